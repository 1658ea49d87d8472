"""Synthetic traces: sessions drawn from a profile's distributions, emitted in time order.

Owns the generative model and the profiles. Memory holds the sessions that are still going on,
whatever the trace's length. Must not know how traces are replayed.

The model: sessions start as a Poisson process. A first turn's prompt is a prefix shared with an
earlier session (a donor: system prompt, tools, project) and tokens of its own. A later turn keeps a
share of the previous prompt (all of it, or what is left after the agent compacts its context), and
adds the previous answer and fresh tokens (tool results, the user's words). The next turn comes
after the answer's service time and a think time.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from scipy.optimize import nnls
from scipy.special import ndtri

from deltaserve.errors import InputError
from replay.stats import TraceStats
from replay.trace import Request

_BATCH = 1 << 14
_TABLE_POINTS = 8193
_FITTED_DONORS = 512
_FITTED_DONOR_TRIES = 8


class Quantiles(BaseModel):
    """A distribution as its values at evenly spaced probabilities from 0 to 1, linear between
    them."""

    model_config = ConfigDict(extra="forbid")

    values: Annotated[list[float], Field(min_length=2)]

    @model_validator(mode="after")
    def _sorted(self) -> Quantiles:
        if any(a > b for a, b in zip(self.values, self.values[1:], strict=False)):
            raise ValueError("expected values in ascending order")
        return self

    @classmethod
    def constant(cls, value: float) -> Quantiles:
        return cls(values=[value, value])

    @classmethod
    def of(cls, samples: NDArray[np.float64] | Sequence[float]) -> Quantiles:
        """The distribution of a sample."""
        probabilities = np.linspace(0, 1, _TABLE_POINTS)
        return cls(values=np.quantile(np.asarray(samples), probabilities).tolist())

    @classmethod
    def lognormal(
        cls, median: float, sigma: float, most: float, zero_share: float = 0.0
    ) -> Quantiles:
        """A lognormal cut at `most`, with a share of exact zeros."""
        probabilities = (np.arange(_TABLE_POINTS) + 0.5) / _TABLE_POINTS
        positive = np.clip((probabilities - zero_share) / (1 - zero_share), 1e-9, 1)
        values = np.minimum(median * np.exp(sigma * ndtri(positive)), most)
        values[probabilities < zero_share] = 0.0
        return cls(values=values.tolist())


class Service(BaseModel):
    """How long an answer takes, for the trace's time stamps: linear in tokens, in seconds."""

    model_config = ConfigDict(extra="forbid")

    base_s: float = 0.0
    per_input_token_s: float = 0.0
    per_output_token_s: float = 0.0


class Profile(BaseModel):
    """What a synthetic trace is drawn from. Lengths in tokens, times in seconds."""

    model_config = ConfigDict(extra="forbid")

    name: str
    block_size: Annotated[int, Field(ge=1)]
    requests_per_s: Annotated[float, Field(gt=0)]
    max_input_tokens: Annotated[int, Field(ge=1)]
    donors: Annotated[int, Field(ge=1)]
    """Sessions that a new one may share a prefix with; fewer make sharing more concentrated."""
    donor_tries: Annotated[int, Field(ge=1)]
    """Donors drawn for a new session, of which the longest is taken."""
    turns: Quantiles
    shared_tokens: Quantiles
    own_tokens: Quantiles
    kept_share: Quantiles
    added_tokens: Quantiles
    output_tokens: Quantiles
    think_time_s: Quantiles
    service: Service

    def scaled(self, length_scale: float, block_size: int | None) -> Profile:
        """This profile with all lengths multiplied by a factor, and another block size if given."""
        if length_scale <= 0:
            raise InputError(f"--length-scale {length_scale}: expected more than 0")

        def times(table: Quantiles) -> Quantiles:
            return Quantiles(values=[value * length_scale for value in table.values])

        return self.model_copy(
            update={
                "max_input_tokens": max(1, round(self.max_input_tokens * length_scale)),
                "shared_tokens": times(self.shared_tokens),
                "own_tokens": times(self.own_tokens),
                "added_tokens": times(self.added_tokens),
                "output_tokens": times(self.output_tokens),
                "block_size": block_size or self.block_size,
            }
        )


