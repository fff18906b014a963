"""Whatever a peer sends: it is taken, or it is one typed error; and it costs no more
memory than it has sent.
"""

import tracemalloc
from array import array
from collections.abc import Callable

import attrs
from hypothesis import example, given, settings
from hypothesis import strategies as st

from infinistore.errors import ProtocolError, StoreUnavailable
from infinistore.protocol.client_connection import ClientConnection
from infinistore.protocol.codec import encode_head, pack_u64, with_offer
from infinistore.protocol.frame_reader import READ_AHEAD_BYTES
from infinistore.protocol.messages import (
    MISSING,
    ONE_WAY,
    REPLIES,
    ErrorReply,
    Exists,
    ExistsReply,
    Get,
    GetReply,
    Hello,
    HelloReply,
    Keys,
    Message,
    Put,
    Reply,
    Request,
)
from infinistore.protocol.server_connection import ServerConnection
from infinistore.protocol.states import State
from infinistore.protocol.versions import MINOR, OFFER, Offer
from tests.examples import examples

from .strategies import messages, messages_of, notices, pieces, puts, requests
from .wire import Wire, frame

MIB = 1024 * 1024
NEWER = Offer(MINOR + 1, OFFER.capabilities)
HELLO_REPLY = HelloReply("0123", "1.0", 64 * MIB, 8192, 256 * MIB, 16 * MIB)


def converse_as_server(wire: Wire) -> None:
    """What a session does: take requests and payloads and answer each, until the client
    leaves or breaks the rules.
    """
    connection = ServerConnection(max_body_bytes=64 * MIB, max_payload_bytes=MIB)
    try:
        while (received := wire.run(connection.receive())) is not None:
            message = received.message
            if isinstance(message, Put):
                lengths = [*message.sizes, 8 * len(message.keys) * message.checksums]
                room = [memoryview(bytearray(length)) for length in lengths]
                wire.run(connection.read_payload(room))
            hello = isinstance(message, Hello)
            if not isinstance(message, ONE_WAY):
                wire.run(connection.reply(HELLO_REPLY if hello else ErrorReply(1, "")))
            assert connection.state is State.READY
        assert connection.state is State.CLOSED
    except StoreUnavailable:
        pass
    except ProtocolError as error:
        wire.run(connection.reply_fatal(error))
        assert connection.state is State.CLOSED


def ask_as_client(wire: Wire, request: Request) -> Reply | None:
    """Say hello and ask; read the payload if there is one. None if that ended in an
    error that it may end in.
    """
    connection = ClientConnection()
    try:
        wire.run(connection.request(Hello()))
        reply = wire.run(connection.request(request))
        if isinstance(reply, GetReply):
            assert connection.payload_left == sum(size for size in reply.sizes if size != MISSING)
            while connection.payload_left and connection.payload_left < MIB:
                wire.run(connection.read_payload([memoryview(bytearray(connection.payload_left))]))
        return reply
    except (ProtocolError, StoreUnavailable):  # what the peer would not understand is not sent
        assert not understands(connection.peer, request) or connection.state is not State.READY
        return None


def understands(peer: Offer, request: Request) -> bool:
    """Whether a server with this offer understands a request and each field of it that
    is not as by default.
    """
    needed = request.CAPABILITY
    newer = [field for field in attrs.fields(type(request)) if field.metadata.get("since", 0) > peer.minor]
    said = [field for field in newer if getattr(request, field.name) != field.default]
    return (not needed or needed in peer.capabilities) and not said


def damaged(data: st.DataObject, stream: bytes) -> bytes:
    """A stream with a few bytes changed, left out, said twice or put in."""
    changed = bytearray(stream)
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(changed)))
        end = min(len(changed), start + data.draw(st.integers(0, 40)))
        what = data.draw(st.sampled_from(["flip", "cut", "again", "insert", "end"]))
        if what == "flip" and start < len(changed):
            changed[start] ^= 1 << data.draw(st.integers(0, 7))
        elif what == "cut":
            del changed[start:end]
        elif what == "again":
            changed[end:end] = changed[start:end]
        elif what == "insert":
            changed[start:start] = data.draw(st.binary(max_size=20))
        elif what == "end":
            del changed[start:]
    return bytes(changed)


@given(st.binary(max_size=300), pieces)
def test_a_server_survives_any_bytes(stream: bytes, sizes: list[int]) -> None:
    converse_as_server(Wire(stream, sizes))
    converse_as_server(Wire(frame(Hello()) + stream, sizes))
    converse_as_server(Wire(with_offer(frame(Hello()), NEWER) + stream, sizes))


@given(st.lists(requests | notices | puts(), max_size=4), pieces, st.data())
def test_a_server_survives_a_damaged_conversation(
    conversation: list[Request | tuple[Put, bytes]], sizes: list[int], data: st.DataObject
) -> None:
    frames = [frame(*said) if isinstance(said, tuple) else frame(said) for said in conversation]
    stream = frame(Hello()) + damaged(data, b"".join(frames))
    converse_as_server(Wire(stream, sizes))


