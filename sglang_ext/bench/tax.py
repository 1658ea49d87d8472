"""What an elastic worker that never separates costs, beside a colocated one at the same load.

Both get the same conversations in closed loop, in turns (A, B, A, B …), with empty caches at the
start of each round. Ratios pair the same requests; their intervals resample conversations. The
reference's even rounds beside its odd ones give the noise floor.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_ext.bench.client import Answer, Arm, Client, Prompts
from sglang_ext.bench.samples import Sample, Sink
from sglang_ext.bench.statistics import interval, quantile


@dataclass(frozen=True)
class Shape:
    """`lanes` conversations at a time, `sessions` of them a round."""

    lanes: int
    sessions: int
    turns: int
    first_tokens: int
    turn_tokens: int
    output_tokens: int
    rounds: int


async def measure(
    client: Client,
    arms: Sequence[Arm],
    reference: Arm,
    prompts: Prompts,
    shape: Shape,
    sink: Sink,
    say: Callable[[str], None],
) -> None:
    """Writes a ``request`` for each request and a ``round`` for each round of each arm."""
    everyone = [reference, *(arm for arm in arms if arm != reference)]
    sessions = [
        [prompts.make(shape.first_tokens)]
        + [prompts.make(shape.turn_tokens) for _ in range(shape.turns - 1)]
        for _ in range(shape.sessions)
    ]
    for round_number in range(shape.rounds + 1):
        # Every other round goes the other way round, so that a drift does not favour one.
        for arm in everyone if round_number % 2 else reversed(everyone):
            say(f"tax: {arm.name}, {f'round {round_number}' if round_number else 'warm-up'}")
            await _round(client, arm, reference, sessions, shape, round_number, sink)


async def _round(
    client: Client,
    arm: Arm,
    reference: Arm,
    sessions: Sequence[Sequence[list[int]]],
    shape: Shape,
    round_number: int,
    sink: Sink,
) -> None:
    await client.flush_arm(arm)
    asked: list[tuple[int, int, Answer]] = []

    async def lane(first: int) -> None:
        # A lane's sessions are fixed: no race decides which requests meet.
        for session in range(first, len(sessions), shape.lanes):
            ids: list[int] = []
            for turn, added in enumerate(sessions[session]):
                ids = ids + added
                answer = await client.ask(arm, ids, shape.output_tokens)
                asked.append((session, turn, answer))
                ids = ids + answer.output_ids

    began_s = client.clock()
    async with asyncio.TaskGroup() as group:
        for first in range(shape.lanes):
            group.create_task(lane(first))
    took_s = client.clock() - began_s
    warm_up = round_number == 0
    for session, turn, answer in asked:
        sink.write(
            "request",
            arm=arm.name,
            reference=reference.name,
            round=round_number,
            warm_up=warm_up,
            session=session,
            turn=turn,
            ttft_s=answer.ttft_s,
            tpot_s=answer.tpot_s,
            cached_tokens=answer.cached_tokens,
        )
    tokens = sum(answer.arrivals[-1][1] for _, _, answer in asked)
    sink.write(
        "round",
        arm=arm.name,
        reference=reference.name,
        round=round_number,
        warm_up=warm_up,
        output_tokens_s=tokens / took_s,
        took_s=took_s,
    )


def summary(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """A row for each arm: its ratios to the reference; the reference's is its noise floor."""
    reference = samples[0]["reference"]
    kept = [s for s in samples if not s["warm_up"]]
    requests = [s for s in kept if s["kind"] == "request"]
    rounds = [s for s in kept if s["kind"] == "round"]
    rows = []
    for arm in dict.fromkeys(s["arm"] for s in rounds):
        if arm == reference:
            numbers = sorted({s["round"] for s in rounds if s["arm"] == reference})
            pairs = list(zip(numbers[::2], numbers[1::2], strict=False))
            above = [s for s in requests if s["arm"] == arm and s["round"] in {b for _, b in pairs}]
            below = [s for s in requests if s["arm"] == arm and s["round"] in {a for a, _ in pairs}]
            speed = [
                _speed(rounds, arm, after) / _speed(rounds, arm, before) for before, after in pairs
            ]
        else:
            both = {s["round"] for s in rounds if s["arm"] == arm}
            both &= {s["round"] for s in rounds if s["arm"] == reference}
            above = [s for s in requests if s["arm"] == arm and s["round"] in both]
            below = [s for s in requests if s["arm"] == reference and s["round"] in both]
            speed = [
                _speed(rounds, arm, number) / _speed(rounds, reference, number)
                for number in sorted(both)
            ]
        if not speed:
            continue
        rows.append(
            {
                "arm": arm,
                "beside": f"{reference}, odd rounds" if arm == reference else reference,
                "rounds": len(speed),
                "requests": len(above),
                "ttft_p90_ms": quantile([s["ttft_s"] * 1e3 for s in above], 0.9),
                "tpot_p90_ms": quantile([s["tpot_s"] * 1e3 for s in above], 0.9),
                "ttft_p90": _ratio(above, below, "ttft_s"),
                "tpot_p90": _ratio(above, below, "tpot_s"),
                "throughput": interval(speed, lambda drawn: math.exp(_mean_log(drawn))),
            }
        )
    return rows


def _speed(rounds: Sequence[Sample], arm: str, number: int) -> float:
    (found,) = [s["output_tokens_s"] for s in rounds if s["arm"] == arm and s["round"] == number]
    return float(found)


def _mean_log(values: Sequence[float]) -> float:
    return sum(math.log(value) for value in values) / len(values)


def _ratio(above: Sequence[Sample], below: Sequence[Sample], key: str) -> dict[str, float | int]:
    """Ratio of the p90s; a conversation is drawn for both arms alike."""
    sessions: dict[int, tuple[list[float], list[float]]] = {}
    for side, samples in enumerate((above, below)):
        for sample in samples:
            sessions.setdefault(sample["session"], ([], []))[side].append(sample[key])

    def ratio(drawn: list[tuple[list[float], list[float]]]) -> float:
        over = quantile([v for values, _ in drawn for v in values], 0.9)
        under = quantile([v for _, values in drawn for v in values], 0.9)
        return over / under

    return interval([s for s in sessions.values() if s[0] and s[1]], ratio)
