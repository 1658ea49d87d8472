"""The console script ``deltaserve``: joins the rooms' command groups, and turns input errors into
one line and exit status 2, and the machine's (a full disk) into one line and exit status 1.

Only the room whose command was called is imported, so that ``deltaserve replay`` does not pay for
the packages that reports need.
"""

from __future__ import annotations

import errno
import faulthandler
import importlib
import os
import sys

import typer

from deltaserve import __version__
from deltaserve.errors import errors_in_one_line
from deltaserve.rooms import prefer_ours

# command → (module, attribute holding a typer.Typer, one-line help)
_ROOMS: dict[str, tuple[str, str, str]] = {
    "replay": ("replay.cli", "app", "Traces: convert, make, sample, describe, replay."),
    "launch": ("launch.cli", "app", "Engines: install, check, start, watch and stop a topology."),
    "route": ("router_policies.cli", "route_app", "Run the router."),
    "policy": ("router_policies.cli", "policy_app", "Routing policies: list and explain."),
    "eval": ("eval.cli", "app", "Experiments: run, report, microbenchmarks."),
    "doctor": ("launch.doctor", "app", "What is installed here, and what would fail."),
}

# What a machine may refuse any program at any time; every other error of the system is our defect.
_OF_THE_MACHINE = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EIO,
    errno.EACCES,
    errno.EPERM,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
}


def build_app(called: str | None) -> typer.Typer:
    """The command line; only the room of the command `called` is imported."""
    app = typer.Typer(
        no_args_is_help=True,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="A router for coding agents before vLLM and SGLang, and what it is measured with.",
    )

    @app.callback()
    def _root(version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
        del version  # answered in main(), before any command is looked up

    for name, (module, attribute, text) in _ROOMS.items():
        if name == called:
            room: typer.Typer = getattr(importlib.import_module(module), attribute)
        else:
            room = typer.Typer()
            room.callback(invoke_without_command=True)(lambda: None)
        callback = room.registered_callback and room.registered_callback.callback
        if callback and callback.__doc__:
            # `text` would take the place of the command's own words and examples.
            app.add_typer(room, name=name, short_help=text)
        else:
            app.add_typer(room, name=name, help=text)
    return app


def main() -> None:
    """Runs the command line: exits 0 on success, 2 on bad input, 1 where the machine cannot (a full
    disk) or on a defect of ours, which shows its traceback."""
    prefer_ours()
    if sys.__stderr__ is not None and not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__)  # a crash in a library's C code says where Python was
    arguments = sys.argv[1:]
    try:
        with errors_in_one_line():
            try:
                if arguments[:1] == ["--version"]:
                    print(f"deltaserve {__version__}")
                    return
                build_app(_called(arguments))(prog_name="deltaserve")
            finally:
                _flush()
    except BrokenPipeError:  # whoever read our output has had enough
        sys.exit(1)
    except OSError as error:
        if error.errno not in _OF_THE_MACHINE:
            raise
        where = f"{error.filename}: " if error.filename is not None else ""
        print(f"error: {where}{error.strerror}", file=sys.stderr)
        sys.exit(1)


def _called(arguments: list[str]) -> str | None:
    """The room whose command is called. A shell that completes a command says in its environment
    what has been typed so far."""
    if "_DELTASERVE_COMPLETE" in os.environ:
        typed = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")
        arguments = typed.split()[1:]
    return arguments[0] if arguments else None


def _flush() -> None:
    """Writes out what was printed, while an error of that can still be told in one line."""
    try:
        sys.stdout.flush()
    except OSError as error:
        # Python tries again at its end, which shall not fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        error.filename = error.filename or "standard output"
        raise


if __name__ == "__main__":
    main()
