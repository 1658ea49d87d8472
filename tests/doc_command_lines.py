"""What our commands would make of their words, found by their own parsers and without running them.

Of `deltaserve` that is the command line as `deltaserve.cli` builds it; of `python -m MODULE` the
module's own: `app` or `main` (typer), `_parser` (argparse).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
from collections.abc import Sequence
from functools import cache
from typing import Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException
from typer.main import get_command

from deltaserve.cli import build_app
from deltaserve.errors import InputError
from tests.doc_pages import Command

# Programs of others, whose options are not ours to know.
OTHERS = ("sglang", "pytest")


class Refused(Exception):
    """A command that its program would refuse, and why."""


def parsed(command: Command) -> tuple[str, dict[str, Any]]:
    """The subcommand that a command names ("eval run"; of a module "") and the values of its
    parameters. Raises `Refused`.

    `…` stands for the value of an option or an argument, else for words left out. Where a command
    is not whole, what it needs may be missing, the value of its last option too.
    """
    if command.whole:
        return _parsed(command.words, True)
    without = [word for word in command.words if word not in ("…", "...")]
    for words in (command.words, without):
        with contextlib.suppress(Refused):
            return _parsed(words, False)
    return _parsed([*without, "…"] if without[-1].startswith("-") else without, False)


def _parsed(words: Sequence[str], whole: bool) -> tuple[str, dict[str, Any]]:
    if words[0] == "deltaserve":
        return _walked(_ours(words[1], whole), words[1:])
    module, rest = words[2], words[3:]
    if module.split(".")[0] in OTHERS:
        return "", {}
    spec = importlib.util.find_spec(module)
    if spec is None:
        raise Refused(f"no module {module}")
    if not rest:
        return "", {}
    found = importlib.import_module(
        f"{module}.__main__" if spec.submodule_search_locations else module
    )
    if hasattr(found, "_parser"):
        return "", _of_argparse(found._parser(), rest, whole)
    app = getattr(found, "app", None)
    if app is None:
        app = typer.Typer(add_completion=False)
        app.command()(found.main)
    return _walked(_command(app, whole), rest)


@cache
def _ours(room: str, whole: bool) -> Any:
    return _command(build_app(room), whole)


def _command(app: typer.Typer, whole: bool) -> Any:
    """The command of `app`; where a command may miss words, one that needs none."""
    command = get_command(app)
    if not whole:
        below = [command]
        for each in below:
            below += getattr(each, "commands", {}).values()
            each.no_args_is_help = False
            for parameter in each.params:
                parameter.required = False
    return command


def _walked(command: Any, words: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Goes from a group of commands to the one that is named, as the command line does."""
    path: list[str] = []
    context = None
    name = "deltaserve"
    try:
        while True:
            # `--install-completion` acts when it is read: that it is there is enough.
            acting = {
                option
                for each in command.params
                if each.is_eager or not each.expose_value
                for option in each.opts
            }
            rest = [word for word in words if word not in acting]
            if command.no_args_is_help and not words:
                raise Refused(f"{name}: names no command")
            if words and not rest:
                return " ".join(path), {}
            context = command.make_context(name, list(rest), parent=context)
            below = [*context._protected_args, *context.args]
            if not isinstance(command, TyperGroup) or not below:
                return " ".join(path), dict(context.params)
            found, command, words = command.resolve_command(context, below)
            name = str(found)
            path.append(name)
    except (TyperException, InputError) as error:
        told = error.format_message() if isinstance(error, TyperException) else str(error)
        raise Refused(told) from None


def _of_argparse(
    parser: argparse.ArgumentParser, words: Sequence[str], whole: bool
) -> dict[str, Any]:
    if not whole:
        _need_nothing(parser)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            return vars(parser.parse_args(words))
    except SystemExit as ended:
        if not ended.code:  # --help
            return {}
        raise Refused(said.getvalue().strip().splitlines()[-1]) from None


def _need_nothing(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        action.required = False
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                _need_nothing(below)
