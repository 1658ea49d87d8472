"""A chart drawn as SVG text: no script, no font, no colour of its own for paper, ink and grid.

Those are classes and variables that the page's style gives, so that one drawing serves light and
dark; `alone` adds a style for a file by itself. Marks name themselves in `<title>` elements, which
browsers show when they are pointed at; `data-plot` tells a script how pixels become values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

import orjson

from eval.plot.chart import Chart
from eval.plot.marks import marks
from eval.plot.scale import CHARACTER, Scale

WIDTH = 460
_LEGEND_ROW = 19
_ALONE = (
    "<style>:root{--ink:#1d1f23;--soft:#5b6068;--grid:#e4e6e8;--paper:#fdfdfb}"
    "@media(prefers-color-scheme:dark){:root{--ink:#e8e9ea;--soft:#a2a8b0;--grid:#33373d;"
    "--paper:#16181b}}svg{background:var(--paper)}.chart text{font:12.5px system-ui,"
    "-apple-system,'Segoe UI',Roboto,sans-serif;fill:var(--soft)}.chart .grid{stroke:var(--grid);"
    "fill:none}.chart .rule{stroke:#888;stroke-dasharray:2 3}.chart .halo{paint-order:stroke;"
    "stroke:var(--paper);stroke-width:3px}.chart .shade{fill:var(--soft);opacity:.12}</style>"
)


def svg(chart: Chart, words: str = "", alone: bool = False) -> str:
    """The chart as one `<svg>` element; `words` say what it shows to those who cannot see it."""
    rows = _legend_rows(chart)
    top = 10 + _LEGEND_ROW * len(rows)
    height = chart.height + _LEGEND_ROW * len(rows)
    y_ends = chart.extent(1)
    bottom = height - (42 if chart.x.title else 26)
    crowded = _crowded(chart)
    if crowded:
        bottom -= 16 * (crowded - 1)
    vertical = Scale(chart.y, y_ends, bottom, top)
    if chart.y.categories:  # the first category on top
        vertical = Scale(chart.y, (y_ends[1], y_ends[0]), bottom, top)
    left = 14 + CHARACTER * max((len(text) for _, text in vertical.ticks()), default=1)
    left += 18 if vertical.title else 0
    across = Scale(chart.x, chart.extent(0), left, WIDTH - 14)
    body = [
        _ALONE if alone else "",
        *_legend(rows),
        *_frame(across, vertical, crowded),
        *marks(chart, across, vertical),
    ]
    plot = {"x": across.inverse, "y": vertical.inverse}
    data = escape(orjson.dumps(plot).decode(), quote=True)
    space = ' xmlns="http://www.w3.org/2000/svg"' if alone else ""
    return (
        f'<svg{space} class="chart" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(words or chart.title, quote=True)}" data-plot="{data}">'
        f"{''.join(body)}</svg>"
    )


def _legend_rows(chart: Chart) -> list[list[tuple[float, str, str, bool]]]:
    """Items of the legend by row, each with its place; none where there is one mark at most."""
    items = chart.legend
    if len(items) < 2 and not any(dash for _, _, dash in items):
        return []
    rows: list[list[tuple[float, str, str, bool]]] = [[]]
    x = 8.0
    for name, colour, dash in items:
        width = 30 + CHARACTER * len(name)
        if x + width > WIDTH and rows[-1]:
            rows.append([])
            x = 8.0
        rows[-1].append((x, name, colour, dash))
        x += width
    return rows


def _legend(rows: Sequence[Sequence[tuple[float, str, str, bool]]]) -> Iterable[str]:
    for i, row in enumerate(rows):
        y = 12 + _LEGEND_ROW * i
        for x, name, colour, dash in row:
            dashes = ' stroke-dasharray="3 3"' if dash else ""
            yield (
                f'<path d="M{x:.0f} {y - 4}h14" stroke="{colour}" stroke-width="4"{dashes}/>'
                f'<text x="{x + 18:.0f}" y="{y}">{escape(name)}</text>'
            )


def _crowded(chart: Chart) -> int:
    """Lines that category names below the x axis need; 1 where they fit side by side."""
    names = chart.x.categories
    if not names:
        return 1
    room = (WIDTH - 70) / len(names)
    return min(len(names), math.ceil(CHARACTER * max(map(len, names)) / room))


def _frame(across: Scale, vertical: Scale, crowded: int) -> Iterable[str]:
    left, right, bottom, top = across.start, across.end, vertical.start, vertical.end
    for y, text in vertical.ticks():
        if not vertical.axis.categories:
            yield f'<path class="grid" d="M{left:.1f} {y:.1f}H{right:.1f}"/>'
        yield f'<text x="{left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{escape(text)}</text>'
    shown = -math.inf
    for i, (x, text) in enumerate(across.ticks()):
        width = CHARACTER * len(text)
        if not across.axis.categories:
            yield f'<path class="grid" d="M{x:.1f} {top:.1f}V{bottom:.1f}"/>'
            if x - width / 2 < shown:  # too near to the label before it
                continue
            shown = x + width / 2 + 4
        y = bottom + 16 + 16 * (i % crowded)
        x = min(max(x, width / 2), WIDTH - width / 2)
        yield f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{escape(text)}</text>'
    yield f'<path class="grid" d="M{left:.1f} {bottom:.1f}H{right:.1f}"/>'
    if across.title:
        y = bottom + 34 + 16 * (crowded - 1)
        middle = (left + right) / 2
        yield (
            f'<text x="{middle:.1f}" y="{y:.1f}" text-anchor="middle">{escape(across.title)}</text>'
        )
    if vertical.title:
        yield (
            f'<text transform="translate(13 {(top + bottom) / 2:.1f}) rotate(-90)" '
            f'text-anchor="middle">{escape(vertical.title)}</text>'
        )
