"""The trace of an experiment: made or found once, and what it makes possible.

Owns which requests a run will send and how much of each an infinite cache could reuse. Traces are
made by the `deltaserve replay` command line, as a person would make them.
"""

from __future__ import annotations

import hashlib
import math
import random
import subprocess
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import orjson

from deltaserve.child import DELTASERVE
from deltaserve.errors import InputError
from eval.experiment import Excerpt, Experiment, Prefixes, Replay, Scalar, Trace, Turns
from eval.records import TraceFacts
from replay.files import write_file
from replay.plan import Plan, make_plan
from replay.plays import in_the_plan
from replay.results import Result
from replay.trace import Request, digest, read_trace, write_trace

Made = TypeVar("Made", Prefixes, Turns)
"""What a trace is made of."""


def prepare_trace(experiment: Experiment, output: Path) -> Path:
    """The experiment's trace file, made under `output`/trace where the file does not exist yet.

    Raises `InputError` where the trace is missing or cannot be made.
    """
    steps = _steps(experiment, output)
    for path, make in steps:
        if make is None:
            if not path.is_file():
                raise InputError(
                    f"trace.path: {path}: no such file; deltaserve replay convert makes one of "
                    "recorded sessions, deltaserve replay synth one of a profile"
                )
        elif not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_name(f"partial-{path.name}")
            make(unfinished)
            unfinished.replace(path)
    return steps[-1][0]


def planned_trace(experiment: Experiment, output: Path) -> Path:
    """Where `prepare_trace` will have the trace; makes nothing."""
    return _steps(experiment, output)[-1][0]


def missing_source(experiment: Experiment) -> str | None:
    """The experiment's own trace file, where it names one that is not there."""
    path = experiment.trace.path
    return path if path is not None and not Path(path).is_file() else None


def _steps(
    experiment: Experiment, output: Path
) -> list[tuple[Path, Callable[[Path], object] | None]]:
    """The files from the source to the trace that is replayed, each with what makes it."""
    trace, seed = experiment.trace, experiment.seed
    folder = output / "trace"
    make: Callable[[Path], object] | None
    if trace.path is not None:
        source, make = Path(trace.path), None
    elif trace.prefixes is not None:
        prefixes = _seeded(trace.prefixes, seed)
        source = folder / f"prefixes-{_digest(prefixes.model_dump())}.jsonl.zst"
        make = partial(_write, lambda: prefixed_requests(prefixes))
    elif trace.turns is not None:
        turns = _seeded(trace.turns, seed)
        source = folder / f"turns-{_digest(turns.model_dump())}.jsonl.zst"
        make = partial(_write, lambda: alike_turns(turns))
    else:
        source = folder / f"{_source_digest(trace, seed)}.jsonl.zst"
        make = partial(_make, _source_command(trace, seed))
    steps: list[tuple[Path, Callable[[Path], object] | None]] = [(source, make)]
    if trace.sample is not None:
        settings = trace.sample.model_dump(exclude_none=True)
        settings.setdefault("seed", seed)
        command = ["replay", "sample", str(source), *flags(settings)]
        source = folder / f"sample-{_digest(str(source), settings)}.jsonl.zst"
        steps.append((source, partial(_make, command)))
    if trace.excerpt is not None:
        whole, excerpt = source, trace.excerpt
        source = folder / f"excerpt-{_digest(str(whole), excerpt.model_dump())}.jsonl.zst"
        steps.append((source, partial(_write, lambda: take_excerpt(whole, excerpt))))
    return steps


def _seeded(shape: Made, seed: int) -> Made:
    """With the experiment's seed, where it has none of its own."""
    return shape if shape.seed is not None else shape.model_copy(update={"seed": seed})


def _write(requests: Callable[[], Iterator[Request]], output: Path) -> None:
    write_trace(output, requests())


