"""One connection of a client: its stream, and what the client holds by it.

`Conversation` enforces the client's deadlines and the server's limits; session,
holdings and movers share it. `Holdings` has the open reservations and leases, the pins,
and the tables that the client writes in shared memory
(`infinistore/protocol/shared_tables.py`). They belong to the connection, whichever
mover made them. Nothing here ends after a timeout: a client that maps the pool may
write where it has reserved and read what it has leased until it says that it is done,
or is gone. What a lost client may still write to is in quarantine.
"""

import fcntl
import logging
import math
import socket
import termios
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import count
from operator import add, gt, itemgetter
from typing import Final, TypeVar

import attrs
import trio

from infinistore.access.identity import DEFAULT_IDENTITY, Identity
from infinistore.core.arena import Arena, create_arena
from infinistore.core.clients import Client, Hazard, Reservation
from infinistore.core.clients import Lease as CoreLease
from infinistore.core.store import StoreCore
from infinistore.disk.tiers import Tiers
from infinistore.errors import (
    BufferTooSmall,
    InfiniStoreException,
    LimitExceeded,
    OutOfMemory,
    ProtocolError,
    StoreUnavailable,
    UnknownReservation,
)
from infinistore.keys import MAX_KEY_BYTES, check_keys
from infinistore.protocol.codec import decode_notices, pack_u64
from infinistore.protocol.effects import Exchange
from infinistore.protocol.frame_reader import READ_AHEAD_BYTES
from infinistore.protocol.messages import (
    Abort,
    Commit,
    Get,
    Lease,
    Message,
    Numbers,
    PutReply,
    RdmaGet,
    Release,
    Reply,
    ReserveReply,
    Touch,
)
from infinistore.protocol.packed_offsets import pack_offsets
from infinistore.protocol.server_connection import Received, ServerConnection
from infinistore.protocol.shared_tables import READER_BYTES, CommitWord, Hazards, TouchLog
from infinistore.server.disk import settled, time_for_disks_s
from infinistore.server.maintenance import PoolGrowth
from infinistore.sizes import in_units
from infinistore.statistics import LATENCY_BOUNDS_S
from infinistore.transports.base import Stream, drive

_log = logging.getLogger("infinistore.server")
_T = TypeVar("_T")
JOINED_BYTES = 16 * 1024
"""Up to this length, a payload is copied behind its head, to save system calls."""
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
    gets: int = 0
    """Gets without a request, in shared memory."""
    got_bytes: int = 0
    """What they have read."""
    got_s: float = 0.0
    """How long those took that their client has timed."""
    got_counts: list[int] = attrs.field(factory=lambda: [0] * (len(LATENCY_BOUNDS_S) + 1))
    """A histogram of that, as in `OperationStatistics`."""

    def add(self, other: "Traffic") -> None:
        """Add the traffic of another connection."""
        self.requests += other.requests
        self.errors += other.errors
        self.received_bytes += other.received_bytes
        self.sent_bytes += other.sent_bytes
        self.gets += other.gets
        self.got_bytes += other.got_bytes
        self.got_s += other.got_s
        self.got_counts = list(map(add, self.got_counts, other.got_counts))

    def note_get(self, read_bytes: int, took_s: float) -> None:
        """Count a get without a request; 0 seconds are no time."""
        self.gets += 1
        self.got_bytes += read_bytes
        if took_s:
            self.got_s += took_s
            self.got_counts[bisect_left(LATENCY_BOUNDS_S, took_s)] += 1

    def figures(self) -> dict[str, int]:
        """Return what the statistics show of it, by their names: a get is one, with a
        request or without.
        """
        return {
            "requests": self.requests + self.gets,
            "errors": self.errors,
            "received_bytes": self.received_bytes,
            "sent_bytes": self.sent_bytes + self.got_bytes,
        }


