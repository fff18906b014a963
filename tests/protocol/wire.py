"""A connection without a network: runs exchanges over bytes in memory."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import cycle
from typing import TypeVar

from infinistore.errors import StoreUnavailable
from infinistore.protocol.codec import encode_head
from infinistore.protocol.effects import CHUNK_BYTES, MAX_VIEWS, Exchange, Fill, Receive, ReceiveDescriptors, Send
from infinistore.protocol.frame_reader import READ_AHEAD_BYTES
from infinistore.protocol.messages import Message

__all__ = ["Wire", "frame"]

_T = TypeVar("_T")


def frame(
    message: Message, payload: bytes = b"", *, request_id: int = 1, announced: int | None = None, deadline_us: int = 0
) -> bytes:
    """One whole frame. `announced`: what the header says of the payload's length, if
    that is not the truth.
    """
    payload_bytes = len(payload) if announced is None else announced
    return encode_head(message, request_id=request_id, payload_bytes=payload_bytes, deadline_us=deadline_us) + payload


class Wire:
    """What one end sees: `incoming` arrives in `pieces` (byte counts, over and over),
    `sent` is what it has sent.

    `sends_until_broken`: how many sends succeed before the connection breaks. What has
    arrived can still be read.
    """

    def __init__(
        self, incoming: bytes = b"", pieces: Iterable[int] = (2**30,), *, sends_until_broken: int | None = None
    ) -> None:
        self.incoming = bytearray(incoming)
        self._length = len(incoming)
        self.sent = bytearray()
        self.effects: list[tuple[object, int]] = []
        """What exchanges have asked for, each time with how much had arrived."""
        self.before_receive: Callable[[], object] = bool
        """Called before bytes arrive."""
        self._pieces = cycle(pieces)
        self._sends_left = sends_until_broken

    def run(self, exchange: Exchange[_T]) -> _T:
        """Run an exchange to its end, and return what it returns."""
        try:
            effect = exchange.send(None)
            while True:
                try:
                    count = 0
                    self.effects.append((effect, self._length - len(self.incoming)))
                    if isinstance(effect, Receive | ReceiveDescriptors):
                        count = self._receive(effect.views)
                    elif isinstance(effect, Fill):
                        self._fill(effect)
                    elif isinstance(effect, Send):
                        self._send(effect.views)
                except StoreUnavailable as error:
                    effect = exchange.throw(error)
                else:
                    effect = exchange.send(count)
        except StopIteration as stop:
            result: _T = stop.value
            return result

    def give_up(self, exchange: Exchange[object], receives: int) -> None:
        """Run an exchange that only fills a span for so many receives, and drop it
        there, as a cancelled driver does.
        """
        with suppress(StopIteration):
            effect = exchange.send(None)
            assert isinstance(effect, Fill)
            if not self._fill(effect, receives):
                exchange.send(None)
        exchange.close()

    def _fill(self, effect: Fill, receives: int = 2**30) -> int:
        """Do it by so many receives at most; return how many bytes remain."""
        span = effect.span
        while span.remaining and receives and effect.arrived(self._receive(span.next_views(CHUNK_BYTES))):
            receives -= 1
        return span.remaining

    def _receive(self, views: Sequence[memoryview]) -> int:
        self.before_receive()
        room = sum(map(len, views))
        assert 0 < room <= max(CHUNK_BYTES, READ_AHEAD_BYTES)  # never asked for nothing, never for too much
        assert len(views) <= MAX_VIEWS
        count = moved = min(room, next(self._pieces), len(self.incoming))
        for view in views:
            part = self.incoming[: min(len(view), count)]
            view[: len(part)] = part
            del self.incoming[: len(part)]
            count -= len(part)
        return moved

    def _send(self, views: Sequence[memoryview]) -> None:
        if self._sends_left is not None:
            if not self._sends_left:
                raise StoreUnavailable("the connection broke: broken pipe")
            self._sends_left -= 1
        for view in views:
            self.sent += view
