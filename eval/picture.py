"""The headline as one static picture, for a README: by arm, how long a turn waits for its first
token, how many requests are answered, and what share of the prompts came from a cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from deltaserve.errors import InputError
from eval.formatting import number, seconds
from eval.metrics import Cell
from eval.report.figures import colours
from eval.stats import Estimate
from eval.tables import known_quantile

_PALE = 0.35
_SOFT = "#555555"


def write_picture(cells: Sequence[Cell], title: str, caption: str, path: Path) -> None:
    """Draws the cells' headline to `path` (.png or .svg by its name): a row a cell, under the
    title, with the caption below.

    Needs matplotlib; raises `InputError` where it is missing or the name ends otherwise.
    """
    if path.suffix not in (".png", ".svg"):
        raise InputError(f"--picture {path}: expected a name that ends in .png or .svg")
    try:
        import matplotlib
    except ImportError:
        raise InputError("--picture needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context(
        {
            "font.size": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.spines.bottom": False,
        }
    ):
        figure, axes = plt.subplots(
            1, 3, figsize=(10.5, 1.9 + 0.55 * len(cells)), width_ratios=(5, 3, 3), sharey=True
        )
        _first_token(axes[0], cells)
        _requests(axes[1], cells)
        _cached(axes[2], cells)
        axes[0].set_yticks(range(len(cells)), [cell.name for cell in cells], size=11)
        axes[0].set_ylim(len(cells) - 0.5, -0.5)  # the first cell on top
        for axis in axes:
            axis.tick_params(axis="y", length=0)
            axis.set_xticks([])
        figure.suptitle(fill(title, 100), x=0.012, ha="left", size=13, weight="bold")
        figure.text(0.012, 0.02, fill(caption, 150), size=8.5, color=_SOFT, ha="left", va="bottom")
        figure.tight_layout(rect=(0, 0.12, 1, 0.99))
        try:
            figure.savefig(path, dpi=160, facecolor="white")
        except OSError as error:
            raise InputError(f"--picture {path}: cannot be written: {error.strerror}") from None
        finally:
            plt.close(figure)


def _first_token(axis: Any, cells: Sequence[Cell]) -> None:
    """p50 as a bar, p90 as a paler one behind it; a quantile only where enough lies beyond it."""
    palette = colours(cells)
    axis.set_title("Wait for the first token (p90: pale)", loc="left", fontsize=11)
    rows = []
    for cell in cells:
        half, most, *_ = cell.latency["ttft"]
        rows.append((known_quantile(half, 0.5), known_quantile(most, 0.9)))
    longest = _longest(value for row in rows for value in row)
    for place, (cell, (p50, p90)) in enumerate(zip(cells, rows, strict=True)):
        for value, opacity in ((p90, _PALE), (p50, 1.0)):
            if value is not None:
                axis.barh(
                    place,
                    min(value.value, longest * 1.05),
                    0.62,
                    color=palette[cell.arm],
                    alpha=opacity,
                )
        named = (("p50", p50), ("p90", p90))
        words = [f"{name} {seconds(v.value)}" for name, v in named if v is not None]
        end = max((value.value for value in (p50, p90) if value is not None), default=0.0)
        _label(axis, place, min(end, longest * 1.05), ", ".join(words) or _missing(cell), longest)
    axis.set_xlim(0, longest * 1.65)


def _requests(axis: Any, cells: Sequence[Cell]) -> None:
    axis.set_title("Requests answered a second", loc="left", fontsize=11)
    values = [cell.measures["requests_per_s"] for cell in cells]
    longest = _longest(values)
    palette = colours(cells)
    for place, (cell, rate) in enumerate(zip(cells, values, strict=True)):
        known = math.isfinite(rate.value)
        if known:
            axis.barh(place, rate.value, 0.62, color=palette[cell.arm])
        words = number(rate.value) if known else _missing(cell)
        _label(axis, place, rate.value if known else 0.0, words, longest)
    axis.set_xlim(0, longest * 1.3)


def _cached(axis: Any, cells: Sequence[Cell]) -> None:
    """The share of prompt tokens from cache, and as a line what an endless cache would have had."""
    axis.set_title("Prompt tokens from cache", loc="left", fontsize=11)
    palette = colours(cells)
    for place, cell in enumerate(cells):
        share = cell.apc.value
        if not math.isfinite(share):
            _label(axis, place, 0.0, "unknown", 1.0)
            continue
        axis.barh(place, 1.0, 0.62, color="#eeeeee")
        axis.barh(place, share, 0.62, color=palette[cell.arm])
        _label(axis, place, 1.0, f"{share * 100:.0f} %", 1.0)
        if math.isfinite(cell.best_apc):
            axis.plot([cell.best_apc] * 2, [place - 0.36, place + 0.36], ":", color=_SOFT, lw=1.4)
    if any(math.isfinite(cell.best_apc) for cell in cells):
        axis.text(
            1.0, len(cells) - 0.52, "dotted: an endless cache", size=8.5, color=_SOFT, ha="right",
            va="top",
        )  # fmt: skip
    axis.set_xlim(0, 1.3)


def _longest(values: Any) -> float:
    known = [
        value.value
        for value in values
        if isinstance(value, Estimate) and math.isfinite(value.value) and value.value > 0
    ]
    return max(known, default=1.0)


def _label(axis: Any, place: int, end: float, words: str, longest: float) -> None:
    axis.text(end + 0.02 * longest, place, words, ha="left", va="center", size=10)


def _missing(cell: Cell) -> str:
    """Why a row has no figure."""
    return "load not sustained" if cell.unsustained is not None else "too few answers"
