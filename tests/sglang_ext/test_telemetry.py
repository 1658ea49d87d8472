"""Telemetry writes what happened, once, in lines that survive a kill.

The hooks are called here with objects that have SGLang's attributes; that SGLang really has them,
and really calls the hooks, is shown by the live tests.
"""

from __future__ import annotations

import gc
import importlib
import json
import resource
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sglang_ext.telemetry.lines import LineFile


class Telemetry:
    """The telemetry modules, imported afresh so that each test has a file of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.expected_faults: list[str] = []
        for name in [name for name in sys.modules if name.startswith("sglang_ext.telemetry")]:
            del sys.modules[name]
        self.garbage = importlib.import_module("sglang_ext.telemetry.garbage")
        self.steps = importlib.import_module("sglang_ext.telemetry.steps")
        self.requests = importlib.import_module("sglang_ext.telemetry.requests")
        self.metrics = importlib.import_module("sglang_ext.telemetry.metrics")
        self.transfers = importlib.import_module("sglang_ext.telemetry.transfers")

    def lines(self, event: str) -> list[dict[str, Any]]:
        return [
            line
            for path in self.folder.glob("*.jsonl")
            for line in map(json.loads, path.read_text().splitlines())
            if line["event"] == event
        ]


@pytest.fixture
def telemetry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[Telemetry]:
    monkeypatch.setenv("DELTASERVE_TELEMETRY_DIR", str(tmp_path / "steps"))
    monkeypatch.setenv("DELTASERVE_WORKER_ID", "decode-0")
    telemetry = Telemetry(tmp_path / "steps")
    yield telemetry
    gc.callbacks[:] = [call for call in gc.callbacks if call is not telemetry.garbage._note]
    # Its faults are logged, not raised: a test that looks at other things must see them.
    errors = [record.getMessage() for record in caplog.get_records("call") if record.exc_info]
    assert errors == telemetry.expected_faults


def forward_mode(name: str) -> SimpleNamespace:
    return SimpleNamespace(
        name=name.upper(),
        is_idle=lambda: name == "idle",
        is_decode=lambda: name == "decode",
        is_prebuilt=lambda: name == "prebuilt",
    )


def scheduler(mode: str = "null") -> SimpleNamespace:
    return SimpleNamespace(
        disaggregation_mode=SimpleNamespace(value=mode),
        waiting_queue=[1, 2],
        disagg_decode_prealloc_queue=SimpleNamespace(queue=[1]),
        disagg_decode_transfer_queue=SimpleNamespace(queue=[1, 2, 3]),
        max_total_num_tokens=1000,
        metrics_reporter=SimpleNamespace(current_scheduler_metrics_enabled=False),
        pool_stats_observer=SimpleNamespace(
            get_pool_stats=lambda: SimpleNamespace(full_num_used=70, full_evictable_size=30)
        ),
    )


def request(finished: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        rid="r1",
        bootstrap_room=7,
        origin_input_ids=[1] * 40,
        output_ids=[1] * 3,
        cached_tokens=32,
        finished_reason=SimpleNamespace(),
        finished=lambda: finished,
        time_stats=SimpleNamespace(
            **dict.fromkeys(
                (
                    "prefill_bootstrap_queue_entry_time",
                    "decode_prealloc_queue_entry_time",
                    "bootstrap_done_time",
                    "decode_transfer_queue_entry_time",
                    "prefill_transfer_queue_entry_time",
                    "prefill_kv_transfer_finish_time",
                    "decode_prebuilt_finish_time",
                    "prefill_finished_time",
                ),
                0.0,
            ),
            wait_queue_entry_time=time.perf_counter() - 1.0,
            forward_entry_time=time.perf_counter() - 0.5,
            completion_time=time.perf_counter(),
        ),
    )


def step(mode: str, requests: list[SimpleNamespace], **fields: Any) -> SimpleNamespace:
    defaults: dict[str, Any] = {
        "decoding_reqs": None,
        "extend_num_tokens": None,
        "prefix_lens": None,
    }
    return SimpleNamespace(
        reqs=requests,
        forward_mode=forward_mode(mode),
        launch_ts=time.monotonic() - 0.25,
        **(defaults | fields),
    )


def run(telemetry: Telemetry, batch: SimpleNamespace, mode: str = "null") -> None:
    calls: list[object] = []
    telemetry.steps._record_step(
        lambda *arguments: calls.append(arguments), scheduler(mode), batch, "result"
    )
    assert len(calls) == 1, "the step's own work was not done exactly once"


def test_a_mixed_step_counts_its_decodes_apart_from_its_prefill(telemetry: Telemetry) -> None:
    decoding = [request(), request()]
    run(
        telemetry,
        step(
            "mixed",
            [request(), *decoding],
            decoding_reqs=decoding,
            extend_num_tokens=514,
            # SGLang adds the whole context of each request that decodes.
            prefix_lens=[32, 4000, 5000],
        ),
    )
    (line,) = telemetry.lines("step")
    assert (line["prefill_requests"], line["prefill_tokens"], line["decode_requests"]) == (
        1,
        512,
        2,
    )
    assert line["prefix_tokens"] == 32
    assert line["worker_id"] == "decode-0"


def test_a_step_says_how_long_it_took_and_how_full_the_worker_is(telemetry: Telemetry) -> None:
    run(telemetry, step("decode", [request()]), mode="decode")
    (line,) = telemetry.lines("step")
    assert line["duration_s"] == pytest.approx(0.25, abs=0.1)
    assert line["start_unix_s"] == pytest.approx(time.time() - 0.25, abs=0.5)
    assert line["queues"] == {"waiting": 2, "preallocation": 1, "transfer": 3}
    assert (line["kv_used_tokens"], line["kv_evictable_tokens"], line["kv_total_tokens"]) == (
        70,
        30,
        1000,
    )


def test_a_request_that_ends_with_its_first_token_on_a_decode_worker_is_recorded_once(
    telemetry: Telemetry,
) -> None:
    """That token came with the KV: there is no step whose result would end it."""
    requests = telemetry.requests
    requests._begin(None, scheduler("decode"))
    finished = request(finished=True)
    requests._record_streamed(None, "streamer", [finished, request()], False)
    requests._record_streamed(None, "streamer", [finished], False, skip_req=None)
    (line,) = telemetry.lines("request")
    assert (line["mode"], line["output_tokens"]) == ("decode", 3)


def test_a_prefill_worker_records_who_failed_before_sending_and_the_others_once_they_are_sent(
    telemetry: Telemetry,
) -> None:
    class FINISH_ABORT: ...

    requests = telemetry.requests
    requests._begin(None, scheduler("prefill"))
    unsent, sent, done = (request(finished=True) for _ in range(3))
    unsent.rid, sent.rid, done.rid = "unsent", "sent", "done"
    unsent.finished_reason = sent.finished_reason = FINISH_ABORT()
    sent.time_stats.prefill_transfer_queue_entry_time = 1.0
    requests._record_streamed(None, "streamer", [unsent, sent, done], False)
    assert [line["engine_request_id"] for line in telemetry.lines("request")] == ["unsent"]
    requests._record_prefilled([sent, done], scheduler("prefill"))
    assert len(telemetry.lines("request")) == 3


def test_a_request_that_fell_back_keeps_its_room(telemetry: Telemetry) -> None:
    fell_back = request(finished=True)
    fell_back.bootstrap_room, fell_back.deltaserve_room = None, 7
    run(telemetry, step("decode", [fell_back]))
    assert telemetry.lines("request")[0]["room"] == 7


def test_a_long_garbage_collection_has_a_line_before_the_step_that_it_held_up(
    telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    began_unix_s = time.time()
    monkeypatch.setattr(telemetry.garbage, "LEAST_S", 1e9)
    run(telemetry, step("decode", [request()]))
    gc.collect()
    monkeypatch.setattr(telemetry.garbage, "LEAST_S", 0.0)
    gc.collect(1)
    monkeypatch.setattr(telemetry.garbage, "LEAST_S", 1e9)
    run(telemetry, step("decode", [request()]))
    (line,) = telemetry.lines("garbage_collection")
    assert line["generation"] == 1
    assert 0 <= line["duration_s"] < 5
    assert began_unix_s <= line["start_unix_s"] <= time.time()
    (path,) = telemetry.folder.glob("*.jsonl")
    events = [json.loads(text)["event"] for text in path.read_text().splitlines()]
    assert events == ["step", "garbage_collection", "step"]


def test_an_idle_step_is_not_recorded(telemetry: Telemetry) -> None:
    run(telemetry, step("idle", []))
    assert telemetry.lines("step") == []


def test_a_finished_request_is_recorded_once_with_the_phases_it_passed(
    telemetry: Telemetry,
) -> None:
    finished = request(finished=True)
    run(telemetry, step("decode", [finished, request()]))
    run(telemetry, step("decode", [finished]))  # overlap scheduling runs it once more
    (line,) = telemetry.lines("request")
    assert line["cached_tokens"] == 32
    assert set(line["phases"]) == {"queued_s", "prefill_started_s", "finished_s"}
    assert line["phases"]["finished_s"] - line["phases"]["queued_s"] == pytest.approx(1.0, abs=0.01)
    assert line["phases"]["finished_s"] == pytest.approx(time.time(), abs=1.0)


def test_times_follow_the_hosts_clock_when_it_is_set_right(
    telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = time.time
    monkeypatch.setattr(time, "time", lambda: before() + 20.0)
    run(telemetry, step("decode", [request(finished=True)]))
    (step_line,) = telemetry.lines("step")
    assert step_line["start_unix_s"] == pytest.approx(time.time() - 0.25, abs=0.5)
    (request_line,) = telemetry.lines("request")
    assert request_line["phases"]["finished_s"] == pytest.approx(time.time(), abs=1.0)


@pytest.fixture
def kv_poll(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The two enumerations that the transfer hook imports from SGLang."""
    poll = SimpleNamespace(Success="success", Failed="failed", Transferring="transferring")
    base, utils = ModuleType("base"), ModuleType("utils")
    base.KVPoll = poll  # type: ignore[attr-defined]
    utils.DisaggregationMode = SimpleNamespace(PREFILL="prefill")  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.disaggregation"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.disaggregation.base", base)
    monkeypatch.setitem(sys.modules, "sglang.srt.disaggregation.utils", utils)
    return poll


