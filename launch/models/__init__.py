"""The model shapes that ship with launch, and the folder an engine reads one from.

Owns the shapes' configurations; a model that is not one of them is a path or a hub name and is
handed to the engine as it is.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import orjson

from launch.cache import cache_dir, make_folder, write_atomically
from launch.models.hub import snapshot
from launch.models.tokenizer import tokenizer_files

TOOL_CALL_PARSERS = {"sglang": "qwen25", "vllm": "hermes"}
"""What each engine calls the form in which shapes' chat templates have tool calls."""


# What is shipped is as constant as the code beside it: read once, not once a worker.
@cache
def shapes() -> tuple[str, ...]:
    """Names of the shipped shapes, sorted."""
    files = resources.files(__name__).iterdir()
    return tuple(sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml")))


def is_shape(model: str) -> bool:
    """Whether `model` names a shipped shape: random weights go with it."""
    return model in shapes()


def has_tokenizer(model: str) -> bool:
    """Whether `model` comes with a tokenizer; what is no shape is taken to."""
    return not is_shape(model) or _resource(f"{model}.merges").is_file()


@cache
def shape_config(name: str) -> Mapping[str, Any]:
    """The Hugging Face configuration of a shipped shape; `like` in its file names another shape,
    whose keys it has as well."""
    own = tomllib.loads(_resource(f"{name}.toml").read_text())
    like = own.pop("like", None)
    return own if like is None else {**shape_config(like), **own}


def shape_folder(name: str) -> Path:
    """Where the model folder of a shipped shape belongs; its name changes with its content."""
    return cache_dir() / "models" / f"{name}-{_digest(name)}"


def is_folder(model: str) -> bool:
    """Whether `model` is written as a folder; a name of another form is a shape's or a hub's."""
    return model.startswith(("/", ".", "~"))


def model_folder(model: str) -> Path | None:
    """The folder of `model` on this machine; None for a hub's that was not downloaded yet. A
    shape's is written when its fleet starts."""
    if is_shape(model):
        return shape_folder(model)
    return Path(model) if is_folder(model) else snapshot(model)


def write_shape(name: str) -> Path:
    """Writes the model folder of a shipped shape and returns it: a ``config.json`` and, where the
    shape has a tokenizer, that and its chat template."""
    folder = shape_folder(name)
    for file, content in _files(name).items():
        if not (folder / file).exists():
            make_folder(folder)
            write_atomically(folder / file, content)
    return folder


@cache
def _digest(name: str) -> str:
    return hashlib.sha256(b"\0".join(_files(name).values())).hexdigest()[:12]


def _files(name: str) -> dict[str, bytes]:
    options = orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS
    files = {"config.json": orjson.dumps(shape_config(name), option=options)}
    if has_tokenizer(name):
        merges, template = (_resource(f"{name}.{end}").read_text() for end in ("merges", "jinja"))
        files |= tokenizer_files(merges, template)
    return files


def _resource(file: str) -> Traversable:
    return resources.files(__name__) / file
