"""The releases of SGLang that the plugin knows, and the one that this process runs.

`select` finds the adapter of a release, `use` makes it the process's, `current` is how plugin code
gets at it. `base` says what an adapter is.
"""

from __future__ import annotations

from collections.abc import Iterable

from sglang_ext.guards import Hook, PlacedHook, PluginMismatch
from sglang_ext.sglang.base import ElasticVerbs, NotNeeded, Release
from sglang_ext.sglang.v0_5_17 import Sglang0517
from sglang_ext.sglang.v0_5_22 import Sglang0519, Sglang0520, Sglang0521, Sglang0522
from sglang_ext.sglang.v0_5_23 import Sglang0523

RELEASES: tuple[Release, ...] = (
    Sglang0517(),
    Sglang0519(),
    Sglang0520(),
    Sglang0521(),
    Sglang0522(),
    Sglang0523(),
)

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
    verbs = current().elastic
    assert verbs is not None, "the feature is refused where a release has none"
    return verbs


def check_features(release: Release, version: str, features: Iterable[str]) -> None:
    """Raises `PluginMismatch` for a feature that cannot be had with this release."""
    for feature in features:
        if feature in release.lacking:
            raise PluginMismatch(
                f"DELTASERVE_SGLANG asks for {feature}, which SGLang {version} cannot have: "
                f"{release.lacking[feature]}"
            )


def place(hooks: Iterable[Hook], release: Release) -> list[PlacedHook]:
    """`hooks` where they belong in `release`, less those that it can do without."""
    placed = []
    for hook in hooks:
        target = release.targets[hook.point]
        if not isinstance(target, NotNeeded):
            placed.append(PlacedHook(target.path, hook.kind, hook.function, target.signature))
    return placed
