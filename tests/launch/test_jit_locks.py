"""A lock that nobody holds is removed before workers wait for it; one that is held is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch import fleet
from launch.jit_locks import VARIABLE, extensions_dir, remove_stale

from .conftest import Fakes


def locks(folder: Path) -> tuple[Path, Path]:
    found = folder / "hicache_hash_cpp" / "lock", folder / "another" / "lock"
    for lock in found:
        lock.parent.mkdir(parents=True)
        lock.touch()
    return found


def test_only_locks_that_nobody_holds_are_removed(tmp_path: Path) -> None:
    held, left = locks(tmp_path)
    told: list[str] = []
    with held.open():
        remove_stale([{VARIABLE: str(tmp_path)}, {}], told.append)
    assert held.exists()
    assert not left.exists()
    assert told == [f"{left}: no process holds it, and torch would wait for it; removed"]


def test_a_fleet_that_starts_removes_them_from_its_engines_folder(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELTASERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(VARIABLE, raising=False)
    topology = fakes("serve")
    assert topology.engine.python is not None
    folder = extensions_dir(Path(topology.engine.python))
    left = locks(folder)
    with fleet(topology, tmp_path / "run") as running:
        assert running.plan.workers[0].environment[VARIABLE] == str(folder)
    assert not any(lock.exists() for lock in left)
    assert "no process holds it" in (tmp_path / "run/transcript.txt").read_text()


def test_a_folder_that_the_user_chose_stays(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "mine"))
    left = locks(tmp_path / "mine")
    with fleet(fakes("serve"), tmp_path / "run") as running:
        assert VARIABLE not in running.plan.workers[0].environment
    assert not any(lock.exists() for lock in left)


def test_a_torch_that_keeps_its_locks_files_has_them_left_alone(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"python": "3.11.0", "sglang": "0.5.23", "torch": "2.14.1+cpu"}
    monkeypatch.setattr("launch.engines._versions", lambda python, where: versions)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "mine"))
    kept = locks(tmp_path / "mine")
    with fleet(fakes("serve"), tmp_path / "run"):
        pass
    assert all(lock.exists() for lock in kept)
