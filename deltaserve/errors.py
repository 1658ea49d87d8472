"""The one exception that means "the user's input is wrong"."""


class InputError(Exception):
    """Bad input from the user: a file, a flag, a key, a port in use, an engine not installed.

    The message is one line that names the place (file, line, field) and what was expected. The
    command line prints it after ``error: `` and exits with 2; no traceback is shown.
    """
