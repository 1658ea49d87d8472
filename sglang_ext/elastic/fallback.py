"""The way back: a request whose KV could not be brought is prefilled here, if it still makes sense.

Owns what happens when a handshake or a transfer fails or is aborted by its client: who falls back
and who ends, and that pages and slots are released exactly once. A failed transfer's
pages are not free at once: the prefill worker may be writing to them. They go to the worker's
quarantine while the request starts over with new ones.

How SGLang's transfer queue is led there: it frees the metadata buffer of an entry that succeeded
and hands the request on; of one that failed it releases the pages as well. So a failed entry is
reported to it as a success whose commit does nothing, and is sorted out of what it hands on.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

from sglang_ext import sglang
from sglang_ext.elastic.worker import ElasticWorker

logger = logging.getLogger(__name__)

REASONS = (
    "prefill_lost",
    "prefill_unreachable",
    "timeout",
    "handshake",
    "transfer",
    "metadata",
    "host_tier",
)
"""Why a transfer failed, as counted."""

_GIVEN_UP = "deltaserve_given_up"
_ABORTED = "deltaserve_aborted"
_ENTRY = "deltaserve_entry"
_COMMITTED = "deltaserve_committed"


def reason_of(message: str, stage: str) -> str:
    """The one of `REASONS` that SGLang's failure `message` stands for.

    Where the message says no more, it is the `stage`: ``handshake``, ``transfer``,
    ``metadata`` or ``host_tier``.
    """
    for text, reason in (
        ("Lost connection with prefill", "prefill_lost"),
        ("but now it is down", "prefill_unreachable"),
        ("Could not fetch", "prefill_unreachable"),
        ("_register_kv_args", "prefill_unreachable"),
        ("send_metadata to prefill", "prefill_unreachable"),
        ("timed out", "timeout"),
        # How SGLang ends a handshake when it gives up looking for the prefill worker; requests that
        # their clients aborted do not get here.
        ("Aborted by AbortReq", "prefill_unreachable"),
    ):
        if text in message:
            return reason
    return stage


def _age_s(req: Any) -> float:
    received_s = (
        req.time_stats.scheduler_recv_time or req.time_stats.decode_prealloc_queue_entry_time
    )
    return time.perf_counter() - received_s if received_s else 0.0


def _deadline_s(worker: ElasticWorker, req: Any) -> float | None:
    """Seconds from arrival to the first token: the request's own, else the worker's setting."""
    custom = req.sampling_params.custom_params
    own = custom.get("deltaserve_deadline_s") if isinstance(custom, dict) else None
    if isinstance(own, int | float) and not isinstance(own, bool):
        return own
    return worker.settings.deadline_s


def may_fall_back(worker: ElasticWorker, req: Any) -> bool:
    """Whether `req` may be prefilled here, as this rank sees it."""
    if not worker.settings.fallback or getattr(req, _ABORTED, False):
        return False
    deadline_s = _deadline_s(worker, req)
    if deadline_s is None:
        return True
    ahead = worker.queues.ahead_of(req)
    return _age_s(req) + worker.paced.expected_s(req, ahead) <= deadline_s


def _take_back_boundary_token(req: Any) -> None:
    """Gives `req` its last token back, which a pause set aside.

    A prefill worker would have computed KV up to it; prefilled here, the request goes on after it.
    """
    if req.pd_rebootstrap_forced_output_id is not None:
        req.output_ids.append(req.pd_rebootstrap_forced_output_id)
    req.pd_rebootstrap_forced_output_id = None
    req.pd_rebootstrap_in_progress = False


def _start_over(req: Any) -> None:
    """Makes `req`, which owns no memory, a request that was never scheduled.

    What it is to finish with stays: SGLang notes there that a request is invalid, puts one token in
    place of its prompt, and ends it with the error once that has run.
    """
    if getattr(req, "pd_rebootstrap_in_progress", False):
        _take_back_boundary_token(req)
    sglang.elastic().start_over(req)
    req.is_retracted = False
    req.finished_reason = None
    req.cached_tokens = 0
    vars(req).pop("deltaserve_cached_tokens", None)
    if req.return_logprob:
        # An aborted request gets empty lists here, which would be sent for the prompt's logprobs.
        for part in ("token", "top", "token_ids"):
            for kind in ("val", "idx"):
                setattr(req.logprob, f"input_{part}_logprobs_{kind}", None)


def _fall_back(worker: ElasticWorker, req: Any, message: str, stage: str) -> None:
    reason = reason_of(message, stage)
    worker.counts[f"fallback_{reason}"] += 1
    logger.warning(
        "Elastic: %s is prefilled here after %.2f s, because of %s: %s",
        req.rid,
        _age_s(req),
        reason,
        message,
    )
    _start_over(req)
    worker.queues.add_local(req)


def resume_here(worker: ElasticWorker, req: Any) -> None:
    """Puts a local request that a pause threw out of the batch back in line.

    SGLang would have its KV recomputed by the prefill worker that it came from.
    """
    _take_back_boundary_token(req)
    worker.queues.add_local(req)


def _failure_message(receiver: Any) -> str:
    try:
        receiver.failure_exception()
    except Exception as error:
        return str(error)
    return "no reason was given"


def mark_aborted(worker: ElasticWorker, request: Any) -> None:
    """Remembers which of the requests under way their client no longer wants.

    SGLang fails their transfers the same way as one that broke.
    """
    s = worker.scheduler
    for queue in (s.disagg_decode_prealloc_queue.queue, s.disagg_decode_transfer_queue.queue):
        for entry in queue:
            if request.abort_all or entry.req.rid.startswith(request.rid):
                setattr(entry.req, _ABORTED, True)


def recover_handshakes(worker: ElasticWorker, queue: Any) -> None:
    """Takes requests whose handshake failed out of the preallocation `queue`, to prefill them here.

    They own no memory yet. SGLang has set them up for an abort and would send it next.
    """
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    failed = [entry for entry in queue.queue if isinstance(entry.req.finished_reason, FINISH_ABORT)]
    verdicts = worker.agree([int(may_fall_back(worker, entry.req)) for entry in failed])
    recovered = []
    for entry, verdict in zip(failed, verdicts, strict=True):
        req = entry.req
        message = str(req.finished_reason.message)
        if not verdict:
            if not getattr(req, _ABORTED, False):
                worker.counts[f"fallback_refused_{reason_of(message, 'handshake')}"] += 1
            continue
        entry.kv_receiver.clear()
        entry.kv_receiver = None
        recovered.append(entry)
        _fall_back(worker, req, message, "handshake")
    if recovered:
        gone = {id(entry) for entry in recovered}
        queue.queue = [entry for entry in queue.queue if id(entry) not in gone]
        queue.pending_reqs = [entry for entry in queue.pending_reqs if id(entry) not in gone]


def give_up_failed(worker: ElasticWorker, polls: list[int], queue: Any) -> list[int]:
    """Marks the transfers that failed and reports them as done, so that they are handed on.

    Also those that brought another request's metadata on any rank. SGLang would find that out
    rank by rank, when it commits them, and the ranks would no longer hold the same requests.
    """
    from sglang.srt.disaggregation.base import KVPoll

    reported = list(polls)
    arrived = []
    for i, (entry, poll) in enumerate(zip(queue.queue, polls, strict=True)):
        if poll == KVPoll.Failed:
            failure = ("transfer", _failure_message(entry.kv_receiver))
            if worker.host_tier.has_failed(entry):
                failure = ("host_tier", "the cached part did not come back from host memory")
            setattr(entry.req, _GIVEN_UP, failure)
            reported[i] = int(KVPoll.Success)
        elif poll == KVPoll.Success and worker.queues.comes_by_transfer(entry.req):
            arrived.append(entry)
    good = worker.agree([int(_brought_room(queue, entry) == _room(entry)) for entry in arrived])
    for entry, is_good in zip(arrived, good, strict=True):
        if not is_good:
            message = f"metadata of room {_brought_room(queue, entry)} came for room {_room(entry)}"
            if _brought_room(queue, entry) == _room(entry):
                message = "another rank got another room's metadata"
            setattr(entry.req, _GIVEN_UP, ("metadata", message))
    return reported


def _brought_room(queue: Any, entry: Any) -> int:
    rooms = queue.metadata_buffers.bootstrap_room
    return int(rooms[entry.metadata_buffer_index, 0].item())


def _room(entry: Any) -> int:
    room = entry.req.bootstrap_room
    return 0 if room is None else int(room)


def commit(worker: ElasticWorker, original: Callable[..., None], queue: Any, entry: Any) -> None:
    """Commits a transfer that succeeded, and remembers the queue's entry until it is sorted out."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    req = entry.req
    if getattr(req, _GIVEN_UP, None) is None:
        original(queue, entry)
        if isinstance(req.finished_reason, FINISH_ABORT):
            # A late write has changed the metadata since `give_up_failed` looked at it. Another
            # rank may have committed it: `sort_out` asks.
            setattr(req, _GIVEN_UP, ("metadata", str(req.finished_reason.message)))
            req.finished_reason = None
        else:
            setattr(req, _COMMITTED, True)
    setattr(req, _ENTRY, entry)


