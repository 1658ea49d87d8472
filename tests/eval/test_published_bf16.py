"""What docs/results/residency-bf16.md says of bf16 KV with think times of up to 10 s: vLLM, and
SGLang with a host tier and with paced prefill."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval.run_lines import read_rows
from eval.steady import State, steadiness
from tests.eval.bf16 import (
    DRAWS,
    Runs,
    both,
    early,
    in_time,
    measured,
    misses,
    more,
    name,
    read,
    says,
)
from tests.eval.differences import longer, longest_s, over, points, times, within_s
from tests.eval.published import lines, phases, run_of
from tests.eval.test_published_lanes import MEASURED
from tests.eval.test_published_lanes import THINKING as THINKING_LINES
from tests.eval.test_published_residency import rate, share_and_rate
from tests.eval.test_sessions_a_gpu import RUNS
from tests.eval.windows import ended, until, worst_gap_s

ARMS = ("vllm", "vllm-residency", "vllm-host", "vllm-host-residency")
BEHIND = [arm for arm in ARMS if arm.endswith("residency")]
TIER = ("sglang-host", "sglang-host-residency")
PACED = "sglang-paced-residency"
UNPACED_OF = ("sglang-residency", 3)
UNPACED = name(*UNPACED_OF)
CUT_OFF = "sglang-paced-residency-twelve-cut-off"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return read((*ARMS, *TIER, PACED), tmp_path_factory.mktemp("runs"))


def test_which_runs_are_steady(runs: Runs) -> None:
    for (arm, _), run in runs.items():
        expected = State.STEADY if arm.endswith("residency") else State.NOT_ASSESSED
        assert steadiness(run).state is expected


def test_what_residency_and_a_tier_are_worth(runs: Runs) -> None:
    brings = [
        rate(name("vllm-host-residency", draw)) / rate(name("vllm-residency", draw))
        for draw in DRAWS
    ]
    without = [(arm, draw) for arm in ARMS if arm not in BEHIND for draw in DRAWS]
    halves_s = [within_s(runs[of], 0.5) for of in without]
    assert not any(early(line) for of in without for line in measured(*of))
    says(
        f"{more(runs, 'vllm', 'vllm-residency')} requests/s without a tier",
        f"{more(runs, 'vllm-host', 'vllm-host-residency')} with one",
        f"{more(runs, 'vllm', 'vllm-host')} of vLLM's requests/s without one",
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
    turns = [line for draw in DRAWS for line in measured("vllm-residency", draw)]
    answered, late, gap, _ = misses(turns)
    sglang, _, gaps, _ = misses(measured(*UNPACED_OF))
    assert (late, gap, len(turns) - answered) == (4, 3, 8)
    says(
        f"of {answered} answered turns three have a gap over 1 s where SGLang's had "
        f"{gaps} of {sglang}",
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


@pytest.mark.parametrize(
    ("label", "lines_of", "arms"),
    [
        ("vLLM", MEASURED, ("vllm", "vllm-residency")),
        ("vLLM, a tier of 60 GB", MEASURED, ("vllm-host", "vllm-host-residency")),
        ("SGLang", MEASURED, ("sglang", "sglang-residency")),
        ("SGLang, paced", MEASURED, ("", PACED)),
        ("SGLang, a tier of 60 GB", MEASURED, TIER),
        ("vLLM, think times of up to a minute", THINKING_LINES, ("vllm", "vllm-residency")),
        ("SGLang, think times of up to a minute", THINKING_LINES, ("sglang", "sglang-residency")),
        ("the same with the tier", THINKING_LINES, TIER),
    ],
)
def test_the_first_table(label: str, lines_of: Path, arms: tuple[str, str]) -> None:
    newest = {
        (row["arm"], row["draw"]): f"{float(row['requests_per_s']):.3f}; "
        f"{100 * float(row['within_objective']):.0f} %"
        for row in read_rows(lines_of)
        if row["sessions"] == "12"
    }
    cells = [newest.get((arm, draw), "") for draw in "23" for arm in arms]
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
        f"**{more(runs, off, behind)} the requests/s, and two turns",
        f"Of {len(without)} turns without residency none had",
        "first token within {:.0f} and {:.0f} s behind it, ".format(*p90s_s[behind])
        + "within {:.0f} and {:.0f} s without".format(*p90s_s[off]),
        "had {:.3f} and {:.3f} requests/s ".format(*(rate for _, rate in before))
        + "with {:.0f} and {:.0f} % in time".format(*(share for share, _ in before)),
        "TTFT p50 {1:.1f} and {2:.1f} s; now {3:.3f}, {4:.0f} % and {0:.2f} s.".format(
            *medians_s, of_now, share
        ),
        f"residency**: {more(runs, 'vllm-host', behind)} its requests/s",
        "within {:.2f} and {:.2f} times its time".format(*beside),
    )


def test_which_engine_is_behind_residency(runs: Runs) -> None:
    ours, vllm = TIER[1], BEHIND[1]
    share = both(runs, vllm, ours, "attainment")
    counts = {
        arm: misses(line for draw in DRAWS for line in measured(arm, draw)) for arm in (ours, vllm)
    }
    assert (round(100 * share.value), counts[ours][2], counts[vllm][2]) == (-9, 9, 2)
    says(
        f"{more(runs, vllm, ours)} vLLM's requests/s and nine points fewer in time "
        f"(−{-100 * share.low:.0f} to +{100 * share.high:.0f})",
        f"Of its {counts[ours][0]} answered turns nine have a gap over 1 s, "
        f"of vLLM's {counts[vllm][0]} two; late first tokens are "
        f"{counts[ours][1]} and {counts[vllm][1]}",
    )


def test_paced_without_a_tier(runs: Runs, tmp_path: Path) -> None:
    turns = [line for draw in DRAWS for line in measured(PACED, draw)]
    answered, late, gap, slow = misses(turns)
    assert (len(turns) - answered, late, gap, slow) == (11, 3, 0, 5)
    good = [share_and_rate(name(PACED, draw))[0] / 100 for draw in DRAWS]
    counts = [len(measured(PACED, draw)) for draw in DRAWS]
    served = sum(round(share * count) for share, count in zip(good, counts, strict=True))
    assert len(turns) - served == 11 + 3 + 5  # no turn missed the objective twice
    unpaced = run_of(UNPACED, tmp_path / UNPACED)
    plain = [run_of(of, tmp_path / of) for of in RUNS["sglang", 12, 3]]
    ours = [runs[PACED, 3]]
    of_unpaced, _, gaps, _ = misses(measured(*UNPACED_OF))
    assert points(over([unpaced], ours, "attainment")) == "+11 points [−9 to +24]"
    assert in_time(runs, "vllm-residency", PACED) == "−9 points [−28 to +4]"
    says(
        f"The longest gap in these {answered} answers is {max(gaps_s(turns)):.2f} s.",
        f"{gaps} of {of_unpaced} have one over 1 s, of up to "
        f"{max(gaps_s(measured(*UNPACED_OF))):.1f} s, "
        f"and {share_and_rate(UNPACED)[0]:.0f} % of turns are in time",
        f"paced {times(over([unpaced], ours, 'requests_per_s'))} the requests/s and eleven points",
        f"of the {len(turns) - served} turns not in time eleven had no answer",
        f"So {100 * served / len(turns):.0f} % of {len(turns)} turns are in time",
        f"three runs) {times(over(plain, ours, 'requests_per_s'))} the requests/s; "
        f"beside vLLM as it comes {more(runs, 'vllm', PACED)} over both draws, "
        f"and {more(runs, 'vllm-residency', PACED)} those of vLLM behind residency",
    )


def test_the_paced_run_that_was_cut_off() -> None:
    found, other = (until(arm, 175) for arm in (CUT_OFF, UNPACED))
    starts_s = {arm: phases(arm)["window_start_s"] for arm in (CUT_OFF, UNPACED)}
    worst_s = {arm: gaps_s(ended(arm, at_s, at_s + 175)) for arm, at_s in starts_s.items()}
    assert sum(gap_s > 1 for gap_s in worst_s[UNPACED]) == 9
    assert max(worst_s[CUT_OFF]) < 0.45
    says(
        f"175 s into its window: {found['answers']} answers, no gap over 0.45 s, "
        f"{found['good']} of {found['firsts']} first tokens in time; unpaced {other['answers']} "
        f"answers in the same seconds, nine with a gap over 1 s (of up to "
        f"{max(worst_s[UNPACED]):.1f} s), {other['good']} of {other['firsts']} in time.",
    )


def gaps_s(turns: Iterable[dict[str, Any]]) -> list[float]:
    """The longest of each answer."""
    return [worst_gap_s(line) for line in turns if not line["error"]]
