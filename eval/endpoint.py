"""Arms that are servers somewhere: nothing is started, caches are emptied where the server can.

Owns what stands in for a topology and a fleet there. Knows servers by HTTP alone.
"""

from __future__ import annotations

import contextlib
import http.client
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deltaserve.errors import InputError
from eval.experiment import Arm
from replay.discovery import find_engine, find_vocab_size
from replay.options import resolve_headers

# SGLang's, and vLLM's where it runs in its development mode.
_FLUSHES = ("/flush_cache", "/reset_prefix_cache")
_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Endpoint:
    """A server that somebody else runs. `headers` are `NAME=VALUE`, with `@VARIABLE` in them for
    what the environment holds; `gpus` how many it has, where that is known."""

    url: str
    gpus: int | None = None
    headers: tuple[str, ...] = ()

    @staticmethod
    def of(arm: Arm) -> Endpoint:
        """The endpoint of an arm that has a `url`."""
        assert arm.url
        headers = tuple(f"{name}={value}" for name, value in arm.headers.items())
        return Endpoint(arm.url.rstrip("/"), arm.gpus, headers)

    def check(self) -> None:
        """Raises `InputError` where no server answers, or a header's variable is not set."""
        find_engine(self.url, resolve_headers(self.headers))

    def describe(self) -> dict[str, Any]:
        """What a run's manifest says in place of a topology."""
        api, model = "unknown", "unknown"
        # A server that is away now may be back for its run; if not, the replay says so.
        with contextlib.suppress(InputError):
            api, model = find_engine(self.url, resolve_headers(self.headers))
        return {"url": self.url, "gpus": self.gpus, "model": model, "api": api}

    def vocab_size(self) -> int | None:
        """The vocabulary of its model, where its folder can be read here."""
        with contextlib.suppress(InputError):
            return find_vocab_size(self.url, resolve_headers(self.headers))
        return None

    def flush(self) -> str | None:
        """Empties the server's caches; returns the path that did it, None where the server has
        none that does."""
        headers = dict(resolve_headers(self.headers))
        for path in _FLUSHES:
            request = urllib.request.Request(self.url + path, b"", headers, method="POST")
            with (
                contextlib.suppress(OSError, http.client.HTTPException),
                urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response,
            ):
                if response.status == 200:
                    return path
        return None


@dataclass(frozen=True)
class AttachedFleet:
    """An endpoint as the runner sees a fleet. `flushed_by` None: its caches could not be emptied,
    and only prompts that no run had before find nothing there."""

    router_url: str
    flushed_by: str | None
    workers: Sequence[Any] = ()
    engine_versions: Mapping[str, str] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)

    def check(self) -> None:
        """Of a server elsewhere no process is known; that it fails, its answers say."""


@contextlib.contextmanager
def attached(
    endpoint: Endpoint, folder: Path, say: Callable[[str], None]
) -> Iterator[AttachedFleet]:
    """The fleet of a run against an endpoint, with empty caches where the server can."""
    folder.mkdir(parents=True, exist_ok=True)
    flushed_by = endpoint.flush()
    say(
        f"{endpoint.url}: caches emptied by {flushed_by}"
        if flushed_by
        else f"{endpoint.url}: has no {' or '.join(_FLUSHES)}; prompts that it has not seen"
    )
    yield AttachedFleet(endpoint.url, flushed_by)
