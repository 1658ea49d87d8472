"""What a request takes alone on an idle worker: measured at one session in flight, or predicted.

Owns that reference, and says where it comes from. Stretch (`eval.outcomes`) is a session's time
over it. Knows tables of requests; not sessions or verdicts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from eval.records import Run
from eval.stats import Array, quantile_points

_LEAST_IN_BIN = 10
_MOST_BINS = 12
_FASTEST = 0.1


@dataclass(frozen=True)
class Curve:
    """Seconds by tokens: linear between the points, flat beyond them."""

    tokens: Array
    seconds: Array

    def at(self, tokens: pd.Series[float]) -> pd.Series[float]:
        """Seconds for each number of tokens; NaN where that is unknown or the curve is empty."""
        if not len(self.tokens):
            return pd.Series(np.nan, index=tokens.index)
        at: pd.Series[float] = pd.Series(
            np.interp(tokens, self.tokens, self.seconds), index=tokens.index, dtype=float
        )
        return at.where(tokens.notna())


@dataclass(frozen=True)
class Alone:
    """How long requests take alone. `source` says from what that is known.

    `first_token` is by the prompt's tokens that were computed, `token` (seconds a token after the
    first arrival) by all of the prompt's. `measured_s` has the whole time of requests that were
    themselves measured at one session in flight.
    """

    source: str
    first_token: Curve
    token: Curve
    measured_s: Mapping[str, float] = field(default_factory=dict)

    def service_s(self, requests: pd.DataFrame) -> pd.Series[float]:
        """Seconds from sending to the answer's end, of each request alone on an idle worker that
        holds everything of its prompt that any request before it had (what a session alone finds).
        """
        prompt = requests["prompt_tokens"]
        new = (prompt - requests["best_cached_tokens"]).fillna(requests["new_tokens"])
        first_chunk = requests["first_chunk_tokens"].fillna(1.0)
        later = (requests["output_length"] - first_chunk).clip(lower=0)
        predicted = self.first_token.at(new.clip(lower=0)) + self.token.at(prompt) * later
        measured = requests["request_id"].map(self.measured_s).astype(float)
        return measured.fillna(predicted)


def one_at_a_time(run: Run) -> bool:
    """Whether a run had one session in flight, as its replay's arguments say."""
    arguments = (run.manifest.get("replay") or {}).get("arguments")
    if not isinstance(arguments, dict):
        return False
    return arguments.get("mode") == "closed" and arguments.get("max_inflight_sessions") == 1


def alone_from(runs: Sequence[Run]) -> Alone | None:
    """The reference from one arm's runs under all loads; None where none of them tells.

    From the runs at one session in flight where there are any. Else from the fastest tenth of
    requests of like size under any load: those were disturbed least, but a little, so stretch is
    then understated.
    """
    single = [run for run in runs if one_at_a_time(run)]
    tables = [run.all_requests[run.all_requests["ok"]] for run in single or runs]
    if not tables or not (table := pd.concat(tables, ignore_index=True)).size:
        return None
    quantile = 0.5 if single else _FASTEST
    first_token = _curve(table["new_tokens"], table["first_token_s"] - table["sent_s"], quantile)
    if not len(first_token.tokens):
        return None
    measured_s: dict[str, float] = {}
    if single:
        took_s = table["finished_s"] - table["sent_s"]
        medians = took_s.groupby(table["request_id"]).median()
        measured_s = {str(name): float(value) for name, value in medians.items()}
    return Alone(
        source=(
            f"measured at one session in flight ({len(table)} requests)"
            if single
            else f"predicted from the fastest tenth of {len(table)} requests of like size"
        ),
        first_token=first_token,
        token=_curve(table["prompt_tokens"], table["tpot_s"], quantile),
        measured_s=measured_s,
    )


def _curve(tokens: pd.Series[float], seconds: pd.Series[float], quantile: float) -> Curve:
    """The quantile of seconds in bins of equally many requests by tokens; never falling."""
    known = tokens.notna() & np.isfinite(seconds.astype(float))
    x, y = tokens[known].to_numpy(dtype=float), seconds[known].to_numpy(dtype=float)
    order = np.argsort(x, kind="stable")
    bins = min(_MOST_BINS, len(x) // _LEAST_IN_BIN) or min(1, len(x))
    parts = [part for part in np.array_split(order, bins) if len(part)] if bins else []
    middles = np.array([np.median(x[part]) for part in parts])
    values = np.array([quantile_points(np.asarray(y[part]), [quantile])[0] for part in parts])
    return Curve(middles, np.maximum.accumulate(values) if len(values) else values)
