"""Are greedy tokens the same whichever path a request takes?

Random conversations of several turns go to the reference worker one after another, and then,
word for word, to every arm. The reference itself is asked a second time: where floating-point sums
depend on what else is in a batch, even it may differ from itself, and an arm is judged beside that.
At the first token that differs the reference is asked by how much the likeliest token led the
second: a lead of about nothing is rounding, a clear one is a fault. (With SGLang's
`--enable-deterministic-inference` sums do not depend on the batch, and nothing may differ.)

On a mixed arm each turn is local or separated at random. Before a stated share of turns the same
prompt is asked for more and aborted somewhere on its way. In the phase `death` a process, the
prefill worker, is killed in the middle: the answers to its requests are judged like all others.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aiohttp

from sglang_ext.bench.client import Arm, Client, Prompts, WorkerError
from sglang_ext.bench.samples import Sample, Sink
from sglang_ext.bench.statistics import quantile

_ABORT_WITHIN_MS = 400
_ABORTED_TOKENS = 200


@dataclass(frozen=True)
class Shape:
    """Of the conversations; a later turn adds up to `turn_tokens` to what was said before."""

    sessions: int
    turns: int
    first_tokens: int
    turn_tokens: int
    output_tokens: int
    at_once: int
    abort_percent: int


@dataclass(frozen=True)
class Death:
    """Process `pid` gets SIGKILL when an arm has answered `after_turns` turns."""

    pid: int
    after_turns: int


@dataclass
class _Turn:
    session: int
    number: int
    input_ids: list[int]
    expected: list[int]
    separated: bool
    abort_after_s: float | None


async def measure(
    client: Client,
    arms: Sequence[Arm],
    reference: Arm,
    prompts: Prompts,
    shape: Shape,
    sink: Sink,
    say: Callable[[str], None],
    death: Death | None = None,
) -> None:
    """Writes a ``turn`` for each turn of each arm, and of the reference again without `death`."""
    await client.flush_arm(reference)
    say(f"identity: {reference.name}")
    turns = await _truth(client, reference, prompts, shape)
    for arm in arms if death else (reference, *(arm for arm in arms if arm != reference)):
        name = f"{arm.name} again" if arm == reference else arm.name
        say(f"identity: {name}")
        await client.flush_arm(arm)
        await _replay(client, arm, name, reference, turns, shape, sink, death)


async def _truth(
    client: Client, reference: Arm, prompts: Prompts, shape: Shape
) -> list[list[_Turn]]:
    opening = [prompts.make(prompts.number(1, shape.first_tokens)) for _ in range(shape.sessions)]
    added = [
        [prompts.make(prompts.number(1, shape.turn_tokens)) for _ in range(shape.turns - 1)]
        for _ in range(shape.sessions)
    ]
    paths = [[prompts.number(0, 1) == 1 for _ in range(shape.turns)] for _ in added]
    aborts = [[_abort_after_s(prompts, shape) for _ in range(shape.turns)] for _ in added]

    async def play(session: int) -> list[_Turn]:
        ids, turns = opening[session], []
        for number in range(shape.turns):
            answer = await client.ask(reference, ids, shape.output_tokens)
            turns.append(
                _Turn(
                    session,
                    number,
                    ids,
                    answer.output_ids,
                    paths[session][number],
                    aborts[session][number],
                )
            )
            if number < shape.turns - 1:
                ids = ids + answer.output_ids + added[session][number]
        return turns

    return await _in_lanes(play, shape)


def _abort_after_s(prompts: Prompts, shape: Shape) -> float | None:
    after_s = prompts.number(0, _ABORT_WITHIN_MS) / 1e3
    return after_s if prompts.number(1, 100) <= shape.abort_percent else None


async def _ask_and_abort(client: Client, arm: Arm, turn: _Turn, after_s: float) -> None:
    rid = client.name()
    ask = client.ask(arm, turn.input_ids, _ABORTED_TOKENS, rid=rid, prefill_may_die=True)
    asking = asyncio.create_task(ask)
    await asyncio.wait([asking], timeout=after_s)
    for worker in (arm.worker, arm.prefill):
        if worker is not None:
            with suppress(aiohttp.ClientError):
                await client.abort(worker, rid)
    with suppress(WorkerError, aiohttp.ClientError):
        await asking


async def _replay(
    client: Client,
    arm: Arm,
    name: str,
    reference: Arm,
    sessions: Sequence[Sequence[_Turn]],
    shape: Shape,
    sink: Sink,
    death: Death | None,
) -> None:
    turns_done = itertools.count(1)

    async def play(session: int) -> None:
        for turn in sessions[session]:
            way = arm.way(turn.separated)
            if turn.abort_after_s is not None:
                await _ask_and_abort(client, way, turn, turn.abort_after_s)
            answer = await client.ask(
                way, turn.input_ids, shape.output_tokens, prefill_may_die=death is not None
            )
            if death and next(turns_done) == death.after_turns:
                os.kill(death.pid, signal.SIGKILL)
            position = first_difference(turn.expected, answer.output_ids)
            lead = None
            if position is not None:
                common = turn.input_ids + turn.expected[:position]
                lead = await client.top_gap(reference, common)
            sink.write(
                "turn",
                arm=name,
                session=turn.session,
                turn=turn.number,
                separated=way.prefill is not None,
                aborted_before=turn.abort_after_s is not None,
                prefill_lost=answer.prefill_lost,
                input_tokens=len(turn.input_ids),
                cached_tokens=answer.cached_tokens,
                output_tokens=len(turn.expected),
                first_difference=position,
                lead_nats=lead,
            )

    await _in_lanes(play, shape)


async def _in_lanes(play: Callable[[int], Any], shape: Shape) -> list[Any]:
    results: list[Any] = [None] * shape.sessions
    numbers = iter(range(shape.sessions))

    async def lane() -> None:
        for number in numbers:
            results[number] = await play(number)

    async with asyncio.TaskGroup() as group:
        for _ in range(shape.at_once):
            group.create_task(lane())
    return results


def first_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """The first position at which the two differ, None where they are equal."""
    for position, (a, b) in enumerate(zip(expected, found, strict=False)):
        if a != b:
            return position
    return None if len(expected) == len(found) else min(len(expected), len(found))


def summary(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """A row for each arm and for cold and cached turns."""
    rows = []
    for arm in dict.fromkeys(s["arm"] for s in samples):
        for cached in (False, True):
            turns = [s for s in samples if s["arm"] == arm and bool(s["turn"]) == cached]
            if not turns:
                continue
            different = [s for s in turns if s["first_difference"] is not None]
            leads = [s["lead_nats"] for s in different if s["lead_nats"] is not None]
            rows.append(
                {
                    "arm": arm,
                    "turns": "later" if cached else "first",
                    "outputs": len(turns),
                    "separated": sum(s["separated"] for s in turns),
                    "prefill_lost": sum(s["prefill_lost"] for s in turns),
                    "aborted_before": sum(s["aborted_before"] for s in turns),
                    "identical": len(turns) - len(different),
                    "different": len(different),
                    "first_difference": min(
                        (s["first_difference"] for s in different), default=None
                    ),
                    "lead_nats_p50": quantile(leads, 0.5) if leads else None,
                    "lead_nats_max": max(leads, default=None),
                    "cached_tokens": sum(s["cached_tokens"] for s in turns),
                    "input_tokens": sum(s["input_tokens"] for s in turns),
                }
            )
    return rows
