"""What another engine's work costs an engine on the same host: on made steps with a known cost,
and what docs/eval.md says of two GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deltaserve.errors import InputError
from eval.beside import at_work, beside, table
from eval.calibrate import read_steps
from tests.eval.published import RESULTS

HALF_S = 20.0
"""The other engine works for so long, then is idle for as long, again and again."""
Step = dict[str, Any]


def step(start_s: float, took_s: float, **fields: Any) -> Step:
    of_decode = {"forward_mode": "decode", "prefill_requests": 0, "prefill_tokens": 0}
    of_all = {"event": "step", "worker_id": "w", "prefix_tokens": 0, "decode_requests": 3}
    timed = {"start_unix_s": start_s, "duration_s": took_s, "kv_used_tokens": 9_000}
    return of_all | of_decode | timed | fields


def is_at_work(at_s: float) -> bool:
    return at_s % (2 * HALF_S) < HALF_S


def steps(until_s: float, *, slower: float) -> list[Step]:
    """Ten decode steps, then a chunk of a prefill and a second one of the same length behind it,
    and so on; decode steps take `slower` times as long while the other works."""
    made, at_s = [], 0.0
    chunk = {"forward_mode": "extend", "prefill_requests": 1, "decode_requests": 0}
    while at_s < until_s:
        for number in range(12):
            took_s = 0.1
            if number < 10:
                took_s = 0.01 * (slower if is_at_work(at_s) else 1.0)
                made.append(step(at_s, took_s))
            else:
                prefix = 8_192 * (number - 10)
                made.append(step(at_s, took_s, prefill_tokens=8_192, prefix_tokens=prefix, **chunk))
            at_s += took_s
    return made


def others(until_s: float) -> list[Step]:
    return [step(at * 0.5, 0.5) for at in range(int(until_s / 0.5)) if is_at_work(at * 0.5)]


def test_a_known_cost_is_found_and_none_where_there_is_none() -> None:
    found = beside(steps(200.0, slower=1.1), others(200.0))
    decode, prefill = found["decode"], found["prefill"]
    assert decode.times.value == pytest.approx(1.1, abs=0.002)
    assert 1.05 < decode.times.low <= decode.times.high < 1.15
    assert (decode.alone_s, prefill.beside_s) == pytest.approx((0.01, 0.1), rel=0.01)
    assert prefill.times.value == pytest.approx(1.0, abs=0.002)
    # Nine of ten decode steps follow one of their kind, one of two chunks does.
    assert decode.beside > 5 * prefill.beside > 100
    assert [line.split(" | ")[0] for line in table(found)[2:]] == ["| decode", "| prefill"]


def test_batches_that_only_one_side_has_are_not_compared() -> None:
    """More requests decode while the other works, which takes longer for its own reasons."""
    made = steps(200.0, slower=1.0)
    for each in made:
        if each["forward_mode"] == "decode" and is_at_work(each["start_unix_s"]):
            each["decode_requests"] = 4
    assert list(beside(made, others(200.0))) == ["prefill"]


def test_steps_that_were_recorded_at_other_times_are_one_clear_error() -> None:
    later = [each | {"start_unix_s": each["start_unix_s"] + 1e4} for each in others(200.0)]
    with pytest.raises(InputError, match="never at work in the same minutes"):
        beside(steps(200.0, slower=1.0), later)


def test_an_engine_is_at_work_in_the_short_pauses_between_its_steps() -> None:
    found = at_work([step(3.0, 0.5), step(0.0, 1.0), step(1.04, 0.5), step(1.2, 0.1)])
    assert found.tolist() == [[0.0, 1.54], [3.0, 3.5]]


def test_what_is_said_of_two_gpus() -> None:
    tier, think = (
        read_steps([RESULTS / "residency" / f"beside-{lane}.steps.jsonl.zst"])
        for lane in ("tier", "think")
    )
    found = beside(tier, think)
    page = (RESULTS.parent / "eval.md").read_text()
    assert "\n".join(table(found)) in page
    for kind in found.values():
        assert abs(kind.times.value - 1) < 0.01
        assert 0.97 < kind.times.low < 1 < kind.times.high < 1.025


def test_the_command_says_what_is_wrong_in_one_line(tmp_path: Path) -> None:
    one = tmp_path / "one.jsonl"
    one.write_text("".join(json.dumps(each) + "\n" for each in steps(5.0, slower=1.0)))
    command = [sys.executable, "-m", "eval.beside", str(one), "--other"]
    shown = subprocess.run(
        [*command, str(tmp_path / "none.jsonl")], capture_output=True, text=True, check=False
    )
    assert shown.returncode == 2
    assert shown.stderr == (
        f"error: {tmp_path}/none.jsonl: expected a run's folder or a file of lines\n"
    )
    same = subprocess.run([*command, str(one)], capture_output=True, text=True, check=False)
    assert same.returncode == 2
    assert same.stderr.startswith("error: no two steps of the same batch")
