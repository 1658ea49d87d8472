"""A run's folder in which somebody has edited a file by hand."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from deltaserve.errors import InputError
from eval.report import find_runs, find_searches, gather, write_report
from eval.search import CAPACITY_FILE
from launch.topology_files import load_topology
from tests.command_line import deltaserve

RunWriter = Callable[..., Path]
Place = tuple[str | int, ...]

# As runs on GPUs have it; what else a manifest holds is of every made run.
MANIFEST: dict[str, Any] = {
    "load": "4",
    "description": "Made by hand.",
    "baseline": "a",
    "order": 1,
    "cell_order": 1,
    "started_at": "2026-01-01T00:00:00+00:00",
    "gpus": 1,
    "topology": load_topology("sglang:1").model_dump(mode="json", exclude_defaults=True)
    | {"max_total_tokens": 1000, "router": {"kind": "deltaserve", "admission": {"rule": "off"}}}
    | {"workers": [{"role": "colocated", "count": 1, "tensor_parallel": 1}]},
    "hardware": {
        "cpu": "made",
        "cores": 2,
        "memory_bytes": 2**34,
        "gpus": [{"name": "made", "memory_bytes": 2**34}],
    },
    "versions": {"deltaserve": "1", "python": "3.11", "engines": {"sglang": "1", "torch": "2"}},
    "git": {"commit": "0" * 40, "dirty": False},
    "trace": {"path": "made.jsonl", "sha256": "0" * 64},
    "policy": "unified",
    "policy_params": {"weight": 1.5},
    "workers": [{"id": "w0", "gpus": [0], "url": "http://w0"}],
    "identity": {"trace_sha256": "0" * 64, "seed": 1, "engine": "sglang 1"},
    "replay": {
        "arguments": {
            "mode": "closed",
            "max_inflight_sessions": 4,
            "time_scale": 2.0,
            "max_think_s": 10.0,
            "start_share": [0.2, 0.5],
            "seed": 1,
        },
        "clock": {"unix_origin_s": 1e9},
    },
    "replay_command": ["deltaserve", "replay", "run"],
    "slo": {"ttft_s": 3.0, "tpot_s": 0.05},
    "validity": {"cold_slack_tokens": 64},
    "analysis": {"primary": ["ttft_p90"], "vary": []},
    "imported": {"duration_s": 60.0, "timed": True},
    "violations": [],
}
PHASES = {
    "window_start_s": 1.0,
    "window_end_s": 100.0,
    "measure_s": 99.0,
    "start": "mid",
    "recycle": True,
}
# What a search for capacity leaves beside its runs.
SEARCH = {
    "arm": "a",
    "over": "replay.max_inflight_sessions",
    "finished": True,
    "agents": 4.0,
    "low": 4.0,
    "high": 6.0,
    "gpus": 1,
    "workers": 1,
    "per_gpu": 4.0,
    "per_worker": 4.0,
    "slo": {"ttft_s": 3.0, "attainment": 0.9, "stretch_p90": 2.0},
    "alone": "predicted",
    "levels": [
        {
            "load": load,
            "repeats": 1,
            "meets": load < 6,
            "sure": True,
            "sustained": True,
            "violations": ["late"],
            "in_time_share": 0.95,
            "stretch_p90": 1.2,
            "ttft_p90": 1.5,
            "intervals": {"in_time_share": [0.9, 1.0]},
        }
        for load in (4.0, 6.0)
    ],
}
WRONG: tuple[Any, ...] = ("word", -0.5, True, None, ["word"], {"word": 7})


def places(value: Any, place: Place = ()) -> Iterator[Place]:
    """Where every field is, those of inner tables and lists too."""
    inside = value
    if isinstance(value, list):
        inside = dict(enumerate(value))
    for key, inner in inside.items() if isinstance(inside, dict) else ():
        yield (*place, key)
        yield from places(inner, (*place, key))


def wrongs(document: dict[str, Any]) -> Iterator[tuple[Place, Any]]:
    """Every field with one of the wrong values, which take turns."""
    yield from zip(places(document), itertools.cycle(WRONG))


def with_wrong(document: dict[str, Any], *edits: tuple[Place, Any]) -> dict[str, Any]:
    edited = copy.deepcopy(document)
    for place, wrong in edits:
        table: Any = edited
        for key in place[:-1]:
            table = table[key]
        table[place[-1]] = wrong
    return edited


def apart(edits: list[tuple[Place, Any]], most: int = 12) -> list[list[tuple[Place, Any]]]:
    """The edits in groups that can be made together: none is inside of another."""
    groups: list[list[tuple[Place, Any]]] = []
    for place, wrong in edits:
        for group in groups:
            inside = any(place[: len(of)] == of or of[: len(place)] == place for of, _ in group)
            if len(group) < most and not inside:
                group.append((place, wrong))
                break
        else:
            groups.append([(place, wrong)])
    return groups


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, run_writer: RunWriter) -> Path:
    made = tmp_path_factory.mktemp("edited")
    run = run_writer(made / "runs", sessions=3, turns=2, manifest=MANIFEST)
    (run / "phases.json").write_bytes(orjson.dumps(PHASES))
    (run / CAPACITY_FILE).write_bytes(orjson.dumps(SEARCH))
    return run


def complaint(folder: Path, reported: bool = True) -> str | None:
    """What a report on the run is refused with; None where there is one. Without `reported` the
    files are read and nothing more."""
    try:
        runs, searches = find_runs([folder]), find_searches([folder])
        if reported:
            evidence = gather(runs, draws=2, searches=searches)
            write_report(evidence, folder.parents[1] / "report")
    except InputError as error:
        return str(error)
    return None


FILES = ("manifest.json", "phases.json", "trace.json", CAPACITY_FILE)


@pytest.mark.parametrize("name", FILES)
def test_a_field_of_another_type_is_named_or_does_no_harm(folder: Path, name: str) -> None:
    """What reading refuses is named there. A report takes a second, so that what is read is in one
    together with others, and with half of them where that one is refused."""
    path = folder / name
    whole = path.read_bytes()
    document = orjson.loads(whole)

    def harmless(edits: list[tuple[Place, Any]]) -> None:
        if refused(edits, reported=True) and len(edits) > 1:
            harmless(edits[: len(edits) // 2])
            harmless(edits[len(edits) // 2 :])

    def refused(edits: list[tuple[Place, Any]], reported: bool) -> bool:
        path.write_bytes(orjson.dumps(with_wrong(document, *edits)))
        try:
            found = complaint(folder, reported)
        except Exception as error:
            pytest.fail(f"{edits}: {error!r}")
        if len(edits) == 1:
            assert found is None or (str(path) in found and "\n" not in found), (edits, found)
        return found is not None

    assert complaint(folder) is None
    try:
        read = [edit for edit in wrongs(document) if not refused([edit], reported=False)]
        for group in apart(read):
            harmless(group)
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize(
    ("name", "place", "wrong", "said"),
    [
        ("manifest.json", ("repeat",), "one", "repeat: input should be a valid integer"),
        ("manifest.json", ("order",), None, "order: input should be a valid integer"),
        ("manifest.json", ("versions", "engines"), [], "versions.engines: input should be an obj"),
        ("manifest.json", ("hardware", "gpus", 0), 1, "hardware.gpus.0: input should be an object"),
        ("phases.json", ("window_start_s",), "1", "window_start_s: input should be a valid number"),
        ("trace.json", ("length_scale",), [], "length_scale: input should be a valid number"),
        (CAPACITY_FILE, ("slo", "ttft_s"), "3", "slo.ttft_s: input should be a valid number"),
    ],
)
def test_the_command_line_names_the_field_in_one_line(
    folder: Path, name: str, place: Place, wrong: Any, said: str
) -> None:
    path = folder / name
    whole = path.read_bytes()
    try:
        path.write_bytes(orjson.dumps(with_wrong(orjson.loads(whole), (place, wrong))))
        done = deltaserve("eval", "report", str(folder))
    finally:
        path.write_bytes(whole)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith(f"error: {path}: ")
    assert said in done.stderr
