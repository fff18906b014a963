"""Effects: what an exchange asks its driver to do. And `Span`, a list of views as one
sequence of bytes, for whoever moves them.

The protocol does no I/O. Code that needs bytes to move is a coroutine, an `Exchange`,
that awaits one of these effects: `count = await Receive(views)`. The effect passes up
to the driver, which carries it out and resumes the coroutine with the result. There are
drivers for Trio, for threads and for asyncio; a fuzzer or a simulated network can be
one, too.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias, TypeVar

_T = TypeVar("_T")


class Send(NamedTuple):
    """Send all of these views, in order."""

    views: Sequence[memoryview]

    def __await__(self) -> Generator["Send", None, None]:
        yield self


class Receive(NamedTuple):
    """Receive at least one byte into these views, in order.

    The result is the number of bytes received, 0 at the end of the stream. `idle` says
    that no frame has begun, so that the peer may take as long as it wants.
    """

    views: Sequence[memoryview]
    idle: bool = False

    def __await__(self) -> Generator["Receive", int, int]:
        return (yield self)


class Fill(NamedTuple):
    """Receive until a span is full, or the stream ends; call `progress` whenever bytes
    have arrived.

    A long payload comes in many pieces. They do not climb to the exchange one by one:
    the driver has the loop.
    """

    span: "Span"
    progress: Callable[["Span"], None] | None = None

    def __await__(self) -> Generator["Fill", None, None]:
        yield self

    async def receive_by(self, receive: Callable[[list[memoryview]], Awaitable[int]]) -> None:
        """Do it, under Trio or asyncio. `receive` is that of the stream."""
        span = self.span
        while span.remaining and self.arrived(await receive(span.next_views(CHUNK_BYTES))):
            pass

    def arrived(self, count: int) -> bool:
        """Move on by the bytes that have arrived; return whether the stream goes on."""
        if count:
            self.span.advance(count)
            if self.progress is not None:
                self.progress(self.span)
        return count > 0


class SendDescriptors(NamedTuple):
    """Send all of these views, in order, and these descriptors with the first byte.

    Works over a Unix socket only.
    """

    views: Sequence[memoryview]
    descriptors: Sequence[int]

    def __await__(self) -> Generator["SendDescriptors", None, None]:
        yield self


class ReceiveDescriptors(NamedTuple):
    """As `Receive`, and append to `descriptors` those that come with the bytes."""

    views: Sequence[memoryview]
    descriptors: list[int]

    def __await__(self) -> Generator["ReceiveDescriptors", int, int]:
        return (yield self)


class LongBody:
    """A body is about to arrive that is too long for the buffer; wait for memory.

    The body has `length` bytes; `arrived` counts those that have come since. Only the
    server's end awaits it, after the hello.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.arrived = 0

    def __await__(self) -> Generator["LongBody", None, None]:
        yield self


class Pause(NamedTuple):
    """Let other tasks run. No bytes move."""

    def __await__(self) -> Generator["Pause", None, None]:
        yield self


Effect: TypeAlias = Send | Receive | Fill | SendDescriptors | ReceiveDescriptors | LongBody | Pause
Exchange: TypeAlias = Coroutine[Any, Any, _T]
"""A coroutine whose awaits end in effects, and in nothing else."""


MAX_VIEWS = 1024
"""The maximum number of views that one system call takes (IOV_MAX on Linux)."""
CHUNK_BYTES = 256 * 1024
"""The maximum that one receive of a `Fill` asks for, in bytes.

The received bytes are still in a near cache when they are hashed.
"""


class Span:
    """Consecutive views that are filled or emptied from the front.

    `complete` counts the views that are finished, `remaining` the bytes that are not.
    """

    __slots__ = ("_ends", "_position", "_views", "complete", "remaining")

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        self._ends = list(accumulate(map(len, views)))
        self._position = 0
        self.complete = bisect_right(self._ends, 0)  # past views without bytes
        self.remaining = self._ends[-1] if views else 0

    def next_views(self, most_bytes: int) -> list[memoryview]:
        """Return the next views: 1 to `most_bytes` bytes, at most `MAX_VIEWS` views."""
        first, ends = self.complete, self._ends
        limit = self._position + most_bytes
        stop = min(bisect_left(ends, limit, first) + 1, first + MAX_VIEWS)
        views = list(self._views[first:stop])
        if views:
            if (beyond := ends[first + len(views) - 1] - limit) > 0:
                views[-1] = views[-1][:-beyond]
            if done := self._position - (ends[first - 1] if first else 0):
                views[0] = views[0][done:]
        return views

    def advance(self, count: int) -> None:
        """Move on by `count` bytes."""
        self.remaining -= count
        self._position += count
        self.complete = bisect_right(self._ends, self._position, self.complete)

    def copy_in(self, data: memoryview) -> None:
        """Fill the front with `data`, no longer than what remains, and move on."""
        position = 0
        for view in self.next_views(len(data)) if len(data) else ():
            view[:] = data[position : position + len(view)]
            position += len(view)
        self.advance(position)
        if position < len(data):  # more views than fit one call
            self.copy_in(data[position:])
