"""A measured run as a column of a page's table: each row's label and what its raw lines say."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eval.experiment import Slo
from eval.metrics import measure, session_bootstrap
from eval.outcomes import good
from eval.records import Run
from eval.run_lines import figures, turns_of
from tests.eval.differences import longer, longest_s
from tests.eval.published import lines, phases, steps
from tests.eval.windows import recomputed_percent


def cells(run: Run) -> dict[str, str]:
    """Its figures by the label of their row. A p90 that a turn without an answer fell into is
    infinite."""
    told = figures(run)
    turns, start_s, end_s = turns_of(run), *run.span_s
    answered = turns[turns["ok"]]
    in_time = good(turns, Slo()).sum()

    def seconds(key: str, digits: int) -> str:
        # What has four digits is not rounded a second time.
        return f"{float(told[key]) + 1e-6:.{digits}f} s" if told[key] else "∞"

    def within(limit_s: float) -> str:
        later, of = longer(run, limit_s)
        return f"{100 * (1 - later / of):.0f} %"

    return {
        "turns in time a second": f"{in_time / (end_s - start_s):.3f}",
        "TTFT p90 of turns": seconds("ttft_p90_s", 1),
        "TPOT p50": f"{1e3 * float(told['tpot_p50_s']):.1f} ms",
        "worst gap p90": seconds("worst_gap_p90_s", 3),
        "prompt tokens from cache": f"{float(told['cached_share']):.3f}",
        "recomputed, of prompt tokens": f"{recomputed_percent(run):.1f} %",
        "turns without an answer": f"{len(turns) - len(answered)} of {len(turns)}",
        "sessions that got an answer": str(answered["session_id"].nunique()),
        "first token within 10 s": within(10.0),
        "first token within 30 s": within(30.0),
        "longest wait": f"{longest_s(run):.0f} s",
    }


def interval_cells(runs: Sequence[Run]) -> dict[str, list[str]]:
    """What reports give an interval (95 %, bootstrap over sessions), a cell a run."""
    boot = session_bootstrap(list(runs), 1000)
    found: dict[str, list[str]] = {}
    for run in runs:
        told = measure([run], boot, Slo()).measures
        for label, key, scale, digits, unit in (
            ("requests/s", "requests_per_s", 1, 3, ""),
            ("turns within the objective", "attainment", 100, 1, " %"),
            ("TTFT p50 of turns", "ttft_p50", 1, 3, " s"),
        ):
            of = told[key]
            value, low, high = (f"{scale * at:.{digits}f}" for at in (of.value, of.low, of.high))
            found.setdefault(label, []).append(f"{value}{unit} [{low}–{high}]".replace("inf", "∞"))
    return found


def best_cached(run: Run) -> float:
    """The share of prompt tokens of answered turns that a cache without end would have had."""
    turns = turns_of(run)
    answered = turns[turns["ok"]]
    best = np.minimum(answered["best_cached_tokens"], answered["prompt_tokens"])
    return float(best.sum() / answered["prompt_tokens"].sum())


def queued(name: str, folder: str) -> list[tuple[str, float]]:
    """Of the requests that came to an engine in the window: to which, and how long they waited in
    its queue. The workers' clock is placed by the request that was there soonest after it was
    sent."""
    sent_s = {line["request_id"]: line["sent_s"] for line in lines(name, folder)}
    found = []
    for event in steps(name, folder):
        if event["event"] == "request":
            request = event["engine_request_id"].rpartition("~")[0]
            at = event["phases"]
            waited_s = at["prefill_started_s"] - at["queued_s"]
            found.append((event["worker_id"], waited_s, at["queued_s"], sent_s[request]))
    origin_s = min(queued_s - was_sent_s for _, _, queued_s, was_sent_s in found)
    window = phases(name, folder)
    return [
        (worker, waited_s)
        for worker, waited_s, queued_s, _ in found
        if window["window_start_s"] <= queued_s - origin_s < window["window_end_s"]
    ]
