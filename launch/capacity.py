"""How many tokens the KV cache of a running worker holds, as its engine says.

An engine takes what its memory allows, less than was asked for where that is less, and whole pages.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from launch.http_calls import FAILURES, call

_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Capacity:
    """KV `tokens` that a worker holds, over all of its data-parallel ranks (`ranks`), each of which
    has a cache of its own."""

    tokens: int
    ranks: int = 1


def reported_capacity(engine: str, url: str, key: str | None = None) -> Capacity | None:
    """The KV capacity of the worker of `engine` at `url`; None where it does not say. `key` is what
    it asks for."""
    try:
        if engine == "sglang":
            _, answer = call("GET", f"{url}/server_info", timeout_s=_TIMEOUT_S, key=key)
            return _of_sglang(json.loads(answer))
        _, answer = call("GET", f"{url}/metrics", timeout_s=_TIMEOUT_S, key=key)
    except (*FAILURES, ValueError, KeyError, TypeError):
        return None
    return _of_vllm(answer.decode(errors="replace"))


def _of_sglang(info: dict[str, object]) -> Capacity | None:
    # The first rank's tokens; its ranks are alike.
    tokens, ranks = info["max_total_num_tokens"], info.get("dp_size") or 1
    if not (isinstance(tokens, int) and isinstance(ranks, int) and tokens > 0):
        return None
    return Capacity(tokens * ranks, ranks)


def _of_vllm(metrics: str) -> Capacity | None:
    # A line a rank, each with the blocks of all of them: vLLM adds them up when they have started.
    lines = re.findall(r"^vllm:cache_config_info{(.*)}", metrics, re.M)
    found = dict(re.findall(r'(\w+)="([^"]*)"', lines[0])) if lines else {}
    pages, page_tokens = found.get("num_gpu_blocks", ""), found.get("block_size", "")
    if not (pages.isdecimal() and page_tokens.isdecimal()):
        return None
    tokens = int(pages) * int(page_tokens)
    return Capacity(tokens, len(lines)) if tokens else None
