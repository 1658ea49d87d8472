"""Each kind of mark as SVG markup, within given scales."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from eval.plot.chart import Area, Bars, Chart, Dots, Heat, Line, Mark, Rule, Shade, Spans
from eval.plot.scale import CHARACTER, Scale

_HEAT = ("#440154", "#3b528b", "#21918c", "#5ec962", "#fde725")


def marks(chart: Chart, across: Scale, vertical: Scale) -> Iterable[str]:
    """Each mark of the chart as markup: shades behind everything, rules before it."""
    bars = [mark for mark in chart.marks if isinstance(mark, Bars)]
    behind = [mark for mark in chart.marks if isinstance(mark, Shade)]
    front = [mark for mark in chart.marks if isinstance(mark, Rule)]
    rest: list[Mark] = [mark for mark in chart.marks if not isinstance(mark, Shade | Rule)]
    for mark in (*behind, *rest, *front):
        if isinstance(mark, Line):
            yield _line(mark, across, vertical)
        elif isinstance(mark, Area):
            yield _area(mark, across, vertical)
        elif isinstance(mark, Dots):
            yield _dots(mark, across, vertical)
        elif isinstance(mark, Bars):
            yield _bars(mark, bars.index(mark), len(bars), across, vertical)
        elif isinstance(mark, Spans):
            yield _spans(mark, across, vertical)
        elif isinstance(mark, Heat):
            yield _heat(mark, across, vertical)
        elif isinstance(mark, Rule):
            yield _rule(mark, across, vertical)
        else:
            yield _shade(mark, across, vertical)


def _path(points: Sequence[tuple[float, float]], step: bool = False) -> str:
    """Path data in tenths of a pixel, relative, so that it is short."""
    out = []
    at = (0, 0)
    for i, (x, y) in enumerate(points):
        here = (round(x * 10), round(y * 10))
        dx, dy = here[0] - at[0], here[1] - at[1]
        if i == 0:
            out.append(f"M{here[0] / 10:g} {here[1] / 10:g}")
        elif step:
            out.append((f"h{dx / 10:g}" if dx else "") + (f"v{dy / 10:g}" if dy else ""))
        elif dx or dy:
            out.append(f"l{dx / 10:g} {dy / 10:g}")
        at = here
    return "".join(out)


def _known(
    x: Iterable[float], y: Iterable[float], across: Scale, vertical: Scale
) -> list[tuple[float, float]]:
    return [
        (across(a), vertical(b))
        for a, b in zip(x, y, strict=True)
        if math.isfinite(a) and math.isfinite(b)
    ]


def _line(mark: Line, across: Scale, vertical: Scale) -> str:
    name = escape(mark.name.lstrip("_"))
    out = ""
    if mark.low is not None and mark.high is not None:
        # A bound that is beyond all numbers ends at the chart's edge.
        top, bottom = vertical.high, vertical.low
        band = [
            (x, max(low, bottom), min(high, top))
            for x, low, high in zip(mark.x, mark.low, mark.high, strict=True)
            if math.isfinite(low) and not math.isnan(high)
        ]
        upper = _known([x for x, _, _ in band], [high for _, _, high in band], across, vertical)
        lower = _known([x for x, _, _ in band], [low for _, low, _ in band], across, vertical)
        if upper and lower:
            ring = _path(upper + lower[::-1])
            out += f'<path d="{ring}Z" fill="{mark.colour}" opacity=".16"/>'
    points = _known(mark.x, mark.y, across, vertical)
    dashes = ' stroke-dasharray="3 3"' if mark.dash else ""
    out += (
        f'<path data-name="{name}" d="{_path(points, mark.step)}" fill="none" '
        f'stroke="{mark.colour}" stroke-width="1.8" stroke-linejoin="round"{dashes}>'
        f"<title>{name}</title></path>"
    )
    if mark.dots:
        for x, y in zip(mark.x, mark.y, strict=True):
            if not (math.isfinite(x) and math.isfinite(y)):
                continue
            px, py = across(x), vertical(y)
            said = f"{name}: {across.said(x)}, {vertical.said(y)}"
            out += (
                f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.4" fill="{mark.colour}">'
                f"<title>{said}</title></circle>"
            )
    return out


def _area(mark: Area, across: Scale, vertical: Scale) -> str:
    upper = _known(mark.x, mark.high, across, vertical)
    lower = _known(mark.x, mark.low, across, vertical)
    if not upper or len(upper) != len(lower):
        return ""
    there = _path(upper, step=True)
    # Steps backwards: the value changes before the move, so that both edges have the same steps.
    back = ""
    before = lower[-1]
    for point in lower[-2::-1]:
        back += f"V{before[1]:.1f}" if not back else ""
        back += f"H{point[0]:.1f}V{point[1]:.1f}"
    edge = f"{there}V{lower[-1][1]:.1f}{back}Z"
    return (
        f'<path data-name="{escape(mark.name)}" d="{edge}" fill="{mark.colour}" opacity=".55">'
        f"<title>{escape(mark.name)}</title></path>"
    )


def _dots(mark: Dots, across: Scale, vertical: Scale) -> str:
    out = [f'<g fill="{mark.colour}" fill-opacity="{mark.opacity}">']
    for i, (x, y) in enumerate(zip(mark.x, mark.y, strict=True)):
        if not (math.isfinite(x) and math.isfinite(y)):
            continue
        px, py = across(x), vertical(y)
        label = mark.labels[i] if mark.labels else ""
        said = escape(f"{mark.name.lstrip('_')}: ") + (escape(label) + " · " if label else "")
        at = vertical.said(y) if across.axis.categories else f"{across.said(x)}, {vertical.said(y)}"
        out.append(
            f'<circle cx="{px:.1f}" cy="{py:.1f}" r="{mark.size:g}"><title>{said}{at}</title>'
            "</circle>"
        )
        if mark.marked and label:
            end = px > across.start + 0.75 * (across.end - across.start)
            out.append(
                f'<text class="halo" x="{px + (-7 if end else 7):.1f}" y="{py - 6:.1f}" '
                f'text-anchor="{"end" if end else "start"}" fill-opacity="1">{escape(label)}</text>'
            )
    return "".join([*out, "</g>"])


def _bars(mark: Bars, index: int, of: int, across: Scale, vertical: Scale) -> str:
    slot = abs(across(1) - across(0)) * 0.8
    width = min(slot / of, 64)
    zero = vertical(0) if not vertical.axis.log else vertical.start
    out = [f'<g fill="{mark.colour}">']
    for i, value in enumerate(mark.values):
        if not math.isfinite(value):
            continue
        middle = across(i) + (index - (of - 1) / 2) * width
        y = vertical(value)
        bounds = ""
        if mark.low and math.isfinite(mark.low[i]) and math.isfinite(mark.high[i]):
            bounds = f" [{vertical.said(mark.low[i])}–{vertical.said(mark.high[i])}]"
        where = escape(across.axis.categories[i])
        said = f"{escape(mark.name)}, {where}: {vertical.said(value)}{bounds}"
        own = f' fill="{mark.colours[i]}"' if mark.colours else ""
        out.append(
            f'<rect{own} x="{middle - width * 0.46:.1f}" y="{min(y, zero):.1f}" '
            f'width="{width * 0.92:.1f}" height="{max(0.5, abs(zero - y)):.1f}">'
            f"<title>{said}</title></rect>"
        )
        if bounds:
            low, high = vertical(mark.low[i]), vertical(mark.high[i])
            out.append(
                f'<path d="M{middle:.1f} {low:.1f}V{high:.1f}m-4 0h8M{middle - 4:.1f} '
                f'{low:.1f}h8" fill="none" stroke="#888"/>'
            )
    return "".join([*out, "</g>"])


def _spans(mark: Spans, across: Scale, vertical: Scale) -> str:
    thick = min(26.0, abs(vertical(1) - vertical(0)) * 0.7)
    out = [f'<g fill="{mark.colour}">']
    for i, (start, end) in enumerate(zip(mark.starts, mark.ends, strict=True)):
        if math.isfinite(start) and math.isfinite(end):
            said = f"{escape(mark.name)}: {across.said(end - start)}"
            out.append(
                f'<rect x="{across(start):.1f}" y="{vertical(i) - thick / 2:.1f}" '
                f'width="{max(0.0, across(end) - across(start)):.1f}" height="{thick:.1f}">'
                f"<title>{said}</title></rect>"
            )
    return "".join([*out, "</g>"])


def _heat(mark: Heat, across: Scale, vertical: Scale) -> str:
    width, height = abs(across(1) - across(0)), abs(vertical(1) - vertical(0))
    known = [v for row in mark.values for v in row if math.isfinite(v)]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    out = []
    for j, row in enumerate(mark.values):
        for i, value in enumerate(row):
            if not math.isfinite(value):
                continue
            share = (value - low) / (high - low) if high > low else 0.0
            x, y = across(i), vertical(j)
            ink = "#000" if share > 0.6 else "#fff"
            out.append(
                f'<rect x="{x - width / 2:.1f}" y="{y - height / 2:.1f}" width="{width:.1f}" '
                f'height="{height:.1f}" fill="{_heat_colour(share)}"/><text x="{x:.1f}" '
                f'y="{y + 4:.1f}" text-anchor="middle" style="fill:{ink}">{value:.3g}</text>'
            )
    return "".join(out)


def _heat_colour(share: float) -> str:
    place = min(max(share, 0.0), 1.0) * (len(_HEAT) - 1)
    i = min(int(place), len(_HEAT) - 2)
    one, two = (
        [int(colour[k : k + 2], 16) for k in (1, 3, 5)] for colour in (_HEAT[i], _HEAT[i + 1])
    )
    mixed = (round(a + (b - a) * (place - i)) for a, b in zip(one, two, strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def _rule(mark: Rule, across: Scale, vertical: Scale) -> str:
    if mark.y is not None:
        y = vertical(mark.y)
        return (
            f'<path class="rule" d="M{across.start:.1f} {y:.1f}H{across.end:.1f}"/>'
            f'<text class="halo" x="{across.end - 2:.1f}" y="{max(y - 5, vertical.end + 10):.1f}" '
            f'text-anchor="end">{escape(mark.words)}</text>'
        )
    if mark.x is None:
        return ""
    x = across(mark.x)
    return (
        f'<path class="rule" d="M{x:.1f} {vertical.start:.1f}V{vertical.end:.1f}"/>'
        f'<text class="halo" x="{x + 4:.1f}" y="{vertical.end + 11:.1f}">'
        f"{escape(mark.words)}</text>"
    )


def _shade(mark: Shade, across: Scale, vertical: Scale) -> str:
    start = min(max(across(mark.start), across.start), across.end)
    end = min(max(across(mark.end), across.start), across.end)
    if end - start < 0.5:
        return ""
    fits = end - start > CHARACTER * len(mark.words)
    text = (
        f'<text x="{(start + end) / 2:.1f}" y="{vertical.end + 11:.1f}" '
        f'text-anchor="middle">{escape(mark.words)}</text>'
    )
    return (
        f'<rect class="shade" x="{start:.1f}" y="{vertical.end:.1f}" width="{end - start:.1f}" '
        f'height="{vertical.start - vertical.end:.1f}"><title>{escape(mark.words)}</title></rect>'
        + (text if fits else "")
    )
