"""Fits how long an engine's steps take from when tokens arrived at the client, without telemetry.

For engines that record no steps (vLLM). Owns what is read off the lines of a replay; the formulas
and the fit are `eval.calibrate`'s. One worker, streamed answers, one token in an arrival mostly.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
# A turn with more new tokens does not count as returning: computing them is most of its cost.
_MOST_NEW_TOKENS = 1_000
# How long before a turn the pace of those who decode is taken from, and the least steps in it.
_PACE_OF_S = 0.5
_LEAST_PACE_STEPS = 8
# They have to decode on after its first token, so that no end of an answer changes the pace.
_ON_FOR_S = 0.05
# So many returning turns are the least that say what a token that is found takes.
_LEAST_RETURNS = 20

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


def fit_arrivals(
    runs: Sequence[Sequence[Request]], chunk_tokens: int | Sequence[int]
) -> Calibration:
    """Both kinds of step of one kind of worker, whose steps prefill at most `chunk_tokens`: in all
    runs, or run by run. Long prompts in chunks of one size do not tell what a step takes besides
    from what its tokens take; runs with chunks of two sizes do.

    Each time when tokens arrive ends a step. Decodes: the time between two steps in which the same
    answers got a token, while nobody waited for a first one. Prefills: those that followed each
    other while nobody decoded ([alone_prefills]), where there are enough of them, and then what a
    token takes that is found cached ([found_token_s]); else, while a request waits alone for its
    first token, by how much longer than a step of decodes alone those who decode wait for theirs.
    What is left of the time to that token, less half a step until it is seen, is `request_s`: the
    engine's API, or loading from a host tier.
    """
    chunks = [chunk_tokens] * len(runs) if isinstance(chunk_tokens, int) else chunk_tokens
    every = [(run, arrival_steps(run), size) for run, size in zip(runs, chunks, strict=True)]
    decode = fit_rows(
        [row for run, steps, _ in every for row in _decodes(run, steps)], _DECODE_TRIM
    )
    if decode is None:
        return Calibration(None, None)
    beside = [pair for run, steps, size in every for pair in _prefills(run, steps, decode, size)]
    prefill = fit_rows([row for row, _ in beside], _PREFILL_TRIM)
    waited_s = max(0.0, float(np.median([waited_s for _, waited_s in beside]))) if prefill else None
    found_s = None
    alone = fit_alone([row for run, _, size in every for row in alone_prefills(run, size)])
    if alone is not None:
        prefill = alone
        found = [each for run, steps, _ in every for each in returns(run, steps)]
        found_s = found_token_s(found, alone, decode)
    return Calibration(prefill, decode, request_s=waited_s, found_token_s=found_s)


@dataclass(frozen=True)
class Return:
    """A turn that came back while others decoded, and nobody else waited for a first token."""

    prompt_tokens: int
    new_tokens: int
    first_token_s: float
    """From when it was sent."""
    stopped_s: float
    """By how much longer than at their pace before the others' steps took until then, together."""
    longest_s: float
    """The longest of those steps."""


def returns(run: Sequence[Request], steps: Sequence[Step] | None = None) -> Iterator[Return]:
    """The returning turns of a run that had the engine to themselves but for decodes. `steps` are
    its `arrival_steps`, where they are known already."""
    ends_s = [at_s for at_s, _ in (arrival_steps(run) if steps is None else steps)]
    by_sent = sorted(run, key=lambda request: float(request["sent_s"]))
    for at in waited_alone(by_sent):
        request = by_sent[at]
        sent_s, first_s = request["sent_s"], request["first_token_s"]
        new = request["prompt_tokens"] - request["cached_tokens"]
        if new > _MOST_NEW_TOKENS:
            continue
        paced_from_s = sent_s - _PACE_OF_S
        if not any(
            other["first_token_s"] < paced_from_s and other["finished_s"] > first_s + _ON_FOR_S
            for other in by_sent[:at]
        ):
            continue
        begun = bisect_right(ends_s, sent_s)
        before = ends_s[bisect_right(ends_s, paced_from_s) : begun]
        if len(before) <= _LEAST_PACE_STEPS:
            continue
        pace_s = float(np.median(np.diff(before)))
        within_s = ends_s[begun - 1 : bisect_right(ends_s, first_s)]
        steps_s = [end_s - start_s for start_s, end_s in pairwise(within_s)]
        yield Return(
            prompt_tokens=request["prompt_tokens"],
            new_tokens=new,
            first_token_s=first_s - sent_s,
            stopped_s=sum(max(0.0, step_s - pace_s) for step_s in steps_s),
            longest_s=max(steps_s),
        )


def found_token_s(found: Sequence[Return], prefill: Fit, decode: Fit) -> float | None:
    """Of a token that a returning turn finds cached: with it the turns together stop those who
    decode for as long as they did, beside what computing their new tokens takes. None of too few.
    """
    if len(found) < _LEAST_RETURNS:
        return None
    overhead_s, token_s, pair_s = prefill.constants
    # The step that computes them carries decodes, whose base it does not have.
    overhead_s -= decode.constants[0]
    stopped_s, tokens = 0.0, 0
    for turn in found:
        new, cached = turn.new_tokens, turn.prompt_tokens - turn.new_tokens
        stopped_s += turn.stopped_s - overhead_s - new * token_s - new * (cached + new / 2) * pair_s
        tokens += cached
    return max(0.0, stopped_s / tokens) if tokens else None


def fit_alone(rows: Sequence[Row]) -> Fit | None:
    """What prefills take while nobody decodes; none of too few."""
    return fit_rows(list(rows), _PREFILL_TRIM)


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
