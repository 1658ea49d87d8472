"""The router's decision as a library: which turn may go now, and to which worker. No I/O.

    fleet = Fleet(policy="unified", admission={"rule": "rotate"})
    fleet.add_worker("http://gpu1:30000", kv_capacity_tokens=400_000)
    with fleet.admit(token_ids, session="conversation 1") as turn:
        if turn.wait(timeout_s=60):
            for _ in ask(turn.worker.url, token_ids):
                turn.output()
            turn.finish()

Whoever embeds it says what happens (workers that come, fail and go; tokens; ends), and asks. A turn
that is left without an end gives back what was reserved for it. All of it may be called from any
thread; `wait` lets the others go on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from router_policies import _core
from router_policies._core import NotAdmitted

__all__ = ["Fleet", "NotAdmitted", "Turn", "Worker"]


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker of a turn."""

    id: str
    url: str


class Turn:
    """A request's place, or its place in the queue."""

    def __init__(self, turn: _core.Turn) -> None:
        self._turn = turn

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until the turn has a place; False if it has none after `timeout_s`. With 0 it only
        looks. Raises `NotAdmitted` if it has waited for too long or no worker is left."""
        return self._turn.wait(timeout_s)

    @property
    def worker(self) -> Worker:
        """The worker that answers, once the turn has a place."""
        return Worker(*self._turn.worker())

    @property
    def prefill(self) -> Worker | None:
        """The worker that prefills for it, where the policy separates."""
        found = self._turn.prefill()
        return Worker(*found) if found else None

    def output(self, tokens: int = 1) -> None:
        """More tokens came; the first ends the prefill."""
        self._turn.output(tokens)

    def finish(
        self,
        *,
        prompt_tokens: int | None = None,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
    ) -> None:
        """The answer is whole; with what the engine counted, where it says so."""
        self._turn.finish(prompt_tokens, cached_tokens, output_tokens)

    def fail(self, error: str) -> None:
        """The worker failed. Ask for another turn, with the worker in `exclude`."""
        self._turn.fail(error)

    def leave(self) -> None:
        """Nobody wants the answer any more; nothing where the turn has ended."""
        self._turn.leave()

    def __enter__(self) -> Turn:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave()


class Fleet:
    """Workers, what is known of them, and who may use their KV. Raises ValueError, in one line, for
    a policy, rule or worker that cannot be."""

    def __init__(
        self,
        policy: str = "unified",
        policy_params: Mapping[str, Any] | None = None,
        admission: Mapping[str, Any] | None = None,
    ) -> None:
        params, rule = (json.dumps(dict(each or {})) for each in (policy_params, admission))
        self._fleet = _core.Fleet(policy, params, rule)

    def add_worker(self, url: str, *, up: bool = True, **fields: Any) -> str:
        """Adds a worker with the fields of `[[workers]]`; returns its id."""
        added = self._fleet.add_worker(json.dumps({"url": url, **fields}))
        self._fleet.set_up(added, up)
        return added

    def set_up(self, worker: str, up: bool) -> bool:
        """Whether the worker can be reached; False where there is none of this id."""
        return self._fleet.set_up(worker, up)

    def set_draining(self, worker: str, draining: bool = True) -> bool:
        """Whether the worker gets no new turns; False where there is none of this id."""
        return self._fleet.set_draining(worker, draining)

    def remove_worker(self, worker: str) -> bool:
        """Turns that run there run to their ends; False where there is none of this id."""
        return self._fleet.remove_worker(worker)

    def admit(
        self,
        tokens: Sequence[int],
        *,
        session: str | None = None,
        max_output_tokens: int | None = None,
        exclude: Iterable[str] = (),
    ) -> Turn:
        """Asks for a place for a prompt of these token ids; not on the workers of `exclude`. Raises
        `NotAdmitted` where nobody can serve it."""
        return Turn(self._fleet.admit(list(tokens), session, max_output_tokens, list(exclude)))

    @property
    def waiting(self) -> int:
        """Turns that wait."""
        return self._fleet.waiting()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is reserved anywhere."""
        return self._fleet.is_idle()