class Conversation:
    """One connection: its stream, its protocol state, and the client in the core."""

    def __init__(
        self,
        stream: Stream,
        connection: ServerConnection,
        tiers: Tiers,
        client: Client,
        *,
        transport: str,
        limits: SessionLimits,
        growth: PoolGrowth | None,
        identity: Identity = DEFAULT_IDENTITY,
    ) -> None:
        self.transport = transport
        """What the payload travels over. A mover that takes over sets it."""
        self.stream = stream
        self.tiers = tiers
        """The store, with its disks."""
        self.core = tiers.core
        """Its memory."""
        self.client = client
        self.limits = limits
        self.traffic = Traffic()
        self.connection = connection
        self.identity = identity
        """Who is at the other end, and what it may do."""
        self.shares_memory = False
        """Whether the client got memory of the server, the pool's or its tables."""
        self.afterwards: Callable[[], object] | None = None
        """What a quick handler has left to be done while its reply is read. It is done
        when the reply has been sent, and may unpin what that has views of."""
        self._within_s = 0.0  # of the next `send_answer`, if blocks were begun
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
        """Reserve space; if the pool may grow, wait for that until the deadline."""
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

    async def lease(
        self, request: Get | Lease | RdmaGet, received: Received, *, touch: bool = True, whole: bool = False
    ) -> CoreLease:
        """Lease the keys of a request as `lease_now` does. Blocks on disk are read
        first; what is late, fails, or finds no room stays missing. If the pool has no
        room for all of them, lease the leading ones only, unless `whole`.
        """
        _check_capacities(request)
        fitting, waits = self.tiers.fetch(request.keys, time_for_disks_s(received.deadline_us))
        for wait in waits:
            await settled(wait)
        return self.lease_now(request, request.keys if whole else fitting, touch=touch)

    def lease_now(self, request: Get | Lease | RdmaGet, keys: Sequence[str], *, touch: bool) -> CoreLease:
        """Lease these keys of a request, if every block fits its capacity.

        `touch` is that of `StoreCore.lease`; a refused request counts as use in any
        case.
        """
        _check_capacities(request)
        capacities = request.capacities.tolist()
        lease = self.core.lease(self.client, keys, max_bytes=self.limits.max_payload_bytes, touch=touch)
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
        """Send the rest of a reply; by default in the time of one without payload."""
        try:
            await self.stream.send_all(views, within_s or self._reply_within_s)
        except TimeoutError:
            raise StoreUnavailable(_NOT_TAKEN) from None
        self.connection.end_reply()

    async def send_answer(self, views: Sequence[memoryview]) -> None:
        """Send the reply of a quick handler, if it has one, and do what it has left."""
        try:
            if views:
                await self.send_reply(views, self._within_s)
        finally:
            self.tidy()

    def tidy(self) -> None:
        """Do what a quick handler has left to be done."""
        self._within_s = 0.0
        self.core.free_replaced()
        afterwards, self.afterwards = self.afterwards, None
        if afterwards is not None:
            afterwards()

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
        sent = self.begin_blocks(reply, views, received)
        within_s, self._within_s = self._within_s, 0.0
        return self.send_reply(sent, within_s)

    def begin_blocks(self, reply: Reply, views: Sequence[memoryview], received: Received) -> Sequence[memoryview]:
        """Return what is to be sent, as the answer of a quick handler, of a reply with
        blocks as its payload.
        """
        payload_bytes = sum(map(len, views))
        self.traffic.sent_bytes += payload_bytes
        begun = self.connection.begin_reply(reply, views)
        self._within_s = self.limits.transfer_s(payload_bytes, received.deadline_us)
        return [memoryview(b"".join(begun))] if 0 < payload_bytes <= JOINED_BYTES else begun


async def send_fatal_error(connection: ServerConnection, stream: Stream, error: InfiniStoreException) -> None:
    """Tell a client why its connection ends, and give it time to read that: closing a
    socket with unread bytes would reset the connection.
    """
    with trio.move_on_after(LINGER_S), suppress(StoreUnavailable):  # it may have gone
        await drive(connection.reply_fatal(error), stream)
        await linger(stream)


async def linger_if_unread(stream: Stream, sock: socket.socket | None, *, read_ahead: bool) -> None:
    """Linger if closing now would drop answers: those that the client has not
    received, where it has sent more that was not read. `read_ahead`: some was.
    """
    descriptor = -1 if sock is None else sock.fileno()
    if read_ahead or (descriptor >= 0 and any(any(fcntl.ioctl(descriptor, one, bytes(4))) for one in _UNDER_WAY)):
        await linger(stream)


