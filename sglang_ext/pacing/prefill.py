"""Paced prefill of one scheduler of SGLang: the next chunk, and what finished steps teach.

Knows where SGLang keeps batches and requests, and how a batch is timed; what is learnt and chosen
from that is the pacer's. Whether there is memory for a chunk is for others to judge.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_ext.guards import PluginMismatch
from sglang_ext.pacing.pacer import ChunkPacer, fit_to_pages
from sglang_ext.pacing.step_times import Step, StepTimes
from sglang_ext.settings import Interference, PacingSettings
from sglang_ext.sglang import current

_LOOKED_AT = 16
_LOOK_AGAIN_STEPS = 64


@dataclass(frozen=True)
class Chunk:
    """What the next prefill batch may be.

    `tokens` is SGLang's ``chunked_prefill_size`` for it, the decodes that ride along included; None
    is no limit. `riding` of them ride along, where the chunk is `mixed`.
    """

    tokens: int | None
    mixed: bool
    riding: int = 0


class PacedPrefill:
    """What pacing adds to one ``Scheduler``; `agree` is how its ranks agree on a chunk's size."""

    def __init__(
        self,
        scheduler: Any,
        settings: PacingSettings,
        agree: Callable[[list[int]], list[int]],
    ) -> None:
        self._scheduler = scheduler
        self.settings = settings
        self.agree = agree
        self.own = Chunk(scheduler.chunked_prefill_size, scheduler.is_mixed_chunk)
        largest = settings.chunk_tokens or self.own.tokens or scheduler.max_prefill_tokens
        self.pacer = ChunkPacer(
            target_s=settings.target_itl_s,
            smallest_tokens=settings.min_chunk_tokens,
            largest_tokens=largest,
            times=StepTimes(graph_tokens=_graph_tokens(scheduler)),
        )
        self.chunk_tokens: int | None = None
        """The pacer's last choice."""
        self._last_result_s: float | None = None
        self._decodes_waited = False
        self._choices = 0

    # ---------------------------------------------------------------- choosing

    def choose(self, running_batch: Any) -> Chunk | None:
        """The next prefill batch's size, or None where it is the decodes' turn."""
        s = self._scheduler
        self._choices += 1
        if not self.has_prompts:
            return self.own
        decoding = is_decoding(running_batch)
        if self.settings.interference is Interference.STOCK:
            riding = running_batch.batch_size() if self.own.mixed and decoding else 0
            return Chunk(self.own.tokens, self.own.mixed, riding)
        prompts = [*s.waiting_queue, *([s.chunked_req] if s.chunked_req is not None else [])]
        mixed = (
            decoding
            and not running_batch.return_logprob
            and not any(r.return_logprob or r.input_embeds is not None for r in prompts)
            and current().can_ride(running_batch)
        )
        if decoding and not mixed and self._decodes_waited:
            return None
        riding = running_batch.batch_size() if mixed else 0
        tokens = self._paced_tokens(running_batch if decoding else None)
        return Chunk(
            fit_to_pages(tokens, self.granule_tokens, riding, self.pacer.largest_tokens),
            mixed,
            riding,
        )

    def chosen(self, had_decodes: bool, batch: Any) -> None:
        """Notes what became of the choice, so that chunks that carry no decodes take turns."""
        self._decodes_waited = had_decodes and batch is not None and not batch.decoding_reqs

    def decodes_go_on(self) -> None:
        """Notes a step without a prefill."""
        self._decodes_waited = False

    @property
    def has_prompts(self) -> bool:
        """Whether a batch that is formed now may prefill.

        A request whose grammar SGLang has compiled is put in line in the midst of that.
        """
        s = self._scheduler
        in_line = s.chunked_req is not None or bool(s.waiting_queue)
        return in_line or bool(s.grammar_manager.has_waiting_grammars())

    @property
    def granule_tokens(self) -> int:
        """What a chunk is a multiple of: a page, or what deterministic inference splits prompts at.

        SGLang passes over a prompt whose chunk is smaller than that, for as long as anyone decodes.
        """
        s = self._scheduler
        return math.lcm(s.page_size, s.truncation_align_size or 1)

    def _paced_tokens(self, decoding: Any) -> int:
        pacer = self.pacer
        if self.settings.interference is Interference.MIXED or decoding is None:
            return pacer.largest_tokens
        s = self._scheduler
        prompts = []
        if s.chunked_req is not None:
            prompts.append(_left_of(s.chunked_req))
        in_line = self.next_in_line()
        prompts += [prompt for _, prompt in in_line]
        tokens = pacer.chunk_tokens(
            prompts, len(decoding.reqs), sum(req.seqlen for req in decoding.reqs)
        )
        if len(in_line) < len(s.waiting_queue) or s.grammar_manager.has_waiting_grammars():
            # Nothing is known of who comes after them: they do not come in, and where nobody is
            # before them begin with the smallest chunk.
            tokens = min(tokens, max(pacer.smallest_tokens, sum(new for new, _ in prompts)))
        self.chunk_tokens = self.agree([tokens])[0]
        return self.chunk_tokens

    def next_in_line(self) -> list[tuple[Any, tuple[int, int]]]:
        """The first requests that wait, each with its (new, cached) tokens."""
        queue = self._scheduler.waiting_queue[:_LOOKED_AT]
        return [(req, self._new_and_cached(req)) for req in queue]

    def _new_and_cached(self, req: Any) -> tuple[int, int]:
        cached = self.cached_tokens(req)
        return max(1, int(req.seqlen) - cached), cached

    def cached_tokens(self, req: Any) -> int:
        """Tokens of `req` that the radix cache holds, looked up every now and then."""
        known: int | None = getattr(req, "deltaserve_cached_tokens", None)
        if known is None or self._choices - req.deltaserve_looked_up_at >= _LOOK_AGAIN_STEPS:
            known = current().look_up_cached_tokens(self._scheduler.tree_cache, req)
            req.deltaserve_cached_tokens = known
            req.deltaserve_looked_up_at = self._choices
        return known

    # ---------------------------------------------------------------- learning

    def launch(self, original: Callable[..., Any], batch: Any, *rest: Any) -> Any:
        """Runs a batch; under overlap scheduling on a GPU its events time it.

        There results are processed one launch late, and the time between two of them holds the
        launch of the next step: of a step between two of decodes alone, next to nothing is left.
        """
        scheduler = self._scheduler
        late = scheduler.enable_overlap and current().device(scheduler) == "cuda"
        if not (late and batch.forward_mode.is_extend()):
            return original(scheduler, batch, *rest)
        import torch

        stream = scheduler.forward_stream
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record(stream)
        began_s = time.monotonic()
        result = original(scheduler, batch, *rest)
        launch_s = time.monotonic() - began_s
        ended.record(stream)
        result.deltaserve_times = (began, ended, launch_s)
        return result

    def processed(self, batch: Any, result: Any) -> None:
        """Learns from a finished step: its time is what the decodes in it waited for a token."""
        now = time.monotonic()
        began = self._last_result_s if self._last_result_s is not None else batch.launch_ts
        self._last_result_s = now
        mode = batch.forward_mode
        if not mode.is_extend() or mode.is_prebuilt() or began is None:
            return
        duration_s, launch_s = now - began, 0.0
        if times := getattr(result, "deltaserve_times", None):
            first, last, launch_s = times
            last.synchronize()
            duration_s = first.elapsed_time(last) / 1e3
        riding = {id(req) for req in batch.decoding_reqs or ()}
        prompts = [
            (length, prefix)
            for req, length, prefix in zip(
                batch.reqs, batch.extend_lens, batch.prefix_lens, strict=False
            )
            if id(req) not in riding
        ]
        context = sum(req.seqlen for req in batch.decoding_reqs or ())
        self.pacer.observe(Step.of(prompts, len(riding), context), duration_s, launch_s)

    def nothing_runs(self) -> None:
        """Notes that the next step does not begin where the last one ended."""
        self._last_result_s = None

    def state(self) -> dict[str, Any]:
        """What has been learnt so far, for ``/server_info``."""
        times = self.pacer.times
        return {
            "steps": times.steps,
            "error": times.error,
            "launch_s": times.launch_s,
            "chunk_tokens": self.chunk_tokens,
        }

    def expected_s(self, req: Any, ahead: Sequence[Any] = ()) -> float:
        """Seconds until `req` would be prefilled here, after those `ahead` of it in line.

        By the steps seen so far; what those ahead have in the cache counts where it is known.
        """
        s = self._scheduler
        prompts = []
        if s.chunked_req is not None:
            prompts.append(_left_of(s.chunked_req))
        for other in ahead:
            cached = getattr(other, "deltaserve_cached_tokens", 0)
            prompts.append((max(1, int(other.seqlen) - cached), cached))
        prompts.append(self._new_and_cached(req))
        running = s.running_batch.reqs
        if self.settings.interference is not Interference.ITL:
            running = ()
        return self.pacer.prefill_s(prompts, len(running), sum(r.seqlen for r in running))


