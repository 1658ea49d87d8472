from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from eval import provenance
from eval.experiment_files import load_experiment, packaged_experiments
from eval.matrix import level_run
from eval.preview import preview
from eval.records import Run
from eval.site import launch_site
from tests import command_line

COMMANDS = (
    ["run"],
    ["report"],
    ["import"],
    ["list"],
    ["micro", "interference"],
    ["micro", "lifecycle"],
    ["micro", "cache-sweep"],
    ["micro", "connector-tax"],
)


def deltaserve(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return command_line.deltaserve("eval", *arguments)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example(command: list[str]) -> None:
    done = deltaserve(*command, "--help")
    assert done.returncode == 0
    assert f"Example: deltaserve eval {' '.join(command)}" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "nothing"], "nothing: no such experiment file; packaged ones:"),
        (["run", "demo", "--set", "repeats"], "--set repeats: expected key=value"),
        (["run", "demo", "--plan", "--only", "x"], "--only: no arm is named 'x'"),
        (["run", "demo", "--set", "arms.vllm.topology=x"], "no topology 'x'"),
        (["report", "nowhere"], "nowhere: no such folder; expected the output of eval run"),
        (["import", "csv", "f", "--arm", "a", "--output", "o"], "format csv: expected one of"),
    ],
)
def test_a_mistake_is_answered_in_one_line_and_exit_status_2(
    arguments: list[str], said: str
) -> None:
    done = deltaserve(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


ARMS = ["vllm", "sglang"]
EXPERIMENT = """
name = "e"
trace.path = "{trace}"
[[arms]]
name = "a"
topology = "{topology}"
"""
# Its worker is attached, so that no engine is needed.
ATTACHED = """
device = "cpu"
model = "tiny-qwen3-moe"
base_port = 0
engine.name = "sglang"
[[workers]]
urls = ["http://127.0.0.1:9"]
"""


@pytest.mark.parametrize("command", ["run", "report", "picture", "import", "plan", "simulate"])
def test_an_output_below_a_file_is_answered_in_one_line(
    make_run: Callable[..., Run], small_trace: Path, tmp_path: Path, command: str
) -> None:
    (tmp_path / "file").touch()
    output = tmp_path / "file" / "below"
    if command == "run":
        (tmp_path / "attached.toml").write_text(ATTACHED)
        experiment = tmp_path / "e.toml"
        topology = tmp_path / "attached.toml"
        experiment.write_text(EXPERIMENT.format(trace=small_trace, topology=topology))
        done = deltaserve("run", experiment, "--output", output)
    elif command == "import":
        source = tmp_path / "serving.jsonl"
        lists = {"ttfts": [1.0], "itls": [[]], "input_lens": [5], "output_lens": [1]}
        source.write_text(json.dumps({"duration": 1.0, **lists}))
        done = deltaserve("import", "bench-serving", source, "--arm", "a", "--output", output)
    elif command == "plan":
        sizes = ["--gpus", "1", "--kv-tokens", "1000"]
        done = deltaserve("plan", small_trace, *sizes, "--output", output)
    elif command == "simulate":
        (tmp_path / "plan.json").write_text('{"workers": []}')
        done = deltaserve("simulate", tmp_path / "plan.json", "--output", output)
    elif command == "report":
        make_run()
        done = deltaserve("report", tmp_path / "runs", "--output", output / "report")
    else:
        make_run()
        picture = ["--picture", output / "picture.png"]
        done = deltaserve("report", tmp_path / "runs", "--output", tmp_path / "x", *picture)
    assert done.returncode == 2
    assert re.fullmatch(rf"error: {output}: cannot be made a folder: .*\n", done.stderr)


def test_a_calibration_that_cannot_be_written_is_answered_in_one_line(tmp_path: Path) -> None:
    of = {"worker_id": "w", "forward_mode": "decode", "decode_requests": 1, "duration_s": 0.01}
    steps = [of | {"start_unix_s": 0.01 * at, "kv_used_tokens": at} for at in range(99)]
    (tmp_path / "steps.jsonl").write_text("\n".join(map(json.dumps, steps)) + "\n")
    output = tmp_path / "nowhere" / "c.toml"
    done = deltaserve("calibrate", tmp_path / "steps.jsonl", "--name", "a", "--output", str(output))
    assert done.returncode == 2
    assert done.stderr == f"error: {output}: cannot be written: No such file or directory\n"


@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        ('{"state": "complete"}', "arm: is missing"),
        ("[]", "expected one JSON object, the manifest of a run"),
        ("{", "not JSON"),
        ('{"state": "complete", "arm": {}}', "arm.name: is missing"),
        ('{"state": "complete", "arm": {"name": "a"}, "topology": 5}', "topology: input should"),
        ('{"state": "complete", "arm": {"name": "a"}, "slo": {"ttft_s": -1}}', "slo.ttft_s: input"),
    ],
)
def test_a_manifest_that_is_none_of_a_run_is_named(
    tmp_path: Path, manifest: str, said: str
) -> None:
    (tmp_path / "runs").mkdir()
    file = tmp_path / "runs" / "manifest.json"
    file.write_text(manifest)
    done = deltaserve("report", tmp_path / "runs", "--output", tmp_path / "report")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {file}: {said}")
    assert done.stderr.count("\n") == 1


