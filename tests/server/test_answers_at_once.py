"""Short requests are answered in one step, without waking the task of their session:
whatever comes between, in whatever pieces, and however slowly the answers are read.
"""

import socket
import struct
from pathlib import Path
from random import Random

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from infinistore.errors import BufferTooSmall, InfiniStoreException, OutOfMemory, ValueTooLarge
from infinistore.protocol.codec import encode_head, pack_u64
from infinistore.protocol.messages import (
    MISSING,
    Abort,
    Commit,
    Exists,
    ExistsReply,
    Get,
    GetReply,
    Keys,
    Lease,
    LeaseReply,
    MatchPrefix,
    MatchPrefixReply,
    Message,
    Put,
    PutReply,
    Release,
    Request,
    Reserve,
    ReserveReply,
    Touch,
)
from infinistore.protocol.server_connection import Received
from infinistore.server.session.receiving import Receiving
from infinistore.transports.sockets.trio_streams import SocketStream
from tests.server.running import KIB, Peer, make_config, running_server, simulated_server
from tests.transports.memory_network import random_chunks

MIB = 1024 * KIB
ROOM = pack_u64([64 * KIB])


def get(key: str, room: int = 64 * KIB) -> Get:
    return Get(Keys([key]), pack_u64([room]), checksums=False)


def put(key: str, length: int, *, replace: bool = True) -> Put:
    return Put(Keys([key]), pack_u64([length]), checksums=False, replace=replace)


async def send_all(peer: Peer, requests: list[tuple[Request, bytes]]) -> None:
    """Send them one after the other, without waiting for answers."""
    for number, (request, payload) in enumerate(requests):
        await peer.send(encode_head(request, request_id=number, payload_bytes=len(payload)) + payload)


async def answer_to(peer: Peer, number: int, request: Request) -> object:
    """What the client gets: the bytes of a block, None for a missing one, or what else
    it is."""
    try:
        reply = await peer.reply_to_half(request, number)
    except InfiniStoreException as error:
        return type(error)
    if isinstance(reply, GetReply):
        return None if reply.sizes[0] == MISSING else await peer.payload()
    return list(reply.skipped) if isinstance(reply, PutReply) else reply


@pytest.mark.parametrize("seed", range(12))
async def test_any_short_requests_in_any_pieces_are_answered_as_by_a_dict(seed: int, autojump_clock: MockClock) -> None:
    random = Random(seed)
    blocks: dict[str, bytes] = {}
    requests: list[tuple[Request, bytes]] = []
    wanted: list[object] = []
    for _ in range(60):
        key = random.choice("abc")
        kind = random.randrange(4)
        if kind == 0:
            requests.append((Exists(Keys([key, "none"])), b""))
            wanted.append(ExistsReply(bytes((key in blocks, False))))
        elif kind == 1:
            room = random.choice([1, 70 * KIB])
            requests.append((get(key, room), b""))
            found = blocks.get(key)
            wanted.append(BufferTooSmall if found is not None and len(found) > room else found)
        else:
            data = random.randbytes(random.choice([1, 100, 16 * KIB, 65 * KIB]))
            replace = random.random() < 0.7
            requests.append((put(key, len(data), replace=replace), data))
            wanted.append([0] if key in blocks and not replace else [])
            blocks |= {key: data} if replace or key not in blocks else {}
    capacity = random.choice([200, 40 * KIB, 300 * KIB])
    async with simulated_server(chunks=random_chunks(seed), capacity_bytes=capacity) as server:
        peer = await server.peer()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_all, peer, requests)
            answers = [await answer_to(peer, number, request) for number, (request, _) in enumerate(requests)]
        assert answers == wanted
        peer.close()
        await server.quiet()
        assert server.server.telemetry.statistics().connections_open == 0


