"""Workers that stay up while routers come and go in front of them.

An engine takes one to three minutes to start, a router a second. Runs that differ only in what
stands in front of the workers, or in the load, can share them: their caches are emptied before
each. Owns the life of such workers; how a fleet starts and ends is in `launch.fleets`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

import orjson

from launch.ending import wait_until_idle
from launch.fleets import Fleet, FleetError, fleet
from launch.guard import older_log
from launch.topology import RouterChoice, Topology, WorkerGroup

_TABLES = ("gpu.csv", "processes.csv")
_ENDING_S = 600.0
"""How long requests whose clients have left may keep the workers from the next run."""


class KeptWorkers:
    """Workers under `folder`, started when they are first asked for and kept until others are, or
    until `close`. Not for several threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key: bytes | None = None
        self._started = 0
        self._workers: Fleet | None = None
        self._open = contextlib.ExitStack()

    @contextlib.contextmanager
    def fleet(
        self, topology: Topology, run_dir: Path, on_progress: Callable[[str], None] | None = None
    ) -> Iterator[Fleet]:
        """Like `launch.fleet`: a fleet of `topology` whose workers hold nothing in their caches,
        with a router of its own. At the end of the block only the router ends; what the workers'
        telemetry and samples recorded meanwhile is copied under `run_dir`.

        Raises what `launch.fleet` raises, and `FleetError` where a cache cannot be emptied.
        """
        workers = self._started_for(topology, on_progress)
        try:
            workers.flush_caches()
            attached = _attached(topology, workers)
            with (
                contextlib.closing(_Recording(workers.plan.run_dir)) as recording,
                contextlib.ExitStack() as afterwards,
                fleet(attached, run_dir, on_progress, behind=workers) as front,
            ):
                # Not while the router is sampled, which goes to files of the same names.
                afterwards.callback(recording.copy_to, run_dir)
                yield front
                if (router := front.plan.router) and topology.router.kind == "deltaserve":
                    wait_until_idle(router.url, _ENDING_S, router.keys.key)
        except FleetError:
            self.close()  # whatever died, the next run starts from nothing
            raise

    def close(self) -> None:
        """Ends the workers, where there are any."""
        self._key, self._workers = None, None
        self._open.close()

    def _started_for(self, topology: Topology, on_progress: Callable[[str], None] | None) -> Fleet:
        key = worker_key(topology)
        if self._workers is None or key != self._key:
            self.close()
            self._started += 1
            alone = topology.model_copy(update={"router": RouterChoice(kind="none")})
            run_dir = self._folder / f"w{self._started}"
            self._workers = self._open.enter_context(fleet(alone, run_dir, on_progress))
            self._key = key
        return self._workers


def worker_key(topology: Topology) -> bytes:
    """Equal for two topologies whose workers would be started alike."""
    content = topology.model_dump(mode="json", exclude={"router", "name", "description"})
    return orjson.dumps(content, option=orjson.OPT_SORT_KEYS)


def _attached(topology: Topology, workers: Fleet) -> Topology:
    """`topology` with the workers that run already in place of those it would start."""
    processes = iter(workers.plan.workers)
    groups = []
    for group in topology.workers:
        if group.urls:
            groups.append(group)
            continue
        own = [next(processes) for _ in range(group.size)]
        ports = [process.ports for process in own]
        hosts = [urlsplit(process.url).hostname for process in own]
        update: dict[str, object] = {
            "urls": tuple(process.url for process in own),
            "count": len(own),
            "gpus": (),
            "bootstrap_ports": tuple(p["bootstrap"] for p in ports)
            if topology.has_bootstrap(group)
            else (),
        }
        if topology.kv_events:
            update |= {
                key: tuple(f"tcp://{h}:{p[key]}" for h, p in zip(hosts, ports, strict=True))
                for key in ("kv_events", "kv_events_replay")
            }
        groups.append(WorkerGroup.model_validate(group.model_dump() | update))
    fields = {"workers": tuple(groups), "gpus": (), "telemetry": False, "warm_up": False}
    # Which GPUs they have was found when they were started; the router is told what to expect.
    return topology.model_copy(update=fields | {"hardware": workers.plan.topology.hardware})


class _Recording:
    """What a fleet's files grow by from now on, until `close`.

    A bounded file that is full goes on under another name (`older_log`), and a second time under
    none. So what is written to now is held open: the rest of it is found wherever it has gone.
    """

    def __init__(self, source: Path) -> None:
        self._source = source
        self._open = contextlib.ExitStack()
        self._begun: dict[Path, BinaryIO] = {}
        for path in self._newest():
            self._begun[path] = file = self._open.enter_context(path.open("rb"))
            file.seek(0, os.SEEK_END)

    def close(self) -> None:
        self._open.close()

    def _newest(self) -> list[Path]:
        """The files that are written to."""
        tables = [self._source / name for name in _TABLES]
        paths = [path for path in (*tables, *self._source.glob("steps/*")) if path.is_file()]
        older = {older_log(str(path)) for path in paths}
        return [path for path in paths if str(path) not in older]

    def copy_to(self, folder: Path) -> None:
        """Adds what was written since to the files of the same names under `folder`. Of a file that
        was full more than twice since, only what the fleet still keeps is there."""
        for path in self._newest():
            target = folder / path.relative_to(self._source)
            target.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.ExitStack() as opened, target.open("ab") as copy:
                for grown in self._grown(path, opened):
                    begun_at = grown.tell()
                    grown.seek(0)
                    header = grown.readline() if path.suffix == ".csv" else b""
                    if copy.tell() == 0:
                        copy.write(header)
                    # The sampler may not have written the header yet when the recording began.
                    grown.seek(max(begun_at, len(header)))
                    shutil.copyfileobj(grown, copy)

    def _grown(self, path: Path, opened: contextlib.ExitStack) -> list[BinaryIO]:
        """The files that were written to under the name of `path` since, each from there on."""
        newest: BinaryIO = opened.enter_context(path.open("rb"))
        begun = self._begun.get(path)
        if begun is not None and _are_same(begun, newest):
            return [begun]
        found = [newest] if begun is None else [begun, newest]
        before = Path(older_log(str(path)))
        if before.exists():
            older = opened.enter_context(before.open("rb"))
            if not any(_are_same(older, file) for file in found):
                found.insert(-1, older)
        return found


def _are_same(one: BinaryIO, other: BinaryIO) -> bool:
    return os.path.sameopenfile(one.fileno(), other.fileno())
