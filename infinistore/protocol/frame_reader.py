"""Splits a stream of bytes into heads and payloads, without I/O: see `effects`."""

from collections.abc import Callable, Sequence

from infinistore.errors import StoreUnavailable
from infinistore.protocol.codec import ALIGNMENT_BYTES, HEADER_BYTES, Header, check_beginning, head_bytes, parse_header
from infinistore.protocol.effects import Fill, LongBody, Receive, ReceiveDescriptors, Span

READ_AHEAD_BYTES = 68 * 1024
"""How much one `Receive` of heads asks for: a head, 64 KiB and their checksum."""


class FrameReader:
    """Splits a stream of bytes into heads and payloads.

    Small frames share one receive. Payloads go directly to their destination.
    """

    def __init__(self, max_body_bytes: int, max_payload_bytes: int, read_ahead_bytes: int = READ_AHEAD_BYTES) -> None:
        self.max_body_bytes = max_body_bytes
        self.max_payload_bytes = max_payload_bytes
        self._announces = False
        self._start = 0
        self._end = 0
        self._buffer = memoryview(bytearray(read_ahead_bytes))
        self._next_frame = Receive([self._buffer], idle=True)

    def widen(self, max_body_bytes: int, read_ahead_bytes: int = READ_AHEAD_BYTES) -> None:
        """Accept bodies of this length from now on, for a peer that has sent its hello.

        The reader announces long bodies (`LongBody`) and reads further ahead.
        """
        self.max_body_bytes = max_body_bytes
        self._announces = True
        ahead = self._buffer[self._start : self._end]
        self._buffer = memoryview(bytearray(max(read_ahead_bytes, len(ahead))))
        self._next_frame = Receive([self._buffer], idle=True)
        self._buffer[: len(ahead)] = ahead
        self._start, self._end = 0, len(ahead)

    async def read_head(self, descriptors: list[int] | None = None) -> tuple[Header, memoryview] | None:
        """Return the next header and body; `None` if the stream ended between two
        frames.

        `descriptors` collects those that come with the bytes. The body is valid until
        the next call of any method.
        """
        if self._start == self._end and descriptors is None:  # usual: nothing was read ahead
            self._start = self._end = 0
            self._end = await self._next_frame
            if not self._end:
                return None
        if self._end - self._start < HEADER_BYTES and not (
            await self._fill(HEADER_BYTES, descriptors, check=check_beginning)
        ):
            return None
        if (head := self.take_head()) is not None:
            return head
        start = self._start
        header = parse_header(
            self._buffer[start : start + HEADER_BYTES],
            max_body_bytes=self.max_body_bytes,
            max_payload_bytes=self.max_payload_bytes,
        )
        length = head_bytes(header.body_bytes)
        if length > len(self._buffer):
            long_head = await self._read_long_head(length)
            return header, long_head[HEADER_BYTES : HEADER_BYTES + header.body_bytes]
        await self._fill(length)
        start = self._start
        self._start = start + length
        start += HEADER_BYTES
        return header, self._buffer[start : start + header.body_bytes]

    def take_head(self) -> tuple[Header, memoryview] | None:
        """Return the next header and body if they have come whole, else None.

        The body is valid until the next call of any method.
        """
        start = self._start
        body_at = start + HEADER_BYTES
        if self._end < body_at:
            return None
        header = parse_header(
            self._buffer[start:body_at], max_body_bytes=self.max_body_bytes, max_payload_bytes=self.max_payload_bytes
        )
        body_end = body_at + header[2]
        # As head_bytes, without the call.
        end = start - (start - body_end) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        if self._end < end:
            return None
        self._start = end
        return header, self._buffer[body_at:body_end]

    @property
    def room(self) -> Sequence[memoryview] | None:
        """Where bytes of the next frame belong, for `arrived`; None if some came."""
        return None if self._start != self._end else self._next_frame.views

    def arrived(self, count: int) -> None:
        """Note that so many bytes are in `room`."""
        self._start, self._end = 0, count

    async def _read_long_head(self, length: int) -> memoryview:
        """Read a head that is longer than the buffer.

        Memory grows with what has arrived, not with what was announced.
        """
        body = LongBody(length)
        if self._announces:
            await body

        def progress(span: Span) -> None:
            body.arrived = len(head) + len(piece) - span.remaining

        head = bytearray()
        while len(head) < length:
            piece = bytearray(min(length - len(head), max(len(head), READ_AHEAD_BYTES)))
            await self.read_payload(Span([memoryview(piece)]), progress)
            head += piece
        return memoryview(head)

    async def read_payload(self, span: Span, progress: Callable[[Span], None] | None = None) -> None:
        """Fill the span with the next bytes; report `progress` as they arrive."""
        ahead = min(self._end - self._start, span.remaining)
        if ahead:
            span.copy_in(self._buffer[self._start : self._start + ahead])
            self._start += ahead
            if progress is not None:
                progress(span)
        if span.remaining:
            await Fill(span, progress)
        if span.remaining:
            raise StoreUnavailable(f"the connection ended {span.remaining} bytes before the end of a frame")

    def take_ahead(self, count: int) -> memoryview | None:
        """Return the next `count` bytes if all of them were read ahead, else None.

        They are valid until the next call of any method.
        """
        start, end = self._start, self._start + count
        if end > self._end:
            return None
        self._start = end
        return self._buffer[start:end]

    @property
    def ahead_bytes(self) -> int:
        """How many bytes were read ahead."""
        return self._end - self._start

    async def read_ahead(self, count: int) -> None:
        """Read until `count` bytes are read ahead, if the buffer has room for them."""
        if count <= len(self._buffer):
            await self._fill(count)

    async def discard(self, count: int) -> None:
        """Read and drop the next `count` bytes."""
        ahead = min(self._end - self._start, count)
        self._start += ahead
        count -= ahead
        while count:
            got = await Receive([self._buffer[:count]])
            if not got:
                raise StoreUnavailable(f"the connection ended {count} bytes before the end of a frame")
            count -= got

    async def _fill(
        self,
        length: int,
        descriptors: list[int] | None = None,
        *,
        check: Callable[[memoryview], object] | None = None,
    ) -> bool:
        """Read until the buffer has `length` bytes; False at the end of the stream.

        `check` sees what is there before each receive: a peer of another protocol may
        send fewer bytes than a header has, and then wait for a reply.
        """
        have = self._end - self._start
        if (self._start and self._start + length > len(self._buffer)) or not have:
            self._buffer[:have] = bytes(self._buffer[self._start : self._end])
            self._start, self._end = 0, have
        while self._end - self._start < length:
            if check is not None:
                check(self._buffer[self._start : self._end])
            room = [self._buffer[self._end :]]
            count = await (Receive(room) if descriptors is None else ReceiveDescriptors(room, descriptors))
            if not count:
                if self._end == self._start:
                    return False
                raise StoreUnavailable("the connection ended in the middle of a frame")
            self._end += count
        return True
