"""Anthropic's and OpenAI's own packages, as they come, each streamed and not, at the same time.

Runs in an engine's environment, which has both: ``python waiting_client.py URL MODEL``. Prints the
answers' texts as a JSON list.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import openai


def main(url: str, model: str) -> None:
    """Asks the server at `url` four times at once."""
    claude = anthropic.Anthropic(base_url=url, api_key="none")
    gpt = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    schema = {"type": "object", "properties": {}}  # without a tool it is a side call

    def headers(session: str) -> dict[str, str]:
        return {"x-session-id": session, "x-session-end": "1"}

    asked: Any = {
        "model": model,
        "max_tokens": 16,
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"name": "look", "input_schema": schema}],
    }
    tool: Any = {"type": "function", "name": "look", "parameters": schema, "strict": False}
    of_gpt: Any = {"model": model, "input": "hi", "tools": [tool]}

    def message() -> str:
        whole = claude.messages.create(**asked, extra_headers=headers("message"))
        return str(whole.content[0].text)

    def message_stream() -> str:
        with claude.messages.stream(**asked, extra_headers=headers("message_stream")) as stream:
            return "".join(stream.text_stream)

    def response() -> str:
        whole = gpt.responses.create(**of_gpt, extra_headers=headers("response"))
        return str(whole.output_text)

    def response_stream() -> str:
        events = gpt.responses.create(
            **of_gpt, stream=True, extra_headers=headers("response_stream")
        )
        deltas = (event for event in events if event.type == "response.output_text.delta")
        return "".join(event.delta for event in deltas)

    askers: list[Callable[[], str]] = [message, message_stream, response, response_stream]
    with ThreadPoolExecutor(len(askers)) as pool:
        print(json.dumps(list(pool.map(lambda ask: ask(), askers))))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
