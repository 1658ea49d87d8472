"""The elastic part of a decode worker's scheduler, and the way to make one elastic.

Owns the parts that an elastic worker is made of: who waits where (`queues`), who may take KV memory
(`memory`), what comes back from host memory (`host_tier`), what failed transfers leave behind
(`quarantine`), how prefill is paced (`sglang_ext.pacing`), and the step that puts them together
(`steps`).

Every decision that depends on a clock is agreed upon by the ranks of a tensor-parallel group: they
must form the same batch.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from sglang_ext import ranks
from sglang_ext.elastic.host_tier import HostTier
from sglang_ext.elastic.memory import Memory
from sglang_ext.elastic.quarantine import Quarantine
from sglang_ext.elastic.queues import Queues
from sglang_ext.elastic.steps import Steps
from sglang_ext.guards import PluginMismatch
from sglang_ext.pacing.prefill import PacedPrefill, check_chunking
from sglang_ext.pacing.sharing import Sharing
from sglang_ext.settings import ELASTIC_PREFIX, ElasticSettings
from sglang_ext.sglang import current as current_release
from sglang_ext.sglang import elastic as elastic_verbs


class ElasticWorker:
    """What the plugin adds to one ``Scheduler`` in decode mode.

    `counts` holds what happened since the start: ``local`` and ``separated`` requests, ``fallback``
    and ``fallback_refused`` by reason, ``requeued_chunk`` (a half-prefilled prompt put back for
    lack of memory).
    """

    def __init__(self, scheduler: Any, settings: ElasticSettings) -> None:
        self.scheduler = scheduler
        self.settings = settings
        self.counts: Counter[str] = Counter()
        self.exporter: Any = None
        self.queues = Queues(scheduler)
        self.host_tier = HostTier(scheduler)
        self.memory = Memory(scheduler, self.queues, self.host_tier)
        self.quarantine = Quarantine(scheduler, settings.quarantine_s, self.agree)
        self.paced = PacedPrefill(scheduler, settings, self.agree)
        self.sharing = Sharing(scheduler, self.paced)
        self.steps = Steps(
            scheduler,
            self.queues,
            self.memory,
            self.host_tier,
            self.quarantine,
            self.paced,
            self.sharing,
            self.counts,
        )

    def agree(self, values: list[int]) -> list[int]:
        """The smallest of each value over the ranks that must form the same batch."""
        return ranks.agree(self.scheduler, values)

    def is_idle(self) -> bool:
        """Whether the worker holds nothing that SGLang does not know of."""
        return not self.queues.transferred and not len(self.quarantine)

    def export(self) -> None:
        """Brings ``/metrics`` up to date, where the server has that page."""
        if self.exporter is not None:
            self.exporter.export()


_workers: list[ElasticWorker] = []


def attach(scheduler: Any, settings: ElasticSettings) -> ElasticWorker:
    """Makes `scheduler` elastic; raises `PluginMismatch` where it cannot be."""
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.environ import envs

    if scheduler.disaggregation_mode is not DisaggregationMode.DECODE:
        raise PluginMismatch(
            "the elastic feature makes a decode worker prefill as well: start it with "
            "--disaggregation-mode decode, or take elastic out of DELTASERVE_SGLANG"
        )
    verbs = elastic_verbs()
    if not verbs.has_radix_cache(scheduler):
        raise PluginMismatch(
            "an elastic worker prefills from its radix cache: "
            "add --disaggregation-decode-enable-radix-cache"
        )
    parallel = current_release().parallel(scheduler)
    unsupported = {
        "pipeline parallelism": parallel.pipeline > 1,
        "context parallelism": parallel.attention_context > 1,
        "the staging buffer": envs.SGLANG_DISAGG_STAGING_BUFFER.get(),
        "diffusion language models": scheduler.dllm_config is not None,
        # SGLang does not look at a request's adapter when its KV has arrived. One more than
        # --max-loras-per-batch in a batch, which a prompt in flight may be in, ends the scheduler.
        "LoRA adapters": scheduler.enable_lora,
        **verbs.unsupported(scheduler),
    }
    for what, asked in unsupported.items():
        if asked:
            raise PluginMismatch(f"an elastic worker does not support {what}: turn one of them off")
    check_chunking(scheduler, settings, ELASTIC_PREFIX)
    worker = ElasticWorker(scheduler, settings)
    # SGLang leaves the logprobs of prompt tokens to the prefill worker; here that is this one.
    # Requests that came over the wire have none, and nothing is sent for them.
    scheduler.output_streamer.disaggregation_mode = DisaggregationMode.NULL
    # SGLang waits for a prefill worker that may be starting; here nobody has to.
    scheduler.disagg_decode_prealloc_queue._max_ensure_retries = settings.connect_attempts
    _workers.append(worker)
    scheduler.deltaserve_elastic = worker
    return worker


def current() -> ElasticWorker | None:
    """The elastic worker of this process, if its scheduler is one."""
    return _workers[-1] if _workers else None
