"""`deltaserve eval plan`: arms for so many GPUs, tried in simulation, and what to measure next.

Owns the arms that a plan tries, the experiment file that it writes (`eval run` takes the same file)
and the words of its answer. How runs are simulated and what an arm carries is elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from deltaserve.errors import InputError
from eval.experiment_files import load_experiment
from eval.progress import Progress
from eval.provenance import MANIFEST, read_manifest
from eval.reach import in_words
from eval.report import find_searches
from eval.report.searches import Search
from eval.run_lines import Row, cell, write_rows
from eval.simulate import read_calibration
from eval.simulated_runs import simulate_experiment
from launch.cache import make_folder, write_atomically

EXPERIMENT_FILE = "plan.toml"
LINES_FILE = "plan.csv"
RUNS_FOLDER = "runs"


@dataclass(frozen=True)
class Hardware:
    """What is there: so many GPUs, each a worker with `kv_tokens` of KV beside the model and
    `host_kv_tokens` in its host's memory (0: none), that behaves as `calibration` says."""

    gpus: int
    kv_tokens: int
    host_kv_tokens: int
    calibration: str


@dataclass(frozen=True)
class Asked:
    """The load and how long it is looked at. Of the trace only the first `sessions` are used, and
    prompts of at most `max_input_tokens`, where these are given; `seeds` draws of sessions and
    starts are made at the levels that decide. Levels are no closer to each other than the share
    `tolerance`; times in seconds. `only` names the arms that are tried; none for all. With
    `calibration_spread` each draw has constants of its own."""

    trace: Path
    sessions: int | None = None
    max_input_tokens: int | None = None
    max_think_s: float | None = 10.0
    seeds: int = 3
    measure_s: float = 900.0
    warm_up_s: float = 120.0
    most_sessions_a_gpu: int = 32
    tolerance: float = 0.05
    only: tuple[str, ...] = ()
    calibration_spread: bool = False
    slo: dict[str, Any] = field(default_factory=dict)


def experiment_text(asked: Asked, hardware: Hardware) -> str:
    """The experiment file of the plan: every arm that fits the hardware, searched over sessions in
    flight."""
    think = "" if asked.max_think_s is None else f"max_think_s = {asked.max_think_s:g}\n"
    longest = (
        "" if asked.max_input_tokens is None else f"max_input_tokens = {asked.max_input_tokens}\n"
    )
    first = "" if asked.sessions is None else f"session_limit = {asked.sessions}\n"
    slo = "".join(f"{key} = {_toml(value)}\n" for key, value in asked.slo.items())
    gpus = hardware.gpus
    run_minutes = (asked.measure_s + asked.warm_up_s) / 60 + 3
    head = f"""# Written by deltaserve eval plan: eval simulate and eval run take it as it is.
name = "plan"
seed = 1
run_minutes = {run_minutes:g}

[trace]
path = {_toml(str(asked.trace.resolve()))}

[replay]
mode = "closed"
{think}{first}{longest}timeout_s = 600

[phases]
start = "mid"
recycle = true
# A prompt of 150,000 tokens takes a slow GPU longer than the default of a minute.
prime_timeout_s = 600
warm_up_s = {asked.warm_up_s:g}
measure_s = {asked.measure_s:g}
drain_s = 120

[slo]
{slo}
[analysis]
vary = ["replay.seed"]

[search]
over = "replay.max_inflight_sessions"
start = {3 * gpus}
low = 1
high = {asked.most_sessions_a_gpu * gpus}
repeats = {asked.seeds}
tolerance = {asked.tolerance:g}

[simulate]
calibration = {_toml(hardware.calibration)}
calibration_spread = {_toml(asked.calibration_spread)}

[set]
max_total_tokens = {hardware.kv_tokens}
kv_events = true
"""
    return "\n".join([head, *(_arm(**arm) for arm in arms(hardware))])


