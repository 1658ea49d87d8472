from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web

import launch
from eval.experiment import Experiment
from eval.micro import cache_sweep, connector_tax, interference, lifecycle
from eval.micro.driver import Bench, driver, smallest
from eval.stats import Estimate
from replay.results import Result
from tests.command_line import deltaserve


def stream(*arrivals: tuple[float, int]) -> Result:
    return Result(
        request_id="r", session_id="s", turn=0, input_length=1, output_length=1,
        arrivals=list(arrivals),
    )  # fmt: skip


def test_interference_compares_a_streams_pace_before_and_during_a_prefill() -> None:
    steady = [(i / 10, i + 1) for i in range(11)]  # ten tokens a second until 1.0
    stalled = [(3.0, 12), (3.1, 13)]  # nothing while the prompt is prefilled, 1.05 to 2.9
    found = interference.point([stream(*steady, *stalled)], 0.0, 1.05, 2.9, prefill=2048, repeat=1)
    assert found.before_s == pytest.approx(0.1)
    assert found.during_s == pytest.approx(2.0)
    assert found.index == pytest.approx(20.0)
    assert found.worst_gap_s == pytest.approx(2.0)
    assert found.ttft_s == pytest.approx(1.85)


def test_streams_that_go_on_undisturbed_have_an_index_of_one() -> None:
    steady = [(i / 10, i + 1) for i in range(40)]
    found = interference.point([stream(*steady)] * 2, 0.0, 1.05, 2.9, prefill=2048, repeat=1)
    assert found.index == pytest.approx(1.0)
    assert found.worst_gap_s == pytest.approx(0.1)


def test_a_pair_that_could_not_be_measured_is_a_dash_and_not_a_number() -> None:
    cut = interference.point([stream((0.1, 1), (0.2, 2))], 0.0, 0.5, 0.9, prefill=64, repeat=1)
    whole = interference.Point(2, 64, 1, 0.1, 0.4, 0.5, 0.6)
    table = interference.sections([cut, whole])[0].tables[0][1]
    assert [row[4].text for row in table.rows] == ["–", "4×"]


def test_stages_of_a_separated_request_add_up_to_its_ttft() -> None:
    moments = {
        "p_bootstrap_queued_s": 100.1,
        "p_queued_s": 100.15,
        "p_prefill_started_s": 100.2,
        "p_prefill_finished_s": 101.0,
        "p_transfer_finished_s": 101.3,
        "d_decode_ready_s": 101.35,
    }
    found = lifecycle.stages(moments, 100.0, 101.5)
    assert found["prefill"] == pytest.approx(0.8)
    assert found["KV transfer"] == pytest.approx(0.3)
    assert sum(found.values()) == pytest.approx(1.5)


def test_moments_of_both_workers_meet_by_room_under_the_requests_own_name(tmp_path: Path) -> None:
    folder = tmp_path / "steps"
    folder.mkdir()
    for mode, phases in (("prefill", {"queued_s": 1.0}), ("decode", {"decode_ready_s": 2.0})):
        line = {
            "event": "request", "engine_request_id": "life-1~83ce40a3", "room": 7, "mode": mode,
            "phases": phases,
        }  # fmt: skip
        (folder / f"{mode}-0-1.jsonl").write_text(json.dumps(line) + "\n")
    transfer = {"event": "kv_transfer", "room": 7, "bytes": 10, "saved_bytes": 30}
    (folder / "prefill-0-2.jsonl").write_text(json.dumps(transfer) + "\n")
    phases, transfers = lifecycle.read_phases(Bench("", {}, tmp_path, 1024, {}))
    assert phases == {"life-1": {"room": 7, "p_queued_s": 1.0, "d_decode_ready_s": 2.0}}
    assert transfers[7]["saved_bytes"] == 30


def test_a_missing_or_late_moment_never_makes_a_stage_negative() -> None:
    found = lifecycle.stages({"p_prefill_finished_s": 102.0, "d_decode_ready_s": 101.0}, 100, 101.5)
    assert min(found.values()) >= 0
    assert sum(found.values()) == pytest.approx(1.5)


def sweep(slope_us: float, seed: int = 0) -> cache_sweep.Sweep:
    rng = np.random.default_rng(seed)
    cached = np.linspace(0, 160_000, 4000)
    duration_us = 900 + slope_us * cached / 16_000 + rng.gamma(2, 30, 4000)
    return cache_sweep.Sweep(
        cached.tolist(), (duration_us / 1e6).tolist(), list(range(4000)), "engine"
    )


def covers(estimate: Estimate, truth: float) -> bool:
    return estimate.low <= truth <= estimate.high


def test_the_slope_of_step_cost_is_found_with_its_interval() -> None:
    assert covers(cache_sweep.slope(sweep(81.0)), 81.0)
    flat = cache_sweep.slope(sweep(0.0))
    assert covers(flat, 0.0)
    assert flat.high - flat.low < 5


