"""`deltaserve eval …`: run an experiment, report on runs.

Owns options, messages and exit statuses; the work is elsewhere in this room.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import orjson
import typer

from deltaserve.errors import InputError
from eval.cli_options import AsJson, Given, Only, OtherSlo, Overrides, bounds, interruptible
from eval.experiment_files import load_experiment, packaged_experiments
from eval.micro.cli import app as micro_app

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(micro_app, name="micro", help="Microbenchmarks: one question each, any topology.")


@app.command(
    "run",
    epilog="Example: deltaserve eval run demo --output out/demo --set replay.length_scale=0.1",
)
def run_command(
    experiment: Annotated[
        str, typer.Argument(help="An experiment file (TOML), or the name of a packaged one.")
    ],
    output: Annotated[
        Path | None, typer.Option(help="Folder for the runs. Default: out/<experiment's name>.")
    ] = None,
    overrides: Overrides = None,
    only: Only = None,
    parallel: Annotated[
        int,
        typer.Option(
            min=1,
            help="Runs at the same time, each on GPUs of its own; see docs/eval.md before what is "
            "measured so is compared.",
        ),
    ] = 1,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan",
            help="Print commands and runs in their order with expected times; start nothing. "
            "Exits with 1 where the trace that the file names is missing.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run every arm of an experiment, each repeat on a fresh fleet.

    Finished runs are kept, so the same command after an interruption goes on where it stopped.
    Exits with 1 if a run failed, with 130 if interrupted.
    """
    from eval import runner
    from eval.site import launch_site

    parsed, path = load_experiment(experiment, overrides)
    folder = output or runner.default_output(parsed)
    if plan:
        from eval.preview import preview
        from eval.prompt_cost import known_factor

        if factor := known_factor(parsed, folder):
            parsed, _ = load_experiment(
                experiment, [*(overrides or []), f"prompt_cost.factor={factor:g}"]
            )
        previewed = preview(parsed, folder, site=launch_site(), only=only)
        if as_json:
            typer.echo(orjson.dumps(previewed.as_dict()).decode())
        else:
            for line in previewed.lines():
                typer.echo(line)
        raise typer.Exit(0 if previewed.missing_trace is None else 1)
    given = Given("run", experiment, path, folder, overrides or [], only or [], parallel)
    with interruptible(given) as progress:
        if parsed.prompt_cost is not None and parsed.prompt_cost.factor is None:
            from eval.prompt_cost import find_factor

            factor = find_factor(parsed, folder, site=launch_site(), progress=progress, only=only)
            given = given.with_override(f"prompt_cost.factor={factor:g}")
            parsed, _ = load_experiment(experiment, given.overrides)
        if parallel > 1:
            from eval.parallel import run_parallel

            summary = run_parallel(parsed, given, site=launch_site(), progress=progress)
        else:
            summary = runner.run_experiment(
                parsed,
                folder,
                site=launch_site(),
                source=given.source,
                progress=progress,
                only=only,
            )
        progress.say(
            f"{folder}: {summary.complete + summary.kept} runs complete, "
            f"{len(summary.invalid)} of them invalid, {len(summary.failed)} failed, "
            f"{len(summary.skipped)} skipped"
        )
    if as_json:
        typer.echo(orjson.dumps({"output": str(folder), **vars(summary)}).decode())
    raise typer.Exit(1 if summary.failed or summary.invalid or summary.skipped else 0)


@app.command(
    "report", epilog="Example: deltaserve eval report out/demo --slo ttft_s=3,tpot_s=0.05 --csv x"
)
def report_command(
    folders: Annotated[
        list[Path], typer.Argument(help="Folders with runs (found at any depth).", metavar="DIR...")
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="Where to write; .html and .md are appended. Default: DIR/report."),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Also draw the headline to this .png or .svg file.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print every figure and table as one JSON object.")
    ] = False,
    slo: OtherSlo = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write each table as a CSV file.")
    ] = None,
    parquet: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Also write each table as a Parquet file (pyarrow)."),
    ] = None,
) -> None:
    """Write one self-contained HTML file and one Markdown file about finished runs."""
    from eval import report

    evidence = report.gather(
        report.find_runs(folders),
        slo=bounds(slo or []),
        searches=report.find_searches(folders),
    )
    written = report.write_report(evidence, output or folders[0] / "report")
    if csv is not None:
        written += report.write_csv(evidence, csv)
    if parquet is not None:
        written += report.write_parquet(evidence, parquet)
    if picture is not None:
        if not evidence.cells:
            raise InputError(f"--picture {picture}: no run is valid, there is nothing to draw")
        from eval.picture import write_picture
        from launch.cache import make_folder

        make_folder(picture.parent)
        write_picture(
            evidence.cells, report.title(evidence.runs), report.caption(evidence), picture
        )
        written.append(picture)
    if as_json:
        typer.echo(orjson.dumps(report.summary_json(evidence)).decode())
    for path in written:
        typer.echo(str(path), err=as_json)


