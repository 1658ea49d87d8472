"""The topology: which engine, which workers in which roles, which router.

Owns the keys and their checks. Knows nothing of files (`launch.topology_files`), engines' flags,
ports in use or processes. A topology is a value.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)

from deltaserve.quantities import (
    Gigabytes,
    Gpus,
    PositiveCount,
    PositiveSeconds,
    PositiveTokens,
    Processes,
    Seconds,
    Tokens,
)
from launch.models import TOOL_CALL_PARSERS, has_tokenizer, is_folder, is_shape
from launch.pacing_keys import PacingKeys
from launch.ports import LARGEST_PORT, last_port
from launch.profiles import ANY_GPU, AUTO, PROFILES, Profile

Role = Literal["colocated", "prefill", "decode", "elastic"]
ROLES: tuple[Role, ...] = get_args(Role)

_Port = Annotated[int, Field(gt=0, lt=65536)]
_Gpu = Annotated[int, Field(ge=0)]
_Setting = Annotated[str, Field(coerce_numbers_to_str=True)]
_Text = Annotated[str, StringConstraints(min_length=1)]

LOG_MAX_MB = 400
"""What is kept of each log of a fleet, unless its topology says otherwise."""


def _log_mb(log_max_mb: float) -> float:
    """`log_max_mb` where it is 0 (no bound) or leaves room for lines."""
    if log_max_mb and not 1 <= log_max_mb <= 1e9:
        raise ValueError(f"expected 0 (no bound), or from 1 to 1e9, not {log_max_mb:g}")
    return log_max_mb


_LogMb = Annotated[float, AfterValidator(_log_mb)]


def _http_url(text: str) -> str:
    """`text` without a slash at its end, where it is what the router takes: ``http://HOST:PORT``"""
    try:
        parts = urlsplit(text)
        wrong = parts.scheme != "http" or not parts.hostname or not parts.port
        (parts.hostname or "").encode("idna")
    except ValueError:  # a port that is none, or a name that cannot be looked up (a..b)
        wrong = True
    if wrong or "@" in text or " " in text or text.rstrip("/") != f"http://{parts.netloc}":
        raise ValueError(f"expected http://HOST:PORT, not {text!r}")
    return text.rstrip("/")


def _host(text: str) -> str:
    """`text` where it can stand in ``http://HOST:PORT`` and in ``HOST:PORT`` as it is."""
    if re.fullmatch(r"[A-Za-z0-9][\w-]*(\.[\w-]+)*", text, re.A) is None:
        raise ValueError(f"expected a name or an IPv4 address, not {text!r}")
    return text


def _hardware(name: str) -> str:
    """`name` where it is a profile's, or ``auto``."""
    known = (AUTO, *PROFILES)
    if name not in known:
        raise ValueError(f"expected one of: {', '.join(known)}")
    return name


