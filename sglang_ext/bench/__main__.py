"""The command line of `sglang_ext.bench`."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

from deltaserve.errors import InputError
from sglang_ext.bench import identity, report, stall, tax, transfer, warm
from sglang_ext.bench.client import (
    Client,
    Prompts,
    WorkerError,
    parse_arm,
    parse_worker,
)
from sglang_ext.bench.samples import Sink

_EXAMPLE = """\
example:
  python -m sglang_ext.bench stall --output out/elastic --arms colocated,itl,stock,itl+prefill \\
    --worker colocated=http://127.0.0.1:31000 --worker itl=http://127.0.0.1:31001 \\
    --worker stock=http://127.0.0.1:31002 \\
    --worker prefill=http://127.0.0.1:31003,127.0.0.1:31004
  python -m sglang_ext.bench report --output out/elastic
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sglang_ext.bench",
        description="Measures SGLang workers that are already running.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    phases = parser.add_subparsers(dest="phase", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--output", type=Path, required=True, help="folder of samples and report")
    asking = argparse.ArgumentParser(add_help=False, parents=[common])
    asking.add_argument(
        "--worker", action="append", required=True, metavar="NAME=URL[,BOOTSTRAP_HOST:PORT]"
    )
    asking.add_argument(
        "--arms",
        required=True,
        help="comma-separated: WORKER, WORKER+PREFILL, or (identity, death) WORKER~PREFILL",
    )
    asking.add_argument("--limit-s", type=float, default=600, help="end the phase after this long")
    asking.add_argument("--vocabulary", type=int, default=30_000, help="token ids are below this")
    asking.add_argument("--seed", type=int, default=1)

    def phase(name: str, text: str, **counts: int) -> argparse.ArgumentParser:
        sub = phases.add_parser(name, help=text, description=text, parents=[asking])
        for option, default in counts.items():
            sub.add_argument(f"--{option.replace('_', '-')}", type=int, default=default)
        return sub

    phase("warm", "Make workers compile what they compile at first use.")
    conversations = {
        "sessions": 24,
        "turns": 3,
        "first_tokens": 4000,
        "turn_tokens": 1000,
        "output_tokens": 16,
        "at_once": 1,
        "abort_percent": 0,
    }
    same = phase("identity", "Are greedy tokens the same on every path?", **conversations)
    dying = phase(
        "death", "Are they, where the prefill worker is killed?", **conversations, after_turns=12
    )
    dying.add_argument("--kill", type=int, required=True, metavar="PID", help="gets SIGKILL")
    beside = phase(
        "stall",
        "What a long prompt does to running decodes.",
        decodes=8,
        context_tokens=2000,
        prompt_tokens=32_000,
        repeats=5,
        stream_tokens=4000,
    )
    beside.add_argument("--base-s", type=float, default=0.5, help="decode alone for this long")
    cost = phase(
        "tax",
        "What an elastic worker costs that never separates.",
        lanes=8,
        sessions=16,
        turns=3,
        first_tokens=6000,
        turn_tokens=1000,
        output_tokens=64,
        rounds=4,
    )
    for sub in (same, dying, cost):
        sub.add_argument("--reference", required=True, help="the worker to compare with")
    moved = phase("transfer", "Time of KV transfers against bytes.", delta_tokens=2000, repeats=5)
    moved.add_argument("--lengths", default="4000,8000,16000,32000,64000")
    moved.add_argument("--telemetry", type=Path, required=True, help="DELTASERVE_TELEMETRY_DIR")
    phases.add_parser("report", help="Write report.json and report.md.", parents=[common])
    return parser


def _phase(
    options: argparse.Namespace, client: Client, say: Callable[[str], None]
) -> Awaitable[None]:
    workers = {worker.name: worker for worker in map(parse_worker, options.worker)}
    arms = [parse_arm(text, workers) for text in options.arms.split(",")]
    if options.phase not in ("identity", "death") and (
        mixed := [arm.name for arm in arms if arm.mixed]
    ):
        raise InputError(f"--arms {mixed[0]}: only identity and death mix two ways")
    prompts = Prompts(options.vocabulary, options.seed)
    sink = Sink(options.output, options.phase)

    def shape(kind: Any, **more: Any) -> Any:
        names = kind.__dataclass_fields__
        return kind(**{name: getattr(options, name) for name in names if name not in more}, **more)

    if options.phase in ("identity", "death"):
        reference = parse_arm(options.reference, workers)
        made = shape(identity.Shape)
        dies = options.phase == "death"
        death = identity.Death(options.kill, options.after_turns) if dies else None
        return identity.measure(client, arms, reference, prompts, made, sink, say, death)
    if options.phase == "warm":
        return warm.measure(client, arms, prompts, sink, say)
    if options.phase == "stall":
        return stall.measure(client, arms, prompts, shape(stall.Shape), sink, say)
    if options.phase == "tax":
        reference = parse_arm(options.reference, workers)
        return tax.measure(client, arms, reference, prompts, shape(tax.Shape), sink, say)
    try:
        lengths = tuple(int(text) for text in options.lengths.split(","))
    except ValueError as error:
        raise InputError(f"--lengths {options.lengths}: expected whole numbers") from error
    made = shape(transfer.Shape, lengths=lengths)
    return transfer.measure(client, arms, prompts, made, options.telemetry, sink, say)


async def _run(options: argparse.Namespace) -> None:
    began_s = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began_s:6.1f} s] {text}", file=sys.stderr, flush=True)

    async with Client() as client:
        try:
            async with asyncio.timeout(options.limit_s) as limit:
                await _phase(options, client, say)
        except TimeoutError:
            if not limit.expired():
                raise
            say(f"{options.phase}: ended by --limit-s; what was measured is kept")


def _cause(error: Exception) -> Exception:
    """The first error of a group of them, as tasks that run together raise."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def main(argv: list[str] | None = None) -> int:
    """0 when done or ended by the limit, 2 for bad input, 1 when a worker failed."""
    options = _parser().parse_args(argv)
    try:
        if options.phase == "report":
            print(report.write(options.output).read_text(), end="")
        else:
            asyncio.run(_run(options))
    except Exception as error:
        cause = _cause(error)
        if not isinstance(cause, InputError | WorkerError | aiohttp.ClientError):
            raise
        print(f"error: {cause}", file=sys.stderr)
        return 2 if isinstance(cause, InputError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
