"""A supervised process: started under a guardian, and what it takes to end it from elsewhere.

Owns the pairing of a process with its guardian (`launch.guard`). Knows no engines and no fleets.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from launch import guard

_MARK = "DELTASERVE_PROCESS"
_PREFIX = "deltaserve-"
# A socket's path has 107 bytes at most: vLLM's have 37 after the folder's, which has 20 after this.
_LONGEST_TEMPORARY = 48

_KILLED_AGAIN_S = 5.0
GRACE_S = 10.0
"""How long a process has to leave after it was asked to."""


class Supervised:
    """A running process. It ends, with all that came of it, when this process does.

    `mark` is in the environment of everything that comes of it, and of nothing else.
    """

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        folder: Path,
        stop_signal: int = signal.SIGTERM,
        log_max_bytes: int = 0,
        own_temporary: bool = False,
        keeps_previous_log: bool = True,
    ) -> None:
        """Starts `argv` in `folder` with exactly `environment`; both outputs go to `log`. It will
        be asked to leave by `stop_signal`. Of its log, `log_max_bytes` are kept at most, in two
        files (`guard.bound_log`); 0 keeps all. With `own_temporary` it has a folder of its own for
        temporary files (``TMPDIR``), which goes when it has ended. What `log` holds is moved
        away first (`keep_previous`), or, where that is not to be kept, dropped."""
        self.mark = uuid.uuid4().hex
        self.temporary_folder = _temporary_folder() if own_temporary else None
        given = {**environment, _MARK: self.mark}
        given.pop(guard.TEMPORARY, None)  # of a process that this one came of
        if self.temporary_folder:
            given["TMPDIR"] = given[guard.TEMPORARY] = str(self.temporary_folder)
        read_end, self._alive_while_open = os.pipe()
        guardian = [sys.executable, "-I", "-S", guard.__file__]
        how = [str(GRACE_S), str(int(stop_signal))]
        if log_max_bytes:
            how += [str(log), str(log_max_bytes)]
        try:
            for part in (Path(guard.older_log(str(log))), log):
                if keeps_previous_log:
                    keep_previous(part)
                else:
                    part.unlink(missing_ok=True)
            # Appended to: what is cut while it is written to then goes on at its new end.
            with log.open("ab") as output:
                self._guardian = subprocess.Popen(
                    [*guardian, str(read_end), str(os.getpid()), *how, "--", *argv],
                    env=given,
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=(read_end,),
                )
        except BaseException:
            os.close(self._alive_while_open)
            if self.temporary_folder:
                guard.remove_temporary(str(self.temporary_folder))
            raise
        finally:
            os.close(read_end)
        self.pid, self._folder = self._guardian.pid, folder
        try:
            self.started_unix_s = psutil.Process(self.pid).create_time()
            self.started = started_at(self.pid) or ""
        except BaseException:  # as where no more files may be open: nobody else would end it
            self.stop()
            raise

    def exit_status(self) -> int | None:
        """None while it runs; 128 + signal where a signal ended it."""
        status = self._guardian.poll()
        return status if status is None or status >= 0 else 128 - status

    def wait(self, timeout_s: float) -> int | None:
        """Its exit status as soon as it has one; None where it still runs after `timeout_s`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guardian.wait(timeout_s)
        return self.exit_status()

    def listens_on(self, port: int) -> bool:
        """Whether one of its processes listens on the TCP port."""
        for process in members(self.pid, self.started):
            try:
                connections = process.net_connections("tcp")
            except psutil.Error:
                continue
            for connection in connections:
                if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                    return True
        return False

    def unbind(self) -> None:
        """Lets every thread of its processes run wherever this process may."""
        cores = os.sched_getaffinity(0)
        for process in members(self.pid, self.started):
            with contextlib.suppress(psutil.NoSuchProcess):
                for thread in process.threads():
                    with contextlib.suppress(ProcessLookupError):
                        os.sched_setaffinity(thread.id, cores)

    def request_stop(self) -> None:
        """Asks for the end without waiting for it."""
        if self._guardian.poll() is None:
            self._guardian.terminate()

    def stop(self) -> list[int]:
        """Ends it and everything that came of it; returns the pids that could not be killed."""
        had_gone = self._guardian.returncode is not None
        self.request_stop()
        try:
            self._guardian.wait(GRACE_S + 5)
        except subprocess.TimeoutExpired:
            self._guardian.kill()
            self._guardian.wait()
        left: list[int] = []
        # Where it has only just gone the number of its session is nobody else's.
        if not had_gone or _are_of(self.pid, self.started, self.mark, self._folder):
            left = guard.kill_offspring(self.pid, 0.0)
        left = sorted({*left, *_sweep_marked(self.mark)})
        _remove_temporary(left, self.temporary_folder)
        if self._alive_while_open >= 0:
            os.close(self._alive_while_open)
            self._alive_while_open = -1
        return left


