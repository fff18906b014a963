"""The embedded store: the same engine in this process, without a server.

Every call into the core is under one lock, so a store may be used from several threads.
Bytes are copied outside the lock, under a pin or into a reservation, so that a long
copy keeps nobody from looking up a key.

What a call asks of its driver, besides a pause, is to wait for a disk, or for a
removal.
"""

import time
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from itertools import compress
from math import ceil
from operator import not_
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

from xxhash import xxh3_64_intdigest

from infinistore.allocators import create_allocator
from infinistore.client import requests
from infinistore.client.memory.copying import PAUSE_BYTES, copy_blocks, hash_blocks
from infinistore.client.memory.views import Leased, ReservedRoom, Returns, Watch, views_at
from infinistore.client.options import Options
from infinistore.client.requests import (
    Batch,
    Followed,
    FollowRemovals,
    Place,
    RemovedKeys,
    check_all_there,
    closed,
)
from infinistore.core.arena import create_arena
from infinistore.core.clients import Client, Lease, Reservation
from infinistore.core.index import NO_CHECKSUM
from infinistore.core.journal import Journal
from infinistore.core.limits import CoreLimits
from infinistore.core.pool import Pool
from infinistore.core.removals import MAX_TOLD_KEYS, RemovalLog, Told
from infinistore.core.store import StoreCore
from infinistore.errors import BufferTooSmall, ChecksumMismatch
from infinistore.host import FORKED, let_go_in_child
from infinistore.protocol import messages
from infinistore.protocol.effects import Pause
from infinistore.protocol.messages import Found, Matched, Prefetched
from infinistore.sizes import in_units
from infinistore.statistics import Stats


class Disks(Protocol):
    """The disks of a store, as far as the store itself has to do with them."""

    def close(self) -> None:
        """Write what waits for them, and end what uses the pool."""

    def let_go(self) -> None:
        """In a forked child, close what is open."""


class AwaitDisk(NamedTuple):
    """Wait until the future is done; the result is nothing.

    Without `within_s` it ends by itself, in time; with it, the wait ends after so many
    seconds at the latest. A call that is given up just forgets it.
    """

    done: Future[None]
    within_s: float | None = None

    def __await__(self) -> Generator["AwaitDisk", None, None]:
        yield self


async def await_removal(
    lock: AbstractContextManager[Any], log: RemovalLog, look: Callable[[Place], Told], request: FollowRemovals
) -> Followed:
    """Ask a store which keys were removed, and wait for one; `look` answers, under the
    lock."""
    place = request.places.get("", (0, 0))
    done: Future[None] = Future()
    done.set_running_or_notify_cancel()  # nobody can cancel it from here on
    wake = partial(done.set_result, None)
    with lock:
        told = look(place)
        is_over = told.place != place or bool(told.keys)
        if not is_over:
            log.waiting.append(wake)
    if not is_over:
        try:
            await AwaitDisk(done, request.wait_s)
        finally:
            with lock:
                log.stop_waiting(wake)
        with lock:
            told = look(place)
    return Followed({"": told.place}, RemovedKeys(told.keys, told.missed))


_Buffer = TypeVar("_Buffer", bytearray, memoryview)
_MAX_BATCH_KEYS = 1024 * 1024


