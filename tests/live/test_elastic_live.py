"""An elastic worker against a colocated one, with real SGLang and real NIXL on a CPU.

Random sessions of several turns go to an elastic worker, each turn either prefilled there or on a
prefill worker; clients give up in between, and the prefill worker dies and comes back. Whatever the
path, the tokens are those of a colocated worker, and in the end all memory is accounted for.

Each release that is pinned runs them where it is installed. ``DELTASERVE_LIVE_SESSIONS`` sets the
number of sessions (default 200) and ``DELTASERVE_LIVE_SEED`` their seed; ``DELTASERVE_LIVE_ENGINE``
names the Python of another environment with SGLang and NIXL, which then runs them alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import sglang_ext
from launch.engines import environment_for
from tests.live.conftest import total_of

pytestmark = [pytest.mark.live, pytest.mark.timeout(1200)]

SESSIONS = int(os.environ.get("DELTASERVE_LIVE_SESSIONS", "200"))
SEED = int(os.environ.get("DELTASERVE_LIVE_SEED", "1"))
START_S = 400.0
ANSWER_S = 90.0
VOCABULARY = 1000

MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "decoder_sparse_step": 1,
    "eos_token_id": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 128,
    "max_position_embeddings": 32768,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000000,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": 1024,
}


DEFAULT, NEWER = "0.5.17", "0.5.23"
"""The pinned releases of SGLang."""

ON_BOTH = pytest.mark.parametrize("workers", [DEFAULT, NEWER], indirect=True, scope="module")
"""For a test of what differs between the releases; each costs engine starts on both."""


def engine_python(version: str = DEFAULT) -> str:
    """The Python of an environment with SGLang `version`, or a skip."""
    given = os.environ.get("DELTASERVE_LIVE_ENGINE")
    if given and version == DEFAULT:
        return given
    if given:
        pytest.skip("DELTASERVE_LIVE_ENGINE names another environment")
    environment = environment_for("sglang", "cpu", version)
    if not environment.installed:
        pytest.skip(f"not installed: deltaserve launch install {environment.name}")
    return str(environment.python)


@dataclass
class Server:
    """One SGLang server and the process group it lives in."""

    name: str
    port: int
    folder: Path
    flags: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    version: str = DEFAULT
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    def start(self) -> None:
        root = Path(sglang_ext.__file__).parent.parent
        # The engine's environment does not have to hold our package: an entry point beside it does.
        path = self.folder / "path"
        info = path / "deltaserve-0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deltaserve\nVersion: 0\n")
        (info / "entry_points.txt").write_text(
            "[sglang.srt.plugins]\ndeltaserve = sglang_ext.plugin:install\n"
        )
        with suppress(FileExistsError):
            (path / "sglang_ext").symlink_to(root / "sglang_ext")
        model = self.folder / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(MODEL))
        environment = os.environ | {
            "PYTHONPATH": f"{path}:{path}/sglang_ext/cpu/stubs",
            "SGLANG_PLUGINS": "deltaserve",
            "SGLANG_USE_CPU_ENGINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
            "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "1",
            "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "10",
            "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "20",
            "DELTASERVE_SGLANG": "cpu",
            **self.variables,
        }
        command = [
            *(engine_python(self.version), "-m", "sglang.launch_server"),
            *("--model-path", str(model)),
            *("--device", "cpu", "--dtype", "float32", "--load-format", "dummy"),
            *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
            *("--grammar-backend", "none", "--skip-tokenizer-init", "--sleep-on-idle"),
            *("--mem-fraction-static", "0.4", "--host", "127.0.0.1", "--port", str(self.port)),
            *("--max-running-requests", "16", "--chunked-prefill-size", "256"),
            "--enable-metrics",
            *self.flags,
        ]
        if "--max-total-tokens" not in self.flags:
            command += ["--max-total-tokens", "32768"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill(self) -> None:
        if self.process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = None

    async def ready(self, client: aiohttp.ClientSession) -> None:
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            if self.process is None or self.process.poll() is not None:
                pytest.fail(f"{self.name} ended while starting:\n{self.tail()}")
            with suppress(aiohttp.ClientError, TimeoutError):
                async with client.get(
                    f"{self.url}/health", timeout=aiohttp.ClientTimeout(total=5)
                ) as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.5)
        pytest.fail(f"{self.name} was not up after {START_S:.0f} s:\n{self.tail()}")

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace")[-6000:].splitlines()[-40:])


@dataclass
class Fleet:
    """A colocated worker for the truth, a prefill and an elastic worker, and a way to ask them."""

    colocated: Server
    prefill: Server
    elastic: Server
    bootstrap_port: int
    client: aiohttp.ClientSession

    async def ask(self, server: Server, body: dict[str, Any]) -> dict[str, Any]:
        async with self.client.post(f"{server.url}/generate", json=body) as answer:
            result: dict[str, Any] = await answer.json()
            assert answer.status == 200, result
            return result

    async def truth(self, ids: list[int], tokens: int) -> list[int]:
        """What the colocated worker says."""
        output: list[int] = (await self.ask(self.colocated, request(ids, tokens)))["output_ids"]
        return output

    async def local(self, body: dict[str, Any]) -> dict[str, Any]:
        return await self.ask(self.elastic, body)

    async def separated(self, body: dict[str, Any], *, tell_prefill: bool = True) -> dict[str, Any]:
        """Both workers get the request, as from a router; the elastic one's answer counts."""
        body = body | {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": random.getrandbits(62),
        }

        async def prefill() -> None:
            # Its death is what is being tested.
            with suppress(aiohttp.ClientError, AssertionError, TimeoutError):
                await self.ask(self.prefill, body)

        task = asyncio.create_task(prefill()) if tell_prefill else None
        try:
            return await self.ask(self.elastic, body)
        finally:
            if task is not None:
                task.cancel()

    async def tokens_during(self, prompt: list[int]) -> int:
        """Tokens that a running request gets while `prompt` is prefilled locally."""
        body = request([7] * 50, 400, stream=True)
        async with self.client.post(f"{self.elastic.url}/generate", json=body) as stream:
            arrived = 0
            before: int | None = None
            task: asyncio.Task[dict[str, Any]] | None = None
            async for line in stream.content:
                if not line.startswith(b"data: {"):
                    continue
                arrived = json.loads(line.removeprefix(b"data: "))["meta_info"]["completion_tokens"]
                if arrived >= 3 and task is None:
                    before = arrived
                    task = asyncio.create_task(self.local(request(prompt, 1)))
                if task is not None and task.done():
                    break
            assert task is not None
            assert before is not None
            assert (await task)["meta_info"]["cached_tokens"] == 0
            return arrived - before

    async def abort(self, rid: str) -> None:
        with suppress(aiohttp.ClientError):
            async with self.client.post(f"{self.elastic.url}/abort_request", json={"rid": rid}):
                pass

    async def state(self) -> dict[str, Any]:
        async with self.client.get(f"{self.elastic.url}/server_info") as answer:
            state: dict[str, Any] = (await answer.json())["internal_states"][0]
            elastic: dict[str, Any] = state["deltaserve_elastic"]
            return elastic

    async def reach(self, stage: str, asked: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Starts a request and waits until one is at `stage`, a queue of `state`."""
        task = asyncio.create_task(asked)
        until = time.monotonic() + 20
        while not (await self.state())["queues"][stage]:
            assert not task.done(), f"the request was never seen at {stage}: {task.result()}"
            assert time.monotonic() < until, f"nothing at {stage}\n{self.elastic.tail()}"
        return task

    async def settled(self, within_s: float = 40.0) -> dict[str, Any]:
        """The elastic worker's accounts, once it says that it is idle."""
        until = time.monotonic() + within_s
        while True:
            state = await self.state()
            if state["idle"]:
                return state
            assert time.monotonic() < until, f"still busy: {state}\n{self.elastic.tail()}"
            await asyncio.sleep(0.5)

    async def check_accounts(self) -> dict[str, Any]:
        """Everything is free or cached, nothing locked; SGLang's idle checks are content."""
        state = await self.settled()
        kv = state["kv_tokens"]
        assert kv["free"] + kv["cached"] == kv["total"], state
        assert kv["locked"] == 0, state
        for slots in ("request_slots", "metadata_slots"):
            assert state[slots]["free"] == state[slots]["total"], state
        assert not any(state["queues"].values()), state
        log = self.elastic.log.read_text(errors="replace")
        assert not re.search(r"leak|Traceback|double free|Eviction insufficient", log), (
            self.elastic.tail()
        )
        async with self.client.get(f"{self.elastic.url}/metrics") as answer:
            page = await answer.text()
        for event, count in state["counts"].items():
            assert total_of(page, f'deltaserve_elastic_events_total{{event="{event}"}}') == count
        async with self.client.post(f"{self.elastic.url}/flush_cache") as answer:
            assert answer.status == 200, await answer.text()
        kv = (await self.state())["kv_tokens"]
        assert kv["free"] == kv["total"], kv
        return state


def request(ids: list[int], tokens: int, **more: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}
    return {"input_ids": ids, "sampling_params": sampling} | more


@asynccontextmanager
async def asking(
    colocated: Server, prefill: Server, elastic: Server, bootstrap_port: int
) -> AsyncIterator[Fleet]:
    """The three workers, once they are up."""
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as client:
        await asyncio.gather(*(server.ready(client) for server in (colocated, prefill, elastic)))
        yield Fleet(colocated, prefill, elastic, bootstrap_port, client)


@dataclass
class Workers:
    """The servers of this module; those of another page size replace each other."""

    folder: Path
    base_port: int
    version: str = DEFAULT
    running: dict[str, Server] = field(default_factory=dict)

    def bring_up(self, name: str, key: str, flags: tuple[str, ...], **variables: str) -> Server:
        """The server `name`, started anew unless it runs with the same `key`."""
        old = self.running.get(name)
        if old is not None and old.variables.get("KEY") == key and old.process is not None:
            return old
        if old is not None:
            old.kill()
        offset = {"colocated": 0, "prefill": 1, "elastic": 2}[name]
        server = Server(
            name,
            self.base_port + offset,
            self.folder,
            flags,
            variables | {"KEY": key},
            self.version,
        )
        server.log.unlink(missing_ok=True)
        server.start()
        self.running[name] = server
        return server

    def fleet(
        self,
        key: str,
        common: tuple[str, ...],
        elastic: tuple[str, ...],
        *,
        backend: str = "nixl",
        **variables: str,
    ) -> AbstractAsyncContextManager[Fleet]:
        """A colocated, a prefill and an elastic worker, up once entered."""
        bootstrap_port = self.base_port + 10
        separated = ("--disaggregation-transfer-backend", backend, *common)
        return asking(
            self.bring_up("colocated", "", ("--disable-overlap-schedule",)),
            self.bring_up(
                "prefill",
                key,
                (
                    *("--disaggregation-mode", "prefill", "--disable-overlap-schedule"),
                    *("--disaggregation-bootstrap-port", str(bootstrap_port)),
                    *separated,
                ),
                DELTASERVE_SGLANG="cpu,telemetry",
                DELTASERVE_TELEMETRY_DIR=str(self.folder / key / "steps"),
                **{name: value for name, value in variables.items() if name == "TRITON_INTERPRET"},
            ),
            self.bring_up(
                "elastic",
                key,
                (
                    *("--disaggregation-mode", "decode"),
                    "--disaggregation-decode-enable-radix-cache",
                    *elastic,
                    *separated,
                ),
                **({"DELTASERVE_SGLANG": "cpu,elastic"} | variables),
            ),
            bootstrap_port,
        )


@pytest.fixture(scope="module", params=[DEFAULT])
def workers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Workers]:
    engine_python(request.param)
    base_port = int(os.environ.get("DELTASERVE_LIVE_BASE_PORT", "32100"))
    workers = Workers(tmp_path_factory.mktemp("elastic"), base_port, request.param)
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


