"""How fleets are made for experiments: from topologies here, or servers elsewhere behind a URL.

Owns what the runner knows of `launch` and of endpoints. Knows no runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import orjson

from deltaserve.child import DELTASERVE
from deltaserve.errors import InputError
from eval.endpoint import Endpoint, attached


class Fleet(Protocol):
    """Workers and a router that are up (`launch.fleet` gives one)."""

    @property
    def router_url(self) -> str | None: ...
    @property
    def workers(self) -> Sequence[Any]: ...
    @property
    def engine_versions(self) -> Mapping[str, str]: ...
    @property
    def timings(self) -> Mapping[str, float]: ...
    def check(self) -> None:
        """Raises when a process of the fleet has died since it was started."""


FleetMaker = Callable[[Any, Path, Callable[[str], None]], AbstractContextManager[Fleet]]


@dataclass(frozen=True)
class Site:
    """How fleets are made here.

    `load` makes a topology from a name and overrides, and `check` raises `InputError` for one that
    cannot be started here; `vocab_size` is of its model, None where unknown; `engine` the versions
    of the engine that it would start, empty where that is known only once it runs. `keeping` gives
    what makes fleets whose workers, started under a folder, are kept for the next fleet while it
    wants the same ones (`worker_key` is then equal). `gpus_needed` is how many GPUs of this machine
    a fleet takes, `gpus_named` those that its topology asks for by number, `gpus_free` those that
    are there for it.
    """

    load: Callable[[str, list[str]], Any]
    check: Callable[[Any], object]
    fleet: FleetMaker
    describe: Callable[[Any], dict[str, Any]]
    vocab_size: Callable[[Any], int | None]
    end: Callable[[Path], int]
    keeping: Callable[[Path], AbstractContextManager[FleetMaker]]
    worker_key: Callable[[Any], bytes]
    replay: Sequence[str] = (*DELTASERVE, "replay", "run")
    clock: Callable[[], float] = time.monotonic
    engine: Callable[[Any], Mapping[str, str]] = lambda _topology: {}
    gpus_needed: Callable[[Any], int] = lambda _topology: 0
    gpus_named: Callable[[Any], Sequence[int]] = lambda _topology: ()
    gpus_free: Callable[[], Sequence[int]] = tuple


def launch_site() -> Site:
    """The real site: topologies and fleets of `launch`."""
    import launch
    from launch.gpus import free_gpus, named_gpus, needed_gpus
    from launch.keep import worker_key
    from launch.models import is_shape, shape_config
    from launch.policies import with_policy

    def load(name: str, overrides: list[str]) -> launch.Topology:
        topology = launch.load_topology(name, overrides)
        if topology.router.kind == "none":
            raise InputError(f"{name}: router.kind is none; an experiment goes through a router")
        if topology.text is None and is_shape(topology.model):
            # Requests carry token ids and random text says nothing: making it would only cost time.
            topology = topology.model_copy(update={"text": False})
        if topology.log_max_mb is None:
            # What is measured is read afterwards, every line of it.
            topology = topology.model_copy(update={"log_max_mb": 0})
        if "base_port" not in topology.model_fields_set:
            # Nobody but the experiment calls its fleets, and two experiments may share a machine.
            topology = topology.model_copy(update={"base_port": 0})
        return with_policy(topology)

    def vocab_size(topology: launch.Topology) -> int | None:
        if is_shape(topology.model):
            return int(shape_config(topology.model)["vocab_size"])
        config = Path(topology.model) / "config.json"
        if config.is_file():
            found = orjson.loads(config.read_bytes()).get("vocab_size")
            return None if found is None else int(found)
        return None

    @contextlib.contextmanager
    def keeping(folder: Path) -> Iterator[FleetMaker]:
        kept = launch.KeptWorkers(folder)
        try:
            yield kept.fleet
        finally:
            kept.close()

    return Site(
        load=load,
        check=lambda topology: launch.plan(topology, Path()),
        fleet=lambda topology, folder, say: launch.fleet(topology, folder, on_progress=say),
        describe=lambda topology: topology.model_dump(mode="json"),
        vocab_size=vocab_size,
        end=_end_left,
        keeping=keeping,
        worker_key=worker_key,
        engine=lambda topology: launch.plan(topology, Path()).engine.versions,
        gpus_needed=needed_gpus,
        gpus_named=named_gpus,
        gpus_free=free_gpus,
    )


def _end_left(folder: Path) -> int:
    """Ends what an earlier runner left of a run's fleet; how many processes that were.

    The folder may have been copied from another host. A fleet that had ended there left nothing;
    of one that had not nobody here knows (`InputError`)."""
    from launch.control import down, status

    if not (folder / "fleet.json").is_file():
        return 0
    fleet = status(folder)
    if fleet.host == socket.gethostname():
        return down(folder).processes
    if fleet.state in ("stopped", "failed"):
        return 0
    raise InputError(
        f"{folder}: its run did not end on {fleet.host}; end it there, or remove that folder where "
        "the machine is gone"
    )


def with_endpoints(site: Site) -> Site:
    """`site` for arms that are servers elsewhere as well (`Endpoint` in place of a topology)."""

    def fleet_maker(make: FleetMaker) -> FleetMaker:
        def fleet(
            topology: Any, folder: Path, say: Callable[[str], None]
        ) -> AbstractContextManager[Fleet]:
            if isinstance(topology, Endpoint):
                return attached(topology, folder, say)
            return make(topology, folder, say)

        return fleet

    @contextlib.contextmanager
    def keeping(folder: Path) -> Iterator[FleetMaker]:
        with site.keeping(folder) as make:
            yield fleet_maker(make)

    def of_either(
        endpoint: Callable[[Endpoint], Any], topology: Callable[[Any], Any]
    ) -> Callable[[Any], Any]:
        return lambda found: endpoint(found) if isinstance(found, Endpoint) else topology(found)

    return dataclasses.replace(
        site,
        check=of_either(Endpoint.check, site.check),
        describe=of_either(Endpoint.describe, site.describe),
        vocab_size=of_either(Endpoint.vocab_size, site.vocab_size),
        worker_key=of_either(lambda endpoint: endpoint.url.encode(), site.worker_key),
        engine=of_either(lambda _endpoint: {}, site.engine),
        fleet=fleet_maker(site.fleet),
        keeping=keeping,
    )


def shared_vocab(site: Site, topologies: Iterable[Any]) -> int | None:
    """The vocabulary that every arm's model has, so that all get the same prompts."""
    sizes = [size for size in map(site.vocab_size, topologies) if size is not None]
    return min(sizes, default=None)
