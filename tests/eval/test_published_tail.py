"""What docs/results/simulated-tail.md says of long waits follows from the lines that it keeps."""

from __future__ import annotations

import math
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

    def shorter(arm: str, level: int) -> list[bool]:
        """Whether an arm's p99 is shorter than the default's, on each half."""
        p99s = [
            [waits(_of(long, name, level, half), (0.99,))[0] for name in (arm, "priced")]
            for half in HALVES
        ]
        return [own_s < usual_s for own_s, usual_s in p99s]

    for arm in arms:
        assert shorter(arm, 16) == [True, True]
        assert shorter(arm, 24) == [True, arm != "fill-0.7"]
        for half in HALVES:
            own, usual = (
                _mean(_of(runs, name, 24, half), "good_per_s") for name in (arm, "priced")
            )
            assert own < usual
    # With 24 both shorten the p99 on draws 1 to 4 and lengthen it on 5 to 8.
    assert shorter("fill-0.85", 24) == [True, False]


def test_the_longest_waits_with_a_short_bound() -> None:
    runs = _runs()
    found = [
        round(_mean(_of(runs, arm, level), "longest_wait_s"))
        for arm in ("bound-20-fill-0.85", "priced")
        for level in (16, 24)
    ]
    assert found == [166, 284, 379, 595]


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


def test_the_table_of_vllm_and_bf16_follows_from_its_lines() -> None:
    text, runs, long = PAGE.read_text(), _rows("tail-others"), _rows("tail-others-waits")
    arms = {"vLLM": "vllm-fp8-host-residency", "bf16": "sglang-host-residency"}
    lost: dict[tuple[str, int], float] = {}
    for name, arm in arms.items():
        for level in (8, 12, 16, 24):
            both = [_of(runs, of, level) for of in (arm, f"{arm} fill-0.7")]
            assert [len(of) for of in both] == [8, 8]
            waited = [waits(_of(long, of, level), (0.95, 0.99)) for of in (arm, f"{arm} fill-0.7")]
            cells = [_change(usual_s, own_s) for usual_s, own_s in zip(*waited, strict=True)]
            for column in ("good_per_s", "requests_per_s"):
                cells.append(" → ".join(f"{_mean(of, column):.3f}" for of in both))
            cells.append(" → ".join(f"{served_percent(of):.0f}" for of in both) + " %")
            assert f"| {name}, {level} in flight | {' | '.join(cells)} |" in text
            usual, own = (_mean(of, "good_per_s") for of in both)
            lost[name, level] = 100 - 100 * own / usual
    vllm = [f"{lost['vLLM', level]:.0f}" for level in (16, 24)]
    bf16 = [lost["bf16", level] for level in (12, 16, 24)]
    more = _more_requests(runs, arms["bf16"], 8)
    said = [
        f"{' and '.join(vllm)} % of the turns in time a second with vLLM and 16 and 24 sessions",
        f"{min(bf16):.0f} to {max(bf16):.0f} % with bf16 KV and twelve or more",
        f"With eight and bf16 KV it is {lost['bf16', 8]:.0f} %, and requests/s are {more:.0f} %",
    ]
    assert [words for words in said if words not in text] == []


def _more_requests(runs: Sequence[Row], arm: str, level: int) -> float:
    """With `fill-0.7`, in percent."""
    usual, own = (_mean(_of(runs, of, level), "requests_per_s") for of in (arm, f"{arm} fill-0.7"))
    return 100 * own / usual - 100


def _change(usual_s: float, own_s: float) -> str:
    """A wait by default and with `fill-0.7`."""
    usual, own = (
        _seconds(wait_s) if math.isfinite(wait_s) else "beyond the run"
        for wait_s in (usual_s, own_s)
    )
    if usual == own:
        return f"{usual}, both"
    return f"{usual} → {own}" if math.isinf(usual_s) else f"{usual.removesuffix(' s')} → {own}"
