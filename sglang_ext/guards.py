"""What a hook into SGLang expects of it, checked before anything is hooked and once it has been.

SGLang's plugin loader logs and swallows exceptions, and so does its registry for a hook that it
cannot apply: a worker whose hooks failed would come up and quietly behave like stock, or half like
it. A mismatch therefore ends the process (`PluginMismatch` is a ``SystemExit``), with a message
that names the hook, what was expected and what was found.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

TESTED_VERSIONS = ("0.5.17", "0.5.18")
"""SGLang releases against which every hook was run."""


class PluginMismatch(SystemExit):
    """The installed SGLang is not what a hook was written for; the worker must not start."""


@dataclass(frozen=True)
class Hook:
    """One hook into SGLang.

    `target` is the dotted path of a function or method; `kind` one of SGLang's hook types;
    `signature` the target's parameters as in `parameters_of`, several where tested releases differ.
    """

    target: str
    kind: Literal["before", "after", "around", "replace"]
    function: Callable[..., Any]
    signature: str | tuple[str, ...]


def parameters_of(function: Callable[..., Any]) -> str:
    """The parameters of `function` with their defaults and without annotations, ``(a, b=1)``."""
    signature = inspect.signature(function)
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def check_version(found: str) -> None:
    """Raises `PluginMismatch` unless `found` is a tested SGLang release."""
    if found not in TESTED_VERSIONS:
        raise PluginMismatch(
            f"deltaserve's SGLang plugin was tested with {', '.join(TESTED_VERSIONS)} and found "
            f"SGLang {found}: install a tested version, or start it without DELTASERVE_SGLANG"
        )


def check_applied(hooks: Iterable[Hook]) -> None:
    """Raises `PluginMismatch` for a hook that its target does not call.

    SGLang's registry wraps a target once for each hook and keeps what it wrapped in
    ``__wrapped__``; a hook is in the closure of its wrapper. What is wrapped in the end must still
    be what the hook was written for: another plugin may have replaced it.
    """
    hooks = tuple(hooks)
    for hook in hooks:
        function: Any = pkgutil.resolve_name(hook.target)
        while function is not None:
            cells = getattr(function, "__closure__", None) or ()
            if any(cell.cell_contents is hook.function for cell in cells):
                break
            function = getattr(function, "__wrapped__", None)
        else:
            raise PluginMismatch(
                f"deltaserve's SGLang plugin hooks {hook.target}, but SGLang did not apply it: "
                "its log says why; a worker with a part of the hooks must not start"
            )
    check_hooks(hooks)


def check_hooks(hooks: Iterable[Hook]) -> None:
    """Raises `PluginMismatch` for a hook whose target is missing or has other parameters."""
    for hook in hooks:
        try:
            target = pkgutil.resolve_name(hook.target)
        except (AttributeError, ImportError) as error:
            raise PluginMismatch(
                f"deltaserve's SGLang plugin hooks {hook.target}, which this SGLang lacks: {error}"
            ) from error
        found = parameters_of(target)
        accepted = (hook.signature,) if isinstance(hook.signature, str) else hook.signature
        if found not in accepted:
            raise PluginMismatch(
                f"deltaserve's SGLang plugin hooks {hook.target}{' or '.join(accepted)}, "
                f"but this SGLang has {found}"
            )
