"""Whether a measured window was a steady state: what came in also went out, and nothing grew.

Owns the check that stands before every average: a run whose queue grew all the while has no TTFT to
report, only the length of the experiment. Knows one run with a window; not arms or verdicts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import pandas as pd
from scipy import special

from eval.records import Run
from eval.stats import Array
from eval.warm_up import warm_up_values

# Answers that ended over requests that came, both inside the window.
LEAST_COMPLETIONS_PER_ARRIVAL = 0.97
# A trend counts where it is no accident of ten points, and moves what it is of by half its mean:
# queues of a steady state wander, and neighbouring points of them are alike.
_BINS = 10
_TREND_P = 0.005
_TREND_SHARE = 0.5
_LEAST_IN_BINS = 3 * _BINS
# What is in flight at either end of a steady window differs by chance, and by more than so many
# standard deviations (of Poisson counts) as seldom as a trend is an accident.
_ENDS_DEVIATIONS = float(special.ndtri(1 - _TREND_P))


class State(StrEnum):
    """What the check says of a run."""

    STEADY = "steady"
    NOT_SUSTAINED = "not sustained"
    NOT_ASSESSED = "not assessed"


@dataclass(frozen=True)
class Trend:
    """How something moved over a window: its mean, its change from start to end by a straight line
    through ten bins, and the chance of such a line without a trend."""

    mean: float
    change: float
    p_value: float

    @property
    def share(self) -> float:
        """The change over the mean."""
        return self.change / self.mean if self.mean else 0.0


@dataclass(frozen=True)
class Steadiness:
    """The check's answer for one run, with its reasons and the figures behind them.

    `left_out_s` is the start of the window that MSER-5 would leave out of TTFT, in seconds; None
    where it says nothing. A remark: no state follows from it.
    """

    state: State
    reasons: list[str]
    in_flight: Trend | None = None
    waiting: Trend | None = None
    ttft: Trend | None = None
    arrivals: int = 0
    completions: int = 0
    left_out_s: float | None = None


def steadiness(run: Run) -> Steadiness:
    """Checks one run's window. Without a window, or with too few requests in it, nothing is said.

    In flight: requests sent and not ended. Waiting: those of them without a first token, which is
    the queue as the client sees it. TTFT: by when requests were scheduled.
    """
    window = run.window
    if window is None:
        return Steadiness(State.NOT_ASSESSED, ["the run has no measured window"])
    table = run.all_requests
    table = table[table["phase"].ne("prime") & table["sent_s"].notna()]
    ended_s = table["finished_s"].fillna(np.inf)
    due = table["scheduled_s"]
    arrivals = int(due.between(window.start_s, window.end_s, inclusive="left").sum())
    # An answer that the client itself broke off when the run ended is none.
    answered = table["error_kind"].ne("cancelled")
    completions = int(
        (ended_s.between(window.start_s, window.end_s, inclusive="left") & answered).sum()
    )
    if arrivals < _LEAST_IN_BINS:
        words = f"only {arrivals} requests were scheduled inside the window"
        return Steadiness(State.NOT_ASSESSED, [words], arrivals=arrivals, completions=completions)
    edges = np.linspace(window.start_s, window.end_s, _BINS + 1)
    first_s = table["first_token_s"].fillna(ended_s)
    in_flight = trend(_present(table["sent_s"], ended_s, edges))
    waiting = trend(_present(table["sent_s"], first_s, edges))
    ttft = trend(_median_by_bin(run.requests, edges))
    moved = [
        _moved(in_flight, "requests in flight", least=2.0),
        _moved(waiting, "requests waiting for their first token", least=2.0),
        # Where nothing waits, TTFT itself may still grow.
        _moved(ttft, "seconds to first token") if waiting.mean < 1 else None,
    ]
    reasons = [words for words in moved if words is not None]
    missing = arrivals - completions
    chance = _ENDS_DEVIATIONS * math.sqrt(2 * max(1.0, in_flight.mean))
    if completions < LEAST_COMPLETIONS_PER_ARRIVAL * arrivals and missing > chance:
        reasons.append(
            f"{completions} answers ended while {arrivals} requests came "
            f"({completions / arrivals:.2f}, at least {LEAST_COMPLETIONS_PER_ARRIVAL:g})"
        )
    state = State.NOT_SUSTAINED if reasons else State.STEADY
    left_out_s = _left_out_s(run.requests, window.start_s)
    return Steadiness(state, reasons, in_flight, waiting, ttft, arrivals, completions, left_out_s)


def not_sustained(runs: Sequence[Run]) -> str | None:
    """Why these runs have no averages: the first that was not sustained, with its reasons; None
    where all were steady, or not assessed."""
    for run in runs:
        found = steadiness(run)
        if found.state is State.NOT_SUSTAINED:
            return f"{run.cell}/r{run.repeat} did not sustain its load: {'; '.join(found.reasons)}"
    return None


def trend(values: Array) -> Trend:
    """The straight line through values at equal distances; unknown ones are left out."""
    known = np.isfinite(values)
    places, y = np.arange(len(values))[known], values[known]
    if len(y) < 4:
        return Trend(float(np.mean(y)) if len(y) else float("nan"), 0.0, 1.0)
    x = places - places.mean()
    slope = float((x * y).sum() / (x * x).sum())
    left = y - y.mean() - slope * x
    freedom = len(y) - 2
    error = math.sqrt(float((left * left).sum()) / freedom / float((x * x).sum()))
    change = slope * (len(values) - 1)
    if error == 0:
        return Trend(float(y.mean()), change, 0.0 if slope else 1.0)
    return Trend(float(y.mean()), change, 2 * float(special.stdtr(freedom, -abs(slope) / error)))


def _moved(found: Trend, what: str, least: float = 0.0) -> str | None:
    """The trend in words where it counts."""
    if not (found.p_value < _TREND_P and abs(found.share) > _TREND_SHARE):
        return None
    if abs(found.change) < least:
        return None
    start, end = found.mean - found.change / 2, found.mean + found.change / 2
    if found.change > 0:
        return f"{what} rose from about {max(0.0, start):.3g} to {end:.3g} over the window"
    return f"{what} fell from about {start:.3g} to {max(0.0, end):.3g}: still warming up"


def _present(begin_s: pd.Series[float], end_s: pd.Series[float], edges: Array) -> Array:
    """How many of the intervals are open, on average over each bin."""
    begin, end = begin_s.to_numpy(dtype=float), end_s.to_numpy(dtype=float)
    return np.array(
        [
            np.clip(np.minimum(end, right) - np.maximum(begin, left), 0, None).sum()
            / (right - left)
            for left, right in itertools.pairwise(edges)
        ]
    )


def _left_out_s(requests: pd.DataFrame, start_s: float) -> float | None:
    """Until when the TTFT of answered turns is still that of a warm-up, from the window's start."""
    answered = requests[np.isfinite(requests["ttft_s"])].sort_values("scheduled_s")
    count = warm_up_values(answered["ttft_s"].to_numpy(dtype=float))
    if not count:
        return None if count is None else 0.0
    return float(answered["scheduled_s"].iloc[count]) - start_s


def _median_by_bin(requests: pd.DataFrame, edges: Array) -> Array:
    """Median TTFT of the requests scheduled in each bin; NaN where most of them failed."""
    known = requests[requests["ttft_s"].notna()]
    place = np.searchsorted(edges, known["scheduled_s"].to_numpy(dtype=float), side="right") - 1
    medians = known["ttft_s"].groupby(place).median().replace(np.inf, np.nan)
    return medians.reindex(range(len(edges) - 1)).to_numpy(dtype=float)
