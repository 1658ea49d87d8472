"""Attached workers, stock routers, samples."""

from __future__ import annotations

import csv
import http.server
import json
import socket
import threading
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltaserve.errors import InputError
from launch import FleetError, control, fleet
from launch.engines import Engine
from launch.models import shape_folder
from launch.planning import Plan, layout, plan, router_config
from launch.sampling import Engines, Sampler
from launch.topology import Topology
from launch.topology_files import load_topology
from tests.processes import wait_until

from .conftest import Fakes

SGLANG = Engine("sglang", Path("/opt/sglang/bin/python"), {"sglang": "0.5.23"})


def made(topology: Topology) -> Plan:
    return layout(topology, Path("/run/x"), SGLANG, 4)


class _Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def elsewhere() -> Iterator[str]:
    """The URL of a worker that was started by somebody else."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Health)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_an_attached_worker_is_used_but_neither_started_nor_ended(
    elsewhere: str, tmp_path: Path
) -> None:
    topology = load_topology(
        "laptop-sglang", [f'workers=[{{ urls = ["{elsewhere}"] }}]', "router.kind=none"]
    )
    with fleet(topology, tmp_path / "run") as running:
        (worker,) = running.workers
        assert (worker.url, worker.pid) == (elsewhere, None)
        (shown,) = control.status(tmp_path / "run").processes
        assert shown.state == "ready"
    again = fleet(topology, tmp_path / "run")
    with again as running:
        assert running.workers


def test_an_attached_worker_that_does_not_answer_is_named_with_its_url_and_why(
    tmp_path: Path,
) -> None:
    with socket.socket() as unheard:  # bound, so that nobody else answers there
        unheard.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unheard.getsockname()[1]}"
        overrides = [f'workers=[{{ urls = ["{url}"] }}]', "router.kind=none", "ready_timeout_s=0.1"]
        topology = load_topology("laptop-sglang", overrides)
        with (
            pytest.raises(FleetError, match=rf"colocated-0 .*: {url}/health: .*refused") as error,
            fleet(topology, tmp_path / "run"),
        ):
            pass
    assert "the end of" not in str(error.value)  # it has no log here


def test_attached_prefill_workers_are_told_apart_by_their_bootstrap_ports() -> None:
    attached = '{ role = "prefill", urls = ["http://a:1", "http://b:1"], bootstrap_ports = [7, 8] }'
    topology = load_topology(
        "laptop-sglang-pd",
        [f'workers=[{attached}, {{ role = "decode", urls = ["http://c:1"] }}]'],
    )
    workers = tomllib.loads(router_config(made(topology)))["workers"]
    assert [(w["id"], w.get("bootstrap_host"), w.get("bootstrap_port")) for w in workers] == [
        ("prefill-0", "a", 7),
        ("prefill-1", "b", 8),
        ("decode-0", None, None),
    ]
    with pytest.raises(InputError, match=r"workers\.0\.bootstrap_ports: one a url is needed"):
        load_topology("laptop-sglang-pd", ['workers.0={ role = "prefill", urls = ["http://a:1"] }'])


def test_attached_workers_of_vllm_over_mooncake_need_bootstrap_ports_too() -> None:
    mooncake = ["transfer_backend=mooncake", 'workers.decode.urls=["http://b:1"]']
    urls = [*mooncake, 'workers.prefill.urls=["http://a:1"]']
    with pytest.raises(InputError, match=r"workers\.0\.bootstrap_ports: one a url is needed"):
        load_topology("laptop-vllm-pd", urls)
    ports = ["workers.prefill.bootstrap_ports=[7]", "workers.decode.bootstrap_ports=[8]"]
    topology = load_topology("laptop-vllm-pd", [*urls, *ports])
    engine = Engine("vllm", Path(), {"vllm": "0.33.0"})
    config = tomllib.loads(router_config(layout(topology, Path("/run/x"), engine, 4)))
    assert [worker["bootstrap_port"] for worker in config["workers"]] == [7, 8]
    over_nixl = [*urls[1:], *ports, "transfer_backend=nixl"]
    with pytest.raises(InputError, match=r"workers\.0\.bootstrap_ports: for attached prefill"):
        load_topology("laptop-vllm-pd", over_nixl)


def test_a_stock_router_is_told_each_workers_role_and_bootstrap_port() -> None:
    stock = ["router.kind=sglang-router", "router.policy=cache_aware"]
    planned = made(load_topology("laptop-sglang-pd", stock))
    prefill, decode = planned.workers
    assert planned.router is not None
    argv = " ".join(planned.router.argv)
    assert f"--prefill {prefill.url} {prefill.ports['bootstrap']} --decode {decode.url}" in argv
    assert "--pd-disaggregation" in argv
    assert "--policy cache_aware" in argv
    colocated = made(load_topology("laptop-sglang", ["router.kind=smg"]))
    assert colocated.router is not None
    urls = [worker.url for worker in colocated.workers]
    at = colocated.router.argv.index("--worker-urls")
    assert list(colocated.router.argv[at + 1 :]) == urls


TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"},
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder with a tokenizer that takes each word for a token."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    return folder


def test_our_router_counts_text_by_the_tokenizer_of_the_models_folder(
    fakes: Fakes, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # processes run elsewhere
    topology = fakes("serve", overrides=("router.kind=deltaserve", "model=./model"))
    run_dir = tmp_path / "run"
    with fleet(topology, run_dir) as running:
        assert str(model) in running.plan.workers[0].argv
        body = json.dumps({"text": "how many words are these"}).encode()
        headers = {"content-type": "application/json"}
        asked = urllib.request.Request(f"{running.router_url}/generate", body, headers)
        urllib.request.urlopen(asked, timeout=30.0).close()
    first, *_ = (run_dir / "decisions.jsonl").read_text().splitlines()
    assert json.loads(first)["input_tokens"] == 5


def test_a_models_folder_that_is_named_as_one_of_the_hub_is_not_looked_for_there(
    fakes: Fakes, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path.parent)
    named = f"{tmp_path.name}/{model.name}"
    assert plan(fakes("serve", overrides=(f"model={named}",)), tmp_path).topology.model == named
    (model / "config.json").write_text("{}")
    said = rf"topology \S+: model: {named} is a folder here; write \./{named}, since a name of"
    with pytest.raises(InputError, match=said):
        plan(fakes("serve", overrides=(f"model={named}",)), tmp_path)
    made = plan(fakes("serve", overrides=(f"model=./{named}",)), tmp_path)
    assert made.topology.model == str(model)


def test_an_engines_python_may_be_named_from_the_working_folder_and_from_home(
    fakes: Fakes, fake_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path.parent)  # processes run elsewhere
    monkeypatch.setenv("HOME", str(tmp_path))
    relative = f"{tmp_path.name}/{fake_python.name}"
    for number, named in enumerate((relative, f"~/{fake_python.name}")):
        topology = fakes("serve", overrides=(f"engine.python={named}",))
        with fleet(topology, tmp_path / f"run{number}") as running:
            assert running.plan.engine.python == fake_python
    with pytest.raises(InputError, match=r"engine\.python: \S+ does not run"):
        plan(fakes("serve", overrides=("engine.python=~nobody-here/python",)), tmp_path)
    with pytest.raises(InputError, match=r"model: no such folder: ~nobody-here/m$"):
        plan(fakes("serve", overrides=("model=~nobody-here/m",)), tmp_path)


def test_the_tokenizer_is_found_given_left_out_or_missed(
    fakes: Fakes, model: Path, tmp_path: Path
) -> None:
    def told(*overrides: str) -> str | None:
        made = plan(fakes("serve", overrides=("router.kind=deltaserve", *overrides)), tmp_path)
        found: str | None = tomllib.loads(router_config(made)).get("tokenizer")
        return found

    file = str(model / "tokenizer.json")
    shape = Path(told() or "")
    assert shape.parent == shape_folder("tiny-qwen3-moe")
    assert told("text=false") is None
    assert told("model=qwen3-coder-30b-a3b") is None
    assert told(f"model={model}") == told(f"router.tokenizer={model}") == file
    assert told(f"model={model}", "router.tokenizer=none") is None
    with pytest.raises(
        InputError, match=r"topology \S+: router\.tokenizer: no such file: /nowhere"
    ):
        told("router.tokenizer=/nowhere/tokenizer.json")
    with pytest.raises(InputError, match=r"topology \S+: model: no such folder: \./nowhere$"):
        told("model=./nowhere")
    with pytest.raises(InputError, match=r"router\.tokenizer: smg has none; use router\.flags"):
        told("router.kind=smg", f"router.tokenizer={model}")


def test_a_stock_router_that_is_missing_is_answered_with_the_command_that_installs_it(
    fakes: Fakes,
) -> None:
    with pytest.raises(InputError, match=r"run: deltaserve launch install smg$"):
        plan(fakes("serve", overrides=("router.kind=smg",)), Path("/run/x"))


def test_processes_are_sampled_while_they_run(fakes: Fakes, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    def rows(name: str) -> list[dict[str, str]]:
        if not (run_dir / name).exists():
            return []
        with (run_dir / name).open() as file:
            return list(csv.DictReader(file))

    with fleet(fakes("serve", "serve", overrides=("sample_interval_s=0.05",)), run_dir):
        wait_until(lambda: min(len(rows("processes.csv")), len(rows("engines.csv"))) >= 6)
    processes, loads = rows("processes.csv"), rows("engines.csv")
    assert {row["id"] for row in processes} == {"colocated-0", "colocated-1"}
    assert all(int(row["rss_bytes"]) > 2**20 and int(row["processes"]) == 1 for row in processes)
    assert {row["id"] for row in loads} == {"colocated-0", "colocated-1"}
    told = ("running", "queued", "kv_used_share")
    assert {tuple(row[name] for name in told) for row in loads} >= {("3.0", "2.0", "")}
    assert not (run_dir / "gpu.csv").exists()


def test_of_samples_the_older_half_makes_room_where_they_are_bounded(tmp_path: Path) -> None:
    older = tmp_path / "processes.1.csv"
    guardians = {"nobody": (2**22 + 1, "gone")}
    sampler = Sampler(tmp_path, guardians, Engines({}, ("a", "b", "c")), (), 0.0005, 2_000)
    newest = tmp_path / "processes.csv"
    try:
        begun_anew: set[bytes] = set()

        def twice() -> bool:
            if older.exists():
                begun_anew.add(older.read_bytes())
            return len(begun_anew) >= 3

        wait_until(twice)
    finally:
        sampler.stop()
    assert older.stat().st_size + newest.stat().st_size < 2_200
    rows: list[dict[str, str]] = []
    for path in (older, newest):
        with path.open() as file:
            rows += csv.DictReader(file)
    times = [float(row["unix_s"]) for row in rows]
    assert times == sorted(times)
    assert {row["id"] for row in rows} == {"nobody"}
    assert len(rows) > 30
