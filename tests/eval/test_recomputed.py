"""The account of cached and recomputed tokens, and Belady's bound, against small cases by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval import provenance
from eval.recomputed import best_replacement, capacity_tokens, recomputed
from eval.records import Run, read_run
from replay.results import Result, ResultWriter

MakeRun = Callable[..., Run]


def run_of(
    folder: Path, turns: list[tuple[str, int, int, int, str]], decode: str | None = None
) -> Run:
    """Turns of (session, prompt, best possible, cached, worker), a second apart; with `decode`
    answers are made there."""
    folder.mkdir()
    writer = ResultWriter(folder / "requests.jsonl")
    with (folder / "decisions.jsonl").open("w") as log:
        for number, (session, prompt, best, cached, worker) in enumerate(turns):
            at_s = float(number)
            writer.write(
                Result(
                    request_id=f"r{number}",
                    session_id=session,
                    turn=0,
                    input_length=prompt,
                    output_length=10,
                    scheduled_s=at_s,
                    sent_s=at_s,
                    first_token_s=at_s + 0.5,
                    finished_s=at_s + 0.9,
                    arrivals=[(at_s + 0.5, 1), (at_s + 0.9, 10)],
                    output_tokens=10,
                    prompt_tokens=prompt,
                    cached_tokens=cached,
                    best_cached_tokens=best,
                    decision_id=f"d{number}",
                )
            )
            event = {"event": "decision", "decision_id": f"d{number}", "kind": "local"}
            chosen: dict[str, str] = {"worker": worker}
            if decode is not None:
                chosen = {"kind": "prefill_decode", "prefill": worker, "decode": decode}
            log.write(json.dumps(event | chosen) + "\n")
    writer.close()
    provenance.write_manifest(folder, {"state": "complete", "arm": {"name": "a"}})
    return read_run(folder)


def test_tokens_are_accounted_for_by_what_became_of_them(tmp_path: Path) -> None:
    run = run_of(
        tmp_path / "r",
        [
            ("a", 1000, 0, 0, "w0"),
            ("b", 1000, 200, 200, "w0"),
            ("a", 2000, 1010, 0, "w0"),  # was here, and evicted
            ("b", 2000, 1010, 200, "w1"),  # on w0 only; what all begin with is nowhere else
            ("a", 3000, 2010, 2005, "w0"),  # all but 5 of it
            ("b", 3000, 2010, 2015, "w1"),  # more than a trace can know
        ],
    )
    found = recomputed(run)
    assert found is not None
    assert found.whole.requests == 6
    assert found.whole.recomputed_tokens == 1010 + 810 + 5
    assert found.by_worker["w0"].evicted_tokens == 1009 + 4, "prompt, and answer but its last"
    assert found.by_worker["w0"].recomputed_tokens == 1015
    assert found.by_worker["w1"].evicted_tokens == 0
    assert found.by_worker["w1"].elsewhere_tokens == 810
    assert found.whole.cached_share == pytest.approx(4420 / 12000)
    assert found.whole.best_share == pytest.approx(6240 / 12000)
    assert math.isnan(found.whole.recomputed_gpu_s)
    assert found.belady is None


def test_an_answer_that_was_evicted_had_been_on_the_worker_that_made_it(tmp_path: Path) -> None:
    # Spliced: the second prompt holds the first's 9 cached answer tokens, all given up since.
    turns = [("a", 1000, 0, 0, "w0"), ("a", 2000, 1009, 0, "w0")]
    found = recomputed(run_of(tmp_path / "local", turns))
    assert found is not None
    assert (found.whole.evicted_tokens, found.whole.elsewhere_tokens) == (1009, 0)
    # Made by a decode worker, the answer was never where the next prompt is prefilled.
    found = recomputed(run_of(tmp_path / "separated", turns, decode="d0"))
    assert found is not None
    assert (found.whole.evicted_tokens, found.whole.elsewhere_tokens) == (1000, 9)


def test_a_session_whose_priming_was_given_up_has_no_more_in_common_with_others(
    tmp_path: Path,
) -> None:
    """Its first answered turn could have had the whole priming prompt, which is its own."""
    turns = [
        ("b", 1000, 0, 0, "w0"),
        ("a", 5000, 0, 0, "w0"),  # given up: nothing of it was ever on the worker
        ("a", 6000, 5000, 0, "w0"),
        ("b", 1100, 1000, 1000, "w0"),
    ]
    run = run_of(tmp_path / "r", turns)
    (run.folder / "router.toml").write_text("[[workers]]\nkv_capacity_tokens = 7500\n")
    lines = (run.folder / "requests.jsonl").read_text().splitlines()
    given_up = {"error": {"kind": "timeout", "message": ""}, "first_token_s": None, "arrivals": []}
    lines[1] = json.dumps(json.loads(lines[1]) | given_up | {"phase": "prime"})
    (run.folder / "requests.jsonl").write_text("\n".join(lines) + "\n")
    found = recomputed(read_run(run.folder))
    assert found is not None
    assert found.belady is not None
    assert (found.whole.evicted_tokens, found.whole.elsewhere_tokens) == (0, 5000)
    # Of 5,000 tokens that all begin with there would be room for 2,500 more.
    assert found.belady.cached_tokens == 1000


def test_bins_of_time_add_up_to_the_whole(make_run: MakeRun) -> None:
    run = make_run()
    found = recomputed(run)
    assert found is not None
    for name in ("prompt_tokens", "cached_tokens", "best_tokens", "recomputed_tokens"):
        assert found.over_time[name].sum() == pytest.approx(getattr(found.whole, name))
        of_workers = sum(getattr(part, name) for part in found.by_worker.values())
        assert of_workers == pytest.approx(getattr(found.whole, name))
    assert found.over_time["at_s"].nunique() > 5


def test_gpu_seconds_are_at_the_pace_of_the_workers_own_prefill_steps(make_run: MakeRun) -> None:
    run = make_run()
    (run.folder / "steps").mkdir()
    steps = [
        {"event": "step", "worker_id": worker, "start_unix_s": 1.0, "duration_s": duration_s,
         "prefill_tokens": tokens, "decode_requests": decoding, "kv_total_tokens": 5000}
        for worker, duration_s, tokens, decoding in (
            ("w0", 1.0, 1000, 0), ("w0", 9.0, 1000, 4), ("w0", 0.1, 0, 4), ("w1", 2.0, 1000, 2),
        )
    ]  # fmt: skip
    (run.folder / "steps" / "w.jsonl").write_text("\n".join(map(json.dumps, steps)) + "\n")
    found = recomputed(read_run(run.folder))
    assert found is not None
    for worker, pace_s in (("w0", 1e-3), ("w1", 2e-3)):
        part = found.by_worker[worker]
        assert part.recomputed_tokens > 0
        assert part.recomputed_gpu_s == pytest.approx(part.recomputed_tokens * pace_s)
    assert found.belady is not None
    assert found.belady.capacity_tokens == 10_000


def test_capacity_is_what_the_router_was_told_with_host_memory(make_run: MakeRun) -> None:
    run = make_run()
    assert math.isnan(capacity_tokens(run))
    (run.folder / "router.toml").write_text(
        "[[workers]]\nkv_capacity_tokens = 1000\nhost_kv_tokens = 500\n"
        "[[workers]]\nkv_capacity_tokens = 2000\n"
    )
    assert capacity_tokens(run) == 3500


def requests_of(turns: list[tuple[str, int]]) -> pd.DataFrame:
    """Turns of (session, new tokens), each with the ones before it as its prefix; no answer."""
    length: dict[str, int] = {}
    rows = []
    for session, new in turns:
        before = length.get(session, 0)
        length[session] = before + new
        rows.append((session, before + new, before, 0))
    columns = ["session_id", "prompt_tokens", "best_cached_tokens", "output_tokens"]
    return pd.DataFrame(rows, columns=columns)


def belady_tokens(turns: list[tuple[str, int]], capacity: float) -> float:
    table = requests_of(turns)
    found = best_replacement(table, pd.Series(True, index=table.index), capacity)
    assert found is not None
    return found.cached_tokens


def test_belady_keeps_who_comes_back_first_where_lru_keeps_nothing() -> None:
    """Three sessions of 100 take turns, and two fit: least recently used always gives up the one
    that comes next."""
    turns = [(name, 100 if i == 0 else 0) for i in range(4) for name in "abc"]
    everything = 3 * 3 * 100
    assert belady_tokens(turns, 300) == everything
    assert 0.5 * everything <= belady_tokens(turns, 200) < everything
    assert belady_tokens(turns, 1e9) == everything


def lru_tokens(turns: list[tuple[str, int]], capacity: float) -> float:
    """A cache of whole sessions that gives up the least recently used."""
    held: dict[str, float] = {}
    served, length = 0.0, dict.fromkeys((name for name, _ in turns), 0)
    for session, new in turns:
        served += held.pop(session, 0.0)
        length[session] += new
        held[session] = length[session]
        while sum(held.values()) > capacity:
            held.pop(next(iter(held)))
    return served


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 50)), min_size=1, max_size=40),
    st.integers(1, 200),
)
def test_belady_is_never_below_lru_nor_above_an_endless_cache(
    turns: list[tuple[str, int]], capacity: int
) -> None:
    found = belady_tokens(turns, capacity)
    best = float(requests_of(turns)["best_cached_tokens"].sum())
    assert lru_tokens(turns, capacity) - 1e-9 <= found <= best + 1e-9
    assert found <= belady_tokens(turns, capacity + 20) + 1e-9


def test_a_beginning_that_all_share_takes_its_room_once() -> None:
    table = pd.DataFrame(
        {
            "session_id": list("abcabc"),
            "prompt_tokens": [110.0] * 3 + [110.0] * 3,
            "best_cached_tokens": [0.0, 100.0, 100.0, 110.0, 110.0, 110.0],
            "output_tokens": [0.0] * 6,
        }
    )
    every = pd.Series(True, index=table.index)
    found = best_replacement(table, every, 230)
    assert found is not None
    # The first session's own 110 hold the common 100 as well, as far as lengths can tell.
    assert found.cached_tokens == pytest.approx(200 + 330)
    small = best_replacement(table, every, 50)
    assert small is not None
    assert small.cached_tokens <= 5 * 50
    assert best_replacement(table, every, float(np.nan)) is None
