from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest

from deltaserve.errors import InputError
from eval.experiment import Experiment, Slo
from eval.experiment_files import load_experiment, packaged_experiments
from eval.matrix import plan_runs

GOOD = """
name = "x"
seed = 3
repeats = 4

[trace]
path = "trace.jsonl"

[replay]
mode = "closed"
max_inflight_sessions = 2

[[arms]]
name = "one"
topology = "laptop-sglang"
policy = "unified"
policy_params = { overload_factor = 1.5 }

[[arms]]
name = "two"
topology = "laptop-vllm"

[[arms]]
name = "three"
topology = "laptop-sglang-pd"
"""

OTHER_TURNS_KEYS = "sessions = 9, turns = 3, output_tokens = 100, think_s = 1.0"
OTHER_PREFIX_KEYS = "requests = 9, prefixes = 2, suffix_tokens = 9, output_tokens = 4"


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "experiment.toml"
    path.write_text(text)
    return str(path)


def load(tmp_path: Path, text: str, *overrides: str) -> Experiment:
    return load_experiment(written(tmp_path, text), list(overrides))[0]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("seed = 3", "sead = 3", "sead: unknown key (did you mean 'seed'?)"),
        (
            'policy = "unified"',
            'polcy = "unified"',
            "arms.one.polcy: unknown key (did you mean 'policy'?)",
        ),
        ("seed = 3", "[phases]\nwarmup_s = 1", "phases.warmup_s: unknown key (did you mean 'warm"),
        ('[trace]\npath = "trace.jsonl"', "zzz = 1", "trace: is missing; zzz: unknown key"),
        ("repeats = 4", "repeats = 0", "repeats: input should be greater than or equal to 1"),
        ("repeats = 4", 'repeats = "4"', "repeats: input should be a valid integer (found '4')"),
        ('name = "two"', 'name = "one"', "the name 'one' is used twice"),
        ('path = "trace.jsonl"', "", "trace: give exactly one of path, synth, convert"),
        ('mode = "closed"', 'mode = "shut"', "replay.mode: input should be 'open', 'closed' or"),
        ('mode = "closed"', 'mode = "sessions"', 'sessions_per_hour needs mode = "sessions"'),
        ("seed = 3", "[phases]\nwarm_up_s = -1", "phases.warm_up_s: input should be greater"),
        ('mode = "closed"', "", 'replay: max_inflight_sessions needs mode = "closed"'),
        ("seed = 3", 'baseline = "nobody"', "no arm is named 'nobody'"),
        ("seed = 3", "seed = = 3", "not TOML"),
        (
            'path = "trace.jsonl"',
            f"prefixes = {{ prefix_tokens = 250, {OTHER_PREFIX_KEYS} }}",
            "trace.prefixes: prefix_tokens: expected a multiple of 100",
        ),
        (
            'path = "trace.jsonl"',
            f"turns = {{ new_tokens = 250, {OTHER_TURNS_KEYS} }}",
            "trace.turns: new_tokens: expected a multiple of 100",
        ),
        (
            'topology = "laptop-vllm"',
            'topology = "laptop-vllm"\nloads = ["high"]',
            "arms.two.loads: no load is named 'high'",
        ),
    ],
)
def test_a_wrong_file_is_answered_in_one_line_with_file_and_key(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    assert old in GOOD
    with pytest.raises(InputError) as error:
        load(tmp_path, GOOD.replace(old, new, 1))
    message = str(error.value)
    assert "\n" not in message
    assert message.startswith(str(tmp_path / "experiment.toml"))
    assert said in message


def test_a_limit_that_nothing_waits_for_may_be_as_large_as_one_likes(tmp_path: Path) -> None:
    """So that one can be left out, and runs that were kept with one stay readable."""
    loaded = load(tmp_path, GOOD, "slo.ttft_s=1e9", "validity.max_client_lag_p99_s=1e9")
    assert loaded.validity.max_client_lag_p99_s == 1e9


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("phases.measure_s=1e300", "phases.measure_s: expected at most 31,622,400 (a year in sec"),
        ("phases.warm_up_s=inf", "phases.warm_up_s: expected at most 31,622,400 (a year in sec"),
        ("replay.timeout_s=1e99", "replay.timeout_s: expected at most 31,622,400 (a year in sec"),
        ("budget_minutes=1e9", "budget_minutes: expected at most 527,040 (a year in minutes)"),
        ("repeats=1000000", "repeats: expected at most 10,000 (ten thousand runs of each arm)"),
        ("replay.max_inflight_sessions=10000000000", "sessions: expected at most 1,000,000,000 ("),
        ("replay.think_scale=1e300", "think_scale: expected at most 1,000,000 (a million times"),
        ("replay.processes=65536", "replay.processes: expected at most 1,024 (no machine runs"),
        ("simulate.kv_tokens=1000000000000", "kv_tokens: expected at most 10,000,000,000 ("),
        ("arms.one.replay={max_think_s = 1e300}", "max_think_s"),
    ],
)
def test_finite_numbers_that_no_run_can_have_are_refused_with_file_key_and_bound(
    tmp_path: Path, override: str, said: str
) -> None:
    with pytest.raises(InputError) as error:
        load(tmp_path, GOOD, override)
    assert str(error.value).startswith(str(tmp_path / "experiment.toml"))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unknown_experiment_is_answered_with_the_packaged_names() -> None:
    with pytest.raises(
        InputError, match=r"nothing: no such experiment file; packaged ones: .*demo"
    ):
        load_experiment("nothing")


