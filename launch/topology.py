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
    AliasChoices,
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
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class EngineChoice(_Strict):
    """Which engine, and its Python: the project's own environment unless `python` names another."""

    name: Literal["sglang", "vllm"]
    """The engine."""
    version: _Text | None = None
    """The release that must be found. Without it the pinned one, or whatever `python` has."""
    python: Path | None = None
    """The Python of an environment of yours, in place of the project's."""


class KvKeys(_Strict):
    """Keys of a worker's KV cache: of all workers where the topology has them, of a group's where
    the group has. None leaves the engine its own default."""

    max_total_tokens: PositiveTokens | None = None
    """KV capacity of a worker on its GPUs, in tokens. Without it what the memory holds."""
    page_size: PositiveTokens | None = None
    """Tokens a page of the KV cache. Without it 16 on vLLM, 32 on a CPU; on SGLang 1, and 64
    on GPUs with a host tier, with `kv_events` and on workers that send each other KV.
    """
    host_kv_tokens: Tokens | None = None
    """Host tier of a worker in tokens; 0 is none."""
    host_kv_gb: Gigabytes | None = None
    """Host tier of a worker in GB of 10⁹ bytes; 0 is none."""
    kv_cache_dtype: Literal["auto", "fp8_e4m3", "fp8_e5m2"] | None = None
    """FP8 holds twice the tokens in the same memory. FlashAttention 3 takes `fp8_e4m3` only."""
    radix_eviction_policy: _Text | None = None
    """SGLang: `lru`, `lfu`, `slru` or `priority`."""
    schedule_policy: _Text | None = None
    """SGLang: `fcfs`, `lpm`, …."""

    @model_validator(mode="after")
    def _check_host_tier(self) -> Self:
        if self.host_kv_tokens is not None and self.host_kv_gb is not None:
            raise ValueError("host_kv_tokens: give it or host_kv_gb, not both")
        return self


class WorkerGroup(KvKeys, PacingKeys):
    """Workers that are alike. A fleet neither starts nor ends those with `urls`."""

    role: Role = "colocated"
    """What the workers do."""
    count: PositiveCount = 1
    """How many workers."""
    urls: tuple[_Url, ...] = ()
    """Attached workers, which run already: `http://HOST:PORT`, one a worker."""
    bootstrap_ports: tuple[_Port, ...] = ()
    """Of attached prefill workers of SGLang and workers of vLLM over Mooncake, one a worker."""
    kv_events: tuple[_Text, ...] = ()
    """Where attached workers publish KV events: `tcp://HOST:PORT`, one a worker."""
    kv_events_replay: tuple[_Text, ...] = ()
    """Where attached workers replay KV events, one a worker."""
    gpus: tuple[_Gpu, ...] = ()
    """The group's GPUs by NVML's numbers."""
    tensor_parallel: Gpus = 1
    """GPUs a worker."""
    chunk_tokens: PositiveTokens | None = None
    """Prefill chunk of the group's workers."""
    flags: tuple[str, ...] = ()
    """Flags of the engine. They come after the topology's and win."""
    environment: dict[str, _Setting] = {}
    """Variables of the workers. They win over the topology's."""

    @property
    def size(self) -> int:
        return len(self.urls) or self.count

    @property
    def gpu_count(self) -> int:
        """How many GPUs its workers take together, where they run on GPUs."""
        return self.count * self.tensor_parallel


class Placement(_Strict):
    """Which machines workers run on: this one, or the nodes of a Ray cluster."""

    kind: Literal["local", "ray"] = "local"
    """`ray` places workers on the nodes of a Ray cluster."""
    address: _Text = "auto"
    """The cluster: `HOST:PORT` of its head, or `auto` on one of its nodes."""
    python: Path | None = None
    """A Python with the cluster's version of Ray, where that is not the pinned one."""


class RouterChoice(_Strict):
    """The router in front."""

    kind: Literal["deltaserve", "sglang-router", "smg", "none"] = "deltaserve"
    """The router in front; `none` leaves the workers to be called directly."""
    policy: _Text = "round_robin"
    """A policy of that router."""
    params: dict[str, Any] = {}
    """Parameters of a deltaserve policy (`deltaserve policy explain NAME`)."""
    admission: dict[str, Any] = Field(
        default={}, validation_alias=AliasChoices("admission", "residency")
    )
    """The `[admission]` table of `router.toml`: the admission rule and its parameters."""
    python_path: tuple[Path, ...] = ()
    """Where a policy that is a Python class (`module:Class`) is looked for. Without it the
    working folder and `PYTHONPATH`.
    """
    tokenizer: _Text = "auto"
    """Counts text prompts: a `tokenizer.json` or a folder with one. `auto` takes the
    model's, `none` counts bytes.
    """
    flags: tuple[str, ...] = ()
    """Flags of a stock router."""


