"""The operations over shared memory: blocks are copied from and to the server's pool by the client itself.

A put reserves room, copies and commits; a get leases, copies and releases. What is small goes inline over the socket:
one round trip beats two. A call that is given up between them closes its connection, which gives room and pins back.

Where the server has the tables for it, a put does not wait at its end: the names of the blocks go to the server before
they are copied, with the request for room, and they become visible by a number in shared memory. What is known to lie
in the pool is read without asking (`own_reads.py`).

Two puts of the same sizes make a third likely: from the second on, each asks for the room of the next put, and the
answer is read then. That saves a put its round trip. A release is not made to wait like that: it has no reply, nothing
would say when to send it if no request follows, and it wakes the server for the one that does.
"""

import errno
import os
from collections.abc import Iterable, Sequence
from typing import Any

from infinistore.client.copying import hash_blocks
from infinistore.client.in_place import Leased, ReservedRoom, private_room
from infinistore.client.mapped_pool import MappedPool
from infinistore.client.operations import Batch
from infinistore.client.own_reads import OwnRead, OwnReads, is_too_long
from infinistore.client.pins import Owed, Pins
from infinistore.client.remote_operations import Channel, RemoteOperations, Room, expect, present_in, skipped_keys
from infinistore.errors import InfiniStoreException, OutOfMemory, ProtocolError, StoreUnavailable
from infinistore.protocol.codec import encode_head, numbers
from infinistore.protocol.connection import State
from infinistore.protocol.effects import Exchange
from infinistore.protocol.messages import (
    MISSING,
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
    Reply,
    Request,
    Reserve,
    ReserveReply,
    Touch,
)
from infinistore.protocol.places import place_of

__all__ = ["SharedMemoryOperations"]

_SPARE_BYTES = range(1024 * 1024, 16 * 1024 * 1024 + 1)
"""For how large a batch room is asked for ahead. It is kept until the next put, or the connection's end: so not for
more, and not for small ones, which seldom come in a row."""


