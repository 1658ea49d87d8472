"""Python in the README and the docs imports what there is, and a policy in it is one that the
router loads. Blocks in a shell's here-document are docs/quickstart.md's, which
tests/eval/test_quickstart.py runs."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

from router_policies import policy
from tests.doc_pages import Block, blocks

PYTHON = [block for block in blocks() if block.language == "python"]
# Clients' own packages, which are not in our environment.
FOREIGN = ("anthropic", "openai")


@pytest.mark.parametrize("block", PYTHON, ids=[block.where for block in PYTHON])
def test_every_import_is_of_what_there_is(block: Block) -> None:
    for statement in ast.walk(ast.parse(block.text)):
        if isinstance(statement, ast.ImportFrom) and statement.module not in (
            "__future__",
            *FOREIGN,
        ):
            module = importlib.import_module(str(statement.module))
            missing = [each.name for each in statement.names if not hasattr(module, each.name)]
            assert not missing, f"{statement.module} has no {', '.join(missing)}"


def test_a_policy_is_one_that_the_router_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (text,) = [block.text for block in PYTHON if block.text.startswith("# mine.py")]
    (tmp_path / "documented.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert callable(policy.load("documented:FewestTokens", {"cached_weight": 0.5}))
