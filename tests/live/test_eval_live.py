"""One experiment through its whole course on real engines: file, fleet, replay, report."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXPERIMENT = """
name = "short"
seed = 3

[trace.synth]
profile = "glm-agentic"
requests = 16
options = {{ rate = 0.05 }}

[replay]
mode = "closed"
max_inflight_sessions = 2
max_think_s = 0.1
fit_input_tokens = 3000

[[arms]]
name = "pd"
topology = "laptop-sglang-pd"
policy = "pd"
set = {{ telemetry = true, base_port = {port} }}

[[arms]]
name = "colocated"
topology = "laptop-sglang"
set = {{ "workers.0.count" = 1, base_port = {port} }}

[[arms]]
name = "vllm"
topology = "laptop-vllm"
set = {{ "workers.0.count" = 1, base_port = {port} }}
"""


def deltaserve(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deltaserve", "eval", *map(str, arguments)],
        capture_output=True,
        text=True,
    )


@pytest.mark.timeout(900)
def test_an_experiment_runs_on_real_engines_and_its_report_shows_kv_saved(tmp_path: Path) -> None:
    file = tmp_path / "short.toml"
    file.write_text(EXPERIMENT.format(port=28900))
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
        assert [v for v in manifest["violations"] if v["rule"] != "client_lag"] == []
        assert f"{engine} {manifest['versions']['engines'][engine]}" in markdown
        if not manifest["violations"]:
            assert 0 < cells[arm]["apc"]["value"] <= cells[arm]["best_apc"] + 0.05
    saved = re.search(r"## KV moved and saved.*\| pd \| 16 \| .* \| ([\d.]+) % \[", markdown, re.S)
    assert saved is not None
    assert float(saved[1]) > 10
    again = deltaserve("run", file, "--output", output)
    assert "3 of 3 runs are complete already" in again.stderr