def _graph_tokens(scheduler: Any) -> int | None:
    """Most tokens of a prefill step that a CUDA graph was captured for, None without graphs."""
    release = current()
    return release.prefill_graph_tokens(scheduler) if release.device(scheduler) == "cuda" else None


def _left_of(chunked_req: Any) -> tuple[int, int]:
    """The (new, cached) tokens of a prompt that has been prefilled in part."""
    prefix = current().prefix_tokens(chunked_req)
    return max(1, int(chunked_req.seqlen) - prefix), prefix


def check_chunking(scheduler: Any, settings: PacingSettings, prefix: str) -> None:
    """Raises `PluginMismatch` where prompts are to be paced and SGLang must not cut or mix them.

    The user said so, or the model or the attention does: SGLang turns chunks or mixing off then.
    `prefix` is that of the variables that `settings` came from.
    """
    if settings.interference is Interference.STOCK:
        return
    if scheduler.chunked_prefill_size is None:
        raise PluginMismatch(
            "paced prefill works in chunks, and chunked prefill is off on this worker: give it a "
            f"--chunked-prefill-size, or set {prefix}INTERFERENCE=stock"
        )
    if "dual_chunk_flash_attn" in current().attention_backends(scheduler):
        raise PluginMismatch(
            "paced prefill carries decodes along, which --attention-backend dual_chunk_flash_attn "
            f"does not allow: set {prefix}INTERFERENCE=stock, or take another backend"
        )


def is_decoding(running_batch: Any) -> bool:
    """Whether anyone in `running_batch` waits for a next token."""
    return not running_batch.is_empty() and not running_batch.is_prefill_only
