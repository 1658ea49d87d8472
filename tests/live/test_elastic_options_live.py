"""What SGLang can do beside a radix cache, on an elastic worker: adapters, grammars, two ranks.

Requests are answered by an elastic worker in turn by itself and with a prefill worker, and their
tokens are those of a colocated worker with the same options.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.live.conftest import NEWER
from tests.live.elastic_fleet import (
    MODEL,
    TEXT_VOCABULARY,
    Fleet,
    Workers,
    engine_python,
    request,
)

pytestmark = [pytest.mark.live, pytest.mark.timeout(1200)]

BASE_PORT = int(os.environ.get("DELTASERVE_LIVE_BASE_PORT", "32100")) + 80
RANK = 4
"""Of the adapters."""

GRAMMAR = "yes|no|perhaps"


@contextmanager
def workers_in(folder: Path, flags: tuple[str, ...], *, text: bool = False) -> Iterator[Workers]:
    engine_python(NEWER)
    workers = Workers(folder, BASE_PORT, NEWER, flags, text)
    try:
        yield workers
    finally:
        for server in workers.running.values():
            server.kill()


def write_tensors(path: Path, shapes: dict[str, tuple[int, ...]], rng: np.random.Generator) -> None:
    """Random float32 tensors of `shapes`, in the form of safetensors."""
    header, data = {}, b""
    for name, shape in shapes.items():
        values = (0.1 * rng.standard_normal(shape)).astype("<f4").tobytes()
        offsets = (len(data), len(data) + len(values))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
        data += values
    described = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(described)) + described + data)


HIDDEN, HEAD = MODEL["hidden_size"], MODEL["head_dim"]
QUERIES, KEYS = MODEL["num_attention_heads"] * HEAD, MODEL["num_key_value_heads"] * HEAD
PROJECTIONS = {
    "q_proj": (QUERIES, HIDDEN),
    "k_proj": (KEYS, HIDDEN),
    "v_proj": (KEYS, HIDDEN),
    "o_proj": (HIDDEN, QUERIES),
}
"""Of a layer's attention: the shapes of their weights."""


def write_weights(folder: Path, rng: np.random.Generator) -> None:
    """Weights for the tiny model with text: SGLang loads adapters beside real ones only."""
    vocabulary = (TEXT_VOCABULARY, HIDDEN)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": vocabulary,
        "lm_head.weight": vocabulary,
        "model.norm.weight": (HIDDEN,),
    }
    wide = MODEL["moe_intermediate_size"]
    for layer in range(MODEL["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{name}.weight": shape for name, shape in PROJECTIONS.items()}
        shapes |= {f"{at}.self_attn.{name}_norm.weight": (HEAD,) for name in "qk"}
        shapes |= {
            f"{at}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")
        }
        shapes[f"{at}.mlp.gate.weight"] = (MODEL["num_experts"], HIDDEN)
        for expert in range(MODEL["num_experts"]):
            inner = f"{at}.mlp.experts.{expert}"
            shapes |= {f"{inner}.{name}_proj.weight": (wide, HIDDEN) for name in ("gate", "up")}
            shapes[f"{inner}.down_proj.weight"] = (HIDDEN, wide)
    folder.mkdir()
    write_tensors(folder / "model.safetensors", shapes, rng)


def write_adapter(folder: Path, rng: np.random.Generator) -> Path:
    """An adapter for the tiny model's attention, in PEFT's form, that changes what it says."""
    folder.mkdir()
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 100 * RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [*PROJECTIONS],
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(MODEL["num_hidden_layers"]):
        for name, (out, into) in PROJECTIONS.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            shapes[f"{at}.lora_A.weight"] = (RANK, into)
            shapes[f"{at}.lora_B.weight"] = (out, RANK)
    write_tensors(folder / "adapter_model.safetensors", shapes, rng)
    return folder


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


async def test_adapters_and_grammars_give_the_tokens_of_a_colocated_worker(tmp_path: Path) -> None:
    rng, weights = random.Random(11), np.random.default_rng(11)
    write_weights(tmp_path / "model-with-text", weights)
    paths = [f"{name}={write_adapter(tmp_path / name, weights)}" for name in ("first", "second")]
    flags = ("--enable-lora", "--lora-paths", *paths, "--lora-backend", "torch_native")
    flags += ("--load-format", "safetensors")
    shared = [rng.randrange(300, 900) for _ in range(400)]
    bodies = []
    for number in range(36):
        # The same prompts by all: an adapter's KV is not another's.
        prompt = shared + [rng.randrange(300, 900) for _ in range(rng.randrange(1, 200))]
        body = request(prompt, 16)
        adapter = (None, "first", "second")[number % 3]
        if adapter:
            body["lora_path"] = adapter
        if number % 4 == 0:
            body["sampling_params"] |= {"regex": GRAMMAR, "ignore_eos": False}
        bodies.append(body)
    with workers_in(tmp_path, flags, text=True) as workers:
        async with workers.fleet("options", (), ("--disable-overlap-schedule",)) as fleet:
            answers = await ask_by_both_paths(fleet, bodies)
            said = [
                (await way(request(shared, 8) | {"lora_path": adapter}))["output_ids"]
                for way in (fleet.local, fleet.separated)
                for adapter in (None, "first", "second")
            ]
            state = await fleet.check_accounts()
    print(state["counts"], file=sys.stderr)
    assert said[:3] == said[3:]
    assert len({tuple(tokens) for tokens in said}) == 3, "an adapter changes nothing"
    assert all(re.fullmatch(GRAMMAR, answer["text"]) for answer in answers[::4])
    assert state["counts"]["separated"] > 15
    assert not any(name.startswith("fallback") for name in state["counts"])


async def test_two_ranks_give_the_tokens_of_two_colocated_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # SGLang asks which cores each rank has where there are fewer NUMA nodes than ranks.
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    rng = random.Random(12)
    with workers_in(tmp_path, ("--tp-size", "2")) as workers:
        async with workers.fleet("ranks", (), ("--disable-overlap-schedule",)) as fleet:
            prompts = [
                [rng.randrange(3, 1000) for _ in range(rng.randrange(20, 900))] for _ in range(24)
            ]
            await ask_by_both_paths(fleet, [request(prompt, 8) for prompt in prompts])
            fleet.prefill.kill()
            lost = await asyncio.gather(
                *(fleet.separated(request([*prompt, 5], 4)) for prompt in prompts[:4])
            )
            for prompt, answer in zip(prompts, lost, strict=False):
                assert answer["output_ids"] == await fleet.truth([*prompt, 5], 4)
            state = await fleet.check_accounts()
    print(state["counts"], file=sys.stderr)
    assert state["counts"]["separated"] >= 12
    assert any(name.startswith("fallback_prefill") for name in state["counts"])
