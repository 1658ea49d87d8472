"""`deltaserve eval micro …`: one command a question."""

from __future__ import annotations

import asyncio
import inspect
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

import launch
from deltaserve import toml_values
from deltaserve.errors import InputError
from eval.cli_options import AsJson
from eval.progress import Progress

if TYPE_CHECKING:
    from eval.document import Section
    from eval.micro.driver import Bench

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

OutputOption = Annotated[
    Path | None, typer.Option("--output", help="A new folder. Default: out/micro-<name>.")
]
Measure = Callable[["Bench", Progress], tuple[list["Section"], Any]]
"""Asks a topology that is up; says what was found: as a report's sections, and for programs."""


def _benchmark(
    name: str, example: str, check: Callable[[launch.Topology], None] = lambda _: None
) -> Callable[[Callable[..., Measure]], None]:
    """Makes a command of a function that takes the options of its own and gives the measurement.

    The options that all have come first; `check` refuses topologies that it cannot be made on.
    """

    def register(function: Callable[..., Measure]) -> None:
        def command(
            topology: Annotated[str, typer.Option(help="A topology's name or file.")],
            output: OutputOption = None,
            overrides: Annotated[
                list[str] | None,
                typer.Option(
                    "--set", metavar="KEY=VALUE", help="Replace a key of the topology; repeatable."
                ),
            ] = None,
            as_json: AsJson = False,
            **own: Any,
        ) -> None:
            measure = function(**own)
            _bench(name, topology, output, overrides or [], measure, as_json, check)

        common = list(inspect.signature(command, eval_str=True).parameters.values())[:-1]
        added = inspect.signature(function, eval_str=True).parameters.values()
        parameters = [*common, *(p.replace(kind=p.KEYWORD_ONLY) for p in added)]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__doc__ = function.__doc__
        app.command(name, epilog=f"Example: deltaserve eval micro {name} {example}")(command)

    return register


@_benchmark("interference", "--topology laptop-sglang --repeats 2")
def interference_command(
    decodes: Annotated[
        str | None, typer.Option(help="Running decodes, as in 1,2,4,8; default by hardware.")
    ] = None,
    prefills: Annotated[
        str | None, typer.Option(help="Prefill lengths in tokens, as in 2048,8192.")
    ] = None,
    context_tokens: Annotated[
        int | None, typer.Option(help="Context of each decoding stream.", min=1)
    ] = None,
    repeats: Annotated[int | None, typer.Option(help="Measurements of each pair.", min=1)] = None,
) -> Measure:
    """What a long prefill does to the decodes beside it: decode batch × prefill length."""
    from eval.micro import interference

    chosen_decodes = _numbers("--decodes", decodes)
    chosen_prefills = _numbers("--prefills", prefills)

    def measure(target: Bench, progress: Progress) -> tuple[list[Section], Any]:
        base = interference.default_grid(target.on_cpu)
        grid = interference.Grid(
            decodes=chosen_decodes or base.decodes,
            prefills=chosen_prefills or base.prefills,
            context_tokens=context_tokens or base.context_tokens,
            repeats=repeats or base.repeats,
        )
        points = asyncio.run(interference.measure(target, grid, progress.detail))
        return interference.sections(points), interference.raw(points)

    return measure


def _separates(topology: launch.Topology) -> None:
    from eval.micro import lifecycle

    lifecycle.check(topology)


@_benchmark("lifecycle", "--topology laptop-sglang-pd", check=_separates)
def lifecycle_command(
    lengths: Annotated[
        str | None, typer.Option(help="Prompt lengths in tokens, as in 2000,8000.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Measurements of each length.", min=1)] = 5,
) -> Measure:
    """Where the time of a separated request goes, from sending to first token."""
    from eval.micro import lifecycle

    chosen = _numbers("--lengths", lengths)

    def measure(target: Bench, progress: Progress) -> tuple[list[Section], Any]:
        base, continued = lifecycle.default_lengths(target.on_cpu)
        asks = asyncio.run(
            lifecycle.measure(target, chosen or base, continued, repeats, progress.detail)
        )
        return lifecycle.sections(asks), lifecycle.raw(asks)

    return measure


@_benchmark("cache-sweep", "--topology laptop-sglang")
def cache_sweep_command(
    input_tokens: Annotated[int | None, typer.Option(help="Of each prompt.", min=1)] = None,
    output_tokens: Annotated[int | None, typer.Option(help="Of each answer.", min=2)] = None,
    concurrency: Annotated[int | None, typer.Option(help="Prompts at a time.", min=1)] = None,
    total_tokens: Annotated[
        int | None, typer.Option(help="Tokens to send in all; default: the cache, once.", min=1)
    ] = None,
) -> Measure:
    """What a decode step costs as the cache fills: the slope, with its interval."""
    from eval.micro import cache_sweep

    def measure(target: Bench, progress: Progress) -> tuple[list[Section], Any]:
        base = cache_sweep.default_shape(target.on_cpu, target.topology.get("max_total_tokens"))
        shape = cache_sweep.Shape(
            input_tokens or base.input_tokens,
            output_tokens or base.output_tokens,
            concurrency or base.concurrency,
            total_tokens or base.total_tokens,
        )
        sweep = asyncio.run(cache_sweep.measure(target, shape, progress.detail))
        return cache_sweep.sections(sweep), cache_sweep.raw(sweep)

    return measure


