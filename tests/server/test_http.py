"""The HTTP server under the management API: whatever comes is answered, or ends one
connection.
"""

import json
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import attrs
import h11
import pytest
import trio
from hypothesis import example, given
from hypothesis import strategies as st

from infinistore.errors import StoreUnavailable
from infinistore.protocol.codec import MAGIC, encode_head
from infinistore.protocol.messages import Hello
from infinistore.server.management.http import Application, ConnectionSlots, HttpLimits, serve_connection, serve_http
from infinistore.transports.sockets.trio_streams import connect_tcp, listen_tcp
from tests.server.http_client import Answer, ask, ask_over, read_answer
from tests.transports.memory_network import Chunks, MemoryStream, random_chunks, stream_pair, whole

LIMITS = HttpLimits(head_bytes=1000, body_bytes=500, head_s=5, request_s=20, connections=2)


async def echo(scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
    """An application that answers with what it was asked."""
    message = await receive()
    assert message["more_body"] is False
    if scope["path"] == "/slow":
        await trio.sleep_forever()
    if scope["path"] == "/fault":
        raise ZeroDivisionError("of the test")
    said = {
        "method": scope["method"],
        "path": scope["path"],
        "query": scope["query_string"].decode(errors="replace"),
        "body": message["body"].decode(errors="replace"),
    }
    text = json.dumps(said).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(text)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": text[:5], "more_body": True})
    await send({"type": "http.response.body", "body": text[5:]})


@asynccontextmanager
async def connected(
    application: Application = echo, chunks: Chunks = whole, limits: HttpLimits = LIMITS
) -> AsyncIterator[MemoryStream]:
    """A client's stream to a served connection; the server must be done when it is
    closed.
    """
    ours, theirs = stream_pair(chunks)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_connection, application, theirs, ConnectionSlots(limits))
        yield ours
        ours.close()


async def send(stream: MemoryStream, data: bytes) -> None:
    await stream.send_all([memoryview(data)])


async def answer_of(stream: MemoryStream, method: str = "POST") -> Answer:
    """The answer to a request that the test sent as bytes."""
    connection = h11.Connection(h11.CLIENT)
    request: Any = h11.Request(method=method, target="/", headers=[("Host", "test")])
    connection.send(request)
    connection.send(h11.EndOfMessage())
    return await read_answer(stream, connection)


async def ended(stream: MemoryStream) -> bool:
    return await stream.receive_into([memoryview(bytearray(1))]) == 0


@given(seed=st.integers(0, 2**32), body=st.binary(max_size=LIMITS.body_bytes))
async def test_a_request_is_answered_however_it_is_cut_into_pieces(seed: int, body: bytes) -> None:
    async with connected(chunks=random_chunks(seed)) as stream:
        for _ in range(2):
            answer = await ask_over(stream, "POST", "/a%20b?c=%20d", body=body)
            assert answer.status == 200
            assert answer.json == {
                "method": "POST",
                "path": "/a b",
                "query": "c=%20d",
                "body": body.decode(errors="replace"),
            }
            assert answer.headers["content-length"] == str(len(answer.body))
            assert "date" in answer.headers


async def test_requests_sent_ahead_are_answered_in_order() -> None:
    async with connected() as stream:
        await send(stream, b"GET /1 HTTP/1.1\r\nHost: t\r\n\r\nGET /2 HTTP/1.1\r\nHost: t\r\n\r\n")
        connection = h11.Connection(h11.CLIENT)
        for path in ("/1", "/2"):
            request: Any = h11.Request(method="GET", target=path, headers=[("Host", "t")])
            connection.send(request)
            connection.send(h11.EndOfMessage())
            assert (await read_answer(stream, connection)).json["path"] == path
            connection.start_next_cycle()


async def test_head_is_answered_without_a_body() -> None:
    async with connected() as stream:
        answer = await ask_over(stream, "HEAD", "/a")
        assert (answer.status, answer.body) == (200, b"")
        assert int(answer.headers["content-length"]) > 0
        assert (await ask_over(stream, "GET", "/b")).json["path"] == "/b"


async def test_a_client_that_asks_to_close_is_closed() -> None:
    async with connected() as stream:
        assert (await ask_over(stream, "GET", "/", headers={"Connection": "close"})).status == 200
        assert await ended(stream)


