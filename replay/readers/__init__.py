"""Readers of other projects' trace files. Each module turns one source into our `Request`s.

A reader adds nothing that its source does not say: what has to be assumed is an option of its own.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Report:
    """What a conversion did. `ids_added` counts started last blocks that had no id in the source;
    `shared_prefix_tokens` those that an option made common to several sessions."""

    requests: int = 0
    sessions: int = 0
    output_length_raised_to_1: int = 0
    ids_added: int = 0
    shared_prefix_tokens: int = 0
