"""The interference index on made decodes whose truth is known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest

from eval.interference import interference, long_prefills
from eval.records import Arrivals, Run
from eval.stats import SessionBootstrap


def made_run(seed: int, *, slower: float = 1.0, stall_s: float = 0.0, requests: int = 300) -> Run:
    """One worker that decodes all its requests step by step, each step longer with its batch; every
    third prompt is long. Requests come in bursts, so that prefills meet large batches. While a long
    prefill runs a step takes `slower` times as long, and one in ten `stall_s` more."""
    rng = np.random.default_rng(seed)
    arrive_s, at_s = [], 0.0
    for _ in range(requests):
        at_s += rng.exponential(1 / (1.5 if int(at_s) // 30 % 2 == 0 else 0.3))
        arrive_s.append(at_s)
    tokens = rng.integers(20, 200, requests)
    heavy = rng.random(requests) < 0.3
    prefill_s = np.where(heavy, rng.uniform(0.3, 1.5, requests), 0.02)
    arrivals: list[list[tuple[float, int]]] = [[] for _ in range(requests)]
    decoding: dict[int, int] = {}
    queue: list[int] = []
    prefilling: tuple[int, float] | None = None
    now_s, come, done = 0.0, 0, 0
    while done < requests:
        while come < requests and arrive_s[come] <= now_s:
            queue.append(come)
            come += 1
        if prefilling is None and queue:
            first = queue.pop(0)
            prefilling = (first, now_s + prefill_s[first])
        if decoding:
            step_s = (0.02 + 0.002 * len(decoding)) * np.exp(rng.normal(0, 0.2))
            if prefilling is not None and heavy[prefilling[0]]:
                step_s = step_s * slower + (stall_s if rng.random() < 0.1 else 0.0)
            now_s += step_s
            for request in list(decoding):
                arrivals[request].append((now_s, arrivals[request][-1][1] + 1))
                decoding[request] -= 1
                if not decoding[request]:
                    del decoding[request]
                    done += 1
        else:
            now_s = prefilling[1] if prefilling else arrive_s[come]
        if prefilling is not None and now_s >= prefilling[1]:
            arrivals[prefilling[0]].append((now_s, 1))
            decoding[prefilling[0]] = int(tokens[prefilling[0]]) - 1
            prefilling = None
    table = pd.DataFrame(
        {
            "ok": True,
            "decode_worker": "w",
            "prefill_worker": "w",
            "phase": "measure",
            "sent_s": arrive_s,
            "first_token_s": [each[0][0] for each in arrivals],
            "decided_to_first_token_s": np.nan,
            "last_token_s": [each[-1][0] for each in arrivals],
            "new_tokens": np.where(heavy, 5000.0, 100.0),
            "row": np.arange(requests),
            "conversation": [f"s{i}" for i in range(requests)],
        }
    )
    every = [pair for each in arrivals for pair in each]
    found = SimpleNamespace(
        all_requests=table,
        arrivals=Arrivals(
            np.concatenate(([0], np.cumsum([len(each) for each in arrivals]))),
            np.array([at for at, _ in every]),
            np.array([count for _, count in every]),
        ),
        length_scale=1.0,
    )
    return cast(Run, found)


def index_of(**how: Any) -> float:
    runs = [made_run(seed, **how) for seed in range(3)]
    boot = SessionBootstrap(list(runs[0].all_requests["conversation"]), 100)
    found = interference(boot, runs)
    assert found.index.low < found.index.value < found.index.high
    assert found.beside_n > 100
    assert found.beside_tpot_s / found.expected_tpot_s == pytest.approx(found.index.value)
    return found.index.value


def test_without_interference_the_index_is_one_though_prefills_meet_larger_batches() -> None:
    assert index_of() == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize("slower", [1.5, 3.0])
def test_decodes_that_a_prefill_slows_have_the_index_of_the_slowdown(slower: float) -> None:
    assert index_of(slower=slower) == pytest.approx(slower, rel=0.08)


def test_stalls_count_though_most_gaps_are_as_ever() -> None:
    assert index_of(stall_s=0.3) > 1.5


def test_prefills_that_overlap_are_one_and_short_ones_are_none() -> None:
    table = pd.DataFrame(
        {
            "prefill_worker": ["w", "w", "w", "w", "v"],
            "sent_s": [0.0, 1.0, 1.5, 9.0, 0.0],
            "first_token_s": [2.0, 3.0, 1.8, 9.5, np.nan],
            "decided_to_first_token_s": np.nan,
            "new_tokens": [4000.0, 3000.0, 3000.0, 100.0, 4000.0],
        }
    )
    run = cast(Run, SimpleNamespace(all_requests=table, length_scale=1.0))
    assert {name: spans.tolist() for name, spans in long_prefills(run).items()} == {"w": [[0, 3]]}


def test_what_a_request_waits_in_the_router_is_no_prefill() -> None:
    # Their clocks differ: the second decision seems to come before its request was sent.
    table = pd.DataFrame(
        {
            "prefill_worker": ["w", "v"],
            "sent_s": [0.0, 1.0],
            "first_token_s": [9.0, 1.25],
            "decided_to_first_token_s": [0.5, 0.5],
            "new_tokens": [4000.0, 4000.0],
        }
    )
    run = cast(Run, SimpleNamespace(all_requests=table, length_scale=1.0))
    found = {name: spans.tolist() for name, spans in long_prefills(run).items()}
    assert found == {"w": [[8.5, 9.0]], "v": [[1.0, 1.25]]}
