"""Makes SGLang workers do, before anyone is served, what they do at first use.

That is compiling kernels, and connecting each prefill worker with each worker that it sends KV to:
SGLang 0.5.17 describes every slot of both KV pools to NIXL then, 0.1 s a million (slots × layers ×
2), one peer after another while all of the prefill worker's requests wait. Pools of 560,000 tokens
of 48 layers took 10 s for the first peer and 4.5 s for each other.

Owns the requests that do it (`deltaserve.step_sizes` says which kernels there are); leaves the
workers' caches empty.
"""

from __future__ import annotations

import http.client
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import orjson

from deltaserve.step_sizes import step_sizes
from launch.planning import Process

_NO_TRANSFER = {"bootstrap_host": "2.2.2.2", "bootstrap_room": 0}
"""SGLang's own word for a separated request whose KV goes nowhere
(`sglang.srt.disaggregation.utils.FAKE_BOOTSTRAP_HOST`)."""
_PREFILLING = ("colocated", "elastic", "prefill")
_RECEIVING = ("elastic", "decode")
_CONNECTING_TOKENS = 128
_BEGINNINGS = 1000
_TIMEOUT_S = 300.0
_FLUSH_S = 10
_POLL_S = 0.1


class WarmUpError(Exception):
    """The worker did not answer; the message says what it said."""

    def __init__(self, worker: Process, what: str) -> None:
        super().__init__(f"{worker.id}: warming up, {what}")
        self.worker = worker


def warm_up(
    workers: Sequence[Process], chunk_tokens: int | None, meanwhile: Callable[[], None]
) -> float:
    """Seconds until all are warm; calls `meanwhile` again and again until then.

    Attached workers are left out: they may be serving. Raises `WarmUpError`.
    """
    began_s = time.monotonic()
    own = [worker for worker in workers if not worker.attached]
    sizes = step_sizes(chunk_tokens)
    receiving = [worker for worker in own if worker.role in _RECEIVING]
    steps = (
        [partial(_compile, worker, sizes) for worker in own if worker.role in _PREFILLING],
        [partial(_connect, worker, receiving) for worker in own if worker.role == "prefill"],
        [partial(_post, worker, f"/flush_cache?timeout={_FLUSH_S}", b"") for worker in own],
    )
    for jobs in steps:
        _run_all(jobs, meanwhile)
    return time.monotonic() - began_s


def _run_all(jobs: Sequence[Callable[[], None]], meanwhile: Callable[[], None]) -> None:
    with ThreadPoolExecutor(max(1, len(jobs))) as pool:
        tasks = [pool.submit(job) for job in jobs]
        try:
            while wait(tasks, _POLL_S).not_done:
                meanwhile()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    for task in tasks:
        task.result()


def _compile(worker: Process, token_counts: Sequence[int]) -> None:
    more = _NO_TRANSFER if worker.role == "prefill" else {}
    for tokens in token_counts:
        _post(worker, "/generate", _request(tokens, tokens, more))


def _connect(prefill: Process, receiving: Sequence[Process]) -> None:
    """Sends KV to one worker after the other: `prefill` connects to one at a time anyway."""
    for number, worker in enumerate(receiving):
        bootstrap = {
            "bootstrap_host": urlsplit(prefill.url).hostname,
            "bootstrap_port": prefill.ports["bootstrap"],
            "bootstrap_room": random.getrandbits(62),
        }
        request = _request(_CONNECTING_TOKENS, _BEGINNINGS - 1 - number, bootstrap)
        with ThreadPoolExecutor(2) as pool:
            halves = [pool.submit(_post, half, "/generate", request) for half in (prefill, worker)]
        for half in halves:
            half.result()


def _request(tokens: int, number: int, more: dict[str, Any]) -> bytes:
    # No prompt begins like another: each is prefilled whole.
    ids = [16 + number % _BEGINNINGS, *(17 + i % 900 for i in range(tokens - 1))]
    sampling = {"max_new_tokens": 2, "ignore_eos": True, "temperature": 0}
    return orjson.dumps({"input_ids": ids, "sampling_params": sampling, **more})


def _post(worker: Process, path: str, body: bytes) -> None:
    parts = urlsplit(worker.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        text = answer.read(300).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise WarmUpError(worker, f"{path}: {error!r}") from error
    finally:
        connection.close()
    if answer.status != http.client.OK:
        raise WarmUpError(worker, f"{path}: {answer.status} {text}")
