"""The last release: its frames are understood, it gets the frames that it understands,
both ways.
"""

from pathlib import Path
from typing import Any

import attrs
import msgpack
import pytest
from hypothesis import given

from infinistore.errors import AuthenticationFailed, InfiniStoreException, ProtocolError, VersionMismatch
from infinistore.protocol import messages
from infinistore.protocol.client_connection import ClientConnection
from infinistore.protocol.codec import (
    HEADER_BYTES,
    Header,
    decode_body,
    encode_head,
    head_bytes,
    pack_u64,
    parse_header,
    statistics_from_tree,
    structure_for,
    unstructure_for,
    with_offer,
)
from infinistore.protocol.messages import (
    KINDS,
    ONE_WAY,
    CountReply,
    ErrorReply,
    Exists,
    ExistsReply,
    Hello,
    HelloReply,
    Keys,
    Lease,
    Message,
    Purge,
    Put,
    StatisticsReply,
)
from infinistore.protocol.server_connection import ServerConnection
from infinistore.protocol.states import State
from infinistore.protocol.versions import LAST_RELEASE, MINOR, OFFER, Capability, Offer
from infinistore.transports.base import Stream
from tests.server.running import simulated_server
from tests.tables import for_each

from .golden import record
from .golden.values import CONVERSATION_BLOCKS, conversation, golden_messages
from .strategies import made_offers
from .wire import Wire, frame

GOLDEN = Path(record.__file__).parent
MESSAGES: list[Message] = golden_messages(messages, pack_u64)
FRAMES = [line.split() for line in (GOLDEN / "frames.hex").read_text().splitlines()]
CONVERSATION = [
    (who, bytes.fromhex(data)) for who, data in map(str.split, (GOLDEN / "conversation.hex").read_text().splitlines())
]
SAID = b"".join(data for who, data in CONVERSATION if who == "client")
ANSWERED = b"".join(data for who, data in CONVERSATION if who == "server")

every_frame = for_each(
    said=[(message, bytes.fromhex(data)) for message, (_, data) in zip(MESSAGES, FRAMES, strict=True)]
)


def parse(head: bytes) -> Header:
    return parse_header(memoryview(head), max_body_bytes=2**32, max_payload_bytes=2**64)


def split(stream: bytes) -> list[tuple[Header, Message, bytes]]:
    """The frames of a stream: header, message, payload."""
    found = []
    while stream:
        header = parse(stream)
        body = memoryview(stream)[HEADER_BYTES : HEADER_BYTES + header.body_bytes]
        end = head_bytes(header.body_bytes)
        payload = stream[end : end + header.payload_bytes]
        found.append((header, decode_body(header.kind, body), payload))
        stream = stream[end + header.payload_bytes :]
    return found


# Frames


@every_frame
def test_a_frame_of_the_last_release_is_understood(said: tuple[Message, bytes]) -> None:
    message, golden = said
    header = parse(golden)
    assert header == Header(message.KIND, record.REQUEST_ID, header.body_bytes, 2**40 + 5, record.DEADLINE_US)
    body = memoryview(golden)[HEADER_BYTES : HEADER_BYTES + header.body_bytes]
    assert decode_body(header.kind, body, structure_for(LAST_RELEASE)) == message


@every_frame
def test_the_last_release_gets_the_bytes_that_it_would_send(said: tuple[Message, bytes]) -> None:
    message, golden = said
    head = encode_head(
        message,
        request_id=record.REQUEST_ID,
        payload_bytes=2**40 + 5,
        deadline_us=record.DEADLINE_US,
        unstructure=unstructure_for(LAST_RELEASE),
    )
    assert head == golden


def test_there_is_a_golden_frame_of_every_message_that_the_last_release_is_sent() -> None:
    assert {type(message) for message in MESSAGES} == set(unstructure_for(LAST_RELEASE))


def test_a_message_that_the_last_release_does_not_have_belongs_to_a_new_capability() -> None:
    golden = {type(message) for message in MESSAGES}
    for cls in set(KINDS.values()) - golden:
        assert cls.CAPABILITY
        assert not cls.CAPABILITY & LAST_RELEASE.capabilities


