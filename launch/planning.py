"""From a topology to the exact processes: commands, environments, ports, log files.

Owns the layout of a run's folder. `layout` is a pure function; `plan` finds the engine for it. What
is planned is held against the machine in `launch.checking`. Nothing is started here.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from deltaserve import __version__
from deltaserve.errors import InputError
from launch import cluster, commands
from launch.cache import make_folder, write_atomically
from launch.capacity import Holds
from launch.cluster import Node, assign, cluster_nodes, launcher
from launch.commands import routers, sglang, vllm
from launch.engines import ENVIRONMENTS, Engine, find, require
from launch.gpus import on_gpus
from launch.guard import older_log
from launch.keys import Keys, engine_keys, router_environment, router_keys, variable
from launch.kv import unlike, vocab_size, worker_kv
from launch.models import is_folder, is_shape, model_folder, shape_folder, write_shape
from launch.policies import with_policy
from launch.ports import free_base, worker_ports
from launch.sampling import SAMPLES
from launch.supervised import keep_previous
from launch.toml_text import line as _line
from launch.topology import Role, Topology, WorkerGroup

_ENGINES = {"sglang": sglang, "vllm": vllm}

_DECISION_LOG = "decisions.jsonl"

# Variables of the caller that would point an engine at our own packages.
_DROPPED = ("VIRTUAL_ENV", "PYTHONHOME", "PYTHONPATH")


@dataclass(frozen=True)
class Process:
    """One process of a fleet, as it will be started; an attached one runs already.

    `node` is the address of the cluster's node that it is placed on, and `launcher` what does that.
    `unbind` says that its threads are to be freed from single cores when it is ready; `keys` are
    what it asks of who calls it.
    """

    id: str
    kind: str
    role: Role | None
    argv: tuple[str, ...]
    environment: dict[str, str]
    ports: dict[str, int]
    gpus: tuple[int, ...]
    attached: bool
    url: str
    health_url: str
    log: Path
    failures: tuple[str, ...]
    stop_signal: int = signal.SIGTERM
    unbind: bool = False
    node: str | None = None
    launcher: tuple[str, ...] = ()
    keys: Keys = field(default_factory=Keys)

    def started(self) -> tuple[tuple[str, ...], dict[str, str]]:
        """What is started here for it: arguments and the whole environment."""
        if not self.launcher:
            return self.argv, self.full_environment()
        placed = {cluster.ENVIRONMENT: json.dumps(self.environment)}
        return (*self.launcher, *self.argv), _inherited() | placed

    def full_environment(self) -> dict[str, str]:
        """The caller's environment with this process's on top."""
        return _inherited() | self.environment


@dataclass(frozen=True)
class Plan:
    """Every process of a topology, in starting order, and the files they read."""

    topology: Topology
    engine: Engine
    run_dir: Path
    processes: tuple[Process, ...]
    parallel_starts: int

    @property
    def workers(self) -> tuple[Process, ...]:
        return tuple(p for p in self.processes if p.kind == "worker")

    @property
    def router(self) -> Process | None:
        return next((p for p in self.processes if p.kind == "router"), None)

    @property
    def ports(self) -> dict[int, str]:
        """Port → what it is for, of everything that will be started."""
        return {
            port: f"{process.id} {name}"
            for process in self.processes
            if not process.attached
            for name, port in process.ports.items()
        }

    @property
    def gpu_plan(self) -> dict[int, str]:
        """GPU → the worker that has it."""
        return {gpu: worker.id for worker in self.workers for gpu in worker.gpus}

    @property
    def load_gauges(self) -> tuple[str, str, str]:
        """The engine's own gauges of requests that run and wait, and of KV held."""
        gauges: tuple[str, str, str] = _ENGINES[self.engine.name].LOAD_GAUGES
        return gauges

    @property
    def plugin_dir(self) -> Path:
        return self.run_dir / "plugins"


