"""The figures of docs/results/routers.md are what its raw lines say."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from eval.records import Run
from eval.run_lines import figures, read_rows
from tests.eval.differences import over, points, times
from tests.eval.published import RESULTS, decisions, lines, phases, row, run_of, says
from tests.eval.run_cells import best_cached, cells, interval_cells, queued
from tests.eval.windows import within_slo

FOLDER = "routers"
RUNS = ("stock-24", "priced-24", "stock-32", "priced-32")
PAGE = (RESULTS / "routers.md").read_text()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("routers")
    return {name: run_of(name, folder / name, FOLDER) for name in RUNS}


def _cells(label: str) -> list[str]:
    return row(0, label, PAGE)


def test_every_figure_of_a_run_comes_from_its_lines(runs: dict[str, Run]) -> None:
    found = interval_cells(list(runs.values()))
    for name, run in runs.items():
        queued_s = [wait_s for _, wait_s in queued(name, FOLDER)]
        waits = {
            "in the engine's queue, p50": f"{np.quantile(queued_s, 0.5):.2f} s",
            "in the engine's queue, p90": f"{np.quantile(queued_s, 0.9):.1f} s",
        }
        for label, cell in (cells(run) | waits).items():
            found.setdefault(label, []).append(cell)
    assert {label: _cells(label) for label in found} == found
    best = [best_cached(run) for run in runs.values()]
    says(PAGE, "{:.3f}, {:.3f}, {:.3f} and {:.3f} of their prompt tokens".format(*best))


def test_what_is_said_of_the_queue() -> None:
    by_worker: dict[str, list[float]] = {}
    for worker, waited_s in queued("stock-24", FOLDER):
        by_worker.setdefault(worker, []).append(waited_s)
    low_s, high_s = sorted(statistics.median(of) for of in by_worker.values())
    assert f"on the fuller worker {high_s:.1f} s, on the other {low_s:.1f} s" in PAGE
    ours_s = [wait_s for name in ("priced-24", "priced-32") for _, wait_s in queued(name, FOLDER)]
    assert np.quantile(ours_s, 0.9) <= 0.25


def test_what_residency_adds(runs: dict[str, Run]) -> None:
    for sessions in ("32", "24"):
        base, arm = ([runs[f"{name}-{sessions}"]] for name in ("stock", "priced"))
        rate, share = over(base, arm, "requests_per_s"), over(base, arm, "attainment")
        told = f"with {sessions} {times(rate)} the requests/s and {points(share)} of turns in time"
        assert told in PAGE


def test_what_other_pages_say_of_it(runs: dict[str, Run]) -> None:
    within = {name: f"{within_slo(run):.0f}" for name, run in runs.items()}
    rates = (float(figures(runs[name])["requests_per_s"]) for name in ("priced-32", "stock-32"))
    ratio = f"at {next(rates) / next(rates):.2f} times the requests/s"
    waited = [
        float(np.quantile([wait_s for _, wait_s in queued(name, FOLDER)], 0.5))
        for name in ("stock-32", "priced-32")
    ]
    readme = (RESULTS.parents[1] / "README.md").read_text()
    assert (
        f"{within['priced-24']} % of turns are in time behind residency and {within['stock-24']} % "
        "behind [SGLang's own router](docs/results/routers.md), with 32 "
        f"{within['priced-32']} and {within['stock-32']} %, {ratio}; there half of the turns wait "
        f"{waited[0]:.1f} s in SGLang's queue, here {waited[1]:.2f} s."
    ) in readme
    assert (
        f"{within['priced-32']} % where [SGLang's own router](routers.md) has "
        f"{within['stock-32']} %, {ratio}."
    ) in (RESULTS / "agents-a-gpu.md").read_text()


def test_what_the_run_says_that_was_cut_off() -> None:
    start_s = phases("off-24-cut-off", FOLDER)["window_start_s"]
    off = [line for line in lines("off-24-cut-off", FOLDER) if line["phase"] == "measure"]
    assert len(off) == 49
    seconds = max(line["finished_s"] for line in off) - start_s
    assert f"ended {seconds:.0f} s into the window" in PAGE
    medians = [statistics.median(line["first_token_s"] - line["scheduled_s"] for line in off)]
    for name in ("stock-24", "priced-24"):
        from_s = phases(name, FOLDER)["window_start_s"]
        medians.append(
            statistics.median(
                line["first_token_s"] - line["scheduled_s"]
                for line in lines(name, FOLDER)
                if line["phase"] == "measure"
                and not line["error"]
                and line["finished_s"] < from_s + seconds
            )
        )
    shown = [f"{median_s:.1f} s" for median_s in medians]
    assert (
        f"half of its 49 answers' first tokens came after {shown[0]}, where it was {shown[1]} with "
        f"`stock` and {shown[2]} with `priced`"
    ) in PAGE


def test_what_the_router_believed_at_first() -> None:
    """Of `priced` with 32 six primings were placed on what the run before had left."""
    found = {line["request_id"]: line for line in lines("priced-32", FOLDER)}
    placed = [e for e in decisions("priced-32", FOLDER) if e["event"] == "decision"]
    wrong = [
        e["ts_unix_s"] - placed[0]["ts_unix_s"]
        for e in placed
        if (cached := found.get(e["request_id"], {}).get("cached_tokens")) is not None
        and e["cached_tokens"].get(e["worker"], 0) > cached + 2_000
    ]
    assert len(wrong) == 6
    assert max(wrong) < 0.1
    assert phases("priced-32", FOLDER)["window_start_s"] > 100


def test_what_was_simulated_is_what_was_predicted(runs: dict[str, Run]) -> None:
    rows = read_rows(RESULTS / "simulated" / "routers-two-gpus.csv")
    by_key = {(line["arm"], line["sessions"]): line for line in rows if line["draw"] == "2"}
    off, apart = [], {}
    for name, run in runs.items():
        arm, sessions = name.split("-")
        line = by_key[arm, sessions]
        rates = float(line["requests_per_s"]), float(figures(run)["requests_per_s"])
        shares = 100 * float(line["within_objective"]), within_slo(run)
        cells = f"{rates[0]:.3f}; {rates[1]:.3f} | {shares[0]:.0f}; {shares[1]:.0f} %"
        assert f"| `{arm}`, {sessions} | {cells} |" in PAGE
        off.append(100 * (rates[0] / rates[1] - 1))
        apart[name] = round(shares[0] - shares[1])
    assert [round(each) for each in off] == [2, 2, -20, -1]
    assert "It is 2, 2 and -1 % off in requests/s, but for `stock` with 32" in PAGE
    assert apart == {"stock-24": 1, "priced-24": -6, "stock-32": -8, "priced-32": -1}
    says(
        (RESULTS.parent / "simulator.md").read_text(),
        "2, 2 and -1 % off in requests/s, but 20 % too few for the stock router with 32 sessions",
        "turns in time 1 point more and 8 fewer of it, 6 and 1 fewer of ours.",
    )
