"""Values of an axis to pixels, and what is written along it."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape

from eval.plot import ticks
from eval.plot.chart import Axis

CHARACTER = 6.7  # mean width of a character at 12.5 px, on the safe side


class Scale:
    """Values of one axis to pixels."""

    def __init__(self, axis: Axis, ends: tuple[float, float], start: float, end: float) -> None:
        self.axis, self.low, self.high = axis, *ends
        self.start, self.end = start, end
        self._turn: Callable[[float], float] = math.log10 if axis.log else float
        self._base = self._turn(self.low)
        self._factor = (end - start) / (self._turn(self.high) - self._base)

    def __call__(self, value: float) -> float:
        if self.axis.log:
            value = max(value, self.low)
        return self.start + (self._turn(value) - self._base) * self._factor

    def ticks(self) -> list[tuple[float, str]]:
        """Places in pixels and what is written there."""
        if self.axis.categories:
            return [(self(i), name) for i, name in enumerate(self.axis.categories)]
        if self.axis.log:
            values = ticks.logarithmic(self.low, self.high)
        else:
            values = ticks.linear(self.low, self.high)
        write, _ = ticks.labeller(self.axis.unit, self.axis.log, self.high)
        return [(self(value), write(value)) for value in values]

    @property
    def title(self) -> str:
        """The axis' title with the unit that its ticks are in."""
        if self.axis.categories:
            return self.axis.title
        _, unit = ticks.labeller(self.axis.unit, self.axis.log, self.high)
        return ", ".join(word for word in (self.axis.title, unit) if word)

    @property
    def inverse(self) -> dict[str, object]:
        """How a script turns pixels into values."""
        return {
            "from": [round(self.start, 1), round(self.end, 1)],
            "to": [self.low, self.high],
            "log": self.axis.log,
            "unit": self.axis.unit,
            "names": list(self.axis.categories),
        }

    def said(self, value: float) -> str:
        """The value as markup says it when pointed at."""
        return escape(ticks.reading(self.axis.unit, value))
