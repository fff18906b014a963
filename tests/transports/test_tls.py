"""TLS over streams that split what is sent anywhere, that end, and that lie."""

import ssl
from pathlib import Path

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from infinistore.errors import StoreUnavailable, TlsFailed
from infinistore.protocol.effects import Span
from infinistore.transports.tls.session import TlsSession, client_context, server_context
from infinistore.transports.tls.trio_stream import TlsStream
from tests.transports.certificates import Files, issue, issue_loosely
from tests.transports.memory_network import random_chunks, stream_pair


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return issue(tmp_path_factory.mktemp("tls"))


def ends_of(files: Files) -> tuple[TlsSession, TlsSession]:
    client = TlsSession(client_context(files.ca), "the server", host_name="localhost")
    return client, TlsSession(server_context(files.cert, files.key), "the client")


def deliver(data: bytes | bytearray | memoryview, receiver: TlsSession) -> None:
    while data:
        room = receiver.room(0)
        count = min(len(room), len(data))
        room[:count] = data[:count]
        receiver.received(count)
        data = data[count:]


def shaken(files: Files) -> tuple[TlsSession, TlsSession]:
    client, server = ends_of(files)
    while not (client.established and server.established):
        if not client.established:
            client.handshake()
        deliver(client.take(), server)
        if not server.established:
            server.handshake()
        deliver(server.take(), client)
    return client, server


def streams(files: Files, seed: int) -> tuple[TlsStream, TlsStream]:
    """Both ends of a connection in memory, which splits what is sent anywhere."""
    left, right = stream_pair(random_chunks(seed))
    client, server = ends_of(files)
    return TlsStream(left, client), TlsStream(right, server)


async def receive_exactly(stream: TlsStream, count: int) -> bytes:
    data = bytearray(count)
    span = Span([memoryview(data)])
    while span.remaining:
        got = await stream.receive_into(span.next_views(1 << 30))
        assert got
        span.advance(got)
    return bytes(data)


async def until_end(stream: TlsStream) -> bytes:
    data, piece = bytearray(), memoryview(bytearray(1000))
    while count := await stream.receive_into([piece]):
        data += piece[:count]
    return bytes(data)


@settings(max_examples=25)
@given(pieces=st.lists(st.integers(0, 40_000), max_size=8), seed=st.integers(0, 1000))
def test_whatever_is_sent_arrives(files: Files, pieces: list[int], seed: int) -> None:
    async def main() -> None:
        client, server = streams(files, seed)
        views = [memoryview(bytes([index]) * size) for index, size in enumerate(pieces)]
        async with trio.open_nursery() as nursery:

            async def send() -> None:
                await client.send_all(views)
                await client.send_eof()

            nursery.start_soon(send)
            assert await until_end(server) == b"".join(views)

    trio.run(main)


async def test_a_stream_that_is_half_closed_receives_on(files: Files) -> None:
    client, server = streams(files, 1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.send_all, [memoryview(b"question")])
        assert await receive_exactly(server, 8) == b"question"
    await client.send_eof()
    assert await until_end(server) == b""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.send_all, [memoryview(b"answer" * 10_000)])
        assert await receive_exactly(client, 60_000) == b"answer" * 10_000
    await server.send_eof()
    assert await until_end(client) == b""


def test_the_end_keeps_what_was_not_read(files: Files) -> None:
    client, server = shaken(files)
    data = server.encrypt(Span([memoryview(b"answer")]))
    deliver(data, client)
    assert client.end()
    target = bytearray(10)
    assert client.decrypt_into([memoryview(target)]) == 6
    assert target[:6] == b"answer"


def test_a_connection_that_ends_without_the_end_of_tls_is_at_its_end(files: Files) -> None:
    client, _ = shaken(files)
    client.received(0)
    assert client.decrypt_into([memoryview(bytearray(10))]) == 0


async def test_an_end_in_the_handshake_is_a_lost_connection(files: Files) -> None:
    left, right = stream_pair(random_chunks(1))
    client, _ = ends_of(files)
    right.close()
    with pytest.raises(StoreUnavailable) as lost:
        await TlsStream(left, client).receive_into([memoryview(bytearray(1))])
    assert not isinstance(lost.value, TlsFailed)


async def test_a_handshake_has_the_deadline_of_its_call(files: Files, autojump_clock: trio.testing.MockClock) -> None:
    left, right = stream_pair(random_chunks(1))
    _, server = ends_of(files)
    with pytest.raises(TimeoutError):
        await TlsStream(right, server).receive_into([memoryview(bytearray(1))], trio.current_time() + 5)
    assert trio.current_time() == pytest.approx(5, abs=0.1)
    left.close()


def test_a_certificate_that_strict_clients_refuse_is_said_to_need_issuing_again(tmp_path: Path) -> None:
    files = issue_loosely(tmp_path, "localhost")
    context = client_context(files.ca)
    context.verify_flags |= ssl.VERIFY_X509_STRICT  # as since Python 3.13
    client = TlsSession(context, "the server", host_name="localhost")
    server = TlsSession(server_context(files.cert, files.key), "the client")
    client.handshake()
    deliver(client.take(), server)
    server.handshake()
    deliver(server.take(), client)
    with pytest.raises(TlsFailed) as raised:
        client.handshake()
    assert "the server is not as RFC 5280 asks: Missing Authority Key Identifier" in str(raised.value)
    assert "issue it again, as the page on security shows" in str(raised.value)


def test_a_changed_byte_is_an_error_and_no_data(files: Files) -> None:
    client, server = shaken(files)
    data = bytearray(server.encrypt(Span([memoryview(b"value" * 10)])))
    data[20] ^= 1
    deliver(data, client)
    with pytest.raises(TlsFailed, match="TLS with the server failed"):
        client.decrypt_into([memoryview(bytearray(100))])


@settings(max_examples=50)
@given(data=st.binary(min_size=1, max_size=400))
def test_nothing_that_a_stranger_sends_is_more_than_a_refusal(files: Files, data: bytes) -> None:
    for end in ends_of(files):
        end.handshake()
        end.room(0)[: len(data)] = data
        end.received(len(data))
        with pytest.raises((TlsFailed, StoreUnavailable)):
            go_on(end)


def go_on(end: TlsSession) -> None:
    end.handshake()
    end.received(0)
    end.handshake()


def test_what_tls_says_for_itself_is_nothing_to_read(files: Files) -> None:
    client, server = shaken(files)
    assert client.is_quiet()
    data = server.encrypt(Span([memoryview(b"x")]))
    deliver(data, client)
    assert not client.is_quiet()
    target = bytearray(2)
    assert client.decrypt_into([memoryview(target)]) == 1  # and it is still there
    assert target == b"x\x00"
