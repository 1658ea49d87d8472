"""A worker's KV cache: its size, type, eviction and host tier become each engine's flags."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from deltaserve.errors import InputError
from launch import fleet
from launch.capacity import Holds, reported
from launch.commands import routers
from launch.engines import Engine
from launch.kv import worker_kv
from launch.planning import Plan, layout, router_config
from launch.topology_files import load_topology

from .conftest import Fakes

KV_BYTES = 98_304  # of a token of qwen3-coder-30b-a3b in bfloat16


def planned(name: str, *overrides: str) -> Plan:
    topology = load_topology(name, overrides)
    engine = Engine(topology.engine.name, Path("/e/bin/python"), {topology.engine.name: "1"})
    return layout(topology, Path("/run/x"), engine, 64)


def value_of(argv: Sequence[str], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def told(made: Plan) -> list[dict[str, object]]:
    workers: list[dict[str, object]] = tomllib.loads(router_config(made))["workers"]
    return workers


def test_a_host_tier_in_tokens_is_a_ratio_of_sglangs_own_pool() -> None:
    made = planned("colocated-2", "max_total_tokens=280000", "host_kv_tokens=700000")
    for worker, spec in zip(made.workers, told(made), strict=True):
        assert "--enable-hierarchical-cache" in worker.argv
        assert value_of(worker.argv, "--hicache-ratio") == "2.5"
        assert value_of(worker.argv, "--hicache-write-policy") == "write_through"
        assert value_of(worker.argv, "--hicache-io-backend") == "kernel"
        assert value_of(worker.argv, "--hicache-mem-layout") == "layer_first"
        assert value_of(worker.argv, "--page-size") == "64"
        assert (spec["kv_capacity_tokens"], spec["host_kv_tokens"]) == (280000, 700000)
        assert spec["page_size"] == 64


def test_a_host_tier_in_gb_is_told_to_the_router_in_tokens_of_the_models_kv() -> None:
    made = planned("colocated-1", "host_kv_gb=60")
    argv = made.workers[0].argv
    assert value_of(argv, "--hicache-size") == "60"
    assert "--hicache-ratio" not in argv
    assert told(made)[0]["host_kv_tokens"] == 60 * 10**9 // KV_BYTES
    fp8 = planned("colocated-1", "host_kv_gb=60", "kv_cache_dtype=fp8_e4m3")
    assert told(fp8)[0]["host_kv_tokens"] == 60 * 10**9 // (KV_BYTES // 2)
    assert value_of(fp8.workers[0].argv, "--kv-cache-dtype") == "fp8_e4m3"
    # SGLang's flag is of one GPU.
    pair = planned("colocated-1", "host_kv_gb=60", "workers.0.tensor_parallel=2")
    assert value_of(pair.workers[0].argv, "--hicache-size") == "30"


def test_on_a_cpu_pages_stay_at_one_token() -> None:
    made = planned("laptop-sglang-1", "host_kv_tokens=160000")
    argv = made.workers[0].argv
    assert value_of(argv, "--hicache-ratio") == "4"
    assert value_of(argv, "--page-size") == "1"
    assert told(made)[0]["page_size"] == 1


def test_colocated_gpu_workers_that_publish_kv_events_have_long_pages() -> None:
    # The scheduler makes an event a page: 100,000 for a long prompt with pages of one token.
    made = planned("colocated-1", "kv_events=true")
    assert value_of(made.workers[0].argv, "--page-size") == "64"
    assert told(made)[0]["page_size"] == 64
    asked = planned("colocated-1", "kv_events=true", "page_size=1")
    assert value_of(asked.workers[0].argv, "--page-size") == "1"
    for name in ("colocated-1", "laptop-sglang-1"):  # no events; a CPU
        overrides = ["kv_events=true"] if name.startswith("laptop") else []
        worker = planned(name, *overrides)
        assert "--page-size" not in worker.workers[0].argv
        assert told(worker)[0]["page_size"] == 1


@pytest.mark.parametrize("name", ["elastic-1p1d", "pd-1p1d"])
def test_gpu_workers_that_send_each_other_kv_have_long_pages(name: str) -> None:
    made = planned(name)
    assert [value_of(worker.argv, "--page-size") for worker in made.workers] == ["64", "64"]
    assert [spec["page_size"] for spec in told(made)] == [64, 64]
    asked = planned(name, "page_size=1")
    assert [value_of(worker.argv, "--page-size") for worker in asked.workers] == ["1", "1"]


def test_a_host_tier_without_a_known_pool_is_rounded_up_to_whole_gb() -> None:
    topology = load_topology("colocated-1", ["host_kv_tokens=700000"])
    topology = topology.model_copy(update={"max_total_tokens": None})
    made = layout(topology, Path("/run/x"), Engine("sglang", Path("/e"), {"sglang": "1"}), 64)
    assert value_of(made.workers[0].argv, "--hicache-size") == "69"  # of 68.8
    unknown = topology.model_copy(update={"model": "/models/unknown"})
    with pytest.raises(InputError, match=r"host_kv_tokens: SGLang takes whole GB a GPU, or max_to"):
        layout(unknown, Path("/run/x"), Engine("sglang", Path("/e"), {"sglang": "1"}), 64)


def test_vllms_host_tier_is_in_gib_over_all_gpus_of_a_worker() -> None:
    made = planned("vllm-2", "host_kv_tokens=1048576")
    argv = made.workers[0].argv
    assert float(value_of(argv, "--kv-offloading-size")) == 96.0
    assert value_of(argv, "--kv-offloading-backend") == "native"
    assert value_of(argv, "--block-size") == "16"
    assert told(made)[0]["host_kv_tokens"] == 1048576
    gb = planned("vllm-2", "host_kv_gb=60", "kv_cache_dtype=fp8_e5m2").workers[0].argv
    assert float(value_of(gb, "--kv-offloading-size")) == pytest.approx(60e9 / 2**30, rel=1e-5)
    assert value_of(gb, "--kv-cache-dtype") == "fp8_e5m2"
    with pytest.raises(InputError, match=r"host_kv_tokens: the bytes a token of org/model are not"):
        planned("vllm-2", "host_kv_tokens=1000", "model=org/model")


def test_eviction_and_scheduling_are_sglangs_flags() -> None:
    argv = planned("colocated-1", "radix_eviction_policy=slru", "schedule_policy=lpm").workers[0]
    assert value_of(argv.argv, "--radix-eviction-policy") == "slru"
    assert value_of(argv.argv, "--schedule-policy") == "lpm"
    plain = planned("colocated-1").workers[0].argv
    for flag in (
        "--radix-eviction-policy",
        "--schedule-policy",
        "--kv-cache-dtype",
        "--enable-hierarchical-cache",
        "--page-size",
    ):
        assert flag not in plain


def test_a_groups_keys_win_over_the_topologys() -> None:
    made = planned(
        "elastic-1p1d",
        "host_kv_gb=60",
        "workers.1.host_kv_tokens=0",
        "workers.0.radix_eviction_policy=lfu",
    )
    prefill, elastic = made.workers
    assert "--enable-hierarchical-cache" in prefill.argv
    assert "--enable-hierarchical-cache" not in elastic.argv
    assert "--radix-eviction-policy" in prefill.argv
    assert "--radix-eviction-policy" not in elastic.argv
    assert [spec.get("page_size") for spec in told(made)] == [64, 64]
    assert "host_kv_tokens" not in told(made)[1]


@pytest.mark.parametrize("override", ["host_kv_gb=1", "workers.1.host_kv_tokens=9"])
def test_an_elastic_worker_may_have_a_host_tier(override: str) -> None:
    made = planned("elastic-1p1d", "max_total_tokens=9", override)
    assert "--enable-hierarchical-cache" in made.workers[1].argv


@pytest.mark.parametrize(
    ("name", "overrides", "said"),
    [
        ("colocated-1", ["host_kv_gb=1", "host_kv_tokens=1"], "give it or host_kv_gb, not both"),
        ("vllm-pd-1p1d", ["host_kv_gb=1"], "vllm takes one connector a worker"),
        ("vllm-2-nixl-both", ["host_kv_gb=1"], "vllm takes one connector a worker"),
        ("laptop-vllm", ["host_kv_tokens=9"], "vllm offloads KV from GPUs only"),
        ("vllm-2", ["schedule_policy=lpm"], "schedule_policy: it is a key of SGLang's only"),
        ("colocated-1", ["kv_cache_dtype=fp8"], "kv_cache_dtype: Input should be 'auto',"),
        ("colocated-1", ["router.kind=smg", "router.admission.rule=cap"], "router.admission: smg"),
    ],
)
def test_what_an_engine_cannot_do_is_refused_in_one_line(
    name: str, overrides: list[str], said: str
) -> None:
    with pytest.raises(InputError) as error:
        load_topology(name, overrides)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "overrides", "said"),
    [
        (
            "laptop-sglang-pd",
            ["workers.prefill.page_size=16"],
            "workers.1: page_size is 1 there and 16 in workers.0",
        ),
        (
            "sglang-elastic:1p2d",
            ["workers.elastic.page_size=1"],
            "workers.1: page_size is 1 there and 64 in workers.0",
        ),
        (
            "sglang-pd:1p1d",
            ["kv_cache_dtype=fp8_e4m3", "workers.decode.kv_cache_dtype=auto"],
            "workers.1: kv_cache_dtype is auto there and fp8_e4m3 in workers.0",
        ),
    ],
)
def test_workers_of_sglang_that_send_each_other_kv_keep_it_alike(
    name: str, overrides: list[str], said: str
) -> None:
    with pytest.raises(InputError) as error:
        planned(name, *overrides)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_workers_that_need_not_keep_kv_alike_may_differ() -> None:
    groups = 'workers=[{ page_size = 1 }, { page_size = 16, kv_cache_dtype = "fp8_e4m3" }]'
    assert len(planned("sglang:1", groups).workers) == 2
    # The same by default and by key.
    assert planned("sglang-pd:1p1d", "workers.prefill.page_size=64").workers
    assert planned("vllm-pd:1p1d", "workers.prefill.page_size=32").workers


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}, 2 * 2 * 4 * 16 * 2),
        (
            {
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 1,
                "head_dim": 32,
                "layer_types": ["full_attention"] * 2,
            },
            2 * 2 * 1 * 32 * 2,
        ),
        (
            {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8, "kv_lora_rank": 1},
            None,
        ),
        (
            {
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "head_dim": 8,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            None,
        ),
        (None, None),
    ],
)
def test_bytes_a_token_are_of_the_models_configuration(
    tmp_path: Path, config: dict[str, object] | None, expected: int | None
) -> None:
    if config:
        (tmp_path / "config.json").write_text(json.dumps(config))
    topology = load_topology("colocated-1", [f"model={tmp_path}"])
    assert worker_kv(topology, topology.workers[0]).bytes_per_token == expected


def test_the_admission_rule_reaches_the_routers_file_and_is_asked_of_the_router(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = planned("colocated-1", 'router.admission={ rule = "cap", sessions = 3 }')
    config = tomllib.loads(router_config(made))
    assert config["admission"] == {"rule": "cap", "sessions": 3}
    assert "admission" not in tomllib.loads(router_config(planned("colocated-1")))
    asked: list[dict[str, object]] = []

    def refuse(argv: Sequence[str], *_: object, **__: object) -> str:
        file = Path(value_of(argv, "--config"))
        asked.append(tomllib.loads(file.read_text()))
        return f"error: {file}:2: admission: sessions: expected 1 or more"

    monkeypatch.setattr(routers, "refusal", refuse)
    assert routers.our_refusal(config, {}) == "router.admission: sessions: expected 1 or more"
    assert asked == [{"admission": {"rule": "cap", "sessions": 3}}]


def test_the_router_is_told_what_workers_really_hold(fakes: Fakes, tmp_path: Path) -> None:
    groups = '[{ environment = { FAKE_KV_TOKENS = "90000" } }, { max_total_tokens = 5000 }]'
    topology = fakes("serve", overrides=(f"workers={groups}", "router.kind=deltaserve"))
    with fleet(topology, tmp_path / "run") as running:
        assert running.plan.topology.max_total_tokens == 131072
    config = tomllib.loads((tmp_path / "run" / "router.toml").read_text())
    assert [worker["kv_capacity_tokens"] for worker in config["workers"]] == [90000, 5000]
    record = json.loads((tmp_path / "run" / "fleet.json").read_text())
    assert [p.get("kv_capacity_tokens") for p in record["processes"]] == [90000, 5000, None]
    transcript = (tmp_path / "run" / "transcript.txt").read_text()
    assert "colocated-0: holds 90,000 KV tokens, not the 131,072 asked for" in transcript
    assert re.search(r"^colocated-0 .* s +90,000 +- +-$", transcript, re.M)


def test_vllms_capacity_is_blocks_times_tokens_a_block(fake_python: Path, tmp_path: Path) -> None:
    fake = [f"engine.python={fake_python}", "router.kind=none", "base_port=0"]
    with fleet(load_topology("laptop-vllm-1", fake), tmp_path / "run"):
        record = json.loads((tmp_path / "run" / "fleet.json").read_text())
    assert record["processes"][0]["kv_capacity_tokens"] == 40000
    assert reported("vllm", "http://127.0.0.1:1") == Holds()


def test_the_router_is_told_what_a_host_tier_really_holds(fakes: Fakes, tmp_path: Path) -> None:
    """As SGLang says, else as bytes a token say; where neither does, the transcript tells."""
    tier = "host_kv_gb = 1, page_size = 64"
    said = f'{{ environment = {{ FAKE_HOST_TOKENS = "777000" }}, {tier} }}'
    topology = fakes("serve", overrides=(f"workers=[{said}, {{ {tier} }}]", f"model={tmp_path}"))
    topology = topology.model_copy(update={"load_format": "dummy"})
    (tmp_path / "config.json").write_text('{"kv_lora_rank": 512}')
    with fleet(topology, tmp_path / "run"):
        pass
    record = json.loads((tmp_path / "run" / "fleet.json").read_text())
    assert [p.get("host_kv_tokens") for p in record["processes"]] == [777000, None]
    transcript = (tmp_path / "run" / "transcript.txt").read_text()
    assert "colocated-1: how many tokens its host tier holds is not known" in transcript
    assert "colocated-0: how many" not in transcript


@pytest.mark.parametrize(
    ("name", "tokens"), [("laptop-sglang", 2 * 131_072), ("laptop-vllm-1", 40_000)]
)
def test_of_data_parallel_ranks_all_are_counted_and_it_is_told_what_is_not_known(
    fake_python: Path, tmp_path: Path, name: str, tokens: int
) -> None:
    fake = [f"engine.python={fake_python}", "router.kind=none", "base_port=0", "workers.0.count=1"]
    ranks = 'workers.0.environment={ FAKE_RANKS = "2", FAKE_KV_TOKENS = "131072" }'
    told: list[str] = []
    with fleet(load_topology(name, [*fake, ranks]), tmp_path / "run", told.append):
        record = json.loads((tmp_path / "run" / "fleet.json").read_text())
    assert record["processes"][0]["kv_capacity_tokens"] == tokens
    (warning,) = (line for line in told if line.startswith("warning: "))
    assert "colocated-0: 2 data-parallel ranks, each with a KV cache of its own" in warning
    assert f"{tokens:,} tokens" in warning


def test_every_engine_serves_the_model_by_the_same_name() -> None:
    for name in ("laptop-sglang", "laptop-vllm"):
        argv = planned(name).workers[0].argv
        assert value_of(argv, "--served-model-name") == "tiny-qwen3-moe"
        argv = planned(name, "model=/models/Qwen3-8B").workers[0].argv
        assert value_of(argv, "--served-model-name") == "Qwen3-8B"
        argv = planned(name, "served_model_name=mine").workers[0].argv
        assert value_of(argv, "--served-model-name") == "mine"


def test_sglang_streams_only_what_is_new_unless_told_otherwise() -> None:
    assert "--incremental-streaming-output" in planned("colocated-1").workers[0].argv
    off = planned("colocated-1", "incremental_streaming_output=false").workers[0].argv
    assert "--incremental-streaming-output" not in off
