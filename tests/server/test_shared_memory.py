"""What the server lends to clients that map its pool, and how it gets that back.

The clients here are raw: they speak the protocol over a real Unix socket, and say what
no good client would.
"""

import fcntl
import gc
import mmap
import os
import select
import stat
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from trio.testing import MockClock

from infinistore.core.arena import create_arena
from infinistore.errors import (
    BufferTooSmall,
    InfiniStoreException,
    InvalidRequest,
    LimitExceeded,
    ProtocolError,
    UnknownReservation,
)
from infinistore.protocol.codec import pack_u64
from infinistore.protocol.messages import (
    MISSING,
    Abort,
    Commit,
    Delete,
    Exists,
    ExistsReply,
    Get,
    GetReply,
    Keys,
    Lease,
    LeaseReply,
    MapArenas,
    MapArenasReply,
    MapTables,
    Prepare,
    Purge,
    Put,
    PutReply,
    Release,
    Request,
    Reserve,
    ReserveReply,
)
from infinistore.protocol.states import State
from infinistore.server import connection as holdings
from infinistore.server.environment import Environment
from infinistore.transports.base import drive
from tests.server.running import KIB, POOL_BYTES, Peer, RunningServer, let_linger, make_config, running_server

OFFSET_MASK = 2**48 - 1


@asynccontextmanager
async def serving(
    folder: Path, environment: Environment | None = None, **settings: Any
) -> AsyncGenerator[RunningServer, None]:
    """A server with a Unix socket, of which its clients leave nothing behind unless it
    ends before.
    """
    config = make_config(unix_socket=str(folder / "store.sock"), **settings)
    async with running_server(config, environment) as server:
        yield server
        if not server.ended:
            await server.left_by_all()


async def arenas(peer: Peer, first: int = 0) -> tuple[MapArenasReply, list[int]]:
    """The arenas and their descriptors, which are the caller's to close, without that
    of the liveness pipe.
    """
    descriptors: list[int] = []
    reply = await drive(peer.connection.request(MapArenas(first), descriptors=descriptors), peer.stream)
    assert isinstance(reply, MapArenasReply)
    os.close(descriptors.pop())
    return reply, descriptors


