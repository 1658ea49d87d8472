"""One replay from a trace file to a run folder: processes, records, resumption and the summary.

Owns the run folder's `replay.json` and `requests.jsonl`. Must not know dialects or prompt contents.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import platform
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson
from numpy.typing import NDArray

import deltaserve
from deltaserve.errors import InputError
from deltaserve.locks import lock_at_once
from replay.client import ClientOptions
from replay.discovery import GUESSED_VOCAB_SIZE, find_engine, find_vocab_size, find_words
from replay.engines import Api
from replay.files import write_json
from replay.options import SAME_ON_RESUME, RunOptions, check, resolve_headers
from replay.phases import OneProcess, PhaseRecord, SeveralProcesses, Window
from replay.plan import Plan, PlannedRequests, make_plan
from replay.plays import TicketCounter, Tickets
from replay.progress import Counters, Display
from replay.prompts import WORDS
from replay.results import REPLAY_FILE, RESULTS_FILE, drop_torn_line, iter_results
from replay.share import Job, run_share
from replay.summary import summarise
from replay.trace import digest, read_trace

_START_DELAY_S = 0.5
_LONG_WAIT_S = 60.0
# About what sending a request, each token of its prompt, and receiving a token take of a core
# (`replay.bench`); from a third of a core on, requests begin to wait for each other.
_REQUEST_CPU_S = 0.4e-3
_INPUT_TOKEN_CPU_S = 6e-9
_OUTPUT_TOKEN_CPU_S = 15e-6
_BUSY_SHARE = 0.33
_BUSIEST_S = 10.0
_STREAMS_A_PROCESS = 500


def run(options: RunOptions, quiet: bool = False) -> dict[str, Any]:
    """Replays a trace; returns the summary of all results in the run folder."""
    check(options)
    plan = make_plan(
        read_trace(options.trace),
        request_limit=options.request_limit,
        session_limit=options.session_limit,
        length_scale=options.length_scale,
        max_input_tokens=options.max_input_tokens,
        source=options.trace,
    )
    if not plan.requests:
        raise InputError(f"{options.trace}: no request left to send; see --max-input-tokens")
    headers = resolve_headers(options.headers)
    found_api, found_model = find_engine(options.url, headers)
    api: Api = found_api if options.api == "auto" else options.api
    model = options.model or found_model
    vocab_size = options.vocab_size or _served_vocab_size(options, api, headers)
    cores = len(os.sched_getaffinity(0))  # of those that the machine has, what this may use
    processes = options.processes or default_processes(plan.requests, options, cores)
    options = replace(options, vocab_size=vocab_size, processes=processes)
    with _alone_in(options.output):
        return _replay(options, plan, headers, api, model, quiet)


def _replay(
    options: RunOptions,
    plan: Plan,
    headers: tuple[tuple[str, str], ...],
    api: Api,
    model: str,
    quiet: bool,
) -> dict[str, Any]:
    assert options.vocab_size is not None
    assert options.processes is not None
    vocab_size, processes = options.vocab_size, options.processes
    record, left = _open_folder(options, plan)
    record["engine"] = {"api": api, "model": model}
    write_json(options.output / REPLAY_FILE, record)
    _warn_of_few_sessions(options, plan.trees)
    interrupted = False
    counters = Counters()
    if left.any():
        first_s = plan.requests.trace_s[int(left.argmax())]
        _warn_of_a_wait(options, record, first_s)
        context = multiprocessing.get_context("fork")
        job = Job(
            plan,
            left,
            options,
            ClientOptions(
                url=options.url,
                api=api,
                model=model,
                vocab_size=vocab_size,
                seed=options.seed if options.prompt_seed is None else options.prompt_seed,
                timeout_s=options.timeout_s,
                prime_timeout_s=options.prime_timeout_s,
                record_output_ids=options.record_output_ids,
                splice_outputs=options.splice_outputs,
                as_text=options.as_text,
                words=_words(options, api, headers),
                headers=headers,
            ),
            processes,
            record["clock"]["monotonic_origin_s"],
            shift_s=_shift_s(first_s, record, options.time_scale),
            shared=OneProcess() if processes == 1 else SeveralProcesses(context, processes),
        )
        phases = _phase_record(job)
        with Display(None if options.has_phases else int(left.sum()), quiet) as display:
            counters = display.counters
            interrupted = _run_job(job, display, phases)
        if phases:
            phases.close(job.clock())
    planned = None if options.has_phases else len(plan.requests)
    summary = summarise(iter_results(options.output), planned)
    summary["interrupted"] = interrupted
    summary["client"] = {"event_loop_lag_s": counters.loop_lag_s.summary()}
    record["summary"] = summary
    write_json(options.output / REPLAY_FILE, record)
    return summary


def _phase_record(job: Job) -> PhaseRecord | None:
    phases, options = job.phases(), job.options
    if not phases:
        return None
    facts = {
        "start": options.start,
        "start_share": list(options.start_share),
        "warm_up_s": phases.warm_up_s,
        "measure_s": phases.measure_s,
        "drain_s": phases.drain_s,
        "recycle": options.recycle,
        "recycle_start": options.recycle_start,
        "max_think_s": options.max_think_s,
    }
    return PhaseRecord(options.output, Window(phases, job.shared), facts)


def _served_vocab_size(options: RunOptions, api: Api, headers: tuple[tuple[str, str], ...]) -> int:
    """The served model's vocabulary; where the server does not say it, a guess, with a warning."""
    if options.as_text or api == "chat":
        return GUESSED_VOCAB_SIZE  # words are drawn from fewer
    found = find_vocab_size(options.url, headers)
    if found is None:
        print(
            f"warning: {options.url} does not say how large its model's vocabulary is; token ids "
            f"are below {GUESSED_VOCAB_SIZE:,} (--vocab-size)",
            file=sys.stderr,
        )
    return found or GUESSED_VOCAB_SIZE


