"""What docs/results/residency-bf16.md says of bf16 KV: vLLM, SGLang with a host tier, and sessions
that think for up to a minute."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval.beside import at_work
from eval.calibrate import read_steps
from eval.records import Run
from eval.run_lines import read_rows
from eval.spans import covered_s
from eval.stats import Estimate
from eval.steady import State, steadiness
from tests.eval import published
from tests.eval.differences import longer, longest_s, over, times, within_s
from tests.eval.published import RESULTS, decisions, lines, phases, run_of
from tests.eval.test_published_lanes import MEASURED, THINKING_RUNS
from tests.eval.test_published_lanes import THINKING as THINKING_LINES
from tests.eval.test_published_residency import rate, share_and_rate
from tests.eval.test_sessions_a_gpu import RUNS
from tests.eval.windows import between, missed, until, worst_gap_s

PAGE = (RESULTS / "residency-bf16.md").read_text()
DRAWS = (2, 3)
ARMS = ("vllm", "vllm-residency", "vllm-host", "vllm-host-residency")
BEHIND = [arm for arm in ARMS if arm.endswith("residency")]
TIER = ("sglang-host", "sglang-host-residency")
MINUTE = ", a minute of thinking"
THINKING = (f"sglang{MINUTE}", f"sglang-residency{MINUTE}")
TIER_THINKING = (f"sglang-host-residency{MINUTE}", 3)
Runs = dict[tuple[str, int], Run]
says = partial(published.says, PAGE)


def name(arm: str, draw: int) -> str:
    of = THINKING_RUNS if arm.endswith(MINUTE) else RUNS
    return of[arm.removesuffix(MINUTE), 12, draw][-1]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """All but those that were cut off, by arm and draw."""
    folder = tmp_path_factory.mktemp("runs")
    every = [(arm, draw) for arm in (*ARMS, *TIER, *THINKING) for draw in DRAWS]
    return {of: run_of(name(*of), folder / name(*of)) for of in (*every, TIER_THINKING)}


def both(runs: Runs, base: str, arm: str, key: str) -> Estimate:
    """An arm over another, over both draws."""
    return over(*([runs[of, draw] for draw in DRAWS] for of in (base, arm)), key)


def early(line: dict[str, Any]) -> bool:
    return not line["error"] and line["first_token_s"] - line["scheduled_s"] <= 10


def measured(arm: str, draw: int) -> list[dict[str, Any]]:
    return [line for line in lines(name(arm, draw)) if line["phase"] == "measure"]


def test_which_runs_are_steady(runs: Runs) -> None:
    judged = (*BEHIND, TIER[1], TIER_THINKING[0])
    for (arm, _), run in runs.items():
        expected = State.STEADY if arm in judged else State.NOT_ASSESSED
        assert steadiness(run).state is expected


def test_what_residency_and_a_tier_are_worth(runs: Runs) -> None:
    def more(base: str, arm: str) -> str:
        return times(both(runs, base, arm, "requests_per_s"))

    brings = [
        rate(name("vllm-host-residency", draw)) / rate(name("vllm-residency", draw))
        for draw in DRAWS
    ]
    without = [(arm, draw) for arm in ARMS if arm not in BEHIND for draw in DRAWS]
    halves_s = [within_s(runs[of], 0.5) for of in without]
    assert not any(early(line) for of in without for line in measured(*of))
    says(
        f"{more('vllm', 'vllm-residency')} requests/s without a tier",
        f"{more('vllm-host', 'vllm-host-residency')} with one",
        f"{more('vllm', 'vllm-host')} of vLLM's requests/s without one",
        "brings {:.2f} and {:.2f} times the requests/s of no tier".format(*brings),
        f"Of {sum(len(measured(*of)) for of in without)} turns without residency none had",
        f"half of them waited for {int(min(halves_s))} to {max(halves_s):.0f} s",
    )


def test_what_twelve_sessions_want() -> None:
    wanted = []
    for draw in DRAWS:
        arm = name("vllm-host", draw)
        start_s = phases(arm)["window_start_s"]
        before = [
            line
            for line in lines(arm)
            if line["phase"] != "prime" and line["scheduled_s"] < start_s
        ]
        last = {
            line["session_id"]: line["input_length"]
            for line in sorted(before, key=lambda line: line["scheduled_s"])
        }
        wanted.append(12 * float(np.mean(list(last.values()))) / 1e6)
    says("have {:.2f} million (draw 2) and {:.2f} million,".format(*wanted))


def test_why_more_are_in_time_than_with_sglang() -> None:
    late, gap, _ = np.sum(
        [
            missed(line)
            for draw in DRAWS
            for line in measured("vllm-residency", draw)
            if not line["error"]
        ],
        axis=0,
    )
    turns = [line for draw in DRAWS for line in measured("vllm-residency", draw)]
    answered = sum(not line["error"] for line in turns)
    sglang = [
        missed(line)
        for line in lines("again-residency")
        if line["phase"] == "measure" and not line["error"]
    ]
    assert (late, gap, len(turns) - answered) == (4, 3, 8)
    says(
        f"of {answered} answered turns three have a gap over 1 s where SGLang's had "
        f"{sum(of[1] for of in sglang)} of {len(sglang)}",
        "Late first tokens are four, and eight turns had no answer",
    )


def test_for_how_long_turns_wait(runs: Runs) -> None:
    without, tier = (
        [longer(runs[arm, draw], 120) for draw in DRAWS]
        for arm in ("vllm-residency", "vllm-host-residency")
    )
    assert sum(waited for waited, _ in without) == 3
    assert sum(waited for waited, _ in tier) == 0
    longest = [max(longest_s(runs[arm, draw]) for draw in DRAWS) for arm in BEHIND]
    says(
        f"three of {sum(turns for _, turns in without)} turns waited for longer than 120 s, "
        f"the longest in sight for {longest[0]:.0f} s",
        f"up to {longest[1]:.0f} s among those that came before",
    )


def test_the_run_that_was_cut_off() -> None:
    found = until("vllm-residency-think-twelve-cut-off", 89)
    late_s = sorted(found["waits_s"])[-2:]
    assert (found["answers"], found["firsts"], found["early"]) == (10, 9, 7)
    says(
        f"ten answers in 89 s, {100 * found['cached']:.0f} % of their prompt tokens",
        "after {:.0f} and {:.0f} s".format(*late_s),
    )


@pytest.mark.parametrize(
    ("label", "lines_of", "arm"),
    [
        ("vLLM", MEASURED, "vllm"),
        ("vLLM, a tier of 60 GB", MEASURED, "vllm-host"),
        ("SGLang", MEASURED, "sglang"),
        ("SGLang, a tier of 60 GB", MEASURED, "sglang-host"),
        ("SGLang, think times of up to a minute", THINKING_LINES, "sglang"),
        ("the same with the tier", THINKING_LINES, "sglang-host"),
    ],
)
def test_the_first_table(label: str, lines_of: Path, arm: str) -> None:
    newest = {
        (row["arm"], row["draw"]): f"{float(row['requests_per_s']):.3f}; "
        f"{100 * float(row['within_objective']):.0f} %"
        for row in read_rows(lines_of)
        if row["sessions"] == "12"
    }
    cells = [newest.get((of, draw), "") for draw in "23" for of in (arm, f"{arm}-residency")]
    says(" | ".join(["", label, *cells, ""]).strip().replace("|  |", "| |").replace("|  |", "| |"))


def test_sglang_with_a_tier(runs: Runs) -> None:
    off, behind = TIER
    without = [line for draw in DRAWS for line in measured(off, draw)]
    assert not any(early(line) for line in without)
    p90s_s = {arm: [within_s(runs[arm, draw], 0.9) for draw in DRAWS] for arm in (*TIER, ARMS[2])}
    beside = [ours / vllm for ours, vllm in zip(p90s_s[behind], p90s_s[ARMS[2]], strict=True)]
    before = [share_and_rate(of) for of in RUNS["sglang-host-residency before slices", 12, 3]]
    share, of_now = share_and_rate(name(behind, 3))
    medians_s = [
        float(row["ttft_p50_s"])
        for row in read_rows(MEASURED)
        if row["arm"].startswith(behind) and (row["sessions"], row["draw"]) == ("12", "3")
    ]
    says(
        f"**{times(both(runs, off, behind, 'requests_per_s'))} the requests/s, and two turns",
        f"Of {len(without)} turns without residency none had",
        "first token within {:.0f} and {:.0f} s behind it, ".format(*p90s_s[behind])
        + "within {:.0f} and {:.0f} s without".format(*p90s_s[off]),
        "had {:.3f} and {:.3f} requests/s ".format(*(rate for _, rate in before))
        + "with {:.0f} and {:.0f} % in time".format(*(share for share, _ in before)),
        "TTFT p50 {1:.1f} and {2:.1f} s; now {3:.3f}, {4:.0f} % and {0:.2f} s.".format(
            *medians_s, of_now, share
        ),
        f"residency**: {times(both(runs, 'vllm-host', behind, 'requests_per_s'))} its requests/s",
        "within {:.2f} and {:.2f} times its time".format(*beside),
    )


def test_which_engine_is_behind_residency(runs: Runs) -> None:
    ours, vllm = TIER[1], BEHIND[1]
    more = both(runs, vllm, ours, "requests_per_s")
    in_time = both(runs, vllm, ours, "attainment")
    counts = {}
    for arm in (ours, vllm):
        answered = [line for d in DRAWS for line in measured(arm, d) if not line["error"]]
        counts[arm] = [len(answered), *np.sum([missed(line) for line in answered], axis=0)]
    assert (round(100 * in_time.value), counts[ours][2], counts[vllm][2]) == (-9, 9, 2)
    says(
        f"{times(more)} vLLM's requests/s and nine points fewer in time "
        f"(−{-100 * in_time.low:.0f} to +{100 * in_time.high:.0f})",
        f"Of its {counts[ours][0]} answered turns nine have a gap over 1 s, "
        f"of vLLM's {counts[vllm][0]} two; late first tokens are "
        f"{counts[ours][1]} and {counts[vllm][1]}",
    )


def test_a_minute_of_thinking(runs: Runs) -> None:
    off, behind = THINKING
    tier = runs[TIER_THINKING]
    shares = [round(share_and_rate(name(behind, draw))[0]) for draw in DRAWS]
    answered = {arm: [sessions(arm, draw) for draw in DRAWS] for arm in THINKING}
    assert answered == {off: [11, 13], behind: [5, 6]}
    waited, turns = np.sum([longer(runs[behind, draw], 120) for draw in DRAWS], axis=0)
    assert (waited, sessions(*TIER_THINKING), longer(tier, 120)) == (8, 12, (1, 47))
    given_up = [
        [e["reason"] for e in decisions(name(*of)) if e["event"] == "give_up"]
        for of in (TIER_THINKING, (behind, 3), (behind, 2))
    ]
    says(
        f"no more requests to answer**: {times(both(runs, off, behind, 'requests_per_s'))}",
        "{} and {} % in time where nobody was".format(*shares),
        f"eight of {turns} turns had waited for longer than 120 s",
        f"**With a tier it does**: {times(over([runs[off, 3]], [tier], 'requests_per_s'))}",
        f"{len(given_up[0])} were, {given_up[0].count('returns_late')} of them of sessions",
        f"without a tier {len(given_up[1])} and {len(given_up[2])}.",
    )


def test_how_much_work_the_engine_had() -> None:
    off, behind = THINKING
    worked = {of: at_work_percent(*of) for of in ((off, 2), (off, 3), (behind, 2), (behind, 3))}
    assert worked[off, 2] == worked[off, 3] == 100
    shares = f"{worked[behind, 2]} and {worked[behind, 3]} %"
    says(f"The engine had work for {shares} of the time, and all of it without residency")


def at_work_percent(arm: str, draw: int) -> int:
    """Of a run's window, by the steps of its worker and the router's clock."""
    run = name(arm, draw)
    sent_s = {line["request_id"]: line["sent_s"] for line in lines(run)}
    origin_s = min(
        event["ts_unix_s"] - sent_s[event["request_id"]]
        for event in decisions(run)
        if sent_s.get(event.get("request_id")) is not None
    )
    window = phases(run)
    start_s, end_s = (origin_s + window[f"window_{at}_s"] for at in ("start", "end"))
    spans = at_work(read_steps([RESULTS / "residency" / "beside-think.steps.jsonl.zst"]))
    return round(100 * covered_s(spans, start_s, end_s) / (end_s - start_s))


def test_giving_up_places_because_the_gpu_idles() -> None:
    rows = read_rows(RESULTS / "simulated" / "idle-think.csv")
    found = []
    for setting in ("0", "10"):
        of = [row for row in rows if row["arm"] == f"prefill_idle_recompute_s {setting}"]
        assert [row["draw"] for row in of] == list("1234")
        found.append(
            [
                np.mean([float(row[key]) for row in of])
                for key in ("requests_per_s", "within_objective")
            ]
        )
    (rate_now, share_now), (rate_then, share_then) = found
    says(
        f"{rate_then / rate_now:.2f} times the requests/s and {share_then / share_now:.2f} times",
        f"{rate_then:.3f} and {100 * share_then:.0f} % for {rate_now:.3f} and "
        f"{100 * share_now:.0f} %",
    )


def sessions(arm: str, draw: int) -> int:
    """That got an answer in the window."""
    window = phases(name(arm, draw))
    return int(
        between(name(arm, draw), window["window_start_s"], window["window_end_s"])["sessions"]
    )


def test_paced_without_a_tier() -> None:
    paced, unpaced = "sglang-paced-residency-twelve-cut-off", RUNS["sglang-residency", 12, 3][-1]
    found, other = (until(arm, 175) for arm in (paced, unpaced))
    gaps_s = {arm: worst_gaps_s(arm, 175) for arm in (paced, unpaced)}
    assert sum(gap_s > 1 for gap_s in gaps_s[unpaced]) == 9
    assert max(gaps_s[paced]) < 0.45
    assert found["firsts"] - found["good"] == 5 == sum(wait_s > 10 for wait_s in found["waits_s"])
    says(
        f"{found['answers']} answers in 175 s and no gap over 0.45 s",
        f"{found['good']} of {found['firsts']} first tokens that came",
        f"{other['answers']} answers in the same seconds, nine of them with a gap over 1 s "
        f"(of up to {max(gaps_s[unpaced]):.1f} s), and {other['good']} of {other['firsts']}",
        f"for up to {max(found['waits_s']):.0f} s",
    )


def worst_gaps_s(arm: str, seconds: float) -> list[float]:
    """Of each answer that ended in the first seconds of the window."""
    start_s = phases(arm)["window_start_s"]
    return [
        worst_gap_s(line)
        for line in lines(arm)
        if line["phase"] != "prime"
        and not line["error"]
        and start_s <= line["finished_s"] < start_s + seconds
    ]
