"""The tables of measured residency, on GPUs and on a laptop, are what their raw lines say."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval.rules_a_gpu import RECOMPUTED_TOKENS
from eval.steady import State, steadiness
from tests.eval.published import (
    RESULTS,
    decisions,
    lines,
    number,
    phases,
    residency_text,
    row,
    run_of,
)
from tests.eval.windows import between, has_rows, missed, until

# By table of the pages, the arms of its columns.
TABLES = (
    (
        "sglang",
        "sglang-residency",
        "sglang-cap",
        "sglang-host-residency",
        "sglang-residency-mended",
        "sglang-lease",
    ),
    ("engines-sglang-1", "engines-sglang-2", "engines-vllm-residency"),
    ("backfill-off", "backfill-residency", "backfill-lease", "backfill-host-residency"),
    ("again-residency", "tier-off", "tier-residency-1", "tier-residency-2"),
    ("two-off-1", "two-off-2", "two-off-3", "two-residency"),
    ("longer-off-1", "longer-off-2", "longer-off-3", "longer-residency"),
    ("fp8-eight-1", "fp8-eight-2", "fp8-twelve"),
    ("slices-eight", "slices-twentyfour"),
    ("vllm-fp8-host-eight", "vllm-three", "vllm-four"),
    ("slices-twelve",),
    ("vllm-fp8-host-ten",),
    ("along-ten", "along-twelve", "along-twentyfour"),
    ("half-twelve", "half-twentyfour"),
    (
        "vllm-fp8-host-twelve",
        "vllm-fp8-host-residency-twelve",
        "vllm-fp8-host-residency-twentyfour",
    ),
    ("rules-priced-sixteen", "rules-aimd-sixteen", "rules-cap-sixteen"),
    ("bound-twentyfour", "think-twelve", "think-sixteen"),
    (
        "mixed-ten",
        "mixed-sixteen",
        "price-sixteen",
        "vllm-4096-ten",
        "vllm-4096-residency-sixteen",
        "vllm-4096-think-twelve",
    ),
    (
        "draw2-mixed-ten",
        "draw2-ten",
        "draw2-vllm-4096-ten",
        "draw2-vllm-4096-residency-sixteen",
        "draw2-sixteen",
        "draw2-twentyfour",
    ),
    ("draw1-vllm-4096-ten", "draw4-vllm-4096-ten", "vllm-4096-residency-twentyfour"),
    ("draw1-ten", "draw4-ten", "draw1-mixed-ten"),
    (
        "draw1-twelve",
        "draw2-twelve",
        "draw4-twelve",
        "draw1-vllm-4096-twelve",
        "draw2-vllm-4096-twelve",
        "vllm-4096-twelve",
        "draw4-vllm-4096-twelve",
        "draw2-mixed-twelve",
    ),
    ("draw1-mixed-twelve", "mixed-twelve", "draw4-mixed-twelve", "mixed-eight"),
    (
        "draw2-rules-thunder-sixteen",
        "draw2-rules-lease-sixteen",
        "draw2-rules-aimd-sixteen",
        "draw2-rules-cap-sixteen",
    ),
    ("draw2-lpm-twelve", "lpm-twelve"),
    (
        "draw2-think-sixteen",
        "draw2-fill-think-sixteen",
        "think-sixteen-again",
        "fill-think-sixteen",
        "draw2-twelve-again",
        "draw2-fill-twelve",
        "fill-twelve",
        "draw1-fill-twelve",
    ),
    ("draw1-fill-ten", "draw2-fill-ten", "fill-ten", "draw4-fill-ten", "draw4-fill-twelve"),
    (
        "draw2-vllm-twelve",
        "draw2-vllm-residency-twelve",
        "vllm-twelve",
        "vllm-residency-twelve",
    ),
    (
        "draw2-vllm-host-twelve",
        "draw2-vllm-host-residency-twelve",
        "vllm-host-twelve",
        "vllm-host-residency-twelve",
    ),
    (
        "draw2-sglang-host-twelve",
        "draw2-sglang-host-residency-twelve",
        "sglang-host-twelve",
        "sglang-host-residency-twelve",
    ),
    ("draw2-sglang-paced-residency-twelve", "sglang-paced-residency-twelve"),
    *(
        (
            f"draw2-{arm}-think-twelve",
            f"draw2-{arm}-residency-think-twelve",
            f"{arm}-think-twelve",
            f"{arm}-residency-think-twelve",
        )
        for arm in ("sglang", "vllm", "sglang-host", "vllm-host")
    ),
)
# By table of the page without a GPU.
LAPTOP_TABLES = (
    *(
        tuple(f"laptop-{arm}-{run}" for arm in (engine, f"{engine}-residency") for run in (1, 2))
        for engine in ("sglang", "sglang-host", "vllm")
    ),
    ("laptop-sglang-fill85-1", "laptop-sglang-fill85-2"),
    tuple(f"laptop-sglang-again{arm}-{run}" for arm in ("", "-residency") for run in (1, 2)),
)
COLUMNS = [
    (page, table, at, arm)
    for page, tables in (("residency", TABLES), ("laptop", LAPTOP_TABLES))
    for table, arms in enumerate(tables)
    for at, arm in enumerate(arms)
]


@pytest.mark.parametrize(("page", "table", "at", "arm"), COLUMNS, ids=[arm for *_, arm in COLUMNS])
def test_every_figure_of_an_arm_comes_from_its_lines(
    page: str, table: int, at: int, arm: str
) -> None:
    text = residency_text() if page == "residency" else (RESULTS / "laptop.md").read_text()

    def cell(label: str) -> str:
        return row(table, label, text)[at]

    requests = lines(arm)
    window = phases(arm)
    start_s, end_s = window["window_start_s"], window["window_end_s"]
    measured = [r for r in requests if r["phase"] == "measure"]
    answered = [r for r in measured if not r["error"]]
    ended = [
        r
        for r in requests
        if not r["error"] and r["phase"] != "prime" and start_s <= r["finished_s"] < end_s
    ]
    ttft_s = [
        r["first_token_s"] - r["scheduled_s"] if not r["error"] else float("inf") for r in measured
    ]
    prompt = sum(r["prompt_tokens"] for r in answered)
    cached = sum(r["cached_tokens"] for r in answered)
    evicted = sum(
        max(0, min(r["best_cached_tokens"], r["prompt_tokens"]) - r["cached_tokens"])
        for r in answered
    )
    rates = len(ended) / (end_s - start_s)
    assert number(cell("requests/s")) == pytest.approx(rates, abs=5e-4)
    assert number(cell("prompt tokens from cache")) == pytest.approx(cached / prompt, abs=5e-4)
    recomputed = 100 * evicted / prompt
    assert number(cell("recomputed, of prompt tokens")) == pytest.approx(recomputed, abs=0.06)
    median_s = float(np.median(ttft_s))
    assert number(cell("TTFT p50 of turns")) == pytest.approx(median_s, rel=0.005)
    within = sum(t <= 10 for t in ttft_s)
    assert cell("turns with a first token within 10 s") == f"{within} of {len(measured)}"
    assert int(cell("turns that failed")) == sum(1 for r in measured if r["error"])
    sessions = {r["session_id"] for r in ended}
    assert int(cell("sessions that got an answer in the window")) == len(sessions)


@pytest.mark.parametrize("table", [4, 5])
def test_what_is_said_of_two_sessions_that_fit(table: int) -> None:
    for at, arm in enumerate(TABLES[table]):
        measured = [r for r in lines(arm) if r["phase"] == "measure"]
        waits_s = [r["first_token_s"] - r["scheduled_s"] for r in measured]
        p90_s = float(np.quantile(waits_s, 0.9))
        assert number(row(table, "TTFT p90 of turns")[at]) == pytest.approx(p90_s, abs=0.0051)


@pytest.mark.parametrize(
    ("table", "state"),
    [
        (3, State.STEADY),
        (4, State.NOT_ASSESSED),
        (5, State.STEADY),
        (6, State.STEADY),
        (7, State.STEADY),
        (9, State.STEADY),
        (10, State.STEADY),
        (11, State.STEADY),
        (12, State.STEADY),
        (13, State.STEADY),
        (14, State.STEADY),
        (16, State.STEADY),
        (17, State.STEADY),
        (18, State.STEADY),
        (19, State.STEADY),
        (21, State.STEADY),
        (24, State.STEADY),
        (25, State.STEADY),
    ],
)
def test_which_runs_the_check_calls_steady(table: int, state: State, tmp_path: Path) -> None:
    for arm in TABLES[table]:
        assert steadiness(run_of(arm, tmp_path / arm)).state is state


def test_what_is_said_of_a_minute_of_thinking(tmp_path: Path) -> None:
    """Which runs are steady, whose turns were computed again and who still waited at the end."""
    states = [steadiness(run_of(arm, tmp_path / arm)).state for arm in TABLES[15]]
    assert states == [State.STEADY, State.NOT_SUSTAINED, State.STEADY]
    window = phases("think-sixteen")
    over_s = window["window_end_s"] + window["drain_s"]
    measured = [r for r in lines("think-sixteen") if r["phase"] == "measure"]
    computed_again = [
        r
        for r in measured
        if not r["error"]
        and min(r["best_cached_tokens"], r["prompt_tokens"]) - r["cached_tokens"]
        >= RECOMPUTED_TOKENS
    ]
    assert len(computed_again) == 4
    waited_s = [over_s - r["scheduled_s"] for r in measured if r["first_token_s"] is None]
    assert [round(f(waited_s)) for f in (len, min, max)] == [4, 49, 68]
    longest_s = sorted(r["first_token_s"] - r["scheduled_s"] for r in measured if not r["error"])
    assert longest_s[-2:] == pytest.approx([201, 225], abs=0.5)


def test_what_is_said_of_twelve_sessions_of_four_draws(tmp_path: Path) -> None:
    """Which runs are steady, what the table of draws has, and where late turns had waited."""
    *steady, mixed = TABLES[20]
    for arm in steady:
        assert steadiness(run_of(arm, tmp_path / arm)).state is State.STEADY
    assert steadiness(run_of(mixed, tmp_path / mixed)).state is State.NOT_SUSTAINED
    page = residency_text()
    page = page[page.index("## Twelve sessions of four draws") :]
    ours = ("draw1-twelve", "draw2-twelve", "half-twelve", "draw4-twelve")
    vllm = ("draw1-vllm-4096-twelve", "draw2-vllm-4096-twelve", "vllm-4096-twelve")
    vllm = (*vllm, "draw4-vllm-4096-twelve")

    for label, arms in (("ours", ours), ("vLLM, chunks of 4,096", vllm)):
        found = [share_and_rate(arm) for arm in arms]
        cells = " | ".join(f"{share:.0f} %; {of:.3f}" for share, of in found)
        assert f"| {label} | {cells} |" in page
    both = [np.array([share_and_rate(arm) for arm in arms]) for arms in (ours, vllm)]
    shares, rates = ([of[:, at].mean() for of in both] for at in (0, 1))
    good = [(of[:, 0] * of[:, 1]).mean() / 100 for of in both]
    assert "ours has {:.0f} % in time and vLLM {:.0f} %".format(*shares) in page
    assert "({:.3f} and {:.3f}), so {:.3f} and {:.3f} turns".format(*rates, *good) in page
    wanted = " | ".join(f"{wanted_share(arm, 12):.2f}" for arm in ours)
    assert f"| wanted of the KV | {wanted} |" in page
    late = []
    for arm in ours[:2] + ours[3:]:
        waited_s = {
            e["decision_id"]: e["residency"]["waited_s"]
            for e in decisions(arm)
            if e["event"] == "decision"
        }
        measured = [r for r in lines(arm) if r["phase"] == "measure" and not r["error"]]
        of = [r for r in measured if missed(r)[0]]
        late.append((len(of), sum(waited_s[r["decision_id"]] > 3 for r in of)))
    assert late == [(23, 17), (10, 7), (18, 15)]


def share_and_rate(arm: str) -> tuple[float, float]:
    """Turns within the objective, in percent, and answers a second."""
    measured = [r for r in lines(arm) if r["phase"] == "measure"]
    good = sum(not r["error"] and not any(missed(r)) for r in measured)
    return 100 * good / len(measured), rate(arm)


def rate(arm: str) -> float:
    """Answers a second of the window."""
    start_s, end_s = (phases(arm)[f"window_{of}_s"] for of in ("start", "end"))
    return float(between(arm, start_s, end_s)["answers"]) / (end_s - start_s)


def wanted_share(arm: str, sessions: int, capacity: int = 563_776) -> float:
    """The share of the KV that so many sessions' turns hold over time: their prompts, for as long
    as they run on the worker, over the time in which they run and their session thinks."""
    run_s = {
        e["decision_id"]: e["duration_s"]
        for e in decisions(arm)
        if e["event"] == "finish" and e["outcome"] == "ok"
    }
    served = [r for r in lines(arm) if r["phase"] != "prime"]
    held = [
        (r["input_length"], run_s[r["decision_id"]]) for r in served if r["decision_id"] in run_s
    ]
    by_session: dict[str, list[dict[str, Any]]] = {}
    for request in sorted(served, key=lambda r: r["scheduled_s"]):
        by_session.setdefault(request["session_id"], []).append(request)
    think_s = [
        after["sent_s"] - before["finished_s"]
        for turns in by_session.values()
        for before, after in pairwise(turns)
        if before["finished_s"] and after["sent_s"]
    ]
    tokens, ran_s = np.array(held).T
    cycle_s = float(ran_s.mean()) + float(np.mean(think_s))
    return float((tokens * ran_s).mean()) * sessions / cycle_s / capacity


def test_what_is_said_of_the_run_that_was_cut_off() -> None:
    """In the seconds of the window that it has lines for, beside the same seconds of others."""
    arms = ("engines-vllm-cut-off", "engines-sglang-1", "engines-sglang-2")
    start_s = phases(arms[0])["window_start_s"]
    answered, waited_s = [], []
    for arm in arms:
        found = between(arm, start_s, start_s + 169)
        answered.append(found["answers"])
        waits_s = found["waits_s"]
        waited_s.append((round(float(np.median(waits_s))), min(waits_s) > 59))
        assert found["cached"] == pytest.approx(0.015, abs=0.001)
    assert answered == [23, 22, 22]
    assert waited_s == [(74, True), (75, True), (75, True)]


def test_which_runs_the_fault_of_replays_touched() -> None:
    """Of the tokens that engines found cached, those that the router did not know of."""
    touched = {"laptop-sglang-residency-2": 0.68, "laptop-sglang-host-2": 0.42}
    touched |= {"laptop-vllm-residency-2": 0.03, "laptop-sglang-no-replay": 0.60}
    arms = [arm for table in LAPTOP_TABLES for arm in table]
    for arm in (*arms, "laptop-sglang-no-replay"):
        finished = [event for event in decisions(arm) if event["event"] == "finish"]
        known = [e for e in finished if e.get("cached_tokens") and "believed_cached_tokens" in e]
        found = sum(e["cached_tokens"] for e in known)
        unknown = sum(max(0, e["cached_tokens"] - e["believed_cached_tokens"]) for e in known)
        assert unknown <= found * 0.001 or unknown / found == pytest.approx(touched[arm], abs=0.006)


@pytest.mark.parametrize(
    ("arm", "lost", "places"),
    [
        ("laptop-sglang-residency-2", 39, 65),
        ("laptop-vllm-residency-2", 5, 51),
        ("laptop-sglang-no-replay", 63, 86),
        ("laptop-sglang-fill85-1", 0, 28),
        ("laptop-sglang-fill85-2", 0, 25),
        ("laptop-sglang-again-residency-1", 0, 31),
        ("laptop-sglang-again-residency-2", 2, 41),
    ],
)
def test_how_many_places_were_lost(arm: str, lost: int, places: int) -> None:
    reasons = [event["reason"] for event in decisions(arm) if event["event"] == "give_up"]
    assert (reasons.count("lost"), len(reasons)) == (lost, places)


def test_what_is_said_of_24_sessions_before_both_engines() -> None:
    """In the seconds of the windows that both have lines for."""
    arms = ("vllm-fp8-host-twentyfour-cut-off", "slices-twentyfour-cut-off")
    page = residency_text()
    columns = [until(arm, 105) for arm in arms]
    has_rows(page, columns)
    medians_s = [float(np.median(column["waits_s"])) for column in columns]
    assert medians_s == pytest.approx([107.0, 0.996], rel=0.001)
    assert min(columns[0]["waits_s"]) == pytest.approx(86, abs=0.5)
    again, before = (until(arm, 160) for arm in (arms[1], "slices-twentyfour"))
    assert (again["answers"], before["answers"]) == (97, 98)
    assert again["cached"] == pytest.approx(0.883, abs=5e-4)
    assert again["good"] / again["firsts"] == pytest.approx(0.62, abs=0.005)
    assert np.median(again["waits_s"]) == pytest.approx(0.97, abs=0.005)


def test_what_is_said_of_24_sessions_before_vllm_with_and_without_residency() -> None:
    """In the seconds of the window that the run without has lines for, and the same of others."""
    arms = (
        "vllm-fp8-host-twentyfour-cut-off-again",
        "vllm-fp8-host-residency-twentyfour",
        "half-twentyfour",
    )
    page = residency_text()
    columns = [until(arm, 230) for arm in arms]
    has_rows(page, columns, ("sessions that got an answer", "{sessions}"))
    vllm, residency, ours = columns
    assert f"{residency['answers'] / vllm['answers']:.1f} times the answers" in page
    assert f"{100 * residency['good'] / residency['firsts']:.0f} % of first tokens" in page
    assert f"{ours['answers'] / residency['answers']:.2f} times as many again" in page
    assert min(vllm["waits_s"]) == pytest.approx(88, abs=0.5)
    assert np.median(vllm["waits_s"]) == pytest.approx(111, abs=0.5)


def test_what_is_said_of_three_rules_with_16_sessions() -> None:
    page = residency_text()
    arms = ("rules-priced-sixteen", "rules-aimd-sixteen", "rules-cap-sixteen")
    good, served, unserved_s = [], [], []
    for arm in arms:
        measured = [r for r in lines(arm) if r["phase"] == "measure"]
        good.append(sum(not r["error"] and not any(missed(r)) for r in measured))
        window = phases(arm)
        start_s, end_s = window["window_start_s"], window["window_end_s"]
        there = [
            r
            for r in lines(arm)
            if r["phase"] != "prime" and r["scheduled_s"] < end_s and r["finished_s"] >= start_s
        ]
        ended = [r for r in there if not r["error"] and r["finished_s"] < end_s]
        served.append(tuple(len({r["session_id"] for r in of}) for of in (ended, there)))
        waits_s = [
            r["finished_s"] - r["scheduled_s"]
            for r in measured
            if r["error"] and r["first_token_s"] is None and r["turn"] == 0
        ]
        unserved_s.append((len(waits_s), round(min(waits_s)), round(max(waits_s))))
    rates = [turns / 210 for turns in good]
    assert "{:.3f}, {:.3f} and {:.3f} ({}, {} and {} turns in 210 s)".format(*rates, *good) in page
    ours, aimd, cap = served
    assert ours == (20, 23)
    assert aimd == (14, 24)
    assert cap == (17, 24)
    assert unserved_s == [(2, 218, 231), (6, 61, 219), (6, 91, 238)]
    found = until("rules-aimd-twentyfour-cut-off", 160)
    assert (found["answers"], found["sessions"]) == (85, 12)
    assert (found["good"], found["firsts"]) == (68, 85)
    before = [until(f"{run}-twentyfour", 160) for run in ("slices", "along", "half")]
    assert sorted(of["answers"] for of in before) == [98, 106, 107]
    assert sorted(of["sessions"] for of in before) == [18, 19, 20]
    assert sorted((of["good"], of["firsts"]) for of in before) == [(72, 99), (86, 105), (90, 110)]


def test_what_is_said_of_the_engines_own_chunks() -> None:
    """In the first seconds with 16 sessions, of which vLLM's were cut off; what missed the
    objective with ten; who still waited when the runs with residency ended."""
    page = residency_text()
    ended = ("vllm-4096-residency-sixteen", "price-sixteen")
    arms = ("vllm-4096-sixteen-cut-off", "mixed-sixteen", *ended)
    has_rows(page[page.index("| 16 in flight, 115 s |") :], [until(arm, 115) for arm in arms])

    def misses(arm: str) -> list[tuple[bool, bool, bool]]:
        return [missed(r) for r in lines(arm) if r["phase"] == "measure" and not r["error"]]

    for arm, late, gaps in (("vllm-fp8-host-ten", 22, 10), ("vllm-4096-ten", 28, 1)):
        assert [sum(of) for of in zip(*misses(arm), strict=True)] == [late, gaps, 0]
    assert [sum(not any(of) for of in misses(arm)) for arm in ended] == [78, 88]
    unserved = [
        [r for r in lines(arm) if r["phase"] == "measure" and r["first_token_s"] is None]
        for arm in ended
    ]
    assert [len(of) for of in unserved] == [3, 7]
    longest = [max(of, key=lambda r: r["finished_s"] - r["scheduled_s"]) for of in unserved]
    assert [r["turn"] for r in longest] == [0, 0]
    rates = [number(row(16, "requests/s")[at]) for at in range(3)]
    assert f"{rates[2] / rates[1]:.1f} times as many, and 75 % of turns" in page


def test_what_is_said_of_the_noise_and_of_waits() -> None:
    rates, medians_s = [], []
    for arm in ("engines-sglang-1", "engines-sglang-2", "backfill-off"):
        window = phases(arm)
        start_s, end_s = window["window_start_s"], window["window_end_s"]
        requests = lines(arm)
        ended = [r for r in requests if r["phase"] != "prime" and not r["error"]]
        ended = [r for r in ended if start_s <= r["finished_s"] < end_s]
        measured = [r for r in requests if r["phase"] == "measure"]
        waits_s = [
            float("inf") if r["error"] else r["first_token_s"] - r["scheduled_s"] for r in measured
        ]
        rates.append(len(ended) / (end_s - start_s))
        medians_s.append(float(np.median(waits_s)))
    assert max(rates) / min(rates) == pytest.approx(1.03, abs=0.006)
    assert max(medians_s) / min(medians_s) == pytest.approx(1.08, abs=0.006)
    assert sorted(waits_s)[int(0.9 * len(waits_s))] == pytest.approx(95.1, abs=0.05)


@pytest.mark.parametrize(
    ("arm", "least_s", "most_s", "count"),
    [
        ("backfill-residency", 95, 228, 9),
        ("backfill-lease", 235, 373, 3),
        ("again-residency", 121, 208, 7),
        ("along-twentyfour", 61, 269, 11),
        ("half-twentyfour", 56, 253, 8),
        ("bound-twentyfour", 33, 33, 2),
        ("think-sixteen", 38, 119, 7),
        ("price-sixteen", 31, 267, 9),
        ("vllm-4096-residency-sixteen", 42, 248, 5),
        ("draw2-twentyfour", 10, 142, 5),
        ("vllm-4096-residency-twentyfour", 11, 237, 4),
    ],
)
def test_how_long_the_unanswered_had_waited(
    arm: str, least_s: float, most_s: float, count: int
) -> None:
    """By the end of their drains."""
    window = phases(arm)
    over_s = window["window_end_s"] + window["drain_s"]
    failed = [r for r in lines(arm) if r["phase"] == "measure" and r["error"]]
    waited_s = sorted(round(over_s - r["scheduled_s"]) for r in failed)
    assert (waited_s[0], waited_s[-1], len(waited_s)) == (least_s, most_s, count)


def test_what_is_said_of_the_turns_outside_the_objective() -> None:
    """With FP8 KV and a host tier: late first tokens, gaps over 1 s, slow answers, any of them."""
    found = []
    for arm in ("fp8-eight-1", "fp8-eight-2"):
        misses = [missed(r) for r in lines(arm) if r["phase"] == "measure"]
        late, gap, slow = (sum(of) for of in zip(*misses, strict=True))
        found.append((late, gap, slow, sum(map(any, misses))))
    assert found == [(6, 20, 0, 26), (6, 22, 1, 28)]


def test_what_is_said_of_ten_sessions_before_vllm() -> None:
    """What was late, and how many sessions each arm keeps nine turns of ten with."""
    measured = [r for r in lines("vllm-fp8-host-ten") if r["phase"] == "measure"]
    misses = [missed(r) for r in measured if not r["error"]]
    assert [sum(of) for of in zip(*misses, strict=True)] == [22, 10, 0]
    assert (len(measured), sum(bool(r["error"]) for r in measured)) == (119, 2)
    shares = [number(row(8, "turns within the SLO")[0]), number(row(10, "turns within the SLO")[0])]
    assert 8 + 2 * (shares[0] - 90) / (shares[0] - shares[1]) == pytest.approx(8.7, abs=0.05)
    shares = [number(row(at, "turns within the SLO")[0]) for at in (7, 9)]
    assert 8 + 4 * (shares[0] - 90) / (shares[0] - shares[1]) == pytest.approx(9.5, abs=0.05)


def test_what_is_said_of_prompt_tokens_a_second() -> None:
    rates, lengths = [], []
    for arm in (*TABLES[6], *TABLES[9]):
        window = phases(arm)
        start_s, end_s = window["window_start_s"], window["window_end_s"]
        requests = [r for r in lines(arm) if r["phase"] != "prime" and not r["error"]]
        ended = [r for r in requests if start_s <= r["finished_s"] < end_s]
        rates.append(sum(r["prompt_tokens"] for r in ended) / (end_s - start_s))
        answered = [r for r in requests if r["phase"] == "measure"]
        lengths.append(sum(r["prompt_tokens"] for r in answered) / len(answered))
    assert rates == pytest.approx([39_300, 39_500, 38_600, 38_900], abs=51)
    assert lengths == pytest.approx([60_000, 60_000, 79_000, 82_700], rel=0.015)


@pytest.mark.parametrize(
    ("arm", "most_s"),
    [
        ("slices-twelve", 112),
        ("half-twelve", 203),
        ("half-twentyfour", 69),
        ("vllm-fp8-host-twelve", 30),
        ("vllm-fp8-host-residency-twelve", 219),
        ("rules-priced-sixteen", 99),
        ("rules-aimd-sixteen", 8),
        ("rules-cap-sixteen", 10),
        ("bound-twentyfour", 30),
        ("think-sixteen", 225),
        ("price-sixteen", 23),
        ("vllm-4096-residency-sixteen", 20),
        ("draw2-ten", 63),
        ("draw2-mixed-ten", 16),
        ("draw2-twentyfour", 68),
    ],
)
def test_how_long_the_longest_that_was_answered_waited(arm: str, most_s: int) -> None:
    measured = [r for r in lines(arm) if r["phase"] == "measure"]
    waits_s = [r["first_token_s"] - r["scheduled_s"] for r in measured if not r["error"]]
    assert max(waits_s) == pytest.approx(most_s, abs=0.5)


@pytest.mark.parametrize(
    ("arm", "late", "computed", "most_s"),
    [("half-twelve", 18, 6, 69), ("half-twentyfour", 17, 4, 55)],
)
def test_what_is_said_of_late_turns_with_half_in_flight(
    arm: str, late: int, computed: int, most_s: int
) -> None:
    """Those that computed all of their prompt, and how late the others came."""
    measured = [r for r in lines(arm) if r["phase"] == "measure" and not r["error"]]
    came_late = [r for r in measured if missed(r)[0]]
    cold = [r for r in came_late if r["cached_tokens"] == 0]
    assert (len(came_late), len(cold)) == (late, computed)
    assert all(r["turn"] <= 1 for r in cold)
    waits_s = [r["first_token_s"] - r["scheduled_s"] for r in came_late if r["cached_tokens"]]
    assert max(waits_s) == pytest.approx(most_s, abs=0.5)


def test_what_is_said_of_the_same_work_to_its_end() -> None:
    page = (RESULTS / "laptop.md").read_text()
    before = [
        (f"laptop-complete-{engine}", f"laptop-complete-{engine}-residency")
        for engine in ("sglang", "sglang-host", "vllm")
    ]
    now = [
        ("laptop-complete-sglang", "laptop-idle-sglang-residency"),
        ("laptop-idle-vllm", "laptop-idle-vllm-residency"),
    ]
    for pairs in (before, now):
        for label, cells in _completion_rows(pairs).items():
            assert f"| {label} | {' | '.join(cells)} |" in page


def _completion_rows(pairs: list[tuple[str, str]]) -> dict[str, list[str]]:
    """The table's rows, a column for each pair of runs without and with residency."""
    rows: dict[str, list[str]] = {}
    for arms in pairs:
        off, priced = map(completions_s, arms)
        both = np.array([_to_its_end(arm) for arm in arms])
        sessions = sorted(off)
        assert sessions == sorted(priced)
        sooner = sum(priced[session] < off[session] for session in sessions)
        took_s = np.array([[off[session], priced[session]] for session in sessions])
        drawn = np.random.default_rng(0).integers(0, len(sessions), (2000, len(sessions)))
        means_s = took_s.mean(axis=0)
        ratios = np.divide(*took_s[drawn].mean(axis=1).T[::-1])
        least, most = np.quantile(ratios, [0.025, 0.975])
        for label, cell in (
            ("recomputed, of prompt tokens", "{:.1f} → {:.1f} %".format(*both[:, 0])),
            ("time until all is done", "{:.0f} → {:.0f} s".format(*both[:, 1])),
            ("completion, mean", "{:.0f} → {:.0f} s".format(*means_s)),
            ("of that, ratio", f"{means_s[1] / means_s[0]:.2f} [{least:.2f}–{most:.2f}]"),
            ("sessions that complete sooner", f"{sooner} of {len(sessions)}"),
            ("TTFT p50", "{:#.2g} → {:#.2g} s".format(*both[:, 2])),
        ):
            rows.setdefault(label, []).append(cell)
    return rows