def manager(mode: str = "prefill", saved_tokens: int = 128) -> SimpleNamespace:
    return SimpleNamespace(
        disaggregation_mode=mode,
        transfer_infos={9: {"peer": SimpleNamespace(decode_prefix_len=saved_tokens)}},
        kv_args=SimpleNamespace(page_size=64, kv_item_lens=[1024, 1024]),
    )


def test_a_transfer_is_one_line_with_the_bytes_of_all_its_chunks(
    telemetry: Telemetry, kv_poll: SimpleNamespace
) -> None:
    sender = manager()
    for pages in (2, 3):
        telemetry.transfers._note_chunk(sender, 9, list(range(pages)), slice(0, pages), False, 0)
        telemetry.transfers._note_end(sender, 9, kv_poll.Transferring)
    telemetry.transfers._note_end(sender, 9, kv_poll.Success)
    (line,) = telemetry.lines("kv_transfer")
    assert (line["tokens"], line["bytes"], line["chunks"]) == (5 * 64, 5 * 2048, 2)
    assert (line["saved_tokens"], line["saved_bytes"]) == (128, 2 * 2048)
    assert line["ok"] is True


def test_a_full_hit_moves_nothing_and_is_still_recorded(
    telemetry: Telemetry, kv_poll: SimpleNamespace
) -> None:
    telemetry.transfers._note_end(manager(saved_tokens=640), 9, kv_poll.Success)
    (line,) = telemetry.lines("kv_transfer")
    assert (line["bytes"], line["saved_bytes"]) == (0, 10 * 2048)