def test_every_packaged_experiment_is_valid() -> None:
    assert "demo" in packaged_experiments()
    for name in packaged_experiments():
        experiment, _ = load_experiment(name)
        assert experiment.name == name


@pytest.mark.parametrize("name", packaged_experiments())
def test_packaged_experiments_on_gpus_measure_a_steady_state(name: str) -> None:
    experiment, _ = load_experiment(name)
    topologies = [arm.topology or "" for arm in experiment.arms]
    if all(topology.startswith("laptop") for topology in topologies):
        return
    if experiment.trace.prefixes is not None:
        return  # prompts of one turn have no middle to begin in
    phases = experiment.phases
    assert phases is not None
    assert phases.start == "mid"
    assert phases.recycle
    assert (phases.warm_up_s or 0) >= 60
    assert (phases.measure_s or 0) >= 300
    assert (experiment.replay.max_think_s or 0) >= 10
    assert experiment.replay.splice_outputs
    for load in experiment.loads:
        assert "max_think_s" not in load.replay
        assert load.replay.get("mode", "closed") in ("closed", "sessions")


def test_overrides_reach_tables_arms_and_typed_values(tmp_path: Path) -> None:
    experiment = load(
        tmp_path,
        GOOD,
        "repeats=2",
        "replay.max_inflight_sessions=8",
        "arms.two.policy=round_robin",
        "arms.one.policy_params.overload_factor=2.5",
        "trace.synth.profile=glm-agentic",
        "trace.synth.requests=10",
    )
    assert experiment.repeats == 2
    assert experiment.replay.max_inflight_sessions == 8
    assert experiment.arms[1].policy == "round_robin"
    assert experiment.arms[0].policy_params == {"overload_factor": 2.5}
    assert experiment.trace.path is None
    assert experiment.trace.synth is not None
    assert experiment.trace.synth.requests == 10


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("repeats", "expected key=value"),
        ("arms.nobody.policy=x", "arms.nobody: no such entry; there are one, two, three$"),
        ("name.x=1", "name is not a table"),
        ("replay.speed=2", "replay.speed: unknown key"),
    ],
)
def test_a_wrong_override_is_answered_in_one_line(tmp_path: Path, override: str, said: str) -> None:
    with pytest.raises(InputError, match=said.replace(".", r"\.")):
        load(tmp_path, GOOD, override)


def test_runs_are_interleaved_in_whole_rounds_in_an_order_that_the_seed_fixes(
    tmp_path: Path,
) -> None:
    experiment = load(tmp_path, GOOD)
    runs = plan_runs(experiment)
    rounds = [[run.cell for run in runs[i : i + 3]] for i in range(0, 12, 3)]
    assert all(sorted(cells) == ["one", "three", "two"] for cells in rounds)
    assert [run.repeat for run in runs] == sorted(run.repeat for run in runs)
    assert len({tuple(cells) for cells in rounds}) > 1
    assert [run.folder for run in plan_runs(experiment)] == [run.folder for run in runs]
    other = load(tmp_path, GOOD, "seed=4")
    assert [run.folder for run in plan_runs(other)] != [run.folder for run in runs]


def test_loads_multiply_arms_and_a_loads_settings_reach_its_runs(tmp_path: Path) -> None:
    text = GOOD + (
        '\n[[loads]]\nname = "low"\nreplay = { max_inflight_sessions = 1 }\n'
        '[[loads]]\nname = "high"\nreplay = { max_inflight_sessions = 9 }\n'
    )
    experiment = load(tmp_path, text, "arms.two.loads=['low']", "repeats=1")
    runs = plan_runs(experiment)
    assert Counter(run.cell for run in runs) == dict.fromkeys(
        ["one@low", "one@high", "three@low", "three@high", "two@low"], 1
    )
    sessions = {run.cell: run.replay.max_inflight_sessions for run in runs}
    assert sessions["one@low"] == 1
    assert sessions["one@high"] == 9


def test_cells_of_a_lower_priority_run_all_their_repeats_first(tmp_path: Path) -> None:
    text = GOOD + (
        '\n[[loads]]\nname = "often"\npriority = 1\n[[loads]]\nname = "seldom"\npriority = 2\n'
    )
    runs = plan_runs(load(tmp_path, text, "arms.three.priority=3", "repeats=2"))
    levels = [3 if run.arm.name == "three" else 1 + (run.load == "seldom") for run in runs]
    assert levels == sorted(levels)
    assert [run.repeat for run in runs] == [1, 1, 2, 2, 1, 1, 2, 2, 1, 1, 2, 2]


