"""Bodies made by another process are those that this one would make, whatever is asked when."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import orjson
import pytest

from replay.bodies import BodiesAhead, BodiesOnDemand, BodyOptions
from replay.plan import PlannedRequests, make_plan
from replay.plays import Plays
from replay.prompts import WORDS
from replay.trace import Request

# Of one to 40,000 tokens: small bodies and large ones come in different ways.
_LENGTHS = [1, 300, 40_000, 17, 20_000, 5_000, 64]


def _requests() -> PlannedRequests:
    first = 0
    trace = []
    for number, length in enumerate(_LENGTHS):
        blocks = -(-length // 64)
        ids = list(range(first, first + blocks))
        first += blocks
        trace.append(Request(f"r{number}", f"s{number}", 0, 0.0, length, 3, 64, ids))
    return make_plan(trace).requests


def _options(**values: Any) -> BodyOptions:
    return BodyOptions(
        **{
            "api": "sglang",
            "model": "m",
            "vocab_size": 50_000,
            "seed": 3,
            "record_output_ids": False,
            "splice_outputs": False,
            "as_text": False,
            "words": WORDS,
            **values,
        }
    )


@contextlib.contextmanager
def _ahead(requests: PlannedRequests, **values: Any) -> Iterator[BodiesAhead]:
    with contextlib.closing(BodiesAhead(_options(**values), Plays(requests))) as bodies:
        yield bodies


def _run(bodies: BodiesAhead, main: Callable[[], Awaitable[None]]) -> None:
    async def opened() -> None:
        bodies.open()
        async with asyncio.timeout(60):
            await main()

    asyncio.run(opened())


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("asked", ["none", "all", "backwards", "all at once"])
def test_bodies_made_ahead_equal_those_made_on_demand(asked: str, as_text: bool) -> None:
    requests = _requests()
    here = BodiesOnDemand(_options(as_text=as_text))
    with _ahead(requests, as_text=as_text) as bodies:

        async def main() -> None:
            order = range(len(requests))
            if asked == "backwards":
                order = reversed(order)
            if asked != "none":
                assert all(bodies.ask(index, float(index)) for index in order)
            if asked == "all at once":
                taken = await asyncio.gather(*map(bodies.take, requests))
            else:
                taken = [await bodies.take(request) for request in requests]
            for request, body in zip(requests, taken, strict=True):
                made = orjson.loads(bytes(body))
                expected = orjson.loads(await here.take(request))
                assert made.pop("rid").partition("~")[0] == request.request_id
                del expected["rid"]
                assert made == expected

        _run(bodies, main)


def test_no_more_bodies_are_asked_ahead_than_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replay.bodies._AHEAD_BYTES", 1000)
    requests = _requests()
    with _ahead(requests) as bodies:

        async def main() -> None:
            assert bodies.ask(0, 0.0)
            assert bodies.ask(1, 0.0)
            assert not bodies.ask(2, 0.0)
            assert bodies.ask(1, 0.0)  # is waiting already
            await bodies.take(requests[2])
            await bodies.take(requests[1])
            assert bodies.ask(3, 0.0)

        _run(bodies, main)


def test_a_request_that_was_given_up_does_not_hold_up_others() -> None:
    requests = _requests()
    with _ahead(requests) as bodies:

        async def main() -> None:
            task = asyncio.create_task(bodies.take(requests[2]))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len(await bodies.take(requests[1])) > 0

        _run(bodies, main)


def test_the_end_of_the_other_process_is_an_error_not_a_wait() -> None:
    requests = _requests()
    with _ahead(requests) as bodies:

        async def main() -> None:
            await bodies.take(requests[0])
            assert bodies._process.pid
            os.kill(bodies._process.pid, signal.SIGKILL)
            for request in requests[1:]:
                with pytest.raises(RuntimeError, match="makes bodies ended"):
                    await bodies.take(request)

        _run(bodies, main)


def test_a_body_that_cannot_be_made_is_that_requests_error_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make = BodiesAhead.__init__.__globals__["BodyFactory"].make

    def failing(self: Any, request: Any) -> bytes:
        if request.index == 1:
            raise ValueError("no such block")
        return bytes(make(self, request))

    monkeypatch.setattr("replay.bodies.BodyFactory.make", failing)
    requests = _requests()
    with _ahead(requests) as bodies:

        async def main() -> None:
            with pytest.raises(RuntimeError, match="ValueError: no such block"):
                await bodies.take(requests[1])
            assert await bodies.take(requests[2])

        _run(bodies, main)
