"""Which GPUs a topology takes: those that it names, of those that were granted to this process."""

from __future__ import annotations

from deltaserve.errors import InputError
from launch.hardware import allowed_gpus, hardware_of
from launch.profiles import AUTO
from launch.topology import Topology


def on_gpus(topology: Topology) -> Topology:
    """`topology` with the GPUs that it takes, where ``CUDA_VISIBLE_DEVICES`` leaves only some to
    this process, and with the profile that they have, where that is not said.

    Raises `InputError` for GPUs that are not left to it.
    """
    started = [group for group in topology.workers if not group.urls]
    if topology.device == "cpu" or topology.placement.kind == "ray" or not started:
        return topology
    where = topology.where
    allowed = allowed_gpus()
    wanted = topology.gpus or tuple(gpu for group in started for gpu in group.gpus)
    needed = sum(group.gpu_count for group in started)
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
    if not wanted and allowed is not None:
        wanted = allowed[:needed]
        topology = topology.model_copy(update={"gpus": wanted})
    if topology.hardware == AUTO and (kind := hardware_of(wanted or tuple(range(needed)), where)):
        topology = topology.model_copy(update={"hardware": kind})
    return topology
