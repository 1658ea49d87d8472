"""What the simulator is to simulate of an experiment's arm: workers, router, load and phases.

Owns how a topology and replay settings become the simulator's plan (`docs/simulator.md`), and which
arms it cannot simulate. Runs nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from deltaserve.errors import InputError
from eval.endpoint import Endpoint
from eval.experiment import Phases, Replay, Simulate
from eval.simulate import drawn_calibration, packaged_calibrations, read_calibration
from launch.kv import worker_kv
from launch.topology import Topology, WorkerGroup
from replay.options import RunOptions, preset_values
from replay.plays import Order

# The calibrations of arms on GPUs, unless the experiment names another: by model and engine, of
# workers with bf16 KV and with FP8. vLLM with bf16 KV has none of its own: SGLang's foretell it;
# those of vLLM with bf16 weights foretell it with FP8 ones (docs/simulator.md).
_CALIBRATIONS = {
    ("qwen3-coder-30b-a3b", "sglang"): {
        False: "qwen3-coder-30b-a3b-h200-sglang",
        True: "qwen3-coder-30b-a3b-h200-sglang-fp8",
    },
    ("qwen3-coder-30b-a3b", "vllm"): {
        False: "qwen3-coder-30b-a3b-h200-sglang",
        True: "qwen3-coder-30b-a3b-h200-vllm-fp8",
    },
    ("qwen3-coder-30b-a3b-fp8", "sglang"): {True: "qwen3-coder-30b-a3b-fp8-h200-sglang"},
    ("qwen3-coder-30b-a3b-fp8", "vllm"): {True: "qwen3-coder-30b-a3b-h200-vllm-fp8"},
}
_FP8 = {"fp8_e4m3", "fp8_e5m2"}

# `sglang_ext.settings`' default: how long a step that prefills beside decodes may take.
_TARGET_ITL_S = 0.08

# Sessions that a run begins for each one in flight; should it need more, they come around again.
_DRAWS_A_SESSION = 20


def check_topology(topology: Any) -> None:
    """Raises `InputError` for what is not simulated yet: a server elsewhere, another router or a
    policy in Python, attached workers, and separated prefill with vLLM."""
    if isinstance(topology, Endpoint):
        raise InputError("is a server at a url; only topologies are simulated")
    router = topology.router
    if router.kind != "deltaserve":
        raise InputError(f"router.kind {router.kind}: only our own router is simulated")
    if ":" in router.policy:
        raise InputError(f"policy {router.policy}: a policy in Python is not simulated")
    for group in topology.workers:
        if group.urls:
            raise InputError("workers.urls: attached workers are not simulated")
        if group.role != "colocated" and topology.engine.name != "sglang":
            raise InputError(
                f"workers with role {group.role!r} of {topology.engine.name} are not simulated "
                "yet; only its colocated ones are"
            )


def calibration_name(topology: Topology, simulate: Simulate) -> str:
    """Which calibration the topology's workers run under: the experiment's, else that of its model
    and engine and, where all workers have FP8 KV, of that. Raises `InputError` where neither is
    known."""
    if simulate.calibration is not None:
        return simulate.calibration
    kinds = {topology.kv_keys(group).kv_cache_dtype for group in topology.workers}
    of_model = _CALIBRATIONS.get((topology.model, topology.engine.name), {})
    if topology.device == "cuda" and (found := of_model.get(kinds <= _FP8)):
        return found
    raise InputError(
        f"simulate.calibration: none is known for {topology.model} on {topology.device}; name one "
        f"that deltaserve eval calibrate fitted, or of {', '.join(packaged_calibrations())}"
    )


def fleet_plan(topology: Topology, simulate: Simulate, draw: int = 0) -> dict[str, Any]:
    """`router` and `workers` of the plan for the topology; where constants are drawn, those of
    `draw`. Raises `InputError` for a topology that cannot be simulated, or whose KV capacity nobody
    says."""
    check_topology(topology)
    name = calibration_name(topology, simulate)
    calibration = read_calibration(name)
    if simulate.calibration_spread:
        calibration = drawn_calibration(name, draw)
    router = checked_router(topology)
    return {
        "router": router | {"kv_events": topology.kv_events},
        "workers": [
            _worker(topology, group, f"{group.role}{number or ''}", simulate, calibration)
            for number, group in enumerate(topology.workers)
        ],
    }


def checked_router(topology: Topology) -> dict[str, Any]:
    """What the topology says of its router. Raises `InputError` where the real one would not start
    so before such workers."""
    router = {
        "policy": topology.router.policy,
        "policy_params": topology.router.params,
        "admission": topology.router.admission,
    }
    workers = [
        {"url": f"http://simulated-{number}:1", "role": group.role, "bootstrap_port": 1}
        for number, group in enumerate(topology.workers)
    ]
    _check_router(json.dumps(router | {"workers": workers}))
    return router


# A plan is made for each run and more often; the router's answer to a configuration stays the same.
@lru_cache
def _check_router(configuration: str) -> None:
    from router_policies import _core

    try:
        _core.check(configuration)
    except ValueError as error:
        raise InputError(f"router.{error}") from None


def _worker(
    topology: Topology,
    group: WorkerGroup,
    name: str,
    simulate: Simulate,
    calibration: Mapping[str, Any],
) -> dict[str, Any]:
    keys = topology.kv_keys(group)
    kv = worker_kv(topology, group)
    tokens = kv.capacity_tokens or simulate.kv_tokens
    if tokens is None:
        raise InputError(
            "its KV capacity is not known before it runs; give max_total_tokens to the topology, "
            "or kv_tokens in [simulate]"
        )
    host_tokens = kv.host_tokens
    if host_tokens is None:
        raise InputError("host_kv_gb: the bytes a token are not known; give host_kv_tokens instead")
    given_host = keys.host_kv_tokens is not None or keys.host_kv_gb is not None
    pacing = topology.pacing_keys(group)
    for key in ("prefill_max_requests", "prefill_decode_interval"):
        if getattr(pacing, key):
            raise InputError(f"{key}: is not simulated")
    chosen = {
        "chunk_tokens": group.chunk_tokens or topology.chunk_tokens,
        "max_prefill_tokens": pacing.max_prefill_tokens,
        "radix_eviction_policy": keys.radix_eviction_policy,
        "schedule_policy": keys.schedule_policy,
    }
    return {
        "id": name,
        "count": group.count,
        "role": group.role,
        "engine": topology.engine.name,
        "kv_tokens": tokens,
        "host_kv_tokens": host_tokens if given_host else simulate.host_kv_tokens,
        "mixed_chunks": topology.mixed_chunk,
        "target_itl_s": _target_itl_s(topology, group),
        "prefix_cache": group.role != "decode" or topology.decode_radix_cache,
        "calibration": dict(calibration),
        **{key: value for key, value in chosen.items() if value is not None},
    }


def _target_itl_s(topology: Topology, group: WorkerGroup) -> float | None:
    """How long a step that prefills beside decodes may take, in seconds; None where nothing paces
    prefill. The plugin's variables say it (docs/elastic-worker.md). Raises `InputError` for a
    target that is no time."""
    if group.role == "elastic":
        prefix = "DELTASERVE_ELASTIC_"
    elif topology.pacing_keys(group).paced:
        prefix = "DELTASERVE_PACED_"
    else:
        return None
    given = topology.environment | group.environment
    how = given.get(f"{prefix}INTERFERENCE") or "itl"
    if how == "stock":
        return None
    if how != "itl":
        raise InputError(f"{prefix}INTERFERENCE={how}: only itl and stock can be simulated")
    name = f"{prefix}TARGET_ITL_MS"
    text = given.get(name)
    if not text:
        return _TARGET_ITL_S
    try:
        target_ms = float(text)
    except ValueError:
        target_ms = math.nan
    if not (math.isfinite(target_ms) and target_ms >= 1):
        raise InputError(f"{name}={text!r}: expected a number of at least 1")
    return target_ms / 1000


def options(trace: Path, folder: Path, replay: Replay, phases: Phases | None) -> RunOptions:
    """The arguments that `replay run` would have of these settings, presets resolved."""
    given = replay.model_dump(exclude={"fit_input_tokens", "preset"}, exclude_none=True)
    if phases is not None:
        # What is off stands on no command line either, so that a preset has its own.
        told = phases.model_dump(exclude_none=True)
        given |= {name: value for name, value in told.items() if value is not False}
    if replay.preset is not None:
        given = preset_values(replay.preset, given)
    if "start_share" in given:
        given["start_share"] = tuple(given["start_share"])
    # No server is called; the address says so wherever arguments are shown.
    return RunOptions(trace=trace, url="http://simulated", output=folder, **given)


def load_plan(asked: RunOptions) -> dict[str, Any]:
    """`seed`, `load` and `phases` of the plan. Raises `InputError` for a window without an end."""
    load = {
        "mode": asked.mode,
        "max_inflight_sessions": asked.max_inflight_sessions,
        "sessions_per_hour": asked.sessions_per_hour or 0.0,
        "time_scale": asked.time_scale,
        "think_scale": asked.think_scale,
        "max_think_s": asked.max_think_s,
        "splice_outputs": asked.splice_outputs,
        "timeout_s": asked.timeout_s,
    }
    plan: dict[str, Any] = {"seed": asked.seed, "load": load}
    if not asked.has_phases:
        return plan
    if asked.measure_s is None or not math.isfinite(asked.measure_s):
        raise InputError("phases.measure_s: a simulated window needs a length")
    plan["phases"] = {
        "start": asked.start,
        "start_share": list(asked.start_share),
        "recycle_start": asked.recycle_start,
        "warm_up_s": asked.warm_up_s or 0.0,
        "measure_s": asked.measure_s,
        "recycle": asked.recycle,
        "prime_parallel": asked.prime_parallel,
        "prime_timeout_s": asked.prime_timeout_s,
        "drain_s": asked.timeout_s if asked.drain_s is None else asked.drain_s,
    }
    return plan


def session_draws(asked: RunOptions, conversations: int) -> list[tuple[int, float, float]]:
    """`phases.draws` of the plan: which conversations `replay` begins with these settings, in its
    order, and where in their middle; of a load that is recycled, as many plays of the trace as it
    is likely to need."""
    order = Order(conversations, asked.seed, shuffled=True)
    most = math.ceil(_DRAWS_A_SESSION * asked.max_inflight_sessions / conversations)
    plays = most if asked.recycle else 1
    return [
        (order.at(ticket)[1], *order.middle(ticket, asked.start_share))
        for ticket in range(plays * conversations)
    ]
