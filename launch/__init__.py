"""Topology file → checked commands → supervised processes.

Owns engines' environments, the plan of a topology's processes and their life. Hands our SGLang
plugin to a worker by entry point only; knows nothing of traces, policies or metrics.

    topology = load_topology("laptop-sglang-pd", ["workers.decode.count=2"])
    with fleet(topology, Path("run")) as running:
        running.router_url, running.workers
"""

from launch.fleets import Fleet, FleetError, Worker, fleet
from launch.keep import KeptWorkers
from launch.planning import Plan, Process, plan
from launch.topology import Topology
from launch.topology_files import catalog, load_topology

__all__ = [
    "Fleet",
    "FleetError",
    "KeptWorkers",
    "Plan",
    "Process",
    "Topology",
    "Worker",
    "catalog",
    "fleet",
    "load_topology",
    "plan",
]
