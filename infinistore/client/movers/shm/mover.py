"""Blocks in shared memory: the client copies from and to the server's pool.

A put reserves room, copies and commits; a get leases, copies and releases. Small
batches go inline over the socket: one round trip beats two. A call that is given up in
between closes its connection, which gives room and pins back.

Where the server has the tables for it, a put does not wait at its end: the names of the
blocks go to the server before they are copied, with the request for room, and a number
in shared memory makes them visible. Blocks whose place in the pool is known are read
without asking (`known_blocks.py`).

Two puts of the same sizes make a third likely. From the second on, each put asks for
the room of the next one, whose answer is read then. That saves a round trip for each
put. A release is not delayed like that: it has no reply, nothing would say when to send
it if no request follows, and it wakes the server for the request that does follow.

`ShmSource` is the shared memory of a store: where the server's Unix socket is, and the
pool that is mapped.
"""

import errno
import os
import threading
from array import array
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from infinistore.client import requests
from infinistore.client.memory.copying import hash_blocks
from infinistore.client.memory.pins import Owed
from infinistore.client.memory.views import Leased, ReservedRoom
from infinistore.client.movers.base import GetPart, Mover, MoverSource, PutPart
from infinistore.client.movers.channel import Channel, expect, in_order, placed, present_in
from infinistore.client.movers.inline import read_payload, skipped_keys
from infinistore.client.movers.shm.known_blocks import KnownReads, PinnedBlocks, Places, is_too_long
from infinistore.client.movers.shm.mapped_pool import Machine, MappedPool
from infinistore.errors import InfiniStoreException, OutOfMemory, ProtocolError, StoreUnavailable
from infinistore.protocol import messages
from infinistore.protocol.codec import encode_head, pack_u64
from infinistore.protocol.messages import (
    NO_CHECKSUM,
    Abort,
    Commit,
    Keys,
    Lease,
    LeaseReply,
    MapArenas,
    MapArenasReply,
    MapTables,
    MapTablesReply,
    Numbers,
    Prepare,
    PrepareReply,
    PutReply,
    Release,
    Request,
    Reserve,
    ReserveReply,
    Touch,
)
from infinistore.protocol.states import State
from infinistore.protocol.versions import Capability

TIMED_READS: Final = 16
"""Of so many reads without a request, one is timed, the first of a connection too."""
MAPS_NOTHING: Final = "the server lets this client map nothing"
_NEEDED_FOR_TABLES = Capability.TABLES | Capability.COMMIT_WORD


async def learn_arenas(channel: Channel, pool: MappedPool, places: Sequence[int] = (0,)) -> None:
    """Ask until all arenas of these places are known, or the server has no more.

    A reply has a bounded number of descriptors. A place in an arena that is not there
    is a ProtocolError for whoever looks at it.
    """
    known = -1
    while known < pool.arena_count and not pool.knows(places):
        known = pool.arena_count
        await ask_arenas(channel, pool)


async def maps_something(channel: Channel, pool: MappedPool) -> bool:
    """Ask for the arenas for the first time; return whether there are any."""
    await learn_arenas(channel, pool)
    if not pool.arena_count and not pool.closed:
        channel.path = "unix", MAPS_NOTHING
        return False
    return True


async def ask_arenas(channel: Channel, pool: MappedPool) -> None:
    """Ask for the arenas that are not known yet, as many as one reply tells of."""
    first = pool.arena_count
    descriptors: list[int] = []
    try:
        request = channel.connection.request(
            MapArenas(first), deadline_us=channel.remaining_us(), descriptors=descriptors
        )
        reply = expect(MapArenasReply, await request)
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    if descriptors and Capability.LIVENESS_PIPE in channel.connection.peer.capabilities:
        pool.watch(descriptors.pop())
    pool.add(first, reply.lengths, descriptors, writable=reply.writable)


