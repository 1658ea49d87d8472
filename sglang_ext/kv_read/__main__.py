"""The command line of `sglang_ext.kv_read`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from sglang_ext.kv_read.layout import Layout
from sglang_ext.kv_read.run import (
    MAPPED_WAYS,
    MOONCAKE_WAYS,
    NIXL_WAYS,
    WAYS,
    Plan,
    Sample,
    measure,
    table,
)

_MOONCAKE_NVLINK = {"MC_INTRANODE_NVLINK": "true"}
"""Without it Mooncake ends at TCP without a word."""

_EXAMPLE = """\
example, on a host with two GPUs, in SGLang's environment:
  python -m sglang_ext.kv_read --output out/kv-read \\
    --nixl-env "" --nixl-env "UCX_RNDV_SCHEME=get_zcopy"
"""


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(int(part) for part in text.split(","))
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text}: numbers of 1 or more")
    return numbers


def _gpus(text: str) -> tuple[int, int]:
    parts = text.split(",")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text}: two GPUs' numbers, as 0,1")
    return int(parts[0]), int(parts[1])


def _ways(text: str) -> tuple[str, ...]:
    chosen = tuple(text.split(","))
    for way in chosen:
        if way not in WAYS:
            raise argparse.ArgumentTypeError(f"{way}: one of {', '.join(WAYS)}")
    return chosen


def _settings(text: str) -> dict[str, str]:
    settings = {}
    for part in text.split():
        name, separator, value = part.partition("=")
        if not separator or not name:
            raise argparse.ArgumentTypeError(f"{part}: expected NAME=VALUE")
        settings[name] = value
    return settings


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sglang_ext.kv_read",
        description="How fast one process reads KV pages out of another's memory.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, required=True, help="folder of samples and table")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpus", type=_gpus, default=(0, 1), help="owner's and reader's (0,1)")
    parser.add_argument("--ways", type=_ways, default=WAYS, help=f"of {','.join(WAYS)}")
    parser.add_argument("--page-tokens", type=_numbers, default=(64, 16, 1))
    parser.add_argument("--tokens", type=_numbers, default=(2_000, 16_000, 64_000))
    parser.add_argument("--repeats", type=int, default=5, help="after one to warm up")
    for library, default in (
        ("nixl", "none"),
        ("mooncake", "on a GPU MC_INTRANODE_NVLINK=true, otherwise none"),
    ):
        parser.add_argument(
            f"--{library}-env",
            type=_settings,
            action="append",
            metavar="SETTINGS",
            help="NAME=VALUE … in the environment of both processes of this library's ways; "
            f"given again, they are measured again, by a pair of its own (default: {default})",
        )
    parser.add_argument("--threads", type=int, default=0, help="NIXL's, beside its progress thread")
    parser.add_argument("--limit-s", type=float, default=20.0, help="for one transfer")
    shape = parser.add_argument_group("shape (default: Qwen3-Coder-30B-A3B's in bf16)")
    shape.add_argument("--layers", type=int, default=48)
    shape.add_argument("--row-bytes", type=int, default=1024, help="a token's keys in a layer")
    shape.add_argument("--pool-tokens", type=int, default=80_000)
    return parser


def main() -> int:
    """Measures, writes `samples.jsonl` line by line and `table.md` at the end."""
    parser = _parser()
    options = parser.parse_args()
    if options.row_bytes < 8 or options.row_bytes % 8:
        parser.error("--row-bytes: a multiple of 8")
    largest = max(*options.tokens, *options.page_tokens)
    if largest > options.pool_tokens:
        parser.error(f"--pool-tokens {options.pool_tokens}: fewer than the {largest} to be read")
    if min(options.tokens) < max(options.page_tokens):
        parser.error("--tokens: a page at least")
    devices = ("cpu", "cpu")
    if options.device == "cuda":
        devices = (f"cuda:{options.gpus[0]}", f"cuda:{options.gpus[1]}")
    layout = Layout(2 * options.layers, options.row_bytes, options.pool_tokens)

    def plan(ways: tuple[str, ...], settings: dict[str, str]) -> Plan:
        return Plan(
            layout=layout,
            devices=devices,
            ways=ways,
            page_tokens=options.page_tokens,
            tokens=options.tokens,
            repeats=options.repeats,
            settings=settings,
            threads=options.threads,
            limit_s=options.limit_s,
        )

    mooncake = _MOONCAKE_NVLINK if options.device == "cuda" else {}
    families: list[tuple[tuple[str, ...], list[dict[str, str]]]] = [
        (NIXL_WAYS, options.nixl_env or [{}]),
        (MOONCAKE_WAYS, options.mooncake_env or [mooncake]),
    ]
    # A pair for each: a process maps an allocation once, for one GPU.
    families += [((way,), [{}]) for way in MAPPED_WAYS]
    plans = [
        plan(chosen, settings)
        for ways, each in families
        if (chosen := tuple(way for way in ways if way in options.ways))
        for settings in each
    ]
    options.output.mkdir(parents=True, exist_ok=True)
    samples: list[Sample] = []
    with (options.output / "samples.jsonl").open("a") as file:
        for pair in plans:
            for sample in measure(pair):
                samples.append(sample)
                file.write(json.dumps(sample) + "\n")
                file.flush()
    lines = table(samples)
    (options.output / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    failed = any("error" in sample or sample.get("right") is False for sample in samples)
    return 1 if failed or not samples else 0


if __name__ == "__main__":
    sys.exit(main())
