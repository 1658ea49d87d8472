"""The entry point ``sglang.srt.plugins``: installs the hooks that the environment asks for.

``DELTASERVE_SGLANG`` is a comma-separated list of features; without it the plugin does nothing, and
the worker is stock SGLang. SGLang calls `install` in every process of a worker.
"""

from __future__ import annotations

import importlib
import os
from importlib.metadata import version
from typing import Any

from sglang_ext.guards import Hook, PlacedHook, PluginMismatch, check_applied, check_hooks
from sglang_ext.sglang import place, select, use

FEATURES = {
    "cpu": "sglang_ext.cpu",
    "elastic": "sglang_ext.elastic",
    "paced": "sglang_ext.paced",
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


def check(sglang_version: str) -> None:
    """Raises `PluginMismatch` where a worker of that SGLang with this environment would not start.

    For a launcher, before there is a worker: neither SGLang nor a GPU is needed.
    """
    names = requested_features(os.environ.get("DELTASERVE_SGLANG", ""))
    if names:
        select(sglang_version)
        for name in names:
            importlib.import_module(FEATURES[name])  # which reads its settings


def install() -> None:
    """Registers the hooks of the requested features; ends the process where SGLang differs.

    Also where anything else goes wrong: SGLang would log it and start the worker without us.
    """
    names = requested_features(os.environ.get("DELTASERVE_SGLANG", ""))
    if not names:
        return
    try:
        _install(names)
    except Exception as error:
        raise PluginMismatch(
            f"deltaserve's SGLang plugin ({', '.join(names)}) cannot be installed: {error!r}"
        ) from error


def _install(names: list[str]) -> None:
    release = select(version("sglang"))
    use(release)
    declared: list[Hook] = []
    for name in names:
        declared.extend(importlib.import_module(FEATURES[name]).HOOKS)
    hooks = place(declared, release)
    check_hooks(hooks)

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, HookType(hook.kind))
    _check_once_applied(HookRegistry, hooks)


def _check_once_applied(registry: Any, hooks: list[PlacedHook]) -> None:
    """Lets SGLang's `registry` check our hooks as soon as it has applied all plugins' hooks.

    It does so in every process, after the last plugin, and only logs a hook that fails.
    """
    apply_hooks = registry.apply_hooks

    def apply_and_check() -> None:
        apply_hooks()
        check_applied(hooks)

    registry.apply_hooks = apply_and_check
