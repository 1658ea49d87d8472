"""The tables of docs/results/separation.md are what their raw lines say."""

from __future__ import annotations

import csv
import re
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval.interference import interference
from eval.metrics import session_bootstrap
from eval.records import Run
from eval.run_lines import figures, turns_of
from tests.eval.published import RESULTS, decisions, lines, number, phases, run_of, steps
from tests.eval.windows import recomputed_percent, within_slo, worst_gap_s

PAGE = RESULTS / "separation.md"
RUNS = ("paced-three", "elastic-three", "pd-three", "paced-six", "elastic-six")
FOLDER = "separation"
PROFILE = (
    "glm-paced",
    "glm-own-chunks",
    "glm-vllm",
    "glm-elastic",
    "glm-pd",
    "glm-paced-twelve",
    "glm-vllm-twelve",
)


def row(label: str) -> list[str]:
    found = re.search(rf"^\| {re.escape(label)} \|(.*)\|$", PAGE.read_text(), re.M)
    assert found, f"no row {label}"
    return [cell.strip() for cell in found[1].split("|")]


@pytest.mark.parametrize(("at", "name"), list(enumerate(RUNS)), ids=RUNS)
def test_every_figure_of_a_run_comes_from_its_lines(at: int, name: str, tmp_path: Path) -> None:
    _check_run(name, at, tmp_path, "", share_digits=0)


# Label of a row, what it shows, in which unit of a second, and to how many places.
Shown = tuple[str, str, float, int]
REQUESTS: Shown = ("requests/s", "requests_per_s", 1.0, 3)
CACHED: Shown = ("prompt tokens from cache", "cached_share", 1.0, 3)
TTFT: Shown = ("TTFT p50 of turns", "ttft_p50_s", 1.0, 3)
TPOT: Shown = ("TPOT p50", "tpot_p50_s", 1e3, 1)
GAP: Shown = ("worst gap p90", "worst_gap_p90_s", 1.0, 3)


def _shows(run: Run, at: int, prefix: str, rows: Iterable[Shown], share_digits: int) -> None:
    """Rows of a column, and its share of turns within the objective."""
    found = figures(run)
    for label, key, scale, digits in rows:
        shown = number(row(f"{prefix}{label}")[at])
        assert shown == pytest.approx(scale * float(found[key]), abs=0.51 * 10**-digits), label
    shown = number(row(f"{prefix}turns within the SLO")[at])
    assert shown == pytest.approx(within_slo(run), abs=0.51 * 10**-share_digits)


def _check_run(name: str, at: int, tmp_path: Path, prefix: str, share_digits: int) -> None:
    """A column of a table of coding sessions, whose rows begin with `prefix`."""
    run = run_of(name, tmp_path / name, FOLDER)
    _shows(run, at, prefix, (REQUESTS, CACHED, TTFT, TPOT), share_digits)
    measured = [r for r in lines(name, FOLDER) if r["phase"] == "measure"]
    answered = [r for r in measured if not r["error"]]
    assert int(row(f"{prefix}turns that failed")[at]) == len(measured) - len(answered)
    within = sum(r["first_token_s"] - r["scheduled_s"] <= 10 for r in answered)
    assert (
        row(f"{prefix}turns with a first token within 10 s")[at] == f"{within} of {len(measured)}"
    )
    gaps_s = [worst_gap_s(r) for r in answered]
    worst_s = float(np.quantile(gaps_s, 0.9))
    assert number(row(f"{prefix}worst gap p90, of answers")[at]) == pytest.approx(
        worst_s, abs=5.1e-4
    )
    recomputed = number(row(f"{prefix}recomputed, of prompt tokens")[at])
    assert recomputed == pytest.approx(recomputed_percent(run), abs=0.051)


