"""Chats through the router while a real engine is killed: they go on, and the worker comes back."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from tests.live.conftest import check_ports_are_free, processes_of

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

DELTASERVE = [sys.executable, "-m", "deltaserve", "launch"]
MODEL = "tiny-qwen3-moe"
CHATS = 2


class Turn(NamedTuple):
    """One answer, or what came in place of it."""

    ended_s: float
    status: int
    worker: str | None
    said: str


def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*DELTASERVE, *arguments], capture_output=True, text=True, check=False)


class Chats:
    """Conversations that go on, turn after turn, until told to end."""

    def __init__(self, url: str) -> None:
        self.turns: list[Turn] = []
        self._url = url
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._chat, args=(n,)) for n in range(CHATS)]

    def __enter__(self) -> Chats:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _chat(self, number: int) -> None:
        conversation = 0
        while not self._over.is_set():
            conversation += 1
            messages = [
                {"role": "system", "content": f"You are agent {number}.{conversation}. " * 20}
            ]
            for turn in range(4):
                messages.append({"role": "user", "content": f"Turn {turn}: what comes next?"})
                done = self._ask(messages, streams=turn % 2 == 1)
                self.turns.append(done)
                messages.append({"role": "assistant", "content": done.said or "…"})
                if self._over.wait(0.2):
                    return

    def _ask(self, messages: list[dict[str, str]], streams: bool) -> Turn:
        body = {"model": MODEL, "messages": messages, "max_tokens": 8, "stream": streams}
        request = urllib.request.Request(
            f"{self._url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                worker = answer.headers["x-deltaserve-worker"]
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            return Turn(time.monotonic(), error.code, None, error.read().decode())
        if streams:
            events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
            # An answer that a worker's death cut short ends with an event that says so. (That word
            # may also be the text of one.)
            failed = any("error" in json.loads(event) for event in events if event != "[DONE]")
            whole = events[-1] == "[DONE]" and not failed
            return (
                Turn(time.monotonic(), 200, worker, "…")
                if whole
                else Turn(time.monotonic(), 502, worker, text[-500:])
            )
        said = json.loads(text)["choices"][0]["message"]["content"] or ""
        return Turn(time.monotonic(), 200, worker, said)

    def since(self, begun_s: float) -> list[Turn]:
        return [turn for turn in list(self.turns) if turn.ended_s > begun_s]

    def wait_until(self, begun_s: float, workers: set[str], patience_s: float) -> None:
        """Waits until every one of `workers` has answered since `begun_s`."""
        deadline_s = time.monotonic() + patience_s
        while not workers <= {turn.worker for turn in self.since(begun_s) if turn.status == 200}:
            assert time.monotonic() < deadline_s, self.since(begun_s)[-10:]
            time.sleep(0.2)


@pytest.fixture(params=["laptop-sglang", "laptop-vllm"])
def run_dir(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Two workers behind the router, up, detached and kept serving."""
    folder = tmp_path / "run"
    # Both get their share, whoever holds what.
    settings = ["--set", "base_port=0", "--set", "router.policy=round_robin"]
    up = ["up", request.param, *settings, "--run-dir", str(folder), "--keep-serving", "--detach"]
    done = launch(*up)
    assert done.returncode == 0, done.stderr
    yield folder
    launch("down", str(folder))


def record_of(run_dir: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((run_dir / "fleet.json").read_text())
    return record


def worker_of(run_dir: Path, name: str) -> dict[str, Any]:
    (found,) = [p for p in record_of(run_dir)["processes"] if p["id"] == name]
    process: dict[str, Any] = found
    return process


def test_chats_go_on_while_a_worker_is_killed_and_comes_back(run_dir: Path) -> None:
    workers = {"colocated-0", "colocated-1"}
    killed = worker_of(run_dir, "colocated-1")
    # The engine itself, under the guardian that keeps it.
    engine = psutil.Process(killed["pid"]).children()[0]
    with Chats(record_of(run_dir)["router_url"]) as chats:
        chats.wait_until(0.0, workers, 60)
        killed_s = time.monotonic()
        engine.send_signal(signal.SIGKILL)
        while worker_of(run_dir, "colocated-1")["state"] == "ready":
            assert time.monotonic() < killed_s + 30, "its death was not noticed"
            time.sleep(0.05)
        shown = launch("status", str(run_dir)).stdout
        assert "colocated-1 died (signal 9)" in shown
        # While it is away the other one answers.
        chats.wait_until(time.monotonic(), {"colocated-0"}, 60)
        while worker_of(run_dir, "colocated-1")["state"] != "ready":
            assert time.monotonic() < killed_s + 400, launch("status", str(run_dir)).stdout
            time.sleep(0.5)
        back_s = time.monotonic()
        chats.wait_until(back_s, workers, 60)
        turns = chats.since(killed_s)
    again = worker_of(run_dir, "colocated-1")
    assert again["pid"] != killed["pid"]
    assert again["url"] == killed["url"]
    # A stream whose worker died after its first token cannot go on elsewhere: at most one a chat.
    failed = [turn for turn in turns if turn.status != 200]
    assert len(failed) <= CHATS, failed
    assert all(turn.status == 502 and turn.ended_s < killed_s + 15 for turn in failed), failed
    print(f"{len(turns)} turns, {len(failed)} cut short; back after {back_s - killed_s:.0f} s")
    settled = launch("status", str(run_dir))
    assert settled.returncode == 0, settled.stdout
    record = record_of(run_dir)
    assert launch("down", str(run_dir)).returncode == 0
    assert processes_of(record) == []
    check_ports_are_free(record)
