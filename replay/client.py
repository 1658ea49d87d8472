"""Sends planned requests over HTTP and turns each answer into a result.

Owns sockets, time stamps and the classification of errors. Must not know when requests are due, nor
where results go.
"""

from __future__ import annotations

import asyncio
import http.client
import secrets
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import orjson

from deltaserve.errors import InputError
from replay.engines import PATHS, Api, BodyMaker, StreamError, parser_for
from replay.http import Head, ProtocolError, Server
from replay.plan import Planned
from replay.prompts import PromptMaker
from replay.results import ErrorInfo, ErrorKind, Result

_ERROR_TEXT_BYTES = 2000
_PREPARED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """How requests are made. `vocab_size` bounds token ids; `as_text` sends words in place of
    ids."""

    url: str
    api: Api
    model: str
    vocab_size: int
    seed: int
    timeout_s: float
    record_output_ids: bool
    splice_outputs: bool
    as_text: bool


def find_engine(url: str, timeout_s: float = 10.0) -> tuple[Api, str]:
    """The dialect and the model's name that a server answers to, from its `/v1/models`."""
    address = f"{url}/v1/models"
    try:
        with urllib.request.urlopen(address, timeout=timeout_s) as response:
            models = orjson.loads(response.read())["data"]
    except urllib.error.HTTPError as error:
        raise InputError(f"--url {url}: {address} answered {error.code}, expected 200") from None
    except (OSError, http.client.HTTPException) as error:
        raise InputError(f"--url {url}: no server answers there ({error})") from None
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise InputError(
            f"--url {url}: {address}: expected a JSON object with a list `data`"
        ) from None
    if not models:
        raise InputError(f"--url {url}: {address} names no model")
    return ("sglang" if models[0].get("owned_by") == "sglang" else "openai"), models[0]["id"]


