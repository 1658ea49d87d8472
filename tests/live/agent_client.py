"""What coding agents ask, with the clients that they use: Anthropic's and OpenAI's own packages.

Runs in an engine's environment, which has both: ``python agent_client.py URL MODEL``. Prints a JSON
object with what was seen; fails with a traceback where an answer is not what the client expects.
The model is random, so that only a grammar makes it call a tool.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import anthropic
import openai

CITIES = ["Aachen", "Bonn"]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": CITIES}},
    "required": ["city"],
    "additionalProperties": False,
}
# Where a call is forced it is strict: vLLM holds no other call to its schema.
WEATHER = {"name": "get_weather", "description": "The weather of a city."}
# Kinds of tools that Codex 0.171 sends. Which of them the model is shown is the engine's affair. To
# models that it knows it sends `apply_patch` with a grammar, which vLLM refuses.
CODEX_TOOLS: list[Any] = [
    {"type": "function", "strict": False, "parameters": PARAMETERS} | WEATHER,
    {
        "type": "namespace",
        "name": "agents",
        "description": "Agents of one's own.",
        "tools": [
            {"type": "function", "name": "wait", "description": "Wait.", "parameters": PARAMETERS}
        ],
    },
    {"type": "web_search", "external_web_access": False},
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Changes files.",
        "format": {"type": "text"},
    },
]
SYSTEM = "You are a coding agent. " * 40
QUESTION = "Which weather is it in Bonn?"


def messages(client: anthropic.Anthropic, model: str) -> dict[str, Any]:
    """A turn, the same streamed, one that calls a tool, one with the tool's result; an abort."""
    tool: Any = WEATHER | {"input_schema": PARAMETERS, "strict": True}
    asked: Any = {"model": model, "system": SYSTEM, "tools": [tool]}
    history: list[Any] = [{"role": "user", "content": QUESTION}]
    counted = client.messages.count_tokens(messages=history, **asked).input_tokens
    asked |= {"max_tokens": 24, "metadata": {"user_id": "user_1_account_2_session_3"}}

    plain = client.messages.create(messages=history, **asked)
    assert plain.role == "assistant", plain
    assert plain.usage.output_tokens > 0, plain

    with client.messages.stream(messages=history, **asked) as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert events[0] == "message_start", events
    assert events[-1] == "message_stop", events
    assert streamed.stop_reason, streamed

    forced: Any = asked | {"max_tokens": 60, "tool_choice": {"type": "tool", "name": "get_weather"}}
    with client.messages.stream(messages=history, **forced) as stream:
        called = stream.get_final_message()
    calls = [block for block in called.content if block.type == "tool_use"]
    # A random model may use up its tokens in white space between the call's brackets, and not every
    # engine forces a call: the conversation goes on as if there had been a whole one.
    used = {"name": "get_weather", "input": {"city": "Bonn"}}
    said: Any = [{"type": "tool_use", "id": calls[0].id if calls else "c1"} | used]
    result = {
        "type": "tool_result",
        "tool_use_id": said[0]["id"],
        "content": "Rain, 7 degrees.",
    }
    history += [{"role": "assistant", "content": said}, {"role": "user", "content": [result]}]
    answer = client.messages.create(messages=history, **asked)
    assert answer.usage.input_tokens > 0, answer

    with client.messages.stream(messages=history, **(asked | {"max_tokens": 2000})) as stream:
        next(iter(stream))
    return {
        "counted": counted,
        # Together the prompt, whatever of it was in the engine's cache, or is now.
        "input_tokens": plain.usage.input_tokens
        + (plain.usage.cache_read_input_tokens or 0)
        + (plain.usage.cache_creation_input_tokens or 0),
        "events": sorted(set(events)),
        "calls": [call.name for call in calls],
        # The first prompt once more, so that most of it was in the cache.
        "again": {
            "prompt_tokens": streamed.usage.input_tokens
            + (streamed.usage.cache_read_input_tokens or 0)
            + (streamed.usage.cache_creation_input_tokens or 0),
            "cached_tokens": streamed.usage.cache_read_input_tokens,
        },
    }


