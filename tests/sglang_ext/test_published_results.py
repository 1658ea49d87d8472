"""The tables of docs/results/elastic-worker.md are those of the samples beside them."""

from __future__ import annotations

from pathlib import Path

import orjson
import zstandard

from sglang_ext.bench import report

RESULTS = Path(__file__).parents[2] / "docs/results"


def test_every_row_of_the_page_is_computed_from_its_samples() -> None:
    computed: set[str] = set()
    for path in RESULTS.glob("elastic-worker/*/samples.jsonl.zst"):
        lines = zstandard.decompress(path.read_bytes()).splitlines()
        found = report.summarize([orjson.loads(line) for line in lines])
        computed |= set(report.markdown(found).splitlines())
    page = (RESULTS / "elastic-worker.md").read_text().splitlines()
    rows = [line for line in page if line.startswith("| ")]
    assert len(rows) > 40
    assert [row for row in rows if row not in computed] == []
