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
class Holds:
    """Tokens that a worker's KV cache holds on its GPUs together and in its host tier; None where
    that is not known."""

    kv_tokens: int | None = None
    host_tokens: int | None = None


def reported(engine: str, url: str, key: str | None = None) -> Holds:
    """What the worker of `engine` at `url` says that it holds. `key` is what it asks for.

    SGLang tells its host tier's tokens once it has prefilled something; vLLM never does.
    """
    metrics = _asked(f"{url}/metrics", key).decode(errors="replace")
    if engine == "vllm":
        return Holds(_of_vllm(metrics))
    sizes = re.findall(r"^sglang:hicache_host_total_tokens(?:{.*})? ([0-9.e+]+)$", metrics, re.M)
    return Holds(_of_sglang(url, key), int(max(map(float, sizes), default=0)) or None)


def _of_sglang(url: str, key: str | None) -> int | None:
    try:
        tokens = json.loads(_asked(f"{url}/server_info", key))["max_total_num_tokens"]
    except (ValueError, KeyError, TypeError):
        return None
    return tokens if isinstance(tokens, int) and tokens > 0 else None


def _of_vllm(metrics: str) -> int | None:
    config = re.search(r"^vllm:cache_config_info{(.*)}", metrics, re.M)
    found = dict(re.findall(r'(\w+)="([^"]*)"', config[1])) if config else {}
    pages, page_tokens = found.get("num_gpu_blocks", ""), found.get("block_size", "")
    if not (pages.isdecimal() and page_tokens.isdecimal()):
        return None
    return int(pages) * int(page_tokens) or None


def _asked(url: str, key: str | None) -> bytes:
    """The answer, empty where there is none."""
    try:
        return call("GET", url, timeout_s=_TIMEOUT_S, key=key)[1]
    except FAILURES:
        return b""
