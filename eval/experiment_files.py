"""Experiment files: which are packaged, how one is read and overridden (``--set key=value``), and
what a mistake in it is answered with.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel, ValidationError

from deltaserve import toml_values
from deltaserve.errors import InputError
from eval.experiment import TRACE_SOURCES, Experiment, Scalar

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

# What a message about a wrong file names at most: lists of numbers may hold thousands of mistakes.
_MOST_PROBLEMS = 3


def packaged_experiments() -> dict[str, Path]:
    """The experiments that come with the package, by name."""
    folder = Path(str(resources.files("eval") / "experiments"))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def load_experiment(
    name_or_path: str, overrides: Sequence[str] | None = None
) -> tuple[Experiment, Path]:
    """Reads an experiment file, or a packaged one by its name, with ``key=value`` overrides. Where
    it has `prompt_cost.factor` its lengths are multiplied by that.

    Raises `InputError`, in one line that names file and key.
    """
    path = Path(name_or_path)
    packaged = packaged_experiments()
    if not path.is_file():
        if name_or_path not in packaged:
            raise InputError(
                f"{name_or_path}: no such experiment file; packaged ones: {', '.join(packaged)}"
            )
        path = packaged[name_or_path]
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not TOML: {error}") from None
    document = toml_values.tables(text, str(path))
    for override in overrides or []:
        _apply_override(document, override)
    try:
        experiment = Experiment.model_validate(document)
    except ValidationError as error:
        raise InputError(f"{path}: {one_line(error, document, Experiment)}") from None
    cost = experiment.prompt_cost
    if cost is not None and cost.factor is not None:
        experiment = experiment.with_lengths_times(cost.factor)
    return experiment, path


def one_line(
    error: ValidationError, document: dict[str, Any], table: type[BaseModel] | None = None
) -> str:
    """The first problems that pydantic found, as ``key.path: what was expected``, with "; " between
    them; where `table` says what was read, an unknown key is answered with the nearest known one.
    """
    problems = [_problem(found, document, table) for found in error.errors()[:_MOST_PROBLEMS]]
    more = error.error_count() - len(problems)
    return "; ".join(problems) + (f" (and {more} more)" if more else "")


def _problem(found: ErrorDetails, document: dict[str, Any], table: type[BaseModel] | None) -> str:
    where: list[str] = []
    value: Any = document
    for part in found["loc"]:
        value = value[part] if _holds(value, part) else None
        name = value.get("name") if isinstance(part, int) and isinstance(value, dict) else None
        where.append(str(name if name is not None else part))
    message = found["msg"].removeprefix("Value error, ")
    if found["type"] == "extra_forbidden":
        message = f"unknown key{_nearest(found['loc'], table) if table is not None else ''}"
    elif found["type"] == "missing":
        message = "is missing"
    elif isinstance(value, Scalar):
        message = f"{message} (found {value!r})"
    message = message[:1].lower() + message[1:]
    return f"{'.'.join(where)}: {message}" if where else message


def _nearest(location: tuple[int | str, ...], table: type[BaseModel]) -> str:
    """The known key that is spelled most like an unknown one, as a question."""
    for part in location[:-1]:
        if isinstance(part, str):
            table = _tables_of(table.model_fields[part].annotation)[0]
    close = difflib.get_close_matches(str(location[-1]), table.model_fields, 1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _tables_of(annotation: Any) -> list[type[BaseModel]]:
    """The tables that an annotation names: `Trace`, `Phases | None`, `list[Arm]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [table for inside in get_args(annotation) for table in _tables_of(inside)]


def _holds(value: Any, part: str | int) -> bool:
    if isinstance(value, dict):
        return part in value
    return isinstance(value, list) and isinstance(part, int) and part < len(value)


def _apply_override(document: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    key = key.strip()
    if not separator or not re.fullmatch(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", key):
        raise InputError(f"--set {override}: expected key=value, as in replay.length_scale=0.1")
    parts = key.split(".")
    if parts[0] == "trace" and len(parts) > 1 and parts[1] in TRACE_SOURCES:
        table = document.setdefault("trace", {})
        if isinstance(table, dict):
            for other in set(TRACE_SOURCES) - {parts[1]}:
                table.pop(other, None)
    if parts == ["slo", "preset"]:
        document["slo"] = {}
    target: Any = document
    for depth, part in enumerate(parts[:-1]):
        if isinstance(target, list):
            entries = {e["name"]: e for e in target if isinstance(e, dict) and "name" in e}
            if part not in entries:
                raise InputError(
                    f"--set {override}: {'.'.join(parts[: depth + 1])}: no such entry; there are "
                    f"{', '.join(map(str, entries)) or 'none'}"
                )
            target = entries[part]
        elif isinstance(target, dict):
            target = target.setdefault(part, {})
        if not isinstance(target, dict | list):
            raise InputError(f"--set {override}: {'.'.join(parts[: depth + 1])} is not a table")
    if not isinstance(target, dict):
        raise InputError(f"--set {override}: name the entry, as in arms.NAME.policy=unified")
    target[parts[-1]] = toml_values.value(text.strip(), f"--set {override}")
