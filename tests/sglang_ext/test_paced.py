"""A worker that does all of a request itself, with its prefill paced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext import paced
from sglang_ext.guards import PluginMismatch
from sglang_ext.pacing.step_times import Step
from sglang_ext.settings import Interference, PacingSettings
from tests.sglang_ext import fake_sglang
from tests.sglang_ext.fake_sglang import PLAIN, Batch, Req

MakeScheduler = Callable[..., Any]


@pytest.fixture
def make_plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeScheduler]:
    """Makes a colocated scheduler, with the hooks of `paced` alone."""
    monkeypatch.setattr(paced, "_paced", [])
    with fake_sglang.installed(monkeypatch, paced.HOOKS) as made:

        def make(settings: PacingSettings | None = None, **fields: Any) -> Any:
            monkeypatch.setattr(paced, "_SETTINGS", settings or PacingSettings())
            return made.Scheduler(
                **({"disaggregation_mode": PLAIN, "device": "cpu", "tokens": 100_000} | fields)
            )

        yield make


def formed(scheduler: Any) -> Any:
    """The prefill batch of the next step."""
    scheduler.get_new_batch_prefill(scheduler.running_batch)
    return scheduler.formed[-1]


def prompt(rid: str, tokens: int, start: int = 0) -> Req:
    return Req(rid, range(start, start + tokens))


def finished_step(prompts: list[tuple[int, int]], decodes: int) -> Any:
    """A step's batch: the prompts as (new, cached) tokens, then who decoded along."""
    riding = [prompt(f"d{i}", 100) for i in range(decodes)]
    return SimpleNamespace(
        reqs=[prompt(f"p{i}", 1) for i in range(len(prompts))] + riding,
        decoding_reqs=riding,
        extend_lens=[new for new, _ in prompts] + [1] * decodes,
        prefix_lens=[cached for _, cached in prompts] + [99] * decodes,
        forward_mode=SimpleNamespace(is_extend=lambda: True, is_prebuilt=lambda: False),
        launch_ts=None,
    )


def test_beside_decodes_a_chunk_is_small_and_carries_them_and_without_it_is_the_servers(
    make_plain: MakeScheduler,
) -> None:
    scheduler = make_plain()
    scheduler.waiting_queue = [prompt("A", 20_000)]
    assert (formed(scheduler).chunk_tokens, formed(scheduler).mixed) == (8192, False)
    scheduler.running_batch = Batch([prompt(f"d{i}", 10) for i in range(4)])
    scheduler.waiting_queue = [prompt("A", 20_000)]
    batch = formed(scheduler)
    assert batch.mixed
    assert batch.prompt_tokens == 512, "the first chunk beside decodes is small, on any machine"
    assert (scheduler.chunked_prefill_size, scheduler.is_mixed_chunk) == (8192, False)


def with_logprobs(batch: Batch) -> None:
    batch.return_logprob = True


def of_a_beam(batch: Batch) -> None:
    batch.reqs[0].beam_group = "beam"


@pytest.mark.parametrize("change", [with_logprobs, of_a_beam])
def test_what_cannot_carry_decodes_takes_turns_with_them(
    make_plain: MakeScheduler, change: Callable[[Batch], None]
) -> None:
    scheduler = make_plain()
    scheduler.running_batch = Batch([prompt("d", 10)])
    change(scheduler.running_batch)
    scheduler.waiting_queue = [prompt("A", 100)]
    assert not formed(scheduler).mixed
    scheduler.waiting_queue = [prompt("B", 100)]
    before = len(scheduler.formed)
    scheduler.get_new_batch_prefill(scheduler.running_batch)
    assert len(scheduler.formed) == before, "it is the decodes' turn"
    assert formed(scheduler).queue == ["B"]


def with_a_grammar(scheduler: Any, req: Req) -> None:
    """Its grammar will have been compiled when the next batch is formed."""
    scheduler.grammar_manager.grammar_queue.append(req)
    scheduler.grammar_manager.compiled.add(req.rid)


