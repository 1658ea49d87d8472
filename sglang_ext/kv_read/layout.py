"""The KV pool that is read: its tensors, what is in them, and which pages of it are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Rows = NDArray[np.int64]
"""Positions of tokens in a pool."""

_VALUES = 32_749
"""Contents are numbers below this prime, so that neighbours in no direction are alike."""


@dataclass(frozen=True)
class Layout:
    """A pool of `pool_tokens` tokens, each with `row_bytes` bytes in every one of its tensors."""

    regions: int
    row_bytes: int
    pool_tokens: int

    def token_bytes(self) -> int:
        """What a token's KV takes, in bytes."""
        return self.regions * self.row_bytes


def allocate(layout: Layout, device: str) -> list[torch.Tensor]:
    """The pool's tensors, `[pool_tokens, row_bytes / 2]` of int16 each, all zero."""
    import torch

    shape = (layout.pool_tokens, layout.row_bytes // 2)
    return [torch.zeros(shape, dtype=torch.int16, device=device) for _ in range(layout.regions)]


def contents(rows: Rows, region: int) -> NDArray[np.int16]:
    """What the owner writes to these rows of a region: one number a row."""
    return ((rows * 31 + region * 977 + 1) % _VALUES).astype(np.int16)


def fill(pool: list[torch.Tensor]) -> None:
    """Writes every row's contents."""
    import torch

    rows = np.arange(len(pool[0]), dtype=np.int64)
    for region, tensor in enumerate(pool):
        values = torch.from_numpy(contents(rows, region)).to(tensor.device)
        tensor.copy_(values[:, None].expand_as(tensor))


def pages(layout: Layout, tokens: int, page_tokens: int, seed: int) -> Rows:
    """Where tokens lie in a pool that has been in use for a while: their pages' first rows, in no
    order."""
    count = layout.pool_tokens // page_tokens
    chosen = np.random.default_rng(seed).permutation(count)[: tokens // page_tokens]
    return chosen.astype(np.int64) * page_tokens


def page_addresses(tensors: Sequence[int], starts: Rows, row_bytes: int) -> NDArray[np.uint64]:
    """Where these pages begin in tensors at these addresses, tensor by tensor."""
    offsets = (starts * row_bytes).astype(np.uint64)
    return (np.asarray(tensors, dtype=np.uint64)[:, None] + offsets[None, :]).reshape(-1)


def rows_of(starts: Rows, page_tokens: int) -> Rows:
    """All rows of these pages, page by page."""
    return (starts[:, None] + np.arange(page_tokens)).reshape(-1)


def is_right(pool: list[torch.Tensor], into: Rows, out_of: Rows) -> bool:
    """Whether the rows `into` hold what the owner's rows `out_of` do, in every region."""
    import torch

    for region, tensor in enumerate(pool):
        expected = torch.from_numpy(contents(out_of, region)).to(tensor.device)
        found = tensor[torch.from_numpy(into).to(tensor.device)]
        if not bool((found == expected[:, None]).all()):
            return False
    return True
