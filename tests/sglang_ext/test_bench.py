"""`sglang_ext.bench` against workers that are made up, so that what it must find is known."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from deltaserve.errors import InputError
from sglang_ext.bench import identity, stall, statistics, tax, transfer, warm
from sglang_ext.bench.__main__ import main
from sglang_ext.bench.client import (
    Answer,
    Arm,
    Client,
    Prompts,
    Worker,
    WorkerError,
    parse_arm,
    parse_worker,
)
from sglang_ext.bench.samples import Sink, fullest, read


@dataclass
class MadeUp:
    """A worker whose token number n is `token(prompt, n)` and which can be held up."""

    token: Callable[[list[int], int], int] = lambda prompt, n: (sum(prompt) + 7 * n) % 97
    step_s: float = 0.001
    prefill_s: Callable[[int], float] = lambda tokens: 0.0
    blocks_decodes: bool = False
    telemetry: Path | None = None
    fails: bool = False
    asked: list[dict[str, Any]] = field(default_factory=list)
    aborted: set[str] = field(default_factory=set)
    prefilling: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        self.asked.append(body)
        if self.fails:
            return web.Response(status=503, text="no room")
        ids = body["input_ids"]
        if body.get("return_logprob"):
            top = [[[-0.5, 1, None], [-0.75, 2, None]]]
            return web.json_response({"meta_info": {"output_top_logprobs": top}})
        started_s = time.time()
        async with self.prefilling:
            await asyncio.sleep(self.prefill_s(len(ids)))
        self.note_transfer(body, len(ids), started_s)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        output: list[int] = []
        for n in range(body["sampling_params"]["max_new_tokens"]):
            if body["rid"] in self.aborted:
                break
            if n:
                await asyncio.sleep(self.step_s)
                if self.blocks_decodes:
                    async with self.prefilling:
                        pass
            output.append(self.token(ids, n))
            about = {"completion_tokens": len(output), "cached_tokens": len(ids) // 2}
            event = orjson.dumps({"output_ids": output, "meta_info": about})
            await response.write(b"data: " + event + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    def note_transfer(self, body: dict[str, Any], tokens: int, started_s: float) -> None:
        if self.telemetry is None:
            return
        room = body["bootstrap_room"]
        moved = {
            "event": "kv_transfer",
            "room": room,
            "bytes": tokens * 1000,
            "saved_bytes": 0,
            "chunks": 1,
            "start_unix_s": started_s,
            # 0.1 s and 1 GB/s
            "end_unix_s": started_s + 0.1 + tokens * 1000 / 1e9,
        }
        ended = {
            "event": "request",
            "room": room,
            "mode": "prefill",
            "phases": {"prefill_finished_s": started_s + 0.05},
        }
        with (self.telemetry / "prefill-1.jsonl").open("ab") as file:
            file.write(orjson.dumps(moved) + b"\n" + orjson.dumps(ended) + b"\n")

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted.add((await request.json())["rid"])
        return web.Response()

    async def flush(self, request: web.Request) -> web.Response:
        return web.Response()


@asynccontextmanager
async def serving(**made_up: MadeUp) -> AsyncIterator[dict[str, Worker]]:
    workers, runners = {}, []
    for name, one in made_up.items():
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/generate", one.generate)
        app.router.add_post("/abort_request", one.abort)
        app.router.add_post("/flush_cache", one.flush)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        runners.append(runner)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        workers[name] = Worker(name, f"http://127.0.0.1:{port}", ("127.0.0.1", 9))
    try:
        yield workers
    finally:
        for runner in runners:
            await runner.cleanup()


def silent(_: str) -> None:
    pass


def samples_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [sample for sample in read(folder) if sample["kind"] == kind]


async def test_identity_finds_the_arm_whose_tokens_differ_and_where(tmp_path: Path) -> None:
    honest = MadeUp()
    wrong = MadeUp(token=lambda prompt, n: honest.token(prompt, n) + (n == 3))
    shape = identity.Shape(3, 2, 20, 10, 6, 2, 0)
    async with serving(a=honest, b=MadeUp(), c=wrong) as workers, Client() as client:
        a, b, c = (Arm(name, workers[name]) for name in "abc")
        sink = Sink(tmp_path, "identity")
        await identity.measure(client, [a, b, c], a, Prompts(90, 1), shape, sink, silent)
    rows = {(row["arm"], row["turns"]): row for row in identity.summary(read(tmp_path))}
    assert {arm for arm, _ in rows} == {"a again", "b", "c"}
    for arm in ("a again", "b"):
        assert rows[arm, "first"]["identical"] == rows[arm, "later"]["identical"] == 3
    assert rows["c", "first"]["different"] == rows["c", "later"]["different"] == 3
    assert rows["c", "first"]["first_difference"] == 3
    assert rows["c", "first"]["lead_nats_p50"] == pytest.approx(0.25)
    # Every arm is asked what the reference was asked, not what it answered itself.
    truth = sorted(body["input_ids"] for body in honest.asked[:6])
    assert sorted(body["input_ids"] for body in wrong.asked) == truth


async def test_a_mixed_arm_goes_both_ways_and_aborts_what_it_will_ask_again(tmp_path: Path) -> None:
    decode, prefill = MadeUp(step_s=0.01), MadeUp()
    shape = identity.Shape(8, 3, 20, 10, 4, 2, 40)
    async with serving(a=MadeUp(), d=decode, p=prefill) as workers, Client() as client:
        a, mixed = Arm("a", workers["a"]), Arm("d~p", workers["d"], workers["p"], mixed=True)
        sink = Sink(tmp_path, "identity")
        await identity.measure(client, [mixed], a, Prompts(90, 1), shape, sink, silent)
    turns = [s for s in samples_of(tmp_path, "turn") if s["arm"] == "d~p"]
    separated = sum(turn["separated"] for turn in turns)
    aborted = sum(turn["aborted_before"] for turn in turns)
    assert len(turns) == 8 * 3
    assert 0 < separated < len(turns)
    assert 0 < aborted < len(turns)
    assert all(turn["first_difference"] is None for turn in turns)
    # What is aborted is asked the same way just before; it would have gone on for long.
    assert len(decode.asked) == len(turns) + aborted
    assert len(decode.aborted) == aborted
    assert separated <= len(prefill.asked) <= separated + aborted


async def test_when_the_prefill_worker_dies_its_turns_are_judged_by_what_the_other_answers(
    tmp_path: Path,
) -> None:
    victim = subprocess.Popen(["sleep", "600"])
    shape = identity.Shape(4, 3, 20, 10, 4, 1, 0)
    lost = MadeUp(fails=True)
    try:
        async with serving(a=MadeUp(), d=MadeUp(), p=lost) as workers, Client() as client:
            a, mixed = Arm("a", workers["a"]), Arm("d~p", workers["d"], workers["p"], mixed=True)
            sink, death = Sink(tmp_path, "death"), identity.Death(victim.pid, 5)
            await identity.measure(client, [mixed], a, Prompts(90, 1), shape, sink, silent, death)
        assert victim.wait(timeout=10) == -signal.SIGKILL
    finally:
        victim.kill()
    turns = samples_of(tmp_path, "turn")
    assert len(turns) == 4 * 3
    assert [turn["prefill_lost"] for turn in turns] == [turn["separated"] for turn in turns]
    assert any(turn["prefill_lost"] for turn in turns)
    assert all(turn["first_difference"] is None for turn in turns)


async def test_warming_up_asks_every_arm_for_every_length_twice(tmp_path: Path) -> None:
    one, other = MadeUp(), MadeUp()
    async with serving(a=one, b=other) as workers, Client() as client:
        arms = [Arm(name, worker) for name, worker in workers.items()]
        await warm.measure(client, arms, Prompts(90, 1), Sink(tmp_path, "warm"), silent)
    for worker in (one, other):
        assert [len(b["input_ids"]) for b in worker.asked] == [
            n for n in warm.LENGTHS for _ in "ab"
        ]
    assert len(samples_of(tmp_path, "prompt")) == 2 * len(warm.LENGTHS)


def test_a_shorter_answer_differs_at_its_end() -> None:
    assert identity.first_difference([1, 2, 3], [1, 2, 3]) is None
    assert identity.first_difference([1, 2, 3], [1, 2]) == 2
    assert identity.first_difference([1, 2, 3], [4, 2, 3]) == 0


async def test_stall_sees_the_decodes_of_the_worker_that_stops_for_a_prompt(tmp_path: Path) -> None:
    def takes_s(tokens: int) -> float:
        return 0.3 if tokens == 500 else 0.0

    waits = MadeUp(step_s=0.01, prefill_s=takes_s, blocks_decodes=True)
    goes_on = MadeUp(step_s=0.01, prefill_s=takes_s)
    shape = stall.Shape(3, 10, 500, 2, 0.1, 10_000)
    async with serving(waits=waits, goes_on=goes_on) as workers, Client() as client:
        arms = [Arm(name, worker) for name, worker in workers.items()]
        await stall.measure(client, arms, Prompts(90, 1), shape, Sink(tmp_path, "stall"), silent)
    samples = read(tmp_path)
    assert [sample["warm_up"] for sample in samples] == [True, True, False, False, False, False]
    rows = {row["arm"]: row for row in stall.summary(samples)}
    assert rows["waits"]["worst_gap_ms"]["value"] >= 290
    assert rows["waits"]["ttft_ms"]["value"] >= 290
    assert rows["goes_on"]["itl_p50_ms"]["value"] < rows["waits"]["worst_gap_ms"]["value"] / 3
    # No stream is left behind.
    assert len(waits.aborted) == 3 * 3


def test_gaps_are_those_that_overlap_the_time_given() -> None:
    answer = Answer(0.0, arrivals=[(1.0, 1), (2.0, 2), (4.0, 5), (5.0, 6)])
    assert stall.gaps([answer], 2.5, 3.0) == [2.0, 0.0, 0.0]
    assert stall.gaps([answer], 0.0, 9.0) == [1.0, 2.0, 0.0, 0.0, 1.0]


async def test_tax_is_the_ratio_to_the_reference_at_the_same_load(tmp_path: Path) -> None:
    fast = MadeUp(step_s=0.02, prefill_s=lambda _: 0.02)
    slow = MadeUp(step_s=0.1, prefill_s=lambda _: 0.02)
    shape = tax.Shape(2, 4, 2, 20, 5, 8, 2)
    async with serving(fast=fast, slow=slow) as workers, Client() as client:
        arms = [Arm(name, worker) for name, worker in workers.items()]
        sink = Sink(tmp_path, "tax")
        await tax.measure(client, arms, arms[0], Prompts(90, 1), shape, sink, silent)
    rows = {row["arm"]: row for row in tax.summary(read(tmp_path))}
    found = rows["slow"]["tpot_p90"]
    assert found["low"] > 1.2
    assert found["low"] <= found["value"] <= found["high"]
    assert rows["slow"]["throughput"]["value"] < 0.9
    assert rows["slow"]["requests"] == 4 * 2 * 2
    assert rows["fast"]["rounds"] == 1
    # Both arms got the same prompts.
    assert sorted(map(str, (b["input_ids"] for b in fast.asked))) == sorted(
        map(str, (b["input_ids"] for b in slow.asked))
    )


async def test_transfer_reads_the_prefill_workers_telemetry_and_fits_a_line(tmp_path: Path) -> None:
    steps = tmp_path / "steps"
    steps.mkdir()
    (steps / "decode-2.jsonl").write_bytes(b'{"event":"step"}\n{"cut off by a ki')
    prefill = MadeUp(telemetry=steps)
    async with serving(d=MadeUp(), p=prefill) as workers, Client() as client:
        arm = Arm("d+p", workers["d"], workers["p"])
        shape = transfer.Shape((1000, 2000), 500, 2)
        sink = Sink(tmp_path, "transfer")
        await transfer.measure(client, [arm], Prompts(90, 1), shape, steps, sink, silent)
    assert {body["bootstrap_host"] for body in prefill.asked} == {"127.0.0.1"}
    found = transfer.summary(read(tmp_path))
    rows = {(row["context_tokens"], row["what"]): row for row in found["rows"]}
    assert rows[1000, "full"]["bytes"] == 1_000_000
    assert rows[2000, "full"]["after_prefill_ms"]["value"] == pytest.approx(52, abs=0.5)
    (fit,) = found["one_chunk"]
    assert fit["constant_ms"] == pytest.approx(100, abs=0.5)
    assert fit["gb_s"] == pytest.approx(1.0, rel=0.05)


async def test_a_worker_that_refuses_ends_the_phase_and_keeps_the_samples(tmp_path: Path) -> None:
    broken = MadeUp(fails=True)
    shape = identity.Shape(2, 1, 20, 10, 4, 1, 0)
    async with serving(a=MadeUp(), b=broken) as workers, Client() as client:
        a, b = (Arm(name, workers[name]) for name in "ab")
        with pytest.raises(ExceptionGroup) as raised:
            await identity.measure(
                client, [a, b], a, Prompts(90, 1), shape, Sink(tmp_path, "identity"), silent
            )
        assert raised.group_contains(WorkerError, match="b answered 503: no room")
    assert [sample["arm"] for sample in read(tmp_path)] == ["a again", "a again"]


async def test_a_refused_prefill_leg_is_an_error_though_the_other_answers() -> None:
    async with serving(d=MadeUp(), p=MadeUp(fails=True)) as workers, Client() as client:
        with pytest.raises(WorkerError, match="p answered 503"):
            await client.ask(Arm("d+p", workers["d"], workers["p"]), [20, 21], 3)


def test_a_report_holds_what_there_is_and_every_sample(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = Sink(tmp_path, "stall")
    for repeat in range(4):
        sink.write(
            "repeat",
            arm="itl",
            repeat=repeat,
            warm_up=repeat == 0,
            prompt_tokens=32000,
            decodes=8,
            ttft_s=1.0 + repeat,
            base_gaps_ms=[10.0],
            gaps_ms=[20.0, 30.0 + repeat],
        )
    with (tmp_path / "samples.jsonl").open("ab") as file:
        file.write(b'{"phase":"stall","kind":"rep')
    assert main(["report", "--output", str(tmp_path)]) == 0
    assert "| itl | 3 | 10 [10–10] |" in capsys.readouterr().out
    found = orjson.loads((tmp_path / "report.json").read_bytes())
    assert len(found["samples"]) == 4
    assert found["stall"][0]["ttft_ms"]["value"] == 3000
    assert "identity" not in found


def test_of_a_phase_that_ran_again_the_fullest_run_is_reported(tmp_path: Path) -> None:
    for run, repeats in enumerate((1, 3, 2)):
        sink = Sink(tmp_path, "stall")
        for _ in range(repeats):
            sink.write("repeat", number=run, warm_up=False)
    for _ in range(9):
        sink.write("repeat", number=run, warm_up=True)
    assert [sample["number"] for sample in fullest(read(tmp_path), "stall")] == [1, 1, 1]
    assert fullest(read(tmp_path), "tax") == []


def test_a_report_of_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--output", str(tmp_path)]) == 2
    assert "no samples" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["a", "a=ftp://x", "=http://x", "a=http://x,nowhere", "a=http://x,h:p"]
)
def test_a_worker_that_cannot_be_meant_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="--worker"):
        parse_worker(text)


def test_arms_name_workers_that_were_given() -> None:
    workers = {w.name: w for w in map(parse_worker, ("e=http://h:1/", "p=http://h:2,h:3"))}
    assert workers["e"].url == "http://h:1"
    assert parse_arm("e+p", workers) == Arm("e+p", workers["e"], workers["p"])
    assert parse_arm("e~p", workers).way(True) == Arm("e~p", workers["e"], workers["p"])
    assert parse_arm("e~p", workers).way(False) == Arm("e~p", workers["e"])
    for wrong in ("x", "e+x", "p+e", "e+p+p"):
        with pytest.raises(InputError, match="--arms"):
            parse_arm(wrong, workers)


async def test_a_phase_ends_at_its_limit_and_a_dead_worker_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hangs = MadeUp(prefill_s=lambda _: 60.0)
    async with serving(a=hangs) as workers:
        common = ["stall", "--output", str(tmp_path), "--arms", "a", "--limit-s", "0.3"]
        given = ["--worker", f"a={workers['a'].url}", "--context-tokens", "5"]
        assert await asyncio.to_thread(main, [*common, *given]) == 0
        assert "ended by --limit-s" in capsys.readouterr().err
    assert await asyncio.to_thread(main, [*common, *given]) == 1
    assert capsys.readouterr().err.count("error: ") == 1


def test_an_interval_needs_three_and_holds_the_value() -> None:
    assert "low" not in statistics.median_interval([1.0, 2.0])
    found = statistics.median_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found["low"] <= found["value"] == 3.0 <= found["high"]
    assert statistics.pooled_quantile_interval([[1.0] * 9, [5.0]], 0.5)["value"] == 1.0
