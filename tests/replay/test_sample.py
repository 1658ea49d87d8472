"""Samples: whole conversations, deterministic, honest about what moved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from deltaserve.errors import InputError
from replay.sample import sample
from replay.stats import describe
from replay.synth import load_profile, synthesise
from replay.trace import Request, read_trace, write_trace

REQUESTS = 12_000


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sample") / "source.jsonl.zst"
    profile = load_profile("glm-agentic").model_copy(update={"requests_per_s": 20.0})
    write_trace(path, synthesise(profile, 1, requests=REQUESTS))
    return path


def test_whole_conversations_of_the_window_are_kept_in_order_from_time_0(
    source: Path, tmp_path: Path
) -> None:
    report = sample(
        source, tmp_path / "s.jsonl", window_s=100, window_start_s=50, sample_ratio=0.1, seed=3
    )
    everything = list(read_trace(source))
    chosen = list(read_trace(tmp_path / "s.jsonl"))
    names = {request.session_id for request in chosen}
    assert len(names) == report["chosen_conversations"]
    original = [request for request in everything if request.session_id in names]
    assert [r.request_id for r in chosen] == [r.request_id for r in original]
    assert chosen[0].timestamp_s == 0.0
    shift_s = original[0].timestamp_s
    begins = {}
    for request, before in zip(chosen, original, strict=True):
        assert request.timestamp_s == pytest.approx(before.timestamp_s - shift_s, abs=1e-6)
        assert request.hash_ids == before.hash_ids
        begins.setdefault(request.session_id, before.timestamp_s)
    assert all(50 <= begin_s < 150 for begin_s in begins.values())


@pytest.mark.parametrize("origin_s", [3_000.0, 1_751_300_000.0])
def test_a_trace_that_does_not_begin_at_0_is_sampled_as_one_that_does(
    tmp_path: Path, origin_s: float
) -> None:
    samples = []
    for begin_s in (0.0, origin_s):
        source = tmp_path / f"{begin_s}.jsonl"
        write_trace(
            source,
            [
                Request(f"r{n}", f"s{n // 3}", n % 3, begin_s + 5.0 * n, 64, 4, 64, [n // 3])
                for n in range(120)
            ],
        )
        for seed, start_s in ((1, None), (2, None), (3, None), (1, 100.0)):
            output = tmp_path / f"{begin_s}-{seed}-{start_s}"
            report = sample(
                source, output, window_s=200, window_start_s=start_s, sample_ratio=0.5, seed=seed
            )
            chosen = [request.request_id for request in read_trace(output)]
            samples.append((chosen, report["window_start_s"]))
    assert samples[:4] == samples[4:]


def test_single_turns_are_at_most_the_share_that_was_asked_for(
    source: Path, tmp_path: Path
) -> None:
    for ratio in (0.0, 0.1, 0.3, 1.0):
        path = tmp_path / f"{ratio}.jsonl"
        report = sample(source, path, sample_ratio=0.05, max_single_turn_ratio=ratio)
        share = report["statistics"]["multi_turn_share"]
        assert 1 - share["sample"] <= ratio + 1e-9
        if ratio == 1.0:
            assert share["sample"] == pytest.approx(share["source"], abs=0.1)


def test_families_keep_block_sharing_within_5_points_and_single_sessions_do_not(
    source: Path, tmp_path: Path
) -> None:
    moved = {}
    for thin in ("families", "sessions"):
        report = sample(source, tmp_path / thin, sample_ratio=0.02, thin=thin, window_s=300, seed=1)
        row = report["statistics"]["block_sharing"]
        moved[thin] = abs(row["sample"] - row["source"])
    assert moved["families"] < 0.05
    assert moved["families"] < moved["sessions"]


def test_the_same_seed_gives_the_same_sample(source: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        sample(source, tmp_path / name, sample_ratio=0.05, seed=seed)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (tmp_path / "a").read_bytes() != (tmp_path / "c").read_bytes()


def test_the_report_holds_the_statistics_of_both_traces(source: Path, tmp_path: Path) -> None:
    report = sample(source, tmp_path / "s.jsonl", sample_ratio=0.05, method="random")
    before, after = describe(read_trace(source)), describe(read_trace(tmp_path / "s.jsonl"))
    row = report["statistics"]["best_hit_rate"]
    assert row["source"] == before["best_hit_rate"]
    assert row["sample"] == after["best_hit_rate"]
    assert row["relative_change"] == pytest.approx(row["sample"] / row["source"] - 1)
    mean = report["statistics"]["input_tokens.mean"]
    assert mean["sample"] == after["input_tokens"]["mean"]


@pytest.mark.parametrize("thin", ["families", "sessions"])
def test_a_trace_of_single_turns_needs_leave_to_be_sampled(
    tmp_path: Path, thin: Literal["families", "sessions"]
) -> None:
    path = tmp_path / "single.jsonl"
    requests = [
        Request(
            request_id=f"r{i}",
            session_id=f"s{i}",
            turn=0,
            timestamp_s=float(i),
            input_length=32,
            output_length=4,
            block_size=16,
            hash_ids=[0, i + 1],
        )
        for i in range(40)
    ]
    write_trace(path, iter(requests))
    with pytest.raises(InputError, match=r"single\.jsonl: .*; give --max-single-turn-ratio 1$"):
        sample(path, tmp_path / "s.jsonl", window_start_s=0.0, thin=thin)
    report = sample(
        path,
        tmp_path / "s.jsonl",
        window_start_s=0.0,
        sample_ratio=0.25,
        max_single_turn_ratio=1.0,
        thin=thin,
    )
    assert report["chosen_conversations"] == 10


def test_a_sample_that_lost_reuse_says_so(source: Path, tmp_path: Path) -> None:
    report = sample(source, tmp_path / "s.jsonl", sample_ratio=0.01, method="random")
    assert any("block sharing moved by -" in warning for warning in report["warnings"])
    assert any("reuse across sessions was lost" in warning for warning in report["warnings"])
    everything = sample(
        source,
        tmp_path / "all.jsonl",
        window_s=1e9,
        window_start_s=0,
        sample_ratio=1,
        max_single_turn_ratio=1,
    )
    assert everything["warnings"] == []
    assert sum(1 for _ in read_trace(tmp_path / "all.jsonl")) == REQUESTS


def test_a_session_comes_with_the_sub_agents_that_it_waits_for(
    tmp_path: Path, trace_of: Callable[..., list[Request]]
) -> None:
    trace = trace_of(11, requests=300)
    write_trace(tmp_path / "t.jsonl", trace)
    report = sample(
        tmp_path / "t.jsonl",
        tmp_path / "s.jsonl",
        window_s=1e9,
        window_start_s=0,
        sample_ratio=0.7,
        max_single_turn_ratio=1,
    )
    chosen = {request.request_id: request for request in read_trace(tmp_path / "s.jsonl")}
    assert 0 < len(chosen) < len(trace)
    sessions = {request.session_id for request in chosen.values()}
    everything = {request.session_id for request in trace}
    assert report["eligible_conversations"] < len(everything)
    assert report["chosen_conversations"] < len(sessions)
    assert all(
        request.parent_request_id is None or request.parent_request_id in chosen
        for request in chosen.values()
    )


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"window_s": 0.0}, "--window-seconds 0"),
        ({"sample_ratio": 0.0}, "--sample-ratio 0"),
        ({"sample_ratio": 1.5}, "--sample-ratio 1.5"),
        ({"max_single_turn_ratio": 2.0}, "--max-single-turn-ratio 2"),
        ({"window_start_s": 1e6}, "no session begins"),
    ],
)
def test_wrong_options_are_named(
    source: Path, tmp_path: Path, values: dict[str, float], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        sample(source, tmp_path / "s.jsonl", **values)  # type: ignore[arg-type]