async def test_an_answer_that_is_not_read_yet_keeps_its_bytes(autojump_clock: MockClock) -> None:
    config = make_config(prealloc_bytes=10 * 64 * KIB)
    async with simulated_server(config, capacity_bytes=100 * KIB) as server:
        reader, writer = await server.peer(), await server.peer()
        old, new = b"o" * 64 * KIB, b"n" * 64 * KIB
        await writer.ask(put("key", len(old)), old)
        await reader.ask(get("key"))
        assert await reader.payload() == old
        await send_all(reader, [(get("key"), b"")] * 2)  # the second answer finds no room for its end
        await trio.testing.wait_all_tasks_blocked()
        await writer.ask(put("key", len(new)), new)
        for number in range(20):  # where the old block was is used again
            await writer.ask(put(f"other {number}", len(new)), new)
        assert [await answer_to(reader, number, get("key")) for number in range(2)] == [old, old]
        await reader.ask(get("other 19"))
        assert await reader.payload() == new


async def test_requests_that_need_no_wait_never_wake_their_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    woken: list[type[Message]] = []
    hand_over = Receiving.next

    async def noted(receiving: Receiving) -> Received | None:
        received = await hand_over(receiving)
        if received is not None:
            woken.append(type(received.message))
        return received

    monkeypatch.setattr(Receiving, "next", noted)
    keys, sizes, none = Keys(["a", "b"]), pack_u64([100, 16 * KIB]), pack_u64()
    async with running_server(make_config(unix_socket=str(tmp_path / "store.sock"))) as server:
        peer = await server.local_peer()
        await peer.ask(Exists(keys))
        assert woken == [Exists], "the first one, before it is known what this client asks"
        for _ in range(2):
            room = await peer.ask(Reserve(sizes))
            assert isinstance(room, ReserveReply)
            assert await peer.ask(Commit(room.reservation, keys, none)) == PutReply(none)
        room = await peer.ask(Reserve(sizes, spare=True))
        assert isinstance(room, ReserveReply)
        await peer.send_head(Abort(room.reservation))
        lease = await peer.ask(Lease(keys, sizes))
        assert isinstance(lease, LeaseReply)
        await peer.send_head(Release(lease.lease))
        await peer.send_head(Touch(keys))
        assert await peer.ask(MatchPrefix(keys)) == MatchPrefixReply(2)
        assert isinstance(await peer.ask(Lease(keys, sizes, inline_bytes=64 * KIB)), LeaseReply)
        await peer.payload()
        assert await peer.ask(Exists(keys)) == ExistsReply(b"\1\1")
        assert woken == [Exists]
        figures = server.core.statistics()
        assert (figures.leases, figures.reservations, figures.hits) == (0, 0, 6)
        recorded = server.server.context.recorder.statistics()
        counted = {one.kind: (one.count, one.payload_bytes) for one in recorded if one.kind in ("commit", "lease")}
        assert counted == dict.fromkeys(("commit", "lease"), (2, 2 * sum(sizes)))


async def test_blocks_stay_pinned_until_the_whole_answer_is_sent(tmp_path: Path) -> None:
    config = make_config(unix_socket=str(tmp_path / "store.sock"), prealloc_bytes=4 * MIB)
    async with running_server(config) as server:
        reader, writer = await server.local_peer(), await server.peer()
        old, new = b"o" * MIB, b"n" * MIB
        await writer.ask(put("key", MIB), old)
        await reader.ask(Exists(Keys(["key"])))
        for session in server.server.sessions:
            assert session.socket is not None
            session.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 * KIB)
        await reader.send_head(Lease(Keys(["key"]), pack_u64(), inline_bytes=MIB))  # more than the socket takes
        await server.until(leases=1)
        for name in ("key", "b", "c", "d", "e", "f"):  # where the old block was would be used again
            await writer.ask(put(name, MIB), new)
        assert isinstance(await reader.reply_to_half(Lease(Keys(["key"]), pack_u64())), LeaseReply)
        assert await reader.payload() == old
        await server.until(leases=0, condemned_bytes=0)