class Client:
    """Sends requests of one process; `on_result` gets each result as it is known."""

    def __init__(
        self,
        options: ClientOptions,
        clock: Callable[[], float],
        on_result: Callable[[Result], None],
        on_first_token: Callable[[float], None] = lambda ttft_s: None,
    ) -> None:
        self._options = options
        self._clock = clock
        self._on_result = on_result
        self._on_first_token = on_first_token
        self._path = PATHS[options.api]
        self._record_ids = options.record_output_ids or options.splice_outputs
        self._bodies = BodyMaker(options.api, options.model, self._record_ids)
        self._prompts = PromptMaker(options.vocab_size, options.seed)
        # SGLang aborts by prefix of the id, and up to 2 s after an answer a new request of its id:
        # an id must be no other's prefix, and no other run's.
        self._run_id = secrets.token_hex(4)
        self._prepared: dict[int, bytes] = {}
        self._prepared_bytes = 0
        self._answers: dict[str, tuple[Planned, list[int]]] = {}
        self._server = Server(options.url)

    def close(self) -> None:
        """Closes idle connections."""
        self._server.close()

    def prepare(self, request: Planned) -> None:
        """Makes a request's body ahead of its time, unless enough are waiting already."""
        if request.index not in self._prepared and self._prepared_bytes < _PREPARED_BYTES:
            body = self._make_body(request)
            self._prepared[request.index] = body
            self._prepared_bytes += len(body)

    def _take_body(self, request: Planned) -> bytes:
        body = self._prepared.pop(request.index, None)
        if body is None:
            return self._make_body(request)
        self._prepared_bytes -= len(body)
        return body

    def _make_body(self, request: Planned) -> bytes:
        if self._options.splice_outputs:
            self._splice(request)
        ids = request.hash_ids.tolist()
        as_text = self._options.as_text or self._options.api == "chat"
        engine_id = f"{request.request_id}~{self._run_id}"
        head, tail = self._bodies.around(request.output_length, engine_id, text=as_text)
        if as_text:
            words = self._prompts.text(ids, request.block_size, request.input_length)
            return head + orjson.dumps(words) + tail
        return self._prompts.json_tokens(ids, request.block_size, request.input_length, head, tail)

    def _splice(self, request: Planned) -> None:
        """Puts the previous answer's tokens where the trace has a stand-in for them: the blocks of
        this prompt after those that the previous one filled begin with the previous prompt's
        started block and the answer. Left alone when this prompt does not continue the previous one
        (the agent compacted its context)."""
        previous, output_ids = self._answers.pop(request.session_id, (None, []))
        if previous is None or previous.block_size != request.block_size:
            return
        size = request.block_size
        full = previous.input_length // size
        end = previous.input_length + len(output_ids)
        if request.input_length < end or not np.array_equal(
            previous.hash_ids[:full], request.hash_ids[:full]
        ):
            return
        tail = self._prompts.tokens(
            previous.hash_ids[full:].tolist(), size, previous.input_length - full * size
        )
        spliced = np.concatenate([tail, np.asarray(output_ids, dtype=np.int64)])
        for number, hash_id in enumerate(request.hash_ids[full : -(-end // size)].tolist()):
            self._prompts.override(hash_id, size, spliced[number * size : (number + 1) * size])

    async def send(self, request: Planned, scheduled_s: float) -> None:
        """Sends one request; every outcome, also a failure, becomes one result."""
        result = Result(
            request_id=request.request_id,
            session_id=request.session_id,
            turn=request.turn,
            input_length=request.input_length,
            output_length=request.output_length,
            trace_s=request.trace_s,
            scheduled_s=scheduled_s,
        )
        try:
            await self._exchange(request, result)
        except asyncio.CancelledError:
            result.error = ErrorInfo(kind="cancelled", message="the run was stopped")
            raise
        except TimeoutError:
            result.error = ErrorInfo(
                kind="timeout", message=f"no complete answer within {self._options.timeout_s:g} s"
            )
        except ProtocolError as error:
            result.error = ErrorInfo(kind="disconnect", message=str(error))
        except OSError as error:
            kind: ErrorKind = "disconnect" if result.status else "connect"
            result.error = ErrorInfo(kind=kind, message=f"{type(error).__name__}: {error}")
        except StreamError as error:
            result.error = ErrorInfo(kind="engine_error", message=str(error))
        except Exception as error:
            result.error = ErrorInfo(kind="client_bug", message=f"{type(error).__name__}: {error}")
        finally:
            if result.finished_s is None:
                result.finished_s = self._clock()
            self._on_result(result)

    async def _exchange(self, request: Planned, result: Result) -> None:
        headers = {"x-session-id": request.session_id, "x-request-id": request.request_id}
        body = self._take_body(request)
        clock = self._clock
        parser = parser_for(self._options.api, self._record_ids)
        refusal: list[bytes] = []

        def on_head(head: Head) -> None:
            result.status = head.status
            result.decision_id = head.headers.get("x-deltaserve-decision-id")

        def on_body(data: bytes) -> None:
            now_s = clock()
            if result.status != 200:
                refusal.append(data)
                return
            seen = parser.feed(data)
            if seen > result.output_tokens:
                if not result.output_tokens:
                    result.first_token_s = now_s
                    self._on_first_token(now_s - (result.scheduled_s or 0.0))
                result.output_tokens = seen
                result.arrivals.append((now_s, seen))

        result.sent_s = clock()
        async with asyncio.timeout(self._options.timeout_s):
            await self._server.post(self._path, headers, body, on_head, on_body)
        result.finished_s = clock()
        if result.status != 200:
            text = b"".join(refusal)[:_ERROR_TEXT_BYTES].decode(errors="replace")
            by_server = result.status is None or result.status >= 500
            kind: ErrorKind = "server_error" if by_server else "client_error"
            result.error = ErrorInfo(kind=kind, message=text)
            return
        answer = parser.close()
        result.prompt_tokens = answer.prompt_tokens
        result.cached_tokens = answer.cached_tokens
        if self._options.record_output_ids:
            result.output_ids = answer.output_ids
        if result.output_tokens < request.output_length:
            whole = "" if answer.done else "; the stream ended early"
            result.error = ErrorInfo(
                kind="short_output" if answer.done else "disconnect",
                message=f"{result.output_tokens} of {request.output_length} tokens{whole}",
            )
        elif self._options.splice_outputs and answer.output_ids:
            self._answers[request.session_id] = (request, answer.output_ids)
