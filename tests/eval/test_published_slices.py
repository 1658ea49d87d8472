"""What docs/results/simulated.md says of no time slices while the turns of all fit."""

from __future__ import annotations

import statistics

import pytest

from eval.by_draw import OverDraws
from eval.noise import Verdict
from eval.run_lines import Row, read_rows
from eval.separation import carried_by_draw
from tests.eval.differences import by_draw, difference
from tests.eval.published import RESULTS

ALWAYS, FROM = "slices always", "slices from 0.85"


def section() -> str:
    text = (RESULTS / "simulated.md").read_text()
    return text[text.index("## No time slices while the turns of all fit") :]


def mean(rows: list[Row], arm: str, sessions: int, column: str) -> float:
    of = [r for r in rows if (r["arm"], int(r["sessions"])) == (arm, sessions)]
    return statistics.fmean(float(row[column]) for row in of)


def cells_of(
    rows: list[Row], arms: tuple[str, str], sessions: int, found: dict[str, OverDraws]
) -> list[str]:
    """A row of the page's tables: before and after, then the differences over draws."""
    shares = [100 * mean(rows, arm, sessions, "within_objective") for arm in arms]
    rates = [mean(rows, arm, sessions, "requests_per_s") for arm in arms]
    told = [difference(found[key]) for key in ("requests_per_s", "goodput_rps")]
    return [
        str(sessions),
        "{:.1f} → {:.1f} %".format(*shares),
        "{:.3f} → {:.3f}".format(*rates),
        *told,
    ]


@pytest.mark.parametrize("sessions", [6, 8, 10, 12, 16, 24])
def test_the_table_follows_from_its_lines(sessions: int) -> None:
    rows = read_rows(RESULTS / "simulated" / "slice-from.csv")
    found = by_draw(rows, sessions, ALWAYS, FROM)
    assert found["attainment"].draws == tuple(range(1, 33))
    cells = cells_of(rows, (ALWAYS, FROM), sessions, found)
    assert f"| {' | '.join(cells)} |" in section()
    better = {key for key, item in found.items() if item.verdict is Verdict.BETTER}
    assert better == {
        8: {"goodput_rps"},
        10: {"requests_per_s"},
        12: {"requests_per_s", "goodput_rps"},
    }.get(sessions, set())
    worse = {key for key, item in found.items() if item.verdict is Verdict.WORSE}
    assert worse == ({"tpot_p50"} if sessions == 10 else set())
    if sessions == 10:
        longer = found["tpot_p50"].effect.value
        assert f"at {100 * (longer - 1):.0f} % more time a token" in section()
    if sessions == 12:
        gains = [100 * (found[key].effect.value - 1) for key in ("requests_per_s", "goodput_rps")]
        said = "With twelve sessions {:.1f} % more requests/s and {:.1f} % more goodput"
        assert said.format(*gains) in section()
        points = 100 * found["attainment"].effect.value
        assert f"they have {points:.1f} points more, which is less than the noise" in section()


# Of the other workloads: what is called so on the page, and by sessions what is told apart.
OTHERS: dict[str, tuple[str, dict[int, set[str]]]] = {
    "vllm": (
        "vLLM in chunks of 4,096",
        {
            8: {"requests_per_s", "goodput_rps"},
            10: {"attainment", "requests_per_s", "goodput_rps"},
            12: {"ttft_p90"},
            16: set(),
            24: set(),
        },
    ),
    "think": (
        "a minute of thinking",
        {
            10: {"requests_per_s"},
            12: {"ttft_p90"},
            16: {"attainment", "requests_per_s", "goodput_rps"},
            24: set(),
        },
    ),
    "bf16": ("bf16 KV and a tier", {3: set(), 4: set(), 6: set(), 8: set(), 12: set()}),
}


