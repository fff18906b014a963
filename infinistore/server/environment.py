"""What a server takes from the machine that it runs on. A test passes another one."""

import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from random import Random, SystemRandom
from typing import TYPE_CHECKING, Any

import attrs
import trio

from infinistore.core.arena import Arena, create_arena
from infinistore.core.store import StoreCore
from infinistore.core.tenants import TenantStore
from infinistore.disk_settings import DiskPlace
from infinistore.host import MemoryLimit, available_memory
from infinistore.protocol.frame_reader import READ_AHEAD_BYTES
from infinistore.protocol.messages import Shard
from infinistore.protocol.shared_tables import tables_are_safe_here
from infinistore.server.budgets import BODY_BUDGET_BYTES, BodyBudget
from infinistore.server.listeners import Listeners, ServerAddresses, open_listeners
from infinistore.service_manager import ServiceManager
from infinistore.transports import Transport, installed_transports
from infinistore.transports.base import Stream
from infinistore.transports.sockets.spin import Spinner
from infinistore.transports.sockets.trio_streams import accept

if TYPE_CHECKING:
    from infinistore.client.extension import Environment as ClientEnvironment
    from infinistore.cluster_io.probing import ClusterEnvironment
    from infinistore.disk_io.store_disks import StoreDisks


def _open_disks(places: Sequence[DiskPlace], random: Random) -> "StoreDisks":
    from infinistore.disk_io.store_disks import open_disks  # late: it needs numpy, and most servers have no disk

    return open_disks(places, random)


async def _no_shards(addresses: ServerAddresses) -> Sequence[Shard]:
    await trio.lowlevel.checkpoint()
    return ()


@attrs.frozen
class Environment:
    """How a server reaches the network, memory, time, chance and threads."""

    open_listeners: Callable[..., Listeners] = open_listeners
    """Listens, as the function of this name does."""
    service_manager: ServiceManager = attrs.field(factory=ServiceManager)
    """Who is told when the server drains."""
    meet_shards: Callable[[ServerAddresses], Awaitable[Sequence[Shard]]] = _no_shards
    """Tells where the server listens; returns its shards, if it is one of several."""
    may_serve: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint
    """Waits until the server may serve, which is ready to, and change what it has found
    of an earlier one.
    """
    must_go_on: bool = False
    """Whether it must not start without the cache that it has found."""
    accept: Callable[[socket.socket, Spinner], Awaitable[Stream]] = accept
    create_arena: Callable[..., Arena] = create_arena
    available_memory: Callable[[], MemoryLimit] = available_memory
    tables_are_safe: Callable[[], bool] = tables_are_safe_here
    body_budget_bytes: int = BODY_BUDGET_BYTES
    """The memory for long bodies while they arrive, of all connections together."""
    make_body_budget: Callable[[int], BodyBudget] = BodyBudget
    make_store: Callable[..., StoreCore] = StoreCore
    make_tenant_store: Callable[..., TenantStore] = TenantStore
    installed_transports: Callable[[], list[Transport]] = installed_transports
    open_disks: "Callable[[Sequence[DiskPlace], Random], StoreDisks]" = _open_disks
    """Opens the disks of a configuration that names some. Blocking."""
    random: Random = attrs.field(factory=SystemRandom)
    """Draws the ids of the server and of holds, which nobody must foresee."""
    clock: Callable[[], float] = trio.current_time
    """What the store tells time by, in seconds. Deadlines of requests are Trio's."""
    stopwatch: Callable[[], float] = time.perf_counter
    """What measures how long requests take and whether spinning pays, in seconds."""
    run_in_thread: Callable[..., Awaitable[Any]] = trio.to_thread.run_sync
    """Runs a blocking function with its arguments, and returns its result."""
    read_ahead_bytes: int = READ_AHEAD_BYTES
    """How many bytes of a connection are read before they are asked for, at most."""
    cluster: "ClusterEnvironment | None" = None
    """How a node of a cluster reaches etcd and other nodes; None for plain sockets."""
    client: "ClientEnvironment | None" = None
    """What it passes blocks to other nodes with."""
