"""The report as two files: its sections in order, rendered to HTML and Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eval.document import Document, write_document
from eval.report import facts
from eval.report.claims import claims, verdicts
from eval.report.evidence import Evidence
from eval.report.opening import opening
from eval.report.sections import sections
from eval.secrets import without_secrets


def write_report(evidence: Evidence, output: Path, notes: Sequence[str] = ()) -> list[Path]:
    """Writes the report as `<output>.html` and `<output>.md`; returns both paths.

    `notes` are said under the headline.
    """
    found = sections(evidence)
    for section in found:
        if section.key == "headline":
            section.text += notes
    first = evidence.runs[0]
    document = Document(
        title=facts.title(evidence.runs),
        banner=facts.banner(evidence),
        claims=claims(evidence),
        verdicts=verdicts(evidence),
        sections=found,
        definitions=facts.definitions(evidence),
        commands=facts.commands(evidence.runs),
        manifest=without_secrets(first.manifest),
        opening=opening(evidence),
    )
    return write_document(document, output)
