"""``deltaserve launch list``: the shipped kinds of topology and what of them fits this machine."""

from __future__ import annotations

from dataclasses import dataclass

from launch.engines import environment_for
from launch.hardware import allowed_gpus, sample_gpus
from launch.topology_files import catalog, load_topology


@dataclass(frozen=True)
class Kind:
    """A shipped kind. `gpus` is how many its smallest size takes (0: none), `fits` whether this
    machine has them, `here` its smallest and largest size here, or what is missing."""

    name: str
    description: str
    engine: str
    roles: tuple[str, ...]
    gpus: int
    fits: bool
    installed: bool
    here: str


def listing() -> list[Kind]:
    """The shipped kinds, by name."""
    allowed = allowed_gpus()
    there = [gpu.index for gpu in sample_gpus()]
    free = len(there if allowed is None else [gpu for gpu in allowed if gpu in there])
    return [_kind(name, described, free) for name, described in catalog().items()]


def _kind(name: str, described: str, gpus_here: int) -> Kind:
    topology = load_topology(name)
    on_cpu = topology.device == "cpu"
    roles = tuple(group.role for group in topology.workers)
    gpus = 0 if on_cpu else sum(group.gpu_count for group in topology.workers)
    environment = environment_for(topology.engine.name, topology.device, topology.engine.version)
    fits = gpus <= gpus_here
    if not fits:
        here = f"needs {gpus} GPU{'s' if gpus > 1 else ''}; {gpus_here or 'none'} here"
    elif on_cpu:
        here = name
    else:
        sizes = dict.fromkeys(_size(roles, count) for count in (gpus, gpus_here))
        here = " to ".join(f"{name}:{size}" for size in sizes)
    if fits and not environment.installed:
        here += f" (after: launch install {environment.name})"
    return Kind(
        name, described, topology.engine.name, roles, gpus, fits, environment.installed, here
    )


def _size(roles: tuple[str, ...], gpus: int) -> str:
    return str(gpus) if len(roles) == 1 else f"1p{gpus - 1}d"
