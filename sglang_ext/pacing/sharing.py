"""A chunk in flight leaves short prompts a part of its step.

SGLang gives a prompt that it has begun the whole of every step until it is in: a turn of 200 tokens
behind a prompt of 100,000 waits for all of it, and long where steps are paced. Here prompts that
fit whole beside half of the chunk go along with it, and the chunk becomes smaller by what they
compute and by what reading their prefixes takes. Knows SGLang's adder and queue; what a step
costs is the pacer's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang_ext.pacing.prefill import Chunk, PacedPrefill
from sglang_ext.pacing.step_times import Step
from sglang_ext.settings import Interference
from sglang_ext.sglang import current
from sglang_ext.sglang.pool import available_tokens

_NEVER_CUT_TOKENS = 1 << 40
_TRY_AGAIN_STEPS = 64


class Sharing:
    """Shares the steps of one scheduler, whose prefill is `paced`."""

    def __init__(self, scheduler: Any, paced: PacedPrefill) -> None:
        self._scheduler = scheduler
        self._paced = paced
        self._share_tokens: int | None = None
        self._kept_out_beside: Any = None
        self._kept_out_at = (0, 0)
        self._kept_out_for_steps = 0

    @contextmanager
    def of(self, chunk: Chunk, running_batch: Any) -> Iterator[None]:
        """Within it, SGLang sees those prompts in line that go along with the chunk in flight.

        Where none does, it sees them all; they then wait as in stock SGLang. Afterwards those that
        were not taken are in line where they were.
        """
        s = self._scheduler
        short = self._short_prompts(chunk, running_batch)
        if not short:
            yield
            return
        queue, s.waiting_queue = s.waiting_queue, list(short)
        chunked, room = s.chunked_req, self._room(running_batch)
        try:
            yield
        finally:
            self._share_tokens = None
            left, shown = ({id(req) for req in reqs} for reqs in (s.waiting_queue, short))
            self._kept_out_beside = chunked if shown <= left else None
            self._kept_out_at, self._kept_out_for_steps = room, 0
            known = {id(req) for req in queue}
            s.waiting_queue = [
                *(req for req in queue if id(req) in left or id(req) not in shown),
                *(req for req in s.waiting_queue if id(req) not in known),
            ]

    def _room(self, running_batch: Any) -> tuple[int, int]:
        """What lets prompts in, more of either: KV tokens, and places in the batch."""
        return available_tokens(self._scheduler), -len(running_batch.reqs)

    def _are_kept_out(self, chunked: Any, running_batch: Any) -> bool:
        """Whether SGLang let nobody in when prompts last went along with the chunk of `chunked`,
        and has no more room since.

        As long as the pool or the batch is full, what the chunk gives up is computed for nobody.
        What else may have kept them out is tried again every now and then.
        """
        if self._kept_out_beside is not chunked:
            return False
        room = self._room(running_batch)
        more = any(now > then for now, then in zip(room, self._kept_out_at, strict=True))
        self._kept_out_at = room
        self._kept_out_for_steps += 1
        return not more and self._kept_out_for_steps < _TRY_AGAIN_STEPS

    def _short_prompts(self, chunk: Chunk, running_batch: Any) -> list[Any]:
        """The prompts that go along, first come first; notes what is left for the chunk."""
        s, paced = self._scheduler, self._paced
        chunked = s.chunked_req
        if (
            chunked is None
            or not s.waiting_queue
            or chunk.tokens is None
            or s.enable_priority_scheduling
            or paced.settings.interference is Interference.STOCK
            or self._are_kept_out(chunked, running_batch)
        ):
            return []
        tokens, prefix = chunk.tokens - chunk.riding, current().prefix_tokens(chunked)
        granule = paced.granule_tokens
        room = tokens // 2 // granule * granule
        fits = tokens >= 2 * max(granule, paced.pacer.smallest_tokens)
        if int(chunked.seqlen) - prefix <= tokens - room or not fits:
            # Its last chunk: what it leaves of the step is free for others anyway.
            return []
        context = sum(req.seqlen for req in running_batch.reqs[: chunk.riding])

        def takes_s(prompts: list[tuple[int, int]]) -> float:
            return paced.pacer.times.predict(Step.of(prompts, chunk.riding, context))

        least = tokens - room
        longest_s = max(paced.pacer.target_s, takes_s([(tokens, prefix)]))
        short: list[Any] = []
        taken: list[tuple[int, int]] = []

        def fits_beside(share: int, prompts: list[tuple[int, int]]) -> bool:
            return takes_s([(share, prefix), *prompts]) <= longest_s

        for req, (new, cached) in paced.next_in_line():
            paged = -(-new // s.page_size) * s.page_size
            beside = [*taken, (paged, cached)]
            # Reading what is cached before it takes time as well, which the chunk gives up.
            if sum(n for n, _ in beside) <= room and fits_beside(least, beside):
                short.append(req)
                taken = beside
        left = tokens - sum(n for n, _ in taken)
        shares = range(least, left + 1, granule)
        share = shares[bisect_left(shares, True, key=lambda n: not fits_beside(n, taken)) - 1]
        # Of the ranks' shares the smallest fits beside as many as all have.
        agreed, share = paced.agree([len(short), share])
        if not agreed:
            return []
        self._share_tokens = share
        return short[:agreed]

    def add_chunked(self, original: Callable[..., Any], adder: Any, req: Any) -> Any:
        """Adds the chunk in flight with its share, and keeps room for the rest of its prompt."""
        rem_tokens, share = adder.rem_chunk_tokens, self._share_tokens
        if share is None or rem_tokens is None or share >= rem_tokens:
            return original(adder, req)
        adder.rem_chunk_tokens = share
        left = original(adder, req)
        adder.rem_chunk_tokens += rem_tokens - share
        if left is not None:
            from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

            release = current()
            done = release.prefix_tokens(req) + release.extend_tokens(req)
            to_decode = max(0, req.sampling_params.max_new_tokens - len(req.output_ids))
            release.keep_from_adder(
                adder,
                int(req.seqlen)
                - done
                + self._scheduler.page_size
                + min(to_decode, CLIP_MAX_NEW_TOKENS),
            )
        return left

    def add_one(self, original: Callable[..., Any], adder: Any, req: Any, **options: Any) -> Any:
        """Adds a prompt in line; beside a chunk in flight only one that fits whole.

        SGLang does not expect to cut a second prompt, and would end there. What the host tier
        holds is not in `req` yet and need not be computed: SGLang loads it while it adds the
        prompt. Should it load less than it found, the prompt no longer fits: with chunks of at
        least `_NEVER_CUT_TOKENS` it is then refused in place of being cut.
        """
        if self._share_tokens is None or not options["has_chunked_req"]:
            return original(adder, req, **options)
        in_place = current().prefix_tokens(req) + int(req.host_hit_length)
        new = len(req.full_untruncated_fill_ids) - in_place
        if adder.ceil_paged_tokens(new) > adder.rem_chunk_tokens:
            from sglang.srt.managers.schedule_policy import AddReqResult

            return AddReqResult.OTHER
        return original(adder, req, **{**options, "truncation_align_size": _NEVER_CUT_TOKENS})
