"""What docs/results/residency-bf16.md says of bf16 KV where sessions think for up to a minute."""

from __future__ import annotations

import numpy as np
import pytest

from eval.beside import at_work
from eval.calibrate import read_steps
from eval.run_lines import read_rows
from eval.spans import covered_s
from eval.steady import State, steadiness
from tests.eval.bf16 import (
    DRAWS,
    MINUTE,
    Runs,
    in_time,
    measured,
    misses,
    more,
    name,
    read,
    says,
    sessions,
)
from tests.eval.differences import longer, within_s
from tests.eval.published import RESULTS, decisions, lines, phases
from tests.eval.test_published_residency import share_and_rate
from tests.eval.windows import ended, until

PLAIN, BEHIND = f"sglang{MINUTE}", f"sglang-residency{MINUTE}"
VLLM, VLLM_BEHIND = f"vllm{MINUTE}", f"vllm-residency{MINUTE}"
TIER, TIER_BEHIND = f"sglang-host{MINUTE}", f"sglang-host-residency{MINUTE}"
VLLM_TIER, VLLM_TIER_BEHIND = f"vllm-host{MINUTE}", f"vllm-host-residency{MINUTE}"
CUT_OFF = "vllm-host-think-twelve-cut-off"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    alone = (PLAIN, BEHIND, VLLM, VLLM_BEHIND)
    tier = (TIER, TIER_BEHIND, VLLM_TIER, VLLM_TIER_BEHIND)
    return read((*alone, *tier), tmp_path_factory.mktemp("runs"))


def test_which_runs_have_turns_enough_to_be_judged(runs: Runs) -> None:
    for (arm, _), run in runs.items():
        enough = arm in (TIER_BEHIND, VLLM_TIER_BEHIND)
        expected = State.STEADY if enough else State.NOT_ASSESSED
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
    behind = (TIER_BEHIND, VLLM_TIER_BEHIND)
    shares = [in_time_percent(arm) for arm in behind]
    waited, turns = np.sum(
        [longer(runs[arm, draw], 120) for arm in behind for draw in DRAWS], axis=0
    )
    assert (waited, turns) == (3, 200)
    places = {arm: [given_up(arm, draw) for draw in (3, 2)] for arm in (BEHIND, *behind)}
    (all_3, late_3), (all_2, late_2) = places[TIER_BEHIND]
    (theirs_3, theirs_late_3), (theirs_2, theirs_late_2) = places[VLLM_TIER_BEHIND]
    says(
        f"twice as many**: {more(runs, TIER, TIER_BEHIND)} the requests/s of SGLang",
        f"{more(runs, PLAIN, TIER_BEHIND)} without a tier either; "
        f"{more(runs, VLLM_TIER, VLLM_TIER_BEHIND)} and {more(runs, VLLM, VLLM_TIER_BEHIND)} "
        "before vLLM. {:.0f} and {:.0f} % are in time where nobody".format(*shares),
        f"SGLang's were {all_3} and {all_2} (draws 3 and 2), {late_3} and {late_2} of them of "
        "sessions that were not expected back soon, "
        f"vLLM's {theirs_3} and {theirs_2}, {theirs_late_3} and {theirs_late_2} of them; "
        "without a tier SGLang's were {} and {}.".format(*(of for of, _ in places[BEHIND])),
        f"Alone the tier brings {more(runs, PLAIN, TIER)} and {more(runs, VLLM, VLLM_TIER)} the",
    )
    for arm in (TIER, VLLM_TIER):
        assert in_time_percent(arm) == 0


def in_time_percent(arm: str) -> float:
    """Of the turns of both draws."""
    turns = [len(measured(arm, draw)) for draw in DRAWS]
    shares = [share_and_rate(name(arm, draw))[0] for draw in DRAWS]
    return float(np.average(shares, weights=turns))


def given_up(arm: str, draw: int) -> tuple[int, int]:
    """Places, and of them those of sessions that were not expected back soon."""
    of = [event["reason"] for event in decisions(name(arm, draw)) if event["event"] == "give_up"]
    return len(of), of.count("returns_late")


def test_beside_vllm_with_the_same_tier(runs: Runs) -> None:
    p90_s = {
        arm: np.array([within_s(runs[arm, draw], 0.9) for draw in DRAWS])
        for arm in (VLLM_TIER, VLLM_TIER_BEHIND, TIER_BEHIND)
    }
    ours, theirs = (p90_s[arm] / p90_s[VLLM_TIER] for arm in (TIER_BEHIND, VLLM_TIER_BEHIND))
    says(
        f"SGLang behind it has {more(runs, VLLM_TIER, TIER_BEHIND)} the requests/s, and nine",
        "first token within {:.2f} and {:.2f} times its time; ".format(*ours)
        + "vLLM behind it within {:.2f} and {:.2f} times.".format(*theirs),
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


def test_which_engine_with_a_tier(runs: Runs) -> None:
    sglang, vllm = (
        misses(line for draw in DRAWS for line in measured(arm, draw))
        for arm in (TIER_BEHIND, VLLM_TIER_BEHIND)
    )
    assert (vllm[2], sglang[2]) == (2, 7)
    points = in_time(runs, TIER_BEHIND, VLLM_TIER_BEHIND).removesuffix("]").split(" [")
    assert points[0] == "+11 points"
    says(
        f"With the tier behind residency vLLM has {more(runs, TIER_BEHIND, VLLM_TIER_BEHIND)}, "
        f"and eleven points more in time ({points[1]})",
        f"of its {vllm[0]} answers two have a gap over 1 s, of SGLang's {sglang[0]} seven; "
        f"late first tokens are {vllm[1]} and {sglang[1]}.",
    )


def answered_turns(arm: str) -> set[tuple[str, int]]:
    """Sessions and their turns whose answers ended in the window of draw 2."""
    window = phases(name(arm, 2))
    answers = ended(name(arm, 2), window["window_start_s"], window["window_end_s"])
    return {(line["session_id"], line["turn"]) for line in answers}


def test_the_runs_some_hours_before_that_were_cut_off() -> None:
    found = until("vllm-residency-think-twelve-cut-off", 89)
    late_s = sorted(found["waits_s"])[-2:]
    assert (found["answers"], found["firsts"], found["early"]) == (10, 9, 7)
    says(
        f"ten answers in 89 s, {100 * found['cached']:.0f} % of their prompt tokens",
        "after {:.0f} and {:.0f} s".format(*late_s),
    )
    theirs, whole = (until(of, 147.1) for of in (CUT_OFF, name(VLLM_TIER, 3)))
    assert (theirs["early"], whole["early"]) == (0, 0)
    says(
        f"with {theirs['answers']} answers and no first token within 10 s; the whole run has "
        f"{whole['answers']} in the same seconds."
    )
