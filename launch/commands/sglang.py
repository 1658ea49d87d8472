"""How an SGLang worker is started (0.5.23).

Every port that SGLang would pick by itself is given; its `/health` is told not to generate, because
a generated token would be in the cache before the first request.
"""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path

from launch.cache import cache_dir
from launch.commands import (
    Command,
    Paths,
    Place,
    bounded_threads,
    kv_events,
    local_only,
    parsers,
    visible_gpus,
)
from launch.kv import hicache_size, worker_kv
from launch.models import is_shape
from launch.topology import Role, Topology, WorkerGroup

HEALTH_PATH = "/health"
LOAD_GAUGES = ("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage")

# On SIGTERM its HTTP process looks up only every 5 s, then waits for a scheduler that, separated,
# does not listen. SIGINT ends the server in good order, and the server ends the scheduler.
STOP_SIGNAL = signal.SIGINT

# Printed by SGLang when a plugin did not load; it goes on without it, so readiness looks for these.
FAILURES = (
    "Failed to load plugin deltaserve",
    "Failed to execute general plugin: deltaserve",
    "Failed to apply hooks to",
)

_EXTENSIONS = "TORCH_EXTENSIONS_DIR"

_PREFILL_GRAPHS_UP_TO = ("--cuda-graph-max-bs-prefill", "4096")

MOONCAKE_NVLINK = {
    "SGLANG_MOONCAKE_CUSTOM_MEM_POOL": "INTRA_NODE_NVLINK",
    "MC_INTRANODE_NVLINK": "true",
}
"""What makes SGLang and Mooncake (0.3.13 and later) move KV over a host's NVLink."""


def features(topology: Topology, group: WorkerGroup) -> list[str]:
    """What our plugin is asked to do in a worker of `group` (``DELTASERVE_SGLANG``)."""
    asked = {
        "cpu": topology.device == "cpu",
        "elastic": group.role == "elastic",
        "paced": bool(topology.pacing_keys(group).paced),
        "telemetry": topology.telemetry,
    }
    return [name for name, wanted in asked.items() if wanted]


def _extensions_dir(python: Path) -> Path:
    """Where torch compiles extensions of the SGLang with this interpreter to.

    Each has a folder of its own: releases of SGLang give different sources the same name, and would
    compile them over each other.
    """
    name = hashlib.sha256(str(python).encode()).hexdigest()[:12]
    return cache_dir() / "torch_extensions" / name


