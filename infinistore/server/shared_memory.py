"""The requests of a client that reads and writes the pool by itself, in mapped memory.

What it has open, reservations and leases, is kept here, named by numbers that mean something on this connection
only. Nothing here ends by itself: a client that maps the pool may write where it has reserved and read what it has
leased until it says that it is done, or is gone.
"""

from contextlib import suppress
from functools import partial
from itertools import count
from operator import itemgetter
from typing import TypeAlias, cast

import trio

from infinistore.core.clients import Lease as CoreLease
from infinistore.core.clients import Reservation
from infinistore.errors import LimitExceeded, OutOfMemory, ProtocolError, UnknownReservation
from infinistore.protocol.codec import numbers
from infinistore.protocol.connection import Received
from infinistore.protocol.messages import (
    MISSING,
    Abort,
    Commit,
    Lease,
    LeaseReply,
    MapArenas,
    MapArenasReply,
    MapTables,
    MapTablesReply,
    Message,
    Numbers,
    Prepare,
    PrepareReply,
    PutReply,
    Release,
    Reserve,
    ReserveReply,
    Touch,
)
from infinistore.protocol.places import places_of
from infinistore.protocol.shared_tables import HAZARD_SLOTS
from infinistore.server.conversation import Conversation
from infinistore.server.read_tables import OwnReads, ReadTables
from infinistore.transports.base import DescriptorStream
from infinistore.transports.sockets import MAX_DESCRIPTORS

__all__ = ["MOST_OPEN", "SharedMemory", "SharedMemoryRequest"]

SharedMemoryRequest: TypeAlias = MapArenas | MapTables | Reserve | Prepare | Commit | Abort | Lease | Release
_NOWHERE = (0, 0, 0, 0)
_LENGTH = itemgetter(2)
_AWAKE_BYTES = 8 * 1024 * 1024 - 1  # what is longer is copied by several threads, which take the cores
_COPIED_BYTES_PER_S = 4e9  # with checksums, a little more than half of what memory does
MOST_OPEN = 1024
"""How many reservations, and how many leases, one connection may have open: an empty one takes no room in the pool."""


