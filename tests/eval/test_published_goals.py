"""What docs/results/residency-goals.md says of each goal, and which runs it says there are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import numpy as np
import pytest

from eval.records import Run
from eval.rules_a_gpu import rule_row
from eval.run_lines import figures, read_rows, turns_of
from eval.sessions_a_gpu import row_of
from eval.stats import Estimate, interval
from eval.waits import waits
from tests.eval import published
from tests.eval.bf16 import measured, misses
from tests.eval.differences import (
    answers,
    by_draw,
    difference,
    longer,
    longest_s,
    over,
    points,
    times,
    tokens_per_s,
    told,
    within_s,
)
from tests.eval.published import RESULTS, lines, run_of
from tests.eval.test_published_lanes import THINKING_RUNS
from tests.eval.test_published_residency import completions_s, rate, share_and_rate
from tests.eval.test_sessions_a_gpu import ALWAYS, RUNS
from tests.eval.windows import missed, until

PAGE = (RESULTS / "residency-goals.md").read_text()
LINES = RESULTS / "residency" / "sessions-a-gpu.csv"
SIMULATED = RESULTS / "simulated"
OURS, VLLM = "sglang-fp8-host-paced-residency", "vllm-fp8-host-4096"
# SGLang as it comes with twelve sessions of draw 3, and ours without a tier: the form of the rule
# that the page is of, and the one before.
PLAIN = RUNS["sglang", 12, 3]
NOW, BEFORE = "again-residency", "backfill-residency"
TIER = RUNS["sglang-host-residency before slices", 12, 3]
TIER_NOW = [RUNS["sglang-host-residency", 12, draw][-1] for draw in (3, 2)]
BEFORE_VLLM = ("vllm", "vllm-residency", "vllm-host", "vllm-host-residency")
# Measured runs without a line in the tables of agents a GPU, by arm and sessions in flight: other
# forms of the rule and windows, other rules, and what was cut off.
OTHERS = {
    ("sglang", 2): ("two-off-1", "two-off-2", "two-off-3"),
    ("sglang", 3): ("sglang-three-cut-off",),
    ("sglang", 12): ("sglang",),
    ("sglang-residency", 2): ("two-residency",),
    ("sglang-residency", 12): ("sglang-residency", "sglang-residency-mended", BEFORE),
    ("sglang-paced-residency", 12): ("sglang-paced-residency-twelve-cut-off",),
    ("sglang-host-residency", 12): ("sglang-host-residency", "backfill-host-residency"),
    ("cap 3, bf16", 12): ("sglang-cap",),
    ("lease, bf16", 12): ("sglang-lease", "backfill-lease"),
    ("sglang-fp8-host-mixed", 10): ("draw4-mixed-ten-cut-off",),
    (OURS, 24): ("slices-twentyfour-cut-off",),
    (ALWAYS, 10): ("draw1-ten-again-cut-off",),
    ("cap 10", 16): ("rules-cap-sixteen", "draw2-rules-cap-sixteen"),
    ("aimd", 16): ("rules-aimd-sixteen", "draw2-rules-aimd-sixteen"),
    ("aimd", 24): ("rules-aimd-twentyfour-cut-off",),
    ("lease", 16): ("draw2-rules-lease-sixteen",),
    ("thunder", 16): ("draw2-rules-thunder-sixteen",),
    ("vllm", 12): ("engines-vllm-cut-off",),
    ("vllm-residency", 12): ("engines-vllm-residency",),
    ("vllm-fp8-host", 24): (
        "vllm-fp8-host-twentyfour-cut-off",
        "vllm-fp8-host-twentyfour-cut-off-again",
    ),
    (VLLM, 16): ("vllm-4096-sixteen-cut-off",),
    (f"{VLLM}-residency", 24): ("draw2-vllm-4096-residency-twentyfour-cut-off",),
}
THINKING_OTHERS = {
    ("vllm-residency", 12): ("vllm-residency-think-twelve-cut-off",),
    ("vllm-host", 12): ("vllm-host-think-twelve-cut-off",),
}
# Rows of the page's second table, with the arms of the runs in each.
CELLS = {
    "SGLang, bf16": ("sglang",),
    "SGLang, bf16, `lpm`": ("sglang-lpm",),
    "SGLang, bf16, residency": ("sglang-residency",),
    "SGLang, bf16, residency and paced": ("sglang-paced-residency",),
    "SGLang, bf16, tier": ("sglang-host",),
    "SGLang, bf16, tier and residency": (
        "sglang-host-residency",
        "sglang-host-residency before slices",
    ),
    "SGLang, bf16, `cap` 3": ("cap 3, bf16",),
    "SGLang, bf16, `lease`": ("lease, bf16",),
    "SGLang, FP8, with residency or not": (),
    "SGLang, FP8, tier": (),
    "the same in its own mixed chunks of 4,096": ("sglang-fp8-host-mixed",),
    "SGLang, FP8, tier and residency": (
        "sglang-fp8-host-residency",
        "sglang-fp8-host-residency before slices",
    ),
    "the same, paced": (OURS,),
    "the same, in time slices always": (ALWAYS,),
    "paced, `cap` 10": ("cap 10",),
    "paced, `aimd`": ("aimd",),
    "paced, `lease`": ("lease",),
    "paced, `thunder`": ("thunder",),
    "vLLM, bf16": ("vllm",),
    "vLLM, bf16, residency": ("vllm-residency",),
    "vLLM, bf16, tier": ("vllm-host",),
    "vLLM, bf16, tier and residency": ("vllm-host-residency",),
    "vLLM, FP8, with residency or not": (),
    "vLLM, FP8, tier": ("vllm-fp8-host",),
    "the same in chunks of 4,096": (VLLM,),
    "vLLM, FP8, tier and residency": ("vllm-fp8-host-residency",),
    "the same in chunks of 4,096, and residency": (f"{VLLM}-residency",),
}
Read = Callable[[str], Run]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Read:
    """A run by the name of its raw lines."""
    folder, known = tmp_path_factory.mktemp("runs"), dict[str, Run]()

    def read(name: str) -> Run:
        if name not in known:
            known[name] = run_of(name, folder / name)
        return known[name]

    return read


says = partial(published.says, PAGE)


def test_residency_alone(run: Read) -> None:
    plain = [run(name) for name in PLAIN]
    plain_rate = float(np.mean([rate(name) for name in PLAIN]))
    other = run("sglang")
    medians_s = [float(figures(each)["ttft_p50_s"]) for each in (*plain, run(NOW))]
    shares = [float(row_of(each, "", 12)["within_objective"]) for each in plain]
    turns = sum(len(turns_of(each)) for each in plain)
    now, before = (over(plain, [run(name)], "requests_per_s") for name in (NOW, BEFORE))
    share = over(plain, [run(NOW)], "attainment")
    first, mended = (
        over([other], [run(f"sglang-residency{form}")], "requests_per_s")
        for form in ("", "-mended")
    )
    assert shares == [0, 0, 0]
    says(
        f"{rate(NOW):.3f}, {times(now)}",
        f"{plain_rate:.3f} on average",
        f"{rate(BEFORE):.3f}, {times(before)}",
        f"{times(first)} and {times(mended)}",
        f"{medians_s[-1]:.2f} s (plain {min(medians_s[:-1]):.1f} to {max(medians_s[:-1]):.1f} s)",
        (
            f"{100 * share.value:.0f} % [{100 * share.low:.0f}–{100 * share.high:.0f}]; "
            f"plain none of {turns}"
        ),
    )


def test_what_is_known_of_how_long_sessions_take(run: Read) -> None:
    """A turn's part of a session's time, the slowest turns, and sessions to their end on a CPU."""
    plain_rate = float(np.mean([rate(name) for name in PLAIN]))
    slowest_s = [within_s(run(name), 0.9, whole=True) for name in (*PLAIN, NOW)]
    plain_s, now_s = slowest_s[:-1], slowest_s[-1]
    late, gap, slow = np.sum(
        [missed(r) for r in lines(NOW) if r["phase"] == "measure" and not r["error"]], axis=0
    )
    unanswered = sum(bool(r["error"]) for r in lines(NOW) if r["phase"] == "measure")
    says(
        f"{12 / rate(NOW):.1f} s with its wait and its thinking, plain {12 / plain_rate:.1f} s",
        f"{plain_rate / rate(NOW):.2f} × on average",
        f"takes {now_s:.0f} s or longer (plain {min(plain_s):.0f} to {max(plain_s):.0f} s)",
        f"{late} had a late first token, {gap} a gap over 1 s, {slow} over 50 ms a token",
        f"{unanswered} no answer when the run ended",
        *(
            f"{_completion_p90(f'laptop-{off}', f'laptop-{residency}')} {words}"
            for off, residency, words in (
                ("complete-sglang", "idle-sglang-residency", "with SGLang"),
                ("complete-sglang-host", "complete-sglang-host-residency", "with its tier"),
                ("idle-vllm", "idle-vllm-residency", "with vLLM"),
            )
        ),
    )


def _completion_p90(off: str, residency: str) -> str:
    """Of the same sessions, from when their first turn was due to the end of their last."""
    without, behind = completions_s(off), completions_s(residency)
    sessions = sorted(without)
    assert sessions == sorted(behind)
    assert len(sessions) == 22
    took_s = np.array([[of[name] for of in (without, behind)] for name in sessions])
    drawn = np.random.default_rng(0).integers(0, len(sessions), (1000, len(sessions)))
    value = np.quantile(took_s, 0.9, axis=0)
    resampled = np.quantile(took_s[drawn], 0.9, axis=1)
    ratios = resampled[:, 1] / resampled[:, 0]
    return times(interval(float(value[1] / value[0]), ratios, len(sessions)))


def test_residency_with_a_tier(run: Read) -> None:
    plain, tier = ([run(name) for name in of] for of in (PLAIN, TIER))
    rows = read_rows(SIMULATED / "sessions-a-gpu.csv")
    simulated = by_draw(rows, 12, "sglang", "sglang-host-residency")["requests_per_s"]
    now = [run(name) for name in TIER_NOW]
    without = [run(RUNS["sglang-host", 12, draw][-1]) for draw in (3, 2)]
    says(
        f"{rate(TIER_NOW[0]):.3f}, {times(over(plain, now[:1], 'requests_per_s'))}",
        f"draws 2 and 3, {times(over(without, now, 'requests_per_s'))}",
        f"{np.mean([rate(name) for name in TIER]):.3f} on average",
        f"{times(over(plain, tier, 'requests_per_s'))} (two runs",
        f"{times(over([run('tier-off')], tier, 'requests_per_s'))} that of plain with the tier",
        f"four draws: {times(simulated.effect)}",
    )


def test_residency_before_vllm(run: Read) -> None:
    """With bf16 KV, of draws 3 and 2, without a tier and with one."""

    def of(arm: str) -> list[Run]:
        return [run(RUNS[arm, 12, draw][-1]) for draw in (3, 2)]

    def by_run(base: str, arm: str, key: str) -> list[Estimate]:
        return [over([one], [two], key) for one, two in zip(of(base), of(arm), strict=True)]

    p90s_s = {arm: [within_s(each, 0.9) for each in of(arm)] for arm in BEFORE_VLLM}
    plain, alone, off, tier = (of(arm) for arm in BEFORE_VLLM)
    assert [row_of(each, "", 12)["within_objective"] for each in plain] == ["0.0000"] * 2
    assert p90s_s["vllm-residency"][0] == math.inf
    in_time = by_run("vllm", "vllm-residency", "attainment")
    shares = (
        f"{100 * each.value:.0f} % [{100 * each.low:.0f}–{100 * each.high:.0f}]" for each in in_time
    )
    more = (times(each) for each in by_run("vllm", "vllm-residency", "requests_per_s"))
    with_tier = (times(each) for each in by_run("vllm", "vllm-host-residency", "requests_per_s"))
    medians_s = (float(figures(each)["ttft_p50_s"]) for each in alone)
    one, two = p90s_s["vllm-host"], p90s_s["vllm-host-residency"]
    sglang = [run(name) for name in TIER_NOW]
    three = [within_s(each, 0.9) for each in sglang]
    says(
        f"requests/s [{' and '.join(more)}](residency-bf16.md)",
        "TTFT p50 {:.2f} and {:.2f} s; ".format(*medians_s) + " and ".join(shares) + " in time",
        "plain none of {} and none of {} |".format(*(len(turns_of(each)) for each in plain)),
        f"[{' and '.join(with_tier)}](residency-bf16.md)",
        f"requests/s [{times(over(plain, alone, 'requests_per_s'))}](residency-bf16.md), TTFT p90 "
        + "beyond the run for {:.0f} s and {:.1f} s for {:.0f} s: {:.2f} ×".format(
            p90s_s["vllm"][0],
            p90s_s["vllm-residency"][1],
            p90s_s["vllm"][1],
            p90s_s["vllm-residency"][1] / p90s_s["vllm"][1],
        ),
        f"requests/s [{times(over(off, tier, 'requests_per_s'))}](residency-bf16.md), TTFT p90 "
        f"{two[0]:.1f} s for {one[0]:.0f} s and {two[1]:.1f} s for {one[1]:.0f} s: "
        f"{two[0] / one[0]:.2f} and {two[1] / one[1]:.2f} ×",
        f"[{times(over(off, sglang, 'requests_per_s'))}]"
        "(residency-bf16.md#sglang-with-a-host-tier), "
        f"TTFT p90 {three[0]:.1f} s for {one[0]:.0f} s and {three[1]:.1f} s for {one[1]:.0f} s: "
        f"{three[0] / one[0]:.2f} and {three[1] / one[1]:.2f} ×",
    )


def test_paced_without_a_tier(run: Read) -> None:
    """Beside vLLM as it comes, and how many of its turns are in time."""
    vllm, paced = (
        [run(RUNS[arm, 12, draw][-1]) for draw in (3, 2)]
        for arm in ("vllm", "sglang-paced-residency")
    )
    shares = [
        over([theirs], [ours], "attainment") for theirs, ours in zip(vllm, paced, strict=True)
    ]
    assert [within_s(each, 0.9) for each in paced] == [math.inf] * 2
    turns = [turns_of(each) for each in paced]
    in_time = [round(share.value * len(each)) for share, each in zip(shares, turns, strict=True)]
    answered, late, gap, slow = misses(
        line for draw in (3, 2) for line in measured("sglang-paced-residency", draw)
    )
    every = sum(map(len, turns))
    assert (gap, late, slow) == (0, 3, 5)
    says(
        "draws 3 and 2, "
        + " and ".join(
            f"{100 * of.value:.0f} % [{100 * of.low:.0f}–{100 * of.high:.0f}]" for of in shares
        ),
        f"[{times(over(vllm, paced, 'requests_per_s'))}](residency-bf16.md#sglang-paced-without"
        "-a-tier), TTFT p90 beyond the run for {:.0f} s and {:.0f} s".format(
            *(within_s(each, 0.9) for each in vllm)
        ),
        f"of {every} turns of two draws {every - answered} had no answer when the run ended, three "
        f"a late first token, five over 50 ms a token, and {100 * sum(in_time) / every:.0f} % were",
    )


def test_a_minute_of_thinking(run: Read) -> None:
    def of(arm: str) -> list[Run]:
        return [run(THINKING_RUNS[arm, 12, draw][-1]) for draw in (3, 2)]

    def more(base: str, arm: str) -> str:
        return times(over(of(base), of(arm), "requests_per_s"))

    def p90_s(arm: str) -> list[float]:
        return [within_s(each, 0.9) for each in of(arm)]

    with_tier = ("sglang-host-residency", "vllm-host-residency")
    theirs = p90_s("vllm-host")
    ours = list(zip(*map(p90_s, with_tier), strict=True))
    waits = [
        "{:.1f} and {:.1f} s".format(*each) + f" for {base:.0f} s"
        for each, base in zip(ours, theirs, strict=True)
    ]
    shares = [
        " and ".join(f"{each / base:.2f}" for each in arms)
        for arms, base in zip(ours, theirs, strict=True)
    ]
    behind = ("sglang-residency", "vllm-residency")
    assert [*p90_s(behind[0]), *p90_s(behind[1])] == [math.inf] * 4
    says(
        f"draws 2 and 3, {more('sglang', 'sglang-host-residency')}, beside plain with the tier "
        f"{more('sglang-host', 'sglang-host-residency')}",
        f"both draws, {more('vllm', 'vllm-host-residency')} |",
        f"requests/s {more('vllm-host', with_tier[0])} with SGLang and "
        f"{more('vllm-host', with_tier[1])} with vLLM behind residency",
        f"TTFT p90 {' and '.join(waits)}: {', '.join(shares)} ×",
        f"None: requests/s {more('vllm', behind[0])} and {more('vllm', behind[1])}, TTFT p90 "
        "beyond the run",
    )


@pytest.mark.parametrize(
    ("base", "seconds", "arms"),
    [
        ("engines-vllm-cut-off", 169, (NOW, "engines-vllm-residency", BEFORE)),
        (
            "vllm-4096-sixteen-cut-off",
            115,
            ("price-sixteen", "vllm-4096-residency-sixteen", "rules-priced-sixteen"),
        ),
        (
            "vllm-fp8-host-twentyfour-cut-off-again",
            230,
            ("bound-twentyfour", "vllm-fp8-host-residency-twentyfour", "half-twentyfour"),
        ),
    ],
)
def test_beside_vllm_with_the_same_memory(
    base: str, seconds: int, arms: tuple[str, str, str], run: Read
) -> None:
    """In the seconds that vLLM's run, which was cut off, has lines for."""
    counts = [until(name, seconds)["answers"] for name in (base, *arms)]
    p90s_s = [float(np.quantile(until(name, seconds)["waits_s"], 0.9)) for name in (base, *arms)]
    ours, vllm, before = (times(answers(run(base), run(name), seconds)) for name in arms)
    vllm_s, *behind_s = p90s_s
    says(
        (
            f"{seconds} s: {counts[1]} answers for {counts[0]}, {ours}; vLLM behind residency "
            f"{counts[2]}, {vllm}; the form before {counts[3]}, {before}"
        ),
        (
            "first tokens p90 {:.1f}, {:.1f} and {:.1f} s for ".format(*behind_s)
            + f"{vllm_s:.1f} s: "
            + "{:.2f}, {:.2f} and {:.2f} ×".format(*(at / vllm_s for at in behind_s))
        ),
    )


