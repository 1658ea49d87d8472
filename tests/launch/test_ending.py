"""Waiting for a router's requests to end."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import orjson

from launch.ending import wait_until_idle


@contextmanager
def router(*answers: bytes) -> Iterator[str]:
    """Answers `GET /workers` with these, one after the other, the last one for good."""
    left = list(answers)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/workers"
            body = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def workers(*requests: int) -> bytes:
    return orjson.dumps({"workers": [{"state": {"requests": count}} for count in requests]})


def test_it_waits_until_no_worker_has_a_request() -> None:
    with router(workers(1, 2), workers(0, 1), workers(0, 0)) as url:
        assert wait_until_idle(url, 10.0)


def test_it_does_not_wait_for_ever() -> None:
    with router(workers(1)) as url:
        assert not wait_until_idle(url, 0.3)


def test_a_router_that_does_not_say_is_not_waited_for() -> None:
    for answer in (b"", b"{}", b'{"workers": [{}]}', b"[]"):
        with router(answer) as url:
            assert not wait_until_idle(url, 60.0)
    assert not wait_until_idle("http://127.0.0.1:9", 60.0)
