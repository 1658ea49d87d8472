"""Which turns of a run are judged, and what its sessions felt: the one definition of both.

Owns the set of turns judged, when a turn is in time, every measure of waiting, and when a level
meets the objective. Pure functions of a plain table of turns and a window; knows no files, runs or
arms.

A table has one row a turn (no priming requests, no faults of the client itself), times in seconds
of one clock: `session`, `due_s`, `first_token_s` (NaN: none came), `finished_s` (when the answer
ended, failed or was cut off; NaN: still under way when the run ended), `error` (its kind; None),
`new_tokens`, `tpot_s` and `worst_gap_s` (of what was received, NaN: unknown), `output_tokens`
(received), `last_token_s`.

**Judged** is every turn under way in the window: due in it, or due before it and without a first
token when it opened. A turn that still waits when the run ends is late once it has waited beyond
its objective, else undecided: left out, and counted. An answer that the end of the run cuts off is
judged on what there is of it: its first token always, its pace where enough tokens came.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from eval.experiment import Slo

COLUMNS = (
    "session",
    "due_s",
    "first_token_s",
    "finished_s",
    "error",
    "new_tokens",
    "tpot_s",
    "worst_gap_s",
    "output_tokens",
    "last_token_s",
)
PACE_TOKENS = 16
"""An answer that was cut off has a pace from so many received tokens on."""
WAITS_S = (10, 30, 60, 180)
_NEARLY_ALL = 0.9
"""Of the window: a session in flight for so much of it should have got a first token."""
PATIENCE_SHARE_MOST = 0.01
# What a client breaks off itself. After the window's end that is the end of the run, and says
# nothing of the servers; inside the window the session got no answer.
BROKEN_OFF = ("cancelled", "timeout")


@dataclass(frozen=True)
class Window:
    """The measured part of a run, from `start_s` to `end_s`, and when the run was over (`over_s`,
    with the drain), in seconds of the turns' clock."""

    start_s: float
    end_s: float
    over_s: float

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s


def judged(turns: pd.DataFrame, window: Window, slo: Slo) -> pd.DataFrame:
    """The turns under way in the window, with what became of each.

    Adds `late_from_s` (when its objective for a first token was up), `until_s` (first token, or how
    long it was seen waiting), `wait_s`, `first_inside` (its first token came in the window), `cut`,
    `decided`, `first_ok`, `pace_ok`, `pace_known` and `in_time` (false where undecided).
    """
    of = _with_waits(turns, window, slo)
    waits = of["until_s"] >= window.start_s
    of = of[of["due_s"].lt(window.end_s) & (of["due_s"].ge(window.start_s) | waits)].copy()
    answered = of["first_token_s"].notna()
    on_time = of["wait_s"].le(of["late_from_s"] - of["due_s"])
    failed = of["error"].notna() & ~of["cut"]
    of["decided"] = answered | failed | ~on_time
    of["first_ok"] = answered & on_time
    stalled_s = (of["finished_s"] - of["last_token_s"]).where(of["cut"] & answered)
    stalled = stalled_s.gt(slo.worst_gap_s)
    broken = of["tpot_s"].gt(slo.tpot_s) | of["worst_gap_s"].gt(slo.worst_gap_s)
    enough = ~of["cut"] | (of["output_tokens"].ge(PACE_TOKENS) & of["tpot_s"].notna())
    of["pace_known"] = answered & (enough | stalled)
    of["pace_ok"] = answered & ~failed & ~((enough & broken) | stalled)
    of["in_time"] = of["first_ok"] & of["pace_ok"]
    return of


def _with_waits(turns: pd.DataFrame, window: Window, slo: Slo) -> pd.DataFrame:
    of = turns.copy()
    of["finished_s"] = of["finished_s"].fillna(window.over_s)
    unended = turns["finished_s"].isna() & of["error"].isna()
    of["cut"] = unended | (of["error"].isin(BROKEN_OFF) & of["finished_s"].ge(window.end_s))
    of["until_s"] = of["first_token_s"].fillna(of["finished_s"])
    of["wait_s"] = of["until_s"] - of["due_s"]
    first_s = of["first_token_s"]
    of["first_inside"] = first_s.ge(window.start_s) & first_s.lt(window.end_s)
    of["late_from_s"] = of["due_s"] + slo.ttft_s + slo.ttft_s_per_new_token * of["new_tokens"]
    return of


