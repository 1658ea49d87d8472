"""Hardware profiles: what each engine is told on a kind of machine, and how fast it is known to be.

One TOML file a kind; a new GPU is a new file. Owns the files and their reading; which GPUs are
really there is asked in `launch.hardware`.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import PurePath

AUTO = "auto"
"""The value of the key `hardware` that has NVML say which profile it is."""


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
    """A kind of machine: the GPUs it has (a word of NVML's name for them), what each engine is told
    there, and what our router is told to expect of a worker that it has not seen yet."""

    device: str
    gpu_name: str | None
    memory_gb: float | None
    """Of a GPU, as its driver says; None where GPUs of that name differ."""
    sglang_flags: tuple[str, ...]
    vllm_flags: tuple[str, ...]
    speed: Speed | None

    def is_of(self, gpu_name: str) -> bool:
        """Whether a GPU that NVML calls `gpu_name` is of this kind."""
        return bool(self.gpu_name and re.search(rf"\b{self.gpu_name}\b", gpu_name))


def _read(text: str) -> Profile:
    data = tomllib.loads(text)
    speed = data.get("speed")
    return Profile(
        device=data["device"],
        gpu_name=data.get("gpu_name"),
        memory_gb=data.get("memory_gb"),
        sglang_flags=tuple(data["sglang_flags"]),
        vllm_flags=tuple(data["vllm_flags"]),
        speed=Speed(**speed) if speed else None,
    )


PROFILES = {
    file.name.removesuffix(".toml"): _read(file.read_text())
    for file in sorted(resources.files(__name__).iterdir(), key=lambda file: file.name)
    if file.name.endswith(".toml")
}
"""Name, as in the key `hardware`, → profile."""

ANY_GPU = PROFILES["cuda"]
"""What engines are told on a GPU that no profile is of."""


def profile_of(gpu_name: str) -> str | None:
    """The profile of GPUs that NVML calls `gpu_name`; None where there is none."""
    return next((name for name, profile in PROFILES.items() if profile.is_of(gpu_name)), None)
