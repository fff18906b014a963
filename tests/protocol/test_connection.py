"""Which message may come when, at both ends: the tables in
`infinistore.protocol.states`, and nothing else.
"""

import random
import struct
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore import errors
from infinistore.errors import (
    InfiniStoreException,
    InvalidRequest,
    OutOfMemory,
    ProtocolError,
    StoreUnavailable,
    ValueTooLarge,
    VersionMismatch,
    error_from_code,
)
from infinistore.protocol import messages
from infinistore.protocol.client_connection import ClientConnection
from infinistore.protocol.codec import HEADER_BYTES, Header, encode_head, head_bytes, pack_u64, parse_header, with_offer
from infinistore.protocol.effects import Exchange, Receive
from infinistore.protocol.frame_reader import READ_AHEAD_BYTES
from infinistore.protocol.messages import (
    KINDS,
    MISSING,
    ONE_WAY,
    REPLIES,
    CountReply,
    Delete,
    ErrorReply,
    Exists,
    ExistsReply,
    Flush,
    FollowRemovals,
    Get,
    GetReply,
    Hello,
    HelloReply,
    Keys,
    Lease,
    LeaseReply,
    Mark,
    Message,
    Pin,
    Prefetch,
    Purge,
    Put,
    PutReply,
    Release,
    Reply,
    Request,
    TakeOver,
    TimesLeft,
)
from infinistore.protocol.server_connection import Received, ServerConnection
from infinistore.protocol.states import CLIENT, SERVER, LocalProtocolError, State
from infinistore.protocol.versions import OFFER
from tests.tables import for_each

from .golden.values import golden_messages
from .strategies import pieces, puts, requests, texts
from .wire import Wire, frame

HELLO_REPLY = HelloReply("0123", "1.0", 2**26, 8192, 2**28, 2**24)
ONE_KEY = Keys(["k"])
PAYLOAD = b"12345"
PUT = Put(ONE_KEY, pack_u64([5]), checksums=False)
GET_REPLY = GetReply(pack_u64([5]), pack_u64())

EXAMPLES: dict[type[Message], Message] = {
    type(message): message
    for message in (
        *reversed(golden_messages(messages, pack_u64)),  # the first of each kind is the example
        HELLO_REPLY,
        PUT,
        Get(ONE_KEY, pack_u64(), checksums=False),
        GET_REPLY,
        ErrorReply(OutOfMemory.code, "full"),
        Flush(ONE_KEY),
        Prefetch(ONE_KEY),
        messages.PrefetchReply(1),
        Pin(ONE_KEY),
        messages.PinReply(b"\1"),
        TimesLeft(ONE_KEY),
        messages.TimesLeftReply(pack_u64([5])),
        Mark(),
        FollowRemovals(3, 5),
        messages.FollowRemovalsReply(3, 6, ONE_KEY),
        TakeOver(1),
        messages.TakeOverReply(ONE_KEY, pack_u64([5])),
    )
}
MESSAGE_KINDS: list[type[Message]] = sorted(KINDS.values(), key=lambda cls: cls.KIND)
REQUEST_KINDS: list[type[Request]] = list(REPLIES)


def payload_of(message: Message) -> bytes:
    return PAYLOAD if isinstance(message, (Put, GetReply)) else b""


def whole_frame(kind: type[Message], request_id: int = 1) -> bytes:
    return frame(EXAMPLES[kind], payload_of(EXAMPLES[kind]), request_id=request_id)


def server(state: State) -> ServerConnection:
    """A server's end that has come to this state in the way that the table shows."""
    connection = ServerConnection(max_body_bytes=2**26, max_payload_bytes=2**28)
    if state is State.HELLO:
        return connection
    Wire(with_offer(frame(Hello()), OFFER)).run(connection.receive())
    Wire().run(connection.reply(HELLO_REPLY))
    if state is State.PAYLOAD:
        Wire(frame(PUT, PAYLOAD)[: -len(PAYLOAD)]).run(connection.receive())
    elif state in (State.REPLYING, State.SENDING):
        Wire(frame(Purge())).run(connection.receive())
        if state is State.SENDING:
            connection.begin_reply(CountReply(0))
    elif state is State.CLOSED:
        Wire().run(connection.reply_fatal(ProtocolError("enough")))
    assert connection.state is state
    return connection


