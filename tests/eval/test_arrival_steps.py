"""Steps are read off the arrivals of an engine that was made with known constants."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from typer.testing import CliRunner

from deltaserve.errors import InputError
from eval.arrival_steps import (
    alone_prefills,
    fit_arrivals,
    read_requests,
)
from eval.calibrate import to_toml
from eval.cli import app

CHUNK = 8_192
OVERHEAD_S, PAIRS_PER_S = 0.1, 7e8
BASE_S, REQUEST_S, CONTEXT_TOKEN_S = 0.003, 0.0012, 1.5e-8


def made_requests(
    seed: int,
    requests: int = 300,
    noise: float = 0.02,
    *,
    overhead_s: float = OVERHEAD_S,
    found_s: float = 0.0,
) -> list[dict[str, Any]]:
    """Answers of an engine whose steps decode all that run, and prefill a chunk beside them; that
    with a request's first chunk takes `found_s` longer for each token that it finds cached."""
    draws = np.random.default_rng(seed)
    now_s = 0.0
    waiting: list[dict[str, Any]] = []
    running: list[dict[str, Any]] = []
    done: list[dict[str, Any]] = []
    sent_s = np.cumsum(draws.exponential(2.0, requests))
    todo = [
        {
            "sent_s": float(at_s),
            "prompt_tokens": int(cached + new),
            "cached_tokens": int(cached),
            "output_tokens": int(draws.integers(60, 400)),
            "error": None,
            "arrivals": [],
        }
        for at_s, cached, new in zip(
            sent_s,
            draws.integers(0, 90_000, requests),
            draws.choice([100, 900, 5_000, 30_000], requests),
            strict=True,
        )
    ]
    while todo or waiting or running:
        if not waiting and not running:
            now_s = max(now_s, todo[0]["sent_s"])
        while todo and todo[0]["sent_s"] <= now_s:
            waiting.append({**todo.pop(0), "computed": 0})
        context = sum(r["prompt_tokens"] + len(r["arrivals"]) for r in running)
        took_s = REQUEST_S * len(running) + CONTEXT_TOKEN_S * context
        prefilled = waiting[0] if waiting else None
        if prefilled:
            left = prefilled["prompt_tokens"] - prefilled["cached_tokens"] - prefilled["computed"]
            part = min(left, CHUNK)
            before = prefilled["cached_tokens"] + prefilled["computed"]
            took_s += overhead_s + part * (before + part / 2) / PAIRS_PER_S
            if not prefilled["computed"]:
                took_s += found_s * prefilled["cached_tokens"]
            prefilled["computed"] += part
        else:
            took_s += BASE_S
        now_s += took_s * draws.normal(1.0, noise)
        told = [*running]
        if prefilled and part == left:
            running.append(waiting.pop(0))
            told.append(prefilled)
        for request in told:
            at_s = now_s + draws.uniform(0, 0.0003)
            request["arrivals"].append([at_s, len(request["arrivals"]) + 1])
        done += [r for r in running if len(r["arrivals"]) == r["output_tokens"]]
        running = [r for r in running if len(r["arrivals"]) < r["output_tokens"]]
    for request in done:
        request["first_token_s"] = request["arrivals"][0][0]
        request["finished_s"] = request["arrivals"][-1][0]
    return done


def test_constants_are_recovered_from_arrivals() -> None:
    calibration = fit_arrivals([made_requests(1), made_requests(2)], CHUNK)
    assert calibration.decode is not None
    assert calibration.prefill is not None
    assert calibration.decode.constants == pytest.approx(
        (BASE_S, REQUEST_S, CONTEXT_TOKEN_S), rel=0.05
    )
    overhead_s, _, pair_s = calibration.prefill.constants
    assert overhead_s == pytest.approx(OVERHEAD_S, rel=0.1)
    assert 1 / pair_s == pytest.approx(PAIRS_PER_S, rel=0.1)
    assert calibration.prefill.median_error < 0.1


def answered(
    sent_s: float, first_s: float, new: int, cached: int = 0, tokens: int = 1
) -> dict[str, Any]:
    arrivals = [[first_s + 0.02 * at, at + 1] for at in range(tokens)]
    return {
        "sent_s": sent_s,
        "first_token_s": first_s,
        "finished_s": arrivals[-1][0] + 0.05,
        "prompt_tokens": cached + new,
        "cached_tokens": cached,
        "output_tokens": tokens,
        "arrivals": arrivals,
    }


def test_prefills_alone_are_those_that_follow_each_other_while_nobody_decodes() -> None:
    run = [
        answered(0.0, 1.0, 10_000),
        answered(0.1, 1.7, 12_000, cached=1_000),  # 6,384 of them in the chunk of the one before
        answered(0.2, 1.701, 2_000),  # all of it in the chunk of the one before
        answered(0.3, 2.0, 700, tokens=100),
        answered(0.4, 3.0, 9_000),  # while that answers
        answered(5.0, 6.0, 9_000),  # sent too late
        answered(5.1, 7.0, 8_192),
    ]
    pairs = [12_000 * 7_000.0, 700 * 350.0, 8_192 * 4_096.0]
    assert list(alone_prefills(run, CHUNK)) == [
        (1.0, 12_000.0, pairs[0], pytest.approx(0.7)),
        (1.0, 700.0, pairs[1], pytest.approx(0.299)),
        (1.0, 8_192.0, pairs[2], pytest.approx(1.0)),
    ]


