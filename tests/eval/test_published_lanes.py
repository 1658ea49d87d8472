"""What docs/results/residency-draws.md says of the runs on four GPUs side by side: SGLang's mixed
chunks with twelve sessions, no time slices while the turns of all fit, and four rules."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from eval.by_draw import over_draws, table
from eval.formatting import effect, effect_interval
from eval.run_lines import read_rows
from eval.sessions_a_gpu import row_of
from eval.steady import State, steadiness
from tests.eval.published import RESULTS, decisions, lines, phases, run_of
from tests.eval.test_published_residency import share_and_rate, wanted_share
from tests.eval.windows import has_rows, missed, until

PAGE = (RESULTS / "residency-draws.md").read_text()
MEASURED = RESULTS / "residency" / "sessions-a-gpu.csv"
THINKING = RESULTS / "residency" / "sessions-a-gpu-think.csv"
OURS, FILL = "sglang-fp8-host-paced-residency", "sglang-fp8-host-paced-residency-fill"
MIXED, VLLM = "sglang-fp8-host-mixed", "vllm-fp8-host-4096"
# Raw lines of runs with think times of up to a minute, by arm, sessions in flight and draw.
THINKING_RUNS = {
    (OURS, 12, 3): ("think-twelve",),
    (OURS, 16, 3): ("think-sixteen", "think-sixteen-again"),
    (OURS, 16, 2): ("draw2-think-sixteen",),
    (FILL, 16, 3): ("fill-think-sixteen",),
    (FILL, 16, 2): ("draw2-fill-think-sixteen",),
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
    start = PAGE.index(f"## {title}")
    return PAGE[start : PAGE.index("\n## ", start + 1)]


@pytest.mark.parametrize("label", TWELVE)
def test_twelve_sessions_of_four_draws(label: str) -> None:
    found = [share_and_rate(arm) for arm in TWELVE[label]]
    cells = [f"{share:.0f} %; {of:.3f}" for share, of in found]
    share, of = (statistics.fmean(column) for column in zip(*found, strict=True))
    good = statistics.fmean(share * of / 100 for share, of in found)
    cells.append(f"{share:.0f} %; {of:.3f}; {good:.3f}")
    page = section("SGLang's mixed chunks with twelve sessions of the other draws, and with eight")
    assert f"| {label} | {' | '.join(cells)} |" in page


@pytest.mark.parametrize(("base", "arm"), [(MIXED, OURS), (VLLM, MIXED)])
def test_which_differences_over_draws_are_told_apart(base: str, arm: str) -> None:
    page = section("SGLang's mixed chunks with twelve sessions of the other draws, and with eight")
    found = table(over_draws(read_rows(MEASURED), 12, base, [arm]), base)
    assert "\n".join(found) in page


def test_the_lines_with_a_minute_of_thinking_follow_from_their_raw_lines(tmp_path: Path) -> None:
    expected = [
        {**row_of(run_of(name, tmp_path / name), arm, sessions), "draw": str(draw)}
        for (arm, sessions, draw), names in THINKING_RUNS.items()
        for name in names
    ]
    assert read_rows(THINKING) == expected


@pytest.mark.parametrize(
    ("label", "pairs", "sessions", "wanted"),
    [
        (
            "16, think ≤ 60 s",
            (
                ("draw2-think-sixteen", "draw2-fill-think-sixteen"),
                ("think-sixteen-again", "fill-think-sixteen"),
            ),
            16,
            "|  | 0.87 | 0.70 |",
        ),
        (
            "twelve, think ≤ 10 s",
            (
                ("draw1-twelve", "draw1-fill-twelve"),
                ("draw2-twelve-again", "draw2-fill-twelve"),
                ("half-twelve", "fill-twelve"),
            ),
            12,
            "| 0.77 | 0.88 | 0.94 |",
        ),
    ],
)
def test_without_time_slices_while_the_turns_of_all_fit(
    label: str, pairs: tuple[tuple[str, str], ...], sessions: int, wanted: str
) -> None:
    page = section("Without time slices while the turns of all fit, measured")
    cells = [] if len(pairs) == 3 else [""]
    for pair in pairs:
        before, after = (share_and_rate(arm) for arm in pair)
        cells.append(
            f"{before[0]:.0f} → {after[0]:.0f} %; {before[1]:.3f} → {after[1]:.3f}; "
            f"{before[0] * before[1] / 100:.3f} → {after[0] * after[1] / 100:.3f}"
        )
    row = " | ".join(["", label, *cells, ""]).replace("|  |", "| |").strip()
    shares = [wanted_share(before, sessions) for before, _ in pairs]
    found = " | ".join([*([""] if len(pairs) == 2 else []), *(f"{of:.2f}" for of in shares)])
    assert f"| {found} |" == wanted
    assert f"{row}\n| wanted of the KV {wanted.replace('|  |', '| |')}" in page


def test_what_is_said_of_the_differences_without_time_slices() -> None:
    page = section("Without time slices while the turns of all fit, measured")
    found = {item.measure.key: item for item in over_draws(read_rows(MEASURED), 12, OURS, [FILL])}
    share, of = (
        f"{effect(item.measure, item.effect.value)} [{effect_interval(item.measure, item.effect)}]"
        for item in (found["attainment"], found["requests_per_s"])
    )
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
