"""An experiment: what a person writes, checked.

Owns the schema. Files and overrides are `eval.experiment_files`, the runs `eval.matrix`. Knows
nothing of how a run is executed or measured; topologies, policies and traces are names here,
checked by their own rooms.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from deltaserve.quantities import (
    Factor,
    PositiveAmount,
    PositiveCount,
    PositiveFactor,
    PositiveMinutes,
    PositiveSeconds,
    PositiveTokens,
    Processes,
    Repeats,
    Seconds,
    Tokens,
)

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
Name = Annotated[str, Field(pattern=_NAME, max_length=64)]
Scalar = str | int | float | bool
# What measured seconds are held against. It may be as long as one likes: nothing waits for it.
Limit = Annotated[float, Field(gt=0)]
_LATENCY_NAMES = ("ttft", "tpot", "worst_gap", "e2e")
_RATE_NAMES = ("throughput_output_tps", "requests_per_s", "first_tokens_per_s", "in_time_per_s")
MEASURE_NAMES = (
    *(f"{name}_p{percent}" for name in _LATENCY_NAMES for percent in (50, 90, 99)),
    *_RATE_NAMES,
    *(f"{name}_per_gpu" for name in _RATE_NAMES),
    "in_time_share",
    "wait_mean_s",
    *(f"wait_over_{seconds}" for seconds in (10, 30, 60, 180)),
    "waiting_sessions",
    "late_share_mean",
    "late_share_p50",
    "late_share_p90",
    "session_completion_p50",
    "session_completion_p90",
    "stretch_p90",
    "apc",
    "recomputed_share",
)
WHOLE_LOADS = ("replay.max_inflight_sessions",)
"""What a search may go over that comes in whole numbers."""
TRACE_SOURCES = ("path", "synth", "convert", "prefixes", "turns")
DRAWN_SOURCES = ("synth", "prefixes", "turns", "sample")


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Synth(_Table):
    """``deltaserve replay synth``: a named profile, how much of it, and its seed."""

    profile: str
    requests: PositiveCount | None = None
    duration_s: PositiveSeconds | None = None
    seed: int | None = None
    options: dict[str, Scalar] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_size(self) -> Synth:
        if (self.requests is None) == (self.duration_s is None):
            raise ValueError("give exactly one of requests and duration_s")
        return self


class Convert(_Table):
    """``deltaserve replay convert``: another project's trace files."""

    format: Literal["weka", "mooncake", "bailian"]
    inputs: Annotated[list[str], Field(min_length=1)]
    options: dict[str, Scalar] = Field(default_factory=dict)


class Prefixes(_Table):
    """Single prompts that each begin with one of a few long prefixes, as published benchmarks of
    prefix caches do: `prefix_tokens` shared, `suffix_tokens` of their own."""

    requests: PositiveCount
    prefixes: PositiveCount
    prefix_tokens: PositiveTokens
    suffix_tokens: PositiveTokens
    output_tokens: PositiveTokens
    block_size: PositiveTokens = 100
    rate: PositiveAmount = 1.0
    seed: int | None = None

    @model_validator(mode="after")
    def _whole_blocks(self) -> Prefixes:
        if self.prefix_tokens % self.block_size:
            raise ValueError(f"prefix_tokens: expected a multiple of {self.block_size}, block_size")
        return self


class Turns(_Table):
    """Sessions whose turns are all alike: each brings `new_tokens` after everything that was said
    before, the answers of `output_tokens` included. So a session of `turns` turns begins with a
    prompt of `new_tokens`, and with a cache that loses nothing about (turns - 1) / (turns + 1) of
    its prompt tokens are cached. Think times are drawn, `think_s` seconds on average."""

    sessions: PositiveCount
    turns: PositiveCount
    new_tokens: PositiveTokens
    output_tokens: PositiveTokens
    think_s: Seconds
    block_size: PositiveTokens = 100
    seed: int | None = None

    @model_validator(mode="after")
    def _whole_blocks(self) -> Turns:
        for name in ("new_tokens", "output_tokens"):
            if getattr(self, name) % self.block_size:
                raise ValueError(f"{name}: expected a multiple of {self.block_size}, block_size")
        return self


class Sample(_Table):
    """``deltaserve replay sample``: a window of the trace, thinned by whole sessions."""

    window_seconds: PositiveAmount | None = None
    sample_ratio: Annotated[float, Field(gt=0, le=1)] | None = None
    max_single_turn_ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    window_start: Seconds | None = None
    method: Literal["window", "random"] | None = None
    seed: int | None = None


