"""The environment variables of the elastic worker, read once and checked.

Knows nothing of SGLang.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from sglang_ext.guards import PluginMismatch


class Interference(StrEnum):
    """What a local prefill may do to the requests that are decoding."""

    STOCK = "stock"
    """SGLang's own schedule: the chunks of a prompt run back to back, decodes wait."""
    MIXED = "mixed"
    """Every chunk carries the decodes along; its size is fixed."""
    ITL = "itl"
    """Every chunk carries the decodes along and is sized to keep their inter-token latency."""


@dataclass(frozen=True)
class Settings:
    """How an elastic worker behaves; `from_environment` says which variable sets what."""

    interference: Interference = Interference.ITL
    target_itl_s: float = 0.08
    chunk_tokens: int | None = None
    min_chunk_tokens: int = 128
    fallback: bool = True
    deadline_s: float | None = None
    quarantine_s: float = 2.0
    connect_attempts: int = 3


def _number(environment: Mapping[str, str], name: str, lowest: float) -> float | None:
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


def _count(environment: Mapping[str, str], name: str) -> int | None:
    value = _number(environment, name, 1)
    if value is None:
        return None
    if value != int(value):
        raise PluginMismatch(f"{name}={environment[name]!r}: expected a whole number")
    return int(value)


def from_environment(environment: Mapping[str, str]) -> Settings:
    """The settings that `environment` asks for.

    ========================================  =====================================================
    ``DELTASERVE_ELASTIC_INTERFERENCE``       ``itl`` (default), ``mixed`` or ``stock``
    ``DELTASERVE_ELASTIC_TARGET_ITL_MS``      longest step that carries decodes (default 80)
    ``DELTASERVE_ELASTIC_CHUNK_TOKENS``       chunk of ``mixed``, largest chunk of ``itl``
                                              (default: the server's ``--chunked-prefill-size``)
    ``DELTASERVE_ELASTIC_MIN_CHUNK_TOKENS``   smallest chunk of ``itl`` (default 128): a prompt
                                              advances by this much even where the target is lost
    ``DELTASERVE_ELASTIC_FALLBACK``           ``1`` (default) or ``0``: prefill locally what a
                                              transfer failed to bring
    ``DELTASERVE_ELASTIC_DEADLINE_S``         do not fall back when the first token would come later
                                              than this after arrival (default: no deadline)
    ``DELTASERVE_ELASTIC_QUARANTINE_S``       how long KV pages of a failed transfer stay unused,
                                              for a late write of the prefill worker (default 2)
    ``DELTASERVE_ELASTIC_CONNECT_ATTEMPTS``   how often to look for a prefill worker that does not
                                              answer, a second apart (default 3; SGLang: 15)
    ========================================  =====================================================

    Raises `PluginMismatch` for a value that cannot be meant.
    """
    given = environment.get("DELTASERVE_ELASTIC_INTERFERENCE", "").strip() or Interference.ITL
    try:
        interference = Interference(given)
    except ValueError as error:
        raise PluginMismatch(
            f"DELTASERVE_ELASTIC_INTERFERENCE={given!r}: expected one of {', '.join(Interference)}"
        ) from error

    fallback = environment.get("DELTASERVE_ELASTIC_FALLBACK", "").strip() or "1"
    if fallback not in ("0", "1"):
        raise PluginMismatch(f"DELTASERVE_ELASTIC_FALLBACK={fallback!r}: expected 0 or 1")

    target_ms = _number(environment, "DELTASERVE_ELASTIC_TARGET_ITL_MS", 1)
    smallest = _count(environment, "DELTASERVE_ELASTIC_MIN_CHUNK_TOKENS")
    quarantine_s = _number(environment, "DELTASERVE_ELASTIC_QUARANTINE_S", 0)
    attempts = _count(environment, "DELTASERVE_ELASTIC_CONNECT_ATTEMPTS")
    default = Settings()
    return Settings(
        interference=interference,
        target_itl_s=default.target_itl_s if target_ms is None else target_ms / 1000,
        chunk_tokens=_count(environment, "DELTASERVE_ELASTIC_CHUNK_TOKENS"),
        min_chunk_tokens=default.min_chunk_tokens if smallest is None else smallest,
        fallback=fallback == "1",
        deadline_s=_number(environment, "DELTASERVE_ELASTIC_DEADLINE_S", 0),
        quarantine_s=default.quarantine_s if quarantine_s is None else quarantine_s,
        connect_attempts=default.connect_attempts if attempts is None else attempts,
    )
