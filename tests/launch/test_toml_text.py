"""What launch writes for the router is TOML, whatever a topology has as a value."""

from __future__ import annotations

import tomllib
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaserve.errors import InputError
from launch import planning
from launch.toml_text import line
from launch.topology_files import load_topology

# TOML's whole numbers have 64 bits, and its text no halves of characters.
_TEXT = st.text(st.characters(exclude_categories=("Cs",)))
_LEAVES = st.one_of(
    st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), _TEXT
)
_VALUES = st.recursive(
    _LEAVES, lambda inner: st.lists(inner) | st.dictionaries(_TEXT, inner), max_leaves=8
)


@given(_TEXT, _VALUES)
def test_what_is_written_is_read_as_it_was(key: str, value: Any) -> None:
    assert tomllib.loads(line(key, value)) == {key: value}


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), date(1970, 1, 1)])
def test_what_json_has_no_word_for_is_written_too(value: Any) -> None:
    assert tomllib.loads(line("key", value)) == {"key": value}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("router.admission.max_wait_s=inf", "max_wait_s: expected a value that is not nan"),
        ('router.admission.rule="rotated\U0001f600"', "rule: rotated\U0001f600 is unknown"),
        ("router.admission.max_wait_s=1970-01-01", "max_wait_s: .* expected a number"),
    ],
)
def test_a_value_that_the_router_refuses_is_answered_in_one_line(
    fake_python: Path, tmp_path: Path, override: str, said: str
) -> None:
    topology = load_topology("laptop-sglang", [f"engine.python={fake_python}", override])
    with pytest.raises(InputError, match=f"router.admission: {said}") as error:
        planning.plan(topology, tmp_path)
    assert "\n" not in str(error.value)
