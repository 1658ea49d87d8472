"""How far a simulated run goes beyond what its calibration was fitted on.

Owns the quantities that a calibration states its range of (`[fit.decode]`: `most_requests`,
`most_context_tokens`), and how a run is held against them. Decode steps are linear in both, for
ever; nothing was measured beyond the range.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

QUANTITIES = {
    "most_requests": "requests that decode at a time",
    "most_context_tokens": "tokens of context that decode at a time",
}


def most_at_once(requests: pd.DataFrame) -> dict[str, float]:
    """The most requests that decoded at the same time on one worker, and the most tokens of their
    prompts, from rows with `decode_worker`, `first_token_s`, `finished_s` and `prompt_tokens`."""
    known = requests[requests["first_token_s"].notna() & requests["finished_s"].notna()]
    found = dict.fromkeys(QUANTITIES, 0.0)
    for _, own in known.groupby(known["decode_worker"].fillna("fleet")):
        at_s = np.concatenate([own["first_token_s"], own["finished_s"]])
        # What ends at a moment is gone before what begins then.
        order = np.lexsort((np.repeat([1, 0], len(own)), at_s))
        for name, amount in (("most_requests", 1.0), ("most_context_tokens", own["prompt_tokens"])):
            change = np.broadcast_to(np.asarray(amount, dtype=float), len(own))
            running = np.cumsum(np.concatenate([change, -change])[order])
            found[name] = max(found[name], float(running.max(initial=0.0)))
    return found


Beyond = dict[str, tuple[float, float]]
"""By quantity the most of a run, and up to what the calibration was fitted."""


def beyond(requests: pd.DataFrame, ranges: Mapping[str, Any]) -> Beyond:
    """What of a run is more than the calibration's `ranges`; nothing where it states none."""
    most = most_at_once(requests)
    return {
        name: (most[name], float(ranges[name]))
        for name in QUANTITIES
        if name in ranges and most[name] > ranges[name]
    }


def in_words(found: Iterable[Mapping[str, Sequence[float]]]) -> list[str]:
    """What several runs had beyond their calibrations, a sentence a quantity: the most of each."""
    told = []
    for name, what in QUANTITIES.items():
        if of := [run[name] for run in found if name in run]:
            most, fitted = max(of, key=lambda pair: pair[0])
            told.append(f"{most:.0f} {what}, fitted up to {fitted:.0f}")
    return told
