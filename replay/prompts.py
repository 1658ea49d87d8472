"""Prompts from hash ids: the same id gives the same tokens in every process and for every engine.

Owns the function from (hash id, block size, vocabulary, seed) to tokens, and its encoding to JSON.
It must not know where the prompt is sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import orjson
from numpy.typing import NDArray

_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

# Frequent English words, each one token with its leading space in the usual byte-pair vocabularies.
WORDS = tuple(
    """
    the of and to in is it you that he was for on are with as his they be at one have this
    from or had by hot but some what there we can out other were all your when up use word how
    said an each she which do their time if will way about many then them would write like so
    these her long make thing see him two has look more day could go come did my sound no most
    number who over know water than call first people may down side been now find any new work
    part take get place made live where after back little only round man year came show every
    good me give our under house world school plant food
""".split()  # noqa: SIM905
)
# What a cached block takes besides its text: a bytes object, an int, an entry in a dict.
_ENTRY_BYTES = 180


class PromptMaker:
    """Makes prompts block by block, keeping what it made until a bound is reached, and then anew.

    Two ids of one position differ in at least one token whenever the block is long enough to tell
    them apart (`vocab_size ** block_size > id`): the leading tokens of a block spell the id in base
    `vocab_size`, each digit shifted by a hash of the seed and its place.
    """

    def __init__(self, vocab_size: int, seed: int, cache_bytes: int = 256 << 20) -> None:
        self.vocab_size = vocab_size
        self.seed = seed
        self._seed_mix = _mix(np.array([seed], dtype=np.uint64) + _GOLDEN)[0]
        self._digits = max(1, math.ceil(63 / math.log2(vocab_size)))
        self._cache_bytes = cache_bytes
        self._cached_bytes = 0
        self._json: dict[int, dict[int, bytes]] = {}
        self._overrides: dict[int, NDArray[np.int64]] = {}

    def block_tokens(self, hash_ids: Sequence[int], block_size: int) -> NDArray[np.int64]:
        """Tokens of whole blocks, shape (len(hash_ids), block_size), values in [0, vocab_size)."""
        ids = np.asarray(hash_ids, dtype=np.uint64)
        vocab = np.uint64(self.vocab_size)
        digits = min(self._digits, block_size)
        tokens = np.empty((len(ids), block_size), dtype=np.int64)
        rest = ids.copy()
        with np.errstate(over="ignore"):
            shifts = _below(_mix(np.arange(digits, dtype=np.uint64) + self._seed_mix), vocab)
            for place in range(digits):
                tokens[:, place] = (rest % vocab + shifts[place]) % vocab
                rest //= vocab
            if block_size > digits:
                places = np.arange(digits, block_size, dtype=np.uint64) * _GOLDEN
                base = _mix(ids + self._seed_mix)
                tokens[:, digits:] = _below(_mix(base[:, None] + places[None, :]), vocab)
        if self._overrides:
            for row, hash_id in enumerate(hash_ids):
                override = self._overrides.get(hash_id)
                if override is not None:
                    tokens[row] = override
        return tokens

    def tokens(
        self, hash_ids: Sequence[int], block_size: int, input_length: int
    ) -> NDArray[np.int64]:
        """The prompt's tokens; the last block is cut to `input_length`."""
        return self.block_tokens(hash_ids, block_size).reshape(-1)[:input_length]

    def json_tokens(
        self,
        hash_ids: Sequence[int],
        block_size: int,
        input_length: int,
        head: bytes = b"[",
        tail: bytes = b"]",
    ) -> bytes:
        """The prompt's tokens as a JSON list of integers, equal to encoding `tokens(...)`; with
        another `head` and `tail`, a longer text around the list's items, made with one copy."""
        full = input_length // block_size
        cache = self._json.setdefault(block_size, {})
        whole = hash_ids[:full]
        missing = [hash_id for hash_id in dict.fromkeys(whole) if hash_id not in cache]
        if missing:
            rows = orjson.dumps(
                self.block_tokens(missing, block_size), option=orjson.OPT_SERIALIZE_NUMPY
            )
            self._cached_bytes += len(rows) + _ENTRY_BYTES * len(missing)
            cache.update(zip(missing, rows[2:-2].split(b"],["), strict=True))
        parts = [cache[hash_id] for hash_id in whole]
        if self._cached_bytes > self._cache_bytes:
            self.forget()
        if full * block_size < input_length:
            last = self.block_tokens(hash_ids[full : full + 1], block_size)
            cut = last[0, : input_length - full * block_size]
            parts.append(orjson.dumps(cut, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1])
        parts[0] = head + parts[0]
        parts[-1] += tail
        return b",".join(parts)

    def text(
        self, hash_ids: Sequence[int], block_size: int, input_length: int, words: Sequence[str]
    ) -> str:
        """The prompt as `words`, one a token: as long as asked for where each is one token to the
        model that reads it."""
        low = self.tokens(hash_ids, block_size, input_length) % len(words)
        return " ".join([words[word] for word in low.tolist()])

    def forget(self) -> None:
        """Lets go of the memory of encoded blocks; what was overridden stays so."""
        self._json.clear()
        self._cached_bytes = 0

    def override(self, hash_id: int, block_size: int, head: NDArray[np.int64]) -> None:
        """From now on the block `hash_id` begins with the tokens `head`, unless it was overridden
        before or `head` is empty."""
        if hash_id in self._overrides or not len(head):
            return
        block = self.block_tokens([hash_id], block_size)[0]
        block[: len(head)] = head
        self._overrides[hash_id] = block
        self._json.get(block_size, {}).pop(hash_id, None)


def play_seed(seed: int, play: int) -> int:
    """The seed of a trace's prompts when it is played again: play 0 has the run's own."""
    if not play:
        return seed
    with np.errstate(over="ignore"):
        mixed = _mix(np.array([seed], dtype=np.uint64) ^ (np.uint64(play) * _GOLDEN))
    return int(mixed[0])


def _below(values: NDArray[np.uint64], bound: np.uint64) -> NDArray[np.uint64]:
    """Even draws below a bound under 2^32 from random bits (Lemire: Fast Random Integer Generation
    in an Interval, 2019), without a division."""
    return ((values >> np.uint64(32)) * bound) >> np.uint64(32)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable PRNGs, OOPSLA 2014): a
    bijection of 64 bits."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * _MIX_A
        values = (values ^ (values >> np.uint64(27))) * _MIX_B
        return values ^ (values >> np.uint64(31))
