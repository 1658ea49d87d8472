"""What became of a run's requests and sessions: in time or not, how long, how much longer than
alone.

Owns the definition of a session's completion and of every measure that arms are compared by, as
what one run contributes to it; which turns are judged, and how, is `eval.judged`'s. Knows tables of
`eval.records`; not arms, noise or verdicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from eval.experiment import Slo
from eval.judged import WAITS_S, Window, judged, measures_of, over, waited_s
from eval.judged import sessions as sessions_in
from eval.records import Run
from eval.stats import UNKNOWN, Array, Estimate, SessionBootstrap, with_order_statistics
from eval.stretch import Alone
from replay.plays import in_the_plan

LATENCY_QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True)
class Measure:
    """A quantity that is compared: its name, which way is better, and what it is made of.

    `kind`: a `quantile` of a column of requests, or of `sessions`; a `rate` (a sum over the
    window's seconds), per GPU where `per_gpu`; a `mean` (a sum over a count); or a `share`. Shares
    (`points`, where they are quantiles of shares) are compared in points, not as a ratio.
    """

    key: str
    label: str
    lower_is_better: bool
    column: str
    quantile: float | None = None
    kind: Literal["quantile", "sessions", "rate", "share", "mean"] = "quantile"
    per_gpu: bool = False
    points: bool = False

    @property
    def in_points(self) -> bool:
        return self.kind == "share" or self.points


_RATES = (
    ("throughput_output_tps", "Output tokens / s", "window_tokens"),
    ("requests_per_s", "Requests / s", "completed"),
    ("first_tokens_per_s", "First tokens / s", "first_tokens"),
    ("in_time_per_s", "Turns within the SLO / s", "in_time"),
)
MEASURES = (
    *(
        Measure(f"{name}_p{round(q * 100)}", f"{label} p{round(q * 100)}", True, column, q)
        for name, label, column in (
            ("ttft", "TTFT", "ttft_s"),
            ("tpot", "TPOT", "tpot_s"),
            ("worst_gap", "Worst gap", "worst_gap_s"),
            ("e2e", "E2E", "e2e_s"),
        )
        for q in LATENCY_QUANTILES
    ),
    *(Measure(key, label, False, column, kind="rate") for key, label, column in _RATES),
    *(
        Measure(
            f"{key}_per_gpu", f"{label} a GPU".replace(" / s", "/s"), False, column, None, "rate",
            per_gpu=True,
        )
        for key, label, column in _RATES
    ),
    Measure("in_time_share", "Turns within the SLO", False, "in_time", kind="share"),
    Measure("wait_mean_s", "Mean wait for a first token", True, "waited_s", kind="mean"),
    *(
        Measure(f"wait_over_{limit}", f"Turns that wait over {limit} s", True, f"over_{limit}",
                kind="share")
        for limit in WAITS_S
    ),
    Measure("waiting_sessions", "Sessions waiting at a time", True, "waiting_s", kind="rate"),
    Measure("late_share_mean", "Late share of sessions, mean", True, "late_share", kind="share"),
    *(
        Measure(f"late_share_p{round(q * 100)}", f"Late share of sessions p{round(q * 100)}", True,
                "late_share", q, "sessions", points=True)
        for q in (0.5, 0.9)
    ),
    *(
        Measure(
            f"session_completion_p{round(q * 100)}",
            f"Session completion p{round(q * 100)}",
            True,
            "completion_s",
            q,
            "sessions",
        )
        for q in (0.5, 0.9)
    ),
    Measure("stretch_p90", "Session stretch p90", True, "stretch", 0.9, "sessions"),
    Measure("apc", "APC", False, "cached_tokens", kind="share"),
    Measure("recomputed_share", "Tokens recomputed", True, "recomputed_tokens", kind="share"),
)  # fmt: skip

BY_KEY = {measure.key: measure for measure in MEASURES}


@dataclass(frozen=True)
class Sample:
    """What one run contributes to a measure: values with their sessions, and what their sum is
    over: other values (a share), seconds (a rate), or nothing (a quantile)."""

    sessions: list[str]
    values: Array
    over: Array | float | None = None


def new_tokens(requests: pd.DataFrame) -> pd.Series[float]:
    """Tokens of each prompt that a cache without end would not hold; where that is not known, those
    that the engine computed; else the whole prompt."""
    prompt = requests["prompt_tokens"]
    new: pd.Series[float] = (
        (prompt - requests["best_cached_tokens"]).fillna(requests["new_tokens"]).fillna(prompt)
    )
    return new.clip(lower=0)


def as_turns(run: Run) -> pd.DataFrame:
    """A run's turns as `eval.judged` takes them: without priming requests and faults of the client
    itself; `conversation` is beside its columns."""
    table = run.all_requests
    counted = table["ok"] | table["failed"] | table["error_kind"].eq("cancelled")
    table = table[counted & table["phase"].ne("prime") & table["scheduled_s"].notna()]
    return pd.DataFrame(
        {
            "session": table["session_id"],
            "conversation": table["conversation"],
            "due_s": table["scheduled_s"],
            "first_token_s": table["first_token_s"],
            "finished_s": table["finished_s"],
            "error": table["error_kind"],
            "new_tokens": new_tokens(table),
            "tpot_s": table["received_tpot_s"],
            "worst_gap_s": table["received_gap_s"],
            "output_tokens": table["output_tokens"],
            "last_token_s": table["last_token_s"],
        }
    )


def window_of(run: Run) -> Window:
    """Where a run's turns are judged: its window, or all of it where it has none."""
    start_s, end_s = run.span_s
    seen_s = run.all_requests[["finished_s", "scheduled_s"]].max().max()
    over_s = max(end_s, seen_s) if np.isfinite(seen_s) else end_s
    # What ends a run without a window is inside it.
    end_s = end_s if run.window is not None else float(np.nextafter(end_s, np.inf))
    return Window(start_s, end_s, float(over_s))


@dataclass(frozen=True)
class Outcome:
    """What became of a run by an objective; its turns are judged once, for all its measures."""

    run: Run
    slo: Slo = field(default_factory=Slo)
    alone: Alone | None = None

    @cached_property
    def window(self) -> Window:
        """Where the run's turns are judged."""
        return window_of(self.run)

    @cached_property
    def turns(self) -> pd.DataFrame:
        """The turns under way in the window, as `eval.judged` judges them, with `conversation`."""
        return judged(self._all_turns, self.window, self.slo)

    @cached_property
    def measures(self) -> dict[str, float]:
        """The measures of `eval.judged`."""
        return measures_of(self.turns, self._sessions, self.window, self.slo)

    @cached_property
    def sessions(self) -> pd.DataFrame:
        """One row a session and play that was in flight in the window: `conversation`, `turns`
        (judged and decided), `met` (in time), `over_patience`, `late_share`, `there_s`,
        `waiting_s`, `starved`, `first_tokens` (as `eval.judged` defines them), `completion_s`,
        `stretch`, `at_least`.

        Completion: from when the first measured turn was due to the end of the last; unknown for a
        session that the window cuts (it has turns before or after, sent or not), infinite for one
        with a failed turn. Stretch: the time that its judged turns took over what they would take
        alone, their think times as they were; infinite where one failed, and `at_least` so large
        where the end of the run cut one off.
        """
        return self.sessions_against(self.alone)

    def sessions_against(self, alone: Alone | None) -> pd.DataFrame:
        """`sessions`, with their stretch over `alone`."""
        found = self._counted_sessions.copy()
        if alone is not None and len(self.turns):
            known = _stretch(self.run, self.turns, alone)
            found["stretch"] = known["stretch"]
            found["at_least"] = known["at_least"].reindex(found.index, fill_value=False)
        return found.reset_index(drop=True)

    @cached_property
    def _counted_sessions(self) -> pd.DataFrame:
        """What `sessions` has that no other run says, by session."""
        of = self.turns
        found = self._sessions.rename(columns={"waited_s": "waiting_s"})
        decided = of[of["decided"]]
        groups = decided.groupby("session")
        found["conversation"] = self._all_turns.groupby("session")["conversation"].first()
        found["turns"] = groups.size()
        found["met"] = groups["in_time"].sum()
        impatient = over(decided, self.slo.patience_s)
        found["over_patience"] = impatient.groupby(decided["session"]).sum()
        counts = ["turns", "met", "over_patience"]
        found[counts] = found[counts].fillna(0)
        found["completion_s"] = _completion_s(self.run)
        found["stretch"], found["at_least"] = np.nan, False
        return found

    @cached_property
    def _all_turns(self) -> pd.DataFrame:
        return as_turns(self.run)

    @cached_property
    def _sessions(self) -> pd.DataFrame:
        return sessions_in(self._all_turns, self.window, self.slo)


def recomputed_tokens(requests: pd.DataFrame) -> pd.Series[float]:
    """Tokens that a cache without end would have held and the engine computed; unknown where either
    is, and never negative: an engine may also find the answer before, which a trace does not know.
    """
    best = requests["best_cached_tokens"].clip(upper=requests["prompt_tokens"])
    return (best - requests["cached_tokens"]).clip(lower=0)


def _completion_s(run: Run) -> pd.Series[float]:
    requests = run.requests[run.requests["scheduled_s"].notna()]
    sessions = requests.groupby("session_id")
    took_s = sessions["finished_s"].max() - sessions["scheduled_s"].min()
    failed = sessions["failed"].any()
    whole = (requests["ok"] | requests["failed"]).groupby(requests["session_id"]).all()
    took_s = took_s.where(~failed, np.inf).where(whole)
    known: pd.Series[float] = took_s.where(~took_s.index.isin(list(_cut(run))))
    return known


def _stretch(run: Run, of: pd.DataFrame, alone: Alone) -> pd.DataFrame:
    """`stretch` and `at_least` of the sessions of judged turns, by session."""
    requests = run.all_requests.loc[of.index]
    of = of.assign(service_s=alone.service_s(requests)).sort_values("due_s", kind="stable")
    sessions = of.groupby("session")
    think_s = (of["due_s"] - sessions["finished_s"].shift(1)).clip(lower=0).fillna(0.0)
    ends = of["error"].isna() | of["cut"]
    failed = (~ends).groupby(of["session"]).any()
    took_s = sessions["finished_s"].max() - sessions["due_s"].min()
    # Of failed turns the service alone need not be known.
    unknown = (of["service_s"].isna() & ends).groupby(of["session"]).any()
    total_s = (think_s + of["service_s"].fillna(0.0)).groupby(of["session"]).sum()
    stretch = (took_s / total_s).where(~unknown & total_s.gt(0)).where(~failed, np.inf)
    return pd.DataFrame({"stretch": stretch, "at_least": sessions["cut"].any() & ~failed})


def _cut(run: Run) -> set[str]:
    """Sessions that have turns before a run's window or after it: such as were sent, primed (the
    session began in its middle) or, as far as the trace is known, not sent any more."""
    table = run.all_requests
    cut = set(table.loc[table["phase"].ne("measure"), "session_id"])
    if run.window is None or run.trace is None or not run.trace.last_requests:
        return cut
    names = map(in_the_plan, table["request_id"], table["play"])
    ends = pd.Series(list(names), index=table.index).eq(
        table["conversation"].map(run.trace.last_requests)
    )
    return cut | (set(table["session_id"]) - set(table.loc[ends, "session_id"]))


def sample(outcome: Outcome, measure: Measure, requests: frozenset[str] | None = None) -> Sample:
    """What a run contributes to `measure`; from those of `requests` only where they are given and
    the measure is of single requests."""
    run = outcome.run
    if measure.column in OF_SESSIONS:
        return _of_sessions(run, measure, outcome.sessions)
    if measure.column in _OF_JUDGED:
        return _of_judged(outcome, measure, requests)
    if measure.kind == "rate":
        return _rate(run, measure)
    table = run.requests
    if requests is not None:
        table = table[table["request_id"].isin(requests)]
    if measure.kind == "quantile":
        return _known(table, measure.column)
    counted = table[table["ok"]]
    tokens = (
        recomputed_tokens(counted) if measure.key == "recomputed_share" else counted[measure.column]
    )
    counted, tokens = counted[tokens.notna()], tokens[tokens.notna()]
    return Sample(
        counted["conversation"].tolist(),
        np.asarray(tokens, dtype=np.float64),
        np.asarray(counted["prompt_tokens"], dtype=np.float64),
    )


def _known(table: pd.DataFrame, column: str) -> Sample:
    """A column's values where they are known."""
    values = np.asarray(table[column], dtype=np.float64)
    known = ~np.isnan(values)
    return Sample(_sessions(table, known), values[known])


def _sessions(table: pd.DataFrame, kept: npt.NDArray[np.bool_]) -> list[str]:
    # Of the column alone: a table of the rows kept would copy dozens that nobody asks for.
    found: list[str] = table["conversation"].to_numpy()[kept].tolist()
    return found


OF_SESSIONS = ("late_share", "waiting_s", "completion_s", "stretch")
_OF_JUDGED = ("first_tokens", "in_time", "waited_s", *(f"over_{limit}" for limit in WAITS_S))


def _of_sessions(run: Run, measure: Measure, sessions: pd.DataFrame) -> Sample:
    """A measure of sessions: the values themselves (their quantile), over the window's seconds, or
    over how many there are."""
    if measure.column == "stretch":
        # Where arms are compared, a session that was cut off counts as endless.
        endless = sessions["stretch"].mask(
            sessions["at_least"] & sessions["stretch"].notna(), np.inf
        )
        return _known(sessions.assign(stretch=endless), "stretch")
    known = _known(sessions, measure.column)
    if measure.kind == "rate":
        return Sample(known.sessions, known.values, _seconds(run, measure))
    if measure.kind == "share":
        return Sample(known.sessions, known.values, np.ones(len(known.values)))
    return known


def _of_judged(
    outcome: Outcome, measure: Measure, requests: frozenset[str] | None = None
) -> Sample:
    """A measure of the turns judged, as `eval.judged.measures` has it."""
    run, of = outcome.run, outcome.turns
    if requests is not None:
        of = of[run.all_requests.loc[of.index, "request_id"].isin(requests)]
    inside = of["first_inside"]
    if measure.kind == "rate":
        counted = inside if measure.column == "first_tokens" else inside & of["in_time"]
        return Sample(_names(of), _numbers(counted), _seconds(run, measure))
    if measure.kind == "mean":
        return Sample(_names(of), _numbers(waited_s(of, outcome.window)), _numbers(inside))
    of = of[of["decided"]]
    if measure.column == "in_time":
        counted = of["in_time"]
    else:
        counted = over(of, float(measure.column.removeprefix("over_")))
    return Sample(_names(of), _numbers(counted), np.ones(len(of)))


def _names(of: pd.DataFrame) -> list[str]:
    return [str(name) for name in of["conversation"]]


def _numbers(of: pd.Series[Any]) -> Array:
    return np.asarray(of, dtype=np.float64)


def _seconds(run: Run, measure: Measure) -> float:
    start_s, end_s = run.span_s
    seconds = end_s - start_s
    if measure.per_gpu:
        seconds *= run.gpus if run.gpus is not None else float("nan")
    return float(seconds)


def _rate(run: Run, measure: Measure) -> Sample:
    """A sum over the seconds in which it was made. Tokens and completed requests count where they
    fell inside the window, whenever the request was scheduled; tokens of an answer that failed do
    not."""
    start_s, end_s = run.span_s
    seconds = _seconds(run, measure)
    table = run.all_requests
    answered = table["ok"] | table["error_kind"].eq("cancelled")
    counted = (answered & table["phase"].ne("prime")).to_numpy(dtype=bool)
    if measure.column == "completed":
        inside = table["finished_s"].between(start_s, end_s)
        done = table["ok"] & (inside | (run.window is None))
        values = np.asarray(done, dtype=np.float64)[counted]
    else:
        values = np.asarray(table["window_tokens"], dtype=np.float64)[counted]
    return Sample(_sessions(table, counted), values, seconds)


def estimates(
    boot: SessionBootstrap, samples: Sequence[Sample], measures: Sequence[Measure]
) -> list[Estimate]:
    """Measures of the same values (a column's quantiles, or one share or rate) over all runs'
    samples together, with their intervals."""
    sessions = [name for part in samples for name in part.sessions]
    values = np.concatenate([part.values for part in samples])
    quantiles = [measure.quantile for measure in measures if measure.quantile is not None]
    if quantiles:
        found = boot.quantiles(sessions, values, quantiles)
        if not measures[0].points:
            return found
        independent = len(set(sessions))
        return [
            with_order_statistics(each, values, independent, quantile)
            for each, quantile in zip(found, quantiles, strict=True)
        ]
    over = [part.over for part in samples]
    if measures[0].kind == "rate":
        seconds = float(sum(part for part in over if isinstance(part, float)))
        return [boot.total(sessions, values, 1 / seconds) if seconds > 0 else UNKNOWN]
    below = np.concatenate([part for part in over if isinstance(part, np.ndarray)])
    return [boot.ratio(sessions, values, below)]


def alike(measures: Sequence[Measure]) -> list[list[Measure]]:
    """Measures in groups of the same values, so that each is resampled once."""
    groups: dict[tuple[str, str, bool], list[Measure]] = {}
    for measure in measures:
        groups.setdefault((measure.kind, measure.column, measure.per_gpu), []).append(measure)
    by_value: list[list[Measure]] = []
    for group in groups.values():
        by_value += [group] if group[0].quantile is not None else [[m] for m in group]
    return by_value
