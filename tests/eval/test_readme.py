"""What the README's first screen says of agents a GPU follows from the published lines."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from eval.experiment_files import load_experiment
from eval.matrix import plan_runs
from eval.noise import Verdict
from eval.run_lines import Row, read_rows
from eval.runner import topology_overrides
from eval.separation import carried_by_draw
from launch.engines import Engine
from launch.planning import layout
from launch.topology_files import load_topology
from tests.eval.differences import by_draw
from tests.eval.published import RESULTS
from tests.eval.test_published_lanes import THINKING
from tests.eval.test_published_simulations import OTHER_DRAWS, measured_and_simulated
from tests.eval.windows import until

README = (Path(__file__).parents[2] / "README.md").read_text()
OURS = "sglang-fp8-host-paced-residency"
VLLM = "vllm-fp8-host-4096"
MIXED = "sglang-fp8-host-mixed"
# By row of the README's table, the measured arm and the simulated one, with its file.
ARMS = (
    ("vllm", "sessions-a-gpu", "vllm"),
    ("sglang", "sessions-a-gpu", "sglang"),
    ("sglang-residency", "sessions-a-gpu", "sglang-residency"),
    ("vllm-fp8-host", "sessions-a-gpu", "vllm-fp8-host"),
    (VLLM, "chunks", "vllm-fp8-host chunk 4096"),
    (f"{VLLM}-residency", "chunks", "vllm-fp8-host-residency chunk 4096"),
    (MIXED, "chunks", "sglang-fp8-host mixed chunk 4096"),
    (OURS, "sessions-a-gpu", OURS),
)
OF_EXPERIMENT = ("max_total_tokens=", "telemetry=")
# Which draws a cell is of, by how many figures it has, as the note below the table says.
DRAWS = {1: "3", 2: "23", 3: "123", 4: "1234"}


@pytest.fixture(scope="module")
def measured() -> list[Row]:
    return read_rows(RESULTS / "residency" / "sessions-a-gpu.csv")


def newest(rows: list[Row], arm: str, sessions: int) -> dict[str, Row]:
    """The last run of each draw."""
    of = [row for row in rows if (row["arm"], row["sessions"]) == (arm, str(sessions))]
    return {row["draw"]: row for row in of}


def carries(file: str, arm: str) -> float:
    """The mean over four simulated draws of how many sessions an arm carries."""
    rows = read_rows(RESULTS / "simulated" / f"{file}.csv")
    of_arm = [row for row in rows if row["arm"] == arm]
    assert {row["draw"] for row in of_arm} == set("1234")
    return statistics.fmean(carried_by_draw(of_arm, "within_objective"))


def test_the_table_has_the_newest_run_of_each_draw(measured: list[Row]) -> None:
    head, _, *rows = README[README.index("| turns in time, % |") :].split("\n\n")[0].splitlines()
    at = [int(cell) for cell in head.strip("|").split("|")[1:-1]]
    for line, (arm, file, simulated_arm) in zip(rows, ARMS, strict=True):
        *cells, carry = [cell.strip() for cell in line.strip("|").split("|")[1:]]
        for sessions, cell in zip(at, cells, strict=True):
            runs = newest(measured, arm, sessions)
            shares = [f"{100 * float(runs[d]['within_objective']):.0f}" for d in sorted(runs)]
            draws = "".join(sorted(runs))
            is_other = len(runs) == 1 and draws != DRAWS[1]
            said = f" (draw {draws})" if is_other else ""
            assert cell == " · ".join(shares) + said, (line, sessions)
            assert is_other or not runs or draws == DRAWS[len(runs)], (line, sessions)
        assert carry == f"{carries(file, simulated_arm):.1f}", line


def test_what_is_said_of_four_draws(measured: list[Row]) -> None:
    ten, twelve = (by_draw(measured, sessions, VLLM, OURS) for sessions in (10, 12))
    share, gap = ten["attainment"].effect, twelve["worst_gap_p90"].effect
    assert twelve["worst_gap_p90"].verdict is Verdict.BETTER
    points = (100 * share.value, 100 * share.low, 100 * share.high)
    said = "({:.0f} points more, 95 % interval {:.0f} to {:+.0f})".format(*points)
    assert said.replace("-", "−") in README
    shorter = [100 * (1 - value) for value in (gap.value, gap.high, gap.low)]
    words = "p90 with twelve {:.0f} % shorter than vLLM's [{:.0f} to {:.0f} %]"
    assert words.format(*shorter) in README


def test_what_is_said_of_twelve_sessions_of_four_draws(measured: list[Row]) -> None:
    """Whose turns want nine tenths of the KV and whose three quarters, the page's test says."""
    ours, mixed, vllm = (newest(measured, arm, 12) for arm in (OURS, MIXED, VLLM))

    def shares(runs: dict[str, Row], draws: str) -> str:
        return " and ".join(f"{100 * float(runs[d]['within_objective']):.0f}" for d in draws)

    assert (
        f"residency keeps {shares(ours, '23')} % in time, where SGLang's mixed chunks have "
        f"{shares(mixed, '23')} % and vLLM {shares(vllm, '23')} %"
    ) in README
    rates = [[float(of[d]["requests_per_s"]) for d in "14"] for of in (mixed, ours)]
    more = [100 * (theirs / own - 1) for theirs, own in zip(*rates, strict=True)]
    (percent,) = {round(value) for value in more}
    best = f"{shares(mixed, '14')} % in time at {percent} % more requests/s"
    said = f"mixed chunks are best, {best} than ours, which has {shares(ours, '14')} %"
    assert said in README