def test_every_field_has_another_value_than_its_default_in_some_golden_frame() -> None:
    for message in MESSAGES:
        for field in attrs.fields(type(message)):
            if field.default is not attrs.NOTHING and not field.metadata.get("since"):
                values = [getattr(other, field.name) for other in MESSAGES if type(other) is type(message)]
                assert any(value != field.default for value in values), (type(message), field.name)


# Conversations


def comparable(message: Message) -> Any:
    """What two servers that are asked the same answer alike: no names, no times, no
    text of errors.
    """
    if isinstance(message, ErrorReply):
        return message.code, message.fatal
    if isinstance(message, HelloReply | StatisticsReply):
        return type(message)
    return message


async def receive(stream: Stream, length: int) -> bytes:
    data = bytearray(length)
    rest = memoryview(data)
    while rest:
        count = await stream.receive_into([rest])
        assert count, "the server closed the connection"
        rest = rest[count:]
    return bytes(data)


async def receive_frame(stream: Stream) -> bytes:
    head = await receive(stream, HEADER_BYTES)
    header = parse(head)
    return head + await receive(stream, head_bytes(header.body_bytes) - HEADER_BYTES + header.payload_bytes)


async def test_a_client_of_the_last_release_is_served_as_by_a_server_of_it() -> None:
    async with simulated_server() as server:
        stream = await server.connect()
        for who, data in CONVERSATION:
            if who == "client":
                await stream.send_all([memoryview(data)])
                continue
            ((wanted_header, wanted, wanted_payload),) = split(data)
            ((header, answer, payload),) = split(await receive_frame(stream))
            assert comparable(answer) == comparable(wanted)
            assert payload == wanted_payload
            assert (header.request_id, header.deadline_us) == (wanted_header.request_id, 0)
        stream.close()


def converse(connection: ClientConnection, wire: Wire) -> list[Any]:
    """What a client of this release hears when it says what the recorded one said."""
    heard: list[Any] = []
    for message, payload in conversation(messages, pack_u64):
        if isinstance(message, ONE_WAY):
            wire.run(connection.notify(message))  # type: ignore[arg-type]
            continue
        try:
            heard.append(
                wire.run(
                    connection.request(
                        message,
                        [[memoryview(payload)]] if payload else (),
                        payload_bytes=len(payload),
                        deadline_us=record.DEADLINE_US,
                    )
                )
            )
            if connection.state is State.PAYLOAD:
                block = bytearray(connection.payload_left)
                wire.run(connection.read_payload([memoryview(block)]))
                heard.append(bytes(block))
        except InfiniStoreException as error:
            heard.append(error.code)
    return heard


def test_a_client_of_this_release_is_served_by_a_server_of_the_last() -> None:
    wire, connection = Wire(ANSWERED), ClientConnection()
    heard = converse(connection, wire)
    answers: list[Any] = []
    for _, message, payload in split(ANSWERED)[:-1]:  # the last is the error after the last request
        answers += [message.code] if isinstance(message, ErrorReply) else [message, payload] if payload else [message]
    assert heard == answers
    assert b"".join(CONVERSATION_BLOCKS) in heard
    assert connection.peer == LAST_RELEASE


def test_a_client_of_this_release_says_byte_for_byte_what_one_of_the_last_said_but_its_offer() -> None:
    wire = Wire(ANSWERED)
    converse(ClientConnection(), wire)
    hello, was = bytes(wire.sent[:64]), SAID[:64]
    assert hello[:24] + hello[32:] == was[:24] + was[32:]
    assert Offer.from_number(int.from_bytes(hello[24:32], "little")) == OFFER
    assert wire.sent[64:] == SAID[64:]


def test_the_statistics_of_a_server_of_the_last_release_are_understood() -> None:
    (reply,) = [message for _, message, _ in split(ANSWERED) if isinstance(message, StatisticsReply)]
    tree = statistics_from_tree(reply.statistics)
    assert tree.server.requests > 0
    assert tree.server.strangers_open == 0
    assert tree.details is not None
    assert [client.name for client in tree.details.clients] == ["decode-7"]


# Two ends that meet


