"""``deltaserve route top`` and ``deltaserve route trace``: a running router's sessions, as tables.

Owns how they look. What is shown is what the router's ``/sessions`` says; nothing is reckoned here.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from deltaserve.errors import InputError

_PATIENCE_S = 10.0


def ask(url: str, path: str, token: str | None) -> dict[str, Any]:
    """What the router at ``url`` answers to a GET of ``path``; raises InputError."""
    place = f"{url.rstrip('/')}{path}"
    if not place.startswith(("http://", "https://")):
        raise InputError(f"{url}: expected http://HOST:PORT or https://HOST:PORT")
    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        request = urllib.request.Request(place, headers=headers)
        with urllib.request.urlopen(request, timeout=_PATIENCE_S) as response:
            answer: dict[str, Any] = json.load(response)
            return answer
    except urllib.error.HTTPError as error:
        try:
            message = json.load(error)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = error.reason
        raise InputError(f"{place}: HTTP {error.code}: {message}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{place}: {getattr(error, 'reason', error)}") from None


def _console() -> Console:
    """One for which no part of an id is markup."""
    return Console(markup=False, emoji=False, highlight=False)


def _plain(text: str) -> str:
    """An id, which its client chose, without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"


def _tokens(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def sessions_table(sessions: list[dict[str, Any]], workers: list[dict[str, Any]]) -> Table:
    """Sessions, those that wait first in the queue's order, and the sum of what workers hold."""
    booked = [worker["state"]["admission"] for worker in workers]
    waiting = sum(session["state"] == "waiting" for session in sessions)
    held = sum(book["booked_tokens"] for book in booked)
    table = Table(
        title=f"{len(sessions) - waiting} with a place, {waiting} waiting, "
        f"{held:,} tokens booked on {len(workers)} workers",
        title_justify="left",
    )
    for name in ("session", "state", "worker"):
        table.add_column(name, overflow="fold")
    for name in ("tokens", "idle s", "waited s", "position"):
        table.add_column(name, justify="right")
    table.add_column("reason")
    for session in sessions:
        table.add_row(
            _plain(session["session_id"] or "(no id)"),
            session["state"],
            session["worker"] or "",
            _tokens(session["tokens"]),
            _seconds(session["idle_s"]),
            _seconds(session["waited_s"]),
            "" if session["position"] is None else str(session["position"]),
            session["reason"] or "",
        )
    return table


def first_difference(told: dict[str, Any] | None) -> str:
    """Why a turn's prompt was not cached as far as it could have been, and where it differs."""
    if told is None:
        return ""
    where = [told["part"], told["index"], told["name"] and f"({told['name']})"]
    words = " ".join(str(word) for word in where if word is not None)
    beside = f"beside {told['beside']}" if told["beside"] else ""
    cost = f"at token {told['token']:,}, {told['lost_tokens']:,} lost"
    line = ", ".join(
        filter(None, (f"{told['why']}: {words}" if words else told["why"], beside, cost))
    )
    return _plain(line + (f": {told['text']}" if told.get("text") else ""))


def turns_table(session: dict[str, Any]) -> Table:
    """A session's last turns, the newest first."""
    now = ", ".join(
        " ".join(filter(None, (place["state"], place["worker"], place["reason"])))
        for place in session["now"]
    )
    name = _plain(session["session_id"])
    table = Table(title=f"session {name}: {now or 'no place'}", title_justify="left")
    table.add_column("time")
    table.add_column("worker", overflow="fold")
    table.add_column("place")
    for name in ("waited s", "input", "new", "cached", "recomputed", "first token s"):
        table.add_column(name, justify="right")
    table.add_column("outcome")
    table.add_column("first difference", overflow="fold")
    for turn in session["turns"]:
        ended = turn["ended"] or {}
        cached = ended.get("cached_tokens")
        table.add_row(
            time.strftime("%H:%M:%S", time.localtime(turn["ts_unix_s"])),
            " → ".join(turn["route"].values()),
            turn["place"],
            _seconds(turn["waited_s"]),
            _tokens(ended.get("prompt_tokens") or turn["input_tokens"]),
            _tokens(turn["new_tokens"]),
            f"~{_tokens(turn['believed_cached_tokens'])}" if cached is None else _tokens(cached),
            _tokens(ended.get("recomputed_tokens")),
            _seconds(ended.get("first_token_s")),
            ended.get("outcome", "runs"),
            first_difference(turn["difference"]),
        )
    return table


def top(url: str, token: str | None, interval_s: float | None) -> None:
    """Shows a router's sessions, once or every ``interval_s`` seconds until Ctrl-C."""
    console = _console()

    def table() -> Table:
        workers = ask(url, "/workers", token)["workers"]
        return sessions_table(ask(url, "/sessions", token)["sessions"], workers)

    if interval_s is None:
        console.print(table())
        return
    try:
        with Live(table(), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval_s)
                live.update(table(), refresh=True)
    except KeyboardInterrupt:
        return


def trace(session: str, url: str, token: str | None) -> None:
    """Shows what a session does and what its last turns came to."""
    answer = ask(url, f"/sessions/{urllib.parse.quote(session, safe='')}", token)
    _console().print(turns_table(answer))
