"""Admission before real engines: sessions that want three times the KV pool, on SGLang and on vLLM.

Without admission every turn is computed again; with three sessions at a time it is served from the
cache. What is asserted is the share of prompt tokens that the engine itself says it had cached. The
default rule keeps nobody out here: computing all these prompts takes less than 3 s.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# Twelve sessions of about 3,000 tokens before a pool of 13,056. One worker serves both rules.
EXPERIMENT = """
name = "crowded"
seed = 7
keep_workers = true

[trace.synth]
profile = "coding-sessions"
requests = 2000
seed = 7

[replay]
mode = "closed"
max_inflight_sessions = 12
max_input_tokens = 5000
length_scale = 0.04
think_scale = 0.005
max_think_s = 0.05
timeout_s = 120

[phases]
start = "mid"
prime_parallel = 12
prime_timeout_s = 15
warm_up_s = 5
measure_s = 25
drain_s = 1
recycle = true

# Nothing that is asserted is a time.
[validity]
max_client_lag_p99_s = 60.0

[set]
kv_events = true
base_port = 0
max_total_tokens = 13056
context_tokens = 8192

[[arms]]
name = "off"
topology = "TOPOLOGY"
policy = "unified"
set = { router = { admission = { rule = "off" } } }

[[arms]]
name = "cap"
topology = "TOPOLOGY"
policy = "unified"
set = { router = { admission = { rule = "cap", sessions = 3 } } }
"""


def deltaserve(*arguments: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "deltaserve", "eval", *map(str, arguments)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(900)
@pytest.mark.parametrize("topology", ["laptop-sglang-1", "laptop-vllm-1"])
def test_sessions_that_want_three_caches_are_served_from_one(tmp_path: Path, topology: str) -> None:
    file = tmp_path / "crowded.toml"
    file.write_text(EXPERIMENT.replace("TOPOLOGY", topology))
    output = tmp_path / "out"
    deltaserve("run", file, "--output", output)
    cells = json.loads(deltaserve("report", output, "--json"))["cells"]
    off, capped = (cells[arm] for arm in ("off", "cap"))
    assert min(off["best_apc"], capped["best_apc"]) > 0.8  # nearly all could come from a cache
    assert off["apc"]["value"] < 0.2
    assert capped["apc"]["value"] > 0.7
    # One worker served both: what differed was the router alone.
    assert len(list((output / "workers").iterdir())) == 1
    # What the router believed to be there came from the engine's own events.
    log = (output / "cap" / "r1" / "decisions.jsonl").read_text().splitlines()
    made = [line for line in map(json.loads, log) if line["event"] == "decision"]
    assert made[-1]["prefix_source"] == "events"
    assert max(max(line["cached_tokens"].values(), default=0) for line in made) > 1000