class Excerpt(_Table):
    """A small part of any trace: the first turns of the first sessions, prefixes kept whole."""

    requests: PositiveCount
    turns: PositiveCount


class Trace(_Table):
    """Where the requests come from: a file, or one made for this experiment."""

    path: str | None = None
    synth: Synth | None = None
    convert: Convert | None = None
    prefixes: Prefixes | None = None
    turns: Turns | None = None
    sample: Sample | None = None
    excerpt: Excerpt | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Trace:
        given = [name for name in TRACE_SOURCES if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"give exactly one of {', '.join(TRACE_SOURCES)} "
                f"(found {', '.join(given) or 'none'})"
            )
        return self


Where = Literal["cold", "mid"]


class Phases(_Table):
    """Which part of a run is measured: where the first sessions begin, how long the load warms up
    and how long the measured window is; whether sessions are played again so that as many stay in
    flight."""

    start: Where | None = None
    start_share: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None
    prime_parallel: PositiveCount | None = None
    prime_timeout_s: PositiveSeconds | None = None
    warm_up_s: Seconds | None = None
    measure_s: PositiveSeconds | None = None
    drain_s: Seconds | None = None
    recycle: bool = False
    recycle_start: Where | None = None


class Replay(_Table):
    """How the trace is replayed; every key but `fit_input_tokens` is a flag of ``replay run``."""

    preset: Literal["agentx", "think-10", "think-60"] | None = None
    mode: Literal["open", "closed", "sessions"] | None = None
    api: Literal["auto", "sglang", "openai", "chat"] | None = None
    max_inflight_sessions: PositiveCount | None = None
    sessions_per_hour: PositiveAmount | None = None
    time_scale: PositiveFactor | None = None
    think_scale: Factor | None = None
    max_think_s: Seconds | None = None
    length_scale: Annotated[float, Field(gt=0, le=1)] | None = None
    fit_input_tokens: PositiveTokens | None = Field(
        default=None,
        description="choose length_scale so that the longest input has at most so many tokens",
    )
    request_limit: PositiveCount | None = None
    session_limit: PositiveCount | None = None
    max_input_tokens: PositiveTokens | None = None
    timeout_s: PositiveSeconds | None = None
    vocab_size: PositiveTokens | None = None
    seed: Annotated[int, Field(ge=0)] | None = None
    processes: Processes | None = None
    splice_outputs: bool = True

    @model_validator(mode="after")
    def _one_scale(self) -> Replay:
        if self.length_scale is not None and self.fit_input_tokens is not None:
            raise ValueError("give length_scale or fit_input_tokens, not both")
        if self.max_inflight_sessions is not None and self.mode_used == "open":
            raise ValueError('max_inflight_sessions needs mode = "closed"')
        if (self.sessions_per_hour is not None) != (self.mode == "sessions"):
            raise ValueError('sessions_per_hour needs mode = "sessions", and the other way round')
        if self.splice_outputs and self.api == "chat":
            raise ValueError('api = "chat" sends text: set splice_outputs = false')
        return self

    @property
    def mode_used(self) -> str:
        """The mode: the file's, else the preset's, else open."""
        return self.mode or ("closed" if self.preset == "agentx" else "open")


class Load(_Table):
    """One level of load: a name, the replay settings that make it, and topology keys under it."""

    name: Name
    replay: dict[str, Scalar] = Field(default_factory=dict)
    set: dict[str, Any] = Field(default_factory=dict)
    priority: int = 0


class Arm(_Table):
    """One thing to compare: a topology under a routing policy, or a server that runs somewhere
    (`url`, with its number of GPUs, for figures a GPU)."""

    name: Name
    topology: str | None = None
    url: Annotated[str, Field(pattern=r"^https?://")] | None = None
    gpus: PositiveCount | None = None
    headers: dict[str, str] = Field(default_factory=dict)
    policy: str | None = None
    policy_params: dict[str, Scalar] = Field(default_factory=dict)
    set: dict[str, Any] = Field(default_factory=dict)
    replay: dict[str, Scalar] = Field(default_factory=dict)
    loads: list[Name] | None = None
    priority: int = 0

    @model_validator(mode="after")
    def _one_server(self) -> Arm:
        if (self.topology is None) == (self.url is None):
            raise ValueError("give either topology or url")
        if self.url is not None:
            for key in ("policy", "policy_params", "set"):
                if getattr(self, key):
                    raise ValueError(f"{key}: is of a topology; the server at url is as it is")
        elif self.gpus is not None or self.headers:
            raise ValueError("gpus, headers: are of an arm with url")
        for name, value in self.headers.items():
            # A run's manifest and report show the arm as it stands here.
            if not re.search(r"@[A-Za-z_]", value):
                raise ValueError(
                    f"headers.{name}: give its value as @VARIABLE of the environment, as in "
                    "'Bearer @API_KEY'"
                )
        return self


