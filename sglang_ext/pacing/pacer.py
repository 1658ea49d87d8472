"""How many prompt tokens may join a step, so that the requests decoding in it keep their pace.

Owns the size of the next chunk, chosen by the model in `step_times`. Knows nothing of SGLang.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
        self,
        prompts: Sequence[tuple[int, int]],
        decode_requests: int,
        decode_context_tokens: int,
    ) -> int:
        """The most prompt tokens that a step with these decodes can take within the target.

        `prompts` are in line, each (new tokens, cached tokens before them); a step takes of them in
        order. Without decodes there is nobody to keep waiting and the chunk is the largest. Where
        even launching a step misses the target, the chunk is what can be computed meanwhile. Where
        computing the smallest chunk does, making it that small would only add steps: the step may
        then take half as long again as with the smallest. Between four fifths of the target and
        the whole, the one rule passes into the other: else a few percent would decide between
        chunks of hundreds and of thousands. A chunk is at most twice the largest that has been
        measured: the model is not trusted far from what it has seen.
        """
        if decode_requests == 0:
            return self.largest_tokens
        lowest = min(self.smallest_tokens, self.largest_tokens)
        if self.times.steps == 0:
            return min(self.largest_tokens, max(lowest, 4 * self.smallest_tokens))
        highest = min(
            self.largest_tokens, max(lowest, int(_GROWTH * self.times.largest_chunk_tokens))
        )

        def step(tokens: int) -> Step:
            return Step.of(_first(tokens, prompts), decode_requests, decode_context_tokens)

        target_s = max(self.target_s / (1 + min(self.times.error, 0.5)), self.times.launch_s)
        smallest_s = self.times.computing_s(step(lowest))
        # Its share of the target times half as long again is the target at 0.82 of it.
        budget_s = max(target_s, _LOST_TARGET * smallest_s * min(1.0, smallest_s / target_s))

        def fits(tokens: int) -> bool:
            return self.times.predict(step(tokens)) <= budget_s

        if fits(highest):
            return highest
        low, high = lowest, highest
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def prefill_s(
        self,
        prompts: Sequence[tuple[int, int]],
        decode_requests: int = 0,
        decode_context_tokens: int = 0,
    ) -> float:
        """Seconds to prefill `prompts`, each (new tokens, cached tokens), one after another.

        0 before any step was seen. For judging a deadline, not for scheduling: beside decodes all
        chunks of a prompt are taken to be as large as the one in its middle.
        """
        total_s = 0.0
        for new_tokens, prefix_tokens in prompts:
            if decode_requests:
                middle = prefix_tokens + new_tokens // 2
                chunk = self.chunk_tokens(
                    [(new_tokens, middle)], decode_requests, decode_context_tokens
                )
                tokens = min(chunk, new_tokens)
                step = Step(tokens, middle, decode_requests, decode_context_tokens)
                total_s += new_tokens / tokens * self.times.predict(step)
                continue
            done = 0
            while done < new_tokens:
                tokens = min(self.largest_tokens, new_tokens - done)
                total_s += self.times.predict(Step(tokens, prefix_tokens + done, 0, 0))
                done += tokens
        return total_s


def _first(tokens: int, prompts: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The parts of `prompts` that the first `tokens` of them make."""
    for new_tokens, cached_tokens in prompts:
        if tokens <= 0:
            return
        yield min(tokens, new_tokens), cached_tokens
        tokens -= new_tokens


def fit_to_pages(tokens: int, page_size: int, riding_decodes: int, largest_tokens: int) -> int:
    """A chunk whose prompt part is whole pages, in the form that SGLang wants it.

    SGLang takes the decodes that ride along off the chunk; a prompt cut within a page would leave
    the rest of that page to the next chunk. At least one page, at most `largest_tokens` rounded
    down to pages (but a page).
    """
    pages = max(1, min(tokens, largest_tokens) // page_size)
    return pages * page_size + riding_decodes
