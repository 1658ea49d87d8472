"""Makes SGLang workers compile, before anyone is served, what they compile at first use.

SGLang's mixture-of-experts kernels are compiled by Triton for ranges of tokens a step, and for
numbers of tokens that 16 divides apart from others, each at the first such step: about a second
each on an H200 whose cache on disk is empty, in the middle of serving. Owns the prompts that go
through them; leaves the workers' caches empty.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from urllib.parse import urlsplit

import orjson

from launch.planning import Process

_RANGES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
"""Tokens a step, as SGLang's tuned configurations of these kernels name them."""
_NO_TRANSFER = {"bootstrap_host": "2.2.2.2", "bootstrap_room": 0}
"""SGLang's own word for a separated request whose KV goes nowhere
(`sglang.srt.disaggregation.utils.FAKE_BOOTSTRAP_HOST`)."""
_ROLES = ("colocated", "elastic", "prefill")
_TIMEOUT_S = 300.0
_FLUSH_S = 10
_POLL_S = 0.1


class WarmUpError(Exception):
    """A worker did not answer; the message names it and says what it said."""


def lengths(chunk_tokens: int | None) -> tuple[int, ...]:
    """Prompts' lengths in tokens that meet every kernel of steps up to `chunk_tokens`."""
    odd = (tokens + 3 for tokens in _RANGES if tokens >= 16)
    largest = chunk_tokens or max(_RANGES)
    return tuple(sorted(n for n in {*_RANGES, *odd, largest} if n <= largest))


def warm_up(
    workers: Sequence[Process], chunk_tokens: int | None, meanwhile: Callable[[], None]
) -> float:
    """Seconds until all are warm; calls `meanwhile` again and again until then.

    Decode workers are left out: they prefill nothing. Raises `WarmUpError`.
    """
    began_s = time.monotonic()
    prefilling = [worker for worker in workers if worker.role in _ROLES and not worker.attached]
    with ThreadPoolExecutor(max(1, len(prefilling))) as pool:
        tasks = [pool.submit(_warm, worker, lengths(chunk_tokens)) for worker in prefilling]
        try:
            while wait(tasks, _POLL_S).not_done:
                meanwhile()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    for task in tasks:
        task.result()
    return time.monotonic() - began_s


def _warm(worker: Process, token_counts: Sequence[int]) -> None:
    more = _NO_TRANSFER if worker.role == "prefill" else {}
    for tokens in token_counts:
        # No prompt begins like another: each is prefilled whole.
        ids = [16 + tokens % 1000, *(17 + i % 900 for i in range(tokens - 1))]
        sampling = {"max_new_tokens": 2, "ignore_eos": True, "temperature": 0}
        body = {"input_ids": ids, "sampling_params": sampling, **more}
        _post(worker, "/generate", orjson.dumps(body))
    _post(worker, f"/flush_cache?timeout={_FLUSH_S}", b"")


def _post(worker: Process, path: str, body: bytes) -> None:
    parts = urlsplit(worker.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        text = answer.read(300).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise WarmUpError(f"{worker.id}: warming up, {path}: {error!r}") from error
    finally:
        connection.close()
    if answer.status != http.client.OK:
        raise WarmUpError(f"{worker.id}: warming up, {path}: {answer.status} {text}")
