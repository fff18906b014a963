"""The stream of one connection, and the space and leases that its client asks for.

Session, holdings and movers share it. It enforces the client's deadlines and the
server's limits. They decide how to answer a request.
"""

import fcntl
import math
import socket
import termios
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from operator import gt
from typing import TYPE_CHECKING, TypeVar

import attrs
import trio

from infinistore.access.identity import DEFAULT_IDENTITY, Identity
from infinistore.core.clients import Client, Reservation
from infinistore.core.clients import Lease as CoreLease
from infinistore.core.store import StoreCore
from infinistore.errors import BufferTooSmall, InfiniStoreException, OutOfMemory, ProtocolError, StoreUnavailable
from infinistore.keys import MAX_KEY_BYTES, check_keys
from infinistore.protocol.effects import Exchange
from infinistore.protocol.frame_reader import READ_AHEAD_BYTES
from infinistore.protocol.messages import Get, Lease, RdmaGet, Reply
from infinistore.protocol.server_connection import Received, ServerConnection
from infinistore.server.maintenance import PoolGrowth
from infinistore.sizes import in_units
from infinistore.transports.base import Stream, drive

if TYPE_CHECKING:
    from infinistore.server.disk.service import DiskService

__all__ = [
    "INTERNAL_ERROR",
    "JOINED_BYTES",
    "LINGER_S",
    "Conversation",
    "SessionLimits",
    "Traffic",
    "linger",
    "part",
    "send_fatal_error",
    "too_small",
]

_T = TypeVar("_T")
JOINED_BYTES = 16 * 1024
"""Up to this length, a payload is copied behind its head before anything else happens:
sending two buffers costs more system calls.
"""
INTERNAL_ERROR = "internal error of the server; its log has more"
_UNDER_WAY = (termios.TIOCOUTQ, termios.FIONREAD)
"""Ask for the bytes of a socket that its peer has not received, and for those from it
that were not read.
"""
LINGER_S = 1.0
_LINGER_BYTES = 16 * 1024
_NOT_TAKEN = "the client did not take its reply in time"


@attrs.frozen
class SessionLimits:
    """What one connection may ask for, and how slow it may be.

    A transfer may take `grace_s` plus its bytes at `least_bytes_per_s`.
    """

    max_body_bytes: int
    max_payload_bytes: int
    max_batch_keys: int | None = None
    read_ahead_bytes: int = READ_AHEAD_BYTES
    grace_s: float = 10.0
    least_bytes_per_s: float = 1024 * 1024

    def transfer_s(self, count: int, deadline_us: int) -> float:
        """Return the time limit for a transfer of `count` bytes. `deadline_us` is what
        is left of the caller's deadline; 0 means none.
        """
        longest = self.grace_s + count / self.least_bytes_per_s
        return min(longest, deadline_us / 1e6) if deadline_us else longest


@attrs.define
class Traffic:
    """The traffic of one connection, or of several. Bytes are payload only."""

    requests: int = 0
    errors: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0

    def add(self, other: "Traffic") -> None:
        """Add the traffic of another connection."""
        self.requests += other.requests
        self.errors += other.errors
        self.received_bytes += other.received_bytes
        self.sent_bytes += other.sent_bytes


