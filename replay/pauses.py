"""How long a session waits after a request that failed.

Without a wait, sessions that do not think would fail as fast as a server refuses them, or the
system connections to one that is gone: thousands of requests a second, each with its line, until
the run's end. An agent waits before it asks again too, and at least as long as the server says.
Must not know requests that are due nor what is sent.
"""

from __future__ import annotations

from replay.results import Result

SHORTEST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
LONGEST_ASKED_S = 60.0
"""Of what a server asks for: agents' clients (OpenAI's, Anthropic's) wait no longer either."""


class Pauses:
    """Follows one process's results, in the order they end."""

    def __init__(self) -> None:
        self._since_s: float | None = None

    def pause_s(self, result: Result, retry_after_s: float | None = None) -> float:
        """Seconds that a session waits after `result` before it goes on; 0 after any token.

        As long as no session has been given a token so far, so that the wait doubles from one
        failure to the next, within `SHORTEST_PAUSE_S` and `LONGEST_PAUSE_S`; and at least
        `retry_after_s`, which the server asked for. A timeout has waited already.
        """
        if result.error is None or result.first_token_s is not None:
            self._since_s = None
            return 0.0
        if result.error.kind in ("timeout", "cancelled"):
            return 0.0
        now_s = result.finished_s or 0.0
        if self._since_s is None:
            self._since_s = now_s
        pause_s = min(max(now_s - self._since_s, SHORTEST_PAUSE_S), LONGEST_PAUSE_S)
        return max(pause_s, min(retry_after_s or 0.0, LONGEST_ASKED_S))
