"""One replay from a trace file to a run folder: processes, records, resumption and the summary.

Owns the run folder's `replay.json` and `requests.jsonl`. Must not know dialects or prompt contents.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import platform
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import orjson

import deltaserve
from deltaserve.errors import InputError
from replay.client import Client, ClientOptions, find_engine
from replay.engines import Api
from replay.plan import Plan, Planned, make_plan
from replay.progress import Counters, Display
from replay.results import (
    REPLAY_FILE,
    RESULTS_FILE,
    Result,
    ResultWriter,
    drop_torn_line,
    read_results,
)
from replay.schedule import Schedule, TreeQueue, Trees
from replay.trace import digest, read_trace

_REPORT_S = 0.5
_START_DELAY_S = 0.5


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
    vocab_size: int = 32_000
    seed: int = 0
    record_output_ids: bool = False
    splice_outputs: bool = False
    as_text: bool = False
    timeout_s: float = 600.0
    processes: int = 1
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
    record, done = _open_folder(options, plan)
    record["engine"] = {"api": api, "model": model}
    origin_s = record["clock"]["monotonic_origin_s"]
    _write_json(options.output / REPLAY_FILE, record)
    left = [request for request in plan.requests if request.index not in done]
    interrupted = False
    if left:
        job = _Job(
            plan,
            done,
            options,
            ClientOptions(
                url=options.url,
                api=api,
                model=model,
                vocab_size=options.vocab_size,
                seed=options.seed,
                timeout_s=options.timeout_s,
                record_output_ids=options.record_output_ids,
                splice_outputs=options.splice_outputs,
                as_text=options.as_text,
            ),
            origin_s,
            shift_s=_shift_s(left, record, options.time_scale),
        )
        with Display(len(left), quiet) as display:
            interrupted = _run_job(job, display)
    summary = summarise(read_results(options.output), len(plan.requests))
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
    if options.splice_outputs and options.processes > 1:
        raise InputError(
            "--splice-outputs: expected --processes 1 (one process knows the spliced blocks)"
        )
    if options.splice_outputs and (options.as_text or options.api == "chat"):
        raise InputError("--splice-outputs: expected token ids; drop --text, or --api chat")
    if options.mode == "closed" and options.processes > options.max_inflight_sessions:
        raise InputError(
            f"--processes {options.processes}: expected at most --max-inflight-sessions "
            f"{options.max_inflight_sessions}"
        )
    if not options.url.startswith(("http://", "https://")):
        raise InputError(f"--url {options.url}: expected http://HOST:PORT")


def _open_folder(options: RunOptions, plan: Plan) -> tuple[dict[str, Any], frozenset[int]]:
    """The run's record, and which requests a resumed run has already answered."""
    results = options.output / RESULTS_FILE
    record_file = options.output / REPLAY_FILE
    trace_digest = digest(options.trace)
    arguments = {
        key: str(value) if isinstance(value, Path) else value
        for key, value in asdict(options).items()
        if key != "resume"
    }
    unix_s, monotonic_s = time.time(), time.monotonic()
    start_s = monotonic_s + (_START_DELAY_S if options.processes > 1 else 0.0)
    record: dict[str, Any] = {
        "arguments": arguments,
        "trace": {"path": str(options.trace.resolve()), "sha256": trace_digest},
        "plan": plan.describe(),
        "clock": {
            "monotonic_origin_s": start_s,
            "unix_origin_s": unix_s + (start_s - monotonic_s),
        },
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
        return record, frozenset()
    if not options.resume:
        raise InputError(f"{results}: holds results already; expected a new folder, or --resume")
    drop_torn_line(results)
    try:
        before = orjson.loads(record_file.read_bytes())
        for name in _SAME_ON_RESUME:
            if before["arguments"][name] != arguments[name]:
                raise InputError(
                    f"--{name.replace('_', '-')} {arguments[name]}: expected "
                    f"{before['arguments'][name]}, as in {record_file}"
                )
        if before["trace"]["sha256"] != trace_digest:
            raise InputError(f"{options.trace}: expected the trace of {record_file}")
        # The unix clock survives a reboot, the monotonic one does not.
        offset_s = unix_s - before["clock"]["unix_origin_s"]
        resumed = [*before["resumed_at_s"], offset_s]
        unix_origin_s = before["clock"]["unix_origin_s"]
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError):
        raise InputError(f"{record_file}: expected the record of the run to resume") from None
    record["clock"] = {
        "monotonic_origin_s": monotonic_s - offset_s,
        "unix_origin_s": unix_origin_s,
    }
    record["resumed_at_s"] = resumed
    answered = {result.request_id for result in read_results(results) if result.error is None}
    return record, frozenset(
        request.index for request in plan.requests if request.request_id in answered
    )


def _shift_s(left: list[Planned], record: dict[str, Any], time_scale: float) -> float:
    """Trace time that a resumed open loop skips, so that its first request is due now."""
    if not record["resumed_at_s"]:
        return 0.0
    return float(left[0].trace_s - record["resumed_at_s"][-1] * time_scale)


@dataclass(slots=True)
class _Job:
    plan: Plan
    done: frozenset[int]
    options: RunOptions
    client: ClientOptions
    origin_s: float
    shift_s: float


