"""The topology file: what is accepted, and what a mistake is answered with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deltaserve.errors import InputError
from launch.topology_files import catalog, load_topology


def one_line(error: pytest.ExceptionInfo[InputError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


def test_every_shipped_topology_loads_and_says_what_it_is_for() -> None:
    shipped = catalog()
    assert {"laptop-sglang", "laptop-sglang-pd", "laptop-vllm", "laptop-vllm-pd"} <= set(shipped)
    for name, description in shipped.items():
        assert load_topology(name).name == name
        assert description


def test_unknown_keys_are_answered_with_file_key_and_a_close_match(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'device = "cpu"\nmodel = "m"\nchunk_token = 5\n[engine]\nname = "sglang"\n[[workers]]\n'
    )
    with pytest.raises(InputError) as error:
        load_topology(file)
    message = one_line(error)
    assert message == f"{file}: chunk_token: unknown key (did you mean 'chunk_tokens'?)"


def test_unknown_keys_of_a_worker_name_the_worker() -> None:
    with pytest.raises(InputError) as error:
        load_topology("laptop-sglang-pd", ["workers.1.rolle=decode"])
    assert one_line(error) == (
        "--set workers.1.rolle=decode: workers.1.rolle: unknown key (did you mean 'role'?)"
    )


def test_unknown_topology_names_what_is_shipped() -> None:
    with pytest.raises(InputError, match=r"did you mean 'laptop-sglang-pd'\?"):
        load_topology("laptop-sglng-pd")


def test_missing_file_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "none.toml"
    with pytest.raises(InputError, match=re.escape(f"{missing}: cannot read")):
        load_topology(missing)


def test_broken_toml_names_the_line(tmp_path: Path) -> None:
    file = tmp_path / "broken.toml"
    file.write_text('device = "cpu"\nmodel = \n')
    with pytest.raises(InputError, match=r"not TOML.*line 2"):
        load_topology(file)


def test_overrides_are_toml_where_they_are_toml_and_text_otherwise() -> None:
    made = load_topology(
        "laptop-sglang-pd",
        [
            "workers.1.count=3",
            'workers.0.flags=["--max-running-requests", "8"]',
            "engine.python=/opt/sglang/bin/python",
            "router.params.threshold_tokens=8000",
            "telemetry=true",
        ],
    )
    assert made.workers[1].count == 3
    assert made.workers[0].flags == ("--max-running-requests", "8")
    assert made.engine.python == Path("/opt/sglang/bin/python")
    assert made.router.params == {"threshold_tokens": 8000}
    assert made.telemetry


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("page_size", "expected key=value"),
        ("page_size=0", "--set page_size=0: page_size: Input should be greater than 0"),
        ("workers.7.count=2", "expected an index from 0 to 1 or a role (prefill, decode): '7'"),
        ("workers.0.role=decode", 'a "decode" worker needs a "prefill" one'),
        ("workers.0.role=pre", "--set workers.0.role=pre: workers.0.role: Input should be"),
        ("workers.0.gpus=[0]", 'device is "cpu"'),
        ("gpus=[0, 1]", 'gpus: device is "cpu"'),
        ("device.x=1", "'device' has no keys"),
    ],
)
def test_a_wrong_override_is_answered_in_one_line(override: str, said: str) -> None:
    with pytest.raises(InputError) as error:
        load_topology("laptop-sglang-pd", [override])
    assert said in one_line(error)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("host_kv_gb=1e308", "host_kv_gb: expected at most 100,000 (100 TB: no host has more"),
        ("host_kv_gb=inf", "host_kv_gb: expected at most 100,000 (100 TB"),
        ("workers.0.host_kv_tokens=1000000000000", "host_kv_tokens: expected at most 10,000,000,0"),
        ("context_tokens=1000000000000", "context_tokens: expected at most 10,000,000,000 ("),
        ("ready_timeout_s=1e300", "ready_timeout_s: expected at most 31,622,400 (a year in sec"),
        ("sample_interval_s=inf", "sample_interval_s: expected at most 31,622,400 (a year in s"),
        ("workers.0.tensor_parallel=65536", "workers.0.tensor_parallel: expected at most 1,024 ("),
        ("cpu_threads=65536", "cpu_threads: expected at most 1,024 (no machine runs more"),
        ("max_prefill_tokens=1000000000000", "max_prefill_tokens: expected at most 10,000,000,0"),
        ("workers.0.count=65536", "workers: the ports of 65,536 of them, 20 each, end at 1,340,7"),
        ("workers.0.count=1777", "20 each, end at 65,546; there are 65,535: have fewer workers"),
    ],
)
def test_finite_numbers_that_no_fleet_can_have_are_refused_with_key_and_bound(
    override: str, said: str
) -> None:
    with pytest.raises(InputError) as error:
        load_topology("laptop-sglang", [override])
    assert said in one_line(error)


def test_a_fleet_has_as_many_workers_as_have_ports() -> None:
    assert load_topology("laptop-sglang", ["workers.0.count=1776"]).worker_count == 1776
    many = ", ".join(f'"http://a:{port}"' for port in range(1, 3001))
    attached = load_topology("laptop-sglang", [f"workers.0={{ urls = [{many}] }}"])
    assert attached.worker_count == 3000


def test_an_elastic_worker_has_a_radix_cache() -> None:
    with pytest.raises(InputError, match="decode_radix_cache: an elastic worker prefills from its"):
        load_topology("elastic-1p1d", ["decode_radix_cache=false"])
    assert not load_topology("pd-1p1d", ["decode_radix_cache=false"]).decode_radix_cache


@pytest.mark.parametrize("name", ["vllm-pd:1p1d", "vllm:1"])
def test_what_a_decode_worker_keeps_is_not_chosen_for_vllm(name: str) -> None:
    with pytest.raises(InputError) as error:
        load_topology(name, ["decode_radix_cache=false"])
    assert "decode_radix_cache: it is a key of SGLang's only" in one_line(error)
    assert load_topology(name, ["decode_radix_cache=true"]).decode_radix_cache


@pytest.mark.parametrize(
    ("name", "override", "said"),
    [
        ("laptop-vllm", "telemetry=true", "vllm writes none; it is a plugin of SGLang's"),
        (
            "laptop-sglang",
            'workers.0={ urls = ["http://a:1"] }',
            "attached workers write theirs where they were started",
        ),
        ("laptop-sglang", "workers.0.count=1", None),
    ],
)
def test_telemetry_that_nobody_writes_is_no_error_but_has_a_reason(
    name: str, override: str, said: str | None
) -> None:
    """Experiments switch it on for the arms of both engines."""
    assert load_topology(name, [override, "telemetry=true"]).why_no_telemetry == said
    assert load_topology(name, [override, "telemetry=false"]).why_no_telemetry is None


NO_URLS = """10.0.0.2:30020 foo http://a http://a:0 http://a:99999 http://a:x http://:1 https://a:1
tcp://a:1 http://a:1/v1 http://a:1?x http://u@a:1 http://10.0.0..2:1"""