@pytest.mark.parametrize("sessions", [10, 12])
def test_beside_vllm_over_draws(sessions: int) -> None:
    found = by_draw(read_rows(LINES), sessions, VLLM, OURS)
    assert {item.draws for item in found.values()} == {(1, 2, 3, 4)}
    shown = [difference(found[key]) for key in ("requests_per_s", "ttft_p90")]
    says("requests/s {}, TTFT p90 {}".format(*shown))


def test_what_overload_costs_in_tokens(run: Read) -> None:
    of_draw = {
        3: ("bound-twentyfour", "price-sixteen", "rules-priced-sixteen"),
        2: ("draw2-twentyfour", "draw2-sixteen"),
    }
    shares = {}
    for draw, names in of_draw.items():
        ours = [
            name
            for (arm, _, of), every in RUNS.items()
            if (arm, of) == (OURS, draw)
            for name in every
        ]
        best = max(ours, key=lambda name: tokens_per_s(run(name)))
        assert best == names[0]
        shares[draw] = [tokens_per_s(run(name)) / tokens_per_s(run(best)) for name in names[1:]]
    older = [
        tokens_per_s(run(name)) / tokens_per_s(run("bound-twentyfour"))
        for name in RUNS[OURS, 24, 3][:-1]
    ]
    twelve, two = (tokens_per_s(run(name)) for name in (NOW, "longer-residency"))
    tier, tier_before = ([tokens_per_s(run(name)) for name in of] for of in (TIER_NOW, TIER))
    says(
        "with 16: {:.2f} and {:.2f} of draw 3, ".format(*shares[3])
        + "{:.2f} of draw 2".format(*shares[2]),
        f"the best on both draws (forms before {min(older):.2f} to {max(older):.2f} of it)",
        f"{twelve:.0f} a second, {twelve / two:.2f} of the {two:.0f} with two",
        "With a tier {:.0f} and {:.0f} a second".format(*tier),
        "before time slices {:.0f} and {:.0f},".format(*tier_before),
    )


