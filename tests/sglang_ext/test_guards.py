"""A worker whose SGLang differs from what the hooks were written for refuses to start."""

from __future__ import annotations

import importlib
import json
import sys
from collections import defaultdict
from collections.abc import Callable
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from sglang_ext import plugin
from sglang_ext import sglang as releases
from sglang_ext.guards import Hook, PlacedHook, PluginMismatch, check_hooks, parameters_of
from sglang_ext.plugin import FEATURES, install, requested_features
from sglang_ext.sglang.base import Release
from sglang_ext.sglang.base import Target as Place


def _hook(target: str, signature: str) -> PlacedHook:
    return PlacedHook(target=target, kind="before", function=lambda: None, signature=signature)


def test_parameters_are_compared_without_annotations() -> None:
    def function(self: object, room: int, *, retries: int = 3) -> str:
        return f"{self}{room}{retries}"

    assert parameters_of(function) == "(self, room, *, retries=3)"


def test_a_hook_whose_target_matches_passes() -> None:
    check_hooks([_hook("json.JSONDecoder.raw_decode", parameters_of(json.JSONDecoder.raw_decode))])


def test_a_hook_whose_target_has_other_parameters_ends_the_process() -> None:
    with pytest.raises(
        PluginMismatch, match=r"raw_decode\(self, room\), but this SGLang has \(self"
    ):
        check_hooks([_hook("json.JSONDecoder.raw_decode", "(self, room)")])


@pytest.mark.parametrize("target", ["json.JSONDecoder.gone", "json.gone.Class.method"])
def test_a_hook_whose_target_is_missing_ends_the_process(target: str) -> None:
    with pytest.raises(PluginMismatch, match="which this SGLang lacks"):
        check_hooks([_hook(target, "()")])


def test_a_mismatch_is_not_an_exception_that_a_plugin_loader_swallows() -> None:
    assert not issubclass(PluginMismatch, Exception)


def test_an_untested_version_is_refused_by_name() -> None:
    tested = r"tested with 0\.5\.23 and found SGLang 0\.5\.24"
    with pytest.raises(PluginMismatch, match=tested):
        releases.select("0.5.24")


def test_a_tested_version_has_one_adapter() -> None:
    versions = [version for release in releases.RELEASES for version in release.versions]
    assert len(set(versions)) == len(versions)
    for version in versions:
        assert version in releases.select(version).versions


def test_features_are_a_comma_separated_list() -> None:
    assert requested_features("") == []
    assert requested_features(" cpu, telemetry,") == ["cpu", "telemetry"]


def test_an_unknown_feature_is_refused_with_the_known_ones() -> None:
    with pytest.raises(PluginMismatch, match="known features: cpu"):
        requested_features("cpu,elastik")


@pytest.mark.parametrize("release", releases.RELEASES, ids=lambda release: release.versions[0])
def test_every_feature_has_hooks_whose_place_each_release_knows(release: Release) -> None:
    points = set()
    for feature, module in FEATURES.items():
        hooks = importlib.import_module(module).HOOKS
        assert hooks, feature
        points |= {hook.point for hook in hooks}
        placed = releases.place(hooks, release)
        assert all(hook.target.startswith("sglang.srt.") for hook in placed), feature
    assert points == set(release.targets), "a place that no hook wants, or the reverse"


def test_without_the_setting_the_plugin_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not even look for SGLang, which our own environment does not have."""
    monkeypatch.delenv("DELTASERVE_SGLANG", raising=False)
    install()


class Engine:
    """A module to hook, and SGLang's registry, which logs what it cannot apply and goes on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Target:
            def first(self, room: int) -> int:
                return room

            def second(self) -> None: ...

        class HookType(Enum):
            AROUND = "around"

        class HookRegistry:
            hooks: ClassVar[dict[str, list[Callable[..., Any]]]] = defaultdict(list)
            broken: ClassVar[set[str]] = set()

            @classmethod
            def register(cls, target: str, hook: Callable[..., Any], hook_type: Any) -> None:
                cls.hooks[target].append(hook)

            @classmethod
            def apply_hooks(cls) -> None:
                for target, hooks in cls.hooks.items():
                    name = target.rsplit(".", 1)[1]
                    if name in cls.broken:
                        continue
                    for hook in hooks:
                        setattr(Target, name, wrap(getattr(Target, name), hook))

        def wrap(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
            def wrapper(*args: Any) -> Any:
                return hook(original, *args)

            wrapper.__wrapped__ = original  # type: ignore[attr-defined]
            return wrapper

        self.target, self.registry = Target, HookRegistry
        modules = {
            "engine": {"Target": Target},
            "feature": {"HOOKS": self.hooks()},
            "sglang": {},
            "sglang.srt": {},
            "sglang.srt.plugins": {},
            "sglang.srt.plugins.hook_registry": {
                "HookRegistry": HookRegistry,
                "HookType": HookType,
            },
        }
        for name, contents in modules.items():
            module = ModuleType(name)
            vars(module).update(contents, __path__=[])
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setitem(FEATURES, "feature", "feature")
        monkeypatch.setenv("DELTASERVE_SGLANG", "feature")
        self.release = SimpleNamespace(
            versions=("9.9.9",),
            targets={
                "first": Place("engine.Target.first", "(self, room)"),
                "second": Place("engine.Target.second", "(self)"),
            },
        )
        monkeypatch.setattr(plugin, "version", lambda _: "9.9.9")
        monkeypatch.setattr(releases, "RELEASES", (self.release,))
        monkeypatch.setattr(releases, "_current", [])

    def hooks(self) -> tuple[Hook, ...]:
        return (
            Hook("first", "around", lambda f, *a: f(*a)),
            Hook("second", "around", lambda f, *a: f(*a)),
        )


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(monkeypatch)


def test_hooks_that_are_all_applied_pass(engine: Engine) -> None:
    install()
    engine.registry.apply_hooks()
    assert engine.target().first(3) == 3  # type: ignore[call-arg]


def test_hooks_find_the_adapter_of_the_installed_release(engine: Engine) -> None:
    install()
    assert releases.current() is engine.release


def test_a_worker_with_a_part_of_its_hooks_does_not_start(engine: Engine) -> None:
    engine.registry.broken.add("second")
    install()
    with pytest.raises(PluginMismatch, match=r"Target\.second, but SGLang did not apply it"):
        engine.registry.apply_hooks()


def test_a_target_that_another_plugin_replaced_by_something_else_is_refused(
    engine: Engine,
) -> None:
    def second(self: object, lane: int) -> None: ...

    install()
    engine.target.second = second  # type: ignore[assignment,method-assign]
    with pytest.raises(PluginMismatch, match=r"but this SGLang has \(self, lane\)"):
        engine.registry.apply_hooks()


@pytest.mark.parametrize(
    "error", [ImportError("libfoo.so"), OSError("libcuda.so.1"), KeyError("x")]
)
def test_whatever_goes_wrong_while_installing_ends_the_process(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """SGLang logs an exception of a plugin and starts the worker without it."""

    def fail(_: str) -> str:
        raise error

    monkeypatch.setattr(plugin, "version", fail)
    with pytest.raises(PluginMismatch, match=r"feature.*cannot be installed"):
        install()
