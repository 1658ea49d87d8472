"""What a topology leaves for KV, for how many coding sessions, and what gives more."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launch import sizing
from launch.cli import app
from launch.engines import Engine
from launch.planning import Plan, layout
from launch.profiles import PROFILES
from launch.topology_files import load_topology
from launch.weights import in_fp8, weight_bytes

CODER = "qwen3-coder-30b-a3b"


def planned(name: str, *overrides: str, hardware: str | None = "h100") -> Plan:
    named = [f"hardware={hardware}"] if hardware else []
    topology = load_topology(name, [*named, *overrides])
    engine = Engine(topology.engine.name, Path("/e"), {topology.engine.name: "1"})
    return layout(topology, Path("/run/x"), engine, 64)


def lines(
    name: str,
    *overrides: str,
    hardware: str | None = "h100",
    memory: Mapping[int, int] | None = None,
    reported: Mapping[str, int] | None = None,
) -> list[str]:
    made = planned(name, *overrides, hardware=hardware)
    return sizing.lines(made, memory or {}, reported)


def checkpoint(folder: Path, total: int, **config: object) -> str:
    """A model's folder with a checkpoint of so many bytes."""
    folder.mkdir()
    shape = {"num_hidden_layers": 48, "num_key_value_heads": 4, "head_dim": 128}
    about = {"vocab_size": 151936, "hidden_size": 2048, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(shape | about | config))
    index = {"metadata": {"total_size": total}, "weight_map": {}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return str(folder)


def test_a_shapes_weights_are_those_of_the_model_that_it_has_the_shape_of() -> None:
    weights = weight_bytes(CODER, "bfloat16")
    assert weights == 2 * 30_532_122_624  # parameters of Qwen3-Coder-30B-A3B-Instruct
    assert in_fp8(CODER, weights) == pytest.approx(31.2e9, rel=0.01)
    assert weight_bytes(f"{CODER}-fp8", "bfloat16") == in_fp8(CODER, weights)
    assert in_fp8(f"{CODER}-fp8", weights) is None


@pytest.mark.parametrize(
    ("engine", "hardware", "measured"), [("sglang", "h200", 592_463), ("vllm", "h20", 281_888)]
)
def test_the_estimate_is_what_engines_had_on_gpus(
    engine: str, hardware: str, measured: int
) -> None:
    argv = getattr(PROFILES[hardware], f"{engine}_flags")
    share, memory_gb = sizing.share_of(engine, argv), PROFILES[hardware].memory_gb
    weights = weight_bytes(CODER, "bfloat16")
    assert share is not None
    assert memory_gb is not None
    assert weights is not None
    found = sizing.kv_tokens(engine, memory_gb * 1e9, share, weights, 98_304)
    assert found == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize(("name", "sessions"), [("sglang-agents:1", 2), ("vllm-agents:1", 3)])
def test_bf16_weights_leave_an_h100_few_sessions_and_that_is_a_warning(
    name: str, sessions: int
) -> None:
    first, *more = lines(name)
    assert first.startswith("warning: ")
    assert f"{sessions} coding sessions" in first
    assert any("an FP8 checkpoint" in line and "10 coding sessions" in line for line in more)


def test_memory_that_is_there_counts_before_that_of_its_kind() -> None:
    there = lines("sglang-agents:1", memory={0: 150_800_000_000})
    assert not there[0].startswith("warning: ")
    assert there[0] != lines("sglang-agents:1")[0]


def test_each_step_that_gives_more_is_named_with_what_it_gives() -> None:
    first, *more = lines("sglang:1", hardware="h200", reported={"colocated-0": 600_000})
    assert "600,000 KV tokens" in first
    assert "8 coding sessions" in first
    assert ['"fp8_e4m3"' in more[0], "1,200,000 KV tokens" in more[0]] == [True, True]
    assert "host_kv_gb" in more[1]
    assert "an FP8 checkpoint" in more[2]


def test_a_tier_that_is_no_larger_than_the_gpus_kv_is_told_with_one_that_is() -> None:
    (tier,) = [line for line in lines("sglang-agents:1", hardware="h200") if "host_kv_gb" in line]
    assert "copies" in tier
    found = lines("sglang-agents:1", "host_kv_gb=100", hardware="h200")
    assert not [line for line in found if "host_kv_gb" in line]


def test_an_fp8_checkpoint_is_smaller_and_gains_nothing_by_being_one(tmp_path: Path) -> None:
    quantized = checkpoint(
        tmp_path / "q", 31_200_000_000, quantization_config={"quant_method": "fp8"}
    )
    found = lines("sglang-agents:1", f"model={quantized}")
    assert "10 coding sessions" in found[0]
    assert not [line for line in found if "FP8 checkpoint" in line]
    plain = checkpoint(tmp_path / "p", 61_100_000_000)
    assert lines("sglang-agents:1", f"model={plain}")[0].startswith("warning: ")


def test_weights_that_the_engine_makes_fp8_count_as_such() -> None:
    found = lines("sglang-agents:1", 'flags=["--quantization", "fp8"]')
    assert "10 coding sessions" in found[0]
    assert not [line for line in found if "FP8 checkpoint" in line]


def test_a_share_of_memory_in_flags_counts_before_the_profiles() -> None:
    given = lines("sglang-agents:1", 'flags=["--mem-fraction-static=0.9"]')
    assert "4 coding sessions" in given[0]


def test_several_gpus_hold_the_weights_once() -> None:
    found = lines("sglang-agents:1", "workers.0.tensor_parallel=2")
    assert not found[0].startswith("warning: ")
    assert "20 coding sessions" in found[0]


def test_a_context_that_the_cache_does_not_hold_is_told() -> None:
    assert [line for line in lines("vllm:1") if "context_tokens is" in line]
    assert not [
        line for line in lines("vllm-agents:1", hardware="h200") if "context_tokens" in line
    ]


def test_what_is_not_known_before_it_runs_is_said_so_and_known_then() -> None:
    (said,) = lines("sglang-agents:1", "model=org/nobody-has-it")
    assert "not on this machine" in said
    known = lines("sglang-agents:1", "model=org/nobody-has-it", reported={"colocated-0": 840_000})
    assert "10 coding sessions" in known[0]
    (said,) = lines("sglang-agents:1", hardware=None)
    assert "hardware" in said


def test_prefill_workers_attached_ones_and_cpus_are_not_told_of() -> None:
    assert {line.split(":")[0].strip() for line in lines("sglang-pd:1p1d", hardware="h200")} == {
        "decode",
        "more",
    }
    assert lines("laptop-sglang", hardware=None) == []
    attached = 'workers=[{urls=["http://10.0.0.2:30020"]}]'
    assert lines("sglang:1", attached) == []


def test_launch_check_says_it(fake_python: Path) -> None:
    command = ["check", "sglang-agents:1", "--set", "hardware=h100", "--set", "base_port=0"]
    done = CliRunner().invoke(app, [*command, "--set", f"engine.python={fake_python}"])
    assert done.exit_code == 0, done.output
    assert "warning: colocated" in done.output
    assert "an FP8 checkpoint" in done.output