def test_what_overload_costs_in_waits(run: Read) -> None:
    sixteen = [longer(run(name), 120) for name in ("rules-priced-sixteen", "price-sixteen")]
    sixteen.append(longer(run("draw2-sixteen"), 120))
    newest = ("bound-twentyfour", "draw2-twentyfour")
    of_sixteen = [within_s(run(name), 0.99) for name in (*RUNS[OURS, 16, 3], *RUNS[OURS, 16, 2])]
    assert of_sixteen == [math.inf] * 3
    of_newest = [within_s(run(name), 0.99) for name in newest]
    assert of_newest[1] == math.inf
    came_before = [_waited_since_before(run(name), 300) for name in newest]
    p99s_s = [within_s(run(name), 0.99) for name in (NOW, BEFORE)]
    known = [longer(run(NOW), least_s) for least_s in (120, 300)]
    assert known[1][0] == 0
    simulated = waits(
        [
            row
            for row in read_rows(SIMULATED / "tail-others-waits.csv")
            if (row["arm"], row["sessions"]) == ("sglang-host-residency", "12")
        ],
        [0.99],
    )[0]
    tier = [longer(run(name), 120) for name in TIER]
    tier_now = [longer(run(name), 120) for name in TIER_NOW]
    assert [waited for waited, _ in tier_now] == [0, 0]
    before_now = [_waited_since_before(run(name), 120) for name in TIER_NOW]
    frontier: Mapping[str, list[float]] = {
        sessions: sorted(
            float(row["ttft_p99_s"])
            for row in read_rows(SIMULATED / "residency-frontier.csv")
            if (row["variant"], row["sessions"]) == ("shown: now", sessions)
            and (row["max_think_s"], row["host_kv_tokens"]) == ("10.0", "0")
        )
        for sessions in ("7", "12")
    }
    says(
        "{} of {}, {} of {} and {} of {} turns".format(*(at for of in sixteen for at in of)),
        f"With 24 it is {of_newest[0]:.0f} s on draw 3 and beyond the run on draw 2",
        "{} and {} turns had waited for longer than 300 s".format(*came_before),
        "p99 {:.0f} s (the form before {:.0f} s)".format(*p99s_s),
        f"{known[0][0]} of {known[0][1]} waited for longer than 120 s, none was seen",
        f"with the tier p99 {simulated:.0f} s",
        "{} of {} and {} of {} for longer than 120 s".format(*(at for of in tier for at in of)),
        f"none of {sum(turns for _, turns in tier_now)} turns that came in windows of three",
        "before them {} and {} had".format(*before_now),
        *(
            f"{words} {min(p99s):.0f} to {max(p99s):.0f} s"
            for words, p99s in (("seven", frontier["7"]), ("twelve", frontier["12"]))
        ),
    )


