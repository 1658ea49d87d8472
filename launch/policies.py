"""Whether our router would take a topology's policy, asked before engines are started for it.

Knows policies by the command line alone (``deltaserve policy list``), and those that are Python
classes by importing them as the router will.
"""

from __future__ import annotations

import difflib
import json
import os
import subprocess
from functools import lru_cache
from pathlib import Path

from deltaserve.child import DELTASERVE, PYTHON
from deltaserve.errors import InputError
from launch.asking import refusal
from launch.commands.routers import python_path
from launch.topology import RouterChoice, Topology

_IMPORT = """
import importlib, json, sys
module, _, name = sys.argv[1].partition(":")
policy = getattr(importlib.import_module(module), name)(**json.loads(sys.argv[2]))
if not callable(getattr(policy, "decide", None)):
    raise TypeError("expected a class with decide(view)")
"""


def with_policy(topology: Topology) -> Topology:
    """`topology` with a place to look for a policy that is a Python class (``module:Class``): the
    working folder, then where this process would look.

    Raises `InputError` for a policy, or parameters of it, that our router would refuse.
    """
    router, where = topology.router, topology.where
    if router.kind != "deltaserve":
        return topology
    if ":" not in router.policy:
        _check_ours(router, where)
        return topology
    if not router.python_path:
        given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        path = (Path.cwd(), *(Path(folder).absolute() for folder in given if folder))
        router = router.model_copy(update={"python_path": path})
    _check_class(router, where)
    return topology.model_copy(update={"router": router})


def _check_ours(router: RouterChoice, where: str) -> None:
    known = _known()
    if router.policy not in known:
        close = difflib.get_close_matches(router.policy, known, 1)
        hint = f" (did you mean {close[0]!r}?)" if close else f"; known: {', '.join(known)}"
        raise InputError(f"{where}: router.policy: no policy {router.policy!r}{hint}")
    parameters = known[router.policy]
    for name in router.params:
        if name not in parameters:
            raise InputError(
                f"{where}: router.params.{name}: {router.policy} has "
                + (f"only: {', '.join(parameters)}" if parameters else "no parameters")
            )


@lru_cache(maxsize=1)
def _known() -> dict[str, tuple[str, ...]]:
    """The policies of our router: name → parameters."""
    done = subprocess.run(
        [*DELTASERVE, "policy", "list", "--json"],
        capture_output=True,
        check=True,
    )
    return {
        policy["name"]: tuple(parameter["name"] for parameter in policy["params"])
        for policy in json.loads(done.stdout)["policies"]
    }


def _check_class(router: RouterChoice, where: str) -> None:
    load = [*PYTHON, "-c", _IMPORT, router.policy, json.dumps(router.params)]
    environment = os.environ | {"PYTHONPATH": python_path(router)}
    if reason := refusal(load, environment, silent="it does not import"):
        raise InputError(f"{where}: router.policy: {router.policy}: {reason}")
