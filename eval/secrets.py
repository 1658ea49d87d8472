"""Values that must not be written down: those of keys that name a secret.

Owns which keys do, and taking their values out of manifests, commands and experiment files before
anything is recorded or shown. What is taken out stands as `***`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "***"

# Whole words of a key: `api_key`, `HF_TOKEN`, `x-api-key`, `Authorization`. `max_total_tokens`,
# `tokenizer` and `ttft_s_per_new_token` are none. In capitals, as environment variables are, a
# part of a word is enough.
_WORD = r"(?:api[_-]?key|apikey|key|token|secret|password|passwd|credentials?|authorization)"
_SECRET = re.compile(rf"(?:^|[_.\-])(?<!per_)(?<!new_){_WORD}$|(?:secret|password)", re.IGNORECASE)
_ENVIRONMENT = re.compile(r"^[A-Z0-9_]*(?:TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL)[A-Z0-9_]*$")

# `key=value`, `key: value` and `--key value` inside a longer text; the value in quotes or one word.
_ASSIGNED = re.compile(
    r"(?P<key>[A-Za-z][\w.\-]*)(?P<quote>['\"]?)(?P<sign>\s*[=:]\s*)"
    r"(?P<value>\"(?:[^\"\\]|\\.)*\"|'[^']*'|(?:Bearer|Basic)\s+[^\s'\"]+|[^\s,}\]'\"]+)"
)
_FLAG = re.compile(
    r"(?P<flag>--[\w\-]+)(?P<space>['\"]\s*,\s*|\s+)(?P<value>\"[^\"]*\"|'[^']*'|[^\s\-]\S*)"
    r"(?P<more>(?:\s*,\s*(?:\"(?!-)[^\"]*\"|'(?!-)[^']*'))*)"
)


def is_secret(key: str) -> bool:
    """Whether the value of `key` (the last part of a dotted one counts) is a secret."""
    last = key.strip().lstrip("-").rpartition(".")[2]
    return bool(_SECRET.search(last) or _ENVIRONMENT.match(last))


def without_secrets(value: Any) -> Any:
    """A copy of `value` in which no secret is left: in tables by their keys, in lists also after a
    flag (`["--api-key", "x"]`), in text where it is assigned (`key = "x"`, `key=x`, `--key x`)."""
    if isinstance(value, Mapping):
        return {
            key: HIDDEN
            if is_secret(str(key)) and item not in (None, "", {}, []) and not _counts(item)
            else without_secrets(item)
            for key, item in value.items()
        }
    if isinstance(value, str):
        return text_without_secrets(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return _list(value)
    return value


def text_without_secrets(text: str) -> str:
    """`text` with the values that are assigned to secret keys taken out."""

    def assigned(found: re.Match[str]) -> str:
        if not is_secret(found["key"]):
            return found[0]
        return f"{found['key']}{found['quote']}{found['sign']}{_hidden(found['value'])}"

    def flag(found: re.Match[str]) -> str:
        if not is_secret(found["flag"]):
            return found[0]
        more = re.sub(r"\"[^\"]*\"|'[^']*'", lambda key: _hidden(key[0]), found["more"])
        return f"{found['flag']}{found['space']}{_hidden(found['value'])}{more}"

    return _FLAG.sub(flag, _ASSIGNED.sub(assigned, text))


def _hidden(value: str) -> str:
    """Stars in the quotes that the value had; a reference to the environment (`@NAME`) stays."""
    if value.strip("'\"").startswith("@"):
        return value
    quote = value[0] if value[0] in "'\"" else ""
    return f"{quote}{HIDDEN}{quote}"


def _list(items: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    after_flag = False
    for item in items:
        if isinstance(item, str) and item.startswith("-"):
            after_flag = is_secret(item)  # whatever follows: vLLM's --api-key takes several
        if after_flag and isinstance(item, str) and not item.startswith("-"):
            found.append(_hidden(item) if item else item)
        else:
            found.append(without_secrets(item))
    return found


def _counts(value: Any) -> bool:
    """A number under a key such as `token` counts something; a table has keys of its own."""
    return isinstance(value, bool | float | Mapping)
