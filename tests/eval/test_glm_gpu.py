"""Three rules of residency before the same pairs of workers, on the production profile: the
packaged experiment, planned and simulated."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import pytest

from eval.experiment_files import load_experiment
from eval.matrix import plan_runs
from eval.progress import Progress
from eval.report import find_runs
from eval.run_lines import Row, read_rows
from eval.runner import load_topologies
from eval.simulated_runs import simulate_experiment
from eval.site import launch_site
from tests.eval.conftest import write_growing
from tests.eval.published import RESULTS, command_options, plan_text

RULES = {
    "-off": {"rule": "off"},
    "": {"rule": "priced"},
    "-idle": {"rule": "priced", "prefill_idle_recompute_s": 3},
}
PAIRS = ("colocated-2-paced", "elastic-1p1d")
ARMS = [pair + rule for pair in PAIRS for rule in RULES]


@pytest.mark.parametrize("pair", PAIRS)
def test_the_arms_of_a_pair_differ_in_the_rule_alone(pair: str) -> None:
    experiment, _ = load_experiment("glm-gpu")
    assert experiment.keep_workers
    site = launch_site()
    topologies = load_topologies(site, experiment, plan_runs(experiment))
    of_pair = {rule: topologies[f"{pair}{rule}@16"] for rule in RULES}
    assert {rule: topology.router.residency for rule, topology in of_pair.items()} == RULES
    assert len({site.worker_key(topology) for topology in of_pair.values()}) == 1
    assert len({topology.router.policy for topology in of_pair.values()}) == 1


def test_the_command_that_is_planned_runs_twelve_before_16_on_one_pair() -> None:
    overrides, only = command_options("eval run glm-gpu")
    assert set(only) == {arm for arm in ARMS if arm.startswith("elastic")}
    experiment, _ = load_experiment("glm-gpu", overrides)
    runs = plan_runs(experiment, only)
    assert [run.replay.max_inflight_sessions for run in runs] == 3 * [12] + 3 * [16]
    assert experiment.phases is not None
    assert (experiment.phases.warm_up_s, experiment.phases.measure_s) == (20, 180)


def test_all_of_its_arms_are_simulated(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    write_growing(trace, sessions=40, turns=4, tokens=20_000, growth=1_280, apart_s=1.0)
    short = [f"trace.path={trace}", "repeats=1", "phases.warm_up_s=5", "phases.measure_s=30"]
    short.append('loads=[{name="12",replay={max_inflight_sessions=12}}]')
    experiment, _ = load_experiment("glm-gpu", short)
    with Progress() as progress:
        simulate_experiment(experiment, tmp_path / "out", source={}, progress=progress, only=ARMS)
    runs = find_runs([tmp_path / "out"])
    assert {run.arm for run in runs} == set(ARMS)
    for run in runs:
        assert run.simulated
        assert run.gpus == 2
        assert len(run.requests) > 10


def test_what_is_said_to_be_simulated_follows_from_the_lines() -> None:
    rows = read_rows(RESULTS / "simulated" / "glm-three-rules.csv")
    assert {row["draw"] for row in rows} == set("12345678")
    text = plan_text()
    for arm in ARMS:
        cells = []
        for sessions in ("12", "16"):
            of_arm = [row for row in rows if (row["arm"], row["sessions"]) == (arm, sessions)]
            assert len(of_arm) == 8
            cells += [_shown(of_arm[:1]), _shown(of_arm)]
        assert f"\n| `{arm}` | {' | '.join(cells)} |\n" in text


def _shown(rows: list[Row]) -> str:
    rate, share = (
        statistics.fmean(float(row[column]) for row in rows)
        for column in ("requests_per_s", "within_objective")
    )
    return f"{rate:.3f}; {100 * share:.0f} %"


def _good_per_s(arm: str, sessions: str) -> list[float]:
    rows = read_rows(RESULTS / "simulated" / "glm-three-rules.csv")
    return [
        int(row["measured_turns"]) * float(row["within_objective"]) / 180
        for row in rows
        if (row["arm"], row["sessions"]) == (arm, sessions)
    ]


def test_how_often_a_rule_has_more_turns_in_time_than_another() -> None:
    [said] = re.findall(r"^Turns in time a second over the eight draws.*$", plan_text(), re.M)
    told = []
    for pair in reversed(PAIRS):
        for sessions in ("12", "16"):
            priced = _good_per_s(pair, sessions)
            for rule in ("-off", "-idle"):
                of_rule = _good_per_s(pair + rule, sessions)
                told.append(
                    (
                        f"{sum(of_rule) / sum(priced):.2f}",
                        str(sum(a > b for a, b in zip(of_rule, priced, strict=True))),
                    )
                )
    assert re.findall(r"(\d\.\d\d) times \((\d) of 8\)", said) == told
