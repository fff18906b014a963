"""The embedded store: the same engine in this process, without a server.

Every call into the core is under one lock, so a store may be used from several threads. Bytes are copied outside the
lock, under a pin or into a reservation, so that a long copy keeps nobody from looking up a key.
"""

import time
from collections.abc import Callable, Sequence
from itertools import compress
from operator import not_
from typing import Self, TypeVar

from xxhash import xxh3_64_intdigest

from infinistore.allocators import create_allocator
from infinistore.client.arguments import check_all_there
from infinistore.client.copying import PAUSE_BYTES, copy_blocks, hash_blocks
from infinistore.client.fork import FORKED, let_go_in_child
from infinistore.client.in_place import Leased, ReservedRoom, Returns, Watch, views_at
from infinistore.client.operations import Batch
from infinistore.client.options import Options
from infinistore.core.arena import create_arena
from infinistore.core.clients import Client, Lease, Reservation
from infinistore.core.index import NO_CHECKSUM
from infinistore.core.limits import CoreLimits
from infinistore.core.pool import Pool
from infinistore.core.store import StoreCore
from infinistore.errors import BufferTooSmall, ChecksumMismatch, StoreUnavailable
from infinistore.protocol.effects import Exchange, Pause
from infinistore.statistics import Stats

__all__ = ["EmbeddedOperations", "EmbeddedStore"]

_Buffer = TypeVar("_Buffer", bytearray, memoryview)
_MAX_BATCH_KEYS = 1024 * 1024


class _CoreLock(Returns[Lease | Reservation]):
    """The lock around a core."""

    def __init__(self, core: StoreCore) -> None:
        super().__init__()
        self._core = core

    def give_back(self, things: Sequence[Lease | Reservation]) -> int:
        for thing in things:
            if isinstance(thing, Lease):
                self._core.release(thing)
            else:
                self._core.abort(thing)  # does nothing after a commit
        return len(things)


class EmbeddedStore:
    """A core with its pool, for one process. Blocking to make: it takes the memory of the pool."""

    def __init__(self, options: Options, clock: Callable[[], float] = time.monotonic) -> None:
        self.pool = Pool(create_allocator(options.allocator, options.minimal_allocate_bytes))
        self.pool.add_arena(create_arena(0, options.pool_bytes, huge_pages=options.huge_pages))
        self.core = StoreCore(self.pool, clock=clock, limits=CoreLimits(max_batch_keys=_MAX_BATCH_KEYS))
        self.lock = _CoreLock(self.core)
        self._looker: Client | None = None
        self._closed = ""
        let_go_in_child(self)

    def close(self) -> None:
        """Give the memory back as soon as nobody looks at it."""
        with self.lock:
            self._closed = self._closed or "this store is closed; open another one"
            self.pool.close()

    def let_go(self) -> None:
        """In a forked child: the memory is not there, and the lock may be held by a thread that is not there either."""
        self._closed = FORKED
        self.lock = _CoreLock(self.core)
        for arena in self.pool.arenas:
            arena.abandon()

    def __enter__(self) -> Self:
        """Take the lock for a call into the core, which is there until it is given back."""
        self.lock.acquire()
        try:
            self.check_usable()
        except StoreUnavailable:
            self.lock.release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.lock.release()

    @property
    def looker(self) -> Client:
        """Whose pins outlive the calls that make them: those of leases and reservations in place. Under the lock."""
        if self._looker is None:
            self._looker = self.core.open_client("in place")
        return self._looker

    def mapped_arenas(self) -> list[tuple[memoryview, memoryview | None]]:
        """Return all the bytes of each arena, to be read and to be written; none when the store is closed."""
        with self.lock:
            return [] if self._closed else [(arena.memory, arena.memory) for arena in self.pool.arenas]

    def arena(self, index: int) -> memoryview:
        """Return all the bytes of an arena."""
        return self.pool.arenas[index].memory

    def check_usable(self) -> None:
        """Raise `StoreUnavailable` if the store was closed, or opened before a fork."""
        if self._closed:
            raise StoreUnavailable(self._closed)


