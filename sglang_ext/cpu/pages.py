"""Pages of several tokens on a machine without a GPU.

SGLang gives out KV slots in pages by two Triton kernels, which need a GPU's driver; with pages of
one token it calls neither. Here the same slots are computed on the CPU: a request first fills what
its last page has left, then takes pages from the front of the free ones, in the batch's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_ext.guards import Hook


def _extend(
    allocator: Any,
    prefix_lens: Any,
    prefix_lens_cpu: Any,
    seq_lens: Any,
    seq_lens_cpu: Any,
    last_loc: Any,
    extend_num_tokens: int,
    num_new_pages: int | None = None,
) -> Any:
    """The slots of each request's tokens from ``prefix_lens`` to ``seq_lens``, a 1-D tensor.

    ``last_loc`` is the slot of each request's last token so far, -1 where it has none. None where
    there are not enough free pages; none is taken then.
    """
    spans = zip(prefix_lens.tolist(), seq_lens.tolist(), last_loc.tolist(), strict=True)
    return _take(allocator, list(spans))


def _decode(allocator: Any, seq_lens: Any, seq_lens_cpu: Any, last_loc: Any) -> Any:
    """The slot of each request's next token, which `seq_lens` counts already; None without room."""
    ends = zip(seq_lens.tolist(), last_loc.tolist(), strict=True)
    return _take(allocator, [(end - 1, end, last) for end, last in ends])


def _take(allocator: Any, spans: Sequence[tuple[int, int, int]]) -> Any:
    """Takes the pages that `slots` needs from SGLang's allocator."""
    pages = pages_of(spans, allocator.page_size)
    if allocator.need_sort and pages > len(allocator.free_pages):
        allocator.merge_and_sort_free()
    if pages > len(allocator.free_pages):
        return None
    free = allocator.free_pages
    allocator.free_pages = free[pages:]
    return free.new_tensor(slots(spans, free[:pages].tolist(), allocator.page_size))


def pages_of(spans: Sequence[tuple[int, int, int]], page_size: int) -> int:
    """How many pages of `page_size` tokens `spans`, as in `slots`, need that they do not have."""
    return sum(-(-end // page_size) - -(-first // page_size) for first, end, _ in spans)


def slots(spans: Sequence[tuple[int, int, int]], free: Sequence[int], page_size: int) -> list[int]:
    """The slots of the tokens of each span, one span after another.

    A span is a request's first token, the one after its last, and the slot of the token before the
    first. `free` are the pages that they take, as many as `pages_of` says.
    """
    found: list[int] = []
    pages = iter(free)
    for first, end, before in spans:
        page_end = min(end, -(-first // page_size) * page_size)
        found += range(before + 1, before + 1 + page_end - first)
        for start in range(page_end, end, page_size):
            slot = next(pages) * page_size
            found += range(slot, slot + min(page_size, end - start))
    return found


HOOKS = (Hook("pages.extend", "replace", _extend), Hook("pages.decode", "replace", _decode))
