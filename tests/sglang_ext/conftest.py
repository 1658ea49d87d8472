"""An elastic worker in a fake SGLang, for the tests that drive its scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import sglang_ext.elastic as hooks
from sglang_ext.elastic import worker
from sglang_ext.settings import ElasticSettings
from tests.sglang_ext import fake_sglang


@pytest.fixture
def make_scheduler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes a scheduler with all hooks applied; `settings` are the worker's."""
    monkeypatch.setattr(worker, "_workers", [])
    with fake_sglang.installed(monkeypatch, hooks.HOOKS) as made:

        def make(settings: ElasticSettings | None = None, **fields: Any) -> Any:
            monkeypatch.setattr(hooks, "_SETTINGS", settings or ElasticSettings(quarantine_s=0.0))
            return made.Scheduler(**fields)

        yield make
