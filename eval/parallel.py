"""Runs of an experiment at the same time: each share of them in a runner of its own, a child
process that sees GPUs of its own.

Owns how runs are shared out and what becomes of the children. What a runner does with its share is
in `eval.runner`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from deltaserve.child import DELTASERVE
from deltaserve.errors import InputError
from eval.cli_options import Given
from eval.endpoint import Endpoint
from eval.experiment import Experiment
from eval.matrix import plan_runs
from eval.progress import Progress
from eval.runner import Summary, run_experiment, unfinished_units, unit_of
from eval.site import Site

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Share:
    """What one runner does: arms, or arms under one load, and the GPUs that it sees; None for all
    that this process does."""

    units: Sequence[str]
    gpus: Sequence[int] | None = None

    def __str__(self) -> str:
        gpus = "" if self.gpus is None else f" on GPU {', '.join(map(str, self.gpus))}"
        return ", ".join(self.units) + gpus


def run_parallel(
    experiment: Experiment, given: Given, *, site: Site, progress: Progress
) -> Summary:
    """Like `run_experiment`, with up to `given.parallel` runs at the same time.

    Raises `InputError` where the arms cannot run beside each other, and where a runner ended
    without having said what became of its runs. An interruption is passed on to all runners, which
    end their fleets first; so is the end of this process, however it comes.
    """
    only = list(given.only) or None
    asked: dict[str, Any] = {
        "site": site,
        "source": given.source,
        "progress": progress,
        "only": only,
    }
    units = unfinished_units(experiment, given.output, **asked)
    if len(units) < 2:
        return run_experiment(experiment, given.output, **asked)
    shares = shared_out(units, given.parallel, site)
    for number, share in enumerate(shares, start=1):
        progress.say(f"{number}: {share}")
    children = [_start(given, share) for share in shares]
    found = _followed(children, progress)
    kept = sum(unit_of(experiment, run) not in units for run in plan_runs(experiment, only))
    summary = Summary(kept=kept)
    for number, (child, said) in enumerate(zip(children, found, strict=True), start=1):
        if child.returncode not in (0, 1) or said is None:
            raise InputError(
                f"{number}: the runner of {shares[number - 1]} ended with status "
                f"{child.returncode}; what it said is above"
            )
        summary.complete += said["complete"]
        summary.kept += said["kept"]
        for name in ("failed", "skipped", "invalid"):
            getattr(summary, name).extend(said[name])
    return summary


def shared_out(units: Mapping[str, Any], parallel: int, site: Site) -> list[Share]:
    """Shares of nearly equal length for as many runners as there are GPUs for, `parallel` at most.

    Units that want the same workers stay together as far as that goes, so that few engines start.
    Raises `InputError` for units that would meet on a server, a GPU or a port.
    """
    for unit, topology in units.items():
        if isinstance(topology, Endpoint):
            raise InputError(
                f"--parallel: {unit} is a server elsewhere, which other runs would load as well"
            )
        if named := site.gpus_named(topology):
            raise InputError(
                f"--parallel: {unit} asks for GPU {named[0]} by number; leave gpus out"
            )
        if getattr(topology, "base_port", 0):
            raise InputError(f"--parallel: {unit} has a base_port; leave it out, or set it to 0")
    needed = max(map(site.gpus_needed, units.values()))
    runners, free = min(parallel, len(units)), list(site.gpus_free()) if needed else []
    if needed:
        runners = min(runners, len(free) // needed)
        if runners == 0:
            raise InputError(f"--parallel: {needed} GPUs are needed, {len(free)} are free")
    by_workers: dict[bytes, list[str]] = {}
    for unit, topology in units.items():
        by_workers.setdefault(site.worker_key(topology), []).append(unit)
    shares = _split(list(by_workers.values()), runners)
    return [
        Share(share, free[at * needed : (at + 1) * needed] if needed else None)
        for at, share in enumerate(shares)
    ]


def _split(groups: Sequence[list[str]], parts: int) -> list[list[str]]:
    """`groups` in so many parts of nearly equal length: whole ones where there are enough of them,
    the longest first to where there is least; else each in as many parts as its length is worth."""
    if len(groups) >= parts:
        found: list[list[str]] = [[] for _ in range(parts)]
        for group in sorted(groups, key=len, reverse=True):
            min(found, key=len).extend(group)
        return found
    of = [1] * len(groups)
    while sum(of) < parts:
        longest = max(range(len(groups)), key=lambda at: len(groups[at]) / of[at])
        of[longest] += 1
    return [
        group[len(group) * part // of_group : len(group) * (part + 1) // of_group]
        for group, of_group in zip(groups, of, strict=True)
        for part in range(of_group)
    ]


def _start(given: Given, share: Share) -> subprocess.Popen[bytes]:
    environment = dict(os.environ)
    if share.gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, share.gpus))
    return subprocess.Popen(
        [*DELTASERVE, *given.words(share.units), "--json"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Ctrl-C reaches it through this process alone, and once.
        start_new_session=True,
        preexec_fn=_end_with_parent,
    )


def _end_with_parent() -> None:
    """Asks the kernel to send SIGTERM to this process when its parent is gone, kill -9 included."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _followed(
    children: Sequence[subprocess.Popen[bytes]], progress: Progress
) -> list[dict[str, Any] | None]:
    """Waits for all of them and shows what they say; the summary that each printed, if it did."""
    outputs: list[bytes] = [b""] * len(children)

    def show(number: int, child: subprocess.Popen[bytes]) -> None:
        assert child.stderr is not None
        for line in child.stderr:
            progress.say(f"{number + 1}: {line.decode(errors='replace').rstrip()}")

    def read(number: int, child: subprocess.Popen[bytes]) -> None:
        assert child.stdout is not None
        outputs[number] = child.stdout.read()

    threads = [
        threading.Thread(target=follow, args=pair, daemon=True)
        for pair in enumerate(children)
        for follow in (show, read)
    ]
    for thread in threads:
        thread.start()
    try:
        for child in children:
            child.wait()
    except KeyboardInterrupt:
        for child in children:
            child.send_signal(signal.SIGINT)
        for child in children:
            child.wait()
        raise
    finally:
        for thread in threads:
            thread.join(timeout=10)
    return [_summary(output) for output in outputs]


def _summary(output: bytes) -> dict[str, Any] | None:
    try:
        found = orjson.loads(output)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None
