"""Turns arriving bytes into heads and payloads, without the I/O: see `effects`."""

from collections.abc import Callable

from infinistore.errors import StoreUnavailable
from infinistore.protocol.codec import HEADER_BYTES, Header, head_bytes, parse_header
from infinistore.protocol.effects import Exchange, Receive, ReceiveDescriptors
from infinistore.protocol.span import Span

__all__ = ["CHUNK_BYTES", "READ_AHEAD_BYTES", "FrameReader"]

READ_AHEAD_BYTES = 64 * 1024
CHUNK_BYTES = 256 * 1024
"""The most that one `Receive` of a payload asks for: what has arrived is still in a near cache when it is hashed."""


class FrameReader:
    """Turns arriving bytes into heads and payloads. Small frames share one receive; payloads go where they belong."""

    def __init__(self, max_body_bytes: int, max_payload_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self.max_payload_bytes = max_payload_bytes
        self._buffer = memoryview(bytearray(READ_AHEAD_BYTES))
        self._next_frame = Receive([self._buffer], idle=True)
        self._start = 0
        self._end = 0

    def read_head(self, descriptors: list[int] | None = None) -> Exchange[tuple[Header, memoryview] | None]:
        """Return the next header and body, or `None` if the stream ended between two frames.

        With `descriptors`, those that come beside it are appended there.

        The body is good until the next call of any method.
        """
        if self._start == self._end and descriptors is None:  # nearly always: nothing was read ahead
            self._start = self._end = 0
            self._end = yield self._next_frame
            if not self._end:
                return None
        if self._end - self._start < HEADER_BYTES and not (yield from self._fill(HEADER_BYTES, descriptors)):
            return None
        start = self._start
        header = parse_header(
            self._buffer[start : start + HEADER_BYTES],
            max_body_bytes=self.max_body_bytes,
            max_payload_bytes=self.max_payload_bytes,
        )
        length = head_bytes(header.body_bytes)
        if length > len(self._buffer):
            head = yield from self._read_long_head(length)
            return header, head[HEADER_BYTES : HEADER_BYTES + header.body_bytes]
        if self._end - start < length:
            yield from self._fill(length)
            start = self._start
        self._start = start + length
        start += HEADER_BYTES
        return header, self._buffer[start : start + header.body_bytes]

    def _read_long_head(self, length: int) -> Exchange[memoryview]:
        """Read a head longer than the buffer. Memory grows with what has arrived, not with what was announced."""
        head = bytearray()
        while len(head) < length:
            piece = bytearray(min(length - len(head), max(len(head), READ_AHEAD_BYTES)))
            yield from self.read_payload(Span([memoryview(piece)]))
            head += piece
        return memoryview(head)

    def read_payload(self, span: Span, progress: Callable[[Span], None] | None = None) -> Exchange[None]:
        """Fill the span with the bytes that come next, calling `progress` whenever some have arrived."""
        ahead = min(self._end - self._start, span.remaining)
        if ahead:
            span.copy_in(self._buffer[self._start : self._start + ahead])
            self._start += ahead
            if progress is not None:
                progress(span)
        while span.remaining:
            count = yield Receive(span.next_views(CHUNK_BYTES))
            if not count:
                raise StoreUnavailable(f"the connection ended {span.remaining} bytes before the end of a frame")
            span.advance(count)
            if progress is not None:
                progress(span)

    def take_ahead(self, count: int) -> memoryview | None:
        """Return the next `count` bytes if they were read ahead, all of them; good until the next call."""
        start, end = self._start, self._start + count
        if end > self._end:
            return None
        self._start = end
        return self._buffer[start:end]

    def discard(self, count: int) -> Exchange[None]:
        """Read and forget the next `count` bytes."""
        ahead = min(self._end - self._start, count)
        self._start += ahead
        count -= ahead
        while count:
            got = yield Receive([self._buffer[:count]])
            if not got:
                raise StoreUnavailable(f"the connection ended {count} bytes before the end of a frame")
            count -= got

    def _fill(self, length: int, descriptors: list[int] | None = None) -> Exchange[bool]:
        """Have at least `length` bytes in the buffer; False if the stream ended with none."""
        have = self._end - self._start
        if have >= length:
            return True
        if (self._start and self._start + length > len(self._buffer)) or not have:
            self._buffer[:have] = bytes(self._buffer[self._start : self._end])
            self._start, self._end = 0, have
        while self._end - self._start < length:
            room = [self._buffer[self._end :]]
            idle = self._end == self._start
            count = yield Receive(room, idle) if descriptors is None else ReceiveDescriptors(room, descriptors)
            if not count:
                if self._end == self._start:
                    return False
                raise StoreUnavailable("the connection ended in the middle of a frame")
            self._end += count
        return True
