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


class PluginMismatch(SystemExit):
    """The installed SGLang is not what a hook was written for; the worker must not start."""


Kind = Literal["before", "after", "around", "replace"]
"""SGLang's types of hooks."""


@dataclass(frozen=True)
class Hook:
    """A hook as a feature declares it: `function` at `point`.

    `point` is a name in `sglang_ext.sglang.base.Release.targets`, which says where that is in the
    installed release and what is expected there.
    """

    point: str
    kind: Kind
    function: Callable[..., Any]


@dataclass(frozen=True)
class PlacedHook:
    """A hook in the installed release.

    `target` is the dotted path of a function or method; `signature` the target's parameters as in
    `parameters_of`.
    """

    target: str
    kind: Kind
    function: Callable[..., Any]
    signature: str


def parameters_of(function: Callable[..., Any]) -> str:
    """The parameters of `function` with their defaults and without annotations, ``(a, b=1)``."""
    signature = inspect.signature(function)
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def check_applied(hooks: Iterable[PlacedHook]) -> None:
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


def check_hooks(hooks: Iterable[PlacedHook]) -> None:
    """Raises `PluginMismatch` for a hook whose target is missing or has other parameters."""
    for hook in hooks:
        try:
            target = pkgutil.resolve_name(hook.target)
        except (AttributeError, ImportError) as error:
            raise PluginMismatch(
                f"deltaserve's SGLang plugin hooks {hook.target}, which this SGLang lacks: {error}"
            ) from error
        found = parameters_of(target)
        if found != hook.signature:
            raise PluginMismatch(
                f"deltaserve's SGLang plugin hooks {hook.target}{hook.signature}, "
                f"but this SGLang has {found}"
            )
