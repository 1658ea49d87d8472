"""A real API server of Kubernetes: pods that come, are not ready and go under load through the
router, with the account and the manifests of the Helm chart.

Skipped where a program is missing: `make kubernetes` builds them, but `etcd` and `openssl`. There
are no nodes: what a kubelet would say of a pod, the test says.
"""

from __future__ import annotations

import http.server
import itertools
import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.doc_pages import ROOT
from tests.live.test_router_live import free_port, get
from tests.processes import wait_until
from tests.programs import program

PROGRAMS = ("etcd", "kube-apiserver", "kubectl", "helm", "openssl")
MISSING = [name for name in PROGRAMS if program(name) is None]
pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(MISSING), reason=f"missing: {', '.join(MISSING)}"),
]

NAMESPACE = "serving"
ACCOUNT = f"system:serviceaccount:{NAMESPACE}:coder-deltaserve"
VALUES = {
    "kubernetes": {"selector": "app=engine", "port": 30000},
    "picker": {"enabled": True},
    "apiKeys": {"secret": "clients"},
    "podDisruptionBudget": {"enabled": True},
    "workers": {
        "coder": {"image": "engine:1", "resources": {"limits": {"nvidia.com/gpu": 1}}},
        "prefill": {"image": "engine:1", "role": "prefill", "worker": {"bootstrap_port": 8998}},
    },
}


def words_of(command: Sequence[str | Path]) -> list[str]:
    """With the program's path."""
    name, *words = map(str, command)
    return [program(name) or name, *words]


