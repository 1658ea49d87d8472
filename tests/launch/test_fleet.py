"""A fleet comes up whole or not at all, and nothing of it is left, whatever ends it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from pathlib import Path
from typing import Any

import psutil
import pytest

from deltaserve.errors import InputError
from launch import FleetError, checking, control, fleet, fleets, guard, planning, ports, supervised
from launch.fleets import log_tail
from launch.ports import free_base, worker_ports
from launch.reservations import reserved
from tests.processes import wait_until, working_in

from .conftest import Fakes, taken_base


def port_of(url: str) -> int:
    return int(url.rsplit(":", 1)[1])


def is_open(url: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port_of(url))) == 0


def test_workers_come_up_and_all_is_gone_afterwards(fakes: Fakes, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    told: list[str] = []
    with fleet(fakes("serve", "grandchildren"), run_dir, told.append) as running:
        urls = [worker.url for worker in running.workers]
        assert [worker.id for worker in running.workers] == ["colocated-0", "colocated-1"]
        assert all(is_open(url) for url in urls)
        assert running.router_url is None
        assert running.engine_versions["sglang"] == "0.5.23"
        assert running.timings["ready_s.colocated-1"] > 0
        assert json.loads((run_dir / "fleet.json").read_text())["state"] == "ready"
        running.check()
    assert working_in(run_dir) == []
    assert not any(is_open(url) for url in urls)
    assert json.loads((run_dir / "fleet.json").read_text())["state"] == "stopped"
    assert any("colocated-1: ready" in line for line in told)


BOUND = """
import os, threading, time
core = {min(os.sched_getaffinity(0))}
os.sched_setaffinity(0, core)
threading.Thread(target=time.sleep, args=(600,)).start()
print("bound", flush=True)
time.sleep(600)
"""


def test_a_process_is_known_by_its_start_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    running = supervised.Supervised(command, dict(os.environ), tmp_path / "log", tmp_path)
    try:
        wait_until(lambda: bool(supervised.members(running.pid, running.started)))
        # The clock is set forward by an hour: times of day reckoned from it move with it.
        moved_s = psutil.Process(running.pid).create_time() + 3600
        monkeypatch.setattr(psutil.Process, "create_time", lambda _: moved_s)
        assert supervised.is_running(running.pid, running.started)
        assert supervised.members(running.pid, running.started)
        boot, _, ticks = running.started.rpartition("-")
        # Another process that came by the pid, after this one or after the machine's next start.
        for other in (f"{boot}-{int(ticks) + 1}", f"another-{ticks}", ""):
            assert not supervised.is_running(running.pid, other)
            assert supervised.terminate(running.pid, other, 0.0)
            assert supervised.sweep(running.pid, other, "another's mark", tmp_path) == []
        assert supervised.members(running.pid, running.started)
    finally:
        running.stop()
    assert not supervised.is_running(running.pid, running.started)
    assert supervised.started_at(2**22 + 1) is None


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_threads_that_bound_themselves_to_a_core_are_freed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", BOUND]
    running = supervised.Supervised(command, dict(os.environ), log, tmp_path)

    def cores() -> list[int]:
        tree = supervised.members(running.pid, running.started)
        threads = [thread.id for process in tree for thread in process.threads()]
        return [len(os.sched_getaffinity(thread)) for thread in threads]

    try:
        wait_until(lambda: log.read_text() == "bound\n")
        assert cores() == [1, 1]
        running.unbind()
        assert cores() == [len(os.sched_getaffinity(0))] * 2
    finally:
        running.stop()


TALKING = """
import sys, time
for number in range(40000):
    print(f"{number:99d}", flush=True)
    time.sleep(0.00002)
