"""What docs/results/residency-vllm.md says of vLLM with bf16 KV, with a host tier and without."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from eval.records import Run
from eval.steady import State, steadiness
from tests.eval import published
from tests.eval.differences import longer, longest_s, over, times, within_s
from tests.eval.published import RESULTS, lines, phases, run_of
from tests.eval.test_published_residency import rate
from tests.eval.test_sessions_a_gpu import RUNS
from tests.eval.windows import missed, until

PAGE = (RESULTS / "residency-vllm.md").read_text()
DRAWS = (2, 3)
ARMS = ("vllm", "vllm-residency", "vllm-host", "vllm-host-residency")
BEHIND = [arm for arm in ARMS if arm.endswith("residency")]
Runs = dict[tuple[str, int], Run]
says = partial(published.says, PAGE)


def name(arm: str, draw: int) -> str:
    return RUNS[arm, 12, draw][-1]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """All eight, by arm and draw."""
    folder = tmp_path_factory.mktemp("runs")
    every = [(arm, draw) for arm in ARMS for draw in DRAWS]
    return {of: run_of(name(*of), folder / name(*of)) for of in every}


def measured(arm: str, draw: int) -> list[dict[str, Any]]:
    return [line for line in lines(name(arm, draw)) if line["phase"] == "measure"]


def test_which_runs_are_steady(runs: Runs) -> None:
    for (arm, _), run in runs.items():
        expected = State.STEADY if arm in BEHIND else State.NOT_ASSESSED
        assert steadiness(run).state is expected


def test_what_residency_and_a_tier_are_worth(runs: Runs) -> None:
    def more(base: str, arm: str) -> str:
        of_base, of_arm = ([runs[of, draw] for draw in DRAWS] for of in (base, arm))
        return times(over(of_base, of_arm, "requests_per_s"))

    brings = [
        rate(name("vllm-host-residency", draw)) / rate(name("vllm-residency", draw))
        for draw in DRAWS
    ]
    without = [of for of in runs if of[0] not in BEHIND]
    halves_s = [within_s(runs[of], 0.5) for of in without]
    early = [
        line
        for of in without
        for line in measured(*of)
        if not line["error"] and line["first_token_s"] - line["scheduled_s"] <= 10
    ]
    assert early == []
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
