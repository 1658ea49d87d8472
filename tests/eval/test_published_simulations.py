"""The page of simulated findings says that it is one, and what it rests on is in the repository."""

from __future__ import annotations

import csv
import itertools
import re
import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from eval.experiment_files import packaged_experiments
from eval.run_lines import read_rows
from eval.separation import OBJECTIVES, figure, table
from eval.simulate import packaged_calibrations

PAGE = Path(__file__).parents[2] / "docs/results/simulated.md"
SEPARATION = PAGE.with_name("simulated-separation.md")


@pytest.mark.parametrize("page", [PAGE, SEPARATION], ids=lambda page: page.stem)
def test_the_page_and_each_of_its_tables_say_simulated(page: Path) -> None:
    lines = page.read_text().splitlines()
    assert "simulated" in lines[0].lower()
    heads = [line for line, below in pairwise(lines) if below.startswith("|--")]
    assert heads
    for head in heads:
        assert "simulated" in head, head


@pytest.mark.parametrize("page", [PAGE, SEPARATION], ids=lambda page: page.stem)
def test_every_experiment_and_calibration_of_the_page_is_here(page: Path) -> None:
    text = page.read_text()
    experiments = re.findall(r"deltaserve eval simulate (\S+)", text)
    assert experiments
    assert set(experiments) <= set(packaged_experiments())
    calibrations = re.findall(r"eval/calibrations/(\S+)\.toml", text)
    assert calibrations
    assert set(calibrations) <= set(packaged_calibrations())


def test_the_map_of_separation_follows_from_its_runs() -> None:
    rows = read_rows(PAGE.parent / "simulated/separation.csv")
    assert len(rows) == 900
    text = SEPARATION.read_text()
    for objective in OBJECTIVES:
        assert "\n".join(table(rows, objective)) in text, objective
    drawn = re.findall(r"\(simulated/separation-(\w+)\.svg\)", text)
    assert drawn
    for objective in drawn:
        kept = PAGE.parent / f"simulated/separation-{objective}.svg"
        assert kept.read_text() == figure(rows, objective)


RUNS = PAGE.parent / "simulated/residency-frontier.csv"


def test_the_tables_of_rules_follow_from_their_runs() -> None:
    with RUNS.open() as file:
        runs = list(csv.DictReader(file))
    lines = PAGE.read_text().splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("| simulated, shown on"))
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in itertools.takewhile(lambda line: line.startswith("|"), lines[head + 2 :])
    ]
    assert len(rows) >= 9
    for load, rule, *cells in rows:
        found = re.fullmatch(r"(\d+) in flight, think ≤ (\d+) s(, host tier)?", load)
        assert found, load
        chosen = [
            run
            for run in runs
            if run["variant"] == f"shown: {rule.strip('`')}"
            and run["sessions"] == found[1]
            and float(run["max_think_s"]) == float(found[2])
            and (int(run["host_kv_tokens"]) > 0) == bool(found[3])
        ]
        assert len(chosen) == 3, (load, rule)
        assert cells == table_cells(chosen), (load, rule)


def table_cells(runs: list[dict[str, str]]) -> list[str]:
    """A row's figures: means over draws, and the p99 of each draw."""

    def mean(key: str) -> float:
        return statistics.fmean(float(run[key]) for run in runs)

    p99s = [f"{float(run['ttft_p99_s']):.0f}" if run["ttft_p99_s"] else "–" for run in runs]
    return [
        f"{mean('requests_per_s'):.3f}",
        f"{mean('ttft_p50_s'):.2f} s",
        f"{', '.join(p99s)} s",
        f"{mean('cached_share'):.2f}",
        str(sum(int(run["unanswered"]) for run in runs)),
    ]
