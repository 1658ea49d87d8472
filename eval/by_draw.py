"""By how much arms differ where each was run on the same draws of sessions: `compare`, beside the
commands that keep a line a run.

Owns the pairing of lines by draw and the table of differences. A draw is one people's work: some
draws are hard for every arm, so that arms are compared draw by draw, and their differences differ
by chance as much as another draw would change them. The statistics are `eval.noise`'s.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from deltaserve.errors import InputError
from eval.formatting import DASH, effect, effect_interval
from eval.noise import Verdict, difference_by_round, holm, judge, p_value
from eval.outcomes import MEASURES, Measure
from eval.run_lines import Row, read_rows
from eval.series import Series
from eval.stats import Estimate

_COLUMNS = {
    "attainment": "within_objective",
    "requests_per_s": "requests_per_s",
    "ttft_p50": "ttft_p50_s",
    "ttft_p90": "ttft_p90_s",
    "tpot_p50": "tpot_p50_s",
    "worst_gap_p90": "worst_gap_p90_s",
}
"""Measures that are compared, by key, and the column of a line that has each."""
_MEASURES = {measure.key: measure for measure in MEASURES}


@dataclass(frozen=True)
class OverDraws:
    """An arm over the base in one measure, over the draws that both have.

    `effect` is the mean difference over draws with its 95 % interval: a ratio, or of a share the
    difference itself; NaN where there is one draw. `verdict` is one by itself, `holds` says whether
    it stays when all that are asked for together are allowed for (Holm).
    """

    measure: Measure
    arm: str
    draws: tuple[int, ...]
    effect: Estimate
    p_value: float
    verdict: Verdict
    holds: bool = False


def over_draws(
    rows: Sequence[Row], sessions: int, base: str, arms: Sequence[str]
) -> list[OverDraws]:
    """Each of `arms` over `base` with so many sessions in flight, in every measure that both have
    figures of; repeats of a draw count as their mean.

    Raises `InputError` where two arms have no draw in common.
    """
    found = []
    for arm in arms:
        draws = sorted(_draws(rows, sessions, base) & _draws(rows, sessions, arm))
        if not draws:
            raise InputError(f"{base} and {arm}: no draw in common with {sessions} sessions")
        for key, column in _COLUMNS.items():
            sides = [[_of(rows, sessions, a, at, column) for at in draws] for a in (base, arm)]
            found.append(_compared(_MEASURES[key], arm, tuple(draws), sides))
    judged = [item for item in found if math.isfinite(item.p_value)]
    kept = dict(zip(map(id, judged), holm([item.p_value for item in judged]), strict=True))
    return [replace(item, holds=kept.get(id(item), False)) for item in found]


def _draws(rows: Sequence[Row], sessions: int, arm: str) -> set[int]:
    return {int(r["draw"]) for r in rows if r["arm"] == arm and int(r["sessions"]) == sessions}


def _of(rows: Sequence[Row], sessions: int, arm: str, draw: int, column: str) -> float:
    """NaN where a run of it has no figure: a quantile among turns that were never answered."""
    which = (arm, sessions, draw)
    of = [r for r in rows if (r["arm"], int(r["sessions"]), int(r["draw"])) == which]
    return statistics.fmean(float(row[column] or math.nan) for row in of)


def _compared(
    measure: Measure, arm: str, draws: tuple[int, ...], sides: Sequence[Sequence[float]]
) -> OverDraws:
    with np.errstate(divide="ignore"):
        base, other = np.array(sides) if measure.in_points else np.log(sides)
    delta, noise = difference_by_round(
        [(_series(one), _series(two)) for one, two in zip(base, other, strict=True)]
    )
    half_width = delta.half_width()
    bounds = np.array([delta.value, delta.value - half_width, delta.value + half_width])
    with np.errstate(over="ignore"):
        value, low, high = map(float, bounds if measure.in_points else np.exp(bounds))
    return OverDraws(
        measure,
        arm,
        draws,
        Estimate(value, low, high, len(draws)),
        p_value(delta, noise),
        judge(delta.value, half_width, noise.floor(), lower_is_better=measure.lower_is_better),
    )


def _series(point: float) -> Series:
    return Series(float(point), np.array([]))


def table(compared: Sequence[OverDraws], base: str) -> list[str]:
    """A line an arm and measure: the mean difference, its interval and the verdict."""
    lines = [
        f"| over `{base}` | draws | measure | difference | p | verdict |",
        "|--|--|--|--|--|--|",
    ]
    for item in compared:
        interval = effect_interval(item.measure, item.effect)
        verdict = str(item.verdict)
        if item.verdict in (Verdict.BETTER, Verdict.WORSE) and not item.holds:
            verdict += ", not after Holm's correction"
        chance = f"{item.p_value:.3f}" if math.isfinite(item.p_value) else DASH
        cells = (
            f"`{item.arm}`",
            ", ".join(map(str, item.draws)),
            item.measure.label,
            f"{effect(item.measure, item.effect.value)} [{interval or DASH}]",
            chance,
            verdict,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def add_compare_command(app: typer.Typer) -> None:
    """Gives an app the command `compare`, which reads such lines."""

    @app.command("compare")
    def compare_command(
        runs: Annotated[Path, typer.Argument(help="CSV of runs, simulated or measured.")],
        sessions: Annotated[int, typer.Option(help="Sessions in flight.")],
        base: Annotated[str, typer.Option(help="The arm that others are compared with.")],
        arm: Annotated[list[str], typer.Option(help="An arm to compare; as many as wanted.")],
    ) -> None:
        """Print by how much arms differ over the draws that they have in common."""
        rows = read_rows(runs, ("arm", "sessions", "draw", *_COLUMNS.values()))
        typer.echo("\n".join(table(over_draws(rows, sessions, base, arm), base)))
