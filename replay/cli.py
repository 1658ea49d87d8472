"""`deltaserve replay …`: the command line of this room. Owns flags and what is printed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from deltaserve.errors import InputError
from deltaserve.quantities import COUNT, FACTOR, SECONDS, TOKENS, check_more_than_0
from replay.cli_run import run
from replay.files import write_file, write_json

# Below this share of later turns a synthetic trace is hardly one of agents.
_FEW_LATER_TURNS = 0.2

app = typer.Typer(no_args_is_help=True, help="Traces: convert, make, sample, describe, replay.")

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
OutputTrace = Annotated[
    Path, typer.Option("--output", help="The trace to write; `.zst` at the end compresses it.")
]


class SourceFormat(StrEnum):
    weka = "weka"
    mooncake = "mooncake"
    bailian = "bailian"


class SampleMethod(StrEnum):
    window = "window"
    random = "random"


class Thinning(StrEnum):
    families = "families"
    sessions = "sessions"


def _print_json(record: dict[str, Any]) -> None:
    sys.stdout.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE).decode())


def _not_a_source(output: Path, *sources: Path) -> None:
    """Refuses to write what is made of a file over that file."""
    for source in sources:
        if output.exists() and source.exists() and output.samefile(source):
            raise InputError(f"--output {output}: expected another file than the one it is made of")


@app.command()
def convert(
    inputs: Annotated[list[Path], typer.Argument(help="Files, or folders of them.")],
    source_format: Annotated[SourceFormat, typer.Option("--format", help="The source's format.")],
    output: OutputTrace,
    shared_prefix: Annotated[
        bool,
        typer.Option(
            help="Weka: sessions with equal tool and system sizes share that prefix.",
        ),
    ] = False,
    sessions_per_hour: Annotated[
        float | None,
        typer.Option(
            help="Weka, which does not say when sessions start: start them as a Poisson process; "
            "without it all start at 0.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the session starts.")] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Convert another project's trace.

    Example: deltaserve replay convert --format weka weka-agentic.tar.zst --output weka.jsonl.zst
    """
    from dataclasses import asdict

    from replay.readers import bailian, mooncake, weka

    check_more_than_0("--sessions-per-hour", sessions_per_hour, COUNT)
    _not_a_source(output, *inputs)
    if source_format is SourceFormat.weka:
        report = weka.convert(
            inputs,
            output,
            shared_prefix=shared_prefix,
            sessions_per_hour=sessions_per_hour,
            seed=seed,
        )
    elif shared_prefix or sessions_per_hour is not None:
        flag = "--shared-prefix" if shared_prefix else "--sessions-per-hour"
        raise InputError(f"{flag}: expected --format weka (the other sources say it themselves)")
    elif source_format is SourceFormat.mooncake:
        report = mooncake.convert(inputs, output)
    else:
        report = bailian.convert(inputs, output)
    if as_json:
        _print_json(asdict(report))
    else:
        print(f"{report.requests:,} requests of {report.sessions:,} sessions → {output}")


