"""How each engine is started: one module an engine, all with the same names.

A command is a pure function of the topology, the worker's place in it, the paths it may use and the
caller's environment; it starts nothing and looks at nothing else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from launch.topology import Role, Topology, WorkerGroup

LOOPBACK = ("127.0.0.1", "localhost")


@dataclass(frozen=True)
class Place:
    """One worker's place in a topology."""

    id: str
    role: Role
    group: WorkerGroup
    ports: Mapping[str, int]
    gpus: tuple[int, ...]
    threads: int


@dataclass(frozen=True)
class Paths:
    """Files and folders that a worker's command names."""

    python: Path
    model: str
    run_dir: Path
    plugin_dir: Path


@dataclass(frozen=True)
class Command:
    """Arguments, and the environment variables set on top of the caller's.

    `unbind` says that its threads bind themselves to cores while it starts and shall not stay so.
    """

    argv: tuple[str, ...]
    environment: dict[str, str]
    unbind: bool = False


def bounded_threads(threads: int) -> dict[str, str]:
    """Keeps every thread pool of an engine at `threads`, so that workers do not fight for cores."""
    pools = ("OMP", "MKL", "OPENBLAS", "NUMEXPR", "RAYON")
    return {f"{pool}_NUM_THREADS": str(threads) for pool in pools} | {
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def kv_events(ports: Mapping[str, int], **more: bool) -> list[str]:
    """Has an engine publish what its cache holds over ZMQ, and again what a reader missed."""
    config = more | {
        "publisher": "zmq",
        "endpoint": f"tcp://*:{ports['kv_events']}",
        "replay_endpoint": f"tcp://*:{ports['kv_events_replay']}",
    }
    return ["--kv-events-config", json.dumps(config)]


def parsers(topology: Topology) -> list[str]:
    """Flags by which an engine finds tool calls and thoughts in what the model writes; both engines
    call them the same."""
    argv = []
    for flag, parser in (
        ("--tool-call-parser", topology.parser_of_tool_calls),
        ("--reasoning-parser", topology.reasoning_parser),
    ):
        argv += [flag, parser] if parser else []
    return argv


def data_parallel_ranks(argv: Sequence[str]) -> int:
    """How many data-parallel ranks the flags of an SGLang or vLLM worker ask for; the last counts,
    as for the engines. 1 where what they say is no number, which the engine will refuse."""
    said = "1"
    for flag, following in pairwise([*argv, ""]):
        name, sign, value = flag.partition("=")
        if name.replace("_", "-") in ("--data-parallel-size", "--dp-size", "-dp"):
            said = value if sign else following
    return int(said) if said.isdecimal() else 1


def local_only(host: str) -> dict[str, str]:
    """Keeps an engine's calls to itself off any proxy, as the caller's to its own hosts are."""
    given = ",".join(os.environ.get(name, "") for name in ("NO_PROXY", "no_proxy"))
    own = (part.strip() for part in given.split(","))
    hosts = ",".join(dict.fromkeys((host, "127.0.0.1", "localhost", *filter(None, own))))
    return {"NO_PROXY": hosts, "no_proxy": hosts, "PYTHONUNBUFFERED": "1"}


def visible_gpus(gpus: tuple[int, ...]) -> dict[str, str]:
    """Shows an engine only `gpus`, counted as NVML counts them, not fastest first."""
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