class SharedMemory:
    """Answers one connection's requests for shared memory.

    `writable`: whether clients may write to the arenas that they map. `tables`: those that let them read blocks that
    they know without asking, where there are any.
    """

    def __init__(self, conversation: Conversation, *, writable: bool, tables: ReadTables | None) -> None:
        self._conversation = conversation
        self._core = conversation.core
        self._writable = writable
        self._tables = tables
        self._own_reads: OwnReads | None = None
        self._ids = count(1)
        self._reservations: dict[int, Reservation] = {}
        self._leases: dict[int, CoreLease] = {}
        self._latest_lease = 0
        self._prepared = 0

    async def answer(self, message: SharedMemoryRequest, received: Received) -> None:
        """Do what a request asks for, and reply."""
        if isinstance(message, Reserve):
            await self._reserve(message, received)
        elif isinstance(message, Prepare):
            await self._prepare(message, received)
        elif isinstance(message, Commit):
            await self._commit(message)
        elif isinstance(message, Abort):
            self._abort(message)
        elif isinstance(message, Lease):
            await self._lease(message, received)
        elif isinstance(message, Release):
            self._release(message)
        elif isinstance(message, MapTables):
            await self._map_tables()
        else:
            await self._map_arenas(message)

    def hear(self, touch: Message) -> None:
        """Count what the client has used without asking."""
        assert isinstance(touch, Touch)
        self._conversation.traffic.sent_bytes += self._core.note_use(touch.keys, read=touch.read)

    def listen(self) -> None:
        """Hear what it used since its last request: perhaps blocks that nobody else has seen yet."""
        if self._own_reads is not None:
            self._core.settle()
            self._own_reads.listen()

    def end_own_reads(self) -> None:
        """Let the client begin no more reads of blocks that it knows, and commit no more batches by itself.

        The reads that have begun count as pinned now, and the batches that it has committed are visible.
        """
        if self._own_reads is not None:
            self._own_reads.end()
            self._core.catch_up()

    def close(self) -> None:
        """Close what the client maps besides the arenas."""
        if self._own_reads is not None:
            self._own_reads.close()
            self._own_reads = None

    def keep(self, lease: CoreLease) -> int:
        """Keep a lease until the client releases it; return the number that it has from now on.

        Raises:
            LimitExceeded: too many are open; this one is still the caller's.
        """
        self._check_leases()
        number = next(self._ids)
        self._leases[number] = lease
        return number

    def open_lease(self, number: int) -> CoreLease:
        """Return a lease that is kept.

        Raises:
            ProtocolError: there is none of this number.
        """
        lease = self._leases.get(number)
        if lease is None:
            raise ProtocolError(f"no lease {number} is open on this connection")
        return lease

    def open_reservation(self, number: int) -> Reservation:
        """Return a reservation that is open.

        Raises:
            UnknownReservation: there is none of this number.
        """
        reservation = self._reservations.get(number)
        if reservation is None:
            raise UnknownReservation(f"no reservation {number} is open on this connection")
        return reservation

    def _check_leases(self) -> None:
        if len(self._leases) >= MOST_OPEN:
            raise LimitExceeded(f"{MOST_OPEN} leases are open on this connection; release them first")

    async def _reserve(self, reserve: Reserve, received: Received) -> None:
        room = await self._take_room(reserve.sizes, received, spare=reserve.spare)
        await self._conversation.reply(room)
        if room.reservation:
            self._reservations[room.reservation].entries()  # for the commit, while the client copies
            if self._own_reads is None:  # else it commits by itself
                self._await_copying(sum(reserve.sizes))

    async def _take_room(self, sizes: Numbers, received: Received, *, spare: bool = False) -> ReserveReply:
        """Open a reservation; its number is 0 for a spare one that is not granted."""
        if len(self._reservations) >= MOST_OPEN:
            raise LimitExceeded(f"{MOST_OPEN} reservations are open on this connection; commit them first")
        lengths = sizes.tolist()  # everything that looks at a list takes half the time that an array takes
        reservation = (
            self._core.reserve_spare(self._conversation.client, lengths)
            if spare
            else await self._conversation.reserve(lengths, received.deadline_us)
        )
        if reservation is None:
            return ReserveReply(0, numbers())
        number = next(self._ids)
        self._reservations[number] = reservation
        return ReserveReply(number, numbers(places_of(reservation.extents)))

    async def _prepare(self, prepare: Prepare, received: Received) -> None:
        """Name the blocks of a batch that the client is writing, and will make visible by itself."""
        if self._own_reads is None:
            raise ProtocolError("Prepare needs the tables that MapTables gives")
        if len(prepare.keys) > HAZARD_SLOTS:
            raise ProtocolError(f"a Prepare of {len(prepare.keys)} keys, and there is room for {HAZARD_SLOTS}")
        self._conversation.check_lengths(prepare.keys)
        self._core.settle()
        before = self._reservations.get(self._prepared)
        if before is not None:
            if before.state == "open":
                raise ProtocolError("a connection prepares one batch at a time: it has one commit word")
            del self._reservations[self._prepared]
            self._prepared = 0
        room = ReserveReply(prepare.reservation, numbers())
        if prepare.sizes:
            if prepare.reservation:
                raise ProtocolError(f"a Prepare of reservation {prepare.reservation} asks for room, too")
            room = await self._take_room(prepare.sizes, received)
        number = room.reservation
        reservation = self.open_reservation(number)
        checksums = len(prepare.keys) if prepare.checksums else 0
        written = partial(self._own_reads.commit_word.checksums_of, number, checksums)
        try:
            accepted = self._core.prepare(reservation, prepare.keys, written)
        except Exception:
            if prepare.sizes:  # of which the client learns nothing
                self._abort(Abort(number))
            raise
        if accepted:
            self._prepared = number
            self._conversation.traffic.received_bytes += sum(map(_LENGTH, reservation.extents))
        await self._conversation.reply(PrepareReply(accepted, number, room.places, self._removals if accepted else 0))
        if not prepare.checksums:
            reservation.entries()  # for the commit, while the client copies

    @property
    def _removals(self) -> int:
        return 0 if self._tables is None else self._tables.removals

    async def _commit(self, commit: Commit) -> None:
        """Make a batch visible that the client has written. If the keys do not fit it, it stays open."""
        self._conversation.check_lengths(commit.keys)
        reservation = self.open_reservation(commit.reservation)
        checksums = commit.checksums.tolist() if commit.checksums else None
        skipped = self._core.commit(reservation, commit.keys, checksums, replace=commit.replace, free=False)
        del self._reservations[commit.reservation]
        self._conversation.traffic.received_bytes += sum(map(_LENGTH, reservation.extents))
        try:
            await self._conversation.reply(PutReply(numbers(skipped)))
        finally:
            self._core.free_replaced(reservation)  # while the client reads the answer

    def _abort(self, abort: Abort) -> None:
        reservation = self._reservations.pop(abort.reservation, None)
        if reservation is None:
            raise ProtocolError(f"no reservation {abort.reservation} is open on this connection")
        self._core.abort(reservation)

    async def _lease(self, request: Lease, received: Received) -> None:
        """Keep a lease for the client to read; or send the blocks, if they are few bytes."""
        self._latest_lease = 0
        self._check_leases()
        conversation = self._conversation
        lease = conversation.lease(request, touch=False)
        lengths = lease.lengths
        total = sum(lengths)
        sizes = numbers(lengths if all(lengths) else [length or MISSING for length in lengths])
        entries = lease.pinned
        if len(entries) < len(lengths):
            entries = [entry or _NOWHERE for entry in lease.entries]
        places = numbers(places_of(entries))
        removals = 0 if self._core.is_being_written(request.keys) else self._removals
        if total > request.inline_bytes:
            number = self._latest_lease = self.keep(lease)
            conversation.traffic.sent_bytes += total
            try:
                await conversation.reply(LeaseReply(number, sizes, numbers(lease.checksums), places, removals))
            finally:
                self._core.touch(request.keys[: len(lengths)])  # while the client reads the answer
            if request.inline_bytes or request.capacities:  # else it is to be looked at in place
                self._await_copying(total)
            return
        try:
            reply = LeaseReply(0, sizes, numbers(lease.checksums), places, removals)
            await conversation.send_blocks(reply, lease.merged_views, received)
        finally:
            self._core.touch(request.keys[: len(lengths)])
            self._core.release(lease)

    def _release(self, release: Release) -> None:
        number = release.lease or self._latest_lease
        if release.lease or number in self._leases:
            self._core.release(self.open_lease(number))
            del self._leases[number]

    def _await_copying(self, count: int) -> None:
        """Stay awake while the client copies so many bytes: being woken up would take a good part of that time.

        Not for so many that several threads copy them: those need the cores more.
        """
        if self._conversation.stream.passes_descriptors:
            stream = cast(DescriptorStream, self._conversation.stream)
            stream.stay_awake(count / _COPIED_BYTES_PER_S if count <= _AWAKE_BYTES else 0)

    async def _map_arenas(self, message: MapArenas) -> None:
        conversation = self._conversation
        arenas = self._core.pool.arenas[message.first : message.first + MAX_DESCRIPTORS]
        descriptors = [arena.share(writable=self._writable) for arena in arenas]
        reply = MapArenasReply(numbers(arena.length for arena in arenas), self._writable)
        await conversation.send(
            conversation.connection.reply(reply, descriptors=descriptors), conversation.limits.grace_s
        )

    async def _map_tables(self) -> None:
        conversation = self._conversation
        if self._tables is not None and self._own_reads is None:
            with suppress(OutOfMemory, OSError):  # no memory, or no descriptors: clients can do without
                self._own_reads = await trio.to_thread.run_sync(OwnReads)
                self._own_reads.watch(self._core, conversation.client, self.hear)
        if self._tables is None or self._own_reads is None:
            await conversation.reply(MapTablesReply(0))
            return
        unit_bytes = self._core.pool.footprint(1)
        reply = MapTablesReply(self._tables.granule_bytes, self._core.max_pinned_bytes, unit_bytes)
        descriptors = [self._tables.share(), self._own_reads.share()]
        await conversation.send(
            conversation.connection.reply(reply, descriptors=descriptors), conversation.limits.grace_s
        )
