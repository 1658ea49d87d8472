"""The ways that go by Mooncake's transfer engine: it reads pages, or writes them, to compare.

Over a host's NVLink (`MC_INTRANODE_NVLINK`) the engine opens a CUDA IPC handle of every allocation
that the other side registered, and has the CUDA driver copy all pages of a transfer in one batch.
"""

from __future__ import annotations

import math
import os
import time
from typing import Any

from sglang_ext.kv_read.layout import Layout, Rows, page_addresses
from sglang_ext.kv_read.ways import Pool, ReadError, Seconds, synchronize

_HOST = "127.0.0.1"


class MooncakeSide:
    """A transfer engine that has a pool registered: the owner's, or the reader's."""

    def __init__(self, pool: Pool, limit_s: float) -> None:
        # A call gives up after this long (5 s at least) and a second for each GB.
        os.environ.setdefault("MC_TRANSFER_TIMEOUT", str(math.ceil(limit_s)))
        from mooncake.engine import TransferEngine

        self.device = str(pool[0].device)
        self.addresses = [tensor.data_ptr() for tensor in pool]
        self.engine: Any = TransferEngine()
        # As SGLang starts it. On a GPU the environment has the last word on the transport.
        protocol = "rdma" if pool[0].is_cuda else "tcp"
        if self.engine.initialize(_HOST, "P2PHANDSHAKE", protocol, ""):
            raise ReadError("Mooncake's transfer engine does not start; its log says why")
        for number, tensor in enumerate(pool):
            # One by one: over NVLink the call for many does not say when one of them failed.
            if code := self.engine.register_memory(tensor.data_ptr(), tensor.nbytes):
                raise ReadError(f"Mooncake does not register tensor {number}: {code}")

    def offer(self) -> dict[str, Any]:
        """What a reader needs to know."""
        return {
            "session": f"{_HOST}:{self.engine.get_rpc_port()}",
            "addresses": self.addresses,
        }


class Mooncake:
    """Transfers by Mooncake, all pages of all tensors in one call.

    Its Python interface takes lists of numbers, which are made for each transfer.
    """

    def __init__(
        self,
        side: MooncakeSide,
        offer: dict[str, Any],
        layout: Layout,
        *,
        writes: bool,
        limit_s: float,
    ) -> None:
        self._side, self._offer, self._layout, self._limit_s = side, offer, layout, limit_s
        engine = side.engine
        self._move = engine.batch_transfer_sync_write if writes else engine.batch_transfer_sync_read

    def read(self, out_of: Rows, into: Rows, page_tokens: int) -> Seconds:
        row_bytes = self._layout.row_bytes
        begun = time.perf_counter()
        own = page_addresses(self._side.addresses, into, row_bytes).tolist()
        other = page_addresses(self._offer["addresses"], out_of, row_bytes).tolist()
        lengths = [page_tokens * row_bytes] * len(own)
        ready = time.perf_counter()
        code = self._move(self._offer["session"], own, other, lengths)
        read_s = time.perf_counter() - ready
        if code:
            # What is still under way must not arrive in a transfer that comes later.
            synchronize(self._side.device)
            raise ReadError(f"Mooncake says {code} after {read_s:.1f} s")
        if read_s > self._limit_s:
            raise ReadError(f"took {read_s:.1f} s, longer than {self._limit_s:.0f} s")
        return ready - begun, read_s
