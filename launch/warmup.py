"""Makes workers do, before anyone is served, what they do at first use, the same for both engines.

That is compiling kernels, and connecting each prefill worker with each worker that it sends KV to:
SGLang 0.5.17 describes every slot of both KV pools to NIXL then, 0.1 s a million (slots × layers ×
2), one peer after another while all of the prefill worker's requests wait. Pools of 560,000 tokens
of 48 layers took 10 s for the first peer and 4.5 s for each other.

Owns the requests that do it (`deltaserve.step_sizes` says which kernels there are); leaves the
workers' caches empty where they can be emptied.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import orjson

from deltaserve.step_sizes import step_sizes
from launch.caches import FlushError, flush
from launch.http_calls import FAILURES, answer_line, call, reason
from launch.planning import Plan, Process
from launch.vllm_calls import COMPLETIONS, completion

_NO_TRANSFER = {"bootstrap_host": "2.2.2.2", "bootstrap_room": 0}
"""SGLang's own word for a separated request whose KV goes nowhere
(`sglang.srt.disaggregation.utils.FAKE_BOOTSTRAP_HOST`)."""
_PREFILLING = ("colocated", "elastic", "prefill")
_RECEIVING = ("elastic", "decode")
_CONNECTING_TOKENS = 128
_CONNECTING_ATTEMPTS = 3
_BEGINNINGS = 1000
_TIMEOUT_S = 300.0
_POLL_S = 0.1


class WarmUpError(Exception):
    """The worker did not answer; the message says what it said."""

    def __init__(self, worker: Process, what: str) -> None:
        super().__init__(f"{worker.id}: warming up, {what}")
        self.worker = worker


def warm_up(plan: Plan, meanwhile: Callable[[], None]) -> float:
    """Seconds until all workers are warm; calls `meanwhile` again and again until then.

    Kernels are compiled where the topology says so (`warms_up`), pairs are always connected.
    Attached workers are left out: they may be serving. Raises `WarmUpError`.
    """
    began_s = time.monotonic()
    own = [worker for worker in plan.workers if not worker.attached]
    sizes = step_sizes(plan.topology.chunk_tokens) if plan.topology.warms_up else ()
    if limit := plan.topology.context_tokens:
        sizes = tuple(size for size in sizes if size + _ANSWER_TOKENS <= limit)
    receiving = [worker for worker in own if worker.role in _RECEIVING]
    requests = _SGLang() if plan.engine.name == "sglang" else _VLLM(plan)
    steps = (
        [partial(_compile, requests, w, sizes) for w in own if w.role in _PREFILLING],
        [partial(_connect, requests, w, receiving) for w in own if w.role == "prefill"],
        [partial(_empty, plan, w) for w in own if requests.can_flush(w)],
    )
    for jobs in steps:
        _run_all(jobs, meanwhile)
    return time.monotonic() - began_s


def _run_all(jobs: Sequence[Callable[[], None]], meanwhile: Callable[[], None]) -> None:
    pool = ThreadPoolExecutor(max(1, len(jobs)))
    try:
        tasks = [pool.submit(job) for job in jobs]
        while wait(tasks, _POLL_S).not_done:
            meanwhile()
    finally:
        # Not waited for: a request to one worker may wait for another that has died.
        pool.shutdown(wait=False, cancel_futures=True)
    for task in tasks:
        task.result()


def _compile(requests: _SGLang | _VLLM, worker: Process, token_counts: Sequence[int]) -> None:
    for tokens in token_counts:
        requests.prefill(worker, _prompt(tokens, tokens))


def _connect(requests: _SGLang | _VLLM, prefill: Process, receiving: Sequence[Process]) -> None:
    """Sends KV to one worker after the other: `prefill` connects to one at a time anyway.

    A first handshake that was too slow for vLLM (5 s) is tried again: what it waited for is done
    by then."""
    for number, worker in enumerate(receiving):
        prompt = _prompt(_CONNECTING_TOKENS, _BEGINNINGS - 1 - number)
        for attempts_left in reversed(range(_CONNECTING_ATTEMPTS)):
            try:
                requests.send_kv(prefill, worker, prompt)
                break
            except WarmUpError:
                if not attempts_left:
                    raise


def _empty(plan: Plan, worker: Process) -> None:
    try:
        flush(
            plan.engine.name,
            worker.url,
            worker.keys.to_change,
            model_with_kv_events=plan.topology.model_with_kv_events,
        )
    except FlushError as error:
        raise WarmUpError(worker, str(error)) from error


_ANSWER_TOKENS = 2


def _prompt(tokens: int, number: int) -> list[int]:
    # No prompt begins like another: each is prefilled whole.
    return [16 + number % _BEGINNINGS, *(17 + i % 900 for i in range(tokens - 1))]


class _SGLang:
    """SGLang's requests."""

    def can_flush(self, worker: Process) -> bool:
        return True

    def prefill(self, worker: Process, prompt: list[int]) -> None:
        self._generate(worker, prompt, _NO_TRANSFER if worker.role == "prefill" else {})

    def send_kv(self, prefill: Process, to: Process, prompt: list[int]) -> None:
        bootstrap = {
            "bootstrap_host": urlsplit(prefill.url).hostname,
            "bootstrap_port": prefill.ports["bootstrap"],
            "bootstrap_room": random.getrandbits(62),
        }
        _both(partial(self._generate, half, prompt, bootstrap) for half in (prefill, to))

    def _generate(self, worker: Process, prompt: list[int], more: dict[str, Any]) -> None:
        sampling = {"max_new_tokens": _ANSWER_TOKENS, "ignore_eos": True, "temperature": 0}
        _post(worker, "/generate", {"input_ids": prompt, "sampling_params": sampling, **more})


