"""The trace format: what is written is read back, and what is broken is named."""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from deltaserve.errors import InputError
from replay.cli import app
from replay.trace import (
    Request,
    SortingTraceWriter,
    TraceWriter,
    _refuse_double_ids,
    digest,
    read_trace,
    write_trace,
)

_names = st.text('aZ0 "\\\né中', min_size=1, max_size=10)
_seconds = st.floats(0, 1e9, allow_nan=False)


@st.composite
def _traces(draw: st.DrawFn) -> list[Request]:
    requests = []
    times = sorted(draw(st.lists(_seconds, max_size=8)))
    request_ids = draw(st.lists(_names, min_size=len(times), max_size=len(times), unique=True))
    for at_s, request_id in zip(times, request_ids, strict=True):
        block_size = draw(st.integers(1, 600))
        input_length = draw(st.integers(1, 5000))
        blocks = -(-input_length // block_size)
        ids = draw(st.integers(0, 2**63 - 1 - blocks))
        requests.append(
            Request(
                request_id,
                draw(_names),
                draw(st.integers(0, 10**6)),
                at_s,
                input_length,
                draw(st.integers(1, 10**6)),
                block_size,
                list(range(ids, ids + blocks)),
                draw(st.none() | _names),
                draw(st.none() | _seconds),
            )
        )
    return requests


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst"])
@given(requests=_traces().filter(bool))
def test_any_trace_written_is_read_back_equal(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, requests: list[Request]
) -> None:
    path = tmp_path_factory.mktemp("trace") / f"t{suffix}"
    assert write_trace(path, requests) == len(requests)
    assert list(read_trace(path)) == requests


def test_a_sorting_writer_writes_any_order_sorted_and_keeps_ties(
    tmp_path: Path, trace_of: Callable[..., list[Request]]
) -> None:
    trace = trace_of(1)
    trace[0] = replace(trace[0], timestamp_s=0.0)
    shuffled = trace[::2] + trace[1::2]
    with SortingTraceWriter(tmp_path / "t.jsonl") as writer:
        for request in shuffled:
            writer.write(request)
    expected = sorted(shuffled, key=lambda request: request.timestamp_s)
    assert list(read_trace(tmp_path / "t.jsonl")) == expected


_GOOD = {
    "request_id": "r",
    "session_id": "s",
    "turn": 0,
    "timestamp_s": 5.0,
    "input_length": 5,
    "output_length": 1,
    "block_size": 4,
    "hash_ids": [1, 2],
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input_length": "5"}, "field input_length: expected an integer ≥ 1, found '5'"),
        ({"input_length": 0}, "field input_length"),
        ({"output_length": True}, "field output_length"),
        ({"output_length": 2**63}, "field output_length: expected an integer up to 2^63 - 1"),
        ({"turn": 2**64 - 1}, "field turn: expected an integer up to 2^63 - 1"),
        ({"turn": -1}, "field turn"),
        ({"request_id": ""}, "field request_id: expected a non-empty string"),
        ({"session_id": None}, "field session_id: expected a non-empty string, found nothing"),
        ({"timestamp_s": -1}, "field timestamp_s"),
        ({"timestamp_s": 4}, "field timestamp_s: expected ≥ 5.0"),
        ({"hash_ids": [1]}, "field hash_ids: expected 2 ids"),
        ({"hash_ids": [1, "2"]}, "field hash_ids: expected integers"),
        ({"hash_ids": [1, -2]}, "field hash_ids: expected integers"),
        ({"hash_ids": 3}, "field hash_ids: expected a list"),
        ({"think_time_s": "x"}, "field think_time_s"),
        ({"parent_request_id": 7}, "field parent_request_id"),
    ],
)
def test_a_broken_line_is_named_by_file_line_and_field(
    tmp_path: Path, change: dict[str, object], words: str
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(orjson.dumps(_GOOD) + b"\n" + orjson.dumps(_GOOD | change) + b"\n")
    with pytest.raises(InputError) as error:
        list(read_trace(path))
    assert str(error.value).startswith(f"{path}:2: {words}")
    assert "\n" not in str(error.value)


def test_an_id_of_an_earlier_line_is_named_with_both_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    ids = ["b", "a", "c", "c", "a"]
    path.write_bytes(b"\n".join(orjson.dumps(_GOOD | {"request_id": name}) for name in ids))
    words = "field request_id: expected one that no line before has, found 'c' (of line 3)"
    with pytest.raises(InputError) as error:
        list(read_trace(path))
    assert str(error.value) == f"{path}:4: {words}"
    commands = ["stats", str(path)], ["sample", str(path), "--output", str(tmp_path / "s.jsonl")]
    for command in commands:
        found = CliRunner().invoke(app, command)
        assert isinstance(found.exception, InputError)
        assert str(found.exception) == str(error.value)
    assert not (tmp_path / "s.jsonl").exists()


def test_two_ids_may_have_the_same_hash(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    lines = [orjson.dumps(_GOOD | {"request_id": name}) for name in "aba"]
    path.write_bytes(b"\n".join(lines[:2]))
    _refuse_double_ids(path, {hash("a")})
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(InputError, match=r"t\.jsonl:3: .* 'a' \(of line 1\)"):
        _refuse_double_ids(path, {hash("a"), hash("b")})


def test_text_that_is_not_json_is_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(orjson.dumps(_GOOD) + b"\n\n{nonsense\n")
    with pytest.raises(InputError, match=r"t\.jsonl:3: expected one JSON object a line"):
        list(read_trace(path))


def test_a_missing_file_a_folder_and_false_zst_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        list(read_trace(tmp_path / "none.jsonl"))
    with pytest.raises(InputError, match="is a folder"):
        list(read_trace(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"file/t\.jsonl: Not a directory"):
        list(read_trace(tmp_path / "file" / "t.jsonl"))
    (tmp_path / "t.jsonl.zst").write_bytes(orjson.dumps(_GOOD))
    with pytest.raises(InputError, match="expected Zstandard data"):
        list(read_trace(tmp_path / "t.jsonl.zst"))


@pytest.mark.parametrize("requests", [3, 3000])
@pytest.mark.parametrize("left", [0.3, 0.6, 0.9999])
@pytest.mark.parametrize("suffix", [".zst", ".gz"])
def test_a_compressed_file_that_was_cut_off_is_said_to_be(
    tmp_path: Path, requests: int, left: float, suffix: str
) -> None:
    write_trace(
        tmp_path / "t.jsonl",
        [Request(f"r{n}", "s", n, n, 4, 1, 2, [n, -n % 7919]) for n in range(requests)],
    )
    path = tmp_path / f"t.jsonl{suffix}"
    pack = gzip.compress if suffix == ".gz" else zstandard.compress
    whole = pack((tmp_path / "t.jsonl").read_bytes())
    path.write_bytes(whole[: int(len(whole) * left)])
    with pytest.raises(InputError, match=rf"^{re.escape(str(path))}:\d+: .*cut off"):
        list(read_trace(path))


def test_frames_of_zst_put_one_after_the_other_are_one_trace(tmp_path: Path) -> None:
    lines = [orjson.dumps(_GOOD | {"request_id": name}) + b"\n" for name in "rs"]
    path = tmp_path / "t.jsonl.zst"
    path.write_bytes(b"".join(map(zstandard.compress, lines)))
    assert len(list(read_trace(path))) == 2


@pytest.mark.parametrize("name", ["t.jsonl.gz", "t.jsonl", "t.zst.gz"])
def test_gzip_is_read_whatever_the_name_and_however_many_members(tmp_path: Path, name: str) -> None:
    lines = [orjson.dumps(_GOOD | {"request_id": name}) + b"\n" for name in "rs"]
    path = tmp_path / name
    path.write_bytes(b"".join(map(gzip.compress, lines)))
    assert [request.request_id for request in read_trace(path)] == ["r", "s"]


def test_zst_is_read_whatever_the_name(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(zstandard.compress(orjson.dumps(_GOOD)))
    assert len(list(read_trace(tmp_path / "t"))) == 1


def test_compressed_data_that_is_broken_or_of_another_kind_is_named(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(orjson.dumps(_GOOD) * 100))
    packed[20] ^= 0xFF
    for name, content, found in (
        ("t.jsonl.gz", bytes(packed), "expected gzip data"),
        ("t.jsonl.bz2", bz2.compress(b"x"), r"is bzip2 data; expected \.jsonl, \.jsonl\.zst or"),
        ("t.jsonl.xz", lzma.compress(b"x"), "is xz data; expected"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=rf"{re.escape(name)}: {found}"):
            list(read_trace(tmp_path / name))


def test_a_trace_is_not_written_under_the_name_of_a_compression_that_it_has_not(
    tmp_path: Path,
) -> None:
    with pytest.raises(InputError, match=r"t\.jsonl\.gz: \.gz is not written; expected \.jsonl or"):
        write_trace(tmp_path / "t.jsonl.gz", [])
    assert list(tmp_path.iterdir()) == []


def test_a_sorting_writer_counts_from_the_first_request(
    tmp_path: Path, trace_of: Callable[..., list[Request]]
) -> None:
    trace = trace_of(1)
    epoch_s = 1_751_300_000.0
    with SortingTraceWriter(tmp_path / "t.jsonl") as writer:
        for request in reversed(trace):
            writer.write(replace(request, timestamp_s=request.timestamp_s + epoch_s))
    first_s = trace[0].timestamp_s
    moved = list(read_trace(tmp_path / "t.jsonl"))
    assert moved[0].timestamp_s == 0.0
    for request, before in zip(moved, trace, strict=True):
        assert request.timestamp_s == pytest.approx(before.timestamp_s - first_s, abs=1e-5)


def test_a_failed_write_leaves_no_file(
    tmp_path: Path, trace_of: Callable[..., list[Request]]
) -> None:
    path = tmp_path / "t.jsonl.zst"

    def fail() -> None:
        with TraceWriter(path) as writer:
            writer.write(trace_of(1)[0])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_the_digest_is_that_of_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"abc")
    assert digest(tmp_path / "t").startswith("ba7816bf8f01cfea414140de5dae2223")
