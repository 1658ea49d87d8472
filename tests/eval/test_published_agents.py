"""The goals about agents a GPU that rest on raw lines of measured runs, in
docs/results/agents-a-gpu.md."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np

from replay.results import tpot_s, worst_gap_s
from tests.eval.published import RESULTS, lines
from tests.eval.test_sessions_a_gpu import RUNS

PAGE = (RESULTS / "agents-a-gpu.md").read_text()
OURS, VLLM = "sglang-fp8-host-paced-residency", "vllm-fp8-host-4096"
DRAWS = (1, 2, 3, 4)


def p90(name: str) -> tuple[float, float, float]:
    """Of a run's measured turns the p90s of TTFT, in which one that failed takes for ever, TPOT and
    worst gap, in s."""
    turns = [r for r in lines(name) if r["phase"] == "measure"]
    answered = [r for r in turns if not r["error"]]
    ttft_s = [math.inf if r["error"] else r["first_token_s"] - r["scheduled_s"] for r in turns]
    of_answers = (
        [value for r in answered if (value := of(r["arrivals"])) is not None]
        for of in (tpot_s, worst_gap_s)
    )
    first, second, third = (float(np.quantile(each, 0.9)) for each in (ttft_s, *of_answers))
    return first, second, third


def ratios(name: str, base: str) -> Sequence[float]:
    return [ours / theirs for ours, theirs in zip(p90(name), p90(base), strict=True)]


def test_where_vllm_just_fails_the_objective() -> None:
    as_it_comes = ratios("slices-eight", "vllm-four")
    (ten,), (default,) = RUNS[OURS, 10, 3], RUNS["vllm-fp8-host", 10, 3]
    same = ratios(ten, default)
    by_draw = [ratios(RUNS[OURS, 10, of][0], RUNS[VLLM, 10, of][0]) for of in DRAWS]
    spans = [f"{min(each):.2f} to {max(each):.2f}" for each in zip(*by_draw, strict=True)]
    said = (
        "as it comes, with four, and ours with eight: {:.2f}, {:.2f} and {:.2f} ×".format(
            *as_it_comes
        ),
        "ten: {:.2f}, {:.2f} and {:.2f} × of draw 3".format(*same),
        "draws 1 to 4: {}, {} and {} ×".format(*spans),
    )
    assert [words for words in said if words not in PAGE] == []
    assert all(found <= goal for found, goal in zip(as_it_comes, (0.25, 0.7, 0.3), strict=True))


def test_what_an_endless_cache_would_have_had() -> None:
    def share(name: str) -> float:
        answered = [r for r in lines(name) if r["phase"] == "measure" and not r["error"]]
        best = sum(min(r["best_cached_tokens"], r["prompt_tokens"]) for r in answered)
        return sum(r["cached_tokens"] for r in answered) / best

    ten = [share(RUNS[OURS, 10, of][0]) for of in DRAWS]
    many = [share(RUNS[OURS, 24, of][-1]) for of in (3, 2)]
    said = f"{min(ten):.3f} to {max(ten):.3f} on four draws (with 24 "
    assert said + "{:.3f} and {:.3f})".format(*many) in PAGE


def test_how_many_predictions_held() -> None:
    text = (RESULTS / "predictions.md").read_text()
    table = text[text.index("| page | ranges | held |") :].split("\n\n")[0]
    rows = re.findall(r"^\| \[.*\| (\d+) \| (\d+) \|$", table, re.M)
    ranges, held = (sum(map(int, column)) for column in zip(*rows, strict=True))
    assert len(rows) == 26
    assert f"| together | {ranges} | {held} |" in table
    assert f"[{held} of {ranges} ranges]" in PAGE
