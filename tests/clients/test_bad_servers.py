"""Servers that lie, fall silent or go away. A client makes one error of its own of
that, never a wrong answer.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

import infinistore
from infinistore.client import AsyncStore
from infinistore.client.extension import Environment
from infinistore.errors import DeadlineExceeded, InfiniStoreException, ProtocolError, StoreUnavailable
from infinistore.protocol.codec import encode_head, pack_u64
from infinistore.protocol.messages import (
    MISSING,
    CountReply,
    ErrorReply,
    ExistsReply,
    GetReply,
    HelloReply,
    Keys,
    KeysReply,
    MatchPrefixReply,
    Message,
    PutReply,
    StatisticsReply,
    Tree,
    VerifyReply,
)
from infinistore.protocol.server_connection import ServerConnection
from infinistore.transports.base import drive
from tests.server.running import MIB
from tests.transports.memory_network import MemoryStream, stream_pair

HELLO = HelloReply("instance", "0", 2**20, 100, 2**20, 2**20)


class FakeServer:
    """Says hello, and answers each request with the next of `answers`: bytes, a
    message, or None to close.

    When there are no more answers it is silent. `connections` counts who came. While it
    `is_down`, nobody can connect.
    """

    def __init__(self, *answers: bytes | Message | None) -> None:
        self.answers = list(answers)
        self.connections = 0
        self.is_down = False
        self.streams: list[MemoryStream] = []

    async def serve(self, stream: MemoryStream) -> None:
        connection = ServerConnection(max_body_bytes=MIB, max_payload_bytes=MIB)
        try:
            await drive(connection.receive(), stream)
            await drive(connection.reply(HELLO), stream)
            while (received := await drive(connection.receive(), stream)) is not None:
                if received.payload_bytes:
                    await drive(connection.discard_payload(), stream)
                if not self.answers:
                    await trio.sleep_forever()
                answer = self.answers.pop(0)
                if answer is None:
                    break
                data = answer if isinstance(answer, bytes) else encode_head(answer, request_id=received.request_id)
                await stream.send_all([memoryview(data)])
                connection = ServerConnection(max_body_bytes=MIB, max_payload_bytes=MIB)
                connection.state = type(connection.state).READY
        except InfiniStoreException:
            pass  # the client left
        finally:
            stream.close()


@asynccontextmanager
async def store_of(server: FakeServer, **options: Any) -> AsyncGenerator[AsyncStore, None]:
    async with trio.open_nursery() as nursery:

        async def connect(*_: object) -> MemoryStream:
            await trio.lowlevel.checkpoint()
            server.connections += 1
            if server.is_down:
                raise StoreUnavailable("nobody is there")
            mine, theirs = stream_pair()
            server.streams.append(mine)
            nursery.start_soon(server.serve, theirs)
            return mine

        async with infinistore.open_store("tcp://fake", environment=Environment(connect=connect), **options) as store:
            yield store
        nursery.cancel_scope.cancel()


def reply(message: Message, payload: bytes = b"", *, request_id: int = 2) -> bytes:
    """A reply to the first request after hello, with a payload."""
    return encode_head(message, request_id=request_id, payload_bytes=len(payload)) + payload


Call = Callable[[AsyncStore], Awaitable[Any]]
GET: Call = lambda store: store.get_many(["a", "b"])  # noqa: E731
LIES: dict[str, tuple[Call, bytes | Message]] = {
    "no frame": (GET, bytes(64)),
    "a reply to another request": (GET, reply(GetReply(pack_u64([MISSING, MISSING]), pack_u64([0, 0])), request_id=9)),
    "a reply of another kind": (GET, CountReply(1)),
    "a request": (GET, reply(HELLO)),
    "more sizes than keys": (GET, reply(GetReply(pack_u64([1, 1, 1]), pack_u64([0, 0, 0])), b"abc")),
    "no sizes at all": (GET, GetReply(pack_u64(), pack_u64())),
    "fewer checksums than sizes": (GET, reply(GetReply(pack_u64([1, 1]), pack_u64([0])), b"ab")),
    "a value that does not come": (GET, GetReply(pack_u64([2**50, MISSING]), pack_u64([0, 0]))),
    "a payload longer than its sizes": (GET, reply(GetReply(pack_u64([1, MISSING]), pack_u64([0, 0])), b"ab")),
    "more than there is room for": (
        lambda store: store.get_into("a", bytearray(1)),
        reply(GetReply(pack_u64([2]), pack_u64([0])), b"ab"),
    ),
    "answers for fewer keys": (lambda store: store.exists_many(["a", "b"]), ExistsReply(b"\1")),
    "answers for more keys": (lambda store: store.exists_many(["a", "b"]), ExistsReply(b"\1\1\1")),
    "a match longer than what was asked": (lambda store: store.match_prefix(["a"]), MatchPrefixReply(2)),
    "a skipped key that was not in the batch": (lambda store: store.put("a", b"x"), PutReply(pack_u64([1]))),
    "more keys than were asked for": (lambda store: store.keys(limit=1), KeysReply(Keys(["a", "b"]), 1)),
    "no statistics": (lambda store: store.stats(), StatisticsReply(Tree({"server": 1}))),
}


@pytest.mark.parametrize("what", LIES)
async def test_a_reply_that_cannot_be_is_a_protocol_error(what: str) -> None:
    call, answer = LIES[what]
    server = FakeServer(answer, reply(ExistsReply(b"\1"), request_id=3), reply(ExistsReply(b"\1")))
    with trio.fail_after(60):
        async with store_of(server) as store:
            with pytest.raises(ProtocolError):
                await call(store)


async def test_a_page_of_no_keys_is_the_last_whatever_the_server_says() -> None:
    async with store_of(FakeServer(KeysReply(Keys([]), 0))) as store:
        assert await store.keys(limit=1) == []


async def test_after_a_broken_conversation_the_next_call_has_a_new_connection() -> None:
    server = FakeServer(bytes(64), ExistsReply(b"\1"))
    async with store_of(server) as store:
        with pytest.raises(ProtocolError):
            await store.exists("a")
        assert await store.exists("a")
    assert server.connections == 2


async def test_a_checksum_that_does_not_match_is_told_to_the_server_and_raised() -> None:
    bad = reply(GetReply(pack_u64([3, MISSING]), pack_u64([12345, 0])), b"abc")
    async with store_of(FakeServer(bad, VerifyReply(b"\1"), ExistsReply(b"\1"))) as store:
        with pytest.raises(infinistore.ChecksumMismatch):
            await store.get_many(["a", "b"])
        assert await store.exists("a")


async def test_a_look_up_is_asked_again_when_its_connection_is_lost(autojump_clock: trio.testing.MockClock) -> None:
    server = FakeServer(None, None, ExistsReply(b"\1"))
    async with store_of(server) as store:
        assert await store.exists("a")
    assert server.connections == 3


async def test_a_put_is_not_sent_twice_and_says_that_its_end_is_not_known(
    autojump_clock: trio.testing.MockClock,
) -> None:
    server = FakeServer(None, ExistsReply(b"\1"))
    async with store_of(server) as store:
        with pytest.raises(StoreUnavailable, match="not known"):
            await store.put("a", b"abc")
        assert await store.exists("a")
    assert server.connections == 2


async def test_an_idle_connection_that_was_closed_is_replaced_without_an_error() -> None:
    server = FakeServer(PutReply(pack_u64()), PutReply(pack_u64()))
    async with store_of(server) as store:
        await store.put("a", b"abc")
        server.streams[0].cut()
        await store.put("a", b"abc")
    assert server.connections == 2


@pytest.mark.parametrize("name", ["exists", "get", "put"])
async def test_a_silent_server_is_waited_for_until_the_deadline(
    name: str, autojump_clock: trio.testing.MockClock
) -> None:
    calls: dict[str, Call] = {
        "exists": lambda store: store.exists("a"),
        "get": lambda store: store.get("a"),
        "put": lambda store: store.put("a", b"abc"),
    }
    server = FakeServer()
    async with store_of(server, deadline_s=5) as store:
        start = trio.current_time()
        with pytest.raises(DeadlineExceeded, match="5 s"):
            await calls[name](store)
        assert 5 <= trio.current_time() - start < 5.1
        server.answers = [ExistsReply(b"\1")]
        await trio.sleep(60)
        assert await store.exists("a")


async def test_a_server_that_never_says_hello_is_not_waited_for_for_ever(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def connect(*_: object) -> MemoryStream:
        await trio.lowlevel.checkpoint()
        return stream_pair()[0]

    start = trio.current_time()
    with pytest.raises(DeadlineExceeded):
        async with infinistore.open_store("tcp://silent", environment=Environment(connect=connect), deadline_s=3):
            pass
    assert 3 <= trio.current_time() - start < 3.1


async def test_a_call_in_line_behind_a_silent_server_gives_up_at_its_own_deadline(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with store_of(FakeServer(), deadline_s=5, max_connections=1) as store:
        start = trio.current_time()

        async def wait() -> None:
            with pytest.raises(DeadlineExceeded):
                await store.get("a")

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(wait)
        assert trio.current_time() - start < 5.1


async def test_look_ups_do_not_wait_behind_blocks(autojump_clock: trio.testing.MockClock) -> None:
    server = FakeServer()
    async with store_of(server, deadline_s=100, max_connections=1) as store, trio.open_nursery() as nursery:
        nursery.start_soon(store.put, "a", b"abc")
        await trio.testing.wait_all_tasks_blocked()
        server.answers = [ExistsReply(b"\1")]
        with trio.fail_after(1):
            assert await store.exists("a")
        nursery.cancel_scope.cancel()


async def test_a_dead_server_costs_little_and_a_restarted_one_is_found(
    autojump_clock: trio.testing.MockClock,
) -> None:
    server = FakeServer()
    async with store_of(server, deadline_s=5) as store:
        server.is_down = True
        server.streams[0].cut()
        with pytest.raises(StoreUnavailable, match="nobody is there"):
            await store.exists("a")
        assert server.connections == 1 + 5
        for _ in range(100):  # the circuit is open: no packet is sent
            with pytest.raises(StoreUnavailable, match="not tried again"):
                await store.exists("a")
        assert server.connections == 1 + 5
        server.is_down = False
        server.answers = [ExistsReply(b"\1")]
        await trio.sleep(60)
        assert await store.exists("a")


async def test_a_server_that_goes_away_in_the_middle_of_a_get_is_unavailable(
    autojump_clock: trio.testing.MockClock,
) -> None:
    half = reply(GetReply(pack_u64([1000, MISSING]), pack_u64([0, 0])), bytes(1000))[:-500]
    async with store_of(FakeServer(*[half] * 20), deadline_s=5) as store:
        with pytest.raises((StoreUnavailable, DeadlineExceeded)):
            await store.get_many(["a", "b"])


async def test_an_error_of_the_server_keeps_the_connection_unless_it_is_fatal() -> None:
    server = FakeServer(
        ErrorReply(infinistore.OutOfMemory.code, "full"),
        ErrorReply(999, "from the future"),
        ErrorReply(infinistore.ProtocolError.code, "what?", fatal=True),
        ExistsReply(b"\1"),
    )
    async with store_of(server) as store:
        with pytest.raises(infinistore.OutOfMemory, match="full"):
            await store.put("a", b"abc")
        with pytest.raises(InfiniStoreException, match="from the future"):
            await store.exists("a")
        assert server.connections == 1
        with pytest.raises(ProtocolError, match="what"):
            await store.exists("a")
        assert await store.exists("a")
    assert server.connections == 2