def plan(topology: Topology, run_dir: Path) -> Plan:
    """The plan of `topology` on this machine, its files under `run_dir`.

    Raises `InputError` when the engine, the model's folder or the tokenizer is missing, the router
    does not take its policy, parameters or flags or could place no request with them on these
    workers, or `base_port = 0` finds no free ports.
    """
    topology = _found(with_policy(topology))
    choice = topology.engine
    if all(group.urls for group in topology.workers):
        engine = Engine(choice.name, Path(), {choice.name: choice.version or "unknown"})
    else:
        where = topology.where
        engine = find(choice.name, topology.device, choice.python, choice.version, where)
    if topology.router.kind in ENVIRONMENTS:
        require(ENVIRONMENTS[topology.router.kind], f"{topology.where}: router.kind")
    if topology.base_port == 0:
        base = free_base(topology.worker_count)
        topology = topology.model_copy(update={"base_port": base})
    topology = on_gpus(topology)
    nodes: list[Node] = []
    if topology.placement.kind == "ray":
        nodes = assign(topology, cluster_nodes(topology.placement, topology.where))
    made = layout(topology, run_dir.absolute(), engine, len(os.sched_getaffinity(0)), nodes)
    _check_router(made)
    return made


def layout(
    topology: Topology, run_dir: Path, engine: Engine, cores: int, nodes: Sequence[Node] = ()
) -> Plan:
    """The processes of `topology` with `engine` on `cores` cores; its workers on `nodes` (one each,
    in order) where given. Pure.
    """
    known = _ENGINES[engine.name]
    if found := unlike(topology):
        raise InputError(f"{topology.where}: {': '.join(found)}")
    on_cpu = topology.device == "cpu"
    # One share is left to those who ask and to the engines' own HTTP processes: a pool of threads
    # whose every step waits for one that has no core is many times slower than a smaller one.
    share = max(1, cores // (topology.worker_count + 1))
    threads = topology.cpu_threads or (share if on_cpu else min(8, share))
    model = topology.model
    paths = commands.Paths(
        python=engine.python,
        model=str(shape_folder(model)) if is_shape(model) else model,
        run_dir=run_dir,
        plugin_dir=run_dir / "plugins",
    )
    processes: list[Process] = []
    counted: dict[Role, int] = {}
    next_gpu = iter(topology.gpus or itertools.count())
    placed = 0
    for group in topology.workers:
        for in_group in range(group.size):
            number = counted.get(group.role, 0)
            counted[group.role] = number + 1
            gpus: tuple[int, ...] = ()
            if group.urls:
                processes.append(_attached(topology, group, number, in_group, run_dir))
                continue
            node = nodes[placed] if nodes else None
            placed += 1
            if not on_cpu and node is None:
                first = in_group * group.tensor_parallel
                gpus = group.gpus[first : first + group.tensor_parallel] or tuple(
                    itertools.islice(next_gpu, group.tensor_parallel)
                )
            place = commands.Place(
                id=f"{group.role}-{number}",
                role=group.role,
                group=group,
                ports=worker_ports(topology.base_port, len(processes)),
                gpus=gpus,
                threads=threads,
            )
            host = node.address if node else topology.host
            command = known.command(topology.model_copy(update={"host": host}), place, paths)
            ranks = commands.data_parallel_ranks(command.argv)
            if topology.kv_events and ranks > 1:
                raise InputError(
                    f"{topology.where}: kv_events: {place.id} has {ranks} data-parallel ranks by "
                    "its flags, and the router reads the events of the first only; set kv_events = "
                    "false, or have a worker for each rank"
                )
            url = f"http://{host}:{place.ports['http']}"
            before: tuple[str, ...] = ()
            if node is not None:
                wanted = 0 if on_cpu else group.tensor_parallel
                before = launcher(
                    topology.placement,
                    node,
                    wanted,
                    run_dir,
                    known.STOP_SIGNAL,
                )
            processes.append(
                Process(
                    id=place.id,
                    kind="worker",
                    role=place.role,
                    argv=command.argv,
                    environment=command.environment,
                    ports=dict(place.ports),
                    gpus=gpus,
                    attached=False,
                    url=url,
                    health_url=url + known.HEALTH_PATH,
                    log=run_dir / "logs" / f"{place.id}.log",
                    failures=known.FAILURES,
                    # What stands here for a placed worker has its own way to be asked.
                    stop_signal=known.STOP_SIGNAL if node is None else signal.SIGTERM,
                    unbind=command.unbind and node is None,
                    node=node.address if node else None,
                    launcher=before,
                    keys=engine_keys(topology, group),
                )
            )
    if topology.router.kind != "none":
        processes.append(_router(topology, processes, run_dir))
    # An engine's start is three imports of torch side by side. SGLang's on a CPU is one, from which
    # its other processes are forked.
    imports = 1 if on_cpu and engine.name == "sglang" else 3
    parallel_starts = topology.parallel_starts or max(1, cores // imports)
    return Plan(topology, engine, run_dir, tuple(processes), parallel_starts)


def move_away_previous(run_dir: Path) -> None:
    """Moves what an earlier start recorded in `run_dir` to names that end with ``.1``: telemetry,
    samples, decisions and logs, which would be taken for this start's, and to which it would add
    its own. Telemetry, samples and decisions that are a link to elsewhere stay: who put it there
    wants it there."""
    steps = run_dir / "steps"
    if steps.is_dir() and not steps.is_symlink():
        before = steps.with_name("steps.1")
        shutil.rmtree(before, ignore_errors=True)
        steps.rename(before)
    for name in (*SAMPLES, _DECISION_LOG):
        newest = run_dir / name
        if not newest.is_symlink():
            for path in (Path(older_log(str(newest))), newest):
                keep_previous(path)
    # All of them: processes that this start does not reach, or does not have, write none over them.
    for log in list((run_dir / "logs").glob("*.log")):
        keep_previous(log)


def write_files(made: Plan) -> None:
    """Writes what the processes read: model folder, plugin folder, router configuration."""
    if is_shape(made.topology.model):
        write_shape(made.topology.model)
    write_plugin(made.plugin_dir)
    (made.run_dir / "logs").mkdir(parents=True, exist_ok=True)
    if made.topology.telemetry and made.topology.why_no_telemetry is None:
        (made.run_dir / "steps").mkdir(exist_ok=True)
    if made.topology.router.kind == "deltaserve":
        write_router_config(made, {})


def write_router_config(made: Plan, reported: Mapping[str, Holds]) -> None:
    """Writes ``router.toml``, with what engines reported that they hold, by worker."""
    path = made.run_dir / "router.toml"
    write_atomically(path, router_config(made, reported).encode())


def check_on_path(folder: Path) -> None:
    """Raises `InputError` where `folder` cannot be named on ``PYTHONPATH``."""
    if os.pathsep in str(folder):
        raise InputError(
            f"{folder}: {os.pathsep!r} separates folders on PYTHONPATH, so that SGLang would not "
            "find our plugin there; choose another folder"
        )


def write_plugin(folder: Path) -> None:
    """A folder that makes our SGLang plugin an installed one for whoever has it on ``PYTHONPATH``.

    It holds a link to the package and the metadata that entry points are read from, so that nothing
    is ever installed in an engine's environment.
    """
    spec = find_spec("sglang_ext")
    if spec is None or not spec.submodule_search_locations:
        raise InputError("the package sglang_ext is missing; install deltaserve again")
    source = Path(next(iter(spec.submodule_search_locations)))
    make_folder(folder)
    link = folder / "sglang_ext"
    info = folder / f"deltaserve-{__version__}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink() or link.resolve() != source.resolve():
        link.unlink(missing_ok=True)
        link.symlink_to(source)
    metadata = f"Metadata-Version: 2.1\nName: deltaserve\nVersion: {__version__}\n"
    entry_points = "[sglang.srt.plugins]\ndeltaserve = sglang_ext.plugin:install\n"
    write_atomically(info / "METADATA", metadata.encode())
    write_atomically(info / "entry_points.txt", entry_points.encode())


def router_config(made: Plan, reported: Mapping[str, Holds] | None = None) -> str:
    """The content of ``router.toml`` (docs/formats.md). What workers reported that they hold counts
    before what was asked for."""
    topology = made.topology
    lines = [
        _line("host", topology.host),
        _line("port", topology.base_port),
        _line("policy", topology.router.policy),
        _line("decision_log", _DECISION_LOG),
    ]
    if topology.log_max_bytes:
        lines += [_line("decision_log_max_mb", topology.log_max_bytes / 1e6)]
    if tokenizer := _tokenizer(topology):
        lines += [_line("tokenizer", str(tokenizer))]
    # SGLang hands larger token ids to the model, where one ends its scheduler; vLLM refuses them.
    if made.engine.name == "sglang" and (size := vocab_size(topology.model)):
        lines += [_line("vocab_size", size)]
    if topology.router.params:
        lines += ["", "[policy_params]"]
        lines += [_line(key, value) for key, value in topology.router.params.items()]
    if topology.router.admission:
        lines += ["", "[admission]"]
        lines += [_line(key, value) for key, value in topology.router.admission.items()]
    groups = [(group, at) for group in topology.workers for at in range(group.size)]
    for worker, (group, at) in zip(made.workers, groups, strict=True):
        lines += ["", "[[workers]]", _line("id", worker.id), _line("url", worker.url)]
        if worker.keys.key:
            lines += [_line("api_key", f"env:{variable(worker.id)}")]
        lines += [_line("role", worker.role), _line("engine", made.engine.name)]
        on_vllm = made.engine.name == "vllm"
        if on_vllm and (topology.kv_connector or worker.role != "colocated"):
            lines += [_line("kv_connector", topology.transfer_backend)]
        if topology.has_bootstrap(group):
            lines += [_line("bootstrap_host", urlsplit(worker.url).hostname)]
            lines += [_line("bootstrap_port", worker.ports["bootstrap"])]
        kv = worker_kv(topology, group)
        holds = (reported or {}).get(worker.id, Holds())
        if capacity_tokens := holds.kv_tokens or kv.capacity_tokens:
            lines += [_line("kv_capacity_tokens", capacity_tokens)]
        if host_tokens := holds.host_tokens or kv.host_tokens:
            lines += [_line("host_kv_tokens", host_tokens)]
        if worker.role in ("decode", "elastic") and not on_vllm and not topology.decode_radix_cache:
            lines += [_line("prefix_cache", False)]
        host = urlsplit(worker.url).hostname
        for name in ("kv_events", "kv_events_replay"):
            if endpoints := getattr(group, name):
                lines += [_line(name, endpoints[at])]
            elif topology.kv_events and not worker.attached:
                lines += [_line(name, f"tcp://{host}:{worker.ports[name]}")]
        if speed := topology.prefill_tokens_per_s(group):
            lines += [_line("prefill_tokens_per_s", speed)]
        lines += [_line("page_size", kv.page_tokens)]
    return "\n".join(lines) + "\n"


def _tokenizer(topology: Topology) -> Path | None:
    """The file by which our router counts text; None where it counts bytes. A hub's model has one
    as soon as an engine has downloaded it."""
    if topology.router.tokenizer not in ("auto", "none"):
        return Path(topology.router.tokenizer)
    folder = model_folder(topology.model)
    if topology.router.tokenizer == "none" or not topology.serves_text or folder is None:
        return None
    file = folder / "tokenizer.json"
    return file if is_shape(topology.model) or file.is_file() else None


def _found(topology: Topology) -> Topology:
    """`topology` with its model's folder, where it is one, the tokenizer and the Pythons that it
    names by absolute path, since processes run in the run's folder. Raises `InputError` for
    a folder or tokenizer that is not there, and for a folder that an engine would not look for."""
    where = topology.where
    starts = not all(group.urls for group in topology.workers)
    model, tokenizer = topology.model, topology.router.tokenizer
    folder = _absolute(Path(model))
    if is_folder(model):
        if starts and not folder.is_dir():
            raise InputError(f"{where}: model: no such folder: {model}")
        model = str(folder)
    elif starts and not is_shape(model) and (folder / "config.json").is_file():
        raise InputError(
            f"{where}: model: {model} is a folder here; write ./{model}, since a name of this form "
            "is looked for on the hub"
        )
    if tokenizer not in ("auto", "none"):
        file = _absolute(Path(tokenizer))
        file = file / "tokenizer.json" if file.is_dir() else file
        if not file.is_file():
            raise InputError(f"{where}: router.tokenizer: no such file: {file}")
        tokenizer = str(file)
    update: dict[str, object] = {"model": model}
    update["router"] = topology.router.model_copy(update={"tokenizer": tokenizer})
    for key, choice in (("engine", topology.engine), ("placement", topology.placement)):
        if choice.python is not None and len(choice.python.parts) > 1:  # else looked for on PATH
            update[key] = choice.model_copy(update={"python": _absolute(choice.python)})
    return topology.model_copy(update=update)


def _absolute(path: Path) -> Path:
    with contextlib.suppress(RuntimeError):  # a home that nobody has
        path = path.expanduser()
    return path.absolute()


def _router(topology: Topology, workers: list[Process], run_dir: Path) -> Process:
    url = f"http://{topology.host}:{topology.base_port}"
    environment = commands.local_only(topology.host)
    keys = Keys()
    if topology.router.kind == "deltaserve":
        argv = routers.ours(run_dir / "router.toml")
        environment["PYTHONPATH"] = routers.python_path(topology.router)
        asked = {worker.id: worker.keys for worker in workers}
        environment |= router_environment(topology.where, asked)
        keys = router_keys(environment)
        ports = {"http": topology.base_port}
        health_url = f"{url}/readyz"
    else:
        known = [(w.role or "colocated", w.url, w.ports.get("bootstrap")) for w in workers]
        argv = routers.stock(topology, known)
        ports = {name: topology.base_port + at for name, at in routers.STOCK_PORTS.items()}
        health_url = f"{url}/readiness"
    return Process(
        id="router",
        kind="router",
        role=None,
        argv=argv,
        environment=environment,
        ports=ports,
        gpus=(),
        attached=False,
        url=url,
        health_url=health_url,
        log=run_dir / "logs" / "router.log",
        failures=(),
        keys=keys,
    )


def _attached(
    topology: Topology, group: WorkerGroup, number: int, at: int, run_dir: Path
) -> Process:
    url = group.urls[at]
    id_ = f"{group.role}-{number}"
    return Process(
        id=id_,
        kind="worker",
        role=group.role,
        argv=(),
        environment={},
        ports={"bootstrap": group.bootstrap_ports[at]} if group.bootstrap_ports else {},
        gpus=(),
        attached=True,
        url=url,
        health_url=url + _ENGINES[topology.engine.name].HEALTH_PATH,
        log=run_dir / "logs" / f"{id_}.log",
        failures=(),
        keys=engine_keys(topology, group),
    )


def _check_router(made: Plan) -> None:
    """Raises `InputError` where the router would refuse its policy, parameters or flags, or could
    place no request on these workers."""
    router, choice = made.router, made.topology.router
    if router is None:
        return
    if choice.kind == "deltaserve":
        config = tomllib.loads(router_config(made))
        refused = routers.our_refusal(config, router.environment)
    else:
        refused = routers.stock_refusal(choice, router.argv)
    if refused:
        raise InputError(f"{made.topology.where}: {refused}")


def _inherited() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in _DROPPED}
