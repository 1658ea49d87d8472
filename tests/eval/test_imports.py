from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltaserve.errors import InputError
from eval.imports import import_file
from eval.report import find_runs, gather, write_report
from replay.results import Result, ResultWriter
from replay.trace import digest, read_trace

SERVING = {
    "backend": "sglang",
    "duration": 12.0,
    "input_lens": [100, 200, 300],
    "output_lens": [3, 2, 4],
    "ttfts": [0.5, 1.0, 0.0],
    "itls": [[0.1, 0.3], [0.2], []],
    "generated_texts": ["", "", ""],
    "errors": ["", "", "it burnt"],
    "cached_tokens": [0, 150, 0],
}


def aiperf(conversation: str, turn: int, start_ms: int, ttft_ms: float, latency_ms: float) -> str:
    start_ns = 1_759_813_207_000_000_000 + start_ms * 1_000_000
    return json.dumps(
        {
            "metadata": {
                "session_num": turn,
                "x_correlation_id": f"user-{conversation}",
                "conversation_id": conversation,
                "turn_index": turn,
                "request_start_ns": start_ns,
                "request_end_ns": start_ns + int(latency_ms * 1e6),
                "benchmark_phase": "profiling",
            },
            "metrics": {
                "input_sequence_length": {"value": 550, "unit": "tokens"},
                "time_to_first_token": {"value": ttft_ms, "unit": "ms"},
                "request_latency": {"value": latency_ms, "unit": "ms"},
                "output_sequence_length": {"value": 9, "unit": "tokens"},
            },
            "error": None,
        }
    )


FAILED = {
    "metadata": {
        "session_num": 8,
        "conversation_id": "c",
        "turn_index": 0,
        "request_start_ns": 1_759_813_208_000_000_000,
        "request_end_ns": 1_759_813_208_000_000_000,
        "benchmark_phase": "profiling",
    },
    "metrics": {"error_isl": {"value": 550, "unit": "tokens"}},
    "error": {"code": 503, "type": "HTTPError", "message": "busy"},
}


def test_bench_serving_lines_become_runs_with_its_own_latencies(tmp_path: Path) -> None:
    source = tmp_path / "serving.jsonl"
    source.write_text(json.dumps(SERVING) + "\n" + json.dumps(SERVING) + "\n")
    folders = import_file(source, "bench-serving", "theirs", tmp_path / "out")
    assert [folder.name for folder in folders] == ["r1", "r2"]
    run = find_runs([tmp_path / "out"])[0]
    assert run.requests["ttft_s"].tolist()[:2] == [0.5, 1.0]
    assert run.requests["tpot_s"].tolist()[:2] == pytest.approx([0.2, 0.2])
    assert run.requests["e2e_s"].tolist()[:2] == pytest.approx([0.9, 1.2])
    assert run.requests["error_kind"].tolist()[2] == "server_error"


def test_bench_servings_throughput_is_over_its_own_duration(tmp_path: Path) -> None:
    source = tmp_path / "serving.jsonl"
    source.write_text(json.dumps(SERVING | {"errors": ["", "", ""], "ttfts": [0.5, 1.0, 2.0]}))
    import_file(source, "bench-serving", "theirs", tmp_path / "out")
    cell = gather(find_runs([tmp_path / "out"]), draws=50).cells[0]
    assert cell.request_rps == pytest.approx(3 / 12)
    assert cell.apc.value == pytest.approx(150 / 600)


