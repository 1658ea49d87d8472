"""Who may take KV memory next: a prompt to prefill here, or one whose KV comes over the wire.

Owns the arithmetic by which the two sides leave room for each other. Knows nothing of SGLang;
all amounts are KV tokens unless named otherwise.

Three rules:

1. What has begun must be able to end. A prompt that has been prefilled in part keeps its remaining
   tokens reserved, and so does every transfer its room to decode.
2. Whoever came first goes first. The older of the two queue heads is kept room for, so that neither
   a stream of transfers nor a stream of local prompts can starve the other.
3. Requests that were thrown out of the batch for lack of memory come back before either.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Place:
    """A request's place in line: by priority (lower is first), then by arrival."""

    priority: int
    arrival: int


@dataclass(frozen=True)
class Waiting:
    """The request at the head of a queue and the KV tokens it needs to be let in."""

    place: Place
    tokens: int


def reserved_for_local(
    *, chunk_remaining: int, local_head: Waiting | None, transfer_head: Waiting | None
) -> int:
    """Tokens that a transfer must leave alone.

    `chunk_remaining` is what the prompt being prefilled still needs; the prompt at the head of the
    local queue is kept room for when it is ahead of the transfers.
    """
    reserved = chunk_remaining
    if local_head is not None and (transfer_head is None or local_head.place < transfer_head.place):
        reserved += local_head.tokens
    return reserved


def reserved_for_transfers(
    *,
    decode_reserve: int,
    transfers: int,
    retracted: int,
    local_head: Waiting | None,
    transfer_head: Waiting | None,
) -> int:
    """Tokens that a local prompt must leave alone.

    `transfers` requests have their KV allocated and will need `decode_reserve` each once they
    decode; `retracted` is what the thrown-out ones need to come back; `transfer_head` has shaken
    hands with its prefill worker and waits for memory.
    """
    reserved = decode_reserve * transfers + retracted
    if transfer_head is not None and (local_head is None or transfer_head.place < local_head.place):
        reserved += transfer_head.tokens
    return reserved


def chunk_that_fits(
    *, chunk: int, granule_tokens: int, page_size: int, decode_growth: int, available: int
) -> int:
    """The part of `chunk` for which there is memory, in whole granules; 0 where there is none.

    A granule is a page or several. `decode_growth` is what the running requests allocate in the
    same step. SGLang's allocator wants a page over for a prompt that starts within one.
    """
    room = available - decode_growth - page_size
    if chunk <= room:
        return chunk
    return max(0, room // granule_tokens * granule_tokens)


def slots_for_transferred(
    *, free: int, chunk_in_flight: bool, local_head: Place | None, transferred_head: Place | None
) -> int:
    """How many transferred requests may join the batch when `free` places are left in it.

    The prompt being prefilled will need one, and so does an older prompt that waits to be.
    """
    slots = free - int(chunk_in_flight)
    if local_head is not None and transferred_head is not None and local_head < transferred_head:
        slots -= 1
    return max(0, slots)
