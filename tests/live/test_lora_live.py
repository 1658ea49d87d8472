"""LoRA adapters on a real engine behind the router: who is sent where, and whose cache is whose.

vLLM with a dense model alone. Without a GPU its mixtures of experts take no adapters ("Monolithic
kernels are not supported for Fused MoE LoRA"). SGLang (0.5.17, and 0.5.23 by its source) takes none
at all: its layers for them pin memory, which ends in "Found no NVIDIA driver on your system",
whatever ``--lora-backend`` says.
"""

from __future__ import annotations

import json
import shutil
import struct
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from launch import fleet, load_topology
from launch.models import shape_config, write_shape
from tests.live.test_router_live import get, router

Prompt = Callable[[int], list[int]]

MODEL = "tiny-qwen3"
ADAPTERS = ("sql", "law")
RANK = 8
TARGETS = {"q_proj": (64, 128), "v_proj": (64, 64)}
"""Inputs and outputs of the projections that adapters change, of the tiny model."""
LAYERS = 2

TOPOLOGY = """
description = "A worker with two adapters, and one without"
device = "cpu"
model = "{model}"
load_format = "dummy"
context_tokens = 4000
max_total_tokens = 12000
base_port = 0
# As in the topology laptop-vllm.
environment = {{ TORCHDYNAMO_DISABLE = "1" }}

[engine]
name = "vllm"

[[workers]]
role = "colocated"
flags = {flags}

[[workers]]
role = "colocated"

[router]
kind = "none"
"""


def write_tensors(path: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    """The format safetensors: the header's length, the header, the data."""
    header: dict[str, Any] = {}
    data = bytearray()
    for name, tensor in tensors.items():
        raw = tensor.astype("<f4").tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": offsets}
        data += raw
    head = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)


def write_model(folder: Path) -> None:
    """The tiny model with one expert for all, that is, dense; its weights are made at the start."""
    shutil.copytree(write_shape("tiny-qwen3-moe"), folder)
    config = {k: v for k, v in shape_config("tiny-qwen3-moe").items() if "expert" not in k}
    config |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    (folder / "config.json").write_text(json.dumps(config))


def write_adapter(folder: Path, seed: int) -> None:
    """An adapter of the tiny model as peft saves one, with random weights."""
    folder.mkdir()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": MODEL,
        "target_modules": list(TARGETS),
        "r": RANK,
        "lora_alpha": 8 * RANK,
        "lora_dropout": 0.0,
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    numbers = np.random.default_rng(seed)
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.{target}.lora_{half}.weight": (
            numbers.normal(size=shape)
        )
        for layer in range(LAYERS)
        for target, (inputs, outputs) in TARGETS.items()
        for half, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK)))
    }
    write_tensors(folder / "adapter_model.safetensors", tensors)


class Answer(NamedTuple):
    """Of one request: which worker answered, what the router believed cached there and what the
    engine found, and the tokens."""

    worker: str
    believed: int
    reported: int
    tokens: list[int]


def ask(url: str, prompt: list[int], model: str) -> Answer:
    """Asks a router for four tokens of a model or an adapter."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": 4,
        "ignore_eos": True,
        "temperature": 0,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120.0) as response:
        worker = response.headers["x-deltaserve-worker"]
        found = json.loads(response.read())
    (decision,) = get(f"{url}/decisions?limit=1")["decisions"]
    (choice,) = found["choices"]
    details = found["usage"]["prompt_tokens_details"]
    return Answer(
        worker=worker,
        believed=decision["cached_tokens"].get(worker, 0),
        reported=details["cached_tokens"] if details else 0,
        tokens=choice["token_ids"],
    )


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Running workers, as a router's flags: `w0` has the adapters, `w1` has not."""
    folder = tmp_path_factory.mktemp("lora")
    for seed, name in enumerate(ADAPTERS):
        write_adapter(folder / name, seed)
    named = [f"{name}={folder / name}" for name in ADAPTERS]
    flags = ["--enable-lora", "--max-lora-rank", str(RANK), "--lora-modules", *named]
    path = folder / "lora.toml"
    write_model(folder / MODEL)
    path.write_text(TOPOLOGY.format(model=folder / MODEL, flags=json.dumps(flags)))
    with fleet(load_topology(path), folder, on_progress=print) as running:
        adapted, plain = (
            f"{worker.url},id=w{at},engine=vllm,page_size=32"
            for at, worker in enumerate(running.workers)
        )
        yield adapted, plain


@pytest.mark.timeout(900)
def test_adapters_and_their_model_share_no_cache_and_the_router_knows_it(
    workers: tuple[str, str], prompt: Prompt
) -> None:
    same = prompt(600)
    models = (*ADAPTERS, MODEL)
    answers = {}
    with router(workers[0]) as url:
        assert {model["id"] for model in get(f"{url}/v1/models")["data"]} == set(models)
        for model in models:
            answer = ask(url, same, model)
            assert (answer.believed, answer.reported) == (0, 0), model
            answers[model] = answer.tokens
        for model in models:
            answer = ask(url, same, model)
            # Whole pages of all but the last token.
            assert answer.believed == answer.reported == 576, model
            assert answer.tokens == answers[model]


@pytest.mark.timeout(900)
def test_an_adapters_requests_go_to_the_worker_that_has_it(
    workers: tuple[str, str], prompt: Prompt
) -> None:
    with router(*workers, policy="round_robin") as url:
        for adapter in (*ADAPTERS, *ADAPTERS):
            assert ask(url, prompt(100), adapter).worker == "w0"
        assert {ask(url, prompt(100), MODEL).worker for _ in range(4)} == {"w0", "w1"}
