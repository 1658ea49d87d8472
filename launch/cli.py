"""``deltaserve launch``: install engines, check a topology, bring it up, watch it, end it."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.table import Table

from deltaserve.child import DELTASERVE
from deltaserve.errors import InputError
from launch import control, engines, planning, rolling, sizing
from launch.checking import check
from launch.claims import announce, claim
from launch.fleets import FleetError, fleet, log_tail
from launch.hardware import sample_gpus
from launch.interrupts import held
from launch.listing import listing
from launch.planning import Plan
from launch.redaction import redacted
from launch.rolling import Rolling
from launch.serving import keep_serving
from launch.supervised import is_running, keep_previous
from launch.topology_files import load_topology

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Engines: install, check, start, watch and stop a topology.",
)

_Name = Annotated[str, typer.Argument(metavar="TOPOLOGY", help="A shipped name or a .toml file.")]
_Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key: workers.prefill.count=2."),
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout.")]
_RunDir = Annotated[Path | None, typer.Option("--run-dir", help="Where the fleet's files go.")]


@app.command("install", epilog="Example: deltaserve launch install sglang")
def install_command(
    names: Annotated[
        list[str],
        typer.Argument(metavar="ENGINE...", help=f"Of: {', '.join(engines.ENVIRONMENTS)}."),
    ],
) -> None:
    """Install engines and stock routers into the cache folder, from their lock files."""
    for name in names:
        print(engines.install(name, _say))


@app.command("plugin", epilog="Example: deltaserve launch plugin ~/deltaserve-plugin")
def plugin_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to put it.")],
) -> None:
    """Put our SGLang plugin into a folder, for workers that you start by hand.

    Prints what a worker's environment must hold so that its Python finds it.
    """
    folder = folder.expanduser().absolute()
    planning.check_on_path(folder)
    planning.write_plugin(folder)
    print(f'export PYTHONPATH={_quoted(str(folder))}"${{PYTHONPATH:+:$PYTHONPATH}}"')


@app.command("list", epilog="Example: deltaserve launch list")
def list_command(as_json: _Json = False) -> None:
    """List the shipped kinds of topology, and in which size each fits this machine."""
    found = listing()
    if as_json:
        _print_json([asdict(kind) for kind in found])
        return
    table = Table("topology", "runs here as", "what it is", box=None, pad_edge=False)
    for kind in found:
        table.add_row(kind.name, kind.here, kind.description)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    print(
        "\nA size follows the name: workers (sglang:2), or prefill and other workers "
        "(sglang-pd:1p3d)."
    )


@app.command("check", epilog="Example: deltaserve launch check laptop-sglang-pd")
def check_command(
    name: _Name,
    overrides: _Set = None,
    run_dir: _RunDir = None,
    print_commands: Annotated[
        bool, typer.Option("--print-commands", help="Print each process's exact command.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Check a topology against this machine and the installed engine; start nothing."""
    topology = load_topology(name, overrides or ())
    folder = run_dir or control.default_run_dir(topology.name)
    made = planning.plan(topology, folder)
    if print_commands and not as_json:
        _print_commands(made)
    gpus = sample_gpus() if topology.device == "cuda" else []
    has_gpus = not made.gpu_plan or bool(gpus)
    was_there = folder.exists()
    try:
        check(made, gpus=has_gpus)
    finally:
        if not was_there:  # what was asked was a question
            _remove_unused(folder)
    if why := topology.why_no_telemetry:
        _say(f"telemetry: not written: {why}")
    room = sizing.lines(made, {gpu.index: gpu.memory_total_bytes for gpu in gpus})
    if as_json:
        _print_json(redacted(_described(made)) | {"room": room})
        return
    print(f"{topology.name}: {made.engine.name} {made.engine.version} ({made.engine.python})")
    table = Table("process", "url", "ports", "GPUs", box=None, pad_edge=False)
    for process in made.processes:
        ports = ", ".join(f"{name} {port}" for name, port in process.ports.items())
        table.add_row(process.id, process.url, ports, ", ".join(map(str, process.gpus)) or "-")
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    for line in room:
        print(line)
    print("OK" if has_gpus else "OK, but for the GPUs: there is no NVIDIA driver here")


