"""One replay from a trace file to a run folder: processes, records, resumption and the summary.

Owns the run folder's `replay.json` and `requests.jsonl`. Must not know dialects or prompt contents.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import multiprocessing
import os
import platform
import resource
import signal
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import orjson
from numpy.typing import NDArray

import deltaserve
from deltaserve.errors import InputError
from replay.bodies import BodiesAhead
from replay.client import Client, ClientOptions
from replay.discovery import GUESSED_VOCAB_SIZE, find_engine, find_vocab_size
from replay.engines import Api
from replay.plan import Plan, Planned, PlannedRequests, make_plan
from replay.progress import Counters, Display
from replay.results import (
    REPLAY_FILE,
    RESULTS_FILE,
    Result,
    ResultWriter,
    drop_torn_line,
    iter_results,
)
from replay.schedule import Schedule, TreeQueue, Trees, precise_loop
from replay.trace import digest, read_trace

_REPORT_S = 0.5
_START_DELAY_S = 0.5
# About what sending a request, each token of its prompt, and receiving a token take of a core
# (`replay.bench`); from a third of a core on, requests begin to wait for each other.
_REQUEST_CPU_S = 0.4e-3
_INPUT_TOKEN_CPU_S = 6e-9
_OUTPUT_TOKEN_CPU_S = 15e-6
_BUSY_SHARE = 0.33
_BUSIEST_S = 10.0
_STREAMS_A_PROCESS = 500


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Arguments of a replay; times in seconds, lengths in tokens."""

    trace: Path
    url: str
    output: Path
    api: Literal["auto", "sglang", "openai", "chat"] = "auto"
    model: str | None = None
    mode: Literal["open", "closed"] = "open"
    max_inflight_sessions: int = 8
    time_scale: float = 1.0
    think_scale: float = 1.0
    max_think_s: float | None = None
    request_limit: int | None = None
    session_limit: int | None = None
    length_scale: float = 1.0
    max_input_tokens: int | None = None
    vocab_size: int | None = None
    seed: int = 0
    record_output_ids: bool = False
    splice_outputs: bool = False
    as_text: bool = False
    timeout_s: float = 600.0
    processes: int | None = None
    resume: bool = False


# What must not change when a run is resumed: with any of these different its results do not belong
# together.
_SAME_ON_RESUME = (
    "mode",
    "max_inflight_sessions",
    "time_scale",
    "think_scale",
    "max_think_s",
    "request_limit",
    "session_limit",
    "length_scale",
    "max_input_tokens",
    "vocab_size",
    "seed",
    "splice_outputs",
    "as_text",
)


def run(options: RunOptions, quiet: bool = False) -> dict[str, Any]:
    """Replays a trace; returns the summary of all results in the run folder."""
    _check(options)
    plan = make_plan(
        read_trace(options.trace),
        request_limit=options.request_limit,
        session_limit=options.session_limit,
        length_scale=options.length_scale,
        max_input_tokens=options.max_input_tokens,
    )
    if not plan.requests:
        raise InputError(f"{options.trace}: no request left to send; see --max-input-tokens")
    found_api, found_model = find_engine(options.url)
    api: Api = found_api if options.api == "auto" else options.api
    model = options.model or found_model
    vocab_size = options.vocab_size or _served_vocab_size(options, api)
    processes = options.processes or default_processes(plan.requests, options, os.cpu_count() or 1)
    options = replace(options, vocab_size=vocab_size, processes=processes)
    record, left = _open_folder(options, plan)
    record["engine"] = {"api": api, "model": model}
    origin_s = record["clock"]["monotonic_origin_s"]
    _write_json(options.output / REPLAY_FILE, record)
    interrupted = False
    if left.any():
        first_s = plan.requests.trace_s[int(left.argmax())]
        job = _Job(
            plan,
            left,
            options,
            ClientOptions(
                url=options.url,
                api=api,
                model=model,
                vocab_size=vocab_size,
                seed=options.seed,
                timeout_s=options.timeout_s,
                record_output_ids=options.record_output_ids,
                splice_outputs=options.splice_outputs,
                as_text=options.as_text,
            ),
            processes,
            origin_s,
            shift_s=_shift_s(first_s, record, options.time_scale),
        )
        with Display(int(left.sum()), quiet) as display:
            interrupted = _run_job(job, display)
    summary = summarise(iter_results(options.output), len(plan.requests))
    summary["interrupted"] = interrupted
    record["summary"] = summary
    _write_json(options.output / REPLAY_FILE, record)
    return summary


