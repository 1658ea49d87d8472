"""Names and settings in the commands of the README and the docs are known: experiments and their
arms, keys of experiments and topologies (`--set`), topologies, engines, policies, rules, profiles.

A file of the reader's (`my.toml`) is the example of docs/eval.md. `ARM` stands for any arm of the
experiment, `…` in a value for more of the same, as the experiment for the last one that the page
names. `--set` and `--only` that stand alone in a line must be taken by any experiment or topology,
those that the page names first.

Not looked at: policies that are classes of the reader's (`mine:LeastWork`, which
tests/eval/test_quickstart.py runs), and names in capital letters.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from deltaserve.errors import InputError
from eval.cli_options import bounds
from eval.experiment import Experiment
from eval.experiment_files import packaged_experiments
from eval.imports import FORMATS, REPLAY
from eval.simulate import read_calibration
from launch.engines import ENVIRONMENTS
from launch.topology_files import catalog, load_topology
from replay.synth import PROFILES
from router_policies import _core
from tests.doc_command_lines import parsed
from tests.doc_pages import Command, blocks, commands, inline
from tests.doc_settings import check_experiment, check_topology, own_file


def check_policy(name: str) -> None:
    rules = json.loads(_core.admission_rules())["rules"]
    known = {policy["name"] for policy in json.loads(_core.policies())} | {"admission"}
    known |= {f"admission.{rule['name']}" for rule in rules}
    if ":" not in name and name not in known:
        raise InputError(f"no policy {name}")


def check_one_of(known: Sequence[str]) -> Callable[[str], None]:
    def check(name: str) -> None:
        if name not in known:
            raise InputError(f"{name} is none of {', '.join(known)}")

    return check


def check_names(path: str, given: dict[str, Any]) -> None:
    """Raises `InputError` for a value of another command that names what is not known."""
    checks: dict[tuple[str, str], Callable[[str], object]] = {
        ("eval import", "file_format"): check_one_of((*FORMATS, REPLAY)),
        ("eval plan", "calibration"): read_calibration,
        ("launch install", "names"): check_one_of(list(ENVIRONMENTS)),
        ("policy explain", "name"): check_policy,
        ("replay synth", "profile"): check_one_of(list(PROFILES)),
        ("route", "policy"): check_policy,
        ("route", "admission"): lambda rule: check_policy(f"admission.{rule}"),
    }
    for (command, parameter), check in checks.items():
        values = given[parameter] if command == path else None
        for value in [values] if isinstance(values, str) else values or []:
            if not value.isupper():
                check(value)
    bounds([bound for bound in given.get("slo") or [] if bound != "…"])
    name = given.get("name")
    if path.startswith("launch ") and name and not name.isupper():
        check_topology(name, given.get("overrides") or ())


def wrong(found: Sequence[Command], own: str) -> Iterator[str]:
    """What is not known in commands that follow each other on a page."""
    experiment = ""
    for command in found:
        path, given = parsed(command)
        name = str(given.get("experiment") or given.get("what") or "")
        try:
            if path not in ("eval run", "eval simulate"):
                check_names(path, given)
            elif name and given.get("trace") is None:  # with a trace it is a plan
                if name not in ("…", "..."):
                    experiment = own if name.endswith(".toml") else name
                settings = given["overrides"] or [], given["only"] or []
                simulated = path == "eval simulate" and experiment != own
                check_experiment(experiment, *settings, simulated)
        except InputError as error:
            yield f"{command}: {error}"


def test_every_command_names_what_is_known(tmp_path: Path) -> None:
    pages: dict[str, list[Command]] = {}
    for command in commands():
        pages.setdefault(command.where.partition(":")[0], []).append(command)
    found = [line for page in pages.values() for line in wrong(page, own_file(tmp_path))]
    assert not found, "\n".join(found)


def test_a_fleet_that_agents_are_to_ask_has_a_worker_that_serves_alone() -> None:
    # The router refuses these APIs where only a prefill and a decode worker together serve.
    asked = {block.where for block in blocks() if re.search(r"/v1/messages|ANTHROPIC_", block.text)}
    fleets = [
        (command, load_topology(str(given["name"])))
        for command in commands()
        if command.where in asked
        for path, given in [parsed(command)]
        if path == "launch up"
    ]
    assert fleets
    for command, topology in fleets:
        roles = {group.role for group in topology.workers}
        assert roles & {"colocated", "elastic"}, f"{command}: only {sorted(roles)} workers"


def named_on(page: Path) -> list[str]:
    """All packaged experiments, those that a page names first."""
    text = page.read_text()
    return sorted(packaged_experiments(), key=lambda name: name not in text)


def is_taken(page: Path, overrides: list[str], only: list[str], own: str) -> bool:
    """Whether any experiment takes settings that stand alone; any topology, where an experiment has
    no such key."""
    is_of_topology = {word.partition("=")[0].split(".")[0] for word in overrides}.isdisjoint(
        Experiment.model_fields
    )
    for experiment in (*named_on(page), own) if only or not is_of_topology else ():
        try:
            check_experiment(experiment, overrides, only)
            return True
        except InputError:
            continue
    for topology in catalog() if is_of_topology else ():
        try:
            check_topology(topology, [re.sub(r"=\.\.\.$", "=1", word) for word in overrides])
            return True
        except InputError:
            continue
    return False


def test_settings_that_stand_alone_are_taken_by_an_experiment_or_a_topology(tmp_path: Path) -> None:
    found = []
    for code in inline():
        words = shlex.split(code.text) if re.match(r"--(set|only) [^ ]", code.text) else []
        pairs = list(zip(words[::2], words[1::2], strict=False))
        overrides = [value for option, value in pairs if option == "--set"]
        overrides = [value.replace("$ARM", "ARM") for value in overrides if value != "key=value"]
        only = [value for option, value in pairs if option == "--only" and value != "ARM@LOAD"]
        given = overrides or only
        if given and not is_taken(code.page, overrides, only, own_file(tmp_path)):
            found.append(f"{code.where}: {code.text}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("deltaserve eval run nothing", "no such experiment file"),
        ("deltaserve eval run demo --only nobody", "no arm is named 'nobody'"),
        ("deltaserve eval run demo --set replay.sped=1", "unknown key"),
        ("deltaserve eval run admission-cpu --set set.model_name=x", "model_name"),
        ("deltaserve eval run admission-cpu --set arms.vllm.policy=nothing", "no policy 'nothing'"),
        ("deltaserve eval run admission --set arms.cap.set.router.admission.fil=1", "fil"),
        ("deltaserve eval simulate demo --output x", "simulate.calibration"),
        ("deltaserve launch up laptop-sglang --set workers.0.cuont=1", "cuont"),
        ("deltaserve launch status laptop", "no topology 'laptop'"),
        ("deltaserve policy explain nothing", "no policy nothing"),
        ("deltaserve replay synth --profile x --output y --requests 1", "x is none of"),
    ],
)
def test_a_name_or_setting_that_is_not_known_is_found(words: str, why: str) -> None:
    (line,) = wrong([Command("here", tuple(words.split()), whole=True)], "")
    assert why in line
