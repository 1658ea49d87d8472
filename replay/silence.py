"""How long a session waits after a request that nobody answered.

Without a wait, sessions that do not think would fail as fast as the system refuses connections:
thousands of requests a second, each with its line, until the run's end. Must not know requests that
are due nor what is sent.
"""

from __future__ import annotations

from replay.results import Result

SHORTEST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0


class Silence:
    """Follows one process's results, in the order they end."""

    def __init__(self) -> None:
        self._since_s: float | None = None

    def pause_s(self, result: Result) -> float:
        """Seconds that a session waits after `result` before it goes on; 0 where a server answered.

        As long as nobody has answered any session so far, so that the wait doubles from one failure
        to the next, within `SHORTEST_PAUSE_S` and `LONGEST_PAUSE_S`. A timeout has waited already.
        """
        if result.status is not None:
            self._since_s = None
        elif result.error and result.error.kind not in ("timeout", "cancelled"):
            now_s = result.finished_s or 0.0
            if self._since_s is None:
                self._since_s = now_s
            return min(max(now_s - self._since_s, SHORTEST_PAUSE_S), LONGEST_PAUSE_S)
        return 0.0
