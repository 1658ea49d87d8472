"""A rolling restart under load: every worker is another process then, and no request fails."""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path

import orjson
import psutil
import pytest
from typer.testing import CliRunner

from deltaserve.errors import InputError
from launch import Fleet, fleet, rolling
from launch.cli import app
from launch.http_calls import call
from launch.rolling import Rolling
from tests.processes import wait_until

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


class Sessions:
    """Sessions whose prompts grow, and what of them was computed again."""

    def __init__(self, url: str, count: int) -> None:
        self._url, self._ends = url, threading.Event()
        self.prompt_tokens = 0
        self.computed_again: dict[tuple[int, int], int] = {}
        """Tokens by the session and the process that it was on before: 0 where it stayed."""
        self.longest: dict[tuple[int, int], int] = {}
        """The last prompt that each session had on a process."""
        self.turns = 0
        self._threads = [threading.Thread(target=self._send, args=(n,)) for n in range(count)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def wait_for(self, turns: int) -> None:
        wait_until(lambda: self.turns >= turns)

    def _send(self, session: int) -> None:
        before, was_on = 0, 0
        tokens = random.Random(session)
        ids: list[int] = []
        while not self._ends.is_set():
            ids += tokens.choices(range(1_000), k=200)
            body = orjson.dumps({"input_ids": ids, "sampling_params": {"max_new_tokens": 1}})
            status, answer = call("POST", f"{self._url}/generate", body, timeout_s=60)
            assert status == 200, answer
            told = json.loads(answer)
            again = before - told["meta_info"]["cached_tokens"]
            moved_from = was_on if told["process"] != was_on else 0
            key = session, moved_from
            self.computed_again[key] = self.computed_again.get(key, 0) + again
            self.longest[session, told["process"]] = len(ids)
            self.prompt_tokens += len(ids)
            self.turns += 1
            before, was_on = len(ids), told["process"]


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


def test_a_roll_computes_again_what_the_moved_sessions_held_and_little_more(
    fakes: Fakes, tmp_path: Path
) -> None:
    topology = fakes("caches", "caches", "caches", overrides=ROUTER)
    with fleet(topology, tmp_path / "run") as running:
        assert running.router_url is not None
        sessions = Sessions(running.router_url, 9)
        try:
            sessions.wait_for(40)
            found = rolled(running)
            sessions.wait_for(sessions.turns + 40)
        finally:
            sessions.end()
        assert found["state"] == "done", found
        # Whoever was on a worker that ended had to leave it, once.
        has_ended = {pid: not psutil.pid_exists(pid) for _, pid in sessions.longest}
        assert sum(has_ended.values()) == 3
        left = (key for key in sessions.computed_again if has_ended.get(key[1]))
        moved = {key: sessions.longest[key] for key in left}
        assert len(moved) >= 9, "each session had to move"
        beyond = sum(sessions.computed_again.values()) - sum(moved.values())
        assert beyond <= 0.05 * sessions.prompt_tokens


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
