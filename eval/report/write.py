"""The report as two files: its sections in order, rendered to HTML and Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eval.document import Document, write_document
from eval.report import facts
from eval.report.claims import claims
from eval.report.evidence import Evidence
from eval.report.sections import sections


def write_report(evidence: Evidence, output: Path, notes: Sequence[str] = ()) -> list[Path]:
    """Writes the report as `<output>.html` and `<output>.md`; returns both paths.

    `notes` are said under the headline.
    """
    found = sections(evidence)
    found[0].text += notes
    first = evidence.runs[0]
    document = Document(
        title=facts.title(evidence.runs),
        banner=facts.banner(evidence),
        claims=claims(evidence),
        sections=found,
        definitions=facts.definitions(first),
        commands=facts.commands(evidence.runs),
        manifest=first.manifest,
    )
    return write_document(document, output)
