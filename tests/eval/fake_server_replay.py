"""Stands in for `deltaserve replay run` against a server that carries `KNEE` sessions in flight:
beyond that first tokens take as long as the sessions that are too many make them. With `WARM` its
cache holds prompts before anybody sent them, and with `UNCOUNTED` it tells no cached tokens. It
writes lines as `fake_replay.py` does."""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path

import orjson

TURNS = 8
WINDOW_S = 100.0

parser = argparse.ArgumentParser()
parser.add_argument("trace", type=Path)
parser.add_argument("--output", type=Path, required=True)
parser.add_argument("--max-inflight-sessions", type=int, required=True)
arguments, rest = parser.parse_known_args()
load = arguments.max_inflight_sessions
knee = float(os.environ["KNEE"])
warm = "WARM" in os.environ
uncounted = "UNCOUNTED" in os.environ
rng = random.Random(load)
(arguments.output / "replay.json").write_text(
    json.dumps(
        {
            "arguments": {"mode": "closed", "max_inflight_sessions": load},
            "clock": {"unix_origin_s": 0.0},
        }
    )
)
(arguments.output / "phases.json").write_text(
    json.dumps({"start": "mid", "window_start_s": 0.0, "window_end_s": WINDOW_S})
)
with (arguments.output / "calls").open("a") as calls:
    calls.write("called\n")
results = (arguments.output / "requests.jsonl").open("ab", buffering=0)
for session in range(load * 4):
    at_s = (session % 4) * WINDOW_S / 4 + rng.uniform(0, 2)
    for turn in range(TURNS):
        slow = load > knee and rng.random() < min(0.9, 0.2 + 0.1 * (load - knee))
        ttft_s = 20.0 if slow else 0.2
        result = {
            "request_id": f"s{session}:{turn}",
            "session_id": f"s{session}",
            "turn": turn,
            "input_length": 1000,
            "output_length": 11,
            "scheduled_s": at_s,
            "sent_s": at_s,
            "first_token_s": at_s + ttft_s,
            "finished_s": at_s + ttft_s + 0.1,
            "arrivals": [(at_s + ttft_s, 1), (at_s + ttft_s + 0.1, 11)],
            "output_tokens": 11,
            "prompt_tokens": 1000,
            "cached_tokens": None if uncounted else 900 if turn or warm else 0,
            "best_cached_tokens": 900 if turn else 0,
            "status": 200,
            "phase": "measure",
        }
        results.write(orjson.dumps(result, option=orjson.OPT_APPEND_NEWLINE))
        at_s = min(at_s + ttft_s + 2.0, WINDOW_S - 0.01)