@pytest.mark.parametrize(
    ("at", "name"), [(1, "elastic-three"), (2, "pd-three"), (4, "elastic-six")]
)
def test_what_was_separated_and_moved(at: int, name: str) -> None:
    separated, kv = _separated_and_moved(name)
    assert row("separated, of answered turns")[at] == separated
    assert row("KV moved; saved, since it was there")[at] == kv


def _decode_steps(name: str) -> list[tuple[float, float, bool]]:
    """When each decode step began, how long it took, and whether it was apart from its worker's
    prefills: SGLang launches a step before the last one has ended."""
    found = [e for e in steps(name, FOLDER) if e["event"] == "step"]
    decodes, ended_s = [], {}
    for event in sorted(found, key=lambda e: e["start_unix_s"]):
        start_s, worker = event["start_unix_s"], event["worker_id"]
        if event["forward_mode"] == "decode":
            apart = start_s >= ended_s.get(worker, 0.0) - 1e-3
            decodes.append((start_s, event["duration_s"], apart))
        else:
            ended_s[worker] = max(ended_s.get(worker, 0.0), start_s + event["duration_s"])
    return decodes


def test_how_many_decode_steps_were_held_up() -> None:
    long = [
        (took_s, apart)
        for name in ("elastic-three", "pd-three", "elastic-six")
        for _, took_s, apart in _decode_steps(name)
        if took_s > 0.3
    ]
    assert len(long) == 13
    assert (min(long)[0], max(long)[0]) == pytest.approx((0.30, 0.95), abs=0.006)
    apart_s = [took_s for took_s, apart in long if apart]
    assert len(apart_s) == 8
    assert (min(apart_s), max(apart_s)) == pytest.approx((0.56, 0.95), abs=0.006)


H200S = ("h200-paced-six", "h200-elastic-six", "h200-pd-six")


@pytest.mark.parametrize(("at", "name"), list(enumerate(H200S)), ids=H200S)
def test_every_figure_of_six_sessions_on_h200s(at: int, name: str, tmp_path: Path) -> None:
    _check_run(name, at, tmp_path, "H200s: ", share_digits=1)
    if at:
        separated, kv = _separated_and_moved(name)
        assert row("H200s: separated, of answered turns")[at] == separated
        assert row("H200s: KV moved; saved, since it was there")[at] == kv


def _window(name: str) -> tuple[float, float]:
    """Where its window was, in the run's seconds."""
    found = phases(name, FOLDER)
    return found["window_start_s"], found["window_end_s"]


def _began_unix_s(name: str) -> float:
    """When a run's clock began, as its decisions' times and its requests' have it."""
    sent_s = {r["decision_id"]: r["sent_s"] for r in lines(name, FOLDER) if r.get("decision_id")}
    at = [
        e["ts_unix_s"] - e["residency"]["waited_s"] - sent_s[e["decision_id"]]
        for e in decisions(name, FOLDER)
        if e["event"] == "decision" and e["decision_id"] in sent_s
    ]
    return statistics.median(at)


def test_what_is_said_of_six_sessions_on_h200s(tmp_path: Path) -> None:
    text = PAGE.read_text()
    rates = [float(figures(run_of(n, tmp_path / n, FOLDER))["requests_per_s"]) for n in H200S]
    assert {round(rates[0] / rate, 1) for rate in rates[1:]} == {3.2}
    assert "serve 3.2 times the requests of either split (2.6 there)" in text
    idle = []
    for name in H200S:
        begin_s, end_s = _window(name)
        covered_s, until_s = 0.0, begin_s
        answers = [
            (max(begin_s, r["first_token_s"]), min(end_s, r["finished_s"]))
            for r in lines(name, FOLDER)
            if r["first_token_s"] is not None and r["first_token_s"] < end_s
        ]
        for first_s, last_s in sorted(answers):
            if last_s > until_s:
                covered_s += last_s - max(first_s, until_s)
                until_s = last_s
        idle.append(round(100 * (1 - covered_s / (end_s - begin_s))))
    assert (
        f"for {idle[1]} and {idle[2]} % of the window nobody's answer was running "
        f"(colocated {idle[0]} %)"
    ) in text
    apart = [step for step in _decode_steps("h200-elastic-six") if step[2]]
    assert f"Of its {len(apart):,} decode steps that no prefill of its own reached into" in text
    for name, longest, from_s, later in (
        ("h200-elastic-six", [0.41, 0.04], 0.0, 0.03),
        ("h200-pd-six", [0.31, 0.19, 0.13, 0.05], 10.0, 0.05),
    ):
        began_s = _began_unix_s(name) + _window(name)[0] + from_s
        found = [step for step in _decode_steps(name) if step[2]]
        by_length = sorted((took_s for _, took_s, _ in found), reverse=True)
        assert by_length[: len(longest)] == pytest.approx(longest, abs=0.006)
        assert max(took_s for at_s, took_s, _ in found if at_s >= began_s) == pytest.approx(
            later, abs=0.006
        )


