"""Arms that are servers elsewhere: nothing is started, caches are emptied or prompts are new."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from deltaserve.errors import InputError
from eval.endpoint import Endpoint
from eval.experiment_files import load_experiment
from eval.preview import preview
from eval.progress import Progress
from eval.provenance import read_manifest
from eval.records import read_run
from eval.runner import run_experiment
from eval.site import Site, launch_site
from replay.results import read_results
from replay.trace import Request, write_trace

_TEXT = """
name = "outside"
repeats = 2
[trace]
path = "{trace}"
[replay]
vocab_size = 500
time_scale = 100.0
[[arms]]
name = "theirs"
url = "{url}"
gpus = 8
headers = {{ Authorization = "Bearer @THEIR_KEY" }}
"""


class _Server(ThreadingHTTPServer):
    """Answers like SGLang; empties its caches on `flush` only."""

    flush: str | None = None

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.seen: list[tuple[str, str]] = []
        self.prompts: list[list[int]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def _send(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        self.server.seen.append((self.path, self.headers.get("authorization", "")))
        self._send(200, b'{"data": [{"id": "m", "owned_by": "sglang"}]}')

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.seen.append((self.path, self.headers.get("authorization", "")))
        if self.path != "/generate":
            self._send(200 if self.path == self.server.flush else 404, b"")
            return
        record = json.loads(body)
        self.server.prompts.append(record["input_ids"])
        count = record["sampling_params"]["max_new_tokens"]
        event: dict[str, Any] = {
            "output_ids": [1] * count,
            "meta_info": {"completion_tokens": count, "prompt_tokens": 4, "cached_tokens": 0},
        }
        self._send(200, b"data: " + json.dumps(event).encode() + b"\n\ndata: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[_Server]:
    found = _Server()
    thread = threading.Thread(target=found.serve_forever, daemon=True)
    thread.start()
    yield found
    found.shutdown()
    thread.join(10)
    found.server_close()


def _experiment(tmp_path: Path, url: str) -> Any:
    trace = tmp_path / "t.jsonl"
    write_trace(
        trace, [Request(f"r{n}", f"s{n}", 0, 0.1 * n, 8, 2, 4, [n, 9 + n]) for n in range(4)]
    )
    (tmp_path / "e.toml").write_text(_TEXT.format(trace=trace, url=url))
    return load_experiment(str(tmp_path / "e.toml"))[0]


def _site() -> Site:
    return launch_site()


@pytest.mark.parametrize("flush", ["/flush_cache", "/reset_prefix_cache", None])
def test_a_server_elsewhere_is_measured_cold_in_every_repeat(
    tmp_path: Path, server: _Server, monkeypatch: pytest.MonkeyPatch, flush: str | None
) -> None:
    monkeypatch.setenv("THEIR_KEY", "s3cret")
    server.flush = flush
    experiment = _experiment(tmp_path, server.url)
    out = tmp_path / "out"
    summary = run_experiment(
        experiment, out, site=_site(), source={}, progress=Progress(Console(file=io.StringIO()))
    )
    assert (summary.complete, summary.failed) == (2, [])
    manifests = [read_manifest(out / "theirs" / f"r{n}") for n in (1, 2)]
    for number, manifest in enumerate(manifests, start=1):
        assert manifest
        assert manifest["gpus"] == 8
        assert manifest["topology"]["model"] == "m"
        assert len(read_results(out / "theirs" / f"r{number}")) == 4
        assert ("prompt_seed" in manifest) is (flush is None)
    assert {key for _, key in server.seen} == {"Bearer s3cret"}
    # With empty caches the prompts are the same in every repeat, else none was there before.
    first, second = ({tuple(p) for p in server.prompts[i : i + 4]} for i in (0, 4))
    if flush:
        assert [path for path, _ in server.seen].count(flush) == 2
        assert first == second
    else:
        assert not first & second
    for path in out.rglob("*"):
        assert path.is_dir() or b"s3cret" not in path.read_bytes(), path


def test_a_preview_of_a_server_elsewhere_starts_nothing(
    tmp_path: Path, server: _Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THEIR_KEY", "s3cret")
    experiment = _experiment(tmp_path, server.url)
    lines = "\n".join(preview(experiment, tmp_path / "out", site=_site()).lines())
    assert f"--url {server.url}" in lines
    assert "--header 'Authorization=Bearer @THEIR_KEY'" in lines
    assert "launch up" not in lines
    assert "s3cret" not in lines
    assert not server.prompts


def test_a_server_that_is_not_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THEIR_KEY", "s3cret")
    experiment = _experiment(tmp_path, "http://127.0.0.1:9")
    with pytest.raises(InputError, match=r"http://127.0.0.1:9: no server answers"):
        run_experiment(
            experiment,
            tmp_path / "out",
            site=_site(),
            source={},
            progress=Progress(Console(file=io.StringIO())),
        )
    assert Endpoint("http://127.0.0.1:9").describe()["model"] == "unknown"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('url = "{url}"', 'url = "{url}"\ntopology = "laptop-vllm"', "either topology or url"),
        ('url = "{url}"', 'url = "{url}"\npolicy = "unified"', "policy: is of a topology"),
        ('url = "{url}"', 'topology = "laptop-vllm"', "gpus, headers: are of an arm with url"),
        ("Bearer @THEIR_KEY", "Bearer abc", "headers.Authorization: give its value as @VARIABLE"),
        ('url = "{url}"', 'url = "host:80"', "arms.theirs.url"),
    ],
)
def test_a_wrong_arm_is_one_line(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in _TEXT
    text = _TEXT.replace(old, new).format(trace="t.jsonl", url="http://h")
    (tmp_path / "e.toml").write_text(text)
    with pytest.raises(InputError) as error:
        load_experiment(str(tmp_path / "e.toml"))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_run_with_phases_is_read_back_with_its_window(
    tmp_path: Path, server: _Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THEIR_KEY", "s3cret")
    server.flush = "/flush_cache"
    trace = tmp_path / "t.jsonl"
    requests = (
        Request(f"{s}.{t}", f"s{s}", t, 0.0, 8 * (t + 1), 2, 8, [*range(100 * s, 100 * s + t + 1)])
        for s in range(5)
        for t in range(6)
    )
    write_trace(trace, requests)
    text = _TEXT.format(trace=trace, url=server.url).replace("repeats = 2", "repeats = 1")
    text = text.replace("time_scale = 100.0", 'mode = "closed"\nmax_inflight_sessions = 3')
    text += '[phases]\nstart = "mid"\nwarm_up_s = 0.2\nmeasure_s = 0.6\nrecycle = true\n'
    (tmp_path / "e.toml").write_text(text)
    experiment = load_experiment(str(tmp_path / "e.toml"))[0]
    progress = Progress(Console(file=io.StringIO()))
    out = tmp_path / "out"
    summary = run_experiment(experiment, out, site=_site(), source={}, progress=progress)
    assert summary.complete == 1
    run = read_run(out / "theirs" / "r1")
    assert run.window
    assert run.window.end_s - run.window.start_s == pytest.approx(0.6)
    assert (run.window.start, run.window.recycle) == ("mid", True)
    phases = run.all_requests["phase"].value_counts()
    assert phases["prime"] == 3
    assert set(run.requests["phase"]) == {"measure"}
    assert len(run.requests) == phases["measure"] > 10
    assert run.requests["best_cached_tokens"].notna().all()
    assert "dropped" not in [found["rule"] for found in run.manifest["violations"]]
