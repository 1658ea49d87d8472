"""The benchmark measures what it says, on a load small enough for any machine."""

from __future__ import annotations

from pathlib import Path

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
