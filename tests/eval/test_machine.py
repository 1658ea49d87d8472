"""What machines did during a replay, from samples with a known course."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from eval.machine import machine_use, read_samples
from eval.records import Run
from eval.report import find_runs, gather, write_report
from launch.sampling import ENGINE_COLUMNS, GPU_COLUMNS, PROCESS_COLUMNS

MakeRun = Callable[..., Run]

ORIGIN_S = 1000.0
MANIFEST = {
    "replay": {"clock": {"unix_origin_s": ORIGIN_S}},
    "workers": [{"id": "w0", "gpus": [0, 1]}, {"id": "w1", "gpus": [2]}],
}


def sampled(run: Run) -> Run:
    """w0 takes half a core, w1 one and a half; NVLink receives 3 GB/s on GPU 2 alone."""
    processes = [",".join(PROCESS_COLUMNS)]
    gpus = [",".join(GPU_COLUMNS)]
    for second in range(-10, 60, 2):
        at = ORIGIN_S + second
        processes += [
            f"{at},w0,{50 + second * 0.5},{1000 + second},3",
            f"{at},w1,{90 + second * 1.5},7,1",
        ]
        for index in (0, 1, 2):
            received = 3e9 * (second + 10) if index == 2 else ""
            gpus.append(
                f"{at},{index},H200,{20 * index},{10**9},{10**11},{100 + index},,{received},"
                f"{1500 + index},{'power+thermal' if index == 1 and second >= 30 else ''}"
            )
    (run.folder / "processes.csv").write_text("\n".join(processes) + "\n1057.0,w0,12")
    engines = [",".join(ENGINE_COLUMNS)]
    for second in range(0, 60, 2):
        engines += [f"{ORIGIN_S + second},w0,{second},1,0.5", f"{ORIGIN_S + second},w1,,,"]
    (run.folder / "engines.csv").write_text("\n".join(engines) + "\n")
    (run.folder / "gpu.csv").write_text("\n".join(gpus) + "\n")
    return run


def test_counters_become_rates_and_gpus_their_workers(make_run: MakeRun) -> None:
    run = sampled(make_run(manifest=MANIFEST))
    samples = read_samples(run)
    assert samples.processes["at_s"].min() == 0.0
    cores = samples.processes.groupby("id")["cores"]
    assert cores.median().to_dict() == pytest.approx({"w0": 0.5, "w1": 1.5})
    assert set(samples.gpus["gpu"]) == {"GPU 0 w0", "GPU 1 w0", "GPU 2 w1"}
    first, second = machine_use(samples)
    assert (first.worker, first.gpus, second.gpus) == ("w0", 2, 1)
    assert first.cores_mean == pytest.approx(0.5)
    assert first.rss_max_bytes == 1058
    assert first.sm_mean_percent == pytest.approx(10.0)
    assert first.sm_clock_mean_mhz == pytest.approx(1500.5)
    # One of its two GPUs, in the second half.
    assert first.throttled_share == pytest.approx(0.25, abs=0.01)
    assert second.throttled_share == 0.0
    assert np.isnan(first.nvlink_received_bytes)
    assert second.nvlink_received_bytes == pytest.approx(3e9 * 58)
    rates = samples.gpus.loc[samples.gpus["index"] == 2, "nvlink_received_bps"]
    assert rates.to_numpy() == pytest.approx(3e9)


def test_samples_of_older_versions_say_nothing_of_throttling(make_run: MakeRun) -> None:
    run = sampled(make_run(manifest=MANIFEST))
    lines = (run.folder / "gpu.csv").read_text().splitlines()
    kept = [",".join(line.split(",")[:-2]) for line in lines]
    (run.folder / "gpu.csv").write_text("\n".join(kept) + "\n")
    first, _ = machine_use(read_samples(run))
    assert np.isnan(first.throttled_share)
    assert np.isnan(first.sm_clock_mean_mhz)


def test_a_process_that_ended_has_no_negative_cpu(make_run: MakeRun) -> None:
    run = sampled(make_run(manifest=MANIFEST))
    path = run.folder / "processes.csv"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:40], "1035.0,w0,1.0,5,1", "1037.0,w0,2.0,5,1"]) + "\n")
    own = read_samples(run).processes
    assert (own["cores"].dropna() >= 0).all()


def test_a_run_without_samples_has_none(make_run: MakeRun) -> None:
    samples = read_samples(make_run())
    assert samples.processes.empty
    assert samples.gpus.empty
    assert machine_use(samples) == []


def test_the_report_draws_and_sums_up_the_samples(make_run: MakeRun) -> None:
    run = sampled(make_run(manifest=MANIFEST))
    html, markdown = write_report(gather(find_runs([run.folder]), draws=50), run.folder / "report")
    text = html.read_text()
    for key in (
        "queues",
        "kv",
        "cores",
        "sm_percent",
        "memory_used_bytes",
        "power_w",
        "nvlink_received_bps",
    ):
        assert f'id="plot-{key}-0"' in text
    # Between two samples nothing is known, which is not idleness.
    assert "Requests in the engines, a, sampled</figcaption>" in text
    section = markdown.read_text().partition("## CPU and GPU")[2]
    assert (
        "| a | w1 | 1.50 | 7.00 B | 40.0 % | 1.00 GB | 102 W | 1502 | 0.0 % | 174 GB |" in section
    )
