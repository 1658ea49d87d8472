"""How expensive a prompt is on this machine, and all lengths of an experiment so that it costs what
the experiment wants.

What admission is worth depends on what computing a prompt again costs, and machines differ in that
by more than a factor of ten. Owns the prompts that measure it, the factor that follows, and its
file. How an experiment's lengths are multiplied is `eval.experiment`'s; prompts are sent as any
run's are.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from scipy.optimize import nnls

from deltaserve.errors import InputError
from eval.experiment import Arm, Experiment, PromptCost, Replay, Trace
from eval.matrix import PlannedRun, plan_runs
from eval.progress import Progress
from eval.provenance import (
    MEASURING_FOLDER,
    PROMPT_COST_FILE,
    prompt_cost_words,
    read_prompt_cost,
)
from eval.runner import load_topologies, run_experiment
from eval.site import Site, with_endpoints
from launch.cache import make_folder, write_atomically
from replay.results import RESULTS_FILE, iter_results
from replay.trace import Request, write_trace

_TIMES = (1, 2)
"""Prompts so many times as long as `PromptCost.tokens` are measured."""
_ROUNDS = 4
"""Of which the first is the warm-up."""
_BLOCK_TOKENS = 64


def known_factor(experiment: Experiment, output: Path) -> float | None:
    """The factor that was measured for the experiment's runs in `output`; None where that is still
    to be done, or the experiment says it itself."""
    cost = experiment.prompt_cost
    if cost is None or cost.factor is not None:
        return None
    found = read_prompt_cost(output)
    return float(found["factor"]) if found.get("asked") == _asked(cost) else None


def find_factor(
    experiment: Experiment,
    output: Path,
    *,
    site: Site,
    progress: Progress,
    only: list[str] | None = None,
) -> float:
    """The factor for all lengths of the experiment: what was measured for its runs in `output`, so
    that an interrupted experiment goes on with it. Else it measures what prompts cost on the
    engines of the arms that are run, and writes that to `output`/prompt-cost.json. Raises
    `InputError` where an engine does not answer."""
    cost = experiment.prompt_cost
    assert cost is not None
    if (known := known_factor(experiment, output)) is not None:
        progress.say(prompt_cost_words(read_prompt_cost(output)))
        return known
    make_folder(output)
    folder = output / MEASURING_FOLDER
    trace = folder / "prompts.jsonl.zst"
    make_folder(folder)
    write_trace(trace, prompts(cost.tokens))
    arms = _one_arm_of_each_engine(experiment, site, only)
    progress.say(
        f"measuring what prompts of {cost.tokens:,} and {2 * cost.tokens:,} tokens take on "
        f"{', '.join(arm.name for arm in arms)}"
    )
    asked = Experiment(
        name="prompt-cost",
        trace=Trace(path=str(trace)),
        replay=Replay(mode="closed", max_inflight_sessions=1, timeout_s=600.0),
        arms=arms,
    )
    summary = run_experiment(asked, folder, site=site, source={}, progress=progress)
    if summary.failed:
        raise InputError(
            f"prompt_cost: {folder / summary.failed[0]} failed; its manifest and logs say why"
        )
    measured = {arm.name: seconds_by_length(folder / arm.name / "r1") for arm in arms}
    factor = factor_for(cost, measured)
    found = {
        "factor": factor,
        "asked": _asked(cost),
        "tokens": round(factor * cost.tokens),
        "seconds": {
            arm: predicted_s(by_length, factor * cost.tokens) for arm, by_length in measured.items()
        },
        "measured": {arm: {str(n): s for n, s in each.items()} for arm, each in measured.items()},
    }
    write_atomically(output / PROMPT_COST_FILE, orjson.dumps(found, option=orjson.OPT_INDENT_2))
    progress.say(prompt_cost_words(found))
    return factor


def prompts(tokens: int) -> Iterator[Request]:
    """Prompts without a common prefix, one after the other: rounds of each length."""
    first_block = 0
    for round_number in range(_ROUNDS):
        for times in _TIMES:
            length = times * tokens
            blocks = -(-length // _BLOCK_TOKENS)
            name = f"r{round_number}-{times}"
            yield Request(
                request_id=name,
                session_id=name,
                turn=0,
                timestamp_s=0.0,
                input_length=length,
                output_length=1,
                block_size=_BLOCK_TOKENS,
                hash_ids=[*range(first_block, first_block + blocks)],
            )
            first_block += blocks


def seconds_by_length(run: Path) -> dict[int, float]:
    """The median time to the first token of a measuring run, by the prompt's length, without the
    first round."""
    taken: dict[int, list[float]] = {}
    for result in iter_results(run / RESULTS_FILE):
        if result.request_id.startswith("r0-"):
            continue
        taken_s = result.ttft_s()
        if taken_s is None or result.cached_tokens:
            why = "was not answered" if taken_s is None else "was cached"
            raise InputError(f"prompt_cost: {run}: the prompt {result.request_id} {why}")
        taken.setdefault(result.input_length, []).append(taken_s)
    if len(taken) < len(_TIMES):
        raise InputError(f"prompt_cost: {run}: holds {len(taken)} lengths of {len(_TIMES)}")
    return {length: statistics.median(each) for length, each in taken.items()}


def predicted_s(by_length: Mapping[int, float], tokens: float) -> float:
    """What a prompt of `tokens` takes: a part for each token, and one for each pair of them."""
    linear, pairs = _constants(by_length)
    return linear * tokens + pairs * tokens**2


def tokens_for(by_length: Mapping[int, float], seconds: float) -> float:
    """How long a prompt is that takes `seconds`."""
    linear, pairs = _constants(by_length)
    if pairs == 0:
        return seconds / linear
    return float((-linear + (linear**2 + 4 * pairs * seconds) ** 0.5) / (2 * pairs))


def _constants(by_length: Mapping[int, float]) -> tuple[float, float]:
    lengths = np.array(list(by_length), dtype=float)
    taken_s = np.array(list(by_length.values()))
    # Of relative errors, so that the shorter prompt counts as much.
    terms = np.column_stack([lengths / taken_s, lengths**2 / taken_s])
    scale = terms.max(axis=0)
    solution, _ = nnls(terms / scale, np.ones(len(taken_s)))
    linear, pairs = solution / scale
    return float(linear), float(pairs)


def factor_for(cost: PromptCost, measured: Mapping[str, Mapping[int, float]]) -> float:
    """The factor with which a prompt of `cost.tokens` takes `cost.seconds` on the fastest engine,
    in two digits and within `cost.factors`."""
    wanted = max(tokens_for(each, cost.seconds) for each in measured.values()) / cost.tokens
    low, high = cost.factors
    return min(max(float(f"{wanted:.2g}"), low), high)


def _one_arm_of_each_engine(
    experiment: Experiment, site: Site, only: Sequence[str] | None
) -> list[Arm]:
    """An arm for each kind of workers, in the file's order, without admission: who waits to be let
    in is not computed."""
    site = with_endpoints(site)
    runs: dict[str, PlannedRun] = {}
    for run in plan_runs(experiment, list(only) if only else None):
        runs.setdefault(run.arm.name, run)
    ordered = [runs[arm.name] for arm in experiment.arms if arm.name in runs]
    topologies = load_topologies(site, experiment, ordered)
    found: dict[bytes, Arm] = {}
    for run in ordered:
        key = site.worker_key(topologies[run.cell])
        update: dict[str, Any] = {"loads": None, "replay": {}, "priority": 0}
        if run.arm.topology is not None:
            router = dict(run.set.get("router") or {}) | {"admission": {"rule": "off"}}
            update["set"] = run.set | {"router": router}
        found.setdefault(key, run.arm.model_copy(update=update))
    return list(found.values())


def _asked(cost: PromptCost) -> dict[str, Any]:
    return cost.model_dump(mode="json", exclude={"factor"})