def test_aiperf_records_keep_their_sessions_and_times(tmp_path: Path) -> None:
    source = tmp_path / "profile_export.jsonl"
    lines = [aiperf("a", 0, 500, 100, 300), aiperf("a", 1, 2000, 50, 130), json.dumps(FAILED)]
    source.write_text("\n".join(lines))
    (folder,) = import_file(source, "aiperf", "theirs", tmp_path / "out")
    run = find_runs([folder])[0]
    ok = run.requests[run.requests["ok"]]
    assert ok["session_id"].tolist() == ["user-a", "user-a"]
    assert ok["ttft_s"].tolist() == pytest.approx([0.1, 0.05], abs=1e-5)
    assert ok["tpot_s"].tolist() == pytest.approx([0.025, 0.01], abs=1e-5)
    assert np.diff(ok["scheduled_s"]).tolist() == pytest.approx([1.5])
    assert run.requests["error_kind"].tolist()[2] == "server_error"


def test_an_answer_of_bench_serving_without_tokens_failed(tmp_path: Path) -> None:
    """Its stream ended without an error: the time to a first token that never came stays 0 there,
    and the tokens are those asked for."""
    source = tmp_path / "serving.jsonl"
    source.write_text(json.dumps(SERVING | {"errors": ["", "", ""]}))
    (folder,) = import_file(source, "bench-serving", "theirs", tmp_path / "out")
    requests = find_runs([folder])[0].requests
    assert requests["error_kind"].fillna("").tolist() == ["", "", "short_output"]
    assert requests["ttft_s"].tolist() == [0.5, 1.0, np.inf]
    assert requests["output_tokens"].tolist() == [3, 2, 0]


def test_answers_of_aiperf_that_were_not_streamed_came_whole(tmp_path: Path) -> None:
    """Without --streaming it records no time to a first token."""
    source = tmp_path / "profile_export.jsonl"
    lines = [json.loads(aiperf("a", turn, 500 * turn, 0, 300)) for turn in range(3)]
    for line in lines:
        del line["metrics"]["time_to_first_token"]
    del lines[1]["metrics"]["output_sequence_length"]
    lines[2]["metrics"]["output_sequence_length"]["value"] = 0
    source.write_text("\n".join(map(json.dumps, lines)))
    (folder,) = import_file(source, "aiperf", "theirs", tmp_path / "out")
    requests = find_runs([folder])[0].requests
    assert requests["error_kind"].fillna("").tolist() == ["", "", "short_output"]
    assert requests["ok"].tolist() == [True, True, False]
    assert requests["e2e_s"].tolist()[:2] == pytest.approx([0.3, 0.3])
    assert requests["ttft_s"].tolist()[:2] == pytest.approx([0.3, 0.3])
    assert requests["output_tokens"].tolist() == [9, 1, 0]
    assert requests["tpot_s"].isna().tolist()[:2] == [True, True]


def test_what_aiperf_cancelled_itself_is_not_counted(tmp_path: Path) -> None:
    """As at the end of a benchmark's duration: servers did not fail there."""
    source = tmp_path / "profile_export.jsonl"
    cancelled = json.loads(aiperf("a", 1, 900, 0, 300))
    cancelled["metrics"] = {"error_isl": {"value": 550, "unit": "tokens"}}
    cancelled["metadata"]["was_cancelled"] = True
    cancelled["error"] = {"code": 499, "type": "RequestCancellationError", "message": "x"}
    source.write_text("\n".join([aiperf("a", 0, 500, 100, 300), json.dumps(cancelled)]))
    (folder,) = import_file(source, "aiperf", "theirs", tmp_path / "out")
    run = find_runs([folder])[0]
    assert run.requests["request_id"].tolist() == ["a-0-0"]
    assert run.all_requests["phase"].tolist() == ["measure", "drain"]
    cell = gather([run], draws=20).cells[0]
    assert (cell.n, cell.failed) == (1, 0)
    assert cell.latency["e2e"][2].value == pytest.approx(0.3)


def test_imported_and_own_runs_make_one_report(tmp_path: Path) -> None:
    source = tmp_path / "serving.jsonl"
    clean = SERVING | {"errors": ["", "", ""], "ttfts": [0.5, 1.0, 2.0]}
    source.write_text(json.dumps(clean))
    import_file(source, "bench-serving", "one", tmp_path / "out")
    import_file(source, "bench-serving", "two", tmp_path / "out")
    evidence = gather(find_runs([tmp_path / "out"]), draws=50)
    markdown = write_report(evidence, tmp_path / "report")[1].read_text()
    assert "hardware that was not recorded" in markdown
    assert "| one |" in markdown


