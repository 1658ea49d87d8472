"""The environment variables of paced prefill, read once and checked.

Knows nothing of SGLang.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from sglang_ext.guards import PluginMismatch


class Interference(StrEnum):
    """What a prefill may do to the requests that are decoding."""

    STOCK = "stock"
    """SGLang's own schedule: the chunks of a prompt run back to back, decodes wait."""
    MIXED = "mixed"
    """Every chunk carries the decodes along; its size is fixed."""
    ITL = "itl"
    """Every chunk carries the decodes along and is sized to keep their inter-token latency."""


@dataclass(frozen=True)
class PacingSettings:
    """How prefill is paced; `pacing_from_environment` says which variable sets what."""

    interference: Interference = Interference.ITL
    target_itl_s: float = 0.08
    chunk_tokens: int | None = None
    min_chunk_tokens: int = 128


def number(environment: Mapping[str, str], name: str, lowest: float) -> float | None:
    """The number in the variable `name`, None where it is unset or empty.

    Raises `PluginMismatch` for what is no number of at least `lowest`.
    """
    text = environment.get(name, "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= lowest):
        raise PluginMismatch(f"{name}={text!r}: expected a number of at least {lowest:g}")
    return value


def count(environment: Mapping[str, str], name: str) -> int | None:
    """The positive whole number in the variable `name`, None where it is unset or empty."""
    value = number(environment, name, 1)
    if value is None:
        return None
    if value != int(value):
        raise PluginMismatch(f"{name}={environment[name]!r}: expected a whole number")
    return int(value)


def pacing_from_environment(environment: Mapping[str, str], prefix: str) -> PacingSettings:
    """The settings in the variables that begin with `prefix`.

    ==================  =========================================================================
    ``INTERFERENCE``    ``itl`` (default), ``mixed`` or ``stock``
    ``TARGET_ITL_MS``   longest step that carries decodes (default 80)
    ``CHUNK_TOKENS``    chunk of ``mixed``, largest chunk of ``itl`` (default: the server's
                        ``--chunked-prefill-size``)
    ``MIN_CHUNK_TOKENS``  smallest chunk of ``itl`` (default 128): a prompt advances by this much
                        even where the target is lost
    ==================  =========================================================================

    Raises `PluginMismatch` for a value that cannot be meant.
    """
    given = environment.get(f"{prefix}INTERFERENCE", "").strip() or Interference.ITL
    try:
        interference = Interference(given)
    except ValueError as error:
        raise PluginMismatch(
            f"{prefix}INTERFERENCE={given!r}: expected one of {', '.join(Interference)}"
        ) from error
    target_ms = number(environment, f"{prefix}TARGET_ITL_MS", 1)
    smallest = count(environment, f"{prefix}MIN_CHUNK_TOKENS")
    default = PacingSettings()
    return PacingSettings(
        interference=interference,
        target_itl_s=default.target_itl_s if target_ms is None else target_ms / 1000,
        chunk_tokens=count(environment, f"{prefix}CHUNK_TOKENS"),
        min_chunk_tokens=default.min_chunk_tokens if smallest is None else smallest,
    )
