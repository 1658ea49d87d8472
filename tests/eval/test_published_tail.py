"""What docs/results/simulated-tail.md says of long waits follows from the lines that it keeps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from eval.run_lines import Row, read_rows
from eval.waits import KEPT_S, waits
from tests.eval.published import RESULTS, served_percent

PAGE = RESULTS / "simulated-tail.md"
HALVES = (range(1, 5), range(5, 9))


def _rows(name: str) -> list[Row]:
    return read_rows(RESULTS / "simulated" / f"{name}.csv")


def _runs() -> list[Row]:
    """Of all arms of the page; the default's are those of the page of rules."""
    return _rows("tail") + [row for row in _rows("rules") if row["arm"] == "priced"]


def _of(rows: Sequence[Row], arm: str, level: int, draws: range = range(1, 9)) -> list[Row]:
    return [
        row
        for row in rows
        if (row["arm"], row["sessions"]) == (arm, str(level)) and int(row["draw"]) in draws
    ]


def _mean(rows: Sequence[Row], column: str) -> float:
    return statistics.fmean(float(row[column]) for row in rows)


def _seconds(wait_s: float) -> str:
    return f"under {KEPT_S:.0f} s" if wait_s < KEPT_S else f"{wait_s:.0f} s"


def test_the_tables_of_long_waits_follow_from_their_lines() -> None:
    text = PAGE.read_text()
    runs, long = _runs(), _rows("tail-waits")
    recomputed = _rows("tail-recomputed") + _rows("rules-recomputed")
    for level in (8, 12, 16, 24):
        head = f"| simulated, {level} in flight |"
        table = text.partition(head)[2].partition("\n\n")[0].splitlines()[2:]
        arms = [line.split("`")[1] for line in table]
        assert sorted(arms) == sorted({row["arm"] for row in runs})
        for line, arm in zip(table, arms, strict=True):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            of = _of(runs, arm, level)
            p95_s, p97_s, p99_s = waits(_of(long, arm, level), (0.95, 0.97, 0.99))
            p99 = _seconds(p99_s)
            if p99_s >= KEPT_S:
                halves = [waits(_of(long, arm, level, half), (0.99,))[0] for half in HALVES]
                p99 += f" ({'; '.join(map(_seconds, halves))})"
            in_time = [_mean(_of(runs, arm, level, half), "good_per_s") for half in HALVES]
            again = _mean(_of(recomputed, arm, level), "recomputed_turns")
            assert cells[1:7] == [
                _seconds(p95_s),
                _seconds(p97_s),
                p99,
                f"{_mean(of, 'good_per_s'):.3f} ({in_time[0]:.3f}; {in_time[1]:.3f})",
                f"{_mean(of, 'requests_per_s'):.3f}",
                f"{served_percent(of):.0f} %",
            ]
            assert cells[8] == f"{again:.1f}"


def test_what_holds_on_both_halves_of_the_draws() -> None:
    runs, long = _runs(), _rows("tail-waits")
    arms = {row["arm"] for row in runs if row["arm"].startswith("bound-20")} | {"fill-0.7"}
    for half in HALVES:
        for arm in arms:
            for level in (16, 24):
                own_s, usual_s = (
                    waits(_of(long, name, level, half), (0.99,))[0] for name in (arm, "priced")
                )
                assert own_s < usual_s
            own, usual = (
                _mean(_of(runs, name, 24, half), "good_per_s") for name in (arm, "priced")
            )
            assert own < usual


def test_the_longest_waits_with_a_short_bound() -> None:
    runs = _runs()
    found = [
        round(_mean(_of(runs, arm, level), "longest_wait_s"))
        for arm in ("bound-20-fill-0.85", "priced")
        for level in (16, 24)
    ]
    assert found == [164, 288, 378, 595]


def test_what_the_page_says_of_its_tables_follows_from_their_lines() -> None:
    text, runs, long = PAGE.read_text(), _runs(), _rows("tail-waits")

    def p99(arm: str, level: int) -> str:
        return f"{waits(_of(long, arm, level), (0.99,))[0]:.0f}"

    def p95(arm: str, level: int) -> str:
        return f"{waits(_of(long, arm, level), (0.95,))[0]:.0f}"

    def good(arm: str, level: int) -> str:
        return f"{_mean(_of(runs, arm, level), 'good_per_s'):.3f}"

    def times(arm: str, level: int, column: str = "good_per_s") -> float:
        own, usual = (_mean(_of(runs, name, level), column) for name in (arm, "priced"))
        return own / usual

    def fewer(arm: str, level: int, column: str = "good_per_s") -> str:
        return f"{100 - 100 * times(arm, level, column):.0f}"

    def served(arm: str, level: int) -> str:
        return f"{served_percent(_of(runs, arm, level)):.0f}"

    step, short = "fill-0.7", "bound-20-fill-0.85"
    said = [
        f"With 24 in flight {p99(short, 24)} s is reached, at {times(short, 24):.2f} times",
        f"{times(short, 24, 'requests_per_s'):.2f} times the requests/s (`{short}`)",
        (
            f"{p99('bound-20-fill-0.92', 16)} s with 16 at {times('bound-20-fill-0.92', 16):.2f} "
            f"times (`bound-20-fill-0.92`), and {p99(short, 16)} s at {times(short, 16):.2f} times"
        ),
        (
            f"p99 {p99(step, 12)} s for {p99('priced', 12)} with twelve in flight, {p99(step, 16)} "
            f"for {p99('priced', 16)} with 16 and {p99(step, 24)} for {p99('priced', 24)} with 24"
        ),
        (
            f"({good(step, 8)} and {good(step, 12)} a second for {good('priced', 8)} and "
            f"{good('priced', 12)}; with twelve"
        ),
        f"with twelve there are {-int(fewer(step, 12, 'requests_per_s'))} % more requests/s",
        (
            f"{fewer(step, 16)} % of the turns in time a second with 16 and {fewer(step, 24)} % "
            f"with 24, at {-int(fewer(step, 16, 'requests_per_s'))} % more and "
            f"{fewer(step, 24, 'requests_per_s')} % fewer requests/s"
        ),
        f"the p99 is {p99('bound-20', 16)} and {p99('bound-20', 24)} s (`bound-20`)",
        (
            f"waits for {p95('bound-20', 16)} and {p95('bound-20', 24)} s in place of "
            f"{p95('priced', 16)} and {p95('priced', 24)} s"
        ),
        (
            f"answers {served('overhead-0.4', 24)} % of sessions in place of "
            f"{served('priced', 24)} with 24 in flight and {served('overhead-0.4', 16)} in place "
            f"of {served('priced', 16)} with 16, at {fewer('overhead-0.4', 24)} and "
            f"{fewer('overhead-0.4', 16)} % fewer"
        ),
        f"`bound-20` has {fewer('bound-20', 24)} % fewer turns in time",
    ]
    assert [words for words in said if words not in text] == []
