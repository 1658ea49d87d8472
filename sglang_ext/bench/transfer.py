"""How long KV takes against its bytes: whole prompts, and what is new on a cached prefix.

Asks a prefill/decode pair one request at a time and reads, from the prefill worker's telemetry,
when it handed the first page to the transfer engine and when the last had arrived. A long prompt is
sent while its later chunks are still being computed, so beside the time from first to last page
stands the time from the end of the prefill to that of the transfer: what the request waits for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from deltaserve.errors import InputError
from sglang_ext.bench.client import Arm, Client, Prompts
from sglang_ext.bench.samples import Sample, Sink
from sglang_ext.bench.statistics import line, median_interval, quantile

_TELEMETRY_S = 5.0


@dataclass(frozen=True)
class Shape:
    """Prompts of `lengths` tokens, each then continued by `delta_tokens`."""

    lengths: tuple[int, ...]
    delta_tokens: int
    repeats: int


async def measure(
    client: Client,
    arms: Sequence[Arm],
    prompts: Prompts,
    shape: Shape,
    telemetry: Path,
    sink: Sink,
    say: Callable[[str], None],
) -> None:
    """Writes a ``transfer`` for each request of each separated arm, once telemetry tells of it."""
    separated = [arm for arm in arms if arm.prefill is not None]
    if not separated:
        raise InputError("--arms: transfer needs a separated arm, WORKER+PREFILL")
    for repeat in range(shape.repeats + 1):
        for arm in separated:
            await client.flush_arm(arm)
            for length in shape.lengths:
                say(f"transfer: {arm.name}, {length} tokens, repeat {repeat}")
                first = prompts.make(length)
                cold = await client.ask(arm, first, 2)
                longer = first + cold.output_ids + prompts.make(shape.delta_tokens)
                delta = await client.ask(arm, longer, 2)
                for kind, answer in (("full", cold), ("delta", delta)):
                    assert answer.room is not None
                    seen = await _seen(telemetry, answer.room)
                    sink.write(
                        "transfer",
                        arm=arm.name,
                        what=kind,
                        repeat=repeat,
                        warm_up=repeat == 0,
                        context_tokens=length,
                        ttft_s=answer.ttft_s,
                        cached_tokens=answer.cached_tokens,
                        **seen,
                    )


async def _seen(telemetry: Path, room: int) -> dict[str, Any]:
    """What the telemetry in a folder says of one transfer; its lines may be a moment late."""
    for _ in range(int(_TELEMETRY_S / 0.05)):
        transfer, finished_s = _find(telemetry, room)
        if transfer is not None and finished_s is not None:
            break
        await asyncio.sleep(0.05)
    if transfer is None:
        raise InputError(
            f"{telemetry}: no kv_transfer of room {room}; start the prefill worker with "
            "DELTASERVE_SGLANG=telemetry and DELTASERVE_TELEMETRY_DIR"
        )
    return {
        "bytes": transfer["bytes"],
        "saved_bytes": transfer["saved_bytes"],
        "chunks": transfer["chunks"],
        "first_to_last_page_s": transfer["end_unix_s"] - transfer["start_unix_s"],
        "after_prefill_s": None
        if finished_s is None
        else max(0.0, transfer["end_unix_s"] - finished_s),
    }


def _find(telemetry: Path, room: int) -> tuple[dict[str, Any] | None, float | None]:
    """The room's ``kv_transfer``, and when its prefill had ended."""
    transfer, finished_s = None, None
    needle = str(room).encode()
    for path in telemetry.glob("*.jsonl"):
        for raw in _tail(path).split(b"\n"):
            if needle not in raw or not raw.endswith(b"}"):
                continue
            event = orjson.loads(raw)
            if event.get("room") != room:
                continue
            if event["event"] == "kv_transfer":
                transfer = event
            elif event["event"] == "request" and event["mode"] == "prefill":
                finished_s = event["phases"].get("prefill_finished_s")
    return transfer, finished_s


def _tail(path: Path, most_bytes: int = 1 << 20) -> bytes:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - most_bytes))
        whole = file.read()
    return whole if size <= most_bytes else whole.partition(b"\n")[2]


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    """Medians by arm, kind and length, and a line through time against bytes for each arm."""
    kept = [s for s in samples if not s["warm_up"]]
    rows, fits = [], []
    for arm in dict.fromkeys(s["arm"] for s in kept):
        of_arm = [s for s in kept if s["arm"] == arm]
        for length in sorted({s["context_tokens"] for s in of_arm}):
            for what in ("full", "delta"):
                same = [s for s in of_arm if s["context_tokens"] == length and s["what"] == what]
                if not same:
                    continue
                after = [s["after_prefill_s"] for s in same if s["after_prefill_s"] is not None]
                rows.append(
                    {
                        "arm": arm,
                        "what": what,
                        "context_tokens": length,
                        "samples": len(same),
                        "bytes": quantile([s["bytes"] for s in same], 0.5),
                        "saved_bytes": quantile([s["saved_bytes"] for s in same], 0.5),
                        "chunks": quantile([s["chunks"] for s in same], 0.5),
                        "first_to_last_page_ms": median_interval(
                            [s["first_to_last_page_s"] * 1e3 for s in same]
                        ),
                        "after_prefill_ms": median_interval([v * 1e3 for v in after]),
                        "ttft_ms": median_interval([s["ttft_s"] * 1e3 for s in same]),
                    }
                )
        # One chunk is sent in one go: its time is the wire's alone.
        single = [s for s in of_arm if s["chunks"] == 1]
        constant_s, per_byte_s = line(
            [s["bytes"] for s in single], [s["first_to_last_page_s"] for s in single]
        )
        fits.append(
            {
                "arm": arm,
                "samples": len(single),
                "constant_ms": constant_s * 1e3,
                "gb_s": 1e-9 / per_byte_s if per_byte_s > 0 else None,
            }
        )
    return {"rows": rows, "one_chunk": fits}