print("said all", flush=True)
time.sleep(600)
"""


def test_a_log_is_bounded_while_it_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "guard.py"
    script.write_text(
        Path(guard.__file__).read_text().replace("LOOK_AT_LOG_S = 5.0", "LOOK_AT_LOG_S = 0.01")
    )
    monkeypatch.setattr(guard, "__file__", str(script))
    log, older = tmp_path / "it.log", tmp_path / "it.1.log"
    older.write_text("of the start before\n")
    command = [sys.executable, "-c", TALKING]
    most = [0]
    running = supervised.Supervised(
        command, dict(os.environ), log, tmp_path, log_max_bytes=2_000_000
    )
    try:

        def said_all() -> bool:
            most[0] = max(most[0], log.stat().st_size)
            return log.read_bytes()[-9:] == b"said all\n"

        wait_until(said_all)
        lines = (older.read_text() + log.read_text()).splitlines()
        whole = [line for line in lines[:-1] if len(line) == 99]
        kept = [int(line) for line in whole]
        assert most[0] < 2_000_000
        assert len(kept) > 10_000
        assert kept[-1] == 39_999
        # Of what was said while it was cut a few lines may be missing, and the system may put the
        # end of one that it was writing into the new file: one for each of four cuts at most.
        assert len(lines) - 1 - len(whole) <= 4
        assert kept == sorted(set(kept))
        assert kept[-1] - kept[0] - len(kept) < 100
        assert log_tail(log, 3).splitlines()[-1] == "said all"
    finally:
        running.stop()
    assert (tmp_path / "it.1.log.1").read_text() == "of the start before\n"


def test_the_end_of_a_log_that_was_just_begun_anew_is_in_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "it.1.log").write_text("one\ntwo\n")
    log = tmp_path / "it.log"
    log.write_text("three\n")
    assert log_tail(log, 2) == "two\nthree"
    assert log_tail(log, 9) == "one\ntwo\nthree"
    assert log_tail(tmp_path / "none.log", 9) == ""


@pytest.mark.parametrize(
    ("given", "kept"), [((), 400_000_000), (("log_max_mb=2",), 2_000_000), (("log_max_mb=0",), 0)]
)
def test_logs_of_a_fleet_are_bounded_unless_its_topology_says_otherwise(
    fakes: Fakes, tmp_path: Path, given: tuple[str, ...], kept: int
) -> None:
    run_dir = tmp_path / "run"
    with fleet(fakes("serve", overrides=("router.kind=deltaserve", *given)), run_dir):
        commands = [process.cmdline() for process in working_in(run_dir)]
    guardians = [argv[: argv.index("--")] for argv in commands if guard.__file__ in argv]
    logs = [str(run_dir / "logs" / f"{name}.log") for name in ("colocated-0", "router")]
    bounds = sorted(argv[argv.index(guard.__file__) + 5 :] for argv in guardians)
    assert bounds == [[log, str(kept)] if kept else [] for log in logs]
    config = tomllib.loads((run_dir / "router.toml").read_text())
    assert config.get("decision_log_max_mb", 0) * 1e6 == kept


def test_the_transcript_tells_each_phase_with_its_time_and_the_workers(
    fakes: Fakes, tmp_path: Path
) -> None:
    with fleet(fakes("serve", "serve"), tmp_path / "run") as running:
        urls = [worker.url for worker in running.workers]
    text = (tmp_path / "run" / "transcript.txt").read_text()
    assert "sglang 0.5.23" in text
    told = re.findall(r"^ +(\d+\.\d) s  (.+)$", text, re.M)
    assert [float(at_s) for at_s, _ in told] == sorted(float(at_s) for at_s, _ in told)
    phases = [what for _, what in told]
    assert phases[0].startswith("checked")
    assert phases.index(f"colocated-0: starting ({urls[0]})") < next(
        i for i, what in enumerate(phases) if what.startswith("colocated-0: ready after")
    )
    assert phases[-2] == "stopping"
    assert phases[-1].startswith("stopped after")
    for number, url in enumerate(urls):
        assert re.search(
            rf"^colocated-{number} +colocated +{url} +\d+\.\d s +131,072 +- +-$", text, re.M
        )


def test_the_transcript_tells_why_a_fleet_failed(fakes: Fakes, tmp_path: Path) -> None:
    with pytest.raises(FleetError), fleet(fakes("die"), tmp_path / "run"):
        pass
    text = (tmp_path / "run" / "transcript.txt").read_text()
    assert "colocated-0 died (exit status 3)" in text
    assert re.search(r"failed after \d+\.\d s$", text, re.M)


def test_the_record_of_a_fleet_keeps_what_changes_an_engine_and_no_secret(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with fleet(fakes("serve"), tmp_path / "run"):
        pass
    written = (tmp_path / "run" / "fleet.json").read_text()
    assert json.loads(written)["inherited_environment"]["NCCL_DEBUG"] == "INFO"
    assert "hf_secret" not in written


LEAVES_A_FOLDER = """
import tempfile, time
print(tempfile.mkdtemp(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("killed", ["engine", "guardian", "supervisor"])
def test_a_process_that_is_killed_leaves_nothing_among_the_temporary_files(
    tmp_path: Path, killed: str
) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", LEAVES_A_FOLDER]
    running = supervised.Supervised(command, dict(os.environ), log, tmp_path, own_temporary=True)
    folder = running.temporary_folder
    try:
        wait_until(lambda: log.read_text().endswith("\n"))
        left = Path(log.read_text().strip())
        assert folder is not None
        assert left.parent == folder
        assert left.is_dir()
        if killed == "engine":
            supervised.members(running.pid, running.started)[0].kill()
        elif killed == "guardian":
            os.kill(running.pid, signal.SIGKILL)
            running.stop()
        else:
            os.close(running._alive_while_open)  # what its guardian sees of that
            running._alive_while_open = -1
        wait_until(lambda: not folder.exists(), timeout_s=10.0)
    finally:
        running.stop()


def test_caches_that_compilers_keep_among_the_temporary_files_outlive_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = tmp_path / "system"
    system.mkdir()
    monkeypatch.setattr(supervised, "_LONGEST_TEMPORARY", len(str(system)))
    monkeypatch.setattr(tempfile, "tempdir", str(system))
    monkeypatch.setenv("LOGNAME", "somebody")
    kept = ["somebody/cutlass_python_cache", "torchinductor_somebody/compiled"]
    code = f"import os, tempfile; at = tempfile.gettempdir(); print(at)\nfor kept in {kept}: "
    command = [sys.executable, "-c", f"{code}os.makedirs(f'{{at}}/{{kept}}')"]
    log = tmp_path / "log"
    running = supervised.Supervised(command, dict(os.environ), log, tmp_path, own_temporary=True)
    wait_until(lambda: running.exit_status() is not None)
    running.stop()
    assert running.exit_status() == 0, log.read_text()
    assert not Path(log.read_text().strip()).exists()
    assert all((system / name).is_dir() for name in kept)


def test_a_folder_of_somebody_else_is_no_cache_of_compiled_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervised, "_LONGEST_TEMPORARY", len(str(tmp_path)))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("LOGNAME", "somebody")
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    folder = supervised._temporary_folder()
    assert folder is not None
    assert list(folder.iterdir()) == []
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid)
    folder = supervised._temporary_folder()
    assert folder is not None
    assert {kept.name for kept in folder.iterdir()} == {"somebody", "torchinductor_somebody"}


