"""Shared memory: the client maps the pool, and reads and writes it there.

The client asks for places in the pool and copies; the server copies nothing. What the
client reserves and leases is kept in its connection's `Holdings`. A removal table shows
clients which blocks are gone (`infinistore/protocol/shared_tables.py`). A pipe that
nobody writes to tells idle clients that the server has ended, however it ended: the
machine gets the pool back only when they unmap it, too.
"""

import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from operator import itemgetter
from typing import Any, ClassVar, cast

import trio

from infinistore.access.identity import Role
from infinistore.core.arena import Arena, create_arena
from infinistore.core.clients import Lease as CoreLease
from infinistore.core.store import StoreCore
from infinistore.core.tenants import Tenants
from infinistore.errors import InfiniStoreException, OutOfMemory, PermissionDenied, ProtocolError
from infinistore.host import NO_THREAD
from infinistore.protocol.codec import pack_u64
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
    Prepare,
    PrepareReply,
    Release,
    Reserve,
    ReserveReply,
)
from infinistore.protocol.packed_offsets import pack_offsets
from infinistore.protocol.server_connection import Received
from infinistore.protocol.shared_tables import HAZARD_SLOTS, RemovalTable, granule_bytes_for, removal_table_bytes
from infinistore.protocol.versions import Capability
from infinistore.server.connection import ROOM_ONLY, ClientTables, Conversation, Holdings
from infinistore.server.movers.base import ConnectionMover, Mover
from infinistore.transports.base import DescriptorStream
from infinistore.transports.sockets.raw_sockets import MAX_DESCRIPTORS


class LivenessPipe:
    """The pipe, until `close`. OSError: there are no descriptors for it."""

    def __init__(self) -> None:
        self._clients_end, self._own_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._closed = False

    def share(self) -> int:
        """Return the descriptor of the clients' end, which the pipe closes."""
        return self._clients_end

    def close(self) -> None:
        """Hang up. Idempotent."""
        if not self._closed:
            self._closed = True
            os.close(self._clients_end)
            os.close(self._own_end)


class PublishedRemovals:
    """The removal table for a pool of `pool_bytes`. Blocking to make: some
    milliseconds.

    OutOfMemory: there is no memory for it.
    """

    def __init__(self, pool_bytes: int, unit_bytes: int = 1, create_arena: Callable[..., Arena] = create_arena) -> None:
        self.granule_bytes = granule_bytes_for(pool_bytes, unit_bytes)
        self.arena = create_arena(0, removal_table_bytes(pool_bytes, unit_bytes), name="removals")
        self.table = RemovalTable(self.arena.memory, self.granule_bytes)
        self.table.note(())  # counts begin at 1: replies say 0 where there is no table

    @property
    def count(self) -> int:
        """How many removals there have been."""
        return self.table.count

    def watch(self, core: StoreCore | Tenants) -> None:
        """Note what is removed from a store, or from those of tenants, from now on."""
        core.expect_hazards()
        core.on_removal = lambda entries: self.table.note(pack_offsets(entries))

    def share(self) -> int:
        """Return the descriptor of the table, which the table closes, for clients."""
        return self.arena.share(writable=False)

    def close(self) -> None:
        """Close it. Clients that have it mapped keep what it says."""
        self.arena.close()


_NOWHERE = (0, 0, 0, 0)
_LENGTH = itemgetter(2)
_AWAKE_BYTES = 8 * 1024 * 1024 - 1  # what is longer is copied by several threads, which take the cores
_COPIED_BYTES_PER_S = 4e9  # with checksums, a little more than half of what memory does


class ShmMover(Mover):
    """Available on Unix sockets, by which a client gets the descriptors that it maps.

    `mapped` says whether clients map the pool at all, `writable` whether they may write
    to the arenas that they map; what they cannot, they send. With
    `removals`, clients read blocks that they know without asking. The mover closes
    `removals` and `liveness`.
    """

    name: ClassVar = "shm"
    requests: ClassVar[tuple[type[Message], ...]] = (
        *(MapArenas, MapTables, Reserve, Prepare, Commit, Abort, Lease, Release),
    )
    refusal: ClassVar[type[InfiniStoreException]] = ProtocolError

    def __init__(
        self,
        liveness: LivenessPipe,
        *,
        writable: bool = True,
        mapped: bool = True,
        removals: PublishedRemovals | None = None,
        create_arena: Callable[..., Arena] = create_arena,
        run_in_thread: Callable[..., Awaitable[Any]] = trio.to_thread.run_sync,
    ) -> None:
        self.writable = writable
        self.mapped = mapped
        self.removals = removals
        self.liveness = liveness
        self.create_arena = create_arena
        self.run_in_thread = run_in_thread
        self.descriptors_per_client = 0 if removals is None else 1

    def unavailable(self, conversation: Conversation) -> str:
        """A stream that passes no descriptors cannot hand out the pool."""
        return "" if conversation.stream.passes_descriptors else "shared memory needs the server's Unix socket"

    def open(self, conversation: Conversation, holdings: Holdings) -> ConnectionMover:
        """Answer the requests of a client that maps the pool, or may map it."""
        return _ShmConnection(self, conversation, holdings)

    def close(self) -> None:
        """Close the table, and hang up on clients that wait for the server's end."""
        self.liveness.close()
        if self.removals is not None:
            self.removals.close()


