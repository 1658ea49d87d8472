"""The arguments of a replay, their presets, and what is wrong with them."""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from deltaserve.errors import InputError
from deltaserve.quantities import COUNT, FACTOR, PROCESSES, SECONDS, TOKENS, Most, check_more_than_0

Mode = Literal["open", "closed", "sessions"]
Where = Literal["cold", "mid"]

NOTHING_ANSWERED = 3
"""Exit code of a run that ended by itself and in which every request failed."""
INTERRUPTED = 130
"""Exit code of a run that Ctrl-C or SIGTERM ended, as a shell has it."""

START_SHARE = (0.25, 0.75)
"""Where sessions begin that begin in their middle, unless told otherwise: after a share of their
requests between these two."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Arguments of a replay; times in seconds, lengths in tokens. Those that are None are chosen by
    the preset, by the server or by what the run needs.

    With `start` "mid", `warm_up_s`, `measure_s` or `recycle` the run has phases.
    """

    trace: Path
    url: str
    output: Path
    api: Literal["auto", "sglang", "openai", "chat"] = "auto"
    model: str | None = None
    mode: Mode = "open"
    max_inflight_sessions: int = 8
    sessions_per_hour: float | None = None
    time_scale: float = 1.0
    think_scale: float = 1.0
    max_think_s: float | None = None
    request_limit: int | None = None
    session_limit: int | None = None
    length_scale: float = 1.0
    max_input_tokens: int | None = None
    vocab_size: int | None = None
    seed: int = 0
    prompt_seed: int | None = None
    start: Where = "cold"
    start_share: tuple[float, float] = START_SHARE
    prime_parallel: int | None = None
    prime_timeout_s: float = 60.0
    warm_up_s: float | None = None
    measure_s: float | None = None
    drain_s: float | None = None
    recycle: bool = False
    recycle_start: Where = "cold"
    record_output_ids: bool = False
    splice_outputs: bool = False
    as_text: bool = False
    timeout_s: float = 600.0
    headers: tuple[str, ...] = ()
    processes: int | None = None
    resume: bool = False

    @property
    def has_phases(self) -> bool:
        """Whether only a window of the run is measured."""
        return bool(
            self.start == "mid"
            or self.warm_up_s is not None
            or self.measure_s is not None
            or self.recycle
        )

    def record(self) -> dict[str, Any]:
        """The arguments as a run's record has them: of headers the names alone."""
        record = asdict(self)
        del record["resume"]
        record |= {name: str(record[name]) for name in ("trace", "output")}
        record["headers"] = [header.partition("=")[0] for header in self.headers]
        return record


# What must not change when a run is resumed: with any of these different its results do not belong
# together.
SAME_ON_RESUME = (
    "mode",
    "max_inflight_sessions",
    "sessions_per_hour",
    "time_scale",
    "think_scale",
    "max_think_s",
    "request_limit",
    "session_limit",
    "length_scale",
    "max_input_tokens",
    "vocab_size",
    "seed",
    "prompt_seed",
    "splice_outputs",
    "as_text",
)

# AIPerf's rules for the corpus of agents' traces (docs/replay.md says where these differ from it).
PRESETS: dict[str, dict[str, Any]] = {
    "agentx": {
        "mode": "closed",
        "start": "mid",
        "recycle": True,
        "max_think_s": 10.0,
        "warm_up_s": 60.0,
        "measure_s": 1800.0,
        "splice_outputs": True,
    },
    "think-10": {"max_think_s": 10.0},
    "think-60": {"max_think_s": 60.0},
}
AGENTX_LEAST_MEASURE_S = 900.0