class _VLLM:
    """vLLM's requests, and the fields by which its connectors are told who sends KV to whom."""

    def __init__(self, plan: Plan) -> None:
        self._model = plan.topology.model_name
        self._nixl = plan.topology.transfer_backend == "nixl"

    def can_flush(self, worker: Process) -> bool:
        return worker.environment.get("VLLM_SERVER_DEV_MODE") == "1"

    def prefill(self, worker: Process, prompt: list[int]) -> None:
        self._complete(worker, prompt, _ANSWER_TOKENS, {})

    def send_kv(self, prefill: Process, to: Process, prompt: list[int]) -> None:
        if self._nixl:  # the answer says where its KV is
            asked = {"do_remote_decode": True, "do_remote_prefill": False}
            given = self._complete(prefill, prompt, 1, asked).get("kv_transfer_params")
            if not given:
                raise WarmUpError(prefill, f"{COMPLETIONS}: no kv_transfer_params in the answer")
            self._complete(to, prompt, _ANSWER_TOKENS, given)
            return
        bootstrap = f"http://{urlsplit(prefill.url).hostname}:{prefill.ports['bootstrap']}"
        transfer = uuid.uuid4().hex
        sending = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
        receiving = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": transfer,
            "remote_engine_id": self._engine_id(prefill, bootstrap),
            "remote_bootstrap_addr": bootstrap,
        }
        _both(
            (
                partial(self._complete, prefill, prompt, 1, sending),
                partial(self._complete, to, prompt, _ANSWER_TOKENS, receiving),
            )
        )

    def _engine_id(self, prefill: Process, bootstrap: str) -> str:
        try:
            _, answer = call("GET", f"{bootstrap}/query", timeout_s=_TIMEOUT_S)
            return str(next(iter(orjson.loads(answer).values()))["engine_id"])
        except (*FAILURES, ValueError, KeyError, StopIteration, AttributeError) as error:
            raise WarmUpError(prefill, f"{bootstrap}/query: {reason(error)}") from error

    def _complete(
        self, worker: Process, prompt: list[int], tokens: int, transfer: dict[str, Any]
    ) -> dict[str, Any]:
        body = completion(self._model, prompt, tokens)
        if transfer:
            body["kv_transfer_params"] = transfer
        answer: dict[str, Any] = orjson.loads(_post(worker, COMPLETIONS, body) or b"{}")
        return answer


def _both(jobs: Any) -> None:
    """Runs the halves of one request side by side: each waits for the other."""
    with ThreadPoolExecutor(2) as pool:
        halves = [pool.submit(job) for job in jobs]
    for half in halves:
        half.result()


def _post(worker: Process, path: str, body: dict[str, Any]) -> bytes:
    try:
        content = orjson.dumps(body)
        status, answer = call(
            "POST", worker.url + path, content, timeout_s=_TIMEOUT_S, key=worker.keys.key
        )
    except FAILURES as error:
        raise WarmUpError(worker, f"{path}: {error!r}") from error
    if status != 200:
        raise WarmUpError(worker, answer_line(path, status, answer))
    return answer
