"""What GPUs are there, which of them this process may take, and what they are doing now.

Owns every question put to NVML; `pynvml` is imported only when one is asked, because a machine
without GPUs need not have it. GPUs are numbered as NVML numbers them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from deltaserve.errors import InputError
from launch.profiles import AUTO, PROFILES, profile_of

_FREE_BELOW_BYTES = 2 * 2**30
_FREE_WITHIN_S = 30.0


class GpuError(InputError):
    """The driver does not answer for a GPU, as for one that has fallen off its bus."""


@dataclass(frozen=True)
class GpuSample:
    """One GPU at one moment. NVLink counts are since the driver started; None where it has none.

    `sm_clock_mhz` is the clock now; `throttled_by` names what keeps it down beside idleness and
    settings (`power`, `thermal`, …), joined by "+", empty where nothing does. These, `sm_percent`
    and `power_w` are None where the driver does not say.
    """

    index: int
    name: str
    sm_percent: int | None
    memory_used_bytes: int
    memory_total_bytes: int
    power_w: float | None
    nvlink_sent_bytes: int | None
    nvlink_received_bytes: int | None
    sm_clock_mhz: int | None = None
    throttled_by: str | None = None

    @property
    def is_free(self) -> bool:
        """Whether nobody works with it; a driver keeps some memory for itself."""
        return self.memory_used_bytes <= _FREE_BELOW_BYTES


def sample_gpus() -> list[GpuSample]:
    """Every GPU now; empty where there is no NVIDIA driver. One that NVML does not answer for, as
    when it is lost or divided (MIG), is left out, since others can do without it; raises `GpuError`
    where it answers for none."""
    with _nvml() as nvml:
        if nvml is None:
            return []
        found: list[GpuSample] = []
        refused: Exception | None = None
        try:
            indices = range(nvml.nvmlDeviceGetCount())
        except nvml.NVMLError as error:
            raise GpuError(f"NVML: {error}") from error
        for index in indices:
            try:
                found.append(_sample(nvml, index))
            except nvml.NVMLError as error:
                refused = error
        if refused and not found:
            raise GpuError(f"NVML: {refused}") from refused
        return found


def allowed_gpus() -> tuple[int, ...] | None:
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` leaves to this process, in its order; None where it is
    not set. A scheduler (Slurm, Ray, Kubernetes) grants GPUs by it, so that the others may belong
    to somebody else.

    Entries are indices or UUIDs (a unique beginning is enough, as for CUDA); as for CUDA, those
    after the first that names no GPU do not count. Raises `InputError` for MIG instances.
    """
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    if setting is None:
        return None
    uuids: list[str] | None = None
    found: list[int] = []
    for entry in (part.strip() for part in setting.split(",")):
        if entry.isdecimal():
            found.append(int(entry))
            continue
        if entry.upper().startswith("MIG"):
            raise InputError(
                f"CUDA_VISIBLE_DEVICES={setting}: MIG instances are not supported; name whole GPUs"
            )
        if not entry.upper().startswith("GPU-"):
            break
        if uuids is None:
            uuids = _uuids()
        matching = [at for at, uuid in enumerate(uuids) if uuid.lower().startswith(entry.lower())]
        if len(matching) != 1:
            break
        found += matching
    return tuple(dict.fromkeys(found))


def hardware_of(gpus: Collection[GpuSample], where: str) -> str | None:
    """The profile of `gpus`; None of none, and where there is no profile of theirs.

    Raises `InputError` where they are of different kinds.
    """
    names = {gpu.name for gpu in gpus}
    found = {profile_of(name) for name in names}
    if len(found) > 1:
        raise InputError(
            f"{where}: hardware: GPUs of different kinds ({', '.join(sorted(names))}); name those "
            "of one kind (gpus), or say what they are (hardware)"
        )
    return next(iter(found), None)