def _check(options: RunOptions) -> None:
    for name, least in (
        ("max_inflight_sessions", 1),
        ("processes", 1),
        ("vocab_size", 2),
        ("request_limit", 1),
        ("session_limit", 1),
        ("max_input_tokens", 1),
    ):
        value = getattr(options, name)
        if value is not None and value < least:
            raise InputError(f"--{name.replace('_', '-')} {value}: expected at least {least}")
    for name in ("time_scale", "timeout_s"):
        if getattr(options, name) <= 0:
            raise InputError(
                f"--{name.replace('_', '-')} {getattr(options, name)}: expected more than 0"
            )
    if options.think_scale < 0:
        raise InputError(f"--think-scale {options.think_scale}: expected 0 or more")
    if options.splice_outputs and (options.processes or 1) > 1:
        raise InputError(
            "--splice-outputs: expected --processes 1 (one process knows the spliced blocks)"
        )
    if options.splice_outputs and (options.as_text or options.api == "chat"):
        raise InputError("--splice-outputs: expected token ids; drop --text, or --api chat")
    if options.mode == "closed" and (options.processes or 1) > options.max_inflight_sessions:
        raise InputError(
            f"--processes {options.processes}: expected at most --max-inflight-sessions "
            f"{options.max_inflight_sessions}"
        )
    if not options.url.startswith(("http://", "https://")):
        raise InputError(f"--url {options.url}: expected http://HOST:PORT")


def _served_vocab_size(options: RunOptions, api: Api) -> int:
    """The served model's vocabulary; where the server does not say it, a guess, with a warning."""
    if options.as_text or api == "chat":
        return GUESSED_VOCAB_SIZE  # words are drawn from fewer
    found = find_vocab_size(options.url)
    if found is None:
        print(
            f"warning: {options.url} does not say how large its model's vocabulary is; token ids "
            f"are below {GUESSED_VOCAB_SIZE:,} (--vocab-size)",
            file=sys.stderr,
        )
    return found or GUESSED_VOCAB_SIZE


