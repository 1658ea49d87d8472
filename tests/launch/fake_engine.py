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
import threading
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
    "--tool-call-parser",
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
    "--api-key",
    "--admin-api-key",
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


_VLLM_FLAGS = (
    "--model",
    "--served-model-name",
    "--host",
    "--port",
    "--tensor-parallel-size",
    "--dtype",
    "--seed",
    "--block-size",
    "--load-format",
    "--max-model-len",
    "--num-gpu-blocks-override",
    "--max-num-batched-tokens",
    "--kv-transfer-config",
    "--kv-events-config",
    "--tool-call-parser",
    "--api-key",
)
_VLLM_SWITCHES = (
    "--enable-prefix-caching",
    "--enable-prompt-tokens-details",
    "--skip-tokenizer-init",
    "--enforce-eager",
    "--enable-auto-tool-choice",
)


# Two data-parallel ranks; a gauge with a longer name and one that is missing.
_METRICS = """# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{dp_rank="0"} 1.0
sglang:num_running_reqs{dp_rank="1"} 2.0
sglang:num_running_reqs_offline{dp_rank="1"} 9.0
sglang:num_queue_reqs 2.0
"""

_CACHE_CONFIG = (
    'vllm:cache_config_info{{block_size="32",engine="{}",num_gpu_blocks="{}",user="x"}} 1.0\n'
)
"""Of each rank; its blocks are those of all, as vLLM adds them up: 1250 for requests, and one a
rank that it keeps for itself."""


_first_transfer = threading.Lock()
_prompts: "dict[tuple[int, ...], list[int]]" = {}
_keys = {"key": os.environ.get("VLLM_API_KEY"), "admin_key": None}


class _Health(http.server.BaseHTTPRequestHandler):
    def _is_allowed(self) -> bool:
        """As the engines have it: health and metrics need no key, what changes an engine the
        administrator's where there is one."""
        path = self.path.partition("?")[0]
        needed = _keys["key"]
        if path in ("/flush_cache", "/freeze_gc"):
            needed = _keys["admin_key"] or needed
        given = self.headers.get("authorization")
        if path in ("/health", "/metrics") or needed is None or given == f"Bearer {needed}":
            return True
        print(f"refused {path}", flush=True)
        self.send_response(401)
        self.end_headers()
        return False

    def do_GET(self) -> None:
        if not self._is_allowed():
            return
        self.send_response(200)
        self.end_headers()
        if self.path == "/metrics":
            ranks = range(int(os.environ.get("FAKE_RANKS", "1")))
            blocks = 1250 + len(ranks)
            lines = [_METRICS, *(_CACHE_CONFIG.format(rank, blocks) for rank in ranks)]
            self.wfile.write("".join(lines).encode())
            if tokens := os.environ.get("FAKE_HOST_TOKENS"):
                line = f'sglang:hicache_host_total_tokens{{tp_rank="0"}} {float(tokens)}\n'
                self.wfile.write(line.encode())
        if self.path == "/server_info" and "FAKE_KV_TOKENS" in os.environ:
            held = int(os.environ["FAKE_KV_TOKENS"])
            ranks = int(os.environ.get("FAKE_RANKS", "1"))
            told = {"max_total_num_tokens": held, "dp_size": ranks}
            self.wfile.write(json.dumps(told).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if not self._is_allowed():
            return
        print(f"asked {self.path} {body.decode()}", flush=True)
        status, answer = self._answer(body)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(answer)

    def _answer(self, body: bytes) -> "tuple[int, bytes]":
        behaviour = os.environ.get("FAKE")
        if behaviour == "refuse" and self.path in ("/generate", "/v1/completions"):
            return 500, b"out of memory"
        if behaviour == "die-asked" and self.path == "/generate":
            os._exit(3)
        if behaviour == "slow" and self.path == "/generate":
            time.sleep(0.25)
        if behaviour == "caches" and self.path == "/generate":
            time.sleep(0.05)
            return 200, json.dumps(_computed(json.loads(body)["input_ids"])).encode()
        if behaviour == "hang-asked" and self.path == "/generate":
            time.sleep(600)
        if self.path.startswith("/reset_prefix_cache"):
            if os.environ.get("VLLM_SERVER_DEV_MODE") != "1":
                return 404, b"not found"
            return 200, json.dumps({"success": behaviour != "busy"}).encode()
        if self.path.startswith("/flush_cache") and behaviour == "busy":
            return 400, b"requests are running"
        if self.path == "/freeze_gc" and behaviour == "no-freeze":
            return 404, b"not found"
        if self.path == "/v1/completions":
            asked = json.loads(body).get("kv_transfer_params") or {}
            if asked.get("do_remote_decode"):
                found = {"remote_host": "127.0.0.1", "remote_block_ids": [1]}
                return 200, json.dumps({"kv_transfer_params": found}).encode()
            if asked and behaviour == "slow-handshake" and _first_transfer.acquire(blocking=False):
                return 500, b"Internal server error"
        return 200, b"{}"

    def log_message(self, *_: object) -> None:
        pass


def _computed(prompt: "list[int]") -> "dict[str, object]":
    """An answer that says what this process had of the prompt, of those that it has answered."""
    begin = tuple(prompt[:16])
    earlier = _prompts.get(begin, [])
    cached = len(earlier) if prompt[: len(earlier)] == earlier else 0
    _prompts[begin] = prompt
    counts = {"prompt_tokens": len(prompt), "cached_tokens": cached, "completion_tokens": 1}
    return {"text": "a", "meta_info": counts, "process": os.getpid()}


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
    for flag, kind in (("--api-key", "key"), ("--admin-api-key", "admin_key")):
        if flag in arguments:
            _keys[kind] = arguments[arguments.index(flag) + 1]
    port = int(arguments[arguments.index("--port") + 1])
    host = arguments[arguments.index("--host") + 1]
    try:
        http.server.ThreadingHTTPServer((host, port), _Health).serve_forever()
    except KeyboardInterrupt:
        print("left on SIGINT", flush=True)


def main(arguments: list[str]) -> None:
    if arguments[:2] == ["-I", "-c"]:
        print(json.dumps({"python": "3.11.0", "sglang": "0.5.23", "vllm": "0.33.0"}))
    elif arguments[0].endswith("probe.py"):
        flags, switches = _FLAGS, _SWITCHES
        if arguments[1:] == ["vllm"]:
            flags, switches = _VLLM_FLAGS, _VLLM_SWITCHES
        options = {flag: {"takes_value": True, "choices": None} for flag in flags}
        options |= {flag: {"takes_value": False, "choices": None} for flag in switches}
        if arguments[1:] == ["sglang"]:
            options["--attention-backend"]["choices"] = ["torch_native", "fa3"]
        print(json.dumps(options))
    else:
        _serve(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
