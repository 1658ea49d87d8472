"""Variants of a plan, simulated one after the other: a line a run.

Owns the loop and the line. What the variants are, and which figures are taken of a run, is said by
who asks (`eval.sensitivity`, `eval.weights`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from eval.run_lines import Row
from eval.simulate import simulate

Plan = dict[str, Any]


def simulate_variants(
    requests: Path,
    bases: Iterable[tuple[Row, Plan]],
    variants: Callable[[Plan], Iterable[tuple[str, Plan]]],
    figures: Callable[[Path], dict[str, float]],
    output: Path,
) -> Iterator[Row]:
    """Simulates all variants of each base (what its lines are labelled with, and its plan) with the
    planned `requests`; a line has the variant, the labels and the figures of the run's folder, of
    which one that is no number is empty."""
    for labels, base in bases:
        for name, plan in variants(base | {"requests": str(requests.resolve())}):
            simulate(plan, output / "run")
            found = figures(output / "run").items()
            shown = {key: "" if math.isnan(value) else f"{value:.4f}" for key, value in found}
            yield {"variant": name, **labels, **shown}