@ON_BOTH
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
        await sessions.run(SESSIONS)
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
    assert sessions.seen["local"] > SESSIONS / 2
    assert sessions.seen["separated"] > SESSIONS / 2
    assert sessions.seen["abandoned"] > 0
    assert fallbacks > 0
    assert state["counts"]["local"] > 0


@ON_BOTH
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


@ON_BOTH
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


@ON_BOTH
async def test_pages_of_64_overlap_retraction_and_a_pool_that_is_nearly_exhausted(
    workers: Workers,
) -> None:
    async with workers.fleet(
        "page 64",
        ("--page-size", "64"),
        ("--max-total-tokens", "4096", "--num-reserved-decode-tokens", "32"),
        DELTASERVE_ELASTIC_INTERFERENCE="mixed",
        # SGLang's page allocator is a Triton kernel, which runs on a CPU in Triton's interpreter.
        TRITON_INTERPRET="1",
        SGLANG_TEST_RETRACT="1",
        SGLANG_TEST_RETRACT_INTERVAL="7",
    ) as fleet:
        sessions = Sessions(fleet, random.Random(SEED + 2), longest_tokens=1800)
        await sessions.run(max(8, SESSIONS // 4), at_once=12)
        prompt = sessions.tokens(1500)
        assert await fleet.tokens_during(prompt) >= len(prompt) / 256
        state = await fleet.check_accounts()
        assert "Testing retraction" in fleet.elastic.log.read_text(errors="replace")
    assert not sessions.wrong, sessions.wrong[:5]
    print(dict(sessions.seen), state["counts"], file=sys.stderr)


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

        sessions = Sessions(
            fleet, random.Random(SEED + 4), longest_tokens=1200, priorities=(0, 3, 50)
        )
        await sessions.run(max(8, SESSIONS // 5))
        await fleet.check_accounts()
    assert not sessions.wrong, sessions.wrong[:5]
    print(dict(sessions.seen), file=sys.stderr)
    assert sessions.seen["retractions"] > 0
    assert sessions.seen["local"] > 0
    assert sessions.seen["separated"] > 0


async def test_mooncake_over_tcp(workers: Workers) -> None:
    present = subprocess.run(
        [engine_python(), "-c", "import mooncake.engine"], capture_output=True, text=True
    )
    if present.returncode != 0:
        pytest.skip(f"no Mooncake in the engine's environment: {present.stderr[-200:]}")
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