class SharedMemoryOperations(RemoteOperations):
    """The operations over one connection by Unix socket, with the server's pool mapped."""

    def __init__(self, channel: Channel, *, pool: MappedPool, inline_bytes: int, pins: Pins) -> None:
        super().__init__(channel)
        self.pool = pool
        self.pins = pins
        self._inline_bytes = inline_bytes
        self._own_reads = OwnReads(pool.known, pins)
        self._last_sizes = numbers()  # of the last put
        self._spare: ReserveReply | None = None  # that room

    def settle(self) -> Exchange[None]:
        """Hear whether there is room for another batch like the last."""
        self.unsettled = False
        try:
            reply = expect(ReserveReply, (yield from self._connection.late_reply()))
        except (StoreUnavailable, ProtocolError):
            raise
        except InfiniStoreException:  # there is none; who needs it asks again, and hears why
            return
        self._spare = reply if reply.reservation else None

    def _ask(self, request: Request) -> Exchange[Reply]:
        if self.unsettled:
            yield from self.settle()
        encoded = self._connection.encode(request, deadline_us=self._remaining_us())
        return (yield from self._connection.ask(encoded))

    def _room_at_hand(self, sizes: Numbers) -> Exchange[ReserveReply | None]:
        """Return room for a batch that was asked for with the last put, if that was alike."""
        if self._spare is not None and sizes == self._last_sizes:
            spare, self._spare = self._spare, None
            return spare
        yield from self._give_up_spare()
        return None

    def _give_up_spare(self) -> Exchange[None]:
        spare, self._spare = self._spare, None
        if spare is not None:
            yield from self._connection.notify(Abort(spare.reservation))

    def _put_part(self, batch: Batch, replace: bool) -> Exchange[list[str]]:
        if self.unsettled:
            yield from self.settle()
        lengths = list(map(len, batch.views))
        sizes = numbers(lengths)
        total = sum(lengths)
        if total <= self._inline_bytes:
            return (yield from super()._put_part(batch, replace))
        if not self._knows_arenas():
            yield from self._ask_arenas()
        if not self.pool.writable:
            return (yield from super()._put_part(batch, replace))
        if replace and self._own_reads.wants_tables:
            yield from self._ask_tables()
        room = yield from self._room_at_hand(sizes)
        self.holding = room is not None
        # Puts come in rows, of batches that are alike: this one asks for the room of the next.
        then = Reserve(sizes, spare=True) if total in _SPARE_BYTES and sizes == self._last_sizes else None
        self._last_sizes = sizes
        if replace and self._own_reads.can_commit(len(sizes)):
            room, hashes, committed = yield from self._put_named(batch, lengths, sizes, room, then)
            if committed:
                return []
            then = None
        else:
            room = room or expect(ReserveReply, (yield from self._ask(Reserve(sizes))))
            self.holding = True
            yield from self._open_room(room, len(lengths))
            hashes = yield from self._copy_in(batch, room, lengths)
        commit = Commit(room.reservation, Keys(batch.keys), hashes, replace)
        request = self._connection.encode(commit, deadline_us=self._remaining_us(), then=then)
        self.unsettled = then is not None
        reply = expect(PutReply, (yield from self._connection.ask(request)))
        self.holding = False
        return skipped_keys(batch.keys, reply)

    def _put_named(
        self, batch: Batch, lengths: list[int], sizes: Numbers, room: ReserveReply | None, then: Request | None
    ) -> Exchange[tuple[ReserveReply, Numbers, bool]]:
        """Put blocks whose names the server knows before they are copied; it takes the room, too, if there is none.

        Return the room, the hashes, and False if all this needs a `Commit`.
        """
        if room is not None:
            yield from self._open_room(room, len(lengths))
        reservation, asked = (0, sizes) if room is None else (room.reservation, numbers())
        prepare = Prepare(reservation, Keys(batch.keys), asked, self._verify)
        request = self._connection.encode(prepare, deadline_us=self._remaining_us(), then=then)
        self.unsettled = then is not None
        yield from self._connection.send(request)
        if room is None:
            reply = expect(PrepareReply, (yield from self._connection.reply_to(request)))
            room = ReserveReply(reply.reservation, reply.places)
            self.holding = True
            yield from self._open_room(room, len(lengths))
            hashes = yield from self._copy_in(batch, room, lengths)
        else:
            hashes = yield from self._copy_in(batch, room, lengths)
            reply = expect(PrepareReply, (yield from self._connection.reply_to(request)))
        if not reply.accepted:
            if self.unsettled:
                yield from self.settle()
            return room, hashes, False
        self._own_reads.commit(room.reservation, hashes)
        self.holding = False
        known = hashes or numbers(bytes(8 * len(sizes)))
        self.pool.known.note(batch.keys, room.places, sizes, known, reply.removals)
        return room, hashes, True

    def _open_room(self, room: ReserveReply, blocks: int) -> Exchange[None]:
        """Get ready to write to room that the server has taken."""
        if not room.reservation or len(room.places) != blocks:
            raise ProtocolError(f"{len(room.places)} places for {blocks} blocks, by the number {room.reservation}")
        if not self._knows_arenas(room.places):
            if self.unsettled:
                yield from self.settle()
            yield from self._ask_arenas()

    def _copy_in(self, batch: Batch, room: ReserveReply, lengths: list[int]) -> Exchange[Numbers]:
        """Copy blocks into the pool; return their hashes, if they are wanted."""
        targets = self.pool.blocks(room.places.tolist(), lengths, writable=True)
        copying = self.pool.copier.copy(batch.views, targets, lengths, sum(lengths), hash_targets=self._verify)
        return numbers((yield from copying))

    def _get(
        self,
        keys: Sequence[str],
        views: Sequence[memoryview] | None,
        room: Room,
        capacities: Numbers | None = None,
    ) -> Exchange[None]:
        first = 0
        while first < len(keys):
            part = self._key_part(keys, first)
            wanted: Any = numbers() if capacities is None else capacities[first : first + len(part)]
            if (yield from self._read_known(part, wanted, first, room)):
                first += len(part)
                continue
            lease = Lease(part, wanted, self._inline_bytes)
            reply = expect(LeaseReply, (yield from self._ask(lease)))
            self.holding = bool(reply.lease)
            self._take_note(lease, reply)
            targets = room(reply.sizes, first)
            if reply.lease:
                yield from self._copy_out(part, reply, targets)
            else:
                yield from self._read_blocks(part, reply, targets)
            first += len(reply.sizes)

    def _copy_out(self, keys: Keys, reply: LeaseReply, targets: list[memoryview]) -> Exchange[None]:
        places, sizes = self._placed(reply)
        if not self._knows_arenas(places):
            yield from self._ask_arenas()
        sources = self.pool.blocks(places, sizes, writable=False)
        release = encode_head(Release(reply.lease), request_id=0)  # while what that takes is in the cache
        copying = self.pool.copier.copy(sources, targets, sizes, sum(sizes), hash_targets=self._verify)
        checksums = yield from copying
        yield from self._connection.notify_encoded(release)
        self.holding = False
        if self._verify:
            there = present_in(reply)
            yield from self._compare([keys[i] for i in there], [reply.checksums[i] for i in there], checksums)

    def _compare(self, keys: Sequence[str], expected: Sequence[int], found: Sequence[int]) -> Exchange[None]:
        bad = [key for key, e, c in zip(keys, expected, found, strict=True) if e not in (NO_CHECKSUM, c)]
        yield from self._report(bad, len(keys))

    def _pin_known(self, keys: Keys, capacities: Numbers) -> Exchange[OwnRead | None]:
        """Pin the blocks of these keys without asking, if it is known where all of them lie; inside `with pins` only.

        None: the server has to be asked. `capacities` is the room there is for each, or empty.
        """
        known = self.pool.known.find(keys)
        if known is None or is_too_long(known, capacities, self._hello.max_batch_bytes):
            return None
        if self._own_reads.wants_tables:
            yield from self._ask_tables()
        if not self._knows_arenas(known.places):
            yield from self._ask_arenas()
        return self._own_reads.pin(keys, known)

    def _read_known(self, keys: Keys, capacities: Numbers, first: int, room: Room) -> Exchange[bool]:
        """Read a part of a batch without asking; False, and nothing is done, if the server has to be asked."""
        with self.pins:
            read = yield from self._pin_known(keys, capacities)
        if read is None:
            return False
        self.holding = True
        sizes = read.sizes.tolist()
        total = sum(sizes)
        touch = encode_head(Touch(keys), request_id=0)  # while what that takes is in the cache
        done = False
        checksums: list[int] = []
        try:
            sources = self.pool.blocks(read.places.tolist(), sizes, writable=False)
            targets = room(read.sizes, first)
            checksums = yield from self.pool.copier.copy(sources, targets, sizes, total, hash_targets=self._verify)
            done = True
        except OutOfMemory:  # where there is no room to map the pool, short blocks go over the socket
            if total > self._inline_bytes:
                raise
        with self.pins:
            self._own_reads.unpin(read)
        if done:
            yield from self._note_use(touch)
        self.holding = False
        if done and self._verify:
            yield from self._compare(keys, read.checksums, checksums)
        return done

    def _note_use(self, touch: bytes) -> Exchange[None]:
        """Have the server know what was used: at the latest when somebody needs room, or asks what was used."""
        if not self._own_reads.log(touch):
            yield from self._connection.notify_encoded(touch)

    def exists_many(self, keys: Sequence[str]) -> Exchange[list[bool]]:
        """Ask which keys are there, unless that is known of all of them."""
        if self.pool.known.are_there(keys):
            return [True] * len(keys)
        return (yield from super().exists_many(keys))

    def match_prefix(self, keys: Sequence[str], hold_s: float) -> Exchange[tuple[int, str]]:
        """Count the leading keys that are there; without asking, if it is known that all of them are."""
        if not hold_s and len(keys) <= self._hello.max_batch_keys and self.pool.known.are_there(keys):
            if self._own_reads.wants_tables:
                yield from self._ask_tables()
            yield from self._note_use(encode_head(Touch(self._key_part(keys, 0), read=False), request_id=0))
            return len(keys), ""
        return (yield from super().match_prefix(keys, hold_s))

    def lease(self, keys: Sequence[str], verify: bool) -> Exchange[Leased]:
        """Pin the batch in the server's pool, in as many parts as the server makes of it, and return views of that."""
        with self.pins:
            if self._spare is not None:
                yield from self._give_up_spare()  # puts will go by other connections
            owed = Owed()
            watch = self.pins.watch(owed)
            views: list[memoryview | None] = []
            checksums: list[int] = []
            try:
                while len(views) < len(keys):
                    part = self._key_part(keys, len(views))
                    read = yield from self._pin_known(part, numbers())
                    if read is not None:
                        owed.hazards.append(read.hazard)
                        yield from self._note_use(encode_head(Touch(part), request_id=0))
                        views += self.pool.views(read.places.tolist(), read.sizes.tolist(), writable=False, watch=watch)
                        checksums += read.checksums
                        continue
                    request = Lease(part, numbers())
                    reply = expect(LeaseReply, (yield from self._ask(request)))
                    if reply.lease:
                        owed.messages.append(Release(reply.lease))
                    self._take_note(request, reply)
                    places, sizes = self._placed(reply)
                    if not self._knows_arenas(places):
                        yield from self._ask_arenas()
                    found = self.pool.views(places, sizes, writable=False, watch=watch)
                    views += found if len(found) == len(reply.sizes) else _in_order(reply.sizes, found)
                    if verify:
                        checksums += reply.checksums
                if verify:
                    yield from self._check_in_place(keys, views, checksums)
            except BaseException:
                if self._connection.state is State.REPLYING:
                    owed.messages.append(Release(0))  # the reply will be read by nobody
                watch.withdraw([view for view in views if view is not None])
                raise
            owed.leased_bytes = self._own_reads.footprint(list(map(len, filter(None, views))))
            self.pins.leased_bytes += owed.leased_bytes
            return Leased(views, watch)

    def _take_note(self, lease: Lease, reply: LeaseReply) -> None:
        """Check a reply, and note where it says that the blocks are."""
        self._check_reply(lease, reply)
        if len(reply.places) != len(reply.sizes):
            raise ProtocolError(f"{len(reply.places)} places for {len(reply.sizes)} blocks")
        self.pool.known.note(lease.keys, reply.places, reply.sizes, reply.checksums, reply.removals)

    @staticmethod
    def _placed(reply: LeaseReply) -> tuple[list[int], list[int]]:
        """Return places and sizes of the blocks that are there, as lists: see `_check_reply`."""
        sizes = reply.sizes.tolist()
        if MISSING not in sizes:  # nearly always
            return reply.places.tolist(), sizes
        there = present_in(reply)
        return [reply.places[i] for i in there], [sizes[i] for i in there]

    def _check_in_place(
        self, keys: Sequence[str], views: Sequence[memoryview | None], checksums: Sequence[int]
    ) -> Exchange[None]:
        present = [(key, view, c) for key, view, c in zip(keys, views, checksums, strict=True) if view is not None]
        hashes = yield from hash_blocks([view for _, view, _ in present])
        there, expected = [key for key, _, _ in present], [checksum for _, _, checksum in present]
        del present
        yield from self._compare(there, expected, hashes)

    def reserve(self, keys: list[str], sizes: Sequence[int]) -> Exchange[ReservedRoom]:
        """Take room for a batch in the server's pool, which the caller writes; private memory if nobody may write."""
        self._check_room(keys, sizes)
        if not self._knows_arenas():
            yield from self._ask_arenas()
        if not self.pool.writable or not keys:
            return private_room(keys, sizes)
        with self.pins:
            wanted = numbers(sizes)
            reply = yield from self._room_at_hand(wanted)
            reply = reply or expect(ReserveReply, (yield from self._ask(Reserve(wanted))))
            owed = Owed([Abort(reply.reservation)])
            watch = self.pins.watch(owed)
            self.pins.reserved = True
            yield from self._open_room(reply, len(sizes))
            memory = self.pool.views(reply.places, sizes, writable=True, watch=watch)
            return ReservedRoom(keys, memory, watch, reply.reservation, owed)

    def commit(self, room: ReservedRoom) -> Exchange[None]:
        """Hash what was written where it lies, and make it visible."""
        if room.reservation is None:
            return (yield from super().commit(room))
        checksums = (yield from hash_blocks(room.memory)) if self._verify else []
        with self.pins:
            commit = Commit(room.reservation, Keys(room.keys), numbers(checksums))
            expect(PutReply, (yield from self._ask(commit)))
            room.owed.messages.clear()
            self.pins.reserved = False

    def close(self) -> None:
        """Let go of the tables."""
        self._own_reads.close()

    def _knows_arenas(self, places: Sequence[int] = (0,)) -> bool:
        """Whether all arenas that are named are known."""
        return not places or max(places) < place_of(len(self.pool), 0)

    def _ask_arenas(self) -> Exchange[None]:
        """Ask for the arenas that are not known yet."""
        first = len(self.pool)
        descriptors: list[int] = []
        try:
            request = self._connection.request(
                MapArenas(first), deadline_us=self._remaining_us(), descriptors=descriptors
            )
            reply = expect(MapArenasReply, (yield from request))
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        self.pool.add(first, reply.lengths, descriptors, writable=reply.writable)

    def _ask_tables(self) -> Exchange[None]:
        """Ask for what lets this process read blocks that it knows without asking."""
        self._own_reads.wants_tables = False
        descriptors: list[int] = []
        try:
            request = self._connection.request(MapTables(), deadline_us=self._remaining_us(), descriptors=descriptors)
            reply = expect(MapTablesReply, (yield from request))
            if reply.granule_bytes:
                self._own_reads.use(reply, descriptors)
        except StoreUnavailable as error:
            if getattr(error.__cause__, "errno", 0) == errno.EMFILE:  # the next connection does without
                self.pool.known.close()
            raise
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


def _in_order(sizes: Sequence[int], found: Iterable[memoryview]) -> list[memoryview | None]:
    """Return what was found with None for what is missing."""
    present = iter(found)
    return [None if size == MISSING else next(present) for size in sizes]