class Conversation:
    """One connection of a client: its stream, its protocol state, and the client in the
    core.
    """

    def __init__(
        self,
        stream: Stream,
        connection: ServerConnection,
        core: StoreCore,
        client: Client,
        *,
        transport: str,
        limits: SessionLimits,
        growth: PoolGrowth | None,
        disk: "DiskService | None" = None,
        identity: Identity = DEFAULT_IDENTITY,
    ) -> None:
        self.transport = transport
        """What the payload travels over, as statistics show it. A mover that takes over
        sets it.
        """
        self.stream = stream
        self.core = core
        self.client = client
        self.limits = limits
        self.traffic = Traffic()
        self.connection = connection
        self.disk = disk
        """The disks below the store, if it has any."""
        self.identity = identity
        """Who is at the other end, and what it may do."""
        self.shares_memory = False
        """Whether the client got memory of the server, the pool's or its tables."""
        self._growth = growth
        self._reply_within_s = limits.transfer_s(limits.max_body_bytes, 0)

    def check_lengths(self, keys: Sequence[str]) -> None:
        """Raise `ValueError` if a key is longer than this server stores."""
        limit = self.core.limits.max_key_bytes
        if limit < MAX_KEY_BYTES:
            check_keys(keys, limit)

    @property
    def may_grow(self) -> bool:
        """Whether there may be room later where there is none now."""
        return self._growth is not None

    async def reserve(self, sizes: Sequence[int], deadline_us: int) -> Reservation:
        """Reserve space. If there is none and the pool may grow, wait for that, at most
        until the caller's deadline.
        """
        growth = self._growth
        try:
            return self.core.reserve(self.client, sizes)
        except OutOfMemory:
            if growth is None:
                raise
            footprints = [self.core.pool.footprint(size) for size in sizes]
            with trio.move_on_after(deadline_us / 1e6 if deadline_us else self.limits.grace_s):
                while await growth.grow_for(sum(footprints), max(footprints)):
                    try:
                        return self.core.reserve(self.client, sizes)
                    except OutOfMemory:
                        continue
            raise

    async def fetch(self, request: Get | Lease | RdmaGet, received: Received) -> int | None:
        """Wait for blocks on disk, before `lease`; return how many keys to lease.

        What is late, fails, or finds no room stays missing.
        """
        if self.disk is None:
            return None
        self.core.limits.check_batch(len(request.keys))
        return await self.disk.fetch(request.keys, received.deadline_us)

    def lease(self, request: Get | Lease | RdmaGet, count: int | None = None, *, touch: bool = True) -> CoreLease:
        """Lease the keys of a request, or `count` of the leading ones, if every block
        fits its capacity. `touch` is that of `StoreCore.lease`; a refused request
        counts as use in any case.
        """
        if request.capacities and len(request.capacities) != len(request.keys):
            raise ProtocolError(f"{len(request.keys)} keys and {len(request.capacities)} capacities")
        keys = request.keys if count is None else request.keys[:count]
        lease = self.core.lease(self.client, keys, max_bytes=self.limits.max_payload_bytes, touch=touch)
        capacities = request.capacities.tolist()
        if capacities and lease.lengths != capacities and any(map(gt, lease.lengths, capacities)):
            self.core.release(lease)
            if not touch:
                self.core.touch(request.keys[: len(lease.lengths)])
            raise too_small(request, lease.lengths)
        return lease

    def reply(self, reply: Reply) -> Awaitable[None]:
        """Send a reply without payload. The time is limited, so that a client that
        reads no replies does not keep the session for ever.
        """
        return self.send_reply(self.connection.begin_reply(reply))

    async def send_reply(self, views: Sequence[memoryview], within_s: float = 0.0) -> None:
        """Send a reply that has begun, or what is left of it; without a time, as one
        without payload."""
        try:
            await self.stream.send_all(views, within_s or self._reply_within_s)
        except TimeoutError:
            raise StoreUnavailable(_NOT_TAKEN) from None
        self.connection.end_reply()

    async def send_answer(self, views: Sequence[memoryview]) -> None:
        """Send the reply of a quick handler, and give back what it has replaced."""
        try:
            await self.send_reply(views)
        finally:
            self.core.free_replaced()

    async def send(self, exchange: Exchange[None], within_s: float) -> None:
        """Send within a time.

        Raises:
            StoreUnavailable: the client does not take it.
        """
        try:
            await drive(exchange, self.stream, within_s=within_s)
        except TimeoutError:
            raise StoreUnavailable(_NOT_TAKEN) from None

    async def drive(self, exchange: Exchange[_T], within_s: float = math.inf) -> _T:
        """Run an exchange over the stream.

        Raises:
            TimeoutError: it was not done within `within_s`.
        """
        return await drive(exchange, self.stream, within_s=within_s)

    def send_blocks(self, reply: Reply, views: Sequence[memoryview], received: Received) -> Awaitable[None]:
        """Send a reply with blocks as its payload."""
        payload_bytes = sum(map(len, views))
        self.traffic.sent_bytes += payload_bytes
        sent = self.connection.begin_reply(reply, views)
        if 0 < payload_bytes <= JOINED_BYTES:
            sent = [memoryview(b"".join(sent))]
        return self.send_reply(sent, self.limits.transfer_s(payload_bytes, received.deadline_us))


async def send_fatal_error(connection: ServerConnection, stream: Stream, error: InfiniStoreException) -> None:
    """Tell a client why its connection ends, and give it time to read that: closing a
    socket with unread bytes would reset the connection.
    """
    with trio.move_on_after(LINGER_S), suppress(StoreUnavailable):  # it may have gone
        await drive(connection.reply_fatal(error), stream)
        await linger(stream)


async def part(stream: Stream, sock: socket.socket | None, *, read_ahead: bool) -> None:
    """Linger if closing at once would drop answers: those that the client has not
    received, where it has sent more that was not read. `read_ahead`: some was.
    """
    descriptor = -1 if sock is None else sock.fileno()
    if read_ahead or (descriptor >= 0 and any(any(fcntl.ioctl(descriptor, one, bytes(4))) for one in _UNDER_WAY)):
        await linger(stream)


async def linger(stream: Stream) -> None:
    """Send nothing more, and wait for a moment until the client has read what was
    sent.
    """
    with trio.move_on_after(LINGER_S), suppress(StoreUnavailable):
        await stream.send_eof()
        buffer = [memoryview(bytearray(_LINGER_BYTES))]
        while await stream.receive_into(buffer):
            pass


def too_small(get: Get | Lease | RdmaGet, sizes: Sequence[int]) -> BufferTooSmall:
    """Return the error for a block, of these sizes, that is longer than its buffer."""
    key, size, capacity = next(
        found for found in zip(get.keys, sizes, get.capacities, strict=False) if found[1] > found[2]
    )
    return BufferTooSmall(f"{key[:100]!r} has {in_units(size)}, its buffer {in_units(capacity)}")
