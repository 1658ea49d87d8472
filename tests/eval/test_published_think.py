"""What docs/results/simulated-think.md says of turns computed again follows from its lines."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from eval.rules_a_gpu import by_draws
from eval.run_lines import Row, read_rows
from eval.separation import carried_by_draw
from tests.eval.published import RESULTS, served_percent

PAGE = RESULTS / "simulated-think.md"
OURS = "sglang-fp8-host-paced-residency"
ALWAYS = f"{OURS} think 60 s, copied beside"
"""With time slices always, in the lines of that."""
LEVELS = ("16", "24")
SETTING = "slice_overhead 0.1"
TIER_TOKENS = 1_220_703
BUDGET_TOKENS = 0.8 * TIER_TOKENS


def _rows(name: str) -> list[Row]:
    return read_rows(RESULTS / "simulated" / f"{name}.csv")


def _cause(row: Row) -> str:
    """By what had become of the session when its prompt was dropped."""
    if row["then"] in ("primed", "unknown"):
        return row["then"]
    if row["slice"] != "has":
        return row["slice"]
    return "thinks" if row["then"] == "thinks" else "waits or runs"


def _mean(rows: Sequence[Row], column: str) -> float:
    return statistics.fmean(float(row[column]) for row in rows)


def _of(rows: Sequence[Row], arm: str, level: str) -> list[Row]:
    of = [row for row in rows if (row["arm"], row["sessions"]) == (arm, level)]
    assert sorted(int(row["draw"]) for row in of) == list(range(1, 9)), (arm, level)
    return of


def test_each_turn_that_is_computed_again_has_its_cause() -> None:
    text = PAGE.read_text()
    turns, counted = _rows("think-why"), _rows("think-tried-recomputed")
    for level in LEVELS:
        for draw in "1234":
            of = [row for row in turns if (row["sessions"], row["draw"]) == (level, draw)]
            run = [
                row
                for row in counted
                if (row["arm"], row["sessions"], row["draw"]) == ("priced", level, draw)
            ]
            assert [int(row["recomputed_turns"]) for row in run] == [len(of)], (level, draw)
    of_day, now = (
        [
            statistics.fmean(
                int(row["recomputed_turns"])
                for row in rows
                if (row["arm"], row["sessions"]) == ("priced", level) and int(row["draw"]) <= 4
            )
            for level in LEVELS
        ]
        for rows in (counted, _rows("think-recomputed"))
    )
    assert (
        f"when {of_day[0]:.0f} and {of_day[1]:.0f} turns a run were computed again where it now is "
        f"{now[0]:.0f} and {now[1]:.0f})"
    ) in text
    table = text.partition("| simulated: turns computed again |")[2].partition("\n\n")[0]
    said = [line.strip("| ").split(" | ")[-2:] for line in table.splitlines()[2:]]
    causes = ("primed", "others", "not_expected", "thinks", "waits or runs", "unknown")
    assert {_cause(row) for row in turns} == set(causes)
    is_of = [lambda row, cause=cause: _cause(row) == cause for cause in causes]
    assert said == [
        [str(sum(row["sessions"] == level and of(row) for row in turns)) for level in LEVELS]
        for of in [*is_of, lambda row: True]
    ]


def test_what_is_said_of_why_turns_are_computed_again() -> None:
    text, turns = PAGE.read_text(), _rows("think-why")
    gone = [row for row in turns if _cause(row) in ("others", "not_expected")]
    kept = [row for row in turns if row["slice"] == "has"]
    primed = [row for row in turns if row["then"] == "primed"]
    tokens = [sum(int(row["recomputed_tokens"]) for row in of) for of in (gone, kept, primed)]
    shares = [100 * part / sum(int(row["recomputed_tokens"]) for row in turns) for part in tokens]
    waits = [
        statistics.median(float(row["waited_s"]) for row in gone if row["sessions"] == level)
        for level in LEVELS
    ]
    minute = sum(float(row["thought_s"]) > 59.9 for row in kept)
    before = [
        row
        for row in gone
        if row["slice"] == "not_expected"
        and 57 < float(row["lost_slice_after_s"]) < 60 == round(float(row["thought_s"]), 3)
    ]
    for_agents = [
        row for row in gone if row["lost_slice_after_s"] and float(row["thought_s"]) > 120
    ]
    early = [row for row in gone if row["lost_slice_after_s"] and row not in before + for_agents]
    all_but = [int(row["known_cached_tokens"]) - int(row["cached_tokens"]) for row in turns]
    tier = [_mean(kept, f"tier_{part}_tokens") / 1e6 for part in ("slices", "others", "ended")]

    def within(column: str) -> int:
        return sum(float(row[column]) <= BUDGET_TOKENS for row in kept)

    count, prompts = within("counted_tokens"), len(kept) - within("slices_prompt_tokens")
    words = [
        f"{shares[0]:.0f} % are of sessions without a slice",
        f"{shares[1]:.0f} % of sessions with one and {shares[2]:.0f} % of those from the beginning",
        f"{waits[0]:.0f} and {waits[1]:.0f} s in the middle with 16 and 24 sessions",
        f"of {len(gone)} drops {sum(row['dropped_for'] == 'slice' for row in gone)} were for turns",
        f"had {_mean(kept, 'counted_tokens') / 1e6:.2f} million tokens on average",
        f"{count} times of {len(kept)} no more than the {BUDGET_TOKENS / 1e6:.2f} million",
        f"together were {_mean(kept, 'slices_prompt_tokens') / 1e6:.2f} million",
        f"more than those {BUDGET_TOKENS / 1e6:.2f} million in {prompts} of {len(kept)}",
        f"Of the {TIER_TOKENS / 1e6:.2f} million that the tier has they held {tier[0]:.2f};",
        f"without a slice {tier[1]:.2f} and those that had ended {tier[2]:.2f}",
        f"{minute} of the {len(kept)} had been away for a minute or longer",
        f"{len(before)} of these 19 lost it",
        f"the other {len(early)} before the window",
        f"in {sum(abs(off) <= 1_024 for off in all_but)} of the {len(turns)};",
    ]
    assert [word for word in words if word not in text] == []
    assert sum(row["slice"] == "not_expected" for row in gone) == 19
    assert len(for_agents) == 3
    assert all(
        float(row["came_s"]) - float(row["thought_s"]) + float(row["lost_slice_after_s"]) < 0
        for row in early
    )
    assert min(all_but) >= 0, "no more was cached than the router knew"
    window = [row for row in primed if float(row["came_s"]) >= 0]
    assert all(float(row["thought_s"]) > 120 for row in window), "they wait for sub-agents"


def test_more_host_memory_leaves_fewer_turns_to_be_computed_again() -> None:
    text, runs, again = PAGE.read_text(), _rows("think-tier"), _rows("think-tier-recomputed")
    for name, arm in (
        ("a host tier of 60 GB", "priced"),
        *((f"{size} GB", f"tier {size} GB") for size in (70, 80, 100, 120)),
    ):
        cells = []
        for level in LEVELS:
            of = _of(runs, arm, level)
            turns = _mean(_of(again, arm, level), "recomputed_turns")
            share = 100 * _mean(of, "within_objective")
            cells.append(f"{turns:.1f}, {share:.0f} %, {_mean(of, 'requests_per_s'):.2f}")
        assert f"| {name} | {' | '.join(cells)} |" in text
    published = [row for row in _rows("slices-always") if row["arm"] == ALWAYS]
    for row in published:
        if row["sessions"] in ("12", *LEVELS):
            same = [
                run for run in _of(runs, "priced", row["sessions"]) if run["draw"] == row["draw"]
            ]
            assert [row | {"arm": "priced"} for _ in same] == [
                {column: run[column] for column in row} for run in same
            ]


def test_what_was_tried_against_it_follows_from_its_lines() -> None:
    text, runs, again = PAGE.read_text(), _rows("think-tried"), _rows("think-tried-recomputed")
    assert "\n".join(by_draws(runs, (range(1, 5), range(5, 9)))) in text
    for arm in dict.fromkeys(row["arm"] for row in runs):
        turns = [_mean(_of(again, arm, level), "recomputed_turns") for level in ("12", *LEVELS)]
        line = next(line for line in text.splitlines() if line.startswith(f"- `{arm}`"))
        assert line.endswith("({:.1f}, {:.1f}, {:.1f}).".format(*turns)), line
        ratios = [
            _mean(_of(runs, arm, level)[first : first + 4], "good_per_s")
            / _mean(_of(runs, "priced", level)[first : first + 4], "good_per_s")
            for level in ("12", *LEVELS)
            for first in (0, 4)
        ]
        if arm not in ("priced", SETTING):
            assert min(ratios) < 0.99, (arm, ratios)
    in_time = [_mean(_of(runs, arm, "24"), "good_per_s") for arm in (SETTING, "priced")]
    served = [served_percent(_of(runs, arm, "24")) for arm in (SETTING, "priced")]
    shorter = [
        served_percent(_of(_rows(name), arm, "24"))
        for name, arm in (("rules-bound", "overhead-0.1"), ("rules", "priced"))
    ]
    for words in (
        f"with 24 sessions it has {100 * (in_time[0] / in_time[1] - 1):.0f} % more of them",
        f"{served[0]:.0f} % of sessions get an answer where it is {served[1]:.0f}, and",
        f"[{shorter[0]:.0f} where it is {shorter[1]:.0f}](simulated-rules.md",
    ):
        assert words in text, words


def test_what_the_simulators_page_says_the_tier_changed_follows_from_lines() -> None:
    rows = [row for row in _rows("slices-always") if row["arm"] == ALWAYS]
    before = [row for row in _rows("think-tried") if row["arm"] == "priced"]
    shares = [
        100
        * _mean(
            [row for row in of if row["sessions"] == level and int(row["draw"]) <= 4],
            "within_objective",
        )
        for of in (rows, before)
        for level in LEVELS
    ]
    carries = statistics.fmean(carried_by_draw(rows, "within_objective"))
    assert (
        "With a minute of thinking ours with 16 and 24 sessions has {:.0f} and {:.0f} % of turns "
        "in time where it was {:.0f} and {:.0f} %, and carries {:.1f} where it was 12.8, both with"
    ).format(*shares, carries) in (RESULTS.parent / "simulator.md").read_text()
