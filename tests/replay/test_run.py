"""Replays against an engine that speaks the real dialects over real sockets."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from asyncio.selector_events import BaseSelectorEventLoop
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import psutil
import pytest

from deltaserve.errors import InputError
from replay.http import Server
from replay.options import RunOptions
from replay.pauses import SHORTEST_PAUSE_S
from replay.plan import make_plan
from replay.prompts import WORDS, PromptMaker
from replay.results import ErrorInfo, Result, read_results
from replay.runner import default_processes, run
from replay.summary import summarise
from replay.tables import summary_lines
from replay.trace import Request, write_trace

TraceOf = Callable[..., list[Request]]
StartEngine = Callable[..., Any]


def _options(tmp_path: Path, trace: list[Request], url: str, **values: Any) -> RunOptions:
    write_trace(tmp_path / "t.jsonl", trace)
    return RunOptions(
        trace=tmp_path / "t.jsonl",
        url=url,
        output=tmp_path / "out",
        **{"vocab_size": 1000, "time_scale": 1000.0, **values},
    )


def _by_id(path: Path) -> dict[str, Result]:
    return {result.request_id: result for result in read_results(path)}


@pytest.mark.parametrize("mode", ["open", "closed"])
@pytest.mark.parametrize("dialect", ["sglang", "sglang-incremental", "vllm", "chat", "text"])
def test_every_request_is_sent_whole_and_its_answer_recorded(
    tmp_path: Path, trace_of: TraceOf, engine: StartEngine, dialect: str, mode: str
) -> None:
    fake = engine(dialect.split("-")[0], incremental=dialect.endswith("incremental"))
    trace = trace_of(4)
    options = _options(
        tmp_path,
        trace,
        fake.url,
        mode=mode,
        api="chat" if dialect == "chat" else "auto",
        as_text=dialect == "text",
        record_output_ids=dialect != "chat",
    )
    summary = run(options, quiet=True)
    assert summary["ok"] == summary["planned"] == len(trace)
    results = _by_id(options.output)
    bodies = {seen["headers"]["x-request-id"]: seen for seen in fake.seen}
    maker = PromptMaker(1000, 0)
    rids: list[str] = []
    for request in trace:
        result = results[request.request_id]
        assert result.output_tokens == request.output_length
        assert result.cached_tokens == 3
        assert result.decision_id == f"d-{request.request_id}"
        assert result.arrivals[-1][1] == request.output_length
        times = [result.scheduled_s, result.sent_s, result.first_token_s, result.finished_s]
        assert times == sorted(times)
        assert all(at_s == round(at_s, 6) for at_s, _ in result.arrivals)  # lines stay short
        if dialect != "chat":
            expected = [7 * number % 100 for number in range(request.output_length)]
            assert result.output_ids == expected
        seen = bodies[request.request_id]
        assert seen["headers"]["x-session-id"] == request.session_id
        if dialect.startswith("sglang"):
            assert seen["path"] == "/generate"
            prompt = seen["body"]["input_ids"]
            rids.append(seen["body"]["rid"])
        elif dialect == "vllm":
            assert seen["path"] == "/v1/completions"
            prompt = seen["body"]["prompt"]
        else:
            continue
        tokens = maker.tokens(request.hash_ids, request.block_size, request.input_length)
        assert prompt == tokens.tolist()
        assert result.prompt_tokens == request.input_length
    # SGLang aborts every request whose id begins with the one to abort.
    assert not any(one != other and other.startswith(one) for one in rids for other in rids)


@pytest.mark.parametrize(
    ("dialect", "owner", "path"),
    [
        ("sglang", "local", "/generate"),  # sglang-router 0.3.2, whose completions take text alone
        ("sglang", "self_hosted", "/generate"),  # smg 1.13.0
        ("vllm", "local", "/v1/completions"),
    ],
)
def test_behind_a_stock_router_an_engine_is_asked_in_its_own_dialect(
    tmp_path: Path, trace_of: TraceOf, engine: StartEngine, dialect: str, owner: str, path: str
) -> None:
    fake = engine(dialect, behind=owner)
    summary = run(_options(tmp_path, trace_of(4, requests=5), fake.url), quiet=True)
    assert summary["ok"] == 5
    assert {seen["path"] for seen in fake.seen} == {path}


@pytest.mark.parametrize(
    ("fault", "kind", "status"),
    [
        ("400", "client_error", 400),
        ("503", "server_error", 503),
        ("error", "engine_error", 200),
        ("short", "short_output", 200),
        ("cut", "disconnect", 200),
        ("hang", "timeout", 200),
    ],
)
def test_whose_fault_an_error_was_is_recorded_and_the_session_goes_on(
    tmp_path: Path, trace_of: TraceOf, engine: StartEngine, fault: str, kind: str, status: int
) -> None:
    fake = engine("sglang")
    trace = [replace(request, output_length=8) for request in trace_of(4, requests=10)]
    fake.faults = {"r2": fault}
    options = _options(tmp_path, trace, fake.url, timeout_s=1.0)
    summary = run(options, quiet=True)
    assert summary["errors"] == {kind: 1}
    assert summary["ok"] == len(trace) - 1
    result = _by_id(options.output)["r2"]
    assert result.error
    assert result.error.kind == kind
    assert result.status == status
    assert result.finished_s is not None


def test_of_an_answer_without_tokens_it_is_told_what_the_server_said(
    tmp_path: Path, trace_of: TraceOf, engine: StartEngine
) -> None:
    fake = engine("sglang")
    fake.faults = {"r2": "whole"}
    options = _options(tmp_path, trace_of(4, requests=10), fake.url)
    run(options, quiet=True)
    result = _by_id(options.output)["r2"]
    assert result.error
    wanted = result.output_length
    assert result.error.message == (
        f"0 of {wanted} tokens; the stream ended early, "
        'after: {"detail": "answers are not streamed here"}'
    )


@pytest.mark.parametrize("dialect", ["sglang", "vllm"])
@pytest.mark.parametrize(
    ("config", "vocab_size"),
    [({"vocab_size": 50}, 50), ({"text_config": {"vocab_size": 70}}, 70), (None, 32_000)],
)
def test_token_ids_are_of_the_served_models_vocabulary(
    tmp_path: Path,
    trace_of: TraceOf,
    engine: StartEngine,
    capsys: pytest.CaptureFixture[str],
    dialect: str,
    config: dict[str, Any] | None,
    vocab_size: int,
) -> None:
    fake = engine(dialect)
    if config:
        (tmp_path / "config.json").write_bytes(orjson.dumps(config))
        fake.model_path = str(tmp_path)
    options = _options(tmp_path, trace_of(4, requests=10), fake.url, vocab_size=None)
    run(options, quiet=True)
    record = orjson.loads((options.output / "replay.json").read_bytes())
    assert record["arguments"]["vocab_size"] == vocab_size
    prompts = [seen["body"]["input_ids" if dialect == "sglang" else "prompt"] for seen in fake.seen]
    assert vocab_size * 0.5 < max(max(prompt) for prompt in prompts) < vocab_size
    warned = [line for line in capsys.readouterr().err.splitlines() if "vocabulary" in line]
    assert len(warned) == (config is None)


@pytest.mark.parametrize("folder_is_here", [True, False])
def test_text_is_of_words_that_the_served_model_reads_as_one_token(
    tmp_path: Path, trace_of: TraceOf, engine: StartEngine, folder_is_here: bool
) -> None:
    fake = engine("vllm")
    own = [f"{a}{b}" for a in "abcdefghijklmnop" for b in "abcdefgh"]
    vocab = {piece: at for at, piece in enumerate(["a", "Ġ7", *(f"Ġ{word}" for word in own)])}
    (tmp_path / "tokenizer.json").write_bytes(orjson.dumps({"model": {"vocab": vocab}}))
    if folder_is_here:
        fake.model_path = str(tmp_path)
    options = _options(tmp_path, trace_of(4, requests=10), fake.url, as_text=True)
    run(options, quiet=True)
    sent = {word for seen in fake.seen for word in seen["body"]["prompt"].split(" ")}
    assert sent <= set(own if folder_is_here else WORDS)
    assert len(sent) > 20


def test_a_server_that_went_away_gives_connection_errors(
    tmp_path: Path, trace_of: TraceOf, engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replay.runner.find_engine", lambda url, headers: ("sglang", "tiny"))
    options = _options(tmp_path, trace_of(4, requests=5), "http://127.0.0.1:9")
    assert run(options, quiet=True)["errors"] == {"connect": 5}


# A closed loop of four sessions that are played again and do not think, for a second and a half.
THOUGHTLESS: dict[str, Any] = {
    "mode": "closed",
    "max_inflight_sessions": 4,
    "think_scale": 0.0,
    "recycle": True,
    "measure_s": 1.5,
    "drain_s": 30.0,
}


@pytest.mark.parametrize("processes", [1, 2])
def test_recycled_sessions_that_do_not_think_wait_before_a_server_that_is_gone(
    tmp_path: Path, trace_of: TraceOf, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    monkeypatch.setattr("replay.runner.find_engine", lambda url, headers: ("sglang", "tiny"))
    options = _options(
        tmp_path,
        trace_of(4, requests=20),
        "http://127.0.0.1:9",
        **THOUGHTLESS,
        processes=processes,
    )
    began_s = time.monotonic()
    summary = run(options, quiet=True)
    assert time.monotonic() - began_s < 10  # the wait is no request that the drain waits for
    assert set(summary["errors"]) == {"connect"}
    # Each session after 0, 0.1, 0.2, 0.4, 0.8 s, and not thousands of times a second.
    assert 4 * 2 <= len(read_results(options.output)) <= 4 * 7
    assert orjson.loads((options.output / "phases.json").read_bytes())["complete"]


@pytest.mark.parametrize("fault", ["400", "503", "error"])
@pytest.mark.parametrize("retry_after", [None, "1"])
def test_recycled_sessions_that_do_not_think_wait_before_a_server_that_refuses_all(
    tmp_path: Path, trace_of: TraceOf, engine: StartEngine, fault: str, retry_after: str | None
) -> None:
    fake = engine("sglang")
    fake.faults = {"all": fault}
    if retry_after:
        fake.refuses_with = {"retry-after": retry_after}
    options = _options(
        tmp_path,
        trace_of(4, requests=20, sub_agents=False),
        fake.url,
        **THOUGHTLESS,
    )
    began_s = time.monotonic()
    summary = run(options, quiet=True)
    assert time.monotonic() - began_s < 10
    assert summary["ok"] == 0
    # As before a server that is gone; each session after 0 and 1 s where the server says so.
    most = 2 if retry_after and fault != "error" else 7
    assert 4 * 2 <= len(read_results(options.output)) <= 4 * most


def test_what_follows_a_refusal_waits_as_long_as_the_server_asks_and_then_thinks(
    tmp_path: Path, trace_of: TraceOf, engine: StartEngine
) -> None:
    fake = engine("sglang")
    fake.refuses_with = {"retry-after": "1"}
    one = trace_of(4, requests=1)[0]
    ids = {"a0": ("a", 0), "a1": ("a", 1), "b0": ("b", 0), "c0": ("c", 0)}
    trace = [
        replace(
            one,
            request_id=name,
            session_id=session,
            turn=turn,
            think_time_s=0.3 if turn else None,
        )
        for name, (session, turn) in ids.items()
    ]
    fake.faults = {"a0": "503", "a1": "400"}
    options = _options(tmp_path, trace, fake.url, mode="closed", max_inflight_sessions=1)
    run(replace(options, time_scale=1.0), quiet=True)
    results = _by_id(options.output)

    def waited_s(before: str, after: str) -> float:
        return (results[after].scheduled_s or 0.0) - (results[before].finished_s or 0.0)

    assert 1.3 <= waited_s("a0", "a1") < 2.0
    assert 1.0 <= waited_s("a1", "b0") < 1.7  # the slot's next session
    assert waited_s("b0", "c0") < 0.1  # an answer is followed at once


def test_sessions_go_on_when_a_server_is_back(
    tmp_path: Path, trace_of: TraceOf, engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = engine("sglang")
    tried: list[float] = []
    connect = Server._connection

    async def refuse_three_times(server: Server) -> Any:
        tried.append(time.monotonic())
        if len(tried) <= 3:
            raise ConnectionRefusedError
        return await connect(server)

    monkeypatch.setattr(Server, "_connection", refuse_three_times)
    trace = trace_of(4, requests=20, sub_agents=False)
    options = _options(tmp_path, trace, fake.url, mode="closed", max_inflight_sessions=1)
    summary = run(replace(options, think_scale=0.0), quiet=True)
    assert (summary["ok"], summary["errors"]) == (17, {"connect": 3})
    waited_s = [after - before for before, after in pairwise(tried)]
    assert waited_s[0] > 0.09
    assert waited_s[2] > 0.19  # for as long as nobody had answered: 0.1 s, 0.1 s, 0.2 s
    assert sum(waited_s[3:]) < 17 * SHORTEST_PAUSE_S  # what was answered is followed at once


def test_no_server_is_one_line(tmp_path: Path, trace_of: TraceOf) -> None:
    with pytest.raises(InputError, match="no server answers there"):
        run(_options(tmp_path, trace_of(4, requests=5), "http://127.0.0.1:9"), quiet=True)


def test_closed_loop_over_several_processes_sends_each_once_within_its_slots(
    tmp_path: Path, trace_of: TraceOf, engine: StartEngine
) -> None:
    fake = engine("sglang", delay_s=0.002)
    trace = trace_of(6, requests=120, sub_agents=False)
    options = _options(
        tmp_path, trace, fake.url, mode="closed", max_inflight_sessions=5, processes=3
    )
    assert run(options, quiet=True)["ok"] == len(trace)
    sent = [seen["headers"]["x-request-id"] for seen in fake.seen]
    assert sorted(sent) == sorted(request.request_id for request in trace)
    assert 3 <= fake.most_in_flight <= 5


def test_open_loop_over_several_processes_keeps_one_clock(
    tmp_path: Path, trace_of: TraceOf, engine: StartEngine
) -> None:
    fake = engine("sglang")
    trace = trace_of(6, requests=60)
    options = _options(tmp_path, trace, fake.url, processes=2, time_scale=50.0)
    assert run(options, quiet=True)["ok"] == len(trace)
    results = _by_id(options.output)
    for request in trace:
        result = results[request.request_id]
        assert result.scheduled_s is not None
        assert result.scheduled_s >= request.timestamp_s / 50 - 1e-9
        if request.parent_request_id:
            assert result.sent_s >= results[request.parent_request_id].finished_s  # type: ignore[operator]


def test_a_resumed_run_sends_what_failed_or_was_never_sent(
    tmp_path: Path, trace_of: TraceOf, engine: StartEngine
) -> None:
    fake = engine("sglang")
    trace = trace_of(4, requests=20)
    fake.faults = {"r3": "503"}
    options = _options(tmp_path, trace, fake.url)
    run(options, quiet=True)
    results = options.output / "requests.jsonl"
    lines = results.read_bytes().splitlines(keepends=True)
    results.write_bytes(b"".join(lines[:12]) + lines[12][:30])
    kept = {orjson.loads(line)["request_id"] for line in lines[:12]} - {"r3"}
    fake.faults = {}
    fake.seen.clear()
    with pytest.raises(InputError, match="--resume"):
        run(options, quiet=True)
    with pytest.raises(InputError, match="--seed 5: expected 0"):
        run(replace(options, resume=True, seed=5), quiet=True)
    summary = run(replace(options, resume=True), quiet=True)
    assert summary["ok"] == len(trace)
    sent = {seen["headers"]["x-request-id"] for seen in fake.seen}
    assert sent == {request.request_id for request in trace} - kept
    record = orjson.loads((options.output / "replay.json").read_bytes())
    assert len(record["resumed_at_s"]) == 1
    again = [r for r in read_results(options.output) if r.request_id in sent]
    assert all(result.sent_s >= record["resumed_at_s"][0] for result in again)  # type: ignore[operator]
    # All is there now: it is no run of three loads.
    assert run(replace(options, resume=True), quiet=True)["ok"] == len(trace)
    record = orjson.loads((options.output / "replay.json").read_bytes())
    assert len(record["resumed_at_s"]) == 1


def test_a_request_that_occurs_twice_is_named_with_its_file(
    tmp_path: Path, trace_of: TraceOf
) -> None:
    trace = trace_of(1, requests=3)
    options = _options(tmp_path, [trace[0], *trace], "http://x")
    twice = rf"{re.escape(str(options.trace))}: request_id {trace[0].request_id}: occurs twice"
    with pytest.raises(InputError, match=twice):
        run(options, quiet=True)


def test_a_run_is_not_resumed_with_other_arrivals(
    tmp_path: Path, trace_of: TraceOf, engine: StartEngine
) -> None:
    options = _options(
        tmp_path, trace_of(4, requests=6), engine("sglang").url,
        mode="sessions", sessions_per_hour=1e6,
    )  # fmt: skip
    run(options, quiet=True)
    with pytest.raises(InputError, match=r"--sessions-per-hour 2000000\.0: expected 1000000\.0"):
        run(replace(options, resume=True, sessions_per_hour=2e6), quiet=True)


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({}, {"request_limit": 3}, "--request-limit 3: expected none, as in "),
        ({"request_limit": 3}, {}, "no --request-limit: expected --request-limit 3, as in "),
        ({}, {"as_text": True}, "--text: expected none, as in "),
        ({"as_text": True}, {}, "no --text: expected --text, as in "),
    ],
)
def test_what_a_resumed_run_misses_or_has_too_much_is_named_as_it_is_given(
    tmp_path: Path,
    trace_of: TraceOf,
    engine: StartEngine,
    before: dict[str, Any],
    now: dict[str, Any],
    said: str,
) -> None:
    options = _options(tmp_path, trace_of(4, requests=6), engine("sglang").url)
    run(replace(options, **before), quiet=True)
    with pytest.raises(InputError, match=f"^{said}.*replay.json$"):
        run(replace(options, resume=True, **now), quiet=True)


def _start_cli(
    tmp_path: Path, trace: list[Request], url: str, processes: int = 1
) -> subprocess.Popen[bytes]:
    write_trace(tmp_path / "t.jsonl", trace)
    command = [sys.executable, "-m", "deltaserve", "replay", "run", str(tmp_path / "t.jsonl")]
    command += ["--url", url, "--output", str(tmp_path / "out"), "--vocab-size", "1000"]
    command += ["--mode", "closed", "--max-inflight-sessions", "2"]
    command += ["--processes", str(processes)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def _wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _wait_for_results(tmp_path: Path, count: int) -> None:
    file = tmp_path / "out" / "requests.jsonl"
    _wait_until(lambda: file.exists() and file.read_bytes().count(b"\n") >= count)


def test_results_are_readable_after_kill_9_and_the_run_can_go_on(
    tmp_path: Path, trace_of: TraceOf, engine: StartEngine
) -> None:
    fake = engine("sglang", delay_s=0.01)
    trace = trace_of(4, requests=40)
    process = _start_cli(tmp_path, trace, fake.url)
    _wait_for_results(tmp_path, 5)
    process.kill()
    process.communicate()
    before = read_results(tmp_path / "out")
    assert 5 <= len(before) < len(trace)
    assert all(result.error is None for result in before)
    assert run(_options_to_resume(tmp_path, fake.url), quiet=True)["ok"] == len(trace)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_that_has_not_ended_is_not_resumed_beside_itself(
    tmp_path: Path, trace_of: TraceOf, engine: StartEngine, processes: int
) -> None:
    """As by one who lost the terminal of the first and takes it for dead."""
    fake = engine("sglang", delay_s=0.01)
    trace = trace_of(4, requests=40)
    process = _start_cli(tmp_path, trace, fake.url, processes)
    try:
        _wait_for_results(tmp_path, 5)
        options = _options_to_resume(tmp_path, fake.url)
        with pytest.raises(InputError, match=r"out: another replay run is at work there"):
            run(options, quiet=True)
        process.send_signal(signal.SIGINT)
    finally:
        process.communicate()
    assert run(options, quiet=True)["ok"] == len(trace)


def _options_to_resume(tmp_path: Path, url: str) -> RunOptions:
    """Of what `_start_cli` started."""
    return RunOptions(
        trace=tmp_path / "t.jsonl",
        url=url,
        output=tmp_path / "out",
        vocab_size=1000,
        mode="closed",
        max_inflight_sessions=2,
        resume=True,
    )


def _has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE  # in a container nobody may collect it
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("processes", [1, 2])
def test_no_process_outlives_a_killed_run(
    tmp_path: Path, trace_of: TraceOf, engine: StartEngine, processes: int
) -> None:
    fake = engine("sglang", delay_s=10.0)
    process = _start_cli(tmp_path, trace_of(4, requests=40, sub_agents=False), fake.url, processes)
    _wait_until(lambda: len(fake.seen) == 2)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) == (1 if processes == 1 else 2 * processes)
    process.kill()
    process.communicate()
    _wait_until(lambda: all(map(_has_ended, children)))


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("processes", [1, 2])
def test_an_interrupted_run_records_what_it_cancelled_and_sums_up(
    tmp_path: Path,
    trace_of: TraceOf,
    engine: StartEngine,
    processes: int,
    signal_number: signal.Signals,
) -> None:
    fake = engine("sglang", delay_s=0.05)
    process = _start_cli(tmp_path, trace_of(4, requests=40), fake.url, processes)
    _wait_for_results(tmp_path, 3)
    os.kill(process.pid, signal_number)
    output, _ = process.communicate(timeout=30)
    assert b"results in" in output
    kinds = {result.error.kind for result in read_results(tmp_path / "out") if result.error}
    assert kinds <= {"cancelled"}
    record = orjson.loads((tmp_path / "out" / "replay.json").read_bytes())
    assert record["summary"]["interrupted"] is True
    assert process.returncode == 130


@pytest.mark.parametrize("block_size", [4, 16])
def test_spliced_prompts_hold_the_generated_answer_and_then_the_traces_tokens(
    tmp_path: Path, engine: StartEngine, block_size: int
) -> None:
    fake = engine("sglang")
    first = list(range(-(-10 // block_size)))
    full = 10 // block_size
    second = first[:full] + list(range(100, 100 + -(-40 // block_size) - full))
    third = [*second, 200, 201, 202][: -(-48 // block_size)]
    trace = [
        Request("a", "s", 0, 0.0, 10, 12, block_size, first),
        Request("b", "s", 1, 1.0, 40, 3, block_size, second),
        Request("c", "t", 0, 2.0, 48, 2, block_size, third),
    ]
    options = _options(tmp_path, trace, fake.url, splice_outputs=True, mode="closed")
    options = replace(options, max_inflight_sessions=1)
    run(options, quiet=True)
    prompts = {s["headers"]["x-request-id"]: s["body"]["input_ids"] for s in fake.seen}
    answer = [7 * number % 100 for number in range(12)]
    stand_in = PromptMaker(1000, 0).tokens(second, block_size, 40).tolist()
    assert prompts["b"] == prompts["a"] + answer + stand_in[22:]
    shared = 40 // block_size * block_size
    assert prompts["c"][:shared] == prompts["b"][:shared]


def test_a_prompt_that_does_not_continue_the_last_is_not_spliced(
    tmp_path: Path, engine: StartEngine
) -> None:
    fake = engine("sglang")
    trace = [
        Request("a", "s", 0, 0.0, 10, 12, 4, [0, 1, 2]),
        Request("b", "s", 1, 1.0, 20, 3, 4, [0, 1, 7, 8, 9]),
        Request("c", "s", 2, 2.0, 40, 3, 4, [0, 1, *range(20, 28)]),
    ]
    run(_options(tmp_path, trace, fake.url, splice_outputs=True), quiet=True)
    prompts = {s["headers"]["x-request-id"]: s["body"]["input_ids"] for s in fake.seen}
    for request in trace:
        expected = PromptMaker(1000, 0).tokens(request.hash_ids, 4, request.input_length)
        assert prompts[request.request_id] == expected.tolist()


def test_the_default_number_of_processes_grows_with_the_load_up_to_half_the_cores(
    tmp_path: Path,
) -> None:
    def processes(rate_rps: int, cores: int, **values: Any) -> int:
        trace = [
            Request(f"r{n}", f"s{n}", 0, n / rate_rps, 4, 50, 4, [n]) for n in range(rate_rps * 12)
        ]
        options = _options(tmp_path, trace, "http://x", **{"time_scale": 1.0, **values})
        return default_processes(make_plan(trace).requests, options, cores)

    assert processes(10, 64) == 1
    assert 1 < processes(1000, 64) < processes(4000, 64) <= 32
    assert processes(1000, 64, time_scale=0.01) == 1
    assert processes(1000, 4) == 2
    assert processes(1000, 1) == 1
    assert processes(10, 64, mode="closed", max_inflight_sessions=2000) == 4


def test_a_trace_that_pauses_for_years_is_counted_where_it_has_requests(tmp_path: Path) -> None:
    trace = [Request(f"r{n}", f"s{n}", 0, at_s, 4, 50, 4, [n]) for n, at_s in enumerate((0, 1e13))]
    options = _options(tmp_path, trace, "http://x", time_scale=1.0)
    assert default_processes(make_plan(trace).requests, options, 64) == 1


def test_a_closed_loop_says_so_where_it_has_fewer_sessions_than_it_is_to_keep_in_flight(
    tmp_path: Path, trace_of: TraceOf, engine: StartEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    options = _options(
        tmp_path, trace_of(3), engine().url, mode="closed", max_inflight_sessions=4, think_scale=0.0
    )
    run(options, quiet=True)
    assert capsys.readouterr().err == ""
    run(replace(options, max_inflight_sessions=40, output=tmp_path / "more"), quiet=True)
    err = capsys.readouterr().err
    assert "t.jsonl: 4 conversations are there to send, so that 40 (--max-inflight" in err


def test_an_open_loop_that_sends_nothing_for_long_says_so(
    tmp_path: Path, engine: StartEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trace that was cut out of another, or has the time of day."""
    trace = [Request("r", "s", 0, 100.0, 4, 2, 4, [1])]
    fake = engine("sglang")
    run(_options(tmp_path, trace, fake.url, time_scale=1000.0), quiet=True)
    assert capsys.readouterr().err == ""
    options = replace(_options(tmp_path, trace, fake.url, time_scale=1.0), output=tmp_path / "two")
    runs = subprocess.Popen(
        [sys.executable, "-m", "deltaserve", "replay", "run", str(options.trace), "--url",
         options.url, "--output", str(options.output), "--vocab-size", "1000"],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert runs.stderr is not None
    words = runs.stderr.readline()
    runs.terminate()
    runs.communicate(timeout=20)
    assert "the first request is due 100 s after the run's start" in words


def test_what_the_client_breaks_off_at_the_end_did_not_fail() -> None:
    """With phases every run ends so: the load goes on until what was measured is answered."""
    made = Result(
        request_id="a", session_id="s", turn=0, input_length=10, output_length=2, phase="drain"
    )
    errors: list[ErrorInfo | None] = [
        ErrorInfo(kind="cancelled", message="the run was stopped"),
        ErrorInfo(kind="server_error", message="no"),
        None,
    ]
    summary = summarise((made.model_copy(update={"error": error}) for error in errors), None)
    assert summary["not_measured"] == {"drain": {"requests": 3, "errors": 1, "cancelled": 1}}
    line = next(line for line in summary_lines(summary) if line.startswith("drain"))
    assert line.endswith("3, not measured; 1 failed, 1 broken off")


def test_of_two_results_for_a_request_the_summary_counts_the_later() -> None:
    failed = Result(
        request_id="a",
        session_id="s",
        turn=0,
        input_length=10,
        output_length=2,
        error=ErrorInfo(kind="connect", message="no"),
    )
    good = failed.model_copy(
        update={"error": None, "output_tokens": 2, "prompt_tokens": 10, "cached_tokens": 4}
    )
    later = failed.model_copy(update={"request_id": "b"})
    summary = summarise([failed, later, good], 3)
    assert (summary["finished"], summary["ok"]) == (2, 1)
    assert summary["errors"] == {"connect": 1}
    assert summary["cached_share"] == 0.4
    assert summary["ttft_s"] is None
    assert summarise([], 3)["finished"] == 0


def test_summary_percentiles_are_numpys(tmp_path: Path) -> None:
    results = [
        Result(
            request_id=str(number),
            session_id="s",
            turn=0,
            input_length=10,
            output_length=2,
            scheduled_s=0.0,
            sent_s=0.0,
            first_token_s=float(number),
            finished_s=float(number + 1),
        )
        for number in range(37)
    ]
    summary = summarise(results, 37)
    p50, p90, p99 = np.percentile(range(37), [50, 90, 99])
    assert summary["ttft_s"] == {"p50": p50, "p90": p90, "p99": p99}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_inflight_sessions": 0}, "--max-inflight-sessions 0"),
        ({"time_scale": 0.0}, "--time-scale 0: expected"),
        ({"vocab_size": 1}, "--vocab-size 1"),
        ({"url": "localhost:1"}, "--url localhost:1: expected http"),
        ({"mode": "sessions"}, "--sessions-per-hour"),
        ({"sessions_per_hour": 5.0}, "--mode sessions"),
        ({"mode": "open", "start": "mid"}, "--start"),
        ({"mode": "closed", "recycle": True}, "--measure-s"),
        ({"mode": "closed", "warm_up_s": 1.0, "resume": True}, "--resume"),
        ({"start_share": (0.5, 0.2)}, "--start-share 0.5 0.2"),
        ({"headers": ("Authorization=Bearer @NO_SUCH_VARIABLE",)}, "NO_SUCH_VARIABLE"),
        ({"headers": ("secret",)}, "--header"),
        ({"splice_outputs": True, "as_text": True}, "--splice-outputs"),
        ({"mode": "closed", "processes": 9}, "--processes 9"),
        ({"max_input_tokens": 1, "url": "http://x"}, "no request left to send"),
        ({"time_scale": 1e300}, "--time-scale 1e.300: expected at most 1,000,000 "),
        ({"timeout_s": float("inf")}, "--timeout-s inf: expected at most 31,622,400 .a year"),
        ({"mode": "closed", "measure_s": 1e300}, "--measure-s 1e.300: expected at most 31,622,4"),
        ({"mode": "closed", "max_think_s": 1e300}, "--max-think-s 1e.300: expected at most 31,6"),
        ({"mode": "closed", "processes": 65_536}, "--processes 65536: expected at most 1,024"),
        *(
            (values, "nan: expected")
            for values in (
                {"time_scale": float("nan")},
                {"think_scale": float("nan")},
                {"timeout_s": float("nan")},
                {"mode": "closed", "max_think_s": float("nan")},
                {"mode": "closed", "measure_s": float("nan")},
                {"mode": "sessions", "sessions_per_hour": float("nan")},
            )
        ),
    ],
)
def test_wrong_options_are_named(
    tmp_path: Path, trace_of: TraceOf, values: dict[str, Any], words: str
) -> None:
    options = replace(_options(tmp_path, trace_of(1, requests=3), "http://x"), **values)
    with pytest.raises(InputError, match=words):
        run(options, quiet=True)


