"""What Mooncake's engine is told, and what becomes of what it answers; the engine is a stand-in."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from sglang_ext.kv_read.layout import Layout
from sglang_ext.kv_read.mooncake import Mooncake, MooncakeSide
from sglang_ext.kv_read.ways import ReadError

LAYOUT = Layout(regions=2, row_bytes=64, pool_tokens=100)
OFFER = {"session": "127.0.0.1:7000", "addresses": [50_000, 90_000]}


class Tensor:
    is_cuda = False
    device = "cpu"
    nbytes = 6_400

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


class Engine:
    """Answers 0, or what `answers` says."""

    def __init__(self) -> None:
        self.answers: dict[str, int] = {}
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append((name, *arguments))
            return self.answers.get(name, 0)

        return call


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine, module = Engine(), ModuleType("mooncake.engine")
    module.TransferEngine = lambda: engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mooncake", ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.engine", module)
    monkeypatch.setattr(os, "environ", {})
    return engine


def side_of(limit_s: float = 20.0) -> MooncakeSide:
    pool: Any = [Tensor(10_000), Tensor(20_000)]
    return MooncakeSide(pool, limit_s)


def read(side: MooncakeSide, *, writes: bool = False, limit_s: float = 20.0) -> None:
    way = Mooncake(side, OFFER, LAYOUT, writes=writes, limit_s=limit_s)
    ready_s, read_s = way.read(out_of=np.array([16, 0]), into=np.array([0, 32]), page_tokens=16)
    assert ready_s > 0
    assert read_s > 0


def test_every_tensor_is_registered(engine: Engine) -> None:
    engine.answers["get_rpc_port"] = 7001
    side = side_of(limit_s=12.5)
    assert engine.calls == [
        ("initialize", "127.0.0.1", "P2PHANDSHAKE", "tcp", ""),
        ("register_memory", 10_000, 6_400),
        ("register_memory", 20_000, 6_400),
    ]
    assert side.offer() == {"session": "127.0.0.1:7001", "addresses": [10_000, 20_000]}
    assert os.environ["MC_TRANSFER_TIMEOUT"] == "13"


@pytest.mark.parametrize("writes", [False, True])
def test_a_page_has_an_address_on_each_side_in_every_tensor(engine: Engine, writes: bool) -> None:
    read(side_of(), writes=writes)
    assert engine.calls[-1] == (
        "batch_transfer_sync_write" if writes else "batch_transfer_sync_read",
        "127.0.0.1:7000",
        [10_000, 12_048, 20_000, 22_048],
        [51_024, 50_000, 91_024, 90_000],
        [1_024] * 4,
    )


def test_an_engine_that_does_not_start_or_register_is_told(engine: Engine) -> None:
    engine.answers["register_memory"] = -202
    with pytest.raises(ReadError, match="does not register tensor 0: -202"):
        side_of()
    engine.answers["initialize"] = -1
    with pytest.raises(ReadError, match="does not start"):
        side_of()


def test_a_transfer_that_fails_or_is_late_is_told(engine: Engine) -> None:
    with pytest.raises(ReadError, match=r"took 0\.0 s, longer than 0 s"):
        read(side_of(), limit_s=0.0)
    engine.answers["batch_transfer_sync_read"] = -1
    with pytest.raises(ReadError, match=r"Mooncake says -1 after 0\.0 s"):
        read(side_of())
