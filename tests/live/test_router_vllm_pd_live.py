"""The router before a prefill and a decode worker of real vLLM, their KV over NIXL."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launch import Fleet, fleet, load_topology
from launch.engines import environment_for
from tests.live.conftest import scraped, worker_of

PAGE_TOKENS = 32

TOPOLOGY = """
description = "vLLM on a CPU: one prefill and one decode worker, KV over NIXL"
device = "cpu"
model = "tiny-qwen3-moe"
context_tokens = 16384
max_total_tokens = 32768
page_size = {page_tokens}
chunk_tokens = 2048
transfer_backend = "nixl"
base_port = 0

# The first as in the topology laptop-vllm.
[environment]
TORCHDYNAMO_DISABLE = "1"
PYTHONPATH = "{path}"

[engine]
name = "vllm"

[[workers]]
role = "prefill"

[[workers]]
role = "decode"

[router]
policy = "pd"
"""


def nixl(folder: Path) -> Path:
    """A folder with NIXL alone, which SGLang's environment has and vLLM's for the CPU has not."""
    (packages,) = environment_for("sglang", "cpu").folder.glob("lib/python3*/site-packages")
    path = folder / "nixl"
    path.mkdir()
    for found in packages.glob("nixl*"):
        (path / found.name).symlink_to(found)
    return path


@pytest.fixture(scope="module")
def separated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("vllm-pd")
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(nixl(folder)), *([before] if before else [])])
    file = folder / "vllm-pd.toml"
    file.write_text(TOPOLOGY.format(page_tokens=PAGE_TOKENS, path=path))
    with fleet(load_topology(file), folder, on_progress=print) as running:
        yield running


def complete(url: str, input_ids: list[int], **fields: Any) -> tuple[str, bytes]:
    """Asks for eight greedy tokens; the worker that answered, and the answer."""
    body = {
        "model": "tiny-qwen3-moe",
        "prompt": input_ids,
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120.0) as answer:
        return answer.headers.get("x-deltaserve-worker", ""), answer.read()


def output_ids(answer: bytes) -> list[int]:
    ids: list[int] = json.loads(answer)["choices"][0]["token_ids"]
    return ids


def streamed_ids(answer: bytes) -> list[int]:
    events = [line.removeprefix(b"data: ") for line in answer.splitlines() if line]
    assert events.pop() == b"[DONE]"
    return [i for event in events for i in json.loads(event)["choices"][0]["token_ids"] or []]


@pytest.mark.timeout(600)
def test_a_separated_request_is_decoded_from_the_kv_that_the_prefill_worker_sent(
    separated: Fleet, prompt: Callable[[int], list[int]]
) -> None:
    router = separated.router_url
    assert router is not None
    prefill, decode = (worker_of(separated, role) for role in ("prefill", "decode"))

    def moved_bytes() -> float:
        return scraped(decode.url, "vllm:nixl_bytes_transferred_sum")

    first = prompt(700)
    answered_by, answer = complete(router, first)
    assert answered_by == decode.id
    moved = moved_bytes()
    page_bytes = moved / -(-len(first) // PAGE_TOKENS)
    assert page_bytes > 0
    assert page_bytes == int(page_bytes), "whole pages"

    # The next turn: what the decode worker lacks is sent, and no more.
    turn = first + output_ids(answer)
    second = turn + prompt(100)
    answered_by, answer = complete(router, second, stream=True)
    assert answered_by == decode.id
    # All but the last token, which was made and not read.
    held = (len(turn) - 1) // PAGE_TOKENS
    assert moved_bytes() - moved == page_bytes * (-(-len(second) // PAGE_TOKENS) - held)

    # The prefill worker serving alone says the same: the KV that came is right.
    _, alone = complete(prefill.url, second)
    assert streamed_ids(answer) == output_ids(alone)
    with urllib.request.urlopen(f"{router}/decisions?limit=2", timeout=30.0) as page:
        decisions = json.loads(page.read())["decisions"]
    assert [decision["kind"] for decision in decisions] == ["prefill_decode"] * 2
    assert scraped(decode.url, "vllm:nixl_num_failed_transfers_total") == 0
