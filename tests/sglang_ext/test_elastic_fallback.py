"""A prefill worker that was replaced between two heartbeats counts as lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.elastic.fallback import notice_restart


class Bootstrap(BaseHTTPRequestHandler):
    """A prefill worker's bootstrap server: says where each rank listens."""

    rank_port = 5000
    ready = True

    def do_GET(self) -> None:
        assert self.path.startswith("/route?prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=0")
        self.send_response(200 if self.ready else 503)
        self.end_headers()
        self.wfile.write(json.dumps({"rank_ip": "127.0.0.1", "rank_port": self.rank_port}).encode())

    def log_message(self, *_: Any) -> None: ...


class Manager:
    """The parts of SGLang's KV manager that hold what it knows of prefill workers."""

    def __init__(self, address: str) -> None:
        self.lost: list[str] = []
        self.prefill_info_table = {
            address: SimpleNamespace(target_tp_ranks=[0], target_pp_ranks=[0])
        }
        known = {"rank_ip": "127.0.0.1", "rank_port": 5000, "is_dummy": False}
        self.connection_pool = {f"{address}_0_0_0": [known], "another:1_0_0_0": [known]}

    def _handle_node_failure(self, address: str) -> None:
        self.lost.append(address)


@pytest.fixture
def address() -> Iterator[str]:
    Bootstrap.rank_port, Bootstrap.ready = 5000, True
    server = ThreadingHTTPServer(("127.0.0.1", 0), Bootstrap)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_one_that_still_listens_where_it_did_is_not_lost(address: str) -> None:
    manager = Manager(address)
    notice_restart(manager, address)
    assert manager.lost == []


def test_one_that_listens_elsewhere_is_another_and_the_old_one_lost(address: str) -> None:
    manager = Manager(address)
    Bootstrap.rank_port = 6000
    notice_restart(manager, address)
    assert manager.lost == [address]


def test_one_that_is_not_ready_or_not_known_is_left_to_the_next_heartbeat(address: str) -> None:
    manager = Manager(address)
    Bootstrap.ready = False
    notice_restart(manager, address)
    notice_restart(manager, "127.0.0.1:1")
    assert manager.lost == []