def _waited_since_before(run: Run, seconds: float) -> int:
    """Turns due before a window that were there in it, and waited longer as far as was seen."""
    start_s, _ = run.span_s
    every = run.all_requests
    there = every[every["phase"].ne("prime") & every["scheduled_s"].lt(start_s)]
    there = there[there["ok"] | there["failed"]]
    waited_s = there["first_token_s"].fillna(there["finished_s"]) - there["scheduled_s"]
    return int(waited_s.gt(seconds).sum())


def test_the_rules_beside_ours(run: Read) -> None:
    for theirs, ours in (
        ("rules-cap-sixteen", "rules-priced-sixteen"),
        ("draw2-rules-cap-sixteen", "draw2-sixteen"),
        ("draw2-rules-lease-sixteen", "draw2-sixteen"),
        ("backfill-lease", BEFORE),
        ("backfill-lease", NOW),
        ("sglang-lease", "sglang-residency-mended"),
    ):
        base, arm = run(theirs), run(ours)
        waits_s = [longest_s(each) for each in (arm, base)]
        says(
            f"{times(over([base], [arm], 'requests_per_s'))}, {{:.0f}} s for {{:.0f}} s".format(
                *waits_s
            )
        )
    rows = read_rows(SIMULATED / "rules.csv")
    longest = {
        arm: np.mean(
            [float(r["longest_wait_s"]) for r in rows if (r["arm"], r["sessions"]) == (arm, "16")]
        )
        for arm in ("priced", "cap", "lease")
    }
    says("{priced:.0f} s, `cap` {cap:.0f} s, `lease` {lease:.0f} s".format(**longest))


