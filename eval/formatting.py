"""Numbers as people read them: seconds, shares, changes, bytes.

Knows estimates and their intervals; not what is measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from eval.stats import Estimate

DASH = "–"


@dataclass(frozen=True)
class Entry:
    """One table cell: a value, what qualifies it (an interval), and a verdict's tag and words."""

    text: str
    interval: str = ""
    tag: str = ""
    verdict: str = ""


def seconds(value: float) -> str:
    """`0.0123` → `12.3 ms`; three significant digits."""
    if not math.isfinite(value):
        return DASH
    if abs(value) < 1:
        return f"{_digits(value * 1000)} ms"
    if abs(value) < 600:
        return f"{_digits(value)} s"
    return f"{_digits(value / 60)} min"


def seconds_interval(estimate: Estimate) -> str:
    """The interval in the value's own unit: `11–14`."""
    if not (math.isfinite(estimate.low) and math.isfinite(estimate.high)):
        return ""
    factor = 1000.0 if abs(estimate.value) < 1 else 1.0 if abs(estimate.value) < 600 else 1 / 60
    return f"{_digits(estimate.low * factor)}–{_digits(estimate.high * factor)}"


def seconds_entry(estimate: Estimate) -> Entry:
    return Entry(seconds(estimate.value), seconds_interval(estimate))


def percent(value: float) -> str:
    """A share: `0.4213` → `42.1 %`."""
    return f"{value * 100:.1f} %" if math.isfinite(value) else DASH


def percent_entry(estimate: Estimate) -> Entry:
    if not math.isfinite(estimate.low):
        return Entry(percent(estimate.value))
    return Entry(percent(estimate.value), f"{estimate.low * 100:.1f}–{estimate.high * 100:.1f}")


def change(ratio: float) -> str:
    """A ratio as a change: `0.88` → `−12 %`."""
    if not math.isfinite(ratio):
        return DASH
    points = (ratio - 1) * 100
    sign = "+" if points >= 0 else "−"
    return f"{sign}{abs(points):.0f} %" if abs(points) >= 10 else f"{sign}{abs(points):.1f} %"


def change_interval(estimate: Estimate) -> str:
    if not (math.isfinite(estimate.low) and math.isfinite(estimate.high)):
        return ""
    return f"{change(estimate.low)} to {change(estimate.high)}"


def number(value: float) -> str:
    """Three significant digits, thousands grouped."""
    if not math.isfinite(value):
        return DASH
    if abs(value) >= 1000:
        return f"{value:,.0f}".replace(",", " ")
    return _digits(value)


def size(count: float) -> str:
    """Bytes: `1536` → `1.54 kB`."""
    if not math.isfinite(count):
        return DASH
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{_digits(count)} {unit}"
        count /= 1000
    return DASH


def _digits(value: float) -> str:
    if value == 0:
        return "0"
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{places}f}"