def test_the_folder_for_temporary_files_is_the_topologys_where_it_names_one(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def folders(*overrides: str) -> list[str | None]:
        with fleet(fakes("serve", overrides=overrides), tmp_path / "run") as running:
            has = psutil.Process(running.workers[0].pid).environ().get("TMPDIR")
        (process,) = json.loads((tmp_path / "run" / "fleet.json").read_text())["processes"]
        return [has, process["temporary_folder"]]

    has, told = folders()
    assert has is not None
    assert has == told
    assert Path(has).parent == Path(tempfile.gettempdir())
    mine = tmp_path / "mine"
    mine.mkdir()
    assert folders(f"workers.0.environment.TMPDIR={mine}") == [str(mine), None]
    assert mine.is_dir()
    # Sockets in so long a path would have none.
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + 44 * "x")
    assert folders()[1] is None


def test_a_worker_that_dies_at_start_is_noticed_at_once_with_its_last_words(
    fakes: Fakes, tmp_path: Path
) -> None:
    began_s = time.monotonic()
    with (
        pytest.raises(FleetError, match=r"colocated-1 died \(exit status 3\)") as error,
        fleet(fakes("serve", "die"), tmp_path / "run"),
    ):
        pass
    assert str(error.value).endswith("the reason it died")
    assert time.monotonic() - began_s < 20
    assert working_in(tmp_path / "run") == []
    assert json.loads((tmp_path / "run" / "fleet.json").read_text())["state"] == "failed"


def test_a_worker_that_never_answers_is_given_up(fakes: Fakes, tmp_path: Path) -> None:
    topology = fakes("hang", overrides=("ready_timeout_s=1.0",))
    with (
        pytest.raises(FleetError, match="colocated-0 was not ready after 1 s"),
        fleet(topology, tmp_path / "run"),
    ):
        pass
    assert working_in(tmp_path / "run") == []