def test_a_loads_keys_of_the_topology_come_on_top_of_the_arms(tmp_path: Path) -> None:
    text = GOOD.replace(
        'topology = "laptop-vllm"', 'topology = "laptop-vllm"\nset = { a = 1, b = 1 }'
    )
    runs = plan_runs(load(tmp_path, text + '\n[[loads]]\nname = "big"\nset = { b = 2 }\n'))
    sets = {run.arm.name: run.set for run in runs}
    assert sets == {"one": {"b": 2}, "two": {"a": 1, "b": 2}, "three": {"b": 2}}


def test_the_experiments_own_keys_of_the_topology_reach_every_arm_and_yield_to_it(
    tmp_path: Path,
) -> None:
    given = ["set.base_port=0", 'set.engine.python="/p"', "arms.one.set.engine.version='1'"]
    runs = plan_runs(load(tmp_path, GOOD, *given, "arms.two.set.base_port=31000", "repeats=1"))
    sets = {run.arm.name: run.set for run in runs}
    assert sets == {
        "one": {"base_port": 0, "engine": {"python": "/p", "version": "1"}},
        "two": {"base_port": 31000, "engine": {"python": "/p"}},
        "three": {"base_port": 0, "engine": {"python": "/p"}},
    }


def test_only_keeps_the_named_arms_in_the_order_of_the_whole_plan(tmp_path: Path) -> None:
    experiment = load(tmp_path, GOOD)
    kept = [run.folder for run in plan_runs(experiment, ["two"])]
    assert kept == [run.folder for run in plan_runs(experiment) if run.arm.name == "two"]
    with pytest.raises(InputError, match="no arm is named 'four'"):
        plan_runs(experiment, ["four"])
    with pytest.raises(InputError, match=r"--only two@x: arm two has no load 'x' \(it has none\)"):
        plan_runs(experiment, ["two@x"])


def test_only_keeps_an_arm_under_one_of_its_loads(tmp_path: Path) -> None:
    loads = '[[loads]]\nname = "x"\n[[loads]]\nname = "y"\n'
    experiment = load(tmp_path, GOOD + loads)
    kept = {run.cell for run in plan_runs(experiment, ["two@y", "one"])}
    assert kept == {"two@y", "one@x", "one@y"}
    with pytest.raises(InputError, match=r"arm two has no load 'z' \(it has x, y\)"):
        plan_runs(experiment, ["two@z"])


def test_a_runs_digest_changes_with_its_settings_and_not_with_other_arms(tmp_path: Path) -> None:
    def digest(*overrides: str) -> str:
        runs = plan_runs(load(tmp_path, GOOD, *overrides))
        return next(run.digest for run in runs if run.cell == "one" and run.repeat == 1)

    assert digest() == digest("arms.two.policy=round_robin", "repeats=2")
    assert digest() != digest("arms.one.policy=pd")
    assert digest() != digest("replay.max_inflight_sessions=3")
    assert digest() != digest("arms.one.set.page_size=8")


@pytest.mark.parametrize(
    ("replay", "search", "said"),
    [
        ("", 'over = "replay.max_inflight_sessions"', 'one is replayed with "open"'),
        (
            'mode = "closed"',
            'over = "replay.sessions_per_hour"\nstart = 9',
            'sessions_per_hour is a load of mode = "sessions", and one is replayed with "closed"',
        ),
        (
            'mode = "sessions"\nsessions_per_hour = 9',
            'over = "replay.sessions_per_hour"\nstart = 9\nalone = true',
            "one session in flight is no level of replay.sessions_per_hour",
        ),
        (
            'mode = "sessions"\nsessions_per_hour = 9',
            'over = "replay.sessions_per_hour"\nstart = 9',
            "search: set phases.recycle = true; a level that has no more sessions to send is not",
        ),
        (
            'mode = "closed"',
            'over = "replay.max_inflight_sessions"',
            "search: set phases.recycle = true; a level that has no more sessions to send is not",
        ),
    ],
)
def test_a_search_whose_levels_would_not_be_its_loads_is_refused(
    tmp_path: Path, replay: str, search: str, said: str
) -> None:
    path = tmp_path / "e.toml"
    text = GOOD.replace('mode = "closed"\nmax_inflight_sessions = 2', replay)
    path.write_text(f"{text}\n[search]\n{search}\n")
    with pytest.raises(InputError) as raised:
        load_experiment(str(path))
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_objective_is_named_in_the_file_or_in_place_of_the_one_there(tmp_path: Path) -> None:
    named = load(tmp_path, GOOD + '[slo]\npreset = "agentperf"\nattainment = 0.95\n').slo
    assert (named.ttft_s, named.stretch_p90, named.attainment) == (10, math.inf, 0.95)
    stated = GOOD + "[slo]\nttft_s = 1.0\n"
    assert load(
        tmp_path, stated, "slo.preset=agentperf", "slo.tpot_s=0.1"
    ).slo == Slo.model_validate({"preset": "agentperf", "tpot_s": 0.1})
