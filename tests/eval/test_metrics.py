"""Metrics against the same numbers computed here from the raw lines, in plain Python."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from eval.decisions import decision_table
from eval.experiment import Slo
from eval.metrics import Cell, class_labels, measure, session_bootstrap
from eval.records import Run, read_run, read_steps
from eval.report import find_runs, gather, summary_json
from eval.serving import hotspot_index

MakeRun = Callable[..., Run]
SLO = Slo(ttft_s=0.6, ttft_s_per_new_token=0.0, tpot_s=0.03, worst_gap_s=1.0)


def cell_of(*runs: Run) -> Cell:
    return measure(runs, session_bootstrap(runs, 200), SLO)


def raw(run: Run) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run.folder / "requests.jsonl").open()]


def test_latencies_are_numpys_percentiles_of_the_raw_lines(make_run: MakeRun) -> None:
    """With answers of which a third come in bursts: first arrivals of several tokens, and later
    ones."""
    run = make_run(burst=3)
    cell = cell_of(run)
    lines = raw(run)
    expected: dict[str, list[float]] = {"ttft": [], "tpot": [], "e2e": [], "worst_gap": []}
    gaps: list[float] = []
    at_once = 0
    for line in lines:
        expected["ttft"].append(line["first_token_s"] - line["scheduled_s"])
        expected["e2e"].append(line["finished_s"] - line["scheduled_s"])
        arrivals = line["arrivals"]
        at_once += len(arrivals) == 1
        if len(arrivals) > 1:
            span_s = arrivals[-1][0] - arrivals[0][0]
            expected["tpot"].append(span_s / (arrivals[-1][1] - arrivals[0][1]))
            expected["worst_gap"].append(max(b[0] - a[0] for a, b in pairwise(arrivals)))
        for before, after in pairwise(arrivals):
            gaps += [(after[0] - before[0]) / (after[1] - before[1])] * (after[1] - before[1])
    for name, values in expected.items():
        for i, q in enumerate((0.5, 0.9, 0.99)):
            estimate = cell.latency[name][i]
            assert estimate.value == pytest.approx(np.quantile(values, q))
            assert estimate.low <= estimate.value <= estimate.high
    assert cell.latency["itl"][1].value == pytest.approx(np.quantile(gaps, 0.9), rel=1e-6)
    assert 0 < at_once < len(lines)
    assert cell.one_arrival_share == pytest.approx(at_once / len(lines))
    first = sum(line["arrivals"][0][1] for line in lines)
    tokens = sum(line["output_tokens"] for line in lines)
    assert cell.first_chunk_share == pytest.approx(first / tokens)


def test_failed_requests_are_slower_than_all_that_were_answered(make_run: MakeRun) -> None:
    """Six of 120: 5 %, so that p90 is of an answer and p99 of none."""
    run = make_run(errors=6)
    cell = cell_of(run)
    ttft = [
        line["first_token_s"] - line["scheduled_s"] if line["error"] is None else np.inf
        for line in raw(run)
    ]
    ordered = np.sort(ttft)
    p90, p99 = cell.latency["ttft"][1:]
    assert ordered[107] <= p90.value <= ordered[108]
    assert p99.value == np.inf
    assert np.isfinite(cell.measures["tpot_p50"].value)
    assert cell.measures["tpot_p99"].value == cell.measures["worst_gap_p99"].value == np.inf
    assert cell.errors == {"server_error": 6}
    assert (cell.n, cell.failed) == (120, 6)


def test_faults_of_the_client_are_no_latency_of_the_servers(make_run: MakeRun) -> None:
    cell = cell_of(make_run(errors=6, error_kind="client_bug"))
    assert np.isfinite(cell.latency["ttft"][2].value)
    assert cell.measures["in_time_share"].n == 114


def test_rates_and_shares_are_sums_over_the_raw_lines(make_run: MakeRun) -> None:
    run = make_run(errors=3)
    cell = cell_of(run)
    lines = raw(run)
    ok = [line for line in lines if line["error"] is None]
    span_s = max(line["finished_s"] for line in lines) - min(line["scheduled_s"] for line in lines)
    assert cell.request_rps == pytest.approx(len(ok) / span_s)
    assert cell.output_tps == pytest.approx(sum(line["output_tokens"] for line in ok) / span_s)
    cached = sum(line["cached_tokens"] for line in ok)
    prompt = sum(line["prompt_tokens"] for line in ok)
    assert cell.apc.value == pytest.approx(cached / prompt)
    assert cell.apc.low < cell.apc.value < cell.apc.high
    good = 0
    for line in ok:
        tpot_s = (line["arrivals"][-1][0] - line["first_token_s"]) / (line["output_tokens"] - 1)
        gap_s = max(b[0] - a[0] for a, b in pairwise(line["arrivals"]))
        assert gap_s <= 1.0
        good += line["first_token_s"] - line["scheduled_s"] <= 0.6 and tpot_s <= 0.03
    assert 0 < good < len(ok)
    assert cell.measures["in_time_share"].value == pytest.approx(good / len(lines))
    assert cell.measures["in_time_per_s"].value == pytest.approx(good / span_s)


def test_repeats_are_pooled_request_by_request(make_run: MakeRun) -> None:
    one, two = make_run(repeat=1), make_run(repeat=2, ttft_s=1.0)
    cell = cell_of(one, two)
    both = pd.concat([one.requests, two.requests])["ttft_s"]
    assert cell.n == len(both)
    assert cell.latency["ttft"][1].value == pytest.approx(float(np.quantile(both, 0.9)))


def test_classes_hold_the_traces_new_tokens_and_their_bounds_scale_with_its_lengths(
    make_run: MakeRun,
) -> None:
    run = make_run()
    cell = cell_of(run)
    assert cell.class_source == "trace"
    assert [row.n for row in cell.classes] == [cell.n, 0, 0, 0]
    assert class_labels(1.0) == ["< 5k", "5k–20k", "20k–50k", "> 50k"]
    assert class_labels(0.1) == ["< 500", "500–2k", "2k–5k", "> 5k"]


def test_a_class_bound_belongs_to_the_class_above_it(make_run: MakeRun) -> None:
    run = make_run()
    run.requests["best_cached_tokens"] = 0.0
    run.requests["input_length"] = [4999, 5000, 20_000, 50_000] * (len(run.requests) // 4)
    assert [row.n for row in cell_of(run).classes] == [len(run.requests) // 4] * 4


def table(rows: list[dict[str, object]]) -> pd.DataFrame:
    return pd.DataFrame([{"run": 0} | row for row in rows])


def test_hotspot_is_the_busiest_workers_p90_over_the_median_workers() -> None:
    rows = []
    for worker, ttft_s in (("a", 1.0), ("b", 2.0), ("c", 8.0)):
        for i in range(10):
            rows.append(
                {
                    "prefill_worker": worker,
                    "sent_s": float(i),
                    "first_token_s": i + ttft_s,
                    "ttft_s": ttft_s,
                }
            )
    assert hotspot_index(table(rows)) == pytest.approx(4.0)


def test_a_hotspot_that_moves_between_runs_is_one(make_run: MakeRun) -> None:
    """The first worker is ten times as slow in one run, the second in the other."""
    runs = [make_run(repeat=r, spread=0.01) for r in (1, 2)]
    for run, slow in zip(runs, ("w0", "w1"), strict=True):
        hot = run.requests["prefill_worker"] == slow
        for column in ("ttft_s", "first_token_s"):
            extra_s = 9 * run.requests["ttft_s"]
            run.requests[column] = run.requests[column].where(~hot, run.requests[column] + extra_s)
    cell = cell_of(*runs)
    by_run = [hotspot_index(run.requests) for run in runs]
    assert min(by_run) > 1.5
    assert cell.hotspot_by_run == pytest.approx(by_run)
    assert cell.hotspot == pytest.approx(np.mean(by_run))


def test_a_separated_request_belongs_to_its_prefill_and_its_decode_worker() -> None:
    decisions = decision_table(
        [
            {
                "event": "decision", "decision_id": "1", "kind": "prefill_decode", "prefill": "p0",
                "decode": "d0", "reason": "heavy", "predicted_s": 0.5,
                "cached_tokens": {"p0": 7, "d0": 3},
            },
            {"event": "finish", "decision_id": "1", "first_token_s": 1.0, "outcome": "ok"},
            {"event": "decision", "decision_id": "2", "kind": "local", "worker": "d0"},
        ]
    )  # fmt: skip
    first, second = decisions.to_dict("records")
    assert (first["prefill_worker"], first["decode_worker"]) == ("p0", "d0")
    assert first["believed_cached_tokens"] == 7
    assert first["decided_to_first_token_s"] == 1.0
    assert (second["prefill_worker"], second["decode_worker"]) == ("d0", "d0")


def test_cached_tokens_that_a_decode_worker_was_only_sent_are_unknown(make_run: MakeRun) -> None:
    run = make_run()
    path = run.folder / "decisions.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    separated = {events[0]["decision_id"]: None, events[2]["decision_id"]: 5}
    for event in events:
        if event["decision_id"] in separated and event["event"] == "decision":
            worker = event.pop("worker")
            event |= {"kind": "prefill_decode", "prefill": "p0", "decode": worker}
        elif event["decision_id"] in separated:
            event["cached_tokens"] = separated[event["decision_id"]]
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    before, after = run.requests, read_run(run.folder).requests
    changed = after["decision_id"].eq(events[0]["decision_id"])
    assert after.loc[changed, ["cached_tokens", "new_tokens"]].isna().all(axis=None)
    assert after.loc[~changed, "cached_tokens"].tolist() == (
        before.loc[~changed, "cached_tokens"].tolist()
    )


def test_a_stream_that_began_before_its_decision_is_joined_by_its_requests_id(
    make_run: MakeRun,
) -> None:
    run = make_run()
    path = run.folder / "requests.jsonl"
    results = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line | {"decision_id": None}) + "\n" for line in results))
    after = read_run(run.folder).requests
    for column in ("decision_id", "reason", "decode_worker"):
        assert after[column].tolist() == run.requests[column].tolist()


def test_the_older_half_of_a_bounded_decision_log_is_read_too(make_run: MakeRun) -> None:
    run = make_run()
    path = run.folder / "decisions.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.with_name("decisions.1.jsonl").write_text("".join(lines[:5]) + "{torn\n")
    path.write_text("".join(lines[5:]))
    again = read_run(run.folder)
    assert again.all_requests.equals(run.all_requests)
    assert again.broken_lines == 1


def test_prediction_error_is_realised_over_predicted(make_run: MakeRun) -> None:
    run = make_run()
    rows = cell_of(run).decisions
    assert sum(row.n for row in rows) == len(run.requests)
    affinity = run.requests[run.requests["reason"] == "affinity"]
    realised = affinity["first_token_s"] - affinity["sent_s"]
    assert rows[0].reason == "affinity"
    assert rows[0].error_ratio_p50 == pytest.approx(float(np.median(realised / 0.25)))


def test_kv_moved_and_saved_come_from_the_prefill_workers_telemetry(make_run: MakeRun) -> None:
    run = make_run()
    (run.folder / "steps").mkdir()
    lines = [
        {"event": "kv_transfer", "worker_id": "p0", "room": i, "ok": ok, "bytes": size,
         "tokens": 10, "saved_tokens": 30, "saved_bytes": 3 * size,
         "start_unix_s": 5.0, "end_unix_s": 5.5}
        for i, (size, ok) in enumerate([(1000, True), (3000, True), (9000, False)])
    ]  # fmt: skip
    text = "\n".join(json.dumps(line) for line in lines) + '\n{"event": "kv_tr'
    (run.folder / "steps" / "p0-1.jsonl").write_text(text)
    kv = cell_of(read_run(run.folder)).kv
    assert kv is not None
    assert kv.transfers == 2
    assert kv.total_bytes == 4000
    assert kv.saved_share == pytest.approx(0.75)
    assert kv.seconds_p50 == pytest.approx(0.5)


def test_steps_count_from_the_replays_start(make_run: MakeRun) -> None:
    run = make_run(manifest={"replay": {"clock": {"unix_origin_s": 100.0}}})
    (run.folder / "steps").mkdir()
    line = {"event": "step", "worker_id": "w0", "forward_mode": "decode", "start_unix_s": 103.5,
            "duration_s": 0.1, "queues": {"waiting": 2, "transfer": 1}}  # fmt: skip
    (run.folder / "steps" / "w0-1.jsonl").write_text(json.dumps(line) + "\n")
    steps = read_steps(run)
    assert steps["at_s"].tolist() == [pytest.approx(3.5)]
    assert steps["waiting"].tolist() == [3]


def test_the_json_summary_has_the_same_numbers(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    evidence = gather(find_runs([tmp_path / "runs"]))
    summary = summary_json(evidence)
    ttft = [r["first_token_s"] - r["scheduled_s"] for r in raw(run)]
    assert summary["cells"]["a"]["ttft_s"]["p90"]["value"] == pytest.approx(np.quantile(ttft, 0.9))
    json.dumps(summary, allow_nan=False)
