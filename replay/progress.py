"""What a person sees while a run goes on: a live line on a terminal, plain lines otherwise.

Owns counters and their display; must not know how requests are sent.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.table import Table

_PLAIN_INTERVAL_S = 5.0


@dataclass(slots=True)
class Counters:
    """What one process has done since it last reported. Times in seconds."""

    sent: int = 0
    done: int = 0
    errors: int = 0
    ttft_s: list[float] = field(default_factory=list)
    lateness_s: list[float] = field(default_factory=list)

    def add(self, other: Counters) -> None:
        self.sent += other.sent
        self.done += other.done
        self.errors += other.errors
        self.ttft_s += other.ttft_s
        self.lateness_s += other.lateness_s


class Display:
    """Shows totals on stderr."""

    def __init__(self, total: int, quiet: bool) -> None:
        self.total = total
        self.counters = Counters()
        self._began_s = time.monotonic()
        self._last_plain_s = self._began_s
        self._quiet = quiet
        self._live: Live | None = None
        if not quiet and sys.stderr.isatty():
            self._live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)

    def __enter__(self) -> Display:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live:
            self._live.stop()

    def add(self, counters: Counters) -> None:
        """Counts what a process reported, and shows the totals when it is time to."""
        self.counters.add(counters)
        if self._live:
            self._live.update(self._table(), refresh=True)
        elif not self._quiet and time.monotonic() - self._last_plain_s >= _PLAIN_INTERVAL_S:
            self._last_plain_s = time.monotonic()
            print(
                "  ".join(f"{name} {value}" for name, value in self._cells()),
                file=sys.stderr,
                flush=True,
            )

    def _cells(self) -> list[tuple[str, str]]:
        counters = self.counters
        return [
            ("elapsed", f"{time.monotonic() - self._began_s:.0f} s"),
            ("sent", f"{counters.sent}/{self.total}"),
            ("in flight", f"{counters.sent - counters.done}"),
            ("done", f"{counters.done}"),
            ("errors", f"{counters.errors}"),
            ("TTFT p50", _seconds(counters.ttft_s, 50)),
            ("TTFT p90", _seconds(counters.ttft_s, 90)),
            ("lateness p99", _seconds(counters.lateness_s, 99)),
        ]

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        cells = self._cells()
        for name, _ in cells:
            table.add_column(name, justify="right")
        table.add_row(*[value for _, value in cells])
        return table


def _seconds(values: list[float], percent: float) -> str:
    if not values:
        return "-"
    return f"{float(np.percentile(values, percent)):.3f} s"