def test_where_everything_fits(run: Read) -> None:
    """Two sessions, and eight before FP8 KV and a tier, simulated."""
    for off, ours in (
        (RUNS["sglang", 2, 3], RUNS["sglang-residency", 2, 3]),
        (OTHERS["sglang", 2], OTHERS["sglang-residency", 2]),
    ):
        plain, residency = ([run(name) for name in of] for of in (off, ours))
        says(f"requests/s {told(over(plain, residency, 'requests_per_s'))}")
        if off == RUNS["sglang", 2, 3]:
            found = {
                key: over(plain, residency, key)
                for key in ("throughput_output_tps", "attainment", "ttft_p50", "ttft_p90")
            }
            says(
                f"output tokens/s {told(found['throughput_output_tps'])}",
                f"turns in time {points(found['attainment'])}",
                f"TTFT p50 {told(found['ttft_p50'])}",
                f"p90 {told(found['ttft_p90'])}",
            )
    rows = read_rows(SIMULATED / "rules.csv")
    found = by_draw(rows, 8, "off", "priced")
    says(
        f"requests/s {difference(found['requests_per_s'])}",
        f"turns in time {difference(found['attainment'])}",
        f"TTFT p50 {difference(found['ttft_p50'])}, p90 {difference(found['ttft_p90'])}",
    )


