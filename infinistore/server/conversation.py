"""What a session says and hears, and the room and pins that its client asks for.

The parts of a session that answer requests (`session.py` for payload that travels inline, `shared_memory.py` for
clients that move their bytes themselves) share one of these. It keeps to the client's deadlines and to the server's
limits; which request is answered how is left to them.
"""

import math
from collections.abc import Sequence
from operator import gt
from typing import TypeVar

import attrs
import trio

from infinistore.core.clients import Client, Reservation
from infinistore.core.clients import Lease as CoreLease
from infinistore.core.store import StoreCore
from infinistore.errors import BufferTooSmall, OutOfMemory, ProtocolError, StoreUnavailable
from infinistore.keys import MAX_KEY_BYTES, check_keys
from infinistore.protocol.connection import Received, ServerConnection
from infinistore.protocol.effects import Exchange
from infinistore.protocol.messages import Get, Lease, RdmaGet, Reply
from infinistore.server.growth import PoolGrowth
from infinistore.transports.base import Stream, drive

__all__ = ["Conversation", "SessionLimits", "Traffic"]

_T = TypeVar("_T")
_JOINED_BYTES = 16 * 1024
"""The longest payload that is copied to lie behind its head: sending two pieces takes several times the calls."""
_NOT_TAKEN = "the client did not take its reply in time"


@attrs.frozen
class SessionLimits:
    """What one connection may ask for, and how slow it may be.

    A transfer may take `grace_s` and then as long as its bytes take at `least_bytes_per_s`.
    """

    max_body_bytes: int
    max_payload_bytes: int
    grace_s: float = 10.0
    least_bytes_per_s: float = 1024 * 1024

    def transfer_s(self, count: int, deadline_us: int) -> float:
        """How long a transfer of `count` bytes may take, for a caller with `deadline_us` left (0: no deadline)."""
        longest = self.grace_s + count / self.least_bytes_per_s
        return min(longest, deadline_us / 1e6) if deadline_us else longest


@attrs.define
class Traffic:
    """What went over a connection, or over several. Bytes are payload only."""

    requests: int = 0
    errors: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0

    def add(self, other: "Traffic") -> None:
        """Count what went over another one, too."""
        self.requests += other.requests
        self.errors += other.errors
        self.received_bytes += other.received_bytes
        self.sent_bytes += other.sent_bytes


class Conversation:
    """One connection to a client: its stream, where the protocol stands on it, and the client as the core knows it."""

    def __init__(
        self,
        stream: Stream,
        core: StoreCore,
        client: Client,
        limits: SessionLimits,
        growth: PoolGrowth | None,
    ) -> None:
        self.stream = stream
        self.core = core
        self.client = client
        self.limits = limits
        self.traffic = Traffic()
        self.connection = ServerConnection(
            max_body_bytes=limits.max_body_bytes, max_payload_bytes=limits.max_payload_bytes
        )
        self._growth = growth
        self._reply_within_s = limits.transfer_s(limits.max_body_bytes, 0)

    def check_lengths(self, keys: Sequence[str]) -> None:
        """Raise `ValueError` if a key is longer than this server stores; the protocol's own limit has been checked."""
        limit = self.core.limits.max_key_bytes
        if limit < MAX_KEY_BYTES:
            check_keys(keys, limit)

    async def reserve(self, sizes: Sequence[int], deadline_us: int) -> Reservation:
        """Take room; where there is none and the pool may grow, wait for that, but not beyond the caller's deadline."""
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

    def lease(self, request: Get | Lease | RdmaGet, *, touch: bool = True) -> CoreLease:
        """Pin what a request asks for, if there is room for all of it at the client's. `touch` is the core's; what is
        refused is touched in any case."""
        if request.capacities and len(request.capacities) != len(request.keys):
            raise ProtocolError(f"{len(request.keys)} keys and {len(request.capacities)} capacities")
        lease = self.core.lease(self.client, request.keys, max_bytes=self.limits.max_payload_bytes, touch=touch)
        capacities = request.capacities.tolist()
        if capacities and lease.lengths != capacities and any(map(gt, lease.lengths, capacities)):
            self.core.release(lease)
            if not touch:
                self.core.touch(request.keys[: len(lease.lengths)])
            raise _too_small(request, lease.lengths)
        return lease

    async def reply(self, reply: Reply) -> None:
        """Send a reply without payload. A client that reads none of its replies must not keep the session for ever."""
        await self._send_reply(reply, (), self._reply_within_s)

    async def _send_reply(self, reply: Reply, payload: Sequence[memoryview], within_s: float) -> None:
        views = self.connection.begin_reply(reply, payload)
        if payload and sum(map(len, payload)) <= _JOINED_BYTES:
            views = [memoryview(b"".join(views))]
        try:
            await self.stream.send_all(views, within_s)
        except TimeoutError:
            raise StoreUnavailable(_NOT_TAKEN) from None
        self.connection.end_reply()

    async def send(self, exchange: Exchange[None], within_s: float) -> None:
        """Send within a time; `StoreUnavailable` if the client does not take it."""
        try:
            await drive(exchange, self.stream, within_s=within_s)
        except TimeoutError:
            raise StoreUnavailable(_NOT_TAKEN) from None

    async def drive(self, exchange: Exchange[_T], within_s: float = math.inf) -> _T:
        """Run an exchange over the stream; `TimeoutError` if it is not done within this time."""
        return await drive(exchange, self.stream, within_s=within_s)

    async def send_blocks(self, reply: Reply, views: Sequence[memoryview], received: Received) -> None:
        """Send a reply with blocks behind it."""
        payload_bytes = sum(map(len, views))
        self.traffic.sent_bytes += payload_bytes
        within_s = self.limits.transfer_s(payload_bytes, received.deadline_us)
        await self._send_reply(reply, views, within_s)


def _too_small(get: Get | Lease | RdmaGet, sizes: Sequence[int]) -> BufferTooSmall:
    key, size, capacity = next(
        found for found in zip(get.keys, sizes, get.capacities, strict=False) if found[1] > found[2]
    )
    return BufferTooSmall(f"{key[:100]!r} has {size} bytes, its buffer {capacity}")
