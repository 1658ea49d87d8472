"""The figures of docs/results/h200-memory.md are what its raw lines say."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from eval.records import Run
from eval.run_lines import figures, read_rows
from eval.steady import State, steadiness
from tests.eval.differences import longer, longest_s, over, points, times
from tests.eval.published import (
    RESULTS,
    decisions,
    lines,
    phases,
    plan_text,
    row,
    run_of,
    says,
)
from tests.eval.run_cells import cells, interval_cells, queued
from tests.eval.windows import recomputed_percent, within_slo

FOLDER = "h200"
PAGE = (RESULTS / "h200-memory.md").read_text()
OURS, MIXED, VLLM = "ours", "mixed", "vllm-4096"
RATE = "requests_per_s"
TABLES = [
    [f"{arm}-{sessions}-draw{draw}" for arm in (OURS, MIXED, VLLM) for draw in (2, 3)]
    for sessions in (16, 24)
] + [["vllm-4-draw2", "vllm-6-draw2", "vllm-6-draw3", "vllm-8-draw2", "vllm-8-draw3"]]
RUNS = [name for table in TABLES for name in table]
# By the name of its raw lines: the experiment's arm, and what pages call it.
ARMS = {
    OURS: ("sglang-fp8-host-paced-residency", "ours"),
    MIXED: ("sglang-fp8-host-mixed", "SGLang's mixed chunks"),
    VLLM: ("vllm-fp8-host-4096", "vLLM in chunks of 4,096"),
    "vllm": ("vllm", "vLLM as it comes"),
}
Read = Callable[[str], Run]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Read:
    folder = tmp_path_factory.mktemp(FOLDER)
    return cache(lambda name: run_of(name, folder / name, FOLDER))


@pytest.mark.parametrize("table", range(3))
def test_every_figure_of_a_table_comes_from_its_lines(table: int, run: Read) -> None:
    runs = [run(name) for name in TABLES[table]]
    found = interval_cells(runs)
    for each in runs:
        for label, cell in cells(each).items():
            found.setdefault(label, []).append(cell)
    assert {label: row(table, label, PAGE) for label in found} == found


def test_all_are_steady_but_one(run: Read) -> None:
    other = {name for name in RUNS if steadiness(run(name)).state is not State.STEADY}
    assert other == {"vllm-8-draw2"}


@pytest.mark.parametrize("draws", [(2,), (3,), (2, 3)])
@pytest.mark.parametrize("sessions", [16, 24])
def test_what_ours_has_over_the_others(sessions: int, draws: tuple[int, ...], run: Read) -> None:
    found = []
    for arm in (MIXED, VLLM):
        base, ours = ([run(f"{of}-{sessions}-draw{draw}") for draw in draws] for of in (arm, OURS))
        share = points(over(base, ours, "attainment")).replace("−0]", "0]")
        found += [times(over(base, ours, RATE)), share]
    says(PAGE, f"| {sessions} | {' and '.join(map(str, draws))} | {' | '.join(found)} |")


def test_what_a_practitioner_takes_from_it(run: Read) -> None:
    within = {name: f"{within_slo(run(name)):.0f}" for name in RUNS}
    shares = {
        (arm, sessions): [within[f"{arm}-{sessions}-draw{draw}"] for draw in (2, 3)]
        for arm in (OURS, MIXED, VLLM)
        for sessions in (16, 24)
    }
    slower, *more = (
        over(*([run(f"{arm}-{sessions}-draw{of}") for of in (2, 3)] for arm in arms), RATE)
        for sessions, *arms in ((16, OURS, VLLM), (24, MIXED, OURS), (24, VLLM, OURS))
    )
    slower_ms = [
        1e3 * (token_s(run(f"{VLLM}-16-draw{of}")) - token_s(run(f"{OURS}-16-draw{of}")))
        for of in (2, 3)
    ]
    waits_s = [
        float(np.quantile([waited_s for _, waited_s in queued(f"{arm}-24-draw{of}", FOLDER)], 0.5))
        for arm, of in ((MIXED, 2), (OURS, 2), (MIXED, 3))
    ]
    in_time = [cells(run(name))["turns in time a second"] for name in RUNS]
    rates = dict(zip(RUNS, map(float, in_time), strict=True))
    best = [max(rates[name] for name in TABLES[2] if name.endswith(of)) for of in ("2", "3")]
    long = [longer(run(f"{OURS}-24-draw{of}"), 30.0) for of in (2, 3)]
    longest = [max(longest_s(run(f"{arm}-24-draw{of}")) for of in (2, 3)) for arm in (OURS, MIXED)]
    assert long == [(4, 107), (4, 120)]
    says(
        PAGE,
        "have {} and {}, {} and {} % of turns in time".format(
            *shares[OURS, 16], *shares[MIXED, 16]
        ),
        "vLLM has {} and {} %, at {:.2f} times ours'".format(*shares[VLLM, 16], slower.value),
        "tokens take {:.0f} to {:.0f} ms longer".format(*sorted(slower_ms)),
        (
            "{} and {} % in time, where SGLang without it has {} and none and vLLM {} and none"
        ).format(*shares[OURS, 24], shares[MIXED, 24][0], shares[VLLM, 24][0]),
        f"recomputes {recomputed_percent(run('mixed-24-draw2')):.1f} % only",
        "turns wait {:.1f} s and longer in its queue for room in the GPU's KV cache, ours "
        "{:.2f} s".format(*waits_s),
        "{:.0f} % is recomputed, half wait for {:.0f} s".format(
            recomputed_percent(run("mixed-24-draw3")), waits_s[2]
        ),
        (
            "{:.2f} times the requests/s of SGLang's mixed chunks [{:.2f}–{:.2f} over both draws] "
            "and {:.2f} times vLLM's [{:.2f}–{:.2f}]"
        ).format(*(at for of in more for at in (of.value, of.low, of.high))),
        (
            f"{within['vllm-4-draw2']} % in time with four sessions of draw 2 and "
            f"{within['vllm-6-draw2']} % with six, {within['vllm-6-draw3']} % with six of draw 3 "
            f"and {within['vllm-8-draw3']} % with eight"
        ),
        (
            "has {:.2f} and {:.2f} turns in time a second, ours {:.2f} with 16 of draw 2 and "
            "{:.2f} with 24 of draw 3"
        ).format(*best, rates["ours-16-draw2"], rates["ours-24-draw3"]),
        first_tokens(run),
        "one for {:.0f} s, where the longest wait behind SGLang alone is {:.0f} s".format(*longest),
    )


def first_tokens(run: Read) -> str:
    """What the page says of first tokens within 30 and 10 s with 24 sessions."""
    late, soon = (
        [
            cells(run(f"{arm}-24-draw{draw}"))[f"first token within {limit} s"].removesuffix(" %")
            for arm in (VLLM, MIXED, OURS)
            for draw in (2, 3)
        ]
        for limit in (30, 10)
    )
    assert late[0] == late[1]
    return (
        f"{late[0]} % of vLLM's turns have it, {late[2]} and {late[3]} % of SGLang's mixed "
        f"chunks', {late[4]} and {late[5]} % of ours; within 10 s it is {soon[0]} and {soon[1]}, "
        f"{soon[2]} and {soon[3]}, {soon[4]} and {soon[5]} %"
    )


def token_s(run: Run) -> float:
    """The median of its turns' time a token."""
    return float(figures(run)["tpot_p50_s"])