def default_processes(requests: PlannedRequests, options: RunOptions, cores: int) -> int:
    """As many processes as keep each one's load at its busiest within what leaves it punctual, and
    at most half the cores, for each has another beside it that makes bodies."""
    if options.splice_outputs:
        return 1
    if options.mode == "closed":
        needed = options.max_inflight_sessions / _STREAMS_A_PROCESS
    else:
        busy_s = (
            _REQUEST_CPU_S
            + _INPUT_TOKEN_CPU_S * np.array(requests.input_length)
            + _OUTPUT_TOKEN_CPU_S * np.array(requests.output_length)
        )
        at_s = np.array(requests.trace_s) / options.time_scale
        spans = ((at_s - at_s[0]) / _BUSIEST_S).astype(np.int64)
        needed = np.bincount(spans, weights=busy_s).max() / _BUSIEST_S / _BUSY_SHARE
    return max(1, min(math.ceil(needed), cores // 2))


def _open_folder(options: RunOptions, plan: Plan) -> tuple[dict[str, Any], NDArray[np.bool_]]:
    """The run's record, and which requests are left to send (when resumed: not all). The run's
    clock starts soon after this returns."""
    left = np.ones(len(plan.requests), dtype=np.bool_)
    results = options.output / RESULTS_FILE
    record: dict[str, Any] = {
        "arguments": {
            key: str(value) if isinstance(value, Path) else value
            for key, value in asdict(options).items()
            if key != "resume"
        },
        "trace": {"path": str(options.trace.resolve()), "sha256": digest(options.trace)},
        "plan": plan.describe(),
        "versions": {
            "deltaserve": deltaserve.__version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
        },
        "resumed_at_s": [],
    }
    if not results.exists():
        try:
            options.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--output {options.output}: {error.strerror}") from None
        record["clock"] = {
            "monotonic_origin_s": time.monotonic() + _START_DELAY_S,
            "unix_origin_s": time.time() + _START_DELAY_S,
        }
        return record, left
    if not options.resume:
        raise InputError(f"{results}: holds results already; expected a new folder, or --resume")
    unix_origin_s, resumed_at_s = _clock_to_resume(options.output / REPLAY_FILE, record)
    drop_torn_line(results)
    answered = {result.request_id for result in iter_results(results) if result.error is None}
    for index, request_id in enumerate(plan.requests.request_ids()):
        left[index] = request_id not in answered
    # The unix clock survives a reboot, the monotonic one does not.
    offset_s = time.time() - unix_origin_s
    record["clock"] = {
        "monotonic_origin_s": time.monotonic() - offset_s,
        "unix_origin_s": unix_origin_s,
    }
    record["resumed_at_s"] = [*resumed_at_s, offset_s]
    return record, left


def _clock_to_resume(record_file: Path, record: dict[str, Any]) -> tuple[float, list[float]]:
    """When the run of a record began and was resumed; that run must be the one of `record`."""
    try:
        before = orjson.loads(record_file.read_bytes())
        for name in _SAME_ON_RESUME:
            if before["arguments"][name] != record["arguments"][name]:
                raise InputError(
                    f"--{name.replace('_', '-')} {record['arguments'][name]}: expected "
                    f"{before['arguments'][name]}, as in {record_file}"
                )
        if before["trace"]["sha256"] != record["trace"]["sha256"]:
            raise InputError(f"{record['trace']['path']}: expected the trace of {record_file}")
        return before["clock"]["unix_origin_s"], before["resumed_at_s"]
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError):
        raise InputError(f"{record_file}: expected the record of the run to resume") from None


def _shift_s(first_s: float, record: dict[str, Any], time_scale: float) -> float:
    """Trace time that a resumed open loop skips, so that its first request is due soon."""
    if not record["resumed_at_s"]:
        return 0.0
    return float(first_s - (record["resumed_at_s"][-1] + _START_DELAY_S) * time_scale)


@dataclass(slots=True)
class _Job:
    plan: Plan
    left: NDArray[np.bool_]
    options: RunOptions
    client: ClientOptions
    processes: int
    origin_s: float
    shift_s: float


def _run_job(job: _Job, display: Display) -> bool:
    """Runs the job in one or several processes; true when it was stopped from outside."""
    count = job.processes
    if count == 1:
        return _run_share(job, 0, TreeQueue(range(job.plan.trees)), display.add)
    context = multiprocessing.get_context("fork")
    counter = context.Value("q", 0)
    children = []
    pipes: list[Connection] = []
    for number in range(count):
        ours, theirs = context.Pipe(duplex=False)
        pipes.append(ours)
        trees = _SharedTrees(counter, job.plan.trees)
        child = context.Process(target=_child, args=(job, number, trees, theirs, pipes))
        child.start()
        theirs.close()
        children.append(child)
    interrupted = False
    with _stopped_by_signal():
        while pipes:
            try:
                for pipe in wait(pipes):
                    assert isinstance(pipe, Connection)
                    try:
                        display.add(pipe.recv())
                    except EOFError:
                        pipes.remove(pipe)
            except KeyboardInterrupt:
                # A terminal signals the children too, others may not; their last results follow.
                interrupted = True
                for child in children:
                    if child.is_alive():
                        child.terminate()
        for child in children:
            child.join()
    failed = [child.exitcode for child in children if child.exitcode not in (0, 130)]
    if failed and not interrupted:
        raise RuntimeError(f"a replay process ended with status {failed[0]}")
    return interrupted or any(child.exitcode == 130 for child in children)


class _Counter(Protocol):
    value: int

    def get_lock(self) -> Any: ...


class _SharedTrees:
    """The next conversation, counted across processes."""

    def __init__(self, counter: Any, trees: int) -> None:
        self._counter: _Counter = counter
        self._trees = trees

    def take(self) -> int | None:
        with self._counter.get_lock():
            if self._counter.value >= self._trees:
                return None
            self._counter.value += 1
            return self._counter.value - 1


@contextlib.contextmanager
def _stopped_by_signal() -> Iterator[None]:
    """Makes a KeyboardInterrupt of SIGTERM, and of SIGINT also where a shell had it ignored."""
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.default_int_handler) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


def _child(
    job: _Job, number: int, trees: Trees, pipe: Connection, inherited: list[Connection]
) -> None:
    # While any process holds the reading end of a pipe, its writer does not see the parent's end.
    for other in inherited:
        other.close()
    with contextlib.suppress(KeyboardInterrupt):
        if not _run_share(job, number, trees, pipe.send):
            return
    raise SystemExit(130)


def _run_share(job: _Job, number: int, trees: Trees, report: Callable[[Counters], None]) -> bool:
    """One process's share of a job; true when it was stopped from outside."""
    _allow_many_sockets()
    with (
        contextlib.closing(BodiesAhead(job.client, job.plan.requests)) as bodies,
        asyncio.Runner(loop_factory=precise_loop) as runner,
    ):
        return runner.run(_work(job, number, trees, report, bodies))


