"""The chunk that a step may take while others decode, and what the model of step times learns."""

from __future__ import annotations

import copy
import functools
import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.pacing.pacer import ChunkPacer, fit_to_pages
from sglang_ext.pacing.step_times import Step, StepTimes


def engine_s(step: Step) -> float:
    """A step on an imagined GPU: launches, dense work, attention, and the decodes' share."""
    tokens = step.prefill_tokens
    return (
        0.030
        + 2.0e-5 * tokens
        + 4.0e-10 * tokens * (step.prefix_tokens + tokens / 2)
        + 1.0e-4 * step.decode_requests
        + 1.0e-8 * step.decode_context_tokens
    )


@functools.cache
def learnt() -> StepTimes:
    times = StepTimes()
    rng = random.Random(1)
    for _ in range(200):
        step = Step(
            rng.randrange(128, 8192),
            rng.randrange(0, 60_000),
            rng.randrange(1, 32),
            rng.randrange(0, 500_000),
        )
        times.observe(step, engine_s(step))
    return times


def one(prefix_tokens: int) -> list[tuple[int, int]]:
    """A single prompt, longer than any chunk, after so many tokens that are in the cache."""
    return [(1_000_000, prefix_tokens)]


def trained(target_s: float = 0.08) -> ChunkPacer:
    return ChunkPacer(
        target_s=target_s,
        smallest_tokens=128,
        largest_tokens=8192,
        times=copy.deepcopy(learnt()),
    )


def test_the_model_predicts_steps_it_has_not_seen() -> None:
    times = trained().times
    for step in (Step(1000, 30_000, 8, 128_000), Step(6000, 500, 2, 10_000)):
        assert times.predict(step) == pytest.approx(engine_s(step), rel=0.03)
    assert times.error < 0.05


def test_the_model_follows_an_engine_that_becomes_slower() -> None:
    pacer = trained()
    rng = random.Random(2)
    for _ in range(400):
        step = Step(rng.randrange(128, 4096), rng.randrange(0, 60_000), 8, 128_000)
        pacer.observe(step, 5 * engine_s(step))
    step = Step(2048, 20_000, 8, 128_000)
    assert pacer.times.predict(step) == pytest.approx(5 * engine_s(step), rel=0.1)


@pytest.mark.parametrize(
    ("before", "after"), [((1, 2_000), (30, 60_000)), ((8, 16_000), (8, 800_000))]
)
def test_after_a_change_of_who_decodes_few_steps_are_too_long(
    before: tuple[int, int], after: tuple[int, int]
) -> None:
    """In a steady state nothing tells decodes and their context from a step's constant.

    When they change, the next steps do; until then a chunk is chosen as if nothing had.
    """
    pacer = ChunkPacer(target_s=0.08, smallest_tokens=128, largest_tokens=8192)

    def took_s(decodes: int, context_tokens: int) -> float:
        chunk = pacer.chunk_tokens(one(5_000), decodes, context_tokens)
        step = Step(chunk, 5_000, decodes, context_tokens)
        pacer.observe(step, engine_s(step))
        return engine_s(step)

    for _ in range(100):
        took_s(*before)
    durations = [took_s(*after) for _ in range(50)]
    too_long = [duration for duration in durations if duration > 1.1 * pacer.target_s]
    assert len(too_long) <= 4
    assert max(durations) < 1.6 * pacer.target_s
    assert max(durations[10:]) <= 1.1 * pacer.target_s


def test_on_a_noisy_engine_steps_keep_the_target_on_the_whole() -> None:
    pacer = ChunkPacer(target_s=0.08, smallest_tokens=128, largest_tokens=8192)
    rng = random.Random(3)
    durations = []
    for i in range(600):
        prefix = 1000 * (i % 30)
        step = Step(pacer.chunk_tokens(one(prefix), 8, 128_000), prefix, 8, 128_000)
        duration_s = engine_s(step) * rng.lognormvariate(0, 0.4)
        durations.append(duration_s)
        pacer.observe(step, duration_s)
    settled = sorted(durations[100:])
    assert 0.05 < sum(settled) / len(settled) < 0.08
    assert settled[int(0.9 * len(settled))] < 0.12


