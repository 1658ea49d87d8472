"""Measured runs as data, and the pages that say what they show.

`python -m results.build` writes the pages from `pages/*.md.j2` and the README's pictures; with
`--check` it writes nothing and ends with 1 where one differs from its data. `--from-raw` derives
`turns/<campaign>.parquet` from the raw result lines that `runs.toml` names in the repository's
history.
"""

from __future__ import annotations

import argparse
import csv
import functools
import hashlib
import math
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
import pandas as pd
import zstandard
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from eval.experiment import Slo
from eval.judged import COLUMNS, Window, measures, not_met
from eval.records import CLIENT_FAULTS
from eval.run_lines import read_rows
from replay.results import Result
from results.pictures import pictures
from sglang_ext.bench.report import markdown

HERE = Path(__file__).parent
OURS = "sglang-fp8-host-paced-residency"
MIXED = "sglang-fp8-host-mixed"
_SECONDS = (
    "due_s",
    "sent_s",
    "first_token_s",
    "last_token_s",
    "finished_s",
    "tpot_s",
    "worst_gap_s",
)
_COUNTS = (
    "turn",
    "prompt_tokens",
    "new_tokens",
    "cached_tokens",
    "output_tokens",
    "first_chunk_tokens",
)
_NAMES = ("run", "session", "phase", "error")


class Judgement(NamedTuple):
    """A run of `runs.toml`, its measures, and why it misses the objective (empty: it meets it)."""

    run: dict[str, Any]
    measures: dict[str, float]
    reasons: list[str]


def manifest() -> dict[str, Any]:
    """`runs.toml`: the commit that holds the raw lines, the arms in words, and every run."""
    return tomllib.loads((HERE / "runs.toml").read_text())


# --- raw lines -> turns


def derive(folder: Path) -> None:
    """Writes one Parquet a campaign into `folder`, from raw lines in the repository's history.

    Raises `ValueError` where the lines of a run are not those whose SHA-256 the manifest has.
    """
    known = manifest()
    folder.mkdir(exist_ok=True)
    for campaign in sorted({run["campaign"] for run in known["runs"]}):
        runs = [run for run in known["runs"] if run["campaign"] == campaign]
        rows = [
            row for run in runs for row in _turns(run, run.get("raw_commit", known["raw_commit"]))
        ]
        table = pd.DataFrame(rows)
        for name in _SECONDS:
            table[name] = table[name].astype(float).round(6)
        for name in _COUNTS:
            table[name] = table[name].astype("Int32")
        for name in _NAMES:
            table[name] = table[name].astype("category")
        path = folder / f"{campaign}.parquet"
        table.to_parquet(path, compression="zstd", compression_level=19, index=False)


def _turns(run: dict[str, Any], commit: str) -> Iterable[dict[str, Any]]:
    packed = subprocess.run(
        ["git", "cat-file", "blob", f"{commit}:{run['raw']}"],
        cwd=HERE,
        capture_output=True,
        check=True,
    ).stdout
    if hashlib.sha256(packed).hexdigest() != run["sha256"]:
        raise ValueError(f"{run['id']}: the raw lines are not those of the manifest")
    lines = zstandard.ZstdDecompressor().decompressobj().decompress(packed).splitlines()
    for result in map(Result.model_validate, map(orjson.loads, lines)):
        prompt = result.input_length if result.prompt_tokens is None else result.prompt_tokens
        held = (
            result.cached_tokens if result.best_cached_tokens is None else result.best_cached_tokens
        )
        last = result.arrivals[-1] if result.arrivals else (result.finished_s, result.output_tokens)
        yield {
            "run": run["id"],
            "session": result.session_id,
            "turn": result.turn,
            "phase": result.phase,
            "due_s": result.scheduled_s,
            "sent_s": result.sent_s,
            "first_token_s": result.first_token_s,
            "last_token_s": last[0],
            "finished_s": result.finished_s,
            "prompt_tokens": prompt,
            "new_tokens": max(0, prompt - (held or 0)),
            "cached_tokens": result.cached_tokens,
            "output_tokens": last[1],
            "first_chunk_tokens": result.first_chunk_tokens(),
            "tpot_s": result.tpot_s(),
            "worst_gap_s": result.worst_gap_s(),
            "error": None if result.error is None else result.error.kind,
        }


