"""Paced prefill on a colocated worker, with real SGLang on a CPU."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.live.elastic_fleet import ANSWER_S, VOCABULARY, Server, request

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """A worker as SGLang ships it, and a paced one with overlap scheduling."""
    base_port = int(os.environ.get("DELTASERVE_LIVE_BASE_PORT", "32100")) + 40
    folder: Path = tmp_path_factory.mktemp("paced")
    plain = Server("plain", base_port, folder, ("--disable-overlap-schedule",))
    paced = Server(
        "paced",
        base_port + 1,
        folder,
        variables={
            "DELTASERVE_SGLANG": "cpu,paced,telemetry",
            "DELTASERVE_TELEMETRY_DIR": str(folder / "steps"),
            "DELTASERVE_PACED_TARGET_ITL_MS": "40",
        },
    )
    try:
        for server in (plain, paced):
            server.start()
        yield plain, paced
    finally:
        for server in (plain, paced):
            server.kill()


@asynccontextmanager
async def ready(*servers: Server) -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    async with aiohttp.ClientSession(timeout=timeout) as client:
        await asyncio.gather(*(server.ready(client) for server in servers))
        yield client


async def answer(
    client: aiohttp.ClientSession, server: Server, ids: list[int], tokens: int
) -> list[int]:
    async with client.post(f"{server.url}/generate", json=request(ids, tokens)) as response:
        body: dict[str, Any] = await response.json()
        assert response.status == 200, body
        output: list[int] = body["output_ids"]
        return output


async def test_tokens_are_those_of_a_plain_worker_and_chunks_carry_the_decodes(
    servers: tuple[Server, Server],
) -> None:
    plain, paced = servers
    rng = random.Random(11)

    def prompt(tokens: int) -> list[int]:
        return [rng.randrange(3, VOCABULARY) for _ in range(tokens)]

    async with ready(plain, paced) as client:
        shared = prompt(300)
        asked = [(prompt(40), 120) for _ in range(4)]
        asked += [
            (shared + prompt(rng.randrange(20, 900)), rng.randrange(2, 30)) for _ in range(24)
        ]
        asked += [(prompt(5000), 4)]
        for begin in range(0, len(asked), 10):
            some = asked[begin : begin + 10]
            found = await asyncio.gather(*(answer(client, paced, *one) for one in some))
            expected = await asyncio.gather(*(answer(client, plain, *one) for one in some))
            assert found == expected
        async with client.get(f"{paced.url}/server_info") as response:
            state = (await response.json())["internal_states"][0]["deltaserve_paced"]
        assert state["steps"] > 20
        assert state["chunk_tokens"] < 5000
    steps = [
        line
        for path in (paced.folder / "steps").glob("*.jsonl")
        for line in map(json.loads, path.read_text().splitlines())
        if line["event"] == "step"
    ]
    mixed = [line for line in steps if line["forward_mode"] == "mixed"]
    assert mixed
    assert all(line["decode_requests"] > 0 for line in mixed)
    assert len({line["prefill_tokens"] for line in mixed}) > 3, "chunks do not follow their cost"