def test_one_compilation_does_not_change_the_chunks() -> None:
    pacer = trained()
    before = pacer.chunk_tokens(one(20_000), 8, 128_000)
    for duration_s in (30.0, 0.08, 30.0):
        pacer.observe(Step(before, 20_000, 8, 128_000), duration_s)
    assert pacer.chunk_tokens(one(20_000), 8, 128_000) == pytest.approx(before, rel=0.05)


@given(
    prefix=st.integers(0, 200_000),
    decodes=st.integers(1, 64),
    context=st.integers(0, 2_000_000),
    target_ms=st.integers(20, 400),
)
def test_a_chunk_keeps_the_target_wherever_the_smallest_leaves_time_for_it(
    prefix: int, decodes: int, context: int, target_ms: int
) -> None:
    pacer = trained()
    pacer.target_s = target_ms / 1000
    tokens = pacer.chunk_tokens(one(prefix), decodes, context)
    assert 128 <= tokens <= 8192
    smallest_s = pacer.times.predict(Step(128, prefix, decodes, context))
    takes_s = pacer.times.predict(Step(tokens, prefix, decodes, context))
    if smallest_s * (1 + pacer.times.error) <= 0.81 * pacer.target_s:
        assert takes_s <= pacer.target_s
    else:
        assert takes_s <= max(pacer.target_s, 1.5 * smallest_s)


def test_a_target_that_no_chunk_can_keep_does_not_make_chunks_tiny() -> None:
    pacer = trained(target_s=0.01)
    tokens = pacer.chunk_tokens(one(1000), 8, 128_000)
    assert tokens > 500
    assert engine_s(Step(tokens, 1000, 8, 128_000)) < 1.6 * engine_s(Step(128, 1000, 8, 128_000))


def test_a_chunk_uses_the_target_up() -> None:
    pacer = trained()
    tokens = pacer.chunk_tokens(one(20_000), 8, 128_000)
    assert engine_s(Step(tokens, 20_000, 8, 128_000)) == pytest.approx(0.08, rel=0.1)


def test_later_chunks_of_a_prompt_are_smaller_because_they_attend_to_more() -> None:
    pacer = trained()
    chunks = [pacer.chunk_tokens(one(prefix), 8, 128_000) for prefix in (0, 30_000, 60_000)]
    assert chunks[0] > chunks[1] > chunks[2]


def test_without_decodes_there_is_nobody_to_keep_waiting() -> None:
    assert trained(target_s=0.001).chunk_tokens(one(50_000), 0, 0) == 8192


def launch_bound_s(step: Step) -> float:
    """The same where launching takes 62 ms and computing begins at once."""
    return max(0.062, engine_s(step) - 0.020)


def test_what_can_be_computed_while_launching_costs_nothing() -> None:
    pacer = ChunkPacer(target_s=0.08, smallest_tokens=128, largest_tokens=8192)
    rng = random.Random(4)
    durations: list[float] = []
    sizes: list[int] = []
    for i in range(300):
        prefix = 1000 * (i % 30)
        step = Step(pacer.chunk_tokens(one(prefix), 8, 16_000), prefix, 8, 16_000)
        # A launch waits where the GPU is behind.
        duration_s = launch_bound_s(step) * rng.uniform(0.97, 1.03)
        durations.append(duration_s)
        sizes.append(step.prefill_tokens)
        pacer.observe(step, duration_s, max(0.062, 0.8 * duration_s))
    assert max(durations[100:]) < 0.09
    # A line through both kinds of step would take 62 ms for the price of the smallest chunk.
    assert sum(durations[100:]) / 200 > 0.07
    assert pacer.times.launch_s == pytest.approx(0.062, rel=0.05)


