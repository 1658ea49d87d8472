"""A worker whose SGLang differs from what the hooks were written for refuses to start."""

from __future__ import annotations

import json

import pytest

from sglang_ext.guards import Hook, PluginMismatch, check_hooks, check_version, parameters_of
from sglang_ext.plugin import FEATURES, install, requested_features


def _hook(target: str, signature: str | tuple[str, ...]) -> Hook:
    return Hook(target=target, kind="before", function=lambda: None, signature=signature)


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


def test_a_hook_that_knows_two_releases_accepts_either_and_no_third() -> None:
    known = parameters_of(json.JSONDecoder.raw_decode)
    check_hooks([_hook("json.JSONDecoder.raw_decode", ("(self, room)", known))])
    with pytest.raises(PluginMismatch, match=r"\(self, room\) or \(self, lane\), but this SGLang"):
        check_hooks([_hook("json.JSONDecoder.raw_decode", ("(self, room)", "(self, lane)"))])


@pytest.mark.parametrize("target", ["json.JSONDecoder.gone", "json.gone.Class.method"])
def test_a_hook_whose_target_is_missing_ends_the_process(target: str) -> None:
    with pytest.raises(PluginMismatch, match="which this SGLang lacks"):
        check_hooks([_hook(target, "()")])


def test_a_mismatch_is_not_an_exception_that_a_plugin_loader_swallows() -> None:
    assert not issubclass(PluginMismatch, Exception)


def test_an_untested_version_is_refused_by_name() -> None:
    check_version("0.5.17")
    with pytest.raises(PluginMismatch, match=r"found SGLang 0\.4\.0"):
        check_version("0.4.0")


def test_features_are_a_comma_separated_list() -> None:
    assert requested_features("") == []
    assert requested_features(" cpu, telemetry,") == ["cpu", "telemetry"]


def test_an_unknown_feature_is_refused_with_the_known_ones() -> None:
    with pytest.raises(PluginMismatch, match="known features: cpu"):
        requested_features("cpu,elastik")


def test_every_feature_has_hooks() -> None:
    assert set(FEATURES) >= {"cpu", "telemetry"}


def test_without_the_setting_the_plugin_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not even look for SGLang, which our own environment does not have."""
    monkeypatch.delenv("DELTASERVE_SGLANG", raising=False)
    install()
