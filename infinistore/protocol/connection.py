"""One end of a connection, without the connection: which frame may come next, and what to do with the bytes.

Nothing here does I/O: whatever needs bytes to move is an `Exchange` (see `effects`), which any driver runs.

What may happen, and where it leads (both ends; the server hears requests and speaks replies, the client the reverse):

    HELLO    -- a Hello -->                     REPLYING
    READY    -- a request without payload -->   REPLYING
    READY    -- a Put -->                       PAYLOAD    -- all its payload, kept or discarded -->  REPLYING
    READY    -- a Release, Abort or Touch, which have no reply --> READY
    REPLYING -- the reply -->                   READY
    any      -- a fatal error reply -->         CLOSED

A server may receive the next request while it replies (pipelining): it lies in the buffer until the reply has gone.
"""

import enum
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from infinistore.errors import InfiniStoreException, ProtocolError, StoreUnavailable, error_from_code
from infinistore.protocol.codec import decode_body, encode_head
from infinistore.protocol.effects import Exchange, Send, SendDescriptors
from infinistore.protocol.frame_reader import FrameReader
from infinistore.protocol.messages import (
    KINDS,
    MISSING,
    ONE_WAY,
    REPLIES,
    Abort,
    ErrorReply,
    GetReply,
    Hello,
    LeaseReply,
    Message,
    Put,
    RdmaGetReply,
    Release,
    Reply,
    Request,
    Touch,
)
from infinistore.protocol.span import Span

__all__ = [
    "ClientConnection",
    "Encoded",
    "Received",
    "ServerConnection",
    "State",
]

_new = tuple.__new__  # makes a named tuple without the call of a Python function
MAX_HELLO_BYTES = 16 * 1024
"""The longest body that a server takes from somebody who has not said who it is."""
MAX_REPLY_BODY_BYTES = 64 * 1024 * 1024
"""The longest body of a reply that a client takes."""


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


class Encoded(NamedTuple):
    """A request that is ready to be sent, and the one that goes `then`, with the number of each."""

    message: Request
    request_id: int
    head: bytes
    then: tuple[Request, int] | None


class ServerConnection:
    """The server's end: `receive` a request, deal with its payload, `reply`; and again."""

    def __init__(self, *, max_body_bytes: int, max_payload_bytes: int) -> None:
        self.state = State.HELLO
        self._max_body_bytes = max_body_bytes
        self._reader = FrameReader(min(max_body_bytes, MAX_HELLO_BYTES), max_payload_bytes)
        self._request_id = 0
        self._reply_kind: type[Reply] | None = None
        self._sending = False
        self.payload_left = 0

    def receive(self) -> Exchange[Received | None]:
        """Return the next request, or `None` if the client has left between two of them.

        Raises:
            ProtocolError: no request, not one that may come now, or it has a payload where none belongs.
        """
        assert self.state in (State.HELLO, State.READY)
        frame = yield from self._reader.read_head()
        if frame is None:
            self.state = State.CLOSED
            return None
        header, body = frame
        # Known from here on, so that an error reply can name the request that it answers.
        self._request_id = header.request_id
        kind = KINDS[header.kind]
        # Refused before it is decoded: whatever is in it, nobody wants it.
        if kind not in REPLIES and kind not in ONE_WAY:
            raise ProtocolError(f"a client may not send {kind.__name__}")
        if (kind is Hello) != (self.state is State.HELLO):
            raise ProtocolError(f"{kind.__name__} may not come now: a connection begins with one Hello")
        message: Any = decode_body(header.kind, body)
        payload_bytes = header.payload_bytes
        if kind is Put:
            expected = _put_payload_bytes(message)
            if payload_bytes != expected:
                raise ProtocolError(f"a Put with {payload_bytes} bytes of payload, its sizes add up to {expected}")
        elif payload_bytes:
            raise ProtocolError(f"{kind.__name__} has no payload, but {payload_bytes} bytes come with it")
        self._reader.max_body_bytes = self._max_body_bytes
        self._reply_kind = REPLIES.get(kind)
        self.payload_left = payload_bytes
        if self._reply_kind is not None:
            self.state = State.PAYLOAD if payload_bytes else State.REPLYING
        return _new(Received, (message, header.request_id, payload_bytes, header.deadline_us))

    def read_payload(self, views: Sequence[memoryview]) -> Exchange[None]:
        """Receive the whole payload into these views. A Put of no blocks has none, and this does nothing then."""
        span = Span(views)

        def progress(span: Span) -> None:
            self.payload_left = span.remaining

        assert self.state is (State.PAYLOAD if span.remaining else State.REPLYING)
        assert span.remaining == self.payload_left
        yield from self._reader.read_payload(span, progress)
        self.state = State.REPLYING

    def discard_payload(self) -> Exchange[None]:
        """Receive what is left of the payload and forget it."""
        assert self.state is State.PAYLOAD
        yield from self._reader.discard(self.payload_left)
        self.payload_left = 0
        self.state = State.REPLYING

    def reply(
        self, message: Reply, payload: Sequence[memoryview] = (), *, descriptors: Sequence[int] = ()
    ) -> Exchange[None]:
        """Send the reply to the last request, header and payload in one go, with descriptors beside it if there are."""
        views = self.begin_reply(message, payload)
        yield SendDescriptors(views, descriptors) if descriptors else Send(views)
        self.end_reply()

    def begin_reply(self, message: Reply, payload: Sequence[memoryview] = ()) -> list[memoryview]:
        """Return what is to be sent as the reply to the last request; `end_reply` is called when all of it was."""
        assert self.state is State.REPLYING
        assert type(message) in (self._reply_kind, ErrorReply)
        payload_bytes = sum(map(len, payload)) if payload else 0
        head = encode_head(message, request_id=self._request_id, payload_bytes=payload_bytes)
        self._sending = True
        return [memoryview(head), *payload]

    def end_reply(self) -> None:
        """Note that the reply was sent."""
        self._sending = False
        self._request_id = 0
        self.state = State.READY

    def reply_fatal(self, error: InfiniStoreException) -> Exchange[None]:
        """Send an error that ends the connection.

        Nothing is sent if a reply was given up half-sent: the client would take the error for a part of its payload.
        """
        self.state = State.CLOSED
        if self._sending:
            return
        head = encode_head(ErrorReply(error.code, _message(error), fatal=True), request_id=self._request_id)
        yield Send([memoryview(head)])


