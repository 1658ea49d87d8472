"""The map of where separating pays: its places, what is kept of a run, and what follows from it."""

from __future__ import annotations

import math
from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from eval.experiment import Turns
from eval.experiment_files import load_experiment
from eval.run_lines import Row, read_rows
from eval.separation import (
    OBJECTIVES,
    advantage,
    app,
    cached_share,
    carried,
    experiment_of,
    figure,
    place_of,
    summary,
    table,
)
from eval.simulate import read_calibration, simulate

H20 = "qwen3-coder-30b-a3b-h20-sglang-guess"


def shape(new_tokens: int, turns: int) -> Turns:
    return Turns(sessions=1, turns=turns, new_tokens=new_tokens, output_tokens=400, think_s=10.0)


def test_a_place_says_what_a_session_takes_alone(tmp_path: Path) -> None:
    """What the formula says is what one session in flight takes in the simulator."""
    place = place_of(shape(8_000, 3), read_calibration(H20))
    lines = [
        {
            "request_id": f"s:{turn}",
            "session_id": "s",
            "turn": turn,
            "trace_s": 0.0,
            "input_length": 8_000 + 8_400 * turn,
            "output_length": 400,
            "block_size": 100,
            "hash_ids": [[0, 80 + 84 * turn]],
            "think_time_s": 10.0 if turn else 0.0,
            "waits_for": [turn - 1] if turn else [],
            "tree": 0,
        }
        for turn in range(3)
    ]
    planned = tmp_path / "planned.jsonl"
    planned.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    plan = {
        "requests": str(planned),
        "load": {"max_inflight_sessions": 1},
        "router": {"policy": "unified"},
        "workers": [{"id": "w", "kv_tokens": 281_888, "calibration": H20}],
    }
    simulate(plan, tmp_path / "run")
    results = (tmp_path / "run/requests.jsonl").read_bytes().splitlines()
    took_s = [
        line["finished_s"] - line["scheduled_s"]
        for line in (orjson.loads(text) for text in results)
    ]
    assert sum(took_s) / 3 == pytest.approx(place.alone_s, rel=0.02)
    assert cached_share(shape(8_000, 3)) == pytest.approx((8_400 + 16_800) / 49_200)
    # Half of eight GPUs busy: each turn keeps one for `work_s` of every think time and answer.
    sessions = place.sessions(0.5, 8)
    assert sessions == pytest.approx(4 * (10.0 + place.alone_s) / place.work_s, abs=0.5)


def rows(
    arm: str, attained: dict[int, float], draw: int = 1, place: tuple[int, int] = (500, 3)
) -> list[Row]:
    return [
        {
            "new_tokens": "500",
            "turns": "3",
            "arm": arm,
            "draw": str(draw),
            "load": str(sessions / 160),
            "sessions": str(sessions),
            **dict.fromkeys(OBJECTIVES, str(share)),
        }
        for sessions, share in attained.items()
    ]


def test_an_arm_carries_the_load_at_which_a_tenth_of_its_turns_miss() -> None:
    assert carried(rows("a", {16: 1.0, 32: 0.95, 48: 0.85, 64: 0.95}), "gap_1s") == pytest.approx(
        40.0
    )
    assert carried(rows("a", {16: 0.89, 32: 1.0}), "gap_1s") == 0.0
    assert carried(rows("a", {16: 1.0, 32: 0.9}), "gap_1s") == 32.0
    unanswered: list[Row] = rows("a", {16: 1.0, 32: 0.0})
    unanswered[1]["gap_1s"] = ""
    assert carried(unanswered, "gap_1s") == pytest.approx(17.6)


def test_tables_and_figures_follow_from_the_lines() -> None:
    lines = [
        *rows("colocated", {16: 1.0, 32: 0.8}, draw=1),
        *rows("colocated", {16: 1.0, 32: 0.9}, draw=2),
        *rows("paced", {16: 0.5, 32: 0.5}),
        *rows("pd-2p6d", {16: 1.0, 32: 0.7}),
    ]
    found = summary(lines, "gap_1s")[500, 3]
    assert (found["colocated"].low, found["colocated"].high) == (3.0, 4.0)
    assert found["colocated"].whole == 20.0
    [_, _, line] = table(lines, "gap_1s")
    assert line == "| 500, 3 | 0.64 | ≥ 3.5 [3–4] | under 2 | 2.7 [2.7–2.7] |"
    [(place, points)] = advantage(lines, "gap_1s").items()
    assert place == (500, 3)
    assert points == pytest.approx(100 * (8 / 3 - 3.5) / 20)
    drawn = figure(lines, "gap_1s")
    assert drawn.startswith("<svg")
    assert "Simulated" in drawn
    assert f"{points:.3g}" in drawn


def test_every_place_has_loads_that_grow() -> None:
    experiment = experiment_of(8_000, 15, 2)
    sessions = [load.replay["max_inflight_sessions"] for load in experiment.loads]
    assert sessions == sorted(sessions)
    assert experiment.repeats == 2
    assert experiment.phases is not None
    assert experiment.phases.measure_s == 600.0
    packaged = experiment_of(2_000, 9, 3)
    # The file as it is packaged is one of the places.
    assert packaged.loads == load_experiment("separation")[0].loads


def test_a_place_is_simulated_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = experiment_of(32_000, 3, 1)
    small = whole.model_copy(
        update={
            "arms": [arm for arm in whole.arms if arm.name in ("colocated", "pd-4p4d")],
            "loads": whole.loads[:2],
        }
    )
    monkeypatch.setattr("eval.separation.experiment_of", lambda *_: small)
    output = tmp_path / "map"
    arguments = ["run", str(output), "--repeats", "1", "--only", "32000-3", "--jobs", "2"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    lines = read_rows(output / "runs.csv")
    assert {(line["arm"], line["load"]) for line in lines} == {
        (arm, load) for arm in ("colocated", "pd-4p4d") for load in ("0.15", "0.3")
    }
    for line in lines:
        assert int(line["measured_turns"]) > 10
        assert float(line["separated_share"]) == (line["arm"] == "pd-4p4d")
        assert math.isclose(float(line["cached_share"]), 0.5, abs_tol=0.1)
        shares = [float(line[name]) for name in OBJECTIVES]
        assert shares == sorted(shares, reverse=True)
    shown = CliRunner().invoke(app, ["show", str(output / "runs.csv"), "--figures", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert "| 32,000, 3 | 0.50 |" in shown.output
    assert (tmp_path / "separation-gap_1s.svg").is_file()
