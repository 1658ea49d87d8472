"""The trace format: one request a line, read and written as a stream.

Owns validation of a trace file and nothing else; it must not know engines, prompts or statistics.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import tempfile
import zlib
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson
import zstandard

from deltaserve.errors import InputError

_READ_BYTES = 1 << 20
_READ_PACKED_BYTES = 1 << 17
_GZIP = b"\x1f\x8b"
_ZSTANDARD = b"\x28\xb5\x2f\xfd"
_NOT_READ = {b"BZh": "bzip2", b"\xfd7zX": "xz", b"PK\x03\x04": "zip", b"PAR1": "Parquet"}
_SUFFIXES_NOT_WRITTEN = (".gz", ".bz2", ".xz", ".zip")
MAX_INTEGER = 2**63 - 1
"""The largest that a trace has, of lengths and of ids of blocks."""
_INT = {int}


@dataclass(slots=True)
class Request:
    """One request of a trace. Lengths are tokens, times seconds from the trace's start.

    `hash_ids` holds one id for every started block of the input. Ids are global: equal ids mean
    equal prefixes up to and including that block. `parent_request_id` names a request whose answer
    must have ended before this one is sent, besides the session's previous turn.
    """

    request_id: str
    session_id: str
    turn: int
    timestamp_s: float
    input_length: int
    output_length: int
    block_size: int
    hash_ids: list[int]
    parent_request_id: str | None = None
    think_time_s: float | None = None


def read_trace(path: Path) -> Iterator[Request]:
    """Requests of a trace file in file order; a broken line raises an error naming file, line,
    field, and so does a file without requests. One whose id an earlier line has is named when the
    file has been read to its end: until then memory holds 8 bytes a request, not the ids."""
    last_timestamp_s = 0.0
    hashes = array("q")
    for number, line in numbered_lines(path):
        try:
            request = parse_line(line)
            if request.timestamp_s < last_timestamp_s:
                raise FieldError(
                    f"field timestamp_s: expected ≥ {last_timestamp_s} (the line before; a trace "
                    f"is sorted), found {request.timestamp_s}"
                )
        except FieldError as error:
            raise InputError(f"{path}:{number}: {error}") from None
        last_timestamp_s = request.timestamp_s
        hashes.append(hash(request.request_id))
        yield request
    if not hashes:
        raise InputError(f"{path}: the trace holds no request")
    ordered = np.sort(np.frombuffer(hashes, dtype=np.int64))
    several = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(several):
        _refuse_double_ids(path, set(several.tolist()))


def _refuse_double_ids(path: Path, hashes: set[int]) -> None:
    """Raises an error for the first line whose id an earlier one has, of ids with these hashes: two
    ids may have the same."""
    line_of: dict[str, int] = {}
    for number, line in numbered_lines(path):
        request_id = _string(json_object(line), "request_id")
        if hash(request_id) not in hashes:
            continue
        if request_id in line_of:
            raise InputError(
                f"{path}:{number}: field request_id: expected one that no line before has, found "
                f"{request_id!r} (of line {line_of[request_id]})"
            )
        line_of[request_id] = number


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines of a plain or compressed file that are not empty, each with its number."""
    number = 0
    try:
        with open_binary(path) as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield number, line
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; expected a trace ({_EXPECTED})") from None
    except IsADirectoryError:
        raise InputError(f"{path}: is a folder; expected a trace file ({_EXPECTED})") from None
    except (CutOffError, EOFError):
        # The second is gzip's.
        raise InputError(f"{path}:{number + 1}: the compressed file is cut off here") from None
    except zstandard.ZstdError as error:
        raise InputError(f"{path}: expected Zstandard data, found: {error}") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path}: expected gzip data, found: {error}") from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None


_EXPECTED = ".jsonl, .jsonl.zst or .jsonl.gz"


class CutOffError(zstandard.ZstdError):
    """A `.zst` file that ends inside a frame: a download or a copy of it was broken off."""


