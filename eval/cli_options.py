"""What several commands of `deltaserve eval` have in common: options, and how an experiment is run.

Owns the options' words, the command that repeats a run, and what an interruption prints.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltaserve.errors import InputError
from eval.experiment import OBJECTIVES

if TYPE_CHECKING:
    from eval.progress import Progress

# Of every command that judges by another objective than a file's.
OtherSlo = Annotated[
    list[str] | None,
    typer.Option(
        "--slo",
        metavar="NAME|KEY=VALUE,…",
        help="Judge by another objective: agentperf or agentx (docs/eval.md), or other bounds, as "
        "in ttft_s=5,tpot_s=0.05.",
    ),
]
# Of every command that executes an experiment.
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Replace a key of the experiment's file; repeatable."
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="ARM[@LOAD]",
        help="Only this arm of the experiment, or this arm under one of its loads; repeatable.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout.")]


@dataclass(frozen=True)
class Given:
    """How an experiment was given to a command that executes it."""

    verb: str
    experiment: str
    file: Path
    output: Path
    overrides: Sequence[str]
    only: Sequence[str]
    parallel: int = 1

    def with_override(self, override: str) -> Given:
        """The same, with one more ``key=value``."""
        return replace(self, overrides=[*self.overrides, override])

    @property
    def command(self) -> str:
        """The command, for whoever repeats it; what is recorded of it leaves values of secret keys
        out."""
        parallel = ["--parallel", str(self.parallel)] if self.parallel > 1 else []
        return shlex.join(["deltaserve", *self.words(self.only), *parallel])

    def words(self, only: Sequence[str]) -> list[str]:
        """The words of the command after ``deltaserve``, for the arms and loads in `only`, one run
        at a time."""
        words = ["eval", self.verb, self.experiment, "--output", str(self.output)]
        words += [word for override in self.overrides for word in ("--set", override)]
        return words + [word for name in only for word in ("--only", name)]

    @property
    def source(self) -> dict[str, object]:
        """What a run's manifest says of where its settings are from."""
        return {
            "file": str(self.file),
            "text": self.file.read_text(encoding="utf-8"),
            "overrides": list(self.overrides),
            "command": self.command,
        }


@contextlib.contextmanager
def interruptible(given: Given) -> Iterator[Progress]:
    """Progress on the terminal; an interruption prints how to go on and exits with 130."""
    from eval import runner
    from eval.progress import Progress

    try:
        with runner.sigterm_as_interrupt(), Progress() as progress:
            yield progress
    except KeyboardInterrupt:
        typer.echo(f"interrupted; go on with: {given.command}", err=True)
        raise typer.Exit(130) from None


def bounds(words: list[str]) -> dict[str, Any]:
    """`["agentperf,ttft_s=5"]` → `{"preset": "agentperf", "ttft_s": 5.0}`."""
    found: dict[str, Any] = {}
    for pair in ",".join(words).split(",") if words else []:
        key, sign, value = pair.partition("=")
        if pair.strip() in OBJECTIVES:
            found["preset"] = pair.strip()
            continue
        try:
            found[key.strip()] = float(value)
        except ValueError:
            sign = ""
        if not sign:
            raise InputError(
                f"--slo {pair}: expected key=number, as in ttft_s=5,tpot_s=0.05, or one of "
                f"{', '.join(OBJECTIVES)}"
            )
    return found
