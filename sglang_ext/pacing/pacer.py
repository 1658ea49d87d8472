"""How many prompt tokens may join a step, so that the requests decoding in it keep their pace.

Owns the size of the next chunk, chosen by the model in `step_times`. Knows nothing of SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sglang_ext.pacing.step_times import Step, StepTimes

_GROWTH = 2.0
_LOST_TARGET = 1.5


@dataclass
class ChunkPacer:
    """Chooses the chunk of the next step.

    `target_s` is the longest that a step carrying decodes should take, `smallest_tokens` the chunk
    below which a prompt would hardly advance, `largest_tokens` the server's chunk.
    """

    target_s: float
    smallest_tokens: int
    largest_tokens: int
    times: StepTimes = field(default_factory=StepTimes)

    def observe(self, step: Step, duration_s: float, launch_s: float = 0.0) -> None:
        """Learns from a step that prefilled; steps of decodes alone run other kernels."""
        if step.prefill_tokens > 0:
            self.times.observe(step, duration_s, launch_s)

    def chunk_tokens(
        self, prefix_tokens: int, decode_requests: int, decode_context_tokens: int
    ) -> int:
        """The most prompt tokens that a step with these decodes can take within the target.

        Without decodes there is nobody to keep waiting and the chunk is the largest. Where even
        launching a step misses the target, the chunk is what can be computed meanwhile; where
        computing the smallest does, making it that small would only add steps: the step may then
        take half as long again as with the smallest. A chunk is at most twice the largest that has
        been measured: the model is not trusted far from what it has seen.
        """
        if decode_requests == 0:
            return self.largest_tokens
        lowest = min(self.smallest_tokens, self.largest_tokens)
        if self.times.steps == 0:
            return min(self.largest_tokens, max(lowest, 4 * self.smallest_tokens))
        highest = min(
            self.largest_tokens, max(lowest, int(_GROWTH * self.times.largest_chunk_tokens))
        )
        budget_s = max(self.target_s / (1 + min(self.times.error, 0.5)), self.times.launch_s)

        def takes_s(tokens: int) -> float:
            step = Step(tokens, prefix_tokens, decode_requests, decode_context_tokens)
            return self.times.predict(step)

        if takes_s(lowest) > budget_s:
            budget_s = _LOST_TARGET * takes_s(lowest)

        def fits(tokens: int) -> bool:
            return takes_s(tokens) <= budget_s

        if fits(highest):
            return highest
        low, high = lowest, highest
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def prefill_s(self, prompts: Sequence[tuple[int, int]]) -> float:
        """Seconds to prefill `prompts`, each (new tokens, cached tokens), one chunk after another.

        0 before any step was seen. For judging a deadline, not for scheduling.
        """
        total_s = 0.0
        for new_tokens, prefix_tokens in prompts:
            done = 0
            while done < new_tokens:
                tokens = min(self.largest_tokens, new_tokens - done)
                total_s += self.times.predict(Step(tokens, prefix_tokens + done, 0, 0))
                done += tokens
        return total_s


def fit_to_pages(tokens: int, page_size: int, riding_decodes: int, largest_tokens: int) -> int:
    """A chunk whose prompt part is whole pages, in the form that SGLang wants it.

    SGLang takes the decodes that ride along off the chunk; a prompt cut within a page would leave
    the rest of that page to the next chunk. At least one page, at most `largest_tokens` rounded
    down to pages (but a page).
    """
    pages = max(1, min(tokens, largest_tokens) // page_size)
    return pages * page_size + riding_decodes
