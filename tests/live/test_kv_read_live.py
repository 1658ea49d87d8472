"""Real NIXL, Mooncake, torch and Triton read KV pages out of another process's memory, on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.kv_read.run import MAPPED_WAYS, MOONCAKE_WAYS, NIXL_WAYS
from tests.live.elastic_fleet import engine_python, needs_mooncake

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def python() -> str:
    return engine_python()


def samples_of(
    python: str,
    folder: Path,
    ways: tuple[str, ...],
    *arguments: str,
    before: str = "",
    status: int = 0,
) -> list[dict[str, Any]]:
    """Measures two page sizes, two lengths and three repeats by these ways."""
    command = [
        *(python, "-m", "sglang_ext.kv_read", "--device", "cpu", "--output", str(folder)),
        *("--layers", "2", "--row-bytes", "96", "--pool-tokens", "4000", "--page-tokens", "16,1"),
        *("--tokens", "64,500", "--repeats", "2", "--ways", ",".join(ways), *arguments),
    ]
    # The kernel's own interpreter stands in for a GPU.
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": f"{before}:{Path.cwd()}" if before else str(Path.cwd()),
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    assert "NO" not in (folder / "table.md").read_text()
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def all_right(samples: list[dict[str, Any]], ways: tuple[str, ...]) -> bool:
    assert {sample["way"] for sample in samples} == set(ways)
    checked = [sample for sample in samples if not sample["way"].endswith("-write")]
    return all(sample["right"] for sample in checked)


def test_nixl_and_mapped_memory_bring_the_right_tokens(python: str, tmp_path: Path) -> None:
    ways = NIXL_WAYS + MAPPED_WAYS
    settings = ("--nixl-env", "", "--nixl-env", "UCX_RNDV_SCHEME=get_zcopy")
    samples = samples_of(python, tmp_path, ways, *settings)
    # Two settings for NIXL's three ways.
    assert len(samples) == (2 * 3 + 2) * 2 * 2 * 3
    assert all_right(samples, ways)
    assert {sample["bytes"] for sample in samples if sample["page_tokens"] == 16} == {
        64 * 4 * 96,
        496 * 4 * 96,
    }


def test_mooncake_brings_the_right_tokens_over_tcp(python: str, tmp_path: Path) -> None:
    needs_mooncake(python)
    samples = samples_of(python, tmp_path, MOONCAKE_WAYS)
    assert len(samples) == 2 * 2 * 2 * 3
    assert all_right(samples, MOONCAKE_WAYS)


def test_without_mooncake_one_line_says_so_and_the_rest_goes_on(
    python: str, tmp_path: Path
) -> None:
    shadow = tmp_path / "shadow" / "mooncake"
    shadow.mkdir(parents=True)
    (shadow / "__init__.py").touch()
    ways = (*MOONCAKE_WAYS, "mapped-staged")
    samples = samples_of(python, tmp_path, ways, before=str(shadow.parent), status=1)
    (failed,) = [sample for sample in samples if "error" in sample]
    assert failed["way"] == "mooncake, mooncake-write"
    assert "No module named 'mooncake.engine'" in failed["error"]
    measured = [sample for sample in samples if sample is not failed]
    assert len(measured) == 2 * 2 * 3
    assert all_right(measured, ("mapped-staged",))
