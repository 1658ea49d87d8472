"""Where separating prefill from decode pays, in simulation: `python -m eval.separation`.

Owns the places of the map (new tokens a turn, turns a session, load), what is kept of each run (one
CSV line), and how lines become what an arm carries, the page's table and its figures. The runs are
those of the packaged experiment `separation`; how they are simulated is elsewhere.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import chain, pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import typer

from deltaserve.errors import told_in_one_line
from eval.experiment import Experiment, Slo, Turns
from eval.experiment_files import load_experiment
from eval.outcomes import good
from eval.plot import Axis, Chart, Heat, svg
from eval.progress import Progress
from eval.records import Run, read_run
from eval.run_lines import Row, cell, figures, read_rows, turns_of, write_rows
from eval.simulate import read_calibration
from eval.simulated_runs import simulate_experiment

EXPERIMENT = "separation"
PLACES = (
    (500, 3), (500, 9), (500, 39),
    (2_000, 3), (2_000, 9), (2_000, 39),
    (8_000, 3), (8_000, 9), (8_000, 15),
    (32_000, 3),
)  # fmt: skip
"""New tokens a turn and turns a session; the longest prompt is about 125,000 tokens."""

_FIRST_TOKEN: dict[str, float] = {"ttft_s": 5.0, "ttft_s_per_new_token": 0.001}
_NO_BOUND_S = 1e6
OBJECTIVES: Mapping[str, Slo] = {
    "first_token": Slo(**_FIRST_TOKEN, tpot_s=_NO_BOUND_S, worst_gap_s=_NO_BOUND_S),
    "gap_1s": Slo(**_FIRST_TOKEN, tpot_s=0.05, worst_gap_s=1.0),
    "gap_300ms": Slo(**_FIRST_TOKEN, tpot_s=0.05, worst_gap_s=0.3),
}
"""The first token within 5 s and a millisecond a new token (about what an H20 takes behind 100,000
tokens), and no more; or also 50 ms a token and no gap over 1 s, or over 0.3 s."""

GPUS = 8
"""Of every arm of the experiment."""
_COLOCATED = ("colocated", "paced")
ATTAINMENT = 0.9
"""An arm carries a load where so many turns keep the objective."""
# Few long turns need a longer window than many short ones.
_LONG_TURN_TOKENS = 8_000
_LONG_WINDOW_S = 600.0


@dataclass(frozen=True)
class Place:
    """One place of the map under one calibration: what a turn takes, in seconds, on average over a
    session's turns. `work_s` is what it adds to its worker's steps; `alone_s` what its client waits
    for on an idle fleet."""

    shape: Turns
    work_s: float
    alone_s: float

    def sessions(self, load: float, gpus: int) -> int:
        """Sessions in flight whose turns, if none ever waited, would keep `load` of `gpus` busy."""
        cycle_s = self.shape.think_s + self.alone_s
        return max(1, round(load * gpus * cycle_s / self.work_s))


def _prompts(shape: Turns) -> list[int]:
    grown = shape.new_tokens + shape.output_tokens
    return [shape.new_tokens + turn * grown for turn in range(shape.turns)]


def _shape(new_tokens: int, turns: int) -> Turns:
    """The sessions of a place, as the experiment has them but for those two."""
    packaged = load_experiment(EXPERIMENT)[0].trace.turns
    assert packaged is not None
    return packaged.model_copy(update={"new_tokens": new_tokens, "turns": turns})


def cached_share(shape: Turns) -> float:
    """Cached tokens over prompt tokens, with a cache that loses nothing."""
    return 1 - shape.turns * shape.new_tokens / sum(_prompts(shape))


def place_of(shape: Turns, constants: Mapping[str, Any], chunk_tokens: int = 8192) -> Place:
    """The place of sessions of this shape, with the constants of a calibration."""
    work: list[float] = []
    alone: list[float] = []
    output = shape.output_tokens
    for prompt in _prompts(shape):
        pairs = shape.new_tokens * (prompt - shape.new_tokens / 2)
        prefill_s = (
            constants["prefill_overhead_s"] * math.ceil(shape.new_tokens / chunk_tokens)
            + shape.new_tokens / constants["prefill_tokens_per_s"]
            + pairs / constants["prefill_pairs_per_s"]
        )
        context = prompt + output / 2
        own_s = (
            constants["decode_per_request_s"] + constants["decode_per_context_token_s"] * context
        )
        work.append(prefill_s + output * own_s)
        alone.append(prefill_s + output * (constants["decode_base_s"] + own_s))
    return Place(shape, statistics.fmean(work), statistics.fmean(alone))


def load_share(name: str) -> float:
    """The share of the fleet that a load of the experiment stands for: `load-15` is 0.15."""
    return int(name.removeprefix("load-")) / 100


def experiment_of(new_tokens: int, turns: int, repeats: int) -> Experiment:
    """The packaged experiment at one place of the map."""
    given = [f"trace.turns.new_tokens={new_tokens}", f"trace.turns.turns={turns}"]
    given += [f"repeats={repeats}"]
    if new_tokens >= _LONG_TURN_TOKENS:
        given += [f"phases.measure_s={_LONG_WINDOW_S}"]
    experiment, _ = load_experiment(EXPERIMENT, given)
    assert experiment.simulate.calibration is not None
    constants = read_calibration(experiment.simulate.calibration)
    place = place_of(_shape(new_tokens, turns), constants)
    for load in experiment.loads:
        sessions = place.sessions(load_share(load.name), GPUS)
        given += [f"loads.{load.name}.replay.max_inflight_sessions={sessions}"]
    return load_experiment(EXPERIMENT, given)[0]


def simulate_places(
    places: Iterable[tuple[int, int]], repeats: int, output: Path, jobs: int = 1
) -> Iterator[Row]:
    """Simulates the experiment at each place, `jobs` arms at a time, and returns a line a run in
    the order of places and arms. Runs that are there already are kept."""
    tasks = [
        (experiment, arm.name, output / f"{new_tokens}-{turns}")
        for new_tokens, turns in places
        for experiment in [experiment_of(new_tokens, turns, repeats)]
        for arm in experiment.arms
    ]
    # Processes start afresh: forking one whose libraries have threads may hang.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from chain.from_iterable(pool.map(_simulate_arm, tasks))


def _simulate_arm(task: tuple[Experiment, str, Path]) -> list[Row]:
    """One arm at one place, every load and draw, in a folder of its own under the place's: arms
    that are simulated side by side share no file."""
    experiment, arm, place_folder = task
    shape = experiment.trace.turns
    assert shape is not None
    folder = place_folder / arm
    with Progress() as progress:
        simulate_experiment(
            experiment, folder, source={"file": EXPERIMENT}, progress=progress, only=[arm]
        )
    return [
        row_of(read_run(path), shape.new_tokens, shape.turns)
        for load in experiment.loads
        for path in sorted((folder / f"{arm}@{load.name}").glob("r*"))
    ]


def row_of(run: Run, new_tokens: int, turns: int) -> Row:
    """What is kept of a run: its figures, and the share of turns that keeps each objective."""
    counted = turns_of(run)
    answered = counted[counted["ok"]]
    assert run.load is not None
    replay = (run.manifest.get("replay") or {}).get("arguments") or {}
    return {
        "new_tokens": str(new_tokens),
        "turns": str(turns),
        "arm": run.arm,
        "load": f"{load_share(run.load):g}",
        "sessions": str(replay.get("max_inflight_sessions", "")),
        "draw": str(run.repeat),
        **figures(run),
        "separated_share": cell(float(answered["kind"].eq("prefill_decode").mean())),
        **{name: cell(float(good(counted, slo).mean())) for name, slo in OBJECTIVES.items()},
    }


def carried(rows: Sequence[Row], objective: str) -> float:
    """The sessions in flight that one arm carries at one place in one draw: where the share of
    turns that keep the objective falls through 0.9, on straight lines between levels. 0 where the
    lowest level misses it already, the highest level where none does."""
    levels = sorted((float(row["sessions"]), float(row[objective] or 0)) for row in rows)
    if levels[0][1] < ATTAINMENT:
        return 0.0
    for (low, above), (high, below) in pairwise(levels):
        if below < ATTAINMENT:
            return low + (high - low) * (above - ATTAINMENT) / (above - below)
    return levels[-1][0]


def carried_by_draw(rows: Sequence[Row], objective: str) -> list[float]:
    """What one arm carries at one place, a figure a draw in the order of their first rows."""
    draws: dict[str, list[Row]] = {}
    for row in rows:
        draws.setdefault(row["draw"], []).append(row)
    return [carried(of_draw, objective) for of_draw in draws.values()]


@dataclass(frozen=True)
class Carried:
    """What an arm carries at a place, in sessions a GPU: the mean over draws, the least and the
    most. `lowest` and `highest` are the levels that were tried; the fleet, were it never idle and
    nobody waiting, would carry `whole`."""

    agents: float
    low: float
    high: float
    lowest: float
    highest: float
    whole: float

    def __str__(self) -> str:
        if self.high == 0:
            return f"under {self.lowest:.2g}"
        at_least = "≥ " if self.high >= self.highest else ""
        return f"{at_least}{self.agents:.2g} [{self.low:.2g}–{self.high:.2g}]"


def summary(rows: Sequence[Row], objective: str) -> dict[tuple[int, int], dict[str, Carried]]:
    """What each arm carries, by place (new tokens, turns)."""
    grouped: dict[tuple[int, int], dict[str, list[Row]]] = {}
    for row in rows:
        place = (int(row["new_tokens"]), int(row["turns"]))
        grouped.setdefault(place, {}).setdefault(row["arm"], []).append(row)
    return {
        place: {arm: _summed(of_arm, objective) for arm, of_arm in arms.items()}
        for place, arms in grouped.items()
    }


def _summed(rows: Sequence[Row], objective: str) -> Carried:
    a_gpu = [of_draw / GPUS for of_draw in carried_by_draw(rows, objective)]
    levels = sorted((float(row["sessions"]) / GPUS, float(row["load"])) for row in rows)
    highest, load = levels[-1]
    return Carried(
        agents=statistics.fmean(a_gpu),
        low=min(a_gpu),
        high=max(a_gpu),
        lowest=levels[0][0],
        highest=highest,
        whole=highest / load,
    )


def table(rows: Sequence[Row], objective: str) -> list[str]:
    """The page's table of one objective: a line a place, sessions a GPU of every arm."""
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    lines = [f"| simulated: new tokens, turns | cached | {' | '.join(arms)} |"]
    lines.append("|--" * (2 + len(arms)) + "|")
    for (new_tokens, turns), by_arm in sorted(summary(rows, objective).items()):
        cells = [str(by_arm.get(arm, "")) for arm in arms]
        share = cached_share(_shape(new_tokens, turns))
        lines.append(f"| {new_tokens:,}, {turns} | {share:.2f} | {' | '.join(cells)} |")
    return lines


