"""The ways in which a reader gets pages out of an owner's pool: NIXL's, and by mapped memory.

Each says how long getting ready for these pages took (descriptors, indices: work that grows with
their number) and how long it was from then until all had arrived.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sglang_ext.kv_read.layout import Layout, Rows, page_addresses, rows_of

if TYPE_CHECKING:
    import torch

Pool = list["torch.Tensor"]
Seconds = tuple[float, float]
"""To get ready, and to read."""


class ReadError(Exception):
    """A transfer failed, or took too long."""


def synchronize(device: str) -> None:
    """Waits for what was put on a device's streams."""
    if device != "cpu":
        import torch

        torch.cuda.synchronize(device)


class NixlSide:
    """A NIXL agent that has a pool registered: the owner's, or the reader's."""

    def __init__(self, name: str, pool: Pool, threads: int) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        on_gpu = pool[0].is_cuda
        self.memory = "VRAM" if on_gpu else "DRAM"
        self.device = pool[0].get_device() if on_gpu else 0
        self.addresses = [tensor.data_ptr() for tensor in pool]
        self.agent: Any = nixl_agent(name, nixl_agent_config(backends=["UCX"], num_threads=threads))
        places = [(tensor.data_ptr(), tensor.nbytes, self.device, "") for tensor in pool]
        self._registered = self.agent.register_memory(places, self.memory)

    def offer(self) -> dict[str, Any]:
        """What a reader needs to know."""
        return {
            "metadata": self.agent.get_agent_metadata(),
            "addresses": self.addresses,
            "device": self.device,
        }


def _descriptors(
    addresses: Sequence[int], device: int, starts: Rows, layout: Layout, page_tokens: int
) -> Any:
    """A line for each page of each region, region by region: address, bytes, device."""
    lines = np.empty((len(addresses) * len(starts), 3), dtype=np.uint64)
    lines[:, 0] = page_addresses(addresses, starts, layout.row_bytes)
    lines[:, 1] = page_tokens * layout.row_bytes
    lines[:, 2] = device
    return lines


