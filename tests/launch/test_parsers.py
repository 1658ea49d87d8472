"""Flags by which engines find tool calls and thoughts in a model's text and follow grammars."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltaserve.errors import InputError
from launch.engines import Engine
from launch.planning import layout
from launch.topology_files import load_topology

REAL = "model=Qwen/Qwen3-Coder-30B-A3B-Instruct"


def flags(name: str, *overrides: str) -> str:
    topology = load_topology(name, overrides)
    engine = Engine(topology.engine.name, Path("/e/bin/python"), {topology.engine.name: "1"})
    return " ".join(layout(topology, Path("/run/x"), engine, 64).workers[0].argv)


@pytest.mark.parametrize(("name", "automatic"), [("sglang", False), ("vllm", True)])
def test_the_parsers_of_a_real_model_are_one_key_for_both_engines(
    name: str, automatic: bool
) -> None:
    argv = flags(name, REAL, "tool_call_parser=qwen3_coder", "reasoning_parser=qwen3")
    assert "--tool-call-parser qwen3_coder" in argv
    assert "--reasoning-parser qwen3" in argv
    assert ("--enable-auto-tool-choice" in argv) == automatic
    argv = flags(name, REAL)
    assert "parser" not in argv
    assert "--enable-auto-tool-choice" not in argv


@pytest.mark.parametrize(
    ("name", "parser"), [("laptop-sglang", "qwen25"), ("laptop-vllm", "hermes")]
)
def test_a_shape_with_a_template_of_ours_has_its_own_parser(name: str, parser: str) -> None:
    assert f"--tool-call-parser {parser}" in flags(name)
    assert "--tool-call-parser mine" in flags(name, "tool_call_parser=mine")
    assert "parser" not in flags(name, "text=false")


@pytest.mark.parametrize("key", ["tool_call_parser", "reasoning_parser"])
def test_a_parser_of_text_is_refused_where_requests_carry_token_ids(key: str) -> None:
    for given in (["text=false"], []):
        name = "laptop-sglang" if given else "sglang"
        with pytest.raises(InputError, match=f"{key}: engines read no text here"):
            load_topology(name, [*given, f"{key}=x"])


def test_sglang_has_a_grammar_backend_where_it_reads_text() -> None:
    assert "--grammar-backend none" in flags("sglang")
    assert "--grammar-backend" not in flags("sglang", REAL)
    assert "--grammar-backend llguidance" in flags("laptop-sglang")
