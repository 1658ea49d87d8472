"""Topology files: which are shipped, how one is named with its size, read and overridden.

Owns names (``sglang-elastic:1p7d``, the older names), ``extends``, overrides (``--set key=value``)
and what a mistake in any of them is answered with. The keys themselves are in `launch.topology`.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from deltaserve import toml_values
from deltaserve.errors import InputError
from launch.topology import (
    EngineChoice,
    Placement,
    RouterChoice,
    Topology,
    WorkerGroup,
)

# Names that topologies had when each size was a file of its own: pattern, kind, size, keys.
_OLDER_NAMES: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    (r"colocated-(\d+)", "sglang", r"\1", {}),
    (r"colocated-(\d+)-mixed", "sglang-mixed", r"\1", {}),
    (r"pd-(\d+p\d+d)", "sglang-pd", r"\1", {}),
    (r"elastic-(\d+p\d+d)", "sglang-elastic", r"\1", {}),
    (r"vllm-(\d+)", "vllm", r"\1", {}),
    (r"vllm-(\d+)-eager", "vllm", r"\1", {"graphs": False}),
    (r"vllm-(\d+)-nixl-both", "vllm", r"\1", {"kv_connector": True}),
    (
        r"vllm-(\d+)-mooncake-both",
        "vllm",
        r"\1",
        {"kv_connector": True, "transfer_backend": "mooncake"},
    ),
    (r"vllm-pd-(\d+p\d+d)", "vllm-pd", r"\1", {}),
)


@dataclass(frozen=True)
class _Named:
    """A shipped topology as it was asked for."""

    kind: str
    size: str | None
    keys: dict[str, Any]
    name: str


def catalog() -> dict[str, str]:
    """The shipped kinds of topology: name → what it is for."""
    return {
        name: str(tomllib.loads(_shipped(name).read_text()).get("description", ""))
        for name in _kinds()
    }


def load_topology(name_or_path: str | Path, overrides: Iterable[str] = ()) -> Topology:
    """The topology of a shipped name or a file, with `overrides` (``key.key=value``) applied.

    A shipped name may end with a size: workers (``sglang:2``) or prefill and other workers
    (``sglang-elastic:1p7d``). A value is read as TOML where it is TOML (``8``, ``true``,
    ``["--a"]``), else as a string; groups of workers are named by role or index
    (``workers.prefill.count=2``, ``workers.0.count=2``). Raises `InputError` in one line that
    names the file and the key, or the override.
    """
    data, where = _data(name_or_path, ())
    set_keys = {}
    for override in overrides:
        key, sign, value = override.partition("=")
        if not sign or not key:
            raise InputError(f"--set {override}: expected key=value")
        found = toml_values.value(value, f"--set {override}")
        set_keys[_set(data, key, found, override)] = override
    try:
        return Topology.model_validate(data)
    except ValidationError as error:
        raise InputError(_one_line(error, where, set_keys)) from error


def path_name(name: str) -> str:
    """What a topology that is asked for as `name` is called: in folders and messages."""
    return name.replace(":", "-")


def name_in(file: Path) -> str:
    """What the topology in a file is called: as the file says, else (also where it cannot be read
    any more) as the file is."""
    try:
        name = tomllib.loads(file.read_text()).get("name")
    except (OSError, ValueError):
        name = None
    return name if isinstance(name, str) else file.stem


def _data(name_or_path: str | Path, below: Sequence[str]) -> tuple[dict[str, Any], str]:
    """The content of a topology, with what it extends, and what to call it in errors. `below` are
    the files that extend it."""
    path = Path(name_or_path)
    named: _Named | None = None
    if path.suffix == ".toml" or len(path.parts) > 1:
        where, folder = str(path), path.parent
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: cannot read the topology: {error}") from error
    else:
        named = _named(str(name_or_path))
        where, folder = f"{named.kind}.toml", None
        text = _shipped(named.kind).read_text()
    data = toml_values.tables(text, where)
    if "extends" in data:
        data = _extended(data, where, folder, below)
    data["name"] = data.get("name", path.stem) if named is None else named.name
    if named is not None:
        data |= named.keys
        if named.size is not None:
            _resize(data["workers"], named)
    return data, where


def _extended(
    data: dict[str, Any], where: str, folder: Path | None, below: Sequence[str]
) -> dict[str, Any]:
    parent = data.pop("extends")
    if not isinstance(parent, str):
        raise InputError(f"{where}: extends: expected the name of a topology or a .toml file")
    is_file = parent.endswith(".toml")
    source: str | Path = (folder or Path()) / Path(parent).expanduser() if is_file else parent
    chain = [*below, where]
    # Resolved: with `..` in it, the way to the same file grows each time around.
    if is_file and Path(source).resolve() in {Path(file).resolve() for file in chain}:
        raise InputError(f"{where}: extends: {' extends '.join([*chain, str(source)])}")
    try:
        found, _ = _data(source, chain)
    except InputError as error:
        raise InputError(f"{where}: extends: {error}") from error
    found.pop("name")
    found.pop("description", None)
    return _merged(found, data, f"{where}: workers")


def _merged(under: dict[str, Any], over: dict[str, Any], where: str) -> dict[str, Any]:
    """`over` on top of `under`, table by table. A list replaces a list, but for tables that are
    named by the role of the group of workers that they change (``[workers.prefill]``)."""
    found = dict(under)
    for key, value in over.items():
        at = found.get(key)
        if isinstance(at, dict) and isinstance(value, dict):
            found[key] = _merged(at, value, where)
        elif key == "workers" and isinstance(at, list) and isinstance(value, dict):
            groups = list(at)
            for role, changes in value.items():
                index = _index(groups, role, where)
                if not isinstance(changes, dict):
                    raise InputError(
                        f"{where}.{role}: expected a table of its keys, not {changes!r}"
                    )
                groups[index] = _merged(groups[index], changes, where)
            found[key] = groups
        else:
            found[key] = value
    return found


def _named(name: str) -> _Named:
    kinds = _kinds()
    kind, colon, size = name.partition(":")
    if kind in kinds:
        return _Named(kind, size if colon else None, {}, path_name(name))
    for pattern, new, new_size, keys in _OLDER_NAMES:
        if match := re.fullmatch(pattern, name):
            return _Named(new, match.expand(new_size), dict(keys), name)
    close = difflib.get_close_matches(kind, kinds, 1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise InputError(
        f"no topology {name!r}{hint}; expected a .toml file or one of: {', '.join(kinds)}, with a "
        "size where one is wanted (sglang:2, sglang-pd:1p3d)"
    )


def _resize(groups: list[dict[str, Any]], named: _Named) -> None:
    """Sets the counts of `groups` to those that the size in a topology's name says."""
    size = named.size or ""
    if len(groups) == 1:
        counts = re.fullmatch(r"([1-9]\d*)", size)
        expected = "a number of workers, as in"
        example = f"{named.kind}:2"
    else:
        counts = re.fullmatch(r"([1-9]\d*)p([1-9]\d*)d", size)
        expected = "prefill and other workers, as in"
        example = f"{named.kind}:1p3d"
    if counts is None:
        raise InputError(f"{named.kind}:{size}: expected {expected} {example}")
    for group, count in zip(groups, counts.groups(), strict=True):
        group["count"] = int(count)