def _unbounded(value: Any) -> Any:
    return math.inf if value is None else value


# JSON has no infinity: a manifest says null of a bound that is none.
Bound = Annotated[float, Field(gt=0), BeforeValidator(_unbounded)]

_NO_BOUND_ON_SESSIONS = {"late_share_p90": 1.0, "stretch_p90": math.inf, "patience_s": math.inf}
OBJECTIVES: Mapping[str, Mapping[str, float]] = {
    "sessions": {},
    "agentperf": {
        "ttft_s": 10.0,
        "ttft_s_per_new_token": 0.0,
        "tpot_s": 0.05,
        "worst_gap_s": math.inf,
        **_NO_BOUND_ON_SESSIONS,
    },
    "agentx": {
        "ttft_s": math.inf,
        "ttft_s_per_new_token": 0.0,
        "tpot_s": math.inf,
        "worst_gap_s": math.inf,
        **_NO_BOUND_ON_SESSIONS,
    },
}
"""Objectives by name, as what each replaces of the default, `sessions`. AgentPerf bounds a turn's
first token and pace; AgentX bounds no latency, so that every turn that is answered is good."""


class Slo(_Table):
    """What a turn must keep to count as good: it did not fail, its first token came within
    `ttft_s` + `ttft_s_per_new_token` × new tokens (of its prompt, those that an endless cache would
    not hold), its tokens at `tpot_s` each on average and never further apart than `worst_gap_s`.

    A load is carried where the share of turns in time is at least `attainment`, at most 1 % of
    turns wait longer than `patience_s`, the p90 over sessions of the share of their time in which
    they are late is at most `late_share_p90`, no session starves, and the p90 of the sessions'
    stretch is at most `stretch_p90`. `preset` names one of `OBJECTIVES`, whose bounds stand where
    no key says otherwise; infinity is no bound.
    """

    ttft_s: Bound = 3.0
    ttft_s_per_new_token: Annotated[float, Field(ge=0)] = 0.0001
    tpot_s: Bound = 0.05
    worst_gap_s: Bound = 1.0
    attainment: Annotated[float, Field(gt=0, le=1)] = 0.9
    late_share_p90: Annotated[float, Field(gt=0, le=1)] = 0.1
    stretch_p90: Annotated[Bound, Field(ge=1)] = 2.0
    patience_s: Bound = 60.0

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or "preset" not in given:
            return given
        if given["preset"] not in OBJECTIVES:
            raise ValueError(f"preset: expected one of {', '.join(OBJECTIVES)}")
        own = {key: value for key, value in given.items() if key != "preset"}
        return {**OBJECTIVES[given["preset"]], **own}


class Analysis(_Table):
    """How runs are compared: the few measures that the experiment is about, to which the correction
    for many comparisons applies, and what is drawn anew in every round (the same for all arms)."""

    primary: list[str] = Field(default_factory=lambda: ["ttft_p90", "tpot_p90", "in_time_per_s"])
    vary: list[Literal["trace.seed", "replay.seed"]] = Field(default_factory=list)

    @model_validator(mode="after")
    def _known_measures(self) -> Analysis:
        for name in self.primary:
            if name not in MEASURE_NAMES:
                raise ValueError(f"primary: unknown measure {name!r}; {', '.join(MEASURE_NAMES)}")
        return self


class SearchBounds(_Table):
    """How much load each arm carries: which replay key is the load, where the search looks, how
    often a level at the edge is repeated. `alone` also runs one session in flight, which is what
    every session's stretch is held against; without it, and where the load is sessions that arrive,
    of which none is one in flight, that is predicted from the other levels."""

    over: Literal["replay.max_inflight_sessions", "replay.sessions_per_hour"]
    start: PositiveAmount = 4.0
    low: PositiveAmount = 1.0
    high: PositiveAmount = 256.0
    tolerance: PositiveFactor = 0.05
    repeats: Repeats = 2
    alone: bool = True

    @model_validator(mode="after")
    def _in_order(self) -> SearchBounds:
        if not self.low <= self.start <= self.high:
            raise ValueError("expected low <= start <= high")
        if "alone" in self.model_fields_set and self.alone and not self.whole:
            raise ValueError(
                f"alone: one session in flight is no level of {self.over}; take it out"
            )
        return self

    @property
    def measures_alone(self) -> bool:
        """Whether one session in flight is run as a level."""
        return self.alone and self.whole

    @property
    def whole(self) -> bool:
        """Whether the load is a whole number."""
        return self.over in WHOLE_LOADS


