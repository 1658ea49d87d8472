"""The guardian: runs one process and leaves nothing of it behind.

Run as a script, ``guard.py FD PARENT GRACE_S SIGNAL [LOG BYTES] -- COMMAND...``, as the leader of a
new session. It ends the command and every process that came of it when the command exits, on
SIGTERM or SIGINT, and when the supervisor dies in whatever way: FD is a pipe whose other end only
the supervisor holds, and PARENT its pid. The command is asked by SIGNAL and has GRACE_S to leave.
Exits with the command's status (128 + signal where a signal ended it). With LOG, the file that both
outputs are appended to, that file and the one before it hold BYTES at most (`bound_log`). When
nothing of the command is left the folder that ``DELTASERVE_TEMPORARY`` names is removed.

Only the standard library: it starts in 20 ms and must not fail with an engine's environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.5
_LOOK_AT_LOG_S = 5.0
_COPIED_BYTES = 1 << 24
_ORPHAN_GRACE_S = 1.0

TEMPORARY = "DELTASERVE_TEMPORARY"
"""Names the folder for temporary files of a process that has one of its own."""

GIVE_UP_S = 60.0
"""How long SIGKILL is repeated before what does not go is left."""


def processes() -> dict[int, tuple[int, int]]:
    """Every process that still holds anything: pid → (parent's pid, session id).

    A zombie holds nothing, unless threads of it are still on their way out: its ports are then
    open, and its memory is taken.
    """
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                stat = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        state, parent, session, threads = stat[0], int(stat[1]), int(stat[3]), int(stat[17])
        if state not in (b"Z", b"X") or threads > 1:
            found[int(name)] = (parent, session)
    return found


def offspring(session: int) -> list[int]:
    """Live processes in `session`, and below its leader in whatever session; not the leader."""
    table = processes()
    tree = {pid for pid, (_, of) in table.items() if of == session} | {session}
    growing = True
    while growing:
        below = {pid for pid, (parent, _) in table.items() if parent in tree} - tree
        tree |= below
        growing = bool(below)
    return sorted(tree - {session})


def kill_offspring(session: int, grace_s: float) -> list[int]:
    """Ends all `offspring`: SIGTERM, up to `grace_s` to leave, then SIGKILL until none is left.

    Gives up `GIVE_UP_S` after that and returns the pids that are left: a process that waits in the
    kernel, as for a GPU's driver, cannot be killed, and whoever waits for it would wait for ever.
    """
    signalled: set[int] = set()
    deadline_s = time.monotonic() + grace_s
    while tree := offspring(session):
        if time.monotonic() >= deadline_s + GIVE_UP_S:
            return tree
        late = time.monotonic() >= deadline_s
        for pid in tree:
            if late or pid not in signalled:
                signalled.add(pid)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        _reap()
        time.sleep(0.05)
    return []


def bound_log(log: str, most_bytes: int) -> None:
    """Moves what `log` holds to ``NAME.1.log``, in the place of what was there, once it is half of
    `most_bytes`.

    It is copied and cut, for the command and all that came of it have the file open and go on
    writing to it: at its end, wherever that is. A line that is written between the copy's last
    look and the cut is lost, or its beginning is. Where there is no room for the copy the log stays
    as it is.
    """
    try:
        source = os.open(log, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # it was moved away
        return
    try:
        if os.fstat(source).st_size < most_bytes // 2:
            return
        older = older_log(log)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(older)  # first: its room is needed
        target = os.open(older, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            at = 0
            while sent := os.sendfile(target, source, at, _COPIED_BYTES):
                at += sent
            os.ftruncate(source, 0)
        except OSError:
            os.unlink(older)
            raise
        finally:
            os.close(target)
    except OSError:
        return
    finally:
        os.close(source)


def older_log(log: str) -> str:
    """Where what `log` held before is kept."""
    stem, suffix = os.path.splitext(log)
    return f"{stem}.1{suffix}"


def _reap() -> dict[int, int]:
    """Collects ended children: pid → exit status."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while (pair := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(pair[1])
            ended[pair[0]] = code if code >= 0 else 128 - code
    return ended


def remove_temporary(folder: str) -> None:
    """Removes a folder for temporary files with all that is in it; what cannot go stays."""
    import shutil  # here: its own imports take longer than everything else of a guardian's start

    shutil.rmtree(folder, ignore_errors=True)


def _end(grace_s: float) -> None:
    """Ends all that came of the command, and removes what it left in its temporary folder."""
    if left := kill_offspring(os.getpid(), grace_s):
        pids = ", ".join(map(str, left))
        print(
            f"guard: could not be killed in {GIVE_UP_S:.0f} s: {pids}", file=sys.stderr, flush=True
        )
    elif TEMPORARY in os.environ:
        remove_temporary(os.environ[TEMPORARY])


def _start(command: list[str]) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    guardian = os.getpid()
    # Of a signal that finds the guardian's handlers in the child the command would never know: one
    # that comes before they are taken back waits until then.
    stops = (signal.SIGTERM, signal.SIGINT)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, stops)
    child = os.fork()
    if child:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return child
    try:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == guardian:
            for number in (*stops, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    finally:
        os._exit(127)


def main(arguments: list[str]) -> int:
    """Runs the command to its end, or to the supervisor's; returns the command's status."""
    pipe, supervisor, grace_s = int(arguments[0]), int(arguments[1]), float(arguments[2])
    stop_signal, begin = int(arguments[3]), arguments.index("--")
    log, command = arguments[4:begin], arguments[begin + 1 :]
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    os.set_inheritable(pipe, False)
    stopping: list[int] = []
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: stopping.append(number))
    child = _start(command)

    deadline_s = None
    look_s = time.monotonic()
    while True:
        if log and time.monotonic() >= look_s:
            bound_log(log[0], int(log[1]))
            look_s = time.monotonic() + _LOOK_AT_LOG_S
        watched = [pipe, woken] if deadline_s is None else [woken]
        ready, _, _ = select.select(watched, [], [], _POLL_S)
        if woken in ready:
            os.read(woken, 4096)
        ended = _reap()
        if child in ended:
            _end(_ORPHAN_GRACE_S)
            return ended[child]
        if deadline_s is None and (stopping or pipe in ready or os.getppid() != supervisor):
            deadline_s = time.monotonic() + grace_s
            os.kill(child, stop_signal)
        if deadline_s is not None and time.monotonic() >= deadline_s:
            _end(0.0)
            return 128 + signal.SIGKILL


if __name__ == "__main__":
    # At once: an interpreter that ends takes its handlers back first, and a signal that came then
    # would end the guardian, whose status would be that signal and not the command's.
    os._exit(main(sys.argv[1:]))
