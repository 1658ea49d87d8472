"""What a person sees while an experiment runs: lines, and on a terminal a line that changes."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.status import Status


class Progress:
    """Writes to stderr. `say` is kept; `detail` and `count` only show what is happening now."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._status: Status | None = None
        self._last_quarter = ("", -1)

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._status = self._console.status("starting")
            self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False)

    def detail(self, *parts: object) -> None:
        """What is being done now: replaces itself on a terminal, an indented line elsewhere."""
        text = " ".join(str(part) for part in parts)
        if self._status is not None:
            self._status.update(text)
        else:
            self._console.print(f"  {text}", markup=False)

    def count(self, what: str, done: int, total: int) -> None:
        """How far something is; off a terminal only at each quarter."""
        text = f"{what} {done}/{total}"
        if self._status is not None:
            self._status.update(text)
            return
        quarter = (what, 4 * done // total if total else 4)
        if quarter != self._last_quarter:
            self._last_quarter = quarter
            self._console.print(f"  {text}", markup=False)
            sys.stderr.flush()
