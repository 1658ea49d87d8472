"""What the readers of JSON Lines sources share: records with their place, and typed fields."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deltaserve.errors import InputError
from replay.trace import FieldError, json_object, numbered_lines


class Record:
    """One line of a source file; a field that is missing or of the wrong type names its place."""

    def __init__(self, place: str, values: dict[str, Any]) -> None:
        self._place = place
        self._values = values

    def error(self, field: str, expected: str) -> InputError:
        found = repr(self._values.get(field))
        shown = found if len(found) <= 40 else f"{found[:37]}..."
        return InputError(f"{self._place}: field {field}: expected {expected}, found {shown}")

    def integer(self, field: str, minimum: int) -> int:
        value = self._values.get(field)
        if type(value) is not int or value < minimum:
            raise self.error(field, f"an integer ≥ {minimum}")
        return value

    def number(self, field: str) -> float:
        value = self._values.get(field)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise self.error(field, "a number ≥ 0")
        return float(value)

    def integers(self, field: str) -> list[int]:
        value = self._values.get(field)
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self.error(field, "a list of integers")
        return value


def records(paths: list[Path]) -> Iterator[Record]:
    """The records of files of JSON Lines, one after the other."""
    for path in paths:
        for place, values in objects(path):
            yield Record(place, values)


def objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file of JSON Lines (plain or `.zst`), each with its place."""
    for number, line in numbered_lines(path):
        place = f"{path}:{number}"
        try:
            values = json_object(line)
        except FieldError as error:
            raise InputError(f"{place}: {error}") from None
        yield place, values