COLD = ("cold-pd-four", "cold-pd-eight")


@pytest.mark.parametrize(("at", "name"), list(enumerate(COLD)), ids=COLD)
def test_every_figure_of_cold_prompts(at: int, name: str, tmp_path: Path) -> None:
    run = run_of(name, tmp_path / name, FOLDER)
    ttft: Shown = ("TTFT p50", "ttft_p50_s", 1.0, 3)
    _shows(run, at, "cold: ", (REQUESTS, ttft, TPOT, GAP), share_digits=1)
    assert not any(r["cached_tokens"] for r in lines(name, FOLDER))


@pytest.mark.parametrize(("at", "name"), [(2, "cold-pd-eight"), (3, "cold-paced-eight-cut-off")])
def test_cold_prompts_until_the_colocated_run_was_cut_off(at: int, name: str) -> None:
    begin_s, _ = _window(name)
    ended_s = max(r["finished_s"] for r in lines("cold-paced-eight-cut-off", FOLDER))
    assert ended_s - begin_s == pytest.approx(38.9, abs=0.05)
    answered = [r for r in lines(name, FOLDER) if not r["error"]]
    done = [r for r in answered if begin_s <= r["finished_s"] <= ended_s]
    assert len(done) == 32
    assert number(row("cold: requests/s")[at]) == pytest.approx(len(done) / 38.9, abs=5.1e-4)
    whole = [r for r in done if r["scheduled_s"] >= begin_s]
    ttft_s = [r["first_token_s"] - r["scheduled_s"] for r in whole]
    tpot_ms = [
        1e3 * (r["finished_s"] - r["first_token_s"]) / (r["output_tokens"] - 1) for r in whole
    ]
    gaps_s = [worst_gap_s(r) for r in whole]
    for label, value, half in (
        ("TTFT p50", np.quantile(ttft_s, 0.5), 5.1e-4),
        ("TPOT p50", np.quantile(tpot_ms, 0.5), 0.051),
        ("worst gap p90", np.quantile(gaps_s, 0.9), 5.1e-4),
    ):
        assert number(row(f"cold: {label}")[at]) == pytest.approx(float(value), abs=half), label


@pytest.mark.parametrize(("at", "name"), list(enumerate(PROFILE)), ids=PROFILE)
def test_every_figure_of_the_profile_comes_from_its_lines(
    at: int, name: str, tmp_path: Path
) -> None:
    run = run_of(name, tmp_path / name, FOLDER)
    late: Shown = ("TTFT p90 of turns", "ttft_p90_s", 1.0, 3)
    rows = (REQUESTS, CACHED, TTFT, late, TPOT, GAP)
    _shows(run, at, "profile: ", rows, share_digits=1)
    assert int(row("profile: turns that failed")[at]) == int(turns_of(run)["failed"].sum())
    recomputed = number(row("profile: recomputed, of prompt tokens")[at])
    assert recomputed == pytest.approx(recomputed_percent(run), abs=0.051)


