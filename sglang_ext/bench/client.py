"""Workers by name, and one request to one of them or to a prefill/decode pair, timed by token.

Does by itself what a router does for a separated request: both workers get the same body with the
same bootstrap fields, and the decode worker's answer counts.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from deltaserve.errors import InputError

_FLUSH_S = 10
_START_S = 120.0
_STOP_S = 3.0


class WorkerError(Exception):
    """A worker refused a request or broke off in the middle of one."""


@dataclass(frozen=True)
class Worker:
    """A running SGLang worker; a prefill worker also has the address of its bootstrap server."""

    name: str
    url: str
    bootstrap: tuple[str, int] | None = None


@dataclass(frozen=True)
class Arm:
    """A way to be served: by `worker` alone, or by `worker` with the KV from `prefill`.

    A mixed arm is both: each request goes one of the two ways, which the phase chooses.
    """

    name: str
    worker: Worker
    prefill: Worker | None = None
    mixed: bool = False

    def way(self, separated: bool) -> Arm:
        """A mixed arm's one or the other; every other arm itself."""
        if not self.mixed:
            return self
        return replace(self, prefill=self.prefill if separated else None, mixed=False)


@dataclass
class Answer:
    """What came back, filled as it comes; `arrivals` are (moment, tokens so far)."""

    sent_s: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    room: int | None = None
    prefill_lost: bool = False

    @property
    def first_token_s(self) -> float:
        return self.arrivals[0][0]

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds a token after the first; None where there was only one."""
        (first_s, first), (last_s, last) = self.arrivals[0], self.arrivals[-1]
        return (last_s - first_s) / (last - first) if last > first else None


def parse_worker(text: str) -> Worker:
    """``NAME=URL`` or, for a prefill worker, ``NAME=URL,BOOTSTRAP_HOST:PORT``."""
    name, equals, rest = text.partition("=")
    url, _, bootstrap = rest.partition(",")
    if not (name and equals) or urlsplit(url).scheme not in ("http", "https"):
        raise InputError(f"--worker {text}: expected NAME=URL or NAME=URL,BOOTSTRAP_HOST:PORT")
    if not bootstrap:
        return Worker(name, url.rstrip("/"))
    host, _, port = bootstrap.rpartition(":")
    if not host or not port.isdecimal():
        raise InputError(f"--worker {text}: expected a bootstrap address HOST:PORT after the comma")
    return Worker(name, url.rstrip("/"), (host, int(port)))


def parse_arm(text: str, workers: dict[str, Worker]) -> Arm:
    """``WORKER``, ``WORKER+PREFILL`` for separated requests, ``WORKER~PREFILL`` for both."""
    mixed = "~" in text
    names = text.split("~" if mixed else "+")
    for name in names:
        if name not in workers:
            raise InputError(f"--arms {text}: no worker {name!r}; given: {', '.join(workers)}")
    if len(names) > 2:
        raise InputError(f"--arms {text}: expected WORKER, WORKER+PREFILL or WORKER~PREFILL")
    prefill = workers[names[1]] if len(names) == 2 else None
    if prefill is not None and prefill.bootstrap is None:
        raise InputError(f"--arms {text}: worker {names[1]!r} was given no bootstrap address")
    return Arm(text, workers[names[0]], prefill, mixed)


class Prompts:
    """Random token ids, the same for the same seed; ids below 16 are left to special tokens."""

    def __init__(self, vocabulary: int, seed: int) -> None:
        self._vocabulary = vocabulary
        self._random = random.Random(seed)

    def make(self, tokens: int) -> list[int]:
        return self._random.choices(range(16, self._vocabulary), k=tokens)

    def number(self, low: int, high: int) -> int:
        return self._random.randint(low, high)


class Client:
    """Sends requests; an asynchronous context manager."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._numbers = itertools.count()
        self._run = f"{random.SystemRandom().getrandbits(40):x}"

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
            # A new connection for each request: a worker may close an idle one just as it is used.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def _open(self) -> aiohttp.ClientSession:
        assert self._session is not None, "used outside `async with`"
        return self._session

    def clock(self) -> float:
        """The clock of every time in an `Answer`."""
        return time.monotonic()

    async def ask(
        self,
        arm: Arm,
        input_ids: Sequence[int],
        output_tokens: int,
        into: Answer | None = None,
        rid: str | None = None,
        prefill_may_die: bool = False,
    ) -> Answer:
        """Exactly `output_tokens` greedy tokens, unless aborted; the answer is also in `into`.

        Where `prefill_may_die`, what becomes of the prefill worker's request is only noted.
        """
        body: dict[str, Any] = {
            "input_ids": list(input_ids),
            "rid": rid or self.name(),
            "stream": True,
            "sampling_params": {
                "max_new_tokens": output_tokens,
                "ignore_eos": True,
                "temperature": 0,
            },
        }
        answer = Answer(0.0) if into is None else into
        if arm.prefill is not None:
            assert arm.prefill.bootstrap is not None
            answer.room = random.SystemRandom().getrandbits(62)
            body |= {
                "bootstrap_host": arm.prefill.bootstrap[0],
                "bootstrap_port": arm.prefill.bootstrap[1],
                "bootstrap_room": answer.room,
            }
        payload = orjson.dumps(body)
        answer.sent_s = self.clock()
        if arm.prefill is None:
            await self._stream(arm.worker, payload, answer)
            return answer
        leg = asyncio.create_task(self._stream(arm.prefill, payload, Answer(0.0)))
        try:
            await self._stream(arm.worker, payload, answer)
            try:
                await leg
            except (WorkerError, aiohttp.ClientError):
                if not prefill_may_die:
                    raise
                answer.prefill_lost = True
        finally:
            leg.cancel()
            with suppress(asyncio.CancelledError, WorkerError, aiohttp.ClientError):
                await leg
        return answer

    async def _stream(self, worker: Worker, payload: bytes, answer: Answer) -> None:
        async with self._open.post(
            f"{worker.url}/generate", data=payload, headers={"content-type": "application/json"}
        ) as response:
            if response.status != 200:
                text = (await response.text())[:300]
                raise WorkerError(f"{worker.name} answered {response.status}: {text}")
            pending = b""
            async for data in response.content.iter_any():
                at_s = self.clock()
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    if line.startswith(b"data: {"):
                        _note(worker, orjson.loads(line[6:]), at_s, answer)
        if not answer.arrivals:
            raise WorkerError(f"{worker.name} ended a request without a token")

    def name(self) -> str:
        """A request id that no other request has."""
        return f"bench-{self._run}-{next(self._numbers)}"

    async def abort(self, worker: Worker, rid: str) -> None:
        async with self._open.post(f"{worker.url}/abort_request", json={"rid": rid}):
            pass

    async def flush(self, *workers: Worker) -> None:
        """Empties caches; a worker that is still busy after a while keeps its own."""
        for worker in workers:
            async with self._open.post(f"{worker.url}/flush_cache?timeout={_FLUSH_S}"):
                pass

    async def flush_arm(self, arm: Arm) -> None:
        await self.flush(*([arm.worker] if arm.prefill is None else [arm.worker, arm.prefill]))

    async def top_gap(self, arm: Arm, input_ids: Sequence[int]) -> float | None:
        """By how much the likeliest next token leads the second, in nats."""
        body = {
            "input_ids": list(input_ids),
            "sampling_params": {"max_new_tokens": 1, "ignore_eos": True, "temperature": 0},
            "return_logprob": True,
            "top_logprobs_num": 2,
        }
        async with self._open.post(f"{arm.worker.url}/generate", json=body) as response:
            if response.status != 200:
                return None
            top = (await response.json())["meta_info"]["output_top_logprobs"][0]
        return float(top[0][0] - top[1][0])