async def ask_tables(channel: Channel, known_reads: KnownReads) -> None:
    """Ask for the tables that let this process read known blocks without asking."""
    known_reads.wants_tables = False
    if _NEEDED_FOR_TABLES not in channel.connection.peer.capabilities:
        return
    descriptors: list[int] = []
    try:
        request = channel.connection.request(MapTables(), deadline_us=channel.remaining_us(), descriptors=descriptors)
        reply = expect(MapTablesReply, await request)
        if reply.granule_bytes:
            known_reads.use(reply, descriptors)
    except StoreUnavailable as error:
        if getattr(error.__cause__, "errno", 0) == errno.EMFILE:
            known_reads.do_without()
        raise
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


_Room: TypeAlias = ReserveReply | PrepareReply
"""Room that the server has taken: a number, and the place of each block."""


class ShmMover(Mover):
    """Copies blocks between memory and the mapped pool, for one connection."""

    name = "shm"

    def __init__(self, channel: Channel, pool: MappedPool, inline_bytes: int, clock: Callable[[], float]) -> None:
        self._channel = channel
        self._connection = channel.connection
        self.pool = self.mapped = pool
        self._pins = channel.pins
        self.inline_bytes = inline_bytes
        self._known_reads = pool.machine.known_reads(pool.known, channel.pins, pool.machine.map_memory)
        self._last_sizes = pack_u64()  # of the last put
        self._spare: ReserveReply | None = None  # room for a put like the last
        self._maps_nothing = False  # the server has no memory for this client to map
        self._clock = clock
        self._reads = 0  # that were tried without a request
        self._times_reads = channel.connection.peer.minor > 0  # else it does not know `took_us`
        self._took_us = 0  # by the last read that was timed, until it is reported
        self.handlers = {
            PutPart: self.put,
            GetPart: self.get,
            requests.Lease: self.lease,
            requests.Reserve: self.reserve,
            requests.Commit: self.commit,
            messages.Exists: self.exists,
            messages.MatchPrefix: self.match_prefix,
            messages.Statistics: self.find_out,
        }

    def why_not(self, request: object) -> str:
        """Say why it cannot carry a request; empty if it can."""
        if self._maps_nothing and isinstance(request, PutPart | GetPart | requests.Lease | requests.Reserve):
            return MAPS_NOTHING
        if isinstance(request, PutPart):
            if request.total_bytes <= self.inline_bytes:
                return "a small batch is quicker inline"
            if self.pool.arena_count and not self.pool.writable:
                return "clients may not write to the pool"
        return ""

    async def _read_spare(self) -> None:
        """Read the reply to the request for spare room."""
        try:
            reply = expect(ReserveReply, await self._connection.late_reply())
        except (StoreUnavailable, ProtocolError):
            raise
        except InfiniStoreException:  # there is no room; the next put asks again, and gets the error
            return
        self._spare = reply if reply.reservation else None

    async def _spare_room(self, alike: bool) -> ReserveReply | None:
        """Return the spare room if this put has the same sizes; else give it up."""
        if alike:
            spare, self._spare = self._spare, None
            return spare
        await self._give_up_spare()
        return None

    async def _give_up_spare(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            await self._connection.notify(Abort(spare.reservation))

    async def put(self, part: PutPart) -> list[str] | None:
        """Put a part; None if clients may not write to the pool."""
        channel = self._channel
        if channel.late is not None:
            await channel.read_late_reply()
        if not self.pool.arena_count:
            await self._learn_first()
        if not self.pool.writable:
            return None
        replace = part.replace
        if replace and self._known_reads.wants_tables:
            await ask_tables(self._channel, self._known_reads)
        sizes = Numbers(array("Q", part.sizes))
        alike = sizes == self._last_sizes
        self._last_sizes = sizes
        room: _Room | None = None
        if self._spare is not None:
            room = await self._spare_room(alike)
            channel.holding = room is not None
        # Puts often come in rows of equal sizes: this one requests room for the next.
        then = Reserve(sizes, spare=True) if alike and part.total_bytes in self.pool.machine.spare_bytes else None
        if replace and not part.ttl_us and self._known_reads.can_commit(len(sizes)):
            room, hashes, committed = await self._put_named(part, sizes, room, then)
            if committed:
                return []
            then = None
        else:
            if room is None:
                room = expect(ReserveReply, await channel.ask(Reserve(sizes)))
            channel.holding = True
            await self._open_room(room, len(sizes))
            hashes = await self._copy_in(part, room)
        commit = Commit(room.reservation, Keys(part.keys), hashes, replace, part.ttl_us)
        request = self._connection.encode(commit, deadline_us=channel.remaining_us(), then=then)
        if then is not None:
            channel.late = self._read_spare
        reply = expect(PutReply, await self._connection.ask(request))
        channel.holding = False
        return skipped_keys(part.keys, reply)

    async def _put_named(
        self, part: PutPart, sizes: Numbers, room: _Room | None, then: Request | None
    ) -> tuple[_Room, Numbers, bool]:
        """Put blocks whose names the server knows before they are copied.

        This also takes the room if there is none yet. Returns the room, the hashes, and
        False if a `Commit` is still needed.
        """
        if room is not None:
            await self._open_room(room, len(sizes))
        reservation, asked = (0, sizes) if room is None else (room.reservation, pack_u64())
        prepare = Prepare(reservation, Keys(part.keys), asked, self._channel.verify)
        request = self._connection.encode(prepare, deadline_us=self._channel.remaining_us(), then=then)
        if then is not None:
            self._channel.late = self._read_spare
        await self._connection.send(request)
        if room is None:
            reply: Any = await self._connection.reply_to(request)
            room = reply
            self._channel.holding = True
            await self._open_room(room, len(sizes))
            hashes = await self._copy_in(part, room)
        else:
            hashes = await self._copy_in(part, room)
            reply = await self._connection.reply_to(request)
        if not reply.accepted:
            if self._channel.late is not None:
                await self._channel.read_late_reply()
            return room, hashes, False
        self._known_reads.commit(room.reservation, hashes)
        self._channel.holding = False
        known = hashes or pack_u64(bytes(8 * len(sizes)))
        self.pool.known.note(part.keys, room.places, sizes, known, reply.removals)
        return room, hashes, True

    async def _open_room(self, room: _Room, blocks: int) -> None:
        """Get ready to write to room that the server has taken."""
        if not room.reservation or len(room.places) != blocks:
            raise ProtocolError(f"{len(room.places)} places for {blocks} blocks, by the number {room.reservation}")
        if max(room.places) >= self.pool.known_end:
            if self._channel.late is not None:
                await self._channel.read_late_reply()
            await learn_arenas(self._channel, self.pool, room.places)

    async def _copy_in(self, part: PutPart, room: _Room) -> Numbers:
        """Copy blocks into the pool; return their hashes, if they are wanted."""
        _, views, lengths, total, _, _, _ = part
        targets = self.pool.blocks(room.places.tolist(), lengths, writable=True)
        copying = self.pool.copier.copy(views, targets, lengths, total, hash_targets=self._channel.verify)
        return Numbers(array("Q", await copying))

    async def _learn_first(self) -> bool:
        """Ask for the arenas for the first time; return whether there are any."""
        self._maps_nothing = not await maps_something(self._channel, self.pool)
        return not self._maps_nothing

    async def find_out(self, request: messages.Statistics) -> None:
        """Learn which way blocks take, before the server is asked for statistics."""
        if not self.pool.arena_count and not self._maps_nothing:
            await self._learn_first()

    async def get(self, part: GetPart) -> int | None:
        """Read a part; return how many of its keys were answered for, or None if
        blocks are not to be mapped."""
        keys = part.keys
        if await self._read_known(part):
            return len(keys)
        lease = Lease(keys, part.capacities, self.inline_bytes)
        reply = expect(LeaseReply, await self._channel.ask(lease))
        self._channel.holding = bool(reply.lease)
        self._take_note(lease, reply)
        if reply.lease and not self.pool.arena_count and not await self._learn_first():
            await self._connection.notify(Release(reply.lease))
            self._channel.holding = False
            return None
        targets = part.destination(reply.sizes, part.first)
        if reply.lease:
            await self._copy_out(part, reply, targets)
        else:
            await read_payload(self._channel, part.keys, reply, targets, verify=part.verify)
        return len(reply.sizes)

    async def _copy_out(self, part: GetPart, reply: LeaseReply, targets: list[memoryview]) -> None:
        places, sizes = placed(reply)
        if not self.pool.knows(places):
            await learn_arenas(self._channel, self.pool, places)
        sources = self.pool.blocks(places, sizes, writable=False)
        # encoded here, while what that takes is in the cache
        release = encode_head(Release(reply.lease), request_id=0)
        verify = part.verify
        checksums = await self.pool.copier.copy(sources, targets, sizes, sum(sizes), hash_targets=verify)
        await self._connection.notify_encoded(release)
        self._channel.holding = False
        if verify:
            there = present_in(reply)
            await self._compare([part.keys[i] for i in there], [reply.checksums[i] for i in there], checksums)

    async def _compare(self, keys: Sequence[str], expected: Sequence[int], found: Sequence[int]) -> None:
        bad = [key for key, e, c in zip(keys, expected, found, strict=True) if e not in (NO_CHECKSUM, c)]
        if bad:
            await self._channel.report(bad, len(keys))

    async def _pin(self, keys: Keys, known: Places) -> PinnedBlocks | None:
        """Pin known blocks without a request, inside `with pins.lock` only.

        Returns None if the server has to be asked.
        """
        if self._known_reads.wants_tables:
            await ask_tables(self._channel, self._known_reads)
        if not self.pool.knows(known.places):
            await learn_arenas(self._channel, self.pool, known.places)
        return self._known_reads.pin(keys, known)

    async def _read_known(self, part: GetPart) -> bool:
        """Read a part without a request; False, without effect, if one is needed."""
        self._reads += 1
        began = self._clock() if self._reads % TIMED_READS == 1 and self._times_reads else None
        keys = part.keys
        known = self.pool.known.find(keys)
        if known is None or is_too_long(known, part.capacities, self._channel.hello.max_batch_bytes):
            return False
        with self._pins.lock:
            pinned = await self._pin(keys, known)
        if pinned is None:
            return False
        self._channel.holding = True
        sizes = pinned.sizes.tolist()
        total = sum(sizes)
        touch = encode_head(Touch(keys, took_us=self._took_us), request_id=0)  # while what that takes is in the cache
        done = False
        checksums: list[int] = []
        try:
            sources = self.pool.blocks(pinned.places.tolist(), sizes, writable=False)
            targets = part.destination(pinned.sizes, part.first)
            checksums = await self.pool.copier.copy(sources, targets, sizes, total, hash_targets=part.verify)
            done = True
        except OutOfMemory:  # where there is no room to map the pool, short blocks go over the socket
            if total > self.inline_bytes:
                raise
        with self._pins.lock:
            self._known_reads.unpin(pinned)
        if done:
            self._took_us = 0 if began is None else max(1, round((self._clock() - began) * 1e6))
            await self._note_use(touch)
        self._channel.holding = False
        if done and part.verify and pinned.checksums.tolist() != checksums:
            await self._compare(keys, pinned.checksums, checksums)
        return done

    async def _note_use(self, touch: bytes) -> None:
        """Tell the server which blocks were used.

        It knows at the latest when a client needs room, or asks what was used.
        """
        if not self._known_reads.log(touch):
            await self._connection.notify_encoded(touch)

    async def exists(self, request: messages.Exists) -> messages.Found | None:
        """Return which keys are present, if all of them are known to be."""
        if self.pool.known.are_there(request.keys):
            return messages.Found([True] * len(request.keys))
        return None

    async def match_prefix(self, request: messages.MatchPrefix) -> messages.Matched | None:
        """Count the leading keys that are present, if all of them are known to be."""
        keys = request.keys
        if request.hold_us or len(keys) > self._channel.hello.max_batch_keys or not self.pool.known.are_there(keys):
            return None
        if self._known_reads.wants_tables:
            await ask_tables(self._channel, self._known_reads)
        await self._note_use(encode_head(Touch(self._channel.key_part(keys, 0), read=False), request_id=0))
        return messages.Matched(len(keys))

    async def lease(self, request: requests.Lease) -> Leased | None:
        """Pin the batch in the server's pool and return views of it; None if it is not
        to be mapped.

        The server decides into how many parts it is cut.
        """
        if not self.pool.arena_count and not await self._learn_first():
            return None
        keys, verify = request.keys, request.verify
        with self._pins.lock:
            if self._spare is not None:
                await self._give_up_spare()  # puts will go by other connections
            owed = Owed()
            watch = self._pins.watch(owed)
            views: list[memoryview | None] = []
            checksums: list[int] = []
            is_asked = False
            try:
                while len(views) < len(keys):
                    part = self._channel.key_part(keys, len(views))
                    known = self.pool.known.find(part)
                    if known is not None and not is_too_long(known, pack_u64(), self._channel.hello.max_batch_bytes):
                        read = await self._pin(part, known)
                    else:
                        read = None
                    if read is not None:
                        owed.hazards.append(read.hazard)
                        self._count_leased(owed, read.sizes)
                        await self._note_use(encode_head(Touch(part), request_id=0))
                        views += self.pool.views(read.places.tolist(), read.sizes.tolist(), writable=False, watch=watch)
                        checksums += read.checksums
                        continue
                    lease = Lease(part, pack_u64())
                    is_asked = True
                    reply = expect(LeaseReply, await self._channel.ask(lease))
                    is_asked = False
                    if reply.lease:
                        owed.messages.append(Release(reply.lease))
                    self._take_note(lease, reply)
                    places, sizes = placed(reply)
                    self._count_leased(owed, sizes)
                    if not self.pool.knows(places):
                        await learn_arenas(self._channel, self.pool, places)
                    found = self.pool.views(places, sizes, writable=False, watch=watch)
                    views += found if len(found) == len(reply.sizes) else in_order(reply.sizes, found)
                    if verify:
                        checksums += reply.checksums
                if verify:
                    await self._check_in_place(keys, views, checksums)
            except BaseException:
                if is_asked and self._connection.state is State.REPLYING:
                    # no one will read the reply that numbers the lease
                    owed.messages.append(Release(0))
                watch.withdraw([view for view in views if view is not None])
                raise
            return Leased(views, watch)

    def _count_leased(self, owed: Owed, sizes: Sequence[int]) -> None:
        """Count a part of a lease at once: this limits what the next part may pin."""
        footprint_bytes = self._known_reads.footprint(sizes)
        owed.leased_bytes += footprint_bytes
        self._pins.leased_bytes += footprint_bytes

    def _take_note(self, lease: Lease, reply: LeaseReply) -> None:
        """Check a reply, and note the locations of the blocks."""
        self._channel.check_reply(lease, reply)
        if len(reply.places) != len(reply.sizes):
            raise ProtocolError(f"{len(reply.places)} places for {len(reply.sizes)} blocks")
        self.pool.known.note(lease.keys, reply.places, reply.sizes, reply.checksums, reply.removals)

    async def _check_in_place(
        self, keys: Sequence[str], views: Sequence[memoryview | None], checksums: Sequence[int]
    ) -> None:
        present = [(key, view, c) for key, view, c in zip(keys, views, checksums, strict=True) if view is not None]
        hashes = await hash_blocks([view for _, view, _ in present])
        there, expected = [key for key, _, _ in present], [checksum for _, _, checksum in present]
        del present
        await self._compare(there, expected, hashes)

    async def reserve(self, request: requests.Reserve) -> ReservedRoom | None:
        """Take room for a batch in the pool, for the caller to write.

        Returns None if clients may not write to the pool.
        """
        if not self.pool.arena_count:
            await self._learn_first()
        if not self.pool.writable or not request.keys:
            return None
        with self._pins.lock:
            wanted = pack_u64(request.sizes)
            reply = None
            if self._spare is not None:
                reply = await self._spare_room(wanted == self._last_sizes)
            if reply is None:
                reply = expect(ReserveReply, await self._channel.ask(Reserve(wanted)))
            owed = Owed([Abort(reply.reservation)])
            watch = self._pins.watch(owed)
            self._pins.reserved = True
            await self._open_room(reply, len(wanted))
            memory = self.pool.views(reply.places, request.sizes, writable=True, watch=watch)
            return ReservedRoom(request.keys, memory, watch, reply.reservation, owed)

    async def commit(self, request: requests.Commit) -> bool | None:
        """Hash the written blocks in place, and make them visible.

        Returns None if they lie in private memory.
        """
        room = request.room
        if room.reservation is None:
            return None
        checksums = (await hash_blocks(room.memory)) if self._channel.verify else []
        with self._pins.lock:
            commit = Commit(room.reservation, Keys(room.keys), pack_u64(checksums), ttl_us=request.ttl_us)
            expect(PutReply, await self._channel.ask(commit))
            room.owed.messages.clear()
            self._pins.reserved = False
        return True

    def close(self) -> None:
        """Let go of the tables."""
        self._known_reads.close()


class ShmSource(MoverSource):
    """Makes movers for connections to a server on this host.

    `on_end` is called, in a thread, when the server has ended and its pool is closed.
    """

    name = "shm"
    takes_unix_socket = True
    needs = Capability.SHARED_MEMORY

    def __init__(
        self,
        inline_bytes: int,
        copy_threads: int,
        known_blocks: int,
        *,
        clock: Callable[[], float],
        on_end: Callable[[], None] = lambda: None,
        machine: Machine | None = None,
    ) -> None:
        self._clock = clock
        self._inline_bytes = inline_bytes
        self._copy_threads = copy_threads
        self._known_blocks = known_blocks
        self._on_end = on_end
        self._machine = machine
        self.pool: MappedPool | None = None
        self._lock = threading.Lock()
        self._closed = False

    async def open(self, channel: Channel, stream: Any) -> ShmMover:
        """Make the mover of a connection by Unix socket."""
        return ShmMover(channel, self._pool_of(channel.hello.instance), self._inline_bytes, self._clock)

    @property
    def instance(self) -> str:
        """The run of a server whose pool is mapped; empty if none is."""
        return "" if self.pool is None else self.pool.instance

    def _pool_of(self, instance: str) -> MappedPool:
        """Return the mapped pool of this run of a server; give up that of another."""
        with self._lock:
            if self._closed:
                raise StoreUnavailable("this store is closed; open another one")
            if self.pool is None or self.pool.closed or self.pool.instance != instance:
                if self.pool is not None:
                    self.pool.close()
                self.pool = MappedPool(
                    instance, self._copy_threads, self._known_blocks, on_end=self._on_end, machine=self._machine
                )
            return self.pool

    def mapped_arenas(self) -> list[tuple[memoryview, memoryview | None]]:
        """Return the mapped part of the server's pool; see `MappedPool.arenas`."""
        with self._lock:
            return [] if self.pool is None or self._closed else self.pool.arenas()

    def close(self) -> None:
        """Close the pool; views that are still held stay good."""
        with self._lock:
            self._closed = True
            if self.pool is not None:
                self.pool.close()

    def let_go(self) -> None:
        """In a forked child: leave the mappings alone, and close the descriptors."""
        self._lock = threading.Lock()  # another thread of the parent may have held it
        self._closed = True
        if self.pool is not None:
            self.pool.let_go()
