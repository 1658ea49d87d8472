"""A file of lines that is bounded in size and outlives a full disk.

Each line is one ``write``: whole or absent after a kill. It has no thread of its own, so telemetry
cannot fall behind the worker or keep it from ending; a slow (network) folder holds the worker up,
though. The worker's threads may write at once: those that send KV do, beside the scheduler's.
"""

from __future__ import annotations

import logging
import os
import threading
import time

logger = logging.getLogger(__name__)

_RETRY_S = 5.0


class LineFile:
    """Lines in ``PATH``, and the ones before them in ``PATH`` with ``.1`` before its suffix.

    When both together would take more than `limit_bytes`, the older half goes. While the disk does
    not take a line, lines are counted and dropped, and the disk is tried again every few seconds.
    Raises OSError only where the file cannot be opened at first.
    """

    def __init__(self, path: str, limit_bytes: int) -> None:
        self._path = path
        stem, suffix = os.path.splitext(path)
        self._older = f"{stem}.1{suffix}"
        self._half_bytes = limit_bytes // 2
        self._descriptor = self._open()
        self._size_bytes = os.fstat(self._descriptor).st_size
        self._retry_at_s = 0.0
        self._writing = threading.Lock()
        self.lost_lines = 0
        """Lines dropped since the disk last took one."""

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def ready(self) -> bool:
        """Whether a line is worth building; where not, it counts as lost."""
        if self._retry_at_s and time.monotonic() < self._retry_at_s:
            self.lost_lines += 1
            return False
        return True

    def write(self, line: bytes) -> bool:
        """Appends `line`, which ends in a newline; whether the disk took all of it."""
        with self._writing:
            return self._write(line)

    def _write(self, line: bytes) -> bool:
        try:
            if self._size_bytes and self._size_bytes + len(line) > self._half_bytes:
                self._begin_anew()
            written = os.write(self._descriptor, line)
            if written < len(line):
                # The rest of the line would be glued to the next one.
                os.ftruncate(self._descriptor, self._size_bytes)
                raise OSError(f"{written} of {len(line)} bytes were written")
        except OSError as error:
            if not self._retry_at_s:
                logger.error(
                    "Telemetry: %s takes no more lines (%s); it is tried again every %.0f s",
                    self._path,
                    error,
                    _RETRY_S,
                )
            self._retry_at_s = time.monotonic() + _RETRY_S
            self.lost_lines += 1
            return False
        self._size_bytes += len(line)
        self._retry_at_s = 0.0
        return True

    def _begin_anew(self) -> None:
        if os.path.exists(self._older):
            logger.warning("Telemetry: %s is full; the older half is dropped", self._path)
        os.replace(self._path, self._older)
        descriptor = self._open()
        os.close(self._descriptor)
        self._descriptor, self._size_bytes = descriptor, 0