def _kinds(name: str) -> dict[str, str]:
    """By request, whether it was separated."""
    found = (event for event in decisions(name, FOLDER) if event["event"] == "decision")
    return {event["request_id"]: event["kind"] for event in found}


def _answered(name: str) -> list[dict[str, Any]]:
    return [r for r in lines(name, FOLDER) if r["phase"] == "measure" and not r["error"]]


def _away(name: str) -> list[dict[str, Any]]:
    """The answered turns that were separated."""
    kinds = _kinds(name)
    return [r for r in _answered(name) if kinds[r["request_id"]] == "prefill_decode"]


def _separated_and_moved(name: str) -> tuple[str, str]:
    """A run's cells: how many answered turns were separated, what KV was moved and saved."""
    sent = [event for event in steps(name, FOLDER) if event["event"] == "kv_transfer"]
    # One of six sessions' on the H200s was given up with the priming request that it was for.
    assert sum(not event["ok"] for event in sent) == name.startswith("h200-")
    moved, saved = (sum(e[key] for e in sent) / 1e9 for key in ("bytes", "saved_bytes"))
    return f"{len(_away(name))} of {len(_answered(name))}", f"{moved:.0f}; {saved:.0f} GB"


@pytest.mark.parametrize(("at", "name"), list(enumerate(PROFILE)), ids=PROFILE)
def test_what_long_prefills_do_to_the_profiles_answers(at: int, name: str, tmp_path: Path) -> None:
    run = run_of(name, tmp_path / name, FOLDER, with_decisions=True)
    found = interference(session_bootstrap([run], 10), [run])
    cell = row("profile: a token beside a long prefill")[at]
    if name == "glm-pd":
        assert (found.beside_n, cell) == (0, "")
    else:
        assert number(cell) == pytest.approx(found.beside_tpot_s, abs=5.1e-4)


def test_how_far_off_the_simulated_profile_is(tmp_path: Path) -> None:
    with (RESULTS / "simulated" / "validation-glm.csv").open() as file:
        simulated = {(r["arm"], r["sessions"]): r for r in csv.DictReader(file)}
    page = (RESULTS.parent / "simulator.md").read_text()
    table = page[page.index("**Another load, predicted before") :].split("\n\n")[1].splitlines()
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table)
    cells = {first: rest for first, *rest in rows}
    off = []
    for at, (name, arm) in enumerate(zip(PROFILE, head[1:], strict=True)):
        topology, sessions = arm.split(", ")
        expected = simulated[topology.strip("`"), sessions]
        run = run_of(name, tmp_path / name, FOLDER)
        measured = figures(run)
        for label, key, scale, digits in (
            ("requests/s", "requests_per_s", 1.0, 3),
            ("prompt tokens from cache", "cached_share", 1.0, 3),
            ("TTFT p50", "ttft_p50_s", 1.0, 3),
            ("TTFT p90", "ttft_p90_s", 1.0, 2),
            ("TPOT p50", "tpot_p50_s", 1e3, 1),
            ("worst gap p90", "worst_gap_p90_s", 1.0, 2),
        ):
            values = [scale * float(found[key]) for found in (measured, expected)]
            shown = [number(part) for part in cells[label][at].split(", ")]
            assert shown == pytest.approx(values, abs=0.51 * 10**-digits), (arm, label)
            if said := re.search(r"\((.+) %\)", cells[label][at]):
                ratio = 100 * (values[1] / values[0] - 1)
                assert float(said[1].replace("−", "-")) == pytest.approx(ratio, abs=0.51)
        in_time = [number(part) for part in cells["turns within the objective"][at].split(", ")]
        within = within_slo(run)
        assert in_time == pytest.approx(
            [within, 100 * float(expected["within_objective"])], abs=0.051
        )
        off.append(
            (
                abs(float(expected["requests_per_s"]) / float(measured["requests_per_s"]) - 1),
                abs(in_time[1] - in_time[0]),
            )
        )
    requests, points = zip(*off, strict=True)
    assert sorted(requests)[-2] < 0.045 < max(requests) == requests[PROFILE.index("glm-pd")]
    assert max(points) == pytest.approx(4.2, abs=0.06)