def test_launches_that_others_on_the_machine_hold_up_do_not_shrink_the_chunks() -> None:
    # Launching took 62 to 115 ms within seconds of each other on a shared host. Taken for
    # computing, that made four chunks of a prompt of 1,000 tokens.
    pacer = ChunkPacer(target_s=0.08, smallest_tokens=128, largest_tokens=8192)
    rng = random.Random(5)
    sizes: list[int] = []
    for i in range(400):
        prefix = 1000 * (i % 30)
        step = Step(pacer.chunk_tokens(one(prefix), 8, 16_000), prefix, 8, 16_000)
        sizes.append(step.prefill_tokens)
        held_up_s = rng.uniform(0.062, 0.115)
        duration_s = max(held_up_s, engine_s(step) - 0.020)
        pacer.observe(step, duration_s, max(held_up_s, 0.8 * duration_s))
    assert min(sizes[100:]) > 1000
    assert pacer.times.error < 0.2


def test_a_target_below_what_launching_takes_gets_what_launching_leaves_time_for() -> None:
    pacer = trained(target_s=0.01)
    pacer.times.launch_s = 0.062
    tokens = pacer.chunk_tokens(one(20_000), 8, 128_000)
    assert engine_s(Step(tokens, 20_000, 8, 128_000)) == pytest.approx(0.062, rel=0.05)


def test_the_first_chunks_grow_step_by_step() -> None:
    pacer = ChunkPacer(target_s=10.0, smallest_tokens=128, largest_tokens=8192)
    sizes = []
    for _ in range(8):
        sizes.append(pacer.chunk_tokens(one(0), 4, 1000))
        step = Step(sizes[-1], 0, 4, 1000)
        pacer.observe(step, engine_s(step))
    assert sizes[0] == 512
    assert all(later <= 2 * earlier for earlier, later in itertools.pairwise(sizes))
    assert sizes[-1] == 8192


def test_steps_of_decodes_alone_teach_nothing_about_prefill() -> None:
    pacer = ChunkPacer(target_s=0.08, smallest_tokens=128, largest_tokens=8192)
    pacer.observe(Step(0, 0, 8, 1000), 0.01)
    assert pacer.times.steps == 0


