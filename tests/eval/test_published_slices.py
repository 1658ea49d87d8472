"""What docs/results/simulated.md says of no time slices while the tier keeps all."""

from __future__ import annotations

import statistics

import pytest

from eval.by_draw import OverDraws, over_draws
from eval.formatting import effect, effect_interval
from eval.noise import Verdict
from eval.run_lines import Row, read_rows
from tests.eval.published import RESULTS

ALWAYS, FROM = "slices always", "slices from 0.6"


def section() -> str:
    text = (RESULTS / "simulated.md").read_text()
    return text[text.index("## No time slices while the tier keeps all") :]


def mean(rows: list[Row], arm: str, sessions: int, column: str) -> float:
    of = [r for r in rows if (r["arm"], int(r["sessions"])) == (arm, sessions)]
    return statistics.fmean(float(row[column]) for row in of)


def by_key(rows: list[Row], base: str, arm: str, sessions: int) -> dict[str, OverDraws]:
    return {item.measure.key: item for item in over_draws(rows, sessions, base, [arm])}


@pytest.mark.parametrize("sessions", [6, 8, 10, 12, 16, 24])
def test_the_table_follows_from_its_lines(sessions: int) -> None:
    rows = read_rows(RESULTS / "simulated" / "slice-from-tier.csv")
    found = by_key(rows, ALWAYS, FROM, sessions)
    assert found["attainment"].draws == tuple(range(1, 33))
    shares = [100 * mean(rows, arm, sessions, "within_objective") for arm in (ALWAYS, FROM)]
    rates = [mean(rows, arm, sessions, "requests_per_s") for arm in (ALWAYS, FROM)]
    told = [
        f"{effect(item.measure, item.effect.value)} [{effect_interval(item.measure, item.effect)}]"
        for item in (found["requests_per_s"], found["goodput_rps"])
    ]
    cells = [
        str(sessions),
        "{:.1f} → {:.1f} %".format(*shares),
        "{:.3f} → {:.3f}".format(*rates),
        *told,
    ]
    assert f"| {' | '.join(cells)} |" in section()
    better = {key for key, item in found.items() if item.verdict is Verdict.BETTER}
    assert better == {10: {"requests_per_s"}, 12: {"requests_per_s", "goodput_rps"}}.get(
        sessions, set()
    )
    assert not [key for key, item in found.items() if item.verdict is Verdict.WORSE]


def test_what_residency_costs_with_ten_and_twelve() -> None:
    rows = read_rows(RESULTS / "simulated" / "slice-from-tier.csv")
    costs, points, shares = [], [], []
    for sessions in (10, 12):
        found = by_key(rows, "without residency", ALWAYS, sessions)
        assert found["attainment"].draws == tuple(range(1, 17))
        assert found["requests_per_s"].verdict is Verdict.WORSE
        assert found["attainment"].verdict is Verdict.NONE
        rate = found["requests_per_s"].effect
        lost = [100 * (1 - value) for value in (rate.value, rate.high, rate.low)]
        costs.append("{:.1f} % [{:.1f}–{:.2g}]".format(*lost))
        points.append(f"{100 * found['attainment'].effect.value:.1f}")
        now = by_key(rows, ALWAYS, FROM, sessions)["requests_per_s"].effect.value
        shares.append((now - 1) / (1 - rate.value))
    text = section()
    assert "{} with ten sessions and {} with twelve".format(*costs) in text
    assert f"at {points[0]} points more of turns in time with ten" in text
    assert f"and {points[1]} more with twelve" in text
    assert shares == pytest.approx([0.44, 0.48], abs=0.01), "nearly half"


def test_of_others_nothing_is_told_apart() -> None:
    rows = read_rows(RESULTS / "simulated" / "slice-from-tier-others.csv")
    arms = dict.fromkeys(row["arm"].rsplit(": ", 1)[0] for row in rows)
    assert len(arms) == 3
    for arm in arms:
        levels = {int(row["sessions"]) for row in rows if row["arm"].startswith(arm)}
        for sessions in levels:
            found = by_key(rows, f"{arm}: {ALWAYS}", f"{arm}: {FROM}", sessions)
            for key in ("attainment", "requests_per_s", "goodput_rps"):
                assert found[key].verdict is Verdict.NONE, (arm, sessions, key)
                assert len(found[key].draws) == 8