def test_what_the_profile_was_separated_for() -> None:
    answered, away = _answered("glm-elastic"), _away("glm-elastic")
    for name in ("glm-elastic", "glm-pd"):
        separated, kv = _separated_and_moved(name)
        at = PROFILE.index(name)
        assert row("profile: separated, of answered turns")[at] == separated
        assert row("profile: KV moved; saved, since it was there")[at] == kv

    def computed(turns: list[dict[str, Any]]) -> int:
        return sum(r["prompt_tokens"] - r["cached_tokens"] for r in turns)

    text = PAGE.read_text()
    rounded = [f"{round(computed(turns), -3):,}" for turns in (away, answered)]
    assert "({} of {} tokens)".format(*rounded) in text
    medians = [
        statistics.median(
            r["first_token_s"] - r["scheduled_s"]
            for r in _answered(name)
            if 20_000 <= r["prompt_tokens"] - r["best_cached_tokens"] < 50_000
        )
        for name in ("glm-elastic", "glm-paced")
    ]
    assert "after {:.1f} s at the median, colocated after {:.1f} s".format(*medians) in text


def _longest_decode_s(name: str) -> float:
    """The longest step of the workers that decode what a prefill worker sent."""
    return max(
        event["duration_s"]
        for event in steps(name, FOLDER)
        if event["event"] == "step" and event["forward_mode"] in ("decode", "mixed")
    )


def test_no_decode_step_of_the_profile_was_held_up() -> None:
    assert 0.2 < _longest_decode_s("glm-elastic") < 0.21
    assert PAGE.read_text().count("longer than 0.21 s") == 2
    assert 0.076 < _longest_decode_s("glm-pd") < 0.077
    assert PAGE.read_text().count("longer than 0.08 s") == 2


def test_how_fast_the_profiles_kv_was_written() -> None:
    rates = []
    for name in ("glm-pd", "glm-elastic"):
        # In one chunk, so that no prefill is in the time; large, so that it is not latency alone.
        sent = [
            e["bytes"] / (e["end_unix_s"] - e["start_unix_s"]) / 1e9
            for e in steps(name, FOLDER)
            if e["event"] == "kv_transfer" and e["chunks"] == 1 and e["bytes"] > 2e8
        ]
        rates += [len(sent), round(statistics.median(sent))]
    said = "{} of over 200 MB went at {} GB/s at the median, with pages of one {} at {}"
    assert said.format(rates[0], rates[1], rates[2], rates[3]) in PAGE.read_text()


def test_every_figure_of_the_decode_radix_cache_comes_from_its_lines() -> None:
    measures: dict[str, list[float]] = {}
    for name in ("radix-off", "radix-on"):
        found = lines(name, FOLDER)
        ttft = [r["first_token_s"] - r["scheduled_s"] for r in found]
        tpot = [
            (r["finished_s"] - r["first_token_s"]) / (r["output_tokens"] - 1) * 1e3 for r in found
        ]
        whole = [r["finished_s"] - r["scheduled_s"] for r in found]
        span_s = max(r["finished_s"] for r in found) - min(r["sent_s"] for r in found)
        sent = [e for e in steps(name, FOLDER) if e["event"] == "kv_transfer"]
        for label, value in (
            ("requests/s", len(found) / span_s),
            ("TTFT p50", float(np.quantile(ttft, 0.5))),
            ("TTFT p90", float(np.quantile(ttft, 0.9))),
            ("TPOT p50", float(np.quantile(tpot, 0.5))),
            ("whole answer p50", float(np.quantile(whole, 0.5))),
            ("KV moved", sum(e["bytes"] for e in sent) / 1e9),
        ):
            measures.setdefault(label, []).append(value)
    for label, (off, on) in measures.items():
        cells = row(f"shape: {label}")
        for value, cell in zip((off, on), cells[:2], strict=True):
            digits = len(cell.split()[0].partition(".")[2])
            assert number(cell) == pytest.approx(value, abs=0.51 * 10**-digits), label
        assert number(cells[2]) == pytest.approx(on / off, abs=0.0051), label