def arms(hardware: Hardware) -> list[dict[str, Any]]:
    """Name, topology, policy and topology keys of each arm: colocated SGLang and vLLM with and
    without admission, each with and without a host tier; splits of two GPUs or more."""
    gpus = hardware.gpus
    found: list[dict[str, Any]] = []
    for engine, prefix in (("sglang", ""), ("vllm", "vllm-")):
        for host_kv_tokens in dict.fromkeys((0, hardware.host_kv_tokens)):
            tier: dict[str, Any] = {}
            if host_kv_tokens:
                tier = {"workers": {"colocated": {"host_kv_tokens": host_kv_tokens}}}
            host = "host" if host_kv_tokens else ""
            for rule, name in (("off", host or "colocated"), ("rotate", f"{host}-admission")):
                found.append(
                    {
                        "name": prefix + name.removeprefix("-"),
                        "topology": f"{engine}:{gpus}",
                        "policy": "unified",
                        "keys": _admission(rule) | tier,
                    }
                )
    if gpus < 2:
        return found
    few, quarter, half = 1, max(1, gpus // 4), gpus // 2
    for prefill in dict.fromkeys((quarter, half)):
        found.append(_split("pd", prefill, gpus))
    for prefill in dict.fromkeys((few, quarter)):
        found.append(_split("elastic", prefill, gpus))
    alone = _split("elastic", quarter, gpus)
    return [*found, alone | {"name": f"{alone['name']}-off", "keys": _admission("off")}]


def _admission(rule: str) -> dict[str, Any]:
    return {"router": {"admission": {"rule": rule}}}


def _split(kind: str, prefill: int, gpus: int) -> dict[str, Any]:
    split = f"{prefill}p{gpus - prefill}d"
    return {
        "name": f"{kind}-{split}",
        "topology": f"sglang-{kind}:{split}",
        "keys": _admission("rotate"),
    }


def _arm(name: str, topology: str, keys: dict[str, Any], policy: str | None = None) -> str:
    lines = ["[[arms]]", f"name = {_toml(name)}", f"topology = {_toml(topology)}"]
    if policy is not None:
        lines.append(f"policy = {_toml(policy)}")
    return "\n".join([*lines, f"set = {_inline(keys)}"]) + "\n"


def _toml(value: Any) -> str:
    # JSON's strings, numbers and booleans are TOML's.
    return orjson.dumps(value).decode()


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_inline(item)}" for key, item in value.items()) + " }"
    return _toml(value)


def plan(
    asked: Asked, hardware: Hardware, output: Path, progress: Progress
) -> tuple[list[Search], str]:
    """Writes the experiment to `output`, simulates it, and returns what each arm carries, the best
    first, and the answer in words. Raises `InputError` for what is wrong with the question."""
    if hardware.gpus < 1 or hardware.kv_tokens < 1:
        raise InputError("--gpus, --kv-tokens: expected at least 1")
    calibration = read_calibration(hardware.calibration)
    make_folder(output)
    path = output / EXPERIMENT_FILE
    write_atomically(path, experiment_text(asked, hardware).encode())
    experiment, _ = load_experiment(str(path))
    source = {"file": str(path), "text": path.read_text(encoding="utf-8")}
    summary = simulate_experiment(
        experiment,
        output / RUNS_FOLDER,
        source=source,
        progress=progress,
        only=list(asked.only) or None,
    )
    if summary.failed:
        raise InputError(f"{output / RUNS_FOLDER}: {summary.failed[0]} failed; see its manifest")
    found = sorted(find_searches([output / RUNS_FOLDER]), key=_best_first)
    write_rows(output / LINES_FILE, (line(search, asked, hardware) for search in found))
    beyond = _extrapolated(output / RUNS_FOLDER)
    return found, answer(found, str(calibration["name"]), path, beyond)


def line(search: Search, asked: Asked, hardware: Hardware) -> Row:
    """What is kept of an arm: the question, and how many agents a GPU it carries. `high` is empty
    where no level surely missed the objective."""
    per_gpu = 1 / hardware.gpus
    return {
        "trace": asked.trace.name.partition(".")[0],
        "calibration": hardware.calibration,
        "gpus": str(hardware.gpus),
        "max_think_s": "" if asked.max_think_s is None else f"{asked.max_think_s:g}",
        "arm": search.arm,
        "agents_per_gpu": f"{search.agents * per_gpu:.3f}",
        "low": f"{search.low * per_gpu:.3f}",
        "high": cell(search.high * per_gpu, ".3f"),
        "levels": str(len(search.levels)),
    }


