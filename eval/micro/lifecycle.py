"""Where the time of a separated request goes, from sending to first token.

Asks a prefill/decode topology one request at a time, cold and continuing a cached prefix, and reads
the moments that each worker's telemetry noted for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

import launch
from deltaserve.errors import InputError
from eval.document import Figure, Section
from eval.formatting import DASH, Entry, percent, seconds, size
from eval.micro.driver import Bench, answered, driver, separated
from eval.plot import PALETTE, Axis, Chart, Spans
from eval.records import events
from eval.tables import Table
from replay.results import Result

SEEN_BEFORE = (
    "Seen before: prefill 620 ms (95 % of the overhead), transfer 42 ms, everything else 10 ms at "
    "the median, on vLLM 0.18.1 with Mooncake over RDMA, two H20, Qwen3-Coder-30B-A3B; under load, "
    "on the same stack, separated requests took 10 to 20 times what these add up to."
)
STAGES = (
    "to the workers",
    "handshake",
    "queued for prefill",
    "prefill",
    "KV transfer",
    "queued for decode",
    "first token out",
)


@dataclass(frozen=True)
class Ask:
    """One request: new tokens, tokens already cached, and how long each stage took (seconds)."""

    new_tokens: int
    cached_tokens: int
    repeat: int
    ttft_s: float
    stages: dict[str, float]
    bytes_moved: float | None
    bytes_saved: float | None

    @property
    def kind(self) -> str:
        return f"{self.new_tokens} new" + (
            f" after {self.cached_tokens}" if self.cached_tokens else ", cold"
        )


def check(topology: launch.Topology) -> None:
    """Raises `InputError` for a topology that separates nothing or notes no moments."""
    if topology.engine.name != "sglang":
        raise InputError(f"{topology.name}: lifecycle needs SGLang's telemetry")
    if not separated(topology):
        raise InputError(f"{topology.name}: lifecycle needs prefill and decode workers")


def default_lengths(on_cpu: bool) -> tuple[Sequence[int], int]:
    """Prompt lengths, and the new tokens of a continued prompt."""
    return ((512, 2048, 8192), 256) if on_cpu else ((2000, 8000, 32000, 64000), 2000)


async def measure(
    target: Bench,
    lengths: Sequence[int],
    continued_tokens: int,
    repeats: int,
    say: Callable[[str], None],
) -> list[Ask]:
    """Each length cold and continued, `repeats` times; the first round is not counted."""
    asked: list[tuple[int, int, int, Result]] = []
    async with driver(target) as drive:
        unix_origin_s = drive.unix_origin_s
        for repeat in range(repeats + 1):
            for length in lengths:
                say(f"{length} tokens, repeat {repeat}")
                session = f"lifecycle-{repeat}-{length}"
                cold = drive.prompt(length)
                first = answered(await drive.ask(cold, 2, session))
                longer = drive.prompt(continued_tokens, after=cold)
                second = answered(await drive.ask(longer, 2, session))
                if repeat:
                    asked.append((length, 0, repeat, first))
                    cached = longer.tokens - continued_tokens
                    asked.append((continued_tokens, cached, repeat, second))
    phases, transfers = read_phases(target)
    found = []
    for new, cached, repeat, result in asked:
        here = phases.get(result.request_id)
        if here is None:
            continue
        moved = transfers.get(here["room"])
        assert result.sent_s is not None
        assert result.first_token_s is not None
        found.append(
            Ask(
                new_tokens=new,
                cached_tokens=cached,
                repeat=repeat,
                ttft_s=result.first_token_s - result.sent_s,
                stages=stages(
                    here,
                    result.sent_s + unix_origin_s,
                    result.first_token_s + unix_origin_s,
                ),
                bytes_moved=None if moved is None else float(moved["bytes"]),
                bytes_saved=None if moved is None else float(moved["saved_bytes"]),
            )
        )
    if not found:
        raise InputError(f"{target.folder}/steps: no request of this run is in the telemetry")
    return found


def read_phases(
    target: Bench,
) -> tuple[dict[str, dict[str, float]], dict[float, dict[str, float]]]:
    """Moments by request (those of the prefill worker prefixed `p_`, of decode `d_`), and KV
    transfers by room."""
    by_room: dict[float, dict[str, float]] = {}
    names: dict[str, float] = {}
    for event in events(target.folder / "steps", "request"):
        room = event.get("room")
        if room is None:
            continue
        prefix = "p_" if event.get("mode") == "prefill" else "d_"
        place = by_room.setdefault(room, {"room": room})
        place |= {prefix + name: float(at) for name, at in event["phases"].items()}
        # The replay client adds "~" and its own id, so that engines never see a name twice.
        name = str(event.get("engine_request_id"))
        names[name.rpartition("~")[0] or name] = room
    transfers = {event["room"]: event for event in events(target.folder / "steps", "kv_transfer")}
    return {name: by_room[room] for name, room in names.items()}, transfers


def stages(
    moments: Mapping[str, float], sent_unix_s: float, first_unix_s: float
) -> dict[str, float]:
    """Seconds of each stage: the differences of successive moments, so that they add up to TTFT.

    A moment that was not noted leaves its stage's time to the next one.
    """
    marks = (
        ("to the workers", moments.get("p_bootstrap_queued_s")),
        ("handshake", moments.get("p_queued_s")),
        ("queued for prefill", moments.get("p_prefill_started_s")),
        ("prefill", moments.get("p_prefill_finished_s")),
        ("KV transfer", moments.get("p_transfer_finished_s")),
        ("queued for decode", moments.get("d_decode_ready_s")),
        ("first token out", first_unix_s),
    )
    spent = dict.fromkeys(STAGES, 0.0)
    before_s = sent_unix_s
    for name, at_s in marks:
        if at_s is None:
            continue
        # Clocks of one machine, but stages of two processes: never negative, never past the end.
        at_s = min(max(at_s, before_s), first_unix_s)
        spent[name] = at_s - before_s
        before_s = at_s
    return spent


def sections(asks: Sequence[Ask]) -> list[Section]:
    """Stacked bars of the median stages, and the table behind them."""
    kinds = list(dict.fromkeys(ask.kind for ask in sorted(asks, key=_order)))
    medians = {
        kind: {
            stage: float(np.median([ask.stages[stage] for ask in asks if ask.kind == kind]))
            for stage in STAGES
        }
        for kind in kinds
    }
    rows = []
    for kind in kinds:
        same = [ask for ask in asks if ask.kind == kind]
        whole = sum(medians[kind].values())
        moved = [ask.bytes_moved for ask in same if ask.bytes_moved is not None]
        saved = [ask.bytes_saved for ask in same if ask.bytes_saved is not None]
        rows.append(
            [
                Entry(kind),
                Entry(seconds(float(np.median([ask.ttft_s for ask in same])))),
                *(
                    Entry(seconds(medians[kind][stage]), percent(medians[kind][stage] / whole))
                    for stage in STAGES
                ),
                Entry(size(float(np.median(moved))) if moved else DASH),
                Entry(size(float(np.median(saved))) if saved else DASH),
            ]
        )
    marks = []
    begun = [0.0] * len(kinds)
    for i, stage in enumerate(STAGES):
        ended = [at + medians[kind][stage] for at, kind in zip(begun, kinds, strict=True)]
        marks.append(Spans(stage, begun, ended, PALETTE[i % len(PALETTE)]))
        begun = ended
    figure = Chart(
        "Time to first token",
        Axis("median", "s", zero=True),
        Axis(categories=tuple(kinds)),
        marks,
        80 + 34 * len(kinds),
    )
    columns = [
        "Prompt",
        "TTFT",
        *(stage[0].upper() + stage[1:] for stage in STAGES),
        "KV moved",
        "KV saved",
    ]
    return [
        Section(
            "lifecycle",
            "Where a separated request's time goes",
            ["Medians, one request at a time; shares are of the stages' sum.", SEEN_BEFORE],
            [("", Table(columns, rows))],
            [Figure("lifecycle", "Median seconds of each stage, by prompt", figure)],
        )
    ]


def raw(asks: Sequence[Ask]) -> list[dict[str, object]]:
    """The requests, for programs."""
    return [asdict(ask) for ask in asks]


def _order(ask: Ask) -> tuple[bool, int, int]:
    return bool(ask.cached_tokens), ask.cached_tokens, ask.new_tokens