async def linger(stream: Stream) -> None:
    """Send nothing more, and wait for a moment until the client has read all."""
    with trio.move_on_after(LINGER_S), suppress(StoreUnavailable):
        await stream.send_eof()
        buffer = [memoryview(bytearray(_LINGER_BYTES))]
        while await stream.receive_into(buffer):
            pass


def _check_capacities(request: Get | Lease | RdmaGet) -> None:
    if request.capacities and len(request.capacities) != len(request.keys):
        raise ProtocolError(f"{len(request.keys)} keys and {len(request.capacities)} capacities")


def too_small(get: Get | Lease | RdmaGet, sizes: Sequence[int]) -> BufferTooSmall:
    """Return the error for a block, of these sizes, that is longer than its buffer."""
    key, size, capacity = next(
        found for found in zip(get.keys, sizes, get.capacities, strict=False) if found[1] > found[2]
    )
    return BufferTooSmall(f"{key[:100]!r} has {in_units(size)}, its buffer {in_units(capacity)}")


_HAZARD_LIKE_BYTES = 16  # of a touch log: to read so many takes about as long as to look at a hazard


class ClientTables:
    """The hazard table, the touch log and the commit word of one client. Blocking to
    make: a fraction of a millisecond.

    OutOfMemory, OSError: there is no memory, or no descriptor, for them.
    """

    def __init__(self, create_arena: Callable[..., Arena] = create_arena) -> None:
        self.arena: Arena = create_arena(0, READER_BYTES, name="reader")
        self.hazards = Hazards(self.arena.memory)
        self._log = TouchLog(self.arena.memory)
        self.commit_word = CommitWord(self.arena.memory)
        self._hear: Callable[[Message], object] | None = None
        self._withdrawn = False

    def watch(self, core: StoreCore, client: Client, hear: Callable[[Message], object]) -> None:
        """Have the core respect the client's hazards, and tell `hear` of its use."""
        self._hear = hear
        core.accept_hazards(client, self._look, self._news)

    def listen(self) -> None:
        """Read the touch log: what the client has used since the last time.

        A malformed log is read up to the fault, and never again. Raises nothing: the
        store calls this in the middle of what it does for other clients.
        """
        if self._hear is None:
            return
        try:
            logged = self._log.take()
            if not logged:  # most of the time
                return
            for touch in decode_notices(logged, Touch):
                self._hear(touch)
        except InfiniStoreException:
            self._hear = None
        except Exception:  # noqa: BLE001  # a fault of ours, and no matter of whoever is served just now
            _log.exception("internal error")
            self._hear = None

    def _look(self) -> list[Hazard]:
        self.listen()
        return self.hazards.look()

    def _news(self) -> int:
        """About how many hazards `_look` would look at; a touch log counts as some."""
        logged_bytes = 0 if self._hear is None else self._log.waiting_bytes
        return self.hazards.news + logged_bytes // _HAZARD_LIKE_BYTES

    def committed(self, reservation: int, blocks: int) -> Sequence[int] | None:
        """Return the checksums of a batch if the client has committed it."""
        return None if self._withdrawn else self.commit_word.checksums_of(reservation, blocks)

    def share(self) -> int:
        """Return the descriptor of the tables, which they close, for the client."""
        return self.arena.share(writable=True)

    def end(self) -> None:
        """Let the client begin no more reads. Those that have begun go on."""
        self.hazards.close()

    def withdraw(self) -> None:
        """Take nothing for committed any more."""
        self._withdrawn = True

    def close(self) -> None:
        """Close the tables."""
        self.arena.close()


ROOM_ONLY: Final = "room only"
"""The outcome of a Prepare that has only taken room: its client has to commit."""
MOST_OPEN = 1024
"""How many reservations, and how many leases, one connection may have open."""
_LENGTH = itemgetter(2)


