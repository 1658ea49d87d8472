"""What a worker on a CPU need not do to start."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.cpu import starting

MODULES = {
    "qwen3_moe.py": "class Qwen3MoeForCausalLM: ...\n\nEntryClass = Qwen3MoeForCausalLM\n",
    # Its name begins with the other's.
    "qwen3_moe_mtp.py": "class A: ...\nEntryClass = [Qwen3MoeForCausalLMMTP]\n",
    "several.py": "import x\nEntryClass = [\n    LlamaForCausalLM,\n    Phi3ForCausalLM,\n]\n",
    "uses_it.py": "from qwen3_moe import Qwen3MoeForCausalLM\n\nEntryClass = OtherForCausalLM\n",
    "shared.py": "class NoModel: ...\n",
}


@pytest.fixture
def sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of models as SGLang's, and a model's folder beside it; nobody's start method."""
    models = tmp_path / "sglang" / "srt" / "models"
    models.mkdir(parents=True)
    for name, text in MODULES.items():
        (models / name).write_text(text)
    for loaded in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv(starting._LEFT_OUT, raising=False)
    # What the hook sets is taken back.
    monkeypatch.setattr(os, "environ", dict(os.environ))
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3MoeForCausalLM"]}')
    return tmp_path


@pytest.fixture
def methods(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The start methods that were set."""
    seen: list[str] = []
    monkeypatch.setattr(
        multiprocessing, "set_start_method", lambda method, force: seen.append(method)
    )
    return seen


def start(model: Path, **settings: Any) -> None:
    arguments = {"device": "cpu", "model_path": str(model), "speculative_draft_model_path": None}
    (hook,) = starting.HOOKS
    hook.function(None, SimpleNamespace(**arguments | settings))


def left_out() -> set[str]:
    return set(filter(None, os.environ.get(starting._LEFT_OUT, "").split(",")))


def test_processes_are_forked_and_the_served_model_alone_is_imported(
    sglang: Path, methods: list[str]
) -> None:
    start(sglang)
    assert methods == ["fork"]
    assert left_out() == {"qwen3_moe_mtp", "several", "shared", "uses_it"}


def test_metrics_of_forked_processes_go_where_the_metrics_page_finds_them(
    sglang: Path, methods: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = SimpleNamespace(ValueClass="in memory", get_value_class=lambda: "in files")
    monkeypatch.setitem(sys.modules, "prometheus_client.values", values)  # type: ignore[misc]
    start(sglang)
    assert values.ValueClass == "in files"


def test_with_a_gpu_nothing_is_forked_and_all_models_are_there(
    sglang: Path, methods: list[str]
) -> None:
    start(sglang, device="cuda")
    assert not methods
    assert not left_out()


@pytest.mark.parametrize(
    "config",
    [None, "", "[1]", '{"architectures": null}', '{"architectures": []}'],
    ids=["absent", "empty", "a list", "null", "none"],
)
def test_of_a_model_that_does_not_say_what_it_is_all_are_imported(
    sglang: Path, methods: list[str], config: str | None
) -> None:
    (sglang / "config.json").unlink()
    if config is not None:
        (sglang / "config.json").write_text(config)
    start(sglang)
    assert not left_out()


def test_with_a_draft_model_or_where_the_user_chose_nothing_is_left_out_by_us(
    sglang: Path, methods: list[str]
) -> None:
    start(sglang, speculative_draft_model_path="draft")
    assert not left_out()
    os.environ[starting._LEFT_OUT] = "llama"
    start(sglang)
    assert left_out() == {"llama"}


def test_an_architecture_that_no_module_names_leaves_all_of_them_in(sglang: Path) -> None:
    folder = sglang / "sglang/srt/models"
    assert starting.modules_besides(["Qwen3MoeForCausalLM", "Unknown"], folder) == []
    assert "several" not in starting.modules_besides(["Phi3ForCausalLM"], folder)
