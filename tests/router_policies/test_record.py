"""`deltaserve route --record`: what it writes is a trace, whole after a kill, and replayed it has
the same prefixes."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

from replay.trace import Request, read_trace
from tests.command_line import deltaserve
from tests.processes import wait_until
from tests.router_policies.test_cli import COMMAND, router

BLOCK = 512
SESSIONS, TURNS = 4, 3
COMMON = [7] * (2 * BLOCK)


def prompt(session: int, turn: int) -> list[int]:
    """What all sessions begin with, then a block and a half more with every turn."""
    own = range(BLOCK * 3 // 2 * (turn + 1))
    return COMMON + [100 + session * 97 + step % 89 for step in own]


def shared(requests: list[Request]) -> list[int]:
    """Of every two requests, the blocks that they begin with together."""

    def both(one: Request, other: Request) -> Iterator[bool]:
        return (a == b for a, b in zip(one.hash_ids, other.hash_ids, strict=False))

    pairs = itertools.combinations(requests, 2)
    return [sum(itertools.takewhile(bool, both(*pair))) for pair in pairs]


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


async def test_a_recording_replayed_has_the_same_prefixes_and_is_whole_after_a_kill(
    tmp_path: Path, mock_worker: Any
) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    wanted = SESSIONS * TURNS
    async with mock_worker() as worker:
        arguments = ["--worker", worker.url, "--record"]
        async with (
            router(*arguments, str(first)) as (url, process),
            aiohttp.ClientSession() as client,
        ):
            for turn, session in itertools.product(range(TURNS), range(SESSIONS)):
                asked = {"input_ids": prompt(session, turn), "stream": True}
                headers = {"x-session-id": f"secret-{session}"}
                async with client.post(f"{url}/generate", json=asked, headers=headers) as answer:
                    assert answer.status == 200
                    await answer.read()
            wait_until(lambda: lines(first) == wanted)
            process.kill()
        recorded = list(read_trace(first))
        assert [(it.session_id, it.turn) for it in recorded] == [
            (f"s{session}", turn) for turn in range(TURNS) for session in range(SESSIONS)
        ]
        assert [it.input_length for it in recorded[::SESSIONS]] == [
            len(prompt(0, turn)) for turn in range(TURNS)
        ]
        assert shared(recorded)[0] == 2
        assert b"secret" not in first.read_bytes()
        async with router(*arguments, str(second)) as (url, _):
            command = [*COMMAND, "replay", "run", str(first), "--url", url, "--api", "sglang"]
            command += ["--vocab-size", "1000", "--output", str(tmp_path / "run")]
            replaying = await asyncio.create_subprocess_exec(*command, stdout=sys.stderr)
            assert await replaying.wait() == 0
            await asyncio.to_thread(wait_until, lambda: lines(second) == wanted)
    order = {(it.session_id, it.turn): at for at, it in enumerate(recorded)}
    again = list(read_trace(second))
    names: dict[str, str] = {}
    for request in again:
        names.setdefault(request.session_id, f"s{len(names)}")
    again.sort(key=lambda it: order[names[it.session_id], it.turn])
    assert [it.input_length for it in again] == [it.input_length for it in recorded]
    assert [it.output_length for it in again] == [it.output_length for it in recorded]
    assert shared(again) == shared(recorded)
    described = deltaserve("replay", "stats", str(second))
    assert described.returncode == 0, described.stderr
