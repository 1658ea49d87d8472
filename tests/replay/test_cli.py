"""The command line: what a person types and sees."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from deltaserve.errors import InputError
from replay.cli import app
from replay.options import RunOptions
from replay.results import read_results
from replay.synth import PROFILES
from replay.trace import Request, read_trace, write_trace
from tests.command_line import deltaserve

Engine = Callable[..., object]


def _cli(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize("command", ["convert", "synth", "sample", "stats", "run"])
def test_every_command_has_help_with_an_example(command: str) -> None:
    assert f"deltaserve replay {command}" in _cli(command, "--help")


def test_help_of_synth_names_every_profile() -> None:
    shown = _cli("synth", "--help")
    assert [name for name in PROFILES if name not in shown] == []


def test_a_trace_is_made_described_and_sampled(tmp_path: Path) -> None:
    trace, small = tmp_path / "t.jsonl.zst", tmp_path / "s.jsonl"
    profile = tmp_path / "p.json"
    made = _cli(
        "synth", "--requests", 400, "--rate", 5, "--length-scale", 0.02, "--block-size", 16,
        "--output", trace, "--save-profile", profile, "--json",
    )  # fmt: skip
    assert orjson.loads(made)["requests"] == 400
    assert len(list(read_trace(trace))) == 400
    record = orjson.loads(_cli("stats", trace, "--json", "--cache-tokens", 5000))
    assert record["requests"] == 400
    assert any(point["cache_tokens"] == 5000 for point in record["lru"][0]["curve"])
    page = tmp_path / "page.html"
    assert "best hit rate" in _cli("stats", trace, "--html", page)
    assert "<html" in page.read_text()
    report = orjson.loads(_cli("sample", trace, "--output", small, "--sample-ratio", 0.5, "--json"))
    written = orjson.loads((tmp_path / "s.jsonl.report.json").read_bytes())
    assert report == written
    again, fitted = tmp_path / "a.jsonl", tmp_path / "f.jsonl"
    _cli("synth", "--requests", 400, "--profile", profile, "--output", again)
    assert list(read_trace(again)) == list(read_trace(trace))
    assert "50 requests" in _cli("synth", "--fit", trace, "--requests", 50, "--output", fitted)


def test_a_run_prints_its_summary(
    tmp_path: Path, trace_of: Callable[..., list[Request]], engine: Callable[..., object]
) -> None:
    fake = engine("sglang")
    write_trace(tmp_path / "t.jsonl", trace_of(1, requests=10))
    out = tmp_path / "out"
    shown = _cli(
        "run", tmp_path / "t.jsonl", "--url", f"{fake.url}/", "--output", out, "--mode", "closed",  # type: ignore[attr-defined]
        "--think-scale", 0,
    )  # fmt: skip
    assert "10 of 10 well; errors: none" in shown
    assert "TTFT" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["stats", "none.jsonl"], "none.jsonl: no such file"),
        (["stats", "/dev/null"], "/dev/null: the trace holds no request"),
        (["synth", "--output", "x.jsonl"], "expected either --requests or --duration"),
        (["synth", "--output", "x.jsonl", "--requests", "1", "--rate", "0"], "--rate 0"),
        (["convert", "none", "--format", "weka", "--output", "x"], "none: no such file or folder"),
        (
            ["convert", "x", "--format", "mooncake", "--shared-prefix", "--output", "x"],
            "--shared-prefix: expected --format weka",
        ),
        (["convert", "x", "--format", "weka", "--output", "x", "--sessions-per-hour", "0"], " 0: "),
        (
            ["convert", "/dev/null", "--format", "mooncake", "--output", "x"],
            "/dev/null: no request in it",
        ),
        *(
            (["synth", "--output", "x.jsonl", *arguments], words)
            for arguments, words in [
                (["--duration", "nan"], "--duration nan: expected more than 0"),
                (["--duration", "inf"], "--duration inf: expected at most 31,622,400 (a year"),
                (["--requests", "99000000000"], "--requests 9.9e+10: expected at most 1,000,000,"),
                (["--requests", "9", "--length-scale", "nan"], "--length-scale nan"),
                (["--requests", "9", "--block-size", "0"], "--block-size 0"),
                (["--requests", "9", "--rate", "nan"], "--rate nan"),
                (["--requests", "9", "--seed", "-1"], "--seed -1: expected at least 0"),
                (["--requests", "9", "--save-profile", "no/p.json"], "no/p.json: cannot be"),
            ]
        ),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_status_2(
    tmp_path: Path, arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = deltaserve("replay", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_what_is_made_of_a_trace_does_not_take_its_place(
    tmp_path: Path, trace_of: Callable[..., list[Request]]
) -> None:
    trace = tmp_path / "t.jsonl"
    write_trace(trace, trace_of(1, requests=10))
    before = trace.read_bytes()
    for command in (
        ["sample", trace, "--sample-ratio", "1", "--max-single-turn-ratio", "1"],
        ["synth", "--fit", trace, "--requests", "3"],
        ["convert", "--format", "mooncake", trace],
    ):
        done = deltaserve("replay", *command, "--output", trace)
        assert done.returncode == 2
        assert f"--output {trace}: expected another file" in done.stderr
        assert trace.read_bytes() == before


def test_a_page_that_cannot_be_written_is_one_line(
    tmp_path: Path, trace_of: Callable[..., list[Request]]
) -> None:
    write_trace(tmp_path / "t.jsonl", trace_of(1, requests=10))
    done = deltaserve("replay", "stats", tmp_path / "t.jsonl", "--html", tmp_path / "no" / "p.html")
    assert done.returncode == 2
    assert "p.html: cannot be written: No such file or directory" in done.stderr


def _limited(limit_bytes: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The command line where no file can become larger than so many bytes, as on a full disk."""
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit_bytes},) * 2); "
        "from deltaserve.cli import main; main()"
    )
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.zst"])
def test_a_full_disk_is_one_line_and_leaves_no_part_of_a_trace(tmp_path: Path, name: str) -> None:
    done = _limited(50_000, "replay", "synth", "--requests", 3000, "--output", tmp_path / name)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert f"{name}: cannot be written: File too large" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_on_a_full_disk_ends_in_one_line_and_stays_readable(
    tmp_path: Path, trace_of: Callable[..., list[Request]], engine: Engine, processes: int
) -> None:
    write_trace(tmp_path / "t.jsonl", trace_of(5, requests=60))
    url = engine("sglang").url  # type: ignore[attr-defined]
    done = _limited(
        9_000, "replay", "run", tmp_path / "t.jsonl", "--url", url, "--output", tmp_path / "out",
        "--time-scale", 50, "--processes", processes, "--vocab-size", 1000,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if not line.startswith("elapsed")]
    assert len(errors) == 1, done.stderr
    assert "requests.jsonl: cannot be written: File too large" in errors[0]
    assert 5 < len(read_results(tmp_path / "out")) < 60


