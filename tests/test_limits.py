"""What the README, the docs and the pages of results may be: their length, their number, and the
words in them; what a checkout may weigh, and how many experiments are packaged.

A reader finds an answer in a minute only where pages are short and few, and reads a sentence once
only where its words are the field's.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from docs.generate import WITH_THEIR_WORDS
from docs.generate import main as generate
from eval.experiment_files import packaged_experiments
from tests.doc_pages import ROOT

README_LINES = 120
PAGES = 16
PAGE_LINES = 250
CHECKOUT_BYTES = 12_000_000
EXPERIMENTS = 10
PLAIN = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "results").glob("*.md")),
    *sorted((ROOT / "eval/experiments").glob("*.toml")),
    *sorted((ROOT / "launch/topologies").glob("*.toml")),
]
# Words of our own → the field's.
DIALECT = {
    "draw": "trace seed",
    "draws": "trace seeds",
    "in time(?! slices?)": "within the SLO",
    "as it comes": "in its default configuration",
    "as they come": "in their default configuration",
    "told apart": "significant",
    "carries": "capacity: sessions at 90 % within the SLO",
    "pump": "scheduler pass",
    "gather": "head-of-line reservation",
    "gathers": "head-of-line reservation",
    "lend": "backfill",
    "lends": "backfill",
    "kin": "process tree",
    "seam": "chunk carry-over",
    "seams": "chunk carry-over",
    "looks": "rescan",
}


def pages() -> list[Path]:
    return sorted((ROOT / "docs").glob("*.md"))


def test_a_checkout_is_small() -> None:
    """Without `.git`; raw lines of runs belong into releases, not into the tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    files = [ROOT / name for name in listed.split("\0") if name]
    weight = sum(path.stat().st_size for path in files if path.is_file())
    assert weight <= CHECKOUT_BYTES


def test_the_packaged_experiments_are_few() -> None:
    assert len(packaged_experiments()) <= EXPERIMENTS


def prose(page: Path) -> list[tuple[int, str]]:
    """Lines with their numbers, without code and what code says: blocks, spans, and generated
    tables whose words are not the page's own."""
    said = rf"^<!-- generated: (?!(?:{'|'.join(WITH_THEIR_WORDS)}) ).*?^<!-- end -->$"
    text = re.sub(
        rf"(?ms)^```.*?^```$|{said}",
        lambda found: "\n" * found[0].count("\n"),
        page.read_text(),
    )
    return list(enumerate(re.sub(r"`[^`\n]*`", "", text).splitlines(), 1))


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


@pytest.mark.parametrize(
    "page", [*pages(), *sorted((ROOT / "results").glob("*.md"))], ids=lambda page: page.name
)
def test_a_page_is_short(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= PAGE_LINES


def test_the_pages_are_few() -> None:
    assert len(pages()) <= PAGES


@pytest.mark.parametrize("page", PLAIN, ids=lambda page: page.name)
def test_a_page_has_the_fields_words(page: Path) -> None:
    found = [
        f"{page.name}:{line}: {word!r} is {plain}"
        for line, text in prose(page)
        for word, plain in DIALECT.items()
        if re.search(rf"\b{word}\b", text, re.IGNORECASE)
    ]
    assert not found, "\n".join(found)


def test_generated_tables_are_what_the_code_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(["--check"]) == 0, capsys.readouterr().out
