"""Prompts on demand against one running target, for microbenchmarks.

Owns when a fleet is up and how a made-up prompt becomes a request; prompts are cold unless a prefix
is given. Knows nothing of what is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

import launch
from deltaserve.errors import InputError
from eval import provenance
from launch.cache import make_folder
from replay.client import Client, ClientOptions
from replay.discovery import GUESSED_VOCAB_SIZE, find_engine, find_vocab_size
from replay.plan import Planned
from replay.prompts import WORDS
from replay.results import Result

BLOCK_TOKENS = 64


@dataclass(frozen=True)
class Bench:
    """A topology that is up: where to ask, and what the report says about it."""

    url: str
    topology: dict[str, Any]
    folder: Path
    vocab_size: int
    facts: dict[str, Any]

    @property
    def on_cpu(self) -> bool:
        return bool(self.topology["device"] == "cpu")

    @property
    def engine(self) -> str:
        return str(self.topology["engine"]["name"])


def separated(topology: launch.Topology) -> bool:
    """Whether requests pass a prefill and a decode worker."""
    return any(group.role in ("prefill", "decode") for group in topology.workers)


def smallest(topology: launch.Topology) -> launch.Topology:
    """What a microbenchmark needs of `topology`: one worker and no router, unless requests are
    separated; SGLang's telemetry on."""
    changes: dict[str, Any] = {}
    if topology.engine.name == "sglang":
        changes["telemetry"] = True
    if not separated(topology):
        group = topology.workers[0]
        gpus = group.gpus[: group.tensor_parallel]
        changes["workers"] = (group.model_copy(update={"count": 1, "gpus": gpus}),)
        changes["router"] = topology.router.model_copy(update={"kind": "none"})
    return topology.model_copy(update=changes)


@contextlib.contextmanager
def bench(topology: launch.Topology, folder: Path, say: Any) -> Iterator[Bench]:
    """Brings the smallest part of `topology` up in `folder`; asks its worker, or the router where
    requests are separated. Writes `bench.json` beside the fleet's files."""
    topology = smallest(topology)
    make_folder(folder)
    with launch.fleet(topology, folder, on_progress=say) as fleet:
        url = fleet.router_url if separated(topology) else fleet.workers[0].url
        if url is None:
            raise InputError(f"{topology.name}: separated workers need a router")
        described = topology.model_dump(mode="json")
        facts: dict[str, Any] = {
            "topology": described,
            "hardware": provenance.hardware(),
            "versions": provenance.versions() | {"engines": dict(fleet.engine_versions)},
            "git": provenance.git(),
            "made_at": provenance.now(),
        }
        (folder / "bench.json").write_bytes(orjson.dumps(facts, option=orjson.OPT_INDENT_2))
        yield Bench(
            url=url,
            topology=described,
            folder=folder,
            vocab_size=find_vocab_size(fleet.workers[0].url) or GUESSED_VOCAB_SIZE,
            facts=facts,
        )


@dataclass
class Prompt:
    """A prompt's blocks; `extended` continues it, so that a cache holds its beginning."""

    blocks: list[int]
    tokens: int


@dataclass
class Driver:
    """Sends prompts and returns results; times count from the driver's start."""

    client: Client
    origin_s: float
    unix_origin_s: float
    _fresh: int
    _results: dict[str, Result] = field(default_factory=dict)
    _first_tokens: int = 0
    _sent: int = 0

    def clock(self) -> float:
        """Seconds since the driver's start."""
        return time.monotonic() - self.origin_s

    @property
    def first_tokens(self) -> int:
        """First tokens seen so far, over all requests."""
        return self._first_tokens

    def prompt(self, tokens: int, after: Prompt | None = None) -> Prompt:
        """A prompt of `tokens` new tokens that nothing has seen, continuing `after` if given.

        A continued prompt keeps only the whole blocks of `after`.
        """
        whole = after.tokens // BLOCK_TOKENS if after is not None else 0
        kept = after.blocks[:whole] if after is not None else []
        new = -(-tokens // BLOCK_TOKENS)
        blocks = [*kept, *range(self._fresh, self._fresh + new)]
        self._fresh += new
        return Prompt(blocks, whole * BLOCK_TOKENS + tokens)

    async def ask(self, prompt: Prompt, output_tokens: int, session: str) -> Result:
        """Sends one request now and waits for its whole answer, or its failure."""
        self._sent += 1
        name = f"{session}-{self._sent}-{self._fresh}"
        request = Planned(
            index=self._sent,
            request_id=name,
            session_id=session,
            turn=0,
            trace_s=0.0,
            input_length=prompt.tokens,
            output_length=output_tokens,
            block_size=BLOCK_TOKENS,
            hash_ids=np.asarray(prompt.blocks, dtype=np.int64),
            think_time_s=0.0,
            waits_for=(),
            tree=0,
        )
        with contextlib.suppress(asyncio.CancelledError):
            await self.client.send(request, self.clock())
        return self._results.pop(name)

    async def until_first_tokens(self, count: int, timeout_s: float) -> None:
        """Waits until so many first tokens came. Raises `TimeoutError`."""
        async with asyncio.timeout(timeout_s):
            while self._first_tokens < count:
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def driver(target: Bench, timeout_s: float = 600.0) -> AsyncIterator[Driver]:
    """A driver for `target`; its prompts differ from those of every earlier driver."""
    api, model = await asyncio.to_thread(find_engine, target.url)
    origin_s, unix_origin_s = time.monotonic(), time.time()
    options = ClientOptions(
        url=target.url,
        api=api,
        model=model,
        vocab_size=target.vocab_size,
        seed=0,
        timeout_s=timeout_s,
        prime_timeout_s=timeout_s,
        record_output_ids=False,
        splice_outputs=False,
        as_text=False,
        words=WORDS,
    )
    results: dict[str, Result] = {}

    def on_result(result: Result) -> None:
        results[result.request_id] = result

    def on_first_token(_ttft_s: float) -> None:
        made._first_tokens += 1

    client = Client(options, lambda: time.monotonic() - origin_s, on_result, on_first_token)
    with contextlib.closing(client):
        made = Driver(client, origin_s, unix_origin_s, time.time_ns() // 1000, results)
        yield made


def answered(result: Result) -> Result:
    """`result`, or `InputError` saying why the engine did not answer."""
    if result.error is not None:
        words = " ".join(result.error.message.split())[:300]
        raise InputError(
            f"the engine did not answer a prompt of {result.input_length} tokens: "
            f"{result.error.kind}: {words}"
        )
    return result