def _levels(runs: Iterable[tuple[int, str]]) -> str:
    """How many runs there are by sessions in flight, and how many of them were cut off."""
    by_level: dict[int, list[str]] = {}
    for sessions, name in runs:
        by_level.setdefault(sessions, []).append(name)
    cells = []
    for sessions, names in sorted(by_level.items()):
        cut = sum("cut-off" in name for name in names)
        parts = [f"{len(names) - cut}"] if cut < len(names) else []
        parts += [f"{cut} cut off"] if cut else []
        cells.append(f"{sessions} ({' and '.join(parts)})")
    return ", ".join(cells) or "not measured"


def _measured() -> list[tuple[str, int, bool, str]]:
    """Each measured run: its arm, sessions in flight, whether they think for a minute, its name."""
    found = [(arm, n, False, name) for (arm, n, _), names in RUNS.items() for name in names]
    found += [
        (arm, n, True, name) for (arm, n, _), names in THINKING_RUNS.items() for name in names
    ]
    for others, minute in ((OTHERS, False), (THINKING_OTHERS, True)):
        found += [(arm, n, minute, name) for (arm, n), names in others.items() for name in names]
    return found


def test_every_measured_run_is_counted_once() -> None:
    names = [name for *_, name in _measured()]
    kept = (RESULTS / "residency").glob("*.requests.jsonl.zst")
    there = {path.name.removesuffix(".requests.jsonl.zst") for path in kept}
    assert sorted(names) == sorted(name for name in there if not name.startswith("laptop-"))
    assert {arm for arm, *_ in _measured()} == {arm for arms in CELLS.values() for arm in arms}