def test_a_server_without_usage_in_its_chunks_has_its_first_token_all_the_same(
    tmp_path: Path, trace_of: TraceOf, engine: StartEngine
) -> None:
    fake = engine("vllm", usage=False, delay_s=0.02)
    trace = [replace(request, output_length=8) for request in trace_of(4, requests=6)]
    options = _options(tmp_path, trace, fake.url)
    assert run(options, quiet=True)["ok"] == 6
    for result in read_results(options.output):
        assert result.counted_by == "chunks"
        assert result.output_tokens == 8
        assert [count for _, count in result.arrivals] == list(range(1, 9))
        assert result.first_token_s
        assert result.finished_s
        assert result.finished_s - result.first_token_s > 0.1


@pytest.mark.parametrize("processes", [1, 2])
def test_a_key_reaches_the_server_and_no_file(
    tmp_path: Path,
    trace_of: TraceOf,
    engine: StartEngine,
    monkeypatch: pytest.MonkeyPatch,
    processes: int,
) -> None:
    fake = engine("vllm", key="Bearer s3cret key")
    monkeypatch.setenv("TEST_API_KEY", "s3cret key")
    options = _options(tmp_path, trace_of(4, requests=6), fake.url, processes=processes)
    with pytest.raises(InputError, match="401"):
        run(options, quiet=True)
    headers = ("Authorization=Bearer @TEST_API_KEY", "X-Team=agents")
    summary = run(replace(options, headers=headers), quiet=True)
    assert summary["ok"] == 6
    assert {seen["headers"]["x-team"] for seen in fake.seen} == {"agents"}
    written = b"".join(path.read_bytes() for path in options.output.iterdir())
    assert b"s3cret" not in written
    assert b'"Authorization"' in written
    assert b"agents" not in written


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_that_comes_while_a_run_ends_is_no_complaint(
    tmp_path: Path, trace_of: TraceOf, engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event loop closes what a signal wakes it by before it forgets the signal."""
    complaints: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", complaints.append)
    closes = BaseSelectorEventLoop._close_self_pipe  # type: ignore[attr-defined]

    def close_and_be_signalled(loop: BaseSelectorEventLoop) -> None:
        closes(loop)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(BaseSelectorEventLoop, "_close_self_pipe", close_and_be_signalled)
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        url = engine("sglang").url
        assert run(_options(tmp_path, trace_of(5, requests=3), url), quiet=True)["ok"] == 3
    finally:
        signal.signal(signal.SIGTERM, before)
    assert complaints == []
