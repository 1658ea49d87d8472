"""Weka's agentic coding traces (github callanjfox/kv-cache-tester): one JSON file a session.

In the source `t` is seconds from the session's start (in a sub-agent's entry: the time at which it
ended; inside it: seconds from its start), `hash_ids` are local to a file and hold one id a *full*
block, so that the started last block gets an id of its own here, which nothing else shares.
"""

from __future__ import annotations

import gzip
import io
import math
import random
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import zstandard

from deltaserve.errors import InputError
from replay.readers import Report
from replay.readers.lines import Record
from replay.trace import Request, SortingTraceWriter, open_binary


@dataclass(slots=True)
class _Call:
    """One call to the model, its times in seconds from the file's start."""

    start_s: float
    end_s: float | None
    think_time_s: float | None
    record: dict[str, Any]


@dataclass(slots=True)
class _Conversation:
    calls: list[_Call]
    prefix_key: tuple[int, int]
    begin_s: float
    end_s: float


class _Ids:
    """Makes ids that are local to a file global, and hands out ids for started blocks."""

    def __init__(self) -> None:
        self._next = 0
        self._local: dict[int, int] = {}
        self._shared: dict[tuple[int, int, int], int] = {}

    def new_file(self) -> None:
        self._local = {}

    def of(self, local_ids: list[int], common: list[int], key: tuple[int, int]) -> list[int]:
        """Global ids. As far as the ids equal `common`, they are those of every session with
        `key`."""
        ids = []
        shared = True
        for position, local in enumerate(local_ids):
            shared = shared and position < len(common) and local == common[position]
            if shared:
                place = (*key, position)
                if place not in self._shared:
                    self._shared[place] = self.fresh()
                ids.append(self._shared[place])
            else:
                known = self._local.get(local)
                if known is None:
                    known = self._local[local] = self.fresh()
                ids.append(known)
        return ids

    def fresh(self) -> int:
        self._next += 1
        return self._next - 1


def convert(
    inputs: list[Path],
    output: Path,
    *,
    shared_prefix: bool = False,
    sessions_per_hour: float | None = None,
    seed: int = 0,
) -> Report:
    """Converts session files, folders of them, or a `.tar`, `.tar.zst` of them, to one trace.

    The source says nothing of when sessions start: they all start at 0, or in random order as a
    Poisson process of `sessions_per_hour`. With `shared_prefix`, sessions (and sub-agents) whose
    tool and system sizes are equal share the ids of that many full blocks; otherwise no two
    sessions share anything. Memory holds one session and an index entry a request.
    """
    report = Report()
    ids = _Ids()
    names = [name for name, _ in _documents(inputs)] if sessions_per_hour else []
    starts_s = _session_starts(names, sessions_per_hour, seed)
    place_of: dict[str, str] = {}
    with SortingTraceWriter(output) as writer:
        for name, data in _documents(inputs):
            start_s = starts_s.get(name, 0.0)
            for request in _session_requests(name, data, ids, start_s, shared_prefix, report):
                before = place_of.setdefault(request.session_id, name)
                if before != name:
                    raise InputError(
                        f"{name}: field id: expected one that no file before has, found "
                        f"{request.session_id!r} (of {before})"
                    )
                writer.write(request)
        if not writer.requests:
            raise InputError(
                f"{inputs[0]}: no session in it; expected JSON files with a list `requests`"
            )
    report.requests = writer.requests
    return report


def _session_starts(
    names: list[str], sessions_per_hour: float | None, seed: int
) -> dict[str, float]:
    if not sessions_per_hour:
        return {}
    generator = random.Random(seed)
    shuffled = sorted(names)
    generator.shuffle(shuffled)
    now_s = 0.0
    starts = {}
    for name in shuffled:
        starts[name] = round(now_s, 3)
        now_s += generator.expovariate(sessions_per_hour / 3600)
    return starts


def _documents(inputs: list[Path]) -> Iterator[tuple[str, bytes]]:
    """(name, content) of every session file, in name order within one input."""
    for path in inputs:
        if not path.exists():
            raise InputError(
                f"{path}: no such file or folder; expected weka session files (docs/replay.md says "
                "where they are from)"
            )
        if path.is_dir():
            for file in sorted(path.rglob("*.json")):
                yield str(file), file.read_bytes()
        elif path.name.endswith((".tar", ".tar.zst", ".tar.gz", ".tgz")):
            yield from _tar_members(path)
        else:
            with open_binary(path) as stream:
                yield str(path), stream.read()


