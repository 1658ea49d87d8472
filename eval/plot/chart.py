"""What a chart consists of: two axes and marks. Owns no pixels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

# Okabe and Ito's palette: told apart by colour-blind readers, on white and on dark grey.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999", "#B5A900")

Numbers = Sequence[float]


@dataclass(frozen=True)
class Axis:
    """An axis of numbers, or of `categories` (then positions are their indices).

    `unit` is written at the ticks; seconds ("s") become ms or µs where that is shorter. `low` and
    `high` fix the ends; else the marks do, and `zero` makes it begin at zero.
    """

    title: str = ""
    unit: str = ""
    log: bool = False
    zero: bool = False
    low: float | None = None
    high: float | None = None
    categories: tuple[str, ...] = ()


@dataclass(frozen=True)
class Line:
    """Points joined in order; `step` holds each value until the next; `low` and `high` are a band
    around it. A name that begins with an underscore is left out of the legend."""

    name: str
    x: Numbers
    y: Numbers
    colour: str
    dash: bool = False
    step: bool = False
    dots: bool = False
    low: Numbers | None = None
    high: Numbers | None = None


@dataclass(frozen=True)
class Area:
    """What is between `low` and `high`, in steps."""

    name: str
    x: Numbers
    low: Numbers
    high: Numbers
    colour: str


@dataclass(frozen=True)
class Dots:
    """Single points; `labels` are shown when pointed at, and beside the point where `marked`."""

    name: str
    x: Numbers
    y: Numbers
    colour: str
    labels: Sequence[str] = ()
    size: float = 4.0
    opacity: float = 0.85
    marked: bool = False


@dataclass(frozen=True)
class Bars:
    """A bar for each category of the x axis, beside those of other `Bars`; NaN leaves its place
    empty. `low` and `high` are ends of intervals, `colours` those of single bars."""

    name: str
    values: Numbers
    colour: str
    low: Numbers = ()
    high: Numbers = ()
    colours: Sequence[str] = ()


@dataclass(frozen=True)
class Spans:
    """Horizontal bars from `starts` to `ends`, one for each category of the y axis."""

    name: str
    starts: Numbers
    ends: Numbers
    colour: str


@dataclass(frozen=True)
class Heat:
    """Numbers for every pair of categories: `values[y][x]`."""

    values: Sequence[Numbers]


@dataclass(frozen=True)
class Rule:
    """A dotted line across the chart at one value of an axis, with words."""

    words: str
    x: float | None = None
    y: float | None = None


@dataclass(frozen=True)
class Shade:
    """A stretch of the x axis that is set apart, with words."""

    start: float
    end: float
    words: str


Mark = Line | Area | Dots | Bars | Spans | Heat | Rule | Shade


@dataclass(frozen=True)
class Chart:
    """A chart: its title (shown above it by whoever shows it), axes and marks, drawn in order."""

    title: str
    x: Axis
    y: Axis
    marks: Sequence[Mark] = field(default_factory=tuple)
    height: int = 270

    @property
    def legend(self) -> list[tuple[str, str, bool]]:
        """Name, colour and whether dashed, of each mark that has a name, once."""
        found: dict[str, tuple[str, str, bool]] = {}
        for mark in self.marks:
            if isinstance(mark, Line | Area | Dots | Bars | Spans) and mark.name[:1] not in "_":
                dash = isinstance(mark, Line) and mark.dash
                found.setdefault(mark.name, (mark.name, mark.colour, dash))
        return list(found.values())

    @property
    def is_empty(self) -> bool:
        """Whether no mark has a point to draw."""
        return not any(True for _ in self._numbers(0)) and not any(
            isinstance(mark, Heat) for mark in self.marks
        )

    def extent(self, axis: int) -> tuple[float, float]:
        """The least and greatest number that marks have on the x (0) or y (1) axis."""
        chosen = (self.x, self.y)[axis]
        if chosen.categories:
            return -0.5, len(chosen.categories) - 0.5
        known = [v for v in self._numbers(axis) if math.isfinite(v) and (v > 0 or not chosen.log)]
        low, high = (min(known), max(known)) if known else (1.0, 10.0)
        if chosen.zero:
            low, high = min(0.0, low), max(0.0, high)
        if not chosen.log and axis == 1:
            room = 0.04 * (high - low)
            low, high = low - (0 if low == 0 else room), high + (0 if high == 0 else room)
        low = chosen.low if chosen.low is not None else low
        high = chosen.high if chosen.high is not None else high
        if low == high:
            low, high = (low / 2, high * 2) if chosen.log else (low - 0.5, high + 0.5)
        return low, high

    def _numbers(self, axis: int) -> Iterator[float]:
        for mark in self.marks:
            if isinstance(mark, Line):
                yield from mark.x if axis == 0 else mark.y
                if axis == 1:
                    yield from mark.low or ()
                    yield from mark.high or ()
            elif isinstance(mark, Area):
                yield from mark.x if axis == 0 else (*mark.low, *mark.high)
            elif isinstance(mark, Dots):
                yield from mark.x if axis == 0 else mark.y
            elif isinstance(mark, Bars):
                yield from range(len(mark.values)) if axis == 0 else mark.values
                if axis == 1:
                    yield from (*mark.low, *mark.high, 0.0)
            elif isinstance(mark, Spans):
                yield from (*mark.starts, *mark.ends) if axis == 0 else range(len(mark.starts))
            elif isinstance(mark, Rule):
                value = (mark.x, mark.y)[axis]
                if value is not None:
                    yield value
