"""A cache folder of the test's own, and topologies of fake engines."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.topology import Topology
from launch.topology_files import load_topology

Fakes = Callable[..., Topology]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("DELTASERVE_CACHE", str(folder))
    return folder


@pytest.fixture
def fake_python(tmp_path: Path) -> Path:
    """What a topology's `engine.python` may name: the fake engine."""
    script = Path(__file__).with_name("fake_engine.py").read_text()
    python = tmp_path / "engine-python"
    python.write_text(f"#!{sys.executable}\n{script}")
    python.chmod(0o755)
    return python


@pytest.fixture
def fakes(fake_python: Path) -> Fakes:
    """Makes a topology of fake SGLang workers without a router, one for each behaviour."""

    def make(*behaviours: str, overrides: tuple[str, ...] = ()) -> Topology:
        groups = ", ".join(f'{{ environment = {{ FAKE = "{b}" }} }}' for b in behaviours)
        return load_topology(
            "laptop-sglang",
            [
                f"workers=[{groups}]",
                f"engine.python={fake_python}",
                "router.kind=none",
                "base_port=0",
                *overrides,
            ],
        )

    return make
