from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest

from deltaserve.errors import InputError
from eval.cli_options import bounds
from eval.experiment import Slo
from eval.experiment_files import load_experiment, packaged_experiments
from eval.formatting import change, number, seconds, size
from eval.plot import Rule, svg
from eval.records import Run
from eval.report import (
    caption,
    find_runs,
    find_searches,
    gather,
    summary_json,
    write_csv,
    write_parquet,
    write_report,
)
from eval.report.answer import answer
from eval.report.claims import claims
from eval.report.evidence import Evidence
from eval.report.figures.curves import capacity_curves
from eval.report.figures.latency import latency_bars
from eval.report.opening import opening
from tests.browser import CHROMIUM, needs_browser

MakeRun = Callable[..., Run]
RunWriter = Callable[..., Path]


class Page(HTMLParser):
    """What a page refers to, what it says, and the data inside it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.references: list[str] = []
        self.data: dict[str, str] = {}
        self.words: list[str] = []
        self._inside: str | None = None
        self._hidden = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.references += [v for k, v in attrs if k in ("src", "href") and v]
        self._hidden = tag in ("script", "style")
        self._inside = given.get("id") if given.get("type") == "application/json" else None

    def handle_endtag(self, tag: str) -> None:
        self._hidden = False
        self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside is not None:
            self.data[self._inside] = data
        elif not self._hidden:
            self.words.append(data)


@pytest.fixture(scope="module")
def three_arms(tmp_path_factory: pytest.TempPathFactory, run_writer: RunWriter) -> Path:
    folder = tmp_path_factory.mktemp("three") / "runs"
    for order, arm in enumerate(("x", "y", "z")):
        for repeat in (1, 2, 3):
            run_writer(
                folder,
                arm=arm,
                repeat=repeat,
                seed=order,
                ttft_s=1.5 if arm == "y" else 0.5,
                manifest={"cell_order": order, "baseline": "z"},
            )
    last = {"cell_order": 2, "baseline": "z"}
    run_writer(folder, arm="z", repeat=4, lag_s=2.0, manifest=last)
    write_report(gather(find_runs([folder]), draws=200), folder / "report")
    return folder


@pytest.fixture(scope="module")
def evidence_of_three(three_arms: Path) -> Evidence:
    return gather(find_runs([three_arms]), draws=20)


def written(folder: Path) -> tuple[Page, str]:
    if not (folder / "report.html").exists():
        write_report(gather(find_runs([folder]), draws=100), folder / "report")
    return Page((folder / "report.html").read_text()), (folder / "report.md").read_text()


def test_the_page_stands_alone(three_arms: Path) -> None:
    page, _ = written(three_arms)
    assert all(r.startswith("#") or r == "data:," for r in page.references)
    text = (three_arms / "report.html").read_text()
    assert "@import" not in text.partition("<script")[0]
    assert len(text) < 1_500_000


def test_every_figure_is_drawn_in_the_page(three_arms: Path) -> None:
    written(three_arms)
    text = (three_arms / "report.html").read_text()
    figures = dict(re.findall(r'<figure id="plot-([\w-]+)">(.*?)</figure>', text, re.S))
    assert {"bars-ttft", "cdf-ttft_s", "apc", "timeline-0", "repeats"} <= set(figures)
    for figure in figures.values():
        drawing = ElementTree.fromstring(figure.partition("</figcaption>")[2])
        assert drawing.tag == "svg"
        assert {"path", "rect", "circle"} & {part.tag for part in drawing.iter()}
        assert drawing.attrib["aria-label"]
        assert "nan" not in figure


def test_both_files_state_the_verdicts_and_what_was_left_out(three_arms: Path) -> None:
    page, markdown = written(three_arms)
    for text in (" ".join(" ".join(page.words).split()), markdown):
        assert re.search(r"y against z, worse: .*TTFT p50 \+\d+ %", text)
        assert re.search(r"x against z, no difference beyond noise: .*TTFT p50", text)
        assert "z/r4 is excluded: client_lag: requests were sent 2.000 s late at p99" in text
        assert "madeengine 1.2.3" in text
        assert "deltaserve eval run made" in text
        assert "It says nothing about speed on GPUs" in text


def test_the_headline_shows_the_measured_numbers(three_arms: Path) -> None:
    _, markdown = written(three_arms)
    runs = [run for run in find_runs([three_arms]) if run.arm == "x"]
    values = np.concatenate([run.requests["ttft_s"] for run in runs])
    row = next(line for line in markdown.splitlines() if line.startswith("| TTFT p90"))
    assert row.split("|")[2].strip().startswith(seconds(float(np.quantile(values, 0.9))))


def test_a_made_up_name_is_text_and_not_markup(make_run: MakeRun, tmp_path: Path) -> None:
    make_run(manifest={"experiment": "<b>x</b></script><script>alert(1)</script>"})
    written(tmp_path / "runs")
    text = (tmp_path / "runs" / "report.html").read_text()
    assert "<script>alert" not in text
    assert "<b>x" not in text


def test_one_run_an_arm_gives_no_verdict_and_says_why(make_run: MakeRun, tmp_path: Path) -> None:
    make_run(arm="a")
    make_run(arm="b", ttft_s=9.0)
    _, markdown = written(tmp_path / "runs")
    assert "without a verdict: every arm ran once" in markdown
    assert "worse" not in markdown.partition("## Every figure")[0]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("repeats", [1, 2])
def test_arms_without_a_request_in_common_are_said_to_be(
    run_writer: RunWriter, tmp_path: Path, repeats: int
) -> None:
    for arm in ("a", "b"):
        for repeat in range(1, repeats + 1):
            folder = run_writer(tmp_path / "runs", arm=arm, repeat=repeat)
            results = folder / "requests.jsonl"
            lines = [json.loads(line) for line in results.read_text().splitlines()]
            for line in lines:
                for key in ("request_id", "session_id"):
                    line[key] = f"{arm}-{line[key]}"
            results.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
            (folder / "trace.json").unlink()
    evidence = gather(find_runs([tmp_path / "runs"]))
    markdown = write_report(evidence, tmp_path / "report")[1].read_text()
    assert "b against a: no request in common, so nothing compares them." in markdown
    assert "ran once" not in markdown
    assert {item.requests for item in evidence.comparisons} == {0}
    assert not any(np.isfinite(item.noise_floor) for item in evidence.comparisons)


def test_once_is_said_only_where_it_is_so(make_run: MakeRun, tmp_path: Path) -> None:
    for arm in ("a", "b"):
        for repeat in (1, 2):
            make_run(arm=arm, repeat=repeat, sessions=1, workers=("w0",))
    _, markdown = written(tmp_path / "runs")
    assert "ran once" not in markdown
    assert "b against a: the requests compared are of too few sessions" in markdown


def test_a_report_on_invalid_runs_only_says_so(make_run: MakeRun, tmp_path: Path) -> None:
    make_run(manifest={"state": "failed", "reason": "it burnt"})
    _, markdown = written(tmp_path / "runs")
    assert "No run is valid" in markdown
    assert "a/r1 is excluded: failed: it burnt" in markdown


def test_scaled_lengths_are_stated_in_the_banner(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    facts = json.loads((run.folder / "trace.json").read_text()) | {"length_scale": 0.1}
    (run.folder / "trace.json").write_text(json.dumps(facts))
    _, markdown = written(tmp_path / "runs")
    assert "Token lengths are the trace's times 0.1" in markdown
    assert "< 500 tokens" in markdown
    assert "at least 205 new tokens" in markdown


def test_loads_are_compared_within_themselves(make_run: MakeRun, tmp_path: Path) -> None:
    for load, factor in (("low", 1.0), ("high", 4.0)):
        for arm in ("a", "b"):
            for repeat in (1, 2):
                make_run(arm=arm, load=load, repeat=repeat, ttft_s=0.5 * factor)
    evidence = gather(find_runs([tmp_path / "runs"]), draws=100)
    pairs = {(item.baseline, item.arm) for item in evidence.comparisons}
    assert pairs == {("a@low", "b@low"), ("a@high", "b@high")}


def test_every_sglang_arm_is_set_against_every_vllm_arm(make_run: MakeRun, tmp_path: Path) -> None:
    for arm, engine in (("s1", "sglang"), ("s2", "sglang"), ("v1", "vllm"), ("v2", "vllm")):
        topology = {"model": "m", "device": "cuda", "engine": {"name": engine}}
        for repeat in (1, 2):
            faster = 0.2 if engine == "sglang" else 1.0
            make_run(arm=arm, repeat=repeat, ttft_s=faster, manifest={"topology": topology})
    evidence = gather(find_runs([tmp_path / "runs"]), draws=100)
    pairs = {(item.arm, item.baseline) for item in evidence.across}
    assert pairs == {(ours, theirs) for ours in ("s1", "s2") for theirs in ("v1", "v2")}
    markdown = write_report(evidence, tmp_path / "report")[1].read_text()
    table = markdown.partition("## SGLang against vLLM")[2]
    assert re.search(r"\| s2 \| v1 \| −80 % \[.*\] \(better\)", table)
    assert "says nothing about speed on GPUs" not in markdown


def test_the_first_screen_says_what_was_measured_and_which_arms(
    make_run: MakeRun, tmp_path: Path
) -> None:
    for arm, role, gpus in (("mixed", "colocated", 2), ("split", "decode", 3)):
        group = {"role": role, "count": gpus, "max_total_tokens": 65536, "chunk_tokens": 512}
        topology = {
            "model": "m",
            "device": "cuda",
            "engine": {"name": "sglang"},
            "workers": [group],
            "router": {"policy": "unified", "admission": {"rule": "rotate"}},
            "page_size": 64,
        }
        workers = [{"id": f"w{i}", "gpus": [i]} for i in range(gpus)]
        flags = ["deltaserve", "replay", "run", "--mode", "closed", "--max-inflight-sessions", "8"]
        make_run(
            arm=arm,
            manifest={"topology": topology, "workers": workers, "replay_command": flags}
            | {"trace": {"path": "/somewhere/agentic.jsonl.zst", "sha256": "ab" * 32}},
        )
    _, markdown = written(tmp_path / "runs")
    first = markdown.partition("\n## ")[0]
    assert "- Trace: agentic.jsonl.zst (SHA-256 abababababab)" in first
    assert "- Requests: 120 in 30 sessions" in first
    assert "- Load: closed loop, 8 sessions in flight" in first
    assert "One run an arm, which judges nothing" in first
    row = next(line for line in first.splitlines() if line.startswith("| split"))
    for said in ("3 decode", "65 536", "rotate", "page_size=64", "chunk_tokens=512"):
        assert said in row
    assert "Output tokens/s a GPU" in markdown


def test_no_quantile_stands_on_fewer_than_five_observations_beyond_it(
    make_run: MakeRun, tmp_path: Path
) -> None:
    for arm in ("a", "b"):
        make_run(arm=arm, sessions=11)  # 44 requests: too few for a p90, enough for a p50
    evidence = gather(find_runs([tmp_path / "runs"]), draws=50)
    html, markdown = write_report(evidence, tmp_path / "report")
    assert re.search(r"^\| TTFT p50", markdown.read_text(), re.M)
    for text in (markdown.read_text(), *(Page(html.read_text()).words)):
        assert not re.search(r"(TTFT|TPOT|E2E) p9[09]( \||$)", text)
    assert all(item.measure.quantile in (None, 0.5) for item in evidence.comparisons)
    assert summary_json(evidence)["cells"]["a"]["ttft_s"]["p90"] is None


def test_every_table_is_written_as_csv_and_in_the_json(
    evidence_of_three: Evidence, tmp_path: Path
) -> None:
    evidence = evidence_of_three
    paths = write_csv(evidence, tmp_path / "csv")
    frames = {path.stem: pd.read_csv(path) for path in paths}
    assert {"arms", "cells", "comparison", "classes", "workers", "runs"} <= set(frames)
    cell = frames["cells"].set_index("cell").loc["x"]
    assert cell["ttft_p90"] == pytest.approx(evidence.cells[0].latency["ttft"][1].value)
    assert cell["ttft_p90_low"] == pytest.approx(evidence.cells[0].latency["ttft"][1].low)
    told = summary_json(evidence)
    json.dumps(told, allow_nan=False)
    assert set(told["tables"]) == set(frames)
    assert all(len(told["tables"][name]) == len(frame) for name, frame in frames.items())


def test_every_column_of_a_table_has_one_type_which_parquet_needs(
    evidence_of_three: Evidence, tmp_path: Path
) -> None:
    evidence = evidence_of_three
    kinds = {bool: "truth value", int: "number", float: "number", str: "text"}
    tables_told = summary_json(evidence)["tables"]
    for name, rows in tables_told.items():
        for column in rows[0] if rows else []:
            found = {kinds[type(row[column])] for row in rows if row[column] is not None}
            assert len(found) <= 1, f"{name}.{column}: {found}"
    pytest.importorskip("pyarrow")
    for path in write_parquet(evidence, tmp_path / "parquet"):
        assert len(pd.read_parquet(path)) == len(tables_told[path.stem])


def width_of(page: Path, window: int) -> int:
    """How wide the page is in a window of that many pixels, with everything unfolded."""
    assert CHROMIUM is not None, "needs Chromium"
    # A frame has the width that is asked for; a window of that browser is never under 500.
    frame = page.with_name("frame.html")
    frame.write_text(
        f"""<iframe id=page src={page.name} style="width:{window}px;height:900px;border:0"></iframe>
        <script>page.onload = () => {{
          for (const fold of page.contentDocument.querySelectorAll("details")) fold.open = true;
          document.title = page.contentDocument.documentElement.scrollWidth;
        }}</script>"""
    )
    browser = [CHROMIUM, "--headless", "--no-sandbox", "--allow-file-access-from-files"]
    browser += [f"--user-data-dir={page.parent}/browser", "--virtual-time-budget=10000"]
    done = subprocess.run(
        [*browser, "--dump-dom", frame.as_uri()], capture_output=True, text=True, timeout=120
    )
    title = re.search(r"<title>(\d+)</title>", done.stdout)
    assert title is not None, done.stderr[-2000:]
    return int(title[1])


@needs_browser
@pytest.mark.parametrize("window", [1280, 390])
def test_no_page_is_wider_than_its_window(three_arms: Path, tmp_path: Path, window: int) -> None:
    written(three_arms)
    page = shutil.copy(three_arms / "report.html", tmp_path / "page.html")
    assert width_of(page, window) <= window


@needs_browser
def test_nor_is_one_of_names_without_a_place_to_break(make_run: MakeRun, tmp_path: Path) -> None:
    long = {
        "experiment": "x" * 64,
        "description": f"Of {'d' * 120}.",
        "trace": {"path": f"/{'t' * 150}.jsonl", "sha256": "ab" * 32},
        "topology": {"model": f"/models/{'m' * 120}", "device": "cpu", "workers": []},
        "source": {"command": f"deltaserve eval run {'c' * 200}"},
    }
    for arm in ("a" * 64, "b" * 64):
        make_run(arm=arm, manifest=long, workers=("w" * 60, "v" * 60))
    make_run(arm="a" * 64, repeat=2, manifest=long | {"state": "failed", "reason": "r" * 150})
    written(tmp_path / "runs")
    page = shutil.copy(tmp_path / "runs" / "report.html", tmp_path / "page.html")
    assert width_of(page, 390) <= 390


def test_parquet_without_pyarrow_names_the_package(
    evidence_of_three: Evidence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="--parquet needs pyarrow"):
        write_parquet(evidence_of_three, tmp_path / "x")


def test_the_objective_can_be_changed_after_the_fact(make_run: MakeRun, tmp_path: Path) -> None:
    make_run(ttft_s=0.5)
    runs = find_runs([tmp_path / "runs"])
    lax, strict = (
        gather(runs, draws=20, slo={"ttft_s": bound_s, "ttft_s_per_new_token": 0.0})
        for bound_s in (1000.0, 0.001)
    )
    assert lax.cells[0].measures["in_time_share"].value == pytest.approx(1.0, abs=0.05)
    assert strict.cells[0].measures["in_time_share"].value == 0.0
    with pytest.raises(InputError, match="--slo: nonsense"):
        gather(runs, draws=20, slo={"nonsense": 1.0})


def test_a_window_in_which_the_load_ran_out_is_named(make_run: MakeRun, tmp_path: Path) -> None:
    for arm, end_s, asked_s in (("a", 50.0, 90.0), ("b", 99.5, 90.0), ("c", 60.0, None)):
        folder = make_run(arm=arm).folder
        window = {"window_start_s": 10.0, "window_end_s": end_s, "measure_s": asked_s}
        (folder / "phases.json").write_text(json.dumps(window))
    found = [words for _, words in claims(gather(find_runs([tmp_path / "runs"]), draws=20))]
    [said] = [words for words in found if words.startswith("Nothing was left to send")]
    assert said.endswith(
        ": a 40.0 s of 90.0 s. With phases.recycle = true sessions are played again."
    )


def test_runs_with_different_objectives_are_judged_by_one_that_is_named(
    make_run: MakeRun, tmp_path: Path
) -> None:
    make_run(arm="a", manifest={"slo": {"ttft_s": 0.001}})
    make_run(arm="b", manifest={"slo": {"ttft_s": 5.0, "tpot_s": 0.1}})
    make_run(arm="imported")  # says none
    runs = find_runs([tmp_path / "runs"])
    words = r"a/r1 and .*b/r1 have different objectives \(ttft_s 0.001 and 5, tpot_s 0.05 and 0.1\)"
    with pytest.raises(InputError, match=f"{words}; judge all by one, as in --slo ttft_s=5"):
        gather(runs, draws=20)
    with pytest.raises(InputError, match=r"\(tpot_s 0.05 and 0.1\)"):
        gather(runs, draws=20, slo={"ttft_s": 5})
    found = gather(runs, draws=20, slo={"ttft_s": 5, "tpot_s": 0.1})
    assert (found.slo.ttft_s, found.slo.tpot_s) == (5.0, 0.1)
    alike = gather([run for run in runs if run.arm != "a"], draws=20)
    assert alike.slo.ttft_s == 5.0
    # A named objective is a whole one, whatever the runs were made with.
    named = gather(runs, draws=20, slo=bounds(["agentperf,tpot_s=0.1"])).slo
    assert named == Slo.model_validate({"preset": "agentperf", "tpot_s": 0.1})


def test_a_report_that_cannot_be_written_leaves_the_one_before(
    evidence_of_three: Evidence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evidence = evidence_of_three
    html, markdown = write_report(evidence, tmp_path / "report")
    before = html.read_bytes(), markdown.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(InputError, match=r"report\.html: cannot be written: No space left"):
        write_report(evidence, tmp_path / "report")
    assert (html.read_bytes(), markdown.read_bytes()) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.md"]


def test_a_search_for_capacity_is_the_answer(three_arms: Path, tmp_path: Path) -> None:
    levels = [{"load": n, "in_time_share": 1 - n / 100, "ttft_p90": n / 10, "sustained": n < 9}
              for n in (4, 8, 16)]  # fmt: skip
    found = {"arm": "x", "agents": 12, "low": 8, "high": 16, "per_gpu": 6, "levels": levels}
    (tmp_path / "capacity.json").write_text(json.dumps(found))
    searches = find_searches([tmp_path])
    evidence = gather(find_runs([three_arms]), draws=20, searches=searches)
    html, markdown = write_report(evidence, tmp_path / "report")
    assert "**x has a capacity of 6 agents a GPU (4–8).**" in markdown.read_text()
    assert "| x | 16 | 84.0 % |" in markdown.read_text()
    assert 'id="plot-capacity-in_time_share"' in html.read_text()
    (tmp_path / "capacity.json").write_text("[1]")
    with pytest.raises(InputError, match=r"capacity\.json: expected objects"):
        find_searches([tmp_path])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"workers": 2}, "x has a capacity of 6 agents a worker (4–8)."),
        ({"per_worker": 3.0}, "x has a capacity of 3 agents a worker (2–4)."),
        ({"high": None, "workers": 1}, "x has a capacity of 12 agents a worker (at least 8)."),
        ({"low": 0, "workers": 1}, "x has a capacity of 12 agents a worker (at most 16)."),
        (
            {"low": 0, "high": None, "workers": 1},
            "x has a capacity of 12 agents a worker (no level is sure).",
        ),
        ({}, "x has a capacity of 12 agents in all."),
        (
            {"agents": 0, "low": 0, "workers": 1, "finished": False},
            "x: no level met the objective, so far: the search has levels to try.",
        ),
    ],
)
def test_a_search_says_of_what_it_is_and_whether_it_has_ended(
    evidence_of_three: Evidence, tmp_path: Path, changed: dict[str, object], said: str
) -> None:
    found = {"arm": "x", "agents": 12, "low": 8, "high": 16, "per_gpu": None} | changed
    (tmp_path / "capacity.json").write_text(json.dumps(found))
    assert answer(replace(evidence_of_three, searches=find_searches([tmp_path]))) == said


def test_the_first_picture_of_a_search_is_of_what_decided_it(
    make_run: MakeRun, tmp_path: Path
) -> None:
    make_run(arm="b")
    make_run(arm="a")
    slo = {"attainment": 0.9, "stretch_p90": 2.0}
    for attainment, title in ((1.0, "Stretch of sessions p90"), (0.5, "Turns within the SLO")):
        levels = [
            {"load": 1, "meets": True, "in_time_share": 1.0, "stretch_p90": 1.0},
            {"load": 2, "meets": False, "in_time_share": attainment, "stretch_p90": 3.0},
        ]
        found = [{"arm": arm, "agents": 1, "slo": slo, "levels": levels} for arm in ("a", "b")]
        (tmp_path / "capacity.json").write_text(json.dumps(found))
        runs, searches = find_runs([tmp_path / "runs"]), find_searches([tmp_path])
        evidence = gather(runs, draws=20, searches=searches)
        picture = opening(evidence).picture
        assert picture is not None
        assert picture.title.startswith(title)
        # In the order of the arms, as all other figures are, so that colours are the same.
        arms = [cell.arm for cell in evidence.cells]
        assert [search.arm for search in evidence.searches] == arms


def test_the_line_of_the_objective_is_the_searchs_own(tmp_path: Path) -> None:
    levels = [{"load": n, "in_time_share": 1.0, "stretch_p90": 1.0 + n} for n in (1, 2)]
    found = {"arm": "x", "agents": 2, "slo": {"attainment": 0.8, "stretch_p90": 4.0}}
    (tmp_path / "capacity.json").write_text(json.dumps({**found, "levels": levels}))
    searches = find_searches([tmp_path])
    for key, at in (("in_time_share", 80.0), ("stretch_p90", 4.0)):
        chart = capacity_curves(searches, key)
        assert chart is not None
        assert [mark.y for mark in chart.marks if isinstance(mark, Rule)] == [at]
    without = [replace(search, slo={}) for search in searches]
    chart = capacity_curves(without, "in_time_share")
    assert chart is not None
    assert not any(isinstance(mark, Rule) for mark in chart.marks)


def test_over_several_loads_every_measure_is_a_curve(make_run: MakeRun, tmp_path: Path) -> None:
    for load, n in (("low", 4), ("high", 8)):
        for arm in ("a", "b"):
            flags = ["replay", "--max-inflight-sessions", str(n)]
            make_run(arm=arm, load=load, manifest={"replay_command": flags})
    _, markdown = written(tmp_path / "runs")
    assert "- Load: 2 levels: 4, 8 sessions in flight" in markdown
    text = (tmp_path / "runs" / "report.html").read_text()
    for key in ("curve-ttft_p90", "curve-throughput_output_tps", "pareto"):
        figure = re.search(rf'<figure id="plot-{key}">(.*?)</figure>', text, re.S)
        assert figure is not None
        assert figure[1].count("<circle") >= 4


def test_what_is_outside_the_window_is_shaded(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    phases = {"start": "mid", "window_start_s": 20.0, "window_end_s": 60.0, "recycle": True}
    (run.folder / "phases.json").write_text(json.dumps(phases))
    _, markdown = written(tmp_path / "runs")
    assert "40 s after 20 s of warm-up that begins in the middle of sessions" in markdown
    text = (tmp_path / "runs" / "report.html").read_text()
    figure = re.search(r'<figure id="plot-timeline-0">(.*?)</figure>', text, re.S)
    assert figure is not None
    assert figure[1].count('class="shade"') == 2


def test_no_bar_vanishes_beside_one_that_is_much_longer(make_run: MakeRun, tmp_path: Path) -> None:
    for arm, spread in (("even", 0.3), ("uneven", 3.0)):
        make_run(arm=arm, sessions=200, spread=spread)
    even, uneven = gather(find_runs([tmp_path / "runs"]), draws=20).cells
    assert not latency_bars([even], "ttft", "TTFT").y.log
    chart = latency_bars([uneven], "ttft", "TTFT")
    assert chart.y.log
    drawn = ElementTree.fromstring(svg(chart))
    heights = [float(bar.attrib["height"]) for bar in drawn.iter("rect")]
    assert len(heights) == 3
    assert min(heights) > 0.1 * max(heights)


def test_folders_without_runs_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no run folder"):
        find_runs([tmp_path])
    with pytest.raises(InputError, match=r"no such folder"):
        find_runs([tmp_path / "nowhere"])


def test_a_picture_of_the_headline_is_drawn(three_arms: Path, evidence_of_three: Evidence) -> None:
    from eval.picture import write_picture

    evidence = evidence_of_three
    for name in ("headline.png", "headline.svg"):
        write_picture(evidence.cells, "A title", caption(evidence), three_arms / name)
        assert (three_arms / name).stat().st_size > 10_000
    with pytest.raises(InputError, match=r"\.png or \.svg"):
        write_picture(evidence.cells, "", "", three_arms / "headline.gif")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (seconds(0.01234), "12.3 ms"),
        (seconds(1.5), "1.50 s"),
        (seconds(7200), "120 min"),
        (seconds(float("nan")), "–"),
        (change(0.88), "−12 %"),
        (change(1.034), "+3.4 %"),
        (number(12345.6), "12 346"),
        (size(1536), "1.54 kB"),
    ],
)
def test_numbers_are_written_as_people_read_them(text: str, expected: str) -> None:
    assert text == expected


def test_the_title_says_what_the_experiment_is(make_run: MakeRun, tmp_path: Path) -> None:
    make_run(manifest={"experiment": "made", "description": "Three things compared."})
    _, markdown = written(tmp_path / "runs")
    assert markdown.startswith("# Three things compared\n")


def test_the_commands_to_repeat_it_do_not_find_everything_done(
    make_run: MakeRun, tmp_path: Path
) -> None:
    command = "deltaserve eval run made --output out/made --set repeats=1"
    make_run(manifest={"source": {"command": command}})
    _, markdown = written(tmp_path / "runs")
    repeat = markdown.partition("## To repeat it")[2]
    assert "deltaserve eval run made --output out/made-again --set repeats=1\n" in repeat
    assert "deltaserve eval report out/made-again\n" in repeat


def test_what_ran_once_has_no_interval_of_its_change(make_run: MakeRun, tmp_path: Path) -> None:
    make_run(arm="x")
    make_run(arm="y")
    _, markdown = written(tmp_path / "runs")
    rows = [line for line in markdown.splitlines() if line.startswith("| y | TTFT p50")]
    assert rows
    assert "[one repeat: no interval]" in rows[0]


def test_the_answer_names_what_the_experiment_is_about(make_run: MakeRun, tmp_path: Path) -> None:
    make_run(manifest={"analysis": {"primary": ["ttft_p50", "requests_per_s", "apc"]}})
    _, markdown = written(tmp_path / "runs")
    said = markdown.splitlines()[2]
    assert re.search(r"TTFT p50 .*, .* requests/s, .* % of prompt tokens from cache", said)


@pytest.mark.parametrize("name", packaged_experiments())
def test_the_answer_says_nothing_twice(make_run: MakeRun, tmp_path: Path, name: str) -> None:
    """Twenty requests are enough for a p50, which then stands for every higher quantile."""
    primary = load_experiment(name)[0].analysis.primary
    make_run(sessions=5, manifest={"analysis": {"primary": primary}})
    words = answer(gather(find_runs([tmp_path]), draws=20))
    figures = words.removeprefix("a: ").removesuffix(".").split(", ")
    assert len(figures) == len(set(figures)), words


def test_a_client_that_is_late_by_much_of_what_it_measured_is_named(
    make_run: MakeRun, tmp_path: Path
) -> None:
    make_run(arm="late", lag_s=0.2)
    make_run(arm="prompt", lag_s=0.001)
    _, markdown = written(tmp_path / "runs")
    [said] = [line for line in markdown.splitlines() if "The client itself sent late" in line]
    assert "late 200 ms of " in said
    assert "prompt" not in said
