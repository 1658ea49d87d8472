"""What docs/results/residency-draws.md says of ten sessions."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pytest

from eval.by_draw import OverDraws, over_draws, table
from eval.noise import Verdict
from eval.run_lines import Row, read_rows
from tests.eval.differences import by_draw
from tests.eval.published import RESULTS, decisions, lines, number, phases, row
from tests.eval.test_sessions_a_gpu import ALWAYS
from tests.eval.windows import has_rows, missed, until

OURS = "sglang-fp8-host-paced-residency"
# The arms of the page's table of ten sessions on four draws; ours was in time slices always.
TEN = {
    "ours": ALWAYS,
    "SGLang's mixed chunks": "sglang-fp8-host-mixed",
    "vLLM, chunks of 4,096": "vllm-fp8-host-4096",
}
# Where the page has ten sessions before ours, SGLang's mixed chunks and vLLM's of 4,096 tokens:
# table and column, on draw 3 and on draw 2.
TEN_BY_DRAW = (((11, 0), (17, 1)), ((16, 0), (17, 0)), ((16, 3), (17, 2)))
CUT_OFF = "draw2-vllm-4096-residency-twentyfour-cut-off"
# Ten sessions before vLLM in chunks of 4,096, of draws 1, 4, 3 and 2.
TEN_VLLM = ("draw1-vllm-4096-ten", "draw4-vllm-4096-ten", "vllm-4096-ten", "draw2-vllm-4096-ten")


def test_what_is_said_of_ten_sessions_of_another_draw() -> None:
    """Turns in time by both draws, what was late, and who still waited when the runs ended."""
    text = (RESULTS / "residency-draws.md").read_text()
    page = text[text.index("## Ten sessions of another draw") :]

    def in_time(*arms: str) -> tuple[int, int]:
        measured = [r for arm in arms for r in lines(arm) if r["phase"] == "measure"]
        good = [r for r in measured if not r["error"] and not any(missed(r))]
        return len(good), len(measured)

    pairs = (
        ("along-ten", "draw2-ten"),
        ("mixed-ten", "draw2-mixed-ten"),
        ("vllm-4096-ten", "draw2-vllm-4096-ten"),
    )
    (ours, of_ours), *others = (in_time(*pair) for pair in pairs)
    said = f"{ours} turns in time of {of_ours} in 480 s, SGLang's mixed chunks {{}} of {{}}, vLLM"
    assert said.format(*others[0]) + " {} of {}".format(*others[1]) in page
    shares = [[number(row(at, "turns within the SLO")[i]) for at, i in of] for of in TEN_BY_DRAW]
    first, second = zip(*shares, strict=True)
    assert "ours keeps {:.0f} % of turns within".format(*second) in page
    assert "mixed chunks {1:.0f} %, vLLM in the same chunks {2:.0f} %".format(*second) in page
    assert "[{:.0f}, {:.0f}](".format(*first) in page
    assert f"and {first[2]:.0f} %." in page
    both = [in_time(arm)[0] for arm in ("draw2-sixteen", "draw2-vllm-4096-residency-sixteen")]
    assert "{} and {} turns in time".format(*both) in page
    for arm, late in (("draw2-mixed-ten", 32), ("draw2-vllm-4096-ten", 45)):
        misses = [missed(r) for r in lines(arm) if r["phase"] == "measure" and not r["error"]]
        assert [sum(of) for of in zip(*misses, strict=True)] == [late, 0, 0]
    unserved = [
        sum(r["phase"] == "measure" and r["first_token_s"] is None for r in lines(arm))
        for arm in ("draw2-sixteen", "draw2-twentyfour")
    ]
    assert unserved == [2, 3]
    rates = [number(cell) for cell in row(17, "requests/s")]
    assert f"at {rates[5]:.3f} requests/s: {rates[5] / rates[1]:.1f} times those with ten" in page
    waits_s = [number(row(17, "TTFT p50 of turns")[at]) for at in (0, 1)]
    assert waits_s[0] / waits_s[1] > 5


def test_what_is_said_of_two_more_draws_before_vllm() -> None:
    """What missed the objective with ten, and the same seconds with 24 before both engines."""
    page = (RESULTS / "residency-draws.md").read_text()
    page = page[page.index("## Ten sessions of two more draws") :]
    for arm, misses in (("draw1-vllm-4096-ten", [11, 0, 0]), ("draw4-vllm-4096-ten", [13, 0, 2])):
        answered = [r for r in lines(arm) if r["phase"] == "measure" and not r["error"]]
        found = [missed(r) for r in answered]
        assert [sum(of) for of in zip(*found, strict=True)] == misses
    lengths, answers = zip(*map(_mean_tokens, TEN_VLLM), strict=True)
    assert [round(tokens, -3) for tokens in lengths] == [82_000, 86_000, 70_000, 86_000]
    assert max(answers[:2]) < min(answers[2:])
    assert "({:.0f} and {:.0f} tokens where".format(*answers[:2]) in page
    arms = ("vllm-4096-residency-twentyfour", "bound-twentyfour", CUT_OFF, "draw2-twentyfour")
    columns = [until(arm, 240) for arm in arms]
    has_rows(page, columns, ("sessions that got an answer", "{sessions}"))
    assert columns[1]["answers"] / columns[0]["answers"] == pytest.approx(1.25, abs=0.02)


def test_what_four_draws_say_of_ten_sessions() -> None:
    """Shares and rates by draw, the verdicts over them, the same seconds of the run that was cut
    off, and turns in time."""
    page = (RESULTS / "residency-draws.md").read_text()
    page = page[page.index("## Ten sessions of the same two draws") :]
    arms = ("draw4-ten", "draw4-mixed-ten-cut-off", "draw4-vllm-4096-ten")
    has_rows(page, [until(arm, 210) for arm in arms])
    rows = read_rows(RESULTS / "residency" / "sessions-a-gpu.csv")
    ours, mixed, vllm = (
        {r["draw"]: r for r in rows if (r["arm"], r["sessions"]) == (arm, "10")}
        for arm in TEN.values()
    )
    for label, runs in zip(TEN, (ours, mixed, vllm), strict=True):
        cells = []
        for draw in "1234":
            row = runs.get(draw)
            within = 100 * float(row["within_objective"]) if row else 0.0
            cells.append(f"{within:.0f} %; {float(row['requests_per_s']):.3f}" if row else "")
        assert f"| {' | '.join([label, *cells])} |".replace("  ", " ") in page

    def of(runs: dict[str, Row], draws: Collection[str]) -> tuple[int, int]:
        turns = [int(runs[draw]["measured_turns"]) for draw in draws]
        shares = [float(runs[draw]["within_objective"]) for draw in draws]
        return sum(round(s * n) for s, n in zip(shares, turns, strict=True)), sum(turns)

    said = "ours had {} turns in time of {}, vLLM {} of {}"
    assert said.format(*of(ours, ours), *of(vllm, ours)) in page
    said = "on three ours {} of {}, SGLang's mixed chunks {} of {}"
    assert said.format(*of(ours, mixed), *of(mixed, mixed)) in page
    names = list(TEN.values())
    for base, arm in ((2, 0), (1, 0), (2, 1)):
        found = over_draws(rows, 10, names[base], [names[arm]])
        assert "\n".join(table(found, names[base])).replace(names[0], OURS) in page


def test_what_sixteen_simulated_draws_say_of_ten_sessions() -> None:
    page = (RESULTS / "residency-draws.md").read_text()
    page = page[page.index("**Sixteen draws would tell more apart**") :].split("\n")[0]
    rows = read_rows(RESULTS / "simulated" / "ten-draws.csv")
    over_vllm, over_mixed = (
        by_draw(rows, 10, base, OURS)
        for base in ("vllm-fp8-host chunk 4096", "sglang-fp8-host mixed chunk 4096")
    )
    assert over_vllm["attainment"].draws == tuple(range(1, 17))

    def told(item: OverDraws) -> str:
        of = item.effect
        if item.measure.in_points:
            value, low, high = (f"{100 * each:+.1f}" for each in (of.value, of.low, of.high))
            return f"{value} points [{low} to {high}]"
        value, low, high = (f"{100 * (each - 1):+.2g}" for each in (of.value, of.low, of.high))
        return f"{value} % [{low} to {high}]".replace("-", "−")

    assert told(over_vllm["attainment"]) in page
    assert told(over_vllm["goodput_rps"]) in page
    assert told(over_mixed["requests_per_s"]).replace(" %", " % requests/s") in page
    for found, percent in ((over_vllm, 44), (over_mixed, 31)):
        shorter = 100 * (1 - found["worst_gap_p90"].effect.value)
        assert round(shorter) == percent
        assert f"a worst gap p90 {percent} % shorter" in page
    for key in ("attainment", "goodput_rps"):
        assert over_mixed[key].verdict is Verdict.NONE


def test_what_ours_missed_the_objective_by_on_draw_1() -> None:
    """Who waited in the router, and how much of the GPU's KV running turns held when they came."""
    requests = [r for r in lines("draw1-ten") if r.get("decision_id")]
    logged = decisions("draw1-ten")
    waited_s = {e["decision_id"]: e["residency"]["waited_s"] for e in logged if "residency" in e}
    why = {e["request_id"]: e["reason"] for e in reversed(logged) if e["event"] == "wait"}
    answered = [r for r in requests if r["phase"] == "measure" and not r["error"]]
    late = [r for r in answered if missed(r)[0]]
    in_router = [r for r in late if waited_s[r["decision_id"]] > 1]
    assert (len(late), len(in_router)) == (21, 17)
    waits_s = [waited_s[r["decision_id"]] for r in in_router]
    assert [round(f(waits_s)) for f in (min, max)] == [3, 14]
    new = [r for r in in_router if why[r["request_id"]] == "sessions_limit"]
    assert (len(new), {r["turn"] for r in new}) == (3, {0})

    def held_tokens(at_s: float) -> int:
        there = [
            r
            for r in requests
            if r["sent_s"] + waited_s[r["decision_id"]] <= at_s < r["finished_s"]
        ]
        answers = [max((n for t, n in r["arrivals"] if t <= at_s), default=0) for r in there]
        return sum(r["input_length"] for r in there) + sum(answers)

    shares = [
        (held_tokens(r["sent_s"]) + r["input_length"] + r["output_length"]) / 563_776
        for r in in_router
        if r not in new
    ]
    assert len(shares) == 14
    assert round(100 * min(shares)) == 98
    slow = [r for r in answered if missed(r)[2]]
    assert (len(slow), min(r["output_tokens"] for r in slow)) == (5, 4)
    assert max(r["output_tokens"] for r in slow) == 155
    mixed = [r for r in lines("draw1-mixed-ten") if r["phase"] == "measure" and not r["error"]]
    assert [sum(of) for of in zip(*map(missed, mixed), strict=True)] == [14, 0, 1]


