"""The report's figures, as charts of `eval.plot`; one colour an arm in all of them."""

from __future__ import annotations

from collections.abc import Sequence

from eval.metrics import Cell
from eval.plot import PALETTE


def colours(cells: Sequence[Cell]) -> dict[str, str]:
    """One colour an arm, the same in every figure."""
    arms = list(dict.fromkeys(cell.arm for cell in cells))
    return {arm: PALETTE[i % len(PALETTE)] for i, arm in enumerate(arms)}
