"""Slots in pages of several tokens on a CPU: each request's are its own, and in its pages."""

from __future__ import annotations

from typing import Any

from sglang_ext.cpu import pages

PAGE = 4


class Numbers(list[int]):
    """As much of a tensor of numbers as is used of one."""

    def tolist(self) -> list[int]:
        return list(self)

    def __getitem__(self, key: Any) -> Any:
        return Numbers(super().__getitem__(key))

    def new_tensor(self, of: list[int]) -> Numbers:
        return Numbers(of)


class Allocator:
    """SGLang's allocator of pages: which are free, and which wait to be sorted in."""

    def __init__(self, *free: int, released: tuple[int, ...] = ()) -> None:
        self.page_size = PAGE
        self.free_pages = Numbers(free)
        self.need_sort = bool(released)
        self._released = released

    def merge_and_sort_free(self) -> None:
        self.free_pages = Numbers(sorted([*self.free_pages, *self._released]))


def extend(allocator: Allocator, *requests: tuple[int, int, int]) -> list[int] | None:
    """What is given out for requests of (tokens in place, tokens wanted, slot of the last one)."""
    prefix, end, last = (Numbers(column) for column in zip(*requests, strict=True))
    wanted = sum(end) - sum(prefix)
    given = pages._extend(
        allocator,
        prefix_lens=prefix,
        prefix_lens_cpu=prefix,
        seq_lens=end,
        seq_lens_cpu=end,
        last_loc=last,
        extend_num_tokens=wanted,
    )
    assert given is None or len(given) == wanted
    return given


def test_a_new_request_takes_pages_from_the_front_and_the_last_only_in_part() -> None:
    allocator = Allocator(5, 3, 9)
    assert extend(allocator, (0, 6, -1)) == [20, 21, 22, 23, 12, 13]
    assert allocator.free_pages == [9]


def test_a_request_fills_its_last_page_before_it_takes_others() -> None:
    allocator = Allocator(7, 1)
    assert extend(allocator, (6, 11, 13)) == [14, 15, 28, 29, 30]
    assert extend(allocator, (6, 8, 41)) == [42, 43]
    assert allocator.free_pages == [1]


def test_a_batch_is_served_in_its_order() -> None:
    allocator = Allocator(2, 4, 6, 8)
    given = extend(allocator, (0, 4, -1), (5, 9, 100), (8, 10, 67))
    assert given == [8, 9, 10, 11, 101, 102, 103, 16, 24, 25]
    assert allocator.free_pages == [8]


def test_without_enough_free_pages_none_is_taken() -> None:
    allocator = Allocator(2)
    assert extend(allocator, (0, 5, -1)) is None
    assert allocator.free_pages == [2]


def test_pages_that_wait_to_be_sorted_in_are_free() -> None:
    assert extend(Allocator(2, released=(1,)), (0, 5, -1)) == [4, 5, 6, 7, 8]


def test_a_decoded_token_takes_the_next_slot_or_begins_a_page() -> None:
    allocator = Allocator(3, 5)
    ends, last = Numbers([7, 5]), Numbers([41, 11])
    assert pages._decode(allocator, seq_lens=ends, seq_lens_cpu=ends, last_loc=last) == [42, 12]
    assert allocator.free_pages == [5]
