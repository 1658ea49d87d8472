"""The report's sections, one module each, in the order in which they are read.

A section is a function of the evidence; it gives None where the runs hold nothing for it, and is
then left out.
"""

from __future__ import annotations

from collections.abc import Callable

from eval.document import Section
from eval.report.evidence import Evidence
from eval.report.sections import (
    capacity,
    classes,
    comparison,
    curves,
    decisions,
    distributions,
    frameworks,
    headline,
    kv,
    machine,
    recomputed,
    runs,
    timelines,
    workers,
)

_SECTIONS: tuple[Callable[[Evidence], Section | None], ...] = (
    capacity.section,
    curves.section,
    headline.section,
    recomputed.section,
    comparison.section,
    frameworks.section,
    classes.section,
    distributions.section,
    workers.section,
    decisions.section,
    kv.section,
    timelines.section,
    machine.section,
    runs.section,
)


def sections(evidence: Evidence) -> list[Section]:
    """Every section that has something to say."""
    found = (section(evidence) for section in _SECTIONS)
    return [section for section in found if section is not None]
