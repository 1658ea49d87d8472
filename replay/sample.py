"""Smaller traces from large ones: whole conversations, chosen so that reuse survives.

Owns the choice and the report of what it changed. Reads the source twice; memory holds a few
numbers a session (and what statistics need). Must not know how traces are replayed.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from deltaserve.errors import InputError
from replay.stats import Session, TraceStats
from replay.trace import TraceWriter, read_trace

Method = Literal["window", "random"]
Thinning = Literal["families", "sessions"]

# Reuse that moves by more than this, in points, is a warning.
_MOVED_POINTS = 5.0
_DRAWS = 16
_COMPARED = (
    "requests",
    "sessions",
    "multi_turn_share",
    "turns.mean",
    "input_tokens.mean",
    "input_tokens.p50",
    "input_tokens.p90",
    "output_tokens.mean",
    "output_tokens.p50",
    "prefill_share",
    "span_s",
    "arrival_rps.mean",
    "arrival_rps.peak_10s",
    "block_sharing",
    "best_hit_rate",
    "reuse.within_session",
    "reuse.across_sessions",
)


@dataclass(slots=True)
class _Conversation:
    """Sessions that depend on each other (one with its sub-agents)."""

    begin_s: float
    requests: int = 0
    names: list[str] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)


@dataclass(slots=True, frozen=True)
class _Aim:
    """What a draw should be like: the source's block sharing and mean input length."""

    block_sharing: float
    mean_input_tokens: float