@app.command("up", epilog="Example: deltaserve launch up laptop-sglang-pd --detach")
def up_command(
    name: _Name,
    overrides: _Set = None,
    run_dir: _RunDir = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return when ready; end it with `down`.")
    ] = False,
    serving_on: Annotated[
        bool,
        typer.Option("--keep-serving", help="Start a process that dies again; not to measure by."),
    ] = False,
    set_from_stdin: Annotated[bool, typer.Option("--set-from-stdin", hidden=True)] = False,
    as_json: _Json = False,
) -> None:
    """Bring a topology up; Ctrl-C (or `down`) ends it and everything it started."""
    if set_from_stdin:
        overrides = [*(overrides or ()), *orjson.loads(sys.stdin.buffer.read())]
    topology = load_topology(name, overrides or ())
    folder = (run_dir or control.default_run_dir(topology.name)).absolute()
    # Of `up --detach` too: who ends it before the fleet is ready (`timeout`, a job that is
    # cancelled) would else have the fleet come up behind them.
    signal.signal(signal.SIGTERM, _leave)
    if detach:
        flags = ["--keep-serving"] if serving_on else []
        _detach(name, topology.name, overrides or [], folder, flags)
        _show(control.status(folder), as_json)
        return
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup leaves it
        signal.signal(signal.SIGHUP, _leave)
    try:
        with fleet(topology, folder, _say) as running:
            _show(control.status(folder), as_json)
            _say("Press Ctrl-C to end it.")
            router = running.plan.router
            asked_of = (router.url, router.keys.key) if router else ("", None)
            roller = Rolling(running, folder, asked_of, _say)
            if serving_on:
                keep_serving(running, _say, roller.look)
            while True:
                time.sleep(0.5)
                roller.look()
                running.check(but=roller.restarting)
    except FleetError as error:
        _say(f"error: {error}")
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@app.command("status", epilog="Example: deltaserve launch status laptop-sglang-pd")
def status_command(
    name: Annotated[
        str | None, typer.Argument(metavar="[TOPOLOGY]", help="A topology or a run folder.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Show a fleet's processes, and exit 1 where it failed; without a name, every fleet's in the
    default place."""
    if name is not None:
        shown = control.status(control.find_run_dir(name))
        _show(shown, as_json)
        if shown.has_failed:
            raise typer.Exit(1)
        return
    known = control.known_fleets()
    found = []
    for run_dir in known:
        try:
            found.append(control.status(run_dir))
        except InputError as error:  # the others are shown all the same
            _say(f"error: {error}")
    if as_json:
        _print_json({"fleets": [f.as_dict() for f in found]})
    else:
        for each in found:
            if each.alive:
                _show(each, False)
        for each in found:
            if not each.alive:  # listed for their logs, until `down --remove`
                print(f"{each.name}: {each.state} since {_at(each.since_unix_s)} ({each.run_dir})")
        if not known:
            _say("No fleet was brought up.")
    if len(found) < len(known):
        raise typer.Exit(1)


@app.command("down", epilog="Example: deltaserve launch down laptop-sglang-pd")
def down_command(
    name: Annotated[str, typer.Argument(metavar="TOPOLOGY", help="A topology or a run folder.")],
    remove: Annotated[
        bool,
        typer.Option("--remove", help="Remove its folder and logs too: status forgets it."),
    ] = False,
    as_json: _Json = False,
) -> None:
    """End a fleet; afterwards no process of it runs and no port is held."""
    run_dir = control.find_run_dir(name)
    if remove and run_dir not in control.known_fleets():
        raise InputError(f"--remove: {run_dir} is a folder of your own; remove it yourself")
    try:
        ended = control.down(run_dir)
    except FleetError as error:
        _say(f"error: {error}")
        raise typer.Exit(1) from None
    if remove:
        with claim(run_dir):  # another may be coming up there
            shutil.rmtree(run_dir)
    if as_json:
        _print_json({"run_dir": str(run_dir), "processes_ended": ended.processes})
        return
    what = f"{ended.processes} processes ended"
    if not ended.processes:
        what = "its start was ended" if ended.supervisor else "was not running"
    _say(f"{run_dir.name}: {what}")


@app.command("roll", epilog="Example: deltaserve launch roll sglang-agents")
def roll_command(
    name: Annotated[str, typer.Argument(metavar="TOPOLOGY", help="A topology or a run folder.")],
    wait_s: Annotated[
        float, typer.Option("--wait-s", min=0, help="How long a worker's turns may take to end.")
    ] = 1800.0,
) -> None:
    """Restart a fleet's workers one after the other, while the others serve.

    A worker gets nothing new, its turns end, it starts again, and gets requests again when it is
    ready. Sessions go on elsewhere between two turns.
    """
    run_dir = control.find_run_dir(name)
    now = control.status(run_dir)
    if now.state != "ready" or now.host != socket.gethostname():
        raise InputError(f"{now.name}: it is {now.state} on {now.host}; expected a ready one here")
    record = orjson.loads((run_dir / "fleet.json").read_bytes())
    rolling.ask(run_dir, rolling.rollable(record), wait_s)
    said = 0
    while True:
        time.sleep(0.3)
        found = rolling.progress(run_dir)
        if found is None or not is_running(now.supervisor_pid, record["supervisor"]["started"]):
            _say("error: the fleet was ended meanwhile")
            raise typer.Exit(1)
        for line in found["said"][said:]:
            _say(line)
        said = len(found["said"])
        if found["state"] in ("done", "failed"):
            raise typer.Exit(int(found["state"] == "failed"))


@app.command("logs", epilog="Example: deltaserve launch logs laptop-sglang colocated-0")
def logs_command(
    name: Annotated[str, typer.Argument(metavar="TOPOLOGY", help="A topology or a run folder.")],
    process: Annotated[
        str | None, typer.Argument(metavar="[PROCESS]", help="Of one process; all without it.")
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="How many of each.")] = 20,
) -> None:
    """Print the ends of a fleet's logs."""
    processes = control.status(control.find_run_dir(name)).processes
    ids = [row.id for row in processes]
    if process is not None and process not in ids:
        raise InputError(f"{name} has no process {process!r}; it has: {', '.join(ids)}")
    for row in processes:
        if process in (None, row.id):
            print(f"==> {row.log} <==\n{log_tail(Path(row.log), lines)}\n")


def _remove_unused(folder: Path) -> None:
    """Removes a run folder unless a fleet has come up there: one that runs could not be found and
    ended any more, of one that ended the logs would be lost."""
    with contextlib.suppress(InputError), claim(folder):
        if not (folder / "fleet.json").exists():
            shutil.rmtree(folder, ignore_errors=True)


def _detach(asked: str, name: str, overrides: list[str], folder: Path, flags: list[str]) -> None:
    """Starts `up` of the topology `asked`, whose name is `name`, in a session of its own and
    follows it until the fleet is ready."""
    log = folder / "supervisor.log"
    argv = [*DELTASERVE, "launch", "up", asked]
    argv += ["--run-dir", str(folder), "--set-from-stdin", *flags]
    supervisor = None
    try:
        # Who finds this process by what it announces, and ends it, ends the supervisor with it.
        with held():
            with claim(folder) as lock:  # a fleet that runs there already goes on with its log
                keep_previous(log)
                announce(lock, name)  # until the supervisor does, which takes it a second
            with log.open("wb") as output:
                supervisor = subprocess.Popen(
                    argv,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=output,
                    start_new_session=True,
                )
        # Not as arguments: anybody on the machine can read a command line, and one may be a secret.
        assert supervisor.stdin is not None
        with supervisor.stdin as told_overrides:
            told_overrides.write(orjson.dumps(overrides))
        with log.open() as told:
            while True:
                ended = supervisor.poll() is not None
                is_ready = _is_ready(folder, supervisor.pid)
                sys.stderr.write(told.read())  # after both: what was told before is shown
                if ended:
                    raise typer.Exit(supervisor.returncode)
                if is_ready:
                    return
                time.sleep(0.3)
    except KeyboardInterrupt:
        if supervisor is not None:
            supervisor.terminate()
            supervisor.wait()
        raise typer.Exit(130) from None


def _is_ready(folder: Path, supervisor_pid: int) -> bool:
    try:
        record = orjson.loads((folder / "fleet.json").read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return False
    return bool(record["state"] == "ready" and record["supervisor"]["pid"] == supervisor_pid)


def _leave(number: int, _frame: object) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def _print_commands(made: Plan) -> None:
    """Before anything is checked: what is wrong with a command is best seen in it."""
    for process in made.processes:
        environment, argv = redacted(process.environment), redacted(process.argv)
        settings = " ".join(f"{k}={_quoted(v)}" for k, v in environment.items())
        where = f" (on {process.node}, by Ray)" if process.node else ""
        print(f"# {process.id}{where}\n{settings} {' '.join(map(_quoted, argv))}\n")


def _described(made: Plan) -> dict[str, Any]:
    return {
        "topology": made.topology.model_dump(mode="json"),
        "engine": {"python": str(made.engine.python), "versions": made.engine.versions},
        "processes": [
            {
                "id": p.id,
                "role": p.role,
                "url": p.url,
                "ports": p.ports,
                "gpus": p.gpus,
                "argv": p.argv,
                "environment": p.environment,
            }
            for p in made.processes
        ],
    }


def _show(fleet_status: control.FleetStatus, as_json: bool) -> None:
    if as_json:
        _print_json(fleet_status.as_dict())
        return
    since = f" since {_at(fleet_status.since_unix_s)}" if fleet_status.since_unix_s else ""
    where = f"on {fleet_status.host}, " if fleet_status.host != socket.gethostname() else ""
    title = f"{fleet_status.name}: {fleet_status.state}{since} ({where}{fleet_status.run_dir})"
    table = Table("id", "role", "pid", "url", "state", "RSS", "CPU", box=None, pad_edge=False)
    for row in fleet_status.processes:
        table.add_row(
            row.id,
            row.role or "-",
            str(row.pid or "-"),
            row.url,
            row.state,
            f"{row.rss_bytes / 2**30:.2f} GiB",
            f"{row.cpu_percent:.0f} %",
        )
    print(title)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    if fleet_status.reason:
        print(f"{fleet_status.state}: {fleet_status.reason.splitlines()[0]}")
    for row in fleet_status.processes:
        if row.reason:
            print(f"{row.id} {_at(row.ended_unix_s)}: {row.reason.splitlines()[0]}; log: {row.log}")
    if fleet_status.has_failed:
        print(f"what happened: {Path(fleet_status.run_dir) / 'transcript.txt'}")


def _at(unix_s: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s)) if unix_s else "(unknown)"


def _quoted(text: str) -> str:
    return shlex.quote(text)


def _print_json(value: Any) -> None:
    sys.stdout.buffer.write(orjson.dumps(value, option=orjson.OPT_INDENT_2) + b"\n")


def _say(text: str) -> None:
    # Nobody may be there to be told any more, and a fleet goes on and ends without.
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