@pytest.mark.parametrize("url", NO_URLS.split())
def test_an_attached_workers_url_is_what_the_router_takes(url: str) -> None:
    with pytest.raises(InputError, match=re.escape(f"expected http://HOST:PORT, not {url!r}")):
        load_topology("laptop-sglang", [f'workers.0={{ urls = ["http://a:1", "{url}"] }}'])


@pytest.mark.parametrize(
    "host", ["::1", "[::1]", "http://a", "a:1", "a b", "a/b", "-a", "ä", "10.0..1"]
)
def test_a_host_is_what_addresses_are_made_of(host: str) -> None:
    said = f"--set host={host}: host: expected a name or an IPv4 address, not {host!r}"
    with pytest.raises(InputError) as error:
        load_topology("laptop-sglang", [f"host={host}"])
    assert one_line(error) == said
    for right in ("0.0.0.0", "10.0.0.2", "node-3.cluster_1.local"):
        assert load_topology("laptop-sglang", [f"host={right}"]).host == right


def test_a_worker_is_attached_once() -> None:
    groups = '{ urls = ["http://a:1", "http://b:1"] }, { urls = ["http://b:1/"] }'
    with pytest.raises(InputError) as error:
        load_topology("laptop-sglang", [f"workers=[{groups}]"])
    assert one_line(error).endswith("workers.1.urls: http://b:1 is given twice")


