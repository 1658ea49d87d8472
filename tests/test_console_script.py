"""The console script itself: what every command has in common."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import command_line

DELTASERVE = [sys.executable, "-m", "deltaserve"]


@pytest.mark.parametrize(
    "command",
    [["--version"], ["launch", "list"], ["policy", "list"], ["policy", "list", "--json"]],
)
def test_a_full_disk_under_the_output_is_one_line(command: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*DELTASERVE, *command], stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stderr.startswith(b"error: ")
    assert done.stderr.endswith(b"No space left on device\n")
    assert done.stderr.count(b"\n") == 1


def test_a_reader_that_leaves_ends_a_command_without_a_word() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    listing = [*DELTASERVE, "policy", "list", "--json"]
    done = subprocess.run(listing, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


def test_a_crash_in_c_code_says_where_python_was() -> None:
    crashing = (
        "import os, signal\n"
        "from deltaserve import cli\n"
        "def crash(**_): os.kill(os.getpid(), signal.SIGSEGV)\n"
        "cli.build_app = lambda _: crash\n"
        "cli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", crashing], capture_output=True, text=True)
    assert done.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in done.stderr
    assert "in crash" in done.stderr


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("deltaserve ", "launch"),
        ("deltaserve launch st", "status"),
        ("deltaserve eval r", "report"),
    ],
)
def test_a_shell_completes_commands_of_every_room(typed: str, offered: str) -> None:
    asked = {
        "_DELTASERVE_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(typed.count(" ")),
    }
    done = subprocess.run(DELTASERVE, env=os.environ | asked, capture_output=True, text=True)
    assert offered in done.stdout.split()


def test_folders_of_our_packages_names_do_not_hide_them(tmp_path: Path) -> None:
    for name in ("launch", "eval", "replay"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    elsewhere = os.environ | {"PYTHONPATH": str(tmp_path)}
    for command in (["launch", "list"], ["eval", "list"], ["replay", "stats", "/dev/null"]):
        listing = [*DELTASERVE, *command]
        done = subprocess.run(listing, cwd=tmp_path, env=elsewhere, capture_output=True, text=True)
        assert "Traceback" not in done.stderr
        assert done.returncode == (0 if "list" in command else 2), done.stderr


def test_help_says_how_to_have_commands_completed() -> None:
    done = subprocess.run([*DELTASERVE, "-h"], capture_output=True, text=True)
    assert "--install-completion" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["eval", "list", "--json"], 0),
        (["eval", "run", "nothing"], 2),
        (["launch", "logs", "nothing"], 2),
        (["replay", "stats", "none.jsonl"], 2),
        (["policy", "explain", "nothing"], 2),
        (["route", "--check"], 2),
    ],
)
def test_a_process_of_its_own_says_what_other_tests_ask_in_theirs(
    arguments: list[str], status: int
) -> None:
    done = subprocess.run([*DELTASERVE, *arguments], capture_output=True, text=True)
    here = command_line.deltaserve(*arguments)
    assert done.returncode == here.returncode == status
    assert (done.stdout, done.stderr) == (here.stdout, here.stderr)
    assert "Traceback" not in done.stderr
