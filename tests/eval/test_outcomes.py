"""Good turns, sessions' completion and stretch against the same computed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import special

from eval import provenance
from eval.experiment import Slo
from eval.outcomes import (
    BY_KEY,
    Outcome,
    Sample,
    estimates,
    new_tokens,
    recomputed_tokens,
)
from eval.records import Run, read_run
from eval.stats import SessionBootstrap
from eval.stretch import alone_from
from replay.results import ErrorInfo, Result, ResultWriter


def turn(
    session: str,
    number: int,
    due_s: float,
    *,
    prompt: int = 1000,
    ttft_s: float = 1.0,
    tpot_s: float = 0.02,
    tokens: int = 11,
    **more: Any,
) -> Result:
    first_s = due_s + ttft_s
    arrivals = [(first_s + tpot_s * i, i + 1) for i in range(tokens)]
    fields = {
        "request_id": f"{session}:{number}",
        "session_id": session,
        "turn": number,
        "input_length": prompt,
        "output_length": tokens,
        "scheduled_s": due_s,
        "sent_s": due_s,
        "first_token_s": first_s,
        "finished_s": arrivals[-1][0],
        "arrivals": arrivals,
        "output_tokens": tokens,
        "prompt_tokens": prompt,
        "cached_tokens": 0,
    }
    return Result.model_validate(fields | more)


def run_of(folder: Path, results: list[Result], **manifest: Any) -> Run:
    folder.mkdir(parents=True, exist_ok=True)
    writer = ResultWriter(folder / "requests.jsonl")
    for result in results:
        writer.write(result)
    writer.close()
    provenance.write_manifest(folder, {"state": "complete", "arm": {"name": "a"}} | manifest)
    return read_run(folder)


FAILED: dict[str, Any] = {
    "error": ErrorInfo(kind="timeout", message=""),
    "arrivals": [],
    "first_token_s": None,
    "output_tokens": 0,
}


def test_a_turn_is_good_when_it_keeps_every_bound_of_the_slo(tmp_path: Path) -> None:
    slo = Slo(ttft_s=3.0, ttft_s_per_new_token=0.0001, tpot_s=0.05, worst_gap_s=1.0)
    stalled = [(1.0, 1), (1.01, 100), (2.2, 101)]
    run = run_of(
        tmp_path / "r",
        [
            turn("good", 0, 0.0),
            turn("slow", 0, 0.0, ttft_s=3.2),
            # 10,000 new tokens of 40,000 may take one second more.
            turn("long", 0, 0.0, prompt=40_000, ttft_s=3.9, best_cached_tokens=30_000),
            turn("too long", 0, 0.0, prompt=40_000, ttft_s=4.1, best_cached_tokens=30_000),
            turn("pace", 0, 0.0, tpot_s=0.06),
            turn("stall", 0, 0.0, arrivals=stalled, output_tokens=101, finished_s=2.2),
            turn("at once", 0, 0.0, arrivals=[(1.0, 11)], finished_s=1.0),
            turn("failed", 0, 0.0, **FAILED),
        ],
    )
    of = Outcome(run, slo).turns
    assert of.loc[of["in_time"], "session"].tolist() == ["good", "long", "at once"]
    late = of.loc[~of["first_ok"], "session"].tolist()
    assert late == ["slow", "too long", "failed"]
    assert of.loc[of["first_ok"] & ~of["pace_ok"], "session"].tolist() == ["pace", "stall"]
    assert new_tokens(run.requests)[2] == 10_000
    assert of["tpot_s"][5] == pytest.approx(1.2 / 100)


def test_a_runs_measures_are_of_its_turns_without_primes_and_faults_of_the_client(
    tmp_path: Path,
) -> None:
    cut = {"error": ErrorInfo(kind="cancelled", message=""), "finished_s": 40.0}
    run = run_of(
        tmp_path / "r",
        [
            turn("a", 0, 0.0, phase="prime", ttft_s=9.0),
            turn("a", 1, 20.0),
            turn("b", 0, 21.0, ttft_s=9.0),
            turn("c", 0, 22.0, **FAILED | {"error": ErrorInfo(kind="connect", message="")}),
            turn("d", 0, 25.0, arrivals=[(26.0, 1), (39.9, 400)], output_tokens=400, **cut),
        ],
    )
    found = Outcome(run).measures
    assert (found["judged_turns"], found["sessions"], found["longest_wait_s"]) == (3, 3, 9.0)
    # The answer that was cut off is judged on what came of it: a gap of 13.9 s.
    assert found["in_time_share"] == pytest.approx(1 / 3)


def test_the_wait_and_pace_of_an_answer_that_the_run_cuts_off_are_those_of_what_came(
    tmp_path: Path,
) -> None:
    """The last answer of a window is on its way when the drain ends; one that the server broke off
    inside the window is slower than any."""
    timeout = {"error": ErrorInfo(kind="timeout", message="")}
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / "phases.json").write_text('{"window_start_s": 0.0, "window_end_s": 60.0}')
    run = run_of(
        folder,
        [
            turn("cut", 0, 55.0, **timeout | {"finished_s": 70.0}),
            turn("waits", 0, 55.0, **FAILED | {"finished_s": 70.0}),
            turn("broken", 0, 30.0, **timeout),
        ],
    )
    found = run.requests.set_index("session_id")
    assert found["ttft_s"].tolist() == pytest.approx([1.0, np.inf, np.inf])
    assert found["tpot_s"].tolist() == pytest.approx([0.02, np.inf, np.inf])
    assert found["e2e_s"].tolist() == [np.inf] * 3


def test_recomputed_tokens_are_what_an_endless_cache_had_and_the_engine_had_not(
    tmp_path: Path,
) -> None:
    run = run_of(
        tmp_path / "r",
        [
            turn("evicted", 0, 0.0, best_cached_tokens=900, cached_tokens=200),
            turn("kept", 0, 0.0, best_cached_tokens=900, cached_tokens=950),
            turn("unknown", 0, 0.0, cached_tokens=950),
        ],
    )
    assert recomputed_tokens(run.requests).tolist()[:2] == [700, 0]
    assert np.isnan(recomputed_tokens(run.requests)[2])


def test_a_session_is_complete_when_its_last_answer_ends(tmp_path: Path) -> None:
    run = run_of(
        tmp_path / "r",
        [
            turn("a", 0, 0.0),
            turn("a", 1, 10.0),
            turn("b", 0, 5.0),
            turn("b", 1, 9.0, **FAILED),
            turn("a#1", 0, 50.0, play=1, request_id="a:0#1"),
        ],
    )
    found = Outcome(run).sessions
    assert found["conversation"].tolist() == ["a", "a", "b"]
    assert found["completion_s"].tolist() == pytest.approx([11.2, 1.2, np.inf])
    assert found["turns"].tolist() == [2, 1, 2]
    assert found["met"].tolist() == [2, 1, 1]


def test_a_session_that_the_window_cuts_has_a_stretch_and_no_completion(tmp_path: Path) -> None:
    run = run_of(
        tmp_path / "r",
        [
            turn("cut", 0, 0.0, phase="warm_up"),
            turn("cut", 1, 10.0),
            turn("whole", 0, 10.0, ttft_s=3.0),
            turn("whole", 1, 20.0, ttft_s=3.0),
        ],
    )
    found = Outcome(run, alone=alone_from([run])).sessions
    assert np.isnan(found["completion_s"][0])
    assert found["completion_s"][1] == pytest.approx(13.2)
    assert found["stretch"].notna().all()


def test_a_session_whose_next_turn_was_not_sent_any_more_is_cut_too(tmp_path: Path) -> None:
    """The run ends when what was measured is answered; who still thinks then sends nothing."""
    results = [
        turn("thinks", 0, 10.0),
        turn("ends", 0, 10.0),
        turn("ends", 1, 20.0),
        turn("primed", 1, 5.0, phase="prime", request_id="primed:1~prime"),
        turn("primed", 2, 10.0),
        turn("ends#1", 0, 30.0, play=1, request_id="ends:0#1"),
        turn("thinks#1", 0, 30.0, play=1, request_id="thinks:0#1"),
        turn("thinks#1", 1, 40.0, play=1, request_id="thinks:1#1"),
    ]
    folder = run_of(tmp_path / "r", results).folder
    window = {"window_start_s": 10.0, "window_end_s": 50.0, "measure_s": 40.0}
    (folder / "phases.json").write_text(json.dumps(window))
    last = {"thinks": "thinks:1", "ends": "ends:1", "primed": "primed:2"}
    facts = {"path": "t", "sha256": "0", "length_scale": 1.0, "best_cached_tokens": {}}
    (folder / "trace.json").write_text(json.dumps(facts | {"last_requests": last}))
    run = read_run(folder)
    known = dict(
        zip(
            sorted(set(run.requests["session_id"])),
            Outcome(run).sessions["completion_s"],
            strict=True,
        )
    )
    assert known["ends"] == pytest.approx(11.2)
    assert known["thinks#1"] == pytest.approx(11.2)
    assert [np.isnan(known[name]) for name in ("thinks", "primed", "ends#1")] == [True] * 3


def test_stretch_is_the_time_over_that_alone_with_the_same_think_times(tmp_path: Path) -> None:
    """Alone, measured at one session in flight: 1.2 s a turn. Beside others: 3.2 and 5.2 s, with
    10 s between the turns in both."""
    arguments = {"arguments": {"mode": "closed", "max_inflight_sessions": 1}}
    single = run_of(tmp_path / "single", [turn("a", 0, 0.0), turn("a", 1, 11.2)], replay=arguments)
    alone = alone_from([single])
    assert alone is not None
    assert alone.source.startswith("measured at one session in flight")
    busy = run_of(
        tmp_path / "busy", [turn("a", 0, 0.0, ttft_s=3.0), turn("a", 1, 13.2, ttft_s=5.0)]
    )
    assert Outcome(busy, alone=alone).sessions["stretch"].tolist() == pytest.approx([18.4 / 12.4])
    assert Outcome(single, alone=alone).sessions["stretch"].tolist() == pytest.approx([1.0])


def test_without_such_a_run_alone_is_predicted_from_the_fastest_of_like_size(
    tmp_path: Path,
) -> None:
    """TTFT of 0.1 ms a token and more the busier it was; what an endless cache holds costs nothing
    alone."""
    rng = np.random.default_rng(0)
    results = []
    for number in range(400):
        prompt = int(rng.choice([1_000, 10_000, 40_000]))
        waited_s = float(rng.exponential(2.0))
        results.append(
            turn(f"s{number}", 0, 10.0 * number, prompt=prompt, ttft_s=prompt * 1e-4 + waited_s,
                 best_cached_tokens=prompt - 1_000)
        )  # fmt: skip
    run = run_of(tmp_path / "r", results)
    alone = alone_from([run])
    assert alone is not None
    assert alone.source.startswith("predicted from the fastest tenth of 400 requests")
    service_s = alone.service_s(run.requests)
    assert service_s.between(0.25, 0.75).all()
    stretch = Outcome(run, alone=alone).sessions["stretch"]
    took_s = run.requests["finished_s"] - run.requests["scheduled_s"]
    assert stretch.max() == pytest.approx((took_s / service_s).max())


@pytest.mark.parametrize("sessions", [12, 24, 60])
@pytest.mark.parametrize("late", ["a fifth", "all"])
def test_the_interval_of_the_late_share_p90_covers_in_93_of_100_runs(
    late: str, sessions: int
) -> None:
    """Of runs whose sessions are drawn anew: four in five are never late and one is for any share
    of its time, or all are, most of them little."""
    rng = np.random.default_rng(11)
    names = [f"s{n}" for n in range(sessions)]
    boot = SessionBootstrap(names, 200)
    measure = BY_KEY["late_share_p90"]
    truth = 0.5 if late == "a fifth" else float(special.betaincinv(1, 5, 0.9))
    covered, runs = 0, 400
    for _ in range(runs):
        shares = rng.beta(1, 5, sessions)
        if late == "a fifth":
            shares = np.where(rng.random(sessions) < 0.2, rng.random(sessions), 0.0)
        [found] = estimates(boot, [Sample(names, shares)], [measure])
        covered += found.low <= truth <= found.high
    assert covered >= 0.93 * runs