class _Frames(io.RawIOBase):
    """What all frames of a `.zst` file hold. zstandard's own reader ends without a word where the
    file does, so that a file that was cut off would be a shorter trace."""

    def __init__(self, packed: BinaryIO) -> None:
        self._packed = packed
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._inside = False
        self._ahead = b""
        self._text = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._text:
            packed = self._ahead or self._packed.read(_READ_PACKED_BYTES)
            if not packed:
                if self._inside:
                    raise CutOffError
                return 0
            self._text = memoryview(self._frame.decompress(packed))
            self._ahead, self._inside = self._frame.unused_data, not self._frame.eof
            if self._frame.eof:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
        part = self._text[: len(buffer)]
        buffer[: len(part)] = part
        self._text = self._text[len(part) :]
        return len(part)


@contextmanager
def open_binary(path: Path) -> Iterator[BinaryIO]:
    """Opens a file for reading bytes, in bounded memory: plain, or compressed by Zstandard or gzip,
    which its first bytes tell. Raises `InputError` for another compression."""
    with path.open("rb") as raw:
        begin = raw.peek(4)[:4]
        if path.suffix == ".zst" or begin == _ZSTANDARD:
            yield io.BufferedReader(_Frames(raw), _READ_BYTES)
        elif begin.startswith(_GZIP):
            with gzip.GzipFile(fileobj=raw) as stream:
                # Typeshed has it as a kind of its own.
                yield io.BufferedReader(stream, _READ_BYTES)
        else:
            for magic, name in _NOT_READ.items():
                if begin.startswith(magic):
                    raise InputError(f"{path}: is {name} data; expected {_EXPECTED}")
            yield raw


class TraceWriter:
    """Writes requests as JSON Lines, compressed when the name ends in `.zst`; the file appears
    under its name when it is whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.requests = 0
        if path.suffix in _SUFFIXES_NOT_WRITTEN:
            raise InputError(f"{path}: {path.suffix} is not written; expected .jsonl or .jsonl.zst")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._part = path.with_name(path.name + ".part")
            self._raw = self._part.open("wb")
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror}") from None
        self._out: Any = self._raw
        if path.suffix == ".zst":
            self._out = zstandard.ZstdCompressor(level=3).stream_writer(self._raw)
        self._pending: list[bytes] = []
        self._pending_bytes = 0

    def write(self, request: Request) -> None:
        self.write_line(encode_line(request))

    def write_line(self, line: bytes) -> None:
        """Writes one request that is already encoded, with its line end."""
        self.requests += 1
        self._pending.append(line)
        self._pending_bytes += len(line)
        if self._pending_bytes >= _READ_BYTES:
            self._drain()

    def _drain(self) -> None:
        try:
            self._out.write(b"".join(self._pending))
        except OSError as error:
            raise self._cannot(error) from None
        self._pending.clear()
        self._pending_bytes = 0

    def _cannot(self, error: OSError) -> InputError:
        return InputError(f"{self.path}: cannot be written: {error.strerror}")

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, failed: object, *exc: object) -> None:
        try:
            if not failed:
                self._drain()
                self._out.close()
                self._raw.close()
                self._part.replace(self.path)
        except OSError as error:
            raise self._cannot(error) from None
        finally:
            # Also where the disk is full: closing would then try to write what is left, and fail.
            with contextlib.suppress(OSError):
                self._raw.close()
            self._part.unlink(missing_ok=True)


class SortingTraceWriter:
    """Writes requests that come in any order as a trace sorted by time (equal times: as they came),
    which counts from the first of them: a source may count from midnight, or from 1970.

    Lines wait in a temporary file; memory holds an index entry a request.
    """

    def __init__(self, path: Path) -> None:
        self._writer = TraceWriter(path)
        self._spool = tempfile.TemporaryFile()  # noqa: SIM115 (closed by __exit__)
        self._index: list[tuple[float, int, int, int]] = []
        self._offset = 0

    @property
    def requests(self) -> int:
        """How many requests were written."""
        return len(self._index)

    def write(self, request: Request) -> None:
        line = encode_line(request)
        try:
            self._spool.write(line)
        except OSError as error:
            raise InputError(f"{tempfile.gettempdir()}: full? {error.strerror}") from None
        self._index.append((request.timestamp_s, len(self._index), self._offset, len(line)))
        self._offset += len(line)

    def __enter__(self) -> SortingTraceWriter:
        return self

    def __exit__(self, failed: type[BaseException] | None, *exc: object) -> None:
        with self._spool:
            if failed:
                self._writer.__exit__(failed)
                return
            self._index.sort()
            origin_s = self._index[0][0] if self._index else 0.0
            with self._writer:
                for timestamp_s, _, begin, length in self._index:
                    self._spool.seek(begin)
                    line = self._spool.read(length)
                    if origin_s:
                        record = orjson.loads(line)
                        record["timestamp_s"] = round(timestamp_s - origin_s, 6)
                        line = orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
                    self._writer.write_line(line)


def write_trace(path: Path, requests: Iterable[Request]) -> int:
    """Writes `requests` to `path`; returns how many."""
    with TraceWriter(path) as writer:
        for request in requests:
            writer.write(request)
    return writer.requests


def encode_line(request: Request) -> bytes:
    """One trace line with its line end."""
    record: dict[str, Any] = {
        "request_id": request.request_id,
        "session_id": request.session_id,
        "turn": request.turn,
        "timestamp_s": request.timestamp_s,
        "input_length": request.input_length,
        "output_length": request.output_length,
        "block_size": request.block_size,
        "hash_ids": request.hash_ids,
    }
    if request.parent_request_id is not None:
        record["parent_request_id"] = request.parent_request_id
    if request.think_time_s is not None:
        record["think_time_s"] = request.think_time_s
    return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)


def digest(path: Path) -> str:
    """SHA-256 of the file's bytes, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class FieldError(Exception):
    """What is wrong with a line; who reads it knows the line's place."""


