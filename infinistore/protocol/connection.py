"""One end of a connection, without the connection: which frame may come next, and what to do with the bytes.

Nothing here does I/O. Whatever needs bytes to move is a generator, an `Exchange`, that yields `Send` and `Receive` and is
resumed when the bytes have moved; a driver for Trio, for threads or for asyncio (or a fuzzer, or a simulated network)
runs it. So the same code runs in all of them.

What may happen, and where it leads (both ends; the server hears requests and speaks replies, the client the reverse):

    HELLO    -- a Hello -->                     REPLYING
    READY    -- a request without payload -->   REPLYING
    READY    -- a Put -->                       PAYLOAD    -- all its payload, kept or discarded -->  REPLYING
    REPLYING -- the reply -->                   READY
    any      -- a fatal error reply -->         CLOSED

A server may receive the next request while it replies (pipelining): it lies in the buffer until the reply has gone.
"""

import enum
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeAlias, TypeVar

from infinistore.errors import InfiniStoreException, ProtocolError, StoreUnavailable, error_from_code
from infinistore.protocol.codec import HEADER_BYTES, decode_body, encode_head, head_bytes, parse_header
from infinistore.protocol.messages import (
    REPLIES,
    ErrorReply,
    GetReply,
    Hello,
    Message,
    Put,
    Reply,
    Request,
)
from infinistore.protocol.span import Span

__all__ = ["ClientConnection", "Exchange", "Pause", "Receive", "Received", "Send", "ServerConnection", "State"]

_T = TypeVar("_T")
READ_AHEAD_BYTES = 64 * 1024
CHUNK_BYTES = 1024 * 1024
"""The most that one `Receive` of a payload asks for: what has just arrived is still in the cache when it is hashed."""


class Send(NamedTuple):
    """Send all of these views, in order."""

    views: Sequence[memoryview]


class Receive(NamedTuple):
    """Receive at least one byte into these views, in order; resume with how many, 0 at the end of the stream."""

    views: Sequence[memoryview]


class Pause(NamedTuple):
    """Let others have their turn; nothing is to be moved. Only what works inside one process yields it."""


Exchange: TypeAlias = Generator[Send | Receive | Pause, int, _T]


class State(enum.Enum):
    """Where the conversation stands: see the table at the top of this module."""

    HELLO = enum.auto()
    READY = enum.auto()
    PAYLOAD = enum.auto()
    REPLYING = enum.auto()
    CLOSED = enum.auto()


class Received(NamedTuple):
    """A message that has arrived, before its payload."""

    message: Message
    request_id: int
    payload_bytes: int
    deadline_us: int


