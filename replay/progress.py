"""What a person sees while a run goes on: a live line on a terminal, plain lines otherwise.

Owns counters and their display; must not know how requests are sent.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.table import Table

_PLAIN_INTERVAL_S = 5.0
_SKETCH_STEP = math.log(1.02)
_SKETCH_LEAST = 1e-6


@dataclass(slots=True)
class Sketch:
    """Percentiles to within 1 %, however many values: counts of values by their logarithm."""

    counts: Counter[int] = field(default_factory=Counter)

    def add(self, value: float) -> None:
        self.counts[math.ceil(math.log(max(value, _SKETCH_LEAST)) / _SKETCH_STEP)] += 1

    def percentile(self, percent: float) -> float | None:
        """The value below which so many lie; None of none."""
        wanted = percent / 100 * self.counts.total()
        for step in sorted(self.counts):
            wanted -= self.counts[step]
            if wanted <= 0:
                return math.exp((step - 0.5) * _SKETCH_STEP)
        return None

    def summary(self) -> dict[str, float] | None:
        """The 50th, 90th and 99th percentile and the largest value; None of none."""
        found = [self.percentile(percent) for percent in (50, 90, 99, 100)]
        names = ("p50", "p90", "p99", "max")
        return {name: value for name, value in zip(names, found, strict=True) if value} or None


@dataclass(slots=True)
class Counters:
    """What one process has done since it last reported. Times in seconds."""

    sent: int = 0
    done: int = 0
    errors: int = 0
    ttft_s: Sketch = field(default_factory=Sketch)
    lateness_s: Sketch = field(default_factory=Sketch)
    loop_lag_s: Sketch = field(default_factory=Sketch)

    def add(self, other: Counters) -> None:
        self.sent += other.sent
        self.done += other.done
        self.errors += other.errors
        self.ttft_s.counts += other.ttft_s.counts
        self.lateness_s.counts += other.lateness_s.counts
        self.loop_lag_s.counts += other.loop_lag_s.counts


class Display:
    """Shows totals on stderr; `total` None: nobody knows how many requests there will be."""

    def __init__(self, total: int | None, quiet: bool) -> None:
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
            ("sent", f"{counters.sent}" + (f"/{self.total}" if self.total is not None else "")),
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


def _seconds(values: Sketch, percent: float) -> str:
    value = values.percentile(percent)
    return "-" if value is None else f"{value:.3f} s"