@pytest.mark.parametrize("label", CELLS)
def test_which_cells_were_measured(label: str) -> None:
    of = [each for each in _measured() if each[0] in CELLS[label]]
    short, long = (
        _levels((sessions, name) for _, sessions, minute, name in of if minute is at)
        for at in (False, True)
    )
    says(f"| {label} | {short} | {long} |")


def test_the_reasons(run: Read) -> None:
    """What the page says of why goals were missed, of measured runs."""
    twelve = [
        [share_and_rate(RUNS[arm, 12, draw][-1]) for draw in range(1, 5)] for arm in (OURS, VLLM)
    ]
    ours = sorted(share for share, _ in twelve[0])
    more_share, more_rate = (np.array(twelve[0]) - np.array(twelve[1])).T
    assert ((more_share > 10).sum(), (more_rate > 0).sum()) == (2, 2)
    fifth_s = 0.2 * float(np.quantile(until("engines-vllm-cut-off", 169)["waits_s"], 0.9))
    vllm = until("vllm-4096-sixteen-cut-off", 115)
    served = [rule_row(run(name), "", 16) for name in ("rules-cap-sixteen", "rules-priced-sixteen")]
    both = [tuple(int(of[f"sessions_{at}"]) for at in ("answered", "there")) for of in served]
    of_draw_2 = [
        until(name, 210)["sessions"]
        for name in ("draw2-rules-cap-sixteen", "draw2-rules-lease-sixteen", "draw2-sixteen")
    ]
    tokens = [
        float(turns_of(run(name))["prompt_tokens"].mean())
        for name in ("bound-twentyfour", "price-sixteen", "draw2-twentyfour", "draw2-sixteen")
    ]
    one_waits_s = longest_s(run("longer-residency"))
    stopped_s = sorted(turns_of(run("longer-residency"))["worst_gap_s"].dropna())[-2:]
    good = sum(
        not r["error"] and not any(missed(r))
        for r in lines("longer-residency")
        if r["phase"] == "measure"
    )
    turns = [len(turns_of(run(name))) for name in ("longer-off-1", "longer-residency")]
    assert (turns, turns[1] - good) == ([38, 37], 3)
    says(
        f"in time in [{ours[0]:.0f} to {ours[-1]:.0f} %]",
        f"A fifth of vLLM's p90 is {fifth_s:.0f} s",
        f"vLLM still found [{100 * vllm['cached']:.0f} % in its tier]",
        "[{} of {} sessions answered, ours {} of {}]".format(*(at for of in both for at in of)),
        "[{} and {}, ours {}]".format(*of_draw_2),
        (
            "{:,.0f} tokens on average for {:,.0f} with 16 of draw 3, {:,.0f} for {:,.0f} of draw 2"
        ).format(*(round(of, -3) for of in tokens)),
        f"[one turn waits for {one_waits_s:.0f} s]",
        "answers for {1:.1f} and {0:.1f} s".format(*stopped_s),
        "one answer of 38 fewer, three turns of 37 not in time",
    )


