"""A colocated, a prefill and an elastic worker of real SGLang on a CPU, and ways to ask them.

Owns how the workers are started, replaced and asked; the tests say what of.
``DELTASERVE_LIVE_ENGINE`` names the Python of another environment with SGLang and NIXL than the
installed one.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import sglang_ext
from launch.models import write_shape
from tests.live.conftest import installed, total_of

START_S = 400.0
ANSWER_S = 90.0
VOCABULARY = 1000
"""Token ids of the tiny model that prompts are made of."""
TEXT_VOCABULARY = 32768
"""Token ids of the tiny model with text: SGLang's own tests ask for ids up to 30,000."""

MODEL: dict[str, Any] = {
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


def engine_python() -> str:
    """The Python of an environment with SGLang; see `installed` where it is missing."""
    return os.environ.get("DELTASERVE_LIVE_ENGINE") or str(installed("sglang").python)


def needs_mooncake(python: str) -> None:
    """Skips the test where this Python cannot load Mooncake's engine."""
    command = [python, "-c", "import mooncake.engine"]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"no Mooncake in the engine's environment: {tried.stderr[-200:]}")


def model_files(text: bool) -> dict[str, bytes]:
    """The tiny model's folder. For text it has ids enough for SGLang's own tests, each a token."""
    if not text:
        return {"config.json": json.dumps(MODEL).encode()}
    shape = write_shape("tiny-qwen3-moe")
    files = {path.name: path.read_bytes() for path in shape.iterdir() if path.is_file()}
    tokenizer = json.loads(files["tokenizer.json"])
    like = tokenizer["added_tokens"][0] | {"special": False}
    tokenizer["added_tokens"] += [
        like | {"id": token, "content": f"<|{token}|>"}
        for token in range(len(tokenizer["model"]["vocab"]), TEXT_VOCABULARY)
    ]
    config = json.dumps(MODEL | {"vocab_size": TEXT_VOCABULARY})
    return files | {
        "tokenizer.json": json.dumps(tokenizer).encode(),
        "config.json": config.encode(),
    }


@dataclass
class Server:
    """One SGLang server and the process group it lives in."""

    name: str
    port: int
    folder: Path
    flags: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    text: bool = False
    """With a tokenizer and grammars; else it takes and gives token ids alone."""
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
        model = self.folder / ("model-with-text" if self.text else "model")
        model.mkdir(exist_ok=True)
        for file, content in model_files(self.text).items():
            (model / file).write_bytes(content)
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
            # llguidance would have a C++ compiler make a kernel at the first answer with a grammar.
            **({"TORCHDYNAMO_DISABLE": "1"} if self.text else {}),
            **self.variables,
        }
        command = [
            *(engine_python(), "-m", "sglang.launch_server"),
            *("--model-path", str(model)),
            *("--device", "cpu", "--dtype", "float32", "--load-format", "dummy"),
            *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
            *("--grammar-backend", "llguidance" if self.text else "none", "--sleep-on-idle"),
            *(() if self.text else ("--skip-tokenizer-init",)),
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
        return await ask(self.client, server, body)

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


async def ask(
    client: aiohttp.ClientSession, server: Server, body: dict[str, Any]
) -> dict[str, Any]:
    """The answer of a server's `/generate`, which has to be one."""
    async with client.post(f"{server.url}/generate", json=body) as answer:
        result: dict[str, Any] = await answer.json()
        assert answer.status == 200, result
        return result


@asynccontextmanager
async def client_of(*servers: Server) -> AsyncIterator[aiohttp.ClientSession]:
    """A client, once the servers are up."""
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as client:
        await asyncio.gather(*(server.ready(client) for server in servers))
        yield client


@asynccontextmanager
async def asking(
    colocated: Server, prefill: Server, elastic: Server, bootstrap_port: int
) -> AsyncIterator[Fleet]:
    """The three workers, once they are up."""
    async with client_of(colocated, prefill, elastic) as client:
        yield Fleet(colocated, prefill, elastic, bootstrap_port, client)


@dataclass
class Workers:
    """The servers of this module; those of another page size replace each other."""

    folder: Path
    base_port: int
    text: bool = False
    running: dict[str, Server] = field(default_factory=dict)

    def bring_up(self, name: str, key: str, flags: tuple[str, ...], **variables: str) -> Server:
        """The server `name`, started anew unless it runs with the same `key`."""
        old = self.running.get(name)
        if old is not None and old.variables.get("KEY") == key and old.process is not None:
            return old
        if old is not None:
            old.kill()
        offset = {"colocated": 0, "prefill": 1, "elastic": 2, "paced": 3}[name]
        server = Server(
            name,
            self.base_port + offset,
            self.folder,
            flags,
            variables | {"KEY": key},
            self.text,
        )
        server.log.unlink(missing_ok=True)
        server.start()
        self.running[name] = server
        return server

    def colocated(self) -> Server:
        """The worker that says what is true: no feature changes its scheduling."""
        return self.bring_up("colocated", "", ("--disable-overlap-schedule",))

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
            self.colocated(),
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
