"""The server: one Trio nursery with the listeners, a session for each connection, growth and periodic eviction.

`serve` runs until it is cancelled or, if it handles signals, until SIGTERM or SIGINT; then it drains: it accepts
nobody, lets requests under way finish, and leaves when they have, when the drain timeout is over, or at a second
signal.
"""

import logging
import mmap
import os
import random
import secrets
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import trio

from infinistore import __version__
from infinistore.allocators import create_allocator
from infinistore.config import ServerConfig, read_token
from infinistore.core.arena import Arena, create_arena
from infinistore.core.limits import CoreLimits
from infinistore.core.memory import available_memory, free_huge_pages
from infinistore.core.pool import Pool
from infinistore.core.store import StoreCore
from infinistore.errors import ConfigError, InfiniStoreException, LimitExceeded, OutOfMemory, StoreUnavailable
from infinistore.protocol.connection import ServerConnection
from infinistore.protocol.messages import HelloReply, Tree
from infinistore.protocol.shared_tables import tables_are_safe_here
from infinistore.server import details
from infinistore.server.conversation import SessionLimits, Traffic
from infinistore.server.growth import PoolGrowth
from infinistore.server.http import serve_http
from infinistore.server.rdma import RdmaPool, open_rdma
from infinistore.server.read_tables import ReadTables
from infinistore.server.session import Service, Session
from infinistore.server.slices import evict_in_slices
from infinistore.statistics import (
    ClientStatistics,
    OperationStatistics,
    ServerDetails,
    ServerStatistics,
    statistics_to_tree,
)
from infinistore.transports.base import Stream, drive
from infinistore.transports.rdma_verbs import NoRdma
from infinistore.transports.sockets import accept, listen_tcp, listen_unix
from infinistore.transports.spin import Spinner

if TYPE_CHECKING:
    from infinistore.server.management import Management

__all__ = ["Server", "ServerAddresses", "serve"]

_log = logging.getLogger("infinistore.server")
_MAX_BODY_BYTES = 64 * 1024 * 1024
_NO_DESCRIPTORS_PAUSE_S = 0.1


@attrs.frozen
class ServerAddresses:
    """Where a server can be reached."""

    tcp: tuple[tuple[str, int], ...]
    unix_socket: Path | None
    management: tuple[tuple[str, int], ...] = ()
    """Where the management API is; empty if it is off."""

    @property
    def port(self) -> int:
        """The TCP port, the same on every address."""
        return self.tcp[0][1]