def test_bench_serving_runs_of_other_lengths_are_not_compared(tmp_path: Path) -> None:
    """Their requests are told apart by position alone."""
    clean = SERVING | {"errors": ["", "", ""], "ttfts": [0.5, 1.0, 2.0]}
    for arm, lengths in (("one", [100, 200, 300]), ("two", [300, 200, 100])):
        source = tmp_path / f"{arm}.jsonl"
        source.write_text((json.dumps(clean | {"input_lens": lengths}) + "\n") * 2)
        import_file(source, "bench-serving", arm, tmp_path / "out")
    evidence = gather(find_runs([tmp_path / "out"]), draws=50)
    assert {item.requests for item in evidence.comparisons} == {0}
    assert all("were asked different things" in (c.reason or "") for c in evidence.comparisons)


def replayed(folder: Path, trace: Path, **record: object) -> Path:
    """A folder as `replay run` leaves it."""
    folder.mkdir()
    writer = ResultWriter(folder / "requests.jsonl")
    for number, request in enumerate(read_trace(trace)):
        at_s = float(number)
        writer.write(
            Result(
                request_id=request.request_id,
                session_id=request.session_id,
                turn=request.turn,
                input_length=request.input_length,
                output_length=8,
                scheduled_s=at_s,
                sent_s=at_s,
                first_token_s=at_s + 0.5,
                finished_s=at_s + 0.9,
                arrivals=[(at_s + 0.5, 1), (at_s + 0.9, 8)],
                output_tokens=8,
                prompt_tokens=request.input_length,
                cached_tokens=0,
            )
        )
    writer.close()
    whole = {
        "arguments": {"seed": 0, "vocab_size": 1000, "mode": "open", "length_scale": 1.0},
        "trace": {"path": str(trace), "sha256": digest(trace)},
        "versions": {"deltaserve": "0.1.0"},
        "clock": {"unix_origin_s": 0.0},
        "summary": {"duration_s": 12.0},
    }
    (folder / "replay.json").write_text(json.dumps(whole | record))
    return folder


def test_a_folder_of_replay_run_is_a_run_with_its_trace_and_gpus(
    tmp_path: Path, small_trace: Path
) -> None:
    source = replayed(tmp_path / "mine", small_trace)
    out = tmp_path / "out"
    folders = [
        *import_file(source, "replay", "mine", out, gpus=2),
        *import_file(source, "replay", "mine", out, gpus=2),
        *import_file(source, "replay", "yours", out, gpus=4),
    ]
    assert [f"{folder.parent.name}/{folder.name}" for folder in folders] == [
        "mine/r1", "mine/r2", "yours/r1",
    ]  # fmt: skip
    evidence = gather(find_runs([out]), draws=50)
    assert evidence.excluded == []
    cell = evidence.cells[0]
    assert (cell.n, cell.gpus) == (24, 2)
    assert cell.requests["best_cached_tokens"].notna().all()
    rate = cell.measures["requests_per_s"].value
    assert rate == pytest.approx(12 / 11.9)
    assert cell.measures["requests_per_s_per_gpu"].value == pytest.approx(rate / 2)
    markdown = write_report(evidence, tmp_path / "report")[1].read_text()
    assert "| mine |" in markdown