class ClientConnection:
    """The client's end: one request at a time, `request` and then, if the reply has one, `read_payload`."""

    def __init__(self, *, max_body_bytes: int = MAX_REPLY_BODY_BYTES) -> None:
        self.state = State.HELLO
        self._reader = FrameReader(max_body_bytes, 2**63)
        self._next_id = 1
        self._payload_left = 0
        self._unanswered: tuple[Request, int] | None = None

    def request(
        self,
        message: Request,
        payload: Iterable[Sequence[memoryview]] = (),
        *,
        payload_bytes: int = 0,
        deadline_us: int = 0,
        descriptors: list[int] | None = None,
        then: Request | None = None,
    ) -> Exchange[Reply]:
        """Send a request, and return the reply, whose payload (a `GetReply` has one) is still to be read.

        `payload` yields groups of views; each group is asked for just before it is sent, so that it can be hashed then.
        With `descriptors`, those that come with the reply are appended there; they are the caller's to close.
        `then` is another request, which goes with this one; its reply, too without payload, is for `late_reply` to
        read before the next request.

        Raises:
            InfiniStoreException: what the server answered, if that is an error; `state` tells if the connection lives.
            ProtocolError: what came is no reply to this request.
        """
        encoded = self.encode(message, payload_bytes=payload_bytes, deadline_us=deadline_us, then=then)
        return (yield from self.ask(encoded, payload if payload_bytes else (), descriptors=descriptors))

    def encode(
        self, message: Request, *, payload_bytes: int = 0, deadline_us: int = 0, then: Request | None = None
    ) -> Encoded:
        """Encode a request, for `ask`; see `request`, which does both. Before a long copy this is cheaper than after
        it, when nothing is in the cache any more."""
        request_id = self._next_id
        self._next_id = request_id % 0xFFFF_FFFF + 1
        head = encode_head(message, request_id=request_id, payload_bytes=payload_bytes, deadline_us=deadline_us)
        if then is None:
            return _new(Encoded, (message, request_id, head, None))
        assert not payload_bytes
        then_id = self._next_id
        self._next_id = then_id % 0xFFFF_FFFF + 1
        head += encode_head(then, request_id=then_id, deadline_us=deadline_us)
        return _new(Encoded, (message, request_id, head, (then, then_id)))

    def ask(
        self,
        request: Encoded,
        payload: Iterable[Sequence[memoryview]] = (),
        *,
        descriptors: list[int] | None = None,
    ) -> Exchange[Reply]:
        """Send what was encoded, and return the reply; see `request`."""
        yield from self.send(request, payload)
        return (yield from self.reply_to(request, descriptors=descriptors))

    def send(self, request: Encoded, payload: Iterable[Sequence[memoryview]] = ()) -> Exchange[None]:
        """Send what was encoded. `reply_to` is called next."""
        assert self.state is (State.HELLO if isinstance(request.message, Hello) else State.READY)
        assert self._unanswered is None
        self._unanswered = request.then
        self.state = State.PAYLOAD
        try:
            if payload:
                groups = iter(payload)
                yield Send([memoryview(request.head), *next(groups, ())])
                for group in groups:
                    yield Send(group)
            else:
                yield _new(Send, ([memoryview(request.head)],))
        except StoreUnavailable as broken:
            self.state = State.CLOSED
            # A server that refuses a payload says why before it closes.
            raise (yield from self._read_refusal()) or broken from None
        self.state = State.REPLYING

    def reply_to(self, request: Encoded, *, descriptors: list[int] | None = None) -> Exchange[Reply]:
        """Return the reply to what was sent; see `request`."""
        return (yield from self._read_reply(request.message, request.request_id, descriptors))

    def late_reply(self) -> Exchange[Reply]:
        """Return the reply to the request that went with the last one, as `then`. Errors are those of `request`."""
        assert self.state is State.READY
        assert self._unanswered is not None
        message, request_id = self._unanswered
        self._unanswered = None
        self.state = State.REPLYING
        return (yield from self._read_reply(message, request_id))

    def _read_refusal(self) -> Exchange[InfiniStoreException | None]:
        """Return the error that the server has sent before the connection broke, if it has sent one."""
        with suppress(ProtocolError, StoreUnavailable):
            frame = yield from self._reader.read_head()
            if frame is not None and KINDS[frame[0].kind] is ErrorReply:
                reply = decode_body(frame[0].kind, frame[1])
                assert isinstance(reply, ErrorReply)
                return error_from_code(reply.code, reply.message)
        return None

    def notify(self, message: Release | Abort | Touch) -> Exchange[None]:
        """Send a request that has no reply."""
        yield from self.notify_encoded(encode_head(message, request_id=0))

    def notify_encoded(self, head: bytes) -> Exchange[None]:
        """Send a request that has no reply, and was encoded as number 0."""
        assert self.state is State.READY
        self.state = State.PAYLOAD
        yield _new(Send, ([memoryview(head)],))
        self.state = State.READY

    def _read_reply(self, request: Request, request_id: int, descriptors: list[int] | None = None) -> Exchange[Reply]:
        frame = yield from self._reader.read_head(descriptors)
        if frame is None:
            self.state = State.CLOSED
            raise StoreUnavailable("the server closed the connection instead of replying")
        header, body = frame
        kind = KINDS[header.kind]
        if kind not in (REPLIES[type(request)], ErrorReply):
            raise ProtocolError(f"{kind.__name__} is no reply to {type(request).__name__}")
        reply: Any = decode_body(header.kind, body)
        fatal = kind is ErrorReply and reply.fatal
        # A fatal error may be about the connection, or about a request that the server could not read.
        if header.request_id != request_id and not fatal:
            raise ProtocolError(f"a reply to request {header.request_id} where one to {request_id} belongs")
        expected = _payload_bytes_of(reply) if kind in _WITH_PAYLOAD else 0
        if header.payload_bytes != expected:
            raise ProtocolError(f"{kind.__name__} with {header.payload_bytes} bytes of payload instead of {expected}")
        if kind is ErrorReply:
            self.state = State.CLOSED if fatal else State.READY
            raise error_from_code(reply.code, reply.message)
        self._payload_left = expected
        self.state = State.PAYLOAD if expected else State.READY
        answer: Reply = reply
        return answer

    @property
    def payload_left(self) -> int:
        """How many bytes of the reply's payload are still to be read."""
        return self._payload_left

    def payload_at_hand(self) -> memoryview | None:
        """Return the payload of the last reply, if all of it came with the reply; then it counts as read.

        It is good until the next call of any method.
        """
        payload = self._reader.take_ahead(self._payload_left)
        if payload is not None:
            self._payload_left = 0
            self.state = State.READY
        return payload

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


_WITH_PAYLOAD = (GetReply, LeaseReply, RdmaGetReply)


def _payload_bytes_of(reply: Reply) -> int:
    """How long the payload of this reply must be."""
    if (
        isinstance(reply, GetReply)
        or (isinstance(reply, LeaseReply) and not reply.lease)
        or (isinstance(reply, RdmaGetReply) and reply.inline)
    ):
        return sum(reply.sizes) - MISSING * reply.sizes.count(MISSING)
    return 0


def _message(error: InfiniStoreException) -> str:
    """The text of an error, short enough for a frame."""
    return (str(error) or type(error).__name__).encode(errors="replace")[:1000].decode(errors="ignore")
