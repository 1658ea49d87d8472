"""Experiments through their whole course on real engines: file, fleet, replay, report; and the
quickstart as a newcomer copies it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launch.engines import install
from launch.ports import free_base
from tests.quickstart import blocks, run

EXPERIMENT = """
name = "short"
seed = 3

[trace.synth]
profile = "glm-agentic"
requests = 16
options = { rate = 0.05 }

[replay]
mode = "closed"
max_inflight_sessions = 2
max_think_s = 0.1
fit_input_tokens = 3000

# Nothing that is asserted is a time.
[validity]
max_client_lag_p99_s = 60.0

[[arms]]
name = "pd"
topology = "laptop-sglang-pd"
policy = "pd"
set = { telemetry = true, base_port = 0 }

[[arms]]
name = "colocated"
topology = "laptop-sglang"
set = { "workers.0.count" = 1, base_port = 0 }

[[arms]]
name = "vllm"
topology = "laptop-vllm"
set = { "workers.0.count" = 1, base_port = 0 }
"""


def deltaserve(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deltaserve", "eval", *map(str, arguments)],
        capture_output=True,
        text=True,
    )


@pytest.mark.alone
@pytest.mark.timeout(900)
def test_an_experiment_runs_on_real_engines_and_its_report_shows_kv_saved(tmp_path: Path) -> None:
    file = tmp_path / "short.toml"
    file.write_text(EXPERIMENT)
    output = tmp_path / "out"
    done = deltaserve("run", file, "--output", output)
    assert done.returncode == 0, done.stderr
    report = deltaserve("report", output, "--output", output / "report", "--json")
    assert report.returncode == 0, report.stderr
    cells = json.loads(report.stdout)["cells"]
    markdown = (output / "report.md").read_text()
    for arm, engine in {"pd": "sglang", "colocated": "sglang", "vllm": "vllm-cpu"}.items():
        manifest = json.loads((output / arm / "r1" / "manifest.json").read_text())
        assert manifest["state"] == "complete"
        assert manifest["results"] == 16
        assert manifest["violations"] == []
        assert f"{engine} {manifest['versions']['engines'][engine]}" in markdown
        assert 0 < cells[arm]["apc"]["value"] <= cells[arm]["best_apc"] + 0.05
    saved = re.search(r"## KV moved and saved.*\| pd \| 16 \| .* \| ([\d.]+) % \[", markdown, re.S)
    assert saved is not None
    assert float(saved[1]) > 10
    again = deltaserve("run", file, "--output", output)
    assert "3 of 3 runs are complete already" in again.stderr


ROUTERS = """
name = "routers"
keep_workers = true

[trace.synth]
profile = "glm-agentic"
requests = 12
options = { rate = 0.05 }

[replay]
mode = "closed"
max_inflight_sessions = 2
max_think_s = 0.1
fit_input_tokens = 3000

[validity]
max_client_lag_p99_s = 60.0

[set]
kv_events = true
telemetry = true

[[arms]]
name = "stock"
topology = "laptop-sglang"
policy = "cache_aware"
set = { router = { kind = "sglang-router" } }

[[arms]]
name = "ours"
topology = "laptop-sglang"
policy = "unified"
set = { router = { admission = { rule = "rotate" } } }
"""


@pytest.mark.timeout(900)
def test_the_stock_router_and_ours_take_turns_before_the_same_workers(tmp_path: Path) -> None:
    install("sglang-router", print)
    file = tmp_path / "routers.toml"
    file.write_text(ROUTERS)
    output = tmp_path / "out"
    done = deltaserve("run", file, "--output", output)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("colocated-0: starting (") == 1
    for arm in ("stock", "ours"):
        run_dir = output / arm / "r1"
        manifest = json.loads((run_dir / "manifest.json").read_text())
        assert (manifest["state"], manifest["results"]) == ("complete", 12)
        assert manifest["violations"] == []
        results = [json.loads(line) for line in (run_dir / "requests.jsonl").open()]
        assert [result["error"] for result in results if result["error"]] == []
        assert sum(result["cached_tokens"] for result in results) > 0
        assert len(list((run_dir / "steps").iterdir())) == 2


SMALL = " ".join(
    f"--set {setting}"
    for setting in (
        "repeats=1",
        "validity.max_client_lag_p99_s=60",
        # As written each run has workers of its own, which takes two more starts.
        "keep_workers=true",
        "trace.excerpt.requests=8",
        "arms.mine.set.base_port=0",
        "arms.unified.set.base_port=0",
    )
)


@pytest.mark.timeout(900)
def test_the_quickstart_leads_to_a_report_of_ones_own_policy(tmp_path: Path) -> None:
    port = free_base(2)
    install, *rest = blocks()
    assert "make setup" in install
    script = "".join(rest)
    # As written, but for the size of the experiment and ports that somebody else may have.
    script = script.replace("localhost:30000", f"localhost:{port}")
    script = script.replace("up laptop-sglang", f"up laptop-sglang --set base_port={port}")
    script = script.replace("eval run policy", f"eval run policy {SMALL}")
    asked, decision = (
        json.loads(line) for line in run(script, tmp_path).splitlines() if line[:1] == "{"
    )
    assert len(asked["output_ids"]) == 8
    assert decision["decisions"][0]["policy"] == "mine:LeastWork"
    markdown = (tmp_path / "out" / "mine" / "report.md").read_text()
    assert re.search(r"^\| mine \| local \| custom \| \d+ \[100\.0 %\]", markdown, re.M)
    assert re.search(r"^\| unified \| local \| ", markdown, re.M)


@pytest.mark.timeout(900)
def test_two_engines_run_at_the_same_time(tmp_path: Path) -> None:
    file = tmp_path / "short.toml"
    file.write_text(EXPERIMENT.replace("requests = 16", "requests = 8"))
    output = tmp_path / "out"
    arms = ("colocated", "vllm")
    only = [word for arm in arms for word in ("--only", arm)]
    done = deltaserve("run", file, "--output", output, "--parallel", "2", *only, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["complete"] == 2
    spans = []
    for arm in arms:
        manifest = json.loads((output / arm / "r1" / "manifest.json").read_text())
        assert (manifest["state"], manifest["results"]) == ("complete", 8)
        spans.append((manifest["started_at"], manifest["ended_at"]))
    assert max(start for start, _ in spans) < min(end for _, end in spans)
