"""Synthetic traces: deterministic, well-formed, and with the figures of what they imitate."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deltaserve.errors import InputError
from replay.stats import TraceStats, describe
from replay.synth import Profile, fit, load_profile, synthesise
from replay.trace import Request, encode_line, parse_line


def test_the_same_seed_gives_the_same_trace_and_another_another() -> None:
    def lines(seed: int) -> list[bytes]:
        trace = synthesise(load_profile("glm-agentic"), seed, requests=300)
        return [encode_line(request) for request in trace]

    assert lines(1) == lines(1)
    assert lines(1) != lines(2)


def test_a_synthetic_trace_keeps_the_formats_promises() -> None:
    profile = load_profile("glm-agentic")
    stats = TraceStats()
    before_s = 0.0
    sessions: dict[str, Request] = {}
    for request in synthesise(profile, 3, requests=3000):
        assert parse_line(encode_line(request)) == request
        assert request.timestamp_s >= before_s
        before_s = request.timestamp_s
        assert request.input_length <= profile.max_input_tokens
        stats.add(request)
        previous = sessions.get(request.session_id)
        assert request.turn == (previous.turn + 1 if previous else 0)
        if previous:
            full = previous.input_length // profile.block_size
            grown = request.input_length >= previous.input_length + previous.output_length
            assert not grown or request.hash_ids[:full] == previous.hash_ids[:full]
        sessions[request.session_id] = request
    assert stats.result()["inconsistent_ids"] == 0


def test_so_many_requests_or_so_long() -> None:
    profile = load_profile("glm-agentic")
    assert len(list(synthesise(profile, 1, requests=17))) == 17
    times = [request.timestamp_s for request in synthesise(profile, 1, duration_s=2.0)]
    assert 1.5 < max(times) < 2.0
    with pytest.raises(InputError, match="either --requests or --duration"):
        synthesise(profile, 1)


@pytest.mark.timeout(600)
def test_glm_agentic_has_the_production_traces_figures_over_200_000_requests() -> None:
    """Each within 5 %, rates and shares within 2 points."""
    record = describe(synthesise(load_profile("glm-agentic"), seed=0, requests=200_000))
    assert record["input_tokens"]["mean"] == pytest.approx(33_600, rel=0.05)
    assert record["input_tokens"]["p50"] == pytest.approx(20_000, rel=0.05)
    assert record["input_tokens"]["p90"] == pytest.approx(88_000, rel=0.05)
    assert record["output_tokens"]["mean"] == pytest.approx(445, rel=0.05)
    assert record["output_tokens"]["p50"] == pytest.approx(80, rel=0.05)
    assert record["io_ratio"] == pytest.approx(75.6, rel=0.05)
    assert record["prefill_share"] == pytest.approx(0.98, abs=0.02)
    assert record["best_hit_rate"] == pytest.approx(0.67, abs=0.02)
    assert record["reuse"]["within_session"] == pytest.approx(0.62, abs=0.02)
    assert record["arrival_rps"]["mean"] == pytest.approx(2_114_220 / 7200, rel=0.05)


def test_coding_sessions_are_long_and_mostly_sent_before() -> None:
    """What makes caches thrash: many turns a session, contexts of 70k tokens, all within one."""
    record = describe(synthesise(load_profile("coding-sessions"), seed=3, duration_s=6000))
    assert record["multi_turn_share"] > 0.9
    assert record["input_tokens"]["p50"] == pytest.approx(70_000, rel=0.2)
    assert record["output_tokens"]["p50"] == pytest.approx(217, rel=0.1)
    assert record["best_hit_rate"] == pytest.approx(0.94, abs=0.02)
    assert record["reuse"]["across_sessions"] == 0


def test_memory_does_not_grow_with_the_trace() -> None:
    code = """
import resource
from replay.synth import load_profile, synthesise
def peak(requests):
    for _ in synthesise(load_profile("glm-agentic"), 0, requests=requests): pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
small = peak(40_000)
print(peak(120_000) - small)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert int(done.stdout) < 60_000  # kB; the ids of 80,000 more requests would take 200 MB


def test_lengths_scale_together_with_the_profile() -> None:
    profile = load_profile("glm-agentic").scaled(0.1, 16)
    record = describe(synthesise(profile, 1, requests=4000))
    full = describe(synthesise(load_profile("glm-agentic"), 1, requests=4000))
    ratio = record["input_tokens"]["mean"] / full["input_tokens"]["mean"]
    assert ratio == pytest.approx(0.1, rel=0.05)
    assert record["block_size"] == 16


def test_a_fitted_profile_gives_a_trace_like_its_source() -> None:
    source = list(synthesise(load_profile("glm-agentic"), 7, requests=20_000))
    profile = fit(source, "again")
    assert Profile.model_validate_json(profile.model_dump_json()) == profile
    before = describe(source)
    after = describe(synthesise(profile, 8, requests=20_000))
    for key in ("input_tokens", "output_tokens", "turns"):
        assert after[key]["mean"] == pytest.approx(before[key]["mean"], rel=0.1)
    assert after["best_hit_rate"] == pytest.approx(before["best_hit_rate"], abs=0.05)
    within = before["reuse"]["within_session"]
    assert after["reuse"]["within_session"] == pytest.approx(within, abs=0.05)
    assert after["arrival_rps"]["mean"] == pytest.approx(before["arrival_rps"]["mean"], rel=0.1)


def test_a_profile_fitted_to_branching_sessions_is_usable(
    trace_of: Callable[..., list[Request]],
) -> None:
    profile = fit(trace_of(1, requests=200), "odd")
    assert len(list(synthesise(profile, 1, requests=500))) == 500


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "field name: Field required"),
        ('{"name": 3}', "field name"),
    ],
)
def test_a_broken_profile_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(InputError, match=rf"p\.json: {words}"):
        load_profile(str(path))
    with pytest.raises(
        InputError, match="--profile none: expected one of glm-agentic, coding-sessions"
    ):
        load_profile("none")
