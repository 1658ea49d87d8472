"""How a vLLM worker is started (0.33.0; on a CPU 0.32.0)."""

from __future__ import annotations

import json
import math
import signal
from typing import Any

from launch.commands import (
    LOOPBACK,
    Command,
    Paths,
    Place,
    bounded_threads,
    kv_events,
    local_only,
    parsers,
    visible_gpus,
)
from launch.kv import WorkerKv, offloading_gib, worker_kv
from launch.models import is_shape
from launch.topology import Role, Topology

HEALTH_PATH = "/health"
LOAD_GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
FAILURES: tuple[str, ...] = ()
STOP_SIGNAL = signal.SIGTERM
OWN_BLOCKS = 1
"""Of each rank's KV cache vLLM keeps one block for itself, which stands where a request has none;
it is asked for besides, so that `max_total_tokens` are for requests. It does not start where the
longest request does not fit beside it."""

_GIB = 2**30
_BINDING = "VLLM_CPU_OMP_THREADS_BIND"


def command(topology: Topology, place: Place, paths: Paths) -> Command:
    """The command of one worker."""
    group = place.group
    shape = is_shape(topology.model)
    kv, kv_cache_dtype = worker_kv(topology, group), topology.kv_keys(group).kv_cache_dtype
    argv = [str(paths.python), "-m", "vllm.entrypoints.openai.api_server", "--model", paths.model]
    argv += ["--served-model-name", topology.model_name]
    argv += ["--host", topology.host, "--port", str(place.ports["http"])]
    argv += ["--tensor-parallel-size", str(group.tensor_parallel), "--dtype", topology.dtype]
    argv += ["--seed", "0", "--block-size", str(kv.page_tokens)]
    argv += ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
    if load_format := topology.load_format or ("dummy" if shape else None):
        argv += ["--load-format", load_format]
    if not topology.serves_text:
        argv += ["--skip-tokenizer-init"]
    elif topology.parser_of_tool_calls:
        argv += ["--enable-auto-tool-choice"]
    argv += parsers(topology)
    if topology.context_tokens:
        argv += ["--max-model-len", str(topology.context_tokens)]
    if kv.capacity_tokens:
        blocks = math.ceil(kv.capacity_tokens / kv.page_tokens) + OWN_BLOCKS
        argv += ["--num-gpu-blocks-override", str(blocks)]
    if kv_cache_dtype:
        argv += ["--kv-cache-dtype", kv_cache_dtype]
    if kv.has_host_tier:
        argv += ["--kv-offloading-size", offloading_gib(topology, kv)]
        argv += ["--kv-offloading-backend", "native"]
    if chunk := group.chunk_tokens or topology.chunk_tokens:
        argv += ["--max-num-batched-tokens", str(chunk)]
    if topology.device == "cpu" or not topology.graphs:
        argv += ["--enforce-eager"]
    if connected := topology.kv_connector or place.role != "colocated":
        argv += ["--kv-transfer-config", _connector(topology, place.role)]
    if topology.kv_events:
        argv += kv_events(place.ports, enable_kv_cache_events=True)
    argv += topology.profile.vllm_flags
    argv += [*topology.flags, *group.flags]

    environment = bounded_threads(place.threads) | local_only(topology.host)
    environment |= {
        "VLLM_HOST_IP": topology.host,
        "VLLM_PORT": str(place.ports["dist"]),
        "MASTER_PORT": str(place.ports["master"]),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": topology.host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(place.ports["side_channel"]),
        "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(place.ports["bootstrap"]),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "",
    }
    if topology.host in LOOPBACK:
        # For `launch.caches`. The calls that come with it shall not be open to a network.
        environment["VLLM_SERVER_DEV_MODE"] = "1"
    if topology.device == "cpu":
        # Bounded, not bound: a worker tied to a core waits whenever the client is on it.
        environment[_BINDING] = "nobind"
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(_kv_gib(kv))
    else:
        environment |= visible_gpus(place.gpus)
        if topology.rdma_devices and topology.transfer_backend == "nixl":
            environment["UCX_NET_DEVICES"] = ",".join(f"{d}:1" for d in topology.rdma_devices)
    if shape:
        environment["HF_HUB_OFFLINE"] = "1"
    environment |= topology.environment | group.environment
    # On a CPU the NIXL connector binds the thread that computes to the last core of the machine, in
    # every worker to the same one, where NIXL's own thread, which never sleeps, can starve it.
    unbind = connected and environment.get(_BINDING) == "nobind"
    return Command(tuple(argv), environment, unbind)


def _connector(topology: Topology, role: Role) -> str:
    """``--kv-transfer-config``; NIXL's connector is the same on both sides, Mooncake's is not,
    and is told its RDMA devices here (NIXL's by an environment variable)."""
    if topology.transfer_backend == "nixl":
        return json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"})
    roles = {"prefill": "kv_producer", "decode": "kv_consumer"}
    config: dict[str, Any] = {"kv_connector": "MooncakeConnector"}
    config["kv_role"] = roles.get(role, "kv_both")
    if topology.rdma_devices:
        devices = ",".join(topology.rdma_devices)
        config["kv_connector_extra_config"] = {"device_name": devices}
    return json.dumps(config)


def _kv_gib(kv: WorkerKv) -> int:
    """Room for the KV cache in whole GiB: what its tokens need, or 2 where that is not known."""
    if kv.capacity_tokens is None or kv.bytes_per_token is None:
        return 2
    return max(1, math.ceil(kv.capacity_tokens * kv.bytes_per_token / _GIB))
