"""What an elastic worker does to its scheduler's queues, locks and memory, step by step."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.guards import PluginMismatch
from sglang_ext.settings import ElasticSettings as Settings
from sglang_ext.settings import Interference
from tests.sglang_ext.fake_sglang import (
    FAILED,
    FINISH_ABORT,
    KV,
    SUCCESS,
    Batch,
    Entry,
    Req,
)

MakeScheduler = Callable[..., Any]


def step(scheduler: Any) -> Any:
    """A turn of SGLang's decode loop up to the next batch, which it returns."""
    scheduler.process_decode_queue()
    plan = scheduler.get_next_disagg_decode_batch_to_run(scheduler.running_batch)
    scheduler.running_batch = plan.running_batch
    return plan.batch_to_run


def prompt(tokens: int, start: int = 0) -> list[int]:
    return list(range(start, start + tokens))


def transferring(scheduler: Any, req: Req) -> Entry:
    """`req` with its pages allocated, waiting for its KV."""
    scheduler._add_request_to_queue(req)
    step(scheduler)
    (entry,) = [e for e in scheduler.disagg_decode_transfer_queue.queue if e.req is req]
    return entry


# ------------------------------------------------------------------ locks


def test_a_deadline_does_not_move_the_lock_of_a_transfer_that_fails(
    make_scheduler: MakeScheduler,
) -> None:
    """While A waits for its KV, another request puts more of A's prompt into the tree.

    A's lock is on what was there when its pages were allocated: that is what has to be unlocked.
    """
    scheduler = make_scheduler(Settings(quarantine_s=0.0, deadline_s=1000.0))
    shared = scheduler.tree_cache.insert(prompt(160))
    entry = transferring(scheduler, Req("A", prompt(6000), room=7))
    assert shared.lock_ref == 1

    deeper = scheduler.tree_cache.insert(prompt(5000))
    scheduler.tree_cache.inc_lock_ref(deeper)  # B, which put it there, runs on it
    entry.kv_receiver.status = FAILED
    step(scheduler)
    step(scheduler)  # ends the quarantine

    assert deeper.lock_ref == 1, "B lost its lock: its pages could be evicted while it runs"
    assert shared.lock_ref == 1, "A's own lock is still there, or was given back twice"


def test_the_metadata_buffer_of_a_failed_transfer_is_nobodys_until_its_quarantine_ends(
    make_scheduler: MakeScheduler,
) -> None:
    """A late write of the prefill worker would go to the next owner's first token."""
    scheduler = make_scheduler(Settings(quarantine_s=0.05))
    entry = transferring(scheduler, Req("A", prompt(100), room=7))
    index = entry.metadata_buffer_index
    slots = scheduler.disagg_decode_transfer_queue.req_to_metadata_buffer_idx_allocator
    entry.kv_receiver.status = FAILED
    step(scheduler)
    assert index not in slots.free_slots
    scheduler.rooms[index] = 7  # the late write
    time.sleep(0.06)
    step(scheduler)
    assert slots.free_slots.count(index) == 1
    assert scheduler.rooms[index, 0].item() == 0, "the next owner would take it for its own"


@pytest.mark.parametrize("deadline_s", [None, 1000.0])
def test_a_failed_transfer_leaves_the_tree_unlocked(
    make_scheduler: MakeScheduler, deadline_s: float | None
) -> None:
    scheduler = make_scheduler(Settings(quarantine_s=0.0, deadline_s=deadline_s))
    shared = scheduler.tree_cache.insert(prompt(160))
    entry = transferring(scheduler, Req("A", prompt(6000), room=7))
    deeper = scheduler.tree_cache.insert(prompt(5000))
    entry.kv_receiver.status = FAILED
    step(scheduler)
    step(scheduler)
    assert (shared.lock_ref, deeper.lock_ref) == (0, 0)
    assert scheduler.deltaserve_elastic.counts["fallback_prefill_lost"] == 1


def test_no_deadline_that_a_client_names_ends_the_scheduler(make_scheduler: MakeScheduler) -> None:
    """JSON has integers that no float holds."""
    scheduler = make_scheduler(Settings(quarantine_s=0.0))
    req = Req("A", prompt(100), room=7)
    req.sampling_params.custom_params = {"deltaserve_deadline_s": 10**400}
    entry = transferring(scheduler, req)
    entry.kv_receiver.status = FAILED
    step(scheduler)
    assert scheduler.deltaserve_elastic.counts["fallback_prefill_lost"] == 1


