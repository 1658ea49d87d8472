"""An experiment is simulated as it is written, and everything made of it says so."""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from deltaserve.errors import InputError
from eval.cli import app
from eval.experiment_files import load_experiment
from eval.progress import Progress
from eval.records import read_run
from eval.report import find_runs, find_searches, gather, write_report
from eval.report.answer import answer
from eval.simulate import packaged_calibrations, read_calibration, simulate
from eval.simulated_runs import simulate_experiment
from eval.validation import read_lines
from replay.lanes import Lanes, Start
from replay.plan import Planned, make_plan
from replay.plays import Order, Plays, TicketCounter
from replay.trace import read_trace
from router_policies import _core
from tests.eval.conftest import Recipe, write_run

CALIBRATION = "Qwen3-Coder-30B-A3B bf16, H200, SGLang 0.5.17"

EXPERIMENT = """
name = "made"
seed = 4
repeats = 2
[trace]
path = "{trace}"
[replay]
mode = "closed"
max_inflight_sessions = 3
max_think_s = 2.0
timeout_s = 300
[phases]
start = "mid"
warm_up_s = 5
measure_s = 120
recycle = true
[set]
kv_events = true
[simulate]
kv_tokens = 60000
[[arms]]
name = "off"
topology = "sglang:2"
policy = "unified"
set = {{ router = {{ admission = {{ rule = "off" }} }} }}
[[arms]]
name = "large"
topology = "sglang:2"
policy = "unified"
set = {{ max_total_tokens = 120000, workers = {{ colocated = {{ host_kv_tokens = 300000 }} }} }}
"""


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    """Six sessions of six turns, their prompts growing by the answer and more."""
    lines = []
    for session in range(6):
        ids: list[int] = []
        length = 9_000 + 500 * session
        for turn in range(6):
            blocks = -(-length // 64)
            ids = [*ids[:-1], *(10_000 * (session + 1) + 1_000 * turn + i for i in range(blocks))]
            ids = ids[:blocks]
            lines.append(
                {
                    "request_id": f"s{session}:{turn}",
                    "session_id": f"s{session}",
                    "turn": turn,
                    "timestamp_s": session + turn * 5.0,
                    "input_length": length,
                    "output_length": 80,
                    "block_size": 64,
                    "hash_ids": ids,
                    "think_time_s": 1.0 if turn else None,
                }
            )
            length += 700
    lines.sort(key=lambda line: float(str(line["timestamp_s"])))
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    path = tmp_path / "made.toml"
    path.write_text(EXPERIMENT.format(trace=trace))
    return path


def run(experiment: Path, output: Path, *overrides: str, only: list[str] | None = None) -> Any:
    parsed, _ = load_experiment(str(experiment), list(overrides))
    with Progress() as progress:
        return simulate_experiment(parsed, output, source={}, progress=progress, only=only)


def test_every_arm_and_repeat_runs_and_the_report_says_that_it_is_simulated(
    experiment: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    summary = run(experiment, output)
    assert (summary.complete, summary.failed, summary.invalid) == (4, [], [])
    runs = find_runs([output])
    for one in runs:
        assert one.simulated == CALIBRATION
        assert one.gpus == 2
        assert len(one.requests) > 20
        assert one.window is not None
        assert one.window.length_s == pytest.approx(120)
        for name in ("requests.jsonl", "decisions.jsonl", "phases.json", "simulation.json"):
            assert (one.folder / name).is_file(), name
    by_name = {(one.arm, one.repeat): one for one in runs}
    plan = orjson.loads((by_name["large", 1].folder / "plan.json").read_bytes())
    [worker] = plan["workers"]
    assert (worker["kv_tokens"], worker["host_kv_tokens"]) == (120_000, 300_000)
    assert worker["chunk_tokens"] == 8192
    assert worker["count"] == 2
    off = orjson.loads((by_name["off", 1].folder / "plan.json").read_bytes())
    assert off["workers"][0]["kv_tokens"] == 60_000
    assert off["router"]["admission"] == {"rule": "off"}
    assert off["router"]["kv_events"] is True
    # Each round has a draw of its own, the same for both arms.
    seeds = {key: one.manifest["identity"]["seed"] for key, one in by_name.items()}
    assert seeds["off", 1] == seeds["large", 1] != seeds["off", 2] == seeds["large", 2]
    pages = write_report(gather(runs, draws=50), tmp_path / "report")
    for page in pages:
        text = page.read_text()
        assert "(simulated)" in text
        assert "Simulated, not measured" in text
        assert CALIBRATION in text
        assert "Measured on" not in text
    # The same again: everything is there.
    assert run(experiment, output).kept == 4


def begun_by_replay(trace: Path, seed: int, sessions: int) -> list[str]:
    """The first requests of the sessions that `replay` begins, in its order; three in flight, with
    answers and think times that take no time."""
    plan = make_plan(read_trace(trace))
    sent: dict[str, str] = {}

    async def send(request: Planned, _due_s: float) -> None:
        if not request.primes:
            sent.setdefault(request.session_id, request.request_id)

    async def main() -> None:
        lanes = Lanes(
            Plays(plan.requests),
            send,
            time.monotonic,
            Order(plan.trees, seed, shuffled=True),
            TicketCounter(sessions),
            start=Start(first_mid=True),
            think_scale=0.0,
        )
        await lanes.closed(3)

    asyncio.run(main())
    return list(sent.values())


def test_the_sessions_of_a_run_are_those_that_replay_would_begin(
    experiment: Path, tmp_path: Path
) -> None:
    """The same, from the same turns, play after play."""
    run(experiment, tmp_path / "out", "repeats=1", "phases.measure_s=60", only=["off"])
    found = read_run(tmp_path / "out/off/r1")
    begun: dict[str, str] = {}
    lines = read_lines(found.folder / "requests.jsonl")
    for line in sorted(lines, key=lambda line: float(line["scheduled_s"])):
        if line["phase"] != "prime":
            begun.setdefault(line["session_id"], line["request_id"])
    assert 12 < len(begun) <= 60  # of six in the trace, in ten plays
    trace = experiment.parent / "trace.jsonl"
    expected = begun_by_replay(trace, found.manifest["identity"]["seed"], len(begun))
    assert set(list(begun.values())[:3]) == set(expected[:3])
    assert set(begun.values()) == set(expected)


def test_a_search_finds_what_each_arm_carries(experiment: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    text = experiment.read_text().replace(
        "[simulate]",
        '[search]\nover = "replay.max_inflight_sessions"\nstart = 2\nhigh = 8\nrepeats = 1\n'
        "[simulate]",
    )
    experiment.write_text(text)
    run(experiment, output, "phases.measure_s=60", only=["large"])
    [found] = find_searches([output])
    assert found.arm == "large"
    assert found.per_unit > 0
    levels = {read_run(path.parent).load for path in output.rglob("manifest.json")}
    assert len(levels) >= 3


def test_a_search_over_a_rule_that_starves_carries_no_more_than_it_lets_in_and_says_why(
    experiment: Path, tmp_path: Path
) -> None:
    """`cap` lets two sessions in until they end, which is after the window."""
    output = tmp_path / "out"
    text = experiment.read_text().replace(
        "[simulate]",
        '[search]\nover = "replay.max_inflight_sessions"\nstart = 2\nhigh = 4\nrepeats = 1\n'
        '[[arms]]\nname = "cap"\ntopology = "sglang:1"\npolicy = "unified"\n'
        'set = { router = { admission = { rule = "cap", sessions = 2 } } }\n'
        "[simulate]",
    )
    experiment.write_text(text)
    keys = ("phases.start=cold", "phases.warm_up_s=1", "phases.measure_s=8")
    lax = ("slo.attainment=0.5", "slo.stretch_p90=inf", "slo.late_share_p90=0.5")
    run(experiment, output, *keys, *lax, only=["cap"])
    [found] = find_searches([output])
    starved = {level["load"]: level["starved_sessions"] for level in found.levels}
    assert (found.agents, starved) == (2, {1: 0, 2: 0, 3: 1, 4: 2})
    evidence = gather(find_runs([output]), draws=20, searches=[found])
    assert "with 3: 1 session gets nothing all the window" in answer(evidence)


def test_a_search_over_arrivals_has_no_level_of_one_session_an_hour(
    experiment: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    text = experiment.read_text().replace(
        "[simulate]",
        '[search]\nover = "replay.sessions_per_hour"\nstart = 200\nlow = 100\nhigh = 400\n'
        "repeats = 1\n[simulate]",
    )
    text = text.replace(
        'mode = "closed"\nmax_inflight_sessions = 3', 'mode = "sessions"\nsessions_per_hour = 200'
    )
    experiment.write_text(text.replace('start = "mid"', 'start = "cold"'))
    run(experiment, output, only=["large"])
    [found] = find_searches([output])
    # Which measured nothing, so that no level above it counted.
    assert found.per_unit > 0
    assert not (output / "large@1").exists()


def test_a_preset_that_recycles_needs_no_recycle_among_the_phases(
    experiment: Path, tmp_path: Path
) -> None:
    text = experiment.read_text().replace('mode = "closed"', 'preset = "agentx"')
    experiment.write_text(text.replace("recycle = true\n", ""))
    assert run(
        experiment, tmp_path / "out", "phases.measure_s=900", "repeats=1", only=["large"]
    ).complete


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("arms.off.topology=vllm-pd:1p1d", "arm off: workers with role .prefill. of vllm"),
        ("arms.large.policy=some.module:Policy", "arm large: "),
        ("simulate.calibration=nowhere.toml", "arm large: calibration nowhere.toml"),
        ("arms.off.topology=laptop-sglang-1", "arm off: simulate.calibration"),
        ("arms.off.set.router.kind=none", "arm off: "),
        ("arms.off.set.router.admission.rule=pricd", "arm off: router.admission: rule: pricd is"),
    ],
)
def test_what_cannot_be_simulated_names_its_arm(
    experiment: Path, tmp_path: Path, override: str, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        run(experiment, tmp_path / "out", override)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("environment", "target_itl_s"),
    [
        ({}, 0.08),
        ({"DELTASERVE_PACED_TARGET_ITL_MS": "300"}, 0.3),
        ({"DELTASERVE_PACED_INTERFERENCE": "stock"}, None),
        ({"DELTASERVE_ELASTIC_TARGET_ITL_MS": "300"}, 0.08),
    ],
)
def test_prefill_is_paced_as_the_workers_variables_say(
    environment: dict[str, str], target_itl_s: float | None, experiment: Path, tmp_path: Path
) -> None:
    given = [f"set.environment.{name}={value!r}" for name, value in environment.items()]
    run(experiment, tmp_path / "out", "set.paced=true", "repeats=1", *given, only=["off"])
    plan = orjson.loads((tmp_path / "out" / "off" / "r1" / "plan.json").read_bytes())
    assert [worker["target_itl_s"] for worker in plan["workers"]] == [target_itl_s]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ((), "qwen3-coder-30b-a3b-h200-sglang"),
        (("set.kv_cache_dtype='fp8_e4m3'",), "qwen3-coder-30b-a3b-h200-sglang-fp8"),
        (("set.kv_cache_dtype='auto'",), "qwen3-coder-30b-a3b-h200-sglang"),
        (
            ("set.kv_cache_dtype='fp8_e4m3'", "set.model='qwen3-coder-30b-a3b-fp8'"),
            "qwen3-coder-30b-a3b-fp8-h200-sglang",
        ),
        (
            (
                "arms.off.topology='vllm:1'",
                "set.kv_cache_dtype='fp8_e4m3'",
                "set.model='qwen3-coder-30b-a3b-fp8'",
            ),
            "qwen3-coder-30b-a3b-h200-vllm-fp8",
        ),
    ],
)
def test_workers_with_fp8_kv_or_weights_have_constants_of_their_own(
    given: tuple[str, ...], name: str, experiment: Path, tmp_path: Path
) -> None:
    run(experiment, tmp_path / "out", "repeats=1", *given, only=["off"])
    plan = orjson.loads((tmp_path / "out" / "off" / "r1" / "plan.json").read_bytes())
    assert [worker["calibration"] for worker in plan["workers"]] == [read_calibration(name)]


