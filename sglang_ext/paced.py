"""Paced prefill on a worker of SGLang that does all of a request itself.

SGLang runs the chunks of a prompt back to back while requests that decode wait, or carries them
along in chunks of a fixed size. Here every chunk carries them along and is sized to keep their
inter-token latency, as on an elastic worker. Turned on with ``DELTASERVE_SGLANG=paced`` on a worker
without ``--disaggregation-mode``; the variables begin with ``DELTASERVE_PACED_``.

This module owns the hooks into SGLang; what they do is in `sglang_ext.pacing`. In a process whose
scheduler is not paced every hook calls the original.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from sglang_ext import ranks, settings
from sglang_ext.guards import Hook, PluginMismatch
from sglang_ext.pacing.prefill import (
    Chunk,
    PacedPrefill,
    check_chunking,
    is_decoding,
)
from sglang_ext.pacing.sharing import Sharing
from sglang_ext.settings import Interference
from sglang_ext.sglang import current
from sglang_ext.sglang.pool import available_tokens

_SETTINGS = settings.paced(os.environ)
_paced: list[Sharing] = []
_kept_tokens = 0
"""KV tokens that the prefill batch being formed leaves to the decodes, beside one for each."""


def _of(scheduler: Any) -> PacedPrefill | None:
    paced = getattr(scheduler, "deltaserve_paced", None)
    return paced if isinstance(paced, PacedPrefill) else None


def _attach(_result: None, scheduler: Any) -> None:
    """Makes `scheduler` paced; raises `PluginMismatch` where it cannot be."""
    from sglang.srt.disaggregation.utils import DisaggregationMode

    if scheduler.disaggregation_mode is not DisaggregationMode.NULL:
        raise PluginMismatch(
            "the paced feature is for workers that prefill and decode: start it without "
            "--disaggregation-mode (an elastic worker is paced already), or take paced out of "
            "DELTASERVE_SGLANG"
        )
    parallel = current().parallel(scheduler)
    unsupported = {
        "pipeline parallelism": parallel.pipeline > 1,
        "context parallelism": parallel.attention_context > 1,
        "speculative decoding": not scheduler.spec_algorithm.is_none(),
        "sliding windows": scheduler.is_hybrid_swa,
        "state-space models": scheduler.is_hybrid_ssm,
        "diffusion language models": scheduler.dllm_config is not None,
    }
    for what, asked in unsupported.items():
        if asked:
            raise PluginMismatch(f"paced prefill does not support {what}: turn one of them off")
    check_chunking(scheduler, _SETTINGS, settings.PACED_PREFIX)
    paced = PacedPrefill(scheduler, _SETTINGS, functools.partial(ranks.agree, scheduler))
    scheduler.deltaserve_paced = paced
    _paced.append(Sharing(scheduler, paced))


def _rest_fits(scheduler: Any, growth_tokens: int) -> bool:
    """Whether the pool has room for the rest of the prompt in flight beside the decodes' growth.

    SGLang made sure of the prompt's room when it began it, and takes no account of the pages that
    decodes take meanwhile: in stock SGLang they wait until it is in.
    """
    req = scheduler.chunked_req
    if req is None or _SETTINGS.interference is Interference.STOCK:
        return True
    rest = int(req.seqlen) - current().prefix_tokens(req)
    room = available_tokens(scheduler)
    return bool(room - growth_tokens >= rest + scheduler.page_size)


def _prefill(original: Callable[..., Any], scheduler: Any, running_batch: Any) -> Any:
    global _kept_tokens
    paced = _of(scheduler)
    if paced is None:
        return original(scheduler, running_batch)
    chunk = paced.choose(running_batch)
    growth_tokens = 0
    if is_decoding(running_batch):
        growth_tokens = running_batch.new_tokens_required_next_decode()
        if not _rest_fits(scheduler, growth_tokens):
            # The prompt goes on as in stock SGLang. Nobody is thrown out of the batch in a step
            # that prefills: without memory for a chunk or for a decode SGLang ends the worker.
            chunk = Chunk(paced.own.tokens, mixed=False)
    if chunk is None:
        from sglang.srt.managers.schedule_batch import NextBatchPlan

        paced.decodes_go_on()
        return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
    had_decodes = bool(running_batch.reqs)
    scheduler.chunked_prefill_size, scheduler.is_mixed_chunk = chunk.tokens, chunk.mixed
    if chunk.mixed and paced.settings.interference is not Interference.STOCK:
        # SGLang keeps a token for each decode that rides along, and one may need a page.
        _kept_tokens = max(0, growth_tokens - chunk.riding)
    try:
        with _paced[-1].of(chunk, running_batch):
            plan = original(scheduler, running_batch)
    finally:
        own = paced.own
        scheduler.chunked_prefill_size, scheduler.is_mixed_chunk = own.tokens, own.mixed
        _kept_tokens = 0
    paced.chosen(had_decodes, plan.batch_to_run)
    return plan


def _launch(original: Callable[..., Any], scheduler: Any, batch: Any, *rest: Any) -> Any:
    paced = _of(scheduler)
    if paced is None:
        return original(scheduler, batch, *rest)
    return paced.launch(original, batch, *rest)


def _learn(_result: None, scheduler: Any, batch: Any, result: Any) -> None:
    paced = _of(scheduler)
    if paced is not None:
        paced.processed(batch, result)


def _idle(_result: None, scheduler: Any) -> None:
    paced = _of(scheduler)
    if paced is not None:
        paced.nothing_runs()


def _paused(_result: None, scheduler: Any, _request: Any) -> None:
    paced = _of(scheduler)
    if paced is not None:
        paced.nothing_runs()


def _adder_made(_result: None, adder: Any, *_: Any, **__: Any) -> None:
    if _kept_tokens:
        current().keep_from_adder(adder, _kept_tokens)


def _add_chunked(original: Callable[..., Any], adder: Any, req: Any) -> Any:
    return _paced[-1].add_chunked(original, adder, req) if _paced else original(adder, req)


def _add_one(original: Callable[..., Any], adder: Any, req: Any, **options: Any) -> Any:
    if not _paced:
        return original(adder, req, **options)
    return _paced[-1].add_one(original, adder, req, **options)


def _internal_state(answer: Any, scheduler: Any, *_: Any) -> Any:
    paced = _of(scheduler)
    if paced is not None:
        answer.internal_state["deltaserve_paced"] = {
            "interference": str(_SETTINGS.interference),
            "target_itl_s": _SETTINGS.target_itl_s,
            **paced.state(),
        }
    return answer


HOOKS = (
    Hook("scheduler.ready", "after", _attach),
    Hook("scheduler.form_prefill", "around", _prefill),
    Hook("scheduler.run_batch", "around", _launch),
    Hook("scheduler.process_result", "after", _learn),
    Hook("scheduler.idle", "after", _idle),
    Hook("scheduler.pause", "after", _paused),
    Hook("adder.made", "after", _adder_made),
    Hook("adder.add_chunked", "around", _add_chunked),
    Hook("adder.add_one", "around", _add_one),
    Hook("scheduler.internal_state", "after", _internal_state),
)
