"""Servers inside a test: on real sockets, or in a simulated network, with their parts
in reach.

Both run `infinistore.server` as it is. A `RunningServer` lets a test look at the core
behind the server's back.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import outcome
import trio
from trio.testing import MockClock

from infinistore.allocators import create_allocator
from infinistore.client.api.store import AsyncStore
from infinistore.config import ServerConfig
from infinistore.core import Pool, StoreCore, create_arena
from infinistore.protocol.client_connection import ClientConnection, Encoded
from infinistore.protocol.codec import encode_head
from infinistore.protocol.messages import Hello, HelloReply, Reply, Request
from infinistore.protocol.states import State
from infinistore.server import Server, ServerAddresses
from infinistore.server.composition import compose_server, make_core, open_disks, run_server, share_descriptors
from infinistore.server.connection import LINGER_S
from infinistore.server.environment import Environment
from infinistore.server.movers.inline import InlineMover
from infinistore.server.movers.rdma import RdmaMover
from infinistore.server.movers.shm import LivenessPipe, ShmMover
from infinistore.statistics import StoreStatistics
from infinistore.transports.base import Stream, drive
from infinistore.transports.sockets.trio_streams import SocketStream, accept, connect_tcp, connect_unix
from infinistore.transports.tls.session import TlsSession, client_context
from infinistore.transports.tls.trio_stream import TlsStream
from tests.transports.memory_network import Chunks, MemoryListener, MemoryStream, whole

if TYPE_CHECKING:
    from tests.transports.certificates import Files

KIB = 1024
MIB = 1024 * 1024
POOL_BYTES = 4 * MIB
HALF_REQUEST_ID = 7

__all__ = [
    "KIB",
    "MIB",
    "POOL_BYTES",
    "Peer",
    "RunningServer",
    "connect_tls",
    "fill_twice",
    "let_linger",
    "make_config",
    "peer_with",
    "recovered",
    "running_server",
    "simulated_server",
    "until",
]


class _EachStep(trio.abc.Instrument):
    """Wakes a task after the step of another one that makes a condition hold."""

    def __init__(self, holds: Callable[[], object]) -> None:
        self._holds = holds
        self._waiting: trio.lowlevel.Task | None = trio.lowlevel.current_task()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        waiting = self._waiting
        if waiting is None or task is waiting:
            return
        try:
            if not self._holds():
                return
        except Exception as error:  # noqa: BLE001  # it is the waiting task's
            trio.lowlevel.reschedule(waiting, outcome.Error(error))
        else:
            trio.lowlevel.reschedule(waiting)
        self._waiting = None

    def give_up(self, _: object) -> trio.lowlevel.Abort:
        self._waiting = None
        return trio.lowlevel.Abort.SUCCEEDED


async def until(holds: Callable[[], object]) -> None:
    """Wait until this holds, without polling: it is asked after each step of any other
    task, for nothing else changes what is in this process.
    """
    await trio.lowlevel.checkpoint()
    if holds():
        return
    steps = _EachStep(holds)
    trio.lowlevel.add_instrument(steps)
    try:
        await trio.lowlevel.wait_task_rescheduled(steps.give_up)
    finally:
        trio.lowlevel.remove_instrument(steps)


def make_config(**settings: Any) -> ServerConfig:
    """A server on free ports, with a small pool, and without a Unix socket unless one
    is named.
    """
    plain: dict[str, Any] = {"service_port": 0, "manage_port": 0, "unix_socket": "off"}
    plain |= {"prealloc_bytes": POOL_BYTES, "minimal_allocate_bytes": KIB}
    plain |= {"disk_wait_s": 600.0}  # what is late would be missing
    return ServerConfig(**{**plain, **settings})


@attrs.define
class RunningServer:
    """A server that serves. `listener` is set in a simulated network only."""

    server: Server
    scope: trio.CancelScope
    listener: MemoryListener | None = None
    finished: trio.Event = attrs.field(factory=trio.Event)
    peers: list["Peer"] = attrs.field(factory=list)
    """Those that it has connected, which are closed with it."""
    loses_clients: bool = False
    """Whether something may be left of a client that is gone."""

    @property
    def core(self) -> StoreCore:
        return self.server.core

    @property
    def url(self) -> str:
        """Its TCP address."""
        return f"tcp://127.0.0.1:{self.server.addresses.port}"

    @property
    def unix_path(self) -> Path:
        assert self.server.addresses.unix_socket is not None
        return self.server.addresses.unix_socket

    @property
    def ended(self) -> bool:
        """Whether `Server.run` is over."""
        return self.finished.is_set()

    async def connect(self) -> Stream:
        """A bare stream to the server."""
        if self.listener is not None:
            return self.listener.connect_stream()
        return await connect_tcp("127.0.0.1", self.server.addresses.port)

    async def stranger(self) -> "Peer":
        """A connection that has not said hello."""
        self.peers.append(peer := Peer(await self.connect()))
        return peer

    async def peer(self) -> "Peer":
        """A connection that has said hello."""
        return await self.greet(await self.connect())

    async def local_peer(self) -> "Peer":
        """One by its Unix socket."""
        return await self.greet(await connect_unix(str(self.unix_path)))

    async def greet(self, stream: Stream) -> "Peer":
        """Say hello by a stream."""
        self.peers.append(peer := Peer(stream))
        await peer.hello()
        return peer

    @asynccontextmanager
    async def until_left(self) -> AsyncGenerator["RunningServer", None]:
        """Close its peers with the block; nothing may be left of them then."""
        try:
            yield self
        finally:
            for peer in self.peers:
                peer.close()
        if self.peers and not self.ended and not self.loses_clients:
            await self.quiet()

    async def left_by_all(self) -> None:
        """Close its peers, and wait until nothing is left of them."""
        async with self.until_left():
            pass

    async def until(self, **figures: int) -> StoreStatistics:
        """Wait until the statistics of its store say so."""
        await until(lambda: all(getattr(self.core.statistics(), name) == figures[name] for name in figures))
        return self.core.statistics()

    async def quiet(self) -> None:
        """Wait until no client is connected; nothing is reserved or leased then."""
        await until(lambda: not (len(self.server.sessions) or self.core.statistics().clients))
        statistics = self.core.statistics()
        assert (statistics.clients, statistics.reservations, statistics.leases) == (0, 0, 0)
        assert statistics.reserved_bytes == 0
        assert statistics.pinned_bytes == statistics.held_bytes


class Peer:
    """A client as raw as a test needs it: it speaks the protocol, but sends what it is
    told to.
    """

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.connection = ClientConnection()

    async def hello(self, token: str = "") -> HelloReply:
        reply = await self.ask(Hello(name="peer", token=token))
        assert isinstance(reply, HelloReply)
        return reply

    async def ask(self, request: Request, payload: bytes = b"", *, deadline_us: int = 0) -> Reply:
        """Send a request with its payload; return the reply or raise what the server
        answered.
        """
        exchange = self.connection.request(
            request, [[memoryview(payload)]] if payload else (), payload_bytes=len(payload), deadline_us=deadline_us
        )
        return await drive(exchange, self.stream)

    async def reply_to_half(self, request: Request, request_id: int = HALF_REQUEST_ID) -> Reply:
        """The reply to a request that was sent by `send_head` and bytes."""
        self.connection.state = State.REPLYING
        return await drive(self.connection.reply_to(Encoded(request, request_id, b"", None)), self.stream)

    async def payload(self) -> bytes:
        """The payload of the last reply."""
        buffer = bytearray(self.connection.payload_left)
        if buffer:
            await drive(self.connection.read_payload([memoryview(buffer)]), self.stream)
        return bytes(buffer)

    async def send(self, data: bytes) -> None:
        await self.stream.send_all([memoryview(data)])

    async def send_head(self, request: Request, *, payload_bytes: int = 0, deadline_us: int = 0) -> None:
        """Send the head of a request, and leave it at that."""
        head = encode_head(request, request_id=HALF_REQUEST_ID, payload_bytes=payload_bytes, deadline_us=deadline_us)
        await self.send(head)

    async def is_closed(self) -> bool:
        """Wait for the end of the stream; False if a byte comes first."""
        return await self.stream.receive_into([memoryview(bytearray(1))]) == 0

    def close(self) -> None:
        self.stream.close()


@asynccontextmanager
async def running_server(
    config: ServerConfig | None = None, environment: Environment | None = None
) -> AsyncGenerator[RunningServer, None]:
    """Run `infinistore.serve` on real sockets until the block is left."""
    finished = trio.Event()

    async def run(task_status: trio.TaskStatus[Server]) -> None:
        await run_server(config or make_config(), environment=environment, on_listening=task_status.started)
        finished.set()

    async with trio.open_nursery() as nursery:
        server: Server = await nursery.start(run)
        async with RunningServer(server, nursery.cancel_scope, finished=finished).until_left() as running:
            yield running
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def simulated_server(
    config: ServerConfig | None = None,
    chunks: Chunks = whole,
    *,
    capacity_bytes: int = 256 * KIB,
    environment: Environment | None = None,
) -> AsyncGenerator[RunningServer, None]:
    """Run the same server in a simulated network until the block is left, or it has
    drained.
    """
    config = config or make_config()
    environment = attrs.evolve(environment or Environment(), accept=_accept)
    pool = Pool(create_allocator(config.allocator, config.minimal_allocate_bytes))
    listener = MemoryListener(chunks, capacity_bytes=capacity_bytes)
    addresses = ServerAddresses((("memory", 0),), None)
    liveness = LivenessPipe()
    resources = ExitStack()
    try:
        pool.add_arena(create_arena(0, config.prealloc_bytes))
        core = make_core(config, pool, environment)
        disks = await open_disks(config, core, environment, resources)
        descriptors = share_descriptors(config)
        movers = [ShmMover(liveness), RdmaMover(None), InlineMover()]
        server = compose_server(
            config,
            core,
            addresses,
            token="",
            environment=environment,
            movers=movers,
            descriptors=descriptors,
            disks=disks,
        )
        async with trio.open_nursery() as nursery:
            running = RunningServer(server, nursery.cancel_scope, listener)

            async def run(task_status: trio.TaskStatus[None]) -> None:
                await server.run([listener], on_listening=task_status.started)
                running.finished.set()

            await nursery.start(run)
            async with running.until_left():
                yield running
            nursery.cancel_scope.cancel()
    finally:
        resources.close()
        listener.close()
        liveness.close()
        pool.close()


async def let_linger(peer: Peer, clock: MockClock) -> None:
    """Read all that the server has to say to a client, and let the time go by that it
    gives such a client to leave.
    """
    buffer = [memoryview(bytearray(4096))]
    while await peer.stream.receive_into(buffer):
        pass
    clock.jump(LINGER_S)


async def fill_twice(store: AsyncStore, pool_bytes: int, block: bytes) -> None:
    """Write twice as many of these blocks as the pool has room for."""
    count = 2 * pool_bytes // len(block)
    for first in range(0, count, 64):
        await store.put_many({f"fill {number}": block for number in range(first, min(first + 64, count))})


async def _accept(listener: Any, *rest: Any) -> MemoryStream | SocketStream:
    return await (listener.accept_stream() if isinstance(listener, MemoryListener) else accept(listener, *rest))


async def recovered(server: RunningServer) -> None:
    """Wait until the disks know what they have."""

    def holds() -> bool:
        found = server.server.telemetry.disk()
        return found is None or all(one.state != "recovering" for one in found.disks)

    await until(holds)


async def connect_tls(address: tuple[str, int], files: "Files") -> TlsStream:
    """A client's end of TLS, which has sent nothing yet."""
    session = TlsSession(client_context(files.ca), "the server", host_name="127.0.0.1")
    return TlsStream(await connect_tcp(*address), session)


async def peer_with(server: RunningServer, token: str, transport: str = "tcp", files: "Files | None" = None) -> Peer:
    """A client that was let in with a token: over TLS if there are `files`, else in the
    clear, or by the Unix socket.
    """
    address = ("127.0.0.1", server.server.addresses.port)
    if transport == "unix":
        peer = Peer(await connect_unix(str(server.unix_path)))
    elif files is None:
        peer = Peer(await connect_tcp(*address))
    else:
        peer = Peer(await connect_tls(address, files))
    try:
        await peer.hello(token)
    except BaseException:
        peer.close()
        raise
    server.peers.append(peer)
    return peer