@contextmanager
def running(log: Path, *command: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as output:
        process = subprocess.Popen(words_of(command), stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def run(*command: str | Path, given: str | None = None) -> str:
    words = words_of(command)
    said = subprocess.run(words, input=given, capture_output=True, text=True, check=False)
    assert said.returncode == 0, f"{words}: {said.stdout}{said.stderr}"
    return said.stdout


class Cluster:
    """An API server; who may ask it what is said by kubeconfigs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.etcd = f"http://127.0.0.1:{free_port()}"
        (folder / "tokens.csv").write_text(
            f'admin-token,admin,1,"system:masters"\nrouter-token,{ACCOUNT},2\n'
        )
        self._make_certificates()
        self.admin = self._kubeconfig("admin")
        self.router = self._kubeconfig("router")

    def _make_certificates(self) -> None:
        key = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2")
        name = ("-subj", "/CN=kube-apiserver", "-addext", "subjectAltName=IP:127.0.0.1")
        leaf = ("-addext", "basicConstraints=critical,CA:FALSE")
        files = ("-keyout", self.folder / "api.key", "-out", self.folder / "api.crt")
        run(*key, *name, *leaf, *files)
        run("openssl", "genrsa", "-out", self.folder / "accounts.key", "2048")

    def _kubeconfig(self, who: str) -> Path:
        cluster = {
            "server": f"https://127.0.0.1:{self.port}",
            "certificate-authority": str(self.folder / "api.crt"),
        }
        context = {"cluster": "here", "user": who, "namespace": NAMESPACE}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [{"name": "here", "cluster": cluster}],
            "users": [{"name": who, "user": {"token": f"{who}-token"}}],
            "contexts": [{"name": "here", "context": context}],
        }
        path = self.folder / f"{who}.kubeconfig"
        path.write_text(json.dumps(config))
        return path

    @contextmanager
    def up(self) -> Iterator[None]:
        peer = f"http://127.0.0.1:{free_port()}"
        with running(
            self.folder / "etcd.log",
            *("etcd", "--data-dir", self.folder / "etcd", "--listen-client-urls", self.etcd),
            *("--advertise-client-urls", self.etcd, "--listen-peer-urls", peer),
            *("--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"),
        ):
            yield

    @contextmanager
    def serving(self) -> Iterator[subprocess.Popen[bytes]]:
        """The API server alone, which may go and come while etcd keeps what there is."""
        accounts = self.folder / "accounts.key"
        with running(
            self.folder / "api.log",
            *("kube-apiserver", "--etcd-servers", self.etcd, "--authorization-mode", "RBAC"),
            *("--bind-address", "127.0.0.1", "--secure-port", str(self.port)),
            *("--tls-cert-file", self.folder / "api.crt"),
            *("--tls-private-key-file", self.folder / "api.key"),
            *("--token-auth-file", self.folder / "tokens.csv"),
            *("--service-account-issuer", "https://here"),
            *("--service-account-key-file", accounts),
            *("--service-account-signing-key-file", accounts),
            *("--service-cluster-ip-range", "10.96.0.0/16"),
            *("--disable-admission-plugins", "ServiceAccount"),
        ) as process:
            wait_until(lambda: self.is_ready(process), 300.0)
            yield process

    def is_ready(self, process: subprocess.Popen[bytes]) -> bool:
        assert process.poll() is None, (self.folder / "api.log").read_text()[-2000:]
        words = words_of(("kubectl", "--kubeconfig", self.admin, "get", "--raw", "/readyz"))
        return subprocess.run(words, capture_output=True, check=False).returncode == 0

    def kubectl(self, *words: str | Path, given: str | None = None) -> str:
        return run("kubectl", "--kubeconfig", self.admin, *words, given=given)

    def put(self, name: str, port: int) -> None:
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "labels": {"app": "engine"},
                "annotations": {"deltaserve/port": str(port)},
                # What a kubelet does: a pod that is to go stays until its containers have ended.
                "finalizers": ["tests/kubelet"],
            },
            "spec": {"containers": [{"name": "engine", "image": "engine:1"}]},
        }
        self.kubectl("create", "-f", "-", given=json.dumps(pod))

    def set_ready(self, name: str, ready: bool) -> None:
        condition = {"type": "Ready", "status": str(ready)}
        status = {"phase": "Running", "podIP": "127.0.0.1", "podIPs": [{"ip": "127.0.0.1"}]}
        patch = json.dumps({"status": {**status, "conditions": [condition]}})
        self.kubectl("patch", "pod", name, "--subresource", "status", "--patch", patch)

    def begin_to_delete(self, name: str) -> None:
        self.kubectl("delete", "pod", name, "--wait=false")

    def end(self, name: str) -> None:
        self.kubectl("patch", "pod", name, "--patch", '{"metadata": {"finalizers": null}}')
        self.kubectl("delete", "pod", name, "--force", "--grace-period=0", "--ignore-not-found")


class Engine:
    """Answers `/generate` after a while, and counts."""

    def __init__(self) -> None:
        self.served = 0
        self.running = 0
        self._lock = threading.Lock()
        engine = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                pass

            def answer(self, body: bytes, status: int = 200) -> None:
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.send_header("content-type", "application/json")
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                known = {
                    "/health": b"",
                    "/v1/models": b'{"data": [{"id": "m"}]}',
                    "/server_info": b'{"max_total_num_tokens": 100000, "version": "0.5.23"}',
                }
                body = known.get(self.path)
                self.answer(body or b"", 404 if body is None else 200)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                engine._count(1)
                time.sleep(0.05)
                meta = {"prompt_tokens": 3, "cached_tokens": 0, "completion_tokens": 1}
                self.answer(json.dumps({"text": "x", "meta_info": meta}).encode())
                engine._count(-1)

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def _count(self, change: int) -> None:
        with self._lock:
            self.running += change
            self.served += change < 0

    def serves_more(self) -> None:
        before = self.served
        wait_until(lambda: self.served > before + 2)

    def gets_nothing(self, url: str, name: str) -> None:
        """Once the router's requests there have ended."""
        wait_until(lambda: load_of(url, name) == 0)
        time.sleep(0.5)
        before = self.served
        time.sleep(1)
        assert self.served == before


class Load:
    """Clients whose requests follow each other; none may fail."""

    def __init__(self, url: str, sessions: int) -> None:
        self.url = url
        self.turns = 0
        self.failed: list[str] = []
        self.is_over = threading.Event()
        self.threads = [threading.Thread(target=self.serve, args=(i,)) for i in range(sessions)]
        for thread in self.threads:
            thread.start()

    def serve(self, session: int) -> None:
        headers = {"content-type": "application/json"}
        for turn in itertools.count():
            if self.is_over.is_set():
                return
            # Each of a session of its own: those that have a place on a worker keep it.
            headers["x-session-id"] = f"s{session}-{turn}"
            body = json.dumps({"input_ids": [session, turn, *range(200)]}).encode()
            request = urllib.request.Request(f"{self.url}/generate", body, headers)
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    answer.read()
                self.turns += 1
            except OSError as error:
                self.failed.append(f"session {session}: {error}")

    def end(self) -> None:
        self.is_over.set()
        for thread in self.threads:
            thread.join(60)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    with made.up():
        yield made


def manifests(folder: Path) -> list[dict[str, Any]]:
    values = folder / "values.json"
    values.write_text(json.dumps(VALUES))
    chart = ROOT / "deploy/helm/deltaserve"
    words = ("helm", "template", "coder", chart, "--namespace", NAMESPACE, "--values", values)
    text = run(*words, "--kube-version", "1.34.0")
    return [each for each in yaml.safe_load_all(text) if each]


def load_of(url: str, name: str) -> int:
    requests: int = get(f"{url}/workers/{name}")["load"]
    return requests


def workers(url: str) -> dict[str, bool]:
    """The workers, and whether each gets new requests."""
    shown = get(f"{url}/workers")["workers"]
    return {each["id"]: each["is_healthy"] and not each["state"]["draining"] for each in shown}


def test_pods_come_are_not_ready_and_go_under_load_and_no_request_is_lost(
    cluster: Cluster, tmp_path: Path
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    config = tmp_path / "router.toml"
    config.write_text(
        f'port = {port}\npolicy = "round_robin"\n'
        '[kubernetes]\nselector = "app=engine"\nport = 30000\n'
        f'kubeconfig = "{cluster.router}"\n'
    )
    deltaserve = Path(sys.executable).with_name("deltaserve")
    check = (deltaserve, "route", "--config", config, "--check")
    engines = {name: Engine() for name in ("a", "b", "c", "d")}
    a, b, c, d = engines.values()

    def are(**expected: bool) -> None:
        wait_until(lambda: workers(url) == expected)

    with ExitStack() as stack:
        api = stack.enter_context(cluster.serving())
        cluster.kubectl("create", "namespace", NAMESPACE)
        # Without the chart's role it may not ask.
        said = subprocess.run(check, capture_output=True, text=True, check=False)
        assert said.returncode == 2
        assert "kubernetes: " in said.stderr
        assert "cannot list resource" in said.stderr
        # The API server takes the whole chart.
        for manifest in manifests(tmp_path):
            text = json.dumps(manifest)
            cluster.kubectl("apply", "--server-side", "-n", NAMESPACE, "-f", "-", given=text)
        said = subprocess.run(check, capture_output=True, text=True, check=False)
        assert said.returncode == 0, said.stderr
        cluster.put("a", a.port)
        cluster.set_ready("a", True)
        stack.enter_context(running(tmp_path / "router.log", *check[:-1]))
        wait_until(lambda: answers(url))
        are(a=True)
        load = Load(url, 8)
        stack.callback(load.end)
        a.serves_more()
        cluster.put("b", b.port)
        cluster.put("c", c.port)
        cluster.set_ready("c", True)
        c.serves_more()
        assert b.served == 0
        cluster.set_ready("b", True)
        b.serves_more()
        cluster.set_ready("a", False)
        are(a=False, b=True, c=True)
        a.gets_nothing(url, "a")
        cluster.set_ready("a", True)
        a.serves_more()
        cluster.begin_to_delete("b")
        are(a=True, b=False, c=True)
        b.gets_nothing(url, "b")
        cluster.end("b")
        are(a=True, c=True)
        b.server.shutdown()
        cluster.put("b", d.port)
        cluster.set_ready("b", True)
        d.serves_more()
        # The API server is killed, and comes back.
        api.kill()
        api.wait()
        time.sleep(2)
        c.serves_more()
        stack.enter_context(cluster.serving())
        cluster.begin_to_delete("c")
        cluster.end("c")
        are(a=True, b=True)
        load.end()
        assert load.failed == []
        assert load.turns == sum(engine.served for engine in engines.values())


def answers(url: str) -> bool:
    with suppress(OSError):
        get(f"{url}/workers")
        return True
    return False
