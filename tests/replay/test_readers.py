"""Readers: what each source says becomes what the trace says."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import zstandard

from deltaserve.errors import InputError
from replay.readers import bailian, mooncake, weka
from replay.trace import Request, read_trace


def _call(t: float, length: int, ids: list[int], api_time: float = 2.0, out: int = 5) -> Any:
    return {
        "t": t,
        "type": "n",
        "in": length,
        "out": out,
        "hash_ids": ids,
        "api_time": api_time,
        "think_time": 1.0,
    }


def _agent(t: float, duration_ms: int | None, calls: list[Any]) -> Any:
    return {
        "t": t,
        "type": "subagent",
        "duration_ms": duration_ms,
        "tool_tokens": 64,
        "system_tokens": 0,
        "requests": calls,
    }


def _session(name: str, requests: list[Any]) -> dict[str, Any]:
    return {
        "id": name,
        "block_size": 64,
        "tool_tokens": 100,
        "system_tokens": 28,
        "requests": requests,
    }


_MAIN = _session(
    "one",
    [
        _call(0.0, 200, [1, 2, 3]),
        # Two agents run from 3 s on and end at 10 s and 12 s; a third is never waited for.
        _agent(10.0, 7000, [_call(0.0, 128, [50, 51]), _call(4.0, 130, [50, 51], out=0)]),
        _agent(12.0, 9000, [_call(0.0, 70, [50])]),
        _agent(12.5, None, [_call(0.0, 70, [50])]),
        _call(14.0, 256, [1, 2, 3, 4]),
        _call(20.0, 128, [1, 9]),
    ],
)


def _write(folder: Path, *sessions: dict[str, Any]) -> Path:
    folder.mkdir()
    for session in sessions:
        (folder / f"{session['id']}.json").write_bytes(orjson.dumps(session))
    return folder


def _read(path: Path) -> dict[str, Request]:
    return {request.request_id: request for request in read_trace(path)}


def test_weka_sub_agents_become_sessions_that_the_main_one_waits_for(tmp_path: Path) -> None:
    output = tmp_path / "t.jsonl"
    report = weka.convert([_write(tmp_path / "in", _MAIN)], output)
    assert (report.requests, report.sessions) == (7, 4)
    assert report.output_length_raised_to_1 == 1
    trace = _read(output)
    assert trace["one/agent-0:0"].parent_request_id == "one:0"
    assert trace["one/agent-0:0"].timestamp_s == 3.0
    assert trace["one/agent-0:0"].think_time_s == 1.0
    assert trace["one/agent-0:1"].parent_request_id is None
    assert trace["one/agent-0:1"].think_time_s == 2.0
    assert trace["one/agent-0:1"].output_length == 1
    assert trace["one/agent-2:0"].timestamp_s == 12.5
    # The main session's second turn waits for the agent that ended last.
    assert trace["one:1"].parent_request_id == "one/agent-1:0"
    assert trace["one:1"].think_time_s == 2.0
    assert trace["one:2"].parent_request_id is None
    assert trace["one:2"].think_time_s == 4.0


def test_weka_ids_become_global_and_a_started_block_gets_its_own(tmp_path: Path) -> None:
    other = _session("two", [_call(0.0, 200, [1, 2, 3])])
    output = tmp_path / "t.jsonl"
    report = weka.convert([_write(tmp_path / "in", _MAIN, other)], output)
    trace = _read(output)
    first, second = trace["one:0"].hash_ids, trace["one:1"].hash_ids
    assert len(first) == len(second) == 4
    assert first[:3] == second[:3]
    assert first[3] != second[3]
    assert report.ids_added == 5
    assert not set(trace["two:0"].hash_ids) & {
        i for name, r in trace.items() if name.startswith("one") for i in r.hash_ids
    }


def test_weka_sessions_share_a_prefix_only_when_asked_to(tmp_path: Path) -> None:
    other = _session("two", [_call(0.0, 200, [7, 8, 9]), _call(5.0, 200, [70, 8, 9])])
    output = tmp_path / "t.jsonl"
    report = weka.convert([_write(tmp_path / "in", _MAIN, other)], output, shared_prefix=True)
    trace = _read(output)
    # 100 tool and 28 system tokens are two full blocks.
    assert trace["two:0"].hash_ids[:2] == trace["one:0"].hash_ids[:2]
    assert trace["two:0"].hash_ids[2] != trace["one:0"].hash_ids[2]
    assert trace["two:1"].hash_ids[0] != trace["two:0"].hash_ids[0]
    assert trace["one/agent-0:0"].hash_ids[0] == trace["one/agent-1:0"].hash_ids[0]
    assert trace["one/agent-0:0"].hash_ids[0] != trace["one:0"].hash_ids[0]
    assert report.shared_prefix_tokens == (2 + 2 + 3) * 64


def test_weka_sessions_start_at_zero_or_as_a_poisson_process(tmp_path: Path) -> None:
    sessions = [_session(f"s{n}", [_call(0.0, 64, [1])]) for n in range(200)]
    source = _write(tmp_path / "in", *sessions)
    output = tmp_path / "t.jsonl"
    weka.convert([source], output)
    assert {request.timestamp_s for request in read_trace(output)} == {0.0}
    weka.convert([source], output, sessions_per_hour=3600.0, seed=1)
    times = [request.timestamp_s for request in read_trace(output)]
    assert times == sorted(times)
    assert 150 < times[-1] < 260
    before = output.read_bytes()
    weka.convert([source], output, sessions_per_hour=3600.0, seed=1)
    assert output.read_bytes() == before


def test_two_weka_files_of_one_session_are_named(tmp_path: Path) -> None:
    """A folder that holds a copy: the trace would have every request twice, which nothing reads."""
    first, second = (_write(tmp_path / name, _MAIN) for name in ("a", "b"))
    with pytest.raises(InputError) as error:
        weka.convert([first, second], tmp_path / "t.jsonl")
    assert str(error.value).startswith(f"{second}/")
    assert "field id: expected one that no file before has, found" in str(error.value)
    assert f"(of {first}/" in str(error.value)
    assert not (tmp_path / "t.jsonl").exists()


def test_weka_reads_an_archive_like_a_folder(tmp_path: Path) -> None:
    folder = _write(tmp_path / "dev", _MAIN)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(folder, "dev")
    (tmp_path / "t.tar.zst").write_bytes(zstandard.compress(packed.getvalue()))
    (tmp_path / "t.tar.gz").write_bytes(gzip.compress(packed.getvalue()))
    weka.convert([folder], tmp_path / "a.jsonl")
    for name in ("t.tar.zst", "t.tar.gz"):
        weka.convert([tmp_path / name], tmp_path / "b.jsonl")
        assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "expected JSON"),
        (b'{"id": "x"}', "field 'tool_tokens'"),
        (orjson.dumps(_session("x", [{"t": 0.0, "type": "n"}])), "field 'hash_ids'"),
    ],
)
def test_a_broken_weka_file_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(InputError, match=rf"x\.json: .*{words}"):
        weka.convert([tmp_path / "x.json"], tmp_path / "t.jsonl")
    assert not (tmp_path / "t.jsonl").exists()


@pytest.mark.parametrize(
    ("place", "field", "value"),
    [
        ("", "block_size", None),
        ("", "block_size", 0),
        ("", "id", None),
        ("", "requests", {}),
        ("requests.0: ", "t", "soon"),
        ("requests.0: ", "t", -5),
        ("requests.0: ", "in", 0),
        ("requests.0: ", "in", 4000),
        ("requests.0: ", "hash_ids", [1, 2, 3, 4, 5]),
        ("requests.0: ", "hash_ids", [[1], 2, 3]),
        ("requests.0: ", "api_time", "long"),
    ],
)
def test_a_field_of_a_weka_file_that_is_wrong_is_named_with_its_request(
    tmp_path: Path, place: str, field: str, value: object
) -> None:
    document = _session("x", [_call(0.0, 200, [1, 2, 3]), _call(9.0, 200, [1, 2, 3])])
    (document["requests"][0] if place else document)[field] = value
    (tmp_path / "x.json").write_bytes(orjson.dumps(document))
    # A length that its ids do not fit is told of the ids.
    told = "hash_ids" if field == "in" and value else field
    with pytest.raises(InputError, match=rf"x\.json: {place}field {told}: expected"):
        weka.convert([tmp_path / "x.json"], tmp_path / "t.jsonl")
    assert not (tmp_path / "t.jsonl").exists()


def test_no_weka_session_and_no_archive_are_named(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with pytest.raises(InputError, match="no session in it"):
        weka.convert([tmp_path / "in"], tmp_path / "t.jsonl")
    (tmp_path / "x.tar").write_bytes(b"no archive")
    with pytest.raises(InputError, match="expected a tar archive"):
        weka.convert([tmp_path / "x.tar"], tmp_path / "t.jsonl")
    with pytest.raises(InputError, match="no such file"):
        weka.convert([tmp_path / "none"], tmp_path / "t.jsonl")


def _lines(path: Path, *records: dict[str, Any]) -> Path:
    path.write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in records))
    return path


def test_mooncake_requests_are_sessions_of_one_turn(tmp_path: Path) -> None:
    record = {"timestamp": 1500, "input_length": 600, "output_length": 9, "hash_ids": [0, 7]}
    source = _lines(tmp_path / "m.jsonl", {**record, "timestamp": 0}, record)
    mooncake.convert([source], tmp_path / "t.jsonl")
    requests = list(read_trace(tmp_path / "t.jsonl"))
    assert [request.timestamp_s for request in requests] == [0.0, 1.5]
    assert requests[1] == Request("r1", "r1", 0, 1.5, 600, 9, 512, [0, 7])
    broken = _lines(tmp_path / "b.jsonl", record, {**record, "hash_ids": [1]})
    with pytest.raises(InputError, match=r"b\.jsonl:2: field hash_ids: expected 2 ids"):
        mooncake.convert([broken], tmp_path / "u.jsonl")
    for beyond in (-1, 2**63):
        wide = _lines(tmp_path / "w.jsonl", {**record, "hash_ids": [0, beyond]})
        with pytest.raises(InputError, match=r"w\.jsonl:1: field hash_ids: expected integers from"):
            mooncake.convert([wide], tmp_path / "u.jsonl")


@pytest.mark.parametrize("begin", [3_000, 1_751_300_000])
def test_times_of_a_source_count_from_its_first_request(tmp_path: Path, begin: int) -> None:
    ids = [{"input_length": 600, "output_length": 9, "hash_ids": [0, n]} for n in range(3)]
    records = [{**record, "timestamp": 1000 * (begin + n)} for n, record in enumerate(ids)]
    mooncake.convert([_lines(tmp_path / "m.jsonl", *records)], tmp_path / "m")
    chats = [_chat(n, -1, begin + n, [1]) for n in range(3)]
    bailian.convert([_lines(tmp_path / "b.jsonl", *chats)], tmp_path / "b")
    for name in "mb":
        assert [request.timestamp_s for request in read_trace(tmp_path / name)] == [0.0, 1.0, 2.0]


def _chat(chat: int, parent: int, at_s: float, ids: list[int], length: int | None = None) -> Any:
    return {
        "chat_id": chat,
        "parent_chat_id": parent,
        "timestamp": at_s,
        "input_length": length or len(ids) * 16,
        "output_length": 3,
        "type": "text",
        "turn": 1,
        "hash_ids": ids,
    }


def test_bailian_chats_become_turns_and_a_second_answer_branches_off(tmp_path: Path) -> None:
    source = _lines(
        tmp_path / "b.jsonl",
        _chat(10, -1, 0.0, [1, 2]),
        _chat(11, 10, 1.0, [1, 2, 3]),
        _chat(12, 10, 2.0, [1, 2, 4]),
        _chat(13, 12, 3.0, [1, 2, 4, 5]),
        _chat(14, 99, 4.0, [1]),
    )
    report = bailian.convert([source], tmp_path / "t.jsonl")
    trace = _read(tmp_path / "t.jsonl")
    assert report.sessions == 3
    places = {name: (r.session_id, r.turn, r.parent_request_id) for name, r in trace.items()}
    assert places == {
        "c10": ("c10", 0, None),
        "c11": ("c10", 1, None),
        "c12": ("c12", 0, "c10"),
        "c13": ("c12", 1, None),
        "c14": ("c14", 0, None),
    }


def test_bailian_ids_stand_for_blocks_and_become_ids_of_prefixes(tmp_path: Path) -> None:
    source = _lines(
        tmp_path / "b.jsonl",
        _chat(1, -1, 0.0, [1, 2, 3]),
        _chat(2, -1, 0.0, [1, 3, 2]),
        _chat(3, -1, 0.0, [1, 2], length=35),
    )
    report = bailian.convert([source], tmp_path / "t.jsonl")
    one, two, three = (request.hash_ids for request in read_trace(tmp_path / "t.jsonl"))
    assert one[0] == two[0] == three[0]
    assert one[1] == three[1]
    assert len({*one, *two, *three}) == 6
    assert report.ids_added == 1


def test_a_bailian_chat_that_occurs_twice_is_named(tmp_path: Path) -> None:
    source = _lines(tmp_path / "b.jsonl", _chat(1, -1, 0.0, [1]), _chat(1, -1, 0.0, [1]))
    with pytest.raises(InputError, match=r"b\.jsonl:2: field chat_id"):
        bailian.convert([source], tmp_path / "t.jsonl")


@pytest.mark.parametrize("convert", [mooncake.convert, bailian.convert])
def test_a_line_that_is_no_object_is_named(
    tmp_path: Path, convert: Callable[[list[Path], Path], Any]
) -> None:
    (tmp_path / "b.jsonl").write_text("[1]\n")
    with pytest.raises(InputError, match=r"b\.jsonl:1: expected a JSON object"):
        convert([tmp_path / "b.jsonl"], tmp_path / "t.jsonl")
