"""What a server does for clients that ask for RDMA, and what it does not let them do.

The clients here are raw: they speak the protocol, and say what no good client would.
"""

import ctypes
from collections.abc import AsyncGenerator

import attrs
import pytest

from infinistore.errors import InvalidRequest, LimitExceeded, ProtocolError, TransferFailed, UnknownReservation
from infinistore.protocol.codec import pack_u64
from infinistore.protocol.messages import (
    Commit,
    CountReply,
    Exists,
    ExistsReply,
    Keys,
    Lease,
    MapArenas,
    Numbers,
    Put,
    PutReply,
    RdmaConnect,
    RdmaConnectReply,
    RdmaFetch,
    RdmaFill,
    RdmaGet,
    RdmaGetReply,
    RdmaPut,
    Release,
    Request,
    Reserve,
    ReserveReply,
)
from infinistore.transports.rdma.memory import RegisteredSpan
from infinistore.transports.rdma.plan import Piece
from infinistore.transports.rdma.verbs import Endpoint, Operation
from tests.server.running import Peer, RunningServer, make_config, running_server, until
from tests.transports.fake_rdma import REMOTE_INVALID, Fabric, FakeDevice, FakeQueue, fabric_in_use

VALUE = bytes(range(256)) * 16
A = Keys(["a"])


@attrs.define
class RdmaPeer:
    """A raw client with a device of its own, some registered memory, and a connected
    queue pair.
    """

    fabric: Fabric
    server: RunningServer
    peer: Peer
    device: FakeDevice
    span: RegisteredSpan
    queue: FakeQueue

    @property
    def memory(self) -> memoryview:
        return self.span.view

    @property
    def place(self) -> tuple[Numbers, Numbers]:
        """Where its memory is, and by which key it is reached."""
        return pack_u64([self.span.address]), pack_u64([self.span.key])

    @property
    def pool(self) -> FakeDevice:
        """The server's device."""
        (device,) = [device for device in self.fabric.devices if device is not self.device]
        return device

    async def ask(self, request: Request) -> object:
        return await self.peer.ask(request)

    async def reserve(self, *sizes: int) -> int:
        reply = await self.peer.ask(Reserve(pack_u64(sizes)))
        assert isinstance(reply, ReserveReply)
        return reply.reservation

    async def exists(self, key: str) -> bool:
        reply = await self.peer.ask(Exists(Keys([key])))
        assert isinstance(reply, ExistsReply)
        return reply.present == b"\1"

    async def put(self, key: str, size: int = len(VALUE), *, address: int = 0, remote_key: int = 0) -> None:
        place = pack_u64([address or self.span.address]), pack_u64([remote_key or self.span.key])
        await self.ask(RdmaPut(Keys([key]), pack_u64([size]), *place, pack_u64()))


async def connect_queue(peer: Peer, device: FakeDevice, *, serves: bool = False) -> FakeQueue:
    queue = device.create_queue(serves=serves)
    end = queue.endpoint
    reply = await peer.ask(RdmaConnect(end.queue, end.packet, end.gid, end.lid, end.mtu, end.reads))
    assert isinstance(reply, RdmaConnectReply)
    own = Endpoint(reply.queue, reply.packet, reply.gid, reply.lid, reply.mtu, reply.reads)
    queue.connect(own, dead_after_s=1)
    return queue


@pytest.fixture
async def rdma() -> AsyncGenerator[RdmaPeer, None]:
    with fabric_in_use() as fabric:
        async with running_server(make_config()) as server:
            peer = await server.peer()
            device = fabric.open("client")
            try:
                span = RegisteredSpan(device, memoryview(bytearray(VALUE)))
                yield RdmaPeer(fabric, server, peer, device, span, await connect_queue(peer, device))
                await server.left_by_all()
            finally:
                device.close()


