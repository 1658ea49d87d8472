"""How rules of residency fare before one GPU: what is kept of a run, and the page made of that."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deltaserve.errors import InputError
from eval.experiment_files import load_experiment
from eval.records import read_run
from eval.rules_a_gpu import app, by_draws, caps, frontier, recomputed_row, rows_in, table
from eval.run_lines import Row, read_rows, write_rows
from eval.simulate import read_calibration
from tests.eval.conftest import Recipe, write_run
from tests.eval.published import RESULTS, served_percent

PAGE = RESULTS / "simulated-rules.md"
RULES = RESULTS / "simulated" / "rules.csv"
CAPS = RESULTS / "simulated" / "rules-cap.csv"
BOUNDS = RESULTS / "simulated" / "rules-bound.csv"
RECOMPUTED = RESULTS / "simulated" / "rules-recomputed.csv"
CHOSEN, SHOWN = range(1, 5), range(5, 9)


def made(arm: str, sessions: int, draw: int = 1, **figures: str) -> Row:
    return {
        "arm": arm,
        "sessions": str(sessions),
        "draw": str(draw),
        "requests_per_s": "0.5",
        "within_objective": "0.8",
        "good_per_s": "0.4",
        "cached_share": "0.9",
        "ttft_p50_s": "0.2",
        "ttft_p90_s": "3",
        "ttft_p99_s": "20",
        "longest_wait_s": "40",
        "unanswered": "1",
        "sessions_there": "10",
        "sessions_answered": "9",
        **figures,
    }


def test_a_turn_that_the_end_cut_off_waited_for_its_first_token_only(tmp_path: Path) -> None:
    write_run(tmp_path, Recipe(arm="off", load="8", ttft_s=0.2, sessions=4, turns=4))
    (file,) = tmp_path.glob("*/r1/requests.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    cut_off = max(lines, key=lambda line: float(line["finished_s"]))
    late_s = cut_off["finished_s"] + 500
    cut_off |= {"finished_s": late_s, "error": {"kind": "timeout", "message": "no answer"}}
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,) = rows_in(tmp_path)
    assert 0 < float(found["longest_wait_s"]) < 5
    cut_off["first_token_s"] = None
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,) = rows_in(tmp_path)
    assert float(found["longest_wait_s"]) > 500


def test_a_run_says_who_waited_longest_and_who_got_no_answer(tmp_path: Path) -> None:
    write_run(tmp_path, Recipe(arm="lease", load="8", ttft_s=0.2, sessions=30, turns=4))
    write_run(tmp_path, Recipe(arm="off", load="8", sessions=30, turns=4, errors=5))
    off, lease = rows_in(tmp_path)
    assert (off["arm"], lease["arm"]) == ("off", "lease")
    assert (lease["unanswered"], lease["sessions_there"]) == ("0", "30")
    assert lease["sessions_answered"] == "30"
    assert 0.2 < float(lease["ttft_p99_s"]) <= float(lease["longest_wait_s"])
    assert off["unanswered"] == "5"
    # More than one turn in a hundred got no answer.
    assert off["ttft_p99_s"] == ""
    assert float(lease["good_per_s"]) > float(off["good_per_s"]) > 0


def test_a_table_has_means_over_draws_and_sums_of_sessions() -> None:
    rows = [
        made("a", 8),
        made("a", 8, draw=2, requests_per_s="0.7", ttft_p99_s="", sessions_answered="5"),
        made("b", 12),
    ]
    assert table(rows, 8)[2:] == [
        "| `a` | 0.600 | 80 % | 0.400 | 0.90 | 0.20 s | 3.0 s | – | 40 s | 70 % of 20 | 2 |"
    ]
    assert table(rows, 12)[2:] == [
        "| `b` | 0.500 | 80 % | 0.400 | 0.90 | 0.20 s | 3.0 s | 20 s | 40 s | 90 % of 10 | 1 |"
    ]


def test_parts_of_the_draws_stand_side_by_side() -> None:
    rows = [made("a", 8), made("a", 8, draw=5, good_per_s="0.3")]
    assert by_draws(rows, (CHOSEN, SHOWN)) == [
        "| simulated: turns within the objective a second, draws 1–4; draws 5–8 | 8 |",
        "|--|--|",
        "| `a` | 0.400; 0.300 |",
    ]


def test_values_of_cap_stand_in_their_order() -> None:
    rows = [made("cap-10", 8, good_per_s="0.5"), made("cap-9", 8)]
    assert caps(rows)[2:] == [
        "| 9 | 80 %, 0.500, 90 % of 10 | 0.4000 |",
        "| 10 | 80 %, 0.500, 90 % of 10 | 0.5000 |",
    ]


def test_whoever_has_the_most_turns_in_time_over_all_levels_is_first_of_the_frontier() -> None:
    rows = [made("a", 8), made("a", 8, draw=5, good_per_s="0.3", longest_wait_s="60")]
    rows += [made("b", 8, good_per_s="0.5"), made("b", 8, draw=5, sessions_answered="5")]
    assert frontier(rows, (CHOSEN, SHOWN))[2:] == [
        "| `b` | 0.450 (0.500; 0.400) | 70 % of 20 | 40 s |",
        "| `a` | 0.350 (0.400; 0.300) | 90 % of 20 | 50 s |",
    ]


def test_the_frontier_is_shown_of_some_levels_of_several_files(tmp_path: Path) -> None:
    rows = [made("a", level, draw=draw) for level in (8, 12) for draw in (1, 5)]
    files = [tmp_path / "one.csv", tmp_path / "other.csv"]
    write_rows(files[0], rows)
    write_rows(files[1], [{**row, "arm": "b"} for row in rows])
    shown = CliRunner().invoke(app, ["frontier", *map(str, files), "--level", "12"])
    assert shown.exit_code == 0
    assert [line[:5] for line in shown.output.splitlines()[2:]] == ["| `a`", "| `b`"]
    assert "8 in flight" not in shown.output


def test_the_commands_keep_lines_and_show_them(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", Recipe(arm="cap-3", load="8"))
    kept, runner = tmp_path / "kept.csv", CliRunner()
    assert runner.invoke(app, ["lines", str(tmp_path / "runs"), str(kept)]).exit_code == 0
    rows = read_rows(kept)
    for command, lines in (("show", table(rows, 8)), ("caps", caps(rows))):
        shown = runner.invoke(app, [command, str(kept)])
        assert shown.exit_code == 0
        assert "\n".join(lines) in shown.output


def test_turns_that_came_back_to_nothing_are_those_computed_again(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "runs", Recipe(arm="lease", load="8", sessions=30)))
    every, (start_s, end_s) = run.all_requests.copy(), run.span_s
    every[["prompt_tokens", "best_cached_tokens", "cached_tokens"]] = [9_000, 8_000, 8_000]
    first = every["first_token_s"]
    there = every.index[first.ge(start_s) & first.lt(end_s)]
    every.loc[there[:4], "cached_tokens"] = [0, 4_000, 4_001, 8_000]
    every.loc[there[4], "best_cached_tokens"] = 0
    row = recomputed_row(replace(run, all_requests=every), "lease", 8)
    assert row == {"arm": "lease", "sessions": "8", "draw": "1", "recomputed_turns": "2"}
    kept = tmp_path / "kept.csv"
    assert CliRunner().invoke(app, ["recomputed", str(tmp_path / "runs"), str(kept)]).exit_code == 0
    assert [row["recomputed_turns"] for row in read_rows(kept)] == ["0"]


def test_a_folder_without_runs_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no complete run"):
        list(rows_in(tmp_path))


def test_the_experiment_is_that_of_sessions_a_gpu_with_other_rules() -> None:
    """So that its runs may stand beside those, and `priced` is an arm of both."""
    experiment, _ = load_experiment("rules-gpu")
    other, _ = load_experiment("sessions-a-gpu")
    assert (experiment.replay, experiment.phases) == (other.replay, other.phases)
    loads = {load.name: load.replay for load in other.loads}
    assert {load.name: load.replay for load in experiment.loads}.items() <= loads.items()


def test_the_tables_of_the_page_follow_from_their_lines() -> None:
    text, rows, of_cap = PAGE.read_text(), read_rows(RULES), read_rows(CAPS)
    tables = [table(rows, level) for level in (8, 12, 16, 24)]
    for lines in (*tables, by_draws(rows, (CHOSEN, SHOWN)), caps(of_cap)):
        assert "\n".join(lines) in text, lines[0]
    assert {int(row["draw"]) for row in rows} == {*CHOSEN, *SHOWN}
    assert {int(row["draw"]) for row in of_cap} == set(CHOSEN)


def test_cap_has_the_value_with_the_most_turns_within_the_objective_a_second() -> None:
    best = max(caps(read_rows(CAPS))[2:], key=lambda line: float(line.split("|")[-2]))
    (cap,) = [arm for arm in load_experiment("rules-gpu")[0].arms if arm.name == "cap"]
    found = re.search(r"'sessions': (\d+)", str(cap.set))
    assert found
    assert best.startswith(f"| {found[1]} |")


def test_ours_is_the_same_arm_as_on_the_page_of_agents_a_gpu_with_slices_always() -> None:
    there = {
        (row["sessions"], row["draw"]): row
        for row in read_rows(RESULTS / "simulated" / "slices-always.csv")
        if row["arm"] == "sglang-fp8-host-paced-residency"
    }
    ours = [
        row for row in read_rows(RULES) if row["arm"] == "priced" and int(row["draw"]) in CHOSEN
    ]
    assert len(ours) == 16
    columns = there["8", "1"].keys() - {"arm"}
    for row in ours:
        same = there[row["sessions"], row["draw"]]
        assert {name: row[name] for name in columns} == {name: same[name] for name in columns}


def test_how_far_ours_is_from_its_lines_where_it_needs_no_slices_while_turns_fit() -> None:
    kept, now = (
        [row for row in read_rows(path) if row["arm"] == "priced"]
        for path in (RULES, RULES.with_name("rules-slices-from.csv"))
    )

    def mean(rows: list[Row], level: int, column: str) -> float:
        of = [float(row[column]) for row in rows if row["sessions"] == str(level)]
        assert len(of) == 8
        return statistics.fmean(of)

    more: list[float] = []
    for level in (8, 12, 16, 24):
        more += [
            100 * (mean(now, level, "requests_per_s") / mean(kept, level, "requests_per_s") - 1),
            100 * (mean(now, level, "within_objective") - mean(kept, level, "within_objective")),
        ]
    said = (
        "eight sessions have {:.1f} % more requests/s and {:.1f} points more turns in time, "
        "twelve {:.1f} % and {:.1f}, 16 {:.1f} % and {:.1f}, 24 {:.1f} % and {:.1f}."
    ).format(*more)
    assert said in PAGE.read_text(), said


def test_what_the_page_says_of_its_tables_follows_from_their_lines() -> None:
    text, rows, of_cap = PAGE.read_text(), read_rows(RULES), read_rows(CAPS)

    def runs_of(arm: str, level: int, runs: list[Row] = rows) -> list[Row]:
        return [row for row in runs if (row["arm"], row["sessions"]) == (arm, str(level))]

    def values(arm: str, level: int, column: str, runs: list[Row] = rows) -> list[float]:
        return [float(row[column]) for row in runs_of(arm, level, runs)]

    def mean(arm: str, level: int, column: str, runs: list[Row] = rows) -> float:
        return statistics.fmean(values(arm, level, column, runs))

    def times(arm: str, level: int, column: str) -> float:
        return mean(arm, level, column) / mean("priced", level, column)

    def more_in(arm: str, level: int, column: str) -> int:
        both = zip(values(arm, level, column), values("priced", level, column), strict=True)
        return sum(a > b for a, b in both)

    def within(arm: str, level: int) -> str:
        return f"{100 * mean(arm, level, 'within_objective'):.0f}"

    def served(arm: str, level: int, runs: list[Row] = rows) -> float:
        return served_percent(runs_of(arm, level, runs))

    both = ("cap", "aimd")
    good = {
        at: " and ".join(f"{times(arm, at, 'good_per_s'):.2f}" for arm in both) for at in (12, 16)
    }
    waits = {
        arm: " and ".join(f"{mean(arm, at, 'longest_wait_s'):.0f}" for at in (12, 16))
        for arm in ("priced", *both)
    }
    rates = " and ".join(f"{1 / times(arm, 24, 'requests_per_s'):.2f}" for arm in both)
    sixteen = sorted(f"{mean(arm, 16, 'requests_per_s'):.2f}" for arm in ("priced", *both))
    least, most = sixteen[0], sixteen[-1]
    said = [
        f"has the most turns in time**: {mean('priced', 24, 'good_per_s'):.3f} within",
        f"{1 / times('cap', 24, 'good_per_s'):.2f} times those of `cap` with ten sessions",
        f"{1 / times('aimd', 24, 'good_per_s'):.2f} times those of `aimd`, more than `cap`",
        f"at {rates} times their requests/s",
        f"{good[12]} times ours with `cap` and `aimd` with twelve, {good[16]} times with 16",
        f"{within('cap', 16)} and {within('aimd', 16)} % are in time where ours has",
        f"ours has {within('priced', 16)} %, at as many requests/s ({least} to {most})",
        f"{waits['priced']} s on average, `aimd` {waits['aimd']} s, `cap` {waits['cap']} s",
        f"24 in flight {served('priced', 24):.0f} % of sessions got an answer",
        f"with `aimd` {served('aimd', 24):.0f} and with `cap` {served('cap', 24):.0f} %",
        (
            f"more than {mean('priced', 16, 'ttft_p90_s'):.1f} s, where it is "
            f"{mean('cap', 16, 'ttft_p90_s'):.1f} and {mean('aimd', 16, 'ttft_p90_s'):.1f} s"
        ),
        f"one draw has {max(values('priced', 16, 'ttft_p90_s')):.0f} s",
        (
            f"ours has the most ({mean('priced', 12, 'good_per_s'):.3f}, `aimd` "
            f"{mean('aimd', 12, 'good_per_s'):.3f}, `cap` {mean('cap', 12, 'good_per_s'):.3f})"
        ),
        f"requests/s of all ({mean('off', 12, 'requests_per_s'):.3f})",
        (
            f"and {within('off', 12)} % in time; with 16 it is {within('off', 16)} %, "
            f"at half the requests/s ({mean('off', 16, 'requests_per_s'):.3f})"
        ),
    ]
    said += [
        f"{served('priced', at):.0f}, {served('aimd', at):.0f} and {served('cap', at):.0f} %"
        for at in (16, 12)
    ]
    cached = [f"{mean(arm, 16, 'cached_share'):.2f}" for arm in ("priced", *both)]
    late = " or ".join(
        f"{100 * mean(f'cap-{n}', 16, 'within_objective', of_cap):.0f}" for n in (13, 14)
    )
    first = [row for row in rows if int(row["draw"]) in CHOSEN]
    rate = mean("priced", 16, "requests_per_s", first)
    more, fewer = (
        round(100 * mean(f"cap-{n}", 16, "requests_per_s", of_cap) / rate - 100) for n in (13, 14)
    )
    enough = " or ".join(f"{served(f'cap-{n}', 16, of_cap):.0f}" for n in (13, 14))
    most_served = max(served(f"cap-{n}", 24, of_cap) for n in range(6, 15))
    said += [
        f"(ours {100 * mean('priced', 16, 'within_objective', first):.0f} %, on the same draws)",
        f"`cap` needs 13 or 14 sessions to answer {enough} % of those that are there",
        f"at {more} % more or {-fewer} % fewer requests/s",
        f"with 24 no number of sessions up to 14 answers more than {most_served:.0f} %",
        (
            f"of prompt tokens {cached[0]} come from the cache with 16 in flight, "
            f"{cached[1]} with `cap` and {cached[2]} with `aimd`"
        ),
        f"then {late} % of its turns are in time",
        f"the shortest p99 ({statistics.median(values('off', 12, 'ttft_p99_s')):.0f} s)",
        f"with `off` half of the turns for {mean('off', 24, 'ttft_p50_s'):.0f} s",
    ]
    assert {within("lease", at) for at in (12, 16, 24)} == {"88", "91"}
    assert {f"{mean('lease', at, 'requests_per_s'):.2f}" for at in (12, 16, 24)} == {"0.45", "0.43"}
    assert [words for words in said if words not in text] == []
    assert times("cap", 16, "requests_per_s") == pytest.approx(1, abs=0.01)
    assert times("aimd", 16, "requests_per_s") == pytest.approx(1, abs=0.01)
    off_16, off_12 = (mean("off", at, "requests_per_s") for at in (16, 12))
    assert off_16 / off_12 == pytest.approx(0.5, abs=0.02)
    for at in (12, 16, 24):
        others = (mean(arm, at, "requests_per_s") for arm in ("priced", *both))
        assert mean("lease", at, "requests_per_s") < min(others)
    assert [more_in(arm, 24, "good_per_s") for arm in both] == [0, 0]
    assert [more_in(arm, at, "good_per_s") for at in (12, 16) for arm in both] == [1, 2, 5, 4]
    assert [more_in("aimd", at, "longest_wait_s") for at in (12, 16)] == [5, 5]
    # "fewer than `aimd` on draws 1 to 4 together", with twelve.
    assert sum(values("priced", 12, "good_per_s")[:4]) < sum(values("aimd", 12, "good_per_s")[:4])
    for at in (16, 24):
        over = []
        for draws in ([2], [0, 1, 3, 4, 5, 6, 7]):
            ours, cap, aimd = (
                sum(values(arm, at, "good_per_s")[draw] for draw in draws)
                for arm in ("priced", *both)
            )
            over.append((f"{ours / cap:.2f}", f"{ours / aimd:.2f}"))
        on_3, others = over
        assert f"{others[0]} and {others[1]}" in text
        words = f"{on_3[0]} and {on_3[1]} times, over the others"
        if at == 24:
            words = (
                f"{on_3[0]} times the turns within the objective a second of `cap` "
                f"and {on_3[1]} times those of `aimd`, over the other seven"
            )
        assert words in text
    left = [
        sum(wait >= 599 for wait in values(arm, 24, "longest_wait_s")) for arm in ("priced", *both)
    ]
    assert left == [7, 5, 6]
    for arm in ("off", "priced", *both):
        assert within(arm, 8) in {"97", "98"}
        assert 0.58 <= mean(arm, 8, "requests_per_s") < 0.595


def test_what_a_longer_bound_brings_follows_from_its_lines() -> None:
    text = PAGE.read_text()
    rows = [row for row in read_rows(RULES) if row["arm"] in {"priced", "cap", "aimd"}]
    rows += read_rows(BOUNDS)
    for levels in ({"8", "12"}, {"16", "24"}):
        shown = [row for row in rows if row["sessions"] in levels]
        assert "\n".join(frontier(shown, (CHOSEN, SHOWN))) in text

    def runs_of(arm: str, level: int) -> list[Row]:
        of = [row for row in rows if (row["arm"], row["sessions"]) == (arm, str(level))]
        assert [int(row["draw"]) for row in of] == [*CHOSEN, *SHOWN]
        return of

    def values(arm: str, level: int, column: str) -> list[float]:
        return [float(row[column]) for row in runs_of(arm, level)]

    def mean(arm: str, level: int, column: str) -> float:
        return statistics.fmean(values(arm, level, column))

    def more_in(arm: str, other: str, column: str, levels: tuple[int, ...]) -> list[int]:
        """Of eight draws, at each level."""
        return [
            sum(
                a > b
                for a, b in zip(values(arm, at, column), values(other, at, column), strict=True)
            )
            for at in levels
        ]

    def served(arm: str, level: int) -> str:
        return f"{served_percent(runs_of(arm, level)):.0f}"

    def good(arm: str, level: int) -> str:
        return f"{mean(arm, level, 'good_per_s'):.3f}"

    def rate(arm: str, level: int) -> str:
        return f"{mean(arm, level, 'requests_per_s'):.3f}"

    def wait(arm: str, level: int) -> str:
        return f"{mean(arm, level, 'longest_wait_s'):.0f}"

    def left(arm: str) -> int:
        return sum(wait_s >= 599 for wait_s in values(arm, 24, "longest_wait_s"))

    now, before, longer, old_price = "priced", "priced before", "fills-6.5", "reload-250000"
    together = "fills-6.5-overhead-0.1"
    times = {
        (other, at): mean(longer, at, "good_per_s") / mean(other, at, "good_per_s")
        for other, at in (("cap", 16), ("cap", 24), ("aimd", 24))
    }
    waits = {
        at: f"{wait(now, at)} s for {wait(before, at)}"
        if at == 12
        else f"{wait(now, at)} for {wait(before, at)}"
        for at in (12, 16, 24)
    }
    said = [
        (
            f"{good(now, 16)} a second for {good(before, 16)} with 16 in flight and "
            f"{good(now, 24)} for {good(before, 24)} with 24"
        ),
        (
            f"requests/s {rate(now, 16)} for {rate(before, 16)} and "
            f"{rate(now, 24)} for {rate(before, 24)}"
        ),
        f"{served(now, 16)} % of sessions for {served(before, 16)}, {served(now, 24)} for",
        f"{served(now, 24)} for {served(before, 24)}.",
        (
            f"the bound's ({good(old_price, 16)} with it alone), with 24 most of it "
            f"({good(old_price, 24)})"
        ),
        (
            f"price brings it**: {good(now, 12)} for {good(before, 12)}, more in seven of eight "
            f"draws and fewer in none ({good(old_price, 12)} with the bound alone)"
        ),
        f"With eight ({good(now, 8)} for {good(before, 8)}) draws would",
        (
            f"(with the bound alone {wait(old_price, 12)}, {wait(old_price, 16)} and "
            f"{wait(old_price, 24)} s)"
        ),
        f"{waits[12]} with twelve, {waits[16]} with 16, {waits[24]} with 24",
        f"{good(longer, 16)} a second with 16 and {good(longer, 24)} with 24",
        f"with twelve ({good(longer, 12)}) draws",
        (
            f"With 24 that is {times['cap', 24]:.2f} times those of `cap` and "
            f"{times['aimd', 24]:.2f} times those of `aimd`"
        ),
        f"with 16 {times['cap', 16]:.2f} times those of `cap`",
        f"{served(longer, 16)} % of sessions answered where `cap` answers {served('cap', 16)}",
        f"{wait(longer, 12)} s with twelve and {wait(longer, 16)} with 16",
        f"(`cap` {wait('cap', 12)} and {wait('cap', 16)} s)",
        f"{served(longer, 24)} % of sessions get an answer, where the default has",
        f"the default has {served(now, 24)} %",
        (
            f"{good('fills-9.5', 12)}, {good('fills-9.5', 16)} and {good('fills-9.5', 24)} a "
            f"second with twelve, 16 and 24, and {wait('fills-9.5', 12)} and "
            f"{wait('fills-9.5', 16)} s with twelve and 16"
        ),
        f"with 24 {served('fills-9.5', 24)} % of sessions get an answer",
        (
            f"as much as 6.5 ({good('overhead-0.1', 16)} with 16 and {good('overhead-0.1', 24)} "
            f"with 24) with a shorter longest wait with 16 ({wait('overhead-0.1', 16)} s)"
        ),
        f"with twelve and 16 ({good(together, 12)} and {good(together, 16)})",
        f"and as many with 24 ({good(together, 24)}, more in four of eight draws)",
        f"with 16 ({good('cap-9', 16)} and {good('cap', 16)})",
        f"13 answer {served('cap-13', 16)} % with {good('cap-13', 16)}",
        (
            f"({good('cap-11', 12)} and {good(now, 12)}, {served('cap-11', 12)} and "
            f"{served(now, 12)} % answered)"
        ),
        f"the longest wait is {wait('cap-11', 12)} s where it is {wait(now, 12)}",
    ]
    said.append(
        f"(`fills-0`): {wait('fills-0', 12)}, {wait('fills-0', 16)} and {wait('fills-0', 24)} s "
        "with twelve, 16 and 24, shorter than the default's in eight, eight and seven of eight "
        f"draws, for {good('fills-0', 12)}, {good('fills-0', 16)} and {good('fills-0', 24)} turns"
    )
    assert more_in(now, "fills-0", "longest_wait_s", (12, 16, 24)) == [8, 8, 7]
    assert [words for words in said if words not in text] == []
    assert more_in(now, before, "good_per_s", (12, 16, 24)) == [7, 7, 8]
    assert more_in(before, now, "good_per_s", (12, 16, 24)) == [0, 1, 0]
    assert more_in(now, old_price, "good_per_s", (24,)) == [8]
    assert more_in(now, before, "longest_wait_s", (12, 16, 24)) == [5, 7, 7]
    assert more_in(longer, now, "good_per_s", (12, 16, 24)) == [5, 8, 7]
    assert more_in("fills-9.5", now, "good_per_s", (12, 16, 24)) == [8, 8, 7]
    assert more_in(together, "fills-9.5", "good_per_s", (12, 16, 24)) == [0, 2, 4]
    most = mean("fills-9.5", 24, "good_per_s")
    assert mean(together, 24, "good_per_s") == pytest.approx(most, rel=0.01)
    assert more_in(now, "cap-11", "good_per_s", (12,)) == [4]
    assert more_in(longer, "cap", "good_per_s", (24,)) == [8]
    assert more_in(longer, "aimd", "good_per_s", (24,)) == [8]
    assert (left(before), left(now), left(longer)) == (1, 7, 8)
    assert sum(wait_s >= 599 for wait_s in values("fills-9.5", 16, "longest_wait_s")) == 4
    caps_there = [f"cap-{n}" for n in (8, 9, 11, 12, 13)] + ["cap"]
    best = sorted(caps_there, key=lambda arm: -mean(arm, 16, "good_per_s"))[:2]
    assert set(best) == {"cap-9", "cap"}


def test_other_pages_quote_what_the_rules_lines_say_of_16_sessions() -> None:
    rows = [row for row in read_rows(RULES) if row["sessions"] == "16"]
    good = {
        arm: statistics.fmean(float(row["good_per_s"]) for row in rows if row["arm"] == arm)
        for arm in ("priced", "aimd", "cap")
    }
    aimd, cap = (f"{100 * good[arm] / good['priced'] - 100:.0f}" for arm in ("aimd", "cap"))
    assert (
        f"[have {aimd} and {cap} %](simulated-rules.md)"
        in (RESULTS / "residency-fp8.md").read_text()
    )
    assert (
        f"([since then {aimd} to {cap} %](simulated-rules.md))"
        in (RESULTS / "predictions.md").read_text()
    )


def test_how_many_turns_came_back_to_neither_tier_follows_from_its_lines() -> None:
    rows = read_rows(RECOMPUTED)

    def mean(arm: str, level: int) -> str:
        of = [row for row in rows if (row["arm"], row["sessions"]) == (arm, str(level))]
        assert [int(row["draw"]) for row in of] == [*CHOSEN, *SHOWN]
        return f"{statistics.fmean(int(row['recomputed_turns']) for row in of):.0f}"

    text, before = PAGE.read_text(), "priced before"
    assert f"with 16 in flight {mean(before, 16)} turns a run came back to neither tier" in text
    assert f"where it is {mean('cap', 16)} with `cap`" in text
    assert f"{mean('priced', 16)} such turns a run are left with 16 in flight" in text
    assert (
        f"with 24 it is {mean('priced', 24)} where it was {mean(before, 24)} "
        f"(`cap` {mean('cap', 24)})"
    ) in text


@pytest.mark.parametrize(
    ("name", "kv_tokens", "seconds"),
    [
        ("qwen3-coder-30b-a3b-h200-sglang", 281888, 90),
        ("qwen3-coder-30b-a3b-h200-sglang-fp8", 563776, 143),
    ],
)
def test_how_long_a_time_slice_is_follows_from_the_calibration(
    name: str, kv_tokens: int, seconds: int
) -> None:
    table, prompt = read_calibration(name), 80_000
    overhead_s, tokens_per_s, pairs_per_s = (
        float(table[f"prefill_{constant}"])
        for constant in ("overhead_s", "tokens_per_s", "pairs_per_s")
    )
    prompt_s = overhead_s + prompt / tokens_per_s + prompt * prompt / 2 / pairs_per_s
    text, fill_s = PAGE.read_text(), kv_tokens / prompt * prompt_s
    assert round(fill_s / 0.2) == seconds
    assert re.search(rf"\b{seconds} s with {kv_tokens:,}", text)
    if "fp8" in name:
        assert f"{4.5 * fill_s:.0f} s here." in text
        assert f"`wait_bound_fills` 6.5, {6.5 * fill_s:.0f} s here" in text