@pytest.mark.parametrize(
    ("summary", "words"),
    [
        (None, "the replay was not finished (replay.json: no summary)"),
        (
            {"interrupted": True},
            "the replay was interrupted, and measured for less time than it was to",
        ),
    ],
)
def test_a_replay_that_was_not_finished_is_said_to_be(
    tmp_path: Path, small_trace: Path, summary: dict[str, Any] | None, words: str
) -> None:
    source = replayed(tmp_path / "mine", small_trace)
    record = json.loads((source / "replay.json").read_text())
    if summary is None:
        del record["summary"]
    else:
        record["summary"] |= summary
    (source / "replay.json").write_text(json.dumps(record))
    import_file(source, "replay", "mine", tmp_path / "out")
    (_, found) = gather(find_runs([tmp_path / "out"]), draws=50).excluded[0]
    assert found[0].detail == words


def test_a_replay_that_was_resumed_is_no_run_to_compare(tmp_path: Path, small_trace: Path) -> None:
    """Its rates would be over the time in which nothing was sent, too."""
    source = replayed(tmp_path / "mine", small_trace, resumed_at_s=[30.0, 3600.4])
    import_file(source, "replay", "mine", tmp_path / "out")
    (_, found) = gather(find_runs([tmp_path / "out"]), draws=50).excluded[0]
    assert found[0].rule == "failed"
    assert found[0].detail.startswith(
        "the replay was broken off and resumed 3600 s after its start"
    )


def test_a_folder_of_something_else_is_answered_in_one_line(
    tmp_path: Path, small_trace: Path
) -> None:
    with pytest.raises(InputError, match=r"no requests\.jsonl there; expected a folder of"):
        import_file(tmp_path, "replay", "a", tmp_path / "out")
    source = replayed(tmp_path / "mine", small_trace)
    (source / "replay.json").write_text("{}")
    with pytest.raises(InputError, match=r"replay\.json: not what replay run writes there"):
        import_file(source, "replay", "a", tmp_path / "out")
    assert not list((tmp_path / "out" / "a").iterdir())


@pytest.mark.parametrize(
    ("text", "file_format", "said"),
    [
        ('{"duration": 1}', "bench-serving", "1: input_lens: is missing.*--output-details$"),
        ("{", "bench-serving", "1: expected one JSON object a line"),
        ("[]", "aiperf", "1: expected a JSON object"),
        ('{"a": 1}', "aiperf", "1: not a record of AIPerf's profile_export.jsonl"),
        ("", "aiperf", "no request of the profiling phase"),
    ],
)
def test_a_file_of_another_kind_is_answered_in_one_line(
    tmp_path: Path, text: str, file_format: str, said: str
) -> None:
    source = tmp_path / "source.jsonl"
    source.write_text(text)
    with pytest.raises(InputError, match=said):
        import_file(source, file_format, "a", tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"output_lens": None}, r"output_lens: input should be a valid list"),
        ({"input_lens": [100, "x", 300]}, r"input_lens\.1: input .* integer \(found 'x'\)"),
        ({"input_lens": [100, -1, 300]}, r"input_lens\.1: input should be greater than or equal"),
        ({"ttfts": 5}, r"ttfts: input should be a valid list \(found 5\)"),
        ({"itls": [[0.1], [None], []]}, r"itls\.1\.0: input should be a valid number"),
        ({"ttfts": [0.5]}, r"ttfts: 1 items, but input_lens has 3"),
    ],
)
def test_a_wrong_field_of_bench_serving_is_named_and_nothing_is_written(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    source = tmp_path / "source.jsonl"
    source.write_text(f"{json.dumps(SERVING)}\n{json.dumps(SERVING | change)}\n")
    with pytest.raises(InputError, match=rf"source\.jsonl:2: {said}"):
        import_file(source, "bench-serving", "a", tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("arm", ["../../zz", "/zz", "", "a b", "a@low"])
def test_an_arm_is_named_as_in_an_experiment(tmp_path: Path, arm: str) -> None:
    source = tmp_path / "source.jsonl"
    source.write_text(json.dumps(SERVING))
    with pytest.raises(InputError, match=rf"^--arm {arm}: "):
        import_file(source, "bench-serving", arm, tmp_path / "o" / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source.jsonl"]
