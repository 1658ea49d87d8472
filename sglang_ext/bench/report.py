"""One JSON file and one Markdown file of the samples in a folder, whichever phases have run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson

from sglang_ext.bench import identity, stall, tax, transfer
from sglang_ext.bench.samples import Sample, fullest, read

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str]]


def write(folder: Path) -> Path:
    """Writes ``report.json`` (summaries, samples) and ``report.md``; returns the latter's path."""
    samples = read(folder)
    found = summarize(samples)
    option = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    (folder / "report.json").write_bytes(orjson.dumps(found | {"samples": samples}, option=option))
    path = folder / "report.md"
    path.write_text(markdown(found))
    return path


def summarize(samples: Sequence[Sample]) -> dict[str, Any]:
    """The summary of each phase that has samples."""
    found: dict[str, Any] = {}
    for phase in ("identity", "death"):
        if turns := fullest(samples, phase):
            found[phase] = identity.summary(turns)
    if repeats := fullest(samples, "stall"):
        found["stall"] = stall.summary(repeats)
    if loads := fullest(samples, "tax"):
        found["tax"] = tax.summary(loads)
    if transfers := fullest(samples, "transfer"):
        found["transfer"] = transfer.summary(transfers)
    return found


def markdown(found: dict[str, Any]) -> str:
    """The summaries as tables; intervals are 95 %."""
    parts = []
    if rows := found.get("identity"):
        parts.append(_section("Token identity", rows, _IDENTITY))
    if rows := found.get("death"):
        parts.append(_section("Token identity, prefill worker killed", rows, _IDENTITY))
    if rows := found.get("stall"):
        words = f"{rows[0]['decodes']} decodes, a prompt of {rows[0]['prompt_tokens']} tokens"
        parts.append(_section(f"Stall: {words}", rows, _STALL))
    if rows := found.get("tax"):
        parts.append(_section("Tax: ratios to the reference", rows, _TAX))
    if transfers := found.get("transfer"):
        parts.append(_section("Transfer", transfers["rows"], _TRANSFER))
        parts.append(_section("Transfers of one chunk", transfers["one_chunk"], _ONE_CHUNK))
    return "\n".join(parts)


def _section(title: str, rows: Sequence[Row], columns: Sequence[Column]) -> str:
    lines = [f"## {title}", ""]
    lines.append("| " + " | ".join(name for name, _ in columns) + " |")
    lines.append("|" + "---|" * len(columns))
    lines += ["| " + " | ".join(text(row) for _, text in columns) + " |" for row in rows]
    return "\n".join([*lines, ""])


def number(value: Any) -> str:
    """Three digits; a dash for nothing."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.3g}"


def _plain(key: str) -> Callable[[Row], str]:
    return lambda row: number(row[key]) if not isinstance(row[key], str) else row[key]


def _estimate(key: str) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        found = row[key]
        if "low" not in found:
            return number(found["value"])
        return f"{number(found['value'])} [{number(found['low'])}–{number(found['high'])}]"

    return text


def _ratio(key: str) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        found = row[key]
        if "low" not in found:
            return f"{found['value']:.3f}"
        return f"{found['value']:.3f} [{found['low']:.3f}–{found['high']:.3f}]"

    return text


def _megabytes(key: str) -> Callable[[Row], str]:
    return lambda row: number(row[key] / 1e6)


_IDENTITY: tuple[Column, ...] = (
    ("arm", _plain("arm")),
    ("turns", _plain("turns")),
    ("outputs", _plain("outputs")),
    ("separated", _plain("separated")),
    ("prefill worker lost", _plain("prefill_lost")),
    ("after an abort", _plain("aborted_before")),
    ("identical", _plain("identical")),
    ("different", _plain("different")),
    ("earliest difference (token)", _plain("first_difference")),
    ("lead there, median (nats)", _plain("lead_nats_p50")),
    ("largest", _plain("lead_nats_max")),
    ("prompt tokens", _plain("input_tokens")),
    ("cached", _plain("cached_tokens")),
)
_STALL: tuple[Column, ...] = (
    ("arm", _plain("arm")),
    ("repeats", _plain("repeats")),
    ("ITL p50 before (ms)", _estimate("base_itl_p50_ms")),
    ("ITL p50 meanwhile (ms)", _estimate("itl_p50_ms")),
    ("ITL p99 meanwhile (ms)", _estimate("itl_p99_ms")),
    ("worst gap (ms)", _estimate("worst_gap_ms")),
    ("the prompt's TTFT (ms)", _estimate("ttft_ms")),
)
_TAX: tuple[Column, ...] = (
    ("arm", _plain("arm")),
    ("beside", _plain("beside")),
    ("rounds", _plain("rounds")),
    ("requests", _plain("requests")),
    ("TTFT p90 (ms)", _plain("ttft_p90_ms")),
    ("TPOT p90 (ms)", _plain("tpot_p90_ms")),
    ("TTFT p90, ratio", _ratio("ttft_p90")),
    ("TPOT p90, ratio", _ratio("tpot_p90")),
    ("throughput, ratio", _ratio("throughput")),
)
_TRANSFER: tuple[Column, ...] = (
    ("arm", _plain("arm")),
    ("context (tokens)", _plain("context_tokens")),
    ("what", _plain("what")),
    ("samples", _plain("samples")),
    ("moved (MB)", _megabytes("bytes")),
    ("saved (MB)", _megabytes("saved_bytes")),
    ("chunks", _plain("chunks")),
    ("first to last page (ms)", _estimate("first_to_last_page_ms")),
    ("after the prefill (ms)", _estimate("after_prefill_ms")),
    ("TTFT (ms)", _estimate("ttft_ms")),
)
_ONE_CHUNK: tuple[Column, ...] = (
    ("arm", _plain("arm")),
    ("samples", _plain("samples")),
    ("constant (ms)", _plain("constant_ms")),
    ("GB/s beyond it", _plain("gb_s")),
)