@app.command(
    "connector-tax",
    epilog=(
        "Example: deltaserve eval micro connector-tax --without laptop-sglang --with laptop-sglang "
        "--with-set 'workers.0.role=elastic' --rates 0.5,1,2"
    ),
)
def connector_tax_command(
    without: Annotated[str, typer.Option(help="The topology without the transfer machinery.")],
    with_: Annotated[str, typer.Option("--with", help="The same with it on.")],
    output: OutputOption = None,
    with_set: Annotated[
        list[str] | None,
        typer.Option("--with-set", metavar="KEY=VALUE", help="Keys of --with; repeatable."),
    ] = None,
    rates: Annotated[str, typer.Option(help="Requests a second, lowest first.")] = "0.5,1,2",
    requests: Annotated[int, typer.Option(help="Of the synthetic trace.", min=2)] = 200,
    repeats: Annotated[int, typer.Option(help="Runs of each arm at each load.", min=1)] = 3,
    fit_input_tokens: Annotated[
        int | None, typer.Option(help="Shrink prompts to at most this.", min=1)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the trace and of the order of runs.")] = 0,
    as_json: AsJson = False,
) -> None:
    """What the transfer machinery costs where it is on but unused, at three loads."""
    from eval import report, runner
    from eval.micro import connector_tax
    from eval.site import launch_site

    try:
        rates_rps = tuple(sorted(float(word) for word in rates.split(",")))
    except ValueError:
        rates_rps = ()
    if not rates_rps or rates_rps[0] <= 0:
        raise InputError(f"--rates {rates}: expected positive numbers, as in 0.5,1,2")
    keys: dict[str, Any] = {}
    for override in with_set or []:
        key, separator, value = override.partition("=")
        if not separator:
            raise InputError(f"--with-set {override}: expected key=value")
        keys[key] = toml_values.value(value, f"--with-set {override}")
    planned = connector_tax.experiment(
        without,
        with_,
        with_set=keys,
        requests=requests,
        rates_rps=rates_rps,
        repeats=repeats,
        fit_input_tokens=fit_input_tokens,
        seed=seed,
    )
    folder = output or Path("out", "micro-connector-tax")
    try:
        with runner.sigterm_as_interrupt(), Progress() as progress:
            summary = runner.run_experiment(
                planned,
                folder,
                site=launch_site(),
                source={"command": _command()},
                progress=progress,
            )
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    evidence = report.gather(report.find_runs([folder]))
    if as_json:
        typer.echo(orjson.dumps(report.summary_json(evidence)).decode())
    for path in report.write_report(evidence, folder / "report", notes=[connector_tax.SEEN_BEFORE]):
        typer.echo(str(path), err=as_json)
    raise typer.Exit(1 if summary.failed else 0)


def _bench(
    name: str,
    topology: str,
    output: Path | None,
    overrides: list[str],
    measure: Measure,
    as_json: bool,
    check: Callable[[launch.Topology], None],
) -> None:
    from eval import report, runner
    from eval.document import Document, write_document
    from eval.micro.driver import bench

    folder = output or Path("out", f"micro-{name}")
    if (folder / "figures.json").exists():
        raise InputError(f"{folder}: holds a finished measurement; choose another --output")
    loaded = launch.load_topology(topology, overrides)
    check(loaded)
    try:
        with (
            runner.sigterm_as_interrupt(),
            Progress() as progress,
            bench(loaded, folder, progress.detail) as target,
        ):
            sections, raw = measure(target, progress)
            facts = target.facts
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    engine = report.engine_entry(facts["versions"]["engines"])
    document = Document(
        title=f"{name}: {loaded.name}",
        banner=[
            *report.place(facts["hardware"], facts["topology"]),
            f"Engine: {engine.text} ({engine.interval}).",
        ],
        claims=[],
        sections=sections,
        definitions=[],
        commands=[_command()],
        manifest=facts,
    )
    written = write_document(document, folder / "report")
    (folder / "figures.json").write_bytes(orjson.dumps(raw, option=orjson.OPT_SERIALIZE_NUMPY))
    if as_json:
        typer.echo(orjson.dumps({"output": str(folder), "figures": raw}).decode())
    for path in written:
        typer.echo(str(path), err=as_json)


def _numbers(option: str, text: str | None) -> list[int]:
    if text is None:
        return []
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise InputError(f"{option} {text}: expected positive integers, as in 1,2,4")
    return numbers


def _command() -> str:
    return shlex.join(["deltaserve", *sys.argv[1:]])
