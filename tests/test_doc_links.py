"""Links of the README and the docs lead to files, and to headings in them, that are there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.doc_pages import PAGES, ROOT


def anchor(heading: str) -> str:
    """What GitHub makes of a heading: its text in lower case without punctuation, with hyphens."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


@cache
def anchors(page: Path) -> frozenset[str]:
    return frozenset(anchor(found) for found in re.findall(r"(?m)^#+ (.*)$", page.read_text()))


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """The files of this repository that a page links to, each with an anchor or ""."""
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", target):
            path, _, heading = target.partition("#")
            yield (page.parent / path).resolve() if path else page, heading


def test_an_anchor_is_githubs() -> None:
    assert anchor("What `elastic`'s [weights](a.md) do: 1, 2") == "what-elastics-weights-do-1-2"


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_link_leads_somewhere(page: Path) -> None:
    lost = [
        (str(target), heading)
        for target, heading in links(page)
        if not target.exists() or (heading and heading not in anchors(target))
    ]
    assert not lost