def test_the_simulated_reasons() -> None:
    rows = read_rows(SIMULATED / "sessions-a-gpu.csv")
    two = by_draw(rows, 2, "sglang", "sglang-residency")["requests_per_s"]
    bounds = [
        [row for row in read_rows(SIMULATED / f"{name}.csv") if row["sessions"] == "16"]
        for name in ("rules", "rules-bound")
    ]
    usual, shorter = (
        [
            np.mean([float(row[column]) for row in of if row["arm"] == arm])
            for column in ("longest_wait_s", "good_per_s")
        ]
        for of, arm in zip(bounds, ("priced", "fills-0"), strict=True)
    )
    long = [
        [
            row
            for row in read_rows(SIMULATED / "tail-waits.csv")
            if (row["arm"], row["sessions"]) == ("priced", sessions)
        ]
        for sessions in ("16", "24")
    ]
    p95s_s, p99s_s = zip(*(waits(of, (0.95, 0.99)) for of in long), strict=True)
    says(
        "within {:.0f} and {:.0f} s (simulated)".format(*p95s_s),
        "{:.0f} and {:.0f} s |".format(*p99s_s),
        f"requests/s {told(two.effect)} with two",
        f"[{shorter[0]:.0f} s](simulated-rules.md#with-a-bound-that-is-longer-than-a-time-slice) "
        f"at {100 - 100 * shorter[1] / usual[1]:.0f} % fewer turns in time",
    )