def test_an_engine_that_goes_on_without_our_plugin_is_refused(fakes: Fakes, tmp_path: Path) -> None:
    with (
        pytest.raises(FleetError, match="the engine started without our plugin"),
        fleet(fakes("plugin-fails"), tmp_path / "run"),
    ):
        pass


def test_a_worker_is_asked_to_leave_by_the_signal_that_its_engine_heeds_at_once(
    fakes: Fakes, tmp_path: Path
) -> None:
    with fleet(fakes("serve"), tmp_path / "run") as running:
        log = running.workers[0].log
    assert log.read_text().endswith("left on SIGINT\n")
    (process,) = json.loads((tmp_path / "run" / "fleet.json").read_text())["processes"]
    assert process["exit_status"] == 0


LEAVES_WITH_7 = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print("ready", flush=True)
time.sleep(600)
"""


def test_a_process_that_is_asked_to_leave_again_while_it_leaves_keeps_its_own_status(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", LEAVES_WITH_7]
    running = supervised.Supervised(command, dict(os.environ), log, tmp_path)
    try:
        wait_until(lambda: log.read_text() == "ready\n")
        # Up to the guardian's very last moment.
        while running.exit_status() is None:
            running.request_stop()
            time.sleep(0.0002)
        assert running.exit_status() == 7
    finally:
        running.stop()


def test_a_worker_that_ignores_every_signal_is_killed(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervised, "GRACE_S", 0.5)
    with fleet(fakes("ignore-signals"), tmp_path / "run"):
        pass
    assert working_in(tmp_path / "run") == []


def test_a_fleet_that_is_ending_ends_whole_before_an_interrupt_counts(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervised, "GRACE_S", 1.0)
    run_dir = tmp_path / "run"
    stop = fleets.Fleet.stop

    def interrupted_stop(running: fleets.Fleet) -> None:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        stop(running)

    monkeypatch.setattr(fleets.Fleet, "stop", interrupted_stop)
    with pytest.raises(KeyboardInterrupt), fleet(fakes("ignore-signals"), run_dir):
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    shown = control.status(run_dir)
    assert (shown.state, shown.alive) == ("stopped", False)
    assert [process.state for process in shown.processes] == ["stopped"]
    assert control.down(run_dir).processes == 0


def test_an_interrupt_while_a_process_is_started_leaves_none(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    popen = subprocess.Popen

    def interrupted(*arguments: Any, **more: Any) -> Any:
        started = popen(*arguments, **more)
        if more.get("start_new_session"):
            signal.raise_signal(signal.SIGINT)
        return started

    monkeypatch.setattr("launch.supervised.subprocess.Popen", interrupted)
    with pytest.raises(KeyboardInterrupt), fleet(fakes("hang"), run_dir):
        pass
    assert working_in(run_dir) == []
    record = json.loads((run_dir / "fleet.json").read_text())
    assert (record["state"], record["processes"][0]["state"]) == ("stopped", "stopped")


def test_a_worker_that_dies_later_is_reported_by_check(fakes: Fakes, tmp_path: Path) -> None:
    with fleet(fakes("grandchildren"), tmp_path / "run") as running:
        below = psutil.Process(running.workers[0].pid).children()
        (engine,) = [process for process in below if "--port" in process.cmdline()]
        engine.kill()
        wait_until(lambda: working_in(tmp_path / "run") == [])
        with pytest.raises(FleetError, match=r"colocated-0 died \(signal 9\)"):
            running.check()


def test_a_killed_guardian_leaves_nothing_after_stop(fakes: Fakes, tmp_path: Path) -> None:
    with fleet(fakes("grandchildren"), tmp_path / "run") as running:
        os.kill(running.workers[0].pid, signal.SIGKILL)
    assert working_in(tmp_path / "run") == []


def test_a_port_in_use_is_named_with_its_owner_before_anything_starts(
    fakes: Fakes, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        topology = fakes("serve", overrides=(f"base_port={port - 20}",))
        with pytest.raises(InputError) as error, fleet(topology, tmp_path / "run"):
            pass
    said = str(error.value)
    assert re.search(rf"port {port} \(colocated-0 http\) is in use by pid {os.getpid()} \(", said)
    assert working_in(tmp_path / "run") == []


def test_a_stranger_that_answers_on_a_workers_port_is_not_taken_for_it(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = [sys.executable, "-m", "http.server", "--directory", str(tmp_path)]
    (tmp_path / "health").touch()
    monkeypatch.setattr(checking, "check_free", lambda _: None)
    monkeypatch.setattr(fleets, "reserved", lambda *_: contextlib.nullcontext())
    with taken_base() as base_port:
        topology = fakes("hang").model_copy(update={"base_port": base_port})
        stranger = subprocess.Popen(
            [*argv, str(worker_ports(base_port, 0)["http"])], stderr=subprocess.DEVNULL
        )
        try:
            with (
                pytest.raises(FleetError, match="colocated-0: another process answers on its port"),
                fleet(topology, tmp_path / "run"),
            ):
                pass
        finally:
            stranger.kill()
            stranger.wait()


def test_two_fleets_never_get_the_same_ports_before_their_engines_have_opened_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Whatever other tests do meanwhile.
    monkeypatch.setenv("DELTASERVE_CACHE", str(tmp_path / "alone"))
    monkeypatch.setattr(ports, "_is_free", lambda _: True)
    monkeypatch.setattr(random, "shuffle", lambda _: None)
    port = free_base(1)
    assert free_base(1) == port
    with reserved([port]):
        assert free_base(1) != port
        other = pytest.raises(InputError, match=f"port {port} belongs to another fleet")
        with other, reserved([port]):
            pass
    with reserved([port]):
        pass


def test_free_ports_that_another_fleet_was_given_at_the_same_moment_are_left_to_it(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with taken_base() as given:
        first = iter([given])
        monkeypatch.setattr(planning, "free_base", lambda n: next(first, None) or free_base(n))
        with fleet(fakes("serve"), tmp_path / "run") as running:
            assert next(first, None) is None
            assert running.plan.topology.base_port != given
        # Ports that were asked for are not changed.
        fixed = fakes("serve", overrides=(f"base_port={given}",))
        taken = pytest.raises(InputError, match=r"belongs to another fleet .* or change base_port$")
        with taken, fleet(fixed, tmp_path / "run"):
            pass


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ('["--max-runing-requests", "4"]', "did you mean --max-running-requests?"),
        ('["--attention-backend=fa9"]', "cannot be 'fa9'; expected one of: torch_native, fa3"),
        ('["--attention-backend", "fa9"]', "cannot be 'fa9'; expected one of: torch_native, fa3"),
    ],
)
def test_flags_are_held_against_the_installed_engine(
    fakes: Fakes, tmp_path: Path, flags: str, said: str
) -> None:
    with (
        pytest.raises(InputError, match=r"colocated-0: sglang 0\.5\.23") as error,
        fleet(fakes("serve", overrides=(f"flags={flags}",)), tmp_path / "run"),
    ):
        pass
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_an_older_engine_is_answered_with_the_key_that_leaves_a_flag_out(
    fakes: Fakes, fake_python: Path, tmp_path: Path
) -> None:
    python = fake_python.read_text()
    fake_python.write_text(python.replace('"--incremental-streaming-output",', ""))
    said = "has no flag --incremental-streaming-output; incremental_streaming_output = false leaves"
    with pytest.raises(InputError, match=said), fleet(fakes("serve"), tmp_path / "run"):
        pass


def test_a_run_folder_holds_one_fleet_at_a_time(fakes: Fakes, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    taken = pytest.raises(InputError, match="is running there; run: deltaserve launch down")
    with fleet(fakes("serve"), run_dir), taken, fleet(fakes("serve"), run_dir):
        pass


SUPERVISOR = """
import sys, time
from pathlib import Path
from launch import fleet, load_topology
with fleet(load_topology(sys.argv[1]), Path(sys.argv[2])):
    print("ready", flush=True)
    time.sleep(600)
