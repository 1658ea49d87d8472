"""What a returning turn costs the others, of steps made by hand and of measured runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from eval.arrival_steps import read_requests, returns
from eval.returning_turns import table
from tests.eval.published import RESULTS

PAGE = RESULTS / "residency-draws.md"
# By heading of the page's tables, their runs.
MEASURED = {
    "vLLM 0.26.0, tier of 60 GB": (
        "vllm-4096-ten",
        "draw2-vllm-4096-ten",
        "draw1-vllm-4096-ten",
        "draw4-vllm-4096-ten",
    ),
    "vLLM 0.26.0, no tier": ("vllm-three", "engines-vllm-residency"),
    "SGLang 0.5.17, tier of 60 GB": ("mixed-ten", "draw2-mixed-ten"),
}


def answer(
    sent_s: float, arrivals_s: list[float], prompt: int = 60_000, new: int = 200
) -> dict[str, Any]:
    return {
        "sent_s": sent_s,
        "first_token_s": arrivals_s[0],
        "finished_s": arrivals_s[-1],
        "arrivals": [[at_s, 1] for at_s in arrivals_s],
        "prompt_tokens": prompt,
        "cached_tokens": prompt - new,
        "output_tokens": len(arrivals_s),
        "error": None,
    }


def decoding(*stops: tuple[float, float], until_s: float = 4.0) -> list[float]:
    """Arrivals every 10 ms from 1 s on, with a step that is longer at each of these times."""
    at_s, found, left = 1.0, [], sorted(stops)
    while at_s < until_s:
        found.append(round(at_s, 6))
        at_s += 0.01
        if left and at_s > left[0][0]:
            at_s += left.pop(0)[1]
    return found


def test_the_steps_of_those_who_decode_are_longer_while_a_turn_returns() -> None:
    """Worked by hand: two steps take 50 and 30 ms longer, so the others stop for 80 ms."""
    others = answer(0.0, decoding((2.005, 0.05), (2.1, 0.03)))
    at_s = [at for at in decoding((2.005, 0.05), (2.1, 0.03)) if at > 2.2]
    [found] = returns([others, answer(2.0, at_s[:3])])
    assert found.stopped_s == pytest.approx(0.08, abs=0.002)
    assert found.longest_s == pytest.approx(0.06, abs=0.002)
    assert found.first_token_s == pytest.approx(at_s[0] - 2.0)
    assert (found.prompt_tokens, found.new_tokens) == (60_000, 200)


def test_steps_at_their_pace_are_no_stop() -> None:
    steady = decoding()
    [found] = returns([answer(0.0, steady), answer(2.0, [at for at in steady if at > 2.2][:3])])
    assert found.stopped_s == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    "requests",
    [
        # Nobody decodes; much of it is new; two wait; who decodes has ended, or only begun.
        [answer(2.0, [2.2, 2.21])],
        [answer(0.0, decoding()), answer(2.0, [2.2, 2.21], new=5_000)],
        [answer(0.0, decoding()), answer(2.0, [2.2, 2.21]), answer(2.1, [2.3, 2.31])],
        [answer(0.0, decoding(until_s=2.1)), answer(2.0, [2.2, 2.21])],
        [answer(0.0, decoding()), answer(1.1, [1.3, 1.31])],
    ],
)
def test_other_turns_are_not_counted(requests: list[dict[str, Any]]) -> None:
    assert list(returns(requests)) == []


def test_the_command_prints_the_table(tmp_path: Path) -> None:
    steps = decoding(*((2.0 + at, 0.05) for at in range(5)), until_s=9.0)
    turns = [answer(1.995 + at, [t for t in steps if t > 2.2 + at][:2]) for at in range(5)]
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b"\n".join(map(orjson.dumps, [answer(0.0, steps), *turns])) + b"\n")
    command = [sys.executable, "-m", "eval.returning_turns", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "| 40,000 to 70,000 | 5 | " in done.stdout
    path.write_bytes(orjson.dumps(turns[0]) + b"\n")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        "error: no turn returned alone while others decoded\n",
    )


@pytest.mark.parametrize("heading", MEASURED)
def test_the_page_has_what_the_measured_runs_say(heading: str) -> None:
    paths = [RESULTS / "residency" / f"{run}.requests.jsonl.zst" for run in MEASURED[heading]]
    found = [each for run in read_requests(paths) for each in returns(run)]
    page = PAGE.read_text()
    for line in table(found)[2:]:
        assert f"| {heading} {line}" in page
    each_ms = np.median([1e6 * each.stopped_s / each.prompt_tokens for each in found])
    assert f"{heading}: {each_ms:.1f} ms" in page
