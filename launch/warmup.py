"""Makes SGLang workers compile, before anyone is served, what they compile at first use.

Owns the prompts that go through these kernels (`deltaserve.step_sizes` says which there are);
leaves the workers' caches empty.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from urllib.parse import urlsplit

import orjson

from deltaserve.step_sizes import step_sizes
from launch.planning import Process

_NO_TRANSFER = {"bootstrap_host": "2.2.2.2", "bootstrap_room": 0}
"""SGLang's own word for a separated request whose KV goes nowhere
(`sglang.srt.disaggregation.utils.FAKE_BOOTSTRAP_HOST`)."""
_ROLES = ("colocated", "elastic", "prefill")
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

    Decode workers are left out: they prefill nothing. Raises `WarmUpError`.
    """
    began_s = time.monotonic()
    prefilling = [worker for worker in workers if worker.role in _ROLES and not worker.attached]
    with ThreadPoolExecutor(max(1, len(prefilling))) as pool:
        tasks = [pool.submit(_warm, worker, step_sizes(chunk_tokens)) for worker in prefilling]
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
        raise WarmUpError(worker, f"{path}: {error!r}") from error
    finally:
        connection.close()
    if answer.status != http.client.OK:
        raise WarmUpError(worker, f"{path}: {answer.status} {text}")