# --- turns -> measures


@functools.cache
def turns() -> dict[str, pd.DataFrame]:
    """The turns of every run, by its id: all but primings and what the client itself broke."""
    found: dict[str, pd.DataFrame] = {}
    for path in sorted((HERE / "turns").glob("*.parquet")):
        table = pd.read_parquet(path)
        for name in _NAMES:
            table[name] = table[name].astype(object)
        for name in _COUNTS:
            table[name] = table[name].astype(float)
        table["error"] = table["error"].where(table["error"].notna(), None)
        table = table[table["phase"].ne("prime") & ~table["error"].isin(CLIENT_FAULTS)]
        for run, rows in table.groupby("run", sort=False):
            found[str(run)] = rows.reset_index(drop=True)
    return found


def window(run: dict[str, Any]) -> Window:
    """The measured part of a run, in seconds of its clock."""
    end_s = run["window_end_s"]
    return Window(run["window_start_s"], end_s, end_s + run["drain_s"])


def judge(run: dict[str, Any], slo: Slo | None = None) -> Judgement:
    """What a run's sessions felt, and whether it meets the objective of `slo` (`Slo()`)."""
    slo = slo or Slo()
    rows = turns()[run["id"]]
    found = measures(rows[list(COLUMNS)], window(run), slo)
    found |= _due_in_window(rows, run, slo)
    return Judgement(run, found, not_met(found, slo))


def _due_in_window(rows: pd.DataFrame, run: dict[str, Any], slo: Slo) -> dict[str, float]:
    """What engines did, and which share of the turns due in the window was good: all that is kept
    of simulated runs. It says nothing of a turn that waits from before the window."""
    start_s, end_s = run["window_start_s"], run["window_end_s"]
    due = rows[rows["due_s"].ge(start_s) & rows["due_s"].lt(end_s)]
    answered = due[due["error"].isna() & due["first_token_s"].notna()]
    bound_s = slo.ttft_s + slo.ttft_s_per_new_token * answered["new_tokens"]
    good = (answered["first_token_s"] - answered["due_s"]).le(bound_s)
    good &= ~answered["tpot_s"].gt(slo.tpot_s) & ~answered["worst_gap_s"].gt(slo.worst_gap_s)
    ended = rows["error"].isna() & rows["finished_s"].ge(start_s) & rows["finished_s"].le(end_s)
    prompts = answered["prompt_tokens"].sum()
    return {
        "due_in_time_share": float(good.sum()) / len(due) if len(due) else math.nan,
        "requests_per_s": float(ended.sum()) / (end_s - start_s),
        "tpot_p50_s": float(answered["tpot_s"].median()),
        "worst_gap_p90_s": float(answered["worst_gap_s"].quantile(0.9)),
        "cached_share": float(answered["cached_tokens"].sum() / prompts) if prompts else math.nan,
    }


@functools.cache
def judgements() -> list[Judgement]:
    """Every run that had a whole window, in the order of the manifest."""
    return [
        judge(run)
        for run in manifest()["runs"]
        if run["status"] != "cut off" and "window_start_s" in run
    ]


# --- measures -> pages


def newest(found: Iterable[Judgement]) -> list[Judgement]:
    """Those of the newest form: no other run supersedes them."""
    old = superseded()
    return [of for of in found if of.run["id"] not in old and of.run["status"] == "complete"]


def superseded() -> set[str]:
    """The ids of runs that a newer one of the same arm stands for."""
    return {run["supersedes"] for run in manifest()["runs"] if "supersedes" in run}


def of_campaign(*names: str, think_s: float | None = None) -> list[Judgement]:
    """The newest runs of campaigns, by sessions, arm and seed."""
    found = newest(of for of in judgements() if of.run["campaign"] in names)
    if think_s is not None:
        found = [of for of in found if of.run["think_s"] == think_s]
    return sorted(
        found,
        key=lambda of: (
            of.run.get("sessions", 0),
            of.run["arm"],
            of.run.get("trace_seed", 0),
            of.run["id"],
        ),
    )


def carried(found: Sequence[Judgement], arm: str) -> int | None:
    """The most sessions at which every run of an arm, those with fewer too, meets the objective."""
    most = None
    for level in sorted({of.run["sessions"] for of in found if of.run["arm"] == arm}):
        at = [of for of in found if of.run["arm"] == arm and of.run["sessions"] == level]
        if any(of.reasons for of in at):
            break
        most = level
    return most


