"""Run by Ray's own Python: tells the nodes of a Ray cluster, and runs a worker's process on one.

    ray_worker.py nodes ADDRESS
    ray_worker.py run ADDRESS NODE GPUS FOLDER GUARD GRACE_S SIGNAL -- COMMAND...

`run` stands for the process that it has placed: it prints what that prints, ends when it ends and
with its status, and on SIGTERM ends it. It is told that process's environment by the variable
``DELTASERVE_PLACED_ENVIRONMENT`` (JSON): anybody on the machine can read a command line. The
process is kept by an actor, and under the actor by our guardian (`launch.guard`, sent along as
text). Ray ends the actor when this process is gone in whatever way, and the guardian then ends the
rest.

Only the standard library and Ray are importable here, and on the node only what is on the node.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_READ_WAIT_S = 0.3
_PLACED_WITHIN_S = 60.0
# Of the environment that Ray gives an actor: its own, and what would point an engine elsewhere.
_DROPPED = ("RAY_", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "OMP_NUM_THREADS")


# Ray kills the children of an actor that ends. The shell is such a child, so that the guardian
# below it lives on, sees that the pipe was closed, and ends the command in good order.
_SHIELD = (
    "guard=$1 pipe=$2 grace=$3 stop=$4; shift 4; "
    '"$0" -I -S -c "$guard" $pipe $$ $grace $stop -- "$@"; exit $?'
)


class Keeper:
    """Keeps one process on its node, and holds the pipe that the guardian watches."""

    def start(
        self,
        guard: str,
        grace_s: str,
        stop_signal: str,
        folder: str,
        environment: dict[str, str],
        command: Sequence[str],
        gpus: int,
    ) -> str | None:
        """Starts it; None, or why it cannot be started on this node."""
        if not os.access(command[0], os.X_OK):
            return f"{command[0]} is not on the node; every node needs the same engines and cache"
        os.makedirs(folder, exist_ok=True)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(_DROPPED)}
        kept |= environment
        if gpus:
            kept["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, ray.get_gpu_ids()))
        read_end, self._alive_while_open = os.pipe()
        shield = ["/bin/sh", "-c", _SHIELD, sys.executable, guard, str(read_end)]
        self._process = subprocess.Popen(
            [*shield, grace_s, stop_signal, *command],
            env=kept,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(read_end,),
        )
        os.close(read_end)
        return None

    def read(self) -> tuple[bytes, int | None]:
        """What it printed since, waited for a moment; and its status once nothing of it is left."""
        assert self._process.stdout is not None
        output = self._process.stdout.fileno()
        if not select.select([output], [], [], _READ_WAIT_S)[0]:
            return b"", None
        data = os.read(output, 1 << 16)
        return data, None if data else self._process.wait()

    def stop(self) -> None:
        """Asks for its end."""
        os.close(self._alive_while_open)


def nodes(address: str) -> list[dict[str, Any]]:
    """The live nodes of the cluster: id, address, GPUs not taken."""
    _connect(address)
    free = ray._private.state.available_resources_per_node()
    return [
        {
            "id": node["NodeID"],
            "address": node["NodeManagerAddress"],
            "gpus": int(free.get(node["NodeID"], {}).get("GPU", 0)),
        }
        for node in ray.nodes()
        if node["Alive"]
    ]


def run(
    address: str,
    node: str,
    gpus: int,
    folder: str,
    guard: str,
    grace_s: str,
    stop_signal: str,
    environment: dict[str, str],
    command: Sequence[str],
) -> int:
    """Runs `command` on the node to its end; its status."""
    _connect(address)
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):  # after Ray, which has handlers of its own
        signal.signal(number, lambda number, _: stopping.append(number))
    keeper = (
        ray.remote(Keeper)
        .options(
            num_cpus=0,
            num_gpus=gpus,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        .remote()
    )
    with open(guard) as file:
        text = file.read()
    how = (grace_s, stop_signal)
    started = keeper.start.remote(text, *how, folder, environment, command, gpus)
    try:
        refused = ray.get(started, timeout=_PLACED_WITHIN_S)
        if refused is not None:
            print(refused, flush=True)
            return 1
        asked = False
        while True:
            if stopping and not asked:
                asked = True
                ray.get(keeper.stop.remote())
            data: bytes
            status: int | None
            data, status = ray.get(keeper.read.remote())
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
            if status is not None:
                return status if status >= 0 else 128 - status
    except ray.exceptions.GetTimeoutError:
        print(f"Ray did not place it on node {node} within {_PLACED_WITHIN_S:.0f} s", flush=True)
    except ray.exceptions.RayError as error:
        print(f"Ray lost it: {error}", flush=True)
    return 1


def _connect(address: str) -> None:
    ray.init(address=address, log_to_driver=False, logging_level="ERROR", namespace="deltaserve")


def main(arguments: list[str]) -> int:
    if arguments[0] == "nodes":
        print(json.dumps(nodes(arguments[1])))
        return 0
    address, node, gpus, folder, guard, grace_s, stop_signal = arguments[1:8]
    environment = json.loads(os.environ.pop("DELTASERVE_PLACED_ENVIRONMENT"))
    command = arguments[arguments.index("--") + 1 :]
    return run(address, node, int(gpus), folder, guard, grace_s, stop_signal, environment, command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
