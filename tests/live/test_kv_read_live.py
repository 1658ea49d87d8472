"""Real NIXL, torch and Triton read KV pages out of another process's memory, on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from sglang_ext.kv_read.run import WAYS
from tests.live.conftest import DEFAULT, installed


@pytest.mark.timeout(300)
def test_every_way_brings_the_right_tokens(tmp_path: Path) -> None:
    engine = installed("sglang", DEFAULT)
    command = [
        *(str(engine.python), "-m", "sglang_ext.kv_read", "--device", "cpu"),
        *("--output", str(tmp_path), "--layers", "2", "--row-bytes", "96"),
        *("--pool-tokens", "4000", "--page-tokens", "16,1", "--tokens", "64,500"),
        *("--repeats", "2", "--ucx", "", "--ucx", "UCX_RNDV_SCHEME=get_zcopy"),
    ]
    # The kernel's own interpreter stands in for a GPU.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    # Two settings for NIXL's three ways; two page sizes, two lengths, three repeats.
    assert len(samples) == (2 * 3 + 2) * 2 * 2 * 3
    assert {sample["way"] for sample in samples} == set(WAYS)
    checked = [sample for sample in samples if sample["way"] != "nixl-write"]
    assert all(sample["right"] for sample in checked)
    assert {sample["bytes"] for sample in samples if sample["page_tokens"] == 16} == {
        64 * 4 * 96,
        496 * 4 * 96,
    }
    assert "NO" not in (tmp_path / "table.md").read_text()
