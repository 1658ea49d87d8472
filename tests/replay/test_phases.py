"""Phases of a run: which requests count, when a run ends, and what `phases.json` says."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from deltaserve.errors import InputError
from replay.bodies import BodiesOnDemand
from replay.client import Client, ClientOptions
from replay.endless import EndlessCache
from replay.options import RunOptions, preset_values
from replay.phases import OneProcess, PhaseOptions, PhaseRecord, Window
from replay.plan import Planned, make_plan
from replay.prompts import WORDS, PromptMaker, play_seed
from replay.results import Result, read_results
from replay.runner import run
from replay.trace import Request, write_trace

StartEngine = Callable[..., Any]


def _trace(sessions: int = 6, turns: int = 8, shared: int = 0, output: int = 3) -> list[Request]:
    """Sessions whose prompts grow by two blocks a turn; `shared` blocks begin them all."""
    trace = []
    for number in range(sessions):
        own = 1000 * (number + 1)
        for turn in range(turns):
            ids = [*range(shared), *range(own, own + 2 * (turn + 1))]
            trace.append(
                Request(
                    f"{number}.{turn}",
                    f"s{number}",
                    turn,
                    0.0,
                    8 * len(ids) - 3,
                    output,
                    8,
                    ids,
                    None,
                    0.02 if turn else None,
                )
            )
    return trace


def _one_family(trace: list[Request]) -> list[Request]:
    """The first session as the parent of all others, their turns by turns."""
    trace = sorted(trace, key=lambda request: (request.turn, request.request_id))
    for request in trace:
        if request.turn == 0 and request is not trace[0]:
            request.parent_request_id = trace[0].request_id
    return trace


def _options(tmp_path: Path, url: str, trace: list[Request], **values: Any) -> RunOptions:
    write_trace(tmp_path / "t.jsonl", trace)
    return RunOptions(
        trace=tmp_path / "t.jsonl",
        url=url,
        output=tmp_path / "out",
        **{
            "vocab_size": 1000,
            "mode": "closed",
            "max_inflight_sessions": 4,
            "timeout_s": 5.0,
            **values,
        },
    )


def _phases(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = orjson.loads((folder / "phases.json").read_bytes())
    return record


@pytest.mark.parametrize("processes", [1, 2])
def test_only_what_is_scheduled_in_the_window_is_measured(
    tmp_path: Path, engine: StartEngine, processes: int
) -> None:
    fake = engine("sglang", delay_s=0.01)
    options = _options(
        tmp_path,
        fake.url,
        _trace(),
        start="mid",
        recycle=True,
        warm_up_s=0.4,
        measure_s=0.8,
        processes=processes,
    )
    summary = run(options, quiet=True)
    results = read_results(options.output)
    phases = _phases(options.output)
    begin, end = phases["window_start_s"], phases["window_end_s"]
    assert end == pytest.approx(begin + 0.8)
    assert phases["complete"] is True
    assert (phases["start"], phases["recycle"], phases["max_think_s"]) == ("mid", True, None)
    by_phase: dict[str, list[Result]] = {}
    for result in results:
        by_phase.setdefault(result.phase, []).append(result)
        assert result.scheduled_s is not None
        if result.phase == "prime":
            assert result.output_length == 1
            assert result.request_id.endswith("~prime")
            # Those of the first lanes: recycled ones begin with their first turn.
            assert result.finished_s <= begin - 0.4 + 1e-3
        elif result.phase == "warm_up":
            assert result.scheduled_s < begin
        elif result.phase == "measure":
            assert begin <= result.scheduled_s < end
            assert result.error is None
        else:
            assert result.scheduled_s >= end
    assert len(by_phase["prime"]) == 4
    assert len(by_phase["measure"]) > 20
    assert summary["planned"] == summary["ok"] == len(by_phase["measure"])
    assert summary["not_measured"]["prime"] == {"requests": 4, "errors": 0}
    # The load goes on while measured requests are unfinished, and not much longer.
    assert max(r.scheduled_s for r in results) <= max(r.finished_s for r in by_phase["measure"]) + 1
    assert fake.most_in_flight <= 4
    # What was played again had other prompts, the same in every process.
    played = [result for result in results if result.play]
    assert played
    requests = {request.request_id: request for request in _trace()}
    for seen in fake.seen:
        name, _, play = seen["headers"]["x-request-id"].removesuffix("~prime").partition("#")
        request = requests[name]
        maker = PromptMaker(1000, play_seed(0, int(play or 0)))
        tokens = maker.tokens(request.hash_ids, request.block_size, request.input_length)
        assert seen["body"]["input_ids"] == tokens.tolist()
    assert summary["client"]["event_loop_lag_s"]["max"] > 0


def test_prompts_of_different_plays_share_no_block() -> None:
    makers = [PromptMaker(1000, play_seed(5, play)) for play in range(20)]
    blocks = {tuple(maker.block_tokens([3], 8)[0]) for maker in makers}
    assert len(blocks) == 20
    assert play_seed(5, 0) == 5


@pytest.mark.parametrize("processes", [1, 2])
def test_sessions_in_flight_at_the_start_of_arrivals_are_primed_too(
    tmp_path: Path, engine: StartEngine, processes: int
) -> None:
    options = _options(
        tmp_path,
        engine("sglang").url,
        _trace(),
        mode="sessions",
        sessions_per_hour=3600.0 * 5,
        max_inflight_sessions=1,  # of two processes one has none
        start="mid",
        recycle_start="mid",
        recycle=True,
        warm_up_s=0.1,
        measure_s=1.0,
        processes=processes,
    )
    run(options, quiet=True)
    results = read_results(options.output)
    primes = [result for result in results if result.phase == "prime"]
    begun = {result.session_id for result in results if result.phase != "prime"}
    assert len(primes) > 2
    assert begun <= {prime.session_id for prime in primes}
    assert all(result.turn > 1 for result in results if result.phase != "prime")
    assert _phases(options.output)["complete"] is True


def test_without_phases_no_phase_is_recorded(tmp_path: Path, engine: StartEngine) -> None:
    options = _options(tmp_path, engine("sglang").url, _trace(turns=2))
    assert run(options, quiet=True)["ok"] == 12
    assert not (options.output / "phases.json").exists()
    assert {result.phase for result in read_results(options.output)} == {"measure"}


def test_sessions_that_run_out_end_the_window(tmp_path: Path, engine: StartEngine) -> None:
    options = _options(
        tmp_path, engine("sglang").url, _trace(turns=3), warm_up_s=0.05, measure_s=60.0
    )
    run(options, quiet=True)
    phases = _phases(options.output)
    assert phases["window_start_s"] == pytest.approx(0.05, abs=0.05)
    assert phases["window_end_s"] < 20
    assert phases["complete"] is False


def test_what_is_measured_and_hangs_is_a_timeout_and_the_rest_is_cancelled(
    tmp_path: Path, engine: StartEngine
) -> None:
    fake = engine("sglang", delay_s=0.001)
    # In play 0 session 0 hangs at its third turn, long after the window.
    fake.faults = {"0.2": "hang"}
    options = _options(
        tmp_path,
        fake.url,
        _trace(sessions=2),
        max_inflight_sessions=2,
        recycle=True,
        warm_up_s=0.0,
        measure_s=0.6,
        drain_s=0.3,
        timeout_s=20.0,
    )
    run(options, quiet=True)
    results = {result.request_id: result for result in read_results(options.output)}
    hung = results["0.2"]
    assert hung.phase == "measure"
    assert hung.error
    assert hung.error.kind == "timeout"
    end = _phases(options.output)["window_end_s"]
    assert end + 0.25 < hung.finished_s < end + 2
    drained = [result for result in results.values() if result.phase == "drain"]
    assert drained
    assert {r.error.kind for r in drained if r.error} <= {"timeout", "cancelled"}


def test_a_session_whose_priming_is_not_answered_goes_on_without_it(
    tmp_path: Path, engine: StartEngine
) -> None:
    """As behind a router that admits only what fits: waiting for all would measure nothing."""
    fake = engine("sglang")
    fake.faults = {f"{number}.{turn}~prime": "hang" for number in range(3) for turn in range(8)}
    options = _options(
        tmp_path,
        fake.url,
        _trace(),
        start="mid",
        prime_parallel=6,
        prime_timeout_s=0.3,
        warm_up_s=0.0,
        measure_s=0.5,
        timeout_s=20.0,
    )
    run(options, quiet=True)
    results = read_results(options.output)
    unprimed = {r.session_id for r in results if r.phase == "prime" and r.error}
    assert unprimed
    assert {r.error.kind for r in results if r.phase == "prime" and r.error} == {"timeout"}
    assert unprimed <= {r.session_id for r in results if r.phase == "measure"}
    assert _phases(options.output)["window_start_s"] == pytest.approx(0.3, abs=0.2)


def test_priming_a_session_with_subagents_ends_with_its_time(
    tmp_path: Path, engine: StartEngine
) -> None:
    """However many prefixes a conversation has, they share one timeout."""
    fake = engine("sglang")
    fake.faults = {f"{number}.{turn}~prime": "hang" for number in range(12) for turn in range(8)}
    options = _options(
        tmp_path,
        fake.url,
        _one_family(_trace(sessions=4)),
        max_inflight_sessions=1,
        start="mid",
        start_share=(0.5, 0.5),
        prime_timeout_s=0.3,
        measure_s=0.3,
        timeout_s=20.0,
    )
    run(options, quiet=True)
    assert len([r for r in read_results(options.output) if r.phase == "prime"]) == 1
    assert _phases(options.output)["window_start_s"] == pytest.approx(0.3, abs=0.2)


@pytest.mark.parametrize("processes", [1, 2])
def test_sessions_arrive_while_the_window_lasts(
    tmp_path: Path, engine: StartEngine, processes: int
) -> None:
    fake = engine("sglang")
    options = _options(
        tmp_path,
        fake.url,
        _trace(turns=2),
        mode="sessions",
        sessions_per_hour=3600.0 * 40,
        recycle=True,
        warm_up_s=0.2,
        measure_s=1.5,
        processes=processes,
    )
    run(options, quiet=True)
    results = read_results(options.output)
    firsts = [r for r in results if r.turn == 0 and r.phase == "measure"]
    assert 30 <= len(firsts) <= 100
    begun = {r.session_id for r in results if r.turn == 0}
    assert len(begun) == len([r for r in results if r.turn == 0])


@pytest.mark.parametrize("spliced", [False, True])
def test_what_an_endless_cache_holds_is_on_every_line(
    tmp_path: Path, engine: StartEngine, spliced: bool
) -> None:
    fake = engine("sglang")
    options = _options(
        tmp_path,
        fake.url,
        _trace(sessions=3, turns=6, shared=4),
        max_inflight_sessions=3,
        start="mid",
        recycle=True,
        measure_s=1.0,
        splice_outputs=spliced,
    )
    run(options, quiet=True)
    results = {r.request_id: r for r in read_results(options.output)}
    after_prime = played_again = 0
    firsts: set[int] = set()
    for result in sorted(results.values(), key=lambda r: r.sent_s or 0.0):
        if result.sent_s is None:  # was due when the run ended
            assert result.best_cached_tokens is None
            continue
        name, _, play = result.request_id.partition("#")
        number, turn = name.removesuffix("~prime").split(".")
        before = results.get(f"{number}.{int(turn) - 1}" + (f"#{play}" if play else ""))
        if result.phase == "prime" or before is None:
            if int(turn) and result.phase != "prime":
                # The primed prompt; its answer of one token is not in this one.
                assert result.best_cached_tokens == 8 * (4 + 2 * int(turn)) - 3
                after_prime += 1
                continue
            # A first turn has the prefix that all share, but for the very first of each play.
            known = 0 if result.play not in firsts else 32
            firsts.add(result.play)
            assert result.best_cached_tokens == known
            played_again += result.play > 0
            continue
        # An answer's last token is in no cache: it was generated and not read.
        answer = before.output_tokens - 1 if spliced else 0
        assert result.best_cached_tokens == before.input_length + answer
    assert after_prime == 3
    assert played_again > 1


def test_a_prompt_is_in_the_endless_cache_from_when_it_was_sent(engine: StartEngine) -> None:
    """Not from when it was due: its body may be made later than that of a request due after it."""

    class LateFirstBody(BodiesOnDemand):
        async def take(self, request: Planned) -> bytes | memoryview:
            if request.request_id == "0.0":
                await asyncio.sleep(0.1)
            return await super().take(request)

    plan = make_plan(iter(_trace(sessions=2, turns=1, shared=4))).requests
    fake = engine("sglang")
    results: dict[str, Result] = {}
    options = ClientOptions(
        api="sglang",
        model="tiny",
        vocab_size=1000,
        seed=0,
        record_output_ids=False,
        splice_outputs=False,
        as_text=False,
        words=WORDS,
        url=fake.url,
        timeout_s=5.0,
        prime_timeout_s=5.0,
    )

    async def send_both() -> None:
        client = Client(
            options,
            time.monotonic,
            lambda result: results.update({result.request_id: result}),
            bodies=LateFirstBody(options),
            endless=EndlessCache(spliced=False),
        )
        with contextlib.closing(client):
            await asyncio.gather(*(client.send(plan[index], 0.0) for index in range(2)))

    asyncio.run(send_both())
    late, early = results["0.0"], results["1.0"]
    assert early.sent_s is not None
    assert late.sent_s is not None
    assert early.sent_s < late.sent_s
    assert (early.best_cached_tokens, late.best_cached_tokens) == (0, 32)


def test_the_window_begins_when_the_last_process_is_primed() -> None:
    shared = OneProcess()
    shared.unprimed = 2
    options = PhaseOptions(warm_up_s=5.0, measure_s=10.0, drain_s=3.0)
    one, other = Window(options, shared, 0), Window(options, shared, 0)
    one.primed(1.0)
    assert one.start_s is None
    assert one.phase_of(100.0) == "warm_up"
    other.primed(4.0)
    assert one.start_s == 9.0
    assert [one.phase_of(s) for s in (8.99, 9.0, 18.99, 19.0)] == [
        "warm_up",
        "measure",
        "measure",
        "drain",
    ]
    assert not one.is_over(19.0, lambda: 0)
    assert not one.is_over(20.0, lambda: 1)
    assert one.is_over(20.0, lambda: 0)
    assert one.is_over(22.01, lambda: 1)


def test_phases_are_written_at_the_start_of_the_window_and_at_its_end(tmp_path: Path) -> None:
    window = Window(PhaseOptions(1.0, 10.0, 3.0), OneProcess())
    record = PhaseRecord(tmp_path, window, {"start": "mid"})
    record.look(0.5)
    window.primed(2.0)
    record.look(2.5)
    assert not (tmp_path / "phases.json").exists()
    record.look(3.1)
    assert _phases(tmp_path) == {
        "start": "mid",
        "window_start_s": 3.0,
        "window_end_s": 13.0,
        "complete": False,
    }
    record.close(9.0)
    assert _phases(tmp_path)["window_end_s"] == 9.0
    assert _phases(tmp_path)["complete"] is False
    record.close(14.0)
    assert _phases(tmp_path)["window_end_s"] == 13.0
    assert _phases(tmp_path)["complete"] is True


def test_a_preset_gives_way_to_flags_but_keeps_its_rules() -> None:
    values = preset_values("agentx", {"measure_s": 900.0, "max_think_s": 60.0})
    assert (values["start"], values["recycle"], values["measure_s"]) == ("mid", True, 900.0)
    assert values["max_think_s"] == 60.0
    with pytest.raises(InputError, match="--measure-s 60"):
        preset_values("agentx", {"measure_s": 60.0})
    with pytest.raises(InputError, match="--mode open"):
        preset_values("agentx", {"mode": "open"})
    assert preset_values("think-60", {}) == {"max_think_s": 60.0}
