"""What goes wrong around a fleet is bounded, told, and never done in somebody else's name."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import psutil
import pytest

from deltaserve import child
from deltaserve.errors import InputError
from launch import (
    FleetError,
    control,
    fleet,
    fleets,
    guard,
    hardware,
    reservations,
    sampling,
    supervised,
)
from launch.redaction import HIDDEN, is_secret, redacted
from launch.reservations import TakenError, is_reserved, reserved
from launch.sampling import Engines, Sampler
from tests import command_line
from tests.processes import wait_until, working_in

from .conftest import Fakes, taken_base

DELTASERVE = str(Path(sys.executable).with_name("deltaserve"))
SECRET = "hunter2-in-full"


def test_a_process_that_cannot_be_killed_is_given_up_and_named(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unkillable = 999_999_999
    offspring = guard.offspring
    monkeypatch.setattr(guard, "GIVE_UP_S", 0.3)
    monkeypatch.setattr(guard, "offspring", lambda session: [*offspring(session), unkillable])
    with (
        pytest.raises(FleetError, match=rf"colocated-0: pid {unkillable}\): they wait in the kern"),
        fleet(fakes("serve"), tmp_path / "run"),
    ):
        pass
    assert working_in(tmp_path / "run") == []
    record = json.loads((tmp_path / "run" / "fleet.json").read_text())
    assert record["state"] == "failed"
    assert record["reason"] == f"could not be killed: colocated-0: pid {unkillable}"
    # As it would be by its mark, were it there.
    monkeypatch.setattr(supervised, "_are_of", lambda *_: True)
    with pytest.raises(FleetError, match=f"could not be killed: pid {unkillable}"):
        control.down(tmp_path / "run")


def test_a_process_that_takes_its_time_to_die_was_killed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine that stands still for some seconds."""
    process = subprocess.Popen(["sleep", "600"], env={**os.environ, "DELTASERVE_PROCESS": "slow"})
    wait_procs = supervised.psutil.wait_procs
    waited: list[float] = []

    def too_short(processes: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        waited.append(timeout)
        return ([], processes) if len(waited) == 1 else wait_procs(processes, timeout)

    monkeypatch.setattr(supervised.psutil, "wait_procs", too_short)
    try:
        # For a moment after its start a process has no environment yet.
        wait_until(lambda: bool(psutil.Process(process.pid).environ()))
        assert supervised.sweep(999_999_999, "", "slow", tmp_path) == []
        assert waited
    finally:
        process.kill()
        process.wait()


def test_a_process_that_goes_just_before_it_is_told_to_leave_has_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the guardians of a fleet whose supervisor ends it at the moment of a `down`."""
    process = subprocess.Popen(["sleep", "600"])
    is_running = supervised.is_running

    def last_look(pid: int, started: str) -> bool:
        found = is_running(pid, started)
        process.kill()
        process.wait()
        return found

    monkeypatch.setattr(supervised, "is_running", last_look)
    assert supervised.terminate(process.pid, supervised.started_at(process.pid) or "", 10.0)


SLOW_FORK = """
_fork = os.fork


def _slow_fork():
    child = _fork()
    if not child:
        time.sleep(0.5)
    return child


os.fork = _slow_fork

"""


def test_a_command_is_asked_to_leave_also_before_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a Ctrl-C at the moment at which its guardian has forked."""
    script = tmp_path / "guard.py"
    main = "if __name__ =="
    script.write_text(Path(guard.__file__).read_text().replace(main, SLOW_FORK + main))
    monkeypatch.setattr(guard, "__file__", str(script))
    monkeypatch.setattr(supervised, "GRACE_S", 3.0)
    log = tmp_path / "it.log"
    running = supervised.Supervised(["sleep", "600"], dict(os.environ), log, tmp_path)
    try:
        wait_until(lambda: bool(guard.offspring(running.pid)))
    finally:
        running.stop()
    assert running.exit_status() == 128 + signal.SIGTERM  # not SIGKILL's, after the grace


@contextmanager
def may_become_full() -> Iterator[Callable[[], None]]:
    """From the call of what it gives, no file of this process can grow, until it is left."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_does_not_keep_a_fleet_from_ending(fakes: Fakes, tmp_path: Path) -> None:
    told: list[str] = []
    with may_become_full() as fill_disk, fleet(fakes("serve"), tmp_path / "run", told.append):
        fill_disk()
    assert working_in(tmp_path / "run") == []
    assert any(line.startswith("fleet.json is out of date: ") for line in told)


def test_on_a_full_disk_it_is_still_told_what_died(fakes: Fakes, tmp_path: Path) -> None:
    with may_become_full() as fill_disk, fleet(fakes("serve"), tmp_path / "run") as running:
        fill_disk()
        os.kill(running.workers[0].pid or 0, signal.SIGKILL)
        wait_until(lambda: bool(running.died()))
        with pytest.raises(FleetError, match=r"colocated-0 died \(signal 9\)"):
            running.check()
    assert working_in(tmp_path / "run") == []


def test_a_fleet_that_cannot_be_written_down_does_not_come_up(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fleets, "write_record", refuse)
    with pytest.raises(OSError, match="No space left"), fleet(fakes("serve"), tmp_path / "run"):
        pass
    assert working_in(tmp_path / "run") == []


def test_hosts_that_share_a_home_do_not_take_each_others_locks_and_pids(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with reserved([19_001], [0]), monkeypatch.context() as elsewhere:
        elsewhere.setattr(socket, "gethostname", lambda: "other-host")
        with reserved([19_001], [0]):
            pass
    here = control.default_run_dir("sglang:2")
    assert here.parts[-2:] == (socket.gethostname(), "sglang-2")
    with fleet(fakes("serve"), here):
        assert control.known_fleets() == [here]
        assert control.find_run_dir("sglang:2") == here
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(socket, "gethostname", lambda: "other-host")
            there = control.status(here)
            assert (there.state, there.alive) == ("ready", True)
            assert there.host != "other-host"
            with pytest.raises(InputError, match=r"its processes are on .*; end it there"):
                control.down(here)
        assert control.status(here).alive


def _asks_port() -> bool:
    return is_reserved("port", 19_001)


def _takes_port() -> bool:
    """Whether a fleet that wants the port is told that another has it."""
    try:
        with reserved([19_001]):
            return False
    except TakenError:
        return True


@pytest.mark.parametrize("meanwhile", [_asks_port, _takes_port])
def test_who_asks_whether_a_port_is_taken_has_not_taken_it(
    monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], bool]
) -> None:
    """Who asks holds its lock for a moment."""
    found: list[bool] = []
    other = threading.Thread(target=lambda: found.append(meanwhile()))
    lock = reservations.lock_at_once

    def slow(file: TextIO) -> bool:
        is_free = lock(file)
        monkeypatch.setattr(reservations, "lock_at_once", lock)
        other.start()
        other.join(0.2)
        return is_free

    monkeypatch.setattr(reservations, "lock_at_once", slow)
    assert not is_reserved("port", 19_001)
    other.join()
    assert found == [False]


def test_the_log_of_the_start_before_is_kept(fakes: Fakes, tmp_path: Path) -> None:
    with pytest.raises(FleetError), fleet(fakes("die"), tmp_path / "run"):
        pass
    with fleet(fakes("serve"), tmp_path / "run") as running:
        log = running.workers[0].log
    assert "the reason it died" not in log.read_text()
    assert "the reason it died" in log.with_name("colocated-0.log.1").read_text()
    assert "exit status 3" in (tmp_path / "run" / "transcript.txt.1").read_text()


def test_the_telemetry_of_a_start_is_apart_from_that_of_the_start_before(
    fakes: Fakes, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    for start in ("first", "second", "third"):
        with fleet(fakes("serve", overrides=("telemetry=true",)), run_dir):
            # As a worker does, whose pid is another each time.
            (run_dir / "steps" / f"colocated-0-{start}.jsonl").write_text("{}\n")
    assert [file.name for file in (run_dir / "steps").iterdir()] == ["colocated-0-third.jsonl"]
    assert [file.name for file in (run_dir / "steps.1").iterdir()] == ["colocated-0-second.jsonl"]
    with fleet(fakes("serve"), run_dir):
        pass
    assert not (run_dir / "steps").exists()


def test_the_decisions_of_a_start_are_apart_from_those_of_the_start_before(
    fakes: Fakes, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    log, older = run_dir / "decisions.jsonl", run_dir / "decisions.1.jsonl"
    topology = fakes("serve", overrides=("router.kind=deltaserve",))
    for start in ("first", "second", "third"):
        with fleet(topology, run_dir):
            # As a router does, whose log is bounded.
            for file in (log, older):
                with file.open("a") as output:
                    output.write(f'{{"start": "{start}"}}\n')
    for file in (log, older):
        assert file.read_text() == '{"start": "third"}\n'
        assert file.with_name(f"{file.name}.1").read_text() == '{"start": "second"}\n'
    with fleet(fakes("serve"), run_dir):  # without a router of ours there are none
        assert not log.exists()
        assert not older.exists()


# One whose worker dies, and one that is refused before anything is started.
MISSPELT = ('flags=["--max-runing-requests", "4"]',)
STARTS_THAT_FAIL = pytest.mark.parametrize(
    ("behaviour", "overrides", "error"),
    [("die", (), FleetError), ("serve", MISSPELT, InputError)],
)


@STARTS_THAT_FAIL
def test_what_a_start_before_recorded_is_not_taken_for_that_of_one_that_fails(
    fakes: Fakes,
    tmp_path: Path,
    behaviour: str,
    overrides: tuple[str, ...],
    error: type[Exception],
) -> None:
    run_dir = tmp_path / "run"
    with fleet(fakes("serve", overrides=("telemetry=true",)), run_dir):
        pass
    files = ("processes.csv", "engines.csv", "gpu.csv", "decisions.jsonl")
    recorded = [name.replace(".", part) for name in files for part in (".", ".1.")]
    for name in recorded:
        (run_dir / name).write_text(f"{name} of the start before")
    for _ in range(2):  # the second finds nothing to move
        with pytest.raises(error), fleet(fakes(behaviour, overrides=overrides), run_dir):
            pass
        for name in recorded:
            assert not (run_dir / name).exists(), name
            assert (run_dir / f"{name}.1").read_text() == f"{name} of the start before"
        assert not (run_dir / "steps").exists()
        assert (run_dir / "steps.1").is_dir()


@STARTS_THAT_FAIL
def test_a_log_of_the_start_before_is_not_shown_as_that_of_one_that_fails(
    fakes: Fakes,
    tmp_path: Path,
    behaviour: str,
    overrides: tuple[str, ...],
    error: type[Exception],
) -> None:
    run_dir, before = tmp_path / "run", "of the start before"
    with fleet(fakes("serve", "serve", overrides=("router.kind=deltaserve",)), run_dir):
        pass
    logs = [run_dir / "logs" / f"{id_}.log" for id_ in ("colocated-0", "colocated-1", "router")]
    logs += [log.with_suffix(".1.log") for log in logs]
    for log in logs:
        log.write_text(before)
    # Without the second worker, and the router was not reached.
    failing = fakes(behaviour, overrides=("router.kind=deltaserve", *overrides))
    with pytest.raises(error), fleet(failing, run_dir):
        pass
    assert before not in command_line.deltaserve("launch", "logs", str(run_dir)).stdout
    assert not any(before in log.read_text() for log in (run_dir / "logs").glob("*.log"))
    assert all(log.with_name(f"{log.name}.1").read_text() == before for log in logs)
    # Who tries again, without a log to move, keeps them.
    refused = fakes("serve", overrides=MISSPELT)
    with pytest.raises(InputError), fleet(refused, run_dir):
        pass
    assert (run_dir / "logs" / "router.log.1").read_text() == before


def test_the_record_of_a_start_that_was_refused_says_why(fakes: Fakes, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    refused = fakes("serve", overrides=MISSPELT)
    with (
        pytest.raises(InputError, match="--max-runing-requests") as caught,
        fleet(refused, run_dir),
    ):
        pass
    record = json.loads((run_dir / "fleet.json").read_text())
    assert (record["state"], record["reason"]) == ("failed", str(caught.value))
    shown = command_line.deltaserve("launch", "status", str(run_dir)).stdout
    assert str(caught.value).splitlines()[0] in shown
    assert str(caught.value) in (run_dir / "transcript.txt").read_text()


def test_a_decision_log_that_somebody_put_elsewhere_stays_there(
    fakes: Fakes, tmp_path: Path
) -> None:
    run_dir, elsewhere = tmp_path / "run", tmp_path / "elsewhere.jsonl"
    run_dir.mkdir()
    (run_dir / "decisions.jsonl").symlink_to(elsewhere)
    for _ in range(2):
        with fleet(fakes("serve", overrides=("router.kind=deltaserve",)), run_dir):
            pass
    assert (run_dir / "decisions.jsonl").is_symlink()
    assert not (run_dir / "decisions.jsonl.1").is_symlink()


def test_the_sampler_goes_on_after_a_gpu_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([hardware.GpuError("NVML: GPU is lost"), [], OSError("no space left")])
    asked = threading.Event()

    def sample() -> list[hardware.GpuSample]:
        answer = next(answers, None)
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            asked.set()
        return answer or []

    monkeypatch.setattr(sampling, "sample_gpus", sample)
    sampler = Sampler(tmp_path, {}, Engines({}, ("a", "b", "c")), [0], 0.01)
    try:
        assert asked.wait(10), "the sampler has died"
    finally:
        sampler.stop()


def test_a_sample_that_never_comes_does_not_keep_a_fleet_from_ending(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a GPU's driver hangs."""
    asked, answers = threading.Event(), threading.Event()

    def load(*_: object) -> list[float | None]:
        asked.set()
        answers.wait(60)
        return [None] * 3

    monkeypatch.setattr(sampling, "engine_load", load)
    monkeypatch.setattr(sampling, "LAST_WITHIN_S", 0.5)
    run_dir = tmp_path / "run"
    try:
        with fleet(fakes("serve", overrides=("sample_interval_s=0.1",)), run_dir) as running:
            assert asked.wait(30)
        assert running.timings["stop_s"] < 30
    finally:
        answers.set()
    assert working_in(run_dir) == []
    assert "a sample hangs" in (run_dir / "transcript.txt").read_text()
    assert json.loads((run_dir / "fleet.json").read_text())["state"] == "stopped"


class Lost(Exception):
    """As NVML's own error."""


class Nvml:
    """NVML on a machine with GPUs of which some have fallen off their bus (`lost`), and which does
    not say who uses them."""

    NVMLError = Lost
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX = NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 0
    NVML_CLOCK_SM = 0

    def __init__(self, count: int, *lost: int) -> None:
        self.count, self.lost = count, lost

    def __enter__(self) -> Nvml:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index in self.lost:
            raise Lost("GPU is lost")
        return index

    def nvmlDeviceGetMemoryInfo(self, _handle: int) -> types.SimpleNamespace:
        return types.SimpleNamespace(used=60 * 2**30, total=140 * 2**30)

    def nvmlDeviceGetName(self, _handle: int) -> str:
        return "NVIDIA H200"

    def nvmlDeviceGetUtilizationRates(self, _handle: int) -> types.SimpleNamespace:
        return types.SimpleNamespace(gpu=1)

    def nvmlDeviceGetPowerUsage(self, _handle: int) -> int:
        return 75_000

    def _not_supported(self, *_: object) -> None:
        raise Lost("Not Supported")

    nvmlDeviceGetFieldValues = nvmlDeviceGetClockInfo = _not_supported
    nvmlDeviceGetCurrentClocksThrottleReasons = _not_supported
    nvmlDeviceGetComputeRunningProcesses = nvmlDeviceGetUUID = _not_supported


def test_an_error_of_nvml_is_told_as_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_nvml", lambda: Nvml(2, 0, 1))
    with pytest.raises(hardware.GpuError, match="NVML: GPU is lost"):
        hardware.sample_gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1")
    with pytest.raises(hardware.GpuError, match="NVML: GPU is lost"):
        hardware.allowed_gpus()


def test_a_gpu_without_readings_of_power_and_use_is_sampled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvml = Nvml(1)
    for reading in ("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage"):
        monkeypatch.setattr(nvml, reading, nvml._not_supported, raising=False)
    monkeypatch.setattr(hardware, "_nvml", lambda: nvml)
    [gpu] = hardware.sample_gpus()
    assert (gpu.sm_percent, gpu.power_w, gpu.memory_total_bytes) == (None, None, 140 * 2**30)


def test_a_gpu_that_is_lost_does_not_keep_a_fleet_from_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hardware, "_nvml", lambda: Nvml(3, 1))
    monkeypatch.setattr(hardware, "_FREE_WITHIN_S", 0.0)
    assert [gpu.index for gpu in hardware.sample_gpus()] == [0, 2]
    said = r"a needs GPU 1; there are 2 that NVML answers for \(0, 2\)"
    with pytest.raises(InputError, match=said):
        hardware.check_gpus({1: "a"}, "h200", "x.toml")
    with pytest.raises(InputError, match=r"GPU 2 is not free: 60\.0 GiB in use$"):
        hardware.check_gpus({2: "a"}, "h200", "x.toml")