def advantage(rows: Sequence[Row], objective: str) -> dict[tuple[int, int], float]:
    """What the best split carries beyond the best colocated arm, by place, in percent of what the
    fleet would carry were it never idle."""
    found = {}
    for place, arms in summary(rows, objective).items():
        colocated = [arm.agents for name, arm in arms.items() if name in _COLOCATED]
        splits = [arm.agents for name, arm in arms.items() if name not in _COLOCATED]
        if colocated and splits:
            whole = next(iter(arms.values())).whole
            found[place] = 100 * (max(splits) - max(colocated)) / whole
    return found


def figure(rows: Sequence[Row], objective: str) -> str:
    """The map of one objective as an SVG file."""
    found = advantage(rows, objective)
    news = sorted({new_tokens for new_tokens, _ in found})
    turns = sorted({turns for _, turns in found}, reverse=True)
    values = [[found.get((new, turn), math.nan) for new in news] for turn in turns]
    chart = Chart(
        f"Simulated: best split less best colocated, {objective}",
        Axis("new tokens a turn", categories=tuple(f"{new:,}" for new in news)),
        Axis("turns a session", categories=tuple(str(turn) for turn in turns)),
        (Heat(values),),
        height=230,
    )
    words = (
        "Simulated. What the best of the elastic and separated arms carries beyond the best of the "
        "colocated ones, in percent of what eight GPUs would carry were they never idle, by new "
        f"tokens and turns; {objective}."
    )
    return svg(chart, words, alone=True) + "\n"


