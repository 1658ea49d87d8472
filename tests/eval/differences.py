"""How measured runs differ, and for how long their turns waited, as the pages say it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from eval.by_draw import OverDraws, over_draws
from eval.experiment import Slo
from eval.formatting import effect, effect_interval
from eval.metrics import session_bootstrap
from eval.outcomes import MEASURES
from eval.records import Run
from eval.rules_a_gpu import rule_row
from eval.run_lines import Row, turns_of
from eval.series import SeriesOf
from eval.stats import Array, Estimate, interval
from eval.waits import waits


def over(base: Sequence[Run], arm: Sequence[Run], key: str) -> Estimate:
    """The mean of `arm`'s runs over that of `base`'s in a measure, or for a share their difference;
    the interval is over which sessions were drawn, the same on both sides."""
    measure = next(each for each in MEASURES if each.key == key)
    runs = [*base, *arm]
    series = SeriesOf(session_bootstrap(runs, 1000), MEASURES, Slo())
    ceiling = series.ceiling(runs, measure, {})
    one, two = ([series.of(each, measure, None, {}, ceiling) for each in of] for of in (base, arm))
    points = [float(np.mean([each.point for each in of])) for of in (one, two)]
    draws: list[Array] = [np.mean([each.draws for each in of], axis=0) for of in (one, two)]
    found = interval(points[1] - points[0], draws[1] - draws[0], len(arm))
    if measure.in_points:
        return found
    return Estimate(*(math.exp(at) for at in (found.value, found.low, found.high)), found.n)


def by_draw(rows: Sequence[Row], sessions: int, base: str, arm: str) -> dict[str, OverDraws]:
    """An arm over the base by measure, over the draws that both have."""
    with np.errstate(invalid="ignore"):  # no turn in time is no goodput, which has no ratio
        return {item.measure.key: item for item in over_draws(rows, sessions, base, [arm])}


def difference(of: OverDraws) -> str:
    """The mean difference over draws."""
    return f"{effect(of.measure, of.effect.value)} [{effect_interval(of.measure, of.effect)}]"


def answers(base: Run, arm: Run, seconds: float) -> Estimate:
    """How many times the answers there are in the first seconds of a window."""
    boot = session_bootstrap([base, arm], 1000)
    counted, draws = [], []
    for each in (base, arm):
        start_s, table = each.span_s[0], each.all_requests
        inside = table["finished_s"].between(start_s, start_s + seconds, inclusive="left")
        ended = table.loc[inside & table["ok"] & table["phase"].ne("prime"), "conversation"]
        counted.append(len(ended))
        draws.append(np.maximum(boot.sum_draws(list(ended), np.ones(len(ended))), 0.5))
    return interval(counted[1] / counted[0], draws[1] / draws[0], 2)


def within_s(run: Run, share: float, *, whole: bool = False) -> float:
    """In which time this share of the turns due in a window have their first token, or (`whole`)
    the end of their answer, by the product-limit estimate."""
    turns = turns_of(run)
    end_s = turns["finished_s" if whole else "first_token_s"]
    came = turns["ok"] if whole else end_s.notna()
    took_s = end_s.where(came, turns["finished_s"]) - turns["scheduled_s"]
    head = {"arm": "", "sessions": "", "draw": "", "turns": str(len(turns))}
    rows: list[Row] = [
        {**head, "wait_s": str(each_s), "answered": str(int(ended))}
        for each_s, ended in zip(took_s, came, strict=True)
    ]
    return waits(rows, [share])[0]


def longer(run: Run, seconds: float) -> tuple[int, int]:
    """Of the turns due in a window those that waited longer, as far as they were seen; and all."""
    turns = turns_of(run)
    waited_s = turns["first_token_s"].fillna(turns["finished_s"]) - turns["scheduled_s"]
    return int(waited_s.gt(seconds).sum()), len(turns)


def longest_s(run: Run) -> float:
    """For which any turn waited in a window or until the run was over."""
    return float(rule_row(run, "", 0)["longest_wait_s"])


def tokens_per_s(run: Run) -> float:
    """Of turns due in a window whose first token came within 10 s."""
    turns = turns_of(run)
    soon = turns["ok"] & turns["ttft_s"].le(10)
    start_s, end_s = run.span_s
    return float(turns.loc[soon, "output_tokens"].sum()) / (end_s - start_s)


def times(of: Estimate) -> str:
    return f"{of.value:.2f} × [{of.low:.2f}–{of.high:.2f}]"


def told(of: Estimate) -> str:
    """A ratio as a change in percent."""
    value, low, high = (f"{100 * (at - 1):+.1f} %" for at in (of.value, of.low, of.high))
    return f"{value} [{low} to {high}]".replace("-", "−").replace("+0.0 %", "0.0 %")


def points(of: Estimate) -> str:
    value, low, high = (f"{100 * at:+.0f}" for at in (of.value, of.low, of.high))
    return f"{value} points [{low} to {high}]".replace("-", "−").replace("+0", "0")
