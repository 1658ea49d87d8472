"""The command line: what a person types and sees."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from replay.cli import app
from replay.trace import Request, read_trace, write_trace

Engine = Callable[..., object]


def _cli(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize("command", ["convert", "synth", "sample", "stats", "run"])
def test_every_command_has_help_with_an_example(command: str) -> None:
    assert f"deltaserve replay {command}" in _cli(command, "--help")


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
        (["synth", "--output", "x.jsonl"], "expected either --requests or --duration"),
        (["synth", "--output", "x.jsonl", "--requests", "1", "--rate", "0"], "--rate 0.0"),
        (["convert", "none", "--format", "weka", "--output", "x"], "none: no such file or folder"),
        (
            ["convert", "x", "--format", "mooncake", "--shared-prefix", "--output", "x"],
            "--shared-prefix: expected --format weka",
        ),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_status_2(
    tmp_path: Path, arguments: list[str], words: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deltaserve", "replay", *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
