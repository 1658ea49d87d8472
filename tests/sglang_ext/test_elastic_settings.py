"""What the environment may ask of an elastic worker, and what it says to nonsense."""

from __future__ import annotations

import pytest

from sglang_ext.elastic.fallback import REASONS, reason_of
from sglang_ext.guards import PluginMismatch
from sglang_ext.settings import ElasticSettings, Interference, elastic, paced


def test_without_variables_the_defaults_hold() -> None:
    assert elastic({}) == ElasticSettings()


def test_every_variable_is_read() -> None:
    assert elastic(
        {
            "DELTASERVE_ELASTIC_INTERFERENCE": "mixed",
            "DELTASERVE_ELASTIC_TARGET_ITL_MS": "45",
            "DELTASERVE_ELASTIC_CHUNK_TOKENS": "2048",
            "DELTASERVE_ELASTIC_MIN_CHUNK_TOKENS": "64",
            "DELTASERVE_ELASTIC_FALLBACK": "0",
            "DELTASERVE_ELASTIC_DEADLINE_S": "2.5",
            "DELTASERVE_ELASTIC_QUARANTINE_S": "0",
            "DELTASERVE_ELASTIC_CONNECT_ATTEMPTS": "5",
        }
    ) == ElasticSettings(
        interference=Interference.MIXED,
        target_itl_s=0.045,
        chunk_tokens=2048,
        min_chunk_tokens=64,
        fallback=False,
        deadline_s=2.5,
        quarantine_s=0.0,
        connect_attempts=5,
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("INTERFERENCE", "fast"),
        ("TARGET_ITL_MS", "0"),
        ("TARGET_ITL_MS", "quick"),
        ("TARGET_ITL_MS", "nan"),
        ("CHUNK_TOKENS", "1.5"),
        ("MIN_CHUNK_TOKENS", "-1"),
        ("FALLBACK", "yes"),
        ("DEADLINE_S", "-0.1"),
        ("QUARANTINE_S", "inf"),
    ],
)
def test_a_value_that_cannot_be_meant_ends_the_worker_and_is_named(name: str, value: str) -> None:
    with pytest.raises(PluginMismatch, match=f"DELTASERVE_ELASTIC_{name}='{value}'"):
        elastic({f"DELTASERVE_ELASTIC_{name}": value})


def test_a_misspelled_variable_ends_the_worker_and_is_named() -> None:
    """A worker that silently lacks what was asked for would make a comparison wrong."""
    with pytest.raises(PluginMismatch, match=r"DELTASERVE_ELASTIC_TARGET_ITL is .*TARGET_ITL_MS"):
        elastic({"DELTASERVE_ELASTIC_TARGET_ITL": "40"})
    with pytest.raises(PluginMismatch, match="DELTASERVE_PACED_FALLBACK"):
        paced({"DELTASERVE_PACED_FALLBACK": "1", "DELTASERVE_ELASTIC_FALLBACK": "1"})


@pytest.mark.parametrize(
    ("message", "stage", "reason"),
    [
        ("Lost connection with prefill instance (bootstrap_addr: h:1)", "transfer", "prefill_lost"),
        ("… is healthy before, but now it is down. …", "handshake", "prefill_unreachable"),
        ("Could not fetch bootstrap info for: …", "handshake", "prefill_unreachable"),
        ("send_metadata to prefill 1.2.3.4:5 failed", "transfer", "prefill_unreachable"),
        ("Request 7 timed out after 300.0s in KVPoll.WaitingForInput", "transfer", "timeout"),
        ("… with exception …: Aborted by AbortReq.", "handshake", "prefill_unreachable"),
        ("something else", "handshake", "handshake"),
        ("something else", "transfer", "transfer"),
        ("Metadata corruption detected - bootstrap_room mismatch", "metadata", "metadata"),
    ],
)
def test_a_failure_is_counted_under_one_of_a_closed_set_of_reasons(
    message: str, stage: str, reason: str
) -> None:
    assert reason_of(message, stage) == reason
    assert reason in REASONS