def primes(prompts: int, overhead_s: float, chunk: int = CHUNK) -> list[dict[str, Any]]:
    """Prompts that come at once and are computed from nothing, one after another."""
    draws = np.random.default_rng(5)
    at_s, left, made = 0.0, 0, []
    for tokens in draws.integers(9_000, 60_000, prompts).tolist():
        chunks = -(-(tokens - left) // chunk)
        left += chunks * chunk - tokens
        at_s += chunks * overhead_s + tokens * tokens / 2 / PAIRS_PER_S
        made.append(answered(0.0, at_s, tokens))
    return made


def later(run: list[dict[str, Any]], by_s: float) -> list[dict[str, Any]]:
    return [
        request
        | {name: request[name] + by_s for name in ("sent_s", "first_token_s", "finished_s")}
        | {"arrivals": [[at_s + by_s, tokens] for at_s, tokens in request["arrivals"]]}
        for request in run
    ]


@pytest.mark.parametrize("found_s", [0.0, 1e-6, 4e-6])
def test_what_a_token_that_is_found_takes_is_recovered_beside_prefills_alone(
    found_s: float,
) -> None:
    overhead_s = 0.01
    alone = primes(80, overhead_s)
    turns = made_requests(3, overhead_s=overhead_s, found_s=found_s)
    found = fit_arrivals([alone + later(turns, 1_000.0)], CHUNK)
    constants = found.constants()
    assert constants["prefill_overhead_s"] == pytest.approx(overhead_s, rel=0.05)
    assert constants["prefill_pairs_per_s"] == pytest.approx(PAIRS_PER_S, rel=0.02)
    # Steps are up to 2 % longer and shorter by chance, which counts where they are longer.
    assert constants["found_token_s"] == pytest.approx(found_s, rel=0.1, abs=3e-7)
    assert f"found_token_s = {constants['found_token_s']:.6g}" in to_toml(found, "made", ["one"])


def test_runs_in_chunks_of_two_sizes_are_fitted_together() -> None:
    """Neither has enough prefills alone by itself, and of each the chunks are its own."""
    turns = later(made_requests(3, overhead_s=0.02), 1_000.0)
    runs = [primes(40, 0.02) + turns, primes(40, 0.02, chunk=CHUNK // 2)]
    found = fit_arrivals(runs, [CHUNK, CHUNK // 2])
    assert found.prefill is not None
    assert (found.prefill.steps, found.prefill.left_out) == (78, 0)
    assert found.prefill.p90_error < 1e-6
    assert found.constants()["prefill_overhead_s"] == pytest.approx(0.02)


def test_too_few_prefills_alone_or_turns_that_return_say_nothing_of_found_tokens() -> None:
    turns = made_requests(3, overhead_s=0.01, found_s=4e-6)
    few = fit_arrivals([primes(20, 0.01) + later(turns, 1_000.0)], CHUNK).constants()
    assert "found_token_s" not in few
    # What the others wait longer is all a prefill's, then.
    assert few["prefill_overhead_s"] > 0.02
    returning = [turn for turn in turns if turn["prompt_tokens"] - turn["cached_tokens"] > 1_000]
    none = fit_arrivals([primes(80, 0.01) + later(returning, 1_000.0)], CHUNK).constants()
    assert "found_token_s" not in none
    assert none["prefill_overhead_s"] == pytest.approx(0.01, rel=0.05)


def test_too_few_answers_give_no_constants() -> None:
    assert fit_arrivals([made_requests(1, requests=3)], CHUNK).prefill is None
    alone = {**made_requests(1, requests=1)[0], "arrivals": [[1.0, 1]]}
    assert fit_arrivals([[alone]], CHUNK).constants() == {}


def test_the_command_fits_the_file_of_a_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    unanswered = {"arrivals": [], "error": {"kind": "timeout"}}
    lines = [*made_requests(1), unanswered]
    (run / "requests.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    output = tmp_path / "fitted.toml"
    arguments = ["calibrate", str(run), "--by", "arrivals", "--name", "made", "--output"]
    done = CliRunner().invoke(app, [*arguments, str(output)])
    assert done.exit_code == 0, done.output
    fitted = tomllib.loads(output.read_text())
    assert fitted["prefill_pairs_per_s"] == pytest.approx(PAIRS_PER_S, rel=0.1)
    assert fitted["fit"]["decode"]["median_relative_error"] < 0.05


def test_chunks_for_other_than_all_runs_are_one_clear_error(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.jsonl" for name in ("one", "two")]
    for path in paths:
        path.write_bytes(orjson.dumps(made_requests(1, requests=1)[0]))
    arguments = ["calibrate", *map(str, paths), "--by", "arrivals", "--name", "x", "--output", "x"]
    done = CliRunner().invoke(app, [*arguments, *["--chunk-tokens", "4096"] * 3])
    assert isinstance(done.exception, InputError)
    assert str(done.exception) == ("--chunk-tokens: expected one, or one for each of 2 runs, not 3")


def test_a_run_without_arrivals_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(orjson.dumps({"arrivals": [], "error": None}) + b"\n")
    with pytest.raises(InputError, match="no answers with arrivals and cached tokens"):
        read_requests([path])
    with pytest.raises(InputError, match=r"gone\.jsonl: expected a run's folder"):
        read_requests([tmp_path / "gone.jsonl"])
