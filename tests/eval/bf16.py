"""The runs that docs/results/residency-bf16.md is about, and what its tests ask of them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from eval.records import Run
from eval.stats import Estimate
from tests.eval import published
from tests.eval.differences import over, points, times
from tests.eval.published import RESULTS, lines, phases, run_of
from tests.eval.test_published_lanes import THINKING_RUNS
from tests.eval.test_sessions_a_gpu import RUNS
from tests.eval.windows import between, missed

PAGE = (RESULTS / "residency-bf16.md").read_text()
DRAWS = (2, 3)
MINUTE = ", a minute of thinking"
Runs = dict[tuple[str, int], Run]
says = partial(published.says, PAGE)


def name(arm: str, draw: int) -> str:
    """Of a run's raw lines: the newest of an arm, which ends in `MINUTE` where sessions think."""
    of = THINKING_RUNS if arm.endswith(MINUTE) else RUNS
    return of[arm.removesuffix(MINUTE), 12, draw][-1]


def read(arms: Iterable[str], folder: Path) -> Runs:
    """The runs of both draws, by arm and draw."""
    every = [(arm, draw) for arm in arms for draw in DRAWS]
    return {of: run_of(name(*of), folder / name(*of)) for of in every}


def both(runs: Runs, base: str, arm: str, key: str) -> Estimate:
    """An arm over another, over both draws."""
    return over(*([runs[of, draw] for draw in DRAWS] for of in (base, arm)), key)


def more(runs: Runs, base: str, arm: str) -> str:
    """How many times the requests/s, as the page says it."""
    return times(both(runs, base, arm, "requests_per_s"))


def in_time(runs: Runs, base: str, arm: str) -> str:
    """How many points more of turns in time, as the page says it in brackets."""
    return points(both(runs, base, arm, "attainment"))


def early(line: dict[str, Any]) -> bool:
    """Whether its first token came within 10 s."""
    return not line["error"] and line["first_token_s"] - line["scheduled_s"] <= 10


def measured(arm: str, draw: int) -> list[dict[str, Any]]:
    """The turns that were due in the window."""
    return [line for line in lines(name(arm, draw)) if line["phase"] == "measure"]


def misses(turns: Iterable[dict[str, Any]]) -> tuple[int, int, int, int]:
    """How many were answered, and of those with a late first token, a gap, slow tokens."""
    answered = [missed(line) for line in turns if not line["error"]]
    late, gap, slow = (int(count) for count in np.sum(answered, axis=0))
    return len(answered), late, gap, slow


def sessions(arm: str, draw: int) -> int:
    """That got an answer in the window."""
    window = phases(name(arm, draw))
    return int(
        between(name(arm, draw), window["window_start_s"], window["window_end_s"])["sessions"]
    )
