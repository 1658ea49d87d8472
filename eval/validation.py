"""A measured run beside a simulated one: `python -m eval.validation MEASURED SIMULATED`.

Owns which requests of two result files are compared, and the table. Both files have result lines
(`docs/formats.md`), packed with zstd or not; a line may have `worst_gap_s` in place of `arrivals`,
null where its answer came all at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import orjson
import pandas as pd
import typer

from deltaserve.errors import InputError, errors_in_one_line
from eval.experiment import Slo
from eval.judged import COLUMNS, Window
from eval.judged import measures as judged_measures
from replay.results import tpot_s, worst_gap_s
from replay.trace import numbered_lines

Line = dict[str, Any]
FELT = (
    "first_tokens_per_s",
    "in_time_share",
    "waiting_sessions",
    "late_share_mean",
    "late_share_p90",
    "wait_mean_s",
    "longest_wait_s",
    "starved_sessions",
)
"""What sessions felt, as `eval.judged` measures it."""


def read_lines(path: Path) -> list[Line]:
    """Result lines of a file; raises InputError with the place of what is no JSON."""
    if not path.is_file():
        raise InputError(f"{path}: expected a file of result lines (.jsonl or .jsonl.zst)")
    lines = []
    for number, text in numbered_lines(path):
        try:
            lines.append(orjson.loads(text))
        except orjson.JSONDecodeError as error:
            raise InputError(f"{path}:{number}: {error}") from None
    return lines


def measures(lines: list[Line], from_s: float, to_s: float, until_s: float) -> dict[str, float]:
    """Of later turns that were scheduled in [from_s, to_s) and answered by `until_s`, when the
    measured run was cut off; times in s. `requests_per_s` is of all answers that ended in the
    window. An answer that came all at once has no TPOT and no gap, and is left out of those. What
    sessions felt (`FELT`) is of every turn under way in the window, by the default objective."""
    answered = [line for line in lines if not line["error"] and line["finished_s"] <= until_s]
    inside = [x for x in answered if from_s <= x["scheduled_s"] < to_s and x["turn"] > 0]
    ended = [line for line in answered if from_s <= line["finished_s"] < to_s]
    prompt_tokens = sum(line["prompt_tokens"] for line in inside)
    cached_tokens = sum(line["cached_tokens"] or 0 for line in inside)
    found = {
        "requests": float(len(inside)),
        "requests_per_s": len(ended) / (to_s - from_s),
        "apc": cached_tokens / prompt_tokens if prompt_tokens else math.nan,
    }
    of_each: dict[str, Callable[[Line], float | None]] = {
        "ttft": lambda line: line["first_token_s"] - line["sent_s"],
        "tpot": _tpot_s,
        "worst_gap": _worst_gap_s,
    }
    for name, measure in of_each.items():
        values = [value for line in inside if (value := measure(line)) is not None]
        for share in (50, 90):
            found[f"{name}_p{share}"] = float(np.percentile(values, share)) if values else math.nan
    felt = judged_measures(
        _turns(lines, until_s), Window(from_s, to_s, _over_s(lines, until_s)), Slo()
    )
    return found | {name: felt[name] for name in FELT}


def _over_s(lines: list[Line], until_s: float) -> float:
    """When the run was over: cut off, or with its last answer."""
    ends = (line["finished_s"] for line in lines if line["finished_s"] is not None)
    return min(until_s, max(ends, default=until_s))


def _turns(lines: list[Line], until_s: float) -> pd.DataFrame:
    """The turns as `eval.judged` takes them; what came after `until_s` had not come yet."""
    return pd.DataFrame(
        [
            _turn(x, until_s)
            for x in lines
            if x.get("phase") != "prime" and x["scheduled_s"] < until_s
        ],
        columns=list(COLUMNS),
    ).astype({name: float for name in COLUMNS if name not in ("session", "error")})


def _turn(line: Line, until_s: float) -> dict[str, Any]:
    def by_then(at_s: float | None) -> float:
        return math.nan if at_s is None or at_s > until_s else at_s

    error = line["error"]
    best = line.get("best_cached_tokens")
    cached = line.get("cached_tokens") if best is None else best
    arrivals = line.get("arrivals")
    return {
        "session": line["session_id"],
        "due_s": line["scheduled_s"],
        "first_token_s": by_then(line["first_token_s"]),
        "finished_s": by_then(line["finished_s"]),
        "error": error["kind"] if error and line["finished_s"] <= until_s else None,
        "new_tokens": max(0, (line["prompt_tokens"] or line["input_length"]) - (cached or 0)),
        "tpot_s": math.nan if (pace := _tpot_s(line)) is None else pace,
        "worst_gap_s": math.nan if (gap := _worst_gap_s(line)) is None else gap,
        "output_tokens": line["output_tokens"],
        "last_token_s": by_then(arrivals[-1][0] if arrivals else line["finished_s"]),
    }


def _tpot_s(line: Line) -> float | None:
    if "arrivals" in line:
        return tpot_s(line["arrivals"])
    after_first = int(line["output_tokens"]) - 1
    if after_first < 1 or _worst_gap_s(line) is None:
        return None
    return float(line["finished_s"] - line["first_token_s"]) / after_first


def _worst_gap_s(line: Line) -> float | None:
    if "worst_gap_s" in line:
        told_s: float | None = line["worst_gap_s"]
        return told_s
    return worst_gap_s(line.get("arrivals", ()))


def main(
    measured: Annotated[Path, typer.Argument(help="requests.jsonl of a measured run.")],
    simulated: Annotated[Path, typer.Argument(help="requests.jsonl of the simulated one.")],
    from_s: Annotated[float, typer.Option(help="Requests scheduled from then on count.")] = 0.0,
    to_s: Annotated[float, typer.Option(help="And before then.")] = 3600.0,
    until_s: Annotated[
        float, typer.Option(help="When the measured run was cut off; later answers do not count.")
    ] = math.inf,
) -> None:
    """Print measures of both, and how far the simulation is off."""
    of_measured = measures(read_lines(measured), from_s, to_s, until_s)
    of_simulated = measures(read_lines(simulated), from_s, to_s, until_s)
    typer.echo(f"{'':<16}{'measured':>12}{'simulated':>12}{'off':>10}")
    for name, value in of_measured.items():
        other = of_simulated[name]
        is_share = name == "apc" or "share" in name
        off = (
            100 * (other - value if is_share else other / value - 1)
            if value or is_share
            else math.nan
        )
        unit = "points" if is_share else "%"
        typer.echo(f"{name:<16}{value:>12.4g}{other:>12.4g}{off:>+9.1f} {unit}")


if __name__ == "__main__":
    with errors_in_one_line():
        typer.run(main)
