"""Sends planned requests over HTTP and turns each answer into a result.

Owns time stamps and the classification of errors. Must not know when requests are due, what their
bodies hold, nor where results go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from replay.bodies import Bodies, BodiesOnDemand, BodyOptions
from replay.endless import EndlessCache
from replay.engines import PATHS, Answer, Parser, StreamError, parser_for
from replay.http import Head, ProtocolError, Server
from replay.plan import Planned
from replay.results import ErrorInfo, ErrorKind, Phase, Result

_ERROR_TEXT_BYTES = 2000


@dataclass(frozen=True, slots=True)
class ClientOptions(BodyOptions):
    """How requests are made and sent."""

    url: str
    timeout_s: float
    prime_timeout_s: float
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Sent:
    """What became of a request, and for how long a server that refused it does not want another."""

    result: Result
    retry_after_s: float | None = None


class Client:
    """Sends requests of one process; `on_result` gets each result as it is known."""

    def __init__(
        self,
        options: ClientOptions,
        clock: Callable[[], float],
        on_result: Callable[[Result], None],
        on_first_token: Callable[[float], None] = lambda ttft_s: None,
        bodies: Bodies | None = None,
        endless: EndlessCache | None = None,
        phase_of: Callable[[float], Phase] = lambda scheduled_s: "measure",
    ) -> None:
        self._endless = endless
        self._phase_of = phase_of
        self.why_stopped: ErrorInfo = ErrorInfo(kind="cancelled", message="the run was stopped")
        self._options = options
        self._clock = clock
        self._on_result = on_result
        self._on_first_token = on_first_token
        self._path = PATHS[options.api]
        self._record_ids = options.record_output_ids or options.splice_outputs
        self._bodies = bodies or BodiesOnDemand(options)
        self._server = Server(options.url)

    def close(self) -> None:
        """Closes idle connections."""
        self._server.close()

    async def send(self, request: Planned, scheduled_s: float) -> Sent:
        """Sends one request; every outcome, also a failure, becomes one result."""
        result = Result(
            request_id=request.request_id,
            session_id=request.session_id,
            turn=request.turn,
            input_length=request.input_length,
            output_length=request.output_length,
            play=request.play,
            trace_s=request.trace_s,
            scheduled_s=scheduled_s,
        )
        stream = _Stream(
            result,
            parser_for(self._options.api, self._record_ids),
            self._clock,
            self._on_first_token,
            lambda: self._endless.cached_tokens(request) if self._endless else None,
        )
        try:
            await self._exchange(request, result, stream)
        except asyncio.CancelledError:
            result.error = self.why_stopped
            raise
        except TimeoutError:
            result.error = ErrorInfo(
                kind="timeout", message=f"no complete answer within {self._limit_s(request):g} s"
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
            # Only now is it known when the window begins, which may be after this was sent.
            result.phase = "prime" if request.primes else self._phase_of(scheduled_s)
            self._on_result(result)
        return Sent(result, stream.retry_after_s)

    async def _exchange(self, request: Planned, result: Result, stream: _Stream) -> None:
        headers = {"x-session-id": request.session_id, "x-request-id": request.request_id}
        headers.update(self._options.headers)
        async with asyncio.timeout(self._limit_s(request)):
            # The body has no name here: it is let go of when it is sent.
            await self._server.post(self._path, headers, await self._bodies.take(request), stream)
        result.finished_s = self._clock()
        if result.status != 200:
            text = stream.said.decode(errors="replace")
            by_server = result.status is None or result.status >= 500
            kind: ErrorKind = "server_error" if by_server else "client_error"
            result.error = ErrorInfo(kind=kind, message=text)
            return
        answer = stream.parser.close()
        self._check(request, result, answer, stream.said)
        spliced = self._options.splice_outputs and not request.primes
        if spliced and answer.output_ids and result.error is None:
            self._bodies.answered(request, answer.output_ids)
            if self._endless:
                self._endless.answered(request, len(answer.output_ids))

    def _limit_s(self, request: Planned) -> float:
        limit_s = self._options.timeout_s
        return min(limit_s, self._options.prime_timeout_s) if request.primes else limit_s

    def _check(
        self, request: Planned, result: Result, answer: Answer, said: bytes | bytearray
    ) -> None:
        result.prompt_tokens = answer.prompt_tokens
        result.cached_tokens = answer.cached_tokens
        if self._options.record_output_ids:
            result.output_ids = answer.output_ids
        result.counted_by = answer.counted_by
        result.output_tokens = max(result.output_tokens, answer.tokens)
        # Without any usage how many tokens the chunks held is not known.
        known = answer.counted_by == "usage" or answer.has_usage
        whole = result.output_tokens >= request.output_length if known else answer.done
        if not whole:
            ending = "" if answer.done else "; the stream ended early"
            if said and not result.output_tokens and not answer.done:  # it may have been no stream
                ending += f", after: {said.decode(errors='replace')}"
            result.error = ErrorInfo(
                kind="short_output" if answer.done else "disconnect",
                message=f"{result.output_tokens} of {request.output_length} tokens{ending}",
            )


@dataclass(slots=True)
class _Stream:
    """Writes what happens to a request into its result, as it happens."""

    result: Result
    parser: Parser
    clock: Callable[[], float]
    on_first_token: Callable[[float], None]
    best_cached_tokens: Callable[[], int | None]
    said: bytearray = field(default_factory=bytearray)
    retry_after_s: float | None = None

    def on_connected(self) -> None:
        # Only now, and not when it was due, does this prompt come before others: bodies that take
        # longer to make, and connections that take longer to stand, change the order.
        self.result.best_cached_tokens = self.best_cached_tokens()
        self.result.sent_s = self.clock()

    def on_head(self, head: Head) -> None:
        self.result.status = head.status
        self.result.decision_id = head.headers.get("x-deltaserve-decision-id")
        if head.status != 200:
            self.retry_after_s = head.retry_after_s()

    def on_body(self, data: bytes) -> None:
        now_s = self.clock()
        result = self.result
        if not result.output_tokens:  # the words of a server that has no tokens for us
            self.said += data[: _ERROR_TEXT_BYTES - len(self.said)]
        if result.status != 200:
            return
        seen = self.parser.feed(data)
        if seen > result.output_tokens:
            if not result.output_tokens:
                result.first_token_s = now_s
                self.on_first_token(now_s - (result.scheduled_s or 0.0))
            result.output_tokens = seen
            result.arrivals.append((now_s, seen))