def simulated() -> list[dict[str, Any]]:
    """Every line of `simulated.csv` beside the run that it was a prediction of."""
    with (HERE / "simulated.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    by_id = {of.run["id"]: of for of in judgements()}
    return [
        {
            "of": by_id[line["run"]],
            "requests_per_s": float(line["requests_per_s"]),
            "due_in_time_share": float(line["due_in_time_share"]),
        }
        for line in lines
    ]


def predicted() -> dict[str, dict[str, float]]:
    """By run of `predicted.csv`: what the simulator said before it that sessions would feel."""
    with (HERE / "predicted.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    return {line.pop("run"): {name: float(of) for name, of in line.items()} for line in lines}


def simulated_errors() -> dict[str, dict[str, float]]:
    """How far the simulator is off, of all runs and by whether residency is in front: pairs,
    geometric mean and standard deviation of the ratio of requests/s, mean difference in points."""
    behind = ("residency", "priced", "rotate")
    groups: dict[str, list[dict[str, Any]]] = {
        "all": [],
        "behind residency": [],
        "without residency": [],
    }
    for row in simulated():
        with_rule = any(word in row["of"].run["arm"] for word in behind)
        for name in ("all", "behind residency" if with_rule else "without residency"):
            groups[name].append(row)
    found = {}
    for name, rows in groups.items():
        logs = np.log(
            [row["requests_per_s"] / row["of"].measures["requests_per_s"] for row in rows]
        )
        points = [
            row["due_in_time_share"] - row["of"].measures["due_in_time_share"] for row in rows
        ]
        found[name] = {
            "pairs": len(rows),
            "ratio": float(np.exp(logs.mean())),
            "spread": float(np.expm1(logs.std(ddof=1))),
            "points": 100 * float(np.mean(points)),
        }
    return found


def strongest(objective: str) -> list[dict[str, Any]]:
    """By arm of `strongest.OBJECTIVE.csv` (simulated): the most sessions up to which every level
    tried meets the objective, for each trace seed, and their mean."""
    rows = read_rows(HERE / f"strongest.{objective}.csv", ["arm", "load", "trace_seed", "not_met"])
    return [
        {"arm": arm, "by_seed": dict(sorted(of.items())), "mean": sum(of.values()) / len(of)}
        for arm, of in _most_met(rows, "arm").items()
    ]


def _most_met(rows: Iterable[dict[str, str]], by: str) -> dict[str, dict[str, int]]:
    """The most sessions up to which every level tried meets the objective, by a column's value and
    trace seed."""
    found: dict[str, dict[str, int]] = {}
    for row in sorted(rows, key=lambda row: int(row["load"]), reverse=True):
        by_seed = found.setdefault(row[by], {})
        # From the highest level down: what misses takes those above it with it.
        if row["not_met"]:
            by_seed[row["trace_seed"]] = 0
        else:
            by_seed[row["trace_seed"]] = by_seed.get(row["trace_seed"], 0) or int(row["load"])
    return found


def steps() -> dict[str, dict[str, Any]]:
    """By GPU and step of `steps.csv` (simulated): the most sessions that meet the objective and
    what 12 and 16 sessions get, means over the trace seeds."""
    with (HERE / "steps.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    found: dict[str, dict[str, Any]] = {}
    for name, by_seed in _most_met(rows, "step").items():
        found[name] = {"sessions": sum(by_seed.values()) / len(by_seed)}
        for load in ("12", "16"):
            of = [row for row in rows if (row["step"], row["load"]) == (name, load)]
            for measure in ("first_tokens_per_s", "in_time_share", "starved_sessions"):
                mean = sum(float(row[measure]) for row in of) / len(of)
                found[name].setdefault(measure, {})[load] = mean
    return found


def simulated_means(name: str) -> list[dict[str, Any]]:
    """Means over trace seeds of what `NAME.csv`, made by `eval.run_lines`, says of simulated runs:
    by sessions and arm."""
    measures = (
        "first_tokens_per_s",
        "in_time_share",
        "late_share_p90",
        "waiting_sessions",
        "longest_wait_s",
    )
    by_cell: dict[tuple[int, str], list[dict[str, str]]] = {}
    for row in read_rows(HERE / f"{name}.csv", measures):
        by_cell.setdefault((int(row["load"]), row["arm"]), []).append(row)
    return [
        {"sessions": sessions, "arm": arm}
        | {measure: float(np.mean([float(row[measure]) for row in rows])) for measure in measures}
        | {"starved": sum(int(row["starved_sessions"]) for row in rows), "seeds": len(rows)}
        for (sessions, arm), rows in sorted(by_cell.items())
    ]


def mean(found: Iterable[Judgement], arm: str, sessions: int, measure: str) -> float:
    """A measure's mean over the trace seeds of an arm's runs."""
    by_seed: dict[int, list[float]] = {}
    for of in found:
        if (of.run["arm"], of.run["sessions"]) == (arm, sessions):
            by_seed.setdefault(of.run["trace_seed"], []).append(of.measures[measure])
    return float(np.mean([np.mean(values) for values in by_seed.values()]))


def elastic_worker() -> dict[str, str]:
    """The tables of each run of `python -m sglang_ext.bench`, from the summaries that are kept."""
    kept = orjson.loads((HERE / "elastic_worker.json").read_bytes())
    return {
        name: markdown(summary).replace("## ", "### ").rstrip() for name, summary in kept.items()
    }


def kv_reads() -> list[dict[str, Any]]:
    """Median, least and most GB/s of each way to read KV, from `kv_reads.csv`."""
    table = pd.read_csv(HERE / "kv_reads.csv", keep_default_na=False)
    table["gb_per_s"] = table["bytes"] / table["read_s"] / 1e9
    groups = table.groupby(["way", "settings", "page_tokens", "tokens"], sort=False)
    found = groups.agg(
        median=("gb_per_s", "median"),
        low=("gb_per_s", "min"),
        high=("gb_per_s", "max"),
        ms=("read_s", "median"),
        samples=("read_s", "size"),
    ).reset_index()
    return [{str(key): value for key, value in row.items()} for row in found.to_dict("records")]


def number(value: float, digits: int = 0) -> str:
    """A number with so many places; an infinite one is ∞, none is empty."""
    if math.isnan(value):
        return ""
    return f"{value:.{digits}f}" if math.isfinite(value) else "∞"


def percent(value: float, digits: int = 0) -> str:
    """A share in percent, without the unit."""
    return number(100 * value, digits)


def pages() -> dict[str, str]:
    """Every page by its file name."""
    environment = Environment(
        loader=FileSystemLoader(HERE / "pages"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters |= {"number": number, "percent": percent}
    known = manifest()
    environment.globals |= {
        "arms": known["arms"],
        "raw_commit": known["raw_commit"],
        "every_run": known["runs"],
        "judged": {of.run["id"]: of for of in judgements()},
        "of_campaign": of_campaign,
        "carried": carried,
        "simulated": simulated,
        "predicted": predicted,
        "simulated_errors": simulated_errors,
        "strongest": strongest,
        "steps": steps(),
        "mean": mean,
        "simulated_means": simulated_means,
        "superseded": superseded(),
        "kv_reads": kv_reads,
        "elastic_worker": elastic_worker,
        "OURS": OURS,
        "MIXED": MIXED,
        "slo": Slo(),
    }
    return {
        name.removesuffix(".j2"): environment.get_template(name).render()
        for name in sorted(
            environment.list_templates(filter_func=lambda name: name.endswith(".md.j2"))
        )
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m results.build", description=__doc__)
    parser.add_argument(
        "--from-raw", action="store_true", help="derive turns/*.parquet from history"
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; 1 where a page is stale"
    )
    options = parser.parse_args(arguments)
    if options.from_raw:
        derive(HERE / "turns")
        return 0
    stale = 0
    runs = [(of.run["arm"], of.run["sessions"], of.measures) for of in of_campaign("fp8-weights")]
    for name, text in (pages() | pictures(runs)).items():
        path = HERE / name
        if path.is_file() and path.read_text() == text:
            continue
        if options.check:
            print(f"{path}: is not what its data say; run python -m results.build", file=sys.stderr)
            stale = 1
        else:
            path.write_text(text)
    return stale


if __name__ == "__main__":
    sys.exit(main())
