"""Request bodies: what they hold, and a process that makes them ahead of their time.

A prompt of 600 kB takes over a millisecond to make, in which a client that made it itself could
neither send another request in time nor stamp a token. Owns the prompts' tokens on their way into a
body; must not know sockets to servers, nor when requests are due.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import mmap
import multiprocessing
import os
import secrets
import select
import signal
import socket
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import orjson

from replay.engines import Api, BodyMaker
from replay.plan import Planned
from replay.plays import Plays
from replay.prompts import PromptMaker, play_seed

Body = bytes | memoryview

_AHEAD_BYTES = 128 << 20
# Smaller bodies go through the socket itself; its buffers hold that much wherever Linux runs.
_INLINE_BYTES = 32 << 10
_BYTES_A_TOKEN = 6
_READY, _SHARED, _FAILED = range(3)
_HEADER = struct.Struct("<qBq")


@dataclass(frozen=True, slots=True)
class BodyOptions:
    """What bodies look like. `vocab_size` bounds token ids; `as_text` sends `words` in
    place of ids."""

    api: Api
    model: str
    vocab_size: int
    seed: int
    record_output_ids: bool
    splice_outputs: bool
    as_text: bool
    words: tuple[str, ...]


class BodyFactory:
    """Makes the bodies of one process's requests."""

    def __init__(self, options: BodyOptions) -> None:
        self._options = options
        self._as_text = options.as_text or options.api == "chat"
        record_ids = options.record_output_ids or options.splice_outputs
        self._around = BodyMaker(options.api, options.model, record_ids)
        self._plays: dict[int, PromptMaker] = {}
        # SGLang aborts by prefix of the id, and up to 2 s after an answer a new request of its id:
        # an id must be no other's prefix, and no other run's.
        self._run_id = secrets.token_hex(4)
        self._answers: dict[str, tuple[Planned, Sequence[int]]] = {}

    def make(self, request: Planned) -> bytes:
        """The body of a request."""
        prompts = self._prompts_of(request.play)
        if self._options.splice_outputs:
            self._splice(request, prompts)
        ids = request.hash_ids.tolist()
        engine_id = f"{request.request_id}~{self._run_id}"
        head, tail = self._around.around(request.output_length, engine_id, text=self._as_text)
        if self._as_text:
            words = self._options.words
            prompt = prompts.text(ids, request.block_size, request.input_length, words)
            return head + orjson.dumps(prompt) + tail
        return prompts.json_tokens(ids, request.block_size, request.input_length, head, tail)

    def answered(self, request: Planned, output_ids: Sequence[int]) -> None:
        """Notes an answer, to be spliced into the session's next prompt."""
        self._answers[request.session_id] = (request, output_ids)

    def _prompts_of(self, play: int) -> PromptMaker:
        """The prompts of a play: those of the trace, with tokens that no other play has."""
        if play not in self._plays:
            # Few sessions of the play before the last are still going on; theirs are made again.
            for older in self._plays:
                if older < play - 1:
                    self._plays[older].forget()
            seed = play_seed(self._options.seed, play)
            self._plays[play] = PromptMaker(self._options.vocab_size, seed)
        return self._plays[play]

    def _splice(self, request: Planned, prompts: PromptMaker) -> None:
        """Puts the previous answer's tokens where the trace has a stand-in for them: the blocks of
        this prompt after those that the previous one filled begin with the previous prompt's
        started block and the answer. Left alone when this prompt does not continue the previous one
        (the agent compacted its context)."""
        previous, output_ids = self._answers.pop(request.session_id, (None, []))
        if previous is None or not continues(previous, len(output_ids), request):
            return
        size = request.block_size
        full = previous.input_length // size
        end = previous.input_length + len(output_ids)
        tail = prompts.tokens(
            previous.hash_ids[full:].tolist(), size, previous.input_length - full * size
        )
        spliced = np.concatenate([tail, np.asarray(output_ids, dtype=np.int64)])
        for number, hash_id in enumerate(request.hash_ids[full : -(-end // size)].tolist()):
            prompts.override(hash_id, size, spliced[number * size : (number + 1) * size])


def continues(previous: Planned, answer_tokens: int, request: Planned) -> bool:
    """Whether a prompt can hold the previous prompt and its answer: it begins with all blocks that
    the previous prompt filled, and is long enough."""
    full = previous.input_length // previous.block_size
    return (
        previous.block_size == request.block_size
        and request.input_length >= previous.input_length + answer_tokens
        and np.array_equal(previous.hash_ids[:full], request.hash_ids[:full])
    )


class Bodies(Protocol):
    """Where a client gets its bodies from."""

    async def take(self, request: Planned) -> Body:
        """The body of a request that is to be sent now."""

    def answered(self, request: Planned, output_ids: Sequence[int]) -> None:
        """Notes an answer, to be spliced into the session's next prompt."""


class BodiesOnDemand:
    """Bodies made where they are needed, when they are: for a few requests at a time."""

    def __init__(self, options: BodyOptions) -> None:
        self._factory = BodyFactory(options)
        self.answered = self._factory.answered

    async def take(self, request: Planned) -> bytes:
        return self._factory.make(request)


class BodiesAhead:
    """Bodies made by a process beside this one, the one that is due first before others.

    A large body comes as a file in memory, from whose pages the kernel copies to the server's
    socket. To be made before the event loop runs, for it forks; `open` and all that follows belong
    inside the loop.
    """

    def __init__(self, options: BodyOptions, requests: Plays) -> None:
        self._requests = requests
        orders, self._orders = os.pipe()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = multiprocessing.get_context("fork").Process(
            target=self._make, args=(options, orders, theirs), daemon=True
        )
        self._process.start()
        os.close(orders)
        theirs.close()
        os.set_blocking(self._orders, False)
        self._socket.setblocking(False)
        self._unsent = deque[bytes]()
        self._ready: dict[int, Body | str] = {}
        self._asked: dict[int, int] = {}
        self._asked_bytes = 0
        self._takers: dict[int, asyncio.Future[None]] = {}
        self._ended = False

    def open(self) -> None:
        """Begins to receive bodies in the running loop."""
        asyncio.get_running_loop().add_reader(self._socket, self._receive)

    def close(self) -> None:
        """Ends the other process; the loop need not run any more."""
        os.close(self._orders)
        self._socket.close()
        self._process.join()

    def ask(self, index: int, due_s: float) -> bool:
        """Orders a body that will be needed at a time; false when enough are waiting already."""
        if index not in self._asked:
            if self._asked_bytes >= _AHEAD_BYTES:
                return False
            self._order(index, due_s)
        return True

    async def take(self, request: Planned) -> Body:
        index = request.index
        if index not in self._asked:
            self._order(index, -1.0)
        try:
            if index not in self._ready and not self._ended:
                self._takers[index] = asyncio.get_running_loop().create_future()
                await self._takers[index]
        finally:
            self._takers.pop(index, None)
            self._asked_bytes -= self._asked.pop(index)
        body = self._ready.pop(index, "the process that makes bodies ended")
        if isinstance(body, str):
            raise RuntimeError(body)
        return body

    def answered(self, request: Planned, output_ids: Sequence[int]) -> None:
        self._send([request.index, output_ids])

    def _order(self, index: int, due_s: float) -> None:
        self._asked[index] = _BYTES_A_TOKEN * self._requests.input_length(index)
        self._asked_bytes += self._asked[index]
        self._send([index, due_s])

    def _send(self, order: list[object]) -> None:
        self._unsent.append(orjson.dumps(order, option=orjson.OPT_APPEND_NEWLINE))
        if len(self._unsent) == 1:
            self._flush()

    def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        while self._unsent:
            try:
                sent = os.write(self._orders, self._unsent[0])
            except BlockingIOError:
                loop.add_writer(self._orders, self._flush)
                return
            except BrokenPipeError:
                break  # the end of the other process is noticed where its bodies would come
            if sent < len(self._unsent[0]):
                self._unsent[0] = self._unsent[0][sent:]
            else:
                self._unsent.popleft()
        self._unsent.clear()
        loop.remove_writer(self._orders)

    def _receive(self) -> None:
        while True:
            try:
                packet, files, _, _ = socket.recv_fds(self._socket, _HEADER.size + _INLINE_BYTES, 1)
            except BlockingIOError:
                return
            except ConnectionError:
                packet = b""
            if not packet:
                self._ended = True
                asyncio.get_running_loop().remove_reader(self._socket)
                for taker in self._takers.values():
                    if not taker.done():
                        taker.set_result(None)
                return
            index, kind, length = _HEADER.unpack_from(packet)
            content: Body | str = packet[_HEADER.size :]
            if kind == _SHARED:
                flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
                content = memoryview(mmap.mmap(files[0], length, flags, mmap.PROT_READ))
                os.close(files[0])
            elif kind == _FAILED:
                content = packet[_HEADER.size :].decode()
            if index in self._asked:  # else its request was given up
                self._ready[index] = content
            if index in self._takers and not self._takers[index].done():
                self._takers[index].set_result(None)

    def _make(self, options: BodyOptions, orders: int, out: socket.socket) -> None:
        """The other process: takes orders until there can be no more."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.close(self._orders)
        self._socket.close()
        factory = BodyFactory(options)
        waiting: list[tuple[float, int]] = []
        rest = b""
        with contextlib.suppress(ConnectionError), out:
            while True:
                if not waiting or select.select([orders], [], [], 0)[0]:
                    data = os.read(orders, 1 << 16)
                    if not data:
                        return
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        index, what = orjson.loads(line)
                        if isinstance(what, list):
                            factory.answered(self._requests[index], what)
                        else:
                            heapq.heappush(waiting, (what, index))
                    continue
                _, index = heapq.heappop(waiting)
                try:
                    body = factory.make(self._requests[index])
                except Exception as error:
                    text = f"{type(error).__name__}: {error}".encode()[:_INLINE_BYTES]
                    out.send(_HEADER.pack(index, _FAILED, len(text)) + text)
                    continue
                _hand_over(out, index, body)


def _hand_over(out: socket.socket, index: int, body: bytes) -> None:
    if len(body) <= _INLINE_BYTES:
        out.send(_HEADER.pack(index, _READY, len(body)) + body)
        return
    file = os.memfd_create("body", os.MFD_CLOEXEC)
    try:
        view = memoryview(body)
        while view:
            view = view[os.write(file, view) :]
        socket.send_fds(out, [_HEADER.pack(index, _SHARED, len(body))], [file])
    finally:
        os.close(file)
