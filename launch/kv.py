"""What a worker's KV cache holds: bytes a token, capacity, host tier, page.

Owns the arithmetic between tokens and bytes, and which of a topology's and a group's keys counts.
Knows engines only by their page sizes; the flags are made in `launch.commands`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deltaserve.errors import InputError
from launch.models import is_shape, model_folder, shape_config
from launch.topology import KvKeys, Topology, WorkerGroup

LONG_PAGE_TOKENS = 64
"""Page of SGLang's GPU workers that send each other KV, have a host tier or publish KV events.

KV is sent and tiers are copied page by page, and pages of one token make that slow: NIXL wrote 47
GB/s between two GPUs with pages of 64 and 17 with pages of one. Events are made page by page, by
the scheduler itself: for a prompt of 100,000 tokens that takes 0.13 to 0.8 s with pages of one
token, and no step is launched meanwhile, with pages of 64 3 to 15 ms
(results/separation.md). On a CPU, whose pools are small, pages stay at one token."""

_VLLM_PAGE_TOKENS = {"cuda": 16, "cpu": 32}
"""On a CPU vLLM takes multiples of 32 only."""

DTYPE_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "float32": 4,
    "float": 4,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
_GB = 10**9


@dataclass(frozen=True)
class WorkerKv:
    """The KV cache of one worker. None is what cannot be known before it runs.

    `capacity_tokens` is on its GPUs together, `host_tokens` in the memory of its host (0: no host
    tier). `bytes_per_token` is over all layers and all of its GPUs.
    """

    page_tokens: int
    capacity_tokens: int | None
    host_tokens: int | None
    host_gb: float | None
    bytes_per_token: int | None

    @property
    def has_host_tier(self) -> bool:
        return bool(self.host_tokens or self.host_gb)

    @property
    def host_bytes(self) -> int | None:
        """Bytes of the host tier; None where neither they nor the bytes a token are known."""
        if self.host_gb is not None:
            return round(self.host_gb * _GB)
        if self.host_tokens is None or self.bytes_per_token is None:
            return None
        return self.host_tokens * self.bytes_per_token


def worker_kv(topology: Topology, group: WorkerGroup) -> WorkerKv:
    """The KV cache of each worker of `group`. Reads the model's configuration, nothing else."""
    keys = topology.kv_keys(group)
    has_host = bool(keys.host_kv_tokens or keys.host_kv_gb)
    page_tokens = keys.page_size
    if page_tokens is None and topology.engine.name == "vllm":
        page_tokens = _VLLM_PAGE_TOKENS[topology.device]
    elif page_tokens is None:
        long = has_host or topology.kv_events or group.role != "colocated"
        page_tokens = LONG_PAGE_TOKENS if long and topology.device == "cuda" else 1
    bytes_per_token = _bytes_per_token(topology, keys)
    host_tokens = keys.host_kv_tokens
    if host_tokens is None and keys.host_kv_gb and bytes_per_token:
        host_tokens = int(keys.host_kv_gb * _GB) // bytes_per_token
    return WorkerKv(
        page_tokens=page_tokens,
        capacity_tokens=keys.max_total_tokens,
        host_tokens=host_tokens if has_host else 0,
        host_gb=keys.host_kv_gb or None,
        bytes_per_token=bytes_per_token,
    )


def unlike(topology: Topology) -> tuple[str, str] | None:
    """Where SGLang's workers that send each other KV do not keep it alike, and how: a decode worker
    ends at its first request from such a prefill worker."""
    groups = [
        (index, group)
        for index, group in enumerate(topology.workers)
        if group.role != "colocated" and not group.urls
    ]
    if topology.engine.name != "sglang" or not groups:
        return None
    first_index, first = groups[0]
    first_keys = _kept_as(topology, first)
    for index, group in groups[1:]:
        for key, value in _kept_as(topology, group).items():
            if value != first_keys[key]:
                why = f"{key} is {value} there and {first_keys[key]} in workers.{first_index}"
                return f"workers.{index}", f"{why}; workers that send each other KV need the same"
    return None


def _kept_as(topology: Topology, group: WorkerGroup) -> dict[str, int | str]:
    return {
        "page_size": worker_kv(topology, group).page_tokens,
        "kv_cache_dtype": topology.kv_keys(group).kv_cache_dtype or "auto",
    }


def hicache_size(topology: Topology, group: WorkerGroup, kv: WorkerKv) -> tuple[str, str]:
    """SGLang's flag for the size of the host tier and its value.

    SGLang takes whole GB (10^9 bytes) a GPU, or a ratio to the KV capacity. Raises `InputError`
    where the keys can be said in neither.
    """
    gpus = group.tensor_parallel
    if kv.host_gb is not None and (kv.host_gb / gpus).is_integer():
        return "--hicache-size", str(int(kv.host_gb / gpus))
    if kv.host_tokens and kv.capacity_tokens:
        return "--hicache-ratio", f"{kv.host_tokens / kv.capacity_tokens:.6g}"
    if kv.host_gb is None and kv.host_bytes is not None:
        return "--hicache-size", str(math.ceil(kv.host_bytes / gpus / _GB))
    key = "host_kv_tokens" if kv.host_gb is None else "host_kv_gb"
    raise InputError(
        f"{topology.where}: {key}: SGLang takes whole GB a GPU, or max_total_tokens beside it"
    )


def offloading_gib(topology: Topology, kv: WorkerKv) -> str:
    """vLLM's size of the host tier: GiB over all GPUs of a worker. Raises `InputError` where the
    bytes a token are not known."""
    if kv.host_bytes is None:
        raise InputError(
            f"{topology.where}: host_kv_tokens: the bytes a token of {topology.model} are not "
            "known here; give host_kv_gb"
        )
    return f"{kv.host_bytes / 2**30:.6g}"


def _bytes_per_token(topology: Topology, keys: KvKeys) -> int | None:
    """Bytes of K and V of one token over all layers; None for models that are not here to be read
    and those that do not keep the same for every layer and token."""
    config = model_config(topology.model)
    config = config.get("text_config", config)
    dtype: str = keys.kv_cache_dtype or "auto"
    if dtype == "auto":
        dtype = topology.dtype
    if dtype == "auto":
        dtype = config.get("torch_dtype") or config.get("dtype") or ""
    layer_types = set(config.get("layer_types") or ()) - {"full_attention"}
    latent = {"kv_lora_rank", "linear_num_value_heads", "mamba_d_state"} & set(config)
    heads = config.get("num_key_value_heads") or config.get("num_attention_heads")
    head_dim = config.get("head_dim")
    if head_dim is None and config.get("hidden_size") and config.get("num_attention_heads"):
        head_dim = config["hidden_size"] // config["num_attention_heads"]
    layers = config.get("num_hidden_layers")
    if layer_types or latent or dtype not in DTYPE_BYTES or not (heads and head_dim and layers):
        return None
    return int(2 * layers * heads * head_dim * DTYPE_BYTES[dtype])


def vocab_size(model: str) -> int | None:
    """Token ids that `model` has, by its ``config.json`` or shape; None where that is not known."""
    config = model_config(model)
    # Models with other inputs than text have their language model's settings one level down.
    for part in (config.get("text_config"), config.get("llm_config"), config):
        size = part.get("vocab_size") if isinstance(part, dict) else None
        if isinstance(size, int) and size > 0:
            return size
    return None


def model_config(model: str) -> Mapping[str, Any]:
    """The configuration of `model`; empty where it is not on this machine."""
    if is_shape(model):
        return shape_config(model)
    folder = model_folder(model)
    if folder is None:
        return {}
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}
