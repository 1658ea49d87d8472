"""``deltaserve doctor``: what is on this machine, what would fail, and what to do about it.

Owns the questions and their answers' words. Starts nothing, changes nothing, asks no network. The
packages of other folders are looked for, not imported.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import orjson
import psutil
import typer

from deltaserve import __version__
from deltaserve.errors import InputError
from launch.cache import cache_dir
from launch.engines import ENVIRONMENTS
from launch.hardware import sample_gpus
from launch.ports import check_free

PYTHONS = ((3, 11), (3, 12))
PORTS = {8000: "the router's default", 30000: "the first port of a topology"}
ENGINE_BYTES = 12 * 10**9
"""Disk that SGLang for a CPU takes, the largest of what the demo installs."""
MEMORY_BYTES = 10 * 2**30
"""Memory that a laptop topology of two SGLang workers takes."""

State = Literal["ok", "note", "problem"]

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@dataclass(frozen=True)
class Check:
    """One answer. `todo` is empty where nothing needs to be done; a *note* keeps some things from
    working, a *problem* all of them."""

    name: str
    state: State
    found: str
    todo: str = ""


def examine() -> list[Check]:
    """Every check of this machine, in the order in which they are shown."""
    return [check for question in QUESTIONS for check in question()]


def _installation() -> Iterator[Check]:
    version = sys.version_info[:2]
    fits = version in PYTHONS
    todo = "" if fits else "install deltaserve into an environment of Python 3.11 or 3.12"
    found = f"{__version__}, Python {platform.python_version()} in {sys.prefix}"
    yield Check("deltaserve", "ok" if fits else "problem", found, todo)
    system = f"{platform.system()} {platform.machine()}"
    runs = system == "Linux x86_64"
    yield Check(
        "system", "ok" if runs else "note", system, "" if runs else "only Linux x86-64 is tested"
    )
    built = importlib.util.find_spec("router_policies._core") is not None
    yield Check(
        "router",
        "ok" if built else "problem",
        "built" if built else "router_policies._core is missing",
        "" if built else "in a clone: make setup; else: pip install . (needs Rust)",
    )


def _engines() -> Iterator[Check]:
    for name, environment in ENVIRONMENTS.items():
        what = f"{environment.package} {environment.version}"
        if environment.installed:
            yield Check(f"engine {name}", "ok", f"{what} in {environment.folder}")
        else:
            todo = f"deltaserve launch install {name}"
            yield Check(f"engine {name}", "note", f"{what} is not installed", todo)


def _gpus() -> Iterator[Check]:
    try:
        gpus = sample_gpus()
    except InputError as error:
        yield Check("GPUs", "problem", str(error), "see what nvidia-smi says")
        return
    if not gpus:
        yield Check("GPUs", "note", "none", "topologies laptop-… and the router need none")
    for gpu in gpus:
        used, total = gpu.memory_used_bytes / 1e9, gpu.memory_total_bytes / 1e9
        yield Check(
            f"GPU {gpu.index}",
            "ok" if gpu.is_free else "note",
            f"{gpu.name}, {used:.0f} of {total:.0f} GB in use",
            "" if gpu.is_free else "in use: name others by gpus=[…], or end what uses it",
        )


def _ports() -> Iterator[Check]:
    for port, purpose in PORTS.items():
        try:
            check_free({port: purpose})
        except InputError as error:
            yield Check(f"port {port}", "note", str(error), "choose another: --port, or base_port")
        else:
            yield Check(f"port {port}", "ok", f"free ({purpose})")


def _machine() -> Iterator[Check]:
    folder = cache_dir()
    there = next(each for each in (folder, *folder.parents) if each.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        yield Check("cache", "problem", f"{there} cannot be written to", "set DELTASERVE_CACHE")
    else:
        free = shutil.disk_usage(there).free
        enough = free >= ENGINE_BYTES
        yield Check(
            "cache",
            "ok" if enough else "note",
            f"{folder}, {free / 1e9:.0f} GB free",
            "" if enough else "an engine takes up to 12 GB: set DELTASERVE_CACHE to another disk",
        )
    available = psutil.virtual_memory().available
    enough = available >= MEMORY_BYTES
    yield Check(
        "memory",
        "ok" if enough else "note",
        f"{available / 2**30:.0f} GiB available",
        "" if enough else "two SGLang workers on a CPU take 10 GiB: try laptop-sglang-1",
    )


QUESTIONS: tuple[Callable[[], Iterable[Check]], ...] = (
    _installation,
    _engines,
    _gpus,
    _ports,
    _machine,
)


@app.callback(invoke_without_command=True)
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what is installed here, what would fail, and what to do about it.

    Exits with 1 where nothing can work until a problem is mended. Starts and changes nothing.

    Example: deltaserve doctor --json
    """
    checks = examine()
    problems = sum(check.state == "problem" for check in checks)
    if as_json:
        found = {"problems": problems, "checks": [asdict(check) for check in checks]}
        print(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode())
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            print(f"{check.state:<8} {check.name:<{width}}  {check.found}")
            if check.todo:
                print(f"{'':<8} {'':<{width}}  → {check.todo}")
    if problems:
        raise typer.Exit(1)
