"""The command of a child process that is this project again, with the same Python.

``-P`` keeps the working folder off its module path: a user's own ``eval/`` or ``launch/`` there
would be imported in place of ours.
"""

from __future__ import annotations

import sys

PYTHON = (sys.executable, "-P")

DELTASERVE = (*PYTHON, "-m", "deltaserve")
"""The console script ``deltaserve``; arguments follow."""