def client(state: State) -> ClientConnection:
    """A client's end that has come to this state in the way that the table shows."""
    connection = ClientConnection()
    if state is State.HELLO:
        return connection
    Wire(with_offer(frame(HELLO_REPLY), OFFER)).run(connection.request(Hello()))
    if state is State.PAYLOAD:
        Wire(frame(GET_REPLY, PAYLOAD, request_id=2)).run(connection.request(Get(ONE_KEY, pack_u64())))
    elif state is State.TELLING:
        connection.notify(Release(1)).send(None)
    elif state in (State.ASKING, State.REPLYING):
        exchange = connection.request(Purge())
        exchange.send(None)
        if state is State.REPLYING:
            exchange.send(0)
    elif state is State.CLOSED:
        with pytest.raises(StoreUnavailable):
            Wire().run(connection.request(Purge()))
    assert connection.state is state
    return connection


def usable(connection: ClientConnection) -> bool:
    """Whether another request may follow."""
    return connection.state is State.READY


def run_until_error(wire: Wire, connection: ClientConnection, request: Request) -> InfiniStoreException:
    with pytest.raises(InfiniStoreException) as caught:
        wire.run(connection.request(request))
    return caught.value


# What a server hears


def test_there_is_an_example_of_every_message() -> None:
    assert set(EXAMPLES) == set(KINDS.values())


@for_each(kind=MESSAGE_KINDS, state=[State.HELLO, State.READY])
def test_a_server_takes_what_the_table_allows_and_refuses_the_rest(state: State, kind: type[Message]) -> None:
    connection = server(state)
    allowed = kind is Hello if state is State.HELLO else kind in (*REPLIES, *ONE_WAY) and kind is not Hello
    if allowed:
        received = Wire(whole_frame(kind)).run(connection.receive())
        assert received is not None
        assert received.message == EXAMPLES[kind]
        after = State.PAYLOAD if kind is Put else State.READY if kind in ONE_WAY else State.REPLYING
        assert connection.state is after
    else:
        with pytest.raises(ProtocolError, match=rf"{kind.__name__}"):
            Wire(whole_frame(kind)).run(connection.receive())
        assert connection.state is state


def test_a_request_follows_a_release_at_once_at_both_ends() -> None:
    connection = client(State.READY)
    asked = Wire(frame(CountReply(3), request_id=2))
    asked.run(connection.notify(Release(7)))
    assert asked.run(connection.request(Purge())) == CountReply(3)
    assert asked.sent == frame(Release(7), request_id=0) + frame(Purge(), request_id=2)
    hearing, wire = server(State.READY), Wire(bytes(asked.sent))
    assert [getattr(wire.run(hearing.receive()), "message", None) for _ in range(2)] == [Release(7), Purge()]


def test_a_release_that_was_given_up_half_sent_ends_the_connection() -> None:
    connection = client(State.READY)
    exchange = connection.notify(Release(7))
    exchange.send(None)
    exchange.close()
    assert not usable(connection)


@pytest.mark.parametrize(("lease", "payload"), [(1, b"abc"), (0, b""), (0, b"abc"), (0, b"123456")])
def test_a_lease_reply_has_a_payload_only_if_nothing_is_leased(lease: int, payload: bytes) -> None:
    reply = frame(LeaseReply(lease, pack_u64([5]), pack_u64([0]), pack_u64()), payload, request_id=2)
    caught = run_until_error(Wire(reply), client(State.READY), Lease(ONE_KEY, pack_u64()))
    assert type(caught) is ProtocolError


@for_each(request_kind=REQUEST_KINDS)
def test_a_server_answers_with_the_reply_that_belongs_to_the_request(request_kind: type[Request]) -> None:
    for kind in MESSAGE_KINDS:
        answer_with(request_kind, kind)


def answer_with(request_kind: type[Request], kind: type[Message]) -> None:
    connection = server(State.HELLO if request_kind is Hello else State.READY)
    wire = Wire(whole_frame(request_kind, request_id=77))
    wire.run(connection.receive())
    if request_kind is Put:
        wire.run(connection.discard_payload())
    reply: Reply = EXAMPLES[kind]  # type: ignore[assignment]
    if kind in (REPLIES[request_kind], ErrorReply):
        wire.run(connection.reply(reply, [memoryview(payload_of(reply))]))
        assert wire.sent == whole_frame(kind, request_id=77)
        assert connection.state is State.READY
    else:
        with pytest.raises(LocalProtocolError):
            wire.run(connection.reply(reply))
        assert not wire.sent