def test_pauses_of_the_machine_do_not_bend_the_slope() -> None:
    found = sweep(20.0)
    for at in (*range(150), *range(3000, 3300, 3)):
        found.duration_s[at] += 0.2
    assert covers(cache_sweep.slope(found), 20.0)


def test_too_few_steps_give_no_slope() -> None:
    assert not cache_sweep.slope(cache_sweep.Sweep([1.0], [1.0], [1.0], "client")).known


def test_gaps_beside_a_prefill_are_no_decode_steps_of_the_clients_sweep() -> None:
    def answer(sent: float, first: float, times: list[float]) -> Result:
        return Result(
            request_id=str(sent), session_id="s", turn=0, input_length=100, output_length=3,
            sent_s=sent, first_token_s=first, finished_s=times[-1], output_tokens=len(times),
            arrivals=[(at, i + 1) for i, at in enumerate(times)],
        )  # fmt: skip

    found = cache_sweep.from_arrivals(
        [answer(0.0, 1.0, [1.0, 1.1, 3.0]), answer(1.5, 2.5, [2.5, 2.6, 2.7])]
    )
    assert found.source == "client"
    assert sorted(found.duration_s) == pytest.approx([0.1, 0.1, 0.1])


def test_a_microbenchmark_starts_one_worker_unless_requests_are_separated() -> None:
    colocated = smallest(launch.load_topology("laptop-sglang"))
    assert (colocated.worker_count, colocated.router.kind) == (1, "none")
    assert colocated.telemetry
    pair = smallest(launch.load_topology("laptop-sglang-pd"))
    assert (pair.worker_count, pair.router.kind) == (2, "deltaserve")
    assert not smallest(launch.load_topology("laptop-vllm")).telemetry


def test_the_connector_tax_is_an_experiment_of_two_arms_at_several_loads() -> None:
    planned = connector_tax.experiment(
        "laptop-sglang",
        "laptop-sglang",
        with_set={"workers.0.role": "elastic"},
        requests=50,
        rates_rps=(0.5, 1.0, 2.0),
        repeats=3,
        fit_input_tokens=4000,
        seed=1,
    )
    assert isinstance(planned, Experiment)
    assert planned.baseline_arm == "without"
    scales = [planned.replay_of(planned.arms[0], load.name).time_scale for load in planned.loads]
    assert scales == [1.0, 2.0, 4.0]


async def test_the_driver_sends_cold_prompts_and_continues_them() -> None:
    seen: list[list[int]] = []

    async def generate(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        seen.append(body["input_ids"])
        response = web.StreamResponse()
        await response.prepare(request)
        count = body["sampling_params"]["max_new_tokens"]
        for i in range(1, count + 1):
            meta = f'{{"prompt_tokens": 1, "completion_tokens": {i}, "cached_tokens": 0}}'
            await response.write(b'data: {"text": "", "meta_info": ' + meta.encode() + b"}\n\n")
            await asyncio.sleep(0.01)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def models(_request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "owned_by": "sglang"}]})

    app = web.Application()
    app.add_routes([web.post("/generate", generate), web.get("/v1/models", models)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    target = Bench(f"http://127.0.0.1:{port}", {}, None, 1024, {})  # type: ignore[arg-type]
    try:
        async with driver(target) as drive:
            one = drive.prompt(200)
            first = await drive.ask(one, 3, "a")
            await drive.ask(drive.prompt(100, after=one), 1, "a")
            task = asyncio.create_task(drive.ask(drive.prompt(64), 1000, "b"))
            await drive.until_first_tokens(3, timeout_s=10)
            task.cancel()
            cut = await task
    finally:
        await runner.cleanup()
    assert first.error is None
    assert len(first.arrivals) == 3
    assert all(b[0] > a[0] for a, b in pairwise(first.arrivals))
    assert len(seen[0]) == 200
    assert seen[1][:192] == seen[0][:192]
    assert len(seen[1]) == 192 + 100
    assert cut.error is not None
    assert cut.error.kind == "cancelled"
    assert cut.arrivals


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["interference", "--topology", "nothing"], "no topology 'nothing'"),
        (["lifecycle", "--topology", "laptop-sglang"], "needs prefill and decode workers"),
        (["lifecycle", "--topology", "laptop-vllm"], "needs SGLang's telemetry"),
        (["connector-tax", "--without", "a", "--with", "b", "--rates", "x"], "--rates x"),
        (["connector-tax", "--without", "nothing", "--with", "b"], "no topology 'nothing'"),
    ],
)
def test_wrong_input_is_answered_in_one_line(arguments: list[str], said: str) -> None:
    done = deltaserve("eval", "micro", *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
