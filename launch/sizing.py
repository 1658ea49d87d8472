"""How much KV cache a topology's workers have, for how many coding sessions, and what gives more.

Estimated before an engine runs, from a GPU's memory, the weights and the engine's share of the
memory; once it runs its own figure counts. Owns the words that `launch check` and `up` say of it;
starts and asks nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from launch.kv import WorkerKv, worker_kv
from launch.planning import Plan, Process
from launch.topology import WorkerGroup
from launch.weights import in_fp8, weight_bytes

SESSION_TOKENS = 70_000
"""A coding session's last prompt, on average over the recorded sessions that are replayed."""
MOST_SESSIONS = 10
"""A GPU: no arm met the objective with 16, whatever memory it had; with ten some did."""
FEW_SESSIONS = 3
"""A GPU: so few are worth a warning."""

_SHARE_FLAGS = {"sglang": "--mem-fraction-static", "vllm": "--gpu-memory-utilization"}
_BESIDE_BYTES = {"sglang": 0, "vllm": 3_500_000_000}
"""What of its share of a GPU an engine needs for other things. SGLang's share is of weights and KV
alone. vLLM's is of all that it takes: it had 281,888 bf16 tokens on an H20."""


@dataclass(frozen=True)
class Room:
    """The KV caches of one worker: tokens on its `gpus` GPUs and in its host tier (0: none).
    `bytes_per_token` is None where the model is not here to be read."""

    gpus: int
    kv_tokens: int
    host_tokens: int
    bytes_per_token: int | None

    @property
    def sessions(self) -> int:
        """Coding sessions whose prompts are on the GPUs at a time, and whose tokens keep their
        pace."""
        return min(self.kv_tokens // SESSION_TOKENS, MOST_SESSIONS * self.gpus)

    @property
    def is_small(self) -> bool:
        return self.sessions <= FEW_SESSIONS * self.gpus

    @property
    def host_bytes(self) -> int | None:
        """A host tier that keeps those sessions' prompts and is larger than the KV on the GPUs: one
        that is not counts as none."""
        tokens = max(self.sessions * SESSION_TOKENS / 0.8, 1.5 * self.kv_tokens)
        return None if self.bytes_per_token is None else int(tokens * self.bytes_per_token)


def kv_tokens(
    engine: str, memory_bytes: float, share: float, weights: int, bytes_per_token: int
) -> int:
    """Tokens of KV that `engine` has room for on a GPU with `weights`, if it takes `share` of its
    memory."""
    free = memory_bytes * share - _BESIDE_BYTES[engine] - weights
    return max(0, int(free // bytes_per_token))


def share_of(engine: str, argv: Sequence[str]) -> float | None:
    """The share of a GPU's memory that a worker's command gives the engine."""
    said = _value(argv, _SHARE_FLAGS[engine])
    try:
        return float(said) if said else None
    except ValueError:
        return None


def lines(
    made: Plan, memory_bytes: Mapping[int, int], reported: Mapping[str, int] | None = None
) -> list[str]:
    """What is to be said of each group of workers on GPUs. `memory_bytes` is of GPUs that are here;
    of others the kind counts that `hardware` names. `reported` are KV tokens by worker."""
    found: list[str] = []
    for worker, group in _firsts(made):
        found += _of_group(made, worker, group, memory_bytes, (reported or {}).get(worker.id))
    return found


def _firsts(made: Plan) -> Iterator[tuple[Process, WorkerGroup]]:
    """The first worker of each group whose workers keep sessions' KV on GPUs of their own."""
    groups = [group for group in made.topology.workers for _ in range(group.size)]
    seen: list[int] = []
    for worker, group in zip(made.workers, groups, strict=True):
        on_gpus = made.topology.device == "cuda" and not worker.attached
        if on_gpus and group.role != "prefill" and id(group) not in seen:
            seen.append(id(group))
            yield worker, group


def _of_group(
    made: Plan,
    worker: Process,
    group: WorkerGroup,
    memory_bytes: Mapping[int, int],
    reported: int | None,
) -> Iterator[str]:
    topology, kv = made.topology, worker_kv(made.topology, group)
    weights = _weights(made, worker)
    tokens = reported or _estimated(made, worker, group, kv, weights, memory_bytes)
    if tokens is None:
        yield (
            f"{group.role}: how many KV tokens fit is not known before it runs: "
            + ("the model is not on this machine" if weights is None else "say hardware = …")
        )
        return
    room = Room(group.tensor_parallel, tokens, kv.host_tokens or 0, kv.bytes_per_token)
    exactly = "" if reported or kv.capacity_tokens == tokens else "some "
    yield (
        f"{'warning: ' if room.is_small else ''}{group.role}: {exactly}{tokens:,} KV tokens a "
        f"worker: room for {_sessions(room)} of {SESSION_TOKENS:,} tokens each"
    )
    if topology.context_tokens and topology.context_tokens > tokens:
        ends = " and vLLM ends at its start" if made.engine.name == "vllm" else ""
        yield (
            f"warning: {group.role}: context_tokens is {topology.context_tokens:,}: longer prompts "
            f"than the KV cache do not fit{ends}"
        )
    for step in _more(made, worker, group, room, weights):
        yield f"  more: {step}"


def _more(
    made: Plan, worker: Process, group: WorkerGroup, room: Room, weights: int | None
) -> Iterator[str]:
    """What gives more, in the order in which to do it. FP8 weights come on top of FP8 KV."""
    keys = made.topology.kv_keys(group)
    is_given = keys.max_total_tokens is not None
    then = room
    if (keys.kv_cache_dtype or "auto") == "auto" and room.bytes_per_token and not is_given:
        halved = room.bytes_per_token // 2
        then = replace(room, kv_tokens=2 * room.kv_tokens, bytes_per_token=halved)
        yield f'kv_cache_dtype = "fp8_e4m3": {_after(then)}'
    if (needed := room.host_bytes) and room.host_tokens < 1.25 * room.kv_tokens:
        why = "keeps the prompts of sessions whose user or tool is busy"
        if room.host_tokens:
            why = f"the tier's {room.host_tokens:,} tokens are mostly copies of what the GPU has"
        yield f"host_kv_gb = {10 * ceil(needed / 1e10)}: {why}"
    smaller = in_fp8(made.topology.model, weights) if weights else None
    is_fp8 = _value(worker.argv, "--quantization") is not None
    if weights and smaller and then.bytes_per_token and not is_fp8 and not is_given:
        gained = (weights - smaller) // then.bytes_per_token
        then = replace(then, kv_tokens=round(then.kv_tokens + gained, -3))
        sizes = f"{smaller / 1e9:.0f} GB of weights, not {weights / 1e9:.0f}"
        yield f"an FP8 checkpoint ({sizes}): {_after(then)}"


def _estimated(
    made: Plan,
    worker: Process,
    group: WorkerGroup,
    kv: WorkerKv,
    weights: int | None,
    memory_bytes: Mapping[int, int],
) -> int | None:
    """KV tokens of a worker; None where something is not known."""
    engine, gpus = made.engine.name, group.tensor_parallel
    kind = made.topology.profile.memory_gb
    memory = [memory_bytes[gpu] for gpu in worker.gpus if gpu in memory_bytes]
    each = min(memory) if memory else kind and kind * 1e9
    share = share_of(engine, worker.argv)
    if not (each and share and weights and kv.bytes_per_token):
        return kv.capacity_tokens
    fits = gpus * kv_tokens(engine, each, share, weights // gpus, kv.bytes_per_token)
    return min(round(fits, -3), kv.capacity_tokens or 10**12)


def _weights(made: Plan, worker: Process) -> int | None:
    found = weight_bytes(made.topology.model, made.topology.dtype)
    if found and (_value(worker.argv, "--quantization") or "").startswith("fp8"):
        return in_fp8(made.topology.model, found) or found
    return found


def _after(room: Room) -> str:
    return f"{room.kv_tokens:,} KV tokens, {_sessions(room)}"


def _sessions(room: Room) -> str:
    return f"{room.sessions} coding session{'' if room.sessions == 1 else 's'}"


def _value(argv: Sequence[str], flag: str) -> str | None:
    """What a command says of a flag; the last word counts."""
    found = None
    for at, word in enumerate(argv):
        if word == flag and at + 1 < len(argv):
            found = argv[at + 1]
        elif word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found