def completions_s(arm: str) -> dict[str, float]:
    """Seconds that each session took, from when its first turn was due to the end of its last."""
    sessions: dict[str, list[dict[str, Any]]] = {}
    for request in lines(arm):
        sessions.setdefault(request["session_id"], []).append(request)
    return {
        session: max(r["finished_s"] for r in turns) - min(r["scheduled_s"] for r in turns)
        for session, turns in sessions.items()
    }


def _to_its_end(arm: str) -> tuple[float, float, float]:
    """The share recomputed in percent, seconds until all was done, the median wait."""
    requests = lines(arm)
    assert len(requests) == 200
    assert not any(r["error"] for r in requests)
    prompt = sum(r["prompt_tokens"] for r in requests)
    assert prompt / len(requests) == pytest.approx(6_300, abs=50)
    again = sum(
        max(0, min(r["best_cached_tokens"], r["prompt_tokens"]) - r["cached_tokens"])
        for r in requests
    )
    all_s = max(r["finished_s"] for r in requests) - min(r["scheduled_s"] for r in requests)
    waits_s = [r["first_token_s"] - r["scheduled_s"] for r in requests]
    return 100 * again / prompt, all_s, float(np.median(waits_s))


@pytest.mark.parametrize(
    ("arm", "share"),
    [
        ("complete-vllm", 0.11),
        ("complete-vllm-residency", 0.59),
        ("complete-sglang", 0.02),
        ("complete-sglang-residency", 0.11),
        ("complete-sglang-host", 0.02),
        ("complete-sglang-host-residency", 0.06),
        ("idle-vllm", 0.10),
        ("idle-vllm-residency", 0.09),
        ("idle-sglang-residency", 0.07),
    ],
)
def test_how_long_engines_were_idle_on_the_way(arm: str, share: float) -> None:
    """From the first decision to the last end, while no request was with the worker."""
    changes: list[tuple[float, int]] = []
    for event in decisions(f"laptop-{arm}"):
        if event["event"] in ("decision", "finish"):
            changes.append((event["ts_unix_s"], 1 if event["event"] == "decision" else -1))
    changes.sort()
    running, idle_s = 0, 0.0
    for (at_s, change), (next_s, _) in pairwise(changes):
        running += change
        idle_s += (next_s - at_s) * (running == 0)
    assert running + changes[-1][1] == 0
    assert idle_s / (changes[-1][0] - changes[0][0]) == pytest.approx(share, abs=0.006)


