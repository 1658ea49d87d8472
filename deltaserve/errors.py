"""The one exception that means "the user's input is wrong", and how a program ends with it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class InputError(Exception):
    """Bad input from the user: a file, a flag, a key, a port in use, an engine not installed.

    The message is one line that names the place (file, line, field) and what was expected. The
    command line prints it after ``error: `` and exits with 2; no traceback is shown.
    """


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Within it an `InputError` ends the program as the command line does."""
    try:
        yield
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
