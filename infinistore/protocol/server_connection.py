"""The server's end of a connection, without I/O: which request may come, and what
follows.

Whatever needs bytes to move is an `Exchange` (see `effects`), which any driver runs.
`states` has the table of events. The next request may arrive while a reply is sent
(pipelining): it stays in the buffer until then.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import attrs

from infinistore.errors import InfiniStoreException, LimitExceeded, ProtocolError
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
from infinistore.protocol.effects import Send, SendDescriptors, Span
from infinistore.protocol.frame_reader import READ_AHEAD_BYTES, FrameReader
from infinistore.protocol.messages import KINDS, ONE_WAY, REPLIES, ErrorReply, Hello, Message, Put, Reply
from infinistore.protocol.states import Event, LocalProtocolError, State
from infinistore.protocol.versions import LAST_RELEASE, OFFER, Offer

_new = tuple.__new__  # makes a named tuple without the call of a Python function
MAX_HELLO_BYTES = 16 * 1024
"""The maximum body that a server accepts before the hello, in bytes."""
_HELLO_BUFFER_BYTES = 1024
_ASKED: dict[type[Message], tuple[Event, type[Reply] | None]] = {
    **{cls: (Event.HELLO if cls is Hello else Event.REQUEST, reply) for cls, reply in REPLIES.items()},
    **dict.fromkeys(ONE_WAY, (Event.NOTICE, None)),
}
"""The event that a message of a client causes, and the reply to it.