def check_gpus(wanted: dict[int, str], hardware: str, where: str) -> None:
    """Raises `InputError` unless each GPU in `wanted` (index → worker) is there, of the profile's
    kind, and free. Waits up to 30 s for memory that a fleet just ended is still giving back.
    """
    profile = PROFILES[hardware] if hardware != AUTO else None
    found = {gpu.index: gpu for gpu in sample_until_free(wanted)}
    if not found:
        raise InputError(f'{where}: device is "cuda", but there is no NVIDIA driver here')
    for index, worker in wanted.items():
        if index not in found:
            numbers = ", ".join(map(str, found))
            raise InputError(
                f"{where}: {worker} needs GPU {index}; there are {len(found)} that NVML answers "
                f"for ({numbers})"
            )
        gpu = found[index]
        if profile and profile.gpu_name and not profile.is_of(gpu.name):
            raise InputError(f"{where}: hardware is {hardware!r}, but GPU {index} is a {gpu.name}")
        if not gpu.is_free:
            used_gib = gpu.memory_used_bytes / 2**30
            raise InputError(
                f"{where}: GPU {index} is not free: {used_gib:.1f} GiB in use{_users(index)}"
            )


def sample_until_free(wanted: Collection[int]) -> list[GpuSample]:
    """Every GPU, once those `wanted` are free, or 30 s later as they are then: what a fleet had is
    given back within seconds of its end."""
    deadline_s = time.monotonic() + _FREE_WITHIN_S
    while True:
        found = sample_gpus()
        busy = any(gpu.index in wanted and not gpu.is_free for gpu in found)
        if not busy or time.monotonic() > deadline_s:
            return found
        time.sleep(0.5)


def _users(index: int) -> str:
    with _nvml() as nvml:
        if nvml is None:
            return ""
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            pids = [str(p.pid) for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
        except nvml.NVMLError:  # as in a container or a virtual machine
            return ""
    return f" by pid {', '.join(pids)}" if pids else ""


def _uuids() -> list[str]:
    """UUIDs of the GPUs, by index."""
    with _nvml() as nvml:
        if nvml is None:
            return []
        try:
            handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
            found = [nvml.nvmlDeviceGetUUID(handle) for handle in handles]
        except nvml.NVMLError as error:
            raise GpuError(f"NVML: {error}") from error
    return [uuid.decode() if isinstance(uuid, bytes) else uuid for uuid in found]


def _sample(nvml: Any, index: int) -> GpuSample:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    name = nvml.nvmlDeviceGetName(handle)
    return GpuSample(
        index=index,
        name=name.decode() if isinstance(name, bytes) else name,
        sm_percent=_read(nvml, lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        memory_used_bytes=memory.used,
        memory_total_bytes=memory.total,
        power_w=_read(nvml, lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
        nvlink_sent_bytes=_nvlink(nvml, handle, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX),
        nvlink_received_bytes=_nvlink(nvml, handle, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX),
        sm_clock_mhz=_clock_mhz(nvml, handle),
        throttled_by=_throttled_by(nvml, handle),
    )


# Reasons for a lower clock, by NVML's bits. An idle GPU, or one with clocks that somebody set, is
# not throttled.
_THROTTLES = (
    (0x04, "power"),
    (0x08, "hardware"),
    (0x10, "sync_boost"),
    (0x20, "thermal"),
    (0x40, "hardware_thermal"),
    (0x80, "power_brake"),
)


def _read(nvml: Any, reading: Callable[[], Any]) -> Any:
    """A reading that some GPUs do not have (virtual ones, some in virtual machines): None there."""
    try:
        return reading()
    except nvml.NVMLError:
        return None


def _clock_mhz(nvml: Any, handle: Any) -> int | None:
    clock: int | None = _read(
        nvml, lambda: int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
    )
    return clock


def _throttled_by(nvml: Any, handle: Any) -> str | None:
    try:
        bits = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    except nvml.NVMLError:
        return None
    return "+".join(name for bit, name in _THROTTLES if bits & bit)


def _nvlink(nvml: Any, handle: Any, counter: int) -> int | None:
    """Data bytes over all links; NVML counts KiB."""
    every_link = 0xFFFFFFFF
    try:
        (value,) = nvml.nvmlDeviceGetFieldValues(handle, [(counter, every_link)])
    except nvml.NVMLError:
        return None
    return value.value.ullVal * 1024 if value.nvmlReturn == nvml.NVML_SUCCESS else None


@contextmanager
def _nvml() -> Iterator[Any]:
    """NVML, or None where there is no driver; `InputError` where only its binding is missing."""
    try:
        import pynvml
    except ModuleNotFoundError:
        raise InputError("nvidia-ml-py is missing; run: pip install nvidia-ml-py") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()
