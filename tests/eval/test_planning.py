"""A plan tries the arms that the hardware allows, and says which of them to measure."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from deltaserve.errors import InputError
from eval.cli import app
from eval.experiment_files import load_experiment
from eval.planning import Asked, Hardware, answer, arms, experiment_text, line, table
from eval.report.searches import Search
from eval.run_lines import read_rows

H200 = "qwen3-coder-30b-a3b-h200-sglang"


def hardware(**changes: Any) -> Hardware:
    return Hardware(
        **({"gpus": 4, "kv_tokens": 281_888, "host_kv_tokens": 0, "calibration": H200} | changes)
    )


def test_arms_are_those_that_the_hardware_allows() -> None:
    names = [arm["name"] for arm in arms(hardware(gpus=1))]
    assert names == ["colocated", "admission", "vllm-colocated", "vllm-admission"]
    names = [arm["name"] for arm in arms(hardware(gpus=8, host_kv_tokens=600_000))]
    assert names == [
        *("colocated", "admission", "host", "host-admission"),
        *("vllm-colocated", "vllm-admission", "vllm-host", "vllm-host-admission"),
        *("pd-2p6d", "pd-4p4d", "elastic-1p7d", "elastic-2p6d", "elastic-2p6d-off"),
    ]
    names = [arm["name"] for arm in arms(hardware(gpus=2))]
    assert names[-3:] == ["pd-1p1d", "elastic-1p1d", "elastic-1p1d-off"]


def test_the_experiment_is_one_that_eval_run_takes(tmp_path: Path) -> None:
    asked = Asked(trace=tmp_path / 'a "b".jsonl', max_think_s=None, slo={"ttft_s": 5.0})
    path = tmp_path / "plan.toml"
    path.write_text(experiment_text(asked, hardware(host_kv_tokens=600_000)))
    experiment, _ = load_experiment(str(path))
    assert experiment.search is not None
    assert (experiment.search.start, experiment.search.high) == (12, 128)
    assert experiment.slo.ttft_s == 5.0
    assert experiment.replay.max_think_s is None
    assert experiment.trace.path == str(asked.trace)
    for place in (3, 7):
        host = experiment.arms[place].set
        assert host["workers"]["colocated"]["host_kv_tokens"] == 600_000
        assert host["router"]["admission"]["rule"] == "rotate"
    assert experiment.arms[7].topology == "vllm:4"
    assert experiment.replay.session_limit is None
    path.write_text(experiment_text(dataclasses.replace(asked, sessions=9), hardware()))
    assert load_experiment(str(path))[0].replay.session_limit == 9
    assert not experiment.simulate.calibration_spread
    path.write_text(
        experiment_text(
            dataclasses.replace(
                asked, tolerance=0.2, calibration_spread=True, max_input_tokens=130_000
            ),
            hardware(),
        )
    )
    changed, _ = load_experiment(str(path))
    assert changed.search is not None
    assert changed.search.tolerance == 0.2
    assert (experiment.replay.max_input_tokens, changed.replay.max_input_tokens) == (None, 130_000)
    assert changed.simulate.calibration_spread


def search(arm: str, agents: float, low: float, high: float) -> Search:
    return Search(arm, agents, low, high, per_unit=agents / 2)


def test_arms_that_overlap_are_to_be_measured_together() -> None:
    best, rival = search("a", 10.0, 8.0, 12.0), search("b", 8.0, 7.0, 9.0)
    behind = search("c", 4.0, 3.0, 5.0)
    words = answer([best, rival, behind], "H200", Path("out/plan.toml"))
    assert words.startswith("Simulated, not measured; calibration: H200.")
    assert "--only a --only b --set search.start=10" in words
    assert "--only c" not in words
    assert "4–6" in words  # the interval, a GPU
    alone = answer([best, behind], "H200", Path("out/plan.toml"))
    assert "a is ahead of every other arm" in alone


def test_where_nothing_carries_one_session_is_to_be_measured() -> None:
    words = answer([search("a", 0.0, 0.0, 0.0)], "H200", Path("p.toml"))
    assert "No arm met the objective" in words
    assert "search.high=1" in words
    unknown = answer([search("a", 2.0, 1.0, math.inf)], "H200", Path("p.toml"))
    assert "at least 0.5" in unknown  # a GPU, of two


def test_turns_that_were_refused_are_told_of() -> None:
    """They count nowhere: what is said to be carried is the load without them."""
    level = {"load": 3.0, "violations": ["client_errors"]}
    refused = dataclasses.replace(search("a", 3.0, 3.0, 3.0), levels=[level])
    words = answer([refused, search("b", 2.0, 2.0, 2.0)], "H200", Path("p.toml"))
    assert (
        "Rules of validity were broken (client_errors) by levels of a: turns were refused" in words
    )
    assert "--max-input-tokens cuts them" in words
    assert "Rules of validity" not in answer([search("b", 2.0, 2.0, 2.0)], "H200", Path("p.toml"))


def test_plans_stand_side_by_side_a_line_an_arm(tmp_path: Path) -> None:
    asked = Asked(trace=tmp_path / "weka.jsonl.zst")
    two, eight = hardware(gpus=2), hardware(gpus=8)
    rows = [
        line(search("pd-1p1d", 5.0, 4.0, 6.0), asked, two),
        line(search("colocated", 6.0, 5.0, math.inf), asked, two),
        line(search("colocated", 26.0, 24.0, 28.0), asked, eight),
    ]
    heads = ["simulated: agents a GPU", *(f"weka, {H200}, {n} GPUs, think ≤ 10 s" for n in (2, 8))]
    assert table(rows) == [
        f"| {' | '.join(heads)} |",
        "|--|--|--|",
        "| `colocated` | 3 [2.5–∞] | 3.2 [3–3.5] |",
        "| `pd-1p1d` | 2.5 [2–3] |  |",
    ]


def sessions(path: Path) -> Path:
    """Eight sessions of five turns, their prompts growing."""
    lines = []
    for session in range(8):
        ids: list[int] = []
        for turn in range(5):
            length = 4_000 + 1_280 * turn
            ids += range(1_000 * (session + 1) + len(ids), 1_000 * (session + 1) + length // 64)
            lines.append(
                {
                    "request_id": f"s{session}:{turn}",
                    "session_id": f"s{session}",
                    "turn": turn,
                    "timestamp_s": session + 10.0 * turn,
                    "input_length": length,
                    "output_length": 60,
                    "block_size": 64,
                    "hash_ids": [*ids, 90_000 + 10 * session + turn][: -(-length // 64)],
                    "think_time_s": 2.0 if turn else None,
                }
            )
    lines.sort(key=lambda line: float(str(line["timestamp_s"])))
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    return path


@pytest.mark.timeout(400)
def test_a_plan_is_simulated_from_the_command_line(tmp_path: Path) -> None:
    trace = sessions(tmp_path / "trace.jsonl")
    output = tmp_path / "out"
    arguments = ["plan", str(trace), "--output", str(output), "--gpus", "1"]
    given = ["--kv-tokens", "60000", "--seeds", "1", "--measure-s", "60", "--tolerance", "0.5"]
    result = CliRunner().invoke(app, [*arguments, *given])
    assert result.exit_code == 0, result.output
    assert "Simulated, not measured" in result.output
    assert "To measure next" in result.output
    for arm in ("colocated", "admission", "vllm-colocated", "vllm-admission"):
        assert (output / "runs" / arm / "capacity.json").is_file()
    rows = read_rows(output / "plan.csv")
    assert len({row["arm"] for row in rows}) == len(rows) == 4
    assert all(float(row["agents_per_gpu"]) >= 0 for row in rows)
    wrong = CliRunner().invoke(app, [*arguments, *given, "--calibration", "none"])
    assert isinstance(wrong.exception, InputError)
    assert "calibration none" in str(wrong.exception)


def test_a_bound_that_is_none_is_named(tmp_path: Path) -> None:
    asked = Asked(trace=tmp_path, slo={"ttft": 5.0})
    path = tmp_path / "plan.toml"
    path.write_text(experiment_text(asked, hardware()))
    with pytest.raises(InputError, match=r"slo\.ttft"):
        load_experiment(str(path))


def test_engines_that_share_a_calibration_are_both_to_be_measured() -> None:
    """vLLM's best arm is behind, by step times that are SGLang's."""
    found = [search("host", 10.0, 9.0, 11.0), search("vllm-host", 4.0, 3.0, 5.0)]
    words = answer(found, "SGLang", Path("p.toml"))
    assert "does not choose between SGLang and vLLM" in words
    assert "--only host --only vllm-host" in words
    alone = answer([found[0], search("off", 4.0, 3.0, 5.0)], "SGLang", Path("p.toml"))
    assert "does not choose between SGLang" not in alone
    assert "--only off" not in alone


def test_what_a_calibration_was_extrapolated_to_is_in_the_answer() -> None:
    beyond = ["32 requests that decode at a time, fitted up to 9"]
    words = answer([search("host", 10.0, 9.0, 11.0)], "SGLang", Path("p.toml"), beyond)
    assert f"Extrapolated: {beyond[0]}." in words
