"""Empties a worker's prefix cache, its host tier included, so that what comes next starts cold.

SGLang has a call for that; vLLM has one where it was started in development mode, as launch starts
it on a loopback address.

Both publish the KV event of it (``AllBlocksCleared``), SGLang (0.5.23) as soon as its scheduler
idles, vLLM (0.32.0) only with its next step (``Scheduler.update_from_output``). A router that comes
in between would believe what was there before, so vLLM is made to take one.
"""

from __future__ import annotations

import json
import time

from launch.http_calls import FAILURES, answer_line, call, reason
from launch.vllm_calls import COMPLETIONS, completion

FLUSH_TIMEOUT_S = 10.0
_POLL_S = 0.2
_STEP_S = 60.0
_STEP = [16] * 9
"""No whole block of any size that vLLM has; vLLM 0.32.0 on a CPU with AMX ends at a first
prompt of one or two tokens."""
_UNREPORTED = "its cache is empty, but the step after which its KV events report that failed"


class FlushError(Exception):
    """The worker's cache is not empty; the message says what it answered."""


def flush(
    engine: str,
    url: str,
    key: str | None = None,
    timeout_s: float = FLUSH_TIMEOUT_S,
    *,
    model_with_kv_events: str | None,
) -> None:
    """Empties the cache of the worker of `engine` at `url`, which asks for `key`; waits up to
    `timeout_s` for requests and transfers that still hold it. Raises `FlushError`.

    `model_with_kv_events` is the name of the model of a worker that publishes KV events: when this
    returns, they tell that its cache is empty."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            refused = (_sglang if engine == "sglang" else _vllm)(url, key, timeout_s)
        except FAILURES as error:
            raise FlushError(f"flushing its cache: {reason(error)}") from error
        if refused is None:
            if engine == "vllm" and model_with_kv_events is not None:
                _step(url, key, model_with_kv_events)
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
    return answer_line(path, status, answer)


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
        return answer_line(path, status, answer)
    try:
        said = json.loads(answer or b"{}")
    except ValueError:
        said = {}
    # Releases before 0.20 answer with an empty body where it was done.
    done = not isinstance(said, dict) or said.get("success", True)
    return None if done else f"{path}: requests or transfers still hold KV"


def _step(url: str, key: str | None, model: str) -> None:
    """One token of vLLM, with which its KV events go out; of a prompt that is no whole block, so
    that nothing of it is kept."""
    content = json.dumps(completion(model, _STEP, 1)).encode()
    try:
        status, answer = call("POST", url + COMPLETIONS, content, timeout_s=_STEP_S, key=key)
    except FAILURES as error:
        raise FlushError(f"{_UNREPORTED}: {COMPLETIONS}: {reason(error)}") from error
    if status != 200:
        raise FlushError(f"{_UNREPORTED}: {answer_line(COMPLETIONS, status, answer)}")
