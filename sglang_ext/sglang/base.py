"""What the plugin needs to know of a release of SGLang: one adapter says it for each.

An adapter owns two things. `Release.targets` says where each hook goes and which parameters are
expected there. The verbs are how plugin code touches state of SGLang that releases keep in
different places. Outside of this folder nothing asks for a version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Target:
    """Where a hook goes: the dotted path of a function or method, and its parameters.

    `signature` is in the form of `guards.parameters_of`.
    """

    path: str
    signature: str


@dataclass(frozen=True)
class Parallel:
    """How many processes share one worker's scheduling, by kind of parallelism."""

    attention_tensor: int
    attention_context: int
    pipeline: int


class ElasticVerbs(Protocol):
    """The verbs of the elastic worker: how a decode worker keeps and gives back KV."""

    def has_radix_cache(self, scheduler: Any) -> bool:
        """Whether the decode worker of `scheduler` keeps a radix cache."""
        ...

    def unsupported(self, scheduler: Any) -> Mapping[str, bool]:
        """What an elastic worker cannot do in this release → whether `scheduler` was asked to.

        Beside what it can do in none, which `elastic.worker` has.
        """
        ...

    def enter_line(self, scheduler: Any, req: Any) -> None:
        """Notes what SGLang notes of a request that begins to wait for its prefill."""
        ...

    def turn_away(self, scheduler: Any, req: Any) -> None:
        """Drops what SGLang holds for `req`, which was refused and has been answered."""
        ...

    def end_in_line(self, scheduler: Any, req: Any, abort: Any) -> None:
        """Answers `req`, which waited and owns no KV, as `abort` (an ``AbortReq``) says."""
        ...

    def release_kv(self, tree_cache: Any, req: Any) -> None:
        """Frees the pages, the slot and the lock of `req`; nothing of it goes into the cache."""
        ...

    def take_kv(self, req: Any) -> Any:
        """Takes from `req` all KV that it owns, and gives a stand-in that owns it instead.

        `release_kv` takes the stand-in. `req` may be used again, as one that never had any.
        """
        ...

    def keep_until_acknowledged(
        self, queue: Any, entry: Any, stand_in: Any, *, longest_s: float | None
    ) -> bool:
        """Has SGLang keep the KV of `stand_in` until the prefill worker writes to it no more.

        `entry` is what failed in the transfer `queue`, with its receiver; its metadata buffer is
        kept too. Without the prefill worker's word SGLang waits for `longest_s` seconds, None for
        as long as it would by itself. False where SGLang does not ask the prefill worker: nothing
        is kept then.
        """
        ...

    def awaiting_acknowledgement(self, queue: Any) -> int:
        """How many failed transfers are kept so."""
        ...

    def release_acknowledged(self, queue: Any) -> None:
        """Releases those that the prefill worker has acknowledged, or that took too long."""
        ...

    def start_over(self, req: Any) -> None:
        """Makes `req`, which owns no KV, one that was never scheduled, as far as SGLang knows."""
        ...

    def put_back(self, scheduler: Any, req: Any) -> None:
        """Frees what a half-prefilled `req` owns; its KV stays, as evictable cache."""
        ...

    def allocated_tokens(self, req: Any) -> int | None:
        """KV tokens that `req` owns pages for; None where it owns none."""
        ...

    def tokens_to_come_back(self, preallocation: Any, req: Any) -> int:
        """KV tokens that a retracted `req` needs to come back."""
        ...

    def is_in_host_memory(self, req: Any) -> bool:
        """Whether the KV of `req` was copied to host memory when it was thrown out."""
        ...

    def forget_host_copy(self, req: Any) -> None:
        """Drops that copy."""
        ...

    def kept_from_adder(self, adder: Any) -> int:
        """Tokens of the KV pool that `adder` leaves alone."""
        ...


class Release(Protocol):
    """One adapter: SGLang as of `versions`."""

    versions: tuple[str, ...]
    """The releases of SGLang that were run with it."""

    targets: Mapping[str, Target]
    """Name of a hook's point → where it is."""

    elastic: ElasticVerbs
    """The elastic worker's verbs."""

    def parallel(self, scheduler: Any) -> Parallel:
        """How `scheduler`'s worker is spread over processes."""
        ...

    def device(self, scheduler: Any) -> str:
        """What the worker computes on: ``cpu``, ``cuda``, …"""
        ...

    def attention_backends(self, scheduler: Any) -> tuple[str, ...]:
        """The attention backends of prefill and decode."""
        ...

    def prefill_graph_tokens(self, scheduler: Any) -> int | None:
        """Most tokens of a prefill step that a CUDA graph was captured for; None without graphs."""
        ...

    def can_ride(self, running_batch: Any) -> bool:
        """Whether SGLang mixes the requests of `running_batch` into a prefill at all.

        Beside that, logprobs and embeddings keep it from it.
        """
        ...

    def prefix_tokens(self, req: Any) -> int:
        """Tokens of `req` that are in place before its next chunk."""
        ...

    def extend_tokens(self, req: Any) -> int:
        """Tokens of the chunk of `req` that was added last."""
        ...

    def look_up_cached_tokens(self, tree_cache: Any, req: Any) -> int:
        """How much of `req` the radix cache holds, in the KV pool or in its host tier.

        Leaves `req` as it is: it may stand elsewhere in the tree, with a lock there.
        """
        ...

    def let_nixl_progress(self, manager: Any) -> None:
        """Has the NIXL of `manager`, a decode worker's, work on what comes in; nothing is lost."""
        ...

    def keep_from_adder(self, adder: Any, tokens: int) -> None:
        """Has `adder`, which forms a prefill batch, leave `tokens` more of the KV pool alone."""
        ...