def test_the_router_is_asked_once_for_each_configuration_not_for_each_run(
    experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(_core, "check", asked.append)
    # A setting that no other test has, for what was asked before is known.
    given = ("set.router.admission.max_wait_s=301", "phases.measure_s=20", "repeats=3")
    assert run(experiment, tmp_path / "out", *given).complete == 6
    rules = {orjson.loads(text)["admission"].get("rule") for text in asked}
    assert (len(asked), rules) == (2, {"off", None})


def test_a_pace_that_is_no_time_names_its_variable(experiment: Path, tmp_path: Path) -> None:
    given = ("set.paced=true", "set.environment.DELTASERVE_PACED_TARGET_ITL_MS='soon'")
    with pytest.raises(InputError, match="off: DELTASERVE_PACED_TARGET_ITL_MS='soon': expected"):
        run(experiment, tmp_path / "out", *given, only=["off"])


def test_how_much_a_step_prefills_is_the_topologys(experiment: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    run(experiment, output, "repeats=1", "arms.off.set.max_prefill_tokens=4096", only=["off"])
    plan = orjson.loads((output / "off" / "r1" / "plan.json").read_bytes())
    assert plan["workers"][0]["max_prefill_tokens"] == 4096


@pytest.mark.parametrize("key", ["prefill_max_requests", "prefill_decode_interval"])
def test_a_pacing_key_that_the_simulator_does_not_know_names_its_arm(
    experiment: Path, tmp_path: Path, key: str
) -> None:
    with pytest.raises(InputError, match=f"arm off: {key}: is not simulated"):
        run(experiment, tmp_path / "out", f"arms.off.set.{key}=2")


def test_a_capacity_that_nobody_says_names_its_arm(experiment: Path, tmp_path: Path) -> None:
    experiment.write_text(experiment.read_text().replace("kv_tokens = 60000", ""))
    with pytest.raises(InputError, match="arm off: its KV capacity"):
        run(experiment, tmp_path / "out")


def test_a_run_that_was_ended_in_its_middle_says_that_it_is_simulated(
    experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_arguments: Any, **_more: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("eval.simulated_runs.simulate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(experiment, tmp_path / "out", only=["off"])
    left = read_run(tmp_path / "out/off/r1")
    assert left.manifest["state"] == "running"
    assert left.simulated == CALIBRATION


def test_simulated_and_measured_runs_are_not_in_one_report(
    experiment: Path, tmp_path: Path
) -> None:
    run(experiment, tmp_path / "out", "repeats=1", only=["off"])
    write_run(tmp_path / "out", Recipe(arm="measured"))
    with pytest.raises(InputError, match=r"is simulated and .* is measured"):
        gather(find_runs([tmp_path / "out"]))


def test_the_command_line(experiment: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    arguments = ["simulate", str(experiment), "--output", str(output), "--set", "repeats=1"]
    result = CliRunner().invoke(app, [*arguments, "--only", "off"])
    assert result.exit_code == 0, result.output
    assert "simulated, not measured: 1 runs complete" in result.output
    assert (output / "off/r1/requests.jsonl").is_file()
    refused = CliRunner().invoke(app, [*arguments, "--trace", "x.jsonl"])
    assert isinstance(refused.exception, InputError)
    assert "--trace" in str(refused.exception)


def test_each_round_draws_its_constants_the_same_for_both_arms(
    experiment: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    assert run(experiment, output, "simulate.calibration_spread=true").complete == 4
    base_s = {
        (one.arm, one.repeat): orjson.loads((one.folder / "plan.json").read_bytes())["workers"][0][
            "calibration"
        ]["decode_base_s"]
        for one in find_runs([output])
    }
    assert base_s["off", 1] == base_s["large", 1] != base_s["off", 2] == base_s["large", 2]
    with pytest.raises(InputError, match="its error drawn"):
        run(experiment, output)


def test_a_topology_that_was_edited_is_not_taken_for_the_one_of_the_finished_runs(
    experiment: Path, tmp_path: Path
) -> None:
    topology, output = tmp_path / "mine.toml", tmp_path / "out"
    text = 'extends = "sglang:1"\nmax_total_tokens = 60000\n'
    given = (f"arms.off.topology='{topology}'",)
    topology.write_text(text)
    run(experiment, output, "repeats=1", *given, only=["off"])
    # Where and how it is started is no other topology.
    topology.write_text(text + 'description = "mine"\nbase_port = 31000\nready_timeout_s = 60\n')
    assert run(experiment, output, "repeats=1", *given, only=["off"]).kept == 1
    topology.write_text(text.replace("60000", "20000") + "[environment]\nSLOW = '1'\n")
    words = r"off/r1: holds a finished run of another topology than .*mine.toml is now \(max_tot"
    with pytest.raises(
        InputError, match=f"{words}.* 60000 and 20000; environment {{}} and"
    ) as told:
        run(experiment, output, *given, only=["off"])
    assert "\n" not in str(told.value)
    # The second round by itself: the two are not repeats of one thing.
    (output / "off" / "r1").rename(tmp_path / "first")
    run(experiment, output, *given, only=["off"])
    shutil.rmtree(output / "off" / "r1")
    (tmp_path / "first").rename(output / "off" / "r1")
    with pytest.raises(InputError, match="both are runs of 'off', but with max_total_tokens"):
        gather(find_runs([output]), draws=20)


def test_a_calibration_file_that_was_fitted_anew_is_not_the_one_of_the_finished_runs(
    experiment: Path, tmp_path: Path
) -> None:
    path, output = tmp_path / "mine.toml", tmp_path / "out"
    text = packaged_calibrations()["qwen3-coder-30b-a3b-h200-sglang"].read_text()
    given = (f"simulate.calibration='{path}'", "repeats=1")
    path.write_text(text)
    assert run(experiment, output, *given, only=["off"]).complete == 1
    assert run(experiment, output, *given, only=["off"]).kept == 1
    path.write_text(text.replace("prefill_tokens_per_s = 214511", "prefill_tokens_per_s = 20000"))
    with pytest.raises(
        InputError, match=r"holds a finished run with engine .*mine.toml \([0-9a-f]"
    ):
        run(experiment, output, *given, only=["off"])


def test_gaps_and_stalls_are_what_they_are_with_every_arrival_written(
    experiment: Path, tmp_path: Path
) -> None:
    """Arrivals are left out of a simulated answer's line only where tokens came at one pace."""
    text = experiment.read_text()
    head, _, rest = text.partition("[trace]")
    _, _, rest = rest.partition("[replay]")
    turns = "sessions = 40, turns = 5, new_tokens = 6000, output_tokens = 300, think_s = 5"
    experiment.write_text(f"{head}[trace]\nturns = {{ {turns} }}\n[replay]{rest}")
    given = ("repeats=1", "replay.max_inflight_sessions=6", "phases.measure_s=60")
    run(experiment, tmp_path / "out", *given, only=["large"])
    folder = tmp_path / "out" / "large" / "r1"
    whole = tmp_path / "whole" / "large" / "r1"
    shutil.copytree(folder, whole)
    plan = orjson.loads((folder / "plan.json").read_bytes())
    simulate(plan | {"output": {"all_arrivals": True}}, whole)
    [few], [every] = (gather(find_runs([place]), draws=20).cells for place in (folder, whole))
    assert every.interference.index.value > 2
    assert few.interference.index.value == pytest.approx(every.interference.index.value, rel=0.05)
    for at in range(3):
        assert few.latency["itl"][at].value == pytest.approx(
            every.latency["itl"][at].value, rel=0.05
        )
        for name in ("ttft", "tpot", "worst_gap"):
            assert few.latency[name][at].value == every.latency[name][at].value
    assert few.output_tps == pytest.approx(every.output_tps, rel=0.01)
    sizes = [(place / "requests.jsonl").stat().st_size for place in (folder, whole)]
    assert sizes[0] < 0.6 * sizes[1]