def test_what_the_decode_radix_cache_does_to_the_decode_worker() -> None:
    most = {
        name: max(
            e["decode_requests"]
            for e in steps(name, FOLDER)
            if e["event"] == "step" and e["worker_id"] == "decode-0"
        )
        for name in ("radix-off", "radix-on")
    }
    assert most == {"radix-off": 10, "radix-on": 26}
    whole = [
        e
        for e in steps("radix-on", FOLDER)
        if e["event"] == "kv_transfer" and e["tokens"] > 50_000 and not e["saved_tokens"]
    ]
    text = PAGE.read_text()
    assert f"{len(whole)} of the 160 prompts took all of theirs along" in text
    assert "up to 26 decode at once" in text


def in_time_a_second(runs: list[dict[str, str]]) -> float:
    return statistics.mean(float(r["requests_per_s"]) * float(r["within_objective"]) for r in runs)


def mean_of(runs: list[dict[str, str]], key: str) -> float | None:
    """None where in one run at least it is beyond what was measured."""
    values = [r[key] for r in runs]
    return None if "" in values else statistics.mean(map(float, values))


def simulated(name: str) -> dict[tuple[str, str], list[dict[str, str]]]:
    """The lines of a file by arm and sessions."""
    found: dict[tuple[str, str], list[dict[str, str]]] = {}
    with (RESULTS / "simulated" / f"{name}.csv").open() as file:
        for line in csv.DictReader(file):
            found.setdefault((line["arm"], line["sessions"]), []).append(line)
    return found


def table(title: str) -> tuple[list[str], list[list[str]]]:
    """The loads that the table's head names, and its rows, each with its arm first."""
    text = PAGE.read_text()
    found = text[text.index(f"| {title} |") :].split("\n\n")[0].splitlines()
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in found]
    return head[1:], rows


IN_TIME_A_SECOND = "turns within the objective a second"
FORMS: dict[str, tuple[str, str]] = {
    "requests/s": ("requests_per_s", "{:.2f}"),
    "turns within the objective": ("within_objective", "{:.0%}"),
    "TTFT p90, s": ("ttft_p90_s", "{:.1f}"),
    "worst gap p90, s": ("worst_gap_p90_s", "{:.2f}"),
    "prompt tokens from cache": ("cached_share", "{:.2f}"),
}


def cell_of(title: str, runs: list[dict[str, str]]) -> str:
    if title == IN_TIME_A_SECOND:
        return f"{in_time_a_second(runs):.3f}"
    key, form = FORMS[title]
    mean = mean_of(runs, key)
    return "–" if mean is None else form.format(mean).replace("%", " %")


ASKED = "priced, prefill_idle_recompute_s 3"
TABLES = {
    ("separation-two-gpus", "simulated", 5, 4): (
        "requests/s",
        "turns within the objective",
        "worst gap p90, s",
    ),
    ("glm-two-gpus", "the profile, simulated", 6, 4): (
        "requests/s",
        "turns within the objective",
        "TTFT p90, s",
        "worst gap p90, s",
    ),
    ("glm-residency", "residency on the profile", 9, 8): (
        IN_TIME_A_SECOND,
        "requests/s",
        "turns within the objective",
        "TTFT p90, s",
        "prompt tokens from cache",
    ),
}