def test_what_is_said_of_more_sessions_than_fit(measured: list[Row]) -> None:
    def rates(arm: str, sessions: int) -> list[str]:
        runs = newest(measured, arm, sessions)
        return [f"{float(runs[draw]['requests_per_s']):.3f}" for draw in sorted(runs, reverse=True)]

    vllm, ours = rates(f"{VLLM}-residency", 24), rates(OURS, 24)
    assert rates("vllm-fp8-host-residency", 24) == vllm
    said = f"it answers {vllm[0]} requests/s with vLLM, {' and '.join(ours)} with SGLang"
    assert said in README
    without = until("vllm-fp8-host-twentyfour-cut-off-again", 230)
    assert f"{without['answers']} answers in 230 s" in README
    assert f"each first token after {min(without['waits_s']):.0f} s at least" in README
    sixteen = f"have {rates(MIXED, 16)[0]} requests/s, ours {rates(OURS, 16)[0]}"
    assert f"{sixteen}." in README


def test_what_is_said_of_bf16_kv(measured: list[Row]) -> None:
    shares, more = {}, {}
    for arm in ("vllm", "vllm-host", "sglang-host"):
        plain, behind = (newest(measured, of, 12) for of in (arm, f"{arm}-residency"))
        assert {float(plain[draw]["within_objective"]) for draw in "23"} == {0.0}
        percent = [100 * float(behind[draw]["within_objective"]) for draw in "23"]
        shares[arm] = "{:.0f} and {:.0f} %".format(*percent)
        rates = [[float(of[draw]["requests_per_s"]) for draw in "23"] for of in (plain, behind)]
        ratios = [ours / theirs for theirs, ours in zip(*rates, strict=True)]
        more[arm] = "{:.1f} and {:.1f}".format(*ratios)
    vllm = f"[behind residency {shares['vllm']}](docs/results/residency-bf16.md)"
    tier = f"with a tier it is {shares['vllm-host']}, with SGLang {shares['sglang-host']}"
    assert f"{vllm} at {more['vllm']} times the requests/s; {tier}, " in README
    assert f"at {more['vllm-host']}, {more['sglang-host']} times.\n" in README


def test_what_is_said_of_a_minute_of_thinking() -> None:
    rows = read_rows(THINKING)
    more = {}
    for arm in ("sglang", "vllm", "sglang-host", "vllm-host"):
        plain, behind = (newest(rows, of, 12) for of in (arm, f"{arm}-residency"))
        more[arm] = [
            float(behind[draw]["requests_per_s"]) / float(plain[draw]["requests_per_s"])
            for draw in "23"
        ]
    assert max(*more["sglang"], *more["vllm"]) < 1.35  # six answers of 18: not told apart
    sglang, vllm = (
        "{:.1f} and {:.1f} times".format(*more[f"{of}-host"]) for of in ("sglang", "vllm")
    )
    assert f"residency brings SGLang {sglang} and vLLM {vllm} the requests/s" in README


def test_what_is_said_of_how_far_the_simulator_is_off() -> None:
    off = [
        round(100 * (float(simulated["requests_per_s"]) / float(run["requests_per_s"]) - 1))
        for lines, is_of in OTHER_DRAWS
        for run, simulated in measured_and_simulated(lines, is_of)
        if "residency" in run["arm"]
    ]
    far = [percent for percent in off if abs(percent) > 10]
    assert (len(far), sum(percent > 0 for percent in far)) == (7, 6)
    assert (
        f"within 10 % of the requests/s of {len(off) - 7} of {len(off)} runs, "
        f"{min(map(abs, far))} to {max(map(abs, far))} % off in seven, "
        "of which it is too kind in six"
    ) in README


def test_what_is_said_of_the_target_that_was_missed() -> None:
    vllm, ours = (carries(file, arm) for _, file, arm in (ARMS[4], ARMS[7]))
    assert f"{ours / vllm:.2f} times vLLM in chunks of 4,096, simulated" in README


@pytest.mark.parametrize(
    ("name", "arm"), [("sglang-agents:1", OURS), ("vllm-agents:1", f"{VLLM}-residency")]
)
def test_the_topologies_for_agents_start_what_was_measured(name: str, arm: str) -> None:
    """But for the KV memory, which the experiment makes that of another GPU, and its telemetry."""
    experiment, _ = load_experiment("residency-gpu", [])
    runs = [run for run in plan_runs(experiment) if run.arm.name == arm]
    given = [word for word in topology_overrides(runs[0]) if not word.startswith(OF_EXPERIMENT)]
    measured = load_topology(str(runs[0].arm.topology), given)
    packaged = load_topology(name, ["text=false"])
    engine = Engine(measured.engine.name, Path("/python"), {measured.engine.name: "0"})
    commands = [layout(of, Path("/run/x"), engine, 8) for of in (measured, packaged)]
    (expected,), (found,) = (made.workers for made in commands)
    assert found.argv == expected.argv
    assert found.environment == expected.environment
    assert packaged.router == measured.router