def test_mooncakes_transfers_are_told_by_their_backend(
    telemetry: Telemetry, kv_poll: SimpleNamespace
) -> None:
    class MooncakeKVManager(SimpleNamespace):
        __module__ = "sglang.srt.disaggregation.mooncake.conn"

    sender = MooncakeKVManager(**vars(manager()))
    telemetry.transfers._note_chunk(sender, 9, [1, 2, 3], slice(0, 3), False)
    telemetry.transfers._note_chunk(sender, 9, [], slice(3, 3), True, aux_index=1)
    telemetry.transfers._note_end(sender, 9, kv_poll.Success)
    (line,) = telemetry.lines("kv_transfer")
    assert (line["backend"], line["bytes"], line["chunks"]) == ("mooncake", 3 * 2048, 1)


def test_rooms_that_never_conclude_do_not_pile_up(telemetry: Telemetry) -> None:
    for room in range(5000):
        telemetry.transfers._note_chunk(manager(), room, [1], slice(0, 1), False, 0)
    assert len(telemetry.transfers._open_transfers) == 4096
    assert 4999 in telemetry.transfers._open_transfers


def test_a_failed_transfer_is_recorded_once(telemetry: Telemetry, kv_poll: SimpleNamespace) -> None:
    sender = manager()
    telemetry.transfers._note_chunk(sender, 9, [1], slice(0, 1), False, 0)
    telemetry.transfers._note_end(sender, 9, kv_poll.Failed)
    telemetry.transfers._note_end(sender, 9, kv_poll.Failed)
    assert [line["ok"] for line in telemetry.lines("kv_transfer")] == [False]


def test_the_receiving_side_records_no_transfer(
    telemetry: Telemetry, kv_poll: SimpleNamespace
) -> None:
    telemetry.transfers._note_end(manager(mode="decode"), 9, kv_poll.Success)
    assert telemetry.lines("kv_transfer") == []


