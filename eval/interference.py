"""What prefills do to the decodes beside them: pace beside a prefill over the pace expected there.

Owns the interference index. Requests that decode while a long prefill runs do so in busy phases, in
larger batches: comparing them with the others would find interference where there is none. So each
request is compared with itself, and each moment with moments of the same batch on the same worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from eval.records import Run
from eval.spans import merged
from eval.stats import UNKNOWN, Array, Estimate, SessionBootstrap

INTERFERING_PREFILL_TOKENS = 2_048
# A request with fewer tokens apart from prefills says too little about its own pace: left out.
_LEAST_OWN_TOKENS = 8.0


@dataclass(frozen=True)
class Interference:
    """Seconds a token beside a long prefill, over those expected at the same batch without one.

    `index` is 1 where prefills change nothing. `beside_n` requests decoded beside one for a while,
    `apart_n` never did. The two paces are in seconds a token.
    """

    index: Estimate
    beside_n: int
    apart_n: int
    beside_tpot_s: float
    expected_tpot_s: float


NONE_KNOWN = Interference(UNKNOWN, 0, 0, float("nan"), float("nan"))


@dataclass(frozen=True)
class _Part:
    """Decoding requests of one worker in one run: seconds and tokens of each by batch, apart from
    long prefills and beside one (requests × batch classes)."""

    conversations: list[str]
    seconds_apart: Array
    tokens_apart: Array
    seconds_beside: Array
    tokens_beside: Array


def interference(boot: SessionBootstrap, runs: Sequence[Run]) -> Interference:
    """The index over all runs: tokens expected in the time beside long prefills (2,048 or more new
    tokens, times the length scale) over the tokens that came.

    A prefill is in hand on a worker from the moment the router sent it there, or the client did
    where there is no decision log, until its first token as the client saw it: its wait in the
    worker's queue is included, its wait in the router is not. What is expected is the
    pace of that worker at the same batch while no long prefill was in hand, times how much faster
    or slower than that the request itself was at such times. An arrival's tokens are spread evenly
    over the time since the one before.
    """
    parts = [part for run in runs for part in _parts(run)]
    conversations: list[str] = []
    expected: list[float] = []
    came: list[float] = []
    seconds = 0.0
    beside_n = apart_n = 0
    for part in parts:
        with np.errstate(divide="ignore", invalid="ignore"):
            rate = part.tokens_apart.sum(axis=0) / part.seconds_apart.sum(axis=0)
        comparable = np.isfinite(rate) & (rate > 0)
        rate = np.where(comparable, rate, 0.0)
        expected_apart = part.seconds_apart @ rate
        enough = expected_apart >= _LEAST_OWN_TOKENS
        own = np.zeros(len(expected_apart))
        own[enough] = part.tokens_apart.sum(axis=1)[enough] / expected_apart[enough]
        expected_beside = (part.seconds_beside @ rate) * own
        came_beside = part.tokens_beside[:, comparable].sum(axis=1)
        beside = part.seconds_beside.sum(axis=1) > 0
        beside_n += int(beside.sum())
        apart_n += int((~beside).sum())
        counted = (expected_beside > 0) & enough
        conversations += [
            name for name, yes in zip(part.conversations, counted, strict=True) if yes
        ]
        expected += expected_beside[counted].tolist()
        came += came_beside[counted].tolist()
        seconds += float(part.seconds_beside[counted][:, comparable].sum())
    if not came or sum(came) <= 0:
        return Interference(UNKNOWN, beside_n, apart_n, float("nan"), float("nan"))
    return Interference(
        index=boot.ratio(conversations, np.array(expected), np.array(came)),
        beside_n=beside_n,
        apart_n=apart_n,
        beside_tpot_s=seconds / sum(came),
        expected_tpot_s=seconds / sum(expected),
    )


def long_prefills(run: Run) -> dict[str, Array]:
    """When long prefills were in hand, by worker: rows of (begin, end) in seconds, merged."""
    table = run.all_requests
    least = INTERFERING_PREFILL_TOKENS * run.length_scale
    heavy = table[
        (table["new_tokens"] >= least)
        & table["prefill_worker"].notna()
        & table["sent_s"].notna()
        & table["first_token_s"].notna()
    ]
    begin_s = heavy["first_token_s"] - heavy["decided_to_first_token_s"]
    heavy = heavy.assign(begin_s=np.fmax(begin_s, heavy["sent_s"]))
    found = {}
    for worker, rows in heavy.groupby("prefill_worker"):
        spans = rows[["begin_s", "first_token_s"]].to_numpy(dtype=float)
        found[str(worker)] = merged(spans[np.argsort(spans[:, 0])])
    return found


def _parts(run: Run) -> list[_Part]:
    table = run.all_requests
    decoding = table[
        table["ok"]
        & table["decode_worker"].notna()
        & (table["last_token_s"] > table["first_token_s"])
    ]
    prefills = long_prefills(run)
    measured = table["phase"].eq("measure")
    parts = []
    for worker, rows in decoding.groupby("decode_worker"):
        spans = prefills.get(str(worker))
        if spans is None:
            continue
        parts.append(_part(run, rows, spans, measured))
    return parts


def _part(run: Run, rows: pd.DataFrame, prefills: Array, measured: pd.Series[bool]) -> _Part:
    begin = rows["first_token_s"].to_numpy(dtype=float)
    end = rows["last_token_s"].to_numpy(dtype=float)
    edges = np.unique(np.concatenate((begin, end, prefills.ravel())))
    middles = (edges[:-1] + edges[1:]) / 2
    batch = np.searchsorted(np.sort(begin), middles) - np.searchsorted(np.sort(end), middles)
    classes, classes_n = _batch_classes(batch)
    place = np.searchsorted(prefills[:, 0], middles, side="right") - 1
    beside = (place >= 0) & (middles < prefills[np.maximum(place, 0), 1])
    shape = (len(rows), classes_n)
    sums = {name: np.zeros(shape) for name in ("sa", "ta", "sb", "tb")}
    firsts, lasts = np.searchsorted(edges, begin), np.searchsorted(edges, end)
    for i, row in enumerate(rows["row"].to_numpy(dtype=np.int64)):
        seconds, tokens = run.arrivals.of(int(row))
        part = slice(firsts[i], lasts[i])
        points = edges[firsts[i] : lasts[i] + 1]
        came = np.diff(np.interp(points, seconds, tokens))
        passed = np.diff(points)
        for flag, at, of in ((~beside[part], "sa", "ta"), (beside[part], "sb", "tb")):
            kinds = classes[part][flag]
            sums[at][i] = np.bincount(kinds, weights=passed[flag], minlength=classes_n)
            sums[of][i] = np.bincount(kinds, weights=came[flag], minlength=classes_n)
    keep = measured.loc[rows.index].to_numpy(dtype=bool)
    names = list(rows["conversation"][keep])
    return _Part(names, *(sums[name][keep] for name in ("sa", "ta", "sb", "tb")))


def _batch_classes(batch: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], int]:
    """Batches up to 16 by themselves, larger ones with those within a tenth."""
    large = 16 + np.floor(np.log(np.maximum(batch, 16) / 16) / np.log(1.1)).astype(np.int64)
    classes = np.where(batch <= 16, batch, large)
    return classes, int(classes.max(initial=0)) + 1
