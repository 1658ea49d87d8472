"""The README's two pictures: what is served, and what sessions suffer, by sessions in flight.

Every point is the mean over the measured runs of one arm at one level (FP8 weights and KV, memory
of an H20, think times of at most 10 s). An arm that was measured at one level alone is a single
dot.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eval.plot import PALETTE, Axis, Chart, Dots, Line, svg

ARMS = {
    "fp8-weights-vllm": "vLLM 0.33.0",
    "fp8-weights-off": "SGLang 0.5.23",
    "fp8-weights-rotate": "deltaserve before SGLang",
}
PICTURES = {
    "served.svg": ("in_time_per_s", 1.0, "first tokens/s of turns within the SLO"),
    "suffered.svg": ("late_share_p90", 100.0, "late share p90 of sessions, %"),
}


def pictures(runs: Sequence[tuple[str, int, dict[str, float]]]) -> dict[str, str]:
    """SVG by file name, from runs as (arm, sessions in flight, measures)."""
    return {
        name: svg(_chart(runs, *what), words=f"{what[2]}, by sessions in flight", alone=True)
        for name, what in PICTURES.items()
    }


def _chart(
    runs: Sequence[tuple[str, int, dict[str, float]]], measure: str, scale: float, title: str
) -> Chart:
    marks: list[Line | Dots] = []
    for (arm, name), colour in zip(ARMS.items(), PALETTE, strict=False):
        levels = sorted({sessions for of, sessions, _ in runs if of == arm})
        means = [
            scale
            * float(np.mean([found[measure] for of, at, found in runs if (of, at) == (arm, n)]))
            for n in levels
        ]
        if len(levels) > 1:
            marks.append(Line(name, levels, means, colour, dots=True))
        else:
            marks.append(Dots(name, levels, means, colour))
    return Chart(title, Axis("sessions in flight on one H200"), Axis(title, zero=True), marks)