"""


def supervisor(fakes: Fakes, tmp_path: Path, *behaviours: str) -> subprocess.Popen[str]:
    """A process that holds a fleet of fakes in ``tmp_path/run``, ready."""
    made = fakes(*behaviours)
    groups = "".join(
        f'[[workers]]\nenvironment = {{ FAKE = "{group.environment["FAKE"]}" }}\n'
        for group in made.workers
    )
    file = tmp_path / "fakes.toml"
    file.write_text(
        f'device = "cpu"\nmodel = "tiny-qwen3-moe"\nbase_port = 0\nrouter = {{ kind = "none" }}\n'
        f'engine = {{ name = "sglang", python = "{made.engine.python}" }}\n{groups}'
    )
    argv = [sys.executable, "-c", SUPERVISOR, str(file), str(tmp_path / "run")]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_kill_9_of_the_supervisor_leaves_no_process(fakes: Fakes, tmp_path: Path) -> None:
    process = supervisor(fakes, tmp_path, "serve", "grandchildren")
    assert len(working_in(tmp_path / "run")) >= 6
    process.kill()
    process.communicate()
    wait_until(lambda: working_in(tmp_path / "run") == [])
    now = control.status(tmp_path / "run")
    assert (now.state, now.alive) == ("dead", False)
    assert [p.state for p in now.processes] == ["dead", "dead"]
    assert control.down(tmp_path / "run").processes == 0


def test_down_ends_a_fleet_that_another_process_holds(fakes: Fakes, tmp_path: Path) -> None:
    process = supervisor(fakes, tmp_path, "serve", "grandchildren")
    before = control.status(tmp_path / "run")
    assert (before.state, before.alive) == ("ready", True)
    assert all(p.rss_bytes > 0 for p in before.processes)
    assert control.down(tmp_path / "run").processes == 2
    process.communicate(timeout=20)
    assert working_in(tmp_path / "run") == []
    assert not any(is_open(p.url) for p in before.processes)


def test_down_says_so_where_the_supervisor_does_not_leave(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that waits for a GPU's driver: it keeps the fleet's folder and ports."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which processes that are started keep
    try:
        process = supervisor(fakes, tmp_path, "serve")
    finally:
        signal.signal(signal.SIGTERM, before)
    monkeypatch.setattr(control, "GRACE_S", -8.0)
    try:
        said = rf"its supervisor \(pid {process.pid}\) does not leave"
        with pytest.raises(FleetError, match=said):
            control.down(tmp_path / "run")
        assert process.poll() is None
        wait_until(lambda: [p.pid for p in working_in(tmp_path / "run")] == [])
    finally:
        process.kill()
        process.communicate()
    control.down(tmp_path / "run")


def test_down_ends_what_is_left_when_supervisor_and_guardians_were_killed(
    fakes: Fakes, tmp_path: Path
) -> None:
    process = supervisor(fakes, tmp_path, "grandchildren")
    (guardian,) = [p.pid for p in control.status(tmp_path / "run").processes if p.pid]
    process.send_signal(signal.SIGSTOP)
    os.kill(guardian, signal.SIGKILL)
    process.kill()
    process.communicate()
    (record,) = json.loads((tmp_path / "run" / "fleet.json").read_text())["processes"]
    assert Path(record["temporary_folder"]).is_dir()
    control.down(tmp_path / "run")
    wait_until(lambda: working_in(tmp_path / "run") == [])
    assert not Path(record["temporary_folder"]).exists()


def test_down_spares_a_process_that_has_come_by_a_recorded_pid(
    fakes: Fakes, tmp_path: Path
) -> None:
    with fleet(fakes("serve"), tmp_path / "run"):
        pass
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        file = tmp_path / "run" / "fleet.json"
        record = json.loads(file.read_text())
        record["state"] = "ready"
        record["supervisor"]["pid"] = record["processes"][0]["pid"] = bystander.pid
        file.write_text(json.dumps(record))
        assert control.down(tmp_path / "run").processes == 0
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_down_spares_a_session_whose_leader_had_come_by_a_recorded_pid(
    fakes: Fakes, tmp_path: Path
) -> None:
    with fleet(fakes("serve"), tmp_path / "run"):
        pass
    # A shell that has gone, and what it left running: in a container that was restarted the same
    # pids come again, and the machine has not.
    job = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    code = f"import subprocess, sys; open(sys.argv[1], 'w').write(str({job}.pid))"
    told = tmp_path / "job"
    shell = subprocess.Popen([sys.executable, "-c", code, str(told)], start_new_session=True)
    shell.wait()
    job_pid = int(told.read_text())
    try:
        file = tmp_path / "run" / "fleet.json"
        record = json.loads(file.read_text())
        record["state"] = record["processes"][0]["state"] = "ready"
        record["supervisor"]["pid"] = record["processes"][0]["pid"] = shell.pid
        file.write_text(json.dumps(record))
        assert not control.status(tmp_path / "run").alive
        assert control.down(tmp_path / "run").processes == 0
        assert psutil.Process(job_pid).status() != psutil.STATUS_ZOMBIE
    finally:
        os.kill(job_pid, signal.SIGKILL)


@pytest.mark.parametrize("named", [False, True])
def test_down_ends_what_a_killed_guardian_left_in_its_session(
    fakes: Fakes, tmp_path: Path, named: bool
) -> None:
    """Also what overwrote its environment, as processes do that give themselves a name."""
    with fleet(fakes("serve"), tmp_path / "run"):
        pass
    file = tmp_path / "run" / "fleet.json"
    record = json.loads(file.read_text())
    environment = {} if named else {"DELTASERVE_PROCESS": record["processes"][0]["mark"]}
    told = tmp_path / "left"
    code = (
        "import os, sys, time\n"
        "child = os.fork()\n"
        "if not child: os.execve(sys.executable, [sys.executable, '-c', "
        f"'import time; time.sleep(60)'], {environment!r})\n"
        "open(sys.argv[1], 'w').write(str(child))"
    )
    guardian = subprocess.Popen(
        [sys.executable, "-c", code, str(told)], start_new_session=True, cwd=tmp_path / "run"
    )
    guardian.wait()
    left = int(told.read_text())
    try:
        wait_until(lambda: psutil.Process(left).environ() == environment, timeout_s=10.0)
        record["processes"][0]["pid"] = guardian.pid
        file.write_text(json.dumps(record))
        assert control.down(tmp_path / "run").processes == 1
        wait_until(lambda: not psutil.pid_exists(left), timeout_s=10.0)
    finally:
        if psutil.pid_exists(left):
            os.kill(left, signal.SIGKILL)


def test_a_process_that_cannot_be_known_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where no more files may be open: nobody would end it, and it would be started again."""

    def refuse(_: int) -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(supervised, "started_at", refuse)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with pytest.raises(OSError, match="Too many open files"):
        supervised.Supervised(command, dict(os.environ), tmp_path / "log", run_dir)
    assert working_in(run_dir) == []