def prefixed_requests(shape: Prefixes) -> Iterator[Request]:
    """Single prompts, each one of `prefixes` shared beginnings (each as often, in random order)
    and a suffix of its own; arrivals at a steady rate, for open loops."""
    rng = random.Random(shape.seed)
    chosen = [number % shape.prefixes for number in range(shape.requests)]
    rng.shuffle(chosen)
    shared = shape.prefix_tokens // shape.block_size
    own = -(-shape.suffix_tokens // shape.block_size)
    for number, prefix in enumerate(chosen):
        first_own = shape.prefixes * shared + number * own
        yield Request(
            request_id=f"r{number}",
            session_id=f"s{number}",
            turn=0,
            timestamp_s=number / shape.rate,
            input_length=shape.prefix_tokens + shape.suffix_tokens,
            output_length=shape.output_tokens,
            block_size=shape.block_size,
            hash_ids=[
                *range(prefix * shared, (prefix + 1) * shared),
                *range(first_own, first_own + own),
            ],
        )


def alike_turns(shape: Turns) -> Iterator[Request]:
    """Sessions of alike turns, all of which begin at 0; session by session, for closed loops. A
    prompt is the one before it, its answer and `new_tokens` more, in whole blocks."""
    rng = random.Random(shape.seed)
    blocks_a_turn = (shape.new_tokens + shape.output_tokens) // shape.block_size
    for session in range(shape.sessions):
        first_block = session * shape.turns * blocks_a_turn
        for turn in range(shape.turns):
            length = (turn + 1) * shape.new_tokens + turn * shape.output_tokens
            think_s = rng.expovariate(1 / shape.think_s) if shape.think_s and turn else 0.0
            yield Request(
                request_id=f"s{session}:{turn}",
                session_id=f"s{session}",
                turn=turn,
                timestamp_s=0.0,
                input_length=length,
                output_length=shape.output_tokens,
                block_size=shape.block_size,
                hash_ids=[*range(first_block, first_block + length // shape.block_size)],
                think_time_s=think_s if turn else None,
            )


def take_excerpt(trace: Path, excerpt: Excerpt) -> Iterator[Request]:
    """The first `turns` requests of each session, of as many sessions, in order of arrival, as hold
    `requests` of them; a request that waits for one left out is left out too."""
    kept: dict[str, list[str]] = {}
    names: set[str] = set()
    for request in read_trace(trace):
        parent = request.parent_request_id
        taken = kept.setdefault(request.session_id, [])
        whole = len(taken) == request.turn < excerpt.turns
        if whole and (parent is None or parent in names):
            taken.append(request.request_id)
            names.add(request.request_id)
    wanted: set[str] = set()
    for requests in kept.values():
        if len(wanted) >= excerpt.requests:
            break
        wanted.update(requests)
    sent: set[str] = set()
    for request in read_trace(trace):
        parent = request.parent_request_id
        if request.request_id in wanted and (parent is None or parent in sent):
            sent.add(request.request_id)
            yield request


def flags(settings: Mapping[str, Scalar | list[float]]) -> list[str]:
    """Settings as long options: `time_scale=2.0` → `--time-scale 2.0`, True → the bare flag, a list
    → the option with each of its values."""
    words: list[str] = []
    for name, value in settings.items():
        option = "--" + name.replace("_", "-")
        if value is True:
            words.append(option)
        elif isinstance(value, list):
            words += [option, *map(str, value)]
        elif value is not False:
            words += [option, str(value)]
    return words


@lru_cache(maxsize=32)
def resolve_scale(trace: Path, replay: Replay) -> Replay:
    """`replay` with `fit_input_tokens` turned into the explicit `length_scale` that does it.

    The factor is rounded down to three digits, and never enlarges a trace.
    """
    if replay.fit_input_tokens is None:
        return replay
    plan = make_replay_plan(trace, replay)
    longest = max((request.input_length for request in plan.requests), default=0)
    scale = None
    while longest > replay.fit_input_tokens:
        # Again where whole tokens a block made the plan longer than the factor asked for.
        scale = _three_digits_down((scale or 1.0) * replay.fit_input_tokens / longest)
        shrunk = make_replay_plan(trace, replay.model_copy(update={"length_scale": scale}))
        longest = max(request.input_length for request in shrunk.requests)
    return replay.model_copy(update={"length_scale": scale, "fit_input_tokens": None})


def _three_digits_down(value: float) -> float:
    step = 10.0 ** (math.floor(math.log10(value)) - 2)
    return round(math.floor(value / step) * step, 12)


class Selection(NamedTuple):
    """What of a run's settings decides which requests it sends; runs that differ in anything else
    (seed, sessions in flight, think times) share a plan and its facts."""

    request_limit: int | None
    session_limit: int | None
    length_scale: float
    max_input_tokens: int | None


def selection(replay: Replay) -> Selection:
    """What these settings select of a trace."""
    return Selection(
        replay.request_limit,
        replay.session_limit,
        replay.length_scale or 1.0,
        replay.max_input_tokens,
    )


def trace_facts(trace: Path, replay: Replay) -> TraceFacts:
    """The requests that a run sends, with the tokens of the longest prefix seen before (arrival
    order, infinite cache), in the run's own lengths."""
    return _facts(trace, selection(replay))


@lru_cache(maxsize=32)
def _facts(trace: Path, selected: Selection) -> TraceFacts:
    plan = plan_of(trace, selected)
    if not plan.requests:
        raise InputError(f"{trace}: no request is left to replay")
    seen: set[int] = set()
    best: dict[str, int] = {}
    last: dict[str, str] = {}
    for request in plan.requests:
        last[request.session_id] = request.request_id
        blocks = request.hash_ids.tolist()
        shared = next((i for i, block in enumerate(blocks) if block not in seen), len(blocks))
        best[request.request_id] = min(shared * request.block_size, request.input_length)
        seen.update(blocks)
    factors = [scale.effective for scale in plan.scales.values()]
    return TraceFacts(
        path=str(trace),
        sha256=digest(trace),
        length_scale=sum(factors) / len(factors),
        best_cached_tokens=best,
        last_requests=last,
    )


def conversations(trace: Path, replay: Replay) -> int:
    """How many conversations a run with these settings has to send, sub-agents with their session:
    more are never in flight, unless they are played again."""
    return _conversations(trace, selection(resolve_scale(trace, replay)))


# Of all runs before the first begins, while `plan_of` keeps one plan.
@lru_cache(maxsize=32)
def _conversations(trace: Path, selected: Selection) -> int:
    return plan_of(trace, selected).trees


def make_replay_plan(trace: Path, replay: Replay) -> Plan:
    """The requests that a run with these settings sends."""
    return plan_of(trace, selection(replay))


# One: all runs of an experiment send the same requests, and a large trace takes a while to read.
@lru_cache(maxsize=1)
def plan_of(trace: Path, selected: Selection) -> Plan:
    """The requests that a run sends which selects these of the trace."""
    return make_plan(read_trace(trace), **selected._asdict(), source=trace)


def possible_cached_tokens(
    trace: Path, replay: Replay, results: Sequence[Result]
) -> dict[str, int]:
    """For each request with a first token, the longest prefix that any other request of the run had
    which was sent before that token came, those that prime caches among them. On a fleet that was
    cold no request finds more in a cache."""
    plan = {request.request_id: request for request in make_replay_plan(trace, replay).requests}
    named = [(in_the_plan(result.request_id, result.play), result) for result in results]
    known = [(plan[name], result) for name, result in named if name in plan]
    sent = [(r.sent_s, r.play, p.hash_ids) for p, r in known if r.sent_s is not None]
    sending = sorted(sent, key=itemgetter(0))
    # Each play has prompts of its own.
    seen: defaultdict[int, Counter[int]] = defaultdict(Counter)
    found: dict[str, int] = {}
    begun = 0
    answered = [(r.first_token_s, p, r) for p, r in known if r.first_token_s is not None]
    for at_s, request, result in sorted(answered, key=itemgetter(0)):
        while begun < len(sending) and sending[begun][0] < at_s:
            _, play, hash_ids = sending[begun]
            seen[play].update(hash_ids.tolist())
            begun += 1
        blocks = request.hash_ids.tolist()
        # Its own blocks are counted once.
        times = seen[result.play]
        shared = next((i for i, block in enumerate(blocks) if times[block] < 2), len(blocks))
        found[result.request_id] = min(shared * request.block_size, request.input_length)
    return found


def write_facts(folder: Path, facts: TraceFacts) -> None:
    """Writes `trace.json`, which the report reads instead of the trace; in one step, for the
    report cannot read half of it."""
    write_file(
        folder / "trace.json",
        orjson.dumps(
            {
                "path": facts.path,
                "sha256": facts.sha256,
                "length_scale": facts.length_scale,
                "requests": facts.planned,
                "best_cached_tokens": facts.best_cached_tokens,
                "possible_cached_tokens": facts.possible_cached_tokens,
                "last_requests": facts.last_requests,
            }
        ),
    )


def _digest(*content: Any) -> str:
    data = orjson.dumps(content, option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(data).hexdigest()[:12]


def _source_digest(trace: Trace, seed: int) -> str:
    content = trace.model_dump(include={"synth", "convert"}) | {"experiment_seed": seed}
    kind = "synth" if trace.synth is not None else "convert"
    return f"{kind}-{_digest(content)}"


def _source_command(trace: Trace, seed: int) -> list[str]:
    if trace.synth is not None:
        settings: dict[str, Scalar] = trace.synth.model_dump(exclude={"options"}, exclude_none=True)
        duration_s = settings.pop("duration_s", None)
        if duration_s is not None:
            settings["duration"] = duration_s
        settings.setdefault("seed", seed)
        return ["replay", "synth", *flags(settings | trace.synth.options)]
    assert trace.convert is not None
    return [
        "replay",
        "convert",
        "--format",
        trace.convert.format,
        *trace.convert.inputs,
        *flags(trace.convert.options),
    ]


def _make(arguments: list[str], output: Path) -> None:
    command = [*DELTASERVE, *arguments, "--output", str(output)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        lines = [line for line in result.stderr.strip().splitlines() if line.strip()]
        reason = lines[-1].removeprefix("error: ") if lines else f"exit {result.returncode}"
        raise InputError(f"trace: deltaserve {' '.join(arguments)}: {reason}")
