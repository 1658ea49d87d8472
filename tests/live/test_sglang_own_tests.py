"""SGLang's own tests, unchanged, with and without the plugin: each must end the same way.

Those of a running server come with SGLang's wheel, as kits: `sglang_kits.py` has them asked of a
worker without the plugin, of one with the plugin loaded and idle, and of an elastic one.

Its unit tests do not, so ``DELTASERVE_SGLANG_SOURCE`` names a checkout of its repository at the
version of the engine (a tree with ``test/registered``). Each of `FILES` runs in the engine's
environment as SGLang ships it, three times: without the plugin, with the plugin loaded and idle,
and with every hook applied in a process whose scheduler is not elastic. What needs a GPU is listed
in ``docs/elastic-worker.md``.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import orjson
import pytest

import sglang_ext
from tests.live.conftest import NEWER
from tests.live.elastic_fleet import Server, client_of, engine_python

pytestmark = [pytest.mark.live, pytest.mark.timeout(1200)]

FILES = (
    "disaggregation/test_decode_queue_cleanup.py",
    "disaggregation/test_disaggregation_wire.py",
    "disaggregation/test_kv_events.py",
    "disaggregation/test_kv_transfer_replica_metric.py",
    "disaggregation/test_nixl_backend_basic.py",
    "disaggregation/test_nixl_sender_failure_cleanup.py",
    "disaggregation/test_register_to_bootstrap.py",
    "managers/test_kv_page_invariants.py",
    "managers/test_prefill_adder.py",
    "managers/test_priority_scheduling_disaggregation.py",
    "managers/test_retraction_order.py",
    "managers/test_schedule_batch_out_of_place.py",
    "managers/test_schedule_batch_prepare_for_decode.py",
    "managers/test_schedule_batch_req_pool_indices.py",
    "managers/test_scheduler_chunked_req_gate.py",
    "managers/test_scheduler_decision_batch_params.py",
    "managers/test_scheduler_flush_cache.py",
    "managers/test_scheduler_init_req_max_new_tokens.py",
    "managers/test_scheduler_pause_generation.py",
    "mem_cache/test_decode_radix_lock_ref.py",
    "mem_cache/test_evict_policy.py",
    "mem_cache/test_paged_free_segment.py",
    "mem_cache/test_radix_cache_unit.py",
    "mem_cache/test_radix_force_miss.py",
    "mem_cache/test_registry.py",
    "mem_cache/test_streaming_session_unit.py",
    "spec/test_decode_bookkeeping_ownership.py",
)
"""Of 0.5.17's ``test/registered/unit``: what exercises code that the plugin hooks, or the cache."""

NEEDS_GPU = {"test_memory_allocated": "reads torch.cuda's memory counter"}
"""Tests in `FILES` that fail on a machine without a GPU, with and without the plugin."""

LOADER = """
import json, os, sys

def pytest_configure(config):
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry
    load_plugins()
    with open(os.environ["LOADED_FILE"], "w") as file:
        json.dump(["sglang_ext.plugin" in sys.modules, len(HookRegistry._patched)], file)
"""


@dataclass
class Ended:
    """How each test ended, by class and name, and what the plugin had done before."""

    outcomes: dict[str, str]
    loaded: bool
    hooks: int


@pytest.fixture(scope="module")
def checkout() -> Path:
    given = os.environ.get("DELTASERVE_SGLANG_SOURCE")
    if not given:
        pytest.skip("DELTASERVE_SGLANG_SOURCE names no checkout of SGLang's repository")
    folder = Path(given) / "test" / "registered" / "unit"
    assert folder.is_dir(), f"{folder}: no such folder; is it a checkout of SGLang 0.5.17?"
    return folder


def path_for(folder: Path) -> Path:
    """A folder for ``PYTHONPATH``: the plugin with its entry point, and pytest, all by link."""
    path = folder / "path"
    info = path / "deltaserve-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deltaserve\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\ndeltaserve = sglang_ext.plugin:install\n"
    )
    (path / "sglang_ext").symlink_to(Path(sglang_ext.__file__).parent)
    packages = Path(pytest.__file__).parent.parent
    for name in ("pytest", "_pytest", "py.py", "pluggy", "iniconfig", "pygments"):
        (path / name).symlink_to(packages / name)
    (path / "loads_plugins.py").write_text(LOADER)
    return path


def run(checkout: Path, folder: Path, features: str | None) -> Ended:
    """The unit tests in a process of their own; `features` None is without the plugin."""
    folder.mkdir()
    loaded = folder / "loaded.json"
    environment = {
        "SGLANG_PLUGINS": "none" if features is None else "deltaserve",
        "DELTASERVE_SGLANG": features or "",
        "DELTASERVE_TELEMETRY_DIR": str(folder / "steps"),
        "LOADED_FILE": str(loaded),
    }
    command = (engine_python(), "-m", "pytest", "-p", "loads_plugins", "--rootdir", str(checkout))
    outcomes = ends(folder, environment, *command, *(str(checkout / file) for file in FILES))
    is_loaded, hooks = orjson.loads(loaded.read_bytes())
    return Ended(outcomes, is_loaded, hooks)


