"""The releases of SGLang that the plugin knows, and the one that this process runs.

`select` finds the adapter of a release, `use` makes it the process's, `current` is how plugin code
gets at it. `base` says what an adapter is.
"""

from __future__ import annotations

from collections.abc import Iterable

from sglang_ext.guards import Hook, PlacedHook, PluginMismatch
from sglang_ext.sglang.base import ElasticVerbs, Release
from sglang_ext.sglang.v0_5_23 import Sglang0523

RELEASES: tuple[Release, ...] = (Sglang0523(),)

_current: list[Release] = []


def select(version: str) -> Release:
    """The adapter for SGLang `version`.

    Raises `PluginMismatch` unless that is a tested release.
    """
    for release in RELEASES:
        if version in release.versions:
            return release
    tested = ", ".join(version for release in RELEASES for version in release.versions)
    raise PluginMismatch(
        f"deltaserve's SGLang plugin was tested with {tested} and found SGLang {version}: install "
        "a tested version, or start it without DELTASERVE_SGLANG"
    )


def use(release: Release) -> None:
    """Makes `release` the one that this process runs."""
    _current[:] = [release]


def current() -> Release:
    """The release that this process runs; the plugin says so before any hook can be called."""
    return _current[0]


def elastic() -> ElasticVerbs:
    """The elastic worker's verbs of that release."""
    return current().elastic


def place(hooks: Iterable[Hook], release: Release) -> list[PlacedHook]:
    """`hooks` where they belong in `release`."""
    targets = [(release.targets[hook.point], hook) for hook in hooks]
    return [PlacedHook(t.path, hook.kind, hook.function, t.signature) for t, hook in targets]