async def test_a_pipe_that_comes_with_the_arenas_hangs_up_when_the_server_has_ended(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        peer = await server.local_peer()
        descriptors: list[int] = []
        await drive(peer.connection.request(MapArenas(99), descriptors=descriptors), peer.stream)
        (pipe,) = descriptors
        poll = select.poll()
        poll.register(pipe, 0)
        assert poll.poll(0) == []
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(pipe, b"x")
        peer.close()
        await server.quiet()
        assert poll.poll(0) == []
    assert poll.poll(0) == [(pipe, select.POLLHUP)]
    os.close(pipe)


async def reserve(peer: Peer, *sizes: int) -> ReserveReply:
    reply = await peer.ask(Reserve(pack_u64(sizes)))
    assert isinstance(reply, ReserveReply)
    return reply


async def lease(peer: Peer, *keys: str, inline_bytes: int = 0) -> LeaseReply:
    reply = await peer.ask(Lease(Keys(list(keys)), pack_u64(), inline_bytes))
    assert isinstance(reply, LeaseReply)
    return reply


async def release(peer: Peer, number: int) -> None:
    await drive(peer.connection.notify(Release(number)), peer.stream)


async def abort(peer: Peer, number: int) -> None:
    await drive(peer.connection.notify(Abort(number)), peer.stream)


async def put(peer: Peer, key: str, value: bytes) -> None:
    await peer.ask(Put(Keys([key]), pack_u64([len(value)]), checksums=False), value)


async def present(peer: Peer, *keys: str) -> list[bool]:
    reply = await peer.ask(Exists(Keys(list(keys))))
    assert isinstance(reply, ExistsReply)
    return [bool(byte) for byte in reply.present]


async def reserve_spare(peer: Peer, *sizes: int) -> int:
    reply = await peer.ask(Reserve(pack_u64(sizes), spare=True))
    assert isinstance(reply, ReserveReply)
    assert len(reply.places) == (len(sizes) if reply.reservation else 0)
    return reply.reservation


def commit(reservation: int, *keys: str, checksums: int = 0) -> Commit:
    return Commit(reservation, Keys(list(keys)), pack_u64(range(1, checksums + 1)))


# Spare room


async def test_spare_room_is_granted_while_little_is_reserved(server: RunningServer, peer: Peer, other: Peer) -> None:
    spare = await reserve_spare(peer, POOL_BYTES // 16, POOL_BYTES // 16)
    assert spare
    assert not await reserve_spare(other, KIB)  # an eighth is reserved
    assert (await reserve(other, KIB)).reservation  # which is no matter to a put
    await peer.ask(commit(spare, "a", "b"))
    assert await reserve_spare(other, KIB)
    peer.close()
    other.close()
    await server.until(reservations=0)


async def test_nothing_is_evicted_for_spare_room(peer: Peer) -> None:
    full = (await reserve(peer, *[64 * KIB] * (POOL_BYTES * 9 // 10 // (64 * KIB)))).places
    keys = [str(number) for number in range(len(full))]
    await peer.ask(commit(1, *keys))
    assert not await reserve_spare(peer, POOL_BYTES // 16)
    assert all(await present(peer, *keys))


# Descriptors


async def test_an_arena_that_was_handed_out_cannot_be_resized_sealed_or_opened_again_by_others(peer: Peer) -> None:
    reply, (descriptor,) = await arenas(peer)
    assert (list(reply.lengths), reply.writable) == ([POOL_BYTES], True)
    assert os.fstat(descriptor).st_size == POOL_BYTES
    seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    assert seals == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    assert stat.S_IMODE(os.fstat(descriptor).st_mode) == 0o400
    for length in (0, POOL_BYTES - mmap.PAGESIZE, POOL_BYTES + mmap.PAGESIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, length)
    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(descriptor)


async def test_without_shared_writes_no_writable_mapping_can_be_made(tmp_path: Path) -> None:
    async with serving(tmp_path, shm_writes="off") as server:
        peer = await server.local_peer()
        reply, (descriptor,) = await arenas(peer)
        assert not reply.writable
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, POOL_BYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(PermissionError):
            os.pwrite(descriptor, b"x", 0)
        await put(peer, "key", b"the server itself can write")
        found = await lease(peer, "key")
        with mmap.mmap(descriptor, POOL_BYTES, mmap.MAP_SHARED, mmap.PROT_READ) as pool:
            start = found.places[0] & OFFSET_MASK
            assert pool[start : start + found.sizes[0]] == b"the server itself can write"
        os.close(descriptor)


def test_sharing_an_arena_twice_gives_the_same_descriptor() -> None:
    arena = create_arena(0, mmap.PAGESIZE)
    assert arena.share(writable=False) == arena.share(writable=False) == arena.fd
    arena.close()


async def test_arenas_are_asked_for_from_a_number_on(peer: Peer) -> None:
    for first in (1, 2**63):
        reply, descriptors = await arenas(peer, first)
        assert (list(reply.lengths), descriptors) == ([], [])
    assert await present(peer, "key") == [False]


async def test_descriptors_that_nobody_takes_are_not_kept(peer: Peer) -> None:
    await present(peer, "key")
    gc.collect()  # what other tests have left may have some
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        assert isinstance(await peer.ask(MapArenas(0)), MapArenasReply)
    assert len(os.listdir("/proc/self/fd")) == before


# What is refused


@pytest.mark.parametrize(
    "request_",
    [
        MapArenas(0),
        MapTables(),
        Reserve(pack_u64([1])),
        Prepare(1, Keys(["key"]), pack_u64(), False),
        commit(1, "key"),
        Lease(Keys(["key"]), pack_u64()),
    ],
    ids=lambda request: type(request).__name__,
)
async def test_over_tcp_there_is_no_shared_memory(request_: Request) -> None:
    async with running_server() as server:
        peer = await server.peer()
        with pytest.raises(ProtocolError, match="Unix socket"):
            await peer.ask(request_)
        assert await peer.is_closed()


@pytest.mark.parametrize("send", [release, abort])
async def test_a_release_or_abort_over_tcp_ends_the_connection(send: Callable[[Peer, int], Awaitable[None]]) -> None:
    async with running_server() as server:
        peer = await server.peer()
        await send(peer, 1)
        with pytest.raises(ProtocolError, match="Unix socket"):
            await present(peer, "key")


async def test_what_is_committed_must_be_reserved_on_this_connection_and_not_committed_yet(
    peer: Peer, other: Peer
) -> None:
    reserved = await reserve(peer, 100)
    for who, number in ((peer, reserved.reservation + 1), (other, reserved.reservation), (peer, 0)):
        with pytest.raises(UnknownReservation):
            await who.ask(commit(number, "key"))
        assert who.connection.state is State.READY
    assert await present(peer, "key") == [False]
    assert isinstance(await peer.ask(commit(reserved.reservation, "key")), PutReply)
    with pytest.raises(UnknownReservation):
        await peer.ask(commit(reserved.reservation, "key"))
    assert await present(other, "key") == [True]


@pytest.mark.parametrize(
    ("keys", "checksums"),
    [((), 0), (("a",), 0), (("a", "b", "c"), 0), (("a", "a"), 0), (("a", "b"), 1), (("a", "b"), 3)],
)
async def test_a_commit_that_does_not_fit_leaves_the_reservation_open(
    peer: Peer, keys: tuple[str, ...], checksums: int
) -> None:
    reserved = await reserve(peer, 100, 200)
    with pytest.raises(InvalidRequest):
        await peer.ask(commit(reserved.reservation, *keys, checksums=checksums))
    assert await present(peer, "a", "b", "c") == [False] * 3
    assert isinstance(await peer.ask(commit(reserved.reservation, "a", "b", checksums=2)), PutReply)
    assert await present(peer, "a", "b", "c") == [True, True, False]


async def test_to_release_what_is_not_leased_ends_the_connection(peer: Peer, other: Peer) -> None:
    await put(peer, "key", b"value")
    leased = await lease(peer, "key")
    await release(other, leased.lease)
    with pytest.raises(ProtocolError, match="lease"):
        await present(other, "key")
    await release(peer, leased.lease)
    assert await present(peer, "key") == [True]
    await release(peer, leased.lease)
    with pytest.raises(ProtocolError, match="lease"):
        await present(peer, "key")


async def test_an_abort_gives_the_room_back_once_and_keeps_the_connection(server: RunningServer) -> None:
    peer, other = await server.local_peer(), await server.local_peer()
    reserved = await reserve(peer, 100 * KIB)
    await abort(peer, reserved.reservation)
    with pytest.raises(UnknownReservation):
        await peer.ask(commit(reserved.reservation, "key"))
    assert server.core.statistics().used_bytes == 0
    kept = await reserve(peer, 100 * KIB)
    await abort(other, kept.reservation)
    with pytest.raises(ProtocolError, match="no reservation"):
        await present(other, "key")
    assert isinstance(await peer.ask(commit(kept.reservation, "key")), PutReply)
    await abort(peer, kept.reservation)
    with pytest.raises(ProtocolError, match="no reservation"):
        await present(peer, "key")
    for who in (peer, other):
        who.close()
    await server.quiet()
    assert server.core.keys() == ["key"]


async def test_the_latest_lease_can_be_released_without_its_number(server: RunningServer, peer: Peer) -> None:
    """By a client that does not wait for the reply: it may have been none, or inline,
    or released already.
    """
    await release(peer, 0)
    await put(peer, "key", b"value")
    older, latest = await lease(peer, "key"), await lease(peer, "key")
    for _ in range(2):
        await release(peer, 0)
    assert await present(peer, "key") == [True]
    assert server.core.statistics().leases == 1
    assert latest.lease != older.lease
    assert (await lease(peer, "key", inline_bytes=100)).lease == 0
    await peer.payload()
    await release(peer, 0)
    assert await present(peer, "key") == [True]
    assert server.core.statistics().leases == 1
    await release(peer, older.lease)
    await peer.send_head(Lease(Keys(["key"]), pack_u64()))
    await release(peer, 0)
    await server.until(leases=0)


async def test_a_lease_that_does_not_fit_the_room_at_the_client_pins_nothing(server: RunningServer, peer: Peer) -> None:
    await put(peer, "key", b"value")
    with pytest.raises(BufferTooSmall):
        await peer.ask(Lease(Keys(["key"]), pack_u64([4])))
    assert server.core.statistics().leases == 0
    assert await present(peer, "key") == [True]
    with pytest.raises(ProtocolError, match="capacities"):
        await peer.ask(Lease(Keys(["key"]), pack_u64([4, 4])))


async def test_open_reservations_are_bounded_even_if_they_take_no_room(
    server: RunningServer, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holdings, "MOST_OPEN", 9)
    for _ in range(9):
        await reserve(peer)
    with pytest.raises(LimitExceeded):
        await reserve(peer)
    assert server.core.statistics().reservations == 9
    assert await present(peer, "key") == [False]


async def test_open_leases_are_bounded(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdings, "MOST_OPEN", 9)
    await put(peer, "key", b"value")
    for _ in range(9):
        await lease(peer, "key")
    with pytest.raises(LimitExceeded):
        await lease(peer, "key")
    assert await present(peer, "key") == [True]


# What is lent


async def test_a_batch_of_exactly_inline_bytes_comes_inline_and_a_longer_one_is_leased(server: RunningServer) -> None:
    peer = await server.local_peer()
    await put(peer, "a", b"12345")
    await put(peer, "b", b"678")
    inline = await lease(peer, "a", "gone", "b", inline_bytes=8)
    assert (inline.lease, list(inline.sizes)) == (0, [5, MISSING, 3])
    assert await peer.payload() == b"12345678"
    assert server.core.statistics().leases == 0
    leased = await lease(peer, "a", "gone", "b", inline_bytes=7)
    assert leased.lease
    assert (len(leased.places), leased.places[1], peer.connection.payload_left) == (3, 0, 0)
    assert (inline.places, inline.checksums) == (leased.places, leased.checksums)
    assert server.core.statistics().leases == 1


async def test_a_leased_block_stays_while_its_key_is_replaced_deleted_and_the_pool_filled(
    server: RunningServer, peer: Peer, other: Peer
) -> None:
    _, (descriptor,) = await arenas(peer)
    blocks = {name: name.encode() * 100 * KIB for name in ("r", "d", "e")}
    for name, value in blocks.items():
        await put(peer, name, value)
    leased = await lease(peer, *blocks)
    await put(other, "r", b"another")
    await other.ask(Delete(Keys(["d"])))
    for index in range(8):
        await put(other, f"filler {index}", b"x" * (512 * KIB))
    await other.ask(Purge())
    with mmap.mmap(descriptor, POOL_BYTES, mmap.MAP_SHARED, mmap.PROT_READ) as pool:
        for place, size, value in zip(leased.places, leased.sizes, blocks.values(), strict=True):
            assert pool[place & OFFSET_MASK :][:size] == value
    await release(peer, leased.lease)
    await present(peer, "r")
    assert server.core.statistics().used_bytes == 0
    os.close(descriptor)


# Clients that go


async def test_a_client_that_leaves_gives_back_what_it_had_reserved_and_leased(server: RunningServer) -> None:
    peer = await server.local_peer()
    await put(peer, "key", b"value")
    await reserve(peer, 64 * KIB)
    await lease(peer, "key")
    peer.close()
    await server.quiet()
    assert server.core.statistics().used_bytes == KIB


@pytest.mark.parametrize("pinned", ["reservation", "lease"])
async def test_a_client_that_breaks_the_protocol_is_in_quarantine_until_its_end_of_the_stream(
    server: RunningServer, peer: Peer, other: Peer, mock_clock: MockClock, pinned: str
) -> None:
    most = POOL_BYTES // 2
    if pinned == "reservation":
        await reserve(peer, most)
    else:
        await put(peer, "key", b"x" * most)
        await lease(peer, "key")
        await other.ask(Purge())
    await release(peer, 12345)
    with pytest.raises(ProtocolError):
        await present(peer, "key")
    await let_linger(peer, mock_clock)
    await server.until(quarantined_bytes=most)
    await server_is_patient(server, other, most)
    peer.close()
    statistics = await server.until(quarantined_bytes=0)
    assert statistics.used_bytes == 0
    await put(other, "big", b"x" * (POOL_BYTES - 64 * KIB))


async def server_is_patient(server: RunningServer, other: Peer, most: int) -> None:
    """The room is counted as taken, and nobody else gets it."""
    assert server.core.statistics().used_bytes == most
    with pytest.raises(InfiniStoreException):
        await put(other, "big", b"x" * (POOL_BYTES - 64 * KIB))
    assert server.core.statistics().quarantined_bytes == most


async def test_a_server_that_stops_does_not_wait_for_a_client_in_quarantine(
    tmp_path: Path, mock_clock: MockClock
) -> None:
    async with running_server(make_config(unix_socket=str(tmp_path / "socket"))) as server:
        peer = await server.local_peer()
        await reserve(peer, KIB)
        await release(peer, 12345)
        await let_linger(peer, mock_clock)
        await server.until(quarantined_bytes=KIB)
    peer.close()


async def test_get_and_put_work_beside_what_is_lent(peer: Peer) -> None:
    reserved = await reserve(peer, 100)
    await put(peer, "other", b"value")
    assert isinstance(await peer.ask(Get(Keys(["other"]), pack_u64(), checksums=False)), GetReply)
    assert await peer.payload() == b"value"
    assert isinstance(await peer.ask(commit(reserved.reservation, "mine")), PutReply)
    assert await present(peer, "mine", "other") == [True, True]