@pytest.mark.parametrize(("flag", "value"), [("--requests", -3), ("--duration", 0), ("--rate", 0)])
def test_a_synthetic_trace_of_nothing_is_refused(tmp_path: Path, flag: str, value: int) -> None:
    arguments = [
        "synth", "--output", str(tmp_path / "t.jsonl"), "--requests", "9", flag, str(value)
    ]  # fmt: skip
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, InputError)
    assert f"{flag} {value}" in str(done.exception)
    assert list(tmp_path.iterdir()) == []


def test_a_synthetic_trace_without_later_turns_is_warned_of(tmp_path: Path) -> None:
    for flags, warned in (
        (("--requests", "300"), True),
        (("--rate", "2", "--requests", "300"), False),
    ):
        done = CliRunner().invoke(app, ["synth", "--output", str(tmp_path / "t.jsonl"), *flags])
        assert done.exit_code == 0
        assert ("first turns" in done.stderr) is warned


def test_exit_codes_tell_a_run_in_which_everything_failed(
    tmp_path: Path, trace_of: Callable[..., list[Request]], engine: Engine
) -> None:
    trace = trace_of(5, requests=6)
    write_trace(tmp_path / "t.jsonl", trace)
    fake = engine("sglang")
    codes = []
    for number, failing in enumerate((1, 6)):
        fake.faults = {request.request_id: "503" for request in trace[:failing]}  # type: ignore[attr-defined]
        arguments = [
            "run", str(tmp_path / "t.jsonl"), "--url", fake.url,  # type: ignore[attr-defined]
            "--output", str(tmp_path / f"o{number}"), "--time-scale", "50", "--vocab-size", "99",
        ]  # fmt: skip
        codes.append(CliRunner().invoke(app, arguments).exit_code)
    assert codes == [0, 3]


def test_a_preset_and_flags_beside_it_reach_the_run(
    tmp_path: Path, trace_of: Callable[..., list[Request]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[RunOptions] = []

    def fake_run(options: RunOptions) -> dict[str, object]:
        seen.append(options)
        raise InputError("enough")

    monkeypatch.setattr("replay.runner.run", fake_run)
    arguments = ["run", "t.jsonl", "--url", "http://h/", "--output", str(tmp_path)]
    CliRunner().invoke(
        app,
        [*arguments, "--preset", "agentx", "--max-inflight-sessions", "24", "--no-splice-outputs",
         "--start-share", "0", "0.5", "--header", "X-A=b", "--header", "Y=c"],
    )  # fmt: skip
    CliRunner().invoke(app, arguments)
    with_preset, plain = seen
    assert with_preset.url == "http://h"
    assert (with_preset.mode, with_preset.start, with_preset.recycle) == ("closed", "mid", True)
    assert (with_preset.max_think_s, with_preset.measure_s) == (10.0, 1800.0)
    assert with_preset.max_inflight_sessions == 24
    assert with_preset.splice_outputs is False
    assert with_preset.start_share == (0.0, 0.5)
    assert with_preset.headers == ("X-A=b", "Y=c")
    assert plain == RunOptions(trace=Path("t.jsonl"), url="http://h", output=tmp_path)


def test_the_mock_server_refuses_what_looks_like_a_port() -> None:
    module = "replay.bench.mock_server"
    command = [sys.executable, "-m", module, "28001", "3", "0.1", "stamps"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "processes 28001: expected 1 to 64" in done.stderr
    command = [sys.executable, "-m", module, "--help"]
    assert "interval_s" in subprocess.run(command, capture_output=True, text=True).stdout