class Nixl:
    """Transfers by NIXL: their descriptors are made for each, or for all pages beforehand."""

    def __init__(
        self,
        side: NixlSide,
        offer: dict[str, Any],
        layout: Layout,
        *,
        operation: str,
        prepared: bool,
        limit_s: float,
    ) -> None:
        self._side, self._offer, self._layout = side, offer, layout
        self._operation, self._prepared, self._limit_s = operation, prepared, limit_s
        self._peer = side.agent.add_remote_agent(offer["metadata"])
        self._lists: dict[int, tuple[Any, Any]] = {}

    def read(self, out_of: Rows, into: Rows, page_tokens: int) -> Seconds:
        lists = self._lists_of(page_tokens) if self._prepared else None
        begun = time.perf_counter()
        if lists is None:
            handle = self._made_for_these(out_of, into, page_tokens)
        else:
            handle = self._chosen_from(lists, out_of, into, page_tokens)
        ready = time.perf_counter()
        agent = self._side.agent
        try:
            state = agent.transfer(handle)
            while state == "PROC":
                if time.perf_counter() - ready > self._limit_s:
                    raise ReadError(f"not there after {self._limit_s:.0f} s")
                state = agent.check_xfer_state(handle)
            done = time.perf_counter()
        finally:
            handle.release()
        if state != "DONE":
            raise ReadError(f"NIXL says {state}")
        return ready - begun, done - ready

    def _made_for_these(self, out_of: Rows, into: Rows, page_tokens: int) -> Any:
        side, offer = self._side, self._offer
        own = _descriptors(side.addresses, side.device, into, self._layout, page_tokens)
        other = _descriptors(offer["addresses"], offer["device"], out_of, self._layout, page_tokens)
        return side.agent.initialize_xfer(
            self._operation,
            side.agent.get_xfer_descs(own, side.memory),
            side.agent.get_xfer_descs(other, side.memory),
            self._peer,
            b"",
        )

    def _lists_of(self, page_tokens: int) -> tuple[Any, Any]:
        if page_tokens not in self._lists:
            side, offer, layout = self._side, self._offer, self._layout
            count = layout.pool_tokens // page_tokens
            every = np.arange(count, dtype=np.int64) * page_tokens
            own = _descriptors(side.addresses, side.device, every, layout, page_tokens)
            other = _descriptors(offer["addresses"], offer["device"], every, layout, page_tokens)
            self._lists[page_tokens] = (
                side.agent.prep_xfer_dlist("", own, side.memory),
                side.agent.prep_xfer_dlist(self._peer, other, side.memory),
            )
        return self._lists[page_tokens]

    def _chosen_from(
        self, lists: tuple[Any, Any], out_of: Rows, into: Rows, page_tokens: int
    ) -> Any:
        count = self._layout.pool_tokens // page_tokens
        firsts = np.arange(self._layout.regions, dtype=np.int64)[:, None] * count

        def indices(starts: Rows) -> Any:
            return (firsts + starts // page_tokens).reshape(-1).astype(np.int32)

        own, other = lists
        return self._side.agent.make_prepped_xfer(
            self._operation, own, indices(into), other, indices(out_of), b""
        )


def shared(pool: Pool) -> list[Any]:
    """What another process needs to map these tensors, each with the function that does."""
    import torch.multiprocessing.reductions

    return [torch.multiprocessing.reductions.reduce_tensor(tensor) for tensor in pool]


def mapped(offer: list[Any], onto: torch.device | None = None) -> Pool:
    """The owner's tensors, mapped here.

    Kernels reach them on the GPU by which they were mapped alone: that on which they are, unless
    another is named.
    """
    pool = []
    for rebuild, of in offer:
        if onto is not None and onto.type == "cuda":
            at = list(inspect.signature(rebuild).parameters).index("storage_device")
            of = (*of[:at], onto.index, *of[at + 1 :])
        pool.append(rebuild(*of))
    return pool


class MappedStaged:
    """Out of the owner's memory, mapped here (CUDA IPC), with torch alone.

    The owner's GPU gathers the rows of each region into one piece, which is copied over and put in
    its places: three copies of all bytes.
    """

    def __init__(self, offer: list[Any], own: Pool) -> None:
        self._theirs, self._own = mapped(offer), own

    def read(self, out_of: Rows, into: Rows, page_tokens: int) -> Seconds:
        import torch

        device, from_device = str(self._own[0].device), str(self._theirs[0].device)
        begun = time.perf_counter()
        rows = torch.from_numpy(rows_of(out_of, page_tokens)).to(from_device)
        places = torch.from_numpy(rows_of(into, page_tokens)).to(device)
        synchronize(device)
        synchronize(from_device)
        ready = time.perf_counter()
        for theirs, own in zip(self._theirs, self._own, strict=True):
            own.index_copy_(0, places, theirs.index_select(0, rows).to(device))
        synchronize(from_device)
        synchronize(device)
        return ready - begun, time.perf_counter() - ready


class MappedKernel:
    """Out of the owner's memory, mapped here (CUDA IPC), by one kernel on the reader's GPU.

    It copies all rows of all regions: one copy of all bytes, and the owner's GPU computes nothing.
    """

    def __init__(self, offer: list[Any], own: Pool) -> None:
        import torch

        from sglang_ext.kv_read.kernel import copy_rows

        self._copy: Callable[..., None] = copy_rows
        device = own[0].device
        self._theirs, self._own = mapped(offer, device), own

        def addresses(pool: Pool) -> torch.Tensor:
            return torch.tensor([tensor.data_ptr() for tensor in pool], device=device)

        self._from, self._to = addresses(self._theirs), addresses(own)

    def read(self, out_of: Rows, into: Rows, page_tokens: int) -> Seconds:
        import torch

        own = self._own[0]
        device = str(own.device)
        begun = time.perf_counter()
        rows = torch.from_numpy(rows_of(out_of, page_tokens)).to(device)
        places = torch.from_numpy(rows_of(into, page_tokens)).to(device)
        synchronize(device)
        ready = time.perf_counter()
        self._copy(self._from, self._to, rows, places, own.shape[1] * own.element_size())
        synchronize(device)
        return ready - begun, time.perf_counter() - ready