class Topology(KvKeys, PacingKeys):
    """A whole topology. Keys that are None leave the engine its own default."""

    name: _Text
    """What the fleet is called. A file's name by default."""
    description: str = ""
    """Shown by `launch list`."""
    engine: EngineChoice
    device: Literal["cpu", "cuda"]
    """Where the engines run."""
    hardware: _Hardware = AUTO
    """The profile of the GPUs (`launch/profiles/*.toml`). `auto` asks NVML."""
    model: _Text
    """A shipped shape (`tiny-qwen3-moe`, `small-qwen3-moe`, `qwen3-coder-30b-a3b`,
    `qwen3-coder-30b-a3b-fp8`; random weights), a folder, or a hub name.
    """
    load_format: _Text | None = None
    """How the engine loads weights; `dummy` for shapes."""
    dtype: _Text = "bfloat16"
    """The type of the weights."""
    served_model_name: _Text | None = None
    """The model's name in answers. Without it the shape, the hub name or the folder's last name."""
    text: bool | None = None
    """Whether engines load the tokenizer and take text. Without it `true` where the model
    has one.
    """
    tool_call_parser: _Text | None = None
    """The engine's parser of the model's tool calls (`qwen3_coder`). Shapes have theirs."""
    reasoning_parser: _Text | None = None
    """The engine's parser of the model's thoughts (`qwen3`). Shapes have theirs."""
    context_tokens: PositiveTokens | None = None
    """The longest prompt and answer together."""
    chunk_tokens: PositiveTokens | None = None
    """The prefill chunk."""
    mixed_chunk: bool = False
    """SGLang: prefill chunks ride in decode batches."""
    graphs: bool = True
    """CUDA graphs."""
    transfer_backend: Literal["nixl", "mooncake"] = "nixl"
    """What moves KV between workers. Mooncake: 0.3.13 or later."""
    rdma_devices: tuple[_Text, ...] = ()
    """RDMA devices for transfers: `["mlx5_0"]`."""
    decode_radix_cache: bool = True
    """SGLang: decode workers keep KV and are sent only what is missing."""
    kv_connector: bool = False
    """vLLM: colocated workers carry the transfer connector (`kv_both`)."""
    kv_events: bool = False
    """Workers publish what their caches hold, and the router reads it."""
    telemetry: bool = False
    """SGLang: a line a step and a request into `RUN/steps`."""
    incremental_streaming_output: bool = True
    """SGLang: a stream's events carry new tokens only."""
    warm_up: bool | None = None
    """Compile kernels and connect pairs before the router starts. Without it on GPUs only."""
    freeze_gc: bool = True
    """SGLang: take warm workers out of Python's garbage collection, which stops them for
    0.4 to 1 s.
    """
    host: _Host = "127.0.0.1"
    """A name or an IPv4 address that the fleet listens on."""
    base_port: Annotated[int, Field(ge=0, le=60000)] = 30000
    """The router's port; workers have blocks of 20 after it. 0 takes free ports."""
    gpus: tuple[_Gpu, ...] = ()
    """The workers' GPUs by NVML's numbers, in order. Without it the first that no other
    fleet has.
    """
    cpu_threads: Processes | None = None
    """Threads a worker. Without it cores / (workers + 1), at most 8 beside a GPU."""
    parallel_starts: Processes | None = None
    """Workers that start at the same time. Without it a third of the cores; for SGLang on a
    CPU as many as cores.
    """
    sample_interval_s: Seconds = 2.0
    """Seconds between samples of processes and GPUs; 0 takes none."""
    log_max_mb: _LogMb | None = None
    """MB of 10⁶ bytes kept of each log; 0 keeps all. Without it 400, in experiments 0."""
    ready_timeout_s: PositiveSeconds = 900.0
    """How long workers may take to start."""
    flags: tuple[str, ...] = ()
    """Flags of the engine, for every worker."""
    environment: dict[str, _Setting] = {}
    """Variables of every worker."""
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
        if self.router.admission and self.router.kind != "deltaserve":
            raise ValueError(f"router.admission: {self.router.kind} has none")
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
