"""A trace is simulated as `replay` would send it, by a plan that a person wrote."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from deltaserve.errors import InputError
from eval.cli import app
from eval.simulate import (
    FITTED,
    PLANNED_FILE,
    drawn_calibration,
    packaged_calibrations,
    read_calibration,
    simulate,
)
from tests.eval.conftest import write_growing


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three sessions of four turns; every prompt goes on where the answer before it ends."""
    path = tmp_path / "trace.jsonl"
    write_growing(path, sessions=3, turns=4, tokens=1_000, growth=640, apart_s=0.0)
    return path


def plan(**changes: Any) -> dict[str, Any]:
    return {
        "load": {"max_inflight_sessions": 2},
        "router": {"policy": "unified"},
        "workers": [{"id": "w", "kv_tokens": 50_000}],
    } | changes


@pytest.mark.parametrize("mode", ["open", "closed"])
def test_think_times_pass_as_fast_as_the_trace_does(trace: Path, tmp_path: Path, mode: str) -> None:
    """As in `replay`: a late turn too comes its think time over the scale after the answer."""
    load = {"mode": mode, "max_inflight_sessions": 3, "time_scale": 100.0}
    simulate(plan(load=load), tmp_path / "out", trace=trace)
    lines = [orjson.loads(line) for line in (tmp_path / "out/requests.jsonl").open("rb")]
    by_name = {line["request_id"]: line for line in lines}
    for session in range(3):
        for turn in range(1, 4):
            before, line = (by_name[f"s{session}:{number}"] for number in (turn - 1, turn))
            assert line["scheduled_s"] - before["finished_s"] == pytest.approx(0.01, abs=1e-3)


@pytest.mark.timeout(60)
def test_a_load_that_is_refused_whole_comes_to_its_end(trace: Path, tmp_path: Path) -> None:
    """No worker does both halves: every request is refused at once, and no client thinks."""
    load = {"max_inflight_sessions": 2, "think_scale": 0.0}
    phases = {"measure_s": 0.5, "recycle": True}
    refused = plan(router={"policy": "pd"}, load=load, phases=phases)
    report = simulate(refused, tmp_path / "out", trace=trace)
    assert report["end_s"] == pytest.approx(0.5, abs=0.1)
    assert 500 < report["failed"] == report["requests"] < 2_000


def test_a_window_ends_when_there_is_nothing_left_to_send(trace: Path, tmp_path: Path) -> None:
    """As in `replay`: rates are of the time in which there was a load."""
    phases = {"measure_s": 100_000.0, "warm_up_s": 0.1}
    simulate(plan(phases=phases), tmp_path / "out", trace=trace)
    lines = [orjson.loads(line) for line in (tmp_path / "out/requests.jsonl").open("rb")]
    assert len(lines) == 12
    found = orjson.loads((tmp_path / "out/phases.json").read_bytes())
    assert found["window_end_s"] == max(line["finished_s"] for line in lines) < 60
    phases["warm_up_s"] = 1_000.0
    simulate(plan(phases=phases), tmp_path / "none", trace=trace)
    assert not (tmp_path / "none/phases.json").exists()


def test_every_request_of_the_trace_is_simulated(trace: Path, tmp_path: Path) -> None:
    report = simulate(plan(), tmp_path / "out", trace=trace)
    assert report["simulated"] is True
    assert (report["requests"], report["failed"]) == (12, 0)
    lines = [orjson.loads(x) for x in (tmp_path / "out/requests.jsonl").read_bytes().splitlines()]
    assert {line["request_id"] for line in lines} == {
        f"s{session}:{turn}" for session in range(3) for turn in range(4)
    }
    for line in lines:
        # Blocks of 64 of the prompt before; its started one is another now.
        before = 1_000 + 640 * (line["turn"] - 1)
        assert line["cached_tokens"] >= (before // 64 * 64 if line["turn"] else 0)
        assert line["phase"] == "measure"


def test_length_scale_and_limits_are_those_of_replay(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = simulate(plan(), out, trace=trace, length_scale=0.5, session_limit=2)
    assert report["requests"] == 8
    first = orjson.loads((out / PLANNED_FILE).read_bytes().splitlines()[0])
    assert (first["input_length"], first["block_size"]) == (500, 32)


def test_a_packaged_calibration_changes_the_times(trace: Path, tmp_path: Path) -> None:
    names = list(packaged_calibrations())
    assert len(names) >= 2
    first_s = []
    for name in names:
        workers = [{"id": "w", "kv_tokens": 50_000, "calibration": name}]
        report = simulate(plan(workers=workers), tmp_path / name, trace=trace)
        assert report["calibrations"] == [read_calibration(name)["name"]]
        line = orjson.loads((tmp_path / name / "requests.jsonl").read_bytes().splitlines()[0])
        first_s.append(line["first_token_s"])
    assert len(set(first_s)) == len(names)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"workers": [{"id": "w", "kv_tokens": 0}]}, "kv_tokens"),
        ({"workers": [{"id": "w", "kv_tokens": 9, "calibration": "none"}]}, "packaged ones"),
        ({"router": {"policy": "unifed"}}, "unifed"),
        ({"requests": "some.jsonl"}, "--trace"),
    ],
)
def test_a_wrong_plan_is_one_clear_error(
    changes: dict[str, Any], named: str, trace: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=named):
        simulate(plan(**changes), tmp_path / "out", trace=trace)