async def test_an_answer_that_goes_in_two_parts_is_counted_as_a_whole(autojump_clock: MockClock) -> None:
    async with simulated_server(capacity_bytes=100 * KIB) as server:
        peer = await server.peer()
        await peer.ask(put("key", 64 * KIB), bytes(64 * KIB))
        await peer.ask(get("key"))
        await peer.payload()
        await send_all(peer, [(get("key"), b"")] * 2)
        await trio.testing.wait_all_tasks_blocked()
        for number in range(2):
            await answer_to(peer, number, get("key"))
        await peer.ask(Exists(Keys(["key"])))
        (counted,) = [one for one in server.server.context.recorder.statistics() if one.kind == "get"]
        assert (counted.count, counted.payload_bytes) == (3, 3 * 64 * KIB)
        (client,) = [session.statistics(0.0) for session in server.server.sessions]
        assert client.sent_bytes == 3 * 64 * KIB


@pytest.mark.parametrize("likely", [False, True])
async def test_what_is_asked_before_a_client_leaves_is_counted(likely: bool) -> None:
    async with running_server(make_config()) as running:
        for number in range(10):
            peer = await running.peer()
            if likely:  # the next one is answered in one step
                await peer.ask(Exists(Keys(["key"])))
            assert isinstance(peer.stream, SocketStream)
            peer.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            await send_all(peer, [(put(f"key {number}", 3), b"abc")])
            peer.close()
            await running.quiet()
        statistics = running.server.context.recorder.statistics()
        assert len(running.core.index) == sum(one.count for one in statistics if one.kind == "put")


async def test_what_is_refused_is_counted_and_the_connection_goes_on() -> None:
    config = make_config(prealloc_bytes=64 * KIB, max_value_bytes=40 * KIB)
    async with simulated_server(config) as server:
        peer, other = await server.peer(), await server.peer()
        await peer.ask(put("key", 100), bytes(100))
        await peer.ask(Exists(Keys(["key"])))
        with pytest.raises(BufferTooSmall):
            await peer.ask(get("key", 99))
        with pytest.raises(ValueTooLarge):
            await peer.ask(put("long", 41 * KIB), bytes(41 * KIB))
        await other.ask(Get(Keys(["key"]), pack_u64(), checksums=False))
        assert await other.payload() == bytes(100)
        assert await peer.ask(Exists(Keys(["key"]))) == ExistsReply(b"\1")
        found = {(one.kind, one.outcome): one.count for one in server.server.context.recorder.statistics()}
        assert found["put", "ok"] == 1
        assert found["put", "ValueTooLarge"] == found["get", "BufferTooSmall"] == 1
        assert found["exists", "ok"] == 2
        clients = [session.statistics(0.0) for session in server.server.sessions]
        assert [(client.requests, client.errors) for client in clients] == [(5, 2), (1, 0)]


async def test_a_put_without_room_is_refused_and_the_next_one_is_not() -> None:
    async with simulated_server(make_config(prealloc_bytes=64 * KIB)) as server:
        peer = await server.peer()
        await peer.ask(put("key", 40 * KIB), bytes(40 * KIB))
        client = server.core.open_client("holder")
        lease = server.core.lease(client, ["key"])
        with pytest.raises(OutOfMemory):
            await peer.ask(put("more", 40 * KIB), bytes(40 * KIB))
        server.core.release(lease)
        server.core.close_client(client)
        assert await peer.ask(put("more", 40 * KIB), bytes(40 * KIB)) == PutReply(pack_u64())


async def test_a_server_that_drains_ends_sessions_that_wait(mock_clock: MockClock) -> None:
    async with simulated_server() as server:
        peer = await server.peer()
        for _ in range(3):
            await peer.ask(Exists(Keys(["key"])))
        server.server.drain()
        assert await peer.is_closed()
        await server.finished.wait()
