"""What `elastic`'s weights rest on, in simulation: `python -m eval.weights`.

Owns the fleet that they are tried on, the variants (a weight changed, another policy in its place)
and the table of what each changes. Weights are chosen on some draws of sessions and shown on
others. How a plan is simulated is elsewhere.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from deltaserve.errors import told_in_one_line
from eval.experiment import Replay
from eval.run_lines import Row, read_rows, write_rows
from eval.simulate import read_calibration, write_planned
from eval.traces import make_replay_plan
from eval.validation import read_lines
from eval.variants import simulate_variants

_CALIBRATION = "qwen3-coder-30b-a3b-h200-sglang"
_KV_TOKENS = 560_000
_TARGET_ITL_S = 0.08
CHOSEN_ON = (1, 2, 3)
SHOWN_ON = (4, 5, 6)
"""Draws of sessions and of where they begin."""

DEFAULT = "elastic, as it is"
_WEIGHTS: Mapping[str, Sequence[float]] = {
    "stall_weight": (0.0, 0.1, 0.4, 1.0),
    "displace_weight": (0.0, 1.0),
    "output_weight": (0.0, 0.5, 2.0),
    "hysteresis_s": (0.0, 0.5),
}
_OTHERS = ("unified", "offload", "pd")


def base_plan(draw: int, sessions: int) -> dict[str, Any]:
    """One prefill and three elastic workers on H200s, coding sessions from their middle."""
    constants = read_calibration(_CALIBRATION)
    worker = {"kv_tokens": _KV_TOKENS, "calibration": constants}
    return {
        "seed": draw,
        "load": {"max_inflight_sessions": sessions, "max_think_s": 10.0},
        "phases": {
            "start": "mid",
            "recycle": True,
            "prime_parallel": 12,
            "prime_timeout_s": 60.0,
            "warm_up_s": 60.0,
            "measure_s": 600.0,
            "drain_s": 120.0,
        },
        "router": {"policy": "elastic", "residency": {"rule": "priced"}, "kv_events": True},
        "workers": [
            {"id": "p", "role": "prefill", **worker},
            {"id": "e", "role": "elastic", "count": 3, "target_itl_s": _TARGET_ITL_S, **worker},
        ],
    }


def variants(base: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and plans: the base as it is, each weight with other values, other policies."""
    router = base["router"]
    yield DEFAULT, dict(base)
    for name, values in _WEIGHTS.items():
        for value in values:
            yield f"{name} {value:g}", {**base, "router": router | {"policy_params": {name: value}}}
    for policy in _OTHERS:
        yield policy, {**base, "router": router | {"policy": policy}}


def figures(folder: Path) -> dict[str, float]:
    """Of a run's folder, of turns due in the window: how many, and how many were answered; of the
    answered, seconds until the first token and until the last, from when they were due (waits for
    residency count), the share that was separated, and quantiles of the first token's time over
    what the policy predicted of it, both from its decision; nan where it predicts nothing."""
    due = [x for x in read_lines(folder / "requests.jsonl") if x["phase"] == "measure"]
    answered = [line for line in due if not line["error"]]
    kinds: dict[str, str] = {}
    predicted_s: dict[str, float] = {}
    first_s: dict[str, float] = {}
    for line in read_lines(folder / "decisions.jsonl"):
        if line["event"] == "decision":
            kinds[line["decision_id"]] = line["kind"]
            if line["predicted_s"]:
                predicted_s[line["decision_id"]] = line["predicted_s"]
        elif line["event"] == "finish" and line["first_token_s"] is not None:
            first_s[line["decision_id"]] = line["first_token_s"]
    ttft_s = [line["first_token_s"] - line["scheduled_s"] for line in answered]
    whole_s = [line["finished_s"] - line["scheduled_s"] for line in answered]

    def ratio(kind: str, share: float) -> float:
        ids = [x["decision_id"] for x in answered if kinds[x["decision_id"]] == kind]
        ratios = [first_s[name] / predicted_s[name] for name in ids if name in predicted_s]
        return float(np.quantile(ratios, share)) if ratios else math.nan

    separated = sum(kinds[line["decision_id"]] == "prefill_decode" for line in answered)
    return {
        "turns": len(due),
        "answered": len(answered),
        "ttft_mean_s": statistics.fmean(ttft_s),
        "ttft_p50_s": float(np.quantile(ttft_s, 0.5)),
        "ttft_p90_s": float(np.quantile(ttft_s, 0.9)),
        "request_mean_s": statistics.fmean(whole_s),
        "separated_share": separated / len(answered),
        **{
            f"{name}_ratio_p{round(100 * share)}": ratio(kind, share)
            for name, kind in (("local", "local"), ("separated", "prefill_decode"))
            for share in (0.5, 0.9)
        },
    }


