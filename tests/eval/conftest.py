"""Run folders with known content, in the formats that replay, the router and engines write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from eval import provenance
from eval.records import Run, read_run
from replay.results import ErrorInfo, ErrorKind, Result, ResultWriter
from replay.trace import Request, write_trace


@dataclass
class Recipe:
    """How a made run behaves: latencies are lognormal around `ttft_s` and `tpot_s`; a third of the
    answers come in bursts of `burst` tokens."""

    arm: str = "a"
    load: str | None = None
    repeat: int = 1
    sessions: int = 30
    turns: int = 4
    ttft_s: float = 0.5
    tpot_s: float = 0.02
    spread: float = 0.3
    seed: int = 0
    trace_seed: int = 1
    sha256: str = "0" * 64
    cached_share: float = 0.6
    first_cached_tokens: int = 0
    lag_s: float = 0.001
    burst: int = 1
    errors: int = 0
    error_kind: ErrorKind = "server_error"
    error_status: int | None = None
    dropped: int = 0
    workers: tuple[str, ...] = ("w0", "w1")
    manifest: dict[str, Any] = field(default_factory=dict)


def make_results(recipe: Recipe) -> list[Result]:
    """The trace (lengths, sessions, times) depends on `trace_seed`, the latencies on `seed`."""
    trace = np.random.default_rng(recipe.trace_seed)
    rng = np.random.default_rng([recipe.seed, recipe.repeat])
    results = []
    for session in range(recipe.sessions):
        heaviness = trace.normal(0, 0.4)
        start_s = float(trace.uniform(0, 60))
        length = int(trace.integers(200, 2000))
        for turn in range(recipe.turns):
            scheduled_s = start_s + 10.0 * turn
            cached = int(length * recipe.cached_share) if turn else 0
            tokens = int(trace.integers(2, 30))
            ttft_s = recipe.ttft_s * float(np.exp(heaviness + rng.normal(0, recipe.spread)))
            tpot_s = recipe.tpot_s * float(np.exp(rng.normal(0, recipe.spread)))
            first_s = scheduled_s + ttft_s
            arrivals = [(first_s + tpot_s * i, i + 1) for i in range(tokens)]
            if recipe.burst > 1 and (session + turn) % 3 == 0:
                # The engine holds tokens back, and sends several at once.
                arrivals = arrivals[recipe.burst - 1 :: recipe.burst] or arrivals[-1:]
                first_s, tokens = arrivals[0][0], arrivals[-1][1]
            results.append(
                Result(
                    request_id=f"s{session}-{turn}",
                    session_id=f"s{session}",
                    turn=turn,
                    input_length=length,
                    output_length=tokens,
                    scheduled_s=scheduled_s,
                    sent_s=scheduled_s + recipe.lag_s,
                    first_token_s=first_s,
                    finished_s=arrivals[-1][0] + 0.001,
                    arrivals=arrivals,
                    output_tokens=tokens,
                    prompt_tokens=length,
                    cached_tokens=cached,
                    decision_id=f"d-s{session}-{turn}",
                    status=200,
                )
            )
            length += int(trace.integers(50, 400))
    results.sort(key=lambda result: result.scheduled_s or 0.0)
    for worker in range(len(recipe.workers)):
        first = next(r for r in results if int(r.session_id[1:]) % len(recipe.workers) == worker)
        first.cached_tokens = recipe.first_cached_tokens
    for result in results[len(results) - recipe.errors :] if recipe.errors else []:
        result.error = ErrorInfo(kind=recipe.error_kind, message="made to fail")
        result.status = recipe.error_status
        result.first_token_s = None
        result.arrivals = []
        result.output_tokens = 0
    return results[: len(results) - recipe.dropped] if recipe.dropped else results


def write_run(output: Path, recipe: Recipe) -> Path:
    """A complete run folder for `recipe` under `output`."""
    cell = recipe.arm if recipe.load is None else f"{recipe.arm}@{recipe.load}"
    folder = output / cell / f"r{recipe.repeat}"
    folder.mkdir(parents=True)
    whole = make_results(Recipe(**{**vars(recipe), "dropped": 0}))
    results = make_results(recipe)
    writer = ResultWriter(folder / "requests.jsonl")
    for result in results:
        writer.write(result)
    writer.close()
    with (folder / "decisions.jsonl").open("wb") as log:
        for result in results:
            worker = recipe.workers[int(result.session_id[1:]) % len(recipe.workers)]
            log.write(
                orjson.dumps(
                    {
                        "event": "decision",
                        "decision_id": result.decision_id,
                        "ts_unix_s": 1e9 + (result.sent_s or 0.0),
                        "request_id": result.request_id,
                        "session_id": result.session_id,
                        "policy": "unified",
                        "kind": "local",
                        "worker": worker,
                        "reason": "affinity" if result.turn else "lowest_score",
                        "cached_tokens": {worker: result.cached_tokens},
                        "predicted_s": 0.25,
                    },
                    option=orjson.OPT_APPEND_NEWLINE,
                )
            )
            if result.first_token_s is not None and result.sent_s is not None:
                log.write(
                    orjson.dumps(
                        {
                            "event": "finish",
                            "decision_id": result.decision_id,
                            "outcome": "ok",
                            "first_token_s": result.first_token_s - result.sent_s,
                        },
                        option=orjson.OPT_APPEND_NEWLINE,
                    )
                )
    (folder / "trace.json").write_bytes(
        orjson.dumps(
            {
                "path": "made.jsonl",
                "sha256": recipe.sha256,
                "length_scale": 1.0,
                "best_cached_tokens": {
                    result.request_id: int(result.input_length * 0.7) if result.turn else 0
                    for result in whole
                },
            }
        )
    )
    manifest = {
        "state": "complete",
        "experiment": "made",
        "arm": {"name": recipe.arm},
        "load": recipe.load,
        "repeat": recipe.repeat,
        "topology": {"model": "made-model", "device": "cpu"},
        "hardware": {"cpu": "made", "cores": 2, "memory_bytes": 2**34, "gpus": []},
        "versions": {"engines": {"madeengine": "1.2.3"}},
        "source": {"command": "deltaserve eval run made"},
        "timings": {"replay_s": 60.0, "fleet_up_s": 1.0},
    } | recipe.manifest
    provenance.write_manifest(folder, manifest)
    return folder


def write_growing(
    path: Path, *, sessions: int, turns: int, tokens: int, growth: int, apart_s: float
) -> None:
    """A trace of sessions that begin `apart_s` after each other, 5 s a turn; every prompt goes on
    where the answer before it ends."""
    lines = []
    for turn in range(turns):
        for session in range(sessions):
            length = tokens + growth * turn
            blocks = -(-length // 64)
            first = 10_000 * session
            lines.append(
                {
                    "request_id": f"s{session}:{turn}",
                    "session_id": f"s{session}",
                    "turn": turn,
                    "timestamp_s": apart_s * session + turn * 5.0,
                    "input_length": length,
                    "output_length": 100,
                    "block_size": 64,
                    "hash_ids": [*range(first, first + blocks - 1), first + 5_000 + turn],
                    "think_time_s": 1.0 if turn else None,
                }
            )
    lines.sort(key=lambda line: float(str(line["timestamp_s"])))
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))


@pytest.fixture(scope="session")
def run_writer() -> Callable[..., Path]:
    """Writes a run with the given recipe's fields under a folder."""
    return lambda folder, **fields: write_run(folder, Recipe(**fields))


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Run]:
    """Writes a run with the given recipe's fields and reads it back."""

    def make(**fields: Any) -> Run:
        return read_run(write_run(tmp_path / "runs", Recipe(**fields)))

    return make


@pytest.fixture
def small_trace(tmp_path: Path) -> Path:
    """Four sessions of three turns; each turn's input continues the one before it."""
    requests = []
    for turn in range(3):
        for session in range(4):
            blocks = 2 * (turn + 1)
            requests.append(
                Request(
                    request_id=f"s{session}-{turn}",
                    session_id=f"s{session}",
                    turn=turn,
                    timestamp_s=10.0 * turn + session,
                    input_length=64 * blocks,
                    output_length=8,
                    block_size=64,
                    hash_ids=[1000 * session + block for block in range(blocks)],
                )
            )
    path = tmp_path / "small.jsonl"
    write_trace(path, requests)
    return path