@pytest.mark.parametrize("interference", [Interference.ITL, Interference.MIXED])
def test_the_first_chunk_of_a_request_whose_grammar_was_compiled_is_paced(
    make_plain: MakeScheduler, interference: Interference
) -> None:
    """SGLang puts it in line while it forms a batch, when the chunk has been chosen."""
    scheduler = make_plain(PacingSettings(interference=interference, chunk_tokens=2048))
    scheduler.running_batch = Batch([prompt("d", 10)])
    with_a_grammar(scheduler, prompt("A", 20_000))
    first = formed(scheduler)
    assert (first.admitted, first.mixed) == (["A"], True)
    # In `itl` the smallest chunk: nothing is known of the prompt yet.
    expected = 128 if interference is Interference.ITL else 2048
    assert first.added == [("A", expected)]


def test_a_request_whose_grammar_was_compiled_is_not_paced_where_nobody_decodes(
    make_plain: MakeScheduler,
) -> None:
    scheduler = make_plain()
    with_a_grammar(scheduler, prompt("A", 20_000))
    assert formed(scheduler).added == [("A", 8192)]


def test_behind_known_prompts_a_request_whose_grammar_was_compiled_waits(
    make_plain: MakeScheduler,
) -> None:
    scheduler = make_plain()
    pace = scheduler.deltaserve_paced
    for tokens in (128, 256, 512, 1024, 2048, 4096):
        pace.pacer.observe(Step(tokens, 0, 1, 10), 1e-9 * tokens)
    scheduler.running_batch = Batch([prompt("d", 10)])
    scheduler.waiting_queue = [prompt("B", 200, start=50_000)]
    with_a_grammar(scheduler, prompt("A", 20_000))
    first = formed(scheduler)
    assert first.added == [("B", 200)], "the chunk was chosen for what is known"
    assert [req.rid for req in scheduler.waiting_queue] == ["A"]
    assert formed(scheduler).added == [("A", 8192)], "as large as the engine is fast"


def test_while_a_grammar_is_compiled_decodes_go_on(make_plain: MakeScheduler) -> None:
    scheduler = make_plain()
    scheduler.running_batch = Batch([prompt("d", 10)])
    scheduler.grammar_manager.grammar_queue = [prompt("A", 100)]
    for _ in range(3):
        plan = scheduler.get_new_batch_prefill(scheduler.running_batch)
        assert plan.batch_to_run is None
    assert (scheduler.chunked_prefill_size, scheduler.is_mixed_chunk) == (8192, False)
    scheduler.grammar_manager.compiled.add("A")
    assert formed(scheduler).admitted == ["A"]


def test_stock_is_left_alone(make_plain: MakeScheduler) -> None:
    scheduler = make_plain(PacingSettings(interference=Interference.STOCK))
    scheduler.running_batch = Batch([prompt("d", 10)])
    scheduler.waiting_queue = [prompt("A", 100)]
    assert (formed(scheduler).chunk_tokens, scheduler.formed[-1].mixed) == (8192, False)


