"""The page of simulated findings says that it is one, and what it rests on is in the repository."""

from __future__ import annotations

import csv
import itertools
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from eval import planning, sensitivity, weights
from eval.experiment_files import packaged_experiments
from eval.run_lines import Row, read_rows
from eval.separation import OBJECTIVES, figure, table
from eval.simulate import packaged_calibrations
from eval.validation import measures, read_lines
from eval.waits import COLUMNS, waits
from tests.eval.test_sessions_a_gpu import ALWAYS

PAGE = Path(__file__).parents[2] / "docs/results/simulated.md"
SEPARATION = PAGE.with_name("simulated-separation.md")
PAGES = sorted(PAGE.parent.glob("simulated*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_and_each_of_its_tables_say_simulated(page: Path) -> None:
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


def test_the_tables_of_sensitivity_follow_from_their_runs() -> None:
    rows = read_rows(PAGE.parent / "simulated/sensitivity.csv")
    text = PAGE.with_name("simulated-sensitivity.md").read_text()
    found = list(sensitivity.tables(rows))
    assert len(found) == 2
    for lines in found:
        assert "\n".join(lines) in text


def test_the_table_of_the_plan_follows_from_its_lines() -> None:
    rows = read_rows(PAGE.parent / "simulated/plan.csv")
    assert "\n".join(planning.table(rows)) in PAGE.with_name("simulated-plan.md").read_text()


RUNS = PAGE.parent / "simulated/residency-frontier.csv"
# Rows of the validation in docs/simulator.md, and whether their difference is one of shares.
VALIDATED = (
    ("requests/s", "requests_per_s", False),
    ("prompt tokens from cache", "apc", True),
    ("TTFT p50", "ttft_p50", False),
    ("TTFT p90", "ttft_p90", False),
    ("TPOT p50", "tpot_p50", False),
    ("TPOT p90", "tpot_p90", False),
    ("worst gap p50", "worst_gap_p50", False),
    ("worst gap p90", "worst_gap_p90", False),
)


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


def test_what_terms_changed_follows_from_their_runs() -> None:
    runs = {
        (row["variant"], *(row[key] for key in ("residency", "sessions", "prefills", "draw"))): row
        for row in read_rows(PAGE.parent / "simulated/elastic-terms.csv")
    }
    columns = ("ttft_mean_s", "request_mean_s", "moved_share", "worst_gap_p90_s")

    def change(variant: str, fleet: tuple[str, ...]) -> str:
        pairs = [
            (row, runs["as it is", *key[1:]])
            for key, row in runs.items()
            if key[0] == variant and key[1:4] == fleet
        ]
        cells = [f"| {variant} | {', '.join(fleet)} | {len(pairs)}"]
        for column in columns:
            changes = [float(row[column]) / float(base[column]) - 1 for row, base in pairs]
            error = 2 * statistics.stdev(changes) / math.sqrt(len(changes))
            cells.append(f"{statistics.fmean(changes):+.1%} ± {error:.1%}".replace("%", " %"))
        return " | ".join(cells) + " |"

    text = (PAGE.parent / "simulated-weights.md").read_text()
    tried = dict.fromkeys((key[0], key[1:4]) for key in runs if key[0] != "as it is")
    assert len(tried) > 10
    for variant, fleet in tried:
        assert change(variant, fleet) in text, change(variant, fleet)


def test_the_table_of_weights_follows_from_its_runs() -> None:
    lines = (PAGE.parent / "simulated-weights.md").read_text().splitlines()
    for line in weights.table(read_rows(PAGE.parent / "simulated/elastic-weights.csv"), 24):
        assert line in lines


HALF = "half in flight, 0.45, 0.2"
ONCE = "prompt at once"
BOUND = "bound by the GPU"
PACED = "sglang-fp8-host-paced-residency"
VLLM = "vllm-fp8-host-residency"
BF16 = "sglang-host-residency"
ANY = "any number"
KEPT = "kept"
BESIDE = "copied beside"
MINUTE = "think 60 s"


def test_the_tables_of_what_was_tried_with_residency_follow_from_their_runs() -> None:
    names = ("kept-free", "idle-worker", "in-time-first", "half-in-flight", "prompt-at-once")
    runs = [
        row
        for name in (*names, "tier-bound", "tier-kept", "reload-price", "slices-always")
        for row in read_rows(PAGE.parent / f"simulated/{name}.csv")
    ]
    said = re.findall(r"\| ([^|]+), (\d+) in flight \| (.* →.*) \|\n", PAGE.read_text())
    no_tier = "sglang-residency"
    arms = {
        "FP8, paced": (f"{PACED} before", f"{PACED} then"),
        "bf16": (f"{BF16} before", f"{BF16} then"),
        "no tier": (f"{no_tier} then", f"{no_tier} three chunks free"),
        "busy share": (f"{no_tier} then", f"{no_tier} price by busy share"),
        "return in 1 s": (f"{no_tier} then", f"{no_tier} idle worker, return in 1 s"),
        "return in 1 s, FP8, paced": (f"{PACED} then", f"{PACED} idle worker, return in 1 s"),
        "in time first, SGLang": (f"{PACED} by arrival", f"{PACED} in time first"),
        "in time first, vLLM": (f"{VLLM} by arrival", f"{VLLM} in time first"),
        "short ones go along": (f"{PACED} nobody goes along", f"{PACED} in time first"),
        "half in flight, SGLang": (f"{PACED} in time first", f"{PACED} {HALF}"),
        "half in flight, vLLM": (f"{VLLM} in time first", f"{VLLM} {HALF}"),
        "prompt at once, SGLang": (f"{PACED} {HALF}", f"{PACED} {ONCE}"),
        "prompt at once, vLLM": (f"{VLLM} {HALF}", f"{VLLM} {ONCE}"),
        "prompt at once, bf16": (f"{BF16} {HALF}", f"{BF16} {ONCE}"),
        "bound by the GPU, SGLang": (f"{PACED} {ONCE}", f"{PACED} {BOUND}"),
        "bound by the GPU, vLLM": (f"{VLLM} {ONCE}", f"{VLLM} {BOUND}"),
        "bound by the GPU, bf16": (f"{BF16} {ONCE}", f"{BF16} {BOUND}"),
        "think 60 s, SGLang": (f"{PACED} {MINUTE}, {ANY}", f"{PACED} {MINUTE}"),
        "think 60 s, vLLM": (f"{VLLM} {MINUTE}, {ANY}", f"{VLLM} {MINUTE}"),
        "kept, SGLang": (f"{PACED} {ANY}", f"{PACED} {KEPT}"),
        "kept, vLLM": (f"{VLLM} {ANY}", f"{VLLM} {KEPT}"),
        "kept, bf16": (f"{BF16} {ANY}", f"{BF16} {KEPT}"),
        "copied beside, SGLang": (f"{PACED} {KEPT}", PACED),
        "copied beside, vLLM": (f"{VLLM} {KEPT}", VLLM),
        "copied beside, bf16": (f"{BF16} {KEPT}", BF16),
        "think 60 s, copied beside, SGLang": (f"{PACED} {MINUTE}", f"{PACED} {MINUTE}, {BESIDE}"),
        "think 60 s, copied beside, vLLM": (f"{VLLM} {MINUTE}", f"{VLLM} {MINUTE}, {BESIDE}"),
        "an H200's memory, SGLang": (f"{PACED} H200 {KEPT}", f"{PACED} H200"),
    }
    assert Counter(label for label, _, _ in said) == {
        "FP8, paced": 5,
        "bf16": 5,
        "no tier": 5,
        "busy share": 5,
        "return in 1 s": 5,
        "return in 1 s, FP8, paced": 2,
        "in time first, SGLang": 5,
        "in time first, vLLM": 5,
        "short ones go along": 4,
        "half in flight, SGLang": 5,
        "half in flight, vLLM": 5,
        "prompt at once, SGLang": 5,
        "prompt at once, vLLM": 5,
        "prompt at once, bf16": 4,
        "bound by the GPU, SGLang": 5,
        "bound by the GPU, vLLM": 5,
        "bound by the GPU, bf16": 5,
        "think 60 s, SGLang": 4,
        "think 60 s, vLLM": 4,
        "kept, SGLang": 3,
        "kept, vLLM": 3,
        "kept, bf16": 4,
        "copied beside, SGLang": 5,
        "copied beside, vLLM": 5,
        "copied beside, bf16": 5,
        "think 60 s, copied beside, SGLang": 4,
        "think 60 s, copied beside, vLLM": 4,
        "an H200's memory, SGLang": 4,
    }

    def mean(column: str, arm: str, sessions: str, draws: range) -> float:
        chosen = [
            float(run[column])
            for run in runs
            if (run["arm"], run["sessions"]) == (arm, sessions) and int(run["draw"]) in draws
        ]
        assert len(chosen) == len(draws)
        return statistics.fmean(chosen)

    for label, sessions, cells in said:
        both = arms[label]
        expected = []
        for draws in (range(1, 5), range(5, 9)):
            shares = [100 * mean("within_objective", arm, sessions, draws) for arm in both]
            expected.append(f"{shares[0]:.1f} → {shares[1]:.1f} %")
        rates = [mean("requests_per_s", arm, sessions, range(1, 9)) for arm in both]
        expected.append(f"{rates[0]:.3f} → {rates[1]:.3f}")
        assert cells == " | ".join(expected), (label, sessions)


def test_what_a_bound_by_the_tier_brings_follows_from_its_lines() -> None:
    rows = read_rows(PAGE.parent / "simulated/tier-kept.csv")
    halves = (range(1, 5), range(5, 9))

    def mean(arm: str, sessions: str, draws: range, column: str) -> float:
        of = [
            float(row["measured_turns"]) * float(row["within_objective"]) / 600
            if column == "good"
            else float(row[column])
            for row in rows
            if (row["arm"], row["sessions"]) == (arm, sessions) and int(row["draw"]) in draws
        ]
        assert len(of) == len(draws)
        return statistics.fmean(of)

    def brings(arm: str, kept: str, any_number: str, levels: tuple[str, ...]) -> list[list[float]]:
        """Points of turns in time, each half of the draws by itself, and % of requests/s."""
        points = [
            100 * (mean(f"{arm} {kept}", at, half, "within_objective") - before)
            for at in levels
            for half in halves
            for before in [mean(f"{arm} {any_number}", at, half, "within_objective")]
        ]
        both = (
            [mean(f"{arm} {which}", at, range(1, 9), "requests_per_s") for at in levels]
            for which in (kept, any_number)
        )
        return [points, [100 * (now / then - 1) for now, then in zip(*both, strict=True)]]

    found = [brings(arm, MINUTE, f"{MINUTE}, {ANY}", ("16", "24")) for arm in (PACED, VLLM)]
    points, rates = ([value for part in found for value in part[at]] for at in (0, 1))
    text = PAGE.read_text()
    assert (
        f"16 and 24 sessions have {min(points):.0f} to {max(points):.0f} points more turns in "
        f"time, at {min(rates):.0f} to {max(rates):.0f} % more requests/s**"
    ) in text
    points, rates = brings(BF16, KEPT, ANY, ("8", "12", "16", "24"))
    most = max(points)
    assert points.index(most) == 5, "16 sessions, draws 5 to 8"
    assert f"{most:.0f}" == "9"
    assert "up to four points more, and nine with 16 sessions on draws 5 to 8" in text
    assert f"{sorted(points)[-2]:.0f}" == "4"
    assert f"requests/s {-min(rates):.0f} % fewer to {max(rates):.0f} % more." in text
    good = (
        [mean(f"{PACED} {MINUTE}{which}", at, range(1, 9), "good") for which in ("", f", {ANY}")]
        for at in ("16", "24")
    )
    more = [now / before for now, before in good]
    assert 1.15 < more[0] < 1.25, "a fifth"
    assert 1.28 < more[1] < 1.38, "a third"
    assert (
        "16 and 24 sessions, a fifth and a third more turns in time a second"
        in (PAGE.parents[1] / "residency.md").read_text()
    )


def test_the_tails_of_waits_follow_from_their_lines() -> None:
    rows = read_rows(PAGE.parent / "simulated/waits.csv", COLUMNS)
    page = PAGE.read_text()
    arms = {"SGLang": PACED, "vLLM": VLLM}

    def tail(arm: str, sessions: str) -> list[float]:
        of = [row for row in rows if (row["arm"], row["sessions"]) == (arm, sessions)]
        assert len({row["draw"] for row in of}) == 8
        return waits(of, (0.95, 0.97, 0.99))

    for engine, arm in arms.items():
        for sessions in ("12", "16", "24"):
            before_s, now_s = (tail(f"{arm} {then}", sessions) for then in ("bound of 90 s", BOUND))
            both = zip(before_s, now_s, strict=True)
            cells = [f"{before:.0f} → {now:.0f} s" for before, now in both]
            assert f"| {engine} with {sessions} sessions | {' | '.join(cells)} |" in page
    longer = [tail(f"{arms['SGLang']} 6.5 fills", sessions) for sessions in ("16", "24")]
    assert f"95 % within {longer[0][0]:.0f} and {longer[1][0]:.0f} s" in page
    assert f"99 % within {longer[0][2]:.0f} s" in page
    assert longer[1][2] > 595


def test_what_the_price_of_a_reload_brings_follows_from_its_lines() -> None:
    rows = [
        row
        for name in ("tier-kept", "reload-price", "slices-always")
        for row in read_rows(PAGE.parent / f"simulated/{name}.csv")
    ]
    words = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")

    def change(column: str, before: str, now: str, sessions: str, draws: range) -> float:
        both = []
        for arm in (before, now):
            of = [
                float(row[column])
                for row in rows
                if (row["arm"], row["sessions"]) == (arm, sessions) and int(row["draw"]) in draws
            ]
            assert len(of) == len(draws), (arm, sessions)
            both.append(statistics.fmean(of))
        return both[1] / both[0] - 1 if column == "requests_per_s" else both[1] - both[0]

    def points(before: str, now: str, *levels: str) -> list[int]:
        """Of turns in time, by level and half of the draws."""
        halves = itertools.product(levels, (range(1, 5), range(5, 9)))
        return [
            round(100 * change("within_objective", before, now, at, half)) for at, half in halves
        ]

    def least_to_most(of: list[int]) -> str:
        return f"{words[min(of)]} to {words[max(of)]}"

    def percent(before: str, now: str, sessions: str) -> int:
        return round(100 * change("requests_per_s", before, now, sessions, range(1, 9)))

    kept = f"{PACED} {KEPT}"
    sixteen = points(kept, PACED, "16")
    assert max(sixteen) == 0
    of_h200 = points(f"{PACED} H200 {KEPT}", f"{PACED} H200", "16", "20", "24")
    ten, twelve, many = (points(f"{VLLM} {KEPT}", VLLM, at) for at in ("10", "12", "24"))
    longer = (f"{VLLM} {MINUTE}", f"{VLLM} {MINUTE}, {BESIDE}")
    sixteen_longer, many_longer = points(*longer, "16"), points(*longer, "24")
    assert ten[0] == ten[1] > 0
    assert min(*twelve, many[0], -many[1], *many_longer) > 0
    assert min(sixteen_longer) == 0
    assert percent(*longer, "16") == 0, "as many"
    of_bf16 = points(f"{BF16} {KEPT}", BF16, "8", "10", "12", "16", "24")
    assert (
        f"twelve sessions {least_to_most(points(kept, PACED, '12'))} turns of a hundred more are "
        f"in time at {percent(kept, PACED, '12')} % more requests/s, with 24 "
        f"{least_to_most(points(kept, PACED, '24'))} more**, on both halves of the draws; with 16 "
        f"up to {words[-min(sixteen)]} fewer. With all the memory of an H200 "
        f"{least_to_most(of_h200)} more from 16 sessions on. vLLM with ten {words[ten[0]]} more, "
        f"with twelve {least_to_most(twelve)}; with 24 {words[many[0]]} more on one half and "
        f"{words[-many[1]]} fewer on the other; with a minute of thinking and 16 sessions up to "
        f"{words[max(sixteen_longer)]} more at as many requests/s, with 24 "
        f"{least_to_most(many_longer)} more at {percent(*longer, '24')} % more. bf16 KV with a "
        "tier between "
        f"{words[-min(of_bf16)]} fewer and {words[max(of_bf16)]} more,"
    ) in PAGE.read_text()


def test_the_tails_of_a_bound_by_the_tier_follow_from_their_lines() -> None:
    rows = read_rows(PAGE.parent / "simulated/tier-kept-waits.csv", COLUMNS)

    def tail(arm: str, sessions: str) -> float:
        of = [row for row in rows if (row["arm"], row["sessions"]) == (arm, sessions)]
        assert len({row["draw"] for row in of}) == 8
        return waits(of, (0.99,))[0]

    now, before = (
        [f"{tail(f'{arm} {variant}', at):.0f}" for arm in (PACED, VLLM) for at in ("16", "24")]
        for variant in (MINUTE, f"{MINUTE}, {ANY}")
    )
    assert (
        f"99 % have their first token within {now[0]} s with SGLang and 16 sessions, and within "
        f"{now[1]} s with 24 (before: {before[0]} and {before[1]} s), with vLLM within {now[2]} "
        f"and {now[3]} s ({before[2]} and {before[3]})."
    ) in PAGE.read_text()


def test_which_part_of_slices_brings_what() -> None:
    runs = [
        row
        for name in ("in-time-first", "half-in-flight")
        for row in read_rows(PAGE.parent / f"simulated/{name}.csv")
        if int(row["draw"]) <= 4
    ]
    page = PAGE.read_text()
    variants = {
        "before: 0.65, 0.3": f"{PACED} in time first",
        "turns without a slice go too while less than half is in flight, 0.65, 0.3": (
            f"{PACED} turns without a slice, 0.65, 0.3"
        ),
    }
    for setting in ("0.65, 0.3", "0.55, 0.3", "0.55, 0.2", "0.45, 0.2", "0.4, 0.2"):
        variants[f"half in flight, {setting}"] = f"{PACED} half in flight, {setting}"
    for label, arm in variants.items():
        cells = []
        for sessions in ("12", "16", "24"):
            chosen = [run for run in runs if (run["arm"], run["sessions"]) == (arm, sessions)]
            assert len(chosen) == 4, (arm, sessions)
            within, rate = (
                statistics.fmean(float(run[column]) for run in chosen)
                for column in ("within_objective", "requests_per_s")
            )
            cells.append(f"{100 * within:.0f} %, {rate:.3f}")
        assert f"| {label} | {' | '.join(cells)} |" in page, (label, cells)


def measured_and_simulated(lines: str, is_of: Callable[[Row], bool]) -> list[tuple[Row, Row]]:
    """The runs that a file of simulated ones has, as they were measured, beside these. Of runs that
    think for a minute it is named `-think`, as their measured lines are."""
    think = "-think" if lines.endswith("-think") else ""
    runs = read_rows(PAGE.parent / f"residency/sessions-a-gpu{think}.csv")
    simulated = read_rows(PAGE.parent / f"simulated/{lines}.csv")
    return list(zip([run for run in runs if is_of(run)], simulated, strict=True))


def of_two_more_draws(run: Row) -> bool:
    """A run of vLLM in chunks of 4,096, measured after all that the simulator is fitted on."""
    later = {("10", "1"), ("10", "4"), ("24", "3")}
    return "vllm-fp8-host-4096" in run["arm"] and (run["sessions"], run["draw"]) in later


def of_sglang_on_two_more_draws(run: Row) -> bool:
    is_of = run["arm"] in (ALWAYS, "sglang-fp8-host-mixed") and run["draw"] in ("1", "4")
    return is_of and run["sessions"] == "10"


def of_twelve_sessions(run: Row) -> bool:
    """Those of the first day, on which ours was not measured again with draw 3."""
    is_of = run["arm"] in ("vllm-fp8-host-4096", "sglang-fp8-host-mixed")
    if is_later(run) or run["sessions"] != "12":
        return False
    return is_of or (run["arm"] == ALWAYS and run["draw"] != "3")


def is_later(run: Row) -> bool:
    """A run of those on four GPUs side by side. Ours with draw 2 was measured before as well."""
    if run["arm"] == "sglang-fp8-host-mixed":
        later = {("8", "3"), *(("12", draw) for draw in "134")}
        return (run["sessions"], run["draw"]) in later
    again = (ALWAYS, "12", "2", "0.5381")
    is_again = tuple(run[key] for key in ("arm", "sessions", "draw", "requests_per_s")) == again
    return is_again or ((run["arm"], run["sessions"]) == (PACED, "12") and run["draw"] != "4")


def is_last(run: Row) -> bool:
    """Ten sessions, and twelve of draw 4, without time slices while the turns of all fit."""
    of = (run["sessions"], run["draw"])
    return run["arm"] == PACED and (of[0] == "10" or of == ("12", "4"))


def of_draw_2(run: Row) -> bool:
    return run["draw"] == "2" and run["sessions"] != "12" and not is_last(run)


VLLM_BF16 = ("vllm", "vllm-residency", "vllm-host", "vllm-host-residency")


def of_vllm_with_bf16(run: Row) -> bool:
    """Twelve sessions, with a host tier and without, behind residency and not."""
    return run["arm"] in VLLM_BF16 and run["sessions"] == "12"


def of_sglang_with_bf16(run: Row) -> bool:
    """Twelve sessions, paced or with a tier, which draw 3 was measured with before as well,
    without residency."""
    arms = ("sglang-paced-residency", "sglang-host", "sglang-host-residency")
    is_before = (run["draw"], run["requests_per_s"]) == ("3", "0.1375")
    return run["arm"] in arms and run["sessions"] == "12" and not is_before


def of_sglang_with_bf16_that_thinks(run: Row) -> bool:
    return run["arm"] in ("sglang", "sglang-residency", "sglang-host", "sglang-host-residency")


def of_vllm_with_bf16_that_thinks(run: Row) -> bool:
    return run["arm"] in VLLM_BF16


OTHER_DRAWS = [
    ("validation-draw2", of_draw_2),
    ("validation-draws", of_two_more_draws),
    ("validation-draws-sglang", of_sglang_on_two_more_draws),
    ("validation-twelve", of_twelve_sessions),
    ("validation-lanes", is_later),
    ("validation-ten", is_last),
    ("validation-vllm-bf16", of_vllm_with_bf16),
    ("validation-sglang-bf16", of_sglang_with_bf16),
    ("validation-bf16-think", of_sglang_with_bf16_that_thinks),
    ("validation-vllm-bf16-think", of_vllm_with_bf16_that_thinks),
]


@pytest.mark.parametrize(
    ("lines", "is_of"),
    [("validation-vllm", lambda run: run["arm"] == "vllm-fp8-host"), *OTHER_DRAWS],
)
def test_a_validation_by_runs_follows_from_its_lines(
    lines: str, is_of: Callable[[Row], bool]
) -> None:
    pairs = measured_and_simulated(lines, is_of)
    for name in ("arm", "sessions"):
        assert [run[name] for run, _ in pairs] == [run[name] for _, run in pairs]
    page = (PAGE.parents[1] / "simulator.md").read_text()
    for label, column, scale in (
        ("requests/s", "requests_per_s", 1),
        ("TTFT p50", "ttft_p50_s", 1),
        ("TTFT p90", "ttft_p90_s", 1),
        ("TPOT p50", "tpot_p50_s", 1000),
        ("worst gap p90", "worst_gap_p90_s", 1),
    ):
        cells = []
        for run, other in pairs:
            if not run[column] or not other[column]:  # of turns that had no answer
                cells.append("–")
                continue
            was, said = float(run[column]) * scale, float(other[column]) * scale
            off = f"{100 * (said / was - 1):+.0f}".replace("-", "−")
            cells.append(rf"{was:#.3g}, {said:#.3g}( m?s)? \({re.escape(off)} %\)")
        row = r" \| ".join((re.escape(label), *cells))
        assert re.search(rf"^\| {row} \|$", page, re.M), row


@pytest.mark.parametrize(("lines", "is_of"), OTHER_DRAWS)
def test_what_other_draws_have_from_the_cache_and_in_time(
    lines: str, is_of: Callable[[Row], bool]
) -> None:
    pairs = measured_and_simulated(lines, is_of)
    page = (PAGE.parents[1] / "simulator.md").read_text()
    for label, column, form in (
        ("prompt tokens from cache", "cached_share", "{:.3f}, {:.3f}"),
        ("turns within the objective", "within_objective", "{:.0f}, {:.0f} %"),
    ):
        scale = 100 if form.endswith("%") else 1
        cells = [form.format(*(scale * float(run[column]) for run in pair)) for pair in pairs]
        assert f"| {label} | {' | '.join(cells)} |" in page


@pytest.mark.parametrize("behind", [True, False])
def test_how_far_it_is_off_on_average(behind: bool) -> None:
    pairs = [
        pair
        for lines, is_of in OTHER_DRAWS
        for pair in measured_and_simulated(lines, is_of)
        if ("residency" in pair[0]["arm"]) is behind
    ]
    rates, shares = (
        np.array([[float(run[column]) for run in pair] for pair in pairs])
        for column in ("requests_per_s", "within_objective")
    )
    logs = np.log(rates[:, 1] / rates[:, 0])
    points = 100 * (shares[:, 1] - shares[:, 0])
    rate, low, high = (f"{math.exp(at):.3f}" for at in mean_and_interval(logs))
    told = [f"{at:+.1f}".replace("-", "−") for at in mean_and_interval(points)]
    label = "behind residency" if behind else "without it"
    row = (
        f"| {label} | {len(pairs)} | {rate} [{low}–{high}] | {100 * np.std(logs, ddof=1):.0f} % "
        f"| {told[0]} points [{told[1]} to {told[2]}] |"
    )
    assert row in (PAGE.parents[1] / "simulator.md").read_text()


def mean_and_interval(values: NDArray[np.float64]) -> tuple[float, float, float]:
    """The mean and its 95 % interval over these values, by Student's t."""
    mean = float(np.mean(values))
    low, high = stats.t.interval(0.95, len(values) - 1, loc=mean, scale=stats.sem(values))
    return mean, float(low), float(high)


GPU_HEAD = "| measured, simulated (off by) | `off`"
FP8_HEAD = "| measured, simulated (off by) | eight in flight"
CPU_HEAD = "| measured, simulated (off by) | SGLang, all fits"
ALL_HEAD = "| measured, simulated (off by) | SGLang (fitted"
CPU_FLEETS = ("sglang-fits", "sglang", "pd", "elastic", "vllm-fits", "vllm")
# Windows of 300 s, of 240 s with eight and with twelve sessions, and of 75 s from 0 on.
ON_GPUS, ON_A_CPU = (60.0, 360.0, 440.0), (0.0, 75.0, math.inf)
EIGHT, TWELVE = (60.0, 300.0, 345.0), (60.0, 303.0, 348.0)


@pytest.mark.parametrize(
    ("head", "column", "measured", "simulated", "window"),
    [
        (GPU_HEAD, 1, "residency/backfill-off", "validation-off", ON_GPUS),
        (GPU_HEAD, 2, "residency/backfill-lease", "validation-lease", ON_GPUS),
        (GPU_HEAD, 3, "residency/backfill-residency", "validation-priced", ON_GPUS),
        (FP8_HEAD, 1, "residency/fp8-eight-1", "validation-fp8-eight", EIGHT),
        (FP8_HEAD, 2, "residency/fp8-eight-2", "validation-fp8-eight", EIGHT),
        (FP8_HEAD, 3, "residency/fp8-twelve", "validation-fp8-twelve", TWELVE),
        *(
            (CPU_HEAD, at, f"simulated/cpu-{arm}-measured", f"cpu-{arm}-simulated", ON_A_CPU)
            for at, arm in enumerate(CPU_FLEETS, 1)
        ),
        *(
            (ALL_HEAD, at, f"simulated/cpu-{arm}-measured", f"cpu-{arm}-attends-all", ON_A_CPU)
            for at, arm in enumerate(CPU_FLEETS[:4], 1)
        ),
    ],
)
def test_the_validation_follows_from_both_runs(
    head: str, column: int, measured: str, simulated: str, window: tuple[float, float, float]
) -> None:
    """Of the load in which the cache helps, and of fleets on a CPU, in docs/simulator.md."""
    runs = (
        PAGE.parent / f"{measured}.requests.jsonl.zst",
        PAGE.parent / f"simulated/{simulated}.requests.jsonl.zst",
    )
    found, other = (measures(read_lines(path), *window) for path in runs)
    text = (PAGE.parents[1] / "simulator.md").read_text()
    compared = text[text.index(head) :]
    for label, name, is_share in VALIDATED:
        row = next(line for line in compared.splitlines() if line.startswith(f"| {label} |"))
        cell = row.strip("|").split("|")[column].strip()
        said = re.fullmatch(r"([\d.]+), ([\d.]+)( m?s)? \((.*)\)", cell)
        assert said, cell
        scale = 1e3 if said[3] == " ms" else 1.0
        for shown, value in ((said[1], found[name]), (said[2], other[name])):
            digits = len(shown.partition(".")[2])
            assert float(shown) == pytest.approx(scale * value, abs=0.51 * 10**-digits), label
        off = other[name] - found[name] if is_share else other[name] / found[name] - 1
        if said[4].endswith(" ×"):
            assert float(said[4].removesuffix(" ×")) == pytest.approx(off + 1, rel=0.05)
        else:
            number = float(re.sub(r" (%|points)$", "", said[4]).replace("−", "-"))
            assert number == pytest.approx(100 * off, abs=0.51), label
