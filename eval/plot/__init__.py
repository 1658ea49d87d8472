"""Charts as values, and their drawing as SVG: small enough to be inside a report, readable without
a script.

Knows numbers, names and colours; not what is measured.
"""

from __future__ import annotations

from eval.plot.chart import (
    PALETTE,
    Area,
    Axis,
    Bars,
    Chart,
    Dots,
    Heat,
    Line,
    Rule,
    Shade,
    Spans,
)
from eval.plot.svg import svg

__all__ = [
    "PALETTE",
    "Area",
    "Axis",
    "Bars",
    "Chart",
    "Dots",
    "Heat",
    "Line",
    "Rule",
    "Shade",
    "Spans",
    "svg",
]
