"""What a simulated result rests on: `python -m eval.sensitivity`.

Owns the variants of one plan (a constant a quarter more or less, a clients' hint, a cache without
end) and the table of what each changes. How a plan is simulated is elsewhere.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import orjson
import typer

from deltaserve.errors import told_in_one_line
from eval.experiment import Replay
from eval.run_lines import Row, read_rows, write_rows
from eval.simulate import read_calibration, write_planned
from eval.traces import make_replay_plan
from eval.validation import read_lines
from eval.variants import simulate_variants

_CALIBRATION = "qwen3-coder-30b-a3b-h200-sglang"
_KV_TOKENS = 281_888
_ENDLESS_TOKENS = 100_000_000
_MAX_INPUT_TOKENS = 130_000
"""As in the packaged experiments of residency: no prompt is longer than the cache."""
_LESS, _MORE = 0.75, 1.25


def base_plan(seed: int, max_think_s: float, sessions: int = 12) -> dict[str, Any]:
    """One H200 with the KV of an H20 under the default rule, coding sessions in a steady state, as
    in `residency-frontier`."""
    return {
        "seed": seed,
        "load": {
            "max_inflight_sessions": sessions,
            "max_think_s": max_think_s,
            "timeout_s": 1200.0,
        },
        "phases": {
            "start": "mid",
            "recycle": True,
            "prime_parallel": 12,
            "prime_timeout_s": 60.0,
            "warm_up_s": 300.0,
            "measure_s": 1500.0,
        },
        "router": {"policy": "unified", "residency": {"rule": "priced"}, "kv_events": True},
        "workers": [
            {"id": "w", "kv_tokens": _KV_TOKENS, "calibration": read_calibration(_CALIBRATION)}
        ],
        "output": {"decisions": False},
    }


def variants(base: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and plans: the base as it is, what is scaled by a quarter either way, and what a router
    with more knowledge or memory would have."""
    [worker] = base["workers"]
    constants = worker["calibration"]

    def scaled(factor: float, *names: str) -> dict[str, Any]:
        changed = {name: constants[name] * factor for name in names}
        return {**base, "workers": [{**worker, "calibration": constants | changed}]}

    def with_kv(tokens: int) -> dict[str, Any]:
        return {**base, "workers": [{**worker, "kv_tokens": tokens}]}

    yield "as it is", dict(base)
    for factor in (_LESS, _MORE):
        sign = f"{factor:g} ×"
        yield f"prefill speed {sign}", scaled(factor, "prefill_tokens_per_s", "prefill_pairs_per_s")
        yield f"prefill overhead {sign}", scaled(factor, "prefill_overhead_s")
        yield f"decode's base {sign}", scaled(factor, "decode_base_s")
        yield f"decode a request {sign}", scaled(factor, "decode_per_request_s")
        yield f"decode a context token {sign}", scaled(factor, "decode_per_context_token_s")
        yield f"KV tokens {sign}", with_kv(round(_KV_TOKENS * factor))
    router = base["router"]
    yield "KV events 1 s late", {**base, "router": router | {"kv_event_s": 1.0}}
    yield "no KV events", {**base, "router": router | {"kv_events": False}}
    load = base["load"]
    ends, gaps = {"end_hints": True}, {"idle_hints": True}
    yield "told when sessions end", {**base, "load": load | ends}
    yield "told how long they think", {**base, "load": load | gaps}
    yield "told both", {**base, "load": load | ends | gaps}
    yield "a cache without end", with_kv(_ENDLESS_TOKENS)


