"""A worker on a CPU starts with less work: on a few cores, starting is most of what is waited for.

SGLang starts scheduler and detokenizer as new processes, because CUDA does not survive a fork, and
each of them imports all of SGLang once more; the scheduler then imports every model that SGLang
knows. Here both are forked from the process that has imported it, and of the models only the one
that is served is imported.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sglang_ext.guards import Hook

_LEFT_OUT = "SGLANG_DISABLED_MODEL_ARCHS"
"""SGLang's variable for modules of models that are not to be imported."""


def _start_with_less(_result: None, server_args: Any) -> None:
    """Follows what SGLang sets up before it starts its processes, in the one that starts them."""
    if server_args.device != "cpu":
        return
    multiprocessing.set_start_method("fork", force=True)
    values: Any = sys.modules.get("prometheus_client.values")
    if values is not None:
        # Where its metrics go, to memory or to files that `/metrics` reads from all processes, it
        # decided when it was imported; SGLang has only just said to files.
        values.ValueClass = values.get_value_class()
    if os.environ.get(_LEFT_OUT) or server_args.speculative_draft_model_path:
        return
    models = find_spec("sglang.srt.models")
    folders = list(models.submodule_search_locations or ()) if models is not None else []
    architectures = architectures_of(server_args.model_path)
    others = modules_besides(architectures, Path(folders[0])) if len(folders) == 1 else []
    if others:
        os.environ[_LEFT_OUT] = ",".join(others)


def architectures_of(model_path: str) -> list[str]:
    """The architectures in the ``config.json`` of a model's folder; none where there is no such."""
    try:
        config = json.loads(Path(model_path, "config.json").read_bytes())
    except (OSError, ValueError):
        return []
    found = config.get("architectures") if isinstance(config, dict) else None
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def modules_besides(architectures: Iterable[str], folder: Path) -> list[str]:
    """The modules in `folder`, one a model, that are not needed for `architectures`.

    SGLang's modules name their architectures in ``EntryClass``. Empty where one of `architectures`
    is not found, or there are none: nothing is known then of what is not needed.
    """
    wanted = set(architectures)
    if not wanted:
        return []
    found: set[str] = set()
    others = []
    for module in sorted(folder.glob("*.py")):
        _, said, entry = module.read_text(encoding="utf-8").partition("\nEntryClass")
        served = wanted & set(re.findall(r"\w+", entry)) if said else set()
        found |= served
        if not served:
            others.append(module.stem)
    return others if found == wanted else []


HOOKS = (Hook("engine.set_up", "after", _start_with_less),)