def _glm_agentic() -> Profile:
    """A production trace of a coding agent on GLM-5.1, two hours of a cluster, known by its
    published figures only: 2,114,220 requests; input mean 33,600, p50 20k, p90 88k tokens; output
    mean 445, p50 80; best prefix hit rate 67 %; of the reuse 62 % within a session. Output lengths
    are the lognormal that has that mean and median; the other parameters were chosen so that the
    figures come out."""
    return Profile(
        name="glm-agentic",
        block_size=512,
        requests_per_s=2_114_220 / 7200,
        max_input_tokens=200_000,
        donors=128,
        donor_tries=2,
        turns=Quantiles.of([1.0] * 50 + [2.0] * 32 + [3.0] * 10 + [4.0] * 5 + [6.0] * 2 + [10.0]),
        shared_tokens=Quantiles.lognormal(12_090, 1.306, 110_500, zero_share=0.02),
        own_tokens=Quantiles.lognormal(2_720, 2.427, 131_500),
        kept_share=Quantiles(values=[1.0, 1.0]),
        added_tokens=Quantiles.lognormal(660, 1.3, 60_000),
        output_tokens=Quantiles.lognormal(80, math.sqrt(2 * math.log(445 / 80)), 100_000),
        think_time_s=Quantiles.lognormal(3.0, 1.4, 1800),
        service=Service(base_s=0.3, per_input_token_s=2e-5, per_output_token_s=0.02),
    )


def _coding_sessions() -> Profile:
    """Long coding sessions, as 534 recorded ones are (the corpus of kv-cache-tester on GitHub,
    31,833 requests): quantiles 5, 10, 25, 50, 75, 90, 95 % of turns a session 4, 6, 13, 34, 83,
    139, 201; of the first prompt 10k, 12k, 18k, 22k, 98k, 234k, 336k tokens; of fresh tokens a
    later turn 0, 27, 89, 349, 1,208, 3,658, 7,608; of think times 3, 4, 6, 10, 34, 161, 417 s; of
    answers 88, 106, 140, 217, 423, 876, 1,508 tokens. A turn keeps the whole prompt before it but
    for one in 60, after the agent compacted its context. Sessions have no prefix in common: the
    recording does not say what they share."""
    return Profile(
        name="coding-sessions",
        block_size=64,
        requests_per_s=2.0,
        max_input_tokens=200_000,
        donors=1,
        donor_tries=1,
        turns=Quantiles(values=[2.0, 6.0, 10.0, 15.0, 22.0, 34.0, 50.0, 70.0, 97.0, 139.0, 250.0]),
        shared_tokens=Quantiles.constant(0.0),
        own_tokens=Quantiles(values=[8_000, 17_600, 21_500, 98_000, 180_000]),
        kept_share=Quantiles(values=[0.2] + [1.0] * 60),
        added_tokens=Quantiles.lognormal(349, 1.83, 60_000),
        output_tokens=Quantiles.lognormal(217, 1.09, 20_000),
        think_time_s=Quantiles.lognormal(10.1, 2.16, 3600),
        service=Service(base_s=0.3, per_input_token_s=2e-5, per_output_token_s=0.02),
    )


PROFILES = {"glm-agentic": _glm_agentic, "coding-sessions": _coding_sessions}


def load_profile(name: str) -> Profile:
    """A built-in profile by name, or one from a JSON file."""
    if name in PROFILES:
        return PROFILES[name]()
    path = Path(name)
    if not path.exists():
        raise InputError(
            f"--profile {name}: expected one of {', '.join(PROFILES)}, or a JSON file of a profile"
        )
    try:
        return Profile.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{path}: field {place}: {first['msg']}") from None


