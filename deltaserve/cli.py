"""The console script ``deltaserve``: joins the rooms' command groups, and turns input errors into
one line and exit status 2.

Only the room whose command was called is imported, so that ``deltaserve replay`` does not pay for
the packages that reports need.
"""

from __future__ import annotations

import importlib
import sys

import typer

from deltaserve import __version__
from deltaserve.errors import InputError

# command → (module, attribute holding a typer.Typer, one-line help)
_ROOMS: dict[str, tuple[str, str, str]] = {
    "replay": ("replay.cli", "app", "Traces: convert, make, sample, describe, replay."),
    "launch": ("launch.cli", "app", "Engines: install, check, start, watch and stop a topology."),
    "route": ("router_policies.cli", "route_app", "Run the router."),
    "policy": ("router_policies.cli", "policy_app", "Routing policies: list and explain."),
    "eval": ("eval.cli", "app", "Experiments: run, report, microbenchmarks."),
}


def build_app(called: str | None) -> typer.Typer:
    """The command line; only the room of the command `called` is imported."""
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Coding-agent traffic on SGLang: selective PD, one trace, real engines, one report.",
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
    """Runs the command line: exits 0 on success, 2 on bad input, 1 on a defect of ours."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["--version"]:
        print(f"deltaserve {__version__}")
        return
    try:
        build_app(arguments[0] if arguments else None)(prog_name="deltaserve")
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