@app.command()
def synth(
    output: OutputTrace,
    profile: Annotated[
        str, typer.Option(help="glm-agentic, coding-sessions, or a JSON file of a profile.")
    ] = "glm-agentic",
    fit: Annotated[
        Path | None, typer.Option(help="A trace to take the profile from, in place of --profile.")
    ] = None,
    save_profile: Annotated[
        Path | None, typer.Option(help="Where to write the profile as JSON.")
    ] = None,
    requests: Annotated[int | None, typer.Option(help="How many requests.")] = None,
    duration: Annotated[float | None, typer.Option(help="How long, in seconds.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same trace.")] = 0,
    rate: Annotated[
        float | None, typer.Option(help="Requests a second, in place of the profile's.")
    ] = None,
    length_scale: Annotated[
        float, typer.Option(help="Multiplies all token lengths, for small machines.")
    ] = 1.0,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens a block, in place of the profile's.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Make a synthetic trace.

    Example: deltaserve replay synth --requests 200 --rate 2 --length-scale 0.02 --block-size 16
    --output small.jsonl
    """
    from replay.synth import fit as fit_profile
    from replay.synth import load_profile, synthesise
    from replay.trace import Request, read_trace, write_trace

    for flag, value, most in (
        ("--requests", requests, COUNT),
        ("--duration", duration, SECONDS),
        ("--rate", rate, COUNT),
        ("--length-scale", length_scale, FACTOR),
        ("--block-size", block_size, TOKENS),
    ):
        check_more_than_0(flag, value, most)
    if seed < 0:
        raise InputError(f"--seed {seed}: expected at least 0")
    if fit is not None:
        _not_a_source(output, fit)
    base = fit_profile(read_trace(fit), fit.name) if fit else load_profile(profile)
    chosen = base.scaled(length_scale, block_size)
    if rate is not None:
        chosen = chosen.model_copy(update={"requests_per_s": rate})
    if save_profile:
        write_file(save_profile, chosen.model_dump_json(indent=1).encode() + b"\n")
    later_turns = 0
    span_s = 0.0

    def counted(made: Iterator[Request]) -> Iterator[Request]:
        nonlocal later_turns, span_s
        for request in made:
            later_turns += request.turn > 0
            span_s = request.timestamp_s
            yield request

    made = synthesise(chosen, seed, requests=requests, duration_s=duration)
    count = write_trace(output, counted(made))
    if later_turns < _FEW_LATER_TURNS * count:
        print(
            f"warning: {output}: {1 - later_turns / count:.0%} of the requests are first turns: it "
            f"spans {span_s:,.0f} s and sessions go on for longer; for later turns give --rate "
            "(fewer a second, over a longer time) or more --requests or --duration",
            file=sys.stderr,
        )
    if as_json:
        _print_json({"requests": count, "output": str(output), "profile": chosen.name})
    else:
        print(f"{count:,} requests → {output}")


@app.command()
def sample(
    trace: Annotated[Path, typer.Argument(help="The trace to sample from.")],
    output: OutputTrace,
    window_seconds: Annotated[
        float, typer.Option(help="Conversations begin within a window of this length.")
    ] = 600.0,
    window_start: Annotated[
        float | None,
        typer.Option(
            help="When the window begins, in seconds from the first request; default: drawn by "
            "the seed."
        ),
    ] = None,
    sample_ratio: Annotated[
        float, typer.Option(help="Share of the window's conversations to keep.")
    ] = 0.0015,
    max_single_turn_ratio: Annotated[
        float, typer.Option(help="Largest share of conversations with a single turn.")
    ] = 0.3,
    method: Annotated[
        SampleMethod,
        typer.Option(help="random draws from all conversations; it destroys reuse across them."),
    ] = SampleMethod.window,
    thin: Annotated[
        Thinning,
        typer.Option(
            help="families keeps conversations that share prefixes together, as far as it takes to "
            "keep the source's block sharing; sessions keeps or drops each by itself."
        ),
    ] = Thinning.families,
    seed: Annotated[int, typer.Option(help="The same seed gives the same sample.")] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Make a smaller trace of whole conversations, and say how far it is from its source.

    The report is written beside the output, as OUTPUT.report.json.

    Example: deltaserve replay sample trace.jsonl.zst --output small.jsonl --sample-ratio 0.01
    """
    from replay.sample import sample as draw
    from replay.tables import sample_lines

    _not_a_source(output, trace)
    report = draw(
        trace,
        output,
        method=method.value,
        thin=thin.value,
        window_s=window_seconds,
        window_start_s=window_start,
        sample_ratio=sample_ratio,
        max_single_turn_ratio=max_single_turn_ratio,
        seed=seed,
        on_progress=lambda text: print(text, file=sys.stderr),
    )
    report_file = output.with_name(output.name + ".report.json")
    write_json(report_file, report)
    if as_json:
        _print_json(report)
    else:
        print("\n".join(sample_lines(report)))
        print(f"sample in {output}, report in {report_file}")


@app.command()
def stats(
    trace: Annotated[Path, typer.Argument(help="A trace.")],
    instances: Annotated[
        list[int] | None,
        typer.Option(help="LRU caches of every size for so many instances (may be repeated)."),
    ] = None,
    cache_tokens: Annotated[
        list[int] | None,
        typer.Option(help="A cache size in tokens to tell the hit rate of (may be repeated)."),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with histograms.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Describe a trace: lengths, arrivals, reuse, the best that a cache could do.

    Example: deltaserve replay stats trace.jsonl.zst --instances 1 --instances 8 --html trace.html
    """
    from replay.stats import TraceStats
    from replay.tables import stats_lines
    from replay.trace import read_trace

    for flag, values in (("--instances", instances), ("--cache-tokens", cache_tokens)):
        if values and min(values) < 1:
            raise InputError(f"{flag} {min(values)}: expected at least 1")
    counts = instances or ([1] if cache_tokens or html else [])
    collected = TraceStats(counts, cache_tokens or [])
    for request in read_trace(trace):
        collected.add(request)
    record = collected.result()
    if html:
        from replay.page import stats_page

        write_file(html, stats_page(trace.name, record, collected.samples()).encode())
    if as_json:
        _print_json(record)
    else:
        print("\n".join(stats_lines(record)))


app.command("run")(run)
