"""Prompts' lengths whose prefill meets every kernel that SGLang compiles at first use.

Its mixture-of-experts kernels are compiled by Triton for ranges of tokens a step, and for numbers
of tokens that 16 divides apart from others, each at the first such step: about a second each on an
H200 whose cache on disk is empty, in the middle of serving.
"""

from __future__ import annotations

_RANGES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
"""Tokens a step, as SGLang's tuned configurations of these kernels name them
(`E=128,N=768,device_name=NVIDIA_H200.json` of 0.5.23)."""


def step_sizes(chunk_tokens: int | None) -> tuple[int, ...]:
    """Lengths in tokens for steps up to `chunk_tokens`; up to the last range where it is None."""
    largest = chunk_tokens or max(_RANGES)
    sizes = {*_RANGES, *(tokens + 3 for tokens in _RANGES), largest}
    return tuple(sorted(tokens for tokens in sizes if tokens <= largest))
