"""How a GPU fares as more sessions are in flight before it: `python -m eval.sessions_a_gpu`.

Owns what is kept of each run of the packaged experiment `sessions-a-gpu` (one CSV line, simulated
or measured), and how lines become the tables and the picture of docs/results/agents-a-gpu.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from deltaserve.errors import InputError, told_in_one_line
from eval.by_draw import add_compare_command
from eval.experiment import Slo
from eval.experiment_files import load_experiment
from eval.outcomes import good
from eval.plot import PALETTE, Axis, Chart, Dots, Line, Rule, svg
from eval.records import Run, read_run
from eval.run_lines import Row, add_lines_command, cell, figures, read_rows, turns_of
from eval.separation import ATTAINMENT, carried_by_draw

EXPERIMENT = "sessions-a-gpu"
MEASURES = {
    "within_objective": "turns within the objective",
    "requests_per_s": "requests/s",
    "cached_share": "prompt tokens from cache",
}
"""What the page has tables of, by column."""


def row_of(run: Run, arm: str, sessions: int) -> Row:
    """What is kept of a run of an arm with so many sessions in flight; the objective is the default
    one of experiments."""
    return {
        "arm": arm,
        "sessions": str(sessions),
        "draw": str(run.repeat),
        **figures(run),
        "within_objective": cell(float(good(turns_of(run), Slo()).mean())),
    }


def rows_in(folder: Path) -> Iterator[Row]:
    """A line for each complete run of a folder of this experiment."""
    for run, sessions in runs_in(folder, EXPERIMENT):
        yield row_of(run, run.arm, sessions)


def runs_in(folder: Path, experiment: str) -> Iterator[tuple[Run, int]]:
    """The complete runs of an experiment's folder, whose loads are named by their sessions in
    flight, with these: arms as the packaged experiment has them, then others; by sessions and
    draws."""
    runs = [read_run(path.parent) for path in folder.glob("*/r*/manifest.json")]
    complete = [run for run in runs if run.manifest.get("state") == "complete"]
    if not complete:
        raise InputError(f"{folder}: no complete run")

    def sessions(run: Run) -> int:
        if run.load is None or not run.load.isdecimal():
            raise InputError(f"{folder}: load {run.load}: expected the sessions in flight")
        return int(run.load)

    packaged = [arm.name for arm in load_experiment(experiment)[0].arms]
    arms = [*packaged, *sorted({run.arm for run in complete} - set(packaged))]
    for run in sorted(complete, key=lambda run: (arms.index(run.arm), sessions(run), run.repeat)):
        yield run, sessions(run)


def _by_arm(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["arm"], []).append(row)
    return found


def _levels(rows: Sequence[Row], column: str) -> dict[int, list[float]]:
    """The values of one arm, by sessions in flight; a missing one counts as 0."""
    found: dict[int, list[float]] = {}
    for row in rows:
        found.setdefault(int(row["sessions"]), []).append(float(row[column] or 0))
    return dict(sorted(found.items()))


def table(rows: Sequence[Row], column: str) -> list[str]:
    """One measure: a line an arm, means over draws by sessions in flight."""
    levels = sorted({int(row["sessions"]) for row in rows})
    if column == "cached_share":  # that an engine did not say is unknown, and not nothing
        rows = [row for row in rows if row[column]]
    lines = [f"| simulated: {MEASURES[column]} | {' | '.join(map(str, levels))} |"]
    lines.append("|--" * (1 + len(levels)) + "|")
    for arm, of_arm in _by_arm(rows).items():
        values = _levels(of_arm, column)
        means = [statistics.fmean(values[level]) if level in values else None for level in levels]
        if column == "within_objective":
            cells = ["" if mean is None else f"{100 * mean:.0f} %" for mean in means]
        else:
            cells = ["" if mean is None else f"{mean:.2f}" for mean in means]
        lines.append(f"| `{arm}` | {' | '.join(cells)} |")
    return lines


def summary(rows: Sequence[Row]) -> list[str]:
    """A line an arm: the sessions that it carries (the mean over draws, the least and the most),
    the most requests/s at any level, and what is left of them at the highest."""
    lines = ["| simulated | agents a GPU | most requests/s, at | at the highest level, of it |"]
    lines.append("|--|--|--|--|")
    for arm, of_arm in _by_arm(rows).items():
        agents = carried_by_draw(of_arm, "within_objective")
        rates = {
            level: statistics.fmean(values)
            for level, values in _levels(of_arm, "requests_per_s").items()
        }
        best = max(rates, key=lambda level: rates[level])
        left = rates[max(rates)] / rates[best]
        lines.append(
            f"| `{arm}` | {statistics.fmean(agents):.1f} [{min(agents):.1f}–{max(agents):.1f}] "
            f"| {rates[best]:.2f}, {best} | {left:.2f} |"
        )
    return lines


def picture(rows: Sequence[Row], measured: Sequence[Row], arms: Sequence[str] | None = None) -> str:
    """The share of turns within the objective by sessions in flight, as an SVG file: a line an arm
    (simulated, with the range of draws), a dot a measured run. `arms` says which; else all are.

    Raises InputError where nothing was simulated of one of them, or they are more than colours."""
    simulated = _by_arm(rows)
    arms = list(simulated) if arms is None else arms
    for arm in arms:
        if arm not in simulated:
            raise InputError(f"arm {arm}: expected one of {', '.join(simulated)}")
    if len(arms) > len(PALETTE):
        raise InputError(f"{len(arms)} arms: a picture has colours for {len(PALETTE)}")
    colours = dict(zip(arms, PALETTE, strict=False))
    marks: list[Line | Dots | Rule] = []
    for arm in arms:
        of_arm = simulated[arm]
        values = _levels(of_arm, "within_objective")
        marks.append(
            Line(
                arm,
                list(values),
                [100 * statistics.fmean(of_level) for of_level in values.values()],
                colours[arm],
                low=[100 * min(of_level) for of_level in values.values()],
                high=[100 * max(of_level) for of_level in values.values()],
            )
        )
    for arm, of_arm in _by_arm(measured).items():
        if arm in colours:
            shares = [100 * float(row["within_objective"]) for row in of_arm]
            at = [float(row["sessions"]) for row in of_arm]
            marks.append(Dots(f"_{arm}", at, shares, colours[arm], size=5, opacity=1))
    marks.append(Rule("carried: 90 %", y=100 * ATTAINMENT))
    words = (
        "Share of turns within the objective by coding sessions in flight before one GPU. Lines "
        "are simulated, with the range of their draws; dots are measured runs."
    )
    chart = Chart(
        words,
        Axis("sessions in flight before one GPU"),
        Axis("turns within the objective", unit="%", low=0, high=100),
        tuple(marks),
        height=330,
    )
    return svg(chart, words, alone=True) + "\n"


app = typer.Typer(no_args_is_help=True, add_completion=False)
add_lines_command(app, rows_in)
add_compare_command(app)


@app.command("show")
def show_command(
    runs: Annotated[Path, typer.Argument(help="CSV of simulated runs.")],
    measured: Annotated[Path | None, typer.Option(help="CSV of measured runs.")] = None,
    picture_path: Annotated[Path | None, typer.Option("--picture", help="SVG to write.")] = None,
    arm: Annotated[list[str] | None, typer.Option(help="An arm to draw; else all are.")] = None,
) -> None:
    """Print the page's tables; with --picture also draw the share of turns within the objective."""
    columns = ("arm", "sessions", "draw", *MEASURES)
    rows = read_rows(runs, columns)
    for lines in (summary(rows), *(table(rows, column) for column in MEASURES)):
        typer.echo("\n".join(["", *lines]))
    if picture_path is not None:
        beside = read_rows(measured, columns) if measured is not None else []
        picture_path.write_text(picture(rows, beside, arm or None), encoding="utf-8")


if __name__ == "__main__":
    with told_in_one_line():
        app()