def _run_job(job: _Job, display: Display) -> bool:
    """Runs the job in one or several processes; true when it was stopped from outside."""
    count = job.options.processes
    if count == 1:
        trees = TreeQueue(range(job.plan.trees))
        return asyncio.run(_work(job, 0, trees, display.add))
    context = multiprocessing.get_context("fork")
    counter = context.Value("q", 0)
    children = []
    pipes: list[Connection] = []
    for number in range(count):
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(
            target=_child, args=(job, number, _SharedTrees(counter, job.plan.trees), theirs)
        )
        child.start()
        theirs.close()
        children.append(child)
        pipes.append(ours)
    interrupted = False
    open_pipes = list(pipes)
    while open_pipes:
        try:
            for pipe in wait(open_pipes):
                assert isinstance(pipe, Connection)
                try:
                    display.add(pipe.recv())
                except EOFError:
                    open_pipes.remove(pipe)
        except KeyboardInterrupt:
            interrupted = True  # the children got the signal too; their last results are on the way
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


def _child(job: _Job, number: int, trees: Trees, pipe: Connection) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        if not asyncio.run(_work(job, number, trees, pipe.send)):
            return
    raise SystemExit(130)


async def _work(job: _Job, number: int, trees: Trees, report: Callable[[Counters], None]) -> bool:
    """One process's share of a job; true when it was stopped from outside."""
    options = job.options
    _allow_many_sockets()
    counters = Counters()
    writer = ResultWriter(options.output / RESULTS_FILE)

    def clock() -> float:
        return time.monotonic() - job.origin_s

    def on_result(result: Result) -> None:
        writer.write(result)
        counters.done += 1
        counters.errors += result.error is not None

    async def send(request: Planned, scheduled_s: float) -> None:
        counters.sent += 1
        counters.lateness_s.append(clock() - scheduled_s)
        await client.send(request, scheduled_s)

    async def report_often() -> None:
        while True:
            await asyncio.sleep(_REPORT_S)
            flush()

    def flush() -> None:
        nonlocal counters
        full, counters = counters, Counters()
        report(full)

    mine = job.plan.requests
    if options.mode == "open" and options.processes > 1:
        mine = [request for request in mine if request.tree % options.processes == number]
    client = Client(job.client, clock, on_result, lambda ttft_s: counters.ttft_s.append(ttft_s))
    with contextlib.closing(client):
        schedule = Schedule(
            mine,
            send,
            clock,
            prepare=client.prepare,
            time_scale=options.time_scale,
            done=job.done,
        )
        await asyncio.sleep(max(0.0, -clock()))
        if options.mode == "open":
            loop = schedule.open_loop(job.shift_s)
        else:
            slots = len(range(number, options.max_inflight_sessions, options.processes))
            loop = schedule.closed_loop(
                trees,
                slots,
                think_scale=options.think_scale / options.time_scale,
                max_think_s=options.max_think_s,
            )
        task = asyncio.create_task(loop)
        reporter = asyncio.create_task(report_often())
        # A reporter that fails has lost its reader: the parent is gone, and this process follows.
        reporter.add_done_callback(lambda _: task.cancel())
        for name in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(name, task.cancel)
        # What exists now lives to the end; collecting it again and again would delay requests.
        gc.freeze()
        try:
            await task
        except asyncio.CancelledError:
            return True
        finally:
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


def summarise(results: list[Result], planned: int) -> dict[str, Any]:
    """Counts, latencies (p50, p90, p99, in seconds) and the engine's cached share over a run's
    results."""
    good = [result for result in results if result.error is None]
    errors: dict[str, int] = {}
    for result in results:
        if result.error:
            errors[result.error.kind] = errors.get(result.error.kind, 0) + 1
    first_s = min((r.sent_s for r in results if r.sent_s is not None), default=0.0)
    last_s = max((r.finished_s for r in results if r.finished_s is not None), default=0.0)
    counted = [r for r in good if r.cached_tokens is not None and r.prompt_tokens]
    prompt_tokens = sum(r.prompt_tokens or 0 for r in counted)
    return {
        "planned": planned,
        "finished": len(results),
        "ok": len(good),
        "errors": errors,
        "duration_s": last_s - first_s,
        "input_tokens": sum(r.input_length for r in good),
        "output_tokens": sum(r.output_tokens for r in good),
        "cached_share": sum(r.cached_tokens or 0 for r in counted) / prompt_tokens
        if prompt_tokens
        else None,
        "ttft_s": _percentiles([r.ttft_s() for r in good]),
        "tpot_s": _percentiles([r.tpot_s() for r in good]),
        "e2e_s": _percentiles([(r.finished_s or 0.0) - (r.scheduled_s or 0.0) for r in good]),
        "lateness_s": _percentiles([r.lateness_s() for r in results]),
    }


def _percentiles(values: list[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    p50, p90, p99 = np.percentile(known, [50, 90, 99])
    return {"p50": float(p50), "p90": float(p90), "p99": float(p99)}


def _write_json(path: Path, record: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(orjson.dumps(record, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    part.replace(path)
