"""Prompts: equal ids give equal tokens, different ids different ones, in every process."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import orjson
from hypothesis import given
from hypothesis import strategies as st

from replay.prompts import WORDS, PromptMaker

_ids = st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=30)
_seeds = st.integers(0, 2**63)


@given(_ids, st.integers(1, 80), st.integers(2, 200_000), _seeds)
def test_equal_ids_give_equal_tokens_within_the_vocabulary(
    ids: list[int], block_size: int, vocab_size: int, seed: int
) -> None:
    together = PromptMaker(vocab_size, seed).block_tokens(ids, block_size)
    assert together.shape == (len(ids), block_size)
    assert together.min() >= 0
    assert together.max() < vocab_size
    for row, hash_id in zip(together, ids, strict=True):
        alone = PromptMaker(vocab_size, seed).block_tokens([hash_id], block_size)[0]
        assert np.array_equal(row, alone)


@given(st.sets(st.integers(0, 2**63 - 1), min_size=2, max_size=50), st.integers(64, 80), _seeds)
def test_different_ids_differ_in_any_block_that_can_tell_them_apart(
    ids: set[int], block_size: int, seed: int
) -> None:
    rows = PromptMaker(2, seed).block_tokens(sorted(ids), block_size)
    assert len({row.tobytes() for row in rows}) == len(ids)


@given(st.integers(2, 40), st.integers(1, 3), _seeds)
def test_a_short_block_tells_apart_as_many_ids_as_it_has_values(
    vocab_size: int, block_size: int, seed: int
) -> None:
    ids = list(range(vocab_size**block_size))
    rows = PromptMaker(vocab_size, seed).block_tokens(ids, block_size)
    assert len({row.tobytes() for row in rows}) == len(ids)


@given(_ids, st.integers(1, 80), st.data())
def test_json_equals_the_encoded_tokens_also_from_a_small_cache(
    ids: list[int], block_size: int, data: st.DataObject
) -> None:
    length = data.draw(st.integers((len(ids) - 1) * block_size + 1, len(ids) * block_size))
    maker = PromptMaker(1000, 3, cache_bytes=2000)
    expected = maker.tokens(ids, block_size, length).tolist()
    assert len(expected) == length
    for _ in range(3):
        assert orjson.loads(maker.json_tokens(ids, block_size, length)) == expected


def test_another_seed_gives_other_tokens() -> None:
    one, two = (PromptMaker(1000, seed).tokens([5], 64, 64) for seed in (1, 2))
    assert not np.array_equal(one, two)


def test_another_process_makes_the_same_tokens() -> None:
    code = (
        "from replay.prompts import PromptMaker;"
        "print(PromptMaker(1024, 9).tokens([3, 2**62], 20, 37).tolist())"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert orjson.loads(other.stdout) == PromptMaker(1024, 9).tokens([3, 2**62], 20, 37).tolist()


def test_a_shorter_prompt_is_a_prefix_of_the_longer_with_the_same_ids() -> None:
    maker = PromptMaker(1000, 0)
    assert np.array_equal(maker.tokens([1, 2], 16, 20), maker.tokens([1, 2], 16, 32)[:20])


def test_an_override_changes_the_head_of_one_block_once() -> None:
    maker = PromptMaker(1000, 0)
    before = orjson.loads(maker.json_tokens([1, 2, 3], 4, 12))
    maker.override(2, 4, np.array([9, 8]))
    maker.override(2, 4, np.array([1, 1, 1, 1]))
    after = orjson.loads(maker.json_tokens([1, 2, 3], 4, 12))
    assert after == [*before[:4], 9, 8, *before[6:]]
    assert maker.tokens([1, 2, 3], 4, 12).tolist() == after


def test_text_has_a_word_a_token_and_tells_blocks_apart() -> None:
    maker = PromptMaker(1000, 0)
    words = maker.text([1, 2], 64, 100, WORDS).split(" ")
    assert len(words) == 100
    assert words[:36] != words[64:]