@pytest.mark.parametrize(
    "key",
    [
        "HF_TOKEN",
        "--api-key",
        "OPENAI_API_KEY",
        "DELTASERVE_API_KEYS",
        "environment.HF_TOKEN",
        "PASSWORD",
        "auth",
    ],
)
def test_secrets_are_known_by_the_last_word_of_their_key(key: str) -> None:
    assert is_secret(key)


@pytest.mark.parametrize(
    "key", ["max_total_tokens", "TOKENIZERS_PARALLELISM", "monkey", "kv_capacity_tokens", "author"]
)
def test_other_keys_are_none(key: str) -> None:
    assert not is_secret(key)


def test_secrets_are_hidden_wherever_they_stand() -> None:
    shown = redacted(
        {
            "environment": {"HF_TOKEN": SECRET, "HF_HOME": "/models"},
            "argv": ["--api-key", SECRET, f"--admin-api-key={SECRET}", "--port", "1"],
            "set": [f"environment.HF_TOKEN={SECRET}", f'environment={{ HF_TOKEN = "{SECRET}" }}'],
            "flags": [f'flags=["--api-key", "{SECRET}"]', f"flags=['--x', '--api-key','{SECRET}']"],
            "tokens": 5,
        }
    )
    assert SECRET not in json.dumps(shown)
    assert shown["environment"] == {"HF_TOKEN": HIDDEN, "HF_HOME": "/models"}
    assert shown["argv"] == ["--api-key", HIDDEN, f"--admin-api-key={HIDDEN}", "--port", "1"]
    assert shown["flags"][0] == f'flags=["--api-key", {HIDDEN}]'
    assert shown["tokens"] == 5
    assert redacted('flags=["--api-key", "--port"]') == 'flags=["--api-key", "--port"]'


