"""What docs/results/residency-draws.md and residency-slices.md say of the runs on four GPUs side by
side: SGLang's mixed chunks with twelve sessions, no time slices while the turns of all fit, four
rules and `lpm`."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from eval.by_draw import over_draws, table
from eval.run_lines import read_rows
from eval.sessions_a_gpu import row_of
from eval.steady import State, steadiness
from tests.eval.differences import by_draw, difference
from tests.eval.published import RESULTS, decisions, lines, phases, run_of
from tests.eval.test_published_residency import share_and_rate, wanted_share
from tests.eval.test_sessions_a_gpu import ALWAYS
from tests.eval.windows import has_rows, missed, until

PAGES = [(RESULTS / f"residency-{of}.md").read_text() + "\n## " for of in ("draws", "slices")]
MEASURED = RESULTS / "residency" / "sessions-a-gpu.csv"
THINKING = RESULTS / "residency" / "sessions-a-gpu-think.csv"
OURS = "sglang-fp8-host-paced-residency"
MIXED, VLLM = "sglang-fp8-host-mixed", "vllm-fp8-host-4096"
# Raw lines of runs with think times of up to a minute, by arm, sessions in flight and draw.
THINKING_RUNS = {
    ("sglang", 12, 3): ("sglang-think-twelve",),
    ("sglang", 12, 2): ("draw2-sglang-think-twelve",),
    ("sglang-residency", 12, 3): ("sglang-residency-think-twelve",),
    ("sglang-residency", 12, 2): ("draw2-sglang-residency-think-twelve",),
    ("sglang-host", 12, 3): ("sglang-host-think-twelve",),
    ("sglang-host", 12, 2): ("draw2-sglang-host-think-twelve",),
    ("sglang-host-residency", 12, 3): ("sglang-host-residency-think-twelve",),
    ("sglang-host-residency", 12, 2): ("draw2-sglang-host-residency-think-twelve",),
    ("vllm", 12, 3): ("vllm-think-twelve",),
    ("vllm", 12, 2): ("draw2-vllm-think-twelve",),
    ("vllm-residency", 12, 3): ("vllm-residency-think-twelve",),
    ("vllm-residency", 12, 2): ("draw2-vllm-residency-think-twelve",),
    ("vllm-host", 12, 3): ("vllm-host-think-twelve",),
    ("vllm-host", 12, 2): ("draw2-vllm-host-think-twelve",),
    ("vllm-host-residency", 12, 3): ("vllm-host-residency-think-twelve",),
    ("vllm-host-residency", 12, 2): ("draw2-vllm-host-residency-think-twelve",),
    (ALWAYS, 12, 3): ("think-twelve",),
    (ALWAYS, 16, 3): ("think-sixteen", "think-sixteen-again"),
    (ALWAYS, 16, 2): ("draw2-think-sixteen",),
    (OURS, 16, 3): ("fill-think-sixteen",),
    (OURS, 16, 2): ("draw2-fill-think-sixteen",),
    (VLLM, 12, 3): ("vllm-4096-think-twelve",),
}
# Twelve sessions of draws 1 to 4, the newest run of each.
TWELVE = {
    "ours": ("draw1-twelve", "draw2-twelve-again", "half-twelve", "draw4-twelve"),
    "SGLang's mixed chunks": (
        "draw1-mixed-twelve",
        "draw2-mixed-twelve",
        "mixed-twelve",
        "draw4-mixed-twelve",
    ),
    "vLLM, chunks of 4,096": (
        "draw1-vllm-4096-twelve",
        "draw2-vllm-4096-twelve",
        "vllm-4096-twelve",
        "draw4-vllm-4096-twelve",
    ),
}


def section(title: str) -> str:
    (page,) = [page for page in PAGES if f"\n## {title}\n" in page]
    start = page.index(f"\n## {title}\n")
    return page[start : page.index("\n## ", start + 1)]


@pytest.mark.parametrize("label", TWELVE)
def test_twelve_sessions_of_four_draws(label: str) -> None:
    found = [share_and_rate(arm) for arm in TWELVE[label]]
    cells = [f"{share:.0f} %; {of:.3f}" for share, of in found]
    share, of = (statistics.fmean(column) for column in zip(*found, strict=True))
    good = statistics.fmean(share * of / 100 for share, of in found)
    cells.append(f"{share:.0f} %; {of:.3f}; {good:.3f}")
    page = section("SGLang's mixed chunks with twelve sessions of the other draws, and with eight")
    assert f"| {label} | {' | '.join(cells)} |" in page


@pytest.mark.parametrize(("base", "arm"), [(MIXED, ALWAYS), (VLLM, MIXED)])
def test_which_differences_over_draws_are_told_apart(base: str, arm: str) -> None:
    page = section("SGLang's mixed chunks with twelve sessions of the other draws, and with eight")
    found = table(over_draws(read_rows(MEASURED), 12, base, [arm]), base)
    assert "\n".join(found).replace(ALWAYS, OURS) in page


def test_the_lines_with_a_minute_of_thinking_follow_from_their_raw_lines(tmp_path: Path) -> None:
    expected = [
        {**row_of(run_of(name, tmp_path / name), arm, sessions), "draw": str(draw)}
        for (arm, sessions, draw), names in THINKING_RUNS.items()
        for name in names
    ]
    assert read_rows(THINKING) == expected


# Runs with time slices always and with slice_from_fill 0.85, by draw.
TEN_PAIRS = {
    1: ("draw1-ten", "draw1-fill-ten"),
    2: ("draw2-ten", "draw2-fill-ten"),
    3: ("along-ten", "fill-ten"),
    4: ("draw4-ten", "draw4-fill-ten"),
}
TWELVE_PAIRS = {
    1: ("draw1-twelve", "draw1-fill-twelve"),
    2: ("draw2-twelve-again", "draw2-fill-twelve"),
    3: ("half-twelve", "fill-twelve"),
    4: ("draw4-twelve", "draw4-fill-twelve"),
}
THINKING_PAIRS = {
    2: ("draw2-think-sixteen", "draw2-fill-think-sixteen"),
    3: ("think-sixteen-again", "fill-think-sixteen"),
}
FIRST = "Without time slices while the turns of all fit, measured"
ALL = "Without time slices while the turns of all fit: ten sessions, and what nine pairs say"


@pytest.mark.parametrize(
    ("title", "label", "pairs", "sessions", "draws"),
    [
        (FIRST, "16, think ≤ 60 s", THINKING_PAIRS, 16, (1, 2, 3)),
        (FIRST, "twelve, think ≤ 10 s", TWELVE_PAIRS, 12, (1, 2, 3)),
        (ALL, "ten, think ≤ 10 s", TEN_PAIRS, 10, (1, 2, 3, 4)),
        (ALL, "twelve, think ≤ 10 s", TWELVE_PAIRS, 12, (1, 2, 3, 4)),
    ],
)
def test_without_time_slices_while_the_turns_of_all_fit(
    title: str, label: str, pairs: dict[int, tuple[str, str]], sessions: int, draws: tuple[int, ...]
) -> None:
    cells, wanted = [], []
    for draw in draws:
        if draw not in pairs:
            cells.append("")
            wanted.append("")
            continue
        before, after = (share_and_rate(arm) for arm in pairs[draw])
        cells.append(
            f"{before[0]:.0f} → {after[0]:.0f} %; {before[1]:.3f} → {after[1]:.3f}; "
            f"{before[0] * before[1] / 100:.3f} → {after[0] * after[1] / 100:.3f}"
        )
        wanted.append(f"{wanted_share(pairs[draw][0], sessions):.2f}")

    def line(*cells: str) -> str:
        return " | ".join(["", *cells, ""]).replace("|  |", "| |").strip()

    assert f"{line(label, *cells)}\n{line('wanted of the KV', *wanted)}" in section(title)


def test_what_makes_it_the_default() -> None:
    page = section(ALL)
    said = []
    room_left, nearly_full = {}, {}
    for pairs in (TEN_PAIRS, TWELVE_PAIRS):
        runs = [[share_and_rate(arm) for arm in pair] for pair in pairs.values()]
        rate = 100 * statistics.fmean(after[1] / before[1] - 1 for before, after in runs)
        points = statistics.fmean(after[0] - before[0] for before, after in runs)
        good = [100 * (after[0] * after[1] / before[0] / before[1] - 1) for before, after in runs]
        assert statistics.fmean(good) == pytest.approx(3, abs=0.2)
        sessions = 10 if pairs is TEN_PAIRS else 12
        for pair, more in zip(pairs.values(), good, strict=True):
            wants = wanted_share(pair[0], sessions)
            (room_left if wants < 0.78 else nearly_full)[pair] = round(more)
        said.append((f"{rate:+.1f} %", f"{points:+.1f}".replace("-", "−")))
    (ten, ten_points), (twelve, twelve_points) = said
    assert (
        f"With ten it is {ten} requests/s and {ten_points} points, "
        f"with twelve {twelve} and {twelve_points};"
    ) in page
    assert sorted(room_left.values(), reverse=True) == [27, 16, 9, 0, -2]
    assert sorted(nearly_full.values(), reverse=True) == [-4, -10, -12]
    assert "the five pairs have 16, 27, 9, 0 and −2 % more turns in time a second" in page
    assert "(three pairs of draws 2 and 3) 4, 10 and 12 % fewer" in page


def test_ten_sessions_of_draw_1_again_with_slices_always() -> None:
    again, first, now = (
        until(arm, 137)["good"]
        for arm in ("draw1-ten-again-cut-off", "draw1-ten", "draw1-fill-ten")
    )
    assert (
        f"{again} turns in time in the first 137 s of its window, {first} in [the first run]"
    ) in section(ALL)
    assert f", {now} with 0.85." in section(ALL)


@pytest.mark.parametrize(("sessions", "base"), [(10, VLLM), (12, VLLM), (12, MIXED)])
def test_ours_as_it_is_now_over_draws(sessions: int, base: str) -> None:
    found = table(over_draws(read_rows(MEASURED), sessions, base, [OURS]), base)
    assert "\n".join(found[2:]) in section(ALL)


def test_what_is_said_of_lpm() -> None:
    page = section("SGLang's own order of the queue")
    measured = [
        [r for r in lines(arm) if r["phase"] == "measure"]
        for arm in ("draw2-lpm-twelve", "lpm-twelve")
    ]
    within = [
        sum(not r["error"] and r["first_token_s"] - r["scheduled_s"] <= 10 for r in turns)
        for turns in measured
    ]
    assert (sum(map(len, measured)), sum(within)) == (48, 11)
    assert "of 48 turns eleven have their first token within 10 s" in page


def test_what_is_said_of_the_differences_without_time_slices() -> None:
    page = section("Without time slices while the turns of all fit, measured")
    rows = [row for row in read_rows(MEASURED) if row["draw"] in "123"]
    found = by_draw(rows, 12, ALWAYS, OURS)
    share, of = (difference(found[key]) for key in ("attainment", "requests_per_s"))
    assert f"that is {share} and {of} requests/s: nothing." in page


def waits(arm: str) -> tuple[int, int]:
    """Seconds that measured turns waited in the router, and late turns that waited over 3 s."""
    waited_s = {
        e["decision_id"]: e["residency"]["waited_s"]
        for e in decisions(arm)
        if e["event"] == "decision"
    }
    answered = [r for r in lines(arm) if r["phase"] == "measure" and not r["error"]]
    late = [r for r in answered if missed(r)[0]]
    total_s = sum(waited_s[r["decision_id"]] for r in answered)
    return round(total_s), sum(waited_s[r["decision_id"]] > 3 for r in late)


def test_how_long_turns_of_draw_3_waited() -> None:
    page = section("Without time slices while the turns of all fit, measured")
    now, *before = (
        waits(arm) for arm in ("fill-twelve", "half-twelve", "slices-twelve", "along-twelve")
    )
    assert (
        f"turns wait for {now[0]} s in the router altogether, in place of {before[0][0]} "
        f"({before[1][0]} and {before[2][0]} in the runs before), but {now[1]} of the late ones "
        f"for more than 3 s where it was {before[0][1]} ({before[1][1]} and {before[2][1]})."
    ) in page


def test_four_rules_with_16_sessions(tmp_path: Path) -> None:
    page = section("Four rules with 16 sessions of draw 2")
    rules = [f"draw2-rules-{rule}-sixteen" for rule in ("thunder", "lease", "aimd", "cap")]
    states = [steadiness(run_of(arm, tmp_path / arm)).state for arm in rules]
    assert states == [State.NOT_SUSTAINED, *[State.STEADY] * 3]
    columns = [until(arm, 210) for arm in ("draw2-sixteen", *rules)]
    has_rows(page, columns, ("sessions that got an answer", "{sessions}"))
    priced, thunder, lease, aimd, cap = (column["good"] for column in columns)
    rates = f"{cap / 210:.3f}, {thunder / 210:.3f} and {priced / 210:.3f}"
    assert f"({rates}: {cap}, {thunder} and {priced} turns)" in page
    assert 1 - lease / priced == pytest.approx(0.25, abs=0.03)
    assert 1 - aimd / priced == pytest.approx(0.25, abs=0.03)
    longest_s = [round(max(column["waits_s"])) for column in columns]
    assert (
        f"waited {longest_s[0]} s with `priced`, {longest_s[2]} s with `lease`, {longest_s[4]} s "
        f"with `cap` and {longest_s[1]} s with `thunder`"
    ) in page
    window = phases(rules[0])
    end_s = window["window_start_s"] + 210
    waiting_s = [
        end_s - r["scheduled_s"]
        for r in lines(rules[0])
        if r["phase"] != "prime"
        and r["scheduled_s"] < end_s
        and (r["first_token_s"] is None or r["first_token_s"] > end_s)
    ]
    assert sum(wait_s > 210 for wait_s in waiting_s) == 8