def test_a_plan_lists_the_runs_in_order_and_starts_nothing(tmp_path: Path) -> None:
    output = tmp_path / "x"
    settings = ["--set", "repeats=1", "--set", "run_minutes=4"]
    done = deltaserve("run", "policy", "--plan", "--output", output, *settings)
    assert done.returncode == 0
    runs = re.findall(rf"^ +\d+  {output}/(\S+)  (.*)$", done.stdout, re.M)
    assert sorted(name for name, _ in runs) == ["mine/r1", "unified/r1"]
    assert [words for _, words in runs] == [f"4.0 min, done after 0:{n:02d}" for n in (4, 8)]
    assert f"deltaserve launch up laptop-sglang --run-dir {output}/mine/r1 --set" in done.stdout
    assert f"--output {output}/unified/r1 --mode closed --max-inflight-sessions 4" in done.stdout
    assert not output.exists()


def test_a_plan_of_a_search_names_first_levels_and_what_is_complete(tmp_path: Path) -> None:
    output = tmp_path / "x"
    done = deltaserve("run", "agents", "--plan", "--json", "--output", output)
    assert done.returncode == 0
    plan = json.loads(done.stdout)
    assert [run["folder"] for run in plan["runs"]] == [f"{output}/{arm}@4/r1" for arm in ARMS]
    assert "from 4, doubled or halved" in plan["search"]
    for cell in plan["cells"]:
        assert any("--max-inflight-sessions 4 " in line for line in cell["commands"])
    experiment, _ = load_experiment("agents")
    level = level_run(experiment, experiment.arms[0], 8.0, 2)
    (output / level.folder).mkdir(parents=True)
    provenance.write_manifest(
        output / level.folder,
        {"state": "complete", "digest": level.digest, "timings": {"total_s": 60.0}},
    )
    again = preview(experiment, output, site=launch_site())
    states = {Path(run.folder).parent.name: run.state for run in again.runs}
    assert states == {"vllm@8": "complete", "vllm@4": "to do", "sglang@4": "to do"}
    assert again.length_source == "measured"


def test_a_plan_whose_trace_is_missing_says_so_and_exits_with_1(tmp_path: Path) -> None:
    gone = tmp_path / "gone.jsonl"
    done = deltaserve("run", "policy", "--plan", "--set", f"trace.path={gone}")
    assert done.returncode == 1
    assert f"# not on this machine: trace.path: {gone}: no such file" in done.stdout


def test_options_of_both_commands_that_execute_are_the_same() -> None:
    run, simulate = (deltaserve(verb, "-h").stdout for verb in ("run", "simulate"))
    for option in ("--set KEY=VALUE", "--only ARM"):
        words = [
            " ".join(text.partition(option)[2].split("\n  --")[0].split())
            for text in (run, simulate)
        ]
        assert words[0] == words[1] != ""


def test_lists_are_json_where_asked_for() -> None:
    done = deltaserve("list", "--json")
    assert done.returncode == 0
    names = [entry["name"] for entry in json.loads(done.stdout)["experiments"]]
    assert names == list(packaged_experiments())


# Starts the router's check once an arm, of which an experiment may have dozens.
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", packaged_experiments())
def test_every_packaged_experiments_topologies_and_policies_are_known(
    name: str, tmp_path: Path
) -> None:
    experiment, _ = load_experiment(name)
    lines = list(preview(experiment, tmp_path / "x", site=launch_site()).lines())
    assert re.fullmatch(
        r"# \d+ runs: \d+ to do; \d+:\d\d h:min left"
        if experiment.search is None
        else r"# \d+ levels: \d+ to do; what they show decides about more",
        lines[-1],
    )
    assert all(
        re.search(r"not installed; run: deltaserve launch install|in use|no free", line)
        for line in lines
        if line.startswith("# not on this machine") and "trace.path" not in line
    )


def test_a_report_as_json_is_one_object_on_stdout(
    make_run: Callable[..., Run], tmp_path: Path
) -> None:
    make_run()
    done = deltaserve("report", tmp_path / "runs", "--output", tmp_path / "report", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["cells"]["a"]["requests"] == 120
    assert (tmp_path / "report.html").is_file()
