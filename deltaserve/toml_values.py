"""What TOML texts hold: tables of a file, and the value of an override (``--set key=value``)."""

from __future__ import annotations

import tomllib
from typing import Any

from deltaserve.errors import InputError

_LEAST, _MOST = -(2**63), 2**63 - 1


def tables(text: str, where: str) -> dict[str, Any]:
    """The content of a file, which `where` names in errors.

    Raises `InputError` for what is no TOML, integers of more than 64 bits among it, which Python's
    reader takes and nothing that is written later can hold.
    """
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{where}: not TOML: {error}") from None
    _check(found, where)
    return found


def value(text: str, where: str) -> Any:
    """`text` as a TOML value where it is one, else as a string. Raises `InputError` as `tables`."""
    try:
        found = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    _check(found, where)
    return found


def _check(found: Any, where: str) -> None:
    inside = found.values() if isinstance(found, dict) else found
    if isinstance(found, dict | list):
        for each in inside:
            _check(each, where)
    elif isinstance(found, int) and not _LEAST <= found <= _MOST:
        raise InputError(f"{where}: {found} has more than 64 bits")
