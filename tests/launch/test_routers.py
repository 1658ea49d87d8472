"""A router that could place no request, or would not start, is found before engines are started."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from deltaserve.errors import InputError
from launch.commands import routers
from launch.commands.routers import our_refusal
from launch.engines import ENVIRONMENTS, Engine
from launch.planning import layout, plan, router_config
from launch.topology_files import load_topology

POLICY = """
from router_policies.policy import Local


class Elsewhere:
    def decide(self, view):
        return None


class First:
    def decide(self, view):
        return Local(view.local()[0].slot)
"""


def refused(name: str, *overrides: str) -> str | None:
    topology = load_topology(name, overrides)
    engine = Engine(topology.engine.name, Path("/x"), {topology.engine.name: "1"})
    made = layout(topology, Path("/run"), engine, 4)
    assert made.router is not None
    return our_refusal(tomllib.loads(router_config(made)), made.router.environment)


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("laptop-sglang", "unified"),
        ("laptop-sglang-pd", "pd"),
        ("laptop-sglang-elastic", "elastic"),
        ("elastic-1p7d", "offload"),
        ("laptop-vllm-pd", "pd"),
        ("vllm-2-mooncake-both", "selective"),
    ],
)
def test_a_policy_that_can_place_requests_on_the_workers_is_taken(name: str, policy: str) -> None:
    overrides = (f"router.policy={policy}", "router.params={}", "kv_events=true")
    assert refused(name, *overrides) is None


@pytest.mark.parametrize(
    ("name", "policy", "lacking"),
    [
        ("laptop-sglang", "pd", "there are no prefill and decode (or elastic) workers"),
        ("laptop-sglang-pd", "unified", "there is no colocated (or elastic) worker"),
        ("laptop-vllm-pd", "offload", "there is no colocated (or elastic) worker"),
    ],
)
def test_a_policy_that_can_place_none_is_refused_with_the_roles_that_it_lacks(
    name: str, policy: str, lacking: str
) -> None:
    said = refused(name, f"router.policy={policy}", "router.params={}")
    assert said is not None
    assert said.startswith(f"router.policy: {policy} can place no request: {lacking}")


@pytest.mark.parametrize("value", ["abc", "[1]"])
def test_a_parameter_of_the_wrong_kind_is_named(value: str) -> None:
    params = ["router.params.decode_weight=0.1", f"router.params.overload_factor={value}"]
    said = refused("laptop-sglang", "router.policy=unified", *params)
    assert said is not None
    assert said.startswith("router.params.overload_factor: invalid type")


def test_a_policy_that_is_a_python_class_is_asked_too(tmp_path: Path) -> None:
    (tmp_path / "asked.py").write_text(POLICY)
    path = f'router.python_path=["{tmp_path}"]'
    assert refused("laptop-sglang", path, "router.policy=asked:First") is None
    said = refused("laptop-sglang", path, "router.policy=asked:Elsewhere")
    assert said is not None
    assert said.startswith("router.policy: asked:Elsewhere can place no request")
    gone = refused("laptop-sglang", path, "router.policy=asked:Nobody")
    assert gone is not None
    assert "asked:Nobody" in gone


def test_a_plan_is_refused_for_it_and_the_router_is_ready_when_it_could_place_a_request(
    fake_python: Path, tmp_path: Path
) -> None:
    fake = [f"engine.python={fake_python}", "base_port=0"]
    made = plan(load_topology("laptop-sglang", fake), tmp_path / "run")
    assert made.router is not None
    assert made.router.health_url == f"{made.router.url}/readyz"
    with pytest.raises(
        InputError, match=r"topology laptop-sglang: router\.policy: pd can place no"
    ):
        plan(load_topology("laptop-sglang", [*fake, "router.policy=pd"]), tmp_path / "run")


LAUNCH_ROUTER = """
import argparse


def parse_router_args(arguments):
    parser = argparse.ArgumentParser()
    for flag in ("--host", "--port", "--prometheus-port", "--log-level"):
        parser.add_argument(flag)
    parser.add_argument("--worker-urls", nargs="*")
    parser.add_argument("--policy", choices=["random", "cache_aware"])
    parser.add_argument("--queue-size", type=int)
    parser.parse_args(arguments)
"""


@pytest.fixture
def stock(tmp_path: Path, fake_python: Path) -> list[str]:
    """A topology of fake engines behind an installed stock router that is only a parser."""
    environment = ENVIRONMENTS["sglang-router"]
    package = tmp_path / "packages" / "sglang_router"
    package.mkdir(parents=True)
    (package / "launch_router.py").write_text(LAUNCH_ROUTER)
    environment.python.parent.mkdir(parents=True)
    (environment.folder / "deltaserve-engine.json").touch()
    environment.python.write_text(
        f'#!/bin/sh\nPYTHONPATH={package.parent} exec {sys.executable} "$@"\n'
    )
    environment.python.chmod(0o755)
    return [f"engine.python={fake_python}", "base_port=0", "router.kind=sglang-router"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            "policy=unified",
            r"router\.policy: sglang-router \S+ has no policy 'unified' \(choose fr",
        ),
        ('flags=["--log-levl", "warn"]', r"router\.flags: .* unrecognized arguments: --log-levl"),
        ('flags=["--queue-size", "many"]', r"router\.flags: .*--queue-size: invalid int value"),
    ],
)
def test_a_stock_router_is_held_against_its_own_parser(
    stock: list[str], tmp_path: Path, more: str, said: str
) -> None:
    good = [*stock, "router.policy=random"]
    plan(load_topology("laptop-sglang", good), tmp_path / "run")
    with pytest.raises(InputError, match=rf"^topology laptop-sglang: {said}") as error:
        plan(load_topology("laptop-sglang", [*good, f"router.{more}"]), tmp_path / "run")
    assert "\n" not in str(error.value)


def test_plans_that_differ_in_their_ports_alone_are_asked_about_once(
    stock: list[str], fake_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Sequence[str | Path]] = []

    def refusal(argv: Sequence[str | Path], *_: object, **__: object) -> None:
        asked.append(argv)

    monkeypatch.setattr(routers, "refusal", refusal)
    ours = [f"engine.python={fake_python}", f"router.python_path={json.dumps([str(tmp_path)])}"]
    for name, overrides in (
        ("laptop-sglang-pd", ours),
        ("laptop-sglang", [*stock, "router.policy=random"]),
    ):
        asked.clear()
        for base_port in (21000, 22000):
            made = load_topology(name, [*overrides, f"base_port={base_port}"])
            plan(made, tmp_path / "run")
        assert len(asked) == 1
