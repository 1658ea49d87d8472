"""A policy that the router would refuse is refused before an engine is started for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import deltaserve
from deltaserve.errors import InputError
from launch.engines import Engine
from launch.planning import layout
from launch.policies import with_policy
from launch.topology import RouterChoice
from launch.topology_files import load_topology

POLICY = """
class Mine:
    def __init__(self, weight: float = 1.0) -> None:
        pass

    def decide(self, view: object) -> None:
        return None
"""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    (tmp_path / "ours.py").write_text(POLICY)
    return tmp_path


def check(policy: str, folder: Path, **params: object) -> None:
    topology = load_topology("laptop-sglang")
    router = RouterChoice(policy=policy, params=params, python_path=(folder,))
    with_policy(topology.model_copy(update={"name": "t", "router": router}))


def test_policies_of_ours_and_python_classes_are_taken_with_their_parameters(module: Path) -> None:
    check("unified", module, overload_factor=1.5)
    check("ours:Mine", module, weight=0.5)


@pytest.mark.parametrize(
    ("policy", "params", "said"),
    [
        ("unifid", {}, r"no policy 'unifid' \(did you mean 'unified'\?\)"),
        ("unified", {"overload": 2}, r"router\.params\.overload: unified has only: overload_fac"),
        ("round_robin", {"x": 2}, r"router\.params\.x: round_robin has no parameters"),
        ("ours:Other", {}, "ours:Other: AttributeError: .*'Other'"),
        ("nothing:Mine", {}, "nothing:Mine: ModuleNotFoundError"),
        ("ours:Mine", {"wieght": 1}, "ours:Mine: TypeError: .*'wieght'"),
    ],
)
def test_a_wrong_policy_is_answered_in_one_line(
    module: Path, policy: str, params: dict[str, object], said: str
) -> None:
    with pytest.raises(InputError, match=rf"^topology t: (router\.policy: )?{said}") as error:
        check(policy, module, **params)
    assert "\n" not in str(error.value)


def test_the_router_finds_a_python_class_where_the_fleet_was_asked_for(
    module: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(module)
    monkeypatch.setenv("PYTHONPATH", "beside")
    topology = with_policy(load_topology("laptop-sglang", ["router.policy=ours:Mine"]))
    path = [str(module), str(module / "beside"), str(Path(deltaserve.__file__).parents[1])]
    engine = Engine("sglang", Path("/opt/python"), {"sglang": "0.5.23"})
    made = layout(topology, module / "run", engine, 4)
    assert made.router is not None
    assert made.router.environment["PYTHONPATH"] == os.pathsep.join(path)
    assert all(str(module) not in w.environment["PYTHONPATH"].split(":") for w in made.workers)
