"""Grammars on an elastic worker, for prompts that it prefills itself and those that it is sent, and
on a paced one.

Their tokens are those of a colocated worker, and those of requests beside them without a grammar.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.live.elastic_fleet import Fleet, Workers, ask, client_of, engine_python, request

pytestmark = [pytest.mark.live, pytest.mark.timeout(1200)]

BASE_PORT = int(os.environ.get("DELTASERVE_LIVE_BASE_PORT", "32100")) + 80
GRAMMAR = "yes|no|perhaps"


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    engine_python()
    workers = Workers(tmp_path, BASE_PORT, text=True)
    try:
        yield workers
    finally:
        for server in workers.running.values():
            server.kill()


async def ask_by_both_paths(fleet: Fleet, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers, whose tokens are the colocated worker's whichever way a request takes."""

    async def one(number: int, body: dict[str, Any]) -> dict[str, Any]:
        way = fleet.separated if number % 2 else fleet.local
        answer, expected = await asyncio.gather(way(body), fleet.ask(fleet.colocated, body))
        assert answer["output_ids"] == expected["output_ids"], (number, body)
        return answer

    answers: list[dict[str, Any]] = []
    for begin in range(0, len(bodies), 6):
        some = bodies[begin : begin + 6]
        answers += await asyncio.gather(*(one(begin + at, body) for at, body in enumerate(some)))
    return answers


async def test_grammars_give_the_tokens_of_a_colocated_worker(workers: Workers) -> None:
    rng = random.Random(11)
    shared = [rng.randrange(300, 900) for _ in range(400)]
    bodies = []
    for number in range(24):
        prompt = shared + [rng.randrange(300, 900) for _ in range(rng.randrange(1, 200))]
        body = request(prompt, 16)
        if number % 4 < 2:  # some of either path, beside others without
            body["sampling_params"] |= {"regex": GRAMMAR, "ignore_eos": False}
        bodies.append(body)
    async with workers.fleet("grammars", (), ("--disable-overlap-schedule",)) as fleet:
        answers = await ask_by_both_paths(fleet, bodies)
        state = await fleet.check_accounts()
    print(state["counts"], file=sys.stderr)
    for body, answer in zip(bodies, answers, strict=True):
        has_grammar = "regex" in body["sampling_params"]
        assert bool(re.fullmatch(GRAMMAR, answer["text"])) == has_grammar, answer["text"]
    fallbacks = sum(n for name, n in state["counts"].items() if name.startswith("fallback"))
    assert state["counts"]["separated"] >= 12 > fallbacks


async def test_a_prompt_whose_grammar_has_to_be_compiled_is_paced_from_its_first_chunk(
    workers: Workers,
) -> None:
    steps = workers.folder / "steps"
    paced = workers.bring_up(
        "paced",
        "",
        ("--chunked-prefill-size", "4096"),
        DELTASERVE_SGLANG="cpu,paced,telemetry",
        DELTASERVE_TELEMETRY_DIR=str(steps),
        DELTASERVE_PACED_TARGET_ITL_MS="40",
    )

    def written() -> list[dict[str, Any]]:
        lines = [line for path in steps.glob("*.jsonl") for line in path.open()]
        return [step for step in map(json.loads, lines) if step["event"] == "step"]

    async with client_of(paced) as client:
        decoding = asyncio.create_task(ask(client, paced, request([7] * 40, 2000)))
        while not any(step["prefill_tokens"] == 40 for step in written()):
            assert not decoding.done(), paced.tail()
            await asyncio.sleep(0.1)
        body = request([300 + at % 500 for at in range(3000)], 4)
        body["sampling_params"] |= {"regex": GRAMMAR, "ignore_eos": False}
        await ask(client, paced, body)
        assert not decoding.done()
        decoding.cancel()
    beside = [(step["prefill_tokens"], step["decode_requests"]) for step in written()]
    chunks = [tokens for tokens, decodes in beside if tokens and decodes]
    assert sum(chunks) == 3000, beside
    assert chunks[0] == 128, chunks
