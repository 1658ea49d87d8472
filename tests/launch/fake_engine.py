#!/usr/bin/env python3
"""Stands in for an engine's Python, for what a real engine cannot do on cue.

Answers what launch asks of an engine's Python (versions, options) and, as the server, behaves as
``FAKE`` says. Its real counterpart is started in tests/live.
"""

import http.server
import json
import os
import signal
import subprocess
import sys
import time

_FLAGS = (
    "--model-path",
    "--host",
    "--port",
    "--nccl-port",
    "--device",
    "--tp-size",
    "--dtype",
    "--random-seed",
    "--load-format",
    "--context-length",
    "--max-total-tokens",
    "--page-size",
    "--chunked-prefill-size",
    "--attention-backend",
    "--sampling-backend",
    "--grammar-backend",
    "--mem-fraction-static",
    "--cuda-graph-backend-prefill",
    "--cuda-graph-max-bs-prefill",
    "--disaggregation-mode",
    "--disaggregation-transfer-backend",
    "--disaggregation-bootstrap-port",
    "--max-running-requests",
    "--kv-events-config",
    "--served-model-name",
    "--kv-cache-dtype",
    "--radix-eviction-policy",
    "--schedule-policy",
    "--hicache-ratio",
    "--hicache-size",
    "--hicache-write-policy",
    "--hicache-io-backend",
    "--hicache-mem-layout",
)
_SWITCHES = (
    "--enable-metrics",
    "--enable-cache-report",
    "--skip-tokenizer-init",
    "--disable-overlap-schedule",
    "--sleep-on-idle",
    "--disaggregation-decode-enable-radix-cache",
    "--enable-mixed-chunk",
    "--enable-hierarchical-cache",
    "--incremental-streaming-output",
)


# Two data-parallel ranks; a gauge with a longer name and one that is missing.
_METRICS = """# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{dp_rank="0"} 1.0
sglang:num_running_reqs{dp_rank="1"} 2.0
sglang:num_running_reqs_offline{dp_rank="1"} 9.0
sglang:num_queue_reqs 2.0
"""


class _Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        if self.path == "/metrics":
            self.wfile.write(_METRICS.encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        refused = os.environ.get("FAKE") == "refuse" and self.path == "/generate"
        print(f"asked {self.path} {body.decode()}", flush=True)
        self.send_response(500 if refused else 200)
        self.end_headers()
        self.wfile.write(b"out of memory" if refused else b"{}")

    def log_message(self, *_: object) -> None:
        pass


def _serve(arguments: list[str]) -> None:
    behaviour = os.environ.get("FAKE", "serve")
    print(f"fake engine: {behaviour}", flush=True)
    if behaviour == "die":
        print("the reason it died", flush=True)
        sys.exit(3)
    if behaviour == "plugin-fails":
        print("Failed to execute general plugin: deltaserve", flush=True)
    if behaviour in ("hang", "plugin-fails"):
        time.sleep(600)
    if behaviour == "ignore-signals":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if behaviour == "grandchildren":
        sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
        subprocess.Popen(sleeper)
        subprocess.Popen(sleeper, start_new_session=True)
    port = int(arguments[arguments.index("--port") + 1])
    host = arguments[arguments.index("--host") + 1]
    try:
        http.server.ThreadingHTTPServer((host, port), _Health).serve_forever()
    except KeyboardInterrupt:
        print("left on SIGINT", flush=True)


def main(arguments: list[str]) -> None:
    if arguments[:2] == ["-I", "-c"]:
        print(json.dumps({"python": "3.11.0", "sglang": "0.5.17"}))
    elif arguments[0].endswith("probe.py"):
        options = {flag: {"takes_value": True, "choices": None} for flag in _FLAGS}
        options |= {flag: {"takes_value": False, "choices": None} for flag in _SWITCHES}
        options["--attention-backend"]["choices"] = ["torch_native", "fa3"]
        print(json.dumps(options))
    else:
        _serve(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
