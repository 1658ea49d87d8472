"""What docs/results/residency-bf16.md says of bf16 KV where sessions think for up to a minute."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from eval.beside import at_work
from eval.calibrate import read_steps
from eval.run_lines import read_rows
from eval.spans import covered_s
from eval.steady import State, steadiness
from tests.eval.bf16 import DRAWS, MINUTE, Runs, measured, more, name, read, says, sessions
from tests.eval.differences import answers, longer, times
from tests.eval.published import RESULTS, decisions, lines, phases, run_of
from tests.eval.test_published_residency import share_and_rate
from tests.eval.windows import ended, until

PLAIN, BEHIND = f"sglang{MINUTE}", f"sglang-residency{MINUTE}"
VLLM, VLLM_BEHIND = f"vllm{MINUTE}", f"vllm-residency{MINUTE}"
TIER, TIER_BEHIND = f"sglang-host{MINUTE}", f"sglang-host-residency{MINUTE}"
CUT_OFF = "vllm-host-think-twelve-cut-off"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return read(
        (PLAIN, BEHIND, VLLM, VLLM_BEHIND, TIER, TIER_BEHIND), tmp_path_factory.mktemp("runs")
    )


def test_which_runs_have_turns_enough_to_be_judged(runs: Runs) -> None:
    for (arm, _), run in runs.items():
        expected = State.STEADY if arm == TIER_BEHIND else State.NOT_ASSESSED
        assert steadiness(run).state is expected


def test_without_a_tier(runs: Runs) -> None:
    shares = [
        round(share_and_rate(name(arm, draw))[0]) for arm in (BEHIND, VLLM_BEHIND) for draw in DRAWS
    ]
    answered = {arm: [sessions(arm, draw) for draw in DRAWS] for arm, _ in runs}
    assert answered[PLAIN] == answered[VLLM] == [11, 13]
    assert sorted((*answered[BEHIND], *answered[VLLM_BEHIND])) == [5, 5, 6, 7]
    waited, turns = np.sum(
        [longer(runs[arm, draw], 120) for arm in (BEHIND, VLLM_BEHIND) for draw in DRAWS], axis=0
    )
    says(
        f"either engine: {more(runs, PLAIN, BEHIND)} with SGLang, "
        f"{more(runs, VLLM, VLLM_BEHIND)} with vLLM",
        "{} and {} % in time with SGLang and {} and {} % with vLLM where nobody".format(*shares),
        f"{waited} of {turns} turns had waited for longer than 120 s",
    )


def test_how_much_work_the_engine_had() -> None:
    worked = {arm: [at_work_percent(arm, draw) for draw in DRAWS] for arm in (PLAIN, BEHIND)}
    assert worked[PLAIN] == [100, 100]
    shares = "{} and {} %".format(*worked[BEHIND])
    says(f"SGLang had work for {shares} of the time, and all of it without residency")


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


def test_with_a_tier(runs: Runs) -> None:
    turns = [len(measured(TIER_BEHIND, draw)) for draw in DRAWS]
    good = [
        round(share_and_rate(name(TIER_BEHIND, draw))[0] / 100 * count)
        for draw, count in zip(DRAWS, turns, strict=True)
    ]
    assert [longer(runs[TIER_BEHIND, draw], 120) for draw in DRAWS] == [(1, 53), (1, 47)]
    (tier_2, late_2), (tier_3, late_3) = (given_up(TIER_BEHIND, draw) for draw in DRAWS)
    without = [given_up(BEHIND, draw)[0] for draw in DRAWS]
    says(
        f"twice as many**: {more(runs, TIER, TIER_BEHIND)} the requests/s of SGLang",
        f"{more(runs, PLAIN, TIER_BEHIND)} without a tier either, and "
        f"{100 * sum(good) / sum(turns):.0f} % in time",
        f"{tier_3} and {tier_2} were (draws 3 and 2), {late_3} and {late_2} of them of sessions",
        "without a tier {1} and {0}.".format(*without),
        f"Alone the tier brings {more(runs, PLAIN, TIER)} the requests/s.",
    )


def given_up(arm: str, draw: int) -> tuple[int, int]:
    """Places, and of them those of sessions that were not expected back soon."""
    of = [event["reason"] for event in decisions(name(arm, draw)) if event["event"] == "give_up"]
    return len(of), of.count("returns_late")


def test_beside_vllm_with_the_same_tier(runs: Runs, tmp_path: Path) -> None:
    seconds = 147.1
    theirs, ours = (until(of, seconds) for of in (CUT_OFF, name(TIER_BEHIND, 3)))
    assert theirs["early"] == 0
    more_answers = answers(run_of(CUT_OFF, tmp_path / CUT_OFF), runs[TIER_BEHIND, 3], seconds)
    says(
        f"in the 147 s that it has lines for {ours['answers']} answers for {theirs['answers']}, "
        f"{times(more_answers)};",
        f"of its {theirs['firsts']} first tokens none came within 10 s, of SGLang's "
        f"{ours['firsts']} behind residency {ours['early']}.",
    )


def test_which_engine(runs: Runs) -> None:
    found = {
        (arm, draw): until(name(arm, draw), 180) for arm in (BEHIND, VLLM_BEHIND) for draw in DRAWS
    }
    answered = {of: seen["answers"] for of, seen in found.items()}
    assert answered_turns(BEHIND) == answered_turns(VLLM_BEHIND)
    assert [found[arm, 2]["good"] for arm in (BEHIND, VLLM_BEHIND)] == [21, 21]
    says(
        f"vLLM as it comes has {more(runs, PLAIN, VLLM)} the requests/s of SGLang",
        f"with draw 2 both answered the same {len(answered_turns(BEHIND))} turns, 21 of them",
        f"With draw 3 vLLM answered {answered[VLLM_BEHIND, 3]} for SGLang's {answered[BEHIND, 3]}.",
    )


def answered_turns(arm: str) -> set[tuple[str, int]]:
    """Sessions and their turns whose answers ended in the window of draw 2."""
    window = phases(name(arm, 2))
    answers = ended(name(arm, 2), window["window_start_s"], window["window_end_s"])
    return {(line["session_id"], line["turn"]) for line in answers}


def test_the_run_some_hours_before_that_was_cut_off() -> None:
    found = until("vllm-residency-think-twelve-cut-off", 89)
    late_s = sorted(found["waits_s"])[-2:]
    assert (found["answers"], found["firsts"], found["early"]) == (10, 9, 7)
    says(
        f"ten answers in 89 s, {100 * found['cached']:.0f} % of their prompt tokens",
        "after {:.0f} and {:.0f} s".format(*late_s),
    )
