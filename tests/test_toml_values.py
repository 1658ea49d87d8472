"""Values of files and overrides that no later file could hold are refused where they stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltaserve import toml_values
from deltaserve.errors import InputError
from tests.command_line import deltaserve

BEYOND = 2**63


def test_a_value_is_read_as_toml_where_it_is_one() -> None:
    assert toml_values.value("8", "--set x=8") == 8
    assert toml_values.value('["--a"]', "") == ["--a"]
    assert toml_values.value("unified", "") == "unified"
    assert toml_values.value(str(BEYOND - 1), "") == BEYOND - 1


@pytest.mark.parametrize("text", [f"{BEYOND}", f"[1, {{a = {BEYOND}}}]", f"{-BEYOND - 1}"])
def test_integers_of_more_than_64_bits_are_refused_with_their_place(text: str) -> None:
    with pytest.raises(InputError, match=r"^--set a=b: -?\d+ has more than 64 bits$"):
        toml_values.value(text, "--set a=b")
    with pytest.raises(InputError, match=r"^f\.toml: -?\d+ has more than 64 bits$"):
        toml_values.tables(f"[t]\na = {text}\n", "f.toml")


def test_what_is_no_toml_names_its_file() -> None:
    with pytest.raises(InputError, match=r"^f\.toml: not TOML: .*line 1"):
        toml_values.tables("a = \n", "f.toml")


def test_experiments_and_topologies_say_so_in_one_line(tmp_path: Path) -> None:
    output = tmp_path / "out"
    for command in (
        ["eval", "simulate", "admission-gpu", "--set", f"seed={BEYOND}", "--output", output],
        ["launch", "check", "laptop-sglang", "--set", f"base_port={BEYOND}"],
    ):
        done = deltaserve(*command)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.endswith(f"={BEYOND}: {BEYOND} has more than 64 bits\n")
        assert done.stderr.count("\n") == 1
