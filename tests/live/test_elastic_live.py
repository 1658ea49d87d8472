"""Elastic and paced workers against a plain colocated one, with real SGLang and real NIXL on a CPU.

Random sessions of several turns go to an elastic worker, each turn either prefilled there or on a
prefill worker; clients give up in between, and the prefill worker dies and comes back. Whatever the
path, the tokens are those of a colocated worker, and in the end all memory is accounted for. So are
those of a colocated worker whose prefill is paced.

Each release that is pinned runs them where it is installed. The sessions with deaths are 200 on the
newer one and 60 on the other, whose adapter has seen the most runs. ``DELTASERVE_LIVE_SESSIONS``
sets their number for both, ``DELTASERVE_LIVE_SEED`` the seed of all. ``DELTASERVE_LIVE_ENGINE``
names the Python of another environment with SGLang and NIXL, which then runs them alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from tests.live.conftest import total_of
from tests.live.elastic_fleet import (
    VOCABULARY,
    Fleet,
    Server,
    Workers,
    ask,
    client_of,
    engine_python,
    needs_mooncake,
    request,
)

pytestmark = [pytest.mark.live, pytest.mark.timeout(1200)]

SESSIONS = int(os.environ.get("DELTASERVE_LIVE_SESSIONS", "200"))
SEED = int(os.environ.get("DELTASERVE_LIVE_SEED", "1"))


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    engine_python()
    base_port = int(os.environ.get("DELTASERVE_LIVE_BASE_PORT", "32100"))
    workers = Workers(tmp_path_factory.mktemp("elastic"), base_port)
    try:
        yield workers
    finally:
        for server in workers.running.values():
            server.kill()


@dataclass
class Sessions:
    """Random sessions on one fleet, and what became of their turns."""

    fleet: Fleet
    rng: random.Random
    longest_tokens: int
    mute_share: float = 0.01
    priorities: tuple[int, ...] = ()
    seen: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(3, VOCABULARY) for _ in range(count)]

    async def run(self, sessions: int, at_once: int = 8) -> None:
        prefixes = [self.tokens(160) for _ in range(3)]
        numbers = iter(range(sessions))

        async def lane() -> None:
            for number in numbers:
                await self.session(number, self.rng.choice(prefixes))

        await asyncio.gather(*(lane() for _ in range(at_once)))

    async def session(self, number: int, prefix: list[int]) -> None:
        ids = prefix + self.tokens(self.rng.randrange(1, 200))
        for turn in range(self.rng.randrange(2, 5)):
            longest = max(2, self.longest_tokens - len(ids) - 32)
            more = self.rng.choice((20, 90, 300, 900))
            ids = ids + self.tokens(min(longest, self.rng.randrange(1, more)))
            tokens = self.rng.randrange(1, 13)
            expected = asyncio.create_task(self.fleet.truth(ids, tokens))
            while (answer := await self.turn(f"s{number}t{turn}", ids, tokens)) is None:
                pass
            if answer != await expected:
                self.wrong.append(f"session {number} turn {turn}, {len(ids)} tokens: {answer}")
            ids = ids + answer

    async def turn(self, name: str, ids: list[int], tokens: int) -> list[int] | None:
        """One attempt at a turn: its tokens, or None where the client gave up."""
        rid = f"{name}-{self.rng.getrandbits(32):x}"
        body = request(ids, tokens, rid=rid)
        if self.priorities:
            body["priority"] = self.rng.choice(self.priorities)
        path = self.rng.choice(("local", "separated"))
        if path == "local":
            asked = asyncio.create_task(self.fleet.local(body))
        else:
            mute = self.rng.random() < self.mute_share
            asked = asyncio.create_task(self.fleet.separated(body, tell_prefill=not mute))
        giving_up = self.rng.random()
        if giving_up < 0.12:
            await asyncio.wait([asked], timeout=self.rng.uniform(0, 0.6))
            if not asked.done():
                self.seen["abandoned"] += 1
                if giving_up < 0.06:
                    asked.cancel()
                else:
                    await self.fleet.abort(rid)
                with suppress(asyncio.CancelledError, AssertionError, aiohttp.ClientError):
                    await asked
                return None
        result = await asked
        assert result["meta_info"]["finish_reason"]["type"] == "length", result["meta_info"]
        self.seen[path] += 1
        self.seen["retractions"] += result["meta_info"].get("num_retractions") or 0
        output: list[int] = result["output_ids"]
        return output

    async def check_that_a_deadline_ends_what_cannot_be_in_time(self) -> None:
        """A transfer that never comes is given up after 10 s; too late for who wanted 5."""
        body = request(self.tokens(100), 2)
        body["sampling_params"]["custom_params"] = {"deltaserve_deadline_s": 5}
        with pytest.raises(AssertionError, match="Decode transfer failed"):
            await self.fleet.separated(body, tell_prefill=False)
        assert (await self.fleet.state())["counts"]["fallback_refused_timeout"] == 1


async def test_any_path_gives_the_tokens_of_a_colocated_worker(workers: Workers) -> None:
    async with workers.fleet(
        "page 1", (), ("--disable-overlap-schedule",), DELTASERVE_ELASTIC_TARGET_ITL_MS="40"
    ) as fleet:
        sessions = Sessions(fleet, random.Random(SEED), longest_tokens=2500)

        async def deaths() -> None:
            for _ in range(2):
                await asyncio.sleep(8)
                fleet.prefill.kill()
                await asyncio.sleep(3)
                fleet.prefill.start()
                await fleet.prefill.ready(fleet.client)

        dying = asyncio.create_task(deaths())
        count = SESSIONS
        await sessions.run(count)
        while not dying.done():  # the second death, too, is to hit transfers
            await sessions.run(8)
        await dying
        await sessions.check_that_a_deadline_ends_what_cannot_be_in_time()
        prompt = sessions.tokens(2000)
        assert await fleet.tokens_during(prompt) >= len(prompt) / 256
        # The worker that came back is used again.
        await Sessions(fleet, random.Random(SEED + 1), 2500).run(8)
        state = await fleet.check_accounts()

    assert not sessions.wrong, sessions.wrong[:5]
    fallbacks = sum(n for name, n in state["counts"].items() if re.match("fallback_(?!ref)", name))
    print(dict(sessions.seen), state["counts"], file=sys.stderr)
    assert sessions.seen["local"] > count / 2
    assert sessions.seen["separated"] > count / 2
    assert sessions.seen["abandoned"] > 0
    assert fallbacks > 0
    assert state["counts"]["local"] > 0


async def test_an_abort_at_any_stage_leaves_nothing_behind(workers: Workers) -> None:
    async with workers.fleet(
        "page 1", (), ("--disable-overlap-schedule",), DELTASERVE_ELASTIC_TARGET_ITL_MS="40"
    ) as fleet:
        tokens = Sessions(fleet, random.Random(SEED + 5), 2500).tokens
        nobody = {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": fleet.bootstrap_port + 1,
            "bootstrap_room": 7,
        }
        before = (await fleet.state())["counts"]

        async def end(rid: str, task: asyncio.Task[Any]) -> None:
            await fleet.abort(rid)
            # An answer that says "abort" or an error, but one of them, and soon.
            done, _ = await asyncio.wait([task], timeout=8)
            assert done, f"{rid} hangs\n{fleet.elastic.tail()}"
            if task.exception() is None:
                assert task.result()["meta_info"]["finish_reason"]["type"] == "abort"

        long_prompt = tokens(9000)
        body = request(long_prompt, 2, rid="abort-prefilling")
        await end("abort-prefilling", await fleet.reach("prefilling", fleet.local(body)))

        ahead = await fleet.reach("prefilling", fleet.local(request(tokens(9000), 2)))
        body = request(tokens(600), 2, rid="abort-local")
        await end("abort-local", await fleet.reach("local", fleet.local(body)))
        await ahead

        body = request(tokens(50), 4000, rid="abort-running")
        await end("abort-running", await fleet.reach("running", fleet.local(body)))

        body = request(tokens(50), 2, rid="abort-preallocation") | nobody
        asked = await fleet.reach("preallocation", fleet.ask(fleet.elastic, body))
        await end("abort-preallocation", asked)

        body = request(tokens(300), 2, rid="abort-transfer")
        asked = await fleet.reach("transfer", fleet.separated(body, tell_prefill=False))
        await end("abort-transfer", asked)

        # What was begun and thrown away is not in the way of, nor mixed up with, the same again.
        answer = await fleet.local(request(long_prompt, 6))
        assert answer["output_ids"] == await fleet.truth(long_prompt, 6)
        counts = (await fleet.check_accounts())["counts"]
        assert counts.get("aborted_transfer", 0) - before.get("aborted_transfer", 0) == 1
        assert {n: c for n, c in counts.items() if n.startswith("fallback")} == {
            n: c for n, c in before.items() if n.startswith("fallback")
        }


async def test_a_pause_lets_the_cache_be_flushed_and_local_requests_go_on_after_it(
    workers: Workers,
) -> None:
    """A weight update pauses, flushes the cache, and ends the worker where that is refused."""
    async with workers.fleet(
        "page 1", (), ("--disable-overlap-schedule",), DELTASERVE_ELASTIC_TARGET_ITL_MS="40"
    ) as fleet:

        async def post(path: str, body: dict[str, Any]) -> int:
            async with fleet.client.post(f"{fleet.elastic.url}{path}", json=body) as answer:
                return answer.status

        tokens = Sessions(fleet, random.Random(SEED + 6), 2500).tokens
        prompts = [tokens(300), tokens(200), tokens(9000)]
        running = [
            await fleet.reach("running", fleet.local(request(prompt, 300)))
            for prompt in prompts[:2]
        ]
        running.append(await fleet.reach("prefilling", fleet.local(request(prompts[2], 3))))
        assert await post("/pause_generation", {"mode": "retract"}) == 200
        until = time.monotonic() + 20
        while (await fleet.state())["queues"]["local"] < 3:
            assert time.monotonic() < until, fleet.elastic.tail()
        assert not any(task.done() for task in running)
        assert await post("/flush_cache", {}) == 200
        assert await post("/continue_generation", {}) == 200
        for prompt, task, count in zip(prompts, running, (300, 300, 3), strict=True):
            assert (await task)["output_ids"] == await fleet.truth(prompt, count)
        await fleet.check_accounts()


async def test_a_paced_worker_gives_the_tokens_of_a_plain_one_in_chunks_that_carry_decodes(
    workers: Workers,
) -> None:
    steps = workers.folder / "paced" / "steps"
    plain = workers.colocated()
    # With overlap scheduling, which the elastic workers of the tests above are without.
    paced = workers.bring_up(
        "paced",
        "",
        (),
        DELTASERVE_SGLANG="cpu,paced,telemetry",
        DELTASERVE_TELEMETRY_DIR=str(steps),
        DELTASERVE_PACED_TARGET_ITL_MS="40",
    )
    rng = random.Random(SEED + 7)

    def prompt(tokens: int) -> list[int]:
        return [rng.randrange(3, VOCABULARY) for _ in range(tokens)]

    shared = prompt(300)
    asked = [request(prompt(40), 120) for _ in range(4)]
    asked += [
        request(shared + prompt(rng.randrange(20, 900)), rng.randrange(2, 30)) for _ in range(24)
    ]
    asked += [request(prompt(5000), 4)]
    async with client_of(plain, paced) as client:

        async def answers(server: Server, bodies: list[dict[str, Any]]) -> list[list[int]]:
            found = await asyncio.gather(*(ask(client, server, body) for body in bodies))
            return [answer["output_ids"] for answer in found]

        for begin in range(0, len(asked), 10):
            some = asked[begin : begin + 10]
            assert await answers(paced, some) == await answers(plain, some)
        async with client.get(f"{paced.url}/server_info") as response:
            state = (await response.json())["internal_states"][0]["deltaserve_paced"]
    paced.kill()
    assert state["steps"] > 20
    assert state["chunk_tokens"] < 5000
    mixed = [
        line
        for path in steps.glob("*.jsonl")
        for line in map(json.loads, path.read_text().splitlines())
        if line["event"] == "step" and line["forward_mode"] == "mixed"
    ]
    assert mixed
    assert all(line["decode_requests"] > 0 for line in mixed)
    assert len({line["prefill_tokens"] for line in mixed}) > 3, "chunks do not follow their cost"


async def test_pages_of_64_overlap_retraction_and_a_pool_that_is_nearly_exhausted(
    workers: Workers,
) -> None:
    async with workers.fleet(
        "page 64",
        ("--page-size", "64"),
        ("--max-total-tokens", "4096", "--num-reserved-decode-tokens", "32"),
        DELTASERVE_ELASTIC_INTERFERENCE="mixed",
        SGLANG_TEST_RETRACT="1",
        SGLANG_TEST_RETRACT_INTERVAL="7",
    ) as fleet:
        sessions = Sessions(fleet, random.Random(SEED + 2), longest_tokens=1800)
        await sessions.run(16, at_once=12)
        prompt = sessions.tokens(1500)
        assert await fleet.tokens_during(prompt) >= len(prompt) / 256
        state = await fleet.check_accounts()
        assert "Testing retraction" in fleet.elastic.log.read_text(errors="replace")
    assert not sessions.wrong, sessions.wrong[:5]
    print(dict(sessions.seen), state["counts"], file=sys.stderr)


async def tokens_back(fleet: Any) -> float:
    """Tokens that the elastic worker has loaded from host memory."""
    async with fleet.client.get(f"{fleet.elastic.url}/metrics") as page:
        return total_of(await page.text(), "sglang:load_back_tokens_total")


async def test_what_was_evicted_comes_back_from_host_memory_on_either_path(
    workers: Workers,
) -> None:
    async with workers.fleet(
        "host tier",
        (),
        (
            *("--enable-hierarchical-cache", "--hicache-ratio", "6"),
            *("--hicache-write-policy", "write_through", "--hicache-io-backend", "kernel"),
            *("--hicache-mem-layout", "layer_first", "--max-total-tokens", "4000"),
            *("--num-reserved-decode-tokens", "32"),
        ),
    ) as fleet:
        sessions = Sessions(fleet, random.Random(SEED + 8), longest_tokens=1500)
        for again in (fleet.local, fleet.separated):
            prompt = sessions.tokens(1500)
            await fleet.local(request(prompt, 1))
            for _ in range(3):  # their KV is more than the pool
                await fleet.local(request(sessions.tokens(1500), 1))
            # The prefill worker has not seen this prompt: what is cached is so on the elastic one.
            longer = prompt + sessions.tokens(40)
            answer = await again(request(longer, 6))
            assert answer["output_ids"] == await fleet.truth(longer, 6)
            assert answer["meta_info"]["cached_tokens"] >= len(prompt) - 1
        # Each of the two prompts, but for what the pool still had of it.
        known = await tokens_back(fleet)
        assert known > 2900

        # How many of theirs come back depends on which were evicted when they return.
        running = asyncio.create_task(sessions.run(48, at_once=14))
        while sessions.seen["separated"] < 12 and not running.done():
            await asyncio.sleep(0.05)
        fleet.prefill.kill()
        await asyncio.sleep(2)
        fleet.prefill.start()
        await running
        loaded = await tokens_back(fleet)
        state = await fleet.check_accounts()
    seen = f"{known:.0f} and {loaded - known:.0f} tokens back"
    print(dict(sessions.seen), state["counts"], seen, file=sys.stderr)
    assert not sessions.wrong, sessions.wrong[:5]
    assert loaded > 10_000
    assert sessions.seen["local"] > 0
    assert sessions.seen["separated"] > 0


async def test_a_more_important_request_pushes_others_out_and_they_come_back(
    workers: Workers,
) -> None:
    async with workers.fleet(
        "priorities",
        (),
        (
            *("--enable-priority-scheduling", "--priority-scheduling-preemption-threshold", "5"),
            *("--max-running-requests", "3", "--disable-overlap-schedule"),
        ),
    ) as fleet:
        # They fill the batch; one has to go for a request that is much more important.
        running = [
            asyncio.create_task(fleet.local(request([9 + i] * 40, 300, priority=0)))
            for i in range(3)
        ]
        until = time.monotonic() + 30
        while (await fleet.state())["queues"]["running"] < 3:
            assert time.monotonic() < until, fleet.elastic.tail()
            await asyncio.sleep(0.02)
        waiting = asyncio.create_task(fleet.local(request([20] * 40, 40, priority=1)))
        urgent = asyncio.create_task(fleet.local(request([21] * 40, 2, priority=50)))
        done, _ = await asyncio.wait(
            [*running, waiting, urgent], return_when=asyncio.FIRST_COMPLETED
        )
        assert urgent in done, "the urgent request had to wait for less important ones"
        answers = [await task for task in running]
        assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
        for i, answer in enumerate(answers):
            assert answer["output_ids"] == await fleet.truth([9 + i] * 40, 300)
        await waiting

        # The prefill worker is told of every prompt and never dies: each transfer has to arrive.
        sessions = Sessions(
            fleet,
            random.Random(SEED + 4),
            longest_tokens=1200,
            mute_share=0,
            priorities=(0, 3, 50),
        )
        for _ in range(20):  # in a few sessions it may be that nobody is pushed out
            await sessions.run(12)
            if sessions.seen["retractions"]:
                break
        state = await fleet.check_accounts()
    print(dict(sessions.seen), state["counts"], file=sys.stderr)
    assert not sessions.wrong, sessions.wrong[:5]
    assert "fallback_timeout" not in state["counts"], "a transfer was lost"
    assert sessions.seen["retractions"] > 0
    assert sessions.seen["local"] > 0
    assert sessions.seen["separated"] > 0


async def test_mooncake_over_tcp(workers: Workers) -> None:
    needs_mooncake(engine_python())
    async with workers.fleet(
        "mooncake", (), ("--disable-overlap-schedule",), backend="mooncake_tcp"
    ) as fleet:
        sessions = Sessions(fleet, random.Random(SEED + 3), longest_tokens=1800)
        running = asyncio.create_task(sessions.run(max(16, SESSIONS // 5)))
        while sessions.seen["separated"] < 12 and not running.done():
            await asyncio.sleep(0.05)
        fleet.prefill.kill()
        await running
        state = await fleet.check_accounts()
    assert not sessions.wrong, sessions.wrong[:5]
    assert state["counts"]["fallback_prefill_unreachable"] > 0
    transfers = [
        event
        for path in (workers.folder / "mooncake" / "steps").glob("*.jsonl")
        for event in map(json.loads, path.read_text().splitlines())
        if event["event"] == "kv_transfer" and event["ok"]
    ]
    assert {event["backend"] for event in transfers} == {"mooncake"}
    assert sum(event["bytes"] for event in transfers) > 0
    assert sum(event["saved_bytes"] for event in transfers) > 0
    print(dict(sessions.seen), state["counts"], file=sys.stderr)