@given(st.lists(messages, max_size=4), st.lists(st.integers(0, 2 * MIB), min_size=4, max_size=4), pieces)
def test_a_server_survives_any_messages_in_any_order(
    conversation: list[Message], announced: list[int], sizes: list[int]
) -> None:
    stream = b"".join(
        frame(message, b"x" * 10, announced=count) for message, count in zip(conversation, announced, strict=False)
    )
    converse_as_server(Wire(stream, sizes))
    converse_as_server(Wire(frame(Hello()) + stream, sizes))
    converse_as_server(Wire(with_offer(frame(Hello()), NEWER) + stream, sizes))


@given(requests.filter(lambda message: type(message) is not Hello), st.binary(max_size=300), pieces)
def test_a_client_survives_any_bytes(request: Request, stream: bytes, sizes: list[int]) -> None:
    assert ask_as_client(Wire(stream, sizes), request) is None
    assert ask_as_client(Wire(frame(HELLO_REPLY) + stream, sizes), request) is None
    assert ask_as_client(Wire(with_offer(frame(HELLO_REPLY), NEWER) + stream, sizes), request) is None


@given(requests.filter(lambda message: type(message) is not Hello), pieces, st.data())
def test_a_client_survives_a_damaged_reply(request: Request, sizes: list[int], data: st.DataObject) -> None:
    reply = data.draw(messages_of(REPLIES[type(request)]))
    payload = data.draw(st.binary(max_size=50))
    if isinstance(reply, GetReply):
        reply = GetReply(pack_u64([len(payload), *[MISSING] * (len(reply.sizes) - 1)]), reply.checksums)
    stream = frame(reply, payload if isinstance(reply, GetReply) else b"", request_id=2)
    ask_as_client(Wire(frame(HELLO_REPLY) + damaged(data, stream), sizes), request)


# Memory


def peak_bytes(run: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def announcing(message: Message, body_bytes: int, payload_bytes: int = 0) -> bytes:
    """A header that announces much, and nothing behind it."""
    head = bytearray(encode_head(message, request_id=2, payload_bytes=payload_bytes)[:32])
    head[12:16] = body_bytes.to_bytes(4, "little")
    return bytes(head)


@settings(max_examples=examples(25))  # slow, for each allocation is traced
@given(st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))
@example(64 * MIB, 0)
@example(2**32 - 1, 2**64 - 1)
def test_a_header_alone_costs_a_server_no_memory(body_bytes: int, payload_bytes: int) -> None:
    for stream in (
        announcing(Hello(), body_bytes, payload_bytes),
        frame(Hello()) + announcing(Exists(Keys([])), body_bytes, payload_bytes),
        frame(Hello()) + announcing(Put(Keys([]), pack_u64()), body_bytes, payload_bytes),
    ):
        assert peak_bytes(lambda stream=stream: converse_as_server(Wire(stream))) < MIB  # type: ignore[misc]


@settings(max_examples=examples(25))  # slow, for each allocation is traced
@given(st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))
@example(64 * MIB, 0)
def test_a_header_alone_costs_a_client_no_memory(body_bytes: int, payload_bytes: int) -> None:
    stream = frame(HELLO_REPLY) + announcing(GetReply(pack_u64(), pack_u64()), body_bytes, payload_bytes)
    assert peak_bytes(lambda: ask_as_client(Wire(stream), Get(Keys(["k"]), pack_u64()))) < MIB


def test_a_body_that_arrives_slowly_takes_memory_as_it_arrives() -> None:
    arrived = 2 * MIB
    stream = frame(Hello()) + announcing(Exists(Keys([])), 64 * MIB) + bytes(arrived)
    # The stream itself is in memory before; a body takes twice its length while it
    # grows, and once more to be joined.
    assert peak_bytes(lambda: converse_as_server(Wire(stream))) < len(stream) + 5 * arrived


def test_a_server_reads_ahead_no_more_than_its_buffer() -> None:
    waiting = frame(Hello()) + frame(Exists(Keys(["k"]))) * 10_000
    connection = ServerConnection(max_body_bytes=MIB, max_payload_bytes=MIB)
    wire = Wire(waiting)
    wire.run(connection.receive())
    assert len(waiting) - len(wire.incoming) == 1024
    wire.run(connection.reply(HELLO_REPLY))
    for _ in range(100):
        wire.run(connection.receive())
        wire.run(connection.reply(ExistsReply(b"\0")))
    assert len(waiting) - len(wire.incoming) <= READ_AHEAD_BYTES + 1024


def test_sizes_that_a_get_reply_cannot_mean_cost_nothing() -> None:
    reply = GetReply(array("Q", [2**62] * 1000), pack_u64())  # type: ignore[arg-type]
    stream = frame(HELLO_REPLY) + frame(reply, announced=2**62, request_id=2)
    assert ask_as_client(Wire(stream), Get(Keys(["k"]), pack_u64())) is None
