"""What a report rests on: which runs count, the cells measured from them, and the arms compared.

Owns finding run folders, sorting out invalid ones and choosing what is compared with what. Knows
nothing of words, tables or figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from deltaserve.errors import InputError
from eval import provenance
from eval.compare import Comparison, compare_cells
from eval.experiment import Analysis, Slo, ValidityRules
from eval.experiment_files import one_line
from eval.identity import check_repeats
from eval.metrics import Cell, alone_by_arm, measure, session_bootstrap
from eval.records import Run, read_run
from eval.report.searches import Search, judged_again
from eval.secrets import without_secrets
from eval.tables import enough
from eval.validity import Violation, violations

DRAWS = 1000


@dataclass(frozen=True)
class Evidence:
    """Everything a report rests on: runs kept and excluded, cells measured, arms compared.

    `comparisons` are of each arm with the baseline, `across` of each SGLang with each vLLM arm.
    `slo` is what counts as goodput, `primary` the measures that the experiment is about, `searches`
    what searches for capacity found.
    """

    runs: list[Run]
    excluded: list[tuple[Run, list[Violation]]]
    cells: list[Cell]
    comparisons: list[Comparison]
    across: list[Comparison]
    baseline: str | None
    slo: Slo = field(default_factory=Slo)
    primary: tuple[str, ...] = ()
    searches: list[Search] = field(default_factory=list)

    @property
    def once(self) -> bool:
        """Whether every arm ran once, so that nothing shows what a rerun would give."""
        return all(len(cell.runs) == 1 for cell in self.cells)

    @property
    def by_load(self) -> dict[str | None, list[Cell]]:
        """The cells of each load, in the order of the experiment file."""
        found: dict[str | None, list[Cell]] = {}
        for cell in self.cells:
            found.setdefault(cell.load, []).append(cell)
        return found


def find_runs(folders: Sequence[Path]) -> list[Run]:
    """Every run under `folders`, by folder name, without those that measured the machine. Raises
    `InputError` where there is none."""
    found: dict[Path, Run] = {}
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"{folder}: no such folder; expected the output of eval run")
        for manifest in sorted(folder.rglob(provenance.MANIFEST)):
            place = manifest.parent.resolve()
            measures = provenance.MEASURING_FOLDER in manifest.relative_to(folder).parts
            if place not in found and not measures:
                run = read_run(manifest.parent)
                # Older versions recorded whatever they were given.
                found[place] = replace(run, manifest=without_secrets(run.manifest))
    if not found:
        raise InputError(
            f"{', '.join(map(str, folders))}: no run folder (manifest.json) inside; expected the "
            "output of eval run"
        )
    return list(found.values())


def gather(
    runs: Sequence[Run],
    draws: int = DRAWS,
    slo: Mapping[str, Any] | None = None,
    searches: Sequence[Search] = (),
) -> Evidence:
    """Sorts out invalid runs, measures each cell from its valid ones and compares the arms.

    `slo` replaces bounds of the objective that the runs are judged by (`{"ttft_s": 5.0}`), or all
    of it (`{"preset": "agentperf"}`); searches
    under another one are judged again. Raises `InputError` where some runs are simulated and others
    measured, or runs have different objectives.
    """
    _check_one_kind(runs)
    valid: dict[str, list[Run]] = {}
    excluded: list[tuple[Run, list[Violation]]] = []
    for run in runs:
        found = violations(run, ValidityRules.model_validate(run.manifest.get("validity", {})))
        if found:
            excluded.append((run, found))
        else:
            valid.setdefault(run.cell, []).append(run)
    check_repeats(valid)
    boot = session_bootstrap([run for group in valid.values() for run in group], draws)
    names = [name for name in _in_order(runs) if name in valid]
    chosen = _objective([run for group in valid.values() for run in group] or runs, slo)
    analysis = Analysis.model_validate(runs[0].manifest.get("analysis", {}))
    alone = alone_by_arm(valid)
    cells = [measure(valid[name], boot, chosen, alone[valid[name][0].arm]) for name in names]
    baseline = _baseline(runs, cells)
    pairs = [
        (base.name, cell.name)
        for cell in cells
        for base in cells
        if base.arm == baseline and base.load == cell.load and cell.arm != baseline
    ]
    across = [
        (theirs.name, ours.name)
        for ours in cells
        for theirs in cells
        if ours.load == theirs.load and (_engine(ours), _engine(theirs)) == ("sglang", "vllm")
    ]
    every = compare_cells(
        valid,
        list(dict.fromkeys(pairs + across)),
        boot,
        slo=chosen,
        alone=alone,
        primary=analysis.primary,
    )
    by_name = {cell.name: cell for cell in cells}
    stated = [item for item in every if _carries(item, by_name)]
    return Evidence(
        runs=list(runs),
        excluded=excluded,
        cells=cells,
        comparisons=[item for item in stated if (item.baseline, item.arm) in pairs],
        across=[item for item in stated if (item.baseline, item.arm) in across],
        baseline=baseline,
        slo=chosen,
        primary=tuple(analysis.primary),
        searches=_by_arm(
            [
                judged_again(each, runs, chosen) if slo or _judged_otherwise(each, chosen) else each
                for each in searches
            ],
            cells,
        ),
    )


def _by_arm(searches: Sequence[Search], cells: Sequence[Cell]) -> list[Search]:
    """In the order of the arms, which is that of colours."""
    arms = list(dict.fromkeys(cell.arm for cell in cells))
    return sorted(
        searches, key=lambda each: arms.index(each.arm) if each.arm in arms else len(arms)
    )


def _check_one_kind(runs: Sequence[Run]) -> None:
    """A simulated run says nothing beside a measured one: how far it is off is not in its noise."""
    simulated = [run for run in runs if run.simulated is not None]
    measured = [run for run in runs if run.simulated is None]
    if simulated and measured:
        raise InputError(
            f"{simulated[0].folder} is simulated and {measured[0].folder} is measured: one report "
            "is of one kind; report them apart (eval.validation sets one beside the other)"
        )


def _carries(item: Comparison, cells: Mapping[str, Cell]) -> bool:
    """Whether a comparison's quantile has enough observations beyond it in both cells to be stated;
    one without any request is kept, to be said to be so."""
    quantile = item.measure.quantile
    if quantile is None or not item.requests:
        return True
    counts = [cells[name].measures[item.measure.key].n for name in (item.baseline, item.arm)]
    return enough(min(counts), quantile)


def _objective(runs: Sequence[Run], replaced: Mapping[str, Any] | None) -> Slo:
    """The one objective of all runs that say theirs, with bounds replaced. Raises `InputError`
    where they differ: shares of good turns under different bounds are not of one measure."""
    told = [run for run in runs if run.manifest.get("slo")] or list(runs[:1])
    chosen = slo_of(told[0], replaced)
    for run in told[1:]:
        other = slo_of(run, replaced)
        if found := [key for key, value in chosen if getattr(other, key) != value]:
            words = ", ".join(
                f"{key} {getattr(chosen, key):g} and {getattr(other, key):g}" for key in found
            )
            raise InputError(
                f"{told[0].folder} and {run.folder} have different objectives ({words}); judge all "
                f"by one, as in --slo {found[0]}={getattr(other, found[0]):g}"
            )
    return chosen


def _judged_otherwise(search: Search, slo: Slo) -> bool:
    """Whether a search says that it was judged by another objective."""
    try:
        return bool(search.slo) and Slo.model_validate(search.slo) != slo
    except ValidationError:
        return True


def slo_of(run: Run, replaced: Mapping[str, Any] | None = None) -> Slo:
    """The objective that `run` was made with, with bounds replaced. Raises `InputError`."""
    replaced = replaced or {}
    # A preset is a whole objective.
    own = {} if "preset" in replaced else run.manifest.get("slo", {})
    given: dict[str, Any] = {**own, **replaced}
    try:
        return Slo.model_validate(given)
    except ValidationError as error:
        raise InputError(f"--slo: {one_line(error, given, Slo)}") from None


def _in_order(runs: Sequence[Run]) -> list[str]:
    """Cells as the experiment file lists its arms, then loads."""
    places = {run.cell: (run.manifest.get("cell_order", 0), run.cell) for run in runs}
    return sorted(places, key=lambda name: places[name])


def _baseline(runs: Sequence[Run], cells: Sequence[Cell]) -> str | None:
    arms = [cell.arm for cell in cells]
    for run in runs:
        named = run.manifest.get("baseline")
        if named in arms:
            return str(named)
    return arms[0] if arms else None


def _engine(cell: Cell) -> str:
    return str(cell.runs[0].manifest.get("topology", {}).get("engine", {}).get("name", ""))