@for_each(state=[state for state in SERVER if state is not State.SENDING])
def test_a_server_may_end_the_connection_with_an_error_in_any_state(state: State) -> None:
    connection = server(state)
    wire = Wire()
    wire.run(connection.reply_fatal(OutOfMemory("full")))
    assert connection.state is State.CLOSED
    request_id = 1 if state in (State.PAYLOAD, State.REPLYING) else 0
    assert wire.sent == frame(ErrorReply(OutOfMemory.code, "full", fatal=True), request_id=request_id)


def test_nothing_follows_a_reply_that_was_given_up_half_sent() -> None:
    connection = server(State.READY)
    Wire(whole_frame(Get)).run(connection.receive())
    exchange = connection.reply(GET_REPLY, [memoryview(PAYLOAD)])
    exchange.send(None)
    exchange.close()
    wire = Wire()
    wire.run(connection.reply_fatal(OutOfMemory("full")))
    assert not wire.sent
    assert connection.state is State.CLOSED


def test_a_server_hears_how_long_the_caller_still_waits() -> None:
    asked = Wire()
    with pytest.raises(StoreUnavailable):
        asked.run(client(State.READY).request(Purge(), deadline_us=1_500_000))
    received = Wire(bytes(asked.sent)).run(server(State.READY).receive())
    assert received == Received(Purge(), 2, 0, 1_500_000)


def test_a_fatal_error_names_the_request_that_could_not_be_decoded() -> None:
    connection = server(State.READY)
    broken = encode_head(Purge(), request_id=77).replace(b"\x80", b"\x90", 1)
    with pytest.raises(ProtocolError):
        Wire(broken).run(connection.receive())
    wire = Wire()
    wire.run(connection.reply_fatal(ProtocolError("what?")))
    assert wire.sent == frame(ErrorReply(ProtocolError.code, "what?", fatal=True), request_id=77)


def test_a_server_sees_that_the_client_has_left_between_two_requests() -> None:
    connection = server(State.READY)
    assert Wire().run(connection.receive()) is None
    assert connection.state is State.CLOSED


@for_each(length=[1, HEADER_BYTES - 1, HEADER_BYTES, 63])
def test_a_stream_that_ends_in_the_middle_of_a_frame_is_a_lost_connection(length: int) -> None:
    with pytest.raises(StoreUnavailable, match="in the middle of a frame"):
        Wire(whole_frame(Exists)[:length]).run(server(State.READY).receive())