class EmbeddedOperations:
    """The operations of an embedded store, for one caller: its pins are its own."""

    def __init__(self, store: EmbeddedStore, *, verify: bool) -> None:
        self._store = store
        self._core = store.core
        self._lock = store.lock
        self._verify = verify
        with store:
            self._client = self._core.open_client("embedded")

    def close(self) -> None:
        """Give back what the caller has pinned. Its copies are done: they are made by the thread that calls this."""
        with self._lock:
            self._core.close_client(self._client)

    def put_many(self, batch: Batch, replace: bool) -> Exchange[list[str]]:
        """Put the batch; return the keys that were skipped because they were there."""
        if replace:
            return (yield from self._put(batch, replace))
        with self._store:
            present = self._core.exists(batch.keys)
            self._core.touch(list(compress(batch.keys, present)))
        missing = batch.where(map(not_, present))
        skipped = list(compress(batch.keys, present))
        skipped += yield from self._put(missing, replace)
        with self._store:  # what was there already must not end colder than what follows it
            self._core.touch(batch.keys)
        return skipped

    def _put(self, batch: Batch, replace: bool) -> Exchange[list[str]]:
        if not batch.keys:  # an empty reservation would go on with an eviction that is under way
            return []
        keys = batch.keys
        with self._store:
            reservation = self._core.reserve(self._client, list(map(len, batch.views)))
            room = reservation.views
        try:
            checksums = yield from copy_blocks(batch.views, room, hash_targets=self._verify)
            with self._store:
                again = self._core.commit(reservation, keys, checksums if self._verify else None, replace=replace)
        finally:
            with self._lock:
                self._core.abort(reservation)  # does nothing after a commit
        return [keys[index] for index in again]

    def get_many(self, keys: Sequence[str]) -> Exchange[list[bytearray | None]]:
        """Read the batch into memory of its own; None for what is missing."""

        def room(lease: Lease) -> list[bytearray | None]:
            return [None if entry is None else bytearray(entry[2]) for entry in lease.entries]

        return (yield from self._read(keys, room))

    def get_many_into(self, batch: Batch, all_or_nothing: bool) -> Exchange[list[int | None]]:
        """Read the batch into the caller's memory; return the stored lengths, None for what is missing."""

        def room(lease: Lease) -> list[memoryview | None]:
            for key, view, entry in zip(*batch, lease.entries, strict=True):
                if entry is not None and entry[2] > len(view):
                    raise BufferTooSmall(f"{key[:100]!r} has {entry[2]} bytes, its buffer {len(view)}")
            if all_or_nothing:
                check_all_there(batch.keys, lease.entries)
            return [
                None if entry is None else view[: entry[2]]
                for view, entry in zip(batch.views, lease.entries, strict=True)
            ]

        filled = yield from self._read(batch.keys, room)
        return [None if view is None else len(view) for view in filled]

    def _read(
        self, keys: Sequence[str], room: Callable[[Lease], list[_Buffer | None]]
    ) -> Exchange[list[_Buffer | None]]:
        """Copy leased blocks into the buffers that `room` finds for them, and check them there."""
        with self._store:
            lease = self._core.lease(self._client, keys)
            views = lease.views
        try:
            buffers = room(lease)
            bad: list[str] = []
            copied = 0
            for key, buffer, view, checksum in zip(keys, buffers, views, lease.checksums, strict=True):
                if buffer is None or view is None:
                    continue
                memoryview(buffer)[:] = view
                if self._verify and checksum != NO_CHECKSUM and xxh3_64_intdigest(buffer) != checksum:
                    bad.append(key)
                copied += len(view)
                if copied >= PAUSE_BYTES:
                    copied = 0
                    yield Pause()
        finally:
            with self._lock:
                self._core.release(lease)
        self._report(bad, len(keys))
        return buffers

    def _report(self, bad: list[str], count: int) -> None:
        """If blocks are not what was written, forget those that are bad in the pool, too, and raise."""
        if bad:
            with self._store:
                for key in bad:
                    self._core.verify(key)
            raise ChecksumMismatch(f"{len(bad)} of {count} blocks are not what was written, first {bad[0][:100]!r}")

    def lease(self, keys: Sequence[str], verify: bool) -> Exchange[Leased]:
        """Pin the batch, and return views of the pool."""
        with self._store as store:
            lease = self._core.lease(store.looker, keys)
            watch = Watch(store.lock.leave, lease)
            present = views_at(watch, store.arena, lease.extents, writable=False)
        found = iter(present)
        views = [None if entry is None else next(found) for entry in lease.entries]
        try:
            if verify:
                hashes = yield from hash_blocks(present)
                there = compress(zip(keys, lease.checksums, strict=True), lease.entries)
                bad = [key for (key, c), found in zip(there, hashes, strict=True) if c not in (NO_CHECKSUM, found)]
                self._report(bad, len(keys))
        except BaseException:
            watch.withdraw(present)
            raise
        return Leased(views, watch)

    def reserve(self, keys: list[str], sizes: Sequence[int]) -> Exchange[ReservedRoom]:
        """Take room for a batch in the pool, which the caller writes."""
        yield from ()
        with self._store as store:
            reservation = self._core.reserve(store.looker, sizes)
            watch = Watch(store.lock.leave, reservation)
            memory = views_at(watch, store.arena, reservation.extents, writable=True)
        return ReservedRoom(keys, memory, watch, reservation)

    def commit(self, room: ReservedRoom) -> Exchange[None]:
        """Hash what was written where it lies, and make it visible."""
        checksums = (yield from hash_blocks(room.memory)) if self._verify else None
        with self._store:
            self._core.commit(room.reservation, room.keys, checksums)

    def exists_many(self, keys: Sequence[str]) -> Exchange[list[bool]]:
        """Ask which keys are there."""
        yield from ()
        with self._store:
            return list(map(bool, self._core.exists(keys)))

    def match_prefix(self, keys: Sequence[str], hold_s: float) -> Exchange[tuple[int, str]]:
        """Count the leading keys that are there; return the count, and the token of the hold or an empty text."""
        yield from ()
        with self._store:
            if not hold_s:
                return self._core.match_prefix(keys), ""
            matched, hold = self._core.hold_prefix(self._client, keys, hold_s)
            return matched, f"{hold:x}" if hold else ""

    def release_hold(self, hold: str) -> Exchange[bool]:
        """End a hold; False if it has ended, or if it was a server's."""
        yield from ()
        try:
            hold_id = int(hold, 16)
        except ValueError:
            return False
        with self._store:
            return self._core.release_hold(hold_id)

    def delete(self, keys: Sequence[str]) -> Exchange[int]:
        """Delete keys; return how many were there."""
        yield from ()
        with self._store:
            return self._core.delete(keys)

    def keys(self, prefix: str, limit: int, after: str) -> Exchange[list[str]]:
        """One page of keys, in code point order."""
        yield from ()
        with self._store:
            return self._core.keys(prefix, limit, after)

    def evict(self, low: float, high: float) -> Exchange[int]:
        """Evict cold blocks; return how many."""
        yield from ()
        with self._store:
            return self._core.evict(low, high)

    def purge(self) -> Exchange[int]:
        """Delete everything; return how many keys there were."""
        yield from ()
        with self._store:
            return self._core.purge()

    def stats(self, details: bool) -> Exchange[Stats]:
        """The statistics of the store; the details are a server's."""
        yield from ()
        with self._store:
            return Stats("embedded", "no URL was given: the store is in this process", self._core.statistics())
