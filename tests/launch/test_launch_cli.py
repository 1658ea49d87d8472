"""The command line, as a user meets it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from launch import cli
from launch.claims import claim
from launch.control import default_run_dir
from tests import command_line
from tests.processes import wait_until, working_in

from .conftest import taken_base


def deltaserve(*arguments: str) -> subprocess.CompletedProcess[str]:
    return command_line.deltaserve("launch", *arguments)


def check(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`check` of two workers, with ports that no fleet of another test is given meanwhile: it keeps
    none from others itself, and would find them in use."""
    with taken_base(2) as base_port:
        return deltaserve("check", name, *arguments, "--set", f"base_port={base_port}")


def as_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`up` takes signals, and what it detaches outlives it: in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "deltaserve", "launch", *arguments],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "command", ["install", "plugin", "list", "check", "up", "status", "logs", "down"]
)
def test_every_command_has_help_with_an_example(command: str) -> None:
    done = deltaserve(command, "--help")
    assert done.returncode == 0
    assert f"Example: deltaserve launch {command}" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["check", "laptop-sglang"], "run: deltaserve launch install sglang"),
        (["up", "laptop-sglang", "--set", "pagesize=2"], "did you mean 'page_size'?"),
        (["down", "laptop-sglang"], "no fleet of the name laptop-sglang here"),
        (["install", "slang"], "no engine 'slang'"),
    ],
)
def test_a_mistake_is_answered_in_one_line_with_status_2(arguments: list[str], said: str) -> None:
    done = deltaserve(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert said in done.stderr


def test_a_worker_started_by_hand_finds_the_plugin_with_what_is_printed(tmp_path: Path) -> None:
    done = deltaserve("plugin", str(tmp_path / "a folder"))
    assert done.returncode == 0, done.stderr
    find = (
        "from importlib.metadata import entry_points\n"
        "(found,) = entry_points(group='sglang.srt.plugins', name='deltaserve')\n"
        "print(found.load().__module__)"
    )
    for before in ("", "/elsewhere"):
        shell = f'{done.stdout}\n"{sys.executable}" -S -c "{find}"; echo "$PYTHONPATH"'
        told = subprocess.run(
            ["bash", "-c", shell], env={"PYTHONPATH": before}, capture_output=True, text=True
        )
        assert told.stdout.splitlines()[0] == "sglang_ext.plugin", told.stderr
        assert told.stdout.splitlines()[1].split(":")[1:] == ([before] if before else [])
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "12:30"):  # a colon separates on PYTHONPATH
        refused = deltaserve("plugin", str(folder))
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)


def test_a_run_folder_that_our_plugin_would_not_be_found_in_is_refused(
    fake_python: Path, tmp_path: Path
) -> None:
    folder = str(tmp_path / "2026-11-26T12:30")
    fakes = ["--set", f"engine.python={fake_python}", "--set", "router.kind=none"]
    fakes += ["--run-dir", folder]
    refused = check("laptop-sglang", *fakes)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert refused.stderr.startswith(f"error: {folder}: ")
    assert check("laptop-vllm", *fakes).returncode == 0


@pytest.mark.parametrize("command", [["check"], ["up"], ["up", "--detach"]])
@pytest.mark.parametrize("below", ["file", "file/below"])
def test_a_run_folder_at_or_below_a_file_is_answered_in_one_line(
    fake_python: Path, tmp_path: Path, command: list[str], below: str
) -> None:
    (tmp_path / "file").touch()
    fakes = ["--set", f"engine.python={fake_python}", "--set", "router.kind=none"]
    folder = str(tmp_path / below)
    called = as_process if command == ["up"] else deltaserve
    done = called(*command, "laptop-sglang", *fakes, "--run-dir", folder)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {folder}: cannot be made a folder: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["check", "up", "install"])
