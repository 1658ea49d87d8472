"""Qwen-Bailian's traces (github alibaba-edu/qwen-bailian-usagetraces-anon): blocks of 16 tokens,
`timestamp` in seconds, turns chained by `parent_chat_id` (-1: none).

The source hashes each block by itself, so that equal ids mean equal blocks, not equal prefixes;
here an id stands for a block after a given prefix. Memory grows with the trace's distinct prefixes.
"""

from __future__ import annotations

from pathlib import Path

from deltaserve.errors import InputError
from replay.readers import Report
from replay.readers.lines import Record, records
from replay.trace import Request, SortingTraceWriter

BLOCK_SIZE = 16
_NO_PREFIX = -1


class _Prefixes:
    """Numbers prefixes: (prefix before, block) → prefix."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}
        self._next = 0

    def chain(self, blocks: list[int]) -> list[int]:
        ids = []
        prefix = _NO_PREFIX
        for block in blocks:
            known = self._numbers.get((prefix, block))
            if known is None:
                known = self._numbers[(prefix, block)] = self.fresh()
            prefix = known
            ids.append(known)
        return ids

    def fresh(self) -> int:
        self._next += 1
        return self._next - 1


class _Chats:
    """Which session and turn a chat is. A second answer to one chat branches off a session of its
    own."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[str, int]] = {}
        self._turns: dict[str, int] = {}

    def place(self, chat: int, parent: int) -> tuple[str, int, str | None]:
        """(session, turn, parent's request if that is in another session)."""
        session, turn = self._of.get(parent, ("", -1))
        branches = bool(session) and self._turns[session] != turn + 1
        if not session or branches:
            new_session = f"c{chat}"
            self._of[chat] = (new_session, 0)
            self._turns[new_session] = 1
            return new_session, 0, f"c{parent}" if branches else None
        self._of[chat] = (session, turn + 1)
        self._turns[session] = turn + 2
        return session, turn + 1, None

    @property
    def sessions(self) -> int:
        return len(self._turns)

    def __contains__(self, chat: int) -> bool:
        return chat in self._of


def convert(inputs: list[Path], output: Path) -> Report:
    """Converts files of one trace, whose lines must come in the order of time."""
    report = Report()
    prefixes = _Prefixes()
    chats = _Chats()
    with SortingTraceWriter(output) as writer:
        for record in records(inputs):
            writer.write(_request(record, prefixes, chats, report))
        if not writer.requests:
            raise InputError(f"{inputs[0]}: no request in it")
    report.requests = writer.requests
    report.sessions = chats.sessions
    return report


def _request(record: Record, prefixes: _Prefixes, chats: _Chats, report: Report) -> Request:
    input_length = record.integer("input_length", minimum=1)
    output_length = record.integer("output_length", minimum=0)
    hash_ids = prefixes.chain(record.integers("hash_ids"))
    full, rest = divmod(input_length, BLOCK_SIZE)
    if rest and len(hash_ids) == full:
        hash_ids.append(prefixes.fresh())
        report.ids_added += 1
    if len(hash_ids) != full + bool(rest):
        raise record.error(
            "hash_ids", f"{full + bool(rest)} ids, one a block of {BLOCK_SIZE} tokens"
        )
    report.output_length_raised_to_1 += output_length < 1
    chat = record.integer("chat_id", minimum=0)
    if chat in chats:
        raise record.error("chat_id", "one that did not occur before")
    session, turn, parent = chats.place(chat, record.integer("parent_chat_id", minimum=-1))
    return Request(
        request_id=f"c{chat}",
        session_id=session,
        turn=turn,
        timestamp_s=record.number("timestamp"),
        input_length=input_length,
        output_length=max(1, output_length),
        block_size=BLOCK_SIZE,
        hash_ids=hash_ids,
        parent_request_id=parent,
    )
