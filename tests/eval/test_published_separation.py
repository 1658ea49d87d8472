"""The tables of docs/results/separation.md are what their raw lines say."""

from __future__ import annotations

import csv
import re
import statistics
from pathlib import Path

import numpy as np
import pytest

from eval.experiment import Slo
from eval.outcomes import good, recomputed_tokens
from eval.run_lines import figures, turns_of
from tests.eval.published import RESULTS, decisions, lines, number, run_of, steps

PAGE = RESULTS / "separation.md"
RUNS = ("paced-three", "elastic-three", "pd-three", "paced-six", "elastic-six")
FOLDER = "separation"


def row(label: str) -> list[str]:
    found = re.search(rf"^\| {re.escape(label)} \|(.*)\|$", PAGE.read_text(), re.M)
    assert found, f"no row {label}"
    return [cell.strip() for cell in found[1].split("|")]


@pytest.mark.parametrize(("at", "name"), list(enumerate(RUNS)), ids=RUNS)
def test_every_figure_of_a_run_comes_from_its_lines(at: int, name: str, tmp_path: Path) -> None:
    run = run_of(name, tmp_path / name, FOLDER)
    found = figures(run)
    for label, key in (
        ("requests/s", "requests_per_s"),
        ("prompt tokens from cache", "cached_share"),
        ("TTFT p50 of turns", "ttft_p50_s"),
    ):
        assert number(row(label)[at]) == pytest.approx(float(found[key]), abs=5.1e-4)
    tpot_ms = float(found["tpot_p50_s"]) * 1e3
    assert number(row("TPOT p50")[at]) == pytest.approx(tpot_ms, abs=0.051)
    within_slo = 100 * float(good(turns_of(run), Slo()).mean())
    assert number(row("turns within the SLO")[at]) == pytest.approx(within_slo, abs=0.51)
    measured = [r for r in lines(name, FOLDER) if r["phase"] == "measure"]
    answered = [r for r in measured if not r["error"]]
    assert int(row("turns that failed")[at]) == len(measured) - len(answered)
    within = sum(r["first_token_s"] - r["scheduled_s"] <= 10 for r in answered)
    assert row("turns with a first token within 10 s")[at] == f"{within} of {len(measured)}"
    gaps_s = [max(np.diff([at_s for at_s, _ in r["arrivals"]]), default=0.0) for r in answered]
    worst_s = float(np.quantile(gaps_s, 0.9))
    assert number(row("worst gap p90, of answers")[at]) == pytest.approx(worst_s, abs=5.1e-4)
    turns = turns_of(run)
    turns = turns[turns["ok"]]
    again = 100 * recomputed_tokens(turns).sum() / turns["prompt_tokens"].sum()
    assert number(row("recomputed, of prompt tokens")[at]) == pytest.approx(again, abs=0.051)


@pytest.mark.parametrize(
    ("at", "name"), [(1, "elastic-three"), (2, "pd-three"), (4, "elastic-six")]
)
def test_what_was_separated_and_moved(at: int, name: str) -> None:
    kinds = {
        e["request_id"]: e["kind"] for e in decisions(name, FOLDER) if e["event"] == "decision"
    }
    answered = [r for r in lines(name, FOLDER) if r["phase"] == "measure" and not r["error"]]
    separated = sum(kinds[r["request_id"]] == "prefill_decode" for r in answered)
    assert row("separated, of answered turns")[at] == f"{separated} of {len(answered)}"
    sent = [event for event in steps(name, FOLDER) if event["event"] == "kv_transfer"]
    assert all(event["ok"] for event in sent)
    moved, saved = (sum(e[key] for e in sent) / 1e9 for key in ("bytes", "saved_bytes"))
    assert row("KV moved; saved, since it was there")[at] == f"{moved:.0f}; {saved:.0f} GB"


def test_how_many_decode_steps_were_held_up() -> None:
    long_s = [
        event["duration_s"]
        for name in ("elastic-three", "pd-three", "elastic-six")
        for event in steps(name, FOLDER)
        if event["event"] == "step"
        and event["forward_mode"] == "decode"
        and event["duration_s"] > 0.3
    ]
    assert len(long_s) == 13
    assert (min(long_s), max(long_s)) == pytest.approx((0.30, 0.95), abs=0.006)


def test_the_simulated_tables_are_the_means_of_their_lines() -> None:
    with (RESULTS / "simulated" / "separation-two-gpus.csv").open() as file:
        rows = list(csv.DictReader(file))
    text = PAGE.read_text()
    for title, key, form in (
        ("requests/s", "requests_per_s", "{:.2f}"),
        ("turns within the objective", "within_objective", "{:.0%}"),
        ("worst gap p90, s", "worst_gap_p90_s", "{:.2f}"),
    ):
        table = text[text.index(f"| simulated: {title} |") :].split("\n\n")[0].splitlines()
        loads = [cell.strip() for cell in table[0].strip("|").split("|")[1:]]
        assert len(table) == 7
        for line in table[2:]:
            arm, *cells = [cell.strip() for cell in line.strip("|").split("|")]
            for load, cell in zip(loads, cells, strict=True):
                values = [
                    r[key] for r in rows if r["arm"] == arm.strip("`") and r["sessions"] == load
                ]
                assert len(values) == 4
                mean = "–" if "" in values else form.format(statistics.mean(map(float, values)))
                assert cell.replace(" %", "%") == mean


def test_the_readme_repeats_the_page() -> None:
    readme = (RESULTS.parents[1] / "README.md").read_text()
    paced, elastic = (number(row("requests/s")[at]) for at in (3, 4))
    assert f"({paced:.3f} and {elastic:.3f} a second" in readme
    assert f"served {paced / elastic:.1f} times the requests" in readme