def test_looking_a_prompt_up_leaves_the_request_as_it_was(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    scheduler.tree_cache.insert(prompt(500))
    scheduler.running_batch = Batch([Req("decoding", prompt(10))])
    req = Req("A", prompt(2000))
    scheduler._add_request_to_queue(req)
    scheduler.deltaserve_elastic.paced.expected_s(req)
    assert (req.lock, req.prefix_len) == (None, 0)


# ------------------------------------------------------------------ the step in flight


def test_nothing_is_allocated_before_the_step_in_flight_has_ended(
    make_scheduler: MakeScheduler,
) -> None:
    """A prefill worker that is known is ready at once: its transfers were never waited for."""
    scheduler = make_scheduler()
    for number in range(3):
        scheduler._add_request_to_queue(Req(f"A{number}", prompt(100), room=number + 1))
    step(scheduler)
    assert scheduler.pool.events == ["wait", "allocate A0", "allocate A1", "allocate A2"]

    scheduler._add_request_to_queue(Req("B", prompt(100), room=9))
    step(scheduler)
    assert scheduler.pool.events[4:] == ["wait", "allocate B"], "each step waits anew"


def test_a_step_that_lets_nobody_in_does_not_wait(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(tokens=600)
    scheduler._add_request_to_queue(Req("fits", prompt(100), room=1))
    step(scheduler)
    scheduler.pool.events.clear()
    scheduler._add_request_to_queue(Req("too large", prompt(550), room=2))
    step(scheduler)
    assert scheduler.pool.events == []


def test_a_retracted_request_comes_back_after_the_step_in_flight(
    make_scheduler: MakeScheduler,
) -> None:
    scheduler = make_scheduler()
    req = Req("A", prompt(100))
    req.output_ids.append(1)
    scheduler._add_request_to_queue(req, is_retracted=True)
    step(scheduler)
    assert scheduler.pool.events == ["wait", "allocate A"]


# ------------------------------------------------------------------ pause


def test_a_pause_with_local_requests_lets_a_weight_update_flush_the_cache(
    make_scheduler: MakeScheduler,
) -> None:
    scheduler = make_scheduler()
    running = Req("running", prompt(50))
    running.output_ids += [5, 6]
    waiting = Req("waiting", prompt(60, start=1000))
    scheduler._add_request_to_queue(running)
    scheduler.waiting_queue.remove(running)
    scheduler.running_batch = Batch([running])
    scheduler._add_request_to_queue(waiting)

    scheduler.pause_generation(SimpleNamespace(mode="retract"))
    late = Req("late", prompt(70, start=2000))
    scheduler._add_request_to_queue(late)
    assert scheduler.flush_cache(), "a weight update would end the worker here"

    scheduler.continue_generation()
    assert not scheduler.is_fully_idle()
    assert running.output_ids == [5, 6]
    step(scheduler)
    assert sorted(scheduler.formed[-1].admitted) == ["late", "running", "waiting"]


def test_a_pause_ends_quarantines_which_would_hold_up_a_flush_until_it_is_over(
    make_scheduler: MakeScheduler,
) -> None:
    scheduler = make_scheduler(Settings(quarantine_s=0.05, fallback=False))
    entry = transferring(scheduler, Req("A", prompt(100), room=7))
    entry.kv_receiver.status = FAILED
    step(scheduler)
    assert not scheduler.is_fully_idle()
    scheduler.pause_generation(SimpleNamespace(mode="retract"))
    assert scheduler.flush_cache()


def test_a_pause_sees_the_requests_whose_kv_has_arrived_and_no_local_prompt(
    make_scheduler: MakeScheduler,
) -> None:
    """SGLang throws out those that it finds in its queue with KV, for a weight update."""
    scheduler = make_scheduler()
    arrived = Req("arrived", prompt(40), room=3)
    scheduler.deltaserve_elastic.queues.transferred.append(arrived)
    waiting = Req("waiting", prompt(60, start=1000))
    scheduler._add_request_to_queue(waiting)
    scheduler.running_batch = Batch([Req("running", prompt(50))])
    seen: list[list[Req]] = []
    scheduler.disagg_decode_prealloc_queue.hold_rebootstrap = lambda _req: seen.append(
        list(scheduler.waiting_queue)
    )
    scheduler.pause_generation(SimpleNamespace(mode="retract"))
    assert seen == [[arrived]]
    assert scheduler.waiting_queue == [waiting]


def test_without_a_pause_who_waits_keeps_the_worker_busy(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    scheduler._add_request_to_queue(Req("A", prompt(50)))
    assert not scheduler.is_fully_idle()
    assert not scheduler.flush_cache()


def test_a_transfer_under_way_keeps_a_paused_worker_busy(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    transferring(scheduler, Req("A", prompt(50), room=3))
    scheduler.pause_generation(SimpleNamespace(mode="retract"))
    assert not scheduler.flush_cache()


# ------------------------------------------------------------------ requests


def test_a_request_with_a_room_and_no_host_is_prefilled_here(make_scheduler: MakeScheduler) -> None:
    """There is nobody to ask for its KV; SGLang would end the worker, whoever sent it."""
    scheduler = make_scheduler()
    req = Req("A", prompt(100), room=7)
    req.bootstrap_host = None
    scheduler._add_request_to_queue(req)
    assert scheduler.waiting_queue == [req]
    assert scheduler.disagg_decode_prealloc_queue.queue == []
    assert scheduler.deltaserve_elastic.counts["local"] == 1


def test_an_invalid_request_ends_with_its_error_also_when_it_falls_back(
    make_scheduler: MakeScheduler,
) -> None:
    """SGLang has put one token in place of its prompt: whatever is generated answers nobody."""
    scheduler = make_scheduler()
    req = Req("A", [0], room=7)
    req.to_finish = invalid = object()
    entry = transferring(scheduler, req)
    entry.kv_receiver.status = FAILED
    step(scheduler)
    assert scheduler.deltaserve_elastic.counts["fallback_prefill_lost"] == 1
    assert req.to_finish is invalid


@pytest.mark.parametrize("room", [None, 7])
def test_a_prompt_that_leaves_no_page_of_the_pool_is_answered_and_does_not_block_the_line(
    make_scheduler: MakeScheduler, room: int | None
) -> None:
    """SGLang accepts it and never lets it in: all that came after it waited as long."""
    scheduler = make_scheduler(tokens=4096, page_size=64)
    too_long, fits = Req("too long", prompt(4032), room=room), Req("fits", prompt(100, start=9000))
    scheduler._add_request_to_queue(too_long)
    scheduler._add_request_to_queue(fits)
    step(scheduler)
    assert scheduler.formed[-1].admitted == ["too long", "fits"]
    assert too_long.origin_input_ids == [0], "it runs a token, and ends with the error"
    assert "4032 tokens" in too_long.to_finish.message
    assert fits.to_finish is None


# ------------------------------------------------------------------ grammars


def test_the_first_chunk_of_a_local_prompt_whose_grammar_was_compiled_is_paced(
    make_scheduler: MakeScheduler,
) -> None:
    scheduler = make_scheduler(tokens=50_000)
    scheduler.running_batch = Batch([Req("decoding", prompt(10))])
    scheduler.grammar_manager.grammar_queue.append(Req("A", prompt(20_000)))
    step(scheduler)
    assert scheduler.formed[-1].added == [], "it is being compiled"
    scheduler.grammar_manager.compiled.add("A")
    step(scheduler)
    formed = scheduler.formed[-1]
    assert (formed.added, formed.mixed) == ([("A", 128)], True)


# ------------------------------------------------------------------ deterministic inference


@pytest.mark.parametrize("interference", [Interference.ITL, Interference.MIXED])
@pytest.mark.parametrize("chunk_tokens", [None, 2048])
def test_chunks_are_whole_alignments_where_inference_is_deterministic(
    make_scheduler: MakeScheduler, interference: Interference, chunk_tokens: int | None
) -> None:
    """SGLang skips a prompt whose chunk is smaller, for as long as anyone decodes."""
    scheduler = make_scheduler(
        Settings(interference=interference, chunk_tokens=chunk_tokens),
        tokens=50_000,
        truncation_align_size=4096,
    )
    scheduler.running_batch = Batch([Req("decoding", prompt(10)) for _ in range(3)])
    scheduler._add_request_to_queue(Req("A", prompt(10_000)))
    step(scheduler)
    formed = scheduler.formed[-1]
    assert formed.mixed
    assert formed.prompt_tokens >= 4096
    assert formed.prompt_tokens % 4096 == 0


def test_a_prompt_begun_goes_on_in_whole_alignments(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(tokens=5500, truncation_align_size=4096)
    scheduler.running_batch = Batch([Req("decoding", prompt(10))])
    req = Req("A", prompt(20_000))
    req.prefix_len = 4096
    req.kv = KV(4096, holds_kv=True)
    scheduler.chunked_req = req
    step(scheduler)
    assert scheduler.formed[-1].prompt_tokens == 4096


# ------------------------------------------------------------------ ranks


class Ranks:
    """The other rank of a group of two: what it says in each agreement."""

    def __init__(self, worker: Any, other: Callable[[list[int]], list[int]]) -> None:
        self.asked: list[int] = []
        self._other = other
        worker.agree = worker.paced.agree = worker.quarantine._agree = self.agree

    def agree(self, values: list[int]) -> list[int]:
        if not values:
            return values
        self.asked.append(len(values))
        return [min(pair) for pair in zip(values, self._other(values), strict=True)]


def arrived(scheduler: Any, count: int, wrong: int | None) -> list[Req]:
    """`count` requests whose KV is here; the metadata of number `wrong` is another room's."""
    reqs = [Req(f"A{i}", prompt(50, start=100 * i), room=i + 1) for i in range(count)]
    entries = [transferring(scheduler, req) for req in reqs]
    for i, entry in enumerate(entries):
        entry.metadata_buffer_index = i
        scheduler.rooms.written[i] = 77 if i == wrong else i + 1
        entry.kv_receiver.status = SUCCESS
    return reqs


def test_metadata_that_is_wrong_on_one_rank_is_dealt_with_on_both(
    make_scheduler: MakeScheduler,
) -> None:
    """Both enter the same agreements with as many values: else one waits alone, or is misled."""
    asked = {}
    fell_back = {}
    for rank, wrong in (("good", None), ("bad", 1)):
        scheduler = make_scheduler()
        scheduler.runtime.attn_tp_size = 2
        # The other rank's answers, as far as this test goes: the bad one finds number 1 wrong.
        first = iter([True])

        def other(values: list[int], first: Any = first) -> list[int]:
            if next(first, False):
                return [1, 0, 1]
            return [1] * len(values)

        ranks = Ranks(scheduler.deltaserve_elastic, lambda values: [1] * len(values))
        reqs = arrived(scheduler, 3, wrong)
        ranks.asked.clear()
        ranks._other = other
        step(scheduler)
        asked[rank] = ranks.asked
        fell_back[rank] = [req.rid for req in scheduler.waiting_queue] + [
            rid for formed in scheduler.formed for rid in formed.admitted
        ]
        assert [req.output_ids for req in reqs] == [[99], [], [99]], rank
        assert scheduler.deltaserve_elastic.counts["fallback_metadata"] == 1
    assert asked["good"] == asked["bad"]
    assert fell_back["good"] == fell_back["bad"] == ["A1"]


def test_metadata_that_changes_on_one_rank_while_it_is_committed_ends_that_request_on_both(
    make_scheduler: MakeScheduler,
) -> None:
    """The ranks had agreed that all three are good. The scheduler, and the others, go on."""
    asked = {}
    for rank in ("good", "bad"):
        scheduler = make_scheduler()
        scheduler.runtime.attn_tp_size = 2
        ranks = Ranks(scheduler.deltaserve_elastic, lambda values: [1] * len(values))
        reqs = arrived(scheduler, 3, None)
        ranks.asked.clear()
        # What the other rank says: all good; what it committed; whether the request may fall back.
        told = iter([[1, 1, 1], [1, 0, 1] if rank == "good" else [1, 1, 1]])

        def other(
            values: list[int], told: Any = told, rank: str = rank, rooms: Any = scheduler.rooms
        ) -> list[int]:
            if rank == "bad":
                rooms.written[1] = 77  # the late write
            return next(told, [int(rank == "good")] * len(values))

        ranks._other = other
        step(scheduler)
        asked[rank] = ranks.asked
        assert [req.output_ids for req in (reqs[0], reqs[2])] == [[99], [99]], rank
        assert isinstance(reqs[1].finished_reason, FINISH_ABORT), rank
        assert reqs[1] not in scheduler.waiting_queue, rank
        assert scheduler.deltaserve_elastic.counts["fallback_refused_metadata"] == 1
        step(scheduler)
    assert asked["good"] == asked["bad"]


def test_on_a_single_rank_wrong_metadata_falls_back(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    reqs = arrived(scheduler, 2, 0)
    step(scheduler)
    assert scheduler.deltaserve_elastic.counts["fallback_metadata"] == 1
    assert [req.output_ids for req in reqs] == [[], [99]]


def test_adapters_are_refused(make_scheduler: MakeScheduler) -> None:
    with pytest.raises(PluginMismatch, match="does not support LoRA adapters"):
        make_scheduler(enable_lora=True)


def test_context_parallelism_is_refused(make_scheduler: MakeScheduler) -> None:
    with pytest.raises(PluginMismatch, match="context parallel"):
        make_scheduler(runtime={"attn_cp_size": 2})


# ------------------------------------------------------------------ order and memory


def test_a_request_that_falls_back_takes_its_place_by_arrival(
    make_scheduler: MakeScheduler,
) -> None:
    """It may have waited for minutes: who came meanwhile must not be served before it."""
    scheduler = make_scheduler(tokens=2000)
    entry = transferring(scheduler, Req("F", prompt(50), room=7))
    scheduler._add_request_to_queue(Req("B", prompt(1950, start=5000)))
    scheduler._add_request_to_queue(Req("C", prompt(20, start=9000)))
    entry.kv_receiver.status = FAILED
    step(scheduler)
    assert scheduler.formed[-1].queue == ["F", "B", "C"]
    assert scheduler.formed[-1].admitted == ["F"]


def test_under_priorities_a_fallback_keeps_its_place_among_its_equals(
    make_scheduler: MakeScheduler,
) -> None:
    scheduler = make_scheduler(enable_priority_scheduling=True)
    fallen = Req("F", prompt(50), room=7)
    equal, urgent = Req("equal", prompt(60, start=100)), Req("urgent", prompt(60, start=300))
    fallen.priority = equal.priority = 1
    urgent.priority = 0
    fallen.time_stats.decode_prealloc_queue_entry_time = 0.5
    entry = transferring(scheduler, fallen)
    for req in (equal, urgent):
        scheduler._add_request_to_queue(req)
    entry.kv_receiver.status = FAILED
    step(scheduler)
    assert scheduler.formed[-1].queue == ["urgent", "F", "equal"]


def test_room_is_kept_for_the_prompt_that_is_tried_first(make_scheduler: MakeScheduler) -> None:
    """A prompt put back half-prefilled is first in line, whoever came before it."""
    scheduler = make_scheduler(tokens=2000)
    queues = scheduler.deltaserve_elastic.queues
    queues.add_local(Req("small", prompt(10)))
    queues.add_local(Req("large", prompt(1900, start=100)), first=True)
    younger = Req("T", prompt(300, start=4000), room=3)
    scheduler._add_request_to_queue(younger)
    scheduler.running_batch = Batch([Req("decoding", prompt(5))])
    scheduler.pool.free = 1800
    step(scheduler)
    assert scheduler.disagg_decode_prealloc_queue.queue, "a younger transfer took the large one's"


def test_a_burst_on_an_idle_worker_leaves_each_room_to_decode(
    make_scheduler: MakeScheduler,
) -> None:
    """Without that, the pool is full of prompts, and the first steps throw half of them out."""
    scheduler = make_scheduler(tokens=1000)
    for number in range(20):
        req = Req(f"A{number}", prompt(50, start=100 * number), room=number + 1)
        scheduler._add_request_to_queue(req)
    step(scheduler)
    admitted = len(scheduler.disagg_decode_transfer_queue.queue)
    reserve = scheduler.disagg_decode_prealloc_queue.num_reserved_decode_tokens
    assert admitted > 5
    assert scheduler.pool.free >= admitted * reserve - reserve


def test_alone_a_request_close_to_the_pools_size_is_let_in(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(tokens=1000)
    scheduler._add_request_to_queue(Req("A", prompt(990), room=1))
    step(scheduler)
    assert len(scheduler.disagg_decode_transfer_queue.queue) == 1


def test_only_more_important_prompts_go_before_a_retracted_request(
    make_scheduler: MakeScheduler,
) -> None:
    scheduler = make_scheduler(tokens=500, enable_priority_scheduling=True)
    retracted = Req("retracted", prompt(600))
    retracted.output_ids.append(1)
    urgent, equal = Req("urgent", prompt(20, start=1000)), Req("equal", prompt(20, start=2000))
    retracted.priority, urgent.priority, equal.priority = 5, 1, 5
    scheduler._add_request_to_queue(retracted, is_retracted=True)
    for req in (equal, urgent):
        scheduler._add_request_to_queue(req)
    step(scheduler)
    assert scheduler.formed[-1].admitted == ["urgent"]
    assert [req.rid for req in scheduler.waiting_queue] == ["equal"]


# ------------------------------------------------------------------ metrics


def test_what_is_counted_in_a_turn_without_a_batch_is_exported(
    make_scheduler: MakeScheduler,
) -> None:
    """A transfer that ends where nobody is served: no step comes that would export it later."""
    scheduler = make_scheduler()
    worker = scheduler.deltaserve_elastic
    exported: list[dict[str, int]] = []
    worker.exporter = SimpleNamespace(export=lambda: exported.append(dict(worker.counts)))
    scheduler._add_request_to_queue(Req("A", prompt(100), room=7))
    assert step(scheduler) is None
    assert exported[-1] == {"separated": 1}