def chat(client: openai.OpenAI, model: str) -> dict[str, Any]:
    """The same by OpenAI's chat, streamed; an answer in one piece; an abort."""
    weather = WEATHER | {"parameters": PARAMETERS, "strict": True}
    tool: Any = {"type": "function", "function": weather}
    history: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": QUESTION},
    ]
    named = {"x-session-id": "chat-1"}
    asked: Any = {"model": model, "tools": [tool], "extra_headers": named}
    plain = client.chat.completions.create(messages=history, max_tokens=16, **asked)
    assert plain.usage is not None, plain
    assert plain.choices[0].finish_reason, plain

    forced: Any = {"type": "function", "function": {"name": "get_weather"}}
    name, arguments, usage = None, "", None
    for chunk in client.chat.completions.create(
        messages=history,
        max_tokens=60,
        tool_choice=forced,
        stream=True,
        stream_options={"include_usage": True},
        **asked,
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            for part in choice.delta.tool_calls or []:
                assert part.function is not None, chunk
                name = part.function.name or name
                arguments += part.function.arguments or ""
    assert usage is not None, "a stream's usage"
    assert name is None or (name == "get_weather" and arguments.startswith("{")), (name, arguments)

    made = {"name": "get_weather", "arguments": '{"city": "Bonn"}'}
    call = {"id": "c1", "type": "function", "function": made}
    history += [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "Rain, 7 degrees."},
    ]
    chunks = list(
        client.chat.completions.create(messages=history, max_tokens=16, stream=True, **asked)
    )
    assert chunks[-1].choices[0].finish_reason, chunks[-1]
    left = client.chat.completions.create(messages=history, max_tokens=2000, stream=True, **asked)
    next(iter(left))
    left.close()
    return {
        "prompt_tokens": plain.usage.prompt_tokens,
        "calls": [name] if name else [],
    }


def responses(client: openai.OpenAI, model: str) -> dict[str, Any]:
    """OpenAI's newer API: the whole conversation in each request, as Codex sends it."""
    asked: Any = {
        "model": model,
        "instructions": SYSTEM,
        "max_output_tokens": 16,
        "store": False,
        "prompt_cache_key": "responses-1",
        "tools": CODEX_TOOLS,
    }
    says = [{"type": "input_text", "text": text} for text in ("Answer in one word.", "In English.")]
    history: list[Any] = [
        {"type": "message", "role": "developer", "content": says},
        {"type": "message", "role": "developer", "content": says[:1]},
        {"role": "user", "content": QUESTION},
    ]
    for _ in range(2):
        stream = list(client.responses.create(input=history, stream=True, **asked))
        events = [event.type for event in stream]
        assert events[0] == "response.created", events
        assert events[-1] in ("response.completed", "response.incomplete"), events
    again = stream[-1].response.usage
    history += [
        {"role": "assistant", "content": "Rain."},
        {"role": "user", "content": "And in Aachen?"},
    ]
    second = client.responses.create(input=history, **asked)
    assert second.usage is not None, second
    usage = second.usage.model_dump()
    # SGLang names them as in chats.
    read = usage.get("input_tokens") or usage.get("prompt_tokens")
    return {
        "events": sorted(set(events)),
        "input_tokens": read,
        "again": {
            "prompt_tokens": again.input_tokens,
            "cached_tokens": again.input_tokens_details.cached_tokens,
        },
    }


def main(url: str, model: str) -> None:
    """Asks everything of the server at `url`."""
    with (
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=30) as claude,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as gpt,
    ):
        names = [model.id for model in gpt.models.list()]
        assert gpt.models.retrieve(model).id == model
        seen = {
            "models": names,
            "messages": messages(claude, model),
            "chat": chat(gpt, model),
            "responses": responses(gpt, model),
        }
        try:
            claude.messages.create(model=model, max_tokens=4, messages="none")  # type: ignore[arg-type]
            seen["error"] = None
        except anthropic.APIStatusError as error:
            seen["error"] = [error.status_code, error.body]
    print(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