def sessions(turns: pd.DataFrame, window: Window, slo: Slo) -> pd.DataFrame:
    """One row a session that was in flight in the window, by name: `there_s` (seconds of the window
    from its first turn's due time to its last turn's end), `waited_s` (of them without a first
    token that was due), `late_s` (of them beyond the objective), `late_share`, `first_tokens` and
    `starved`. Turns of one session that wait at the same time count once."""
    of = _with_waits(turns, window, slo)
    start_s, end_s = window.start_s, window.end_s
    groups = of.groupby("session", sort=True)
    begin = groups["due_s"].min().clip(start_s, end_s)
    end = groups["finished_s"].max().clip(start_s, end_s)
    found = pd.DataFrame({"there_s": end - begin})
    found["waited_s"] = _united_s(of, "due_s", window)
    found["late_s"] = _united_s(of, "late_from_s", window)
    found["first_tokens"] = groups["first_inside"].sum()
    found = found[found["there_s"].gt(0)]
    found["late_share"] = found["late_s"] / found["there_s"]
    found["starved"] = (
        found["there_s"].ge(_NEARLY_ALL * window.length_s)
        & found["first_tokens"].eq(0)
        & (found["late_s"].gt(0) | found["waited_s"].ge(_NEARLY_ALL * window.length_s))
    )
    return found


def _united_s(of: pd.DataFrame, begin: str, window: Window) -> pd.Series[float]:
    """Seconds of the window, by session, in which any of its turns was between `begin` and
    `until_s`."""
    part = pd.DataFrame(
        {
            "session": of["session"],
            "begin": of[begin].clip(window.start_s, window.end_s),
            "end": of["until_s"].clip(window.start_s, window.end_s),
        }
    ).sort_values(["session", "begin"])
    before = part.groupby("session")["end"].cummax().groupby(part["session"]).shift(1)
    fresh = part[["begin"]].assign(before=before).max(axis=1)
    united: pd.Series[float] = (
        (part["end"] - fresh).clip(lower=0).groupby(part["session"]).sum().astype(float)
    )
    return united


def measures(turns: pd.DataFrame, window: Window, slo: Slo) -> dict[str, float]:
    """Every measure of turns judged and of sessions, by name; NaN where there is nothing to
    measure, infinite where nothing that waited got a first token.

    `wait_mean_s`: all seconds waited in the window over the first tokens that came in it.
    `wait_over_…`: of the decided turns, those known to have waited longer; one that failed without
    a first token waited in vain, and counts. `longest_wait_s`: at least, where it still waits.
    `in_time_per_s` and `first_tokens_per_s` count first tokens that came in the window.
    """
    return measures_of(judged(turns, window, slo), sessions(turns, window, slo), window, slo)


def measures_of(
    of: pd.DataFrame, by_session: pd.DataFrame, window: Window, slo: Slo
) -> dict[str, float]:
    """The measures of turns that are `judged` and of their `sessions`."""
    decided = of[of["decided"]]
    firsts = int(of["first_inside"].sum())
    waited = float(waited_s(of, window).sum())
    share = by_session["late_share"].to_numpy(dtype=float)
    return {
        "first_tokens_per_s": firsts / window.length_s,
        "in_time_share": _mean(decided["in_time"]),
        "in_time_per_s": int((of["in_time"] & of["first_inside"]).sum()) / window.length_s,
        "waiting_sessions": float(by_session["waited_s"].sum()) / window.length_s,
        "late_share_mean": float(share.mean()) if len(share) else np.nan,
        "late_share_p50": _quantile(share, 0.5),
        "late_share_p90": _quantile(share, 0.9),
        "wait_mean_s": waited / firsts if firsts else (np.inf if waited else np.nan),
        **{f"wait_over_{limit}": _mean(over(decided, limit)) for limit in WAITS_S},
        "wait_over_patience": _mean(over(decided, slo.patience_s)),
        "longest_wait_s": float(of["wait_s"].max()) if len(of) else np.nan,
        "starved_sessions": float(by_session["starved"].sum()),
        "served_sessions": float(by_session["first_tokens"].gt(0).sum()),
        "sessions": float(len(by_session)),
        "judged_turns": float(len(decided)),
        "undecided_turns": float(len(of) - len(decided)),
        "pace_undecided_turns": float((of["first_token_s"].notna() & ~of["pace_known"]).sum()),
    }