def test_why_places_went_before_sglang_that_gives_up_what_is_cheap() -> None:
    log = decisions("laptop-idle-sglang-residency")
    reasons = [event["reason"] for event in log if event["event"] == "give_up"]
    assert (reasons.count("worker_idle"), len(reasons)) == (52, 88)


def test_what_is_said_of_ten_24_and_twelve_with_short_turns_along() -> None:
    def misses(arm: str) -> list[tuple[bool, bool, bool]]:
        measured = [r for r in lines(arm) if r["phase"] == "measure"]
        return [missed(r) for r in measured if not r["error"]]

    assert [sum(of) for of in zip(*misses("along-ten"), strict=True)] == [11, 0, 0]
    vllm = [number(row(at, "turns within the SLO")[0]) for at in (8, 10)]
    ours = [number(cell) for cell in row(11, "turns within the SLO")[:2]]
    carried = [
        least + 2 * (above - 90) / (above - below)
        for least, (above, below) in ((8, vllm), (10, ours))
    ]
    assert carried == pytest.approx([8.7, 10.1], abs=0.05)
    assert carried[1] / carried[0] == pytest.approx(1.16, abs=0.005)
    found = until("sglang-three-cut-off", 131)
    assert (found["answers"], found["good"], found["firsts"]) == (28, 24, 28)
    assert found["cached"] == pytest.approx(0.887, abs=5e-4)