def test_what_was_simulated_is_what_was_predicted(run: Read) -> None:
    rows = read_rows(RESULTS / "simulated" / "h200-windows.csv")
    simulated = {(line["arm"], line["sessions"], line["draw"]): line for line in rows}
    off: dict[str, list[int]] = {arm: [] for arm in ARMS}
    apart = {}
    for arm, (name, label) in ARMS.items():
        for sessions in ("4", "6", "8") if arm == "vllm" else ("16", "24"):
            cells = []
            for draw in ("2", "3"):
                of = f"{arm}-{sessions}-draw{draw}"
                line = simulated[name, sessions, draw]
                rate, share = (float(line[each]) for each in ("requests_per_s", "within_objective"))
                says(
                    plan_text(),
                    f"| `{name}`, {sessions} |",
                    f"{rate:.3f}; {100 * share:.0f} % |",
                )
                if of not in RUNS:
                    cells += ["", ""]
                    continue
                measured = float(figures(run(of))["requests_per_s"])
                within = within_slo(run(of))
                off[arm].append(round(100 * (rate / measured - 1)))
                apart[of] = round(100 * share) - round(within)
                cells += [f"{rate:.3f}; {measured:.3f}", f"{100 * share:.0f}; {within:.0f} %"]
            assert f"| {label}, {sessions} | {' | '.join(cells)} |" in PAGE
    assert {arm: sorted(each) for arm, each in off.items()} == {
        OURS: [3, 5, 7, 8],
        MIXED: [-16, 1, 4, 6],
        VLLM: [4, 7, 13, 14],
        "vllm": [-3, 0, 0, 1, 3],
    }
    twelve = [float(simulated[ARMS[OURS][0], "12", of]["within_objective"]) for of in "23"]
    says(PAGE, "edge of it: ours {:.0f} and {:.0f} %".format(*(100 * each for each in twelve)))
    assert apart.pop("vllm-4096-16-draw2") == 11
    assert max(map(abs, apart.values())) == 4


