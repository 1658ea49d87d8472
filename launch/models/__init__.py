"""The model shapes that ship with launch, and the folder an engine reads one from.

Owns the shapes' configurations; a model that is not one of them is a path or a hub name and is
handed to the engine as it is.
"""

from __future__ import annotations

import hashlib
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import orjson

from launch.cache import cache_dir, write_atomically


def shapes() -> list[str]:
    """Names of the shipped shapes, sorted."""
    files = resources.files(__name__).iterdir()
    return sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml"))


def is_shape(model: str) -> bool:
    """Whether `model` names a shipped shape: random weights and no tokenizer go with it."""
    return model in shapes()


def shape_config(name: str) -> dict[str, Any]:
    """The Hugging Face configuration of a shipped shape."""
    return tomllib.loads((resources.files(__name__) / f"{name}.toml").read_text())


def shape_folder(name: str) -> Path:
    """Where the model folder of a shipped shape belongs; its name changes with its content."""
    digest = hashlib.sha256(_config_bytes(name)).hexdigest()[:12]
    return cache_dir() / "models" / f"{name}-{digest}"


def write_shape(name: str) -> Path:
    """Writes the model folder of a shipped shape (only a ``config.json``) and returns it."""
    folder = shape_folder(name)
    config = folder / "config.json"
    if not config.exists():
        write_atomically(config, _config_bytes(name))
    return folder


def _config_bytes(name: str) -> bytes:
    return orjson.dumps(shape_config(name), option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS)