@pytest.mark.parametrize(
    ("name", "prefix", "arms", "repeats", "title"),
    [(*file, title) for file, titles in TABLES.items() for title in titles],
)
def test_the_simulated_tables_are_the_means_of_their_lines(
    name: str, prefix: str, arms: int, repeats: int, title: str
) -> None:
    runs = simulated(name)
    assert {len(found) for found in runs.values()} == {repeats}
    loads, rows = table(f"{prefix}: {title}")
    assert len(rows) == arms
    for arm, *cells in rows:
        assert cells == [cell_of(title, runs[arm.replace("`", ""), load]) for load in loads]


def test_the_readme_repeats_the_page() -> None:
    readme = (RESULTS.parents[1] / "README.md").read_text()
    paced, elastic = (number(row("requests/s")[at]) for at in (3, 4))
    assert f"({paced:.3f} and {elastic:.3f} a second" in readme
    assert f"served {paced / elastic:.1f} times the requests" in readme
    profile = dict(zip(PROFILE, map(number, row("profile: requests/s")), strict=True))
    paced, elastic, decode, vllm = (
        profile[f"glm-{name}"] for name in ("paced", "elastic", "pd", "vllm")
    )
    assert f"it was {paced / elastic:.2f} times ({paced:.3f} and {elastic:.3f}, on H200s)" in readme
    assert f"one decode worker {decode:.3f} and with two vLLM workers {vllm:.3f}" in readme


def test_what_the_page_says_of_residency_on_the_profile() -> None:
    runs, text = simulated("glm-residency"), PAGE.read_text()

    def more(topology: str, one: str, other: str, *sessions: str) -> list[int]:
        """Turns in time a second with one rule, in percent more than with another."""
        return [
            round(100 * (in_time_a_second(runs[f"{topology}, {one}", at])
                         / in_time_a_second(runs[f"{topology}, {other}", at]) - 1))
            for at in sessions
        ]  # fmt: skip

    few, colocated, split = ("4", "8", "12", "16"), "colocated-2-paced", "elastic-1p1d"
    fits = more(colocated, "off", "priced", *few)
    assert f"than `priced`, by {min(fits)} to {max(fits)} %" in text
    [crowded] = more(colocated, "priced", "off", "24")
    assert f"`priced` has {crowded} % more." in text
    off = more(split, "off", "priced", "8", "12", "24")
    assert f"have {off[0]} and {off[1]} % more turns in time a second with eight and twelve" in text
    assert f"than behind `priced`, and {-off[2]} % fewer with 24" in text
    requests = [
        mean_of(runs[name, "8"], "requests_per_s") or 0.0
        for name in (f"{colocated}, priced", f"{split}, priced", f"{split}, off")
    ]
    assert f"serve {requests[0] / requests[1]:.2f} times the requests of an elastic pair" in text
    assert f"and {requests[0] / requests[2]:.2f} times those of one behind `off`" in text
    gains = more(split, ASKED, "priced", *few, "24")
    assert "has {}, {}, {} and {} % more turns in time a second".format(*gains) in text
    assert f"and {-gains[4]} % fewer with 24" in text
    gains = more("pd-1p1d", ASKED, "priced", *few, "24")
    assert f"decode worker {min(gains)} to {max(gains)} % more" in text
    gains = more(colocated, ASKED, "priced", *few, "24")
    assert f"colocated workers {-min(gains)} % fewer to {max(gains)} % more" in text
    with (RESULTS / "simulated" / "prefill-idle-weka.csv").open() as file:
        lines = list(csv.DictReader(file))
    for think in ("10 s", "60 s"):
        found = []
        for at in ("4", "6", "8", "12", "16"):
            asked, unasked = (
                in_time_a_second(
                    [
                        r
                        for r in lines
                        if (r["arm"], r["sessions"]) == (f"{rule}, think {think}", at)
                    ]
                )
                for rule in (ASKED, "priced")
            )
            found.append(round(100 * (asked / unasked - 1)))
        assert f"{-min(found)} % fewer to {max(found)} % more" in text
