"""Transfers and local prompts leave each other room, and neither can starve the other."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.elastic.admission import (
    Place,
    Waiting,
    chunk_that_fits,
    reserved_for_local,
    reserved_for_transfers,
    slots_for_transferred,
)

heads = st.none() | st.builds(
    Waiting,
    st.builds(Place, st.integers(-2, 2), st.integers(0, 50)),
    st.integers(1, 10_000),
)


def test_a_prompt_in_progress_keeps_what_it_still_needs() -> None:
    assert reserved_for_local(chunk_remaining=700, local_head=None, transfer_head=None) == 700


def test_the_older_of_the_two_heads_is_kept_room_for() -> None:
    older, newer = Waiting(Place(0, 1), 300), Waiting(Place(0, 2), 500)
    assert reserved_for_local(chunk_remaining=0, local_head=older, transfer_head=newer) == 300
    assert reserved_for_local(chunk_remaining=0, local_head=newer, transfer_head=older) == 0
    none = {"decode_reserve": 0, "transfers": 0, "retracted": 0}
    assert reserved_for_transfers(**none, local_head=newer, transfer_head=older) == 300
    assert reserved_for_transfers(**none, local_head=older, transfer_head=newer) == 0


def test_priority_goes_before_age() -> None:
    urgent, old = Waiting(Place(-1, 9), 300), Waiting(Place(0, 1), 500)
    assert reserved_for_local(chunk_remaining=0, local_head=urgent, transfer_head=old) == 300


def test_requests_under_way_keep_room_to_decode_and_the_retracted_to_come_back() -> None:
    assert (
        reserved_for_transfers(
            decode_reserve=512, transfers=3, retracted=1000, local_head=None, transfer_head=None
        )
        == 2536
    )


@given(local=heads, transfer=heads)
def test_never_are_both_heads_held_back_for_each_other(
    local: Waiting | None, transfer: Waiting | None
) -> None:
    if local is not None and transfer is not None and local.place == transfer.place:
        return
    from_transfers = reserved_for_local(chunk_remaining=0, local_head=local, transfer_head=transfer)
    from_local = reserved_for_transfers(
        decode_reserve=0, transfers=0, retracted=0, local_head=local, transfer_head=transfer
    )
    if local is not None and transfer is not None:
        assert (from_transfers == 0) != (from_local == 0)


@given(
    total=st.integers(64, 4096),
    requests=st.lists(st.tuples(st.booleans(), st.integers(1, 64)), min_size=1, max_size=60),
)
def test_everybody_gets_in_whatever_the_mix(total: int, requests: list[tuple[bool, int]]) -> None:
    """A pool of `total` tokens, requests that hold theirs for a while and leave in order."""
    queues: dict[bool, deque[Waiting]] = {True: deque(), False: deque()}
    for arrival, (local, tokens) in enumerate(requests):
        queues[local].append(Waiting(Place(0, arrival), min(tokens, total)))
    running: deque[Waiting] = deque()
    served: list[int] = []
    for _ in range(3 * len(requests)):
        for local in (False, True):
            head = queues[local][0] if queues[local] else None
            other = queues[not local][0] if queues[not local] else None
            free = total - sum(request.tokens for request in running)
            if local:
                free -= reserved_for_transfers(
                    decode_reserve=0, transfers=0, retracted=0, local_head=head, transfer_head=other
                )
            else:
                free -= reserved_for_local(chunk_remaining=0, local_head=other, transfer_head=head)
            if head is not None and head.tokens <= free:
                running.append(queues[local].popleft())
        if running:
            served.append(running.popleft().place.arrival)
    assert sorted(served) == list(range(len(requests)))


@given(
    chunk=st.integers(1, 8192),
    page_size=st.sampled_from([1, 16, 64]),
    pages=st.sampled_from([1, 4, 64]),
    growth=st.integers(0, 2048),
    available=st.integers(0, 16_384),
)
def test_a_chunk_never_takes_what_the_decodes_need(
    chunk: int, page_size: int, pages: int, growth: int, available: int
) -> None:
    fitting = chunk_that_fits(
        chunk=chunk,
        granule_tokens=pages * page_size,
        page_size=page_size,
        decode_growth=growth,
        available=available,
    )
    assert 0 <= fitting <= chunk
    assert fitting == 0 or fitting + growth + page_size <= available
    assert fitting in (0, chunk) or fitting % (pages * page_size) == 0


def test_the_prompt_in_progress_and_an_older_one_keep_their_places_in_the_batch() -> None:
    old, new = Place(0, 1), Place(0, 2)
    assert (
        slots_for_transferred(free=4, chunk_in_flight=True, local_head=old, transferred_head=new)
        == 2
    )
    assert (
        slots_for_transferred(free=4, chunk_in_flight=False, local_head=new, transferred_head=old)
        == 4
    )
    assert (
        slots_for_transferred(free=0, chunk_in_flight=True, local_head=old, transferred_head=new)
        == 0
    )
