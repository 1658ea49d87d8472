"""Telemetry's totals on SGLang's ``/metrics`` page, for people and dashboards.

The same facts as in the JSON lines, added up; what explains a single number is in the lines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_ext.prometheus import labels_of

SPANS = (
    ("handshake", "preallocation_queued_s", "transfer_started_s"),
    ("kv_arrival", "transfer_started_s", "decode_ready_s"),
    ("queued", "queued_s", "prefill_started_s"),
    ("prefill", "prefill_started_s", "prefill_finished_s"),
    ("kv_transfer", "prefill_finished_s", "transfer_finished_s"),
    ("decode", "decode_ready_s", "finished_s"),
)
"""Phase → the moments it lies between; absent where the worker's role does not know them."""


def spans(phases: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each of `SPANS` that a request with these moments passed."""
    return {
        name: phases[end] - phases[begin]
        for name, begin, end in SPANS
        if begin in phases and end in phases and phases[end] >= phases[begin]
    }


class Totals:
    """The Prometheus metrics of one scheduler; a child a label value is made once and kept."""

    def __init__(self, labels: dict[str, str]) -> None:
        from prometheus_client import (  # type: ignore[import-not-found,unused-ignore]
            Counter,
            Summary,
        )

        self._labels = labels
        names = list(labels)
        self._steps: Any = Summary(
            "deltaserve_step_seconds", "Steps and their duration.", [*names, "forward_mode"]
        )
        self._prefill_tokens: Any = Counter(
            "deltaserve_prefill_tokens", "Prompt tokens computed.", names
        ).labels(**labels)
        self._phases: Any = Summary(
            "deltaserve_request_phase_seconds",
            "Requests that passed a phase on this worker, and how long it took.",
            [*names, "phase"],
        )
        self._transfers: Any = Counter(
            "deltaserve_kv_transfers", "KV transfers that ended.", [*names, "ok"]
        )
        self._moved: Any = Counter(
            "deltaserve_kv_moved_bytes", "KV bytes that were sent.", names
        ).labels(**labels)
        self._saved: Any = Counter(
            "deltaserve_kv_saved_bytes",
            "KV bytes not sent, because the decode worker held them.",
            names,
        ).labels(**labels)
        self._collections: Any = Summary(
            "deltaserve_garbage_collection_seconds",
            "Collections of Python's garbage that stopped the scheduler for 5 ms or longer.",
            [*names, "generation"],
        )
        self._children: dict[tuple[int, str], Any] = {}

    def _child(self, metric: Any, label: str, value: str) -> Any:
        key = (id(metric), value)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = metric.labels(**self._labels, **{label: value})
        return child

    def step(self, forward_mode: str, duration_s: float, prefill_tokens: int) -> None:
        self._child(self._steps, "forward_mode", forward_mode).observe(duration_s)
        if prefill_tokens:
            self._prefill_tokens.inc(prefill_tokens)

    def request(self, phases: Mapping[str, float]) -> None:
        for phase, seconds in spans(phases).items():
            self._child(self._phases, "phase", phase).observe(seconds)

    def transfer(self, ok: bool, moved_bytes: int, saved_bytes: int) -> None:
        self._child(self._transfers, "ok", "true" if ok else "false").inc()
        self._moved.inc(moved_bytes)
        self._saved.inc(saved_bytes)

    def collection(self, generation: int, duration_s: float) -> None:
        self._child(self._collections, "generation", str(generation)).observe(duration_s)


_attached = False
_totals: Totals | None = None


def attach(scheduler: Any) -> None:
    """Starts counting for `scheduler`, once, where its server exports metrics."""
    global _attached, _totals
    if not _attached:
        _attached = True
        labels = labels_of(scheduler)
        _totals = None if labels is None else Totals(labels)


def totals() -> Totals | None:
    """What to count into, in a process whose scheduler exports metrics."""
    return _totals