async def _work(
    job: _Job,
    number: int,
    trees: Trees,
    report: Callable[[Counters], None],
    bodies: BodiesAhead,
) -> bool:
    options = job.options
    counters = Counters()
    writer = ResultWriter(options.output / RESULTS_FILE)
    bodies.open()

    def clock() -> float:
        return time.monotonic() - job.origin_s

    def on_result(result: Result) -> None:
        writer.write(result)
        counters.done += 1
        counters.errors += result.error is not None

    async def send(request: Planned, scheduled_s: float) -> None:
        counters.sent += 1
        counters.lateness_s.add(clock() - scheduled_s)
        await client.send(request, scheduled_s)

    async def report_often() -> None:
        while True:
            await asyncio.sleep(_REPORT_S)
            flush()

    def flush() -> None:
        nonlocal counters
        full, counters = counters, Counters()
        report(full)

    mine = job.left
    if options.mode == "open" and job.processes > 1:
        mine = mine & (np.array(job.plan.requests.tree) % job.processes == number)
    client = Client(job.client, clock, on_result, lambda s: counters.ttft_s.add(s), bodies)
    with contextlib.closing(client):
        schedule = Schedule(
            job.plan.requests,
            send,
            clock,
            mine=mine,
            prepare=bodies.ask,
            time_scale=options.time_scale,
        )
        if options.mode == "open":
            loop = schedule.open_loop(job.shift_s)
        else:
            slots = len(range(number, options.max_inflight_sessions, job.processes))
            loop = schedule.closed_loop(
                trees,
                slots,
                think_scale=options.think_scale / options.time_scale,
                max_think_s=options.max_think_s,
            )
            await asyncio.sleep(max(0.0, -clock()))
        task = asyncio.create_task(loop)

        def stop() -> None:
            # Once: a second cancellation would cut short what the first one began.
            if not task.cancelling():
                task.cancel()

        reporter = asyncio.create_task(report_often())
        # A reporter that fails has lost its reader: the parent is gone, and this process follows.
        reporter.add_done_callback(lambda _: stop())
        for name in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(name, stop)
        # A full collection stops everything for tens of milliseconds, and finds next to nothing:
        # only a connection that was broken off leaves cycles behind.
        gc.freeze()
        gc.disable()
        try:
            await task
        except asyncio.CancelledError:
            return True
        finally:
            gc.enable()
            gc.unfreeze()
            reporter.cancel()
            with contextlib.suppress(OSError):
                flush()
            writer.close()
    return False


def _allow_many_sockets() -> None:
    """Lifts the number of open files from the usual 1,024 to what the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def summarise(results: Iterable[Result], planned: int) -> dict[str, Any]:
    """Counts, latencies (p50, p90, p99, in seconds) and the engine's cached share over a run's
    results, of which the last of each request counts."""
    last: dict[str, int] = {}
    errors: dict[int, str] = {}
    rows = array("d")
    for result in results:
        row = last.setdefault(result.request_id, len(last))
        errors.pop(row, None)
        if result.error:
            errors[row] = result.error.kind
        values = array("d", [math.nan if v is None else v for v in _summary_row(result)])
        rows[row * len(values) : (row + 1) * len(values)] = values
    values_by_column = np.array(rows).reshape(len(last), len(_SUMMARY_COLUMNS)).T
    columns = dict(zip(_SUMMARY_COLUMNS, values_by_column, strict=True))
    good = np.ones(len(last), dtype=np.bool_)
    good[list(errors)] = False
    counted = good & (columns["prompt_tokens"] > 0) & ~np.isnan(columns["cached_tokens"])
    prompt_tokens = columns["prompt_tokens"][counted].sum()
    return {
        "planned": planned,
        "finished": len(last),
        "ok": int(good.sum()),
        "errors": dict(Counter(errors.values())),
        "duration_s": _most(columns["finished_s"]) + _most(-columns["sent_s"]),
        "input_tokens": int(columns["input_tokens"][good].sum()),
        "output_tokens": int(columns["output_tokens"][good].sum()),
        "cached_share": float(columns["cached_tokens"][counted].sum() / prompt_tokens)
        if prompt_tokens
        else None,
        "ttft_s": _percentiles(columns["ttft_s"][good]),
        "tpot_s": _percentiles(columns["tpot_s"][good]),
        "e2e_s": _percentiles(columns["e2e_s"][good]),
        "lateness_s": _percentiles(columns["lateness_s"]),
    }


_SUMMARY_COLUMNS = (
    *("input_tokens", "output_tokens", "prompt_tokens", "cached_tokens", "sent_s", "finished_s"),
    *("ttft_s", "tpot_s", "e2e_s", "lateness_s"),
)


def _summary_row(result: Result) -> tuple[float | None, ...]:
    """A result's values for `_SUMMARY_COLUMNS`."""
    return (
        result.input_length,
        result.output_tokens,
        result.prompt_tokens,
        result.cached_tokens,
        result.sent_s,
        result.finished_s,
        result.ttft_s(),
        result.tpot_s(),
        (result.finished_s or 0.0) - (result.scheduled_s or 0.0),
        result.lateness_s(),
    )


def _most(values: NDArray[np.float64]) -> float:
    known = values[~np.isnan(values)]
    return float(known.max()) if len(known) else 0.0


def _percentiles(values: NDArray[np.float64]) -> dict[str, float] | None:
    known = values[~np.isnan(values)]
    if not len(known):
        return None
    p50, p90, p99 = np.percentile(known, [50, 90, 99])
    return {"p50": float(p50), "p90": float(p90), "p99": float(p99)}


def _write_json(path: Path, record: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(orjson.dumps(record, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    part.replace(path)
