"""A report as a value, and its two renderings: one HTML file that stands alone, one Markdown file.

Owns the templates and the embedding of figures. Knows nothing of what the words and tables say.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from jinja2 import Environment, PackageLoader, StrictUndefined
from plotly.offline import get_plotlyjs

import deltaserve
from deltaserve.errors import InputError
from eval import provenance
from eval.tables import Table
from launch.cache import make_folder


@dataclass(frozen=True)
class Figure:
    """A plot; `words` say what it shows to those who cannot see it."""

    key: str
    words: str
    plot: Any

    @property
    def title(self) -> str:
        """The plot's own title."""
        return str(self.plot.layout.title.text or self.words)


@dataclass
class Section:
    """A part of the report: words, tables (each with a heading or none) and figures."""

    key: str
    title: str
    text: list[str] = field(default_factory=list)
    tables: list[tuple[str, Table]] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)


@dataclass(frozen=True)
class Document:
    """Everything a report says. A claim is a tag (better, worse, none, unjudged) and a sentence."""

    title: str
    banner: list[str]
    claims: list[tuple[str, str]]
    sections: list[Section]
    definitions: list[tuple[str, str]]
    commands: list[str]
    manifest: dict[str, Any]


def write_document(document: Document, output: Path) -> list[Path]:
    """Writes `<output>.html` and `<output>.md` (a suffix of `output` is dropped); returns both."""
    stem = output.with_suffix("") if output.suffix in (".html", ".md") else output
    if not stem.name:
        raise InputError(f"--output {output}: expected the name of a file, without its suffix")
    make_folder(stem.parent)
    environment = Environment(
        loader=PackageLoader("eval"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    plots = {
        figure.key: _embedded(figure.plot)
        for section in document.sections
        for figure in section.figures
    }
    context = {
        **{name: getattr(document, name) for name in Document.__dataclass_fields__},
        "made": provenance.now(),
        "version": deltaserve.__version__,
        "plots": plots,
        "plotly_js": get_plotlyjs() if plots else "",
        "manifest": orjson.dumps(document.manifest, option=orjson.OPT_INDENT_2).decode(),
    }
    written = []
    for suffix, escape in (("html", True), ("md", False)):
        template = environment.overlay(autoescape=escape).get_template(f"report.{suffix}.j2")
        path = stem.with_name(f"{stem.name}.{suffix}")
        try:
            path.write_text(template.render(**context), encoding="utf-8")
        except OSError as error:
            raise InputError(f"--output {path}: cannot be written: {error.strerror}") from None
        written.append(path)
    return written


def _embedded(plot: Any) -> str:
    # Inside a script element only its own end tag must not occur.
    return str(plot.to_json()).replace("</", "<\\/")