def _tar_members(path: Path) -> Iterator[tuple[str, bytes]]:
    try:
        with open_binary(path) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                if member.isfile() and member.name.endswith(".json"):
                    content = archive.extractfile(member)
                    yield f"{path}:{member.name}", (content or io.BytesIO()).read()
    except (tarfile.TarError, zstandard.ZstdError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(
            f"{path}: expected a tar archive of session files, found: {error}"
        ) from None


def _session_requests(
    name: str, data: bytes, ids: _Ids, start_s: float, shared_prefix: bool, report: Report
) -> Iterator[Request]:
    """The requests of one file: the main session and its sub-agents, each as a session."""
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InputError(f"{name}: expected JSON, found: {error}") from None
    head = _record(name, document, "tool_tokens", "system_tokens", "requests", "block_size", "id")
    block_size = head.integer("block_size", minimum=1)
    if not isinstance(document.get("id"), str | int):
        raise head.error("id", "the session's name")
    session_id = str(document["id"])
    main, agents = _conversations(name, document, block_size)
    ids.new_file()
    names = [session_id] + [f"{session_id}/agent-{n}" for n in range(len(agents))]
    for position, conversation in enumerate([main, *agents]):
        report.sessions += 1
        common: list[int] = []
        if shared_prefix and conversation.calls:
            if not all(type(tokens) is int for tokens in conversation.prefix_key):
                raise head.error("tool_tokens, system_tokens", "integers, for --shared-prefix")
            blocks = sum(conversation.prefix_key) // block_size
            common = conversation.calls[0].record["hash_ids"][:blocks]
        for turn, call in enumerate(conversation.calls):
            parent_id, parent_end_s = _parent(turn, position, call, main, agents, names)
            think_time_s = None if call.think_time_s is None else max(0.0, call.think_time_s)
            if parent_end_s is not None:
                think_time_s = round(max(0.0, call.start_s - parent_end_s), 3)
            elif turn == 0 and position == 0:
                think_time_s = None
            hash_ids = ids.of(call.record["hash_ids"], common, conversation.prefix_key)
            input_length = call.record["in"]
            if len(hash_ids) * block_size < input_length:
                hash_ids.append(ids.fresh())
                report.ids_added += 1
            if call.record["out"] < 1:
                report.output_length_raised_to_1 += 1
            if turn == 0:
                report.shared_prefix_tokens += len(common) * block_size
            yield Request(
                request_id=f"{names[position]}:{turn}",
                session_id=names[position],
                turn=turn,
                timestamp_s=round(start_s + call.start_s, 3),
                input_length=input_length,
                output_length=max(1, call.record["out"]),
                block_size=block_size,
                hash_ids=hash_ids,
                parent_request_id=parent_id,
                think_time_s=think_time_s,
            )


def _record(place: str, value: object, *needed: str) -> Record:
    """The fields of an object of the source, which has those that are `needed`."""
    if not isinstance(value, dict):
        raise InputError(f"{place}: expected a JSON object, found {type(value).__name__}")
    for field in needed:
        if field not in value:
            raise InputError(f"{place}: field {field!r}: missing")
    return Record(place, value)


def _conversations(
    name: str, document: dict[str, Any], block_size: int
) -> tuple[_Conversation, list[_Conversation]]:
    main = _Conversation([], (document["tool_tokens"], document["system_tokens"]), 0.0, 0.0)
    agents = []
    for number, entry in enumerate(_requests(name, document)):
        place = f"{name}: requests.{number}"
        fields = _record(place, entry, "type")
        if entry["type"] != "subagent":
            main.calls.append(_call(place, entry, 0.0, block_size))
            continue
        _record(place, entry, "t", "duration_ms", "requests", "tool_tokens", "system_tokens")
        # `t` is when a completed agent ended, and when one that nobody waits for was launched.
        begin_s = end_s = fields.number("t")
        if entry["duration_ms"] is None:
            end_s = math.inf
        else:
            begin_s = max(0.0, end_s - fields.number("duration_ms") / 1000)
        agents.append(
            _Conversation(
                [
                    _call(f"{place}.requests.{inner}", record, begin_s, block_size)
                    for inner, record in enumerate(_requests(place, entry))
                ],
                (entry["tool_tokens"], entry["system_tokens"]),
                begin_s,
                end_s,
            )
        )
    return main, agents


def _requests(place: str, values: dict[str, Any]) -> list[Any]:
    found = values["requests"]
    if not isinstance(found, list):
        raise Record(place, values).error("requests", "a list")
    return found


def _call(place: str, record: Any, offset_s: float, block_size: int) -> _Call:
    fields = _record(place, record, "hash_ids", "in", "out", "t")
    full, started = divmod(fields.integer("in", minimum=1), block_size)
    if len(fields.integers("hash_ids")) not in {full, full + bool(started)}:
        raise fields.error("hash_ids", f"{full} ids, one a full block of {block_size} tokens")
    if type(record["out"]) is not int:
        raise fields.error("out", "an integer")
    seconds = {
        field: record.get(field)
        for field in ("t", "api_time", "think_time")
        if field == "t" or record.get(field) is not None
    }
    for field, value in seconds.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise fields.error(field, "seconds")
    start_s = offset_s + float(seconds["t"])
    if start_s < 0:
        raise fields.error("t", "seconds from the session's start")
    api_time_s = seconds.get("api_time")
    return _Call(
        start_s,
        None if api_time_s is None else start_s + api_time_s,
        seconds.get("think_time"),
        record,
    )


def _parent(
    turn: int,
    position: int,
    call: _Call,
    main: _Conversation,
    agents: list[_Conversation],
    names: list[str],
) -> tuple[str | None, float | None]:
    """The answer that this call waited for besides its own session's previous one, and when that
    (or the previous turn, when there is none besides) ended."""
    if position > 0:
        if turn > 0:
            return None, agents[position - 1].calls[turn - 1].end_s
        begun = [n for n, c in enumerate(main.calls) if c.start_s <= call.start_s]
        if not begun:
            return None, None
        return f"{names[0]}:{begun[-1]}", main.calls[begun[-1]].end_s
    if turn == 0:
        return None, None
    previous = main.calls[turn - 1]
    # The main session waits for the agents that it started after its previous answer; the one that
    # ended last is the parent.
    awaited = [
        n
        for n, agent in enumerate(agents)
        if agent.calls and previous.start_s <= agent.begin_s and agent.end_s <= call.start_s
    ]
    if not awaited:
        return None, previous.end_s
    last = max(awaited, key=lambda n: agents[n].end_s)
    return f"{names[last + 1]}:{len(agents[last].calls) - 1}", agents[last].end_s
