"""Where workers are placed when it is not here: the nodes of a Ray cluster.

Owns the questions to Ray, which `launch.ray_worker` puts in Ray's own Python, and which worker goes
to which node. Knows no engines.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deltaserve.errors import InputError
from launch import guard
from launch.engines import ENVIRONMENTS, require
from launch.supervised import GRACE_S
from launch.topology import Placement, Topology

_SCRIPT = Path(__file__).with_name("ray_worker.py")

ENVIRONMENT = "DELTASERVE_PLACED_ENVIRONMENT"
"""The variable in which what stands for a placed process finds that process's environment."""

_ANSWER_WITHIN_S = 30.0

# Less than a supervised process has: what is placed must have ended before what stands for it here.
_REMOTE_GRACE_S = GRACE_S - 4


@dataclass(frozen=True)
class Node:
    """A machine of the cluster, and how many of its GPUs are not taken."""

    id: str
    address: str
    gpus: int


def cluster_nodes(placement: Placement, where: str) -> list[Node]:
    """The live nodes. Raises `InputError` when Ray is not installed or the cluster not there."""
    command = [str(_python(placement, where)), str(_SCRIPT), "nodes", placement.address]
    asked = f"{where}: placement.address: {placement.address}"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_ANSWER_WITHIN_S, check=False
        )
    except OSError as error:
        raise InputError(f"{where}: placement.python: {error}") from None
    except subprocess.TimeoutExpired:
        raise InputError(f"{asked}: no Ray cluster answered in {_ANSWER_WITHIN_S:.0f} s") from None
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        raise InputError(f"{asked}: {reason}")
    return [Node(**node) for node in json.loads(done.stdout.strip().splitlines()[-1])]


def assign(topology: Topology, nodes: Sequence[Node]) -> list[Node]:
    """A node for each worker that is not attached, in order: GPUs node by node, so that workers of
    a topology stay close; in turn where no GPUs are asked for.

    Raises `InputError` where the GPUs do not suffice.
    """
    free = {node.id: node.gpus for node in nodes}
    found: list[Node] = []
    for group in topology.workers:
        for _ in range(0 if group.urls else group.count):
            if topology.device == "cpu":
                found.append(nodes[len(found) % len(nodes)])
                continue
            place = next((n for n in nodes if free[n.id] >= group.tensor_parallel), None)
            if place is None:
                there = ", ".join(f"{n.address} has {n.gpus}" for n in nodes)
                raise InputError(
                    f"{topology.where}: placement: no node with {group.tensor_parallel} free "
                    f"GPUs is left for worker {len(found) + 1} ({there})"
                )
            free[place.id] -= group.tensor_parallel
            found.append(place)
    return found


def launcher(
    placement: Placement,
    node: Node,
    gpus: int,
    folder: Path,
    stop_signal: int,
) -> tuple[str, ...]:
    """What to put before a command so that it runs on `node` and is asked to leave by
    `stop_signal`. Its environment there is given in `ENVIRONMENT`, as JSON: anybody on this machine
    can read a command line."""
    words = [str(_python(placement, "placement")), str(_SCRIPT), "run", placement.address, node.id]
    words += [str(gpus), str(folder), guard.__file__, str(_REMOTE_GRACE_S), str(int(stop_signal))]
    return (*words, "--")


def _python(placement: Placement, where: str) -> Path:
    if placement.python is not None:
        return placement.python
    require(ENVIRONMENTS["ray"], f"{where}: placement")
    return ENVIRONMENTS["ray"].python