_Hardware = Annotated[str, AfterValidator(_hardware)]
_Host = Annotated[str, AfterValidator(_host)]
_Url = Annotated[str, AfterValidator(_http_url)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EngineChoice(_Strict):
    """Which engine, and its Python: the project's own environment unless `python` names another."""

    name: Literal["sglang", "vllm"]
    version: _Text | None = None
    python: Path | None = None


class KvKeys(_Strict):
    """Keys of a worker's KV cache: of all workers where the topology has them, of a group's where
    the group has. None leaves the engine its own default; a host tier of 0 is none.

    `max_total_tokens` are on the worker's GPUs, `host_kv_tokens` or `host_kv_gb` (GB of 10^9 bytes)
    in its host's memory. `radix_eviction_policy` and `schedule_policy` are SGLang's.
    """

    max_total_tokens: PositiveTokens | None = None
    page_size: PositiveTokens | None = None
    host_kv_tokens: Tokens | None = None
    host_kv_gb: Gigabytes | None = None
    kv_cache_dtype: Literal["auto", "fp8_e4m3", "fp8_e5m2"] | None = None
    radix_eviction_policy: _Text | None = None
    schedule_policy: _Text | None = None

    @model_validator(mode="after")
    def _check_host_tier(self) -> Self:
        if self.host_kv_tokens is not None and self.host_kv_gb is not None:
            raise ValueError("host_kv_tokens: give it or host_kv_gb, not both")
        return self


class WorkerGroup(KvKeys, PacingKeys):
    """Workers that are alike. Each takes `tensor_parallel` GPUs, from `gpus` where given.

    With `urls` (one a worker) they are attached instead: workers that run already, here or on
    another machine, and that a fleet neither starts nor ends. `kv_events` and `kv_events_replay`
    are then the ZMQ endpoints (``tcp://HOST:PORT``) that they publish at, one a worker.
    """

    role: Role = "colocated"
    count: PositiveCount = 1
    urls: tuple[_Url, ...] = ()
    bootstrap_ports: tuple[_Port, ...] = ()
    kv_events: tuple[_Text, ...] = ()
    kv_events_replay: tuple[_Text, ...] = ()
    gpus: tuple[_Gpu, ...] = ()
    tensor_parallel: Gpus = 1
    chunk_tokens: PositiveTokens | None = None
    flags: tuple[str, ...] = ()
    environment: dict[str, _Setting] = {}

    @property
    def size(self) -> int:
        return len(self.urls) or self.count

    @property
    def gpu_count(self) -> int:
        """How many GPUs its workers take together, where they run on GPUs."""
        return self.count * self.tensor_parallel


class Placement(_Strict):
    """Which machines workers run on: this one, or the nodes of a Ray cluster.

    `address` is the cluster's (``HOST:PORT`` of its head, or ``auto`` on one of its nodes);
    `python` has the cluster's version of Ray where that is not the pinned one.
    """

    kind: Literal["local", "ray"] = "local"
    address: _Text = "auto"
    python: Path | None = None


class RouterChoice(_Strict):
    """The router in front; `none` leaves the workers to be called directly.

    `params` are of our policies, `flags` of the stock routers. `residency` is the ``[residency]``
    table of our router's configuration (its rule and the rule's parameters), which the router
    checks. `python_path` is where a policy that is a Python class (``package.module:Class``) is
    looked for. `tokenizer` is the model's, for text prompts: a ``tokenizer.json`` or a folder with
    one; ``auto`` is that of the model's folder or download where it has one, ``none`` leaves text
    to be compared by its bytes.
    """

    kind: Literal["deltaserve", "sglang-router", "smg", "none"] = "deltaserve"
    policy: _Text = "round_robin"
    params: dict[str, Any] = {}
    residency: dict[str, Any] = {}
    python_path: tuple[Path, ...] = ()
    tokenizer: _Text = "auto"
    flags: tuple[str, ...] = ()


class Topology(KvKeys, PacingKeys):
    """A whole topology. Keys that are None leave the engine its own default.

    `gpus` are those that its workers take, in order: how several topologies share one machine.
    `text` says whether engines load the model's tokenizer (None: where it has one), and
    `tool_call_parser` and `reasoning_parser` what they call the form in which the model writes tool
    calls and thoughts. `log_max_mb` bounds each process's log and the decision log (MB of 10^6
    bytes; 0: not at all).
    """

    name: _Text
    description: str = ""
    engine: EngineChoice
    device: Literal["cpu", "cuda"]
    hardware: _Hardware = AUTO
    model: _Text
    load_format: _Text | None = None
    dtype: _Text = "bfloat16"
    served_model_name: _Text | None = None
    text: bool | None = None
    tool_call_parser: _Text | None = None
    reasoning_parser: _Text | None = None
    context_tokens: PositiveTokens | None = None
    chunk_tokens: PositiveTokens | None = None
    mixed_chunk: bool = False
    graphs: bool = True
    transfer_backend: Literal["nixl", "mooncake"] = "nixl"
    rdma_devices: tuple[_Text, ...] = ()
    decode_radix_cache: bool = True
    kv_connector: bool = False
    kv_events: bool = False
    telemetry: bool = False
    incremental_streaming_output: bool = True
    warm_up: bool | None = None
    freeze_gc: bool = True
    host: _Host = "127.0.0.1"
    base_port: Annotated[int, Field(ge=0, le=60000)] = 30000
    gpus: tuple[_Gpu, ...] = ()
    cpu_threads: Processes | None = None
    parallel_starts: Processes | None = None
    sample_interval_s: Seconds = 2.0
    log_max_mb: _LogMb | None = None
    ready_timeout_s: PositiveSeconds = 900.0
    flags: tuple[str, ...] = ()
    environment: dict[str, _Setting] = {}
    placement: Placement = Placement()
    workers: Annotated[tuple[WorkerGroup, ...], Field(min_length=1)]
    router: RouterChoice = RouterChoice()

    @model_validator(mode="after")
    def _check(self) -> Self:
        roles = {group.role for group in self.workers}
        if "prefill" in roles and not roles & {"decode", "elastic"}:
            raise ValueError('workers: a "prefill" worker needs a "decode" or "elastic" one')
        if "decode" in roles and "prefill" not in roles:
            raise ValueError('workers: a "decode" worker needs a "prefill" one')
        sglang = self.engine.name == "sglang"
        if "elastic" in roles and not sglang:
            raise ValueError('workers: the role "elastic" is SGLang\'s only')
        if "elastic" in roles and not self.decode_radix_cache:
            raise ValueError("decode_radix_cache: an elastic worker prefills from its radix cache")
        if self.mixed_chunk and not sglang:
            raise ValueError("mixed_chunk: vllm always mixes; it is a key of SGLang's only")
        if not self.decode_radix_cache and not sglang:
            raise ValueError("decode_radix_cache: it is a key of SGLang's only")
        if self.kv_connector and (sglang or roles != {"colocated"}):
            raise ValueError("kv_connector: only for vllm workers that are colocated")
        if self.text and not has_tokenizer(self.model):
            raise ValueError(f"text: {self.model} has no tokenizer; requests carry token ids")
        for key in ("tool_call_parser", "reasoning_parser"):
            if getattr(self, key) and not self.serves_text:
                raise ValueError(f"{key}: engines read no text here (text); they take token ids")
        if self.hardware != AUTO and PROFILES[self.hardware].device != self.device:
            raise ValueError(f"hardware: {self.hardware} does not have device {self.device!r}")
        if self.router.params and self.router.kind != "deltaserve":
            raise ValueError(f"router.params: {self.router.kind} has none; use router.flags")
        if self.router.tokenizer not in ("auto", "none") and self.router.kind != "deltaserve":
            raise ValueError(f"router.tokenizer: {self.router.kind} has none; use router.flags")
        if self.router.flags and self.router.kind in ("deltaserve", "none"):
            raise ValueError(f"router.flags: {self.router.kind} has none; use router.params")
        if self.router.kind not in ("deltaserve", "none") and "elastic" in roles:
            raise ValueError(f"router.kind: {self.router.kind} knows no elastic workers")
        if self.router.kind not in ("deltaserve", "none") and not sglang and "prefill" in roles:
            raise ValueError(f"router.kind: {self.router.kind} does not separate with vllm workers")
        if self.router.residency and self.router.kind != "deltaserve":
            raise ValueError(f"router.residency: {self.router.kind} has none")
        for index, group in enumerate(self.workers):
            self._check_kv(index, group)
            self._check_pacing(index, group)
        if self.given and "colocated" not in roles:
            raise ValueError(f"{self.given[0]}: only for colocated workers, and there are none")
        self._check_gpus()
        self._check_visible_gpus()
        self._check_ports()
        attached: set[str] = set()
        for index, group in enumerate(self.workers):
            for url in group.urls:  # the router would refuse it when every worker is up
                if url in attached:
                    raise ValueError(f"workers.{index}.urls: {url} is given twice")
                attached.add(url)
            if group.urls and (group.gpus or group.count not in (1, len(group.urls))):
                raise ValueError(f"workers.{index}.urls: attached workers have no gpus and count")
            for key in ("kv_events", "kv_events_replay"):
                endpoints = getattr(group, key)
                if endpoints and len(endpoints) != len(group.urls):
                    raise ValueError(f"workers.{index}.{key}: for attached workers, one a url")
            if group.urls and self.has_bootstrap(group):
                if len(group.bootstrap_ports) != len(group.urls):
                    raise ValueError(f"workers.{index}.bootstrap_ports: one a url is needed")
            elif group.bootstrap_ports:
                raise ValueError(
                    f"workers.{index}.bootstrap_ports: for attached prefill workers of SGLang and "
                    "those of vLLM over Mooncake"
                )
        return self

    def _check_pacing(self, index: int, group: WorkerGroup) -> None:
        for key in group.given:
            if group.role != "colocated":
                raise ValueError(
                    f"workers.{index}.{key}: only for colocated workers, not for {group.role} ones"
                )
        if (given := self.pacing_keys(group).given) and self.engine.name != "sglang":
            raise ValueError(f"{given[0]}: it is a key of SGLang's only")

    def pacing_keys(self, group: WorkerGroup) -> PacingKeys:
        """The keys of pacing of the workers of `group`: its own, else the topology's."""
        return PacingKeys.over(group, self) if group.role == "colocated" else PacingKeys()

    def _check_kv(self, index: int, group: WorkerGroup) -> None:
        keys = self.kv_keys(group)
        has_host_tier = bool(keys.host_kv_tokens or keys.host_kv_gb)
        host_key = "host_kv_tokens" if keys.host_kv_tokens else "host_kv_gb"
        where = f"workers.{index}.{host_key}" if host_key in group.model_fields_set else host_key
        if self.engine.name != "sglang":
            for key in ("radix_eviction_policy", "schedule_policy"):
                if getattr(keys, key) is not None:
                    raise ValueError(f"{key}: it is a key of SGLang's only")
            if has_host_tier and self.device == "cpu":
                raise ValueError(f"{where}: vllm offloads KV from GPUs only, not on a CPU")
            if has_host_tier and (self.kv_connector or group.role != "colocated"):
                raise ValueError(
                    f"{where}: vllm takes one connector a worker, and this one has the one that "
                    "transfers KV between workers"
                )

    def kv_keys(self, group: WorkerGroup) -> KvKeys:
        """The keys of the KV cache of the workers of `group`: its own, else the topology's."""
        found = {key: getattr(group, key) for key in KvKeys.model_fields}
        own_host_tier = group.host_kv_tokens is not None or group.host_kv_gb is not None
        for key, value in found.items():
            is_host_tier = key in ("host_kv_tokens", "host_kv_gb")
            if value is None and not (is_host_tier and own_host_tier):
                found[key] = getattr(self, key)
        return KvKeys(**found)

    def _check_gpus(self) -> None:
        started = {f"workers.{i}.gpus": g for i, g in enumerate(self.workers) if not g.urls}
        given = {key: (g.gpus, g.gpu_count) for key, g in started.items() if g.gpus}
        if self.gpus:
            if given:
                raise ValueError("gpus: give them to the topology or to its workers, not to both")
            given["gpus"] = (self.gpus, sum(group.gpu_count for group in started.values()))
        taken: set[int] = set()
        for key, (gpus, needed) in given.items():
            if self.device == "cpu":
                raise ValueError(f'{key}: device is "cpu"')
            if self.placement.kind == "ray":
                raise ValueError(f"{key}: Ray chooses the GPUs of workers that it places")
            if len(gpus) != needed:
                raise ValueError(
                    f"{key}: {len(gpus)} given, but count x tensor_parallel is {needed}"
                )
            if len(set(gpus)) != len(gpus) or taken & set(gpus):
                raise ValueError(f"{key}: a GPU is given twice")
            taken |= set(gpus)
        if not self.gpus and 0 < len(given) < len(started):
            raise ValueError("workers: give gpus to every group or to none")

    def _check_visible_gpus(self) -> None:
        """Whoever says which GPUs a worker sees past `gpus` has all workers on the same ones, which
        are not those that the fleet has kept for itself, looks at and samples."""
        started = {f"workers.{i}.": g for i, g in enumerate(self.workers) if not g.urls}
        if self.device == "cpu" or not started:
            return
        given = {"": self.environment} | {key: g.environment for key, g in started.items()}
        for key, environment in given.items():
            for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
                if name in environment:
                    raise ValueError(
                        f"{key}environment.{name}: each worker is shown its own GPUs; gpus says "
                        "which they are, by NVML's numbers"
                    )

    def _check_ports(self) -> None:
        last = last_port(self.base_port, self.worker_count)
        if last > LARGEST_PORT and not all(group.urls for group in self.workers):
            raise ValueError(
                f"workers: the ports of {self.worker_count:,} of them, 20 each, end at {last:,}; "
                f"there are {LARGEST_PORT:,}: have fewer workers, or a lower base_port"
            )

    @property
    def where(self) -> str:
        """What messages call the place of a wrong key: it may stand in the topology's file, in one
        that this extends, or in an override."""
        return f"topology {self.name}"

    @property
    def model_name(self) -> str:
        """The model's name in every engine's answers and requests, whatever folder it lies in."""
        name = Path(self.model).name if is_folder(self.model) else self.model
        return self.served_model_name or name

    @property
    def model_with_kv_events(self) -> str | None:
        """The name of the model whose workers publish KV events; None where none of them does."""
        publish = self.kv_events or any(group.kv_events for group in self.workers)
        return self.model_name if publish else None

    @property
    def parser_of_tool_calls(self) -> str | None:
        """What the engine calls the form in which the model writes tool calls; None: nobody said,
        or the engine reads no text."""
        ours = TOOL_CALL_PARSERS[self.engine.name] if is_shape(self.model) else None
        return (self.tool_call_parser or ours) if self.serves_text else None

    @property
    def serves_text(self) -> bool:
        """Whether engines load the model's tokenizer, so that they take and give text."""
        return has_tokenizer(self.model) if self.text is None else self.text

    @property
    def log_max_bytes(self) -> int:
        """What is kept of each log, 0 where all is: by default `LOG_MAX_MB`, since a fleet that is
        used for weeks would else fill its disk."""
        return int((LOG_MAX_MB if self.log_max_mb is None else self.log_max_mb) * 1e6)

    @property
    def worker_count(self) -> int:
        return sum(group.size for group in self.workers)

    @property
    def warms_up(self) -> bool:
        """Whether workers are warmed up: by default on GPUs, where kernels compile at first use."""
        return self.device == "cuda" if self.warm_up is None else self.warm_up

    @property
    def connects_pairs(self) -> bool:
        """Whether prefill and decode workers are connected before they serve: with a warm-up, and
        with vLLM over NIXL unless that is switched off. Its decode worker waits five seconds for
        the first handshake with a prefill worker, and answers a request with 500 after them
        (`nixl/base_worker.py` of vLLM 0.26); on a busy CPU that is not always enough."""
        impatient = self.engine.name == "vllm" and self.transfer_backend == "nixl"
        pairs = any(group.role == "prefill" for group in self.workers)
        return self.warms_up or (pairs and impatient and self.warm_up is None)

    @property
    def why_no_telemetry(self) -> str | None:
        """Why nobody writes the telemetry that is asked for; None where somebody does, or it is not
        asked for. It is no error: experiments switch it on for the arms of both engines."""
        if not self.telemetry:
            return None
        if self.engine.name != "sglang":
            return f"{self.engine.name} writes none; it is a plugin of SGLang's"
        if all(group.urls for group in self.workers):
            return "attached workers write theirs where they were started"
        return None

    @property
    def profile(self) -> Profile:
        """What the hardware is; that of any GPU until it is known which."""
        if self.hardware == AUTO:
            return PROFILES["cpu"] if self.device == "cpu" else ANY_GPU
        return PROFILES[self.hardware]

    def has_bootstrap(self, group: WorkerGroup) -> bool:
        """Whether our router needs a bootstrap port of each worker of `group`: prefill workers of
        SGLang have one, and all of vLLM that have Mooncake's connector."""
        if self.engine.name == "sglang":
            return group.role == "prefill"
        connected = self.kv_connector or group.role != "colocated"
        return connected and self.transfer_backend == "mooncake"

    def prefill_tokens_per_s(self, group: WorkerGroup) -> float | None:
        """What to expect of a worker of `group` that has not been seen yet; None where nothing was
        measured: another model, more GPUs a worker, GPUs that are not known or were not seen."""
        speed = self.profile.speed
        return None if group.tensor_parallel > 1 or speed is None else speed.of(self.model)
