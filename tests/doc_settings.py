"""Whether settings in the docs are known: of an experiment, of a topology.

They are applied by the functions that the command line calls, to the packaged experiment or the
shipped topology, up to what the router says of its policy and admission. Nothing is started, and no
file that a setting names has to be there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from deltaserve.errors import InputError
from eval.endpoint import Endpoint
from eval.experiment_files import load_experiment
from eval.matrix import plan_runs
from eval.runner import load_topologies
from eval.simulated_fleet import checked_router, fleet_plan
from eval.simulated_runs import simulation_site
from eval.site import Site, launch_site, with_endpoints
from launch.policies import with_policy
from launch.topology_files import load_topology
from tests.doc_pages import blocks


@cache
def own_file(folder: Path) -> str:
    """The experiment that docs/eval.md shows, as a file."""
    (text,) = [block.text for block in blocks() if '"pd-or-not"' in block.text]
    path = folder / "my.toml"
    path.write_text(text)
    return str(path)


def check_experiment(
    name: str, overrides: Sequence[str], only: Sequence[str], simulated: bool = False
) -> None:
    """Raises `InputError` for what `eval run`, or `eval simulate`, would not take."""
    words = [re.sub(r",?…", "", word) for word in overrides]
    arms = [arm.name for arm in load_experiment(name)[0].arms]
    said: InputError | None = None
    for arm in arms if re.search(r"\bARM\b", " ".join([*words, *only])) else arms[:1]:
        try:
            _check_experiment(
                name,
                [re.sub(r"\bARM\b", arm, word) for word in words],
                [re.sub(r"^ARM$", arm, word) for word in only],
                simulated,
            )
            return
        except InputError as error:
            said = error
    assert said is not None
    raise said


def _check_experiment(name: str, overrides: list[str], only: list[str], simulated: bool) -> None:
    experiment, _ = load_experiment(name, overrides)
    site: Site = simulation_site(experiment.simulate) if simulated else launch_site()
    runs = plan_runs(experiment, [word for word in only if not word.endswith("@LOAD")])
    if any(":" in (run.arm.policy or "") for run in runs):
        return
    for topology in load_topologies(with_endpoints(site), experiment, runs).values():
        if simulated:
            fleet_plan(topology, experiment.simulate)
        elif not isinstance(topology, Endpoint) and topology.router.kind == "deltaserve":
            checked_router(topology)


def check_topology(name: str, overrides: Sequence[str] = ()) -> None:
    """Raises `InputError` for a topology, or a setting of it, that is not known."""
    topology = load_topology(name, overrides)
    if topology.router.kind == "deltaserve" and ":" not in topology.router.policy:
        checked_router(with_policy(topology))
