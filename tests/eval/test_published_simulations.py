"""The page of simulated findings says that it is one, and what it rests on is in the repository."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

from eval.experiment import packaged_experiments
from eval.simulate import packaged_calibrations

PAGE = Path(__file__).parents[2] / "docs/results/simulated.md"


def test_the_page_and_each_of_its_tables_say_simulated() -> None:
    lines = PAGE.read_text().splitlines()
    assert "simulated" in lines[0].lower()
    heads = [line for line, below in pairwise(lines) if below.startswith("|--")]
    assert heads
    for head in heads:
        assert "simulated" in head, head


def test_every_experiment_and_calibration_of_the_page_is_here() -> None:
    text = PAGE.read_text()
    experiments = re.findall(r"deltaserve eval simulate (\S+)", text)
    assert experiments
    assert set(experiments) <= set(packaged_experiments())
    calibrations = re.findall(r"eval/calibrations/(\S+)\.toml", text)
    assert calibrations
    assert set(calibrations) <= set(packaged_calibrations())