def bases(sessions: Sequence[int], draws: Sequence[int]) -> Iterator[tuple[Row, dict[str, Any]]]:
    """The plans that variants are made of, with so many sessions in flight."""
    for inflight, draw in product(sessions, draws):
        yield {"sessions": str(inflight), "draw": str(draw)}, base_plan(draw, inflight)


def table(rows: Sequence[Row], sessions: int) -> list[str]:
    """The page's table at one load: means over the draws that weights were chosen on, and over
    those that they are shown on; of the prediction the shown ones."""
    heads = (
        f"simulated, {sessions} in flight",
        "TTFT mean: chosen on, shown on",
        "TTFT p90",
        "whole request, mean",
        "separated",
        "realised / predicted p50, p90: local; separated",
    )
    lines = [f"| {' | '.join(heads)} |", "|--" * len(heads) + "|"]
    of_load = [row for row in rows if int(row["sessions"]) == sessions]
    for name in dict.fromkeys(row["variant"] for row in of_load):
        chosen = [x for x in of_load if x["variant"] == name and int(x["draw"]) in CHOSEN_ON]
        shown = [x for x in of_load if x["variant"] == name and int(x["draw"]) in SHOWN_ON]

        def both(key: str, chosen: list[Row] = chosen, shown: list[Row] = shown) -> str:
            return ", ".join(f"{_mean(found, key):.2f} s" for found in (chosen, shown) if found)

        ratios = [
            ", ".join(f"{_mean(shown or chosen, f'{kind}_ratio_p{at}'):.2f}" for at in (50, 90))
            for kind in ("local", "separated")
        ]
        lines.append(
            f"| `{name}` | {both('ttft_mean_s')} | {both('ttft_p90_s')} | {both('request_mean_s')} "
            f"| {_mean(shown or chosen, 'separated_share'):.0%} "
            f"| {'; '.join(ratios).replace('nan, nan', '–')} |"
        )
    return lines


def _mean(rows: Sequence[Row], key: str) -> float:
    values = [float(row[key]) for row in rows if row[key]]
    return statistics.fmean(values) if values else math.nan


app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.command()
def run(
    trace: Annotated[Path, typer.Argument(help="The trace of coding sessions.")],
    output: Annotated[Path, typer.Argument(help="Folder for the runs and for runs.csv.")],
    sessions: Annotated[
        list[int] | None, typer.Option(help="In flight; repeatable. Default: 12 and 24.")
    ] = None,
    session_limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many sessions of the trace.")
    ] = None,
) -> None:
    """Simulate every variant on all draws and write a line a run to OUTPUT/runs.csv."""
    replay = Replay(session_limit=session_limit, max_input_tokens=130_000)
    requests = write_planned(make_replay_plan(trace, replay), output)
    given = bases(sessions or (12, 24), (*CHOSEN_ON, *SHOWN_ON))
    write_rows(output / "runs.csv", simulate_variants(requests, given, variants, figures, output))


@app.command()
def show(runs: Annotated[Path, typer.Argument(help="runs.csv, of `run`.")]) -> None:
    """Print what each variant changes."""
    rows = read_rows(runs)
    for sessions in dict.fromkeys(int(row["sessions"]) for row in rows):
        typer.echo("\n".join(["", *table(rows, sessions)]))


if __name__ == "__main__":
    with told_in_one_line():
        app()