def test_a_cache_at_or_below_a_file_is_answered_in_one_line(
    fake_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    (tmp_path / "file").touch()
    cache = tmp_path / "file" / "cache"
    monkeypatch.setenv("DELTASERVE_CACHE", str(cache))
    fakes = ["--set", f"engine.python={fake_python}", "--set", "router.kind=none"]
    fakes += ["--run-dir", str(tmp_path / "run")]
    asked = ["sglang"] if command == "install" else ["laptop-sglang", *fakes]
    done = as_process(command, *asked)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {cache}/")
    assert done.stderr.endswith(": cannot be made a folder: Not a directory\n")
    assert done.stderr.count("\n") == 1


def test_up_detached_then_status_then_down(fake_python: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    fakes = ["--set", f"engine.python={fake_python}", "--set", "router.kind=none"]
    up = as_process(
        "up", "laptop-sglang", *fakes, "--set", "base_port=0", "--run-dir", str(run_dir), "--detach"
    )
    assert up.returncode == 0, up.stderr
    shown = json.loads(deltaserve("status", str(run_dir), "--json").stdout)
    assert [p["state"] for p in shown["processes"]] == ["ready", "ready"]
    down = deltaserve("down", str(run_dir))
    assert down.returncode == 0
    assert "2 processes ended" in down.stderr
    ended = json.loads(deltaserve("status", str(run_dir), "--json").stdout)
    assert (ended["alive"], ended["state"]) == (False, "stopped")
    kept = deltaserve("down", str(run_dir), "--remove")
    assert kept.returncode == 2
    assert "is a folder of your own" in kept.stderr
    assert run_dir.exists()


def test_up_of_a_fleet_that_runs_leaves_its_log_alone(fake_python: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    fakes = ["--set", f"engine.python={fake_python}", "--set", "router.kind=none"]
    fakes += ["--set", "base_port=0", "--run-dir", str(run_dir), "--detach"]
    assert as_process("up", "laptop-sglang", *fakes).returncode == 0
    log = run_dir / "supervisor.log"
    try:
        # It goes on speaking for a moment when the fleet is ready and `up` has returned.
        wait_until(lambda: log.read_text().endswith("Press Ctrl-C to end it.\n"))
        said = log.read_text()
        for _ in range(2):
            again = as_process("up", "laptop-sglang", *fakes)
            assert (again.returncode, again.stderr.count("\n")) == (2, 1)
            assert f"{run_dir}: a fleet is running there; run: deltaserve" in again.stderr
        assert log.read_text() == said
    finally:
        assert deltaserve("down", str(run_dir)).returncode == 0


def test_what_was_told_before_a_fleet_was_ready_is_shown_however_late_it_is_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    idle = [sys.executable, "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(cli, "DELTASERVE", idle)

    def is_ready(folder: Path, pid: int) -> bool:
        # As a supervisor does while whoever follows it is kept from looking.
        with (folder / "supervisor.log").open("a") as log:
            log.write("told in the meantime\n")
        os.kill(pid, signal.SIGKILL)
        return True

    monkeypatch.setattr(cli, "_is_ready", is_ready)
    cli._detach("laptop-sglang", "laptop-sglang", [], tmp_path, [])
    assert capsys.readouterr().err == "told in the meantime\n"


@pytest.mark.parametrize(("before", "lives_on"), [("SIG_IGN", True), ("SIG_DFL", False)])
def test_a_hangup_ends_a_fleet_unless_it_was_started_by_nohup(
    fake_python: Path, tmp_path: Path, before: str, lives_on: bool
) -> None:
    run_dir = tmp_path / "run"
    fakes = ["--set", f"engine.python={fake_python}", "--set", "router.kind=none"]
    fakes += ["--set", "base_port=0", "--set", "workers.0.count=1", "--run-dir", str(run_dir)]
    up = ["-m", "deltaserve", "launch", "up", "laptop-sglang", *fakes]
    code = f"import os, signal, sys; signal.signal(signal.SIGHUP, signal.{before}); "
    code += "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *up], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_until(
            lambda: (run_dir / "fleet.json").exists() and record(run_dir)["state"] == "ready"
        )
        process.send_signal(signal.SIGHUP)
        if lives_on:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(2)
            assert record(run_dir)["state"] == "ready"
            process.terminate()
        assert process.wait(60) == 130
        assert record(run_dir)["state"] == "stopped"
    finally:
        process.kill()
        process.wait()


def record(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "fleet.json").read_text())
    return found


def test_down_ends_a_fleet_that_is_still_checked(fake_python: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    fakes = ["--set", f"engine.python={fake_python}", "--set", "router.kind=none"]
    fakes += ["--set", "base_port=0", "--run-dir", str(run_dir)]
    assert as_process("up", "laptop-sglang", *fakes, "--detach").returncode == 0
    assert deltaserve("down", str(run_dir)).returncode == 0
    # Another engine: its options are asked for, which takes as long as it is imported.
    script = fake_python.read_text().replace("3.11.0", "3.12.0")
    asked = 'elif arguments[0].endswith("probe.py"):\n'
    assert asked in script
    fake_python.write_text(script.replace(asked, f"{asked}        time.sleep(600)\n"))
    up = [sys.executable, "-m", "deltaserve", "launch", "up", "laptop-sglang", *fakes]
    process = subprocess.Popen(up, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: record(run_dir)["supervisor"]["pid"] == process.pid)
        assert record(run_dir)["state"] == "planned"
        done = deltaserve("down", str(run_dir))
        assert (done.returncode, done.stderr) == (0, "run: its start was ended\n")
        assert process.poll() == 130
        assert record(run_dir)["state"] == "stopped"
    finally:
        process.terminate()
        process.wait()


@pytest.mark.parametrize("came_up_before", [False, True])
def test_status_and_down_find_a_fleet_that_is_still_planned(
    fake_python: Path, tmp_path: Path, came_up_before: bool
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'extends = "laptop-sglang"\nname = "prod"\nbase_port = 0\n'
        f'[engine]\npython = "{fake_python}"\n[router]\nkind = "none"\n'
    )
    if came_up_before:
        assert as_process("up", str(file), "--detach").returncode == 0
        assert deltaserve("down", "prod").stderr == "prod: 2 processes ended\n"
    # As an engine on a slow disk does, which is asked for its version first.
    asking = tmp_path / "asking"
    script, asked = fake_python.read_text(), '    if arguments[:2] == ["-I", "-c"]:\n'
    assert asked in script
    wait = f"        open({str(asking)!r}, 'w').close(); time.sleep(600)\n"
    fake_python.write_text(script.replace(asked, f"{asked}{wait}"))
    up = [sys.executable, "-m", "deltaserve", "launch", "up", str(file)]
    process = subprocess.Popen(up, stderr=subprocess.DEVNULL)
    try:
        wait_until(asking.exists)
        assert deltaserve("status", "prod").stdout.startswith("prod: planned since ")
        assert "prod: planned since " in deltaserve("status").stdout
        assert deltaserve("logs", "prod").returncode == 0
        done = deltaserve("down", "prod")
        assert (done.returncode, done.stderr) == (0, "prod: its start was ended\n")
        assert process.poll() == 130
    finally:
        process.kill()
        process.wait()
    if came_up_before:
        assert deltaserve("status", "prod").stdout.startswith("prod: stopped since ")
    assert deltaserve("down", "prod").returncode == (0 if came_up_before else 2)
    assert "prod: its start" not in deltaserve("down", "prod").stderr


def test_status_and_down_find_a_fleet_whose_detached_supervisor_has_not_begun(
    tmp_path: Path,
) -> None:
    begun = tmp_path / "begun"
    # As a supervisor on a slow disk, which is reading its own modules still.
    slow = f"import os, time; open({str(begun)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    code = (
        f"import sys; from launch import cli; cli.DELTASERVE = [sys.executable, '-c', {slow!r}]; "
    )
    code += "from deltaserve.cli import main; main()"
    up = [sys.executable, "-c", code, "launch", "up", "laptop-sglang", "--detach"]
    process = subprocess.Popen(up, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: begun.exists() and begun.read_text() != "")
        assert deltaserve("status", "laptop-sglang").stdout.startswith("laptop-sglang: planned ")
        done = deltaserve("down", "laptop-sglang")
        assert (done.returncode, done.stderr) == (0, "laptop-sglang: its start was ended\n")
        assert process.poll() == 130
        assert not psutil.pid_exists(int(begun.read_text()))
    finally:
        process.terminate()
        process.wait()


def test_down_ends_a_fleet_whose_supervisor_is_suspended(fake_python: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    fakes = ["--set", f"engine.python={fake_python}", "--set", "router.kind=none"]
    fakes += ["--set", "base_port=0", "--run-dir", str(run_dir)]
    up = [sys.executable, "-m", "deltaserve", "launch", "up", "laptop-sglang", *fakes]
    process = subprocess.Popen(up, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(
            lambda: (run_dir / "fleet.json").exists() and record(run_dir)["state"] == "ready"
        )
        process.send_signal(signal.SIGSTOP)  # as Ctrl-Z does
        assert deltaserve("down", str(run_dir)).returncode == 0
        assert process.poll() == 130
        assert record(run_dir)["state"] == "stopped"
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_is_told_to_leave_while_a_fleet_comes_up_detached_ends_it(
    fake_python: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """As by Ctrl-C, and by `timeout` or a job that is cancelled."""
    run_dir = tmp_path / "run"
    fakes = ["--set", f"engine.python={fake_python}", "--set", "router.kind=none"]
    fakes += ["--set", "base_port=0", "--run-dir", str(run_dir), "--set", "environment.FAKE=hang"]
    up = [sys.executable, "-m", "deltaserve", "launch", "up", "laptop-sglang", "--detach", *fakes]
    process = subprocess.Popen(up, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(
            lambda: (run_dir / "fleet.json").exists() and record(run_dir)["state"] == "starting"
        )
        process.send_signal(number)
        assert process.wait(60) == 130
        assert record(run_dir)["state"] == "stopped"
        assert working_in(run_dir) == []
    finally:
        process.kill()
        process.wait()
        deltaserve("down", str(run_dir))


def test_a_second_ctrl_c_does_not_keep_up_from_ending_its_fleet(
    fake_python: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    # As an engine does that has much to give back: until the second Ctrl-C has come.
    leaving = tmp_path / "leaving"
    leaving.touch()
    leaves = "    except KeyboardInterrupt:\n"
    wait = f"        while os.path.exists({str(leaving)!r}): time.sleep(0.05)\n"
    script = fake_python.read_text()
    assert leaves in script
    fake_python.write_text(script.replace(leaves, f"{leaves}{wait}"))
    fakes = ["--set", f"engine.python={fake_python}", "--set", "router.kind=none"]
    fakes += ["--set", "base_port=0", "--set", "workers.0.count=1", "--run-dir", str(run_dir)]
    up = [sys.executable, "-m", "deltaserve", "launch", "up", "laptop-sglang", *fakes]
    process = subprocess.Popen(up, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr
    try:
        wait_until(
            lambda: (run_dir / "fleet.json").exists() and record(run_dir)["state"] == "ready"
        )
        process.send_signal(signal.SIGINT)
        while process.stderr.readline() != "stopping\n":
            pass
        process.send_signal(signal.SIGINT)
        leaving.unlink()
        assert process.wait(60) == 130
        assert record(run_dir)["state"] == "stopped"
        assert deltaserve("status", str(run_dir)).returncode == 0
        assert "was not running" in deltaserve("down", str(run_dir)).stderr
    finally:
        process.kill()
        process.wait()


@contextmanager
def unread(python: Path, run_dir: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`up` of one worker once it is ready, when nobody reads what it says any more."""
    up = [sys.executable, "-m", "deltaserve", "launch", "up", "laptop-sglang", *arguments]
    up += ["--set", f"engine.python={python}", "--set", "router.kind=none"]
    up += ["--set", "base_port=0", "--set", "workers.0.count=1", "--run-dir", str(run_dir)]
    process = subprocess.Popen(up, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr
    try:
        while (line := process.stderr.readline()) != "Press Ctrl-C to end it.\n":
            assert line, "it did not come up"
        process.stderr.close()
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_fleet_whose_words_nobody_reads_any_more_ends_whole(
    fake_python: Path, tmp_path: Path
) -> None:
    """As by Ctrl-C of `up 2>&1 | tee log`, which ends `tee` too."""
    run_dir = tmp_path / "run"
    with unread(fake_python, run_dir) as process:
        process.send_signal(signal.SIGINT)
        process.wait(60)
        assert working_in(run_dir) == []
        assert record(run_dir)["state"] == "stopped"
        assert process.returncode == 130


def test_a_fleet_whose_words_nobody_reads_any_more_is_kept_serving(
    fake_python: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    with unread(fake_python, run_dir, "--keep-serving") as process:
        first = record(run_dir)["processes"][0]["pid"]
        os.kill(first, signal.SIGKILL)

        def serves_again() -> bool:
            assert process.poll() is None
            worker = record(run_dir)["processes"][0]
            return worker["pid"] != first and worker["state"] == "ready"

        wait_until(serves_again)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert working_in(run_dir) == []


def test_a_folder_that_a_fleet_comes_up_in_is_not_removed(fake_python: Path) -> None:
    fakes = ["--set", f"engine.python={fake_python}", "--set", "router.kind=none"]
    fakes += ["--set", "base_port=0", "--detach"]
    assert as_process("up", "laptop-sglang", *fakes).returncode == 0
    assert deltaserve("down", "laptop-sglang").returncode == 0
    with claim(default_run_dir("laptop-sglang")):
        refused = deltaserve("down", "laptop-sglang", "--remove")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "a fleet is running there" in refused.stderr
    assert deltaserve("down", "laptop-sglang", "--remove").returncode == 0


def test_a_fleet_is_found_by_its_file_under_a_name_of_its_own(
    fake_python: Path, tmp_path: Path
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'extends = "laptop-sglang"\nname = "prod"\nbase_port = 0\n'
        f'[engine]\npython = "{fake_python}"\n[router]\nkind = "none"\n'
    )
    up = as_process("up", str(file), "--detach")
    assert up.returncode == 0, up.stderr
    try:
        assert deltaserve("status", str(file)).stdout.startswith("prod: ready")
    finally:
        assert deltaserve("down", "prod").returncode == 0
    assert deltaserve("down", str(file)).stderr == "prod: was not running\n"
    file.write_text("[")  # of a file that says nothing any more its own name is left
    assert "no fleet of the name" in deltaserve("down", str(file)).stderr


def test_a_fleet_that_ended_is_listed_until_it_is_removed(fake_python: Path) -> None:
    fakes = ["--set", f"engine.python={fake_python}", "--set", "router.kind=none"]
    up = as_process("up", "laptop-sglang", *fakes, "--set", "base_port=0", "--detach")
    assert up.returncode == 0, up.stderr
    assert deltaserve("down", "laptop-sglang").returncode == 0
    listed = deltaserve("status").stdout
    assert listed.startswith("laptop-sglang: stopped since ")
    folder = Path(listed.split("(")[1].split(")")[0])
    assert folder.exists()
    assert deltaserve("down", "laptop-sglang", "--remove").returncode == 0
    assert not folder.exists()
    assert deltaserve("status").stdout == ""


def test_a_fleet_whose_record_is_broken_hides_no_other(fake_python: Path) -> None:
    fakes = ["--set", f"engine.python={fake_python}", "--set", "router.kind=none"]
    up = as_process("up", "laptop-sglang", *fakes, "--set", "base_port=0", "--detach")
    assert up.returncode == 0, up.stderr
    assert deltaserve("down", "laptop-sglang").returncode == 0
    folder = Path(deltaserve("status").stdout.split("(")[1].split(")")[0])
    for name, record in (("empty", ""), ("older", '{"state": "stopped"}')):
        broken = folder.with_name(name) / "fleet.json"
        broken.parent.mkdir()
        broken.write_text(record)
    listed = deltaserve("status")
    assert listed.returncode == 1
    assert "laptop-sglang: stopped since " in listed.stdout
    for name in ("empty", "older"):
        broken = folder.with_name(name) / "fleet.json"
        assert f"error: {broken}: cannot be read: " in listed.stderr
        for command in ("status", "down"):
            done = deltaserve(command, name)
            assert (done.returncode, done.stderr.count("\n")) == (2, 1)
            assert f"{broken}: cannot be read: " in done.stderr
    shown = json.loads(deltaserve("status", "--json").stdout)
    assert [fleet["name"] for fleet in shown["fleets"]] == ["laptop-sglang"]


def test_up_exits_1_and_shows_the_log_when_a_worker_dies(fake_python: Path, tmp_path: Path) -> None:
    done = as_process(
        "up",
        "laptop-sglang",
        "--set",
        f"engine.python={fake_python}",
        "--set",
        "environment.FAKE=die",
        "--set",
        "base_port=0",
        "--run-dir",
        str(tmp_path / "run"),
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "the reason it died" in done.stderr


def test_check_prints_the_exact_commands(fake_python: Path) -> None:
    fake = ["--set", f"engine.python={fake_python}"]
    done = check("laptop-sglang-pd", *fake, "--print-commands")
    assert done.returncode == 0, done.stderr
    assert "--disaggregation-mode decode" in done.stdout
    assert "DELTASERVE_SGLANG=cpu" in done.stdout


def test_check_and_up_say_where_telemetry_is_not_written(fake_python: Path, tmp_path: Path) -> None:
    fakes = ["--set", f"engine.python={fake_python}", "--set", "router.kind=none"]
    fakes += ["--set", "base_port=0", "--set", "telemetry=true"]
    said = "telemetry: not written: vllm writes none; it is a plugin of SGLang's\n"
    checked = check("laptop-vllm", *fakes, "--json")
    assert (checked.returncode, checked.stderr) == (0, said)
    assert json.loads(checked.stdout)["topology"]["telemetry"] is True
    assert check("laptop-sglang", *fakes).stderr == ""
    run_dir = tmp_path / "run"
    up = as_process("up", "laptop-vllm", *fakes, "--run-dir", str(run_dir), "--detach")
    assert (up.returncode, deltaserve("down", str(run_dir)).returncode) == (0, 0)
    assert said in up.stderr
    assert not (run_dir / "steps").exists()


def test_check_leaves_nothing_behind_and_shows_the_commands_of_what_it_refuses(
    fake_python: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    asked = ["laptop-sglang", "--set", f"engine.python={fake_python}", "--run-dir", str(folder)]
    asked.append("--print-commands")
    assert check(*asked).returncode == 0
    assert not folder.exists()
    refused = check(*asked, "--set", 'flags=["--no-such-flag"]')
    assert refused.returncode == 2
    assert "--no-such-flag" in refused.stdout
    assert not folder.exists()
    folder.mkdir()
    assert check(*asked).returncode == 0
    assert folder.exists()


def test_check_leaves_the_folder_of_a_fleet_that_came_up_meanwhile(
    fake_python: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    fakes = ["--set", f"engine.python={fake_python}", "--set", "router.kind=none"]
    fakes += ["--set", "base_port=0", "--run-dir", str(run_dir)]
    # Its options are asked for, which takes as long as an engine is imported.
    script = fake_python.read_text()
    asked = 'elif arguments[0].endswith("probe.py"):\n'
    wait = "        while os.path.exists(os.environ.get('FAKE_IMPORTS', '')): time.sleep(0.05)\n"
    fake_python.write_text(script.replace(asked, f"{asked}{wait}"))
    importing = tmp_path / "importing"
    importing.touch()
    command = [sys.executable, "-m", "deltaserve", "launch", "check", "laptop-sglang", *fakes]
    environment = os.environ | {"FAKE_IMPORTS": str(importing)}
    with taken_base(2) as base_port:
        command += ["--set", f"base_port={base_port}"]
        checks = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            wait_until(run_dir.exists, timeout_s=30.0)
            up = as_process("up", "laptop-sglang", *fakes, "--detach")
            assert up.returncode == 0, up.stderr
            importing.unlink()
            shown, _ = checks.communicate(timeout=60)
            assert checks.returncode == 0, shown
            assert deltaserve("status", str(run_dir)).stdout.startswith("laptop-sglang: ready")
            assert "a fleet is running there" in as_process("up", "laptop-sglang", *fakes).stderr
        finally:
            importing.unlink(missing_ok=True)
            checks.wait()
            down = deltaserve("down", str(run_dir))
    assert down.returncode == 0, down.stderr
    assert check("laptop-sglang", *fakes).returncode == 0
    assert "stopped" in deltaserve("status", str(run_dir)).stdout


def test_a_fleet_that_is_kept_serving_outlives_a_worker(fake_python: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    fakes = ["--set", f"engine.python={fake_python}", "--set", "router.kind=none"]
    fakes += ["--set", "base_port=0", "--run-dir", str(run_dir)]
    up = as_process("up", "laptop-sglang", *fakes, "--keep-serving", "--detach")
    assert up.returncode == 0, up.stderr

    def workers() -> list[dict[str, Any]]:
        shown = json.loads(deltaserve("status", str(run_dir), "--json").stdout)
        assert shown["state"] == "ready"
        found: list[dict[str, Any]] = shown["processes"]
        return found

    first = workers()[0]["pid"]
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: workers()[0]["pid"] != first and workers()[0]["state"] == "ready")
    assert "died (signal 9); starting it again in 1 s" in (run_dir / "supervisor.log").read_text()
    assert deltaserve("logs", str(run_dir), "colocated-0").stdout.count("==>") == 1
    assert "it has: colocated-0" in deltaserve("logs", str(run_dir), "x").stderr
    assert deltaserve("down", str(run_dir), "--json").returncode == 0
