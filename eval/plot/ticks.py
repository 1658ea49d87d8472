"""Where an axis has ticks, and what is written at them."""

from __future__ import annotations

import math
from collections.abc import Callable

_SECONDS = ((1e-6, "µs"), (1e-3, "ms"), (1.0, "s"))


def linear(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers in [low, high]."""
    span = high - low
    if not span > 0:
        return [low]
    rough = span / count
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def logarithmic(low: float, high: float) -> list[float]:
    """Powers of ten in [low, high], with 2 and 5 between them where that leaves few."""
    for steps in ((1,), (1, 3), (1, 2, 5)):
        found = [
            m * 10.0**k
            for k in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            for m in steps
            if low * 0.999 <= m * 10.0**k <= high * 1.001
        ]
        if len(found) >= 3:
            break
    return found or [low, high]


def seconds_unit(high: float) -> tuple[float, str]:
    """The unit (its seconds, its name) in which numbers up to `high` seconds read best."""
    fitting = [(size, name) for size, name in _SECONDS if high >= size * 0.999]
    return fitting[-1] if fitting else _SECONDS[0]


def labeller(unit: str, log: bool, high: float) -> tuple[Callable[[float], str], str]:
    """How a tick is written, and the unit that the axis' title says.

    On a linear axis all ticks are in one unit, which the title names; on a logarithmic one each
    tick has its own.
    """
    if unit != "s":
        return short, unit
    if log:
        return seconds, ""
    size, name = seconds_unit(high)
    return (lambda value: short(value / size)), name


def seconds(value: float) -> str:
    """`0.02` → `20 ms`."""
    size, name = seconds_unit(abs(value))
    return f"{short(value / size)} {name}" if value else "0"


def short(value: float) -> str:
    """At most three digits, thousands as k and millions as M."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "–"
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * (1 if size > 1e3 else 10):
            return f"{value / size:.3g}{suffix}"
    return f"{value:.4g}" if abs(value) >= 1 else f"{value:.3g}"


def reading(unit: str, value: float) -> str:
    """A value as it is said when pointed at: `0.0123` s → `12.3 ms`."""
    if unit == "s":
        size, name = seconds_unit(abs(value))
        return f"{value / size:.3g} {name}"
    return f"{value:.4g}{' ' if unit else ''}{unit}"