async def test_a_client_that_waits_to_be_told_to_go_on_is_told() -> None:
    async with connected() as stream:
        await send(stream, b"POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n")
        buffer = bytearray(100)
        count = await stream.receive_into([memoryview(buffer)])
        assert buffer[:count].startswith(b"HTTP/1.1 100 ")
        await send(stream, MAGIC)
        assert (await answer_of(stream)).json["body"] == MAGIC.decode()


async def test_a_request_as_for_a_proxy_has_its_path() -> None:
    async with connected() as stream:
        assert (await ask_over(stream, "GET", "http://host:1/a/b?c")).json["path"] == "/a/b"


POST = b"POST / HTTP/1.1\r\nHost: t\r\n"
TOO_LARGE, NO_REQUEST = (413,), (400, 501, 505)
REFUSED: dict[str, tuple[bytes, tuple[int, ...]]] = {
    "an announced body": (POST + b"Content-Length: 501\r\n\r\n", TOO_LARGE),
    "an absurd body": (POST + b"Content-Length: 99999999999999999999\r\n\r\n", TOO_LARGE),
    "chunks": (POST + b"Transfer-Encoding: chunked\r\n\r\n" + (b"64\r\n" + b"x" * 100 + b"\r\n") * 6, TOO_LARGE),
    "a huge head": (b"GET / HTTP/1.1\r\nHost: t\r\nX: " + b"x" * 2000, (431,)),
    "bytes": (b"\x00\x01\x02\r\n\r\n", NO_REQUEST),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", NO_REQUEST),
    "two hosts": (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", NO_REQUEST),
    "a negative length": (POST + b"Content-Length: -1\r\n\r\n", NO_REQUEST),
    "an endless length": (POST + b"Content-Length: " + b"9" * 900 + b"\r\n\r\n", NO_REQUEST),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", NO_REQUEST),
    "a store": (encode_head(Hello(name="store"), request_id=1), NO_REQUEST),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_what_is_too_large_or_no_request_is_refused_and_ends_the_connection(case: str) -> None:
    request_bytes, statuses = REFUSED[case]
    async with connected() as stream:
        await send(stream, request_bytes)
        answer = await answer_of(stream)
        assert answer.status in statuses
        assert answer.json["error"]
        assert statuses is not TOO_LARGE or "500 bytes" in answer.json["error"]
        assert await ended(stream)


@given(st.binary(max_size=300), st.booleans())
@example(b"GET /\xff\xfe%ff%00 HTTP/1.1\r\nHost: \xff\r\n\r\n", True)
@example(b"GET http:// HTTP/1.1\r\nHost: t\r\n\r\n", True)
@example(b"OPTIONS * HTTP/1.1\r\nHost: t\r\n\r\n", True)
async def test_any_bytes_are_answered_or_end_the_connection(data: bytes, as_head: bool) -> None:
    async with connected() as stream:
        await send(stream, b"GET /" + data if as_head else data)
        await stream.send_eof()
        while not await ended(stream):
            pass


@pytest.mark.parametrize(
    ("said", "status", "within_s"),
    [
        (b"GET / HTTP/1.1\r\n", 408, LIMITS.head_s),
        (POST + b"Content-Length: 100\r\n\r\nhalf", 408, LIMITS.request_s),
        (b"GET /slow HTTP/1.1\r\nHost: t\r\n\r\n", 503, LIMITS.request_s),
    ],
    ids=["head", "body", "application"],
)
async def test_what_takes_too_long_is_given_up(
    said: bytes, status: int, within_s: float, autojump_clock: trio.testing.MockClock
) -> None:
    async with connected() as stream:
        await send(stream, said)
        answer = await answer_of(stream)
        assert (answer.status, trio.current_time()) == (status, within_s)
        assert await ended(stream)


async def test_a_head_that_trickles_in_is_given_up(autojump_clock: trio.testing.MockClock) -> None:
    async with connected() as stream, trio.open_nursery() as nursery:

        async def trickle() -> None:
            while True:
                await send(stream, b"X")
                await trio.sleep(1)

        nursery.start_soon(trickle)
        answer = await answer_of(stream)
        assert (answer.status, trio.current_time()) == (408, LIMITS.head_s)
        nursery.cancel_scope.cancel()


async def test_an_idle_connection_is_closed_without_a_word(autojump_clock: trio.testing.MockClock) -> None:
    async with connected() as stream:
        assert await ended(stream)
        assert trio.current_time() == LIMITS.head_s


async def test_a_client_that_reads_no_response_is_given_up(autojump_clock: trio.testing.MockClock) -> None:
    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(1024 * 1024)})

    async with connected(endless) as stream:
        await send(stream, b"GET / HTTP/1.1\r\nHost: t\r\n\r\n")
        await trio.sleep(LIMITS.request_s + 1)
        buffer = [memoryview(bytearray(64 * 1024))]
        while await stream.receive_into(buffer):
            pass


