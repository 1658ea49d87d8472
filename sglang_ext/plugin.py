"""The entry point ``sglang.srt.plugins``: installs the hooks that the environment asks for.

``DELTASERVE_SGLANG`` is a comma-separated list of features; without it the plugin does nothing, and
the worker is stock SGLang. SGLang calls `install` in every process of a worker.
"""

from __future__ import annotations

import importlib
import os
from importlib.metadata import version

from sglang_ext.guards import Hook, PluginMismatch, check_hooks, check_version

FEATURES = {
    "cpu": "sglang_ext.cpu",
    "elastic": "sglang_ext.elastic",
    "telemetry": "sglang_ext.telemetry",
}
"""Feature name → module with a tuple `HOOKS`."""


def requested_features(setting: str) -> list[str]:
    """The features named in `setting`, the value of ``DELTASERVE_SGLANG``.

    Raises `PluginMismatch` for an unknown name: a worker that silently lacks what was asked for
    would make a comparison wrong.
    """
    names = [name.strip() for name in setting.split(",") if name.strip()]
    for name in names:
        if name not in FEATURES:
            raise PluginMismatch(
                f"DELTASERVE_SGLANG names {name!r}; known features: {', '.join(FEATURES)}"
            )
    return names


def install() -> None:
    """Registers the hooks of the requested features; ends the process where SGLang differs."""
    names = requested_features(os.environ.get("DELTASERVE_SGLANG", ""))
    if not names:
        return
    check_version(version("sglang"))
    hooks: list[Hook] = []
    for name in names:
        hooks.extend(importlib.import_module(FEATURES[name]).HOOKS)
    check_hooks(hooks)

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, HookType(hook.kind))
