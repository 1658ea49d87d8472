"""How many tokens the KV cache of a running worker holds, as its engine says.

An engine takes what its memory allows, less than was asked for where that is less, and whole pages.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from launch.commands.vllm import OWN_BLOCKS
from launch.http_calls import FAILURES, call

_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Holds:
    """Tokens that a worker's KV cache holds on its GPUs together and in its host tier, over all of
    its data-parallel ranks (`ranks`), each of which has a cache of its own; None where that is not
    known."""

    kv_tokens: int | None = None
    host_tokens: int | None = None
    ranks: int = 1


def reported(engine: str, url: str, key: str | None = None) -> Holds:
    """What the worker of `engine` at `url` says that it holds. `key` is what it asks for.

    SGLang tells its host tier's tokens once it has prefilled something; vLLM never does.
    """
    metrics = _asked(f"{url}/metrics", key).decode(errors="replace")
    if engine == "vllm":
        return _of_vllm(metrics)
    # Of both tiers the first rank's tokens are taken: ranks are alike.
    tokens, ranks = _of_sglang(_asked(f"{url}/server_info", key))
    sizes = re.findall(r"^sglang:hicache_host_total_tokens(?:{.*})? ([0-9.e+]+)$", metrics, re.M)
    host_tokens = int(max(map(float, sizes), default=0))
    return Holds(tokens * ranks or None, host_tokens * ranks or None, ranks)


def _of_sglang(answer: bytes) -> tuple[int, int]:
    """A rank's tokens (0: not said), and how many ranks there are."""
    try:
        info = json.loads(answer)
        tokens, ranks = info["max_total_num_tokens"], info.get("dp_size") or 1
    except (ValueError, KeyError, TypeError, AttributeError):
        return 0, 1
    if not (isinstance(tokens, int) and isinstance(ranks, int) and tokens > 0 and ranks > 0):
        return 0, 1
    return tokens, ranks


def _of_vllm(metrics: str) -> Holds:
    # A line a rank, each with the blocks of all of them: vLLM adds them up when they have started.
    lines = re.findall(r"^vllm:cache_config_info{(.*)}", metrics, re.M)
    found = dict(re.findall(r'(\w+)="([^"]*)"', lines[0])) if lines else {}
    pages, page_tokens = found.get("num_gpu_blocks", ""), found.get("block_size", "")
    if not (pages.isdecimal() and page_tokens.isdecimal()):
        return Holds()
    tokens = (int(pages) - OWN_BLOCKS * len(lines)) * int(page_tokens)
    return Holds(tokens, ranks=len(lines)) if tokens > 0 else Holds()


def _asked(url: str, key: str | None) -> bytes:
    """The answer, empty where there is none."""
    try:
        return call("GET", url, timeout_s=_TIMEOUT_S, key=key)[1]
    except FAILURES:
        return b""