def figures(folder: Path) -> dict[str, float]:
    """Of a run's folder: answers a second in the window, the cached share of prompt tokens, and
    quantiles of TTFT (s) of every turn due in the window; infinite of one that got no answer."""
    phases = orjson.loads((folder / "phases.json").read_bytes())
    lines = read_lines(folder / "requests.jsonl")
    start_s, end_s = phases["window_start_s"], phases["window_end_s"]
    ended = [x for x in lines if not x["error"] and start_s <= x["finished_s"] < end_s]
    ended = [x for x in ended if x["phase"] != "prime"]
    due = [x for x in lines if x["phase"] == "measure"]
    answered = [x for x in due if not x["error"]]
    ttft_s = [np.inf if x["error"] else x["first_token_s"] - x["scheduled_s"] for x in due]
    return {
        "requests_per_s": len(ended) / (end_s - start_s),
        "cached_share": sum(x["cached_tokens"] for x in answered)
        / sum(x["prompt_tokens"] for x in answered),
        **{
            f"ttft_p{share}_s": float(np.quantile(ttft_s, share / 100, method="higher"))
            for share in (50, 99)
        },
    }


def bases(thinks: Sequence[float], draws: int) -> Iterator[tuple[Row, dict[str, Any]]]:
    """The plans that variants are made of, with think times up to each of `thinks` (s)."""
    for max_think_s, draw in product(thinks, range(1, draws + 1)):
        labels = {"max_think_s": f"{max_think_s:g}", "draw": str(draw)}
        yield labels, base_plan(draw, max_think_s)


def tables(rows: Sequence[Row]) -> Iterator[list[str]]:
    """The page's tables, one for each bound on think times."""
    for max_think_s in dict.fromkeys(row["max_think_s"] for row in rows):
        yield _table(max_think_s, [row for row in rows if row["max_think_s"] == max_think_s])


def _table(max_think_s: str, rows: Sequence[Row]) -> list[str]:
    """Of each variant the mean over draws, and the least and the most that it gives over the plan
    as it is, draw by draw."""
    base = {row["draw"]: row for row in rows if row["variant"] == "as it is"}
    heads = (
        f"simulated, think ≤ {max_think_s} s",
        "requests/s",
        "over the plan as it is",
        "TTFT p50",
        "TTFT p99",
        "from cache",
    )
    lines = [f"| {' | '.join(heads)} |", "|--" * len(heads) + "|"]
    for name in dict.fromkeys(row["variant"] for row in rows):
        chosen = [row for row in rows if row["variant"] == name]

        def mean(key: str, chosen: Sequence[Row] = chosen) -> float:
            return statistics.fmean(float(row[key]) for row in chosen)

        over = [
            float(row["requests_per_s"]) / float(base[row["draw"]]["requests_per_s"]) - 1
            for row in chosen
        ]
        shown = f"{statistics.fmean(over):+.0%} [{min(over):+.0%} to {max(over):+.0%}]"
        p99 = mean("ttft_p99_s")
        lines.append(
            f"| {name} | {mean('requests_per_s'):.3f} | {'' if name == 'as it is' else shown} "
            f"| {mean('ttft_p50_s'):.2f} s | {f'{p99:.0f} s' if np.isfinite(p99) else '–'} "
            f"| {mean('cached_share'):.2f} |"
        )
    return lines


app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.command()
def run(
    trace: Annotated[Path, typer.Argument(help="The trace of coding sessions.")],
    output: Annotated[Path, typer.Argument(help="Folder for the runs and for runs.csv.")],
    draws: Annotated[int, typer.Option(min=1, help="Draws of sessions and starts.")] = 3,
    max_think_s: Annotated[
        list[float] | None,
        typer.Option(help="Cut think times to so much (s); repeatable. Default: 10 and 60."),
    ] = None,
) -> None:
    """Simulate the plan and its variants and write a line a run to OUTPUT/runs.csv."""
    replay = Replay(max_input_tokens=_MAX_INPUT_TOKENS)
    requests = write_planned(make_replay_plan(trace, replay), output)
    given = bases(max_think_s or (10.0, 60.0), draws)
    write_rows(output / "runs.csv", simulate_variants(requests, given, variants, figures, output))


@app.command()
def show(runs: Annotated[Path, typer.Argument(help="runs.csv, of `run`.")]) -> None:
    """Print what each variant changes."""
    for lines in tables(read_rows(runs)):
        typer.echo("\n".join(["", *lines]))


if __name__ == "__main__":
    with told_in_one_line():
        app()
