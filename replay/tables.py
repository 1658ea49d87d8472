"""Plain text for people: what `stats` and `run` print. Owns wording; computes nothing."""

from __future__ import annotations

from typing import Any

_LABEL_WIDTH = 18
_CURVE_STEP = 0.01


def stats_lines(record: dict[str, Any]) -> list[str]:
    """A trace's statistics as lines of text."""
    rps, reuse = record["arrival_rps"], record["reuse"]
    mean_rps = f"{rps['mean']:.3g}" if rps["mean"] else "-"
    blocks = f" (blocks of {record['block_size']} tokens)" if record["block_size"] else ""
    rows = [
        (
            "requests",
            (
                f"{record['requests']:,} in {record['sessions']:,} sessions, "
                f"{record['multi_turn_share']:.1%} of them with more than one turn"
            ),
        ),
        (
            "span",
            (
                f"{record['span_s']:,.0f} s, {mean_rps} requests/s on average, "
                f"{rps['peak_10s']:.3g} in the busiest 10 s"
            ),
        ),
        ("input tokens", _distribution(record["input_tokens"])),
        ("output tokens", _distribution(record["output_tokens"])),
        (
            "input to output",
            f"{record['io_ratio']:.1f} : 1, prefill {record['prefill_share']:.1%} of tokens",
        ),
        ("turns a session", _distribution(record["turns"])),
    ]
    session = record["session"]
    rows += [
        ("first prompt", f"{_distribution(session['first_input_tokens'])} tokens"),
        ("last prompt", f"{_distribution(session['last_input_tokens'])} tokens"),
        ("session length", f"{_distribution(session['duration_s'])} s"),
        ("session's reuse", f"{_distribution(session['reused_share'], 3)} of its input"),
    ]
    if record["growth_tokens"]:
        rows.append(("growth a turn", f"{_distribution(record['growth_tokens'])} tokens"))
    if record["think_time_s"]:
        rows.append(("think time", f"{_distribution(record['think_time_s'], 1)} s"))
    rows += [
        ("block sharing", f"{record['block_sharing']:.1%} of blocks occurred before{blocks}"),
        (
            "best hit rate",
            f"{record['best_hit_rate']:.1%} of input tokens (infinite prefix cache)",
        ),
    ]
    if reuse:
        rows.append(
            (
                "reuse",
                (
                    f"{reuse['within_session']:.1%} within a session, "
                    f"{reuse['across_sessions']:.1%} across sessions"
                ),
            )
        )
    lines = _align(rows)
    if record["inconsistent_ids"]:
        lines.append(
            f"warning: {record['inconsistent_ids']:,} block ids stand for different prefixes in "
            "different requests; hit rates are then too high"
        )
    for cache in record.get("lru", []):
        lines.append(f"LRU cache, {cache['instances']} instance(s): tokens each, hit rate")
        shown = -1.0
        for point in cache["curve"]:
            if point["hit_rate"] - shown >= _CURVE_STEP or point is cache["curve"][-1]:
                shown = point["hit_rate"]
                lines.append(f"  {point['cache_tokens']:>14,}  {shown:.1%}")
    return lines


def sample_lines(report: dict[str, Any]) -> list[str]:
    """A sampling report as lines of text."""
    lines = [f"{'':<26}{'source':>16}{'sample':>16}{'change':>10}"]
    for name, row in report["statistics"].items():
        before, after = _number(row["source"]), _number(row["sample"])
        change = row["relative_change"]
        moved = "-" if change is None else f"{change:+.1%}"
        lines.append(f"{name:<26}{before:>16}{after:>16}{moved:>10}")
    return lines + [f"warning: {text}" for text in report["warnings"]]


def summary_lines(summary: dict[str, Any]) -> list[str]:
    """A run's summary as lines of text."""
    errors = ", ".join(f"{count} {kind}" for kind, count in summary["errors"].items()) or "none"
    rows = [
        ("requests", f"{summary['ok']:,} of {summary['planned']:,} well; errors: {errors}"),
        *(
            (
                phase.replace("_", "-"),
                f"{part['requests']:,}, not measured; {part['errors']} failed"
                + (f", {part['cancelled']} broken off" if "cancelled" in part else ""),
            )
            for phase, part in summary["not_measured"].items()
        ),
        ("duration", f"{summary['duration_s']:.1f} s"),
        ("tokens", f"{summary['input_tokens']:,} in, {summary['output_tokens']:,} out"),
    ]
    if summary["cached_share"] is not None:
        rows.append(("cached", f"{summary['cached_share']:.1%} of prompt tokens"))
    for key, name in (
        ("ttft_s", "TTFT"),
        ("tpot_s", "TPOT"),
        ("e2e_s", "end to end"),
        ("lateness_s", "client lateness"),
    ):
        values = summary[key]
        if values:
            parts = [f"{percent} {values[percent]:.4f} s" for percent in ("p50", "p90", "p99")]
            rows.append((name, ", ".join(parts)))
    return _align(rows)


def _align(rows: list[tuple[str, str]]) -> list[str]:
    return [f"{label:<{_LABEL_WIDTH}}{text}" for label, text in rows]


def _distribution(values: dict[str, float], digits: int = 0) -> str:
    return (
        f"mean {values['mean']:,.{max(digits, 1)}f}, p50 {values['p50']:,.{digits}f}, "
        f"p90 {values['p90']:,.{digits}f}, p99 {values['p99']:,.{digits}f}, "
        f"max {values['max']:,.{digits}f}"
    )


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
