"""Whether our router could place a request with a topology's policy, before engines are started.

The router itself is asked, on a port of its own, with its policy and parameters and with workers of
the same roles that are stand-ins and always well. So what a policy needs is written down nowhere
but in the policy, and a mistake is found in a second instead of after the engines' start.
"""

from __future__ import annotations

import http.client
import http.server
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from deltaserve.errors import InputError

_PATIENCE_S = 60.0
_ANNOUNCED = "listening on http://"
_WORKER_KEYS = ("id", "role", "engine", "kv_connector", "bootstrap_port", "page_size")


def rehearse(router_toml: str, environment: Mapping[str, str], where: str) -> None:
    """Raises `InputError` where the router would not start with `router_toml` and `environment` (on
    top of the caller's), or could place no request. `where` names the topology's file.
    """
    config = tomllib.loads(router_toml)
    policy, params = config["policy"], config.get("policy_params", {})
    told = tuple(sorted(environment.items()))
    refused = _refusal(policy, _given(params), _workers(config), told)
    if refused is None:
        return
    if refused:
        raise InputError(f"{where}: {_which(policy, params, told) or f'router: {refused}'}")
    roles = [worker["role"] for worker in config["workers"]]
    raise InputError(
        f"{where}: router.policy: {policy} can place no request on {_listed(roles)} workers"
        f"{_needs(roles)}"
    )


def _which(policy: str, params: Mapping[str, Any], told: tuple[tuple[str, str], ...]) -> str | None:
    """What is wrong with the one of `params` that is refused by itself."""
    for name, value in params.items():
        refused = _refusal(policy, _given({name: value}), (), told)
        if refused and "policy_params" in refused:
            reason = refused.partition("policy_params:")[2].strip()
            return f"router.params.{name}: {policy}: {reason}"
    return None


def _needs(roles: Collection[str]) -> str:
    """What is missing; there are only two ways to place a request."""
    if "prefill" not in roles:
        return (
            "; it separates prefill from decode: it needs prefill and decode (or elastic) workers"
        )
    if not {"colocated", "elastic"} & set(roles):
        return "; it serves requests on one worker: it needs colocated or elastic ones"
    return ""


def _listed(roles: Collection[str]) -> str:
    return " and ".join(dict.fromkeys(roles))


def _given(params: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"{name}={json.dumps(value)}" for name, value in params.items())


def _workers(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The workers as flags of the router, without their URL."""
    return tuple(
        ",".join(f"{key}={worker[key]}" for key in _WORKER_KEYS if key in worker)
        for worker in config["workers"]
    )


@lru_cache(maxsize=256)
def _refusal(
    policy: str,
    params: tuple[str, ...],
    workers: tuple[str, ...],
    environment: tuple[tuple[str, str], ...],
) -> str | None:
    """None where the router could place a request, its error where it does not start, and an empty
    text where it would answer every request with 503. Without workers only the start counts."""
    with _stand_in() as url, tempfile.NamedTemporaryFile() as said:
        argv = [sys.executable, "-m", "deltaserve", "route", "--host", "127.0.0.1", "--port", "0"]
        argv += ["--policy", policy]
        for param in params:
            argv += ["--policy-param", param]
        for worker in workers:
            argv += ["--worker", f"{url},{worker}"]
        router = subprocess.Popen(
            argv,
            env=os.environ | dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
        )
        # Read by a handle of its own: the router's knows where the router writes next.
        log = Path(said.name)
        try:
            deadline_s = time.monotonic() + _PATIENCE_S
            while time.monotonic() < deadline_s:
                died = router.poll() is not None
                told = log.read_text(errors="replace")
                if died:
                    lines = told.strip().splitlines() or [f"it exits with {router.returncode}"]
                    return lines[-1].removeprefix("error: ")
                address, announced, _ = told.partition(_ANNOUNCED)[2].partition("\n")
                if announced and not workers:
                    return None
                if announced and (ready := _ready(address)) is not None:
                    return None if ready else ""
                time.sleep(0.02)
            last = (log.read_text(errors="replace").strip().splitlines() or ["nothing"])[-1]
            return f"it is not ready within {_PATIENCE_S:g} s; the last it said: {last}"
        finally:
            router.kill()
            router.wait()


def _ready(address: str) -> bool | None:
    """Whether the router could place a request; None before it has seen all of its workers."""
    try:
        workers = json.loads(_get(address, "/workers")[1])["workers"]
        if not all(worker["is_healthy"] for worker in workers):
            return None
        return _get(address, "/readyz")[0] == 200
    except (OSError, http.client.HTTPException):  # it ends meanwhile
        return None


def _get(address: str, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(address, timeout=_PATIENCE_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


@contextmanager
def _stand_in() -> Iterator[str]:
    """The URL of a worker that is well and does nothing."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Well) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


class _Well(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        pass
