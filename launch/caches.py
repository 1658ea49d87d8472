"""Empties a worker's prefix cache, its host tier included, so that what comes next starts cold.

SGLang has a call for that; vLLM has one where it was started in development mode, as launch starts
it on a loopback address.
"""

from __future__ import annotations

import json
import time

from launch.http_calls import FAILURES, call, reason, told

FLUSH_TIMEOUT_S = 10.0
_POLL_S = 0.2


class FlushError(Exception):
    """The worker's cache is not empty; the message says what it answered."""


def flush(
    engine: str, url: str, key: str | None = None, timeout_s: float = FLUSH_TIMEOUT_S
) -> None:
    """Empties the cache of the worker of `engine` at `url`, which asks for `key`; waits up to
    `timeout_s` for requests and transfers that still hold it. Raises `FlushError`."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            refused = (_sglang if engine == "sglang" else _vllm)(url, key, timeout_s)
        except FAILURES as error:
            raise FlushError(f"flushing its cache: {reason(error)}") from error
        if refused is None:
            return
        if time.monotonic() >= deadline_s:
            raise FlushError(f"flushing its cache: {refused}")
        time.sleep(_POLL_S)


def _sglang(url: str, key: str | None, timeout_s: float) -> str | None:
    path = "/flush_cache"
    url = f"{url}{path}?timeout={timeout_s:.0f}"
    status, answer = call("POST", url, b"", timeout_s=timeout_s + 30, key=key)
    if status == 200:
        return None
    return told(path, status, answer)


def _vllm(url: str, key: str | None, timeout_s: float) -> str | None:
    path = "/reset_prefix_cache"
    url = f"{url}{path}?reset_external=true"
    status, answer = call("POST", url, b"", timeout_s=timeout_s + 30, key=key)
    if status == 404:
        raise FlushError(
            f"flushing its cache: vLLM has no {path} unless VLLM_SERVER_DEV_MODE=1 is in its "
            "environment when it starts"
        )
    if status != 200:
        return told(path, status, answer)
    try:
        said = json.loads(answer or b"{}")
    except ValueError:
        said = {}
    # Releases before 0.20 answer with an empty body where it was done.
    done = not isinstance(said, dict) or said.get("success", True)
    return None if done else f"{path}: requests or transfers still hold KV"