def _temporary_folder() -> Path | None:
    """A new folder under the system's for temporary files; None where that has so long a path that
    sockets in it would not have one (of 107 bytes).

    In it are links to what is kept in the system's by the user's name: caches of compilers
    (inductor, the CUTE DSL and those that follow it), of which the next start would else find none.
    """
    system = Path(tempfile.gettempdir())
    if len(os.fsencode(system)) > _LONGEST_TEMPORARY:
        return None
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=system))
    with contextlib.suppress(OSError, KeyError):  # no name, or a folder of somebody else's
        user = getpass.getuser()
        for kept in (user, f"torchinductor_{user}"):
            (system / kept).mkdir(mode=0o700, exist_ok=True)
            # Compiled code is loaded from there: only from a folder that nobody else wrote.
            if (system / kept).lstat().st_uid == os.getuid():
                (folder / kept).symlink_to(system / kept)
    return folder


def keep_previous(log: Path) -> None:
    """Moves what an earlier start left at `log` to ``LOG.1``: the crash that one wants to see is
    often the one before."""
    with contextlib.suppress(FileNotFoundError):
        log.replace(log.with_name(f"{log.name}.1"))


def started_at(pid: int) -> str | None:
    """When the process that is `pid` started, as ``BOOT-TICKS``: the machine's boot and the clock
    ticks since; None where no process has that pid. With its pid it is that process and no other.

    Not the time of day: that is reckoned from a clock which is set while processes run, and a
    process that ran before would then be taken for another.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name before may hold spaces and parentheses; of what follows the 20th is the start.
    return f"{boot}-{stat.rpartition(b')')[2].split()[19].decode()}"


def is_running(pid: int, started: str) -> bool:
    """Whether the process that is `pid` since `started` runs; a later one does not count."""
    try:
        zombie = psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    return not zombie and _is_same(pid, started) is True


def terminate(pid: int, started: str, timeout_s: float) -> bool:
    """SIGTERM to that very process, suspended or not; True when it has gone within `timeout_s`."""
    if is_running(pid, started):
        with contextlib.suppress(ProcessLookupError):  # it may go at any moment
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGCONT)
    return goes(pid, started, timeout_s)


def goes(pid: int, started: str, timeout_s: float) -> bool:
    """Whether that very process has gone within `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while is_running(pid, started):
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(0.1)
    return True


def sweep(
    guardian: int,
    started: str,
    mark: str,
    folder: Path,
    temporary_folder: Path | None = None,
) -> list[int]:
    """Kills what a guardian that died before its time left behind, and removes the folder that it
    had for temporary files; returns the pids that could not be killed in time (`guard.GIVE_UP_S`).

    That is what stayed in its session, whatever it calls itself now, and what left the session but
    still has the environment it was started with. Does nothing to a process, nor to what one left
    in its session, that has come by the guardian's pid since.
    """
    left: list[int] = []
    if _are_of(guardian, started, mark, folder):
        left = guard.kill_offspring(guardian, 0.0)
    left = sorted({*left, *_sweep_marked(mark)})
    _remove_temporary(left, temporary_folder)
    return left


def _sweep_marked(mark: str) -> list[int]:
    """Kills what has `mark` in its environment until none is left, for one may come of another that
    is being looked for, and a machine may take its time; returns the pids that could not be killed
    in it."""
    deadline_s = time.monotonic() + guard.GIVE_UP_S
    while killed := _kill_marked(mark):
        if time.monotonic() >= deadline_s:
            return sorted(process.pid for process in killed)
        psutil.wait_procs(killed, timeout=_KILLED_AGAIN_S)
    return []


def _kill_marked(mark: str) -> list[psutil.Process]:
    """Kills what has `mark`; returns what it killed."""
    killed = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(_MARK) == mark:
                process.kill()
                killed.append(process)
        except psutil.Error:
            continue
    return killed


def _remove_temporary(left: Sequence[int], folder: Path | None) -> None:
    if not left and folder and folder.name.startswith(_PREFIX):
        guard.remove_temporary(str(folder))


def members(guardian: int, started: str) -> list[psutil.Process]:
    """The live processes under a guardian that runs; the guardian left out."""
    return _offspring(guardian) if _is_same(guardian, started) else []


def processes_of(guardian: int, started: str, mark: str, folder: Path) -> list[psutil.Process]:
    """The live processes under a guardian, or left by it in its session; the guardian left out.
    They have `mark` and were started in `folder`."""
    return _offspring(guardian) if _are_of(guardian, started, mark, folder) else []


def _offspring(guardian: int) -> list[psutil.Process]:
    found = []
    for pid in guard.offspring(guardian):
        try:
            found.append(psutil.Process(pid))
        except psutil.NoSuchProcess:
            continue
    return found


def _are_of(guardian: int, started: str, mark: str, folder: Path) -> bool:
    """Whether what is under the pid `guardian` and in the session of that number is of the guardian
    that had it, which may be gone.

    Then the number may have gone to another leader of a session, who is gone too and left something
    in it: in a container that was restarted the same pids come again. A number is given out again
    only when nothing is left in its session, so one process tells of all of them: by its mark, or,
    where it has overwritten its environment with a name of its own, by the folder it works in.
    """
    is_same = _is_same(guardian, started)
    if is_same is not None:
        return is_same
    for process in _offspring(guardian):
        try:
            environment = process.environ()
            if environment.get(_MARK) == mark:
                return True
            if not environment and Path(process.cwd()) == folder.resolve():
                return True
        except psutil.Error:  # it has ended, or is another user's
            continue
    return False


def _is_same(pid: int, started: str) -> bool | None:
    """Whether `pid` is still the process that started then; None where no process has that pid."""
    now = started_at(pid)
    return None if now is None else now == started
