"""How many tokens the KV cache of a running worker holds, as its engine says.

An engine takes what its memory allows, less than was asked for where that is less, and whole pages.
"""

from __future__ import annotations

import json
import re

from launch.http_calls import FAILURES, call

_TIMEOUT_S = 5.0


def reported_capacity_tokens(engine: str, url: str, key: str | None = None) -> int | None:
    """The KV capacity in tokens of the worker of `engine` at `url`; None where it does not say.
    `key` is what it asks for."""
    try:
        if engine == "sglang":
            _, answer = call("GET", f"{url}/server_info", timeout_s=_TIMEOUT_S, key=key)
            tokens = json.loads(answer)["max_total_num_tokens"]
            return tokens if isinstance(tokens, int) and tokens > 0 else None
        _, answer = call("GET", f"{url}/metrics", timeout_s=_TIMEOUT_S, key=key)
    except (*FAILURES, ValueError, KeyError, TypeError):
        return None
    config = re.search(r"^vllm:cache_config_info{(.*)}", answer.decode(errors="replace"), re.M)
    if config is None:
        return None
    found = dict(re.findall(r'(\w+)="([^"]*)"', config[1]))
    pages, page_tokens = found.get("num_gpu_blocks", ""), found.get("block_size", "")
    if not (pages.isdecimal() and page_tokens.isdecimal()):
        return None
    return int(pages) * int(page_tokens) or None