class ValidityRules(_Table):
    """When a run is excluded by rule (never by hand). `max_error_share` is of requests that failed
    by the client's or the machine's fault; what servers fail is an outcome."""

    cold_slack_tokens: Tokens = 64
    max_client_lag_p99_s: Limit = 0.25
    max_error_share: Annotated[float, Field(ge=0, lt=1)] = 0.01


class PromptCost(_Table):
    """What computing a prompt again should cost on the machine that runs the experiment: a prompt
    of `tokens` takes `seconds` on the fastest of the engines. All lengths of the experiment are
    multiplied by one `factor` for that: of prompts and answers, of the KV and of what is compared
    with them (`LENGTHS`). It is measured before the first run, and stays within `factors`; where it
    is given nothing is measured."""

    tokens: PositiveTokens
    seconds: PositiveSeconds
    factors: Annotated[list[PositiveFactor], Field(min_length=2, max_length=2)] = [0.25, 4.0]
    factor: PositiveFactor | None = None

    @model_validator(mode="after")
    def _in_order(self) -> PromptCost:
        low, high = self.factors
        if low > high:
            raise ValueError(f"factors: expected the smaller first, found [{low:g}, {high:g}]")
        return self


LENGTHS = ("max_total_tokens", "host_kv_tokens", "context_tokens")
"""Keys of topologies that are lengths to `PromptCost`."""
_LENGTHS_OF_REPLAY = ("max_input_tokens", "fit_input_tokens")
_LENGTH_STEP = 256


def _length(tokens: int, factor: float) -> int:
    """So many times the tokens, in steps that every engine's page divides."""
    return max(_LENGTH_STEP, _LENGTH_STEP * round(tokens * factor / _LENGTH_STEP))


