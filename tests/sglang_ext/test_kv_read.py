"""Which pages of a pool are read, what is in them, and the table that is made of the samples."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang_ext.kv_read import __main__ as command_line
from sglang_ext.kv_read.layout import Layout, contents, page_addresses, pages, rows_of
from sglang_ext.kv_read.run import MAPPED_WAYS, Plan, table
from sglang_ext.kv_read.ways import mapped

LAYOUT = Layout(regions=4, row_bytes=64, pool_tokens=1_000)


@pytest.mark.parametrize("page_tokens", [1, 16, 64])
def test_pages_lie_apart_and_within_the_pool(page_tokens: int) -> None:
    starts = pages(LAYOUT, 640, page_tokens, seed=3)
    rows = rows_of(starts, page_tokens)
    assert len(rows) == len(set(rows.tolist())) == 640 // page_tokens * page_tokens
    assert rows.min() >= 0
    assert rows.max() < LAYOUT.pool_tokens
    assert np.any(np.diff(starts) != page_tokens)
    assert LAYOUT.token_bytes() == 256


def test_addresses_of_pages_go_tensor_by_tensor() -> None:
    addresses = page_addresses([1_000_000, 5_000_000], np.array([48, 0]), LAYOUT.row_bytes)
    assert addresses.tolist() == [1_003_072, 1_000_000, 5_003_072, 5_000_000]


def test_neighbours_hold_different_contents() -> None:
    rows = np.arange(LAYOUT.pool_tokens)
    held = np.stack([contents(rows, region) for region in range(LAYOUT.regions)])
    assert (held > 0).all()
    assert (np.diff(held, axis=0) != 0).all()
    assert (np.diff(held, axis=1) != 0).all()


def sample(**fields: Any) -> dict[str, Any]:
    of = {"way": "nixl", "settings": {"A": "1"}, "page_tokens": 64, "tokens": 2_000}
    return {**of, "warm_up": False, "bytes": 10**9, "ready_s": 0.1, "read_s": 0.1, **fields}


def test_the_table_leaves_warm_ups_out_and_names_what_failed() -> None:
    lines = table(
        [
            sample(warm_up=True, read_s=50.0, right=True),
            sample(right=True),
            sample(read_s=0.2, right=True),
            sample(read_s=0.05, right=True),
            sample(way="nixl-write"),
            sample(way="mapped-staged", right=True),
            sample(way="mapped-staged", right=False),
            {"way": "nixl-prepared", "page_tokens": 1, "error": "ReadError: not there after 20 s"},
        ]
    )
    assert "| nixl | A=1 | 64 | 2000 | 10.00 [5.00–20.00] | 5.00 | 100.0 | yes |" in lines
    assert "| nixl-prepared |  | 1 | | ReadError: not there after 20 s | | | |" in lines
    (written,) = [line for line in lines if line.startswith("| nixl-write |")]
    assert written.endswith("| not checked |")
    (wrong,) = [line for line in lines if line.startswith("| mapped-staged |")]
    assert wrong.endswith("| NO |")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ways", "carrier-pigeon"], "carrier-pigeon: one of nixl, "),
        (["--nixl-env", "UCX_TLS"], "UCX_TLS: expected NAME=VALUE"),
        (["--mooncake-env", "=1"], "=1: expected NAME=VALUE"),
        (["--tokens", "0"], "0: numbers of 1 or more"),
        (["--tokens", "90000"], "--pool-tokens 80000: fewer than the 90000 to be read"),
        (["--tokens", "32"], "--tokens: a page at least"),
        (["--gpus", "1"], "1: two GPUs' numbers, as 0,1"),
        (["--row-bytes", "12"], "--row-bytes: a multiple of 8"),
    ],
)
def test_a_wrong_argument_is_told_by_its_name(
    arguments: list[str], words: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "sglang_ext.kv_read", "--output", str(tmp_path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert words in done.stderr


def planned(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> list[Plan]:
    plans: list[Plan] = []

    def measure(plan: Plan) -> list[dict[str, Any]]:
        plans.append(plan)
        return []

    monkeypatch.setattr(command_line, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["kv_read", "--output", str(folder), *arguments])
    assert command_line.main() == 1, "nothing was measured"
    return plans


def test_each_library_has_a_pair_for_each_of_its_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = ("--nixl-env", "", "--nixl-env", "A=1 B=2", "--mooncake-env", "C=3")
    plans = planned(monkeypatch, tmp_path, *settings)
    nixl, mooncake = ("nixl", "nixl-prepared", "nixl-write"), ("mooncake", "mooncake-write")
    assert [(plan.ways, plan.settings) for plan in plans] == [
        (nixl, {}),
        (nixl, {"A": "1", "B": "2"}),
        (mooncake, {"C": "3"}),
        *(((way,), {}) for way in MAPPED_WAYS),
    ]


def test_the_owner_and_the_reader_have_the_gpus_that_they_are_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ways = ("--ways", "mapped-kernel")
    for arguments, devices in (
        ((), ("cuda:0", "cuda:1")),
        (("--gpus", "3,2"), ("cuda:3", "cuda:2")),
        (("--device", "cpu"), ("cpu", "cpu")),
    ):
        (plan,) = planned(monkeypatch, tmp_path, *ways, *arguments)
        assert plan.devices == devices


def test_mooncake_is_told_of_nvlink_on_a_gpu_and_writes_come_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ways = ("--ways", "mooncake-write,mooncake")
    (plan,) = planned(monkeypatch, tmp_path, *ways)
    assert plan.ways == ("mooncake", "mooncake-write")
    assert plan.settings == {"MC_INTRANODE_NVLINK": "true"}
    (plan,) = planned(monkeypatch, tmp_path, *ways, "--device", "cpu")
    assert plan.settings == {}


def test_memory_is_mapped_by_the_gpu_that_is_to_read_it() -> None:
    """Of a device, mapping asks for its type and number alone, so that none is needed here."""

    def rebuild(rows: int, storage_device: int, handle: str) -> tuple[int, int, str]:
        return rows, storage_device, handle

    offer: list[Any] = [(rebuild, (3, 0, "handle"))]
    gpu: Any = SimpleNamespace(type="cuda", index=1)
    processor: Any = SimpleNamespace(type="cpu", index=None)
    assert mapped(offer, gpu) == [(3, 1, "handle")]
    assert mapped(offer, processor) == mapped(offer) == [(3, 0, "handle")]
