"""One process's share of a run: its part of the load, sent and recorded.

Must not know how a run is split over processes, nor what comes of its results.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import resource
import signal
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.bodies import BodiesAhead
from replay.client import Client, ClientOptions
from replay.dispatch import Dispatch, Send, precise_loop
from replay.endless import EndlessCache
from replay.lanes import Lanes, Start, poisson_arrivals
from replay.open_loop import OpenLoop
from replay.options import RunOptions
from replay.pauses import Pauses
from replay.phases import PhaseOptions, Shared, Window
from replay.plan import Plan, Planned
from replay.plays import Order, Plays, Tickets
from replay.progress import Counters
from replay.results import RESULTS_FILE, ErrorInfo, Result, ResultWriter

_REPORT_S = 0.5
_LOOK_S = 0.05
_CLOCK_DIGITS = 6
# One lane in so many is primed at a time: enough to keep a fleet busy, and few enough that their
# long prompts do not fill a queue that the first turns then stand in.
_LANES_A_PRIMING_ONE = 8


@dataclass(slots=True)
class Job:
    """What all processes of a run share. `left` marks the plan's requests that are to be sent;
    `shift_s` is the trace time that a resumed open loop skips."""

    plan: Plan
    left: NDArray[np.bool_]
    options: RunOptions
    client: ClientOptions
    processes: int
    origin_s: float
    shift_s: float
    shared: Shared

    def clock(self) -> float:
        """Seconds since the run's start, to the microsecond: an answer's line has a time for each
        token, and what a subtraction leaves behind the sixth digit doubles its size and says
        nothing."""
        return round(time.monotonic() - self.origin_s, _CLOCK_DIGITS)

    def phases(self) -> PhaseOptions | None:
        """The run's phases; None where all of it is measured."""
        options = self.options
        if not options.has_phases:
            return None
        drain_s = options.timeout_s if options.drain_s is None else options.drain_s
        return PhaseOptions(options.warm_up_s or 0.0, options.measure_s, drain_s)


def run_share(job: Job, number: int, tickets: Tickets, report: Callable[[Counters], None]) -> bool:
    """Does the part of process `number`; true when it was stopped from outside."""
    _allow_many_sockets()
    plays = Plays(job.plan.requests)
    with (
        contextlib.closing(BodiesAhead(job.client, plays)) as bodies,
        asyncio.Runner(loop_factory=precise_loop) as runner,
    ):
        return runner.run(_Share(job, number, plays, bodies, report).run(tickets))


