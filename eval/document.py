"""A report as a value, and its two renderings: one HTML file that stands alone, one Markdown file.

Owns the templates, the embedding of figures and that a report on disk is always whole. Knows
nothing of what the words and tables say.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

import deltaserve
from deltaserve.errors import InputError
from eval import provenance
from eval.plot import Chart, svg
from eval.tables import Table
from launch.cache import make_folder, write_atomically


@dataclass(frozen=True)
class Figure:
    """A chart; `words` say what it shows to those who cannot see it."""

    key: str
    words: str
    plot: Chart

    @property
    def title(self) -> str:
        """The chart's own title."""
        return self.plot.title or self.words

    @property
    def markup(self) -> Markup:
        """The chart as SVG, to be put into a page as it is."""
        return Markup(svg(self.plot, self.words))


@dataclass
class Section:
    """A part of the report: words, tables (each with a heading or none) and figures.

    A `folded` one shows its title only, until it is opened.
    """

    key: str
    title: str
    text: list[str] = field(default_factory=list)
    tables: list[tuple[str, Table]] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    folded: bool = False


@dataclass(frozen=True)
class Opening:
    """The first screen: the answer in a sentence, what was measured (name and words), the arms,
    and one picture."""

    answer: str
    facts: list[tuple[str, str]]
    arms: Table | None = None
    picture: Figure | None = None


@dataclass(frozen=True)
class Document:
    """Everything a report says.

    Claims and verdicts are a tag (better, worse, none, unjudged) and a sentence each; claims limit
    what the report carries and are always in sight.
    """

    title: str
    banner: list[str]
    claims: list[tuple[str, str]]
    sections: list[Section]
    definitions: list[tuple[str, str]]
    commands: list[str]
    manifest: dict[str, Any]
    opening: Opening | None = None
    verdicts: list[tuple[str, str]] = field(default_factory=list)


def stem_of(output: Path) -> Path:
    """`output` without the suffix of a report; raises `InputError` where no name is left."""
    stem = output.with_suffix("") if output.suffix in (".html", ".md") else output
    if not stem.name:
        raise InputError(f"--output {output}: expected the name of a file, without its suffix")
    return stem


def write_document(document: Document, output: Path) -> list[Path]:
    """Writes `<output>.html` and `<output>.md` (a suffix of `output` is dropped); returns both.

    Both are made before either is written, and each replaces what was there in one step: a full
    disk leaves the report that was there before.
    """
    stem = stem_of(output)
    make_folder(stem.parent)
    context = {
        **{name: getattr(document, name) for name in Document.__dataclass_fields__},
        "made": provenance.now(),
        "version": deltaserve.__version__,
        "manifest": orjson.dumps(document.manifest, option=orjson.OPT_INDENT_2).decode(),
    }
    contents = {}
    for suffix in ("html", "md"):
        contents[stem.with_name(f"{stem.name}.{suffix}")] = _template(suffix).render(**context)
    for path, text in contents.items():
        write_whole(path, text.encode("utf-8"))
    return list(contents)


@functools.cache
def _template(suffix: str) -> Template:
    """Of `html` (which escapes) or `md`; compiled once a process."""
    environment = Environment(
        autoescape=suffix == "html",
        loader=PackageLoader("eval"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(f"report.{suffix}.j2")


def write_whole(path: Path, content: bytes, option: str = "--output") -> None:
    """Replaces the file in one step, or raises `InputError` naming `option` and leaves it alone."""
    try:
        write_atomically(path, content)
        path.chmod(0o666 & ~_umask())
    except OSError as error:
        raise InputError(f"{option} {path}: cannot be written: {error.strerror}") from None


def _umask() -> int:
    import os

    mask = os.umask(0)
    os.umask(mask)
    return mask
