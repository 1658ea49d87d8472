"""The engines' dialects: bodies and streams, cut anywhere."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.engines import (
    Answer,
    BodyMaker,
    OpenAIParser,
    Parser,
    SGLangParser,
    StreamError,
)

_IDS = [11, 12, 13, 14, 15, 16]


def _sglang_stream(incremental: bool, steps: list[int]) -> bytes:
    stream = b""
    before = 0
    for count in steps:
        event = {
            "text": 'a "completion_tokens": 99 b',
            "output_ids": _IDS[before:count] if incremental else _IDS[:count],
            "meta_info": {
                "prompt_tokens": 70,
                "completion_tokens": count,
                "cached_tokens": 64,
                "finish_reason": {"type": "length", "length": 6} if count == 6 else None,
            },
        }
        stream += b"data: " + orjson.dumps(event) + b"\n\n"
        before = count
    return stream + b"data: [DONE]\n\n"


def _openai_stream() -> bytes:
    events: list[dict[str, Any]] = []
    for count, token in enumerate(_IDS, start=1):
        usage = {"prompt_tokens": 70, "total_tokens": 70 + count, "completion_tokens": count}
        events.append({"choices": [{"text": "", "token_ids": [token]}], "usage": usage})
    details = {"cached_tokens": 64}
    events.append({"choices": [], "usage": usage | {"prompt_tokens_details": details}})
    return b"".join(b"data: " + orjson.dumps(event) + b"\n\n" for event in events) + (
        b"data: [DONE]\n\n"
    )


def _feed(parser: Parser, stream: bytes, cuts: list[int]) -> tuple[Answer, list[int]]:
    counts = []
    edges = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    for begin, end in pairwise(edges):
        counts.append(parser.feed(stream[begin:end]))
    return parser.close(), counts


_cuts = st.lists(st.integers(0, 10**6), max_size=12)
_steps = st.sets(st.integers(1, 5)).map(lambda inner: [*sorted(inner), 6])


@given(st.booleans(), st.booleans(), _steps, _cuts)
def test_an_sglang_stream_is_read_however_it_is_cut(
    incremental: bool, record: bool, steps: list[int], cuts: list[int]
) -> None:
    answer, counts = _feed(SGLangParser(record), _sglang_stream(incremental, steps), cuts)
    assert (answer.tokens, answer.prompt_tokens, answer.cached_tokens) == (6, 70, 64)
    assert answer.done
    assert answer.output_ids == (_IDS if record else None)
    assert counts == sorted(counts)


@given(st.booleans(), _cuts)
def test_an_openai_stream_is_read_however_it_is_cut(record: bool, cuts: list[int]) -> None:
    answer, counts = _feed(OpenAIParser(record), _openai_stream(), cuts)
    assert (answer.tokens, answer.prompt_tokens, answer.cached_tokens) == (6, 70, 64)
    assert answer.done
    assert answer.output_ids == (_IDS if record else None)
    assert counts == sorted(counts)


@pytest.mark.parametrize("parser", [SGLangParser(False), OpenAIParser(False)])
def test_an_error_inside_a_stream_is_raised_with_its_message(parser: Parser) -> None:
    with pytest.raises(StreamError, match="no memory"):
        parser.feed(b'data: {"error": {"message": "no memory"}}\n\n')


def test_an_aborted_sglang_request_is_an_error() -> None:
    parser = SGLangParser(False)
    parser.feed(
        b'data: {"output_ids":[],"meta_info":{"completion_tokens":0,"finish_reason":'
        b'{"type":"abort","message":"too long"}}}\n\n'
    )
    with pytest.raises(StreamError, match="too long"):
        parser.close()


def test_counts_that_disagree_are_an_error() -> None:
    parser = OpenAIParser(True)
    parser.feed(b'data: {"choices":[{"text":"x"}],"usage":{"completion_tokens":1}}\n\n')
    with pytest.raises(StreamError, match="return_token_ids"):
        parser.close()


def _body(api: Any, prompt: bytes, record: bool = False) -> Any:
    text = prompt.startswith(b'"')
    head, tail = BodyMaker(api, "m", record).around(7, "r1", text=text)
    return orjson.loads(head + prompt + tail)


def test_bodies_ask_for_exact_greedy_lengths() -> None:
    sglang = _body("sglang", b"1,2")
    assert sglang["input_ids"] == [1, 2]
    assert sglang["stream"] is True
    params = sglang["sampling_params"]
    assert params == {"max_new_tokens": 7, "ignore_eos": True, "temperature": 0}
    openai = _body("openai", b"1,2", record=True)
    assert openai["prompt"] == [1, 2]
    assert openai["min_tokens"] == openai["max_tokens"] == 7
    assert openai["return_token_ids"] is openai["ignore_eos"] is True
    assert openai["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    chat = _body("chat", b'"hi"')
    assert chat["messages"] == [{"role": "user", "content": "hi"}]
    assert "return_token_ids" not in chat
    assert _body("sglang", b'"hi"')["text"] == _body("openai", b'"hi"')["prompt"] == "hi"


def _chunks(*events: dict[str, Any], done: bool = True) -> list[bytes]:
    pieces = [b"data: " + orjson.dumps(event) + b"\n\n" for event in events]
    return [*pieces, b"data: [DONE]\n\n"] if done else pieces


_USAGE = {"prompt_tokens": 9, "completion_tokens": 7, "prompt_tokens_details": None}


def _text(text: str, chat: bool) -> dict[str, Any]:
    if chat:
        return {"choices": [{"index": 0, "delta": {"content": text}}], "usage": None}
    return {"choices": [{"index": 0, "text": text}]}


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("usage", ["at the end", "with the last chunk", "none"])
def test_chunks_are_counted_where_a_server_does_not_say_their_tokens(
    chat: bool, usage: str
) -> None:
    # Of seven tokens the second chunk holds three, and the last, without text, ends the answer.
    events = [_text(text, chat) for text in ("", "a", "b c d", "e", "f")]
    last = {"choices": [{"index": 0, "finish_reason": "length", "delta": {}, "text": ""}]}
    if usage == "with the last chunk":
        last["usage"] = _USAGE  # type: ignore[assignment]
    events.append(last)
    if usage == "at the end":
        events.append({"choices": [], "usage": _USAGE})
    parser = OpenAIParser(False)
    counts = [parser.feed(piece) for piece in _chunks(*events)]
    # The first token is seen with the first text, not with the usage at the end.
    assert counts[:5] == [0, 1, 2, 3, 4]
    assert set(counts[5:]) == {4}
    answer = parser.close()
    assert (answer.counted_by, answer.done) == ("chunks", True)
    assert answer.has_usage is (usage != "none")
    assert answer.tokens == (7 if answer.has_usage else 4)
    assert answer.prompt_tokens == (9 if answer.has_usage else None)


def test_usage_in_every_chunk_is_not_marked() -> None:
    usage = [{"prompt_tokens": 3, "completion_tokens": count} for count in (0, 2, 3)]
    events = [_text("x", True) | {"usage": found} for found in usage]
    parser = OpenAIParser(False)
    ending = {"choices": [], "usage": usage[-1]}
    assert [parser.feed(piece) for piece in _chunks(*events, ending)] == [0, 2, 3, 3, 3]
    assert parser.close().counted_by == "usage"


@pytest.mark.parametrize("event", [b'{"detail": "no"}', b"[]", b"nonsense"])
def test_what_is_no_chunk_is_an_error(event: bytes) -> None:
    with pytest.raises(StreamError):
        OpenAIParser(False).feed(b"data: " + event + b"\n\n")


@pytest.mark.parametrize("end", ["", "\n", "\r\n", "\n\n"])
@pytest.mark.parametrize("usage", [False, True])
def test_the_last_event_counts_whatever_ends_its_line(usage: bool, end: str) -> None:
    events = [orjson.dumps(_text("x", True)) for _ in range(3)]
    if usage:
        events.append(orjson.dumps({"choices": [], "usage": _USAGE}))
    for last in (events, [*events, b"[DONE]"]):
        parser = OpenAIParser(False)
        parser.feed(b"\n\n".join(b"data: " + event for event in last) + end.encode())
        answer = parser.close()
        assert answer.tokens == (7 if usage else 3)
        assert answer.done is (last is not events)
    stream = _sglang_stream(False, [2, 6])
    for whole in (stream.removesuffix(b"\n\n"), stream.removesuffix(b"\n\ndata: [DONE]\n\n")):
        reader = SGLangParser(True)
        reader.feed(whole + end.encode())
        assert reader.close().output_ids == _IDS


def test_a_stream_that_is_cut_off_inside_an_event_has_what_came_before_it() -> None:
    for cut in (b'data: {"choices": [{"te', b"data: [DO", b"dat"):
        parser = OpenAIParser(False)
        parser.feed(b"data: " + orjson.dumps(_text("x", True)) + b"\n\n" + cut)
        answer = parser.close()
        assert (answer.tokens, answer.done) == (1, False)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("value", [None, {}, ""])
def test_an_error_without_a_value_is_none(chat: bool, value: Any) -> None:
    parser = OpenAIParser(False)
    for piece in _chunks(*(_text("x", chat) | {"error": value} for _ in range(3))):
        parser.feed(piece)
    assert parser.close().tokens == 3
