"""Keys by which a colocated SGLang worker shares its steps between prefill and decode.

Owns the keys, which workers have them, and the flags that they become. What pacing does is
`sglang_ext.paced`'s, and SGLang's own where SGLang has the flag.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from deltaserve.quantities import Count, PositiveCount, PositiveTokens

_FLAGS = {
    "max_prefill_tokens": "--max-prefill-tokens",
    "prefill_max_requests": "--prefill-max-requests",
    "prefill_decode_interval": "--prefill-decode-interval",
    "prefill_decode_interval_min_bs": "--prefill-decode-interval-min-bs",
}


class PacingKeys(BaseModel):
    """Of all colocated workers where the topology has them, of a group's where the group has.

    None leaves the engine its own default.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    paced: bool | None = None
    """Size prefill chunks by what they cost the requests that decode beside them."""
    max_prefill_tokens: PositiveTokens | None = None
    """A step prefills at most so many tokens."""
    prefill_max_requests: PositiveCount | None = None
    """A step prefills at most so many prompts."""
    prefill_decode_interval: Count | None = None
    """SGLang: so many steps only decode after a step that prefilled."""
    prefill_decode_interval_min_bs: Count | None = None
    """SGLang: the interval applies from so many decoding requests on."""

    @property
    def given(self) -> tuple[str, ...]:
        """The keys that ask for something, an interval of 0 too: an engine may default to more."""
        asked = tuple(key for key in _FLAGS if getattr(self, key) is not None)
        return ("paced", *asked) if self.paced else asked

    def over(self, other: PacingKeys) -> PacingKeys:
        """These keys, and those of `other` where these say nothing."""
        names = PacingKeys.model_fields
        found = {name: getattr(self, name) for name in names}
        return PacingKeys(
            **{n: getattr(other, n) if value is None else value for n, value in found.items()}
        )

    def sglang_flags(self) -> list[str]:
        """SGLang's flags for them."""
        argv: list[str] = []
        for key, flag in _FLAGS.items():
            if (value := getattr(self, key)) is not None:
                argv += [flag, str(value)]
        return argv
