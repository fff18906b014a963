"""The client's end of a connection, without I/O: which request may be sent, and what
follows.

Whatever needs bytes to move is an `Exchange` (see `effects`), which any driver runs.
`states` has the table of events.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from infinistore.errors import InfiniStoreException, ProtocolError, StoreUnavailable, error_from_code
from infinistore.protocol.codec import (
    UNSTRUCTURE_FOR_STRANGERS,
    Header,
    Structure,
    decode_body,
    encode_head,
    structure_for,
    unstructure_for,
    with_offer,
)
from infinistore.protocol.effects import Send, Span
from infinistore.protocol.frame_reader import FrameReader
from infinistore.protocol.messages import (
    KINDS,
    MISSING,
    REPLIES,
    Abort,
    ErrorReply,
    GetReply,
    Hello,
    LeaseReply,
    RdmaGetReply,
    Release,
    Reply,
    Request,
    Touch,
)
from infinistore.protocol.states import Event, LocalProtocolError, State
from infinistore.protocol.versions import LAST_RELEASE, OFFER, Offer

_new = tuple.__new__  # makes a named tuple without the call of a Python function
MAX_REPLY_BODY_BYTES = 64 * 1024 * 1024
"""The maximum body of a reply that a client accepts, in bytes."""
# Looked up once: an attribute of a class takes as long as the table itself.
_HELLO, _REQUEST, _NOTICE, _SENT = Event.HELLO, Event.REQUEST, Event.NOTICE, Event.SENT
_REPLY, _REPLY_WITH_PAYLOAD, _PAYLOAD = Event.REPLY, Event.REPLY_WITH_PAYLOAD, Event.PAYLOAD


class Encoded(NamedTuple):
    """An encoded request, and one that is sent with it (`then`), with their ids."""

    message: Request
    request_id: int
    head: bytes
    then: "Encoded | None"


class ClientConnection:
    """The client's end: one request at a time, `request` and then `read_payload`.

    `offer` is what this end can do. After the first reply, `peer` is what both ends can
    do.
    """

    def __init__(self, *, max_body_bytes: int = MAX_REPLY_BODY_BYTES, offer: Offer = OFFER) -> None:
        self.state = State.HELLO
        self.peer = LAST_RELEASE
        self._offer = offer
        self._structure: Structure | None = None
        self._unstructure = UNSTRUCTURE_FOR_STRANGERS
        self._reader = FrameReader(max_body_bytes, 2**63)
        self._next_id = 1
        self._payload_left = 0
        self._unanswered: Encoded | None = None

    async def request(
        self,
        message: Request,
        payload: Iterable[Sequence[memoryview]] = (),
        *,
        payload_bytes: int = 0,
        deadline_us: int = 0,
        descriptors: list[int] | None = None,
        then: Request | None = None,
    ) -> Reply:
        """Send a request and return the reply.

        Its payload (a `GetReply` has one) is read after that.

        `payload` yields groups of views. Each group is requested just before it is
        sent, so that it can be hashed then. `descriptors` collects those that come with
        the reply; the caller closes them. `then` is another request, which is sent
        together with this one; neither has a payload. Its reply must be read by
        `late_reply` before the next request.

        Raises:
            InfiniStoreException: the server's error; `state` says whether the
                connection is good.
            ProtocolError: the peer sent anything other than a reply to this request.
            VersionMismatch: the server does not understand this request, which was not
                sent.
        """
        encoded = self.encode(message, payload_bytes=payload_bytes, deadline_us=deadline_us, then=then)
        await self.send(encoded, payload if payload_bytes else ())
        return await self.reply_to(encoded, descriptors=descriptors)

    def encode(
        self, message: Request, *, payload_bytes: int = 0, deadline_us: int = 0, then: Request | None = None
    ) -> Encoded:
        """Encode a request, for `send` and `reply_to`; `request` does all three.

        Encoding before a long copy is faster than after it, when the caches are cold.
        """
        request_id = self._next_id
        self._next_id = request_id % 0xFFFF_FFFF + 1
        unstructure = self._unstructure
        head = encode_head(
            message,
            request_id=request_id,
            payload_bytes=payload_bytes,
            deadline_us=deadline_us,
            unstructure=unstructure,
        )
        if self._structure is None:  # a Hello, whose deadline nobody looks at
            head = with_offer(head, self._offer)
        if then is None:
            return _new(Encoded, (message, request_id, head, None))
        if payload_bytes:
            raise LocalProtocolError("a request with payload goes alone")
        then_id = self._next_id
        self._next_id = then_id % 0xFFFF_FFFF + 1
        head += encode_head(then, request_id=then_id, deadline_us=deadline_us, unstructure=unstructure)
        return Encoded(message, request_id, head, Encoded(then, then_id, b"", None))

    async def ask(self, request: Encoded, payload: Iterable[Sequence[memoryview]] = ()) -> Reply:
        """Send an encoded request and return the reply; see `request`."""
        await self.send(request, payload)
        return await self.reply_to(request)

    async def send(self, request: Encoded, payload: Iterable[Sequence[memoryview]] = ()) -> None:
        """Send an encoded request. Call `reply_to` next."""
        after = self.state.client[_HELLO if type(request.message) is Hello else _REQUEST]
        if self._unanswered is not None:
            raise LocalProtocolError("the reply to another request is still to be read")
        self._unanswered = request.then
        self.state = after
        try:
            if payload:
                groups = iter(payload)
                await _new(Send, ([memoryview(request.head), *next(groups, ())],))
                for group in groups:
                    await Send(group)
            else:
                await _new(Send, ([memoryview(request.head)],))
        except StoreUnavailable as broken:
            self.close()
            # A server that refuses a payload sends the reason before it closes.
            raise (await self._read_refusal()) or broken from None
        self.state = self.state.client[_SENT]

    async def reply_to(self, request: Encoded, *, descriptors: list[int] | None = None) -> Reply:
        """Return the reply to a request that was sent; see `request`."""
        transitions = self.state.client
        if not transitions.listens:
            transitions.check_listens()
        frame = await self._reader.read_head(descriptors)
        if frame is None:
            self.close()
            raise StoreUnavailable(_NO_REPLY + (_TO_HELLO if type(request.message) is Hello else ""))
        header, body = frame
        kind = KINDS[header.kind]
        if kind is not REPLIES[type(request.message)] and kind is not ErrorReply:
            raise ProtocolError(f"{kind.__name__} is no reply to {type(request.message).__name__}")
        reply: Any = decode_body(header.kind, body, self._structure or self._meet(header))
        fatal = kind is ErrorReply and reply.fatal
        # A fatal error may concern the connection, or a request that was not readable.
        if header.request_id != request.request_id and not fatal:
            raise ProtocolError(f"a reply to request {header.request_id} where one to {request.request_id} belongs")
        expected = _payload_bytes_of(reply) if kind in _WITH_PAYLOAD else 0
        if header.payload_bytes != expected:
            raise ProtocolError(f"{kind.__name__} with {header.payload_bytes} bytes of payload instead of {expected}")
        if kind is ErrorReply:
            self.state = transitions[Event.FATAL if fatal else _REPLY]
            raise error_from_code(reply.code, reply.message)
        self._payload_left = expected
        self.state = transitions[_REPLY_WITH_PAYLOAD if expected else _REPLY]
        answer: Reply = reply
        return answer

    async def late_reply(self) -> Reply:
        """Return the reply to the request that was sent as `then`.

        Errors are those of `request`.
        """
        after = self.state.client[Event.SECOND_REPLY]
        if self._unanswered is None:
            raise LocalProtocolError("no other request was sent, whose reply could be read")
        request, self._unanswered = self._unanswered, None
        self.state = after
        return await self.reply_to(request)

    async def _read_refusal(self) -> InfiniStoreException | None:
        """Return the error that came before the connection broke, or None."""
        with suppress(ProtocolError, StoreUnavailable):
            frame = await self._reader.read_head()
            if frame is not None and KINDS[frame[0].kind] is ErrorReply:
                reply: Any = decode_body(frame[0].kind, frame[1], self._structure or self._meet(frame[0]))
                return error_from_code(reply.code, reply.message)
        return None

    async def notify(self, message: Release | Abort | Touch) -> None:
        """Send a request that has no reply."""
        await self.notify_encoded(encode_head(message, request_id=0))

    async def notify_encoded(self, head: bytes) -> None:
        """Send a request that has no reply and was encoded with the id 0."""
        self.state = self.state.client[_NOTICE]
        await _new(Send, ([memoryview(head)],))
        self.state = self.state.client[_SENT]

    def _meet(self, first: Header) -> Structure:
        """Record what the server can do, from its first frame."""
        self.peer = Offer.from_number(first.deadline_us).shared_with(self._offer)
        self._unstructure = unstructure_for(self.peer)
        self._structure = structure_for(self.peer)
        return self._structure

    def close(self) -> None:
        """End the conversation: nothing more is sent or received.

        Call this if the stream has ended, or if it is unknown how much of a frame was
        sent.
        """
        self.state = self.state.client[Event.END]

    @property
    def payload_left(self) -> int:
        """The number of bytes of the reply's payload that have not been read."""
        return self._payload_left

    def payload_at_hand(self) -> memoryview | None:
        """Return the payload of the last reply, as read, if all of it has arrived.

        It is valid until the next call of any method.
        """
        payload = self._reader.take_ahead(self._payload_left)
        if payload is not None:
            self.state = self.state.client[_PAYLOAD]
            self._payload_left = 0
        return payload

    async def read_payload(self, views: Sequence[memoryview], progress: Callable[[Span], None] | None = None) -> None:
        """Receive the complete payload of the last reply into these views."""
        after = self.state.client[_PAYLOAD]
        span = Span(views)
        if span.remaining != self._payload_left:
            raise ProtocolError(f"a payload of {self._payload_left} bytes where the sizes say {span.remaining}")
        await self._reader.read_payload(span, progress)
        self._payload_left = 0
        self.state = after


_NO_REPLY = "the server closed the connection instead of replying"
_TO_HELLO = " to the hello; if it does so each time, it may be the original InfiniStore: install infinistore-trio there"
_WITH_PAYLOAD = (GetReply, LeaseReply, RdmaGetReply)


def _payload_bytes_of(reply: Reply) -> int:
    """Return the length of the payload of this reply, in bytes."""
    if (
        isinstance(reply, GetReply)
        or (isinstance(reply, LeaseReply) and not reply.lease)
        or (isinstance(reply, RdmaGetReply) and reply.inline)
    ):
        return sum(reply.sizes) - MISSING * reply.sizes.count(MISSING)
    return 0
