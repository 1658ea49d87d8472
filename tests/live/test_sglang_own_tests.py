"""SGLang's own tests of the decode radix cache, unchanged, with and without the plugin.

SGLang's wheel does not ship its tests, so ``DELTASERVE_SGLANG_SOURCE`` names a checkout of its
repository at the version of the engine (a tree with ``test/registered``). Each of `FILES` runs in
the engine's environment as SGLang ships it, three times: without the plugin, with the plugin loaded
and idle, and with every hook applied in a process whose scheduler is not elastic. Each test must
end the same way each time. What needs a GPU is listed in ``docs/elastic-worker.md``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import orjson
import pytest

import sglang_ext
from tests.live.elastic_fleet import engine_python

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
    """The tests in a process of their own; `features` None is without the plugin."""
    folder.mkdir()
    path, report, loaded = path_for(folder), folder / "report.xml", folder / "loaded.json"
    (folder / "pytest.ini").write_text("[pytest]\n")
    environment = os.environ | {
        "PYTHONPATH": f"{path}:{path}/sglang_ext/cpu/stubs",
        "SGLANG_USE_CPU_ENGINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "SGLANG_PLUGINS": "none" if features is None else "deltaserve",
        "DELTASERVE_SGLANG": features or "",
        "DELTASERVE_TELEMETRY_DIR": str(folder / "steps"),
        "LOADED_FILE": str(loaded),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [
            *(engine_python(), "-m", "pytest", "-q", "-c", "pytest.ini"),
            *("--rootdir", str(checkout), "-p", "no:cacheprovider", "-p", "loads_plugins"),
            f"--junitxml={report}",
            *(str(checkout / file) for file in FILES),
        ],
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
    is_loaded, hooks = orjson.loads(loaded.read_bytes())
    return Ended(outcomes, is_loaded, hooks)


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
