"""A rolling restart: each worker in turn is drained, ended, started again and given requests.

``launch roll`` asks for it in ``roll.json`` of the run folder; who supervises the fleet does it,
for a process ends with the one that started it. The router gives a draining worker nothing new, so
that sessions go on elsewhere between two of their turns, and no request fails.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import orjson

from deltaserve.errors import InputError
from launch.cache import write_atomically
from launch.http_calls import FAILURES, answer_line, call, reason

_ASKS_S = 5.0


class RollError(RuntimeError):
    """A rolling restart stopped; the workers that were not restarted yet serve on."""


class Rollable(Protocol):
    """What is restarted (`launch.fleets.Fleet`)."""

    def restart(self, process_id: str) -> None:
        """Ends a process and starts it again."""

    def is_ready_again(self, process_id: str) -> bool:
        """Whether one that was started again is ready; ends it where it takes too long."""

    def died(self) -> dict[str, str]:
        """Process id → why, of those that have died and not been started again."""


def rollable(record: dict[str, Any]) -> list[str]:
    """The workers of a fleet (``fleet.json``) that can be restarted one by one.

    Raises `InputError` where that would fail requests.
    """
    workers = [p for p in record["processes"] if p["role"] is not None and not p["attached"]]
    name = record["topology"]["name"]
    if record["topology"]["router"]["kind"] != "deltaserve":
        raise InputError(f"{name}: only behind our router can workers be drained")
    roles = Counter(p["role"] for p in record["processes"] if p["role"] is not None)
    if alone := [role for role, count in roles.items() if count == 1]:
        raise InputError(f"{name}: it has one {alone[0]} worker: nobody serves while it restarts")
    if not workers:
        raise InputError(f"{name}: its workers were started elsewhere")
    return [p["id"] for p in workers]


def ask(run_dir: Path, workers: list[str], wait_s: float) -> None:
    """Asks the supervisor of the fleet in `run_dir` for a rolling restart."""
    if (asked := progress(run_dir)) and asked["state"] in ("asked", "rolling"):
        raise InputError(f"{run_dir}: a rolling restart is under way")
    _write(run_dir, {"state": "asked", "workers": workers, "wait_s": wait_s, "said": []})


def progress(run_dir: Path) -> dict[str, Any] | None:
    """How far the last one has come: `state` is ``asked``, ``rolling``, ``done`` or ``failed``."""
    try:
        found: dict[str, Any] = orjson.loads((run_dir / "roll.json").read_bytes())
    except FileNotFoundError:
        return None
    return found


def forget(run_dir: Path) -> None:
    """What was asked of an earlier fleet in the folder is not done."""
    (run_dir / "roll.json").unlink(missing_ok=True)


def _write(run_dir: Path, value: dict[str, Any]) -> None:
    write_atomically(run_dir / "roll.json", orjson.dumps(value))


class Rolling:
    """Does what `ask` asks for, a step whenever it is told to look."""

    def __init__(
        self,
        fleet: Rollable,
        run_dir: Path,
        router: tuple[str, str | None],
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`router` is its URL and the key that it asks for."""
        self._fleet, self._run_dir, self._router = fleet, run_dir, router
        self._tell, self._clock = tell, clock
        self._asked: dict[str, Any] = {}
        self._steps: Iterator[None] | None = None
        self.restarting: set[str] = set()
        """Workers whose death does not end the fleet: they are being restarted, or did not come
        back."""
        forget(run_dir)

    def look(self) -> None:
        """Does what is due now; to be called a few times a second."""
        if self._steps is None:
            asked = progress(self._run_dir)
            if asked is None or asked["state"] != "asked":
                return
            self._asked = asked
            self._steps = self._roll(asked["workers"], asked["wait_s"])
        try:
            next(self._steps)
            return
        except StopIteration:
            self._say("done", f"{len(self._asked['workers'])} workers restarted")
        except RollError as error:
            self._say("failed", str(error))
        self._steps = None

    def _say(self, state: str, line: str) -> None:
        self._asked = {**self._asked, "state": state, "said": [*self._asked["said"], line]}
        _write(self._run_dir, self._asked)
        self._tell(f"roll: {line}")

    def _roll(self, workers: list[str], wait_s: float) -> Iterator[None]:
        for worker in workers:
            self._say("rolling", f"{worker}: draining")
            self._post(worker, "drain")
            try:
                yield from self._restart(worker, wait_s)
            finally:  # one that did not come back is kept out by the router's own health checks
                self._post(worker, "undrain")
            self._say("rolling", f"{worker}: serves again")
            yield

    def _restart(self, worker: str, wait_s: float) -> Iterator[None]:
        deadline_s = self._clock() + wait_s
        while requests := self._worker(worker)["load"]:
            if self._clock() > deadline_s:
                raise RollError(f"{worker}: {requests} requests still run after {wait_s:.0f} s")
            yield
        self.restarting.add(worker)
        self._say("rolling", f"{worker}: restarting")
        self._fleet.restart(worker)
        while not self._fleet.is_ready_again(worker):
            if why := self._fleet.died().get(worker):
                raise RollError(f"{why}; its log says why")
            yield
        while not self._worker(worker)["is_healthy"]:
            yield
        self.restarting.discard(worker)

    def _post(self, worker: str, action: str) -> None:
        self._call("POST", f"/workers/{quote(worker)}/{action}", b"{}")

    def _worker(self, worker: str) -> dict[str, Any]:
        found: dict[str, Any] = orjson.loads(self._call("GET", f"/workers/{quote(worker)}"))
        return found

    def _call(self, method: str, path: str, body: bytes | None = None) -> bytes:
        url, key = self._router
        try:
            status, answer = call(method, url + path, body, timeout_s=_ASKS_S, key=key)
        except FAILURES as error:
            raise RollError(f"the router does not answer: {reason(error)}") from error
        if status >= 300:
            raise RollError(answer_line(path, status, answer))
        return answer
