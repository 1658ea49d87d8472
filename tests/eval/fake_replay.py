"""Stands in for `deltaserve replay run` where a test is about the runner: it answers every request
of the trace at once. In the trace's folder, a file `behave.json` may say otherwise for an arm:
``{"<arm>": "fail" | "hang" | "warm"}``. It reads and writes lines as they are: what does so for the
real one takes longer to import than all else here.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from pathlib import Path

import orjson
import zstandard

parser = argparse.ArgumentParser()
parser.add_argument("trace", type=Path)
parser.add_argument("--url", required=True)
parser.add_argument("--output", type=Path, required=True)
arguments, rest = parser.parse_known_args()
behaviours = arguments.trace.parent / "behave.json"
behaviour = None
if behaviours.is_file():
    behaviour = json.loads(behaviours.read_text()).get(arguments.output.parent.name)
(arguments.output / "replay.json").write_text(
    json.dumps({"arguments": rest, "clock": {"unix_origin_s": 0.0}})
)
results = (arguments.output / "requests.jsonl").open("ab", buffering=0)
lines = arguments.trace.open("rb")
if arguments.trace.suffix == ".zst":
    plain = zstandard.ZstdDecompressor().stream_reader(lines, read_across_frames=True)
    lines = io.BufferedReader(plain)
for count, line in enumerate(lines):
    request = orjson.loads(line)
    if behaviour == "fail" and count == 3:
        print("error: made to fail", file=sys.stderr)
        sys.exit(1)
    if behaviour == "hang" and count == 3:
        (arguments.output / "hanging").touch()
        time.sleep(60)
    at_s = request["timestamp_s"]
    result = {
        "request_id": request["request_id"],
        "session_id": request["session_id"],
        "turn": request["turn"],
        "input_length": request["input_length"],
        "output_length": request["output_length"],
        "scheduled_s": at_s,
        "sent_s": at_s,
        "first_token_s": at_s + 0.1,
        "finished_s": at_s + 0.2,
        "arrivals": [(at_s + 0.1, 1), (at_s + 0.2, request["output_length"])],
        "output_tokens": request["output_length"],
        "prompt_tokens": request["input_length"],
        "cached_tokens": 500 if behaviour == "warm" else 0,
        "status": 200,
    }
    results.write(orjson.dumps(result, option=orjson.OPT_APPEND_NEWLINE))
