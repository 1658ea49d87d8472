"""The phases of a run: priming, warm-up, the measured window, drain.

Owns when the window is, for all processes of a run, and the run folder's `phases.json`. Must not
know requests or servers.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from replay.files import write_json
from replay.results import Phase

PHASES_FILE = "phases.json"
_NOT_KNOWN = -1.0


@dataclass(frozen=True, slots=True)
class PhaseOptions:
    """Lengths of a run's phases in seconds; `measure_s` None: until there is nothing left to send.
    `drain_s` bounds the wait for measured requests after the window."""

    warm_up_s: float
    measure_s: float | None
    drain_s: float


class Shared(Protocol):
    """Numbers that a run's processes share. The times are negative until they are known."""

    def lock(self) -> Any:
        """To be held while numbers are changed together."""

    window_start_s: float
    unprimed: int

    def get_unfinished(self) -> list[int]:
        """Each process's measured requests without an answer; negative before the window's end."""

    def set_unfinished(self, process: int, count: int) -> None:
        """Sets that of one process."""


class OneProcess:
    """The numbers of a run that has but one process."""

    def __init__(self) -> None:
        self.window_start_s = _NOT_KNOWN
        self.unprimed = 1
        self._unfinished = -1

    def lock(self) -> Any:
        return contextlib.nullcontext()

    def get_unfinished(self) -> list[int]:
        return [self._unfinished]

    def set_unfinished(self, process: int, count: int) -> None:
        self._unfinished = count


class SeveralProcesses:
    """The same in memory that forked processes share."""

    def __init__(self, context: Any, processes: int) -> None:
        self._start = context.Value("d", _NOT_KNOWN)
        self._unprimed = context.Value("q", processes)
        self._unfinished = context.Array("q", [-1] * processes)

    def lock(self) -> Any:
        return self._unprimed.get_lock()

    @property
    def window_start_s(self) -> float:
        return float(self._start.value)

    @window_start_s.setter
    def window_start_s(self, value: float) -> None:
        self._start.value = value

    @property
    def unprimed(self) -> int:
        return int(self._unprimed.value)

    @unprimed.setter
    def unprimed(self, value: int) -> None:
        self._unprimed.value = value

    def get_unfinished(self) -> list[int]:
        return list(self._unfinished)

    def set_unfinished(self, process: int, count: int) -> None:
        self._unfinished[process] = count


class Window:
    """The measured window as one process sees it.

    It begins `warm_up_s` after the last process has primed its first sessions, and lasts
    `measure_s`. All times are of the run's clock.
    """

    def __init__(self, options: PhaseOptions, shared: Shared, process: int = 0) -> None:
        self._options = options
        self._shared = shared
        self._process = process

    @property
    def start_s(self) -> float | None:
        """When the window begins; None while that is not known, for sessions are being primed."""
        start_s = self._shared.window_start_s
        return None if start_s < 0 else start_s

    @property
    def end_s(self) -> float:
        """When the window ends; infinite while that is not known."""
        start_s, measure_s = self.start_s, self._options.measure_s
        return math.inf if start_s is None or measure_s is None else start_s + measure_s

    def primed(self, now_s: float) -> None:
        """This process has primed its first sessions; to be called once."""
        with self._shared.lock():
            self._shared.unprimed -= 1
            if not self._shared.unprimed:
                self._shared.window_start_s = max(0.0, now_s) + self._options.warm_up_s

    def phase_of(self, scheduled_s: float) -> Phase:
        """The phase of a request (not of a priming one) by when it was scheduled."""
        start_s = self.start_s
        if start_s is None or scheduled_s < start_s:
            return "warm_up"
        return "measure" if scheduled_s < self.end_s else "drain"

    def is_over(self, now_s: float, unfinished: Callable[[], int]) -> bool:
        """Whether this process can stop sending: the window has ended, and no process has a
        measured request without an answer (or it has waited `drain_s` for them)."""
        if now_s <= self.end_s:
            return False
        self._shared.set_unfinished(self._process, unfinished())
        if now_s > self.end_s + self._options.drain_s:
            return True
        return not any(self._shared.get_unfinished())


class PhaseRecord:
    """Writes `phases.json`: at the start of the window, and again when the run has ended."""

    def __init__(self, folder: Path, window: Window, facts: dict[str, Any]) -> None:
        self._path = folder / PHASES_FILE
        self._window = window
        self._facts = facts
        self._written = False

    def look(self, now_s: float) -> None:
        """Writes the file if the window has begun and the file has not been written."""
        start_s = self._window.start_s
        if not self._written and start_s is not None and now_s >= start_s:
            self._write(start_s, self._window.end_s, ended=False)
            self._written = True

    def close(self, now_s: float) -> None:
        """Writes the file with the end that the window came to have: a run that was interrupted, or
        that had no more sessions to send, ends it early."""
        start_s = self._window.start_s
        if start_s is not None and now_s >= start_s:
            self._write(start_s, min(self._window.end_s, now_s), ended=True)

    def _write(self, start_s: float, end_s: float, *, ended: bool) -> None:
        window = {
            "window_start_s": start_s,
            "window_end_s": None if math.isinf(end_s) else end_s,
            "complete": ended and self._window.end_s in (end_s, math.inf),
        }
        write_json(self._path, self._facts | window)
