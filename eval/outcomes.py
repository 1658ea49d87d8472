"""What became of a run's requests and sessions: good or not, how long, how much longer than alone.

Owns the definition of a good turn under a stated SLO, of a session's completion and of every
measure that arms are compared by, as what one run contributes to it. Knows tables of
`eval.records`; not arms, noise or verdicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from eval.experiment import Slo
from eval.records import Run
from eval.stats import UNKNOWN, Array, Estimate, SessionBootstrap
from eval.stretch import Alone
from replay.plays import in_the_plan

LATENCY_QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True)
class Measure:
    """A quantity that is compared: its name, which way is better, and what it is made of.

    `kind`: a `quantile` of a column of requests, or of `sessions`; a `rate` (a sum over the
    window's seconds), per GPU where `per_gpu`; or a `share`, compared in points, not as a ratio.
    """

    key: str
    label: str
    lower_is_better: bool
    column: str
    quantile: float | None = None
    kind: Literal["quantile", "sessions", "rate", "share"] = "quantile"
    per_gpu: bool = False

    @property
    def in_points(self) -> bool:
        return self.kind == "share"


_RATES = (
    ("throughput_output_tps", "Output tokens / s", "window_tokens"),
    ("requests_per_s", "Requests / s", "completed"),
    ("goodput_rps", "Goodput", "good"),
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
    Measure("attainment", "Turns within the SLO", False, "good", kind="share"),
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


def missed(requests: pd.DataFrame, slo: Slo) -> dict[str, npt.NDArray[np.bool_]]:
    """Which requests missed which bound of the SLO: `ttft`, `tpot` or `worst_gap`. A request whose
    tokens all came at once has no pace or gap to keep; one that failed missed all that it has."""
    bound_s = slo.ttft_s + slo.ttft_s_per_new_token * new_tokens(requests)
    found = {"ttft": ~requests["ttft_s"].le(bound_s)}
    for name, most_s in (("tpot", slo.tpot_s), ("worst_gap", slo.worst_gap_s)):
        found[name] = requests[f"{name}_s"].gt(most_s)
    return {name: of.to_numpy(dtype=bool) for name, of in found.items()}


def good(requests: pd.DataFrame, slo: Slo) -> npt.NDArray[np.bool_]:
    """Which requests kept the SLO; one that failed is never good."""
    kept = requests["ok"].to_numpy(dtype=bool)
    for of in missed(requests, slo).values():
        kept = kept & ~of
    return kept


def recomputed_tokens(requests: pd.DataFrame) -> pd.Series[float]:
    """Tokens that a cache without end would have held and the engine computed; unknown where either
    is, and never negative: an engine may also find the answer before, which a trace does not know.
    """
    best = requests["best_cached_tokens"].clip(upper=requests["prompt_tokens"])
    return (best - requests["cached_tokens"]).clip(lower=0)


def by_session(run: Run, alone: Alone | None = None, slo: Slo | None = None) -> pd.DataFrame:
    """One row a session and play: `conversation`, `turns` (measured, but for the client's own
    faults), `met` (those of them that kept the SLO), `completion_s`, `stretch`.

    Completion: from when the first measured turn was due to the end of the last; unknown for a
    session that the window cuts (it has turns before or after, sent or not). Stretch: the same time
    (of measured turns, cut or not) over what those turns would take alone, their think times as
    they were. A session with a failed turn was never completed: both are infinite.
    """
    requests = run.requests[run.requests["scheduled_s"].notna()].sort_values("scheduled_s")
    columns = ["conversation", "turns", "met", "completion_s", "stretch"]
    if requests.empty:
        return pd.DataFrame({name: pd.Series(dtype=float) for name in columns})
    requests = requests.assign(met=good(requests, slo or Slo()))
    sessions = requests.groupby("session_id", sort=True)
    found = pd.DataFrame(
        {
            "conversation": sessions["conversation"].first(),
            "took_s": sessions["finished_s"].max() - sessions["scheduled_s"].min(),
            "failed": sessions["failed"].any(),
            "turns": sessions["ok"].sum() + sessions["failed"].sum(),
            "met": sessions["met"].sum(),
        }
    )
    found["known"] = found["turns"] == sessions.size()
    took_s = found["took_s"].where(~found["failed"], np.inf).where(found["known"])
    found["completion_s"] = took_s.where(~found.index.isin(list(_cut(run))))
    found["stretch"] = np.nan
    if alone is not None:
        before_s = sessions["finished_s"].shift(1)
        think_s = (requests["scheduled_s"] - before_s).clip(lower=0).fillna(0.0)
        alone_s = think_s + alone.service_s(requests)
        total_s = alone_s.groupby(requests["session_id"]).sum(min_count=1)
        # Of failed turns the service alone need not be known.
        stretch = (took_s / total_s).where(~found["failed"], np.inf)
        found["stretch"] = stretch.where(found["known"] & (total_s.gt(0) | found["failed"]))
    return found[columns].reset_index(drop=True)


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


def sample(
    run: Run,
    measure: Measure,
    slo: Slo,
    sessions: pd.DataFrame | None = None,
    requests: frozenset[str] | None = None,
) -> Sample:
    """What `run` contributes to `measure`; from those of `requests` only where they are given and
    the measure is of single requests. `sessions` is the run's table of them (`by_session`), made
    here where it is not given."""
    if measure.kind == "sessions":
        return _known(by_session(run) if sessions is None else sessions, measure.column)
    if measure.kind == "rate":
        return _rate(run, measure, slo)
    table = run.requests
    if requests is not None:
        table = table[table["request_id"].isin(requests)]
    if measure.kind == "quantile":
        return _known(table, measure.column)
    if measure.key == "attainment":
        counted = table[table["ok"] | table["failed"]]
        return Sample(
            counted["conversation"].tolist(),
            np.asarray(good(counted, slo), dtype=np.float64),
            np.ones(len(counted)),
        )
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


def _rate(run: Run, measure: Measure, slo: Slo) -> Sample:
    """A sum over the seconds in which it was made. Tokens and completed requests count where they
    fell inside the window, whenever the request was scheduled; tokens of an answer that failed do
    not. Goodput counts the requests scheduled inside the window."""
    start_s, end_s = run.span_s
    seconds = end_s - start_s
    if measure.per_gpu:
        seconds *= run.gpus if run.gpus is not None else float("nan")
    if measure.column == "good":
        values = np.asarray(good(run.requests, slo), dtype=np.float64)
        return Sample(run.requests["conversation"].tolist(), values, float(seconds))
    table = run.all_requests
    answered = table["ok"] | table["error_kind"].eq("cancelled")
    counted = (answered & table["phase"].ne("prime")).to_numpy(dtype=bool)
    if measure.column == "completed":
        inside = table["finished_s"].between(start_s, end_s)
        done = table["ok"] & (inside | (run.window is None))
        values = np.asarray(done, dtype=np.float64)[counted]
    else:
        values = np.asarray(table["window_tokens"], dtype=np.float64)[counted]
    return Sample(_sessions(table, counted), values, float(seconds))


def estimates(
    boot: SessionBootstrap, samples: Sequence[Sample], measures: Sequence[Measure]
) -> list[Estimate]:
    """Measures of the same values (a column's quantiles, or one share or rate) over all runs'
    samples together, with their intervals."""
    sessions = [name for part in samples for name in part.sessions]
    values = np.concatenate([part.values for part in samples])
    quantiles = [measure.quantile for measure in measures if measure.quantile is not None]
    if quantiles:
        return boot.quantiles(sessions, values, quantiles)
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