async def test_a_put_is_read_from_the_client_and_a_get_written_to_it(rdma: RdmaPeer) -> None:
    await rdma.put("a")
    rdma.memory[:] = bytes(len(VALUE))
    reply = await rdma.ask(RdmaGet(A, pack_u64([len(VALUE)]), *rdma.place))
    assert reply == RdmaGetReply(pack_u64([len(VALUE)]), pack_u64([0]))
    assert rdma.memory == VALUE
    assert [client.transport for client in rdma.server.server.telemetry.clients()] == ["rdma"]


LIES = {
    "an address before the memory": {"address": -1},
    "a key of nothing": {"remote_key": 5},
    "a length beyond the end": {"size": len(VALUE) + 1},
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
async def test_a_client_that_lies_about_its_memory_is_told_and_stores_nothing(
    rdma: RdmaPeer, lie: dict[str, int]
) -> None:
    if "address" in lie:
        lie = {"address": rdma.span.address + lie["address"]}
    with pytest.raises(TransferFailed, match="remote access error"):
        await rdma.put("a", **lie)
    assert not await rdma.exists("a"), "the connection goes on"
    statistics = rdma.server.core.statistics()
    assert (statistics.reservations, statistics.used_bytes) == (0, 0)
    assert list(rdma.fabric.queues.values()) == [rdma.queue], "the server's queue pair is gone"


async def test_after_a_failure_rdma_fails_until_the_client_connects_anew(rdma: RdmaPeer) -> None:
    with pytest.raises(TransferFailed):
        await rdma.put("a", remote_key=5)
    with pytest.raises(TransferFailed, match="remote access error"):
        await rdma.put("a")
    await rdma.peer.ask(Put(A, pack_u64([3]), checksums=False), b"abc")
    rdma.queue = await connect_queue(rdma.peer, rdma.device)
    await rdma.put("b")
    assert await rdma.exists("b")


async def test_the_room_of_a_failed_put_is_used_again_only_when_its_queue_pair_is_destroyed(rdma: RdmaPeer) -> None:
    core = rdma.server.core
    seen: list[int] = []
    free = core.pool.free

    def freed(extents: object) -> None:
        seen.append(len(rdma.fabric.queues))
        free(extents)  # type: ignore[arg-type]

    core.pool.free = freed  # type: ignore[method-assign]
    with pytest.raises(TransferFailed):
        await rdma.put("a", remote_key=5)
    assert set(seen) == {1}, "only the client's was left"


async def test_a_client_that_goes_with_a_transfer_under_way_loses_it(rdma: RdmaPeer) -> None:
    rdma.fabric.held = True
    await rdma.peer.send_head(RdmaPut(A, pack_u64([9]), *rdma.place, pack_u64()))
    await until(lambda: rdma.fabric.work)
    rdma.queue.close()
    rdma.peer.close()
    rdma.fabric.release()
    await rdma.server.quiet()
    assert not rdma.fabric.queues
    assert not rdma.server.core.exists(["a"])[0]


# The server's own memory


@pytest.mark.parametrize("operation", Operation)
async def test_no_client_can_address_the_servers_memory(rdma: RdmaPeer, operation: Operation) -> None:
    await rdma.put("a")
    arena = max(rdma.pool.regions.values(), key=lambda region: region.length)
    before = ctypes.string_at(arena.address, len(VALUE))
    queue = await connect_queue(rdma.peer, rdma.device, serves=True)
    rdma.memory[:] = b"x" * len(VALUE)
    for key in (arena.local_key, arena.remote_key):
        piece: Piece = (rdma.span.address, rdma.span.key, arena.address, key, 2000)
        queue.state = "ready"
        queue.post(operation, [piece], 1)
        (completion,) = queue.poll()
        assert completion.status == REMOTE_INVALID
    assert ctypes.string_at(arena.address, len(VALUE)) == before
    assert rdma.memory == b"x" * len(VALUE)
    assert not arena.remote
    queue.close()


async def test_what_is_registered_for_the_server_is_not_for_its_clients(rdma: RdmaPeer) -> None:
    assert [region.remote for region in rdma.pool.regions.values()] == [False, False], "a scratch byte and the arena"
    with pytest.raises(TransferFailed):
        await rdma.put("a", address=rdma.server.core.pool.arenas[0].address)
    rdma.queue = await connect_queue(rdma.peer, rdma.device)
    own = max(rdma.pool.regions.values(), key=lambda region: region.length)
    with pytest.raises(TransferFailed):
        await rdma.put("a", address=own.address, remote_key=own.remote_key)


async def test_a_reservation_that_was_not_filled_cannot_be_committed(rdma: RdmaPeer) -> None:
    """New room holds what others had there."""
    reservation = await rdma.reserve(100)
    fill = RdmaFill(reservation, 0, 60, rdma.span.address, rdma.span.key)
    assert await rdma.ask(fill) == CountReply(60)
    with pytest.raises(ProtocolError, match="40 bytes of this reservation"):
        await rdma.ask(Commit(reservation, A, pack_u64()))


async def test_a_reservation_whose_commit_was_refused_is_filled_still(rdma: RdmaPeer) -> None:
    reservation = await rdma.reserve(100)
    fill = RdmaFill(reservation, 0, 100, rdma.span.address, rdma.span.key)
    assert await rdma.ask(fill) == CountReply(100)
    with pytest.raises(InvalidRequest, match="needs as many keys"):
        await rdma.ask(Commit(reservation, Keys(["a", "b"]), pack_u64()))
    assert await rdma.ask(Commit(reservation, A, pack_u64())) == PutReply(pack_u64())
    assert await rdma.exists("a")


# What is refused


async def refused(rdma: RdmaPeer, request: Request, match: str) -> None:
    with pytest.raises(ProtocolError, match=match):
        await rdma.ask(request)
    assert await rdma.peer.is_closed()


ONE = pack_u64([1])
TWO = pack_u64([1, 1])


@pytest.mark.parametrize(
    ("request_", "match"),
    [
        (RdmaPut(A, TWO, ONE, ONE, pack_u64()), "columns"),
        (RdmaPut(A, ONE, TWO, ONE, pack_u64()), "columns"),
        (RdmaPut(A, ONE, ONE, ONE, TWO), "columns"),
        (RdmaPut(A, ONE, ONE, pack_u64(), pack_u64()), "remote keys"),
        (RdmaPut(A, ONE, ONE, pack_u64([1 << 32]), pack_u64()), "remote keys"),
        (RdmaGet(A, pack_u64(), ONE, ONE), "columns"),
        (RdmaGet(A, ONE, TWO, ONE), "columns"),
        (RdmaGet(A, ONE, TWO, ONE, 10), "one span"),
        (RdmaPut(A, pack_u64([2]), pack_u64([2**64 - 1]), ONE, pack_u64()), "beyond the end"),
        (RdmaFetch(7, 0, 1, 1, 1), "no lease 7"),
        (MapArenas(), "Unix socket"),
        (Lease(A, pack_u64()), "Unix socket"),
        (RdmaConnect(1 << 24, 0, "0" * 32), "no queue pair has"),
        (RdmaConnect(1, 1 << 24, "0" * 32), "no queue pair has"),
        (RdmaConnect(1, 0, "0" * 31), "no queue pair has"),
        (RdmaConnect(1, 0, "g" * 32), "no queue pair has"),
        (RdmaConnect(1, 0, "0" * 32, mtu=1500), "no queue pair has"),
        (RdmaConnect(1, 0, "0" * 32, reads=0), "no queue pair has"),
        (RdmaConnect(1, 0, "0" * 32, lid=1 << 16), "no queue pair has"),
    ],
    ids=repr,
)
async def test_a_request_that_makes_no_sense_ends_the_connection(rdma: RdmaPeer, request_: Request, match: str) -> None:
    await refused(rdma, request_, match)


@pytest.mark.parametrize(("first", "length", "match"), [(0, 31, "of a batch of 30"), (5, 10, "without gaps")])
async def test_pieces_that_are_not_in_their_batch_or_leave_gaps_end_the_connection(
    rdma: RdmaPeer, first: int, length: int, match: str
) -> None:
    reservation = await rdma.reserve(10, 20)
    await refused(rdma, RdmaFill(reservation, first, length, rdma.span.address, rdma.span.key), match)


async def test_requests_that_the_store_refuses_keep_the_connection(rdma: RdmaPeer) -> None:
    with pytest.raises(InvalidRequest, match="twice"):
        await rdma.ask(RdmaPut(Keys(["a", "a"]), TWO, TWO, ONE, pack_u64()))
    with pytest.raises(UnknownReservation):
        await rdma.ask(RdmaFill(7, 0, 1, 1, 1))
    with pytest.raises(LimitExceeded):
        await rdma.ask(Reserve(pack_u64([1] * 9000)))
    await rdma.put("a")


@pytest.mark.parametrize("request_", [RdmaPut(A, ONE, ONE, ONE, pack_u64()), RdmaFetch(1, 0, 1, 1, 1), Release(1)])
async def test_rdma_before_it_is_connected_ends_the_connection(request_: Request) -> None:
    with fabric_in_use():
        async with running_server() as server:
            peer = await server.peer()
            if isinstance(request_, Release):
                await peer.send_head(request_)
            else:
                with pytest.raises(ProtocolError, match="before RdmaConnect"):
                    await peer.ask(request_)


async def test_a_server_without_rdma_says_so_and_the_connection_goes_on() -> None:
    with fabric_in_use(absent="no device"):
        async with running_server() as server:
            peer = await server.peer()
            with pytest.raises(TransferFailed, match="no RDMA"):
                await peer.ask(RdmaConnect(1, 0, "0" * 32))
            assert isinstance(await peer.ask(Exists(A)), ExistsReply)


async def test_a_get_that_is_longer_than_its_span_is_leased_and_fetched_in_pieces(rdma: RdmaPeer) -> None:
    await rdma.put("a")
    await rdma.put("b", 1000)
    rdma.memory[:] = bytes(len(VALUE))
    reply = await rdma.ask(RdmaGet(Keys(["a", "missing", "b"]), pack_u64(), *rdma.place, region_bytes=2000))
    assert isinstance(reply, RdmaGetReply)
    assert list(reply.sizes) == [len(VALUE), 2**64 - 1, 1000]
    assert rdma.server.core.statistics().leases == 1
    fetched = b""
    for first in range(0, len(VALUE) + 1000, 2000):
        count = min(2000, len(VALUE) + 1000 - first)
        assert await rdma.ask(RdmaFetch(reply.lease, first, count, *map(int, (rdma.span.address, rdma.span.key))))
        fetched += rdma.memory[:count]
    assert fetched == VALUE + VALUE[:1000]
    await rdma.peer.send_head(Release(reply.lease))
    assert await rdma.exists("a")
    assert rdma.server.core.statistics().leases == 0


async def test_what_was_written_is_read_back_once_from_each_memory(rdma: RdmaPeer) -> None:
    await rdma.put("a")
    await rdma.put("b", 1000)
    other = RegisteredSpan(rdma.device, memoryview(bytearray(1000)))
    places = pack_u64([rdma.span.address, other.address, other.address + 500])
    keys = pack_u64([rdma.span.key, other.key, other.key])
    get = RdmaGet(Keys(["a", "b", "missing"]), pack_u64([len(VALUE), 1000, 10]), places, keys)
    before = rdma.fabric.moved_bytes
    assert await rdma.ask(get) == await rdma.ask(attrs.evolve(get, read_back=True))
    assert rdma.fabric.moved_bytes - before == 2 * (len(VALUE) + 1000) + 2
    assert other.view == VALUE[:1000]
    nothing = RdmaGet(
        Keys(["missing"]), pack_u64([10]), pack_u64([other.address]), pack_u64([other.key]), read_back=True
    )
    assert await rdma.ask(nothing) == RdmaGetReply(pack_u64([2**64 - 1]), pack_u64([0]), inline=True)


async def test_local_access_is_checked_too(rdma: RdmaPeer) -> None:
    """The fake device would notice if the server named memory of its own that is not
    registered.
    """
    rdma.pool.regions.clear()
    with pytest.raises(TransferFailed, match="local access error"):
        await rdma.put("a")
