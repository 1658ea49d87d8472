"""A rolling restart under load: every worker is another process then, and no request fails."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from deltaserve.errors import InputError
from launch import Fleet, fleet, rolling
from launch.cli import app
from launch.http_calls import call
from launch.rolling import Rolling

from .conftest import Fakes

ROUTER = ("router.kind=deltaserve", "router.policy=unified")


class Load:
    """Sessions that send one turn after the other, each of about a quarter of a second."""

    def __init__(self, url: str, sessions: int) -> None:
        self._url, self._ends = url, threading.Event()
        self.statuses: list[int] = []
        self._threads = [threading.Thread(target=self._send, args=(n,)) for n in range(sessions)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def _send(self, session: int) -> None:
        turn = 0
        while not self._ends.is_set():
            turn += 1
            ids = [50 * session + n % 50 for n in range(100 + 10 * turn)]
            body = orjson.dumps({"input_ids": ids, "sampling_params": {"max_new_tokens": 4}})
            self.statuses.append(call("POST", f"{self._url}/generate", body, timeout_s=60)[0])


def rolled(running: Fleet, wait_s: float = 60) -> dict[str, object]:
    """What became of a rolling restart that is asked for now."""
    run_dir, router = running.plan.run_dir, running.plan.router
    assert router is not None
    said: list[str] = []
    roller = Rolling(running, run_dir, (router.url, router.keys.key), said.append)
    record = json.loads((run_dir / "fleet.json").read_text())
    rolling.ask(run_dir, rolling.rollable(record), wait_s)
    with pytest.raises(InputError, match="under way"):
        rolling.ask(run_dir, [], wait_s)
    deadline_s = time.monotonic() + 90
    while (found := rolling.progress(run_dir)) and found["state"] in ("asked", "rolling"):
        assert time.monotonic() < deadline_s, said
        roller.look()
        running.check(but=roller.restarting)
        time.sleep(0.05)
    assert found
    return found


def test_every_worker_is_started_again_and_no_request_fails(fakes: Fakes, tmp_path: Path) -> None:
    with fleet(fakes("slow", "slow", "slow", overrides=ROUTER), tmp_path / "run") as running:
        before = {worker.id: worker.pid for worker in running.workers}
        assert running.router_url is not None
        with Load(running.router_url, 6) as load:
            found = rolled(running)
        assert found["state"] == "done", found
        assert all(worker.pid != before[worker.id] for worker in running.workers)
        assert len(load.statuses) > 12, "the sessions went on meanwhile"
        assert set(load.statuses) == {200}
        _, answer = call("GET", f"{running.router_url}/workers", timeout_s=5)
        workers = json.loads(answer)["workers"]
        assert [w["state"]["draining"] for w in workers] == [False] * 3
        assert running.died() == {}


def test_a_worker_whose_turns_do_not_end_keeps_serving(fakes: Fakes, tmp_path: Path) -> None:
    topology = fakes("hang-asked", "hang-asked", overrides=ROUTER)
    with fleet(topology, tmp_path / "run") as running:
        url = running.router_url
        assert url is not None
        body = orjson.dumps({"input_ids": [1, 2, 3]})
        for _ in range(4):
            with pytest.raises(TimeoutError):
                call("POST", f"{url}/generate", body, timeout_s=0.3)
            asked = threading.Thread(target=_ask, args=(url, body), daemon=True)
            asked.start()
        time.sleep(0.5)
        before = [worker.pid for worker in running.workers]
        found = rolled(running, wait_s=0.5)
        assert found["state"] == "failed"
        assert "requests still run" in str(found["said"])
        assert [worker.pid for worker in running.workers] == before
        _, answer = call("GET", f"{url}/workers", timeout_s=5)
        assert not any(w["state"]["draining"] for w in json.loads(answer)["workers"])


def _ask(url: str, body: bytes) -> None:
    try:
        call("POST", f"{url}/generate", body, timeout_s=20)
    except OSError:
        return


def test_what_would_fail_requests_is_refused(fakes: Fakes, tmp_path: Path) -> None:
    with fleet(fakes("serve", overrides=ROUTER), tmp_path / "one") as running:
        told = CliRunner().invoke(app, ["roll", str(running.plan.run_dir)])
        assert isinstance(told.exception, InputError)
        assert "one colocated worker" in str(told.exception)
    with fleet(fakes("serve", "serve"), tmp_path / "none") as running:
        told = CliRunner().invoke(app, ["roll", str(running.plan.run_dir)])
        assert isinstance(told.exception, InputError)
        assert "only behind our router" in str(told.exception)
