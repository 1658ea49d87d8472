"""`deltaserve doctor` says what is there, what would fail, and what to do."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from launch import doctor
from launch.doctor import Check, examine
from launch.engines import ENVIRONMENTS
from launch.hardware import GpuError, GpuSample


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DELTASERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def check(name: str) -> Check:
    (found,) = [each for each in examine() if each.name == name]
    return found


def test_an_engine_that_is_missing_is_named_with_what_installs_it() -> None:
    found = check("engine sglang")
    assert (found.state, found.todo) == ("note", "deltaserve launch install sglang")


def test_an_engine_that_is_installed_is_named_with_its_folder() -> None:
    folder = ENVIRONMENTS["sglang"].folder
    folder.mkdir(parents=True)
    (folder / "deltaserve-engine.json").write_text("{}")
    found = check("engine sglang")
    assert found.state == "ok"
    assert str(folder) in found.found


def test_a_port_in_use_is_named_with_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(doctor, "PORTS", {port: "a test"})
        found = check(f"port {port}")
        assert found.state == "note"
        assert str(os.getpid()) in found.found
    assert check(f"port {port}").state == "ok"


def test_a_gpu_in_use_and_a_driver_that_does_not_answer_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = GpuSample(0, "NVIDIA H200", 90, 70 * 10**9, 150 * 10**9, 600.0, None, None)
    monkeypatch.setattr(doctor, "sample_gpus", lambda: [gpu])
    found = check("GPU 0")
    assert (found.state, found.found) == ("note", "NVIDIA H200, 70 of 150 GB in use")

    def refuse() -> list[GpuSample]:
        raise GpuError("NVML: Unknown Error")

    monkeypatch.setattr(doctor, "sample_gpus", refuse)
    assert check("GPUs") == Check(
        "GPUs", "problem", "NVML: Unknown Error", "see what nvidia-smi says"
    )


def test_a_small_disk_is_told_before_an_engine_fills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=3 * 10**9))
    assert check("cache").todo.startswith("an engine takes up to 12 GB")


def test_json_has_every_check_and_a_problem_is_exit_1(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = CliRunner().invoke(doctor.app, ["--json"])
    printed = json.loads(shown.stdout)
    assert shown.exit_code == (1 if printed["problems"] else 0)
    assert [each["name"] for each in printed["checks"]] == [each.name for each in examine()]
    broken = Check("router", "problem", "router_policies._core is missing", "make setup")
    monkeypatch.setattr(doctor, "QUESTIONS", (lambda: [broken],))
    shown = CliRunner().invoke(doctor.app, [])
    assert shown.exit_code == 1
    assert shown.stdout.splitlines() == [
        "problem  router  router_policies._core is missing",
        "                 → make setup",
    ]
