"""The headline as one static picture, for a README: TTFT, TPOT and APC by arm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

from deltaserve.errors import InputError
from eval.metrics import QUANTILES, Cell
from eval.report.figures import colours


def write_picture(cells: Sequence[Cell], caption: str, path: Path) -> None:
    """Draws the cells' headline to `path` (.png or .svg by its name), with the caption below.

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

    palette = colours(cells)
    with plt.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = plt.subplots(1, 3, figsize=(10.5, 3.8), width_ratios=(3, 3, 2))
        width = 0.8 / len(cells)
        for axis, metric, title, factor in (
            (axes[0], "ttft", "Time to first token, ms", 1000.0),
            (axes[1], "tpot", "Time per output token, ms", 1000.0),
        ):
            for i, cell in enumerate(cells):
                estimates = cell.latency[metric]
                values = [e.value * factor for e in estimates]
                below = [max(0.0, (e.value - e.low) * factor) for e in estimates]
                above = [max(0.0, (e.high - e.value) * factor) for e in estimates]
                axis.bar(
                    [k + (i - (len(cells) - 1) / 2) * width for k in range(len(QUANTILES))],
                    values,
                    width * 0.92,
                    yerr=[below, above],
                    color=palette[cell.arm],
                    error_kw={"elinewidth": 0.9, "capsize": 2, "ecolor": "#555555"},
                    label=cell.name,
                )
            axis.set_xticks(range(len(QUANTILES)), [f"p{round(q * 100)}" for q in QUANTILES])
            axis.set_title(title, loc="left", fontsize=11)
        for i, cell in enumerate(cells):
            axes[2].bar(i, cell.apc.value * 100, 0.74, color=palette[cell.arm])
            axes[2].annotate(
                f"{cell.apc.value * 100:.0f}",
                (i, cell.apc.value * 100),
                (0, -4),
                textcoords="offset points",
                ha="center",
                va="top",
                color="white",
            )
        best = next((cell.best_apc for cell in cells if cell.best_apc == cell.best_apc), None)
        if best is not None:
            axes[2].axhline(best * 100, color="#777777", linestyle=":", linewidth=1)
            axes[2].annotate(
                "best possible", (len(cells) - 0.5, best * 100), ha="right", va="bottom", size=8
            )
        axes[2].set_ylim(0, 109)
        axes[2].set_xticks([])
        axes[2].set_title("Prompt tokens from cache, %", loc="left", fontsize=11)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="upper left", ncols=min(len(cells), 6), frameon=False,
            bbox_to_anchor=(0.01, 1.0),
        )  # fmt: skip
        figure.text(
            0.012, 0.015, fill(caption, 150), size=8.5, color="#555555", ha="left", va="bottom"
        )
        figure.tight_layout(rect=(0, 0.09, 1, 0.91))
        try:
            figure.savefig(path, dpi=160, facecolor="white")
        except OSError as error:
            raise InputError(f"--picture {path}: cannot be written: {error.strerror}") from None
        finally:
            plt.close(figure)