async def test_a_fault_in_the_application_is_logged_and_answered_without_details(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with connected() as stream:
        answer = await ask_over(stream, "GET", "/fault")
        assert answer.status == 500
        assert "of the test" not in answer.body.decode()
        assert await ended(stream)
    assert "of the test" in caplog.text
    assert caplog.records[0].levelno == logging.ERROR


@asynccontextmanager
async def serving(limits: HttpLimits = LIMITS) -> AsyncIterator[tuple[str, int]]:
    listeners = listen_tcp("127.0.0.1", 0)
    async with trio.open_nursery() as nursery:
        limits = attrs.evolve(limits, probes=frozenset(["/probe"]))
        nursery.start_soon(serve_http, echo, listeners, limits)
        yield listeners[0].getsockname()[:2]
        nursery.cancel_scope.cancel()
    for listener in listeners:
        listener.close()


async def test_a_broken_connection_ends_nothing_else() -> None:
    async with serving() as address:
        stream = await connect_tcp(*address)
        await stream.send_all([memoryview(b"GET / HT")])
        reset = socket.SO_LINGER
        stream.socket.setsockopt(socket.SOL_SOCKET, reset, b"\x01\0\0\0\0\0\0\0")
        stream.close()
        assert (await ask(address, "GET", "/")).status == 200


HALF = [b"", b"G", b"GET / HTTP/1.1\r\nHost: t\r\n", b"POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 100\r\n\r\nhalf"]


@pytest.mark.parametrize("said", HALF, ids=["nothing", "a byte", "half a head", "half a body"])
async def test_nobody_waits_for_connections_that_ask_for_nothing(
    said: bytes, mock_clock: trio.testing.MockClock
) -> None:
    """The clock stands still: they make room although their time is not over."""
    async with serving(HttpLimits(connections=3)) as address:
        silent = [await connect_tcp(*address) for _ in range(10)]
        for stream in silent:
            with suppress(StoreUnavailable):
                await stream.send_all([memoryview(said)])
        assert (await ask(address, "GET", "/")).status == 200
        for stream in silent:
            stream.close()


async def test_the_connection_whose_client_was_silent_for_the_longest_goes() -> None:
    async with serving(HttpLimits(connections=3)) as address:
        first, second, third = [await connect_tcp(*address) for _ in range(3)]
        for stream in (first, second, third, first):
            assert (await ask_over(stream, "GET", "/")).status == 200
        fourth = await connect_tcp(*address)
        assert (await ask_over(fourth, "GET", "/")).status == 200
        assert await second.receive_into([memoryview(bytearray(1))]) == 0
        for stream in (third, first, fourth):
            assert (await ask_over(stream, "GET", "/")).status == 200
        for stream in (first, second, third, fourth):
            stream.close()


async def test_a_connection_that_is_being_answered_is_not_closed_for_another() -> None:
    async with serving(HttpLimits(connections=2, requests=1)) as address, trio.open_nursery() as nursery:
        asked = await connect_tcp(*address)
        nursery.start_soon(ask_over, asked, "GET", "/slow")
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(10):
            assert (await ask(address, "GET", "/probe")).status == 200
        assert not asked.is_stale()
        nursery.cancel_scope.cancel()
        asked.close()


async def test_a_probe_is_answered_whatever_else_is_being_asked() -> None:
    async with serving(HttpLimits(requests=2)) as address, trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(ask, address, "GET", "/slow")
        await trio.testing.wait_all_tasks_blocked()
        assert (await ask(address, "GET", "/probe")).status == 200
        refused = await ask(address, "GET", "/probes")
        assert (refused.status, "2 requests are being answered" in refused.json["error"]) == (503, True)
        nursery.cancel_scope.cancel()


async def test_a_stopped_server_does_not_wait_for_its_clients() -> None:
    async with serving() as address:
        idle = await connect_tcp(*address)
        busy = await connect_tcp(*address)
        await busy.send_all([memoryview(b"GET /slow HTTP/1.1\r\nHost: t\r\n\r\n")])
        await trio.testing.wait_all_tasks_blocked()
    for stream in (idle, busy):
        stream.close()