@pytest.mark.parametrize(
    ("arm", "half_empty"),
    [
        ("along-ten", 6),
        ("along-twelve", 26),
        ("along-twentyfour", 18),
        ("half-twelve", 22),
        ("half-twentyfour", 26),
    ],
)
def test_for_how_much_of_a_window_turns_waited_before_a_half_empty_cache(
    arm: str, half_empty: int
) -> None:
    """Percent of the window in which a turn waited and prompts in flight took less than
    half of the KV, by when the router let them go."""
    capacity = 563_776
    window = phases(arm)
    went = {e["request_id"]: e for e in decisions(arm) if e["event"] == "decision"}
    requests = lines(arm)
    first = next(r for r in requests if r["request_id"] in went)
    of_first = went[first["request_id"]]
    began_unix_s = of_first["ts_unix_s"] - of_first["residency"]["waited_s"] - first["sent_s"]
    at_s = np.arange(window["window_start_s"], window["window_end_s"], 0.5)
    tokens, waiting = np.zeros(len(at_s)), np.zeros(len(at_s))
    for request in requests:
        decision = went.get(request["request_id"])
        let_go_s = decision["ts_unix_s"] - began_unix_s if decision else np.inf
        came_s = request["sent_s"] or request["scheduled_s"]
        finished_s = request["finished_s"] or np.inf
        prompt = request["prompt_tokens"] or request["input_length"]
        waiting += (at_s >= came_s) & (at_s < min(let_go_s, finished_s))
        tokens += prompt * ((at_s >= let_go_s) & (at_s < finished_s))
    share = np.mean((waiting > 0) & (tokens < capacity / 2))
    assert 100 * share == pytest.approx(half_empty, abs=0.6)
