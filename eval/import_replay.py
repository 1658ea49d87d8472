"""A folder that `deltaserve replay run` wrote, as a run that the report reads.

Owns what such a folder says of itself: its trace, its prompts, whether it was finished. The servers
are whatever answered: their engine and GPUs are known only if they are given.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from deltaserve.errors import InputError
from eval import provenance
from eval.decisions import DECISION_FILES
from eval.experiment import Replay
from eval.records import PHASES_FILE
from eval.traces import possible_cached_tokens, trace_facts, write_facts
from replay.results import REPLAY_FILE, RESULTS_FILE, read_results
from replay.trace import digest

_FILES = (RESULTS_FILE, REPLAY_FILE, PHASES_FILE, *DECISION_FILES)
# What of a replay's arguments decides which requests there are, and how long they are.
_OF_THE_TRACE = ("request_limit", "session_limit", "length_scale", "max_input_tokens")


def import_replay(source: Path, folder: Path, manifest: dict[str, Any]) -> None:
    """Fills the new run folder `folder` from the replay's folder `source`; `manifest` holds what
    the caller knows (experiment, arm, repeat, GPUs).

    What an endless cache would hold is computed again where the trace is still where it was. Raises
    `InputError` where `source` is no such folder.
    """
    record = _read(source / REPLAY_FILE)
    results = read_results(source)
    for name in _FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if (source / "steps").is_dir():
        shutil.copytree(source / "steps", folder / "steps", dirs_exist_ok=True)
    arguments, trace = record["arguments"], record["trace"]
    path = Path(trace["path"])
    if path.is_file() and digest(path) == trace["sha256"]:
        replay = Replay.model_validate(
            {name: arguments[name] for name in _OF_THE_TRACE if arguments.get(name) is not None}
        )
        facts = trace_facts(path, replay)
        write_facts(
            folder,
            replace(
                facts,
                possible_cached_tokens=possible_cached_tokens(path, replay, results),
            ),
        )
    summary = record.get("summary")
    unfinished = None
    if summary is None:
        unfinished = "the replay was not finished (replay.json: no summary)"
    elif summary.get("interrupted"):
        unfinished = "the replay was interrupted, and measured for less time than it was to"
    elif record.get("resumed_at_s"):
        unfinished = (
            f"the replay was broken off and resumed {record['resumed_at_s'][-1]:.0f} s after its "
            "start: the time between would count in its rates, and no cache was what it had been"
        )
    provenance.write_manifest(
        folder,
        {
            "state": "failed" if unfinished else "complete",
            "reason": unfinished,
            "load": None,
            "topology": {"model": "unknown", "device": "unknown"},
            "versions": {"deltaserve": record["versions"].get("deltaserve"), "engines": {}},
            "trace": {"path": trace["path"], "sha256": trace["sha256"]},
            "identity": {
                "trace_sha256": trace["sha256"],
                "seed": arguments.get("seed"),
                "vocab_size": arguments.get("vocab_size"),
                "splice_outputs": arguments.get("splice_outputs"),
            },
            "replay": record,
            "source": {"file": str(source.resolve()), "format": "replay"},
            "timings": {"replay_s": (summary or {}).get("duration_s")},
        }
        | manifest,
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = orjson.loads(path.read_bytes())
        arguments, trace = record["arguments"], record["trace"]
        if not (isinstance(arguments, dict) and isinstance(record["versions"], dict)):
            raise TypeError("arguments and versions: expected objects")
        str(trace["path"]), str(trace["sha256"])
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{path}: no such file; expected a folder of `replay run`") from None
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not what replay run writes there: {error!r}") from None
    return record
