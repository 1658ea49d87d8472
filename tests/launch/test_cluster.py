"""Workers placed on a cluster's nodes: who goes where, and what is started here for them."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest

from deltaserve.errors import InputError
from launch.cluster import Node, assign, cluster_nodes
from launch.engines import Engine
from launch.planning import layout, router_config
from launch.topology import Placement
from launch.topology_files import load_topology

SGLANG = Engine("sglang", Path("/opt/sglang/bin/python"), {"sglang": "0.5.23"})
RAY = ("placement.kind=ray", "placement.python=/opt/ray/bin/python")


def nodes(*gpus: int) -> list[Node]:
    return [Node(f"n{i}", f"10.0.0.{i}", count) for i, count in enumerate(gpus)]


def test_gpus_are_taken_node_by_node() -> None:
    topology = load_topology("elastic-1p3d", RAY)
    placed = assign(topology, nodes(1, 2, 4))
    assert [node.id for node in placed] == ["n0", "n1", "n1", "n2"]


def test_workers_without_gpus_go_to_each_node_in_turn() -> None:
    topology = load_topology("laptop-sglang", ["workers.0.count=3", *RAY])
    assert [node.id for node in assign(topology, nodes(0, 0))] == ["n0", "n1", "n0"]


def test_too_few_gpus_are_named_by_node() -> None:
    topology = load_topology("colocated-4", ["workers.0.tensor_parallel=2", *RAY])
    with pytest.raises(InputError, match=r"no node with 2 free GPUs is left for worker 3 \(10\.0"):
        assign(topology, nodes(3, 2))


def test_a_placed_worker_listens_where_it_is_and_gets_its_environment_there() -> None:
    topology = load_topology("laptop-sglang-pd", RAY)
    made = layout(topology, Path("/run/x"), SGLANG, 4, assign(topology, nodes(0, 0)))
    prefill, decode = made.workers
    assert [prefill.node, decode.node] == ["10.0.0.0", "10.0.0.1"]
    assert decode.argv[decode.argv.index("--host") + 1] == "10.0.0.1"
    assert decode.health_url.startswith("http://10.0.0.1:")
    told = tomllib.loads(router_config(made))["workers"][0]
    assert told["bootstrap_host"] == "10.0.0.0"
    argv, environment = decode.started()
    assert argv[0] == "/opt/ray/bin/python"
    assert argv[-len(decode.argv) - 1 :] == ("--", *decode.argv)
    # Anybody on the machine can read a command line.
    assert not any("DELTASERVE_WORKER_ID" in word for word in argv)
    assert "DELTASERVE_WORKER_ID" not in environment
    placed = json.loads(environment["DELTASERVE_PLACED_ENVIRONMENT"])
    assert placed["DELTASERVE_WORKER_ID"] == "decode-0"
    assert made.router is not None
    assert made.router.started()[0] == made.router.argv


def test_ray_chooses_the_gpus_of_what_it_places() -> None:
    made = load_topology("colocated-2", RAY)
    assert layout(made, Path("/run/x"), SGLANG, 4, assign(made, nodes(2))).gpu_plan == {}
    with pytest.raises(InputError, match="Ray chooses the GPUs"):
        load_topology("colocated-2", ["workers.0.gpus=[0, 1]", *RAY])


def test_a_cluster_is_asked_by_its_own_python(tmp_path: Path) -> None:
    answer = [{"id": "a", "address": "10.0.0.9", "gpus": 8}]
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\nprint('a warning')\nprint({json.dumps(answer)!r})\n")
    python.chmod(0o755)
    assert cluster_nodes(Placement(kind="ray", python=python), "t.toml") == [
        Node("a", "10.0.0.9", 8)
    ]
    python.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('ConnectionError: nobody')\n")
    with pytest.raises(InputError, match=r"t\.toml: placement\.address: auto: ConnectionError"):
        cluster_nodes(Placement(kind="ray", python=python), "t.toml")
    with pytest.raises(InputError, match=r"run: deltaserve launch install ray$"):
        cluster_nodes(Placement(kind="ray"), "t.toml")
