"""SGLang's own tests of a running server, with and without the plugin: each must end the same way.

They come with SGLang's wheel, as kits: `sglang_kits.py` has them asked of a worker without the
plugin, of one with the plugin loaded and idle, and of an elastic one.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

import pytest

import sglang_ext
from tests.live.elastic_fleet import Server, client_of, engine_python

pytestmark = [pytest.mark.live, pytest.mark.timeout(1200)]


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
    return path


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
    python = engine_python()
    base_port = int(os.environ.get("DELTASERVE_LIVE_BASE_PORT", "32100")) + 60
    servers: dict[str, Server] = {}
    for offset, (name, (flags, variables)) in enumerate(WORKERS.items()):
        folder = tmp_path / name / "worker"
        folder.mkdir(parents=True)
        variables = variables | {"DELTASERVE_TELEMETRY_DIR": str(folder / "steps")}
        servers[name] = Server(name, base_port + offset, folder, flags, variables, text=True)

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
    assert len(stock) == 18
    assert set(stock.values()) == {"passed"}, stock
    assert idle == stock
    assert hooked == stock
    assert state["counts"]["local"] > 100
    assert list((servers["hooked"].folder / "steps").glob("*.jsonl"))