@pytest.mark.parametrize(
    "shown",
    [
        f"Authorization: Bearer {SECRET}",
        f"OTEL_EXPORTER_OTLP_HEADERS=authorization=Bearer {SECRET}",
        ["--header", f"Authorization: Basic {SECRET}"],
        {"GITHUB_PAT": SECRET},
        f"GITHUB_PAT={SECRET}",
        f"https://somebody:{SECRET}@host/path",
    ],
)
def test_a_secret_behind_a_scheme_or_in_an_address_is_hidden(shown: object) -> None:
    assert SECRET not in json.dumps(redacted(shown))


def test_an_address_without_a_password_stays() -> None:
    assert redacted("http://host:8000/v1") == "http://host:8000/v1"


@pytest.mark.parametrize(
    "shown",
    [
        ["--api-key", "for-ann", "for-bob", "--port", "1"],
        'flags=["--api-key", "for-ann", "for-bob", "--port", "1"]',
        "flags=['--api-key', 'for-ann','for-bob', '--port', '1']",
        {"api_keys": ["for-ann", "for-bob"], "port": "1"},
    ],
)
def test_all_keys_of_a_flag_that_takes_several_are_hidden(shown: object) -> None:
    hidden = json.dumps(redacted(shown))
    assert "for-ann" not in hidden
    assert "for-bob" not in hidden
    assert "port" in hidden
    assert HIDDEN in hidden


