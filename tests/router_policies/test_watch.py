"""`deltaserve route top` and `deltaserve route trace` before a router's answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from tests.command_line import deltaserve

WAITING = {
    "session_id": "late [red]\x1b[2J",
    "state": "waiting",
    "worker": None,
    "tokens": 60_000,
    "idle_s": None,
    "waited_s": 12.34,
    "position": 1,
    "reason": "no_room",
}
RUNNING = WAITING | {
    "session_id": "main",
    "state": "running",
    "worker": "w0",
    "waited_s": None,
    "position": None,
    "reason": None,
}
TURN: dict[str, Any] = {
    "ts_unix_s": 1_700_000_000.0,
    "route": {"worker": "w0"},
    "place": "resident",
    "waited_s": 400.0,
    "input_tokens": 38_000,
    "new_tokens": 210,
    "believed_cached_tokens": 37_790,
    "difference": {
        "why": "changed",
        "beside": None,
        "part": "system",
        "index": 0,
        "name": None,
        "offset": 36,
        "text": "cc_version=2.1.197.c8e\x1b[2J",
        "token": 36,
        "lost_tokens": 35_524,
    },
    "ended": {
        "outcome": "ok",
        "first_token_s": 0.5,
        "prompt_tokens": 38_010,
        "cached_tokens": 37_000,
        "recomputed_tokens": 790,
    },
}
ANSWERS: dict[str, Any] = {
    "/workers": {"workers": [{"state": {"admission": {"booked_tokens": 61_000}}}]},
    "/sessions": {"sessions": [WAITING, RUNNING]},
    "/sessions/a%2Fb": {
        "session_id": "a/b",
        "now": [RUNNING],
        "turns": [TURN, TURN | {"ended": None, "difference": None}],
    },
}


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        found = ANSWERS.get(self.path)
        if self.headers.get("authorization") != "Bearer secret":
            self.answer(401, {"error": {"message": "this needs the admin token"}})
        elif found is None:
            self.answer(404, {"error": {"message": "session x: it has no place"}})
        else:
            self.answer(200, found)

    def answer(self, status: int, body: dict[str, Any]) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("DELTASERVE_ADMIN_TOKEN", "secret")
    server = HTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_top_shows_who_waits_before_who_has_a_place(url: str) -> None:
    shown = deltaserve("route", "top", url).stdout
    assert "1 with a place, 1 waiting, 61,000 tokens booked on 1 workers" in shown
    late, main = (
        next(line for line in shown.splitlines() if word in line) for word in ("late", "main")
    )
    assert shown.index(late) < shown.index(main)
    assert "late [red]?[2J" in late
    assert "12.3" in late
    assert "no_room" in late
    assert "w0" in main
    assert "running" in main


def test_trace_shows_what_each_turn_of_a_session_came_to(url: str) -> None:
    shown = deltaserve("route", "trace", "a/b", "--url", url).stdout
    done, runs = (
        next(line for line in shown.splitlines() if word in line) for word in (" ok ", " runs ")
    )
    for figure in ("400.0", "38,010", "210", "37,000", "790", "0.5"):
        assert figure in done
    assert "changed: system 0, at token 36, 35,524 lost: cc_version=2.1.197.c8e?[2J" in done
    assert "38,000" in runs
    assert "~37,790" in runs


def test_what_the_router_refuses_is_one_line(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = deltaserve("route", "trace", "x", "--url", url)
    assert gone.returncode == 2
    assert "HTTP 404: session x: it has no place" in gone.stderr
    monkeypatch.delenv("DELTASERVE_ADMIN_TOKEN")
    closed = deltaserve("route", "top", url)
    assert closed.returncode == 2
    assert "HTTP 401: this needs the admin token" in closed.stderr
    assert deltaserve("route", "top", "localhost:1").returncode == 2