@app.command(
    "import",
    epilog="Example: deltaserve eval import bench-serving results.jsonl --arm vllm --output out/x",
)
def import_command(
    file_format: Annotated[
        str,
        typer.Argument(
            metavar="FORMAT", help="bench-serving (SGLang's), aiperf, or replay (our own)."
        ),
    ],
    source: Annotated[
        Path, typer.Argument(metavar="FILE", help="The tool's output file, or the replay's folder.")
    ],
    arm: Annotated[str, typer.Option(help="The arm's name in reports.")],
    output: Annotated[Path, typer.Option(help="Folder for the runs, as of eval run.")],
    gpus: Annotated[
        int | None, typer.Option(min=1, help="How many GPUs the servers had, for figures a GPU.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Turn another load generator's results into runs that eval report reads.

    bench-serving: sglang.bench_serving with --output-details, one run a line. aiperf:
    profile_export.jsonl, one run a file. replay: a folder of deltaserve replay run.
    """
    from eval.imports import FORMATS, REPLAY, import_file

    if file_format not in (*FORMATS, REPLAY):
        raise InputError(f"format {file_format}: expected one of {', '.join((*FORMATS, REPLAY))}")
    folders = [str(folder) for folder in import_file(source, file_format, arm, output, gpus)]
    if as_json:
        typer.echo(orjson.dumps({"runs": folders}).decode())
        return
    for folder in folders:
        typer.echo(folder)


@app.command(
    "simulate",
    epilog="Example: deltaserve eval simulate admission-gpu --set trace.path=weka.jsonl.zst "
    "--output out/simulated",
)
def simulate_command(
    what: Annotated[
        str,
        typer.Argument(
            metavar="EXPERIMENT|PLAN",
            help="An experiment (file or packaged name), or one run's plan (docs/simulator.md).",
        ),
    ],
    output: Annotated[Path, typer.Option(help="Folder for the runs, or for the one run's files.")],
    overrides: Overrides = None,
    only: Only = None,
    trace: Annotated[
        Path | None, typer.Option(help="Of a plan that names no requests: the trace.")
    ] = None,
    length_scale: Annotated[float, typer.Option(help="Of a plan: as of replay run.")] = 1.0,
    max_input_tokens: Annotated[
        int | None, typer.Option(help="Of a plan: as of replay run.")
    ] = None,
    sessions: Annotated[int | None, typer.Option(help="Of a plan: only the first so many.")] = None,
) -> None:
    """Simulate fleets in virtual time, under the router's own decisions. Not a measurement.

    Of an experiment, every arm, load, repeat and search level runs as `eval run` would run it, and
    eval report takes the folder. Exits with 1 if a run failed.
    """
    from eval.simulate import is_plan, read_plan, simulate

    if not is_plan(what):
        if trace is not None or length_scale != 1.0 or max_input_tokens or sessions:
            if what not in packaged_experiments() and not Path(what).is_file():
                raise InputError(f"{what}: no such file; expected a plan (docs/simulator.md)")
            raise InputError(
                "--trace, --length-scale, …: are of a plan; use --set of an experiment"
            )
        _simulate_experiment(what, output, overrides or [], only)
        return
    if overrides or only:
        raise InputError(f"--set, --only: are of an experiment; {what} is a plan")
    report = simulate(
        read_plan(Path(what)),
        output,
        trace=trace,
        length_scale=length_scale,
        max_input_tokens=max_input_tokens,
        session_limit=sessions,
    )
    typer.echo(
        f"simulated {report['end_s']:.0f} s: {report['requests']} requests, "
        f"{report['failed']} failed; {output}"
    )


def _simulate_experiment(
    name: str, output: Path, overrides: list[str], only: list[str] | None
) -> None:
    from eval.simulated_runs import simulate_experiment

    parsed, path = load_experiment(name, overrides)
    given = Given("simulate", name, path, output, overrides, only or [])
    with interruptible(given) as progress:
        summary = simulate_experiment(
            parsed, output, source=given.source, progress=progress, only=only
        )
    typer.echo(
        f"simulated, not measured: {summary.complete + summary.kept} runs complete, "
        f"{len(summary.invalid)} of them invalid, {len(summary.failed)} failed; {output}"
    )
    raise typer.Exit(1 if summary.failed or summary.invalid or summary.skipped else 0)


@app.command(
    "plan",
    epilog="Example: deltaserve eval plan trace.jsonl.zst --gpus 2 --kv-tokens 281888 "
    "--host-kv-tokens 600000 --output out/plan",
)
def plan_command(
    trace: Annotated[Path, typer.Argument(help="The trace that stands for the load to come.")],
    output: Annotated[Path, typer.Option(help="Folder for the experiment file and its runs.")],
    gpus: Annotated[int, typer.Option(min=1, help="How many; each is a worker.")],
    kv_tokens: Annotated[
        int, typer.Option(min=1, help="KV tokens that a GPU holds beside the model.")
    ],
    host_kv_tokens: Annotated[
        int, typer.Option(min=0, help="KV tokens in host memory, a GPU; 0: no host tier.")
    ] = 0,
    calibration: Annotated[
        str, typer.Option(help="Model and GPU: a packaged calibration's name, or a file.")
    ] = "qwen3-coder-30b-a3b-h200-sglang",
    slo: OtherSlo = None,
    max_think_s: Annotated[
        float | None, typer.Option(min=0, help="Cut think times to so much.")
    ] = 10.0,
    sessions: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many sessions of the trace.")
    ] = None,
    max_input_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="As of replay run; a worker refuses what is longer than its KV."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Trace seeds at the levels that decide.")] = 3,
    measure_s: Annotated[float, typer.Option(help="Length of a simulated window.")] = 900.0,
    tolerance: Annotated[
        float, typer.Option(min=0.01, max=1, help="Levels are no closer than this share.")
    ] = 0.05,
    only: Only = None,
    calibration_spread: Annotated[
        bool,
        typer.Option(
            "--calibration-spread",
            help="A trace seed also draws constants from the error that the calibration states.",
        ),
    ] = False,
) -> None:
    """Say how many agents a GPU holds, arm by arm, in simulation, and what to measure next.

    Arms: SGLang and vLLM colocated, with and without admission, with and without a host tier, and
    from two GPUs on SGLang with separated prefill. OUTPUT/plan.toml is the experiment, which eval
    run measures as it is.
    """
    from eval.planning import Asked, Hardware, plan
    from eval.progress import Progress
    from eval.runner import sigterm_as_interrupt

    asked = Asked(
        trace=trace,
        sessions=sessions,
        max_input_tokens=max_input_tokens,
        max_think_s=max_think_s,
        seeds=seeds,
        measure_s=measure_s,
        tolerance=tolerance,
        only=tuple(only or ()),
        calibration_spread=calibration_spread,
        slo=bounds(slo or []),
    )
    hardware = Hardware(gpus, kv_tokens, host_kv_tokens, calibration)
    with sigterm_as_interrupt(), Progress() as progress:
        _, words = plan(asked, hardware, output, progress)
    typer.echo(words)


class StepsBy(StrEnum):
    """What `eval calibrate` reads steps off."""

    STEPS = "steps"
    ARRIVALS = "arrivals"


@app.command(
    "calibrate",
    epilog="Example: deltaserve eval calibrate out/h200/sglang/r0 --name 'H200, SGLang' "
    "--output h200.toml",
)
def calibrate_command(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folders of runs, or files of their lines."),
    ],
    name: Annotated[str, typer.Option(help="Of what: model, GPU, engine and version.")],
    output: Annotated[Path, typer.Option(help="The calibration file (TOML) to write.")],
    by: Annotated[
        StepsBy,
        typer.Option(
            help="What the steps are read off: telemetry's steps, or, of an engine that has none "
            "(vLLM), when tokens arrived at the client (requests.jsonl, one worker)."
        ),
    ] = StepsBy.STEPS,
    chunk_tokens: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="With arrivals: the most tokens that a step prefills, once, or once for each run "
            "in their order. Chunks of two sizes tell a step's time from its tokens'.",
            show_default="8192",
        ),
    ] = None,
) -> None:
    """Fit how long an engine's steps take, for the simulator, and say how well that fits.

    One kind of worker at a time: runs of one model, GPU, engine and version.
    """
    from eval.arrival_steps import fit_arrivals, read_requests
    from eval.calibrate import fit, read_steps, to_toml
    from replay.files import write_file

    if '"' in name or "\n" in name:
        raise InputError(f"--name {name}: expected one line without quotation marks")
    if by is StepsBy.ARRIVALS:
        chunks = chunk_tokens or [8192]
        if len(chunks) not in (1, len(runs)):
            raise InputError(
                f"--chunk-tokens: expected one, or one for each of {len(runs)} runs, "
                f"not {len(chunks)}"
            )
        each = chunks * len(runs) if len(chunks) == 1 else chunks
        calibration = fit_arrivals(read_requests(runs), each)
    else:
        calibration = fit(read_steps(runs))
    text = to_toml(calibration, name, [run.name for run in runs])
    write_file(output, text.encode())
    typer.echo(text.rstrip())


@app.command("list", epilog="Example: deltaserve eval list")
def list_command(as_json: AsJson = False) -> None:
    """List the packaged experiments."""
    found = {name: load_experiment(name) for name in packaged_experiments()}
    if as_json:
        listed = [
            {"name": name, "description": experiment.description, "file": str(path)}
            for name, (experiment, path) in found.items()
        ]
        typer.echo(orjson.dumps({"experiments": listed}).decode())
        return
    for name, (experiment, path) in found.items():
        typer.echo(f"{name:<20} {experiment.description} ({path})")
