"""Writes keys and values as TOML: what launch writes for our router."""

from __future__ import annotations

import json
from typing import Any


def line(key: str, value: Any) -> str:
    """One line, ``key = value``; a table becomes an inline one."""
    return f"{json.dumps(key) if not key.isidentifier() else key} = {_value(value)}"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        inner = ", ".join(line(key, item) for key, item in value.items())
        return f"{{ {inner} }}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_value(item) for item in value)}]"
    return json.dumps(value)
