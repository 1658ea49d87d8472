"""How the router is started: ours from its configuration file, stock ones from flags.

The stock routers are arms to compare with: `sglang-router` (0.3.2) and its successor `smg`
(1.13.0), which share these flags.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import deltaserve
from deltaserve.child import DELTASERVE
from launch.asking import refusal
from launch.engines import ENVIRONMENTS
from launch.keys import CLIENTS
from launch.toml_text import line
from launch.topology import Role, RouterChoice, Topology

_PARSE = """
import importlib, sys
importlib.import_module(sys.argv[1] + ".launch_router").parse_router_args(sys.argv[2:])
"""

_CHECKED = ("id", "role", "engine", "kv_connector", "page_size")
"""What our router is told of a worker when it is only asked whether it could serve it."""

STOCK_PORTS = {"http": 0, "metrics": 1}
"""Ports of a stock router, from the topology's base port."""


def ours(config: Path) -> tuple[str, ...]:
    """The command of our router; it reads everything from `config`."""
    return (*DELTASERVE, "route", "--config", str(config))


def our_refusal(config: Mapping[str, Any], environment: Mapping[str, str]) -> str | None:
    """Why our router would not start with `config` (the content of its file) and `environment` (on
    top of the caller's), or could place no request, after the key of the topology that says so;
    None where it could. The policy itself is asked, a Python class too.
    """
    params = config.get("policy_params", {})
    # The answer is kept, and depends on these too.
    given = {key: os.environ[key] for key in (CLIENTS,) if key in os.environ}
    said = _said_by_ours(
        config["policy"],
        tuple(f"{name}={json.dumps(value)}" for name, value in params.items()),
        "\n".join(line(key, value) for key, value in config.get("admission", {}).items()),
        tuple(
            ",".join(
                [
                    f"http://127.0.0.1:{port}",
                    *(f"{key}={worker[key]}" for key in _CHECKED if key in worker),
                    # Which port it is decides nothing, and is another in each plan of a topology.
                    *([f"bootstrap_port={port}"] if "bootstrap_port" in worker else ()),
                ]
            )
            for port, worker in enumerate(config["workers"], 1)
        ),
        tuple(sorted((given | dict(environment)).items())),
    )
    if said is None:
        return None
    for ours, of_topology in (
        (r"policy_params: (\w+): ", r"router.params.\1: "),
        (r"policy_params: ", "router.params: "),
        (r"admission: ", "router.admission: "),
        (r"policy (?=\S+ can place no request)", "router.policy: "),
    ):
        named, found = re.subn(f"^{ours}", of_topology, said)
        if found:
            return named
    return f"router: {said}"


@lru_cache(maxsize=256)
def _said_by_ours(
    policy: str,
    params: tuple[str, ...],
    admission: str,
    workers: tuple[str, ...],
    environment: tuple[tuple[str, str], ...],
) -> str | None:
    argv = [*DELTASERVE, "route", "--check", "--policy", policy]
    for flag, values in (("--policy-param", params), ("--worker", workers)):
        for value in values:
            argv += [flag, value]
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as config:
        if admission:
            config.write(f"[admission]\n{admission}\n")
            config.flush()
            argv += ["--config", config.name]
        said = refusal(argv, os.environ | dict(environment), silent="it does not run")
        return said and re.sub(rf"^(error: )?({re.escape(config.name)}(:\d+)?: )?", "", said)


def python_path(router: RouterChoice) -> str:
    """Where our router's Python looks: for its policy, then for us and what we need, however the
    Python that runs here was told of that."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    ours = [Path(deltaserve.__file__).parents[1], *(Path(folder) for folder in given if folder)]
    found = [str(folder.absolute()) for folder in (*router.python_path, *ours)]
    return os.pathsep.join(dict.fromkeys(found))


def stock(topology: Topology, workers: Sequence[tuple[Role, str, int | None]]) -> tuple[str, ...]:
    """The command of a stock router over `workers`: (role, URL, bootstrap port)."""
    kind = topology.router.kind
    environment = ENVIRONMENTS[kind]
    if kind == "smg":
        argv = [str(environment.folder / "bin" / "smg"), "launch"]
    else:
        argv = [str(environment.python), "-m", "sglang_router.launch_router"]
    argv += ["--host", topology.host, "--port", str(topology.base_port)]
    argv += ["--prometheus-port", str(topology.base_port + STOCK_PORTS["metrics"])]
    argv += ["--policy", topology.router.policy]
    if any(role == "prefill" for role, _, _ in workers):
        argv += ["--pd-disaggregation"]
        for role, url, bootstrap_port in workers:
            argv += [f"--{role}", url]
            if role == "prefill":
                argv += [str(bootstrap_port)]
    else:
        argv += ["--worker-urls", *(url for _, url, _ in workers)]
    return (*argv, *topology.router.flags)


def stock_refusal(router: RouterChoice, argv: Sequence[str]) -> str | None:
    """What a stock router's own argument parser finds wrong with its command `argv`, after the key
    of the topology that says so; None where it takes it."""
    # Which ports they are decides nothing, and is another in each plan of a topology.
    end = len(argv) - len(router.flags)
    ours = [
        re.sub(r"(^|:)\d+$", rf"\g<1>{at}", flag)
        for at, flag in enumerate(argv[argv.index("--host") : end], 1)
    ]
    environment = ENVIRONMENTS[router.kind]
    said = _said_by_stock(router.kind, environment.python, (*ours, *router.flags))
    if said is None:
        return None
    reason = said.partition("error: ")[2] or said
    about = f"{router.kind} {environment.version}"
    policy, is_policy, choices = reason.partition("argument --policy: invalid choice: ")
    if is_policy and not policy:
        return f"router.policy: {about} has no policy {choices}"
    return f"router.flags: {about}: {reason}"


@lru_cache(maxsize=256)
def _said_by_stock(kind: str, python: Path, flags: tuple[str, ...]) -> str | None:
    parse: list[str | Path] = [python, "-c", _PARSE, kind.replace("-", "_"), *flags]
    return refusal(parse, silent="it does not run")