class _Share:
    """The parts of one process: a schedule, a client, the results, and what they tell the parent
    process."""

    def __init__(
        self,
        job: Job,
        number: int,
        plays: Plays,
        bodies: BodiesAhead,
        report: Callable[[Counters], None],
    ) -> None:
        self._job = job
        self._number = number
        self._plays = plays
        self._bodies = bodies
        self._report = report
        self._counters = Counters()
        phases = job.phases()
        self._window = Window(phases, job.shared, number) if phases else None
        self._measured_in_flight = 0
        self._pauses = Pauses()
        # Only a process that sends everything knows what came before.
        knows_all = job.processes == 1 and bool(job.left.all())
        self._client = Client(
            job.client,
            job.clock,
            self._on_result,
            lambda ttft_s: self._counters.ttft_s.add(ttft_s),
            bodies,
            EndlessCache(job.client.splice_outputs) if knows_all else None,
            self._window.phase_of if self._window else lambda scheduled_s: "measure",
        )
        self._writer = ResultWriter(job.options.output / RESULTS_FILE)

    def _on_result(self, result: Result) -> None:
        self._counters.done += 1
        self._counters.errors += result.error is not None
        self._writer.write(result)

    async def _send(self, request: Planned, scheduled_s: float) -> None:
        self._counters.sent += 1
        self._counters.lateness_s.add(self._job.clock() - scheduled_s)
        window = self._window
        # The window's start is known long before it: when it begins nothing is sent unmarked.
        measured = bool(window and not request.primes and window.phase_of(scheduled_s) == "measure")
        self._measured_in_flight += measured
        try:
            sent = await self._client.send(request, scheduled_s)
        finally:
            self._measured_in_flight -= measured
        if pause_s := self._pauses.pause_s(sent.result, sent.retry_after_s):
            # What waits for this request's end waits for this too.
            await asyncio.sleep(pause_s)

    def _flush(self) -> None:
        full, self._counters = self._counters, Counters()
        self._report(full)

    async def _report_often(self) -> None:
        while True:
            await asyncio.sleep(_REPORT_S)
            self._flush()

    async def _watch_loop(self) -> None:
        """Measures how late the event loop wakes: what it is late by, every time stamp may be."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + _LOOK_S
            await asyncio.sleep(_LOOK_S)
            self._counters.loop_lag_s.add(loop.time() - due_s)

    async def _end_with_window(self, schedule: Dispatch, stop: Callable[[], None]) -> None:
        """Stops the load when the window has ended and what it measures has been answered."""
        window = self._window
        assert window

        def unfinished() -> int:
            return self._measured_in_flight + schedule.due_before(window.end_s)

        while not window.is_over(self._job.clock(), unfinished):
            await asyncio.sleep(_LOOK_S)
        if unfinished():
            self._client.why_stopped = ErrorInfo(
                kind="timeout", message="no complete answer when the drain phase ended"
            )
        stop()

    def _schedule(self, tickets: Tickets) -> tuple[Dispatch, Coroutine[Any, Any, None]]:
        """The part of the load that is this process's."""
        job, options, number = self._job, self._job.options, self._number
        mine = job.left
        send: Send = self._send
        if options.mode == "open":
            if job.processes > 1:
                mine = mine & (np.array(job.plan.requests.tree) % job.processes == number)
            open_loop = OpenLoop(
                job.plan.requests,
                send,
                job.clock,
                mine=mine,
                prepare=self._bodies.ask,
                time_scale=options.time_scale,
                think_scale=options.think_scale,
                max_think_s=options.max_think_s,
            )
            if self._window:
                self._window.primed(0.0)
            return open_loop, open_loop.run(job.shift_s)
        slots = len(range(number, options.max_inflight_sessions, job.processes))
        lanes = Lanes(
            self._plays,
            send,
            job.clock,
            Order(job.plan.trees, options.seed, shuffled=job.phases() is not None),
            tickets,
            mine=mine,
            prepare=self._bodies.ask,
            think_scale=options.think_scale / options.time_scale,
            max_think_s=options.max_think_s,
            start=Start(
                first_mid=options.start == "mid",
                later_mid=options.recycle_start == "mid",
                share=options.start_share,
                parallel=self._prime_parallel(slots),
                prime_timeout_s=options.prime_timeout_s,
            ),
            on_primed=self._primed,
        )
        if options.mode == "closed":
            return lanes, lanes.closed(slots)
        assert options.sessions_per_hour
        arrivals = poisson_arrivals(options.sessions_per_hour, options.seed, number, job.processes)
        return lanes, lanes.arriving(arrivals, slots if options.start == "mid" else 0)

    def _prime_parallel(self, slots: int) -> int:
        """This process's part of the conversations that are primed at a time, at least one."""
        whole = self._job.options.prime_parallel
        part = slots / _LANES_A_PRIMING_ONE if whole is None else whole / self._job.processes
        return max(1, math.ceil(part))

    def _primed(self) -> None:
        if self._window:
            self._window.primed(self._job.clock())

    async def run(self, tickets: Tickets) -> bool:
        """Sends this process's part; true when it was stopped from outside."""
        job = self._job
        self._bodies.open()
        with contextlib.closing(self._client), contextlib.closing(self._writer):
            schedule, load = self._schedule(tickets)
            stopped = False

            async def begin() -> None:
                if job.options.mode != "open":
                    await asyncio.sleep(max(0.0, -job.clock()))
                await load

            task = asyncio.create_task(begin())

            def cancel() -> None:
                # Once: a second cancellation would cut short what the first one began.
                if not task.cancelling():
                    task.cancel()

            def stop() -> None:
                nonlocal stopped
                stopped = True
                cancel()

            helpers = [
                asyncio.create_task(self._report_often()),
                asyncio.create_task(self._watch_loop()),
            ]
            # A reporter that fails has lost its reader: the parent is gone, and this follows.
            helpers[0].add_done_callback(lambda _: stop())
            if self._window:
                helpers.append(asyncio.create_task(self._end_with_window(schedule, cancel)))
            for name in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(name, stop)
            # A full collection stops everything for tens of milliseconds, and finds next to
            # nothing: only a connection that was broken off leaves cycles behind.
            gc.freeze()
            gc.disable()
            try:
                await task
            except asyncio.CancelledError:
                return stopped
            finally:
                # A loop that ends closes what signals wake it by before it forgets the signals: one
                # that came in between would be a complaint of Python's.
                signal.set_wakeup_fd(-1)
                gc.enable()
                gc.unfreeze()
                for helper in helpers:
                    helper.cancel()
                if self._window:
                    # Others wait for what is measured here, and it has all ended.
                    job.shared.set_unfinished(self._number, 0)
                with contextlib.suppress(OSError):
                    self._flush()
        return False


def _allow_many_sockets() -> None:
    """Lifts the number of open files from the usual 1,024 to what the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