def _note(worker: Worker, event: dict[str, Any], at_s: float, answer: Answer) -> None:
    if "error" in event:
        raise WorkerError(f"{worker.name}: {str(event['error'])[:300]}")
    about = event["meta_info"]
    tokens = int(about["completion_tokens"])
    ids = event["output_ids"]
    answer.output_ids = ids if len(ids) == tokens else answer.output_ids + ids
    answer.cached_tokens = int(about.get("cached_tokens") or 0)
    before = answer.arrivals[-1][1] if answer.arrivals else 0
    if tokens > before:
        answer.arrivals.append((at_s, tokens))


class Streams:
    """Requests that decode until told to stop."""

    def __init__(self, client: Client, arm: Arm) -> None:
        self._client = client
        self._arm = arm
        self._tasks: list[asyncio.Task[Answer]] = []
        self._rids: list[str] = []
        self.answers: list[Answer] = []

    async def start(self, contexts: Sequence[Sequence[int]], output_tokens: int) -> None:
        """Returns once each has two tokens: all of them decode."""
        for context in contexts:
            answer = Answer(0.0)
            rid = self._client.name()
            self._rids.append(rid)
            self.answers.append(answer)
            self._tasks.append(
                asyncio.create_task(
                    self._client.ask(self._arm, context, output_tokens, answer, rid)
                )
            )
        until_s = self._client.clock() + _START_S
        while any(not a.arrivals or a.arrivals[-1][1] < 2 for a in self.answers):
            self.check()
            if self._client.clock() > until_s:
                raise WorkerError(f"{self._arm.name}: streams did not begin in {_START_S:.0f} s")
            await asyncio.sleep(0.005)

    def check(self) -> None:
        """Raises what a stream raised, or that one ended before it was told to."""
        for task in self._tasks:
            if task.done():
                task.result()
                raise WorkerError(f"{self._arm.name}: a stream ended early; give it more tokens")

    async def stop(self) -> None:
        for rid in self._rids:
            with suppress(aiohttp.ClientError):
                await self._client.abort(self._arm.worker, rid)
        await asyncio.wait(self._tasks, timeout=_STOP_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
