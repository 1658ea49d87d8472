"""Arms compared over the draws of sessions that they have in common."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deltaserve.errors import InputError
from eval.by_draw import over_draws, table
from eval.noise import Verdict
from eval.run_lines import Row, read_rows
from eval.sessions_a_gpu import app
from tests.eval.published import RESULTS

MEASURED = RESULTS / "residency" / "sessions-a-gpu.csv"


def line(arm: str, draw: int, rate: float, within: float = 0.5, ttft_p90: str = "2.0") -> Row:
    return {
        "arm": arm,
        "sessions": "10",
        "draw": str(draw),
        "within_objective": str(within),
        "requests_per_s": str(rate),
        "ttft_p50_s": "0.2",
        "ttft_p90_s": ttft_p90,
        "tpot_p50_s": "0.01",
        "worst_gap_p90_s": "0.3",
    }


def test_what_draws_have_in_common_is_no_difference_between_arms() -> None:
    """Draws differ by a factor of four and arms by a tenth of each: the tenth is what is judged."""
    rates = {1: 0.2, 2: 0.4, 3: 0.6, 4: 0.8}
    off = {1: 1.10, 2: 1.11, 3: 1.09, 4: 1.10}
    rows = [line("a", draw, rate) for draw, rate in rates.items()]
    rows += [line("b", draw, rate * off[draw]) for draw, rate in rates.items()]
    by_key = {item.measure.key: item for item in over_draws(rows, 10, "a", ["b"])}
    found = by_key["requests_per_s"]
    # Worked out by hand: the mean of the logarithms, and 3.182 of their standard errors.
    assert found.effect.value == pytest.approx(1.1000, abs=1e-4)
    assert found.effect.low == pytest.approx(1.0871, abs=1e-4)
    assert found.effect.high == pytest.approx(1.1130, abs=1e-4)
    assert (found.draws, found.verdict, found.holds) == ((1, 2, 3, 4), Verdict.BETTER, True)
    same = by_key["ttft_p50"]
    assert (same.effect.value, same.verdict) == (1.0, Verdict.NONE)


def test_a_share_is_compared_in_points_and_repeats_of_a_draw_as_their_mean() -> None:
    rows = [line("a", 1, 0.5, within) for within in (0.6, 0.8)]
    rows += [line("a", 2, 0.5, 0.5), line("b", 1, 0.5, 0.9), line("b", 2, 0.5, 0.6)]
    by_key = {item.measure.key: item for item in over_draws(rows, 10, "a", ["b"])}
    assert by_key["attainment"].effect.value == pytest.approx(0.15)


def test_only_draws_that_both_have_and_the_same_sessions_count() -> None:
    rows = [line("a", 1, 0.5), line("a", 2, 0.5), line("b", 2, 1.0), line("b", 3, 9.0)]
    rows += [{**line("b", 1, 9.0), "sessions": "12"}]
    (rate,) = [i for i in over_draws(rows, 10, "a", ["b"]) if i.measure.key == "requests_per_s"]
    assert (rate.draws, rate.verdict) == ((2,), Verdict.UNJUDGED)
    assert rate.effect.value == pytest.approx(2.0)
    assert math.isnan(rate.effect.low)
    with pytest.raises(InputError, match="a and c: no draw in common with 10 sessions"):
        over_draws(rows, 10, "a", ["c"])


def test_a_quantile_among_turns_without_an_answer_is_not_judged() -> None:
    rows = [line("a", draw, 0.5) for draw in (1, 2)]
    rows += [line("b", 1, 0.5), line("b", 2, 0.5, ttft_p90="")]
    by_key = {item.measure.key: item for item in over_draws(rows, 10, "a", ["b"])}
    assert by_key["ttft_p90"].verdict is Verdict.UNJUDGED
    assert "| TTFT p90 | – [–] | – | not judged |" in "\n".join(table(list(by_key.values()), "a"))


def test_one_verdict_among_many_says_when_holm_does_not_keep_it() -> None:
    rates = ((1, 1.12), (2, 1.15), (3, 1.18))
    rows = [line("a", draw, 1.0) for draw, _ in rates]
    rows += [line("b", draw, rate) for draw, rate in rates]
    shown = table(over_draws(rows, 10, "a", ["b"]), "a")
    (rate,) = [words for words in shown if "Requests / s" in words]
    assert rate.endswith("| better, not after Holm's correction |")


def test_the_command_prints_the_table_and_refuses_what_it_cannot_compare(tmp_path: Path) -> None:
    arguments = ["compare", str(MEASURED), "--sessions", "10", "--base", "vllm-fp8-host-4096"]
    done = CliRunner().invoke(app, [*arguments, "--arm", "sglang-fp8-host-mixed"])
    expected = over_draws(read_rows(MEASURED), 10, "vllm-fp8-host-4096", ["sglang-fp8-host-mixed"])
    assert done.exit_code == 0
    assert done.output == "\n".join(table(expected, "vllm-fp8-host-4096")) + "\n"
    (tmp_path / "other.csv").write_text("arm,sessions,draw\n")
    wrong = CliRunner().invoke(app, ["compare", str(tmp_path / "other.csv"), *arguments[2:]])
    assert wrong.exit_code != 0
