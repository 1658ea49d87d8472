"""The next chunk of a local prompt: paced, and no larger than there is memory for."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from sglang_ext import sglang
from sglang_ext.elastic.admission import chunk_that_fits
from sglang_ext.elastic.memory import Memory
from sglang_ext.elastic.queues import Queues
from sglang_ext.pacing.prefill import Chunk, PacedPrefill, is_decoding

logger = logging.getLogger(__name__)


class Chunks:
    """Chooses the chunks of one scheduler, and takes one back for which there is no memory."""

    def __init__(
        self,
        scheduler: Any,
        queues: Queues,
        memory: Memory,
        paced: PacedPrefill,
        counts: Counter[str],
        wait_for_step_in_flight: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._queues = queues
        self._memory = memory
        self._paced = paced
        self._counts = counts
        self._wait_for_step_in_flight = wait_for_step_in_flight

    def choose(self, running_batch: Any) -> Chunk | None:
        """The next prefill batch's size, or None where this step must not prefill."""
        s = self._scheduler
        chunked = s.chunked_req
        decoding = is_decoding(running_batch)
        growth = 0
        if decoding:
            growth = running_batch.new_tokens_required_next_decode()
            if not running_batch.check_decode_mem():
                if chunked is not None:
                    self._requeue("running requests need its memory")
                return None
        chunk = self._paced.choose(running_batch)
        if chunk is None or chunked is None:
            return chunk
        remaining = int(chunked.seqlen) - sglang.current().prefix_tokens(chunked)
        wanted = remaining if chunk.tokens is None else min(remaining, chunk.tokens - chunk.riding)
        fitting = chunk_that_fits(
            chunk=wanted,
            granule_tokens=self._paced.granule_tokens,
            page_size=s.page_size,
            decode_growth=growth,
            available=self._memory.available_tokens(),
        )
        if fitting <= 0:
            if not decoding:
                self._requeue("there is no memory for its next chunk")
            return None
        if fitting == wanted:
            return chunk
        return dataclasses.replace(chunk, tokens=fitting + chunk.riding)

    def _requeue(self, why: str) -> None:
        """Puts a half-prefilled prompt back in line; its KV stays, as evictable cache."""
        s = self._scheduler
        req = s.chunked_req
        logger.warning("Elastic: %s goes back to the queue half-prefilled: %s", req.rid, why)
        # Its last chunk may still be written; those pages could be handed to a transfer.
        self._wait_for_step_in_flight()
        s.chunked_req = None
        sglang.elastic().put_back(s, req)
        self._counts["requeued_chunk"] += 1
        self._queues.add_local(req, first=True)
