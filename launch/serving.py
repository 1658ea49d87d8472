"""Keeps a fleet serving when a process of it dies: it is started again after a pause that grows.

For `launch up --keep-serving`. A measurement must not use it: it would go on with a worker whose
cache is empty. The router takes a dead worker out and puts it back by its own health checks, for
a worker keeps its address.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0

FORGIVEN_AFTER_S = 600.0
"""A process that has served for so long starts again with the first pause."""


class Restartable(Protocol):
    """What is kept serving (`launch.fleets.Fleet`)."""

    def died(self) -> dict[str, str]:
        """Process id → why, of those that have died and not been started again."""

    def restart(self, process_id: str) -> None:
        """Starts one that died again."""

    def is_ready_again(self, process_id: str) -> bool:
        """Whether one that was started again is ready; ends it where it takes too long."""


@dataclass
class _Patient:
    restarts: int = 0
    restart_at_s: float | None = None
    is_starting: bool = False
    ready_since_s: float | None = None


class KeepServing:
    """Restarts what dies in `fleet` whenever it is told to look."""

    def __init__(
        self, fleet: Restartable, tell: Callable[[str], None], clock: Callable[[], float]
    ) -> None:
        """`tell` gets a line for each death, start and readiness; `clock` counts seconds."""
        self._fleet = fleet
        self._tell = tell
        self._clock = clock
        self._patients: dict[str, _Patient] = {}

    def look(self) -> None:
        """Does what is due now; to be called a few times a second."""
        now_s = self._clock()
        for process_id, why in self._fleet.died().items():
            patient = self._patients.setdefault(process_id, _Patient(ready_since_s=now_s))
            if patient.restart_at_s is None:
                self._schedule(process_id, patient, why, now_s)
            elif now_s >= patient.restart_at_s:
                patient.restart_at_s, patient.is_starting = None, True
                patient.restarts += 1
                self._fleet.restart(process_id)
        for process_id, patient in self._patients.items():
            if patient.is_starting and self._fleet.is_ready_again(process_id):
                patient.is_starting, patient.ready_since_s = False, now_s
                self._tell(f"{process_id}: serving again after {patient.restarts} restarts")

    def _schedule(self, process_id: str, patient: _Patient, why: str, now_s: float) -> None:
        served_s = 0.0 if patient.ready_since_s is None else now_s - patient.ready_since_s
        if served_s >= FORGIVEN_AFTER_S:
            patient.restarts = 0
        # Bounded exponent: a worker may fail for days.
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(patient.restarts, 16))
        patient.restart_at_s, patient.is_starting = now_s + pause_s, False
        patient.ready_since_s = None
        self._tell(f"{why}; starting it again in {pause_s:.0f} s")


def keep_serving(fleet: Restartable, tell: Callable[[str], None], also: Callable[[], None]) -> None:
    """Keeps `fleet` serving until interrupted; `also` is called each time before it looks."""
    keeper = KeepServing(fleet, tell, time.monotonic)
    while True:
        time.sleep(0.5)
        also()
        keeper.look()