class _FrameReader:
    """Turns arriving bytes into heads and payloads. Small frames share one receive; payloads go where they belong."""

    def __init__(self, max_body_bytes: int, max_payload_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self.max_payload_bytes = max_payload_bytes
        self._buffer = memoryview(bytearray(READ_AHEAD_BYTES))
        self._start = 0
        self._end = 0

    def read_head(self) -> Exchange[Received | None]:
        """Return the next message, or `None` if the stream ended between two frames."""
        if not (yield from self._fill(HEADER_BYTES)):
            return None
        start = self._start
        header = parse_header(
            self._buffer[start : start + HEADER_BYTES],
            max_body_bytes=self.max_body_bytes,
            max_payload_bytes=self.max_payload_bytes,
        )
        length = head_bytes(header.body_bytes)
        if length <= len(self._buffer):
            yield from self._fill(length)
            head = self._buffer[self._start : self._start + length]
            self._start += length
        else:
            head = memoryview(bytearray(length))
            yield from self.read_payload(Span([head]))
        message = decode_body(header.kind, head[HEADER_BYTES : HEADER_BYTES + header.body_bytes])
        return Received(message, header.request_id, header.payload_bytes, header.deadline_us)

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

    def _fill(self, length: int) -> Exchange[bool]:
        """Have at least `length` bytes in the buffer; False if the stream ended with none."""
        have = self._end - self._start
        if have >= length:
            return True
        if self._start and self._start + length > len(self._buffer) or not have:
            self._buffer[:have] = bytes(self._buffer[self._start : self._end])
            self._start, self._end = 0, have
        while self._end - self._start < length:
            count = yield Receive([self._buffer[self._end :]])
            if not count:
                if self._end == self._start:
                    return False
                raise StoreUnavailable("the connection ended in the middle of a frame")
            self._end += count
        return True


class ServerConnection:
    """The server's end: `receive` a request, deal with its payload, `reply`; and again."""

    def __init__(self, *, max_body_bytes: int, max_payload_bytes: int) -> None:
        self.state = State.HELLO
        self._reader = _FrameReader(max_body_bytes, max_payload_bytes)
        self._request: Received | None = None
        self.payload_left = 0

    def receive(self) -> Exchange[Received | None]:
        """Return the next request, or `None` if the client has left between two of them.

        Raises:
            ProtocolError: no request, not one that may come now, or it has a payload where none belongs.
        """
        assert self.state in (State.HELLO, State.READY)
        received = yield from self._reader.read_head()
        if received is None:
            self.state = State.CLOSED
            return None
        # Known from here on, so that an error reply can name the request that it answers.
        self._request = received
        message = received.message
        if type(message) not in REPLIES:
            raise ProtocolError(f"a client may not send {type(message).__name__}")
        if (type(message) is Hello) != (self.state is State.HELLO):
            raise ProtocolError(f"{type(message).__name__} may not come now: a connection begins with one Hello")
        if isinstance(message, Put):
            expected = _put_payload_bytes(message)
            if received.payload_bytes != expected:
                raise ProtocolError(
                    f"a Put with {received.payload_bytes} bytes of payload, its sizes add up to {expected}"
                )
        elif received.payload_bytes:
            raise ProtocolError(
                f"{type(message).__name__} has no payload, but {received.payload_bytes} bytes come with it"
            )
        self.payload_left = received.payload_bytes
        self.state = State.PAYLOAD if received.payload_bytes else State.REPLYING
        return received

    def read_payload(self, views: Sequence[memoryview]) -> Exchange[None]:
        """Receive the whole payload into these views."""
        assert self.state is State.PAYLOAD
        span = Span(views)

        def progress(span: Span) -> None:
            self.payload_left = span.remaining

        assert span.remaining == self.payload_left
        yield from self._reader.read_payload(span, progress)
        self.state = State.REPLYING

    def discard_payload(self) -> Exchange[None]:
        """Receive what is left of the payload and forget it."""
        assert self.state is State.PAYLOAD
        yield from self._reader.discard(self.payload_left)
        self.payload_left = 0
        self.state = State.REPLYING

    def reply(self, message: Reply, payload: Sequence[memoryview] = ()) -> Exchange[None]:
        """Send the reply to the last request, header and payload in one go."""
        assert self.state is State.REPLYING
        assert self._request is not None
        head = encode_head(message, request_id=self._request.request_id, payload_bytes=sum(map(len, payload)))
        yield Send([memoryview(head), *payload])
        self._request = None
        self.state = State.READY

    def reply_fatal(self, error: InfiniStoreException) -> Exchange[None]:
        """Send an error that ends the connection."""
        request_id = self._request.request_id if self._request is not None else 0
        self.state = State.CLOSED
        head = encode_head(ErrorReply(error.code, _message(error), fatal=True), request_id=request_id)
        yield Send([memoryview(head)])


class ClientConnection:
    """The client's end: one request at a time, `request` and then, if the reply has one, `read_payload`."""

    def __init__(self, *, max_body_bytes: int = 2**31) -> None:
        self.state = State.HELLO
        self._reader = _FrameReader(max_body_bytes, 2**63)
        self._next_id = 1
        self._payload_left = 0

    def request(
        self,
        message: Request,
        payload: Iterable[Sequence[memoryview]] = (),
        *,
        payload_bytes: int = 0,
        deadline_us: int = 0,
    ) -> Exchange[Reply]:
        """Send a request, and return the reply, whose payload (a `GetReply` has one) is still to be read.

        `payload` yields groups of views; each group is asked for just before it is sent, so that it can be hashed then.

        Raises:
            InfiniStoreException: what the server answered, if that is an error; `state` tells if the connection lives.
            ProtocolError: what came is no reply to this request.
        """
        assert self.state is (State.HELLO if isinstance(message, Hello) else State.READY)
        request_id = self._next_id
        self._next_id = request_id % 0xFFFF_FFFF + 1
        self.state = State.PAYLOAD
        head = encode_head(message, request_id=request_id, payload_bytes=payload_bytes, deadline_us=deadline_us)
        try:
            groups = iter(payload)
            yield Send([memoryview(head), *next(groups, ())])
            for group in groups:
                yield Send(group)
        except StoreUnavailable as broken:
            # A server that refuses a payload says why before it closes.
            with suppress(ProtocolError, StoreUnavailable):
                yield from self._read_reply(message, request_id)
            raise broken from None
        self.state = State.REPLYING
        return (yield from self._read_reply(message, request_id))

    def _read_reply(self, request: Request, request_id: int) -> Exchange[Reply]:
        received = yield from self._reader.read_head()
        if received is None:
            self.state = State.CLOSED
            raise StoreUnavailable("the server closed the connection instead of replying")
        reply = received.message
        if isinstance(reply, ErrorReply):
            unfinished = self.state is not State.REPLYING
            self.state = State.CLOSED if reply.fatal or unfinished else State.READY
            raise error_from_code(reply.code, reply.message)
        if received.request_id != request_id or type(reply) is not REPLIES[type(request)]:
            raise ProtocolError(
                f"{type(reply).__name__} (request {received.request_id}) is no reply to request {request_id}"
            )
        if received.payload_bytes and not isinstance(reply, GetReply):
            raise ProtocolError(f"{type(reply).__name__} with a payload")
        self._payload_left = received.payload_bytes
        self.state = State.PAYLOAD if received.payload_bytes else State.READY
        return reply

    @property
    def payload_left(self) -> int:
        """How many bytes of the reply's payload are still to be read."""
        return self._payload_left

    def read_payload(
        self, views: Sequence[memoryview], progress: Callable[[Span], None] | None = None
    ) -> Exchange[None]:
        """Receive the payload of the last reply, all of it, into these views."""
        span = Span(views)
        if span.remaining != self._payload_left:
            raise ProtocolError(f"a payload of {self._payload_left} bytes where the sizes say {span.remaining}")
        yield from self._reader.read_payload(span, progress)
        self._payload_left = 0
        self.state = State.READY


def _put_payload_bytes(put: Put) -> int:
    """How long the payload of this Put must be.

    Raises:
        ProtocolError: the sizes do not fit the keys.
    """
    if len(put.sizes) != len(put.keys):
        raise ProtocolError(f"a Put of {len(put.keys)} keys and {len(put.sizes)} sizes")
    return sum(put.sizes) + (8 * len(put.keys) if put.checksums else 0)


def _message(error: InfiniStoreException) -> str:
    """The text of an error, short enough for a frame."""
    return (str(error) or type(error).__name__).encode(errors="replace")[:1000].decode(errors="ignore")
