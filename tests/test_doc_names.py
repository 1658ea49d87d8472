"""Names in the README and the docs are there: make's targets and variables, `DELTASERVE_…` in the
environment. And the other way round: every subcommand, every packaged experiment and every such
variable that is read is named on some page.

A variable is read where code has it in quotation marks, with something in its middle
(`f"DELTASERVE_{engine}_PYTHON"`), or as a prefix with one of the plugin's settings. Those of the
live tests count; what other tests make up does not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from deltaserve.cli import build_app
from eval.experiment_files import packaged_experiments
from sglang_ext.settings import _ELASTIC, _PACING, ELASTIC_PREFIX, PACED_PREFIX
from tests.doc_command_lines import parsed
from tests.doc_pages import PAGES, ROOMS, ROOT, blocks, commands, inline

_ROOMS_OF_CODE = ("deltaserve", "eval", "launch", "replay", "router_policies", "sglang_ext")
CODE = "\n".join(
    path.read_text()
    for folder in (*_ROOMS_OF_CODE, "tests/live")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".rs") and ROOT / "router_policies/tests" not in path.parents
)
PROSE = "\n".join(page.read_text() for page in PAGES)
MAKEFILE = (ROOT / "Makefile").read_text()

READ = {
    *re.findall(r"[\"'](DELTASERVE_[A-Z0-9_]*[A-Z0-9])[\"']", CODE),
    *(ELASTIC_PREFIX + name for name in _ELASTIC),
}
PACED = {PACED_PREFIX + name for name in _PACING}  # the docs name these with the elastic worker's
MADE = {
    rf"DELTASERVE_\w+{end}" for end in re.findall(r"f[\"']DELTASERVE_\{[^}]*\}(_[A-Z0-9_]+)", CODE)
}
NAMED = set(re.findall(r"\bDELTASERVE_[A-Z0-9_]*[A-Z0-9]\b", PROSE))


def test_every_variable_that_is_named_is_read() -> None:
    assert not {
        name
        for name in NAMED - READ - PACED
        if not any(re.fullmatch(pattern, name) for pattern in MADE)
    }


def test_every_variable_that_is_read_is_named() -> None:
    assert set() == READ - NAMED
    assert not {pattern for pattern in MADE if not re.search(pattern, PROSE)}


def made() -> Iterator[tuple[str, list[str]]]:
    """What is made on the pages: a target and the variables that it is given."""
    lines = [line for block in blocks() for line in block.text.splitlines()]
    for line in (*lines, *(code.text for code in inline())):
        if found := re.match(r"make ([a-z-]+)((?: +[A-Z]+=\S+)*)(?: *$| +#)", line):
            yield found[1], re.findall(r"([A-Z]+)=", found[2])


def test_every_target_and_variable_of_make_is_in_the_makefile() -> None:
    targets = set(re.findall(r"(?m)^([a-z-]+):", MAKEFILE))
    found = list(made())
    assert {target for target, _ in found} <= targets
    assert {"demo", "test"} <= {target for target, _ in found}
    for name in {name for _, names in found for name in names}:
        assert f"$({name})" in MAKEFILE, name


def subcommands(command: Any, *path: str) -> Iterator[str]:
    below = getattr(command, "commands", {})
    if not below:
        yield " ".join(path)
    for name, each in below.items():
        yield from subcommands(each, *path, name)


def test_every_subcommand_is_named() -> None:
    called = {parsed(command)[0] for command in commands() if command.words[0] == "deltaserve"}
    known = {
        " ".join((room, *path.split()[1:]))
        for room in ROOMS
        for path in subcommands(get_command(build_app(room)).commands[room], room)
    }
    assert known - called == set()


def test_every_packaged_experiment_is_named_where_experiments_are_listed() -> None:
    named = {code.text for code in inline() if code.page == ROOT / "docs/eval.md"}
    assert set(packaged_experiments()) <= named
