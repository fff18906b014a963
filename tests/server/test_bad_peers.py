"""Peers that do what they may not do, or nothing at all.

Each gets one error of its own, or a closed connection. The server goes on: a canary
that was stored before is there after, others are served meanwhile, and nothing stays
reserved, leased or connected.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import msgpack
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from infinistore.core import Client
from infinistore.errors import (
    AuthenticationFailed,
    DeadlineExceeded,
    InfiniStoreException,
    InvalidRequest,
    LimitExceeded,
    ProtocolError,
    StoreUnavailable,
    ValueTooLarge,
    VersionMismatch,
)
from infinistore.protocol.codec import encode_head, pack_u64
from infinistore.protocol.messages import (
    CountReply,
    Delete,
    Evict,
    Exists,
    ExistsReply,
    Get,
    GetReply,
    Hello,
    Keys,
    KeysReply,
    ListKeys,
    MapTables,
    MatchPrefix,
    MatchPrefixReply,
    Put,
    PutReply,
    ReleaseHold,
    Request,
    Statistics,
    StatisticsReply,
    Touch,
    Verify,
    VerifyReply,
)
from infinistore.server.connection import Holdings
from tests.server.running import (
    KIB,
    MIB,
    Peer,
    RunningServer,
    make_config,
    running_server,
    simulated_server,
    until,
)
from tests.transports.memory_network import random_chunks

CANARY = b"canary " * 1000


@asynccontextmanager
async def watched(server: RunningServer) -> AsyncGenerator[RunningServer, None]:
    """Store a canary, and look after the block whether it lives, and whether the server
    is as it was.
    """
    keeper = await server.peer()
    await put(keeper, "canary", CANARY)
    yield server
    for peer in (keeper, await server.peer()):
        assert await get(peer, "canary") == CANARY
    await server.left_by_all()


@pytest.fixture
async def server() -> AsyncIterator[RunningServer]:
    async with simulated_server() as server, watched(server):
        yield server


async def put(peer: Peer, key: str, value: bytes) -> None:
    assert isinstance(await peer.ask(Put(Keys([key]), pack_u64([len(value)]), checksums=False), value), PutReply)


async def get(peer: Peer, key: str) -> bytes:
    assert isinstance(await peer.ask(Get(Keys([key]), pack_u64(), checksums=False)), GetReply)
    return await peer.payload()


async def refusal(peer: Peer, request: Request, payload: bytes = b"") -> InfiniStoreException:
    """What the server answers, which must be an error."""
    with pytest.raises(InfiniStoreException) as raised:
        await peer.ask(request, payload)
    return raised.value


async def next_refusal(peer: Peer) -> InfiniStoreException:
    """The error that the server sends next, after bytes that no request of the client's
    own made.
    """
    with pytest.raises(InfiniStoreException) as raised:
        await peer.reply_to_half(Statistics())
    return raised.value


def frame(
    kind: int = Statistics.KIND, body: bytes = b"\x80", *, version: int = 1, flags: int = 0, payload_bytes: int = 0
) -> bytes:
    """A frame with anything in it."""
    head = bytearray(encode_head(Statistics(), request_id=1, payload_bytes=payload_bytes))
    head[4], head[5], head[6] = version, kind, flags
    head[12:16] = len(body).to_bytes(4, "little")
    whole = bytes(head[:32]) + body
    return whole.ljust(-(-len(whole) // 64) * 64, b"\0")


BAD_BYTES = {
    "no frame at all": (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", ProtocolError),
    "zeros": (bytes(64), ProtocolError),
    "another version": (frame(version=2), VersionMismatch),
    "an unknown kind": (frame(kind=0x70), ProtocolError),
    "an unknown flag": (frame(flags=1), ProtocolError),
    "a reply": (frame(kind=CountReply.KIND, body=msgpack.packb({"count": 1})), ProtocolError),
    "an error reply": (frame(kind=0xFF, body=msgpack.packb({"code": 1, "message": "", "fatal": True})), ProtocolError),
    "a body that is no msgpack": (frame(body=b"\xc1"), ProtocolError),
    "a body that is no map": (frame(body=msgpack.packb([1])), ProtocolError),
    "a body with an unknown field": (frame(body=msgpack.packb({"what": 1})), ProtocolError),
    "a body with a field whose name is bytes": (frame(body=msgpack.packb({b"what": 1})), ProtocolError),
    "a body with fields whose names are text and bytes": (frame(body=msgpack.packb({"a": 1, b"b": 1})), ProtocolError),
    "a body too long": (frame()[:12] + (2**32 - 1).to_bytes(4, "little") + frame()[16:], ProtocolError),
    "a payload too long": (frame(kind=Put.KIND, payload_bytes=2**60), ProtocolError),
    "a payload where none belongs": (frame(payload_bytes=1), ProtocolError),
}


@pytest.mark.parametrize("what", BAD_BYTES)
@pytest.mark.parametrize("greeted", [True, False], ids=["after hello", "before hello"])
async def test_bytes_that_are_no_request_get_one_error_and_a_closed_connection(what: str, greeted: bool) -> None:
    data, expected = BAD_BYTES[what]
    async with simulated_server() as server, watched(server):
        peer = await server.peer() if greeted else await server.stranger()
        await peer.send(data)
        error = await next_refusal(peer)
        assert type(error) is expected
        assert str(error)
        assert await peer.is_closed()
        peer.close()
        assert server.server.telemetry.statistics().errors == 1


@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 63, 64, 65, 1000])
@pytest.mark.parametrize("greeted", [True, False], ids=["after hello", "before hello"])
async def test_a_client_that_leaves_in_the_middle_of_anything_leaves_nothing_behind(length: int, greeted: bool) -> None:
    data = encode_head(Put(Keys(["half"]), pack_u64([5000])), request_id=1, payload_bytes=5008) + bytes(5000)
    async with simulated_server() as server, watched(server):
        peer = await server.peer() if greeted else await server.stranger()
        await peer.send(data[:length])
        await trio.testing.wait_all_tasks_blocked()
        peer.close()
        keeper = await server.peer()
        assert await keeper.ask(Exists(Keys(["half"]))) == ExistsReply(b"\0")


@given(
    data=st.binary(max_size=300)
    | st.tuples(st.integers(0, 255), st.binary(max_size=200)).map(lambda pair: frame(*pair)),
    seed=st.integers(0, 1000),
)
def test_any_bytes_leave_the_server_alive(data: bytes, seed: int) -> None:
    async def main() -> None:
        with trio.fail_after(60):
            async with simulated_server(chunks=random_chunks(seed)) as server, watched(server):
                for peer in (await server.peer(), await server.stranger()):
                    await peer.send(data)
                    await peer.stream.send_eof()
                    buffer = [memoryview(bytearray(65536))]
                    while await peer.stream.receive_into(buffer):
                        pass
                    peer.close()

    trio.run(main, clock=MockClock(autojump_threshold=0))


requests = st.sampled_from(
    [
        Put(Keys(["a", "b"]), pack_u64([3, 4])),
        Put(Keys(["a"]), pack_u64([3]), checksums=False, replace=False),
        Get(Keys(["a", "canary"]), pack_u64([10, 100000])),
        Get(Keys(["canary"]), pack_u64([])),
        Exists(Keys(["a"])),
        MatchPrefix(Keys(["a", "b"]), hold_us=100),
        ReleaseHold(17),
        ListKeys("a", "b", 7),
        Evict(0.9, 0.95),
        Statistics(),
        Verify(Keys(["canary"])),
        Hello("again", ""),
        Touch(Keys(["canary", "a"]), read=True),
        MapTables(),
    ]
)


@given(
    requests=st.lists(requests, min_size=1, max_size=4),
    changes=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=3),
    seed=st.integers(0, 1000),
)
def test_damaged_requests_leave_the_server_alive(
    requests: list[Request], changes: list[tuple[int, int]], seed: int
) -> None:
    """Well-formed requests with a few bytes changed get past the first checks more
    often than any bytes do.
    """
    data = bytearray()
    for number, request in enumerate(requests):
        payload = b""
        if isinstance(request, Put):
            payload = bytes(sum(request.sizes) + (8 * len(request.keys) if request.checksums else 0))
        data += encode_head(request, request_id=number, payload_bytes=len(payload)) + payload
    for position, value in changes:
        data[position % len(data)] = value

    async def main() -> None:
        with trio.fail_after(60):
            async with simulated_server(chunks=random_chunks(seed)) as server:
                peer = await server.peer()
                await peer.send(bytes(data))
                await peer.stream.send_eof()
                buffer = [memoryview(bytearray(65536))]
                while await peer.stream.receive_into(buffer):
                    pass
                peer.close()
                other = await server.peer()
                await put(other, "key", b"value")
                assert await get(other, "key") == b"value"

    trio.run(main, clock=MockClock(autojump_threshold=0))


# Well-formed, but more than anybody may ask for

SMALL = make_config(max_value_bytes=100 * KIB, max_batch_bytes=200 * KIB, max_batch_keys=8)
REFUSED: dict[str, tuple[Request, bytes, type[InfiniStoreException], bool]] = {
    "a key that is longer than 1 KiB": (Exists(Keys(["k" * 1025])), b"", ProtocolError, True),
    "a key that is empty": (Exists(Keys(["a", ""])), b"", ProtocolError, True),
    "a put that names a key twice": (Put(Keys(["a", "a"]), pack_u64([1, 1]), False), b"ab", InvalidRequest, False),
    "a put of an empty value": (Put(Keys(["a", "b"]), pack_u64([1, 0]), False), b"a", InvalidRequest, False),
    "a put of nothing but an empty value": (Put(Keys(["a"]), pack_u64([0]), False), b"", InvalidRequest, False),
    "a put with fewer sizes than keys": (Put(Keys(["a", "b"]), pack_u64([1]), False), b"a", ProtocolError, True),
    "a put whose payload is not what its sizes say": (
        Put(Keys(["a"]), pack_u64([2]), False),
        b"a",
        ProtocolError,
        True,
    ),
    "a put whose sizes overflow": (
        Put(Keys(["a", "b"]), pack_u64([2**64 - 1, 2]), False),
        b"a",
        ProtocolError,
        True,
    ),
    "a value too large": (
        Put(Keys(["a"]), pack_u64([100 * KIB + 1]), False),
        bytes(100 * KIB + 1),
        ValueTooLarge,
        False,
    ),
    "a batch of too many bytes": (
        Put(Keys(list("abcd")), pack_u64([90 * KIB] * 4), False),
        bytes(360 * KIB),
        ProtocolError,
        True,
    ),
    "a batch of too many keys": (
        Put(Keys(list("abcdefghi")), pack_u64([1] * 9), False),
        bytes(9),
        LimitExceeded,
        False,
    ),
    "a get of too many keys": (Get(Keys(list("abcdefghi")), pack_u64()), b"", LimitExceeded, False),
    "a question about too many keys": (Exists(Keys(list("abcdefghi"))), b"", LimitExceeded, False),
    "a deletion of too many keys": (Delete(Keys(list("abcdefghi"))), b"", LimitExceeded, False),
    "a match of too many keys": (MatchPrefix(Keys(list("abcdefghi"))), b"", LimitExceeded, False),
    "a check of too many keys": (Verify(Keys(list("abcdefghi"))), b"", LimitExceeded, False),
    "a get with too few capacities": (Get(Keys(["a", "b"]), pack_u64([1])), b"", ProtocolError, True),
    "a hold that is too long": (MatchPrefix(Keys(["canary"]), hold_us=3600 * 10**6), b"", LimitExceeded, False),
    "a hold for ever": (MatchPrefix(Keys(["canary"]), hold_us=2**64 - 1), b"", LimitExceeded, False),
    "an eviction upside down": (Evict(0.9, 0.1), b"", InvalidRequest, False),
    "a second hello": (Hello("again"), b"", ProtocolError, True),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_what_nobody_may_ask_for_is_refused_by_its_own_error(what: str) -> None:
    request, payload, expected, closes = REFUSED[what]
    async with simulated_server(SMALL) as server, watched(server):
        peer = await server.peer()
        if isinstance(request, Hello):
            await peer.send_head(request)
            error = await next_refusal(peer)
        else:
            error = await refusal(peer, request, payload)
        assert isinstance(error, expected)
        assert str(error)
        if closes:
            assert await peer.is_closed()
        else:
            assert isinstance(await peer.ask(Statistics()), StatisticsReply)
            assert await peer.ask(Exists(Keys(["a"]))) == ExistsReply(b"\0")


async def test_a_request_before_hello_is_refused(server: RunningServer) -> None:
    peer = await server.stranger()
    await peer.send_head(Get(Keys(["canary"]), pack_u64()))
    assert isinstance(await next_refusal(peer), ProtocolError)
    assert await peer.is_closed()


async def test_a_refused_payload_is_read_to_its_end_only_if_that_is_short() -> None:
    config = make_config(prealloc_bytes=MIB)
    async with simulated_server(config, capacity_bytes=4 * MIB) as server, watched(server):
        short, long = await server.peer(), await server.peer()
        error = await refusal(short, Put(Keys(["a"]), pack_u64([16 * MIB]), False), bytes(16 * MIB))
        assert isinstance(error, ValueTooLarge)
        await put(short, "b", b"small")
        await long.send_head(Put(Keys(["a"]), pack_u64([16 * MIB + 1]), False), payload_bytes=16 * MIB + 1)
        assert isinstance(await next_refusal(long), ValueTooLarge)
        assert await long.is_closed()


async def test_a_put_of_no_blocks_is_answered(peer: Peer) -> None:
    assert await peer.ask(Put(Keys([]), pack_u64())) == PutReply(pack_u64())
    assert await peer.ask(Get(Keys([]), pack_u64())) == GetReply(pack_u64(), pack_u64())


async def test_pipelined_requests_are_answered_in_order(peer: Peer) -> None:
    wanted: list[tuple[Request, bytes]] = [
        (Put(Keys(["a"]), pack_u64([3]), checksums=False), b"abc"),
        (Exists(Keys(["a", "b"])), b""),
        (Put(Keys(["a", "a"]), pack_u64([1, 1]), checksums=False), b"xy"),
        (MatchPrefix(Keys(["a", "b"])), b""),
        (ListKeys(prefix="a"), b""),
        (Delete(Keys(["a"])), b""),
        (Exists(Keys(["a"])), b""),
        (Verify(Keys(["a"])), b""),
    ]
    data = b"".join(
        encode_head(request, request_id=number, payload_bytes=len(payload)) + payload
        for number, (request, payload) in enumerate(wanted)
    )
    await peer.send(data)
    answers: list[object] = []
    for number, (request, _) in enumerate(wanted):
        try:
            answers.append(await peer.reply_to_half(request, number))
        except InvalidRequest as error:
            answers.append(type(error))
    assert answers == [
        PutReply(pack_u64()),
        ExistsReply(b"\1\0"),
        InvalidRequest,
        MatchPrefixReply(1),
        KeysReply(Keys(["a"]), 1000),
        CountReply(1),
        ExistsReply(b"\0"),
        VerifyReply(b"\1"),
    ]


# Tokens


@pytest.mark.parametrize("token", ["", "wrong", "right ", "Right", "right" * 200])
async def test_without_the_token_nobody_is_served(token: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("token") / "token"
    file.write_text("right\n")
    async with running_server(make_config(token_file=file)) as server:
        friend = await server.stranger()
        await friend.hello("right")
        await put(friend, "canary", CANARY)
        stranger = await server.stranger()
        told = "the token given is wrong" if token else "wants a token, and none was given"
        with pytest.raises(AuthenticationFailed, match=told):
            await stranger.hello(token)
        assert await stranger.is_closed()
        assert await get(friend, "canary") == CANARY


# Slow ones: the clock jumps ahead when nothing else can happen


@pytest.mark.parametrize("sent", [0, 40])
async def test_who_does_not_say_a_whole_hello_is_sent_away(
    server: RunningServer, sent: int, autojump_clock: MockClock
) -> None:
    peer = await server.stranger()
    await peer.send(encode_head(Hello("slow"), request_id=1)[:sent])
    assert isinstance(await next_refusal(peer), DeadlineExceeded)
    assert await peer.is_closed()


@pytest.mark.parametrize("sent", [1, 31, 32, 63])
async def test_half_a_head_is_not_waited_for_for_ever(peer: Peer, sent: int, autojump_clock: MockClock) -> None:
    await trio.sleep(3600)  # between two frames it may be silent
    await peer.send(encode_head(Exists(Keys(["slow"])), request_id=1)[:sent])
    start = trio.current_time()
    assert isinstance(await next_refusal(peer), DeadlineExceeded)
    assert trio.current_time() - start < 60
    assert await peer.is_closed()


@pytest.mark.parametrize("sent", [0, 1, 999_999])
async def test_a_put_that_stops_gives_its_room_back(
    server: RunningServer, peer: Peer, sent: int, autojump_clock: MockClock
) -> None:
    await peer.send_head(Put(Keys(["slow"]), pack_u64([MIB]), checksums=False), payload_bytes=MIB)
    await peer.send(bytes(sent))
    await trio.testing.wait_all_tasks_blocked()
    assert server.core.statistics().reserved_bytes == MIB
    other = await server.peer()
    await put(other, "key", b"served meanwhile")
    assert isinstance(await next_refusal(peer), DeadlineExceeded)
    assert server.core.statistics().reserved_bytes == 0
    assert await other.ask(Exists(Keys(["slow"]))) == ExistsReply(b"\0")
    assert await peer.is_closed()


async def test_the_deadline_of_a_put_is_its_callers(peer: Peer, autojump_clock: MockClock) -> None:
    put_head = Put(Keys(["slow"]), pack_u64([MIB]), checksums=False)
    start = trio.current_time()
    await peer.send_head(put_head, payload_bytes=MIB, deadline_us=500_000)
    assert isinstance(await next_refusal(peer), DeadlineExceeded)
    assert trio.current_time() - start <= 2


async def test_a_put_that_dawdles_but_comes_keeps_its_connection(peer: Peer, autojump_clock: MockClock) -> None:
    await peer.send_head(Put(Keys(["slow"]), pack_u64([4]), checksums=False), payload_bytes=4)
    for byte in b"slow":
        await trio.sleep(2)
        await peer.send(bytes([byte]))
    assert isinstance(await peer.reply_to_half(Put(Keys([]), pack_u64())), PutReply)
    assert await get(peer, "slow") == b"slow"


async def test_a_put_that_is_late_is_refused_and_the_next_request_served(
    server: RunningServer, peer: Peer, autojump_clock: MockClock
) -> None:
    """The rest of the late payload is thrown away, not taken for the next request."""
    await peer.send_head(Put(Keys(["late"]), pack_u64([1000]), checksums=False), payload_bytes=1000)
    await peer.send(bytes(400))
    await trio.sleep(11)
    assert server.core.statistics().reserved_bytes == 0
    await peer.send(bytes(600))
    assert isinstance(await next_refusal(peer), DeadlineExceeded)
    await put(peer, "key", b"the next request")
    assert await get(peer, "key") == b"the next request"


async def test_a_slow_reader_is_left_and_slows_nobody(server: RunningServer, autojump_clock: MockClock) -> None:
    slow = await server.peer()
    await put(slow, "large", bytes(2 * MIB))
    await slow.send_head(Get(Keys(["large"]), pack_u64(), checksums=False))
    await trio.testing.wait_all_tasks_blocked()
    assert server.core.statistics().leases == 1
    other = await server.peer()
    assert await get(other, "large") == bytes(2 * MIB)
    await trio.sleep(60)
    assert server.core.statistics().leases == 0
    received = 0  # what was on its way arrives, the rest never does
    while count := await slow.stream.receive_into([memoryview(bytearray(MIB))]):
        received += count
    assert 0 < received < 2 * MIB


async def test_who_never_reads_small_replies_is_left_too(autojump_clock: MockClock) -> None:
    async with simulated_server(capacity_bytes=4 * KIB) as server, watched(server):
        peer = await server.peer()

        async def ask_for_ever() -> None:
            while True:
                await peer.send_head(Statistics())

        with trio.fail_after(3600), pytest.raises(StoreUnavailable):
            await ask_for_ever()


# Many


async def test_five_hundred_idle_connections_do_not_disturb() -> None:
    async with running_server(make_config(max_connections=600)) as server, watched(server):
        peers: list[Peer] = []

        async def connect() -> None:
            peers.append(await server.peer())

        for _ in range(10):
            async with trio.open_nursery() as nursery:
                for _ in range(50):
                    nursery.start_soon(connect)
        assert server.server.telemetry.statistics().connections_open == 501
        await put(peers[0], "key", b"value")
        assert await get(peers[499], "key") == b"value"
        for peer in peers:
            peer.close()


@pytest.mark.parametrize("kind", ["sockets", "memory"])
async def test_one_connection_too_many_is_told_so(kind: str) -> None:
    config = make_config(max_connections=2)
    async with (running_server if kind == "sockets" else simulated_server)(config) as server:
        first, second = await server.peer(), await server.peer()
        await put(first, "canary", CANARY)
        third = await server.stranger()
        with pytest.raises(LimitExceeded, match="--max-connections"):
            await third.hello()
        assert server.server.telemetry.statistics().connections_refused == 1
        third.close()
        second.close()
        await until(lambda: len(server.server.sessions) == 1)
        fourth = await server.peer()
        assert await get(fourth, "canary") == CANARY


# Faults of ours


async def test_a_fault_of_ours_where_a_connection_ends_ends_no_other_and_gives_nothing_away(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with simulated_server() as server:
        server.loses_clients = True
        keeper, peer = await server.peer(), await server.peer()
        await put(keeper, "canary", CANARY)
        close_client = server.core.close_client

        def fail(client: Client) -> None:
            raise RuntimeError("planned")

        monkeypatch.setattr(server.core, "close_client", fail)
        peer.close()
        await until(lambda: len(server.server.sessions) == 1)
        monkeypatch.setattr(server.core, "close_client", close_client)
        assert [record.message for record in caplog.records if record.levelname == "ERROR"] == ["internal error"]
        assert server.core.statistics().quarantined_clients == 1
        assert await get(keeper, "canary") == CANARY
        assert await get(await server.peer(), "canary") == CANARY


async def test_a_fault_of_ours_while_a_client_may_still_write_keeps_its_room_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with simulated_server() as server:
        server.loses_clients = True
        keeper, peer = await server.peer(), await server.peer()
        length = 128 * KIB  # longer than what is read ahead, so that it has room before it comes
        await peer.send_head(Put(Keys(["k"]), pack_u64([length]), checksums=False), payload_bytes=length)
        await trio.testing.wait_all_tasks_blocked()
        assert server.core.statistics().reserved_bytes

        def fail(holdings: Holdings) -> None:
            raise RuntimeError("planned")

        with monkeypatch.context() as patched:
            patched.setattr(Holdings, "revoke_tables", fail)
            patched.setattr(server.core, "abort", lambda reservation: None)
            peer.close()
            await trio.testing.wait_all_tasks_blocked()
        assert server.core.statistics().quarantined_bytes == length
        await put(keeper, "canary", CANARY)
        assert await get(keeper, "canary") == CANARY