def _kinds() -> list[str]:
    files = (resources.files("launch") / "topologies").iterdir()
    return sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml"))


def _shipped(kind: str) -> Any:
    return resources.files("launch") / "topologies" / f"{kind}.toml"


def _set(data: dict[str, Any], key: str, value: Any, override: str) -> str:
    """Sets one key and returns it with indices in place of roles."""
    at: Any = data
    *parents, last = key.split(".")
    path = []
    for part in parents:
        if isinstance(at, list):
            index = _index(at, part, f"--set {override}")
            at, part = at[index], str(index)
        else:
            at = at.setdefault(part, {})
        path.append(part)
        if not isinstance(at, (dict, list)):
            raise InputError(f"--set {override}: {part!r} has no keys")
    if isinstance(at, list):
        index = _index(at, last, f"--set {override}")
        at[index], last = value, str(index)
    else:
        at[last] = value
    return ".".join([*path, last])


def _index(items: list[Any], part: str, where: str) -> int:
    """Where in a list `part` is: an index, or the role of one of its groups of workers."""
    if part.isdecimal() and int(part) < len(items):
        return int(part)
    roles = [item.get("role", "colocated") for item in items if isinstance(item, dict)]
    if roles.count(part) == 1:
        return roles.index(part)
    if part in roles:
        raise InputError(f"{where}: several groups are {part!r}; name one by its index")
    named = f" or a role ({', '.join(dict.fromkeys(roles))})" if roles else ""
    raise InputError(f"{where}: expected an index from 0 to {len(items) - 1}{named}: {part!r}")


def _one_line(error: ValidationError, where: str, set_keys: dict[str, str]) -> str:
    first = error.errors()[0]
    location = [str(part) for part in first["loc"]]
    key = ".".join(location)
    source = where
    for set_key, override in set_keys.items():
        if f"{key}.".startswith(f"{set_key}."):
            source = f"--set {override}"
    if first["type"] == "extra_forbidden":
        known = _keys_at(location[:-1])
        close = difflib.get_close_matches(location[-1], known, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
        return f"{source}: {key}: unknown key ({hint})"
    message = first["msg"].removeprefix("Value error, ")
    return f"{source}: {key}: {message}" if key else f"{source}: {message}"


def _keys_at(location: list[str]) -> list[str]:
    nested: dict[str, type[BaseModel]] = {
        "engine": EngineChoice,
        "placement": Placement,
        "workers": WorkerGroup,
        "router": RouterChoice,
    }
    model = nested[location[0]] if location else Topology
    return list(model.model_fields)