def sample(
    source: Path,
    output: Path,
    *,
    method: Method = "window",
    window_s: float = 600.0,
    window_start_s: float | None = None,
    sample_ratio: float = 0.0015,
    max_single_turn_ratio: float = 0.3,
    seed: int = 0,
    thin: Thinning = "families",
    on_progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Writes a sample and returns the report: every statistic of source and sample, and warnings.

    `window`: of the conversations that begin within a contiguous window, a share of `sample_ratio`,
    of which at most `max_single_turn_ratio` have a single turn. With `thin="families"` neighbours
    in the tree of prefixes are kept together, and of many draws with families of different sizes
    the one is taken whose block sharing and mean input are nearest to the source's; with
    `"sessions"` each is kept or dropped by itself. `window_start_s` counts from the source's first
    request. `random`: the same share of all conversations, drawn evenly: what destroys reuse, kept
    so that this can be shown.
    """
    _check(window_s, sample_ratio, max_single_turn_ratio)
    on_progress("first pass: sessions and statistics of the source")
    conversations, span_s, source_stats = _first_pass(source)
    generator = random.Random(seed)
    begin_s: float | None = None
    if method == "random":
        eligible = conversations
        chosen = generator.sample(eligible, _target(eligible, sample_ratio))
    else:
        begin_s = window_start_s
        if begin_s is None:
            begin_s = generator.uniform(0.0, max(0.0, span_s - window_s))
        eligible = [c for c in conversations if begin_s <= c.begin_s < begin_s + window_s]
        if not eligible:
            raise InputError(
                f"{source}: no session begins within {begin_s:g} and {begin_s + window_s:g} s of "
                "the first request"
            )
        multi, single = _quotas(eligible, sample_ratio, max_single_turn_ratio)
        if not multi + single:
            raise InputError(
                f"{source}: every conversation that begins in the window ({len(eligible):,}) has a "
                f"single turn, and --max-single-turn-ratio {max_single_turn_ratio:g} lets a sample "
                "hold such only beside others; give --max-single-turn-ratio 1"
            )
        if multi + single == len(eligible):
            chosen = eligible  # every draw is of all
        elif thin == "sessions":
            chosen = _draw_sessions(eligible, multi, single, generator)
        else:
            aim = _Aim(source_stats["block_sharing"], source_stats["input_tokens"]["mean"])
            chosen = _draw_families(eligible, multi, single, aim, generator)
    on_progress(f"second pass: writing {len(chosen):,} of {len(eligible):,} conversations")
    sample_stats = _second_pass(source, output, chosen)
    return {
        "method": method,
        "seed": seed,
        "thin": thin if method == "window" else None,
        "sample_ratio": sample_ratio,
        "window_s": window_s if method == "window" else None,
        "window_start_s": begin_s,
        "max_single_turn_ratio": max_single_turn_ratio if method == "window" else None,
        "eligible_conversations": len(eligible),
        "chosen_conversations": len(chosen),
        "statistics": _compare(source_stats, sample_stats),
        "warnings": _warnings(source_stats, sample_stats),
    }


def _check(window_s: float, sample_ratio: float, max_single_turn_ratio: float) -> None:
    if window_s <= 0:
        raise InputError(f"--window-seconds {window_s:g}: expected more than 0")
    if not 0 < sample_ratio <= 1:
        raise InputError(f"--sample-ratio {sample_ratio:g}: expected above 0 and at most 1")
    if not 0 <= max_single_turn_ratio <= 1:
        raise InputError(f"--max-single-turn-ratio {max_single_turn_ratio:g}: expected 0 to 1")


def _first_pass(source: Path) -> tuple[list[_Conversation], float, dict[str, Any]]:
    """The source's conversations in the order in which they begin (in seconds from the first
    request), the span of its requests and its statistics."""
    stats = TraceStats()
    request_hashes = array("q")
    request_sessions = array("l")
    links: list[tuple[int, int]] = []
    origin_s, end_s = None, 0.0
    for request in read_trace(source):
        if origin_s is None:
            origin_s = request.timestamp_s
        request.timestamp_s -= origin_s
        stats.add(request)
        number = stats.sessions[request.session_id].number
        request_hashes.append(hash(request.request_id))
        request_sessions.append(number)
        if request.parent_request_id is not None:
            links.append((number, hash(request.parent_request_id)))
        end_s = request.timestamp_s
    return _join(stats, request_hashes, request_sessions, links), end_s, stats.result()


def _join(
    stats: TraceStats,
    request_hashes: array[int],
    request_sessions: array[int],
    links: list[tuple[int, int]],
) -> list[_Conversation]:
    """Sessions joined along `parent_request_id`; parents are found by the hash of their id."""
    root = list(range(len(stats.sessions)))

    def find(session: int) -> int:
        while root[session] != session:
            root[session] = root[root[session]]
            session = root[session]
        return session

    if links:
        hashes = np.frombuffer(request_hashes, dtype=np.int64)
        order = np.argsort(hashes, kind="stable")
        wanted = np.array([parent for _, parent in links], dtype=np.int64)
        places = np.searchsorted(hashes[order], wanted).clip(max=len(order) - 1)
        for (child, parent), place in zip(links, order[places].tolist(), strict=True):
            if request_hashes[place] == parent:
                one, other = find(child), find(request_sessions[place])
                root[max(one, other)] = min(one, other)
    joined: dict[int, _Conversation] = {}
    for name, session in stats.sessions.items():
        first = find(session.number)
        if first not in joined:
            joined[first] = _Conversation(session.begin_s)
        joined[first].requests += session.requests
        joined[first].names.append(name)
        joined[first].sessions.append(session)
    return list(joined.values())


def _target(eligible: list[_Conversation], sample_ratio: float) -> int:
    return max(1, round(sample_ratio * len(eligible)))


def _quotas(
    eligible: list[_Conversation], sample_ratio: float, max_single_turn_ratio: float
) -> tuple[int, int]:
    """How many conversations with several turns and with a single one to keep."""
    target = _target(eligible, sample_ratio)
    several = sum(conversation.requests > 1 for conversation in eligible)
    natural = 1 - several / len(eligible)
    single = min(round(natural * target), int(max_single_turn_ratio * target))
    multi = min(target - single, several)
    if max_single_turn_ratio < 1:
        single = min(single, int(multi * max_single_turn_ratio / (1 - max_single_turn_ratio)))
    return multi, single


def _draw_sessions(
    eligible: list[_Conversation], multi: int, single: int, generator: random.Random
) -> list[_Conversation]:
    return [
        *generator.sample([c for c in eligible if c.requests > 1], multi),
        *generator.sample([c for c in eligible if c.requests == 1], single),
    ]


def _draw_families(
    eligible: list[_Conversation],
    multi: int,
    single: int,
    aim: _Aim,
    generator: random.Random,
) -> list[_Conversation]:
    """The draw nearest to the aim, of `_DRAWS` for each size of family from 2 to all."""
    # In lexicographic order of their first prompts' ids, conversations that share a prefix are
    # neighbours, and the nearer the longer what they share.
    order = sorted(eligible, key=lambda conversation: conversation.sessions[0].chains[0])
    best, best_distance = _draw_sessions(eligible, multi, single, generator), math.inf
    size = 2
    while True:
        for _ in range(_DRAWS):
            draw = _draw_runs(order, multi, single, size, generator)
            distance = _distance(draw, aim)
            if distance < best_distance:
                best, best_distance = draw, distance
        if size >= multi + single:
            return best
        size *= 2


def _draw_runs(
    order: list[_Conversation], multi: int, single: int, size: int, generator: random.Random
) -> list[_Conversation]:
    """Runs of about `size` neighbours, from random places on, until both quotas are full."""
    taken: dict[int, _Conversation] = {}
    total = multi + single
    left = {True: multi, False: single}
    while left[True] or left[False]:
        share = {
            True: min(left[True], -(-size * multi // total)),
            False: min(left[False], -(-size * single // total)),
        }
        place = generator.randrange(len(order))
        steps = 0
        while (share[True] or share[False]) and steps < len(order):
            conversation = order[place]
            kind = conversation.requests > 1
            if share[kind] and place not in taken:
                taken[place] = conversation
                share[kind] -= 1
                left[kind] -= 1
            place = (place + 1) % len(order)
            steps += 1
    return list(taken.values())


def _distance(draw: list[_Conversation], aim: _Aim) -> float:
    """How far a draw is from the aim: 1 for 5 points of block sharing, or 10 % of input length."""
    sessions = [session for conversation in draw for session in conversation.sessions]
    ids: set[int] = set()
    for session in sessions:
        for chain in session.chains:
            ids.update(chain)
        if session.tails:
            ids.update(session.tails)
    sharing = 1 - len(ids) / sum(session.blocks for session in sessions)
    requests = sum(session.requests for session in sessions)
    mean = sum(session.input_tokens for session in sessions) / requests
    return math.hypot(
        (sharing - aim.block_sharing) / 0.05, (mean / aim.mean_input_tokens - 1) / 0.1
    )


def _second_pass(source: Path, output: Path, chosen: list[_Conversation]) -> dict[str, Any]:
    """Writes the chosen conversations, from time 0, and returns their statistics."""
    names = {name for conversation in chosen for name in conversation.names}
    begin_s = None
    stats = TraceStats()
    with TraceWriter(output) as writer:
        for request in read_trace(source):
            if request.session_id in names:
                if begin_s is None:
                    begin_s = request.timestamp_s
                request.timestamp_s = round(request.timestamp_s - begin_s, 6)
                writer.write(request)
                stats.add(request)
    return stats.result()


def _look_up(record: dict[str, Any], name: str) -> float | None:
    value: Any = record
    for part in name.split("."):
        value = None if value is None else value[part]
    return None if value is None else float(value)


def _compare(source: dict[str, Any], chosen: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """Each statistic in source and sample, and the difference as a share of the source's."""
    table: dict[str, dict[str, float | None]] = {}
    for name in _COMPARED:
        before, after = _look_up(source, name), _look_up(chosen, name)
        change = (after - before) / before if before and after is not None else None
        table[name] = {"source": before, "sample": after, "relative_change": change}
    return table


def _warnings(source: dict[str, Any], chosen: dict[str, Any]) -> list[str]:
    warnings = []
    for name, words in (
        ("block_sharing", "block sharing"),
        ("best_hit_rate", "the best possible hit rate"),
    ):
        points = 100 * (chosen[name] - source[name])
        if abs(points) > _MOVED_POINTS:
            warnings.append(
                f"{words} moved by {points:+.1f} points ({source[name]:.1%} → {chosen[name]:.1%})"
            )
    for part, words in (("across_sessions", "across sessions"), ("within_session", "in sessions")):
        before, after = (_reused_share(record, part) for record in (source, chosen))
        if 100 * (before - after) > _MOVED_POINTS:
            warnings.append(
                f"reuse {words} was lost: {before:.1%} of the source's input tokens, "
                f"{after:.1%} of the sample's"
            )
    return warnings


def _reused_share(record: dict[str, Any], part: str) -> float:
    reuse = record["reuse"]
    return float(record["best_hit_rate"] * reuse[part]) if reuse else 0.0