def preset_values(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """A preset's arguments under those that were `given`. Raises `InputError` where a given one
    breaks the preset's rules."""
    if name not in PRESETS:
        raise InputError(f"--preset {name}: expected one of {', '.join(PRESETS)}")
    values = PRESETS[name] | given
    if name == "agentx":
        for key in ("mode", "start", "recycle"):
            if values[key] != PRESETS[name][key]:
                raise InputError(
                    f"--{key} {values[key]}: --preset agentx has {PRESETS[name][key]}; "
                    "drop one of the two"
                )
        if values["measure_s"] < AGENTX_LEAST_MEASURE_S:
            raise InputError(
                f"--measure-s {values['measure_s']:g}: --preset agentx measures at least "
                f"{AGENTX_LEAST_MEASURE_S:g} s"
            )
    return values


_BOUNDS: dict[str, tuple[int, Most | None]] = {
    "max_inflight_sessions": (1, COUNT),
    "processes": (1, PROCESSES),
    "vocab_size": (2, TOKENS),
    "request_limit": (1, COUNT),
    "session_limit": (1, COUNT),
    "max_input_tokens": (1, TOKENS),
    "prime_parallel": (1, COUNT),
    "think_scale": (0, FACTOR),
    "max_think_s": (0, SECONDS),
    "warm_up_s": (0, SECONDS),
    "drain_s": (0, SECONDS),
    "seed": (0, None),
    "prompt_seed": (0, None),
}
_MORE_THAN_0 = {
    "time_scale": FACTOR,
    "timeout_s": SECONDS,
    "prime_timeout_s": SECONDS,
    "measure_s": SECONDS,
    "sessions_per_hour": COUNT,
}


def check(options: RunOptions) -> None:
    """Raises `InputError`, naming the flag, for the first argument that cannot be."""
    for name, (least, most) in _BOUNDS.items():
        value = getattr(options, name)
        if value is None:
            continue
        # Turned around, so that what is no number is refused too.
        if not value >= least:
            raise InputError(f"{_flag(name)} {value}: expected at least {least}")
        if wrong := most and most.wrong_with(value):
            raise InputError(f"{_flag(name)} {value:g}: {wrong}")
    for name, most in _MORE_THAN_0.items():
        check_more_than_0(_flag(name), getattr(options, name), most)
    if not 0 <= options.start_share[0] <= options.start_share[1] < 1:
        raise InputError(
            f"--start-share {options.start_share[0]:g} {options.start_share[1]:g}: expected two "
            "shares from 0 to below 1, the lower first"
        )
    _check_load(options)
    if options.splice_outputs and (options.as_text or options.api == "chat"):
        raise InputError("--splice-outputs: expected token ids; drop --text, or --api chat")
    if not options.url.startswith(("http://", "https://")):
        raise InputError(f"--url {options.url}: expected http://HOST:PORT")
    resolve_headers(options.headers)


def _check_load(options: RunOptions) -> None:
    if options.mode == "open":
        for name in ("recycle", "recycle_start", "start"):
            if getattr(options, name) not in (False, "cold"):
                raise InputError(f"{_flag(name)}: expected --mode closed or --mode sessions")
    if (options.mode == "sessions") != (options.sessions_per_hour is not None):
        raise InputError("--sessions-per-hour and --mode sessions: expected both or neither")
    if options.recycle and options.measure_s is None:
        raise InputError("--recycle: expected --measure-s, for recycled sessions never run out")
    if options.resume and options.has_phases:
        raise InputError(
            "--resume: a run with phases cannot be resumed (its steady state is lost); start anew"
        )
    if options.mode == "closed" and (options.processes or 1) > options.max_inflight_sessions:
        raise InputError(
            f"--processes {options.processes}: expected at most --max-inflight-sessions "
            f"{options.max_inflight_sessions}"
        )


def resolve_headers(headers: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Names and values of `NAME=VALUE` headers; `@VARIABLE` in a value stands for that environment
    variable, so that a key need not be written where the process list shows it."""
    found = []
    for header in headers:
        name, separator, value = header.partition("=")
        if not separator or not re.fullmatch(r"[A-Za-z0-9-]+", name):
            raise InputError(
                f"--header {name}: expected NAME=VALUE, as in 'Authorization=Bearer @API_KEY'"
            )
        for variable in re.findall(r"@([A-Za-z_][A-Za-z0-9_]*)", value):
            if variable not in os.environ:
                raise InputError(f"--header {name}: the environment has no variable {variable}")
            value = value.replace(f"@{variable}", os.environ[variable])
        if not value.isprintable():
            raise InputError(f"--header {name}: its value has characters that no header can have")
        found.append((name.lower(), value))
    return tuple(found)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
