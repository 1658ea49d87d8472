"""The result format: one JSON line a request, readable after a kill at any moment.

Owns reading and writing `requests.jsonl`; importable without the client's packages, so that
evaluation can use it alone. Must not know how results come about.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from deltaserve.errors import InputError

ErrorKind = Literal[
    "timeout",
    "connect",
    "disconnect",
    "client_error",
    "server_error",
    "engine_error",
    "short_output",
    "cancelled",
    "client_bug",
]
Phase = Literal["prime", "warm_up", "measure", "drain"]
RESULTS_FILE = "requests.jsonl"
_TAIL_BYTES = 1 << 16
_LINE_BEGIN = b'{"request_id":'
REPLAY_FILE = "replay.json"


class ErrorInfo(BaseModel):
    """Why a request failed: by whose fault (`kind`), and in what words."""

    kind: ErrorKind
    message: str


class Result(BaseModel):
    """What became of one request. Times are seconds from the run's start, on one monotonic clock.

    `scheduled_s` is when the request was due: its time in the trace (`trace_s`), or when its
    parent's answer ended (closed loop: plus think time) if that is later. `sent_s - scheduled_s` is
    the client's own lateness. `arrivals` holds the time of each chunk and the tokens received so
    far. `phase` is that of a run with phases (else all are measured), `play` how often the session
    was begun before, `best_cached_tokens` what an endless cache would have held of this prompt.
    `counted_by` is "chunks" where the server does not say how many tokens a chunk holds: then each
    chunk of text counts as one in `arrivals`.
    """

    model_config = ConfigDict(extra="ignore")

    request_id: str
    session_id: str
    turn: int
    input_length: int
    output_length: int
    trace_s: float | None = None
    scheduled_s: float | None = None
    sent_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    arrivals: list[tuple[float, int]] = []
    output_tokens: int = 0
    counted_by: Literal["usage", "chunks"] = "usage"
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_ids: list[int] | None = None
    phase: Phase = "measure"
    play: int = 0
    best_cached_tokens: int | None = None
    decision_id: str | None = None
    status: int | None = None
    error: ErrorInfo | None = None

    def ttft_s(self) -> float | None:
        """Time to first token, from the schedule, in seconds."""
        if self.first_token_s is None or self.scheduled_s is None:
            return None
        return self.first_token_s - self.scheduled_s

    def tpot_s(self) -> float | None:
        """Time per output token after the first arrival, in seconds (`tpot_s` of the module)."""
        return tpot_s(self.arrivals)

    def worst_gap_s(self) -> float | None:
        """The longest time between two arrivals, in seconds; None with fewer than two."""
        return worst_gap_s(self.arrivals)

    def first_chunk_tokens(self) -> int | None:
        """Tokens that the first arrival brought; None where nothing arrived."""
        return self.arrivals[0][1] if self.arrivals else None

    def lateness_s(self) -> float | None:
        """How long after the schedule the client sent the request, in seconds."""
        if self.sent_s is None or self.scheduled_s is None:
            return None
        return self.sent_s - self.scheduled_s


def tpot_s(arrivals: Sequence[tuple[float, int]]) -> float | None:
    """Time per output token, in seconds: from the first arrival to the last, over the tokens that
    came after the first arrival. None where no token did.

    The tokens of the first arrival are not counted: an engine that holds its first tokens back and
    sends them at once did not make them in no time. `arrivals` are (seconds, tokens so far).
    """
    if len(arrivals) < 2:
        return None
    (first_s, first), (last_s, last) = arrivals[0], arrivals[-1]
    return (last_s - first_s) / (last - first) if last > first else None


def worst_gap_s(arrivals: Sequence[tuple[float, int]]) -> float | None:
    """The longest time between two arrivals, in seconds; None with fewer than two."""
    return max((after[0] - before[0] for before, after in pairwise(arrivals)), default=None)


class ResultWriter:
    """Appends results to a file, each with one write, so that a kill leaves whole lines (but for
    the last). Several processes may append to one file. Raises `InputError` where the file cannot
    be written, and after that for every result: a line is written whole or not at all."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed: str | None = None
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror}") from None

    def write(self, result: Result) -> None:
        if self._failed:
            raise InputError(self._failed)
        # The fields as they are: pydantic's own dump would copy every arrival.
        record = result.__dict__ | {"error": result.error.__dict__ if result.error else None}
        if result.output_ids is None:
            del record["output_ids"]
        line = memoryview(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
        except OSError as error:
            self._failed = f"{self._path}: cannot be written: {error.strerror}"
            raise InputError(self._failed) from None

    def close(self) -> None:
        os.close(self._descriptor)


def iter_results(path: Path) -> Iterator[Result]:
    """Results of a `requests.jsonl` (or of the folder that holds it), in the order they finished; a
    resumed run may have two of one request.

    A torn last line, as a kill leaves it, is dropped, and so is the torn beginning that a process
    on a full disk leaves before another's line; any other broken line is an error that names it.
    """
    file = path / RESULTS_FILE if path.is_dir() else path
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.endswith(b"\n"):
                    yield _parse(line, f"{file}:{number}")
    except FileNotFoundError:
        raise InputError(f"{file}: no such file; expected a run's results") from None


def read_results(path: Path) -> list[Result]:
    """All of `iter_results`; of two results for one request the later counts."""
    results: dict[str, Result] = {}
    for result in iter_results(path):
        results.pop(result.request_id, None)
        results[result.request_id] = result
    return list(results.values())


def _parse(line: bytes, place: str) -> Result:
    whole = line[max(0, line.rfind(_LINE_BEGIN)) :]
    try:
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError:
            record = orjson.loads(whole)
        return Result.model_validate(record)
    except orjson.JSONDecodeError as error:
        raise InputError(f"{place}: expected one JSON object a line: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{place}: field {field}: {first['msg']}") from None


def drop_torn_line(path: Path) -> None:
    """Cuts a file's last line off when it has no line end."""
    with path.open("rb+") as stream:
        end = stream.seek(0, os.SEEK_END)
        while end:
            begin = max(0, end - _TAIL_BYTES)
            stream.seek(begin)
            last = stream.read(end - begin).rfind(b"\n")
            if last >= 0:
                stream.truncate(begin + last + 1)
                return
            end = begin
        stream.truncate(0)
