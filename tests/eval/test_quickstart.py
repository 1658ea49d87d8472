"""docs/quickstart.md, copied as a newcomer copies it: everything that needs no engine."""

from __future__ import annotations

import re
from pathlib import Path

from tests.quickstart import blocks, copied, run

# What sets up the environment, or needs an engine; tests/live runs those.
NOT_HERE = re.compile(
    r"make |source |curl |  -d |deltaserve launch |deltaserve eval report"
    r"|deltaserve eval run (?!.*--plan)"
)


def commands(block: str) -> str:
    """A block without the commands that need more than this package."""
    joined = block.replace("\\\n", "")
    return "\n".join(line for line in joined.splitlines() if not NOT_HERE.match(line))


def test_what_needs_no_engine_works_as_written(tmp_path: Path) -> None:
    said = run("\n".join(map(commands, blocks())), tmp_path)
    assert (tmp_path / "mine.py").exists()
    assert "unified: keep the session's worker" in said
    plan, changed = re.findall(r"(# unified\n.*?h:min left)", said, re.S)
    assert len(re.findall(r"^ +\d+  out/mine/(?:mine|unified)/r[123]  ", plan, re.M)) == 6
    assert 'router.policy="mine:LeastWork"' in plan
    assert "router.params.cached_weight=0.5" in changed


def test_a_mistake_in_the_policy_is_said_before_anything_starts(tmp_path: Path) -> None:
    policy = next(block for block in blocks() if "class LeastWork" in block)
    plan = next(block for block in blocks() if "--plan" in block)
    wrong = commands(policy).replace("class LeastWork", "class LeastWrok") + "\n" + commands(plan)
    done = copied(wrong, tmp_path)
    assert done.returncode == 2
    assert "policy mine:LeastWork: module 'mine' has no attribute" in done.stderr.splitlines()[-1]