@pytest.mark.parametrize("workload", OTHERS)
def test_the_table_of_other_workloads_follows_from_its_lines(workload: str) -> None:
    rows = read_rows(RESULTS / "simulated" / "slice-from-others.csv")
    called, told_apart = OTHERS[workload]
    always, from_fill = f"{workload} {ALWAYS}", f"{workload} {FROM}"
    assert {int(r["sessions"]) for r in rows if r["arm"] == always} == set(told_apart)
    for sessions, expected in told_apart.items():
        found = by_draw(rows, sessions, always, from_fill)
        assert found["attainment"].draws == tuple(range(1, 33 if workload == "think" else 17))
        cells = cells_of(rows, (always, from_fill), sessions, found)
        assert f"| {called}, {' | '.join(cells)} |" in section()
        better = {key for key, item in found.items() if item.verdict is Verdict.BETTER}
        assert better == expected
        assert not [item for item in found.values() if item.verdict is Verdict.WORSE]


def test_what_the_draws_say_on_which_nothing_was_chosen() -> None:
    rows = read_rows(RESULTS / "simulated" / "slice-from.csv")
    rows = [row for row in rows if int(row["draw"]) > 16]
    found = {of: by_draw(rows, of, ALWAYS, FROM)["goodput_rps"] for of in (8, 10, 12, 16)}
    rises = [100 * (item.effect.value - 1) for item in found.values()]
    rises[-1] *= -1
    said = "by {:.1f}, {:.1f} and {:.1f} % with eight, ten and twelve and falls by {:.1f} % with 16"
    assert said.format(*rises) in section()
    better = [of for of, item in found.items() if item.verdict is Verdict.BETTER]
    assert better == [8]


def test_what_residency_costs_with_ten_and_twelve() -> None:
    rows = read_rows(RESULTS / "simulated" / "slice-from.csv")
    costs, points = [], []
    for sessions in (10, 12):
        found = by_draw(rows, sessions, "without residency", ALWAYS)
        assert found["attainment"].draws == tuple(range(1, 17))
        assert found["requests_per_s"].verdict is Verdict.WORSE
        assert found["attainment"].verdict is Verdict.NONE
        rate = found["requests_per_s"].effect
        lost = [100 * (1 - value) for value in (rate.value, rate.high, rate.low)]
        costs.append("{:.1f} % [{:.1f}–{:.2g}]".format(*lost))
        points.append(f"{100 * found['attainment'].effect.value:.1f}")
    text = section()
    assert "{} with ten sessions and {} with twelve".format(*costs) in text
    assert f"at {points[0]} points more of turns in time with ten" in text
    assert f"and {points[1]} more with twelve" in text


def test_what_a_gpu_carries_without_slices_while_turns_fit() -> None:
    kept = RESULTS / "simulated"

    def carries(of: str, arm: str) -> float:
        rows = [row for row in read_rows(kept / f"{of}.csv") if row["arm"] == arm]
        return statistics.fmean(carried_by_draw(rows, "within_objective"))

    ours, vllm = "sglang-fp8-host-paced-residency", "vllm-fp8-host-residency chunk 4096"
    now, behind = (carries("slice-from-long", f"{arm} {FROM}") for arm in (ours, vllm))
    before, behind_before = (carries("slices-always", arm) for arm in (ours, vllm))
    assert (now, behind) == (carries("sessions-a-gpu", ours), carries("chunks", vllm))
    without = carries("chunks", "vllm-fp8-host chunk 4096")
    mixed = carries("chunks", "sglang-fp8-host mixed chunk 4096")
    text = section()
    assert f"{now:.1f} sessions in place of {before:.1f}, {now / without:.2f} times vLLM" in text
    assert f"and {now / mixed:.2f} times SGLang with its own mixed chunks" in text
    assert f"behind residency {behind:.1f} in place of {behind_before:.1f}, where" in text
    assert f"where it carries {without:.1f} without" in text
    chunks = (RESULTS / "simulated-chunks.md").read_text()
    kinds = (("always", "slices-always"), ("now", "chunks"))
    rows = [
        row | {"arm": kind}
        for kind, of in kinds
        for row in read_rows(kept / f"{of}.csv")
        if row["arm"] == vllm
    ]
    tpot = by_draw(rows, 12, "now", "always")["tpot_p50"]
    assert tpot.verdict is Verdict.BETTER
    said = (
        f"carries {behind - without:.1f} sessions more than without residency; with time slices "
        f"always it was {without - behind_before:.1f} fewer, and with twelve sessions a token took "
        f"{100 * (1 - tpot.effect.value):.0f} % less time"
    )
    assert said in chunks, said
