"""The benchmark measures what it says, on a load small enough for any machine."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from pathlib import Path

import orjson
import pytest

from replay.bench import __main__ as bench


@pytest.mark.parametrize("processes", [None, 2])
def test_punctuality_joins_the_clients_stamps_with_the_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int | None
) -> None:
    monkeypatch.setattr(bench, "_STREAM_S", 0.3)
    monkeypatch.setattr(bench, "_PROMPT_BLOCKS", 150)
    monkeypatch.setattr(bench, "_SHARED_BLOCKS", 100)
    found = bench._punctuality(tmp_path, rate_rps=50.0, duration_s=1.0, processes=processes)
    assert found["requests"] == 50
    assert found["processes"] == (processes or 1)
    assert 1 <= found["most_streams_at_a_time"] <= 50
    assert 0 <= found["sent_within_5_ms"] <= 1
    # One machine, one clock: nothing is received before it was sent, or seen before it was written.
    for percent, sent_ms in found["sent_late_ms"].items():
        assert 0 <= sent_ms <= found["received_late_ms"][percent]
        assert found["first_token_seen_late_ms"][percent] >= 0


def test_the_mock_servers_first_token_has_a_time_of_its_own(tmp_path: Path) -> None:
    module = [sys.executable, "-m", "replay.bench.mock_server"]
    arguments = ["1", "3", "0.01", str(tmp_path / "stamps"), "--first-s", "0.2"]
    with subprocess.Popen(
        [*module, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        assert server.stdin is not None
        url = f"http://127.0.0.1:{server.stdout.readline().strip()}/v1/completions"
        with urllib.request.urlopen(url, b"{}", timeout=30) as answer:
            assert answer.read().count(b"w1 ") == 3
        server.stdin.close()
    (stamp,) = map(orjson.loads, (tmp_path / "stamps.0").read_bytes().splitlines())
    assert stamp["first_token_s"] - stamp["arrived_s"] >= 0.2
    # Two more tokens and the usage, 10 ms apart: far from three times the first wait.
    assert 0.02 <= stamp["finished_s"] - stamp["first_token_s"] < 0.4
