"""Waits until a router's requests have ended.

Our router keeps a request whose client has left in the queue of an engine that does not survive its
abort (docs/router.md, "Clients that leave"). What ends the router meanwhile aborts it after all.
"""

from __future__ import annotations

import time

import orjson

from launch.http_calls import FAILURES, call

_POLL_S = 0.2
_ANSWER_TIMEOUT_S = 10.0


def wait_until_idle(router_url: str, timeout_s: float, key: str | None = None) -> bool:
    """Waits until no worker of our router at `router_url` has a request, up to `timeout_s` seconds.
    False where one still has then, or the router does not say."""
    deadline_s = time.monotonic() + timeout_s
    while (requests := _requests(router_url, key)) != 0:
        if requests is None or time.monotonic() >= deadline_s:
            return False
        time.sleep(_POLL_S)
    return True


def _requests(router_url: str, key: str | None) -> int | None:
    """Requests on all of its workers; None where it does not say."""
    try:
        url = f"{router_url}/workers"
        _, answer = call("GET", url, timeout_s=_ANSWER_TIMEOUT_S, key=key)
        workers = orjson.loads(answer)["workers"]
        return sum(int(worker["state"]["requests"]) for worker in workers)
    except (*FAILURES, ValueError, KeyError, TypeError):
        return None
