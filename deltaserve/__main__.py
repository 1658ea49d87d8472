"""``python -m deltaserve``: the console script, without the working folder on the module path.

``python -m`` puts it first there, where a user's own ``eval/`` or ``launch/`` would hide ours.
"""

import os
import sys
from pathlib import Path

_OURS = Path(__file__).resolve().parents[1]
if not sys.flags.safe_path and sys.path and Path(sys.path[0] or os.curdir).resolve() != _OURS:
    del sys.path[0]

from deltaserve.cli import main  # noqa: E402

main()
