"""How large a user's durations, sizes and counts may be: one bound a kind, with its reason.

A number that is finite and absurd is a typing error. Taken as it is it ends in a run that never
ends, or in an error of something that was told of it much later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeVar

from pydantic import AfterValidator, Field

from deltaserve.errors import InputError

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True)
class Most:
    """The largest value of a kind, and what that is. As a validator of pydantic's it refuses what
    is more, and what is no number."""

    value: int
    what: str

    def wrong_with(self, value: float) -> str | None:
        """What is wrong with `value`, as the end of a message that names the setting."""
        return None if value <= self.value else f"expected at most {self.value:,} ({self.what})"

    def __call__(self, value: _Number) -> _Number:
        if wrong := self.wrong_with(value):
            raise ValueError(wrong)
        return value


def check_more_than_0(flag: str, value: float | None, most: Most) -> None:
    """Raises `InputError`, naming the flag, where `value` is not more than 0, or more than `most`.
    None is what was not given."""
    if value is None:
        return
    if not value > 0:
        raise InputError(f"{flag} {value:g}: expected more than 0")
    if wrong := most.wrong_with(value):
        raise InputError(f"{flag} {value:g}: {wrong}")


SECONDS = Most(366 * 86_400, "a year in seconds")
MINUTES = Most(366 * 1_440, "a year in minutes")
TOKENS = Most(10**10, "ten thousand million tokens: no prompt and no cache has more")
GB = Most(100_000, "100 TB: no host has more memory")
COUNT = Most(10**9, "a thousand million: no trace and no load has more")
FACTOR = Most(10**6, "a million times as much")
REPEATS = Most(10_000, "ten thousand runs of each arm")
PROCESSES = Most(1_024, "no machine runs more of them well")
GPUS = Most(1_024, "one worker has no more")

Seconds = Annotated[float, Field(ge=0), AfterValidator(SECONDS)]
PositiveSeconds = Annotated[float, Field(gt=0), AfterValidator(SECONDS)]
PositiveMinutes = Annotated[float, Field(gt=0), AfterValidator(MINUTES)]
Tokens = Annotated[int, Field(ge=0), AfterValidator(TOKENS)]
PositiveTokens = Annotated[int, Field(gt=0), AfterValidator(TOKENS)]
Gigabytes = Annotated[float, Field(ge=0), AfterValidator(GB)]
Count = Annotated[int, Field(ge=0), AfterValidator(COUNT)]
PositiveCount = Annotated[int, Field(gt=0), AfterValidator(COUNT)]
PositiveAmount = Annotated[float, Field(gt=0), AfterValidator(COUNT)]
Factor = Annotated[float, Field(ge=0), AfterValidator(FACTOR)]
PositiveFactor = Annotated[float, Field(gt=0), AfterValidator(FACTOR)]
Repeats = Annotated[int, Field(ge=1), AfterValidator(REPEATS)]
Processes = Annotated[int, Field(gt=0), AfterValidator(PROCESSES)]
Gpus = Annotated[int, Field(gt=0), AfterValidator(GPUS)]
