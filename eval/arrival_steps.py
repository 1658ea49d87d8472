"""Fits how long an engine's steps take from when tokens arrived at the client, without telemetry.

For engines that record no steps (vLLM). Owns what is read off the lines of a replay; the formulas
and the fit are `eval.calibrate`'s. One worker, streamed answers, one token in an arrival mostly.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from deltaserve.errors import InputError
from eval.calibrate import Calibration, Fit, Row, fit_rows, read_lines

# Tokens of one step reach the client within this time of each other.
_TOGETHER_S = 0.003
# A longer one between the same answers is not a step of decodes alone.
_LONGEST_DECODE_S = 0.08
# What is loaded from a host tier, and client's delays, make steps differ.
_PREFILL_TRIM = 0.4
_DECODE_TRIM = 0.3
# A prefill step's overhead is less than this.
_LONGEST_OVERHEAD_S = 0.5
# So many prefills beside which nobody decodes are the least that say what their steps take.
_LEAST_ALONE = 5

Request = dict[str, Any]
Step = tuple[float, dict[int, int]]


def read_requests(paths: Sequence[Path]) -> list[list[Request]]:
    """Answered requests, a list a run: of files (`*.jsonl`, `*.jsonl.zst`) and of runs' folders
    (their `requests.jsonl`). Raises InputError where a path is neither, or has no arrivals."""
    runs = []
    for path in paths:
        file = path / "requests.jsonl" if path.is_dir() else path
        found = [line for line in read_lines(file) if line.get("arrivals") and not line["error"]]
        known = [line for line in found if line.get("cached_tokens") is not None]
        if not known:
            raise InputError(f"{file}: no answers with arrivals and cached tokens")
        runs.append(known)
    return runs


def fit_arrivals(runs: Sequence[Sequence[Request]], chunk_tokens: int) -> Calibration:
    """Both kinds of step of one kind of worker, whose steps prefill at most `chunk_tokens`.

    Each time when tokens arrive ends a step. Decodes: the time between two steps in which the same
    answers got a token, while nobody waited for a first one. Prefills: while a request waits alone
    for its first token, by how much longer than a step of decodes alone those who decode wait for
    theirs. What is left of its time to the first token, less half a step until it is seen, is
    `request_s`: the engine's API, or loading from a host tier. Prefills while nobody decodes have
    an overhead of their own where there are enough of them ([alone_prefills]).
    """
    all_steps = [arrival_steps(run) for run in runs]
    both = list(zip(runs, all_steps, strict=True))
    decode = fit_rows([row for run, steps in both for row in _decodes(run, steps)], _DECODE_TRIM)
    if decode is None:
        return Calibration(None, None)
    found = [pair for run, steps in both for pair in _prefills(run, steps, decode, chunk_tokens)]
    prefill = fit_rows([row for row, _ in found], _PREFILL_TRIM)
    waited_s = max(0.0, float(np.median([waited_s for _, waited_s in found]))) if prefill else None
    alone = [row for run in runs for row in alone_prefills(run, chunk_tokens)]
    alone_s = alone_overhead_s(alone, prefill) if prefill else None
    return Calibration(prefill, decode, request_s=waited_s, alone_overhead_s=alone_s)


def alone_prefills(run: Sequence[Request], chunk_tokens: int) -> Iterator[Row]:
    """The terms of prefills that followed each other while nobody decoded, and what they took: the
    time between two first tokens, where the second request was sent before the first of them and no
    other answer was under way. The budget that the last chunk of one leaves is the next one's.

    Requests without an answer are not seen: what is computed of them makes a prefill look longer.
    """
    by_first = sorted(run, key=lambda request: float(request["first_token_s"]))
    until_s = float("-inf")
    left = 0.0
    for before, request in pairwise(by_first):
        until_s = max(until_s, before["arrivals"][-1][0])
        new = float(request["prompt_tokens"] - request["cached_tokens"])
        begun_s = before["first_token_s"]
        if until_s > begun_s + _TOGETHER_S or request["sent_s"] > begun_s:
            left = 0.0
            continue
        if not left:
            left = -float(before["prompt_tokens"] - before["cached_tokens"]) % chunk_tokens
        chunks = max(0.0, -(-(new - left) // chunk_tokens))
        left += chunks * chunk_tokens - new
        if chunks:
            pairs = new * (request["cached_tokens"] + new / 2)
            yield chunks, new, pairs, request["first_token_s"] - begun_s


def alone_overhead_s(rows: Sequence[Row], prefill: Fit) -> float | None:
    """Of steps that prefill while nobody decodes: with it all `rows` together take as long as they
    did, tokens and pairs at the speed of `prefill`. None of too few rows."""
    _, token_s, pair_s = prefill.constants
    besides = [
        (besides_s, chunks)
        for chunks, tokens, pairs, took_s in rows
        for besides_s in [took_s - tokens * token_s - pairs * pair_s]
        # Longer by more than a chunk may be: others were computed in between.
        if besides_s < chunks * _LONGEST_OVERHEAD_S
    ]
    if len(besides) < _LEAST_ALONE:
        return None
    return max(0.0, sum(s for s, _ in besides) / sum(chunks for _, chunks in besides))


def arrival_steps(run: Sequence[Request]) -> list[tuple[float, dict[int, int]]]:
    """When each step's tokens arrived, and of which answers, with the tokens that those have."""
    arrivals = sorted(
        (at_s, number, tokens)
        for number, request in enumerate(run)
        for at_s, tokens in request["arrivals"]
    )
    steps: list[tuple[float, dict[int, int]]] = []
    last_s = float("-inf")
    for at_s, number, tokens in arrivals:
        if at_s - last_s > _TOGETHER_S:
            steps.append((at_s, {}))
        steps[-1][1][number] = tokens
        last_s = at_s
    return steps


