"""What elastic's weights rest on: the variants, what is kept of a run, and the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from eval import weights
from eval.run_lines import Row, read_rows
from eval.weights import CHOSEN_ON, DEFAULT, SHOWN_ON, app, base_plan, figures, table, variants
from tests.eval.test_planning import sessions


def test_each_variant_changes_the_router_alone_and_none_is_the_default() -> None:
    base = base_plan(1, 12)
    found = dict(variants(base))
    assert found.pop(DEFAULT) == base
    for plan in found.values():
        assert plan["router"] != base["router"]
        assert plan | {"router": base["router"]} == base
    assert not set(CHOSEN_ON) & set(SHOWN_ON)


def request(name: str, ttft_s: float, **changes: Any) -> dict[str, Any]:
    return {
        "decision_id": name,
        "phase": "measure",
        "scheduled_s": 10.0,
        "first_token_s": 10.0 + ttft_s,
        "finished_s": 12.0 + ttft_s,
        "error": None,
    } | changes


def decided(name: str, kind: str, predicted_s: float | None, took_s: float) -> list[dict[str, Any]]:
    decision = {
        "event": "decision", "decision_id": name, "kind": kind, "predicted_s": predicted_s,
    }  # fmt: skip
    return [decision, {"event": "finish", "decision_id": name, "first_token_s": took_s}]


def test_figures_are_of_turns_due_in_the_window(tmp_path: Path) -> None:
    requests = [
        request("warm", 9.0, phase="warm_up"),
        request("a", 1.0),
        request("b", 3.0),
        request("never", 0.0, error={"kind": "timeout", "message": ""}, decision_id=None),
    ]
    decisions = [
        *decided("warm", "local", 0.1, 9.0),
        *decided("a", "local", 0.5, 1.0),
        # Two of its three seconds it waited for residency.
        *decided("b", "prefill_decode", 0.8, 1.0),
    ]
    for name, lines in (("requests", requests), ("decisions", decisions)):
        (tmp_path / f"{name}.jsonl").write_bytes(b"\n".join(map(orjson.dumps, lines)))
    found = figures(tmp_path)
    assert (found["turns"], found["answered"]) == (3, 2)
    assert found["ttft_mean_s"] == pytest.approx(2.0)
    assert found["request_mean_s"] == pytest.approx(4.0)
    assert found["separated_share"] == 0.5
    assert found["local_ratio_p50"] == pytest.approx(2.0)
    assert found["separated_ratio_p90"] == pytest.approx(1.25)


def row(variant: str, draw: int, ttft_s: float, ratio: str) -> Row:
    keys = ("ttft_mean_s", "ttft_p90_s", "request_mean_s", "separated_share")
    ratios = ("local_ratio_p50", "local_ratio_p90", "separated_ratio_p50", "separated_ratio_p90")
    return {
        "variant": variant,
        "sessions": "12",
        "draw": str(draw),
        **dict.fromkeys(keys, str(ttft_s)),
        **dict.fromkeys(ratios, ratio),
    }


def test_the_table_keeps_the_draws_apart_that_weights_were_chosen_on() -> None:
    rows = [row("elastic", 1, 0.1, "1"), row("elastic", 2, 0.3, "1"), row("elastic", 4, 0.5, "1.5")]
    rows.append(row("unified", 1, 0.2, ""))
    [_, _, elastic, unified] = table(rows, 12)
    both = "0.20 s, 0.50 s"
    assert elastic == f"| `elastic` | {both} | {both} | {both} | 50% | 1.50, 1.50; 1.50, 1.50 |"
    assert unified == "| `unified` | 0.20 s | 0.20 s | 0.20 s | 20% | –; – |"


def test_variants_are_simulated_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = weights.variants

    def few(base: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        short = base | {"phases": {"start": "mid", "recycle": True, "measure_s": 60.0}}
        return [(name, plan) for name, plan in made(short) if name in (DEFAULT, "pd")]

    monkeypatch.setattr(weights, "variants", few)
    monkeypatch.setattr(weights, "CHOSEN_ON", (1,))
    monkeypatch.setattr(weights, "SHOWN_ON", (4,))
    trace = sessions(tmp_path / "trace.jsonl")
    output = tmp_path / "out"
    result = CliRunner().invoke(app, ["run", str(trace), str(output), "--sessions", "6"])
    assert result.exit_code == 0, result.output
    rows = read_rows(output / "runs.csv")
    assert [(x["variant"], x["draw"]) for x in rows] == [
        (DEFAULT, "1"), ("pd", "1"), (DEFAULT, "4"), ("pd", "4"),
    ]  # fmt: skip
    for found in rows:
        assert float(found["separated_share"]) == 1 or found["variant"] == DEFAULT
        assert 0.5 < float(found["separated_ratio_p50"] or found["local_ratio_p50"]) < 2
    shown = CliRunner().invoke(app, ["show", str(output / "runs.csv")])
    assert shown.output.count("\n") == 5