app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.command()
def run(
    output: Annotated[Path, typer.Argument(help="Folder for the runs and for runs.csv.")],
    repeats: Annotated[int, typer.Option(min=1, help="Draws of sessions and starts.")] = 3,
    only: Annotated[
        list[str] | None, typer.Option(help="Only this place, as in 2000-9. Repeatable.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Arms simulated at a time.")] = 1,
) -> None:
    """Simulate every place of the map and write a line a run to OUTPUT/runs.csv."""
    chosen = [place for place in PLACES if not only or f"{place[0]}-{place[1]}" in only]
    write_rows(output / "runs.csv", simulate_places(chosen, repeats, output, jobs))


@app.command("show")
def show_command(
    runs: Annotated[Path, typer.Argument(help="runs.csv, of `run`.")],
    figures: Annotated[Path | None, typer.Option(help="Folder for the maps as SVG.")] = None,
) -> None:
    """Print the tables of a map; with --figures also draw it."""
    rows = read_rows(runs)
    for objective in OBJECTIVES:
        typer.echo("\n".join(["", f"{objective}:", "", *table(rows, objective)]))
        if figures is not None:
            path = figures / f"separation-{objective}.svg"
            path.write_text(figure(rows, objective), encoding="utf-8")


if __name__ == "__main__":
    with told_in_one_line():
        app()
