"""Fits how long an engine's steps take from when tokens arrived at the client, without telemetry.

For engines that record no steps (vLLM). Owns what is read off the lines of a replay; the formulas
and the fit are `eval.calibrate`'s. One worker, streamed answers, one token in an arrival mostly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from deltaserve.errors import InputError
from eval.calibrate import Calibration, Fit, Row, fit_rows, read_lines

# Tokens of one step reach the client within this time of each other.
_TOGETHER_S = 0.003
# A longer one between the same answers is not a step of decodes alone.
_LONGEST_DECODE_S = 0.08
# Requests differ by where in a step they came, and by what a host tier loads for them.
_PREFILL_TRIM = 0.4
_DECODE_TRIM = 0.3

Request = dict[str, Any]


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

    Decodes: the time between two steps in which the same answers got a token, while nobody waited
    for a first one. Prefills: a request's time to its first token, where no other waited for one at
    the same time, less what the decodes beside it take: half a step on average until it is seen,
    and theirs in each of its chunks. So what the engine does for a request besides (its API,
    loading from a host tier) counts as overhead of its chunks.
    """
    decode = fit_rows([row for run in runs for row in _decodes(run)], _DECODE_TRIM)
    if decode is None:
        return Calibration(None, None)
    prefills = [row for run in runs for row in _prefills(run, decode, chunk_tokens)]
    return Calibration(fit_rows(prefills, _PREFILL_TRIM), decode)


def _decodes(run: Sequence[Request]) -> Iterator[Row]:
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
    waits = sorted((request["sent_s"], request["first_token_s"]) for request in run)
    begun, waiting_until_s = 0, float("-inf")
    for (before_s, before), (at_s, now) in pairwise(steps):
        while begun < len(waits) and waits[begun][0] < at_s:
            waiting_until_s = max(waiting_until_s, waits[begun][1])
            begun += 1
        if before.keys() != now.keys() or waiting_until_s > before_s:
            continue
        if at_s - before_s < _LONGEST_DECODE_S:
            context = sum(run[number]["prompt_tokens"] + tokens for number, tokens in now.items())
            yield 1.0, float(len(now)), float(context), at_s - before_s


def _prefills(run: Sequence[Request], decode: Fit, chunk_tokens: int) -> Iterator[Row]:
    base_s, request_s, context_token_s = decode.constants
    by_sent = sorted(run, key=lambda request: float(request["sent_s"]))
    until_s = float("-inf")
    for at, request in enumerate(by_sent):
        sent_s, first_s = request["sent_s"], request["first_token_s"]
        alone = until_s < sent_s
        until_s = max(until_s, first_s)
        if not alone or (at + 1 < len(by_sent) and by_sent[at + 1]["sent_s"] < first_s):
            continue
        running = [
            other["prompt_tokens"] + other["output_tokens"] / 2
            for other in by_sent[:at]
            if other["finished_s"] > first_s
        ]
        cached = request["cached_tokens"]
        new = float(request["prompt_tokens"] - cached)
        chunks = max(1.0, -(-new // chunk_tokens))
        beside_s = request_s * len(running) + context_token_s * sum(running)
        waited_s = (base_s + beside_s) / 2 if running else 0.0
        yield chunks, new, new * (cached + new / 2), first_s - sent_s - waited_s - chunks * beside_s
