"""The table of docs/results/residency.md is what its raw lines say."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

DOCS = Path(__file__).parents[2] / "docs" / "results"
ARMS = (
    "sglang",
    "sglang-residency",
    "sglang-cap",
    "sglang-host-residency",
    "sglang-residency-mended",
    "sglang-lease",
)


def lines(arm: str) -> list[dict[str, Any]]:
    with (DOCS / "residency" / f"{arm}.requests.jsonl.zst").open("rb") as packed:
        text = io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(packed))
        return [json.loads(line) for line in text]


def row(label: str) -> list[str]:
    text = (DOCS / "residency.md").read_text()
    found = re.search(rf"^\| {re.escape(label)} \|(.*)\|$", text, re.M)
    assert found, label
    return [cell.strip() for cell in found[1].split("|")]


def number(cell: str) -> float:
    return float(cell.split()[0].rstrip("%"))


@pytest.mark.parametrize("at", range(len(ARMS)), ids=ARMS)
def test_every_figure_of_an_arm_comes_from_its_lines(at: int) -> None:
    arm = ARMS[at]
    requests = lines(arm)
    window = json.loads((DOCS / "residency" / f"{arm}.phases.json").read_text())
    start_s, end_s = window["window_start_s"], window["window_end_s"]
    measured = [r for r in requests if r["phase"] == "measure"]
    answered = [r for r in measured if not r["error"]]
    ended = [
        r
        for r in requests
        if not r["error"] and r["phase"] != "prime" and start_s <= r["finished_s"] < end_s
    ]
    ttft_s = [
        r["first_token_s"] - r["scheduled_s"] if not r["error"] else float("inf") for r in measured
    ]
    prompt = sum(r["prompt_tokens"] for r in answered)
    cached = sum(r["cached_tokens"] for r in answered)
    evicted = sum(
        max(0, min(r["best_cached_tokens"], r["prompt_tokens"]) - r["cached_tokens"])
        for r in answered
    )
    rates = len(ended) / (end_s - start_s)
    assert number(row("requests/s")[at]) == pytest.approx(rates, abs=5e-4)
    assert number(row("prompt tokens from cache")[at]) == pytest.approx(cached / prompt, abs=5e-4)
    recomputed = 100 * evicted / prompt
    assert number(row("recomputed, of prompt tokens")[at]) == pytest.approx(recomputed, abs=0.06)
    median_s = float(np.median(ttft_s))
    assert number(row("TTFT p50 of turns")[at]) == pytest.approx(median_s, rel=0.005)
    within = sum(t <= 10 for t in ttft_s)
    assert row("turns with a first token within 10 s")[at] == f"{within} of {len(measured)}"
    assert int(row("turns that failed")[at]) == sum(1 for r in measured if r["error"])
    sessions = {r["session_id"] for r in ended}
    assert int(row("sessions that got an answer in the window")[at]) == len(sessions)
