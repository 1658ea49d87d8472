"""Which GPUs a topology takes, of those granted to this process: those that it names, else the
first that no other fleet has."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from deltaserve.errors import InputError
from launch.hardware import allowed_gpus, hardware_of, sample_gpus
from launch.profiles import AUTO
from launch.reservations import is_reserved
from launch.topology import Topology


def on_gpus(topology: Topology) -> Topology:
    """`topology` with the GPUs that it takes and with the profile that they have, where that is not
    said. Where there is no driver and no ``CUDA_VISIBLE_DEVICES`` it names none.

    Raises `InputError` for GPUs that ``CUDA_VISIBLE_DEVICES`` does not leave to this process.
    """
    started = [group for group in topology.workers if not group.urls]
    if topology.device == "cpu" or topology.placement.kind == "ray" or not started:
        return topology
    where = topology.where
    found = cache(sample_gpus)  # asked once, and only where what is there decides something
    allowed = allowed_gpus()
    wanted = named_gpus(topology)
    needed = needed_gpus(topology)
    if allowed is not None:
        left = ", ".join(map(str, allowed)) or "none"
        if barred := [gpu for gpu in wanted if gpu not in allowed]:
            raise InputError(
                f"{where}: gpus: GPU {barred[0]} is not among those that CUDA_VISIBLE_DEVICES "
                f"allows ({left})"
            )
        if needed > len(allowed):
            raise InputError(
                f"{where}: {needed} GPUs are needed; CUDA_VISIBLE_DEVICES allows {left}"
            )
    if not wanted:
        there = tuple(gpu.index for gpu in found()) if allowed is None else allowed
        wanted = _first_free(there, needed)
        topology = topology.model_copy(update={"gpus": wanted})
    if topology.hardware == AUTO:
        taken = [gpu for gpu in found() if gpu.index in (wanted or range(needed))]
        if kind := hardware_of(taken, where):
            topology = topology.model_copy(update={"hardware": kind})
    return topology


def free_gpus() -> tuple[int, ...]:
    """The GPUs granted to this process that no fleet has; none where there is no driver."""
    allowed = allowed_gpus()
    there = tuple(gpu.index for gpu in sample_gpus()) if allowed is None else allowed
    return tuple(gpu for gpu in there if not is_reserved("GPU", gpu))


def needed_gpus(topology: Topology) -> int:
    """How many GPUs of this machine a fleet of `topology` takes."""
    if topology.device == "cpu" or topology.placement.kind == "ray":
        return 0
    return sum(group.gpu_count for group in topology.workers if not group.urls)


def named_gpus(topology: Topology) -> tuple[int, ...]:
    """The GPUs that a topology itself asks for; none where it takes what is free."""
    started = [group for group in topology.workers if not group.urls]
    return topology.gpus or tuple(gpu for group in started for gpu in group.gpus)


def _first_free(there: Sequence[int], needed: int) -> tuple[int, ...]:
    """The first `needed` of them that no other fleet has. Where fewer are left the first of all, so
    that the fleet in the way is named; none where fewer are there."""
    free = [gpu for gpu in there if not is_reserved("GPU", gpu)]
    if len(there) < needed:
        return ()
    return tuple((free if len(free) >= needed else there)[:needed])
