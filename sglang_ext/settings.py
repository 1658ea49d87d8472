"""The environment variables of paced prefill and of the elastic worker, read once and checked.

One table of names a feature: `paced` reads those that begin with ``DELTASERVE_PACED_``, `elastic`
those that begin with ``DELTASERVE_ELASTIC_``. Knows nothing of SGLang.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from sglang_ext.guards import PluginMismatch

PACED_PREFIX = "DELTASERVE_PACED_"
ELASTIC_PREFIX = "DELTASERVE_ELASTIC_"


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
    """How prefill is paced; `paced` says which variable sets what."""

    interference: Interference = Interference.ITL
    target_itl_s: float = 0.08
    chunk_tokens: int | None = None
    min_chunk_tokens: int = 128


def _number(environment: Mapping[str, str], name: str, lowest: float) -> float | None:
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


def _count(environment: Mapping[str, str], name: str) -> int | None:
    """The positive whole number in the variable `name`, None where it is unset or empty."""
    value = _number(environment, name, 1)
    if value is None:
        return None
    if value != int(value):
        raise PluginMismatch(f"{name}={environment[name]!r}: expected a whole number")
    return int(value)


_PACING = frozenset({"INTERFERENCE", "TARGET_ITL_MS", "CHUNK_TOKENS", "MIN_CHUNK_TOKENS"})
_ELASTIC = _PACING | {"FALLBACK", "DEADLINE_S", "QUARANTINE_S", "CONNECT_ATTEMPTS"}


def _check_names(environment: Mapping[str, str], prefix: str, known: frozenset[str]) -> None:
    """Raises `PluginMismatch` for a variable with `prefix` that nobody reads: it is misspelled."""
    for name in environment:
        if name.startswith(prefix) and name.removeprefix(prefix) not in known:
            raise PluginMismatch(
                f"{name} is no setting; those that begin with {prefix} are "
                f"{', '.join(sorted(known))}"
            )


def _pacing(environment: Mapping[str, str], prefix: str) -> PacingSettings:
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
    target_ms = _number(environment, f"{prefix}TARGET_ITL_MS", 1)
    smallest = _count(environment, f"{prefix}MIN_CHUNK_TOKENS")
    default = PacingSettings()
    return PacingSettings(
        interference=interference,
        target_itl_s=default.target_itl_s if target_ms is None else target_ms / 1000,
        chunk_tokens=_count(environment, f"{prefix}CHUNK_TOKENS"),
        min_chunk_tokens=default.min_chunk_tokens if smallest is None else smallest,
    )


def paced(environment: Mapping[str, str]) -> PacingSettings:
    """The settings of a paced worker; the names are those of `_pacing`.

    Raises `PluginMismatch` for a value that cannot be meant, and for a name that nobody reads.
    """
    _check_names(environment, PACED_PREFIX, _PACING)
    return _pacing(environment, PACED_PREFIX)


@dataclass(frozen=True)
class ElasticSettings(PacingSettings):
    """How an elastic worker behaves; `elastic` says which variable sets what."""

    fallback: bool = True
    deadline_s: float | None = None
    quarantine_s: float = 2.0
    connect_attempts: int = 3


def elastic(environment: Mapping[str, str]) -> ElasticSettings:
    """The settings that `environment` asks for: those of `paced`, and

    ========================================  =====================================================
    ``DELTASERVE_ELASTIC_FALLBACK``           ``1`` (default) or ``0``: prefill locally what a
                                              transfer failed to bring
    ``DELTASERVE_ELASTIC_DEADLINE_S``         do not fall back when the first token would come later
                                              than this after arrival (default: no deadline)
    ``DELTASERVE_ELASTIC_QUARANTINE_S``       how long KV pages of a failed transfer stay unused,
                                              for a late write of the prefill worker (default 2)
    ``DELTASERVE_ELASTIC_CONNECT_ATTEMPTS``   how often to look for a prefill worker that does not
                                              answer, a second apart (default 3; SGLang: 15)
    ========================================  =====================================================

    Raises `PluginMismatch` for a value that cannot be meant, and for a name that nobody reads.
    """
    _check_names(environment, ELASTIC_PREFIX, _ELASTIC)
    pacing = _pacing(environment, ELASTIC_PREFIX)
    fallback = environment.get(f"{ELASTIC_PREFIX}FALLBACK", "").strip() or "1"
    if fallback not in ("0", "1"):
        raise PluginMismatch(f"{ELASTIC_PREFIX}FALLBACK={fallback!r}: expected 0 or 1")
    quarantine_s = _number(environment, f"{ELASTIC_PREFIX}QUARANTINE_S", 0)
    attempts = _count(environment, f"{ELASTIC_PREFIX}CONNECT_ATTEMPTS")
    default = ElasticSettings()
    return ElasticSettings(
        **dataclasses.asdict(pacing),
        fallback=fallback == "1",
        deadline_s=_number(environment, f"{ELASTIC_PREFIX}DEADLINE_S", 0),
        quarantine_s=default.quarantine_s if quarantine_s is None else quarantine_s,
        connect_attempts=default.connect_attempts if attempts is None else attempts,
    )