def fit(requests: Iterable[Request], name: str) -> Profile:
    """The profile of a trace: its distributions, its rate, its sharing between sessions and turns.

    Where the trace gives think times, what is left between two turns is service time, fitted as
    linear in tokens; otherwise all of it is think time. Memory grows with the number of requests.
    """
    stats = TraceStats()
    last: dict[str, Request] = {}
    turns: dict[str, int] = {}
    shared, own, kept, added, outputs, think, service = (array("d") for _ in range(7))
    block_size, longest, begin_s, end_s = 0, 0, 0.0, 0.0
    for request in requests:
        reuse = stats.add(request)
        if not turns:
            begin_s, block_size = request.timestamp_s, request.block_size
        elif request.block_size != block_size:
            raise InputError(f"{name}: expected one block_size, found {request.block_size} too")
        end_s = request.timestamp_s
        longest = max(longest, request.input_length)
        turns[request.session_id] = turns.get(request.session_id, 0) + 1
        outputs.append(request.output_length)
        before = last.get(request.session_id)
        last[request.session_id] = request
        if before is None:
            shared.append(reuse.hit_tokens)
            own.append(request.input_length - reuse.hit_tokens)
            continue
        held = reuse.within_session_tokens
        whole = before.input_length // block_size * block_size
        kept_tokens = before.input_length if held >= whole else held
        kept.append(min(1.0, kept_tokens / before.input_length))
        added.append(max(1, request.input_length - kept_tokens - before.output_length))
        gap_s = request.timestamp_s - before.timestamp_s
        if request.think_time_s is None:
            think.append(gap_s)
        else:
            think.append(request.think_time_s)
            service.extend(
                (max(0.0, gap_s - request.think_time_s), before.input_length, before.output_length)
            )
    if end_s <= begin_s:
        raise InputError(f"{name}: expected requests at different times to fit a profile to")
    return Profile(
        name=name,
        block_size=block_size,
        requests_per_s=len(outputs) / (end_s - begin_s),
        max_input_tokens=longest,
        donors=_FITTED_DONORS,
        donor_tries=_FITTED_DONOR_TRIES,
        turns=Quantiles.of(np.array(list(turns.values()), dtype=np.float64)),
        shared_tokens=Quantiles.of(shared),
        own_tokens=Quantiles.of(own),
        kept_share=Quantiles.of(kept) if kept else Quantiles.constant(1.0),
        added_tokens=Quantiles.of(added) if added else Quantiles.constant(1.0),
        output_tokens=Quantiles.of(outputs),
        think_time_s=Quantiles.of(think) if think else Quantiles.constant(0.0),
        service=_fit_service(np.frombuffer(service, dtype=np.float64).reshape(-1, 3)),
    )


def _fit_service(rows: NDArray[np.float64]) -> Service:
    """Least squares without negative terms over rows of (seconds, input tokens, output tokens)."""
    if not len(rows):
        return Service()
    terms = np.column_stack([np.ones(len(rows)), rows[:, 1], rows[:, 2]])
    (base_s, per_input_s, per_output_s), _ = nnls(terms, rows[:, 0])
    return Service(
        base_s=float(base_s),
        per_input_token_s=float(per_input_s),
        per_output_token_s=float(per_output_s),
    )


class _Draws:
    """Draws from one distribution, in batches."""

    def __init__(self, table: Quantiles, seed: np.random.SeedSequence) -> None:
        self._generator = np.random.default_rng(seed)
        self._values = np.asarray(table.values)
        self._probabilities = np.linspace(0, 1, len(self._values))
        self._batch: list[float] = []

    def next(self) -> float:
        if not self._batch:
            self._batch = np.interp(
                self._generator.random(_BATCH), self._probabilities, self._values
            ).tolist()
        return self._batch.pop()


@dataclass(slots=True)
class _Session:
    name: str
    left: int
    turn: int
    ids: list[int]
    input_length: int
    output_length: int
    think_time_s: float | None


def synthesise(
    profile: Profile, seed: int, *, requests: int | None = None, duration_s: float | None = None
) -> Iterator[Request]:
    """Draws a trace of so many requests, or of so long; the same arguments give the same trace."""
    if (requests is None) == (duration_s is None):
        raise InputError("expected either --requests or --duration")
    return _Generator(profile, seed).run(requests, duration_s)