def _words(options: RunOptions, api: Api, headers: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    """What text prompts are made of: words that the served model reads as one token each, so that
    prompts are as long as the trace says; frequent English ones where its tokenizer is not here."""
    if not options.as_text and api != "chat":
        return WORDS
    return find_words(options.url, len(WORDS), headers) or WORDS


def default_processes(requests: PlannedRequests, options: RunOptions, cores: int) -> int:
    """As many processes as keep each one's load at its busiest within what leaves it punctual, and
    at most half the cores, for each has another beside it that makes bodies."""
    if options.mode == "sessions":
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
        # Of those that have a request: a trace may pause for years.
        _, spans = np.unique(np.floor((at_s - at_s[0]) / _BUSIEST_S), return_inverse=True)
        needed = np.bincount(spans, weights=busy_s).max() / _BUSIEST_S / _BUSY_SHARE
    return max(1, min(math.ceil(needed), cores // 2))


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Makes a run's folder, and keeps a second run out of it: one that is resumed while it goes on
    would send what is left twice. The system lets go of it with the last of the run's processes."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise InputError(f"--output {folder}: {error.strerror}") from None
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            if not lock_at_once(held):
                raise InputError(
                    f"--output {folder}: another replay run is at work there; wait for it, or stop "
                    "it"
                )
        yield
    finally:
        os.close(held)


def _open_folder(options: RunOptions, plan: Plan) -> tuple[dict[str, Any], NDArray[np.bool_]]:
    """The run's record, and which requests are left to send (when resumed: not all). The run's
    clock starts soon after this returns."""
    left = np.ones(len(plan.requests), dtype=np.bool_)
    results = options.output / RESULTS_FILE
    record: dict[str, Any] = {
        "arguments": options.record(),
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
    # Where nothing is left to send nothing goes on.
    record["resumed_at_s"] = [*resumed_at_s, offset_s] if left.any() else resumed_at_s
    return record, left


def _difference(flag: str, had: Any, has: Any) -> str:
    """How a flag differs from what it was, in words that can be typed."""
    if had is None or has is None or isinstance(has, bool):
        given = f"no {flag}" if has in (None, False) else flag if has is True else f"{flag} {has}"
        wanted = "none" if had in (None, False) else flag if had is True else f"{flag} {had}"
        return f"{given}: expected {wanted}"
    return f"{flag} {has}: expected {had}"


def _clock_to_resume(record_file: Path, record: dict[str, Any]) -> tuple[float, list[float]]:
    """When the run of a record began and was resumed; that run must be the one of `record`."""
    try:
        before = orjson.loads(record_file.read_bytes())
        for name in SAME_ON_RESUME:
            had, has = before["arguments"].get(name), record["arguments"][name]
            if had != has:
                flag = "--text" if name == "as_text" else f"--{name.replace('_', '-')}"
                raise InputError(f"{_difference(flag, had, has)}, as in {record_file}")
        if before["trace"]["sha256"] != record["trace"]["sha256"]:
            raise InputError(f"{record['trace']['path']}: expected the trace of {record_file}")
        return before["clock"]["unix_origin_s"], before["resumed_at_s"]
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError):
        raise InputError(f"{record_file}: expected the record of the run to resume") from None


def _warn_of_a_wait(options: RunOptions, record: dict[str, Any], first_s: float) -> None:
    """Says so where an open loop sends nothing for long: its trace does not begin at 0."""
    wait_s = first_s / options.time_scale
    if options.mode == "open" and not record["resumed_at_s"] and wait_s >= _LONG_WAIT_S:
        print(
            f"warning: {options.trace}: the first request is due {wait_s:,.0f} s after the run's "
            "start: timestamp_s counts from 0",
            file=sys.stderr,
        )


def _warn_of_few_sessions(options: RunOptions, conversations: int) -> None:
    """Says so where a closed loop never has as many sessions in flight as it was asked for."""
    asked = options.max_inflight_sessions
    if options.mode == "closed" and not options.recycle and conversations < asked:
        print(
            f"warning: {options.trace}: {conversations:,} conversations are there to send, so that "
            f"{asked:,} (--max-inflight-sessions) are never in flight; --recycle plays them again",
            file=sys.stderr,
        )


def _shift_s(first_s: float, record: dict[str, Any], time_scale: float) -> float:
    """Trace time that a resumed open loop skips, so that its first request is due soon."""
    if not record["resumed_at_s"]:
        return 0.0
    return float(first_s - (record["resumed_at_s"][-1] + _START_DELAY_S) * time_scale)


def _run_job(job: Job, display: Display, phases: PhaseRecord | None) -> bool:
    """Runs the job in one or several processes; true when it was stopped from outside."""

    def report(counters: Counters) -> None:
        display.add(counters)
        if phases:
            phases.look(job.clock())

    count = job.processes
    sessions = None if job.options.recycle else job.plan.trees
    if count == 1:
        return run_share(job, 0, TicketCounter(sessions), report)
    context = multiprocessing.get_context("fork")
    counter = context.Value("q", 0)
    children = []
    pipes: list[Connection] = []
    for number in range(count):
        ours, theirs = context.Pipe(duplex=False)
        pipes.append(ours)
        tickets: Tickets = _SharedTickets(counter, sessions)
        if job.options.mode == "sessions":
            # Whichever process is faster: an arrival is of the same conversation.
            tickets = TicketCounter(sessions, number, count)
        child = context.Process(target=_child, args=(job, number, tickets, theirs, pipes))
        child.start()
        theirs.close()
        children.append(child)
    interrupted = False
    wrong: str | None = None
    with _stopped_by_signal():
        while pipes:
            try:
                for pipe in wait(pipes):
                    assert isinstance(pipe, Connection)
                    try:
                        message = pipe.recv()
                    except EOFError:
                        pipes.remove(pipe)
                        continue
                    if isinstance(message, Counters):
                        report(message)
                    else:
                        # What one cannot record, the others need not send.
                        wrong = wrong or message
                        _terminate(children)
            except KeyboardInterrupt:
                # A terminal signals the children too, others may not; their last results follow.
                interrupted = True
                _terminate(children)
        for child in children:
            child.join()
    if wrong:
        raise InputError(wrong)
    failed = [child.exitcode for child in children if child.exitcode not in (0, 130)]
    if failed and not interrupted:
        raise RuntimeError(f"a replay process ended with status {failed[0]}")
    return interrupted or any(child.exitcode == 130 for child in children)


def _terminate(children: list[Any]) -> None:
    for child in children:
        if child.is_alive():
            child.terminate()


class _Counter(Protocol):
    value: int

    def get_lock(self) -> Any: ...


class _SharedTickets:
    """Tickets counted across processes, below `count` (None: endless)."""

    def __init__(self, counter: Any, count: int | None) -> None:
        self._counter: _Counter = counter
        self._count = count

    def take(self) -> int | None:
        with self._counter.get_lock():
            if self._counter.value == self._count:
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
    job: Job, number: int, tickets: Tickets, pipe: Connection, inherited: list[Connection]
) -> None:
    # While any process holds the reading end of a pipe, its writer does not see the parent's end.
    for other in inherited:
        other.close()
    with contextlib.suppress(KeyboardInterrupt):
        try:
            if not run_share(job, number, tickets, pipe.send):
                return
        except InputError as error:
            pipe.send(str(error))
            raise SystemExit(2) from None
    raise SystemExit(130)