def test_who_still_waited_when_the_run_that_was_cut_off_had_had_its_window() -> None:
    """Turns without an answer are in the router's log alone, by its clock."""
    requests = {r["request_id"]: r for r in lines(CUT_OFF)}
    came = [e for e in decisions(CUT_OFF) if e["event"] in ("wait", "decision")]
    apart_s = [
        e["ts_unix_s"] - requests[e["request_id"]]["sent_s"]
        for e in came
        if e["event"] == "wait" and e["request_id"] in requests
    ]
    first_s: dict[str, float] = {}
    for event in came:
        first_s.setdefault(event["request_id"], event["ts_unix_s"] - float(np.median(apart_s)))
    begun = {e["request_id"] for e in came if e["event"] == "decision"}
    window = phases(CUT_OFF)
    start_s, end_s = window["window_start_s"], window["window_end_s"]
    open_at_s = {id_: at for id_, at in first_s.items() if id_ not in requests and at < end_s}
    waited_s = sorted(end_s - at for id_, at in open_at_s.items() if id_ not in begun)
    before = [s for s in waited_s if s > end_s - start_s]
    assert (len(waited_s), len(before)) == (12, 9)
    assert [round(s) for s in (before[0], before[-1])] == [257, 302]
    assert sum(at >= start_s for at in open_at_s.values()) == 8
    assert max(r["finished_s"] for r in requests.values()) == pytest.approx(end_s + 2.2, abs=0.1)


def _mean_tokens(arm: str) -> tuple[float, float]:
    """Of prompts and of answers."""
    answered = [r for r in lines(arm) if r["phase"] == "measure" and not r["error"]]
    prompts, answers = ([r[key] for r in answered] for key in ("prompt_tokens", "output_tokens"))
    return float(np.mean(prompts)), float(np.mean(answers))