A Put with blocks also has a payload.
"""
# Looked up once: an attribute of a class takes as long as the table itself.
_REQUEST_WITH_PAYLOAD, _PAYLOAD, _REPLY, _SENT = Event.REQUEST_WITH_PAYLOAD, Event.PAYLOAD, Event.REPLY, Event.SENT


@attrs.frozen
class TooManyKeys:
    """Stands for a request that was not read, because it is too large a batch."""

    why: str


class Received(NamedTuple):
    """A message that has arrived, before its payload. It may be `TooManyKeys`.

    The `deadline_us` of a `Hello` is the client's offer, if it made one.
    """

    message: Message
    request_id: int
    payload_bytes: int
    deadline_us: int


class ServerConnection:
    """The server's end: `receive` a request and its payload, `reply`, and again.

    `offer` is what this end can do. After the hello, `peer` is what both ends can do.
    A batch of more than `max_batch_keys` is not read, however long it is.
    """

    def __init__(
        self,
        *,
        max_body_bytes: int,
        max_payload_bytes: int,
        max_batch_keys: int | None = None,
        read_ahead_bytes: int = READ_AHEAD_BYTES,
        offer: Offer = OFFER,
    ) -> None:
        self.state = State.HELLO
        self.peer = LAST_RELEASE
        self._offer: Offer | None = offer  # until it is made
        self._structure: Structure | None = None
        self._unstructure = UNSTRUCTURE_FOR_STRANGERS
        self._max_body_bytes = max_body_bytes
        self._max_batch_keys = max_batch_keys
        self._read_ahead_bytes = read_ahead_bytes
        self._reader = FrameReader(min(max_body_bytes, MAX_HELLO_BYTES), max_payload_bytes, _HELLO_BUFFER_BYTES)
        self._request_id = 0
        self._reply_kind: type[Reply] | None = None
        self.payload_left = 0

    async def receive(self) -> Received | None:
        """Return the next request, or `None` if the client closed between two requests.

        Raises:
            ProtocolError: not a request, not allowed now, or it has a payload and must
                not.
            LocalProtocolError: the last request has not been answered.
        """
        transitions = self.state.server
        if not transitions.listens:
            transitions.check_listens()
        frame = await self._reader.read_head()
        if frame is None:
            self.state = transitions[Event.END]
            return None
        return self._accept(*frame)

    def take(self) -> Received | None:
        """Return the next request if its head has come, else None; see `receive`."""
        transitions = self.state.server
        if not transitions.listens:
            transitions.check_listens()
        frame = self._reader.take_head()
        return None if frame is None else self._accept(*frame)

    @property
    def room(self) -> Sequence[memoryview] | None:
        """Where the next request belongs; None if a part of it has come.

        What is received there, by no effect of `receive`, is announced by `arrived`.
        """
        return self._reader.room

    def arrived(self, count: int) -> None:
        """Note that so many bytes are in `room`; 0 is the end of the stream."""
        if not count:
            self.state = self.state.server[Event.END]
        self._reader.arrived(count)

    def _accept(self, header: Header, body: memoryview) -> Received:
        # Known from here on, so that an error reply can name its request.
        self._request_id = header.request_id
        kind = KINDS[header.kind]
        # Refused before it is decoded.
        asked = _ASKED.get(kind)
        if asked is None:
            raise ProtocolError(f"a client may not send {kind.__name__}")
        event, reply_kind = asked
        transitions = self.state.server
        if event not in transitions:
            raise ProtocolError(f"{kind.__name__} may not come now: a connection begins with one Hello")
        message: Any
        payload_bytes = header.payload_bytes
        try:
            message = decode_body(header.kind, body, self._structure or self._meet(header), self._max_batch_keys)
        except LimitExceeded as error:
            message = TooManyKeys(str(error))
        if kind is Put:
            expected = payload_bytes if type(message) is TooManyKeys else _put_payload_bytes(message)
            if payload_bytes != expected:
                raise ProtocolError(f"a Put with {payload_bytes} bytes of payload, its sizes add up to {expected}")
            if payload_bytes:
                event = _REQUEST_WITH_PAYLOAD
        elif payload_bytes:
            raise ProtocolError(f"{kind.__name__} has no payload, but {payload_bytes} bytes come with it")
        elif kind is Hello:
            self._reader.widen(self._max_body_bytes, self._read_ahead_bytes)
        self._reply_kind = reply_kind
        self.payload_left = payload_bytes
        self.state = transitions[event]
        return _new(Received, (message, header.request_id, payload_bytes, header.deadline_us))

    def _meet(self, hello: Header) -> Structure:
        """Record what the client can do.

        The server sends no offer to a client that made none.
        """
        own = LAST_RELEASE if self._offer is None else self._offer
        self.peer = Offer.from_number(hello.deadline_us).shared_with(own)
        self._unstructure = unstructure_for(self.peer)
        self._structure = structure_for(self.peer)
        return self._structure

    async def read_payload(self, views: Sequence[memoryview]) -> None:
        """Receive the complete payload into these views.

        A Put of no blocks has no payload; this does nothing then.
        """
        span = Span(views)

        def progress(span: Span) -> None:
            self.payload_left = span.remaining

        after = self.state.server[_PAYLOAD]
        if span.remaining != self.payload_left:
            raise LocalProtocolError(f"room for {span.remaining} bytes of payload, of which {self.payload_left} come")
        await self._reader.read_payload(span, progress)
        self.state = after

    async def gather_payload(self) -> None:
        """Wait until a payload has come that is short enough to be read ahead; do
        nothing for a long one.

        TCP delivers a block of 64 KiB in two pieces: its head fills up the first.
        """
        await self._reader.read_ahead(self.payload_left)

    @property
    def payload_to_come(self) -> int:
        """How many bytes of the payload have not come yet."""
        return max(0, self.payload_left - self._reader.ahead_bytes)

    def take_payload(self) -> memoryview | None:
        """Return the complete payload if it was read ahead, else None.

        It is valid until the next call of `receive`.
        """
        after = self.state.server[_PAYLOAD]
        payload = self._reader.take_ahead(self.payload_left)
        if payload is not None:
            self.payload_left = 0
            self.state = after
        return payload

    async def discard_payload(self) -> None:
        """Receive the rest of the payload and drop it."""
        after = self.state.server[_PAYLOAD]
        await self._reader.discard(self.payload_left)
        self.payload_left = 0
        self.state = after

    async def reply(
        self, message: Reply, payload: Sequence[memoryview] = (), *, descriptors: Sequence[int] = ()
    ) -> None:
        """Send the reply to the last request with all that belongs to it."""
        views = self.begin_reply(message, payload)
        await (SendDescriptors(views, descriptors) if descriptors else Send(views))
        self.end_reply()

    def begin_reply(self, message: Reply, payload: Sequence[memoryview] = ()) -> list[memoryview]:
        """Return the views to be sent as the reply to the last request.

        Call `end_reply` when all of them have been sent.
        """
        after = self.state.server[_REPLY]
        if type(message) is not self._reply_kind and type(message) is not ErrorReply:
            raise LocalProtocolError(f"{type(message).__name__} is no reply to the last request")
        payload_bytes = sum(map(len, payload)) if payload else 0
        head = encode_head(
            message, request_id=self._request_id, payload_bytes=payload_bytes, unstructure=self._unstructure
        )
        self.state = after
        if self._offer is not None:
            head = self._with_offer(head)
        return [memoryview(head), *payload]

    def _with_offer(self, head: bytes) -> bytes:
        """Return this end's first head, with the offer if the client made one."""
        offer, self._offer = self._offer, None
        return with_offer(head, offer) if offer is not None and self.peer.minor else head

    def end_reply(self) -> None:
        """Record that the reply was sent."""
        self.state = self.state.server[_SENT]
        self._request_id = 0

    async def reply_fatal(self, error: InfiniStoreException) -> None:
        """Send an error that ends the connection.

        If a reply was sent in part, nothing is sent: the client would take the error
        for a part of its payload.
        """
        was = self.state
        self.state = was.server[Event.FATAL]
        if was is State.SENDING:
            return
        reply = ErrorReply(error.code, _message(error), fatal=True)
        head = encode_head(reply, request_id=self._request_id, unstructure=self._unstructure)
        if self._offer is not None:
            head = self._with_offer(head)
        await Send([memoryview(head)])


def _put_payload_bytes(put: Put) -> int:
    """Return the length of the payload of this Put, in bytes.

    Raises:
        ProtocolError: the sizes do not match the keys.
    """
    if len(put.sizes) != len(put.keys):
        raise ProtocolError(f"a Put of {len(put.keys)} keys and {len(put.sizes)} sizes")
    return sum(put.sizes) + (8 * len(put.keys) if put.checksums else 0)


def _message(error: InfiniStoreException) -> str:
    """Return the text of an error, short enough for a frame."""
    return (str(error) or type(error).__name__).encode(errors="replace")[:1000].decode(errors="ignore")