def test_a_finished_step_teaches_each_prompts_own_prefix(
    make_plain: MakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = make_plain()
    seen: list[Step] = []
    monkeypatch.setattr(
        scheduler.deltaserve_paced.pacer, "observe", lambda step, *_: seen.append(step)
    )
    for _ in range(2):  # from the first result on, the time between two is known
        scheduler.process_batch_result(finished_step([(200, 100_000)] * 10, 3), None)
    assert [step.prefill_tokens for step in seen] == [2000]
    assert seen[0].prefix_tokens == 1_000_000
    assert seen[0].attended_pairs == pytest.approx(10 * 200 * 100_100)
    assert (seen[0].decode_requests, seen[0].decode_context_tokens) == (3, 300)


def test_the_pause_before_a_step_is_not_taken_for_the_step(
    make_plain: MakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = make_plain()
    seen: list[Step] = []
    monkeypatch.setattr(
        scheduler.deltaserve_paced.pacer, "observe", lambda step, *_: seen.append(step)
    )
    scheduler.process_batch_result(finished_step([(200, 0)], 1), None)
    scheduler.on_idle()
    scheduler.process_batch_result(finished_step([(200, 0)], 1), None)
    assert seen == []


def test_what_the_cache_holds_of_a_waiting_prompt_is_looked_up_again(
    make_plain: MakeScheduler,
) -> None:
    scheduler = make_plain(PacingSettings(target_itl_s=0.01))
    scheduler.running_batch = Batch([prompt("d", 10)])
    req = prompt("A", 90_000)
    pace = scheduler.deltaserve_paced
    scheduler.max_running_requests = 1  # A waits
    for _ in range(70):
        scheduler.waiting_queue = [req]
        pace.choose(scheduler.running_batch)
    assert scheduler.tree_cache.lookups == 2
    scheduler.tree_cache.insert(range(5000))
    for _ in range(64):
        pace.choose(scheduler.running_batch)
    assert req.deltaserve_cached_tokens == 5000  # type: ignore[attr-defined]


def test_prompts_of_which_nothing_is_known_stay_out_of_a_step(make_plain: MakeScheduler) -> None:
    scheduler = make_plain()
    for _ in range(20):
        scheduler.deltaserve_paced.pacer.observe(Step(4096, 0, 1, 10), 0.01)
    scheduler.running_batch = Batch([prompt("d", 10)])
    scheduler.waiting_queue = [prompt(f"A{i}", 100, 200 * i) for i in range(40)]
    assert scheduler.deltaserve_paced.choose(scheduler.running_batch).tokens == 16 * 100 + 1
    scheduler.waiting_queue = scheduler.waiting_queue[:16]
    assert scheduler.deltaserve_paced.choose(scheduler.running_batch).tokens > 4000


@pytest.mark.parametrize(
    ("device", "backend", "sizes", "expected"),
    [
        ("cuda", "breakable", [4, 512, 4096], 4096),
        ("cuda", "disabled", [4096], None),
        ("cuda", "breakable", None, None),
        ("cpu", "breakable", [4096], None),
    ],
)
def test_how_far_the_graphs_reach_is_what_sglang_captured(
    make_plain: MakeScheduler,
    device: str,
    backend: str,
    sizes: list[int] | None,
    expected: int | None,
) -> None:
    graphs = SimpleNamespace(backend=backend, bs=sizes)
    scheduler = make_plain(device=device, runtime={"prefill_graphs": graphs})
    assert scheduler.deltaserve_paced.pacer.times.graph_tokens == expected


def in_flight(scheduler: Any, tokens: int, done: int) -> Req:
    """A prompt of which `done` tokens are in, as the chunk in flight beside one decode."""
    req = prompt("long", tokens, 100_000)
    req.prefix_len = done
    scheduler.chunked_req = req
    scheduler.running_batch = Batch([prompt("d", 10)])
    for _ in range(20):
        scheduler.deltaserve_paced.pacer.observe(Step(2000, 0, 1, 10), 0.02)
    return req


def test_short_prompts_go_along_with_a_chunk_in_flight(make_plain: MakeScheduler) -> None:
    """They waited for all of it: minutes, where steps are paced and the prompt is long."""
    scheduler = make_plain()
    long = in_flight(scheduler, 60_000, 4000)
    another = prompt("another long", 30_000, 300_000)
    short = [prompt(f"s{i}", 300, 1000 * i) for i in range(3)]
    scheduler.waiting_queue = [another, *short]
    batch = formed(scheduler)
    assert batch.admitted == ["s0", "s1", "s2"]
    sizes = dict(batch.added)
    assert sizes["long"] == batch.prompt_tokens - 900
    assert sizes["long"] >= batch.prompt_tokens / 2
    assert scheduler.waiting_queue == [another]
    assert scheduler.chunked_req is long


def test_short_prompts_take_at_most_half_and_the_others_keep_their_places(
    make_plain: MakeScheduler,
) -> None:
    scheduler = make_plain()
    in_flight(scheduler, 60_000, 4000)
    scheduler.waiting_queue = [prompt(f"s{i}", 900, 1000 * i) for i in range(12)]
    batch = formed(scheduler)
    assert 1 <= len(batch.admitted) < 6
    assert dict(batch.added)["long"] >= batch.prompt_tokens / 2
    assert [req.rid for req in scheduler.waiting_queue] == [
        f"s{i}" for i in range(len(batch.admitted), 12)
    ]


def test_a_prompt_that_lost_its_prefix_since_it_was_looked_up_is_not_cut(
    make_plain: MakeScheduler,
) -> None:
    """SGLang ends where a second prompt is cut beside the one in flight."""
    scheduler = make_plain()
    in_flight(scheduler, 60_000, 4000)
    stale = prompt("stale", 20_000)
    node = scheduler.tree_cache.insert(range(19_900))
    assert scheduler.deltaserve_paced.cached_tokens(stale) == 19_900
    scheduler.tree_cache.root_node.children.remove(node)  # evicted
    scheduler.waiting_queue = [stale]
    assert formed(scheduler).admitted == []
    assert scheduler.waiting_queue == [stale]


def test_memory_for_the_rest_of_the_chunk_in_flight_is_kept(make_plain: MakeScheduler) -> None:
    scheduler = make_plain(tokens=56_200)
    in_flight(scheduler, 60_000, 4000)
    scheduler.waiting_queue = [prompt("s", 300)]
    assert formed(scheduler).admitted == []


def test_a_chunk_in_flight_gives_up_nothing_for_prompts_that_cannot_come_in(
    make_plain: MakeScheduler,
) -> None:
    """With the pool full, up to half of every step was computed for nobody."""
    scheduler = make_plain(tokens=56_200)
    in_flight(scheduler, 60_000, 4000)
    waiting = scheduler.waiting_queue = [prompt("s", 900)]

    def chunk_of(batch: Any) -> int:
        return int(dict(batch.added)["long"])

    assert chunk_of(formed(scheduler)) < formed(scheduler).prompt_tokens, "tried once"
    for _ in range(20):
        scheduler.pool.free -= 100  # the decodes' next tokens
        batch = formed(scheduler)
        assert batch.admitted == []
        assert chunk_of(batch) == batch.prompt_tokens
    assert scheduler.waiting_queue == waiting
    scheduler.pool.free += 10_000  # somebody has ended
    assert formed(scheduler).admitted == ["s"]
    # The same where one that decodes leaves a place in the batch.
    scheduler.pool.free -= 8_000
    scheduler.running_batch = Batch([prompt(f"d{i}", 10) for i in range(3)])
    scheduler.waiting_queue = [prompt("t", 900, 5000)]
    formed(scheduler)
    assert chunk_of(formed(scheduler)) == scheduler.formed[-1].prompt_tokens
    scheduler.running_batch.reqs.pop()
    assert chunk_of(formed(scheduler)) < scheduler.formed[-1].prompt_tokens


def decoding(scheduler: Any, requests: int, growth_tokens: int) -> Batch:
    """Requests that decode on `scheduler` and allocate `growth_tokens` for their next tokens."""
    batch = Batch([prompt(f"d{i}", 10) for i in range(requests)])
    batch.new_tokens_required_next_decode = lambda: growth_tokens  # type: ignore[method-assign]
    scheduler.running_batch = batch
    return batch


@pytest.mark.parametrize(("free", "rides"), [(3296, True), (3232, False)])
def test_decodes_wait_where_their_next_pages_are_those_of_the_prompt_in_flight(
    make_plain: MakeScheduler, free: int, rides: bool
) -> None:
    """SGLang ends a worker that has no memory for a chunk; it throws nobody out beside one."""
    scheduler = make_plain(tokens=free, page_size=64)
    in_flight(scheduler, 4000, 1024)  # 2,976 tokens to go
    decoding(scheduler, 4, growth_tokens=256)
    batch = formed(scheduler)
    assert batch.mixed is rides
    assert (batch.chunk_tokens == 8192) is not rides


@pytest.mark.parametrize(("free", "chunks"), [(3296, 0), (3232, 1)])
def test_decodes_do_not_take_turns_with_a_prompt_whose_pages_they_would_take(
    make_plain: MakeScheduler, free: int, chunks: int
) -> None:
    scheduler = make_plain(tokens=free, page_size=64)
    in_flight(scheduler, 4000, 1024)
    decoding(scheduler, 4, growth_tokens=256).return_logprob = True  # cannot ride along
    scheduler.deltaserve_paced.chosen(True, Batch([prompt("long", 1)]))  # and waited for a chunk
    scheduler.get_new_batch_prefill(scheduler.running_batch)
    assert len(scheduler.formed) == chunks


def test_a_prompt_that_joins_leaves_the_decodes_of_its_step_their_next_pages(
    make_plain: MakeScheduler,
) -> None:
    for growth_tokens, admitted in ((64, ["A"]), (256, [])):
        scheduler = make_plain(tokens=500, page_size=64)
        decoding(scheduler, 4, growth_tokens)
        scheduler.waiting_queue = [prompt("A", 300)]
        assert formed(scheduler).admitted == admitted


@pytest.mark.parametrize("loads_back", [True, False])
def test_a_short_turn_on_what_the_host_tier_holds_goes_along(
    make_plain: MakeScheduler, loads_back: bool
) -> None:
    """It was refused, as if all had to be computed, when its room was off the chunk already."""
    scheduler = make_plain(tokens=200_000)
    long = in_flight(scheduler, 60_000, 4000)
    scheduler.tree_cache.insert(range(20_000), is_in_host=True)
    scheduler.tree_cache.loads_back = loads_back
    scheduler.waiting_queue = [prompt("back", 20_300)]
    # Where nothing is loaded SGLang would cut the prompt, and end there.
    assert formed(scheduler).admitted == (["back"] if loads_back else [])
    assert scheduler.chunked_req is long


def knows_that_prefixes_cost(scheduler: Any) -> None:
    for i in range(40):
        prompts = [(100 + 10 * i, 1000 * i)]
        seconds = 0.01 + 1e-6 * prompts[0][0] + 1e-6 * prompts[0][1]
        scheduler.deltaserve_paced.pacer.observe(Step.of(prompts, 1, 10), seconds)


def test_a_short_prompt_on_a_prefix_too_long_to_read_in_time_waits(
    make_plain: MakeScheduler,
) -> None:
    scheduler = make_plain(PacingSettings(target_itl_s=0.04))
    long = in_flight(scheduler, 60_000, 0)
    knows_that_prefixes_cost(scheduler)
    scheduler.tree_cache.insert(range(90_000))
    scheduler.waiting_queue = [prompt("far", 90_100)]
    assert formed(scheduler).admitted == []
    assert scheduler.chunked_req is long


def test_the_chunk_gives_up_what_reading_the_prefix_of_a_short_prompt_takes(
    make_plain: MakeScheduler,
) -> None:
    """Else hardly a turn of an agent would go along: its prefix is mostly the longer one."""
    sizes = []
    for cached in (0, 15_000):
        scheduler = make_plain(PacingSettings(target_itl_s=0.04))
        in_flight(scheduler, 60_000, 4000)
        knows_that_prefixes_cost(scheduler)
        scheduler.tree_cache.insert(range(cached))
        scheduler.waiting_queue = [prompt("short", cached + 100)]
        batch = formed(scheduler)
        assert batch.admitted == ["short"]
        sizes.append(dict(batch.added)["long"])
        assert sizes[-1] >= batch.prompt_tokens / 2
    assert sizes[1] < sizes[0] - 100


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"disaggregation_mode": "decode"}, "without --disaggregation-mode"),
        ({"spec_algorithm": SimpleNamespace(is_none=lambda: False)}, "speculative decoding"),
        ({"is_hybrid_swa": True}, "sliding windows"),
        ({"is_hybrid_ssm": True}, "state-space"),
        ({"chunked_prefill_size": None}, "--chunked-prefill-size"),
        ({"runtime": {"attention_backend": "dual_chunk_flash_attn"}}, "dual_chunk"),
    ],
)
def test_what_cannot_be_paced_is_refused(
    make_plain: MakeScheduler, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(PluginMismatch, match=message):
        make_plain(**fields)


def test_without_chunks_stock_is_accepted(make_plain: MakeScheduler) -> None:
    scheduler = make_plain(
        PacingSettings(interference=Interference.STOCK), chunked_prefill_size=None
    )
    scheduler.waiting_queue = [prompt("A", 100)]
    assert formed(scheduler).chunk_tokens is None


def test_a_pause_is_not_taken_for_a_step_of_its_length(
    make_plain: MakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = make_plain()
    seen: list[float] = []
    pacer = scheduler.deltaserve_paced.pacer
    monkeypatch.setattr(pacer, "observe", lambda step, duration_s, _: seen.append(duration_s))

    def result_at(now_s: float, launched_s: float) -> None:
        monkeypatch.setattr("sglang_ext.pacing.prefill.time.monotonic", lambda: now_s)
        batch = finished_step([(100, 0)], decodes=1)
        batch.launch_ts = launched_s
        scheduler.process_batch_result(batch, None)

    result_at(10.0, launched_s=9.5)
    result_at(10.4, launched_s=10.0)
    scheduler.pause_generation(SimpleNamespace(mode="in_place"))
    result_at(100.3, launched_s=100.0)
    assert seen == pytest.approx([0.5, 0.4, 0.3])
