"""The GPU plan, and the GPUs held against it (made up here: no GPU is needed)."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from deltaserve.errors import InputError
from launch import fleets, gpus, hardware, listing, sampling
from launch.engines import Engine
from launch.hardware import GpuSample, check_gpus
from launch.planning import Plan, layout, plan
from launch.reservations import reserved
from launch.topology import Topology
from launch.topology_files import catalog, load_topology
from tests.processes import wait_until

GIB = 2**30


def planned(name: str, *overrides: str) -> Plan:
    topology = load_topology(name, overrides)
    engine = Engine(topology.engine.name, Path("/e/bin/python"), {topology.engine.name: "1"})
    return layout(topology, Path("/run/x"), engine, 64)


SIZED = {
    "sglang:1": 1,
    "sglang:8": 8,
    "sglang-mixed:2": 2,
    "sglang-agents:3": 3,
    "sglang-pd:1p3d": 4,
    "sglang-elastic:1p7d": 8,
    "vllm:4": 4,
    "vllm-agents:2": 2,
    "vllm-pd:2p2d": 4,
}


@pytest.mark.parametrize(("name", "count"), SIZED.items())
def test_each_worker_of_a_gpu_topology_has_gpus_of_its_own(name: str, count: int) -> None:
    made = planned(name)
    assert len(made.workers) == count
    gpus = [gpu for worker in made.workers for gpu in worker.gpus]
    assert sorted(gpus) == list(range(count))
    for worker in made.workers:
        assert worker.environment["CUDA_VISIBLE_DEVICES"] == str(worker.gpus[0])
        assert made.gpu_plan[worker.gpus[0]] == worker.id


def test_tensor_parallel_workers_take_neighbouring_gpus_or_those_given() -> None:
    pair = ["workers.0.tensor_parallel=2", "workers.0.count=2"]
    assert [w.gpus for w in planned("colocated-4", *pair).workers] == [(0, 1), (2, 3)]
    given = planned("colocated-4", *pair, "workers.0.gpus=[7, 5, 3, 1]").workers
    assert [w.gpus for w in given] == [(7, 5), (3, 1)]
    assert given[0].environment["CUDA_VISIBLE_DEVICES"] == "7,5"


def test_topologies_share_a_machine_each_on_gpus_of_its_own() -> None:
    sglang, vllm = planned("pd-1p1d", "gpus=[1, 0]"), planned("vllm-pd-1p1d", "gpus=[2, 3]")
    assert [w.gpus for w in sglang.workers] == [(1,), (0,)]
    assert [w.environment["CUDA_VISIBLE_DEVICES"] for w in vllm.workers] == ["2", "3"]
    # Otherwise CUDA may count in another order than NVML, which is asked whether they are free.
    assert vllm.workers[0].environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    doubled = planned("pd-1p1d", "workers.1.tensor_parallel=2", "gpus=[5, 6, 7]")
    assert [w.gpus for w in doubled.workers] == [(5,), (6, 7)]
    part = ['workers.0={ role = "prefill", urls = ["http://a:1"], bootstrap_ports = [7] }']
    assert planned("pd-1p1d", *part, "gpus=[3]").gpu_plan == {3: "decode-0"}


def test_a_fleet_samples_its_own_gpus_and_tells_what_they_hold(
    fake_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = [gpu(0, used_gib=60), gpu(1), gpu(2, used_gib=60), gpu(3)]
    for module in (hardware, gpus, fleets, sampling):
        monkeypatch.setattr(module, "sample_gpus", lambda: there)
    overrides = [f"engine.python={fake_python}", "router.kind=none", "base_port=0", "gpus=[3, 1]"]
    sampled = tmp_path / "run" / "gpu.csv"
    with fleets.fleet(load_topology("colocated-2", overrides), tmp_path / "run"):
        wait_until(lambda: sampled.exists() and sampled.read_text().count("\n") >= 3)
    transcript = (tmp_path / "run" / "transcript.txt").read_text()
    assert transcript.count("GPUs 1, 3 (NVIDIA H200): 0.5, 0.5 GiB in use\n") == 2
    assert re.search(r"^colocated-0 .* s +- +3 +0\.5 GiB$", transcript, re.M)
    rows = sampled.read_text().splitlines()[1:]
    assert {row.split(",")[1] for row in rows} == {"1", "3"}


def test_a_gpu_belongs_to_one_fleet_at_a_time() -> None:
    taken = pytest.raises(InputError, match=r"GPU 1 belongs to another fleet .* or change gpus$")
    with reserved([], gpus=[0, 1]), reserved([], gpus=[2]), taken, reserved([], gpus=[1, 3]):
        pass
    with reserved([], gpus=[1]):
        pass


def test_connectors_graphs_and_mixing_become_the_engines_flags() -> None:
    both = planned("vllm-8-mooncake-both").workers[0].argv
    config = both[both.index("--kv-transfer-config") + 1]
    assert config == '{"kv_connector": "MooncakeConnector", "kv_role": "kv_both"}'
    assert "--enforce-eager" in planned("vllm-8-eager").workers[0].argv
    assert "--enforce-eager" not in planned("vllm-8").workers[0].argv
    assert "--enable-mixed-chunk" in planned("colocated-8-mixed").workers[0].argv
    rdma = planned("pd-4p4d", 'rdma_devices=["mlx5_0", "mlx5_1"]').workers[0].argv
    assert rdma[rdma.index("--disaggregation-ib-device") + 1] == "mlx5_0,mlx5_1"


def test_mooncake_is_told_of_nvlink_where_it_has_no_rdma_device() -> None:
    def told(topology: str, *overrides: str) -> list[bool]:
        workers = planned(topology, *overrides).workers
        return ["MC_INTRANODE_NVLINK" in worker.environment for worker in workers]

    mooncake = "transfer_backend=mooncake"
    assert told("elastic-1p1d", mooncake) == [True, True]
    assert told("elastic-1p1d", mooncake, 'rdma_devices=["mlx5_0"]') == [False, False]
    assert told("elastic-1p1d") == [False, False]
    decode = planned("elastic-1p1d", mooncake).workers[1].argv
    assert "--disaggregation-decode-enable-radix-cache" in decode


def test_prefill_graphs_are_captured_where_prompts_are_prefilled() -> None:
    def graphs(topology: str, *overrides: str) -> list[str]:
        workers = [worker.argv for worker in planned(topology, *overrides).workers]
        return [argv[argv.index("--cuda-graph-backend-prefill") + 1] for argv in workers]

    assert graphs("elastic-1p1d") == ["breakable", "breakable"]
    assert graphs("pd-1p1d") == ["breakable", "disabled"]
    assert graphs("colocated-1") == ["breakable"]
    # `--disable-cuda-graph` alone would not reach what is asked for by name.
    assert graphs("colocated-1", "graphs=false") == ["disabled"]


@pytest.mark.parametrize(
    ("name", "override", "said"),
    [
        ("vllm-8", "mixed_chunk=true", "mixed_chunk: vllm always mixes"),
        ("vllm-8", "workers.0.role=elastic", 'the role "elastic" is SGLang\'s only'),
        ("colocated-8", "kv_connector=true", "only for vllm workers"),
        ("colocated-8", "hardware=cpu", "hardware: cpu does not have device 'cuda'"),
        ("elastic-1p7d", "router.kind=smg", "smg knows no elastic workers"),
        ("colocated-8", "router.flags=['--x']", "router.flags: deltaserve has none"),
        ("vllm-8", "paced=true", "paced: it is a key of SGLang's only"),
        ("vllm-8", "prefill_decode_interval=2", "prefill_decode_interval: it is a key of SGLang's"),
        ("pd-1p7d", "paced=true", "paced: only for colocated workers, and there are none"),
        (
            "elastic-1p7d",
            "workers.1.paced=true",
            "workers.1.paced: only for colocated workers, not",
        ),
        ("colocated-8", "prefill_decode_interval=-1", "prefill_decode_interval: "),
        ("colocated-8", "max_prefill_tokens=0", "max_prefill_tokens: "),
        (
            "colocated-2",
            "environment.CUDA_VISIBLE_DEVICES=2,3",
            "environment.CUDA_VISIBLE_DEVICES: each worker is shown its own GPUs; gpus",
        ),
        (
            "vllm-pd-1p1d",
            "workers.decode.environment.CUDA_DEVICE_ORDER=FASTEST_FIRST",
            "workers.1.environment.CUDA_DEVICE_ORDER: each worker is shown",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(name: str, override: str, said: str) -> None:
    with pytest.raises(InputError) as error:
        planned(name, override)
    assert said in str(error.value)


@pytest.fixture
def found(fake_python: Path, tmp_path: Path) -> Callable[..., Topology]:
    """Plans a topology of fakes as `up` does and gives its topology as it was then found."""

    def make(name: str, *overrides: str) -> Topology:
        fake = [f"engine.python={fake_python}", "router.kind=none", "base_port=0"]
        return plan(load_topology(name, [*fake, *overrides]), tmp_path / "run").topology

    return make


def see(monkeypatch: pytest.MonkeyPatch, *there: GpuSample) -> None:
    monkeypatch.setattr(gpus, "sample_gpus", lambda: list(there))
    monkeypatch.setattr(hardware, "_uuids", lambda: [f"GPU-{at}b{at}-x" for at in range(4)])


@pytest.mark.parametrize(
    ("allowed", "gpus"),
    [("2,3", (2, 3)), ("3,2,0", (3, 2)), ("GPU-1b,GPU-3b3-x", (1, 3)), (None, (0, 1))],
)
def test_a_fleet_takes_only_gpus_that_were_granted_to_the_caller(
    found: Callable[..., Topology],
    monkeypatch: pytest.MonkeyPatch,
    allowed: str | None,
    gpus: tuple[int, ...],
) -> None:
    see(monkeypatch, *(gpu(at) for at in range(4)))
    if allowed is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
    assert found("sglang:2").gpus == gpus


@pytest.mark.parametrize(
    ("overrides", "asked"), [([], 1), (["gpus=[1]"], 1), (["gpus=[1]", "hardware=h200"], 0)]
)
def test_a_plan_asks_once_which_gpus_are_there_and_what_they_are(
    found: Callable[..., Topology],
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    asked: int,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    counted = Mock(return_value=[gpu(0), gpu(1)])
    for module in (hardware, gpus):
        monkeypatch.setattr(module, "sample_gpus", counted)
    assert found("sglang:1", *overrides).hardware == "h200"
    assert counted.call_count == asked


def test_a_fleet_takes_the_first_gpus_that_no_other_fleet_has(
    found: Callable[..., Topology], monkeypatch: pytest.MonkeyPatch
) -> None:
    see(monkeypatch, *(gpu(at) for at in range(4)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with reserved([], gpus=[0, 2]):
        assert found("sglang:2").gpus == (1, 3)
        assert found("sglang:1", "gpus=[0]").gpus == (0,)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,0")
        assert found("sglang:1").gpus == (3,)
        # The fleet that is in the way is named where it reserves them.
        assert found("sglang:2").gpus == (3, 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    see(monkeypatch)
    assert found("sglang:2").gpus == ()


def test_two_fleets_on_one_machine_get_gpus_and_ports_of_their_own(
    fake_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = [gpu(at) for at in range(2)]
    for module in (hardware, gpus, fleets, sampling):
        monkeypatch.setattr(module, "sample_gpus", lambda: there)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake = [f"engine.python={fake_python}", "router.kind=none", "base_port=0", "warm_up=false"]
    topology = load_topology("sglang:1", fake)
    with (
        fleets.fleet(topology, tmp_path / "a") as one,
        fleets.fleet(topology, tmp_path / "b") as other,
        pytest.raises(InputError, match=r"GPU 0 belongs to another fleet"),
        fleets.fleet(topology, tmp_path / "c"),
    ):
        pass
    assert [set(fleet.plan.gpu_plan) for fleet in (one, other)] == [{0}, {1}]
    assert not set(one.plan.ports) & set(other.plan.ports)


@pytest.mark.parametrize(
    ("allowed", "override", "said"),
    [
        ("1", "name=x", "topology x: 2 GPUs are needed; CUDA_VISIBLE_DEVICES allows 1"),
        ("", "name=x", "2 GPUs are needed; CUDA_VISIBLE_DEVICES allows none"),
        ("0,1,-1,3", "gpus=[1,3]", "gpus: GPU 3 is not among those that CUDA_VISIBLE_DEVICES"),
        ("2,3", "workers.0.gpus=[0,2]", "GPU 0 is not among those"),
        ("MIG-1", "name=x", "MIG instances are not supported"),
        ("GPU-9", "name=x", "allows none"),
    ],
)
def test_gpus_that_were_not_granted_are_refused(
    found: Callable[..., Topology],
    monkeypatch: pytest.MonkeyPatch,
    allowed: str,
    override: str,
    said: str,
) -> None:
    see(monkeypatch, *(gpu(at) for at in range(4)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
    with pytest.raises(InputError) as error:
        found("sglang:2", override)
    assert said in str(error.value)
    assert found("laptop-sglang").gpus == ()


def test_the_profile_is_that_of_the_gpus_that_are_there(
    found: Callable[..., Topology], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, kind in (
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA L4", "auto"),
    ):
        see(monkeypatch, gpu(0, name=name), gpu(1, name="NVIDIA L4"))
        assert found("sglang:1").hardware == kind
        assert found("sglang:1", "hardware=h20").hardware == "h20"
    see(monkeypatch, gpu(0), gpu(1, name="NVIDIA H20"))
    with pytest.raises(InputError, match=r"GPUs of different kinds \(NVIDIA H20, NVIDIA H200\)"):
        found("sglang:2")
    see(monkeypatch)
    assert found("sglang:2").hardware == "auto"


def test_an_unknown_gpu_is_left_to_the_engines_own_choice_of_attention() -> None:
    assert "--attention-backend" not in planned("sglang").workers[0].argv
    assert "--attention-backend" in planned("sglang", "hardware=h100").workers[0].argv
    with pytest.raises(InputError, match="hardware: expected one of: auto, a100, b200, cpu,"):
        load_topology("sglang", ["hardware=h300"])


def test_the_list_says_which_sizes_fit_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "sample_gpus", lambda: [gpu(at) for at in range(4)])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    kinds = {kind.name: kind for kind in listing.listing()}
    assert set(kinds) == set(catalog())
    assert kinds["sglang"].here.startswith("sglang:1 to sglang:3")
    assert kinds["vllm-pd"].here.startswith("vllm-pd:1p1d to vllm-pd:1p2d")
    assert kinds["laptop-vllm"].fits
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    kinds = {kind.name: kind for kind in listing.listing()}
    assert (kinds["vllm-pd"].fits, kinds["vllm-pd"].here) == (False, "needs 2 GPUs; 1 here")


def gpu(index: int, *, name: str = "NVIDIA H200", used_gib: float = 0.5) -> GpuSample:
    return GpuSample(index, name, 0, int(used_gib * GIB), 140 * GIB, 75.0, 0, 0)


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ([], "there is no NVIDIA driver here"),
        ([gpu(0)], "decode-0 needs GPU 1; there are 1"),
        ([gpu(0), gpu(1, name="NVIDIA H20")], "hardware is 'h200', but GPU 1 is a NVIDIA H20"),
        ([gpu(0), gpu(1, used_gib=60)], "GPU 1 is not free: 60.0 GiB in use"),
    ],
)
def test_gpus_that_are_missing_other_or_busy_are_named(
    there: list[GpuSample], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "sample_gpus", lambda: there)
    monkeypatch.setattr(hardware, "_FREE_WITHIN_S", 0.0)
    monkeypatch.setattr(hardware, "_users", lambda _: "")
    with pytest.raises(InputError) as error:
        check_gpus({0: "prefill-0", 1: "decode-0"}, "h200", "pd.toml")
    assert said in str(error.value)


def test_memory_that_a_fleet_is_still_giving_back_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = iter([[gpu(0, used_gib=60)], [gpu(0)]])
    monkeypatch.setattr(hardware, "sample_gpus", lambda: next(seen))
    check_gpus({0: "colocated-0"}, "h200", "colocated.toml")
    assert next(seen, None) is None


def test_what_keeps_a_clock_down_is_named() -> None:
    class Nvml:
        NVMLError = RuntimeError
        NVML_CLOCK_SM = 1

        def __init__(self, bits: int | None) -> None:
            self.bits = bits

        def nvmlDeviceGetCurrentClocksThrottleReasons(self, _handle: object) -> int:
            if self.bits is None:
                raise RuntimeError("not supported")
            return self.bits

    # 0x1 is an idle GPU and 0x2 clocks that somebody set: no throttling.
    found = [hardware._throttled_by(Nvml(bits), None) for bits in (0x3, 0x24, None)]
    assert found == ["", "power+thermal", None]