@pytest.mark.parametrize("duration_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_duration_that_cannot_be_is_not_learnt(duration_s: float) -> None:
    times = StepTimes()
    times.observe(Step(100, 0, 1, 10), duration_s)
    assert times.steps == 0


def test_a_prompt_is_expected_to_take_all_its_chunks() -> None:
    pacer = trained()
    whole = pacer.prefill_s([(20_000, 10_000)])
    parts = sum(
        engine_s(Step(tokens, 10_000 + done, 0, 0))
        for done, tokens in ((0, 8192), (8192, 8192), (16_384, 3616))
    )
    assert whole == pytest.approx(parts, rel=0.1)


@given(
    tokens=st.integers(1, 20_000),
    page_size=st.sampled_from([1, 16, 64, 128]),
    riding=st.integers(0, 256),
    largest=st.integers(128, 16_384),
)
def test_a_prompt_part_is_whole_pages(
    tokens: int, page_size: int, riding: int, largest: int
) -> None:
    part = fit_to_pages(tokens, page_size, riding, largest) - riding
    assert part % page_size == 0
    assert page_size <= part <= max(page_size, largest)
    assert part > min(tokens, largest) - page_size


def test_decodes_that_near_the_target_pass_into_those_that_miss_it_without_a_jump() -> None:
    """Around the target a few percent of noise must not decide between 128 tokens and thousands."""
    pacer = trained()
    steps = [Step(128, 1000, 8, context) for context in range(0, 12_000_000, 20_000)]
    budgets = []
    for step in steps:
        chunk = pacer.chunk_tokens(one(1000), 8, step.decode_context_tokens)
        budgets.append(pacer.times.predict(Step(chunk, 1000, 8, step.decode_context_tokens)))
    smallest = [pacer.times.predict(step) for step in steps]
    assert smallest[0] < 0.5 * pacer.target_s
    assert smallest[-1] > 1.5 * pacer.target_s
    assert all(later / earlier < 1.03 for earlier, later in itertools.pairwise(budgets))
    assert all(later > 0.99 * earlier for earlier, later in itertools.pairwise(budgets))
    near = next(i for i, s in enumerate(smallest) if s > 0.95 * pacer.target_s)
    assert budgets[near] > 1.15 * smallest[near], "chunks are tiny just below the target"


def engine_of_prompts_s(prompts: list[tuple[int, int]], decodes: int, context: int) -> float:
    """A step with several prompts on the imagined GPU: each reads its own prefix."""
    return (
        0.020
        + sum(2.0e-5 * new + 4.0e-10 * new * (old + new / 2) + 1.0e-8 * old for new, old in prompts)
        + 1.0e-4 * decodes
        + 1.0e-8 * context
    )


def test_a_step_of_many_short_turns_on_long_prefixes_is_predicted_as_what_it_is() -> None:
    """Ten turns of 200 tokens on 100,000 each read a million tokens of KV, not 100,000."""
    times = StepTimes()
    rng = random.Random(6)
    for _ in range(300):
        prompts = [
            (rng.randrange(50, 600), rng.randrange(0, 120_000)) for _ in range(rng.randrange(1, 12))
        ]
        times.observe(Step.of(prompts, 8, 100_000), engine_of_prompts_s(prompts, 8, 100_000))
    for prompts in ([(200, 100_000)] * 10, [(128, 0)] * 20, [(2000, 50_000)]):
        expected_s = engine_of_prompts_s(prompts, 8, 100_000)
        assert times.predict(Step.of(prompts, 8, 100_000)) == pytest.approx(expected_s, rel=0.05)


def test_a_chunk_allows_for_the_prompts_behind_the_first() -> None:
    pacer = trained()
    alone = pacer.chunk_tokens([(200, 0)], 8, 128_000)
    for tokens in range(1, 30):
        pacer.observe(
            Step.of([(50 * tokens, 100_000)], 8, 128_000),
            engine_s(Step(50 * tokens, 100_000, 8, 128_000)) + 0.001,
        )
    followed = pacer.chunk_tokens([(200, 0)] + [(200, 200_000)] * 9, 8, 128_000)
    assert followed < 0.7 * alone


def test_beyond_the_graphs_a_launch_that_misses_the_target_is_learnt_and_tried_again() -> None:
    """Launching takes 62 ms where there is no graph: 25 ms of computing do not show that."""
    pacer = ChunkPacer(
        target_s=0.04,
        smallest_tokens=128,
        largest_tokens=8192,
        times=StepTimes(graph_tokens=4096),
    )
    sizes: list[int] = []
    for _ in range(700):
        tokens = pacer.chunk_tokens(one(0), 8, 16_000)
        launch_s = 0.003 if tokens + 8 <= 4096 else 0.062
        duration_s = max(launch_s, 0.005 + 4.5e-6 * tokens)
        sizes.append(tokens)
        pacer.observe(Step(tokens, 0, 8, 16_000), duration_s, launch_s)
    eager = [tokens for tokens in sizes[20:] if tokens + 8 > 4096]
    assert 1 <= len(eager) < 10
    assert sorted(sizes)[len(sizes) // 2] == 4096 - 8


def test_a_prompt_beside_decodes_is_expected_to_take_its_paced_chunks() -> None:
    pacer = trained()
    alone_s = pacer.prefill_s([(20_000, 10_000)])
    paced_s = pacer.prefill_s([(20_000, 10_000)], 8, 128_000)
    assert paced_s > 1.2 * alone_s
    behind_s = pacer.prefill_s([(20_000, 10_000), (20_000, 10_000)], 8, 128_000)
    assert behind_s == pytest.approx(2 * paced_s)