class _CoreReturns(Returns[Lease | Reservation]):
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
    """A core with its pool, for one process. Blocking to make: it takes the memory of
    the pool.
    """

    def __init__(self, options: Options, clock: Callable[[], float] = time.monotonic) -> None:
        self.pool = Pool(create_allocator(options.allocator, options.minimal_allocate_bytes))
        node = options.numa_node if options.numa_node >= 0 else None
        arena = create_arena(0, options.pool_bytes, huge_pages=options.huge_pages, prefault_threads=1, numa_node=node)
        self.pool.add_arena(arena)
        journal = Journal(reads=options.disk_admission == "second-use") if options.disk else None
        limits = CoreLimits(max_batch_keys=_MAX_BATCH_KEYS)
        self.core = StoreCore(self.pool, clock=clock, limits=limits, journal=journal)
        self.returns = _CoreReturns(self.core)
        self.lock = self.returns.lock
        """Around every call into the core; taken by `with` alone."""
        self.clock = clock
        self.deadline_s = options.deadline_s
        self.disks: Disks | None = None
        """The disks below the pool, if there are any; set by who opens the store."""
        self.operations = EmbeddedOperations
        """What carries out requests."""
        self._looker: Client | None = None
        self._closed = ""
        self.forked = False
        """Whether this is a forked child, which has to leave it alone."""
        let_go_in_child(self)

    def close(self) -> None:
        """Give the memory back as soon as nobody looks at it. With disks, write what
        waits for them first, which takes some seconds at most.
        """
        with self.lock:
            first = not self._closed
            self._closed = self._closed or "this store is closed; open another one"
        if first and self.disks is not None:
            self.disks.close()
        with self.lock:
            self.pool.close()
        self.returns.flush()

    def let_go(self) -> None:
        """In a forked child: the memory is not there, and the lock may be held by a
        thread that is not there either.
        """
        self._closed = FORKED
        self.forked = True
        self.returns = _CoreReturns(self.core)
        self.lock = self.returns.lock
        for arena in self.pool.arenas:
            arena.abandon()
        if self.disks is not None:
            self.disks.let_go()

    @property
    def looker(self) -> Client:
        """Whose pins outlive the calls that make them: those of leases and reservations
        in place. Under the lock.
        """
        if self._looker is None:
            self._looker = self.core.open_client("in place")
        return self._looker

    def mapped_arenas(self) -> list[tuple[memoryview, memoryview | None]]:
        """Return all the bytes of each arena, to be read and to be written; none when
        the store is closed.
        """
        with self.lock:
            return [] if self._closed else [(arena.memory, arena.memory) for arena in self.pool.arenas]

    def arena(self, index: int) -> memoryview:
        """Return all the bytes of an arena."""
        return self.pool.arenas[index].memory

    def check_usable(self) -> None:
        """Raise `StoreUnavailable` if the store was closed, or opened before a fork."""
        if self._closed:
            raise closed(self._closed)