def test_the_ranges_that_were_predicted(run: Read) -> None:
    """Requests/s within a fifth of what was simulated, but where two lie on the edge, and shares
    of turns in time."""
    simulated = {
        (line["arm"], line["sessions"], line["draw"]): float(line["requests_per_s"])
        for line in read_rows(RESULTS / "simulated" / "h200-windows.csv")
    }
    rates = {"vllm-6-draw2": (0.12, 0.40), "vllm-8-draw3": (0.15, 0.42)}
    shares = {
        "ours-16-draw2": (66, 92),
        "ours-16-draw3": (58, 88),
        "ours-24-draw2": (66, 94),
        "ours-24-draw3": (62, 92),
        "mixed-16-draw2": (66, 94),
        "mixed-16-draw3": (60, 90),
        "mixed-24-draw2": (0, 40),
        "mixed-24-draw3": (0, 20),
        "vllm-4096-16-draw2": (68, 95),
        "vllm-4096-16-draw3": (28, 70),
        "vllm-4096-24-draw2": (0, 25),
        "vllm-4096-24-draw3": (0, 15),
        "vllm-4-draw2": (82, 100),
        "vllm-6-draw2": (0, 65),
        "vllm-6-draw3": (85, 100),
        "vllm-8-draw2": (0, 10),
        "vllm-8-draw3": (0, 50),
    }
    assert set(shares) == set(RUNS)
    held = 0
    for name, (low, high) in shares.items():
        arm, sessions, draw = name.rsplit("-", 2)
        said = simulated[ARMS[arm][0], sessions, draw.removeprefix("draw")]
        least, most = rates.get(name, (0.8 * said, 1.2 * said))
        held += least <= float(figures(run(name))["requests_per_s"]) <= most
        held += low <= within_slo(run(name)) <= high
    assert held == 2 * len(RUNS)
    says(PAGE, f"{held} ranges of these seventeen runs, and all held")


def test_what_the_router_believed_at_first() -> None:
    """Primings that were placed at a run's beginning on KV of the run before."""
    found = {}
    for name in RUNS:
        was_cached = {line["request_id"]: line["cached_tokens"] for line in lines(name, FOLDER)}
        placed = [e for e in decisions(name, FOLDER) if e["event"] == "decision"]
        found[name] = sum(
            e["cached_tokens"].get(e["worker"], 0) > 0 == was_cached.get(e["request_id"])
            for e in placed
            if e["ts_unix_s"] - placed[0]["ts_unix_s"] < 0.1
        )
    misled = [name for name, primings in found.items() if primings]
    assert misled == ["vllm-4096-24-draw2", "vllm-4096-24-draw3", "vllm-4-draw2", "vllm-8-draw3"]
    least_s = min(phases(name, FOLDER)["window_start_s"] for name in misled)
    says(PAGE, f"the window began {least_s:.0f} s later at the earliest")


def test_what_other_pages_say_of_it(run: Read) -> None:
    within = {name: f"{within_slo(run(name)):.0f}" for name in RUNS}
    rates = {name: f"{float(figures(run(name))['requests_per_s']):.3f}" for name in RUNS}
    readme = (RESULTS.parents[1] / "README.md").read_text()
    for arm, label in (
        (VLLM, "vLLM in chunks of 4,096"),
        (MIXED, "SGLang, its own mixed chunks of 4,096"),
        (OURS, "SGLang, **paced prefill and residency**"),
    ):
        both = [
            "{} · {}; {} · {}".format(
                *(of[f"{arm}-{sessions}-draw{draw}"] for of in (within, rates) for draw in (2, 3))
            )
            for sessions in (16, 24)
        ]
        says(readme, f"| {label} | {' | '.join(both)} |")
    says(
        readme,
        f"{within['vllm-4-draw2']} % in time with four sessions of draw 2 and "
        f"{within['vllm-6-draw2']} % with six, {within['vllm-6-draw3']} % with six of draw 3 and "
        f"{within['vllm-8-draw3']} % with eight.",
    )
    means = [
        over(
            *([run(f"{arm}-24-draw{of}") for of in (2, 3)] for arm in (base, OURS)),
            RATE,
        ).value
        for base in (VLLM, MIXED)
    ]
    says(
        (RESULTS / "agents-a-gpu.md").read_text(),
        "with 16 ours has {} and {} % of turns in time on two draws, SGLang's mixed chunks {} and "
        "{} %, vLLM in chunks of 4,096 {} and {} %; with 24 ours {} and {} %, the others {} % at "
        "most".format(*(within[name] for name in (*TABLES[0], *TABLES[1][:3]))),
        "24: {} and {} %, vLLM {} and {} %, SGLang's mixed chunks {} and {} %, ".format(
            *(within[f"{arm}-24-draw{of}"] for arm in (OURS, VLLM, MIXED) for of in (2, 3))
        )
        + "{:.2f} and {:.2f} times their requests/s".format(*means),
    )