def table(rows: Sequence[Row]) -> list[str]:
    """Plans side by side, as a page has them: a line an arm, in the order in which arms come."""
    plans = list(dict.fromkeys(map(_plan_of, rows)))
    heads = [
        f"{trace}, {calibration}, {gpus} GPUs, think ≤ {think} s"
        for trace, calibration, gpus, think in plans
    ]
    lines = [f"| simulated: agents a GPU | {' | '.join(heads)} |", "|--" * (1 + len(plans)) + "|"]
    # `elastic-2p6d` of eight GPUs is a line of its own, beside `elastic-1p1d` of two.
    for arm in dict.fromkeys(row["arm"] for row in sorted(rows, key=lambda row: row["arm"])):
        by_plan = {_plan_of(row): row for row in rows if row["arm"] == arm}
        cells = [_agents(by_plan[plan]) if plan in by_plan else "" for plan in plans]
        lines.append(f"| `{arm}` | {' | '.join(cells)} |")
    return lines


def _plan_of(row: Row) -> tuple[str, str, str, str]:
    return row["trace"], row["calibration"], row["gpus"], row["max_think_s"]


def _agents(row: Row) -> str:
    high = f"{float(row['high']):.2g}" if row["high"] else "∞"
    return f"{float(row['agents_per_gpu']):.2g} [{float(row['low']):.2g}–{high}]"


def _best_first(search: Search) -> tuple[float, float]:
    return (-search.agents if math.isfinite(search.agents) else 0.0, -search.low)


def _extrapolated(runs: Path) -> list[str]:
    """What runs had beyond what the calibration was fitted on."""
    manifests = (read_manifest(path.parent) or {} for path in runs.rglob(MANIFEST))
    return in_words([(each.get("simulated") or {}).get("beyond") or {} for each in manifests])


def answer(
    found: Sequence[Search], calibration: str, path: Path, beyond: Sequence[str] = ()
) -> str:
    """The table of arms, what decides between them, and the command that measures it. `beyond` is
    what the calibration was extrapolated to. Engines that were simulated with one calibration are
    not told apart by it: the best arm of either is measured."""
    lines = [
        f"Simulated, not measured; calibration: {calibration}.",
        "",
        f"{'arm':<20}{'agents a GPU':>13}  {'interval':<18}{'levels':>7}",
    ]
    for search in found:
        lines.append(
            f"{search.arm:<20}{search.per_unit:>13.3g}  {search.interval or '?':<18}"
            f"{len(search.levels):>7}"
        )
    if not found:
        return "\n".join([*lines, "no arm could be simulated"])
    if words := _not_counted(found):
        lines += ["", words]
    lines += [f"Extrapolated: {words}." for words in beyond]
    best, rivals = found[0], [s for s in found[1:] if _overlap(s, found[0])]
    others = [search for search in found if _engine(search) != _engine(best)]
    if others:
        lines += [
            "",
            "Both engines have the same step times: this does not choose between SGLang and vLLM.",
        ]
        if others[0] not in rivals:
            rivals.append(others[0])
    lines += ["", _measure_next(best, rivals, path)]
    return "\n".join(lines)


def _not_counted(found: Sequence[Search]) -> str:
    """Whose levels broke a rule of validity, and what that mostly is; empty where none did."""
    broken = {search.arm: search.invalid for search in found if search.invalid}
    if not broken:
        return ""
    rules = dict.fromkeys(
        rule for levels in broken.values() for level in levels for rule in level["violations"]
    )
    words = f"Rules of validity were broken ({', '.join(rules)}) by levels of {', '.join(broken)}"
    if "client_errors" in rules:
        words += (
            ": turns were refused, which count nowhere. Prompts longer than a worker's KV are; "
            "--max-input-tokens cuts them"
        )
    return f"{words}."


def _engine(search: Search) -> str:
    return "vllm" if search.arm.startswith("vllm") else "sglang"


def _overlap(one: Search, other: Search) -> bool:
    return not (one.high < other.low or other.high < one.low)


def _measure_next(best: Search, rivals: Sequence[Search], path: Path) -> str:
    """Which arms to measure: those that the simulation does not tell apart, or the best one alone,
    from the level that it is said to carry."""
    if best.agents <= 0:
        return (
            "No arm met the objective at any level: measure one session alone first "
            f"(deltaserve eval run {path} --only {best.arm} --set search.start=1 "
            "--set search.high=1)."
        )
    names = [best.arm, *(rival.arm for rival in rivals)]
    why = (
        f"the simulation does not choose between them: {', '.join(names)}"
        if rivals
        else f"{best.arm} is ahead of every other arm; its capacity is simulated, not measured"
    )
    only = " ".join(f"--only {name}" for name in names)
    return (
        f"To measure next ({why}): deltaserve eval run {path} {only} "
        f"--set search.start={best.agents:g}"
    )
