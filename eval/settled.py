"""Whether a measured window began when the start of the load was over.

Owns three signs that it did not: a turn waited longer than the load had warmed up, prefixes were
not there because their priming failed, or more (or fewer) sessions waited in the first third of the
window than in the rest. Knows one run with a window; not arms or verdicts. Whether what came also
went out is `eval.steady`'s.
"""

from __future__ import annotations

import numpy as np
from scipy import special

from eval.outcomes import Outcome
from eval.stats import Array

MOST_PRIMINGS_FAILED = 0.05
BLOCKS = 15
"""Of equal length in a window; the first third is five of them."""
_LEAST_TURNS = 30
# As large a difference is no accident, and it moves what sessions feel: two sessions more or fewer
# wait, and half of those that wait in the rest.
_P_VALUE = 0.01
_LEAST_SESSIONS = 2.0
_LEAST_SHARE = 0.5


def unsettled(outcome: Outcome) -> list[str]:
    """The signs that a run's window shows the load's start, a sentence a sign; none of a run
    without a window."""
    run = outcome.run
    if run.window is None:
        return []
    found = []
    turns = run.all_requests[run.all_requests["phase"].ne("prime")]
    warm_up_s = run.window.start_s - float(turns["scheduled_s"].min())
    longest_s = outcome.measures["longest_wait_s"]
    if longest_s > max(0.0, warm_up_s):
        found.append(f"a turn waited {longest_s:.0f} s, the warm-up lasted {warm_up_s:.0f} s")
    primings = run.all_requests[run.all_requests["phase"].eq("prime")]
    failed = int((~primings["ok"]).sum())
    if failed > MOST_PRIMINGS_FAILED * len(primings):
        found.append(f"{failed} of {len(primings)} primings failed")
    if len(outcome.turns) >= _LEAST_TURNS:
        waiting = waiting_by_block(
            outcome.turns["due_s"].to_numpy(dtype=float),
            outcome.turns["until_s"].to_numpy(dtype=float),
            run.window.start_s,
            run.window.end_s,
        )
        if first_third_differs(waiting[None, :])[0]:
            third = BLOCKS // 3
            found.append(
                f"{waiting[:third].mean():.3g} turns waited at a time in the window's first third, "
                f"{waiting[third:].mean():.3g} after it"
            )
    return found


def waiting_by_block(due_s: Array, until_s: Array, start_s: float, end_s: float) -> Array:
    """How many turns waited at a time, on average over each block of the window; times in s."""
    edges = np.linspace(start_s, end_s, BLOCKS + 1)
    begin = np.maximum(due_s[:, None], edges[:-1])
    waited_s = np.clip(np.minimum(until_s[:, None], edges[1:]) - begin, 0, None).sum(axis=0)
    means: Array = waited_s / (edges[1] - edges[0])
    return means


def first_third_differs(waiting: Array) -> Array:
    """Which windows (rows of `waiting`, a column a block) begin otherwise than they go on.

    Student's t of the first third's mean against the others', with the spread of the rest alone:
    what is over after the first third must not count as noise.
    """
    third = BLOCKS // 3
    first, rest = waiting[:, :third].mean(axis=1), waiting[:, third:]
    mean = rest.mean(axis=1)
    error = rest.std(axis=1, ddof=1) * np.sqrt(1 / third + 1 / rest.shape[1])
    apart = np.abs(first - mean)
    # No spread at all: any difference is more than an accident.
    t = np.divide(apart, error, out=np.full_like(apart, np.inf), where=error > 0)
    p_value = 2 * special.stdtr(rest.shape[1] - 1, -t)
    differs: Array = (
        (p_value < _P_VALUE) & (apart >= _LEAST_SESSIONS) & (apart > _LEAST_SHARE * mean)
    )
    return differs
