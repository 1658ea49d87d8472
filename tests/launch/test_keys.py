"""Engines that ask for a key get it from launch and from our router, and it stands in no file."""

from __future__ import annotations

import json
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from deltaserve.errors import InputError
from launch import fleet, keys, plan
from launch.keep import KeptWorkers
from launch.keys import CLIENTS, Keys, engine_keys, router_environment, router_keys
from launch.topology_files import load_topology
from tests.processes import wait_until, working_in

from .conftest import Fakes

KEY, ADMIN, OTHER = "sk-the-engines-own", "sk-the-administrators", "sk-another"


@pytest.fixture(autouse=True)
def nobodys_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (CLIENTS, "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def asked(url: str, path: str, key: str | None) -> int:
    headers = {"content-type": "application/json"}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    body = json.dumps({"input_ids": [1, 2, 3]}).encode()
    request = urllib.request.Request(url + path, body, headers)
    try:
        with urllib.request.urlopen(request, timeout=30.0) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_fleet_whose_engines_ask_for_a_key_is_warmed_up_and_served(
    fakes: Fakes, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    given = (
        f'flags=["--api-key", "{KEY}", "--admin-api-key", "{ADMIN}"]',
        "router.kind=deltaserve",
        "chunk_tokens=512",
        "warm_up=true",
        "environment.FAKE_KV_TOKENS=4321",
    )
    with fleet(fakes("serve", "serve", overrides=given), run_dir) as running:
        running.flush_caches()
        assert running.router_url is not None
        assert asked(running.router_url, "/generate", KEY) == 200
        # Who could not ask an engine cannot do so by asking the router.
        for key in (None, OTHER):
            assert asked(running.router_url, "/generate", key) == 401
        log = running.workers[0].log
        wait_until(lambda: log.read_text().count("asked /flush_cache") == 2)
        commands = {word for process in working_in(run_dir) for word in process.cmdline()}
        ours = [p for p in working_in(run_dir) if "route" in p.cmdline()]
        assert any(p.environ().get("DELTASERVE_COLOCATED_0_API_KEY") == KEY for p in ours)
    for name in ("colocated-0", "colocated-1"):
        said = (run_dir / "logs" / f"{name}.log").read_text()
        assert "refused" not in said
        assert "asked /freeze_gc" in said
    config = tomllib.loads((run_dir / "router.toml").read_text())
    for worker in config["workers"]:
        assert worker["api_key"].startswith("env:DELTASERVE_COLOCATED_")
        # It was asked, and with the key.
        assert worker["kv_capacity_tokens"] == 4321
    for file in (path for path in run_dir.rglob("*") if path.is_file()):
        for secret in (KEY, ADMIN):
            assert secret not in file.read_text(errors="replace"), file
    # An engine's own command line has what its flags say; no other has.
    assert {word for word in commands if "sk-" in word} == {KEY, ADMIN}


def test_a_vllm_worker_may_have_its_key_in_its_environment(
    fake_python: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    given = [f"engine.python={fake_python}", "base_port=0", f"environment.VLLM_API_KEY={KEY}"]
    with fleet(load_topology("laptop-vllm-pd", [*given, "warm_up=true"]), run_dir) as running:
        assert running.timings["warm_up_s"] > 0
        commands = {word for process in working_in(run_dir) for word in process.cmdline()}
    assert KEY not in commands
    for file in (path for path in run_dir.rglob("*") if path.is_file()):
        assert KEY not in file.read_text(errors="replace"), file
    assert "refused" not in (run_dir / "logs" / "prefill-0.log").read_text()


def test_kept_workers_are_asked_with_their_key_behind_each_router(
    fakes: Fakes, tmp_path: Path
) -> None:
    given = (f'flags=["--api-key", "{KEY}"]', "router.kind=deltaserve", "warm_up=true")
    kept = KeptWorkers(tmp_path / "kept")
    try:
        for number in (1, 2):
            with kept.fleet(fakes("serve", overrides=given), tmp_path / f"run{number}") as front:
                assert front.router_url is not None
                assert asked(front.router_url, "/generate", KEY) == 200
                log = front.workers[0].log
    finally:
        kept.close()
    assert "refused" not in log.read_text()


@pytest.mark.parametrize(
    ("name", "given", "found", "admin"),
    [
        ("laptop-sglang", (), (), None),
        ("laptop-sglang", ('flags=["--api-key=a"]',), ("a",), None),
        ("laptop-sglang", ('flags=["--api-key", "a", "--api-key", "b"]',), ("b",), None),
        ("laptop-sglang", ('flags=["--admin-api-key", "c"]',), (), "c"),
        ("laptop-sglang", ("environment.VLLM_API_KEY=a",), (), None),
        ("laptop-vllm", ('flags=["--api-key", "a", "b", "--seed", "1"]',), ("a", "b"), None),
        ("laptop-vllm", ('flags=["--api_key", "a"]', "environment.VLLM_API_KEY=b"), ("a",), None),
        ("laptop-vllm", ("environment.VLLM_API_KEY=b",), ("b",), None),
    ],
)
def test_a_key_is_found_where_the_engine_finds_it(
    name: str, given: tuple[str, ...], found: tuple[str, ...], admin: str | None
) -> None:
    topology = load_topology(name, given)
    keys = engine_keys(topology, topology.workers[0])
    assert (keys.keys, keys.admin_key) == (found, admin)
    assert keys.key == (found[0] if found else None)
    assert keys.to_change == (admin or keys.key)
    assert not any(key in repr(keys) for key in found if len(key) > 1)


def test_a_groups_own_key_comes_after_the_topologys() -> None:
    given = ['flags=["--api-key", "a"]', 'workers.decode.flags=["--api-key", "b"]']
    topology = load_topology("laptop-sglang-pd", given)
    assert [engine_keys(topology, group).keys for group in topology.workers] == [("a",), ("b",)]


def test_whom_the_router_serves_is_left_to_whoever_has_said_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = {"prefill-0": Keys((KEY,)), "decode-0": Keys((KEY, OTHER)), "decode-1": Keys()}
    told = router_environment("x", workers)
    assert told == {
        "DELTASERVE_PREFILL_0_API_KEY": KEY,
        "DELTASERVE_DECODE_0_API_KEY": KEY,
        CLIENTS: f"{KEY},{OTHER}",
    }
    assert router_keys(told).keys == (KEY, OTHER)
    assert router_environment("x", {"decode-1": Keys()}) == {}
    with pytest.raises(InputError, match="x: --api-key: our router takes no key with a comma"):
        router_environment("x", {"w": Keys(("a,b",))})
    with pytest.raises(InputError, match="x: --api-key: our router takes keys of 8 to 512"):
        router_environment("x", {"w": Keys(("short",))})
    monkeypatch.setenv(CLIENTS, "one, two")
    told = router_environment("x", workers)
    assert CLIENTS not in told
    assert router_keys(told).keys == ("one", "two")
    assert keys.variable("colocated-0") == "DELTASERVE_COLOCATED_0_API_KEY"


@pytest.mark.parametrize("nothing", ["", ",", " , \n"])
@pytest.mark.parametrize("flags", ["[]", f'["--api-key", "{KEY}"]'])
def test_a_fleet_does_not_start_where_the_variable_for_clients_keys_has_none(
    nothing: str, flags: str, fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CLIENTS, nothing)
    given = (f"flags={flags}", "router.kind=deltaserve")
    with (
        pytest.raises(InputError, match=f"^{CLIENTS}: expected keys, .* found none"),
        fleet(fakes("serve", overrides=given), tmp_path / "run"),
    ):
        pass
    assert not list(tmp_path.glob("run/logs/*"))


def test_a_clients_key_that_our_router_does_not_take_is_found_before_a_worker_starts(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology = fakes("serve", overrides=("router.kind=deltaserve",))
    plan(topology, tmp_path / "before")  # what the router said then is not what it says now
    monkeypatch.setenv(CLIENTS, "short")
    with (
        pytest.raises(InputError, match=f"{CLIENTS}: expected a key of 8 to 512") as raised,
        fleet(topology, tmp_path / "run"),
    ):
        pass
    assert "short" not in str(raised.value)
    assert not list(tmp_path.glob("run/logs/*"))
