"""A cache folder of the test's own, topologies of fake engines, and ports of the test's own."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path

import pytest

from launch.fleets import reserved_plan
from launch.planning import Plan
from launch.ports import free_base, worker_ports
from launch.reservations import TakenError, reserved
from launch.topology import Topology
from launch.topology_files import load_topology

Fakes = Callable[..., Topology]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that is empty but for the reservations of ports, which all tests on a machine
    share: their fleets leave each other's ports alone, as fleets of one user do."""
    folder = tmp_path / "cache"
    shared = Path(tempfile.gettempdir()) / f"ports-of-launch-tests-{os.getuid()}"
    shared.mkdir(exist_ok=True)
    (folder / "reserved").mkdir(parents=True)
    (folder / "reserved" / "port").symlink_to(shared)
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


@contextmanager
def kept_plan(topology: Topology, run_dir: Path) -> Iterator[Plan]:
    """A plan whose ports nobody else is given until the block ends."""
    with ExitStack() as kept:
        yield reserved_plan(topology, run_dir, kept)


@contextmanager
def taken_base(worker_count: int = 1) -> Iterator[int]:
    """A base port of so many workers that a fleet has, until the block ends."""
    with ExitStack() as kept:
        while True:
            base = free_base(worker_count)
            of_workers = (worker_ports(base, index).values() for index in range(worker_count))
            try:
                kept.enter_context(reserved([base, *chain.from_iterable(of_workers)]))
                break
            except TakenError:  # by another test, since it was found free
                continue
        yield base


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