def test_an_attached_workers_url_may_end_with_a_slash_and_be_of_ipv6() -> None:
    topology = load_topology("laptop-sglang", ['workers.0.urls=["http://a:1/", "http://[::1]:2"]'])
    assert topology.workers[0].urls == ("http://a:1", "http://[::1]:2")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["workers.0.gpus=[0]", "workers.1.gpus=[0]"], "workers.1.gpus: a GPU is given twice"),
        (["workers.0.gpus=[0]"], "workers: give gpus to every group or to none"),
        (["workers.0.gpus=[0, 1]"], "workers.0.gpus: 2 given, but count x tensor_parallel is 1"),
        (["gpus=[2, 2]"], "gpus: a GPU is given twice"),
        (["gpus=[2]"], "gpus: 1 given, but count x tensor_parallel is 2"),
        (["gpus=[-1, 0]"], "--set gpus=[-1, 0]: gpus.0: Input should be greater than or equal"),
        (["gpus=[2, 3]", "workers.0.gpus=[2]"], "gpus: give them to the topology or to its"),
        (["gpus=[2, 3]", "placement.kind=ray"], "gpus: Ray chooses the GPUs of workers that it"),
    ],
)
def test_gpus_that_do_not_suffice_or_are_given_twice_are_named(
    overrides: list[str], said: str
) -> None:
    with pytest.raises(InputError) as error:
        load_topology("pd-1p1d", overrides)
    assert said in one_line(error)


OLDER = {
    "colocated-4": ("sglang:4", {}),
    "colocated-8-mixed": ("sglang-mixed:8", {}),
    "pd-3p1d": ("sglang-pd:3p1d", {}),
    "elastic-1p7d": ("sglang-elastic:1p7d", {}),
    "vllm-2": ("vllm:2", {}),
    "vllm-8-eager": ("vllm:8", {"graphs": False}),
    "vllm-1-nixl-both": ("vllm:1", {"kv_connector": True}),
    "vllm-4-mooncake-both": (
        "vllm:4",
        {"kv_connector": True, "transfer_backend": "mooncake"},
    ),
    "vllm-pd-2p2d": ("vllm-pd:2p2d", {}),
}


@pytest.mark.parametrize("older", OLDER)
def test_older_names_mean_what_they_meant(older: str) -> None:
    now, keys = OLDER[older]
    expected = load_topology(now).model_copy(update={"name": older, **keys})
    assert load_topology(older) == expected


def test_a_size_is_part_of_the_name() -> None:
    made = load_topology("sglang-elastic:1p7d", ["workers.elastic.chunk_tokens=4096"])
    assert [(g.role, g.count, g.chunk_tokens) for g in made.workers] == [
        ("prefill", 1, None),
        ("elastic", 7, 4096),
    ]
    # A folder of this name is on PYTHONPATH, where a colon separates.
    assert made.name == "sglang-elastic-1p7d"
    assert load_topology("laptop-sglang:3").worker_count == 3
    assert load_topology("sglang").worker_count == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("sglang:1p1d", "sglang:1p1d: expected a number of workers, as in sglang:2"),
        ("sglang:0", "expected a number of workers"),
        ("sglang:", "expected a number of workers"),
        ("sglang-pd:4", "expected prefill and other workers, as in sglang-pd:1p3d"),
        ("sglng:4", "did you mean 'sglang'?"),
        ("vllm-2-lazy", "no topology 'vllm-2-lazy'"),
    ],
)
def test_a_wrong_size_is_answered_with_an_example(name: str, said: str) -> None:
    with pytest.raises(InputError) as error:
        load_topology(name)
    assert said in one_line(error)


