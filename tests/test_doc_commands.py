"""Commands in the README and the docs name subcommands and options that there are, with all that
they need; nothing is run.

Not looked at: programs of others (`curl`, `python -m sglang.…`), files that a command reads, what
quotations and values mean (experiments' settings: `test_doc_settings`), and needed words that are
missing where a command stands in a line (`eval run`) or has `…`.
"""

from __future__ import annotations

import pytest

from tests.doc_command_lines import Refused, parsed
from tests.doc_pages import Command, commands, simple_commands


def test_every_command_is_one_that_its_program_takes() -> None:
    refused = []
    for command in commands():
        try:
            parsed(command)
        except Refused as error:
            refused.append(f"{command}: {error}")
    assert not refused, "\n".join(refused)


def test_commands_are_found_on_the_pages() -> None:
    found = {command.words[:3] for command in commands()}
    assert ("deltaserve", "eval", "run") in found
    assert ("python", "-m", "sglang_ext.bench") in found


def test_commands_are_taken_out_of_the_shell_around_them() -> None:
    line = "X=1 taskset -c 0 deltaserve eval run a --set 'b=[1, 2]' > x && cd y; python -m z | cat"
    assert list(simple_commands(line)) == [
        ("deltaserve", "eval", "run", "a", "--set", "b=[1, 2]"),
        ("python", "-m", "z"),
    ]
    assert list(simple_commands('eval "$(deltaserve launch plugin d)"')) == [
        ("deltaserve", "launch", "plugin", "d")
    ]


@pytest.mark.parametrize(
    ("words", "whole", "why"),
    [
        ("deltaserve eval walk demo", True, "No such command 'walk'"),
        ("deltaserve eval run demo --ouput x", True, "No such option: --ouput"),
        ("deltaserve eval simulate demo", True, "Missing option '--output'"),
        ("deltaserve eval run … demo too", False, "unexpected extra argument"),
        ("deltaserve eval", True, "names no command"),
        ("deltaserve replay run a --url u --output o --mode often", True, "'often' is not one of"),
        ("deltaserve route --decode a b", True, "expected one URL"),
        ("python -m eval.nothing", True, "no module eval.nothing"),
        ("deltaserve eval simulate", True, "Missing argument"),
        ("python -m sglang_ext.bench report --into x", True, "required: --output"),
    ],
)
def test_a_command_that_would_fail_is_refused(words: str, whole: bool, why: str) -> None:
    with pytest.raises(Refused, match=why):
        parsed(Command("here", tuple(words.split()), whole))


@pytest.mark.parametrize(
    "words",
    [
        "deltaserve eval simulate … --set a=b",
        "deltaserve route --policy pd --worker …",
        "deltaserve eval run",
        "deltaserve eval report --slo",
        "python -m sglang_ext.bench warm",
        "deltaserve --install-completion",
    ],
)
def test_a_command_of_which_words_are_left_out_is_taken(words: str) -> None:
    parsed(Command("here", tuple(words.split()), whole=False))
