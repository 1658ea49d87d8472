"""What is kept of a search: a line for each level that it tried."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deltaserve.errors import InputError
from eval.search_lines import rows_in

LEVEL: dict[str, Any] = {
    "load": 10.0,
    "repeats": 1,
    "requests_per_s": 0.54321,
    "attainment": 0.9,
    "stretch_p90": 1.25,
    "sustained": True,
    "meets": True,
    "sure": False,
}


def write_search(folder: Path, arm: str, seed: int, *levels: dict[str, Any], agents: float) -> None:
    (folder / arm).mkdir(parents=True)
    found = {"arm": arm, "agents": agents, "levels": levels}
    (folder / arm / "capacity.json").write_text(json.dumps(found))
    for level in levels:
        run = folder / f"{arm}@{level['load']:g}" / "r1"
        run.mkdir(parents=True)
        (run / "manifest.json").write_text(json.dumps({"identity": {"seed": seed}}))


def test_each_level_has_a_line_with_its_draw_and_verdict(tmp_path: Path) -> None:
    missed = LEVEL | {"load": 14.0, "attainment": 0.5, "meets": False, "sure": True}
    # As capacity.json says it where more than a tenth of the sessions had no answer.
    left = LEVEL | {"load": 8.0, "stretch_p90": 1e9, "meets": False, "sustained": False}
    unknown = LEVEL | {"stretch_p90": None}
    write_search(tmp_path / "two", "b", 2, missed, LEVEL, agents=10.0)
    write_search(tmp_path / "one", "b", 1, left, agents=0.0)
    write_search(tmp_path / "other", "a", 7, unknown, agents=10.0)
    rows = list(rows_in(tmp_path))
    told = [(row["arm"], row["draw"], row["level"], row["agents"]) for row in rows]
    assert told == [("a", "7", "10", "10"), ("b", "1", "8", "0")] + [
        ("b", "2", level, "10") for level in ("10", "14")
    ]
    assert [row["stretch_p90"] for row in rows] == ["", "inf", "1.25", "1.25"]
    assert rows[2] | {"requests_per_s": "0.5432", "within_objective": "0.9000"} == rows[2]
    assert [(row["sustained"], row["carried"], row["sure"]) for row in rows[1:]] == [
        ("False", "False", "False"),
        ("True", "True", "False"),
        ("True", "False", "True"),
    ]


def test_a_folder_without_a_search_or_without_its_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no search"):
        list(rows_in(tmp_path))
    write_search(tmp_path, "b", 1, LEVEL, agents=10.0)
    (tmp_path / "b@10" / "r1" / "manifest.json").unlink()
    with pytest.raises(InputError, match="b@10: its run is not there"):
        list(rows_in(tmp_path))
