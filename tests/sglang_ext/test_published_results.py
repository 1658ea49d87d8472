"""The tables of docs/results/elastic-worker.md are those of the samples beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import zstandard

from sglang_ext.bench import report

RESULTS = Path(__file__).parents[2] / "docs/results"
PAGE = RESULTS / "elastic-worker.md"


def samples(path: Path) -> list[dict[str, Any]]:
    """What a run of `python -m sglang_ext.bench` wrote."""
    return [orjson.loads(line) for line in zstandard.decompress(path.read_bytes()).splitlines()]


def test_every_row_of_the_page_is_computed_from_its_samples() -> None:
    computed: set[str] = set()
    for path in RESULTS.glob("elastic-worker/*/samples.jsonl.zst"):
        computed |= set(report.markdown(report.summarize(samples(path))).splitlines())
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert len(rows) > 40
    assert [row for row in rows if row not in computed] == []


def test_what_is_said_of_prompts_longer_than_a_chunk() -> None:
    turns = [
        sample
        for path in RESULTS.glob("elastic-worker/identity-*/samples.jsonl.zst")
        for sample in samples(path)
        if sample["phase"] == "identity"
    ]
    assert all(turn["first_difference"] is None for turn in turns)
    longer = [turn for turn in turns if turn["input_tokens"] > 8192]
    separated, both = (sum(turn["separated"] for turn in of) for of in (turns, longer))
    said = " ".join(PAGE.read_text().split())
    assert (
        f"{len(turns)} turns were compared, {len(longer)} of them with a prompt longer than a "
        f"chunk, {both} of those separated."
    ) in said
    most = max(turn["input_tokens"] for turn in turns)
    assert f"{len(turns)} of prompts of up to {most:,} tokens" in said
    assert f"in chunks of 8,192, {separated} of them separated" in said