def met(server_offer: Offer, client_offer: Offer) -> tuple[ServerConnection, ClientConnection]:
    """Two ends that have said hello."""
    server = ServerConnection(max_body_bytes=2**20, max_payload_bytes=2**20, offer=server_offer)
    client = ClientConnection(offer=client_offer)
    asked = client.encode(Hello())
    wire = Wire(asked.head)
    wire.run(server.receive())
    wire.run(server.reply(HelloReply("0123", "1.0", 2**26, 8192, 2**28, 2**24)))
    reply = Wire(bytes(wire.sent))
    reply.run(client.ask(asked))
    return server, client


@given(made_offers, made_offers)
def test_two_ends_know_of_each_other_what_both_can_do(server_offer: Offer, client_offer: Offer) -> None:
    server, client = met(server_offer, client_offer)
    both = server_offer.capabilities & client_offer.capabilities
    assert server.peer == (client_offer.minor, both)
    assert client.peer == (server_offer.minor, both)


def test_only_the_first_frame_of_each_end_has_an_offer() -> None:
    server, client = met(OFFER, OFFER)
    wire = Wire(frame(ExistsReply(b"\1"), request_id=2))
    wire.run(client.request(Exists(Keys(["k"]))))
    assert parse(bytes(wire.sent)).deadline_us == 0
    answer = Wire(bytes(wire.sent))
    answer.run(server.receive())
    answer.run(server.reply(ExistsReply(b"\1")))
    assert parse(bytes(answer.sent)).deadline_us == 0


@pytest.mark.parametrize("fatal", [False, True])
def test_a_server_that_turns_a_client_away_tells_what_it_can_do(fatal: bool) -> None:
    server, client = ServerConnection(max_body_bytes=2**20, max_payload_bytes=2**20), ClientConnection()
    asked = client.encode(Hello())
    wire = Wire(asked.head)
    wire.run(server.receive())
    error = AuthenticationFailed("who are you?")
    wire.run(server.reply_fatal(error) if fatal else server.reply(ErrorReply(error.code, str(error))))
    assert Offer.from_number(parse(bytes(wire.sent)).deadline_us) == OFFER
    with pytest.raises(AuthenticationFailed):
        Wire(bytes(wire.sent)).run(client.ask(asked))
    assert client.peer == OFFER


def test_a_client_understands_the_refusal_of_a_newer_server_with_more_fields() -> None:
    head = with_field(ErrorReply(AuthenticationFailed.code, "no", fatal=True), "help", "ask the operators")
    with pytest.raises(AuthenticationFailed):
        Wire(with_offer(head, Offer(MINOR + 1, OFFER.capabilities))).run(ClientConnection().request(Hello()))


def test_a_client_does_not_send_what_the_server_cannot_do_and_stays_good() -> None:
    _, client = met(Offer(MINOR, OFFER.capabilities & ~Capability.SHARED_MEMORY), OFFER)
    wire = Wire(frame(CountReply(0), request_id=3))
    with pytest.raises(VersionMismatch, match="the peer does not understand Lease"):
        wire.run(client.request(Lease(Keys(["k"]), pack_u64())))
    assert not wire.sent
    assert wire.run(client.request(Purge())) == CountReply(0)


def test_a_newer_field_in_a_hello_is_ignored_and_in_a_put_it_ends_the_connection() -> None:
    newer = Offer(MINOR + 1, OFFER.capabilities)
    server = ServerConnection(max_body_bytes=2**20, max_payload_bytes=2**20)
    hello = Wire(with_offer(with_field(Hello(name="me"), "zone", "b"), newer))
    received = hello.run(server.receive())
    assert received is not None and received.message == Hello(name="me")
    hello.run(server.reply(HelloReply("0123", "1.0", 2**26, 8192, 2**28, 2**24)))
    with pytest.raises(ProtocolError, match="unknown fields 'priority'"):
        Wire(with_field(Put(Keys([]), pack_u64()), "priority", 5)).run(server.receive())


def with_field(message: Message, name: str, value: Any) -> bytes:
    """A frame with one more field in its body."""
    head = encode_head(message, request_id=1)
    fields = msgpack.unpackb(head[HEADER_BYTES : HEADER_BYTES + parse(head).body_bytes])
    body: bytes = msgpack.packb(fields | {name: value})
    return (head[:12] + len(body).to_bytes(4, "little") + head[16:32] + body).ljust(head_bytes(len(body)), b"\0")
