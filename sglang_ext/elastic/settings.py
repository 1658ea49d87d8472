"""The environment variables of the elastic worker, read once and checked.

Knows nothing of SGLang.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from sglang_ext.guards import PluginMismatch
from sglang_ext.pacing.settings import PacingSettings, count, number, pacing_from_environment

PREFIX = "DELTASERVE_ELASTIC_"


@dataclass(frozen=True)
class Settings(PacingSettings):
    """How an elastic worker behaves; `from_environment` says which variable sets what."""

    fallback: bool = True
    deadline_s: float | None = None
    quarantine_s: float = 2.0
    connect_attempts: int = 3


def from_environment(environment: Mapping[str, str]) -> Settings:
    """The settings that `environment` asks for: those of `pacing_from_environment`, and

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

    Raises `PluginMismatch` for a value that cannot be meant.
    """
    pacing = pacing_from_environment(environment, PREFIX)
    fallback = environment.get(f"{PREFIX}FALLBACK", "").strip() or "1"
    if fallback not in ("0", "1"):
        raise PluginMismatch(f"{PREFIX}FALLBACK={fallback!r}: expected 0 or 1")
    quarantine_s = number(environment, f"{PREFIX}QUARANTINE_S", 0)
    attempts = count(environment, f"{PREFIX}CONNECT_ATTEMPTS")
    default = Settings()
    return Settings(
        **dataclasses.asdict(pacing),
        fallback=fallback == "1",
        deadline_s=number(environment, f"{PREFIX}DEADLINE_S", 0),
        quarantine_s=default.quarantine_s if quarantine_s is None else quarantine_s,
        connect_attempts=default.connect_attempts if attempts is None else attempts,
    )