def waited_s(of: pd.DataFrame, window: Window) -> pd.Series[float]:
    """Seconds of the window that each judged turn waited for its first token."""
    until_s = of["until_s"].clip(upper=window.end_s)
    return (until_s - of["due_s"].clip(lower=window.start_s)).clip(lower=0)


def over(of: pd.DataFrame, limit_s: float) -> pd.Series[bool]:
    """Which judged turns are known to have waited longer than `limit_s`, or in vain."""
    in_vain = of["first_token_s"].isna() & of["error"].notna() & ~of["cut"]
    return of["wait_s"].gt(limit_s) | in_vain


def _mean(of: pd.Series[bool]) -> float:
    return float(of.mean()) if len(of) else np.nan


def _quantile(values: npt.NDArray[np.float64], share: float) -> float:
    return float(np.quantile(values, share)) if len(values) else float("nan")


def product_limit(
    values: npt.NDArray[np.float64],
    censored: npt.NDArray[np.bool_],
    share: float,
    counts: npt.NDArray[np.float64] | None = None,
) -> npt.NDArray[np.float64]:
    """The quantile of values of which some are only known to be at least so large (`censored`;
    Kaplan and Meier's product limit), for each row of `counts` (draws × values: how often each
    counts; each once where not given). Infinite where that many do not end: an endless value is one
    of those beyond all others, never mixed with them. NaN of no values."""
    counts = np.ones((1, len(values))) if counts is None else counts
    known = ~np.isnan(values)
    values, censored, counts = values[known], censored[known], counts[:, known]
    if not len(values):
        return np.full(len(counts), np.nan)
    # Of equal values those that end come before those that were cut off.
    order = np.lexsort((censored, values))
    values, counts = values[order], counts[:, order]
    ends = ~censored[order] & np.isfinite(values)
    at_risk = np.cumsum(counts[:, ::-1], axis=1)[:, ::-1]
    ended = np.divide(counts, at_risk, out=np.zeros_like(counts), where=at_risk > 0)
    left = np.cumprod(np.where(ends, 1 - ended, 1.0), axis=1)
    reached = left <= 1 - share + 1e-9
    found = np.where(reached.any(axis=1), values[reached.argmax(axis=1)], np.inf)
    return np.where(counts.sum(axis=1) > 0, found, np.nan)


def not_met(found: Mapping[str, float], slo: Slo, stretch_p90: float = np.nan) -> list[str]:
    """Why a level does not meet the objective, a sentence a reason; empty where it does.

    It meets it where no session starves, `slo.attainment` of the judged turns are in time, the late
    share of sessions has a p90 of at most `slo.late_share_p90`, at most 1 % of turns wait longer
    than `slo.patience_s`, and the p90 of stretch (where one is known) is at most `slo.stretch_p90`.
    The worst comes first.
    """
    reasons = []
    if starved := round(found["starved_sessions"]):
        reasons.append(
            f"{starved} session{'s get' if starved > 1 else ' gets'} nothing all the window"
        )
    if not found["in_time_share"] >= slo.attainment:
        reasons.append(
            f"{found['in_time_share']:.1%} of turns within the SLO, not {slo.attainment:.0%}"
        )
    if not found["late_share_p90"] <= slo.late_share_p90:
        reasons.append(
            f"one session in ten is late for {found['late_share_p90']:.0%} of its time or more, "
            f"not at most {slo.late_share_p90:.0%}"
        )
    if found["wait_over_patience"] > PATIENCE_SHARE_MOST:
        reasons.append(
            f"{found['wait_over_patience']:.1%} of turns wait longer than {slo.patience_s:g} s, "
            f"not at most {PATIENCE_SHARE_MOST:.0%}"
        )
    if stretch_p90 > slo.stretch_p90:
        reasons.append(f"stretch p90 is {stretch_p90:.3g}, not at most {slo.stretch_p90:g}")
    return reasons