def waited_alone(by_sent: Sequence[Request]) -> Iterator[int]:
    """Which of the requests, in the order in which they were sent, waited for their first token
    while no other did."""
    until_s = float("-inf")
    for at, request in enumerate(by_sent):
        alone = until_s < request["sent_s"]
        until_s = max(until_s, request["first_token_s"])
        next_s = by_sent[at + 1]["sent_s"] if at + 1 < len(by_sent) else float("inf")
        if alone and next_s >= request["first_token_s"]:
            yield at


def _decodes(run: Sequence[Request], steps: Sequence[Step]) -> Iterator[Row]:
    waits = sorted((request["sent_s"], request["first_token_s"]) for request in run)
    begun, waiting_until_s = 0, float("-inf")
    for (before_s, before), (at_s, now) in pairwise(steps):
        while begun < len(waits) and waits[begun][0] < at_s:
            waiting_until_s = max(waiting_until_s, waits[begun][1])
            begun += 1
        if before.keys() != now.keys() or waiting_until_s > before_s:
            continue
        if at_s - before_s < _LONGEST_DECODE_S:
            yield 1.0, float(len(now)), _context(run, now), at_s - before_s


def _prefills(
    run: Sequence[Request], steps: Sequence[Step], decode: Fit, chunk_tokens: int
) -> Iterator[tuple[Row, float]]:
    """The terms of a request's chunks and what they took; and how long it waited besides."""
    base_s, request_s, context_token_s = decode.constants
    ends_s = [at_s for at_s, _ in steps]
    by_sent = sorted(run, key=lambda request: float(request["sent_s"]))
    for at in waited_alone(by_sent):
        request = by_sent[at]
        sent_s, first_s = request["sent_s"], request["first_token_s"]
        running = [
            other["prompt_tokens"] + other["output_tokens"] / 2
            for other in by_sent[:at]
            if other["finished_s"] > first_s
        ]
        begun = bisect_right(ends_s, sent_s)
        if not running or begun == 0:
            continue
        decode_s = base_s + request_s * len(running) + context_token_s * sum(running)
        within_s = ends_s[begun - 1 : bisect_right(ends_s, first_s)]
        stalled_s = sum(
            max(0.0, end_s - before_s - decode_s) for before_s, end_s in pairwise(within_s)
        )
        cached = request["cached_tokens"]
        new = float(request["prompt_tokens"] - cached)
        chunks = max(1.0, -(-new // max(1, chunk_tokens - len(running))))
        # A step that prefills has the decodes' time without their base.
        row = (chunks, new, new * (cached + new / 2), stalled_s + chunks * base_s)
        # Half of the step in which it came, on average: until then nobody could see it.
        yield row, first_s - sent_s - stalled_s - (chunks + 0.5) * decode_s


def _context(run: Sequence[Request], tokens: Mapping[int, int]) -> float:
    return float(sum(run[number]["prompt_tokens"] + n for number, n in tokens.items()))
