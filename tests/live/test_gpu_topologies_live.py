"""The GPU topologies that fit on this machine's GPUs, each started for real and asked twice.

``DELTASERVE_SGLANG_PYTHON`` and ``DELTASERVE_VLLM_PYTHON`` name the engines' interpreters where
they are not those that `deltaserve launch install` makes; ``DELTASERVE_GPUS=2,3`` keeps to these
GPUs, so that several of these tests can run side by side. The transcripts are printed (-s).
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from launch import catalog, fleet, load_topology, plan
from launch.engines import environment_for
from launch.hardware import sample_gpus
from tests.live.conftest import cached_of
from tests.processes import working_in

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

PROMPT_TOKENS = 20_000


def gpus() -> list[int]:
    """The GPUs that may be used."""
    there = [gpu.index for gpu in sample_gpus()]
    wanted = os.environ.get("DELTASERVE_GPUS")
    return [int(index) for index in wanted.split(",")] if wanted else there


def sizes() -> list[str]:
    """Every kind for GPUs in its smallest size and in those of 2, 4 and 8 workers."""
    found = []
    for kind in catalog():
        topology = load_topology(kind)
        if topology.device == "cuda":
            one_role = len(topology.workers) == 1
            found += [f"{kind}:{n}" if one_role else f"{kind}:1p{n - 1}d" for n in (2, 4, 8)]
            found += [f"{kind}:1"] if one_role else []
    return found


@pytest.mark.parametrize("name", sizes())
def test_a_gpu_topology_comes_up_answers_from_its_cache_and_is_gone(
    name: str, tmp_path: Path
) -> None:
    engine = load_topology(name).engine.name
    given = os.environ.get(f"DELTASERVE_{engine.upper()}_PYTHON")
    python = Path(given) if given else environment_for(engine, "cuda").python
    allowed = gpus()
    if not allowed or not python.exists():
        pytest.skip(f"no GPU, or {python} is not there")
    overrides = [f"engine.python={python}", "base_port=0"]
    needed = len(plan(load_topology(name, overrides), tmp_path / "plan").gpu_plan)
    if needed > len(allowed):
        pytest.skip(f"needs {needed} GPUs")
    topology = load_topology(name, [*overrides, f"gpus={allowed[:needed]}"])
    prompt = random.Random(name).choices(range(16, 30_000), k=PROMPT_TOKENS)
    with fleet(topology, tmp_path / "run") as running:
        assert cached_of(running, prompt) == 0
        # Whole pages, and the last token is always computed; vLLM counts what was sent to it.
        assert PROMPT_TOKENS - 64 <= cached_of(running, prompt) <= PROMPT_TOKENS
        running.check()
    print((tmp_path / "run" / "transcript.txt").read_text())
    assert working_in(tmp_path / "run") == []
