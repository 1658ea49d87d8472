"""Numbers as people read them: seconds, shares, changes, bytes.

Knows estimates and their intervals; not what is measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from eval.outcomes import Measure
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
    """`0.0123` → `12.3 ms`; three significant digits. `∞` is among requests that failed."""
    if value == math.inf:
        return "∞"
    if not math.isfinite(value):
        return DASH
    if abs(value) < 1:
        return f"{_digits(value * 1000)} ms"
    if abs(value) < 600:
        return f"{_digits(value)} s"
    return f"{_digits(value / 60)} min"


def seconds_interval(estimate: Estimate) -> str:
    """The interval in the value's own unit: `11–14`."""
    if not math.isfinite(estimate.low) or math.isnan(estimate.high):
        return ""
    if not math.isfinite(estimate.value):
        return f"{seconds(estimate.low)} to ∞"
    factor = 1000.0 if abs(estimate.value) < 1 else 1.0 if abs(estimate.value) < 600 else 1 / 60
    high = _digits(estimate.high * factor) if math.isfinite(estimate.high) else "∞"
    return f"{_digits(estimate.low * factor)}–{high}"


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
    if ratio == math.inf:
        return "∞"
    if not math.isfinite(ratio):
        return DASH
    points = (ratio - 1) * 100
    sign = "+" if points >= 0 else "−"
    return f"{sign}{abs(points):.0f} %" if abs(points) >= 10 else f"{sign}{abs(points):.1f} %"


def points(difference: float) -> str:
    """A difference of two shares: `-0.051` → `−5.1 points`."""
    if not math.isfinite(difference):
        return DASH
    sign = "+" if difference >= 0 else "−"
    return f"{sign}{abs(difference) * 100:.1f} points"


def effect(measure: Measure, value: float) -> str:
    """A comparison's effect in one measure: a change in percent, or in points of a share."""
    return points(value) if measure.in_points else change(value)


def effect_interval(measure: Measure, estimate: Estimate) -> str:
    """The interval of such an effect: `−20 % to −3.1 %`."""
    if not math.isfinite(estimate.low) or math.isnan(estimate.high):
        return ""  # from beyond every answer to beyond every answer says nothing
    return f"{effect(measure, estimate.low)} to {effect(measure, estimate.high)}"


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
