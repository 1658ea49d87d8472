"""What launch asks of vLLM in its own terms: a few tokens for a prompt of token ids.

Knows neither workers nor what the tokens are for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

COMPLETIONS = "/v1/completions"


def completion(model: str, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    """The body of a request to `COMPLETIONS` for exactly so many `tokens`."""
    body = {"model": model, "prompt": list(prompt), "max_tokens": tokens}
    return body | {"temperature": 0, "ignore_eos": True}