def fakes_of(python: Path, *more: str) -> list[str]:
    overrides = [f"engine.python={python}", "base_port=0", "workers.0.count=1", *more]
    return [word for override in overrides for word in ("--set", override)]


def test_a_secret_reaches_the_engine_and_no_file_and_no_command_line(
    fake_python: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    secret = [f"environment.MY_TOKEN={SECRET}", f'flags=["--max-running-requests={SECRET}"]']
    up = [DELTASERVE, "launch", "up", "laptop-sglang", "--run-dir", str(run_dir), "--detach"]
    made = fakes_of(fake_python, secret[0], "router.kind=none")
    try:
        done = subprocess.run([*up, *made], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        record = json.loads((run_dir / "fleet.json").read_text())
        supervisor = psutil.Process(record["supervisor"]["pid"])
        tree = [supervisor, *supervisor.children(recursive=True)]
        assert not any(SECRET in word for process in tree for word in process.cmdline())
        environments = [p.environ().get("MY_TOKEN") for p in tree if "--port" in p.cmdline()]
        assert SECRET in environments
        for file in (p for p in run_dir.rglob("*") if p.is_file() and not p.is_symlink()):
            assert SECRET not in file.read_text(errors="replace"), file
    finally:
        subprocess.run([DELTASERVE, "launch", "down", str(run_dir)], check=False)
    check = [DELTASERVE, "launch", "check", "laptop-sglang", "--print-commands", *made]
    with taken_base() as base_port:
        check += ["--set", f"base_port={base_port}"]
        for form in ([], ["--json"]):
            shown = subprocess.run([*check, *form], capture_output=True, text=True, check=True)
            assert SECRET not in shown.stdout
            assert HIDDEN in shown.stdout


TAKEN = 'raise SystemExit("a package of the working folder was imported")\n'


@pytest.fixture
def crowded(tmp_path: Path) -> Path:
    """A working folder with packages of our rooms' names."""
    folder = tmp_path / "project"
    for name in ("eval", "launch", "replay", "sglang_ext"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(TAKEN)
    (folder / "launch.py").write_text(TAKEN)
    return folder


def test_a_users_own_packages_in_the_working_folder_are_not_imported(
    fake_python: Path, tmp_path: Path, crowded: Path
) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            argv, cwd=crowded, env=environment, capture_output=True, text=True, check=False
        )

    run_dir = str(tmp_path / "run")
    up = ["launch", "up", "laptop-sglang", *fakes_of(fake_python), "--run-dir", run_dir]
    done = run(DELTASERVE, *up, "--detach")  # with our router, and its policy asked
    assert done.returncode == 0, done.stderr
    assert run(DELTASERVE, "launch", "down", run_dir).returncode == 0
    assert run(sys.executable, "-m", "deltaserve", "eval", "list").returncode == 0
    synth = ["--requests", "5", "--output", str(tmp_path / "t.jsonl")]
    assert run(*child.DELTASERVE, "replay", "synth", *synth).returncode == 0


def test_an_exit_status_that_no_signal_has_is_not_called_one() -> None:
    assert fleets._status(128 + 9) == "signal 9"
    assert fleets._status(255) == "exit status 255"
    assert fleets._status(3) == "exit status 3"


def test_status_says_since_when_a_fleet_is_ready_and_not_since_when_it_starts(
    fakes: Fakes, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    began_s = time.time()
    with fleet(fakes("serve"), run_dir) as running:
        took_s = running.timings["start_s"]
        shown = control.status(run_dir)
    assert shown.state == "ready"
    assert shown.since_unix_s is not None
    assert began_s + took_s - 0.01 <= shown.since_unix_s <= time.time()


def test_status_says_what_died_why_and_since_when_and_exits_1(fakes: Fakes, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with fleet(fakes("serve", "grandchildren"), run_dir) as running:
        below = psutil.Process(running.workers[1].pid).children()
        (engine,) = [process for process in below if "--port" in process.cmdline()]
        engine.kill()
        wait_until(lambda: running._members[1].running.exit_status() is not None)
        with pytest.raises(FleetError):
            running.check()
    shown = control.status(run_dir)
    assert shown.has_failed
    assert shown.reason == "colocated-1 died (signal 9)"
    assert shown.since_unix_s is not None
    assert [p.reason for p in shown.processes] == [None, "colocated-1 died (signal 9)"]
    status = [DELTASERVE, "launch", "status", str(run_dir)]
    done = subprocess.run(status, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "failed: colocated-1 died (signal 9)" in done.stdout
    assert str(run_dir / "logs" / "colocated-1.log") in done.stdout
    assert str(run_dir / "transcript.txt") in done.stdout


def test_status_of_a_fleet_whose_supervisor_was_killed_says_so(
    fakes: Fakes, tmp_path: Path
) -> None:
    with fleet(fakes("serve"), tmp_path / "run"):
        pass
    file = tmp_path / "run" / "fleet.json"
    record = json.loads(file.read_text())
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    record |= {"state": "ready", "ended_unix_s": None}
    record["supervisor"]["pid"] = gone.pid
    file.write_text(json.dumps(record))
    shown = control.status(tmp_path / "run")
    assert (shown.state, shown.reason) == ("dead", f"its supervisor (pid {gone.pid}) was killed")
