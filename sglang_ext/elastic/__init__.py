"""A decode worker of SGLang that also prefills: the selective half of selective PD.

A request with bootstrap fields gets its KV from a prefill worker, as on any decode worker; one
without is prefilled here, from and into the radix cache, and all of them decode in one batch.
Turned on with ``DELTASERVE_SGLANG=elastic`` on a worker with ``--disaggregation-mode decode
--disaggregation-decode-enable-radix-cache``; `sglang_ext.settings` lists what can be set.

This module owns the hooks into SGLang and does nothing else: each finds the worker of its scheduler
and calls it. In a process whose scheduler is not elastic every hook calls the original.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from sglang_ext import settings, sglang
from sglang_ext.elastic import fallback
from sglang_ext.elastic.metrics import exporter_of
from sglang_ext.elastic.queues import LOCAL_ROOM
from sglang_ext.elastic.state import add_to_loads, state
from sglang_ext.elastic.worker import ElasticWorker, attach, current
from sglang_ext.guards import Hook

_SETTINGS = settings.elastic(os.environ)


def _worker(scheduler: Any) -> ElasticWorker | None:
    worker = getattr(scheduler, "deltaserve_elastic", None)
    return worker if isinstance(worker, ElasticWorker) else None


def _attach(_result: None, scheduler: Any) -> None:
    worker = attach(scheduler, _SETTINGS)
    worker.exporter = exporter_of(worker)


def _let_pass_without_room(scheduler: Any, request: Any, **_: Any) -> None:
    if (
        _worker(scheduler) is not None
        and request.bootstrap_room is None
        and request.bootstrap_host is None
    ):
        request.bootstrap_room = LOCAL_ROOM


def _queue(
    original: Callable[..., None], scheduler: Any, req: Any, is_retracted: bool = False
) -> None:
    worker = _worker(scheduler)
    if worker is None:
        original(scheduler, req, is_retracted)
        return
    # A request that a more important one pushed out has its KV in host memory, like one that was
    # retracted, and no prefill worker that would send it again.
    is_retracted = is_retracted or sglang.elastic().is_in_host_memory(req)
    if not is_retracted and not worker.memory.can_ever_hold(req):
        # SGLang's way to end an invalid request: it runs a single token of it.
        req.set_finish_with_abort(
            f"The prompt of {req.seqlen} tokens does not fit into the KV pool of "
            f"{scheduler.max_total_num_tokens} with a page of {scheduler.page_size} to spare"
        )
        req.deltaserve_local = True
    if is_retracted and not req.output_ids:
        worker.queues.prefill_again(req)
    elif is_retracted or not worker.queues.is_local(req):
        worker.queues.number(req)
        if not is_retracted and worker.queues.comes_by_transfer(req):
            worker.counts["separated"] += 1
        original(scheduler, req, is_retracted)
    elif scheduler._set_or_validate_priority(req) and not worker.queues.is_refused(req):
        worker.counts["local"] += 1
        worker.queues.add_local(req)
    else:
        sglang.elastic().turn_away(scheduler, req)


def _next_batch(original: Callable[..., Any], scheduler: Any, running_batch: Any) -> Any:
    worker = _worker(scheduler)
    if worker is None:
        return original(scheduler, running_batch)
    plan = worker.steps.next_batch(running_batch)
    # In each turn of the loop: what is counted while nobody is served has no step to wait for.
    worker.export()
    return plan


def _prefill(original: Callable[..., Any], scheduler: Any, running_batch: Any) -> Any:
    worker = _worker(scheduler)
    return (
        original(scheduler, running_batch)
        if worker is None
        else worker.steps.prefill(original, running_batch)
    )


def _process_decode_queue(original: Callable[..., None], scheduler: Any) -> None:
    worker = _worker(scheduler)
    # The event loop calls this before the last batch is merged into the running one, too early for
    # its accounting; `Steps.prefill` calls it again in the right place.
    if worker is None or worker.steps.taking_in:
        original(scheduler)


def _launch(original: Callable[..., Any], scheduler: Any, batch: Any, *rest: Any) -> Any:
    worker = _worker(scheduler)
    if worker is None:
        return original(scheduler, batch, *rest)
    return worker.paced.launch(original, batch, *rest)


def _learn(_result: None, scheduler: Any, batch: Any, result: Any) -> None:
    worker = _worker(scheduler)
    if worker is not None:
        worker.paced.processed(batch, result)


def _abort(original: Callable[..., None], scheduler: Any, request: Any) -> None:
    worker = _worker(scheduler)
    if worker is None:
        original(scheduler, request)
        return
    fallback.mark_aborted(worker, request)
    worker.queues.abort_waiting(request)
    with worker.queues.showing_transferred():
        original(scheduler, request)


def _is_fully_idle(
    original: Callable[..., bool], scheduler: Any, for_health_check: bool = False, **more: Any
) -> bool:
    worker = _worker(scheduler)
    if worker is None:
        return original(scheduler, for_health_check, **more)
    if not scheduler._engine_paused or for_health_check:
        return original(scheduler, for_health_check, **more) and worker.is_idle()
    # Nobody is served while a worker is paused. Local prompts in line own no memory: they are no
    # reason to refuse the flush of the cache that a weight update does, and insists on.
    with worker.queues.hiding_local():
        return original(scheduler, for_health_check, **more) and worker.is_idle()


def _pause(original: Callable[..., None], scheduler: Any, request: Any) -> None:
    worker = _worker(scheduler)
    if worker is None:
        original(scheduler, request)
        return
    # Where SGLang also throws out requests whose KV has arrived, it looks for them in its queue.
    with worker.queues.showing_transferred():
        original(scheduler, request)
    worker.paced.nothing_runs()
    worker.quarantine.sit_out()
    worker.export()


def _internal_state(answer: Any, scheduler: Any, *_: Any) -> Any:
    worker = _worker(scheduler)
    if worker is not None:
        answer.internal_state["deltaserve_elastic"] = state(worker)
    return answer


def _loads(loads: Any, _inquirer: Any) -> Any:
    worker = current()
    if worker is not None:
        add_to_loads(worker, loads)
    return loads


def _adder_init(_result: None, adder: Any, *_: Any, **__: Any) -> None:
    worker = current()
    if worker is not None:
        sglang.current().keep_from_adder(adder, worker.steps.extra_reserved_tokens)


def _add_chunked(original: Callable[..., Any], adder: Any, req: Any) -> Any:
    worker = current()
    if worker is None:
        return original(adder, req)
    # Memory for the chunk has been made sure of. What is reserved for others must not cut it into
    # crumbs: it may take from those reserves, as they count what it leaves.
    release, kept = sglang.current(), sglang.elastic().kept_from_adder(adder)
    release.keep_from_adder(adder, -kept)
    left = worker.sharing.add_chunked(original, adder, req)
    release.keep_from_adder(adder, kept)
    return left


def _add_one(original: Callable[..., Any], adder: Any, req: Any, **options: Any) -> Any:
    worker = current()
    if worker is None:
        return original(adder, req, **options)
    return worker.sharing.add_one(original, adder, req, **options)


def _transfer_budget(
    tokens: int, queue: Any, *_: Any, count_retracted: bool = True, **__: Any
) -> int:
    worker = _worker(queue.scheduler)
    if worker is None:
        return tokens
    return worker.memory.transfer_budget(tokens, for_retracted=not count_retracted)


def _before_allocation(queue: Any, *_: Any, **__: Any) -> None:
    worker = _worker(queue.scheduler)
    if worker is not None:
        worker.steps.before_allocation()


def _handshakes(_result: None, queue: Any, *_: Any, **__: Any) -> None:
    worker = _worker(queue.scheduler)
    if worker is not None:
        fallback.recover_handshakes(worker, queue)


def _poll(polls: list[int], queue: Any) -> list[int]:
    worker = _worker(queue.scheduler)
    return polls if worker is None else fallback.give_up_failed(worker, polls, queue)


def _commit(original: Callable[..., None], queue: Any, entry: Any) -> None:
    worker = _worker(queue.scheduler)
    if worker is None:
        original(queue, entry)
    else:
        fallback.commit(worker, original, queue, entry)


def _transferred(handed_on: list[Any], queue: Any, *_: Any, **__: Any) -> list[Any]:
    worker = _worker(queue.scheduler)
    return handed_on if worker is None else fallback.sort_out(worker, queue, handed_on)


def _hold_rebootstrap(original: Callable[..., None], queue: Any, req: Any) -> None:
    worker = _worker(queue.scheduler)
    if worker is None or not worker.queues.is_local(req):
        original(queue, req)
    else:
        fallback.resume_here(worker, req)


def _heartbeat(_result: None, manager: Any, address: str) -> None:
    if current() is not None:
        fallback.notice_restart(manager, address)


HOOKS = (
    Hook("scheduler.ready", "after", _attach),
    Hook("scheduler.generate", "before", _let_pass_without_room),
    Hook("scheduler.queue", "around", _queue),
    Hook("decode.next_batch", "around", _next_batch),
    Hook("scheduler.form_prefill", "around", _prefill),
    Hook("decode.take_in", "around", _process_decode_queue),
    Hook("scheduler.run_batch", "around", _launch),
    Hook("scheduler.process_result", "after", _learn),
    Hook("scheduler.abort", "around", _abort),
    Hook("scheduler.is_idle", "around", _is_fully_idle),
    Hook("scheduler.pause", "around", _pause),
    Hook("scheduler.internal_state", "after", _internal_state),
    Hook("scheduler.loads", "after", _loads),
    Hook("adder.made", "after", _adder_init),
    Hook("adder.add_chunked", "around", _add_chunked),
    Hook("adder.add_one", "around", _add_one),
    Hook("decode.budget", "after", _transfer_budget),
    Hook("decode.allocate", "before", _before_allocation),
    Hook("decode.handshakes", "after", _handshakes),
    Hook("decode.hold", "around", _hold_rebootstrap),
    Hook("decode.poll", "after", _poll),
    Hook("decode.commit", "around", _commit),
    Hook("decode.transferred", "after", _transferred),
    Hook("kv.heartbeat", "after", _heartbeat),
)
