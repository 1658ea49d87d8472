"""Finds this project's other top-level packages beside this one, before others of their name.

``eval`` and ``launch`` are names that other people's folders have too: one of those on
``PYTHONPATH`` would be imported in place of ours.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_OURS = ("launch", "router_policies", "sglang_ext", "replay", "eval")
_FOLDER = str(Path(__file__).resolve().parents[1])


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [_FOLDER], target) if name in _OURS else None


def prefer_ours() -> None:
    """From now on this process imports our packages, wherever else there are some of their name."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
