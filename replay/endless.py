"""What an endless cache would hold of each prompt of a run.

Owns which prompts and answers of the run came before. It is the best that any cache could do: one
cache for all, which forgets nothing and has a prompt the moment it is sent.
"""

from __future__ import annotations

import bisect

from replay.bodies import continues
from replay.plan import Planned

# About 100 bytes each; beyond that `best_cached_tokens` is not known.
_MOST_BLOCKS = 5_000_000


class EndlessCache:
    """Follows the requests of one process that sends all of a run."""

    def __init__(self, spliced: bool) -> None:
        self._spliced = spliced
        # By play: how many tokens of each block came before (the last of a prompt may be cut).
        self._known: dict[int, dict[int, int]] = {}
        self._blocks = 0
        self._answers: dict[str, tuple[Planned, int]] = {}

    def cached_tokens(self, request: Planned) -> int | None:
        """The tokens of a prompt that is sent now which the cache holds; adds the prompt to it.

        A prompt that goes on after a spliced answer has that answer cached but for its last token,
        which the engine generated and never read.
        """
        if self._blocks > _MOST_BLOCKS:
            return None
        known = self._known.setdefault(request.play, {})
        ids: list[int] = request.hash_ids.tolist()
        size = request.block_size
        # An id stands for its block and all before it: what is known is a beginning of the list.
        shared = bisect.bisect_left(ids, True, key=lambda hash_id: known.get(hash_id, 0) < size)
        found = shared * size
        if shared < len(ids):
            found += known.get(ids[shared], 0)  # a prompt before this ended within the block
        found = min(found, request.input_length)
        before = len(known)
        known.update(dict.fromkeys(ids[shared:-1], size))
        ending = request.input_length - size * (len(ids) - 1)
        known[ids[-1]] = max(ending, known.get(ids[-1], 0))
        self._blocks += len(known) - before
        previous, answer_tokens = self._answers.pop(request.session_id, (None, 0))
        if previous is not None and continues(previous, answer_tokens, request):
            found = max(found, previous.input_length + answer_tokens - 1)
        return found

    def answered(self, request: Planned, output_tokens: int) -> None:
        """Notes an answer that will be spliced into the session's next prompt."""
        if self._spliced and output_tokens:
            self._answers[request.session_id] = (request, output_tokens)