def test_a_plan_that_is_not_there_is_no_experiment(tmp_path: Path) -> None:
    words = ["simulate", "plan.toml", "--trace", "trace.jsonl", "--output", str(tmp_path / "out")]
    with pytest.raises(InputError, match=r"plan\.toml: no such file; expected a plan"):
        CliRunner().invoke(app, words, catch_exceptions=False)


def test_the_command_takes_a_plan_as_toml(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(
        '[load]\nmax_inflight_sessions = 2\n[router]\npolicy = "unified"\n'
        '[[workers]]\nid = "w"\nkv_tokens = 50000\n'
    )
    out = tmp_path / "out"
    arguments = ["simulate", str(path), "--trace", str(trace), "--output", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "12 requests" in result.output
    assert (out / "simulation.json").is_file()


def test_constants_are_drawn_from_the_error_that_the_calibration_states() -> None:
    given = read_calibration("qwen3-coder-30b-a3b-h200-sglang")
    ratios: dict[str, list[float]] = {}
    for seed in range(400):
        drawn = drawn_calibration("qwen3-coder-30b-a3b-h200-sglang", seed)
        assert drawn == drawn_calibration("qwen3-coder-30b-a3b-h200-sglang", seed)
        changed = {key for key in given if drawn[key] != given[key]}
        assert changed == {key for key in given if key.startswith(("prefill", "decode"))}
        # One factor a kind: a slower prefill has more overhead and fewer tokens a second.
        slower = drawn["prefill_overhead_s"] / given["prefill_overhead_s"]
        assert given["prefill_pairs_per_s"] / drawn["prefill_pairs_per_s"] == pytest.approx(slower)
        ratios.setdefault("prefill", []).append(slower)
        ratios.setdefault("decode", []).append(drawn["decode_base_s"] / given["decode_base_s"])
    # Half of the draws are within the fit's median error of a step: 6.4 % and 3.7 %.
    for kind, error in (("prefill", 0.0641), ("decode", 0.0369)):
        inside = sum(abs(ratio - 1) <= error for ratio in ratios[kind])
        assert 160 <= inside <= 240, kind


def test_what_a_found_token_takes_is_drawn_with_prefills() -> None:
    given = read_calibration("qwen3-coder-30b-a3b-h200-vllm-fp8")
    drawn = drawn_calibration("qwen3-coder-30b-a3b-h200-vllm-fp8", 7)
    slower = drawn["prefill_overhead_s"] / given["prefill_overhead_s"]
    assert slower != pytest.approx(1.0)
    assert drawn["found_token_s"] / given["found_token_s"] == pytest.approx(slower)


def test_a_guess_says_its_own_error_and_one_that_says_none_is_refused(tmp_path: Path) -> None:
    guess = "qwen3-coder-30b-a3b-h20-sglang-guess"
    base_s = read_calibration(guess)["decode_base_s"]
    shares = [drawn_calibration(guess, seed)["decode_base_s"] / base_s for seed in range(400)]
    assert 0.15 < statistics.pstdev(shares) < 0.25
    path = tmp_path / "mine.toml"
    path.write_text(calibration_file())
    with pytest.raises(InputError, match="states no error of prefill steps"):
        drawn_calibration(str(path), 1)


def calibration_file(**changes: str | None) -> str:
    """A calibration with all that it must have, lines replaced or (None) left out."""
    lines: dict[str, str | None] = {"name": '"mine"', **dict.fromkeys(FITTED, "0.1"), **changes}
    return "".join(f"{key} = {value}\n" for key, value in lines.items() if value is not None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        # As eval calibrate writes it of runs with too few decode steps.
        (
            {key: None for key in FITTED if key.startswith("decode")},
            "mine.toml: has no decode_base_s, decode_per_request_s, decode_per_context_token_s",
        ),
        ({"prefill_tokens_per_s": None}, "mine.toml: has no prefill_tokens_per_s"),
        ({"name": None}, "mine.toml: name: expected of what it is"),
        ({"name": "7"}, "mine.toml: name: expected of what it is"),
        ({"decode_base_s": '"fast"'}, "mine.toml: decode_base_s: expected a number, not 'fast'"),
    ],
)
def test_a_calibration_that_lacks_constants_does_not_run_under_those_of_another_gpu(
    changes: dict[str, str | None], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(calibration_file())
    assert read_calibration(str(path)).keys() == {"name", *FITTED}
    path.write_text(calibration_file(**changes))
    with pytest.raises(InputError, match=words):
        read_calibration(str(path))