def test_telemetry_without_a_folder_refuses_to_start(
    telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DELTASERVE_TELEMETRY_DIR")
    with pytest.raises(SystemExit, match="DELTASERVE_TELEMETRY_DIR"):
        telemetry.requests._begin(None, scheduler())


def test_a_fault_of_telemetry_is_logged_once_and_does_not_reach_the_worker(
    telemetry: Telemetry,
) -> None:
    processed: list[Any] = []

    def process(scheduler: Any, batch: Any, result: Any) -> None:
        processed.append(batch)

    batch = SimpleNamespace(reqs=[request()])
    for _ in range(3):
        telemetry.steps._record_step(process, scheduler(), batch, None)
    assert processed == [batch] * 3
    telemetry.expected_faults = ["Telemetry: _write_step fails; its lines are missing"]


def test_a_fault_of_the_worker_itself_is_not_swallowed(telemetry: Telemetry) -> None:
    def process(scheduler: Any, batch: Any, result: Any) -> None:
        raise RuntimeError("the worker's own")

    with pytest.raises(RuntimeError, match="the worker's own"):
        telemetry.steps._record_step(process, scheduler(), SimpleNamespace(reqs=[]), None)


def test_a_phase_lies_between_two_moments_that_this_worker_knows(telemetry: Telemetry) -> None:
    spans = telemetry.metrics.spans
    colocated = {"queued_s": 10.0, "prefill_started_s": 10.5, "prefill_finished_s": 12.0}
    assert spans(colocated) == {"queued": 0.5, "prefill": 1.5}
    decode = {
        "preallocation_queued_s": 1.0,
        "transfer_started_s": 1.25,
        "decode_ready_s": 2.0,
        "finished_s": 5.0,
    }
    assert spans(decode) == {"handshake": 0.25, "kv_arrival": 0.75, "decode": 3.0}
    assert spans({"queued_s": 3.0, "prefill_started_s": 2.0}) == {}


def test_a_full_disk_loses_lines_and_neither_the_file_nor_the_totals(
    telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[float] = []
    totals = SimpleNamespace(step=lambda mode, duration_s, tokens: counted.append(duration_s))
    monkeypatch.setattr(telemetry.metrics, "totals", lambda: totals)
    run(telemetry, step("decode", [request()]))
    (path,) = telemetry.folder.glob("*.jsonl")
    a_line = path.stat().st_size
    with disk_of(a_line * 2 + a_line // 2):  # two lines and a half
        for _ in range(6):
            run(telemetry, step("decode", [request()]))
    assert len(telemetry.lines("step")) == 2, "a torn line is in the file"
    assert len(counted) == 7, "the totals stopped with the disk"

    monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + 60)
    run(telemetry, step("decode", [request()]))
    (lost,) = telemetry.lines("lost")
    assert lost["lines"] == 5
    assert len(telemetry.lines("step")) == 3


@contextmanager
def disk_of(limit_bytes: int) -> Iterator[None]:
    """Within it no file grows beyond the limit: writes end short, then fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_files_are_bounded_and_keep_the_latest_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = LineFile(str(tmp_path / "decode-0.jsonl"), limit_bytes=2000)
    for number in range(500):
        assert file.write(b"%9d\n" % number)
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2000
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["decode-0.1.jsonl", "decode-0.jsonl"], "the older half comes first"
    kept = [int(line) for name in names for line in (tmp_path / name).read_text().splitlines()]
    assert kept == list(range(kept[0], 500))
    assert len(kept) >= 100
    assert "the older half is dropped" in caplog.text


def test_threads_that_write_at_once_lose_no_line_where_a_new_file_begins(tmp_path: Path) -> None:
    """The scheduler's thread and those that send KV: two that began anew dropped the older half."""
    file = LineFile(str(tmp_path / "prefill-0.jsonl"), limit_bytes=40_000)
    refused: list[int] = []

    def write(writer: int) -> None:
        for number in range(3000):
            if not file.write(b"%d %9d\n" % (writer, number)):
                refused.append(number)

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=write, args=(writer,)) for writer in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval_s)
    assert not refused
    older, newer = (tmp_path / name for name in ("prefill-0.1.jsonl", "prefill-0.jsonl"))
    assert older.stat().st_size == 20_000 // 12 * 12
    assert (older.stat().st_size + newer.stat().st_size) % 12 == 0


@pytest.mark.parametrize("limit", ["0", "much", "nan"])
def test_a_limit_that_cannot_be_meant_is_refused(
    telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setenv("DELTASERVE_TELEMETRY_MAX_MB", limit)
    with pytest.raises(SystemExit, match="DELTASERVE_TELEMETRY_MAX_MB"):
        telemetry.requests._begin(None, scheduler())