def test_what_has_come_by_the_pid_of_a_guardian_that_had_gone_is_spared(tmp_path: Path) -> None:
    """A worker that died is started again up to a minute later (`up --keep-serving`)."""
    gone = supervised.Supervised(["true"], dict(os.environ), tmp_path / "log", tmp_path)
    wait_until(lambda: gone.exit_status() is not None)
    code = "import subprocess, sys; subprocess.Popen(['sleep', '600']).wait()"
    other = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        wait_until(lambda: len(psutil.Process(other.pid).children()) == 1)
        (child,) = psutil.Process(other.pid).children()
        gone.pid = other.pid
        assert gone.stop() == []
        time.sleep(0.2)
        assert child.is_running()
        assert other.poll() is None
    finally:
        os.killpg(other.pid, signal.SIGKILL)
        other.wait()


FORKS_WHEN_ASKED = """
import os, signal, sys, time
def fork(*_):
    child = os.fork()
    if child:
        open(sys.argv[1], "w").write(str(child))
signal.signal(signal.SIGUSR1, fork)
open(sys.argv[1], "w").close()
time.sleep(600)
"""


def test_what_comes_of_a_process_while_it_is_looked_for_is_ended_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that has left its guardian's session, when the guardian was killed."""
    told, mark = tmp_path / "told", "a fleet's"
    command = [sys.executable, "-c", FORKS_WHEN_ASKED, str(told)]
    environment = os.environ | {"DELTASERVE_PROCESS": mark}
    left = subprocess.Popen(command, env=environment, cwd=tmp_path, start_new_session=True)
    look = psutil.process_iter

    def before_it_forks() -> list[psutil.Process]:
        found = list(look())
        if left.poll() is None:
            left.send_signal(signal.SIGUSR1)
            wait_until(lambda: told.read_text() != "", timeout_s=10.0)
        return found

    try:
        wait_until(told.exists, timeout_s=10.0)
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(psutil, "process_iter", before_it_forks)
            assert supervised.sweep(2**22 + 1, "gone", mark, tmp_path) == []
        assert working_in(tmp_path) == []
    finally:
        left.kill()
        left.wait()
        for process in working_in(tmp_path):
            process.kill()


def test_a_killed_process_counts_until_its_last_thread_has_gone() -> None:
    code = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "print('ready', flush=True)\n"
        "ctypes.CDLL(None).pthread_exit(None)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        is_zombie = psutil.Process(process.pid).status
        wait_until(lambda: is_zombie() == psutil.STATUS_ZOMBIE)
        assert process.pid in guard.processes()
    finally:
        process.kill()
    process.wait()
    assert process.pid not in guard.processes()