def json_object(line: bytes) -> dict[str, Any]:
    """The object that a line of JSON Lines is; `FieldError` where it is none."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise FieldError(f"expected one JSON object a line, found: {error}") from None
    if not isinstance(record, dict):
        raise FieldError(f"expected a JSON object, found {_name(record)}")
    return record


def parse_line(line: bytes) -> Request:
    record = json_object(line)
    request_id = _string(record, "request_id")
    session_id = _string(record, "session_id")
    turn = _integer(record, "turn", minimum=0)
    timestamp_s = _seconds(record, "timestamp_s")
    input_length = _integer(record, "input_length", minimum=1)
    output_length = _integer(record, "output_length", minimum=1)
    block_size = _integer(record, "block_size", minimum=1)
    hash_ids = record.get("hash_ids")
    if not isinstance(hash_ids, list):
        raise FieldError(f"field hash_ids: expected a list of integers, found {_name(hash_ids)}")
    blocks = -(-input_length // block_size)
    if len(hash_ids) != blocks:
        raise FieldError(
            f"field hash_ids: expected {blocks} ids (input_length {input_length} in blocks of "
            f"{block_size}), found {len(hash_ids)}"
        )
    if set(map(type, hash_ids)) != _INT or min(hash_ids) < 0 or max(hash_ids) > MAX_INTEGER:
        raise FieldError("field hash_ids: expected integers from 0 to 2^63 - 1")
    parent = record.get("parent_request_id")
    think_time_s = record.get("think_time_s")
    return Request(
        request_id,
        session_id,
        turn,
        timestamp_s,
        input_length,
        output_length,
        block_size,
        hash_ids,
        None if parent is None else _string(record, "parent_request_id"),
        None if think_time_s is None else _seconds(record, "think_time_s"),
    )


def _string(record: dict[str, Any], field: str) -> str:
    value = record.get(field)
    if not isinstance(value, str) or not value:
        raise FieldError(f"field {field}: expected a non-empty string, found {_name(value)}")
    return value


def _integer(record: dict[str, Any], field: str, minimum: int) -> int:
    value = record.get(field)
    if type(value) is not int or value < minimum:
        raise FieldError(f"field {field}: expected an integer ≥ {minimum}, found {_name(value)}")
    if value > MAX_INTEGER:
        raise FieldError(f"field {field}: expected an integer up to 2^63 - 1, found {value}")
    return value


def _seconds(record: dict[str, Any], field: str) -> float:
    value = record.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise FieldError(f"field {field}: expected seconds ≥ 0, found {_name(value)}")
    return float(value)


def _name(value: object) -> str:
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
