"""The pages of measured runs say what the data says, and the data says it without our code too."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pyarrow.parquet as parquet
import pytest

from results import build

RESULTS = Path(build.__file__).parent


def test_every_page_is_what_its_data_and_template_make() -> None:
    made = build.pages()
    assert {path.name for path in RESULTS.glob("*.md")} == set(made)
    assert [name for name, text in made.items() if (RESULTS / name).read_text() != text] == []


def test_every_run_has_turns_and_every_turn_a_run() -> None:
    known = {run["id"] for run in build.manifest()["runs"]}
    assert set(build.turns()) == known
    assert build.superseded() <= known


@pytest.mark.parametrize(
    ("run", "campaign"), [("ours-24-draw2", "h200"), ("mixed-twelve", "residency")]
)
def test_a_recount_without_our_code_agrees(run: str, campaign: str) -> None:
    """First tokens a second, late sessions, the starved and the longest wait, from plain rows."""
    [of] = [of for of in build.judgements() if of.run["id"] == run]
    start, end = of.run["window_start_s"], of.run["window_end_s"]
    rows = [
        row
        for row in parquet.read_table(RESULTS / "turns" / f"{campaign}.parquet").to_pylist()
        if row["run"] == run and row["phase"] != "prime"
    ]
    firsts = [row for row in rows if start <= (row["first_token_s"] or -1) < end]
    assert of.measures["first_tokens_per_s"] == pytest.approx(len(firsts) / (end - start))

    over = end + of.run["drain_s"]
    late: dict[str, list[tuple[float, float]]] = {}
    there: dict[str, tuple[float, float]] = {}
    longest = 0.0
    for row in rows:
        ended = over if row["finished_s"] is None else row["finished_s"]
        until = ended if row["first_token_s"] is None else row["first_token_s"]
        begin, last = there.get(row["session"], (math.inf, 0.0))
        there[row["session"]] = (min(begin, row["due_s"]), max(last, ended))
        bound = row["due_s"] + 3.0 + 0.0001 * row["new_tokens"]
        late.setdefault(row["session"], []).append((max(bound, start), min(until, end)))
        if row["due_s"] < end and until >= start:
            longest = max(longest, until - row["due_s"])
    assert of.measures["longest_wait_s"] == pytest.approx(longest)

    shares = []
    starved = 0
    served = {row["session"] for row in firsts}
    for session, (begin, last) in there.items():
        present = min(last, end) - max(begin, start)
        if present <= 0:
            continue
        waited = sum(max(0.0, to - since) for since, to in late[session])
        shares.append(waited / present)
        starved += present >= 0.9 * (end - start) and session not in served and waited > 0
    assert of.measures["starved_sessions"] == starved
    assert of.measures["late_share_mean"] == pytest.approx(sum(shares) / len(shares))
    assert sum(share >= of.measures["late_share_p90"] for share in shares) >= 0.1 * len(shares) - 1


@pytest.mark.parametrize("objective", ["sessions", "agentperf"])
def test_an_arm_is_said_to_meet_an_objective_up_to_the_level_below_the_first_that_misses_it(
    objective: str,
) -> None:
    with (RESULTS / f"strongest.{objective}.csv").open() as file:
        rows = list(csv.DictReader(file))
    for found in build.strongest(objective):
        for seed, most in found["by_seed"].items():
            own = [x for x in rows if (x["arm"], x["trace_seed"]) == (found["arm"], seed)]
            missed = [int(x["load"]) for x in own if x["not_met"]]
            assert most == max(int(x["load"]) for x in own if int(x["load"]) < min(missed))
