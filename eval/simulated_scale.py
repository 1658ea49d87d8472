"""How large a fleet can be simulated here: `python -m eval.simulated_scale`.

Owns the made load and the table: time, decisions a second of a core, and memory by fleet size. Each
size runs in a process of its own, so that its memory is its own.
"""

from __future__ import annotations

import multiprocessing
import random
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import orjson
import typer

from deltaserve.errors import told_in_one_line
from eval.simulate import simulate

_BLOCK_TOKENS = 64
_SESSIONS = 200
_TURNS = 30


@dataclass(frozen=True)
class Scale:
    """What one size took: seconds on the clock and of a core (where others use the machine, the
    first is longer), and memory in bytes."""

    workers: int
    simulated_s: float
    wall_s: float
    cpu_s: float
    requests: int
    peak_bytes: int

    @property
    def decisions_per_cpu_s(self) -> float:
        """The simulation has one thread, so this is its speed on a core of its own."""
        return self.requests / self.cpu_s


def made_requests(seed: int = 1, shorter: int = 1) -> list[dict[str, Any]]:
    """Planned requests of coding sessions: prompts of 20,000 to 80,000 tokens that grow by the
    answer and some 1,000 tokens a turn; `shorter` divides these, the answers stay."""
    rng = random.Random(seed)
    lines: list[dict[str, Any]] = []
    next_id = 1
    for session in range(_SESSIONS):
        length = rng.randrange(20_000, 40_000) // shorter
        runs: list[tuple[int, int]] = []
        blocks = 0
        for turn in range(_TURNS):
            if runs:
                # The started block of the prompt before is another now that it is full.
                runs[-1] = (runs[-1][0], runs[-1][1] - 1)
                blocks -= 1
            new = -(-length // _BLOCK_TOKENS) - blocks
            runs = [run for run in runs if run[1]] + [(next_id, new)]
            next_id += new
            blocks += new
            output = rng.randrange(50, 600)
            lines.append(
                {
                    "request_id": f"s{session}:{turn}",
                    "session_id": f"s{session}",
                    "turn": turn,
                    "trace_s": float(turn),
                    "input_length": length,
                    "output_length": output,
                    "block_size": _BLOCK_TOKENS,
                    "hash_ids": list(runs),
                    "think_time_s": rng.expovariate(1 / 4.0) if turn else 0.0,
                    "waits_for": [len(lines) - 1] if turn else [],
                    "tree": session,
                }
            )
            length += output + rng.randrange(100, 2_000) // shorter
    return lines


def scale(
    workers: int,
    simulated_s: float,
    sessions_a_worker: int,
    folder: Path,
    *,
    shorter: int = 1,
    rule: str = "priced",
) -> Scale:
    """Simulates a fleet of `workers` for `simulated_s` of its time, in this process, with a rule of
    residency."""
    requests = folder / "planned.jsonl"
    made = made_requests(shorter=shorter)
    requests.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in made))
    plan = {
        "requests": str(requests),
        "seed": 1,
        "load": {"max_inflight_sessions": sessions_a_worker * workers, "max_think_s": 10.0},
        "phases": {"measure_s": simulated_s, "recycle": True, "drain_s": 0.0},
        "router": {"policy": "unified", "residency": {"rule": rule}},
        "workers": [{"id": "w", "count": workers, "kv_tokens": 281_888}],
        # A decision's line names every worker: 1,000 of them would fill a disk.
        "output": {"decisions": False},
    }
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    report = simulate(plan, folder / "run")
    return Scale(
        workers=workers,
        simulated_s=report["end_s"],
        wall_s=time.monotonic() - began_s,
        cpu_s=time.process_time() - began_cpu_s,
        requests=report["requests"],
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _apart(
    workers: int, simulated_s: float, sessions_a_worker: int, shorter: int, rule: str
) -> Scale:
    """`scale` in a new process, which no other size has used memory of."""
    context = multiprocessing.get_context("spawn")
    with TemporaryDirectory() as folder, context.Pool(1) as pool:
        given = (workers, simulated_s, sessions_a_worker, Path(folder))
        return pool.apply(scale, given, {"shorter": shorter, "rule": rule})


def main(
    workers: Annotated[
        list[int] | None, typer.Argument(help="Fleet sizes. Default: 8 64 256 1000.")
    ] = None,
    minutes: Annotated[float, typer.Option(help="Of the fleet's own time.")] = 10.0,
    sessions: Annotated[int, typer.Option(min=1, help="In flight, a worker.")] = 4,
    shorter: Annotated[int, typer.Option(min=1, help="Prompts so many times shorter.")] = 1,
    rule: Annotated[str, typer.Option(help="Of residency.")] = "priced",
) -> None:
    """Simulate fleets of several sizes and print what each took on this machine."""
    heads = (("workers", 8), ("requests", 10), ("wall", 10), ("core", 10), ("decisions/s", 13))
    typer.echo("".join(f"{head:>{width}}" for head, width in heads) + f"{'memory':>10}")
    for count in workers or [8, 64, 256, 1000]:
        found = _apart(count, 60 * minutes, sessions, shorter, rule)
        typer.echo(
            f"{found.workers:>8}{found.requests:>10,}{found.wall_s:>8.1f} s{found.cpu_s:>8.1f} s"
            f"{found.decisions_per_cpu_s:>13,.0f}{found.peak_bytes / 2**30:>6.2f} GiB"
        )


if __name__ == "__main__":
    with told_in_one_line():
        typer.run(main)
