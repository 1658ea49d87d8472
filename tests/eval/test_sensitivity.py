"""What a simulated result rests on: the variants of a plan, and the table of what each changes."""

from __future__ import annotations

import math
from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from eval import sensitivity
from eval.run_lines import read_rows, write_rows
from eval.sensitivity import app, base_plan, figures, tables, variants


def test_each_variant_changes_one_thing() -> None:
    base = base_plan(3, 10.0)
    found = dict(variants(base))
    assert found["as it is"] == base
    assert base_plan(3, 10.0) == base  # none of them changes the base itself
    names = [name for name in found if found[name] == base]
    assert names == ["as it is"]
    slower = found["prefill speed 0.75 ×"]["workers"][0]["calibration"]
    of_base = base["workers"][0]["calibration"]
    changed = {key for key in of_base if slower[key] != of_base[key]}
    assert changed == {"prefill_tokens_per_s", "prefill_pairs_per_s"}
    assert slower["prefill_pairs_per_s"] == 0.75 * of_base["prefill_pairs_per_s"]
    told = found["told both"]["load"]
    assert told["end_hints"]
    assert told["idle_hints"]


def line(name: str, phase: str, finished_s: float, ttft_s: float | None) -> dict[str, object]:
    return {
        "request_id": name,
        "phase": phase,
        "scheduled_s": 10.0,
        "first_token_s": None if ttft_s is None else 10.0 + ttft_s,
        "finished_s": finished_s,
        "prompt_tokens": 100,
        "cached_tokens": 40,
        "error": None if ttft_s is not None else {"kind": "cancelled", "message": ""},
    }


def test_a_turn_without_an_answer_is_slower_than_any_bound(tmp_path: Path) -> None:
    (tmp_path / "phases.json").write_bytes(
        orjson.dumps({"window_start_s": 10.0, "window_end_s": 20.0})
    )
    lines = [
        line("p", "prime", 11.0, 1.0),
        line("w", "warm_up", 12.0, 1.0),
        *(line(f"m{i}", "measure", 15.0, 0.5) for i in range(3)),
        line("late", "measure", 25.0, 2.0),
        line("never", "measure", 30.0, None),
    ]
    (tmp_path / "requests.jsonl").write_bytes(b"\n".join(map(orjson.dumps, lines)))
    found = figures(tmp_path)
    assert found["requests_per_s"] == 0.4
    assert found["ttft_p50_s"] == 0.5
    assert found["ttft_p99_s"] == math.inf
    assert found["cached_share"] == 0.4


def test_the_table_compares_draw_by_draw(tmp_path: Path) -> None:
    def row(variant: str, draw: int, rate: float, p99_s: float) -> dict[str, str]:
        return {
            "variant": variant,
            "max_think_s": "10",
            "draw": str(draw),
            "requests_per_s": str(rate),
            "cached_share": "0.5",
            "ttft_p50_s": "0.25",
            "ttft_p99_s": str(p99_s),
        }

    rows = [row("as it is", 1, 1.0, 9.0), row("as it is", 2, 2.0, 11.0)]
    rows += [row("more", 1, 1.2, 9.0), row("more", 2, 2.0, math.inf)]
    write_rows(tmp_path / "runs.csv", rows)
    assert read_rows(tmp_path / "runs.csv") == rows
    [lines] = tables(rows)
    assert lines[2:] == [
        "| as it is | 1.500 |  | 0.25 s | 10 s | 0.50 |",
        "| more | 1.600 | +10% [+0% to +20%] | 0.25 s | – | 0.50 |",
    ]


def test_variants_are_simulated_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.eval.test_planning import sessions

    chosen = ("as it is", "prefill speed 0.75 ×", "a cache without end")
    made = variants
    short = {"start": "mid", "recycle": True, "measure_s": 120.0}

    def few(base: dict[str, object]) -> list[tuple[str, dict[str, object]]]:
        return [(name, plan) for name, plan in made(base | {"phases": short}) if name in chosen]

    monkeypatch.setattr(sensitivity, "variants", few)
    trace = sessions(tmp_path / "trace.jsonl")
    output = tmp_path / "out"
    result = CliRunner().invoke(
        app, ["run", str(trace), str(output), "--draws", "1", "--max-think-s", "5"]
    )
    assert result.exit_code == 0, result.output
    rows = read_rows(output / "runs.csv")
    assert [row["variant"] for row in rows] == list(chosen)
    first = float(rows[0]["ttft_p50_s"])
    assert float(rows[1]["ttft_p50_s"]) > first
    shown = CliRunner().invoke(app, ["show", str(output / "runs.csv")])
    assert shown.output.count("\n") == 6