class Holdings:
    """The reservations, leases and tables of one connection, by number."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._core = conversation.core
        self._numbers = count(1)
        self._reservations: dict[int, Reservation] = {}
        self._filled_bytes: dict[int, int] = {}  # by the number of a reservation
        self._leases: dict[int, CoreLease] = {}
        self._latest_lease = 0
        self._tables: ClientTables | None = None

    # Reservations

    def reserve_now(self, sizes: Numbers, *, spare: bool = False) -> ReserveReply | None:
        """Open a reservation, and return the reply; the number is 0 for a spare one
        that is not granted. None if there may be room later: see `reserve`.

        Raises:
            LimitExceeded: too many reservations are open on this connection.
            OutOfMemory: there is no room.
        """
        lengths = self._lengths_of_another(sizes)
        client = self._conversation.client
        try:
            reservation = self._core.reserve_spare(client, lengths) if spare else self._core.reserve(client, lengths)
        except OutOfMemory:
            if self._conversation.may_grow:
                return None
            raise
        return ReserveReply(0, pack_u64()) if reservation is None else self._open(reservation)

    async def reserve(self, sizes: Numbers, received: Received) -> ReserveReply:
        """As `reserve_now`; if the pool may grow, wait for that until the deadline."""
        lengths = self._lengths_of_another(sizes)
        return self._open(await self._conversation.reserve(lengths, received.deadline_us))

    def _lengths_of_another(self, sizes: Numbers) -> list[int]:
        if len(self._reservations) >= MOST_OPEN:
            raise LimitExceeded(f"{MOST_OPEN} reservations are open on this connection; commit them first")
        self._core.limits.check_batch(len(sizes))
        return sizes.tolist()  # everything that looks at a list takes half the time that an array takes

    def _open(self, reservation: Reservation) -> ReserveReply:
        number = next(self._numbers)
        self._reservations[number] = reservation
        return ReserveReply(number, pack_u64(pack_offsets(reservation.extents)))

    def reservation(self, number: int) -> Reservation:
        """Return an open reservation.

        Raises:
            UnknownReservation: there is none of this number.
        """
        reservation = self._reservations.get(number)
        if reservation is None:
            raise UnknownReservation(f"no reservation {number} is open on this connection")
        return reservation

    def forget_committed(self, number: int) -> None:
        """Forget a reservation that its client has committed through its commit word.

        Raises:
            ProtocolError: it is still open.
        """
        reservation = self._reservations.get(number)
        if reservation is not None:
            if reservation.state == "open":
                raise ProtocolError("a connection prepares one batch at a time: it has one commit word")
            del self._reservations[number]

    def fill(self, number: int, count: int) -> None:
        """Note that the server has written the next `count` bytes of a reservation."""
        self._filled_bytes[number] = self._filled_bytes.get(number, 0) + count

    def filled_bytes(self, number: int) -> int:
        """How many bytes of a reservation the server has written, from the first."""
        return self._filled_bytes.get(number, 0)

    def check_filled(self, number: int) -> None:
        """Check that the server has written all of a reservation: new room holds what
        others had there before.

        Raises:
            UnknownReservation: there is none of this number.
            ProtocolError: a part is missing.
        """
        missing = sum(map(_LENGTH, self.reservation(number).extents)) - self.filled_bytes(number)
        if missing:
            raise ProtocolError(f"{in_units(missing)} of this reservation have not been filled")

    # Quick handlers (`infinistore.server.movers.base`) that always answer.

    def commit(self, commit: Commit, received: Received, at_once: bool) -> Sequence[memoryview]:
        """Answer a Commit: make a written batch visible. If the keys do not fit it, it
        stays open. Of too many checksums, one too many is looked at.
        """
        self._conversation.check_lengths(commit.keys)
        reservation = self.reservation(commit.reservation)
        checksums = commit.checksums[: len(reservation.extents) + 1].tolist() if commit.checksums else None
        skipped = self._core.commit(
            reservation, commit.keys, checksums, replace=commit.replace, free=False, ttl_s=commit.ttl_us / 1e6
        )
        del self._reservations[commit.reservation]
        if self._filled_bytes:
            self._filled_bytes.pop(commit.reservation, None)
        self._conversation.traffic.received_bytes += sum(map(_LENGTH, reservation.extents))
        return self._conversation.connection.begin_reply(PutReply(pack_u64(skipped)))

    def abort(self, abort: Abort, received: Received, at_once: bool) -> Sequence[memoryview]:
        """Heed an Abort: give the room of a reservation back."""
        self.abort_reservation(abort.reservation)
        return ()

    def abort_reservation(self, number: int) -> None:
        """Give the room of a reservation back.

        Raises:
            ProtocolError: there is none of this number.
        """
        reservation = self._reservations.pop(number, None)
        if reservation is None:
            raise ProtocolError(f"no reservation {number} is open on this connection")
        self._filled_bytes.pop(number, None)
        self._core.abort(reservation)

    # Leases

    def begin_lease(self) -> None:
        """Check that one more lease may be kept; until `keep_latest`, `Release(0)`
        names none.

        Raises:
            LimitExceeded: too many leases are open on this connection.
        """
        self._latest_lease = 0
        self._check_may_keep()

    def _check_may_keep(self) -> None:
        if len(self._leases) >= MOST_OPEN:
            raise LimitExceeded(f"{MOST_OPEN} leases are open on this connection; release them first")

    def keep(self, lease: CoreLease) -> int:
        """Keep a lease until the client releases it; return the number that it has from
        now on.

        Raises:
            LimitExceeded: too many are open; this one is still the caller's.
        """
        self._check_may_keep()
        number = next(self._numbers)
        self._leases[number] = lease
        return number

    def keep_latest(self, lease: CoreLease) -> int:
        """Keep a lease as `keep` does, as the one that `Release(0)` names."""
        self._latest_lease = number = self.keep(lease)
        return number

    def lease(self, number: int) -> CoreLease:
        """Return a lease that is kept.

        Raises:
            ProtocolError: there is none of this number.
        """
        lease = self._leases.get(number)
        if lease is None:
            raise ProtocolError(f"no lease {number} is open on this connection")
        return lease

    def release(self, release: Release, received: Received, at_once: bool) -> Sequence[memoryview]:
        """Heed a Release: end a lease. Number 0 is the latest one, if it was kept."""
        number = release.lease or self._latest_lease
        if release.lease or number in self._leases:
            self._core.release(self.lease(number))
            del self._leases[number]
        return ()

    # Tables that the client writes

    @property
    def tables(self) -> ClientTables | None:
        """The tables that the client writes, if it has asked for any."""
        return self._tables

    def add_tables(self, tables: ClientTables) -> None:
        """Respect the client's hazards and touches until the connection closes."""
        self._tables = tables
        tables.watch(self._core, self._conversation.client, self.note_use)

    def note_use(self, touch: Message) -> None:
        """Count what the client has used without asking."""
        assert isinstance(touch, Touch)
        read_bytes = self._core.note_use(touch.keys, read=touch.read)
        if touch.read:
            self._conversation.traffic.note_get(read_bytes, touch.took_us / 1e6)

    def listen(self) -> None:
        """Hear of blocks that the client has used since its last request."""
        if self._tables is not None:
            self._core.commit_written()
            self._tables.listen()

    # The end of the connection

    def revoke_tables(self) -> None:
        """Let the client begin no more reads through its tables, and commit no more
        batches.

        The reads that have begun count as pinned now, and the batches that it has
        committed are visible.
        """
        if self._tables is not None:
            self._tables.end()
            self._core.scan_hazards(self._conversation.client)

    def withdraw_tables(self) -> None:
        """As `revoke_tables`, and for good: the client may no longer do what tables are
        for. What it commits through them from now on is not.
        """
        self.revoke_tables()
        if self._tables is not None:
            self._tables.withdraw()

    def quarantine(self) -> None:
        """Keep the client's room from others: the client may still touch it."""
        self._core.quarantine(self._conversation.client)

    def give_back(self) -> None:
        """End all that the client holds: it cannot touch any of it any more."""
        self._core.close_client(self._conversation.client)
        if self._tables is not None:
            self._tables.close()
            self._tables = None
