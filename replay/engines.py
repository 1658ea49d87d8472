"""The HTTP dialects of engines: what a request's body looks like and what a streamed answer says.

Pure functions of bytes. Must not know sockets, schedules or results.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import orjson

Api = Literal["sglang", "openai", "chat"]

PATHS: dict[Api, str] = {
    "sglang": "/generate",
    "openai": "/v1/completions",
    "chat": "/v1/chat/completions",
}
_COMPLETION_TOKENS = b'"completion_tokens":'
_DATA = b"data:"
_DONE = b"[DONE]"
_TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls")


@dataclass(slots=True)
class BodyMaker:
    """Makes the bodies of one dialect."""

    api: Api
    model: str
    record_output_ids: bool

    def around(self, output_tokens: int, engine_id: str, *, text: bool) -> tuple[bytes, bytes]:
        """What comes before and after the prompt (the items of a list of token ids, or a JSON
        string) in a body that asks for exactly `output_tokens` greedy tokens, streamed."""
        if self.api == "sglang":
            head = b'{"text":' if text else b'{"input_ids":['
            options: dict[str, Any] = {
                "sampling_params": {
                    "max_new_tokens": output_tokens,
                    "ignore_eos": True,
                    "temperature": 0,
                },
                "stream": True,
                "rid": engine_id,
            }
        else:
            head = b'{"prompt":' if text else b'{"prompt":['
            options = {
                "model": self.model,
                "max_tokens": output_tokens,
                "min_tokens": output_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            }
            if self.record_output_ids:
                options["return_token_ids"] = True
        tail = b"," if text else b"],"
        if self.api == "chat":
            head, tail = b'{"messages":[{"role":"user","content":', b"}],"
        return head, tail + orjson.dumps(options)[1:]


class StreamError(Exception):
    """The engine reported an error inside a stream, or sent what is not of its dialect."""


@dataclass(slots=True)
class Answer:
    """What a stream has said so far. `tokens` counts those generated, as the engine reports
    them; where it does not (`counted_by` "chunks"), each chunk of text as one until the end, where
    `has_usage` says whether the engine told how many they were."""

    tokens: int = 0
    counted_by: Literal["usage", "chunks"] = "usage"
    has_usage: bool = False
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_ids: list[int] | None = None
    done: bool = False


class Parser(Protocol):
    """Reads a stream piece by piece."""

    answer: Answer

    def feed(self, data: bytes) -> int:
        """Takes what arrived; returns the number of tokens generated so far."""

    def close(self) -> Answer:
        """Ends the stream: parses what was put off, and checks that the counts agree."""


def parser_for(api: Api, record_output_ids: bool) -> Parser:
    """The parser of a dialect."""
    if api == "sglang":
        return SGLangParser(record_output_ids)
    return OpenAIParser(record_output_ids)


@dataclass(slots=True)
class _Events:
    """Cuts a stream into the payloads of its server-sent events, and notes the one that ends it."""

    _rest: bytes = b""

    def payloads(self, data: bytes, answer: Answer) -> Iterator[bytes]:
        if self._rest:
            data = self._rest + data
        # Servers end an event with an empty line; a payload of JSON holds no raw line end.
        *lines, self._rest = data.split(b"\n")
        for line in lines:
            if not line.startswith(_DATA):
                continue
            payload = line[len(_DATA) :].strip()
            if payload == _DONE:
                answer.done = True
            else:
                yield payload

    def last(self) -> bytes:
        """The line that the stream's end left without a line end, given one: whole where it is the
        end of the answer or JSON, nothing where the stream was cut off inside it."""
        line, self._rest = self._rest.strip(), b""
        payload = line.removeprefix(_DATA).strip()
        if payload != _DONE:
            try:
                orjson.loads(payload)
            except orjson.JSONDecodeError:
                return b""
        return line + b"\n"


@dataclass(slots=True)
class SGLangParser:
    """SGLang's `/generate` stream. Each event carries `meta_info.completion_tokens`, counted from
    the start, and `output_ids`: all so far, or (server flag `--incremental-streaming-output`) the
    new ones.

    Counting needs only that number, so that an event is not parsed as a tree before the last one:
    parsing all of a cumulative stream is quadratic in its length (SGLang 0.5.17,
    tokenizer_manager.py).
    """

    record_output_ids: bool
    answer: Answer = field(default_factory=Answer)
    _events: _Events = field(default_factory=_Events)
    _last: bytes = b""
    _incremental: bool | None = None
    _ids: list[int] = field(default_factory=list)

    def feed(self, data: bytes) -> int:
        for event in self._events.payloads(data, self.answer):
            at = event.rfind(_COMPLETION_TOKENS)
            if at < 0:
                raise StreamError(_error_message(event))
            tokens = _leading_int(event, at + len(_COMPLETION_TOKENS))
            if self.record_output_ids and self._incremental is not False:
                self._collect(event, tokens)
            self.answer.tokens = tokens
            self._last = event
        return self.answer.tokens

    def _collect(self, event: bytes, tokens: int) -> None:
        new = orjson.loads(event).get("output_ids") or []
        if self._incremental is None and tokens > len(new):
            self._incremental = True
        elif self._incremental is None and self.answer.tokens > 0:
            self._incremental = len(new) < tokens
        if self._incremental is False:
            return
        if self._incremental is None:
            self._ids = list(new)
        else:
            self._ids.extend(new)

    def close(self) -> Answer:
        self.feed(self._events.last())
        answer = self.answer
        if not self._last:
            return answer
        event = orjson.loads(self._last)
        meta = event["meta_info"]
        answer.prompt_tokens = meta.get("prompt_tokens")
        answer.cached_tokens = meta.get("cached_tokens")
        reason = meta.get("finish_reason")
        if isinstance(reason, dict) and reason.get("type") == "abort":
            raise StreamError(f"aborted: {reason.get('message', '')}")
        if self.record_output_ids:
            ids = self._ids if self._incremental else event.get("output_ids") or []
            if len(ids) != answer.tokens:
                raise StreamError(
                    f"output_ids holds {len(ids)} tokens, completion_tokens says {answer.tokens}"
                )
            answer.output_ids = ids
        return answer


@dataclass(slots=True)
class OpenAIParser:
    """The stream of OpenAI's completions and chat, with usage in every event
    (`stream_options.continuous_usage_stats`, which vLLM and SGLang have).

    Of other servers, whose usage comes at the end or not at all, chunks of text are counted: their
    first one is the first token all the same, and must not be taken for the end of the answer."""

    record_output_ids: bool
    answer: Answer = field(default_factory=Answer)
    _events: _Events = field(default_factory=_Events)
    _usage: dict[str, Any] | None = None
    _chunks: int = 0
    _ids: list[int] = field(default_factory=list)

    def feed(self, data: bytes) -> int:
        for event in self._events.payloads(data, self.answer):
            at = event.rfind(_COMPLETION_TOKENS)
            if at < 0:
                self._count_chunk(event)
                continue
            tokens = _leading_int(event, at + len(_COMPLETION_TOKENS))
            ends = b'"choices":[]' in event or b'"choices": []' in event
            if self._chunks or (ends and not self.answer.tokens):
                # The only usage, at the end: what came before was counted by chunks.
                self._usage = orjson.loads(event).get("usage")
                continue
            self.answer.tokens = tokens
            if self.record_output_ids or ends:
                self._read(event)
        return self._chunks or self.answer.tokens

    def _count_chunk(self, event: bytes) -> None:
        """Counts an event without usage, if it holds text."""
        try:
            record = orjson.loads(event)
            # Some servers name the key in every chunk, without a value.
            if record.get("error"):
                raise StreamError(_error_message(event))
            for choice in record["choices"]:
                delta = choice.get("delta") or {}
                self._ids.extend(choice.get("token_ids") or [])
                texts = (choice.get("text"), *(delta.get(name) for name in _TEXT_FIELDS))
                self._chunks += any(texts)
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
            raise StreamError(_error_message(event)) from None

    def _read(self, event: bytes) -> None:
        record = orjson.loads(event)
        for choice in record["choices"]:
            self._ids.extend(choice.get("token_ids") or [])
        if not record["choices"]:
            self._usage = record.get("usage")

    def close(self) -> Answer:
        self.feed(self._events.last())
        answer = self.answer
        answer.has_usage = self._usage is not None
        if self._chunks or (answer.has_usage and not answer.tokens):
            answer.counted_by = "chunks"
            answer.tokens = (self._usage or {}).get("completion_tokens") or self._chunks
        if self._usage:
            answer.prompt_tokens = self._usage.get("prompt_tokens")
            details = self._usage.get("prompt_tokens_details") or {}
            answer.cached_tokens = details.get("cached_tokens")
        if self.record_output_ids and (self._ids or answer.counted_by == "usage"):
            if len(self._ids) != answer.tokens:
                raise StreamError(
                    f"token_ids holds {len(self._ids)} tokens where completion_tokens says "
                    f"{answer.tokens}; does the server know return_token_ids?"
                )
            answer.output_ids = self._ids
        return answer


def _leading_int(data: bytes, start: int) -> int:
    text = data[start : start + 16].lstrip()
    end = 0
    while end < len(text) and 48 <= text[end] <= 57:
        end += 1
    if not end:
        raise StreamError(f"completion_tokens is not a number: {text!r}")
    return int(text[:end])


def _error_message(event: bytes) -> str:
    try:
        record = orjson.loads(event)
    except orjson.JSONDecodeError:
        return f"not JSON: {event[:200]!r}"
    error = record.get("error") if isinstance(record, dict) else None
    if isinstance(error, dict):
        return str(error.get("message", error))
    return str(error if error is not None else record)[:500]
