"""The shapes' model folders: what engines find there."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import jinja2
import pytest

from deltaserve.errors import InputError
from launch import load_topology, plan
from launch.engines import Engine
from launch.models import has_tokenizer, shape_config, shapes, write_shape
from launch.models.tokenizer import SPECIAL
from launch.planning import layout, router_config


@pytest.fixture
def folder() -> Path:
    """The written folder of the tiny model."""
    return write_shape("tiny-qwen3-moe")


def test_every_token_id_of_the_tiny_model_has_a_text(folder: Path) -> None:
    config = shape_config("tiny-qwen3-moe")
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(config["vocab_size"]))
    told = json.loads((folder / "tokenizer_config.json").read_text())
    assert vocabulary[told["bos_token"]] == config["bos_token_id"]
    assert vocabulary[told["eos_token"]] == config["eos_token_id"]


def test_each_merge_joins_two_tokens_that_are_there_before_it(folder: Path) -> None:
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    vocabulary = model["vocab"]
    assert len(vocabulary) == len(SPECIAL) + 256 + len(model["merges"])
    for left, right in model["merges"]:
        assert max(vocabulary[left], vocabulary[right]) < vocabulary[left + right]


def test_the_chat_template_extends_a_conversation_by_what_is_new(folder: Path) -> None:
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "<b>"}}}
    turns = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "What is there?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "A file.", "tool_call_id": "1"},
    ]

    def text(upto: int, prompted: bool = False) -> str:
        return environment.from_string(template).render(
            messages=turns[:upto], tools=tools, add_generation_prompt=prompted
        )

    for upto in range(1, len(turns)):
        assert text(upto + 1).startswith(text(upto))
    whole = text(len(turns), prompted=True)
    assert whole.endswith("<|im_start|>assistant\n")
    assert whole.count("<|im_end|>") == len(turns)
    for part in ('"name": "look"', "What is there?", "<tool_call>", "A file.", "Be short."):
        assert part in whole


def test_without_tools_and_system_the_prompt_is_the_turn_alone(folder: Path) -> None:
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    turn = {"role": "user", "content": "Hi"}
    told = jinja2.Environment().from_string(template).render(messages=[turn])
    assert told == "<|im_start|>user\nHi<|im_end|>\n"


@pytest.mark.parametrize("name", ["laptop-sglang-1", "laptop-vllm-1"])
def test_a_key_decides_whether_engines_load_the_tokenizer(
    name: str, fake_python: Path, tmp_path: Path
) -> None:
    skips = "--skip-tokenizer-init"

    def argv(*overrides: str) -> tuple[str, ...]:
        of_test = [f"engine.python={fake_python}", "router.kind=none", "base_port=0"]
        return plan(load_topology(name, [*of_test, *overrides]), tmp_path).workers[0].argv

    assert skips not in argv()
    assert "--tool-call-parser" in argv()
    assert skips in argv("text=false")
    assert "--tool-call-parser" not in argv("text=false")
    assert skips in argv("model=qwen3-coder-30b-a3b")
    with pytest.raises(InputError, match="text: qwen3-coder-30b-a3b has no tokenizer"):
        load_topology(name, ["model=qwen3-coder-30b-a3b", "text=true"])


def test_shapes_without_a_tokenizer_have_a_configuration_only(folder: Path) -> None:
    bare = [name for name in shapes() if not has_tokenizer(name)]
    assert bare == ["qwen3-coder-30b-a3b", "qwen3-coder-30b-a3b-fp8", "small-qwen3-moe"]
    for name in bare:
        assert [file.name for file in write_shape(name).iterdir()] == ["config.json"]


def test_the_fp8_shape_differs_from_the_bf16_one_in_its_quantization_only(folder: Path) -> None:
    config = json.loads((write_shape("qwen3-coder-30b-a3b-fp8") / "config.json").read_text())
    assert config.pop("quantization_config")["weight_block_size"] == [128, 128]
    assert config == shape_config("qwen3-coder-30b-a3b")


def test_a_hubs_model_is_known_once_it_was_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokenizer, its vocabulary and the bytes of its KV: an engine downloads it when it starts,
    and the router is told after that."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    keys = ["model=Org/Name", "host_kv_gb=60", "kv_cache_dtype=fp8_e4m3"]
    engine = Engine("sglang", Path("/e/bin/python"), {"sglang": "1"})
    made = layout(load_topology("sglang", keys), Path("/run/x"), engine, 8)

    def told() -> tuple[object, ...]:
        config = tomllib.loads(router_config(made))
        [worker] = config["workers"]
        return config.get("tokenizer"), config.get("vocab_size"), worker.get("host_kv_tokens")

    assert told() == (None, None, None)
    repository = tmp_path / "hub" / "models--Org--Name"
    folder = repository / "snapshots" / "abc"
    folder.mkdir(parents=True)
    shape = dict(shape_config("qwen3-coder-30b-a3b"))
    (folder / "config.json").write_text(json.dumps(shape))
    (folder / "tokenizer.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("gone")
    assert told() == (None, None, None)
    (repository / "refs" / "main").write_text("abc\n")
    assert told() == (str(folder / "tokenizer.json"), shape["vocab_size"], 60 * 10**9 // 49152)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "other"))
    assert told() == (None, None, None)