class EmbeddedOperations:
    """The operations of an embedded store, for one caller: its pins are its own."""

    def __init__(self, store: EmbeddedStore, *, verify: bool) -> None:
        self._store = store
        self._lock = store.lock
        self._verify = verify
        with self._lock:
            self._client = self._core.open_client("embedded")

    def close(self) -> None:
        """Give back what the caller has pinned. Its copies are done: they are made by
        the thread that calls this.
        """
        if self._store.forked:  # and nobody may be there to release the lock
            return
        with self._lock:
            self._store.core.close_client(self._client)
        if self._store.returns.left:  # meanwhile
            self._store.returns.flush()

    @property
    def _core(self) -> StoreCore:
        """For a call, under the lock. StoreUnavailable: the store was closed."""
        self._store.check_usable()
        return self._store.core

    async def put(self, request: requests.Put) -> list[str]:
        """Put the batch; return the keys that were skipped because they were there."""
        batch, replace, ttl_us = request.batch, request.replace, request.ttl_us
        if replace:
            return await self._put(batch, replace, ttl_us)
        present = await self.exists(messages.Exists(messages.Keys(batch.keys)))
        with self._lock:
            self._core.touch(list(compress(batch.keys, present)))
        missing = batch.where(map(not_, present))
        skipped = list(compress(batch.keys, present))
        skipped += await self._put(missing, replace, ttl_us)
        with self._lock:  # what was there already must not end colder than what follows it
            self._core.touch(batch.keys)
        return skipped

    async def _put(self, batch: Batch, replace: bool, ttl_us: int) -> list[str]:
        if not batch.keys:  # an empty reservation would go on with an eviction that is under way
            return []
        keys = batch.keys
        with self._lock:
            reservation = self._core.reserve(self._client, list(map(len, batch.views)))
            room = reservation.views
        try:
            checksums = await copy_blocks(batch.views, room, hash_targets=self._verify)
            with self._lock:
                hashes = checksums if self._verify else None
                again = self._core.commit(reservation, keys, hashes, replace=replace, ttl_s=ttl_us / 1e6)
        finally:
            with self._lock:
                self._store.core.abort(reservation)  # does nothing after a commit
        return [keys[index] for index in again]

    async def get(self, request: requests.Get) -> list[bytearray | None]:
        """Read the batch into memory of its own; None for what is missing."""
        keys = request.keys

        def room(lease: Lease) -> list[bytearray | None]:
            return [bytearray(length) if length else None for length in lease.lengths]

        return await self._read(keys, room)

    async def get_into(self, request: requests.GetInto) -> list[int | None]:
        """Read the batch into the caller's memory; return the stored lengths, None for
        what is missing.
        """
        batch, all_or_nothing = request.batch, request.all_or_nothing

        def room(lease: Lease) -> list[memoryview | None]:
            for key, view, length in zip(*batch, lease.lengths, strict=True):
                if length > len(view):
                    raise BufferTooSmall(f"{key[:100]!r} has {in_units(length)}, its buffer {in_units(len(view))}")
            if all_or_nothing:
                check_all_there(batch.keys, lease.entries)
            return [view[:length] if length else None for view, length in zip(batch.views, lease.lengths, strict=True)]

        filled = await self._read(batch.keys, room)
        return [None if view is None else len(view) for view in filled]

    async def _read(self, keys: Sequence[str], room: Callable[[Lease], list[_Buffer | None]]) -> list[_Buffer | None]:
        """Copy leased blocks into the buffers that `room` finds for them, and check
        them there.
        """
        to_wait_for = self._reading(keys)
        taken: tuple[Lease, list[memoryview | None]] | None = None
        while taken is None:
            with self._lock:
                wait = to_wait_for and to_wait_for()
                if wait is None:
                    lease = self._core.lease(self._client, keys)
                    taken = lease, lease.views
            if wait is not None:
                await wait
        lease, views = taken
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
                    await Pause()
        finally:
            with self._lock:
                self._store.core.release(lease)
        self._report(bad, len(keys))
        return buffers

    def _reading(self, keys: Sequence[str]) -> Callable[[], AwaitDisk | None] | None:
        """Return what says, under the lock, what to wait for before these keys are
        leased; None without disks.
        """
        return None

    def _report(self, bad: list[str], count: int) -> None:
        """If blocks are not what was written, forget those that are bad in the pool,
        too, and raise.
        """
        if bad:
            with self._lock:
                for key in bad:
                    self._core.verify(key)
            raise ChecksumMismatch(f"{len(bad)} of {count} blocks are not what was written, first {bad[0][:100]!r}")

    async def lease(self, request: requests.Lease) -> Leased:
        """Pin the batch, and return views of the pool."""
        keys, verify = request.keys, request.verify
        to_wait_for = self._reading(keys)
        taken: tuple[Lease, Watch, list[memoryview]] | None = None
        while taken is None:
            with self._lock:
                wait = to_wait_for and to_wait_for()
                if wait is None:
                    lease = self._core.lease(self._store.looker, keys)
                    watch = Watch(self._store.returns, lease)
                    taken = lease, watch, views_at(watch, self._store.arena, lease.extents, writable=False)
            if wait is not None:
                await wait
        lease, watch, present = taken
        found = iter(present)
        views = [None if entry is None else next(found) for entry in lease.entries]
        try:
            if verify:
                hashes = await hash_blocks(present)
                there = compress(zip(keys, lease.checksums, strict=True), lease.entries)
                bad = [key for (key, c), found in zip(there, hashes, strict=True) if c not in (NO_CHECKSUM, found)]
                self._report(bad, len(keys))
        except BaseException:
            watch.withdraw(present)
            raise
        return Leased(views, watch)

    async def reserve(self, request: requests.Reserve) -> ReservedRoom:
        """Take room for a batch in the pool, which the caller writes."""
        keys, sizes = request.keys, request.sizes
        with self._lock:
            reservation = self._core.reserve(self._store.looker, sizes)
            watch = Watch(self._store.returns, reservation)
            memory = views_at(watch, self._store.arena, reservation.extents, writable=True)
        return ReservedRoom(keys, memory, watch, reservation)

    async def commit(self, request: requests.Commit) -> None:
        """Hash what was written where it lies, and make it visible."""
        room = request.room
        checksums = (await hash_blocks(room.memory)) if self._verify else None
        with self._lock:
            self._core.commit(room.reservation, room.keys, checksums, ttl_s=request.ttl_us / 1e6)

    async def exists(self, request: messages.Exists) -> Found:
        """Ask which keys are there."""
        with self._lock:
            return Found(map(bool, self._core.exists(request.keys)))

    async def match_prefix(self, request: messages.MatchPrefix) -> Matched:
        """Count the leading keys that are there."""
        keys, hold_s = request.keys, request.hold_us / 1e6
        with self._lock:
            if not hold_s:
                return Matched(self._core.match_prefix(keys))
            matched, hold = self._core.hold_prefix(self._client, keys, hold_s)
            return Matched(matched, hold_token(hold))

    async def flush(self, request: messages.Flush) -> int:
        """Return how many keys have a durable block: none, without a disk."""
        self._store.check_usable()
        return 0

    async def prefetch(self, request: messages.Prefetch) -> Prefetched:
        """Hold what is there, if that is wanted. Nothing has to be read."""
        if not request.hold_us:
            self._store.check_usable()
            return Prefetched(0)
        held = await self.match_prefix(messages.MatchPrefix(request.keys, request.hold_us))
        return Prefetched(0, hold=held.hold)

    async def release_hold(self, request: requests.ReleaseHolds) -> bool:
        """End a hold; False if it has ended, or if it was a server's."""
        try:
            hold_id = int(request.hold, 16)
        except ValueError:
            return False
        with self._lock:
            return self._release_hold(hold_id)

    def _release_hold(self, hold_id: int) -> bool:
        return self._core.release_hold(hold_id)

    async def delete(self, request: messages.Delete) -> int:
        """Delete keys; return how many were there."""
        with self._lock:
            return self._core.delete(request.keys)

    async def pin(self, request: messages.Pin) -> list[bool]:
        """Pin keys, or unpin them."""
        with self._lock:
            kept, keys = self._core.retention, request.keys
            return list(map(bool, kept.protect(keys, request.ttl_us / 1e6) if request.pinned else kept.unprotect(keys)))

    async def times_left(self, request: messages.TimesLeft) -> list[int | None]:
        """Tell when keys end."""
        with self._lock:
            left = self._core.retention.times_left(request.keys)
        return [0 if time_s is None else ceil(time_s * 1e6) if time_s else None for time_s in left]

    async def removed(self, request: FollowRemovals) -> Followed:
        """Ask which keys were removed, and wait for one."""
        return await await_removal(self._lock, self._core.removal_log, self._told, request)

    def _told(self, place: tuple[int, int]) -> Told:
        core = self._core
        return core.removal_log.told(place, MAX_TOLD_KEYS, core.index.contains_many)

    async def list_keys(self, request: messages.ListKeys) -> list[str]:
        """One page of keys, in code point order."""
        with self._lock:
            return self._core.keys(request.prefix, request.limit, request.after)

    async def evict(self, request: messages.Evict) -> int:
        """Evict cold blocks; return how many."""
        with self._lock:
            return self._core.evict(request.low, request.high)

    async def purge(self, request: messages.Purge) -> int:
        """Delete everything; return how many keys there were."""
        with self._lock:
            return self._core.purge()

    async def statistics(self, request: messages.Statistics) -> Stats:
        """The statistics of the store; the details are a server's."""
        with self._lock:
            return Stats("embedded", "no URL was given: the store is in this process", self._core.statistics())

    handlers: ClassVar[Mapping[type[Any], Callable[[Any, Any], Coroutine[Any, Any, Any]]]] = {
        requests.Put: put,
        requests.Get: get,
        requests.GetInto: get_into,
        requests.Lease: lease,
        requests.Reserve: reserve,
        requests.Commit: commit,
        messages.Exists: exists,
        messages.MatchPrefix: match_prefix,
        requests.ReleaseHolds: release_hold,
        messages.Delete: delete,
        messages.Pin: pin,
        messages.TimesLeft: times_left,
        messages.Flush: flush,
        messages.Prefetch: prefetch,
        FollowRemovals: removed,
        messages.ListKeys: list_keys,
        requests.ListKeysOfEveryNode: list_keys,
        messages.Evict: evict,
        messages.Purge: purge,
        messages.Statistics: statistics,
    }
    """What carries out each kind of request."""


def hold_token(hold_id: int) -> str:
    """Return what names a hold to callers; an empty text if there is none."""
    return f"{hold_id:x}" if hold_id else ""
