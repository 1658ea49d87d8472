"""The topology laptop-vllm-pd: a prefill and a decode worker of real vLLM, their KV over NIXL."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch import Fleet, fleet, load_topology
from launch.kv import worker_kv
from launch.supervised import members, started_at
from tests.live.conftest import check_ports_are_free, processes_of, scraped, worker_of


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
    return post(f"{url}/v1/completions", body)


def post(url: str, body: dict[str, Any]) -> tuple[str, bytes]:
    """The worker that answered, and the answer."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120.0) as answer:
            return answer.headers.get("x-deltaserve-worker", ""), answer.read()
    except urllib.error.HTTPError as error:
        pytest.fail(f"{url} answered {error.code}: {error.read()!r}")


def output_ids(answer: bytes) -> list[int]:
    ids: list[int] = json.loads(answer)["choices"][0]["token_ids"]
    return ids


def streamed_ids(answer: bytes) -> list[int]:
    events = [line.removeprefix(b"data: ") for line in answer.splitlines() if line]
    assert events.pop() == b"[DONE]"
    return [i for event in events for i in json.loads(event)["choices"][0]["token_ids"] or []]


@pytest.mark.timeout(600)
def test_a_separated_request_is_decoded_from_the_kv_that_the_prefill_worker_sent(
    prompt: Callable[[int], list[int]], tmp_path: Path
) -> None:
    topology = load_topology("laptop-vllm-pd", ["base_port=0"])
    with fleet(topology, tmp_path, on_progress=print) as separated:
        check_no_process_is_bound(separated)
        check_what_is_sent(separated, prompt)
        separated.check()
    record = json.loads((tmp_path / "fleet.json").read_text())
    assert processes_of(record) == []
    check_ports_are_free(record)


def check_no_process_is_bound(running: Fleet) -> None:
    for worker in running.workers:
        assert worker.pid is not None
        processes = members(worker.pid, started_at(worker.pid) or "")
        assert len(processes) >= 3
        for process in processes:
            assert os.sched_getaffinity(process.pid) == os.sched_getaffinity(0), process


def check_what_is_sent(separated: Fleet, prompt: Callable[[int], list[int]]) -> None:
    router = separated.router_url
    assert router is not None
    prefill, decode = (worker_of(separated, role) for role in ("prefill", "decode"))
    topology = separated.plan.topology
    page_tokens = worker_kv(topology, topology.workers[0]).page_tokens

    def moved_bytes() -> float:
        return scraped(decode.url, "vllm:nixl_bytes_transferred_sum")

    def failed_transfers() -> float:
        return scraped(decode.url, "vllm:nixl_num_failed_transfers_total")

    # The pair connected before it served, which moved KV as well. A first handshake that is slow on
    # a busy machine fails there and is tried again: what counts is what fails after it.
    connecting, failed_connecting = moved_bytes(), failed_transfers()
    first = prompt(700)
    answered_by, answer = complete(router, first)
    assert answered_by == decode.id
    moved = moved_bytes()
    page_bytes = (moved - connecting) / -(-len(first) // page_tokens)
    assert page_bytes > 0
    assert page_bytes == int(page_bytes), "whole pages"

    # The next turn: what the decode worker lacks is sent, and no more.
    turn = first + output_ids(answer)
    second = turn + prompt(100)
    # A stream that waits for 5 s begins before its worker is known: the bytes tell which it was.
    _, answer = complete(router, second, stream=True)
    # All but the last token, which was made and not read.
    held = (len(turn) - 1) // page_tokens
    assert moved_bytes() - moved == page_bytes * (-(-len(second) // page_tokens) - held)

    # The prefill worker serving alone says the same: the KV that came is right.
    _, alone = complete(prefill.url, second)
    assert streamed_ids(answer) == output_ids(alone)
    # So are agents' own APIs.
    for path, asked in (
        ("/v1/messages", {"messages": [{"role": "user", "content": "one " * 900}]}),
        ("/v1/responses", {"input": "two " * 900, "max_output_tokens": 8}),
    ):
        moved = moved_bytes()
        post(router + path, {"model": "tiny-qwen3-moe", "max_tokens": 8, **asked})
        assert moved_bytes() - moved > 900 // page_tokens * page_bytes, path
    with urllib.request.urlopen(f"{router}/decisions?limit=4", timeout=30.0) as page:
        decisions = json.loads(page.read())["decisions"]
    assert [decision["kind"] for decision in decisions] == ["prefill_decode"] * 4
    assert failed_transfers() == failed_connecting
