"""A Triton kernel that copies rows between pools of many tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]

if TYPE_CHECKING:
    import torch

_ROWS_A_PROGRAM = 16


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _copy(  # type: ignore[no-untyped-def]
    from_ptr,
    to_ptr,
    rows_ptr,
    places_ptr,
    count,
    words: tl.constexpr,
    words_padded: tl.constexpr,
    rows_a_program: tl.constexpr,
):
    region = tl.program_id(1)
    source = tl.load(from_ptr + region).to(tl.pointer_type(tl.int64))
    target = tl.load(to_ptr + region).to(tl.pointer_type(tl.int64))
    at = tl.program_id(0) * rows_a_program + tl.arange(0, rows_a_program)
    rows = tl.load(rows_ptr + at, mask=at < count, other=0)
    places = tl.load(places_ptr + at, mask=at < count, other=0)
    word = tl.arange(0, words_padded)
    mask = (at < count)[:, None] & (word < words)[None, :]
    values = tl.load(source + rows[:, None] * words + word[None, :], mask=mask)
    tl.store(target + places[:, None] * words + word[None, :], values, mask=mask)


def copy_rows(
    sources: torch.Tensor,
    targets: torch.Tensor,
    rows: torch.Tensor,
    places: torch.Tensor,
    row_bytes: int,
) -> None:
    """Copies row `rows[i]` of every source tensor to row `places[i]` of its target tensor.

    `sources` and `targets` hold the tensors' addresses (int64); rows are of `row_bytes` bytes, a
    multiple of 8.
    """
    words = row_bytes // 8
    grid = (triton.cdiv(len(rows), _ROWS_A_PROGRAM), len(sources))
    _copy[grid](
        sources,
        targets,
        rows,
        places,
        len(rows),
        words=words,
        words_padded=triton.next_power_of_2(words),
        rows_a_program=_ROWS_A_PROGRAM,
    )
