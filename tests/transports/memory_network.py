"""A network inside one Trio run: streams and a listener without sockets, and without
luck.

What is sent arrives, in order, but in pieces whose sizes somebody else chooses:
Hypothesis, or a seeded generator. So a header, a key or a payload is split anywhere,
and each split can be replayed. A stream that nobody reads from fills up, as a socket
does. Time passes only where a test lets it pass: with `autojump_clock` a slow peer
costs nothing.
"""

import math
import random
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import trio

from infinistore.errors import StoreUnavailable
from infinistore.protocol.effects import Span
from infinistore.transports.base import React

__all__ = ["Chunks", "MemoryListener", "MemoryStream", "random_chunks", "stream_pair", "whole"]

Chunks = Callable[[int], int]
"""How many bytes the next call moves, at least 1, given the most that it could move."""

CAPACITY_BYTES = 256 * 1024


def whole(most: int) -> int:
    """Move all that can be moved."""
    return most


def random_chunks(seed: int) -> Chunks:
    """Move anything from one byte to everything; small pieces often."""
    generator = random.Random(seed)

    def choose(most: int) -> int:
        return generator.randint(1, generator.choice([min(most, 7), min(most, 100), min(most, 5000), most]))

    return choose


class _Pipe:
    """One direction: bytes on their way, and how it ended."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.data = bytearray()
        self.ended = False
        """The sender sends nothing more; what is on its way still arrives."""
        self.broken = ""
        """Why nothing moves any more, either way; empty while it does."""
        self.changed = trio.lowlevel.ParkingLot()

    def end(self) -> None:
        self.ended = True
        self.changed.unpark_all()

    def break_off(self, why: str) -> None:
        self.broken = self.broken or why
        self.changed.unpark_all()


@contextmanager
def _until(deadline: float) -> Iterator[None]:
    with trio.CancelScope(deadline=deadline) as scope:
        yield
    if scope.cancelled_caught:
        raise TimeoutError


class MemoryStream:
    """One end of a connection; keeps the promises of
    `infinistore.transports.base.Stream`.

    Each call is a checkpoint before it moves anything, so a cancelled receive loses no
    bytes. `calls` counts them.
    """

    passes_descriptors = False

    def __init__(self, outgoing: _Pipe, incoming: _Pipe, chunks: Chunks) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self._chunks = chunks
        self.closed = False

    async def send_all(self, views: Sequence[memoryview], within_s: float = math.inf) -> None:
        with _until(trio.current_time() + within_s):  # real time: as its callers say
            await self._send_all(views)

    async def receive_into(self, views: Sequence[memoryview], deadline: float = math.inf) -> int:
        with _until(deadline):
            return await self._receive_into(views)

    async def receive_or_react(self, views: Sequence[memoryview], react: React) -> int:
        while True:
            count = await self.receive_into(views)
            answer = react(count) if count else 0
            if answer is not None:
                return answer

    def send_now(self, views: Sequence[memoryview]) -> Sequence[memoryview]:
        span = Span(views)
        pipe = self._outgoing
        self._check(pipe)
        room = pipe.capacity_bytes - len(pipe.data)
        if room > 0:
            self._move(pipe, span, self._chunks(min(room, span.remaining)))
        return span.next_views(span.remaining)

    def _move(self, pipe: _Pipe, span: Span, count: int) -> None:
        moved = 0
        for view in span.next_views(count):
            pipe.data += view
            moved += len(view)
        span.advance(moved)
        pipe.changed.unpark_all()

    async def _send_all(self, views: Sequence[memoryview]) -> None:
        span = Span(views)
        pipe = self._outgoing
        while span.remaining:
            await trio.lowlevel.checkpoint()
            while True:
                self._check(pipe)
                room = pipe.capacity_bytes - len(pipe.data)
                if room > 0:
                    break
                await pipe.changed.park()
            self._move(pipe, span, self._chunks(min(room, span.remaining)))

    async def _receive_into(self, views: Sequence[memoryview]) -> int:
        pipe = self._incoming
        await trio.lowlevel.checkpoint()
        while True:
            self._check(pipe)
            if pipe.data:
                break
            if pipe.ended:
                return 0
            await pipe.changed.park()
        span = Span(views)
        count = self._chunks(min(len(pipe.data), span.remaining))
        span.copy_in(memoryview(bytes(pipe.data[:count])))
        del pipe.data[:count]
        pipe.changed.unpark_all()
        return count

    async def send_eof(self) -> None:
        self._outgoing.end()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """Close this end: the peer reads what is on its way, then the end; what it
        sends breaks.
        """
        if not self.closed:
            self.closed = True
            self._outgoing.end()
            self._incoming.break_off("the other end was closed")
            self._outgoing.changed.unpark_all()

    def cut(self) -> None:
        """Lose the connection: nothing arrives any more, both ends learn it at once."""
        for pipe in (self._outgoing, self._incoming):
            pipe.break_off("the connection was cut")

    def is_stale(self) -> bool:
        pipe = self._incoming
        return bool(pipe.ended or pipe.broken or pipe.data)

    @property
    def unread(self) -> bytes:
        """What the peer has sent and this end has not read."""
        return bytes(self._incoming.data)

    def _check(self, pipe: _Pipe) -> None:
        if self.closed:
            raise StoreUnavailable("the connection was closed on this side")
        if pipe.broken:
            raise StoreUnavailable(f"the connection broke: {pipe.broken}")


def stream_pair(chunks: Chunks = whole, *, capacity_bytes: int = CAPACITY_BYTES) -> tuple[MemoryStream, MemoryStream]:
    """Return the two ends of a new connection."""
    there, back = _Pipe(capacity_bytes), _Pipe(capacity_bytes)
    return MemoryStream(there, back, chunks), MemoryStream(back, there, chunks)


class MemoryListener(socket.socket):
    """What a server listens on: a socket only by type, because a server closes its
    listeners as sockets.
    """

    def __init__(self, chunks: Chunks = whole, *, capacity_bytes: int = CAPACITY_BYTES) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        self._chunks = chunks
        self._capacity_bytes = capacity_bytes
        self._waiting: deque[MemoryStream] = deque()
        self._changed = trio.lowlevel.ParkingLot()

    def connect_stream(self, chunks: Chunks | None = None) -> MemoryStream:
        """Connect, as a client: return the client's end.

        Raises:
            StoreUnavailable: nobody listens any more.
        """
        if self.fileno() == -1:
            raise StoreUnavailable("nobody listens any more")
        mine, theirs = stream_pair(chunks or self._chunks, capacity_bytes=self._capacity_bytes)
        self._waiting.append(theirs)
        self._changed.unpark_all()
        return mine

    async def accept_stream(self) -> MemoryStream:
        """Wait for the next connection, as
        `infinistore.transports.sockets.trio_streams.accept` does.
        """
        await trio.lowlevel.checkpoint()
        while not self._waiting:
            if self.fileno() == -1:
                raise trio.ClosedResourceError
            await self._changed.park()
        return self._waiting.popleft()

    def close(self) -> None:
        super().close()
        while self._waiting:
            self._waiting.pop().close()
        self._changed.unpark_all()