def sort_out(worker: ElasticWorker, queue: Any, handed_on: list[Any]) -> list[Any]:
    """Of the requests that the transfer queue hands on, those whose KV is here.

    The others lose their pages and metadata buffers to the quarantine. Then they fall back, or end
    with an error: so does one that any rank has committed while another gave it up.
    """
    entries = {id(req): vars(req).pop(_ENTRY, None) for req in handed_on}
    committed = {id(req) for req in handed_on if vars(req).pop(_COMMITTED, False)}
    kept = worker.agree([int(getattr(req, _GIVEN_UP, None) is None) for req in handed_on])
    for req, is_kept in zip(handed_on, kept, strict=True):
        if not is_kept and getattr(req, _GIVEN_UP, None) is None:
            message = "its metadata changed on another rank while it was committed"
            setattr(req, _GIVEN_UP, ("metadata", message))
    given_up = [req for req in handed_on if getattr(req, _GIVEN_UP, None) is not None]
    if not given_up:
        return handed_on
    from http import HTTPStatus

    from sglang.srt.disaggregation.utils import prepare_abort

    verdicts = worker.agree(
        [int(id(req) not in committed and may_fall_back(worker, req)) for req in given_up]
    )
    for req, verdict in zip(given_up, verdicts, strict=True):
        stage, message = getattr(req, _GIVEN_UP)
        setattr(req, _GIVEN_UP, None)
        entry = entries[id(req)]
        worker.host_tier.let_go(queue, entry)
        worker.quarantine.hold(
            entry,
            sglang.elastic().take_kv(req),
            writer_is_gone=reason_of(message, stage) == "prefill_lost",
        )
        if verdict:
            _fall_back(worker, req, message, stage)
            continue
        s = worker.scheduler
        if getattr(req, _ABORTED, False):
            worker.counts["aborted_transfer"] += 1
        else:
            worker.counts[f"fallback_refused_{reason_of(message, stage)}"] += 1
            logger.error("Elastic: the transfer of %s failed: %s", req.rid, message)
            if s.metrics_reporter.enable_metrics:
                s.metrics_collector.increment_transfer_failed_reqs()
        prepare_abort(req, f"Decode transfer failed: {message}", HTTPStatus.INTERNAL_SERVER_ERROR)
        s.output_streamer.stream_output([req], req.return_logprob)
    gone = {id(req) for req in given_up}
    return [req for req in handed_on if id(req) not in gone]