def command(topology: Topology, place: Place, paths: Paths) -> Command:
    """The command of one worker."""
    group = place.group
    shape = is_shape(topology.model)
    argv = [str(paths.python), "-m", "sglang.launch_server", "--model-path", paths.model]
    argv += ["--host", topology.host, "--port", str(place.ports["http"])]
    argv += ["--nccl-port", str(place.ports["dist"]), "--device", topology.device]
    argv += ["--tp-size", str(group.tensor_parallel), "--dtype", topology.dtype]
    argv += ["--served-model-name", topology.model_name]
    argv += ["--random-seed", "0", "--enable-metrics", "--enable-cache-report"]
    if topology.incremental_streaming_output:
        # Otherwise every event of a stream carries all tokens so far, from one Python process.
        argv += ["--incremental-streaming-output"]
    if load_format := topology.load_format or ("dummy" if shape else None):
        argv += ["--load-format", load_format]
    if not topology.serves_text:
        argv += ["--skip-tokenizer-init"]
        argv += ["--grammar-backend", "none"]
    elif topology.device == "cpu":
        # xgrammar, SGLang's default, does not take a CPU's logits everywhere.
        argv += ["--grammar-backend", "llguidance"]
    argv += parsers(topology)
    if topology.context_tokens:
        argv += ["--context-length", str(topology.context_tokens)]
    argv += _kv_cache(topology, group)
    if chunk := group.chunk_tokens or topology.chunk_tokens:
        argv += ["--chunked-prefill-size", str(chunk)]
    argv += topology.pacing_keys(group).sglang_flags()
    if place.role != "colocated":
        argv += _disaggregation(topology, place)
    if topology.kv_events:
        argv += kv_events(place.ports)
    if topology.mixed_chunk:
        argv += ["--enable-mixed-chunk"]
    if topology.device == "cuda":
        argv += _graphs(topology, place.role)
    argv += topology.profile.sglang_flags
    argv += [*topology.flags, *group.flags]

    environment = bounded_threads(place.threads) | local_only(topology.host)
    environment |= {
        "MASTER_PORT": str(place.ports["master"]),
        "SGLANG_HOST_IP": topology.host,
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        "DELTASERVE_TELEMETRY_DIR": str(paths.run_dir / "steps"),
        "DELTASERVE_WORKER_ID": place.id,
    }
    if _EXTENSIONS not in os.environ:
        environment[_EXTENSIONS] = str(_extensions_dir(paths.python))
    python_path = [str(paths.plugin_dir)]
    if topology.device == "cpu":
        # A stand-in for the kernels' package, whose own import needs a CUDA driver.
        python_path.insert(0, str(paths.plugin_dir / "sglang_ext" / "cpu" / "stubs"))
        environment |= {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        if topology.serves_text:
            # llguidance would have a C++ compiler make a kernel at the first answer with a grammar.
            environment["TORCHDYNAMO_DISABLE"] = "1"
    else:
        environment |= visible_gpus(place.gpus)
        if place.role != "colocated" and _moves_over_nvlink(topology):
            environment |= MOONCAKE_NVLINK
    if shape:
        environment["HF_HUB_OFFLINE"] = "1"
    environment |= topology.environment | group.environment
    # Beside what the topology names: without ours the worker would be a stock one, and say nothing.
    for name, ours in (
        ("SGLANG_PLUGINS", ["deltaserve"]),
        ("DELTASERVE_SGLANG", features(topology, group)),
    ):
        given = (word.strip() for word in environment.get(name, "").split(","))
        environment[name] = ",".join(dict.fromkeys([*ours, *filter(None, given)]))
    # Before a path that the topology gives: SGLang goes on without a plugin that it does not find.
    python_path += filter(None, [environment.get("PYTHONPATH")])
    environment["PYTHONPATH"] = ":".join(python_path)
    return Command(tuple(argv), environment)


def _kv_cache(topology: Topology, group: WorkerGroup) -> list[str]:
    """Flags of the KV cache: its size, pages, type, order of eviction and host tier.

    HiCache's are those that it ran best with on an H200: copied when written, by a kernel, in the
    layout that the GPU has.
    """
    keys, kv = topology.kv_keys(group), worker_kv(topology, group)
    argv = []
    if kv.capacity_tokens:
        argv += ["--max-total-tokens", str(kv.capacity_tokens)]
    if keys.page_size or kv.has_host_tier or kv.page_tokens > 1:
        argv += ["--page-size", str(kv.page_tokens)]
    for flag, value in (
        ("--kv-cache-dtype", keys.kv_cache_dtype),
        ("--radix-eviction-policy", keys.radix_eviction_policy),
        ("--schedule-policy", keys.schedule_policy),
    ):
        argv += [flag, value] if value else []
    if kv.has_host_tier:
        argv += ["--enable-hierarchical-cache", *hicache_size(topology, group, kv)]
        argv += ["--hicache-write-policy", "write_through", "--hicache-io-backend", "kernel"]
        argv += ["--hicache-mem-layout", "layer_first"]
    return argv


def _graphs(topology: Topology, role: Role) -> list[str]:
    """CUDA graphs for decode unless turned off, and for prefill where the worker does any.

    SGLang leaves those out in decode mode, elastic workers included. There an eager step of 48
    layers takes 62 ms to launch, whatever its size: no ITL below it could be kept
    (`results/elastic-worker.md`). Chunks that carry decodes along are below 4,096 tokens.
    """
    argv = [] if topology.graphs else ["--disable-cuda-graph"]
    if not topology.graphs or role == "decode":
        return [*argv, "--cuda-graph-backend-prefill", "disabled"]
    return [*argv, "--cuda-graph-backend-prefill", "breakable", *_PREFILL_GRAPHS_UP_TO]


def _moves_over_nvlink(topology: Topology) -> bool:
    """Whether Mooncake has no RDMA device to use: it would end at TCP without being told."""
    return topology.transfer_backend == "mooncake" and not topology.rdma_devices


def _disaggregation(topology: Topology, place: Place) -> list[str]:
    mode = "prefill" if place.role == "prefill" else "decode"
    argv = ["--disaggregation-mode", mode]
    argv += ["--disaggregation-transfer-backend", topology.transfer_backend]
    if topology.rdma_devices:
        argv += ["--disaggregation-ib-device", ",".join(topology.rdma_devices)]
    if mode == "prefill":
        argv += ["--disaggregation-bootstrap-port", str(place.ports["bootstrap"])]
    elif topology.decode_radix_cache:
        argv += ["--disaggregation-decode-enable-radix-cache"]
    return argv