def _scaled_keys(keys: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """Keys of a topology with their lengths multiplied, at any depth."""
    found: dict[str, Any] = {}
    for key, value in keys.items():
        if isinstance(value, Mapping):
            value = _scaled_keys(value, factor)
        elif key in LENGTHS and isinstance(value, int):
            value = _length(value, factor)
        found[key] = value
    return found


def _scaled_replay(replay: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """Settings of a replay with their lengths multiplied."""
    found = dict(replay)
    for key in _LENGTHS_OF_REPLAY:
        if found.get(key) is not None:
            found[key] = _length(found[key], factor)
    if found.get("length_scale") is not None:
        found["length_scale"] = round(found["length_scale"] * factor, 6)
    return found


class Simulate(_Table):
    """What simulated runs rest on where no topology says it (`deltaserve eval simulate`): the
    calibration by its packaged name or file, whether each round draws its constants from the error
    that it states, and the KV tokens of a worker, on its GPUs and in host memory. Measured runs do
    not read it."""

    calibration: str | None = None
    calibration_spread: bool = False
    kv_tokens: PositiveTokens | None = None
    host_kv_tokens: Tokens = 0


class Experiment(_Table):
    """The whole matrix: arms × loads × repeats on one trace."""

    name: Name
    description: str = ""
    seed: int = 0
    repeats: Repeats = 1
    baseline: Name | None = None
    output: str | None = None
    keep_workers: bool = Field(
        default=False,
        description="runs whose workers would be started alike share them, with empty caches",
    )
    budget_minutes: PositiveMinutes | None = None
    run_minutes: PositiveMinutes | None = Field(
        default=None, description="what a run is expected to take, until one has been measured"
    )
    trace: Trace
    set: dict[str, Any] = Field(default_factory=dict)
    replay: Replay = Field(default_factory=Replay)
    phases: Phases | None = None
    slo: Slo = Field(default_factory=Slo)
    validity: ValidityRules = Field(default_factory=ValidityRules)
    analysis: Analysis = Field(default_factory=Analysis)
    search: SearchBounds | None = None
    prompt_cost: PromptCost | None = None
    simulate: Simulate = Field(default_factory=Simulate)
    loads: list[Load] = Field(default_factory=list)
    arms: Annotated[list[Arm], Field(min_length=1)]

    @model_validator(mode="after")
    def _consistent(self) -> Experiment:
        for what, names in (
            ("arms", [arm.name for arm in self.arms]),
            ("loads", [load.name for load in self.loads]),
        ):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"{what}: the name {twice[0]!r} is used twice")
        drawn = any(getattr(self.trace, name) is not None for name in DRAWN_SOURCES)
        if "trace.seed" in self.analysis.vary and not drawn:
            raise ValueError(
                "analysis.vary: trace.seed changes nothing of this trace; add trace.sample, or "
                "vary replay.seed"
            )
        if self.baseline is not None and self.baseline not in [arm.name for arm in self.arms]:
            raise ValueError(f"baseline: no arm is named {self.baseline!r}")
        if self.search is not None and (self.loads or any(arm.loads for arm in self.arms)):
            raise ValueError("search: chooses the loads itself; take loads out")
        known = [load.name for load in self.loads]
        for arm in self.arms:
            for load in arm.loads or []:
                if load not in known:
                    raise ValueError(f"arms.{arm.name}.loads: no load is named {load!r}")
            for name in self.loads_of(arm):
                replay = self.replay_of(arm, name)
                self._check_search(arm, replay)
                self._check_prompt_cost(arm, replay)
        return self

    def _check_prompt_cost(self, arm: Arm, replay: Replay) -> None:
        """Refuses lengths that could not be multiplied by every factor that may be found."""
        if self.prompt_cost is None or replay.fit_input_tokens is not None:
            return
        most = self.prompt_cost.factor or self.prompt_cost.factors[1]
        scale = replay.length_scale
        if scale is None or scale * most > 1:
            raise ValueError(
                f"prompt_cost: {arm.name} has replay.length_scale {scale or 1:g}; expected at most "
                f"{1 / most:g}, since lengths may be multiplied by {most:g} and are never longer "
                "than the trace's"
            )

    def _check_search(self, arm: Arm, replay: Replay) -> None:
        """Refuses a search whose load the arm's replay does not read, for all levels would be
        alike, and one whose levels may run out of sessions: what is left then is another load."""
        if self.search is None:
            return
        mode = "closed" if self.search.whole else "sessions"
        if replay.mode_used != mode:
            raise ValueError(
                f'search: {self.search.over} is a load of mode = "{mode}", and {arm.name} is '
                f'replayed with "{replay.mode_used}"'
            )
        if not self.recycles(replay):
            raise ValueError(
                "search: set phases.recycle = true; a level that has no more sessions to send is "
                "not the load that it is called by"
            )

    def recycles(self, replay: Replay) -> bool:
        """Whether sessions are played again under these settings."""
        given = self.phases is not None and self.phases.recycle
        return given or replay.preset == "agentx"

    def with_draw(self, repeat: int) -> Experiment:
        """The experiment as round `repeat` (from 1) runs it: what `analysis.vary` names is drawn
        anew, the same for every arm."""
        shift = repeat - 1
        changed: dict[str, Any] = {}
        if "trace.seed" in self.analysis.vary:
            drawn = {
                name: part.model_copy(
                    update={"seed": (self.seed if part.seed is None else part.seed) + shift}
                )
                for name in DRAWN_SOURCES
                if (part := getattr(self.trace, name)) is not None
            }
            changed["trace"] = self.trace.model_copy(update=drawn)
        return self.model_copy(update=changed) if changed and shift else self

    def with_lengths_times(self, factor: float) -> Experiment:
        """The experiment with all lengths multiplied, as `prompt_cost` says."""
        replay = _scaled_replay(self.replay.model_dump(exclude_defaults=True), factor)
        loads, arms = (
            [
                part.model_copy(
                    update={
                        "replay": _scaled_replay(part.replay, factor),
                        "set": _scaled_keys(part.set, factor),
                    }
                )
                for part in parts
            ]
            for parts in (self.loads, self.arms)
        )
        return self.model_copy(
            update={
                "replay": Replay.model_validate(replay),
                "set": _scaled_keys(self.set, factor),
                "loads": loads,
                "arms": arms,
            }
        )

    def loads_of(self, arm: Arm) -> list[str | None]:
        """The names of the loads that `arm` runs under; one None where the file names no loads."""
        if arm.loads is not None:
            return list(arm.loads)
        return [load.name for load in self.loads] or [None]

    def load_named(self, name: str | None) -> Load | None:
        """The load of that name; None where the experiment has none."""
        return next((load for load in self.loads if load.name == name), None)

    def replay_of(self, arm: Arm, load: str | None) -> Replay:
        """The replay settings of `arm` under `load`: the file's, the load's, then the arm's."""
        merged: dict[str, Any] = self.replay.model_dump(exclude_defaults=True)
        known = self.load_named(load)
        merged |= known.replay if known is not None else {}
        merged |= arm.replay
        return Replay.model_validate(merged)

    @property
    def baseline_arm(self) -> str:
        """The arm that the others are compared with: the one named, else the first."""
        return self.baseline or self.arms[0].name