def notice_restart(manager: Any, address: str) -> None:
    """Treats a prefill worker as lost that was replaced between two heartbeats.

    The new one answers the heartbeats of the old one's address, but listens on other ports: KV
    would be asked for at the old ports and waited for until the timeout (300 s by default). Runs in
    the thread that sends heartbeats.
    """
    prefill = manager.prefill_info_table.get(address)
    if prefill is None:
        return
    for key, cached in list(manager.connection_pool.items()):
        if not key.startswith(f"{address}_") or not cached:
            continue
        dp_rank, cp_rank, _ = key.removeprefix(f"{address}_").split("_", 2)
        ranks = {
            "prefill_dp_rank": dp_rank,
            "prefill_cp_rank": cp_rank,
            "target_tp_rank": prefill.target_tp_ranks[0],
            "target_pp_rank": list(prefill.target_pp_ranks)[-1],
        }
        try:
            with urlopen(f"http://{address}/route?{urlencode(ranks)}", timeout=2) as answer:
                found = json.load(answer)
        except (OSError, ValueError):
            # Down, or not registered yet: the next heartbeat knows more.
            return
        known = cached[0]
        if any(found.get(part) != known[part] for part in ("rank_ip", "rank_port")):
            logger.warning("Elastic: the prefill worker at %s was replaced", address)
            manager._handle_node_failure(address)
            return