class _Generator:
    def __init__(self, profile: Profile, seed: int) -> None:
        seeds = iter(np.random.SeedSequence(seed).spawn(12))
        self._profile = profile
        self._turns = _Draws(profile.turns, next(seeds))
        self._shared = _Draws(profile.shared_tokens, next(seeds))
        self._own = _Draws(profile.own_tokens, next(seeds))
        self._kept = _Draws(profile.kept_share, next(seeds))
        self._added = _Draws(profile.added_tokens, next(seeds))
        self._output = _Draws(profile.output_tokens, next(seeds))
        self._think = _Draws(profile.think_time_s, next(seeds))
        self._uniform = _Draws(Quantiles(values=[0.0, 1.0]), next(seeds))
        mean_turns = float(np.mean(_rounded_turns(profile.turns)))
        self._session_gap_s = mean_turns / profile.requests_per_s
        self._donors: list[list[int]] = []
        self._next_id = 0
        self._sessions = 0

    def run(self, requests: int | None, duration_s: float | None) -> Iterator[Request]:
        going: list[tuple[float, int, _Session]] = []
        order = 0
        emitted = 0
        arrival_s = 0.0
        while requests is None or emitted < requests:
            if not going or arrival_s <= going[0][0]:
                at_s, session = arrival_s, self._new_session()
                arrival_s -= self._session_gap_s * math.log(1.0 - self._uniform.next())
            else:
                at_s, _, session = heapq.heappop(going)
            if duration_s is not None and at_s >= duration_s:
                return
            yield self._request(at_s, session)
            emitted += 1
            session.left -= 1
            if session.left:
                next_s = at_s + self._service_s(session)
                session.think_time_s = round(self._think.next(), 3)
                self._continue(session)
                order += 1
                heapq.heappush(going, (next_s + session.think_time_s, order, session))

    def _request(self, at_s: float, session: _Session) -> Request:
        return Request(
            request_id=f"{session.name}:{session.turn}",
            session_id=session.name,
            turn=session.turn,
            timestamp_s=round(at_s, 3),
            input_length=session.input_length,
            output_length=session.output_length,
            block_size=self._profile.block_size,
            hash_ids=session.ids,
            think_time_s=session.think_time_s,
        )

    def _service_s(self, session: _Session) -> float:
        service = self._profile.service
        return (
            service.base_s
            + service.per_input_token_s * session.input_length
            + service.per_output_token_s * session.output_length
        )

    def _new_session(self) -> _Session:
        profile = self._profile
        shared_blocks = int(self._shared.next()) // profile.block_size
        ids: list[int] = []
        if shared_blocks and self._donors:
            tries = range(profile.donor_tries)
            picks = [int(self._uniform.next() * len(self._donors)) for _ in tries]
            donor = max((self._donors[pick] for pick in picks), key=len)
            ids = donor[:shared_blocks]
        length = len(ids) * profile.block_size + max(1, round(self._own.next()))
        length = min(length, profile.max_input_tokens)
        self._fill(ids, length)
        self._remember(ids[: length // profile.block_size])
        self._sessions += 1
        return _Session(
            name=f"s{self._sessions - 1}",
            left=max(1, round(self._turns.next())),
            turn=0,
            ids=ids,
            input_length=length,
            output_length=max(1, round(self._output.next())),
            think_time_s=None,
        )

    def _remember(self, ids: list[int]) -> None:
        if len(self._donors) < self._profile.donors:
            self._donors.append(ids)
        else:
            self._donors[int(self._uniform.next() * len(self._donors))] = ids

    def _continue(self, session: _Session) -> None:
        """Makes the session's next prompt."""
        profile = self._profile
        kept = int(session.input_length * min(1.0, self._kept.next()))
        length = kept + session.output_length + max(1, round(self._added.next()))
        if length > profile.max_input_tokens:
            # The context is full: the agent keeps what every session of its kind begins with.
            kept = min(kept, int(self._shared.next()))
            length = kept + session.output_length + max(1, round(self._own.next()))
            length = min(length, profile.max_input_tokens)
        ids = session.ids[: min(kept, length) // profile.block_size]
        self._fill(ids, length)
        session.ids = ids
        session.turn += 1
        session.input_length = length
        session.output_length = max(1, round(self._output.next()))

    def _fill(self, ids: list[int], length: int) -> None:
        missing = -(-length // self._profile.block_size) - len(ids)
        ids.extend(range(self._next_id, self._next_id + missing))
        self._next_id += missing


def _rounded_turns(table: Quantiles) -> NDArray[np.float64]:
    """Turns at many evenly spaced probabilities, rounded as sessions round them."""
    probabilities = np.linspace(0, 1, 200_001)
    values = np.interp(probabilities, np.linspace(0, 1, len(table.values)), table.values)
    return np.maximum(1, np.round(values))
