"""Hides secrets in what is written and shown: values whose key says that they are one.

A topology may set ``environment.HF_TOKEN`` or the flag ``--api-key``. The engine gets them; files,
transcripts and tables get `HIDDEN` in their place.
"""

from __future__ import annotations

import re
from typing import Any

HIDDEN = "***"

# The last word of the name decides: HF_TOKEN and --api-key are secrets, max_total_tokens is not.
_SECRET = re.compile(
    r"secret|passw(or)?d|credential|(^|[^a-z])(api_?keys?|token|key|auth|authorization|pat)$", re.I
)
_ASSIGNED = re.compile(r"""([\w.-]+)("?\s*[=:]\s*)("[^"]*"|'[^']*'|[^\s,}'"]+)""")
# A scheme before the secret, as in "Authorization: Bearer abc".
_SCHEME = re.compile(
    r"((?:authorization|auth)\"?\s*[=:]\s*[\"']?(?:bearer|basic|token)\s+)[^\s,}'\"]+", re.I
)
_URL = re.compile(r"(\w://)[^\s/@:'\"]*:[^\s/@'\"]+@")
_VALUE = r"""(?:"(?!-)[^"]*"|'(?!-)[^']*')"""
# Several values too: vLLM's --api-key takes as many keys as follow it.
_LISTED = re.compile(rf"""(--?[\w-]+)(["']\s*,\s*)({_VALUE}(?:\s*,\s*{_VALUE})*)""")


def is_secret(key: str) -> bool:
    """Whether a variable, key or flag of this name holds a secret."""
    return bool(_SECRET.search(key.replace("-", "_").rpartition(".")[2]))


def redacted(value: Any) -> Any:
    """`value` (what JSON can hold) with the values of secret keys hidden, at any depth, and those
    of secret flags and assignments (``--api-key X``, ``--set environment.HF_TOKEN=X``,
    ``--set 'flags=["--api-key", "X"]'``) in lists of arguments."""
    if isinstance(value, dict):
        return {
            key: HIDDEN
            if is_secret(str(key)) and isinstance(item, str | list | tuple)
            else redacted(item)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        hidden = []
        after_secret_flag = False
        for item in value:
            is_flag = isinstance(item, str) and item.startswith("-")
            hidden.append(HIDDEN if after_secret_flag and not is_flag else redacted(item))
            if is_flag:
                after_secret_flag = "=" not in item and is_secret(item)
        return hidden
    if not isinstance(value, str):
        return value
    value = _URL.sub(rf"\1{HIDDEN}@", _SCHEME.sub(rf"\1{HIDDEN}", value))
    return _LISTED.sub(_hide, _ASSIGNED.sub(_hide, value))


def _hide(found: re.Match[str]) -> str:
    key, sign, _ = found.groups()
    return f"{key}{sign}{HIDDEN}" if is_secret(key) else found.group()
