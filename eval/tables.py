"""Tables that are stated once and serve every output: HTML, Markdown, CSV, Parquet and JSON.

A table is a list of columns; a column says its title, how a row's value is got and how it is
written. Owns how a value becomes a table's entry and a record for programs. Knows nothing of what
the rows are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from eval.formatting import (
    DASH,
    Entry,
    number,
    percent,
    percent_entry,
    seconds,
    seconds_interval,
    size,
)
from eval.stats import Estimate

Record = dict[str, Any]
Row = TypeVar("Row")

# A quantile is shown where at least so many observations lie beyond it: the p99 of 40 requests is
# their maximum, and says nothing about the next 40.
LEAST_BEYOND = 5


@dataclass(frozen=True)
class Table:
    """Rows of entries under titles; the first column names the row.

    `records` are the same rows for programs: the value of each column by its key, without units or
    rounding. `key` names the table in exports; one without a key is not exported. A `stacked` table
    shows its rows below each other on a narrow screen, where others scroll; a `folded` one shows
    its heading only, until it is opened.
    """

    columns: list[str]
    rows: list[list[Entry]]
    note: str = ""
    key: str = ""
    stacked: bool = False
    folded: bool = False
    records: list[Record] = field(default_factory=list)


@dataclass(frozen=True)
class Format:
    """How a number is written, and how the interval of an estimate is written below it."""

    text: Callable[[float], str]
    interval: Callable[[Estimate], str]


def _number_interval(estimate: Estimate) -> str:
    return f"{number(estimate.low)}–{number(estimate.high)}" if math.isfinite(estimate.low) else ""


SECONDS = Format(seconds, seconds_interval)
PERCENT = Format(percent, lambda estimate: percent_entry(estimate).interval)
NUMBER = Format(number, _number_interval)
RATIO = Format(
    lambda value: f"{value:.2f}" if math.isfinite(value) else DASH,
    lambda e: f"{e.low:.2f}–{e.high:.2f}" if math.isfinite(e.low) else "",
)
SIZE = Format(size, _number_interval)
TOKENS = Format(
    lambda value: f"{value:.0f}" if abs(value) < 1000 else number(value), _number_interval
)
LEVEL = Format(lambda value: f"{value:.3g}" if math.isfinite(value) else DASH, lambda _: "")
COUNT = Format(lambda value: f"{value:.0f}" if math.isfinite(value) else DASH, lambda _: "")


@dataclass(frozen=True)
class Column(Generic[Row]):
    """One column of a table.

    `key` names it for programs (with its unit); `value` gives a row's value: a number, an
    `Estimate`, a text, a truth value or None. `under` is what stands below the value in small
    print instead of an interval, `tag` the colour of a verdict. A column whose title is empty is
    exported only.
    """

    key: str
    title: str
    value: Callable[[Row], Any]
    form: Format = NUMBER
    under: Callable[[Row], str] | None = None
    tag: Callable[[Row], str] | None = None

    def entry(self, row: Row) -> Entry:
        """The row's value as it is shown."""
        shown = entry(self.value(row), self.form)
        return Entry(
            shown.text,
            shown.interval if self.under is None else self.under(row),
            "" if self.tag is None else self.tag(row),
        )

    def record(self, row: Row) -> Record:
        """The row's value for programs; an estimate becomes `key`, `key_low` and `key_high`."""
        value = self.value(row)
        if isinstance(value, Estimate):
            bounds = {"": value.value, "_low": value.low, "_high": value.high}
            return {f"{self.key}{name}": plain(bound) for name, bound in bounds.items()}
        return {self.key: plain(value)}


def entry(value: Any, form: Format = NUMBER) -> Entry:
    """A value as a table's entry: a dash for what is unknown, an estimate with its interval."""
    if value is None:
        return Entry(DASH)
    if isinstance(value, Entry):
        return value
    if isinstance(value, Estimate):
        return Entry(form.text(value.value), form.interval(value) if value.known else "")
    if isinstance(value, bool):
        return Entry("yes" if value else "no")
    if isinstance(value, str):
        return Entry(value or DASH)
    return Entry(form.text(float(value)))


def tabulate(
    key: str, rows: Iterable[Row], columns: Sequence[Column[Row]], keep_empty: bool = False
) -> Table:
    """A table of `rows`. Columns that hold nothing but dashes are not shown, unless `keep_empty`;
    the first always is."""
    listed = list(rows)
    shown: list[tuple[str, list[Entry]]] = []
    for column in columns:
        if not column.title:
            continue
        entries = [column.entry(row) for row in listed]
        if not shown or keep_empty or any(item.text != DASH for item in entries):
            shown.append((column.title, entries))
    records = []
    for row in listed:
        record: Record = {}
        for column in columns:
            record |= column.record(row)
        records.append(record)
    return Table(
        columns=[title for title, _ in shown],
        rows=[[entries[i] for _, entries in shown] for i in range(len(listed))],
        key=key,
        records=records,
    )


def enough(n: int, quantile: float) -> bool:
    """Whether `n` observations say anything about a quantile: five of them lie beyond it, on the
    side where fewer do."""
    return n * min(quantile, 1 - quantile) >= LEAST_BEYOND - 1e-9


def known_quantile(value: Estimate, quantile: float) -> Estimate | None:
    """`value`, or None where too few observations lie beyond the quantile to state it."""
    return value if enough(value.n, quantile) else None


def plain(value: Any) -> Any:
    """A value as CSV has it: None for what is unknown; what is beyond every bound is infinite."""
    if isinstance(value, Entry):
        return value.text
    if value is None or isinstance(value, bool | str):
        return value
    number_ = float(value)
    if math.isnan(number_):
        return None
    return value if isinstance(value, int) else number_