def ends(folder: Path, variables: Mapping[str, str], *command: str) -> dict[str, str]:
    """How each test ended that pytest runs, in an engine's environment, by class and name."""
    path, report = path_for(folder), folder / "report.xml"
    (folder / "pytest.ini").write_text("[pytest]\n")
    environment = os.environ | {
        "PYTHONPATH": f"{path}:{path}/sglang_ext/cpu/stubs",
        "SGLANG_USE_CPU_ENGINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    done = subprocess.run(
        [*command, "-q", "-c", "pytest.ini", "-p", "no:cacheprovider", f"--junitxml={report}"],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout[-4000:] + done.stderr[-4000:]
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        worse = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        outcomes[f"{case.get('classname')}.{case.get('name')}"] = worse[0] if worse else "passed"
    return outcomes


KITS = Path(__file__).with_name("sglang_kits.py")

WORKERS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "stock": ((), {"SGLANG_PLUGINS": "none", "DELTASERVE_SGLANG": ""}),
    "idle": ((), {"DELTASERVE_SGLANG": ""}),
    "hooked": (
        (
            *("--disaggregation-mode", "decode", "--disaggregation-decode-enable-radix-cache"),
            *("--disaggregation-transfer-backend", "nixl"),
        ),
        {"DELTASERVE_SGLANG": "cpu,elastic,telemetry"},
    ),
}
"""How each worker is started: flags and variables."""


async def test_the_wheels_kits_end_alike_on_a_plain_an_idle_and_an_elastic_worker(
    tmp_path: Path,
) -> None:
    if not os.environ.get("DELTASERVE_SGLANG_KITS"):
        pytest.skip("DELTASERVE_SGLANG_KITS is not set: it takes ten minutes on two cores")
    python = engine_python(NEWER)
    base_port = int(os.environ.get("DELTASERVE_LIVE_BASE_PORT", "32100")) + 60
    servers: dict[str, Server] = {}
    for offset, (name, (flags, variables)) in enumerate(WORKERS.items()):
        folder = tmp_path / name / "worker"
        folder.mkdir(parents=True)
        variables = variables | {"DELTASERVE_TELEMETRY_DIR": str(folder / "steps")}
        servers[name] = Server(name, base_port + offset, folder, flags, variables, NEWER, text=True)

    def asked_of(server: Server) -> dict[str, str]:
        folder = server.folder.parent
        # Beside a pytest.ini of its own: the configuration here is not for the engine's Python.
        file = shutil.copy(KITS, folder / "kits.py")
        variables = {
            "SGLANG_PLUGINS": "none",
            "WORKER_URL": server.url,
            "WORKER_MODEL": str(server.folder / "model-with-text"),
        }
        return ends(folder, variables, python, "-m", "pytest", "--rootdir", str(folder), str(file))

    try:
        for server in servers.values():
            server.start()
        async with client_of(*servers.values()) as client:
            found = await asyncio.gather(
                *(asyncio.to_thread(asked_of, server) for server in servers.values())
            )
            async with client.get(f"{servers['hooked'].url}/server_info") as answer:
                state = (await answer.json())["internal_states"][0]["deltaserve_elastic"]
    finally:
        for server in servers.values():
            server.kill()
    stock, idle, hooked = found
    for name, outcomes in zip(servers, found, strict=True):
        print(name, dict(Counter(outcomes.values())), file=sys.stderr)
    assert len(stock) == 19
    assert set(stock.values()) == {"passed"}, stock
    assert idle == stock
    assert hooked == stock
    assert state["counts"]["local"] > 100
    assert list((servers["hooked"].folder / "steps").glob("*.jsonl"))


def test_they_end_alike_without_the_plugin_with_it_idle_and_with_every_hook_applied(
    checkout: Path, tmp_path: Path
) -> None:
    stock = run(checkout, tmp_path / "stock", None)
    idle = run(checkout, tmp_path / "idle", "")
    hooked = run(checkout, tmp_path / "hooked", "elastic,telemetry")
    for name, ended in (("stock", stock), ("idle", idle), ("hooked", hooked)):
        print(name, dict(Counter(ended.outcomes.values())), file=sys.stderr)

    assert (stock.loaded, stock.hooks) == (False, 0)
    assert (idle.loaded, idle.hooks) == (True, 0)
    assert hooked.loaded
    assert hooked.hooks > 20

    failed = {name.rsplit(".", 1)[-1] for name, end in stock.outcomes.items() if end != "passed"}
    assert failed <= set(NEEDS_GPU), failed
    assert len(stock.outcomes) > 250
    assert idle.outcomes == stock.outcomes
    assert hooked.outcomes == stock.outcomes
