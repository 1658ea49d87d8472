"""``fleet.json``: what a fleet is and how it is, for other programs (docs/formats.md).

Owns what the file holds of a plan, and that no secret is in it. How the fleet is, is told to it.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
import psutil

from deltaserve import __version__
from launch.cache import write_atomically
from launch.kv import worker_kv
from launch.planning import Plan, Process
from launch.redaction import redacted
from launch.supervised import started_at
from launch.topology import WorkerGroup

# Set by the user's shell rather than the topology, and changing what an engine does.
_TELLING_PREFIXES = ("SGLANG_", "VLLM_", "NCCL_", "UCX_", "NIXL_", "MC_", "TORCH", "CUDA_", "HF_")


def write_record(
    plan: Plan, fleet: Mapping[str, Any], processes: Sequence[Mapping[str, Any]]
) -> None:
    """Writes ``fleet.json`` of `plan`: `fleet` is how it is as a whole, `processes` how each is."""
    groups = [group for group in plan.topology.workers for _ in range(group.size)]
    of_worker = dict(zip((worker.id for worker in plan.workers), groups, strict=True))
    record = dict(fleet) | {
        "deltaserve": __version__,
        "topology": plan.topology.model_dump(mode="json"),
        "host": socket.gethostname(),
        "supervisor": {
            "pid": os.getpid(),
            "started_unix_s": psutil.Process().create_time(),
            "started": started_at(os.getpid()),
            "argv": sys.argv,
        },
        "engine": {
            "name": plan.engine.name,
            "python": str(plan.engine.python),
            "versions": plan.engine.versions,
        },
        "inherited_environment": {
            k: v for k, v in sorted(os.environ.items()) if k.startswith(_TELLING_PREFIXES)
        },
        "processes": [
            _of_process(process) | _kv(plan, of_worker.get(process.id)) | dict(state)
            for process, state in zip(plan.processes, processes, strict=True)
        ],
    }
    content = orjson.dumps(redacted(record), option=orjson.OPT_INDENT_2)
    write_atomically(plan.run_dir / "fleet.json", content)


def _of_process(process: Process) -> dict[str, Any]:
    return {
        "id": process.id,
        "kind": process.kind,
        "role": process.role,
        "attached": process.attached,
        "node": process.node,
        "url": process.url,
        "ports": process.ports,
        "gpus": process.gpus,
        "argv": process.argv,
        "environment": process.environment,
        "log": str(process.log),
    }


def _kv(plan: Plan, group: WorkerGroup | None) -> dict[str, Any]:
    """What is known of a worker's KV cache before it runs."""
    if group is None:
        return {}
    kv = worker_kv(plan.topology, group)
    return {
        "kv_capacity_tokens": kv.capacity_tokens,
        "host_kv_tokens": kv.host_tokens,
        "kv_bytes_per_token": kv.bytes_per_token,
        "page_tokens": kv.page_tokens,
    }