@for_each(
    beginning=[
        struct.pack("<IcI", 0xDEADBEEF, b"C", 3) + b"key",
        b"\x15\x03\x03\x00\x02\x02\x16",
        b"HTTP/1.1",
        b"QUIT\r\n",
    ],
    pieces=[[1], [5], [2**30]],
)
def test_a_peer_of_another_protocol_that_waits_after_a_few_bytes_is_refused_at_once(
    beginning: bytes, pieces: list[int]
) -> None:
    wire = Wire(beginning, pieces)
    with pytest.raises(ProtocolError, match=r"original InfiniStore|TLS|HTTP|not an InfiniStore frame"):
        wire.run(server(State.HELLO).receive())
    assert len(wire.effects) == -(-4 // pieces[0])  # four bytes tell


def test_a_server_that_closes_instead_of_answering_the_hello_may_be_the_original() -> None:
    with pytest.raises(StoreUnavailable, match=r"instead of replying to the hello; .* the original InfiniStore"):
        Wire().run(client(State.HELLO).request(Hello()))
    with pytest.raises(StoreUnavailable, match=r"instead of replying$"):
        Wire().run(client(State.READY).request(Purge()))


@for_each(discard=[False, True])
def test_a_stream_that_ends_in_a_payload_is_a_lost_connection(discard: bool) -> None:
    connection = server(State.READY)
    wire = Wire(whole_frame(Put)[:-2])
    wire.run(connection.receive())
    with pytest.raises(StoreUnavailable, match="2 bytes before the end"):
        wire.run(connection.discard_payload() if discard else connection.read_payload([memoryview(bytearray(5))]))


@for_each(announced=[0, 4, 6, 13])
def test_a_put_whose_payload_is_not_what_its_sizes_add_up_to_is_refused(announced: int) -> None:
    with pytest.raises(ProtocolError, match=f"a Put with {announced} bytes of payload, its sizes add up to 5"):
        Wire(frame(PUT, announced=announced)).run(server(State.READY).receive())


def test_the_checksums_of_a_put_count_as_payload() -> None:
    put = Put(Keys(["a", "b"]), pack_u64([5, 6]), checksums=True)
    with pytest.raises(ProtocolError, match="a Put with 11 bytes of payload, its sizes add up to 27"):
        Wire(frame(put, announced=11)).run(server(State.READY).receive())


@for_each(sizes=[[], [5, 0], [1, 1, 3]])
def test_a_put_has_one_size_for_each_key(sizes: list[int]) -> None:
    with pytest.raises(ProtocolError, match=f"a Put of 1 keys and {len(sizes)} sizes"):
        Wire(frame(Put(ONE_KEY, pack_u64(sizes)), announced=5)).run(server(State.READY).receive())


def test_sizes_too_large_to_add_up_in_64_bits_are_refused() -> None:
    put = Put(Keys(["a", "b"]), pack_u64([2**64 - 1, 6]), checksums=False)
    with pytest.raises(ProtocolError, match="its sizes add up to 18446744073709551621"):
        Wire(frame(put, PAYLOAD)).run(server(State.READY).receive())


def test_a_put_of_no_blocks_is_a_put() -> None:
    connection = server(State.READY)
    wire = Wire(frame(Put(Keys([]), pack_u64())))
    wire.run(connection.receive())
    wire.run(connection.read_payload([memoryview(b"")]))
    wire.run(connection.reply(PutReply(pack_u64())))
    assert connection.state is State.READY


@for_each(request_kind=REQUEST_KINDS)
def test_a_request_other_than_a_put_has_no_payload(request_kind: type[Request]) -> None:
    if request_kind is Put:
        return
    connection = server(State.HELLO if request_kind is Hello else State.READY)
    with pytest.raises(ProtocolError, match=f"{request_kind.__name__} has no payload, but 3 bytes come with it"):
        Wire(frame(EXAMPLES[request_kind], b"abc")).run(connection.receive())


def test_a_payload_over_the_limit_is_refused() -> None:
    connection = ServerConnection(max_body_bytes=100, max_payload_bytes=4)
    with pytest.raises(ProtocolError, match="a payload of 5 bytes is over the limit of 4"):
        Wire(whole_frame(Put)).run(connection.receive())


def test_a_stranger_may_not_say_much() -> None:
    connection = ServerConnection(max_body_bytes=2**26, max_payload_bytes=2**26)
    head = bytearray(whole_frame(Hello))
    head[12:16] = (16 * 1024 + 1).to_bytes(4, "little")
    with pytest.raises(ProtocolError, match="a body of 16385 bytes is over the limit of 16384"):
        Wire(bytes(head)).run(connection.receive())


def test_who_has_not_said_hello_has_a_small_buffer_and_what_came_behind_the_hello_is_kept() -> None:
    """The hello and the requests behind it arrive in one piece, cut by the end of that
    buffer.
    """

    def wanted(exchange: Exchange[Received | None]) -> int:
        effect = exchange.send(None)
        assert isinstance(effect, Receive)
        exchange.close()
        return sum(map(len, effect.views))

    assert wanted(ServerConnection(max_body_bytes=1 << 20, max_payload_bytes=0).receive()) == 1024
    asked = [Exists(Keys([f"key {number}"])) for number in range(40)]
    connection = ServerConnection(max_body_bytes=1 << 20, max_payload_bytes=0)
    wire = Wire(frame(Hello("me")) + b"".join(map(frame, asked)))
    received = wire.run(connection.receive())
    assert received is not None and received.message == Hello("me")
    wire.run(connection.reply(HelloReply("i", "v", 1, 1, 1, 1)))
    for request in asked:
        received = wire.run(connection.receive())
        assert received is not None and received.message == request
        wire.run(connection.reply(ExistsReply(b"\0")))
    assert wanted(connection.receive()) == READ_AHEAD_BYTES


def test_a_block_of_64_kib_comes_together_with_its_head() -> None:
    key, block = Keys(["k" * 1024]), bytes(64 * 1024)
    put, reply = Put(key, pack_u64([len(block)]), checksums=True), GetReply(pack_u64([len(block)]), pack_u64([7]))
    connection = server(State.READY)
    wire = Wire(frame(put, block + bytes(8)))
    assert wire.run(connection.receive()) is not None
    assert bytes(connection.take_payload() or b"") == block + bytes(8)
    reader = client(State.READY)
    wire = Wire(frame(reply, block, request_id=2))
    wire.run(reader.request(Get(key, pack_u64(), checksums=True)))
    assert bytes(reader.payload_at_hand() or b"") == block


@given(st.integers(1, READ_AHEAD_BYTES + 1000), pieces)
def test_a_payload_in_pieces_is_gathered_if_it_is_short(length: int, sizes: list[int]) -> None:
    payload = random.Random(length).randbytes(length)
    connection = server(State.READY)
    wire = Wire(
        frame(Put(Keys(["k"]), pack_u64([length]), checksums=False), payload) + frame(Exists(Keys(["k"]))), sizes
    )
    assert wire.run(connection.receive()) is not None
    wire.run(connection.gather_payload())

    if length <= READ_AHEAD_BYTES:
        assert connection.payload_to_come == 0
        assert bytes(connection.take_payload() or b"") == payload
    else:
        assert connection.take_payload() is None
        received = bytearray(length)
        wire.run(connection.read_payload([memoryview(received)]))
        assert received == payload
    wire.run(connection.reply(ErrorReply(1, "")))
    following = wire.run(connection.receive())
    assert following is not None and following.message == Exists(Keys(["k"]))


# What a client hears


@for_each(request_kind=REQUEST_KINDS)
def test_a_client_takes_the_reply_to_its_request_or_an_error_and_refuses_the_rest(request_kind: type[Request]) -> None:
    for kind in MESSAGE_KINDS:
        hear(request_kind, kind)


def hear(request_kind: type[Request], kind: type[Message]) -> None:
    hello = request_kind is Hello
    connection = client(State.HELLO if hello else State.READY)
    request: Request = EXAMPLES[request_kind]  # type: ignore[assignment]
    wire = Wire(whole_frame(kind, request_id=1 if hello else 2))
    if kind is REPLIES[request_kind]:
        assert wire.run(connection.request(request)) == EXAMPLES[kind]
        assert connection.state is (State.PAYLOAD if kind is GetReply else State.READY)
    else:
        error = run_until_error(wire, connection, request)
        if kind is ErrorReply:
            assert type(error) is OutOfMemory
            assert connection.state is State.READY
        else:
            assert type(error) is ProtocolError
            assert not usable(connection)


@for_each(request_kind=REQUEST_KINDS, state=CLIENT)
def test_a_client_asks_only_when_the_table_allows_it(state: State, request_kind: type[Request]) -> None:
    allowed = state is State.HELLO if request_kind is Hello else state is State.READY
    if allowed:
        return
    wire = Wire()
    unknown_to_last_release = request_kind in (
        Flush,
        Mark,
        Pin,
        Prefetch,
        FollowRemovals,
        TakeOver,
        TimesLeft,
    )  # which a peer counts as before its hello
    refused = VersionMismatch if state is State.HELLO and unknown_to_last_release else LocalProtocolError
    with pytest.raises(refused):
        wire.run(client(state).request(EXAMPLES[request_kind]))  # type: ignore[arg-type]
    assert not wire.sent


@for_each(reply=[CountReply(3), ErrorReply(OutOfMemory.code, "full")], request_id=[0, 1, 3])
def test_a_reply_to_another_request_is_refused(reply: Reply, request_id: int) -> None:
    connection = client(State.READY)
    error = run_until_error(Wire(frame(reply, request_id=request_id)), connection, Purge())
    assert type(error) is ProtocolError
    assert str(error) == f"a reply to request {request_id} where one to 2 belongs"
    assert not usable(connection)


def test_a_fatal_error_is_heard_whatever_request_it_names() -> None:
    connection = client(State.READY)
    reply = frame(ErrorReply(VersionMismatch.code, "too old", fatal=True), request_id=0)
    error = run_until_error(Wire(reply), connection, Purge())
    assert (type(error), str(error)) == (VersionMismatch, "too old")
    assert connection.state is State.CLOSED


@for_each(request_kind=REQUEST_KINDS, error=[False, True])
def test_a_reply_other_than_to_a_get_has_no_payload(request_kind: type[Request], error: bool) -> None:
    if request_kind is Get and not error:
        return
    hello = request_kind is Hello
    connection = client(State.HELLO if hello else State.READY)
    kind = ErrorReply if error else REPLIES[request_kind]
    reply = frame(EXAMPLES[kind], b"abc", request_id=1 if hello else 2)
    caught = run_until_error(Wire(reply), connection, EXAMPLES[request_kind])  # type: ignore[arg-type]
    assert type(caught) is ProtocolError
    assert str(caught) == f"{kind.__name__} with 3 bytes of payload instead of 0"
    assert not usable(connection)


@pytest.mark.parametrize(
    ("sizes", "payload_bytes"), [([], 1), ([MISSING], 1), ([5, MISSING], 4), ([5, 6], 0), ([2**63, 2**63], 0)]
)
def test_the_payload_of_a_get_reply_is_what_its_sizes_add_up_to(sizes: list[int], payload_bytes: int) -> None:
    reply = frame(GetReply(pack_u64(sizes), pack_u64()), announced=payload_bytes, request_id=2)
    connection = client(State.READY)
    error = run_until_error(Wire(reply), connection, Get(Keys(["a", "b"]), pack_u64()))
    assert type(error) is ProtocolError
    assert f"GetReply with {payload_bytes} bytes of payload instead of" in str(error)
    assert not usable(connection)


def test_the_payload_of_a_reply_goes_where_it_is_wanted() -> None:
    connection = client(State.READY)
    wire = Wire(frame(GetReply(pack_u64([2, 3]), pack_u64()), b"abcde", request_id=2))
    wire.run(connection.request(Get(Keys(["a", "b"]), pack_u64())))
    assert connection.payload_left == 5
    memory = bytearray(5)
    wire.run(connection.read_payload([memoryview(memory)[3:], memoryview(memory)[:3]]))
    assert memory == b"cdeab"
    assert (connection.state, connection.payload_left) == (State.READY, 0)


def test_room_of_another_size_than_the_payload_is_refused() -> None:
    connection = client(State.PAYLOAD)
    with pytest.raises(ProtocolError, match="a payload of 5 bytes where the sizes say 4"):
        Wire(PAYLOAD).run(connection.read_payload([memoryview(bytearray(4))]))


def test_request_ids_count_up_and_skip_zero_when_they_wrap() -> None:
    connection = client(State.READY)
    connection._next_id = 0xFFFF_FFFE
    sent = []
    for expected in (0xFFFF_FFFE, 0xFFFF_FFFF, 1, 2):
        wire = Wire(frame(CountReply(0), request_id=expected))
        wire.run(connection.request(Purge()))
        sent.append(int.from_bytes(wire.sent[8:12], "little"))
    assert sent == [0xFFFF_FFFE, 0xFFFF_FFFF, 1, 2]


# Errors


ERRORS: list[type[InfiniStoreException]] = [
    cls
    for name in errors.__all__
    if isinstance(cls := getattr(errors, name), type)
    and issubclass(cls, errors.InfiniStoreException)
    and cls.__name__ == name  # a second name is no second error
]


def test_no_two_errors_have_the_same_code() -> None:
    assert sorted(cls.code for cls in set(ERRORS)) == list(range(1, 23))  # one has a second name


@given(cls=st.sampled_from(ERRORS), text=texts, fatal=st.booleans())
def test_an_error_comes_back_as_the_same_class_with_the_same_text(
    cls: type[InfiniStoreException], text: str, fatal: bool
) -> None:
    connection = client(State.READY)
    error = run_until_error(Wire(frame(ErrorReply(cls.code, text, fatal), request_id=2)), connection, Purge())
    assert (type(error), str(error)) == (cls, text)
    assert connection.state is (State.CLOSED if fatal else State.READY)


@for_each(cls=ERRORS)
def test_an_error_without_text_travels_under_its_name(cls: type[InfiniStoreException]) -> None:
    wire = Wire()
    wire.run(server(State.READY).reply_fatal(cls()))
    error = run_until_error(Wire(bytes(wire.sent)), client(State.READY), Purge())
    assert (type(error), str(error)) == (cls, cls.__name__)


@given(st.text(max_size=3000) | st.integers(900, 1100).map(lambda length: "\U0001f4a9" * length))
def test_any_text_of_an_error_fits_a_frame(text: str) -> None:
    wire = Wire()
    wire.run(server(State.READY).reply_fatal(OutOfMemory(text)))
    error = run_until_error(Wire(bytes(wire.sent)), client(State.READY), Purge())
    assert type(error) is OutOfMemory
    if text and text.isascii():
        assert str(error) == text[:1000]


KNOWN_CODES = {
    error.code for error in vars(errors).values() if isinstance(error, type) and issubclass(error, InfiniStoreException)
}


@given(st.integers(0, 2**64 - 1).filter(lambda code: code not in KNOWN_CODES))
def test_an_unknown_code_is_the_root_error_and_is_named(code: int) -> None:
    error = error_from_code(code, "new trouble")
    assert type(error) is InfiniStoreException
    assert str(error) == f"new trouble (unknown error code {code})"


# A server that refuses while the client still sends

REFUSALS = [ValueTooLarge, ProtocolError, InvalidRequest, VersionMismatch, StoreUnavailable]


def put_in_groups(connection: ClientConnection, groups: int = 3) -> Callable[[Wire], Reply]:
    blocks = [[memoryview(b"abcd")]] * groups
    put = Put(Keys([f"{index}" for index in range(groups)]), pack_u64([4] * groups), checksums=False)
    return lambda wire: wire.run(connection.request(put, blocks, payload_bytes=4 * groups))


@for_each(cls=REFUSALS, fatal=[False, True], sends=[0, 1, 2])
def test_a_client_whose_send_breaks_raises_the_error_that_the_server_has_left(
    cls: type[InfiniStoreException], fatal: bool, sends: int
) -> None:
    connection = client(State.READY)
    wire = Wire(frame(ErrorReply(cls.code, "no", fatal), request_id=2), sends_until_broken=sends)
    with pytest.raises(InfiniStoreException) as caught:
        put_in_groups(connection)(wire)
    assert (type(caught.value), str(caught.value)) == (cls, "no")
    assert connection.state is State.CLOSED


@pytest.mark.parametrize(
    "left",
    [b"", b"INFS", b"HTTP/1.1 400 Bad Request\r\n\r\n....", frame(PutReply(pack_u64()), request_id=2)],
    ids=["nothing", "a part", "nonsense", "a reply"],
)
def test_a_client_whose_send_breaks_says_so_if_the_server_has_left_no_error(left: bytes) -> None:
    connection = client(State.READY)
    with pytest.raises(StoreUnavailable, match="broken pipe"):
        put_in_groups(connection)(Wire(left, sends_until_broken=1))
    assert connection.state is State.CLOSED


# However the bytes arrive


def headers(sent: bytes) -> list[Header]:
    """The headers of frames without payload."""
    found = []
    while sent:
        header = parse_header(memoryview(sent), max_body_bytes=2**26, max_payload_bytes=0)
        found.append(header)
        sent = sent[head_bytes(header.body_bytes) :]
    return found


def serve(connection: ServerConnection, wire: Wire) -> list[Received | bytes | None]:
    """Take requests until the stream ends, and tell what came: messages and
    payloads.
    """
    events: list[Received | bytes | None] = []
    while True:
        received = wire.run(connection.receive())
        events.append(received)
        if received is None:
            return events
        if connection.state is State.PAYLOAD:
            payload = bytearray(connection.payload_left)
            middle = len(payload) // 2
            wire.run(connection.read_payload([memoryview(payload)[:middle], memoryview(payload)[middle:]]))
            events.append(bytes(payload))
            assert connection.payload_left == 0
        reply = HELLO_REPLY if isinstance(received.message, Hello) else ErrorReply(1, "")
        wire.run(connection.reply(reply))


@given(st.lists(requests.filter(lambda message: not isinstance(message, Hello)) | puts(), max_size=6), pieces)
def test_a_pipelined_stream_gives_the_same_events_in_whatever_pieces_it_arrives(
    conversation: list[Request | tuple[Put, bytes]], sizes: list[int]
) -> None:
    stream = frame(Hello(), request_id=1)
    expected: list[object] = [Hello()]
    for request_id, said in enumerate(conversation, start=2):
        message, payload = said if isinstance(said, tuple) else (said, b"")
        stream += frame(message, payload, request_id=request_id)
        expected += [message, payload] if payload else [message]
    connection = ServerConnection(max_body_bytes=2**26, max_payload_bytes=2**26)
    wire = Wire(stream, sizes)
    events = serve(connection, wire)
    messages = [event.message if isinstance(event, Received) else event for event in events]
    assert messages == [*expected, None]
    ids = [event.request_id for event in events if isinstance(event, Received)]
    assert ids == list(range(1, len(conversation) + 2))
    assert [header.request_id for header in headers(bytes(wire.sent))] == ids


async def receive_into(room: Sequence[memoryview]) -> int:
    return await Receive(room, idle=True)


def serve_what_has_come(connection: ServerConnection, wire: Wire) -> list[Received | bytes | None]:
    """As `serve`, but take requests and payloads that have come whole without an
    exchange, as a session does.
    """
    events: list[Received | bytes | None] = []
    while True:
        received = connection.take()
        if received is None and (room := connection.room) is not None:
            connection.arrived(wire.run(receive_into(room)))
            received = connection.take() if connection.state is not State.CLOSED else None
        if received is None and connection.state is not State.CLOSED:
            received = wire.run(connection.receive())
        events.append(received)
        if received is None:
            return events
        if connection.state is State.PAYLOAD:
            if (taken := connection.take_payload()) is None:
                wire.run(connection.gather_payload())
                taken = connection.take_payload()
            if taken is not None:
                events.append(bytes(taken))
            else:
                payload = bytearray(connection.payload_left)
                wire.run(connection.read_payload([memoryview(payload)]))
                events.append(bytes(payload))
            assert connection.payload_left == 0
        wire.run(connection.reply(HELLO_REPLY if isinstance(received.message, Hello) else ErrorReply(1, "")))


@given(st.lists(requests.filter(lambda message: not isinstance(message, Hello)) | puts(), max_size=6), pieces)
def test_what_has_come_whole_is_taken_as_it_would_be_received(
    conversation: list[Request | tuple[Put, bytes]], sizes: list[int]
) -> None:
    stream = frame(Hello(), request_id=1)
    for request_id, said in enumerate(conversation, start=2):
        message, payload = said if isinstance(said, tuple) else (said, b"")
        stream += frame(message, payload, request_id=request_id)
    events = []
    for serving in (serve, serve_what_has_come):
        connection = ServerConnection(max_body_bytes=2**26, max_payload_bytes=2**26)
        wire = Wire(stream, sizes)
        events.append((serving(connection, wire), bytes(wire.sent)))
    assert events[0] == events[1]


@for_each(take=[ServerConnection.take, lambda connection: Wire().run(connection.receive())])
def test_nothing_is_taken_before_the_last_request_is_answered(take: Callable[[ServerConnection], object]) -> None:
    connection = server(State.REPLYING)
    with pytest.raises(LocalProtocolError):
        take(connection)


@given(puts(), st.integers(0, 20), pieces)
def test_a_payload_that_is_given_up_half_way_can_be_discarded(
    said: tuple[Put, bytes], receives: int, sizes: list[int]
) -> None:
    put, payload = said
    connection = server(State.READY)
    wire = Wire(frame(put, payload) + frame(Purge(), request_id=2), sizes)
    wire.run(connection.receive())
    if connection.state is State.PAYLOAD:
        wire.give_up(connection.read_payload([memoryview(bytearray(len(payload)))]), receives)
    if connection.state is State.PAYLOAD:
        wire.run(connection.discard_payload())
    wire.run(connection.reply(ErrorReply(OutOfMemory.code, "full")))
    received = wire.run(connection.receive())
    assert received is not None
    assert received.message == Purge()


@for_each(
    body_bytes=[65_000, 65_504, 65_505, 70_000, 200_000, 1_000_000],
    sizes=[[1000], [65_536], [2**30], [1, 65_535]],
)
def test_a_body_around_and_over_the_buffer_arrives(body_bytes: int, sizes: list[int]) -> None:
    joined_bytes = body_bytes - (9 if body_bytes < 2**16 else 11)  # a map of one, its name, the length of the text
    keys = Keys(["x" * 999] * (joined_bytes // 1000) + ["y" * (joined_bytes % 1000)])
    assert len(frame(Delete(keys))) == head_bytes(body_bytes)
    connection = server(State.READY)
    wire = Wire(frame(Delete(keys)) + frame(Purge(), request_id=2), sizes)
    for expected in (Delete(keys), Purge()):
        received = wire.run(connection.receive())
        assert received is not None
        assert received.message == expected
        wire.run(connection.reply(ErrorReply(1, "")))
