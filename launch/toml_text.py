"""Writes keys and values as TOML: what launch writes for our router."""

from __future__ import annotations

import json
import math
import re
from datetime import date, time
from typing import Any


def line(key: str, value: Any) -> str:
    """One line, ``key = value``; a table becomes an inline one."""
    bare = re.fullmatch(r"[A-Za-z0-9_-]+", key) is not None
    return f"{key if bare else _text(key)} = {_value(value)}"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        inner = ", ".join(line(key, item) for key, item in value.items())
        return f"{{ {inner} }}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_value(item) for item in value)}]"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, date | time):
        return value.isoformat()
    return json.dumps(value)


def _text(value: str) -> str:
    """JSON's strings are TOML's, but for halves of characters and DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