async def serve(
    config: ServerConfig | None = None,
    *,
    handle_signals: bool = False,
    task_status: trio.TaskStatus[ServerAddresses] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run a server until it is cancelled; with `handle_signals` (main thread only) also until SIGTERM or SIGINT.

    Started in a nursery by `await nursery.start(serve, config)`, it gives a `ServerAddresses` once it listens.

    Raises:
        ConfigError: an address, a port or a path that cannot be used; or no RDMA where it is required.
        OutOfMemory: the machine has no memory for the pool.
    """
    refused: InfiniStoreException | None = None
    with ExitStack() as resources:
        config = ServerConfig() if config is None else config
        token = read_token(config.token_file) if config.token_file else ""
        # Listen before taking memory: a port in use is known at once. Nobody is served until the pool is there.
        listeners, managers, addresses = _listen(config, resources)
        pool = Pool(create_allocator(config.allocator, config.minimal_allocate_bytes))
        resources.callback(pool.close)
        async with trio.open_nursery() as nursery:
            management = _start_management(config, token, managers, nursery)
            try:
                pool.add_arena(await trio.to_thread.run_sync(_make_arena, config, 0, config.prealloc_bytes))
                tables = await trio.to_thread.run_sync(_make_tables, config, addresses)
                if tables is not None:
                    resources.callback(tables.close)
                rdma = await trio.to_thread.run_sync(open_rdma, config, pool)
            except (OutOfMemory, ConfigError) as error:
                refused = error  # raised outside of the nursery, which would wrap it in a group
            else:
                if rdma is not None:
                    resources.callback(rdma.close)
                server = Server(config, pool, addresses, token, rdma=rdma, tables=tables)
                if management is not None:
                    management.server = server
                if handle_signals:
                    await nursery.start(_drain_on_signal, server, nursery.cancel_scope)
                await server.run(listeners, on_listening=lambda: task_status.started(server.addresses))
            nursery.cancel_scope.cancel()
    if refused is not None:
        raise refused


def _listen(
    config: ServerConfig, resources: ExitStack
) -> tuple[list[socket.socket], list[socket.socket], ServerAddresses]:
    """Return the listeners for data, those for management, and where they are; `resources` closes them."""
    listeners = [resources.enter_context(sock) for sock in listen_tcp(config.host, config.service_port)]
    tcp = tuple(sock.getsockname()[:2] for sock in listeners)
    unix_path = config.socket_path(tcp[0][1])
    if unix_path is not None:
        listeners.append(resources.enter_context(listen_unix(unix_path)))
        resources.callback(unix_path.unlink, missing_ok=True)
    managers: list[socket.socket] = []
    if config.manage_port is not None:
        found = listen_tcp(config.manage_host, config.manage_port, host_flag="--manage-host", port_flag="--manage-port")
        managers = [resources.enter_context(sock) for sock in found]
    return listeners, managers, ServerAddresses(tcp, unix_path, tuple(sock.getsockname()[:2] for sock in managers))


def _start_management(
    config: ServerConfig, token: str, listeners: list[socket.socket], nursery: trio.Nursery
) -> "Management | None":
    if not listeners:
        return None
    from infinistore.server.management import Management  # late: an embedding that has none does not pay for it

    management = Management(config, token)
    nursery.start_soon(serve_http, management.application(), listeners)
    return management


class Server:
    """A server that listens: its parts, for those who look into it."""

    def __init__(
        self,
        config: ServerConfig,
        pool: Pool,
        addresses: ServerAddresses,
        token: str,
        *,
        rdma: RdmaPool | None = None,
        tables: ReadTables | None = None,
    ) -> None:
        self.config = config
        self.rdma = rdma
        self.addresses = addresses
        self.core = StoreCore(
            pool,
            clock=trio.current_time,
            limits=CoreLimits(
                max_key_bytes=config.max_key_bytes,
                max_value_bytes=config.max_value_bytes,
                max_batch_keys=config.max_batch_keys,
            ),
            random=random.Random(secrets.randbits(128)),
        )
        self._started_at = trio.current_time()
        self._sessions: set[Session] = set()
        self._past = Traffic()  # of the connections that are over
        self._drain = trio.Event()
        self._spinner = Spinner(config.spin_us * 1e-6)
        self._connections_total = 0
        self._connections_refused = 0
        growth = None
        if config.auto_increase:
            growth = PoolGrowth(
                self.core,
                max_capacity_bytes=_max_pool_bytes(config, pool),
                step_bytes=config.prealloc_bytes,
                page_bytes=free_huge_pages()[1] if config.huge_pages else mmap.PAGESIZE,
                make_arena=self._make_arena,
            )
        self._service = Service(
            core=self.core,
            hello=self._hello(),
            limits=SessionLimits(
                max_body_bytes=_MAX_BODY_BYTES,
                max_payload_bytes=max(config.max_batch_bytes, config.max_value_bytes) + 8 * config.max_batch_keys,
            ),
            statistics=self._statistics_tree,
            token=token,
            growth=growth,
            shared_writes=config.shm_writes == "on",
            rdma=rdma,
            tables=tables,
        )
        if tables is not None:
            tables.watch(self.core)

    def _hello(self) -> HelloReply:
        config = self.config
        return HelloReply(
            instance=secrets.token_hex(16),
            server_version=__version__,
            max_body_bytes=_MAX_BODY_BYTES,
            max_batch_keys=config.max_batch_keys,
            max_batch_bytes=config.max_batch_bytes,
            max_value_bytes=config.max_value_bytes,
            unix_socket=str(self.addresses.unix_socket or ""),
            rdma="" if self.rdma is None else self.rdma.device.link,
        )

    def _make_arena(self, index: int, length: int) -> Arena:
        arena = _make_arena(self.config, index, length)
        if self.rdma is not None:
            try:
                self.rdma.add_arena(arena)
            except NoRdma as error:
                arena.close()
                raise OutOfMemory(str(error)) from error
        return arena

    async def run(self, listeners: Sequence[socket.socket], on_listening: Callable[[], None]) -> None:
        """Serve until `drain` is called and the last session is over. Everything else ends with it."""
        async with trio.open_nursery() as background:
            if self._service.growth is not None:
                background.start_soon(self._service.growth.run)
            if self.config.enable_periodic_evict:
                background.start_soon(self._evict_periodically)
            async with trio.open_nursery() as sessions:
                for listener in listeners:
                    sessions.start_soon(self._accept, listener, sessions)
                on_listening()
                await self._drain.wait()
                sessions.cancel_scope.deadline = trio.current_time() + self.config.drain_timeout_s
                for listener in listeners:
                    trio.lowlevel.notify_closing(listener)
                    listener.close()
                for session in self._sessions:
                    session.finish()
            background.cancel_scope.cancel()

    def drain(self) -> None:
        """Accept nobody any more, let requests under way finish within the drain timeout, and stop."""
        self._drain.set()

    @property
    def draining(self) -> bool:
        """Whether `drain` has been called."""
        return self._drain.is_set()

    def statistics(self) -> ServerStatistics:
        """What the server has done so far."""
        self.core.catch_up()
        traffic = attrs.evolve(self._past)
        for session in self._sessions:
            traffic.add(session.traffic)
        return ServerStatistics(
            instance=self._service.hello.instance,
            version=__version__,
            uptime_s=trio.current_time() - self._started_at,
            connections_open=len(self._sessions),
            connections_total=self._connections_total,
            connections_refused=self._connections_refused,
            requests=traffic.requests,
            errors=traffic.errors,
            received_bytes=traffic.received_bytes,
            sent_bytes=traffic.sent_bytes,
            spin=self._spinner.statistics(),
        )

    def operations(self) -> list[OperationStatistics]:
        """What its requests were, and how long they took."""
        return self._service.recorder.statistics()

    def clients(self) -> list[ClientStatistics]:
        """The connections that are open; of many those that moved the most bytes."""
        self.core.catch_up()
        return details.clients(self._sessions)

    async def details(self) -> ServerDetails:
        """What takes a few milliseconds to gather; others have their turn meanwhile."""
        self.core.catch_up()
        state = "draining" if self.draining else "serving"
        found = await details.gather(self.core, list(self._sessions), self._service.recorder, state)
        return attrs.evolve(
            found, max_connections=self.config.max_connections, max_pinned_bytes=self.core.max_pinned_bytes
        )

    async def _statistics_tree(self, with_details: bool) -> Tree:
        found = await self.details() if with_details else None
        return statistics_to_tree(self.statistics(), self.core.statistics(), found)

    async def _accept(self, listener: socket.socket, sessions: trio.Nursery) -> None:
        transport = "unix" if listener.family == socket.AF_UNIX else "tcp"
        while True:
            try:
                stream = await accept(listener, self._spinner)
            except trio.ClosedResourceError:
                return
            except OSError as error:
                # Out of descriptors, most likely: what is open goes on, and the next connection waits a moment.
                _log.warning("cannot accept a connection", extra={"error": error.strerror})
                await trio.sleep(_NO_DESCRIPTORS_PAUSE_S)
                continue
            self._connections_total += 1
            if len(self._sessions) < self.config.max_connections:
                session = Session(stream, self._service, f"client-{self._connections_total}", transport)
                self._sessions.add(session)
                sessions.start_soon(self._serve, session)
            else:
                self._connections_refused += 1
                sessions.start_soon(self._refuse, stream)

    async def _serve(self, session: Session) -> None:
        try:
            await session.run()
        finally:
            self._sessions.discard(session)
            self._past.add(session.traffic)

    async def _refuse(self, stream: Stream) -> None:
        error = LimitExceeded(
            f"the server has its {self.config.max_connections} connections; close some, or raise --max-connections"
        )
        with suppress(StoreUnavailable), trio.move_on_after(1):
            await drive(ServerConnection(max_body_bytes=0, max_payload_bytes=0).reply_fatal(error), stream)
        stream.close()

    async def _evict_periodically(self) -> None:
        config = self.config
        while True:
            await trio.sleep(config.evict_interval_s)
            self.core.expire_holds()
            low, high = config.evict_min_threshold, config.evict_max_threshold
            evicted = await evict_in_slices(self.core, low, high, "periodic")
            if evicted:
                _log.info("evicted periodically", extra={"blocks": evicted})


async def _drain_on_signal(server: Server, everything: trio.CancelScope, *, task_status: trio.TaskStatus[None]) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        async for number in signals:
            name = signal.Signals(number).name
            if server.draining:
                _log.info("not waiting for requests under way", extra={"signal": name})
                everything.cancel()
            _log.info("draining", extra={"signal": name, "at_most_s": server.config.drain_timeout_s})
            server.drain()


def _make_arena(config: ServerConfig, index: int, length: int) -> Arena:
    return create_arena(index, length, huge_pages=config.huge_pages, prefault_threads=os.cpu_count() or 1)


def _make_tables(config: ServerConfig, addresses: ServerAddresses) -> ReadTables | None:
    """Make what lets clients on this host read what they know without asking, if any can connect."""
    if addresses.unix_socket is None or not tables_are_safe_here():
        return None
    return ReadTables(config.max_pool_bytes or config.prealloc_bytes, config.minimal_allocate_bytes)


def _max_pool_bytes(config: ServerConfig, pool: Pool) -> int:
    if config.max_pool_bytes is not None:
        return config.max_pool_bytes
    return pool.capacity_bytes + available_memory().available_bytes
