"""Signals that ask this process to end, held back while what it is doing must not be cut short."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Within it Ctrl-C, SIGTERM and SIGHUP do nothing; the last that came counts when it is left.

    Only the main thread is ever interrupted by them: in another one there is nothing to hold. Those
    that are ignored stay so.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        came.append(number)

    heeded = [n for n in _SIGNALS if signal.getsignal(n) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, note) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[-1])
