"""Prefill/decode separation on real SGLang: the same answers, and only the missing KV is moved."""

from __future__ import annotations

import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson
import pytest

from launch import Fleet, fleet, load_topology
from sglang_ext.plugin import FEATURES
from tests.live.conftest import (
    Generation,
    generate,
    generate_separated,
    scraped,
    worker_of,
)
from tests.live.elastic_fleet import engine_python
from tests.live.test_router_live import get, router

Prompt = Callable[[int], list[int]]


@pytest.fixture(
    scope="module",
    params=[1, 64],
    ids="pages-of-{}".format,
)
def sglang(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    """The fleet with pages of one token, as workers on a CPU have, and of 64, as those that send
    each other KV on GPUs."""
    topology = load_topology(
        Path(__file__).with_name("sglang-pd-beside-colocated.toml"),
        [f'engine.python="{engine_python()}"', f"page_size={request.param}"],
    )
    with fleet(topology, tmp_path_factory.mktemp("sglang"), on_progress=print) as running:
        yield running


@pytest.fixture
def page(sglang: Fleet) -> int:
    """Tokens a page of the fleet's KV caches."""
    page_tokens = sglang.plan.topology.page_size
    assert page_tokens is not None
    return page_tokens


def whole_pages(tokens: int, page: int) -> int:
    """How many of `tokens` are in pages that they fill: no other is found again."""
    return tokens // page * page


def colocated(sglang: Fleet, input_ids: list[int], output_tokens: int) -> Generation:
    return generate(worker_of(sglang, "colocated").url, input_ids, output_tokens)


def transfers(sglang: Fleet) -> dict[int, dict[str, Any]]:
    """What telemetry wrote of KV transfers, by bootstrap room."""
    lines = [
        orjson.loads(line)
        for path in (sglang.plan.run_dir / "steps").glob("prefill-*.jsonl")
        for line in path.read_bytes().splitlines()
    ]
    return {line["room"]: line for line in lines if line["event"] == "kv_transfer"}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("input_tokens", [1, 17, 400, 3000])
def test_greedy_tokens_are_the_colocated_ones_cold_and_with_a_cached_prefix(
    sglang: Fleet, page: int, prompt: Prompt, input_tokens: int
) -> None:
    conversation = prompt(input_tokens)
    known = 0
    for turn in range(3):
        expected = colocated(sglang, conversation, 12)
        answer, _ = generate_separated(sglang, conversation, 12)
        assert answer.output_ids == expected.output_ids, f"turn {turn}"
        assert answer.prompt_tokens == len(conversation)
        assert (answer.cached_tokens > 0) == (known >= page)
        known = len(conversation)
        conversation = conversation + answer.output_ids + prompt(150)


@pytest.mark.timeout(600)
def test_a_second_turn_moves_only_what_the_decode_worker_lacks(
    sglang: Fleet, page: int, prompt: Prompt
) -> None:
    first = prompt(2000)
    answer, first_room = generate_separated(sglang, first, 8)
    assert answer.cached_tokens == 0
    second = first + answer.output_ids + prompt(100)
    answer, second_room = generate_separated(sglang, second, 8)

    # Of the first answer's tokens the last has no KV yet: it was never fed back.
    held = whole_pages(len(first) + 8 - 1, page)
    assert answer.cached_tokens == held
    moved = transfers(sglang)
    # Of the last page all is sent, whatever it holds.
    sent_first, sent_second = (
        whole_pages(tokens + page - 1, page) for tokens in (len(first), len(second) - held)
    )
    assert moved[first_room]["tokens"] == sent_first
    assert moved[first_room]["saved_tokens"] == 0
    assert moved[second_room]["tokens"] == sent_second
    assert moved[second_room]["saved_tokens"] == held
    bytes_a_token = moved[first_room]["bytes"] // sent_first
    assert bytes_a_token > 0
    assert moved[second_room]["bytes"] == bytes_a_token * sent_second
    assert moved[second_room]["saved_bytes"] == bytes_a_token * held


@pytest.mark.timeout(600)
def test_telemetry_tells_what_each_worker_did(sglang: Fleet, prompt: Prompt) -> None:
    answer, room = generate_separated(sglang, prompt(500), 6)
    assert len(answer.output_ids) == 6
    events: dict[str, list[dict[str, Any]]] = {}
    for path in (sglang.plan.run_dir / "steps").glob("*.jsonl"):
        for line in path.read_bytes().splitlines():
            event = orjson.loads(line)
            if event["event"] == "request" and event["room"] == room:
                events.setdefault(event["worker_id"], []).append(event)
    assert {worker: len(lines) for worker, lines in events.items()} == {
        worker_of(sglang, "prefill").id: 1,
        worker_of(sglang, "decode").id: 1,
    }
    prefilled = events[worker_of(sglang, "prefill").id][0]["phases"]
    decoded = events[worker_of(sglang, "decode").id][0]["phases"]
    assert prefilled["prefill_started_s"] < prefilled["prefill_finished_s"]
    assert prefilled["prefill_finished_s"] <= prefilled["transfer_finished_s"]
    assert decoded["preallocation_queued_s"] <= decoded["transfer_started_s"]
    assert decoded["decode_ready_s"] < decoded["finished_s"]


@pytest.mark.timeout(600)
def test_metrics_pages_add_up_what_telemetry_wrote(sglang: Fleet, prompt: Prompt) -> None:
    conversation = prompt(700)
    answer, _ = generate_separated(sglang, conversation, 5)
    generate_separated(sglang, conversation + answer.output_ids + prompt(60), 5)

    prefill = worker_of(sglang, "prefill")
    moved = transfers(sglang).values()
    assert scraped(prefill.url, "deltaserve_kv_moved_bytes_total") == sum(
        transfer["bytes"] for transfer in moved
    )
    saved_bytes = sum(transfer["saved_bytes"] for transfer in moved)
    assert saved_bytes > 0
    assert scraped(prefill.url, "deltaserve_kv_saved_bytes_total") == saved_bytes
    assert scraped(prefill.url, 'deltaserve_kv_transfers_total{ok="true"}') == len(moved)
    assert scraped(prefill.url, 'deltaserve_request_phase_seconds_count{phase="prefill"}') >= 2

    decode = worker_of(sglang, "decode")
    assert scraped(decode.url, 'deltaserve_request_phase_seconds_sum{phase="kv_arrival"}') > 0
    steps = scraped(decode.url, 'deltaserve_step_seconds_count{forward_mode="decode"}')
    assert steps >= 2 * 4
    assert scraped(decode.url, "deltaserve_kv_moved_bytes_total") == 0


@pytest.mark.timeout(600)
def test_a_paced_colocated_worker_carries_decodes_along_in_chunks_by_their_cost(
    sglang: Fleet, prompt: Prompt
) -> None:
    worker = worker_of(sglang, "colocated")
    with ThreadPoolExecutor(5) as pool:
        decodes = [pool.submit(generate, worker.url, prompt(40), 200) for _ in range(4)]
        long = pool.submit(generate, worker.url, prompt(5000), 4)
        assert len(long.result().output_ids) == 4
        assert all(len(decode.result().output_ids) == 200 for decode in decodes)
    with urllib.request.urlopen(f"{worker.url}/server_info", timeout=30.0) as answer:
        state = orjson.loads(answer.read())["internal_states"][0]["deltaserve_paced"]
    assert state["target_itl_s"] == 0.04
    assert state["steps"] > 3
    mixed = [
        line
        for path in (sglang.plan.run_dir / "steps").glob(f"{worker.id}-*.jsonl")
        for line in map(orjson.loads, path.read_bytes().splitlines())
        if line["event"] == "step" and line["forward_mode"] == "mixed"
    ]
    assert mixed
    assert all(line["decode_requests"] > 0 for line in mixed)


@pytest.mark.timeout(600)
def test_our_router_separates_and_knows_what_a_worker_holds_by_its_events(
    sglang: Fleet, page: int, prompt: Prompt
) -> None:
    (colocated, prefill, decode) = sglang.plan.workers
    events = ",".join(
        f"{name}=tcp://127.0.0.1:{colocated.ports[name]}"
        for name in ("kv_events", "kv_events_replay")
    )
    first = prompt(500)
    generate(colocated.url, first, 4)  # before the router is there: it asks for a replay
    with router(f"{colocated.url},id=w,engine=sglang,page_size={page},{events}") as url:
        time.sleep(2.0)
        held = generate(url, first, 4).cached_tokens
        (decision,) = get(f"{url}/decisions?limit=1")["decisions"]
        assert decision["prefix_source"] == "events"
        assert decision["cached_tokens"]["w"] == held == whole_pages(len(first) - 1, page)
    bootstrap = f"role=prefill,bootstrap_port={prefill.ports['bootstrap']}"
    with router(f"{prefill.url},{bootstrap}", f"{decode.url},role=decode", policy="pd") as url:
        turn = prompt(300)
        cold = generate(url, turn, 8)
        assert cold.cached_tokens == 0
        warm = generate(url, turn + cold.output_ids + prompt(20), 4)
        assert warm.cached_tokens >= whole_pages(len(turn), page)
        kinds = {decision["kind"] for decision in get(f"{url}/decisions?limit=2")["decisions"]}
        assert kinds == {"prefill_decode"}


def test_every_hook_matches_the_installed_sglang(sglang: Fleet) -> None:
    """Checked inside the engine's own environment, for features that no worker here has on, too."""
    code = (
        "import importlib, importlib.metadata\n"
        "from sglang_ext.guards import check_hooks\n"
        "from sglang_ext.sglang import place, select\n"
        "release = select(importlib.metadata.version('sglang'))\n"
        f"for module in {sorted(FEATURES.values())!r}:\n"
        "    check_hooks(place(importlib.import_module(module).HOOKS, release))\n"
        "print('all match')\n"
    )
    (worker, *_) = sglang.plan.workers
    result = subprocess.run(
        [str(sglang.plan.engine.python), "-P", "-c", code],
        env=worker.full_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout.endswith("all match\n"), result.stderr