class _ShmConnection(ConnectionMover):
    client_touches_pool: ClassVar = True

    def __init__(self, mover: ShmMover, conversation: Conversation, holdings: Holdings) -> None:
        self._mover = mover
        self._conversation = conversation
        self._core = conversation.core
        self._holdings = holdings
        self._prepared = 0
        self.handlers = {
            MapArenas: self._map_arenas,
            MapTables: self._map_tables,
            Reserve: self._reserve,
            Prepare: self._prepare,
            Lease: self._lease,
        }
        self.quick = {
            Reserve: self._reserve_now,
            Prepare: self._prepare_now,
            Commit: holdings.commit,
            Abort: holdings.abort,
            Lease: self._lease_now,
            Release: holdings.release,
        }

    def _reserve_now(self, reserve: Reserve, received: Received, at_once: bool) -> Sequence[memoryview] | None:
        self._check_may_write(reserve)
        room = self._holdings.reserve_now(reserve.sizes, spare=reserve.spare)
        return None if room is None else self._reserved(reserve, room)

    async def _reserve(self, reserve: Reserve, received: Received) -> None:
        room = await self._holdings.reserve(reserve.sizes, received)
        await self._conversation.send_answer(self._reserved(reserve, room))

    def _reserved(self, reserve: Reserve, room: ReserveReply) -> Sequence[memoryview]:
        begun = self._conversation.connection.begin_reply(room)
        if room.reservation:
            self._conversation.afterwards = partial(self._while_copying, reserve, room.reservation)
        return begun

    def _while_copying(self, reserve: Reserve, number: int) -> None:
        self._holdings.reservation(number).entries()  # for the commit
        if self._holdings.tables is None:  # else it commits without a message
            self._await_copying(sum(reserve.sizes))

    def _prepare_now(self, prepare: Prepare, received: Received, at_once: bool) -> Sequence[memoryview] | None:
        """Name the blocks of a batch that the client commits by its commit word."""
        self._check_may_write(prepare)
        holdings = self._holdings
        tables = holdings.tables
        if tables is None:
            raise ProtocolError("Prepare needs the tables that MapTables gives")
        if len(prepare.keys) > HAZARD_SLOTS:
            raise ProtocolError(f"a Prepare of {len(prepare.keys)} keys, and there is room for {HAZARD_SLOTS}")
        self._conversation.check_lengths(prepare.keys)
        self._core.commit_written()
        holdings.forget_committed(self._prepared)
        self._prepared = 0
        if prepare.sizes and prepare.reservation:
            raise ProtocolError(f"a Prepare of reservation {prepare.reservation} asks for room, too")
        if self._core.is_being_written(prepare.keys):
            return None  # it is not accepted, which is another outcome
        room = holdings.reserve_now(prepare.sizes) if prepare.sizes else self._room_of(prepare)
        return None if room is None else self._named(prepare, room)[0]

    async def _prepare(self, prepare: Prepare, received: Received) -> str | None:
        room = await self._holdings.reserve(prepare.sizes, received) if prepare.sizes else self._room_of(prepare)
        begun, accepted = self._named(prepare, room)
        await self._conversation.send_answer(begun)
        return None if accepted else ROOM_ONLY

    @staticmethod
    def _room_of(prepare: Prepare) -> ReserveReply:
        return ReserveReply(prepare.reservation, pack_u64())

    def _named(self, prepare: Prepare, room: ReserveReply) -> tuple[Sequence[memoryview], bool]:
        """Return the reply, and whether what is written there has names."""
        holdings = self._holdings
        tables = holdings.tables
        assert tables is not None
        number = room.reservation
        reservation = holdings.reservation(number)
        checksums = len(prepare.keys) if prepare.checksums else 0
        written = partial(tables.committed, number, checksums)
        try:
            accepted = self._core.prepare(reservation, prepare.keys, written)
        except Exception:
            if prepare.sizes:  # of which the client learns nothing
                holdings.abort_reservation(number)
            raise
        if accepted:
            self._prepared = number
            self._conversation.traffic.received_bytes += sum(map(_LENGTH, reservation.extents))
        removals = self._removals if accepted else 0
        begun = self._conversation.connection.begin_reply(PrepareReply(accepted, number, room.places, removals))
        if not prepare.checksums:
            self._conversation.afterwards = reservation.entries  # for the commit, while the client copies
        return begun, accepted

    def _check_may_write(self, request: Message) -> None:
        """Refuse room to a client that could not write to it: committed unwritten, room
        shows what others had there before.

        Raises:
            PermissionDenied: clients may not write to this pool.
        """
        if not (self._mover.mapped and self._mover.writable):
            raise PermissionDenied(
                f"{type(request).__name__}: clients may not write to the server's memory here; send the blocks with Put"
            )

    @property
    def _removals(self) -> int:
        removals = self._mover.removals
        return 0 if removals is None else removals.count

    def _lease_now(self, request: Lease, received: Received, at_once: bool) -> Sequence[memoryview] | None:
        self._holdings.begin_lease()
        conversation = self._conversation
        if conversation.tiers.waits_for_disk(request.keys):
            return None
        return self._leased(request, received, conversation.lease_now(request, request.keys, touch=False))

    async def _lease(self, request: Lease, received: Received) -> None:
        lease = await self._conversation.lease(request, received, touch=False)
        await self._conversation.send_answer(self._leased(request, received, lease))

    def _leased(self, request: Lease, received: Received, lease: CoreLease) -> Sequence[memoryview]:
        """Keep a lease for the client, or send the blocks if they are few bytes."""
        conversation = self._conversation
        lengths = lease.lengths
        total = sum(lengths)
        sizes = pack_u64(lengths if all(lengths) else [length or MISSING for length in lengths])
        entries = lease.pinned
        if len(entries) < len(lengths):
            entries = [entry or _NOWHERE for entry in lease.entries]
        # Where blocks are concerns nobody who cannot look there.
        places = pack_u64(pack_offsets(entries) if self._mover.mapped else [0] * len(entries))
        removals = self._removals
        if self._core.is_being_written(request.keys) or self._core.retention.end_any(request.keys):
            removals = 0  # the client must ask again
        is_kept = total > request.inline_bytes
        number = self._holdings.keep_latest(lease) if is_kept else 0
        reply = LeaseReply(number, sizes, pack_u64(lease.checksums), places, removals)
        if is_kept:
            begun: Sequence[memoryview] = conversation.connection.begin_reply(reply)
            conversation.traffic.sent_bytes += total
        else:
            begun = conversation.begin_blocks(reply, lease.merged_views, received)

        def afterwards() -> None:
            self._core.touch(request.keys[: len(lengths)])
            if not is_kept:
                self._core.release(lease)
            elif request.inline_bytes or request.capacities:  # else it is to be looked at in place
                self._await_copying(total)

        conversation.afterwards = afterwards
        return begun

    def _await_copying(self, count: int) -> None:
        """Stay awake while the client copies so many bytes: being woken up would take a
        good part of that time.

        A copy by several threads is not waited for like that: they need the cores more.
        """
        stream = cast(DescriptorStream, self._conversation.stream)
        stream.stay_awake(count / _COPIED_BYTES_PER_S if count <= _AWAKE_BYTES else 0)

    async def _map_arenas(self, message: MapArenas, received: Received) -> None:
        conversation, mover = self._conversation, self._mover
        roles = conversation.identity.roles
        writable = mover.writable and Role.WRITE in roles
        # Who may not read maps nothing, and sends its puts.
        arenas = self._core.pool.arenas[message.first : message.first + MAX_DESCRIPTORS - 1]
        if Role.READ not in roles or not mover.mapped:
            arenas, writable = [], False
        conversation.shares_memory |= bool(arenas)
        with ExitStack() as opened:
            descriptors = [arena.share(writable=mover.writable) for arena in arenas]
            if mover.writable and not writable:  # a seal would keep others from writing, too
                descriptors = [_open_for_reading(descriptor, opened) for descriptor in descriptors]
            if Capability.LIVENESS_PIPE in conversation.connection.peer.capabilities:
                descriptors.append(mover.liveness.share())
            reply = MapArenasReply(pack_u64(arena.length for arena in arenas), writable)
            await conversation.send(
                conversation.connection.reply(reply, descriptors=descriptors), conversation.limits.grace_s
            )

    async def _map_tables(self, message: MapTables, received: Received) -> None:
        conversation, removals = self._conversation, self._mover.removals
        if Role.READ not in conversation.identity.roles:
            removals = None
        if removals is not None and self._holdings.tables is None:
            with suppress(OutOfMemory, OSError, *NO_THREAD):  # no memory, descriptors or thread: clients can do without
                make = partial(ClientTables, self._mover.create_arena)
                self._holdings.add_tables(await self._mover.run_in_thread(make))
        tables = self._holdings.tables
        if removals is None or tables is None:
            await conversation.reply(MapTablesReply(0))
            return
        conversation.shares_memory = True
        unit_bytes = self._core.pool.footprint(1)
        reply = MapTablesReply(removals.granule_bytes, self._core.max_pinned_bytes, unit_bytes)
        descriptors = [removals.share(), tables.share()]
        await conversation.send(
            conversation.connection.reply(reply, descriptors=descriptors), conversation.limits.grace_s
        )


def _open_for_reading(descriptor: int, opened: ExitStack) -> int:
    """Return a descriptor of the same memory that can only be mapped for reading."""
    try:
        found = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise OutOfMemory(f"the memory cannot be shared for reading: {error.strerror}") from None
    opened.callback(os.close, found)
    return found