def test_a_group_of_workers_is_named_by_its_role() -> None:
    made = load_topology("laptop-sglang-pd", ["workers.prefill.count=2", "workers.decode.count=3"])
    assert [(g.role, g.count) for g in made.workers] == [("prefill", 2), ("decode", 3)]
    with pytest.raises(InputError) as error:
        load_topology("laptop-sglang-pd", ["workers.prefill.count=0"])
    assert one_line(error).startswith("--set workers.prefill.count=0: workers.0.count: ")
    with pytest.raises(InputError, match=r"index from 0 to 1 or a role \(prefill, decode\): 'x'"):
        load_topology("laptop-sglang-pd", ["workers.x.count=2"])
    twice = ["workers=[{}, {}]", "workers.colocated.count=2"]
    with pytest.raises(InputError, match="several groups are 'colocated'; name one by its index"):
        load_topology("laptop-sglang", twice)


def test_a_file_extends_a_shipped_topology_or_another_file(tmp_path: Path) -> None:
    base, mine = tmp_path / "base.toml", tmp_path / "mine.toml"
    base.write_text(
        'extends = "sglang-pd:2p3d"\n[router]\npolicy = "selective"\n'
        "[workers.decode]\nflags = ['--x']\n"
    )
    mine.write_text(
        'extends = "base.toml"\nhost_kv_gb = 60\n[router.params]\na = 1\n'
        "[workers.prefill]\ncount = 1\n"
    )
    made = load_topology(mine)
    assert (made.name, made.description, made.host_kv_gb) == ("mine", "", 60)
    assert (made.router.policy, made.router.params) == ("selective", {"a": 1})
    assert [(g.role, g.count, g.flags) for g in made.workers] == [
        ("prefill", 1, ()),
        ("decode", 3, ("--x",)),
    ]
    mine.write_text('extends = "base.toml"\n[[workers]]\n')
    assert [group.role for group in load_topology(mine).workers] == ["colocated"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('extends = "sglng"', "mine.toml: extends: no topology 'sglng' (did you mean 'sglang'?)"),
        ('extends = "mine.toml"', "mine.toml extends "),
        ('extends = "../{here}/mine.toml"', "mine.toml extends "),
        ('extends = "gone.toml"', "gone.toml: cannot read the topology"),
        ("extends = 3", "extends: expected the name of a topology or a .toml file"),
        ('extends = "sglang"\n[workers.decode]\ncount = 2', "or a role (colocated): 'decode'"),
        ('extends = "sglang"\nchunk_token = 2', "did you mean 'chunk_tokens'?"),
        (
            'extends = "sglang-pd"\n[workers]\nprefill = 2',
            "mine.toml: workers.prefill: expected a table of its keys, not 2",
        ),
    ],
)
def test_a_wrong_extension_names_the_file(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "mine.toml").write_text(content.replace("{here}", tmp_path.name))
    with pytest.raises(InputError) as error:
        load_topology(tmp_path / "mine.toml")
    assert said in one_line(error)


def test_the_small_laptop_topologies_are_of_one_size() -> None:
    for name in ("laptop-sglang-1", "laptop-vllm-1"):
        made = load_topology(name)
        assert (made.worker_count, made.max_total_tokens) == (1, 40000)
        assert made.engine.name in name


@pytest.mark.parametrize("value", ["-1", "0.5", "1e10"])
def test_a_bound_of_logs_leaves_room_for_lines(value: str) -> None:
    with pytest.raises(InputError, match=r"log_max_mb: .*expected 0 \(no bound\), or from 1"):
        load_topology("laptop-sglang", [f"log_max_mb={value}"])
    assert load_topology("laptop-sglang", ["log_max_mb=0"]).log_max_bytes == 0
