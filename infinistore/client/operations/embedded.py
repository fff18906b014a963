"""The embedded store: the same engine in this process, without a server.

Every call into the core is under one lock, so a store may be used from several threads.
Bytes are copied outside the lock, under a pin or into a reservation, so that a long
copy keeps nobody from looking up a key.

What a call asks of its driver, besides a pause, is to wait for a disk, or for a
removal. A thread starts the jobs of the disks, takes their results, and wakes the calls
that wait for them; the disks are used under the lock, too.
"""

import os
import select
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import compress
from operator import not_
from random import Random, SystemRandom
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

from xxhash import xxh3_64_intdigest

from infinistore.allocators import create_allocator
from infinistore.answers import ANSWERS, removals
from infinistore.client import requests
from infinistore.client.memory.copying import PAUSE_BYTES, copy_blocks, hash_blocks
from infinistore.client.memory.views import Leased, ReservedRoom, Returns, Watch, views_at
from infinistore.client.options import Options
from infinistore.client.requests import (
    Batch,
    Followed,
    FollowRemovalsOfNodes,
    check_all_there,
    followed,
    store_closed_error,
)
from infinistore.core.arena import create_arena
from infinistore.core.clients import Client, Lease, Reservation
from infinistore.core.index import NO_CHECKSUM
from infinistore.core.journal import Journal
from infinistore.core.limits import CoreLimits
from infinistore.core.pool import Pool
from infinistore.core.store import StoreCore
from infinistore.disk.settings import TierSettings
from infinistore.disk.tiers import Steps, Tiers
from infinistore.disk.waits import Wait
from infinistore.errors import BufferTooSmall, ChecksumMismatch, StoreUnavailable
from infinistore.eviction import eviction_class
from infinistore.host import FORKED, ONE, let_go_in_child, make_eventfd, start_thread
from infinistore.protocol.effects import Pause
from infinistore.protocol.messages import Exists, Keys, ListKeys, ReleaseHold, Reply, Statistics
from infinistore.sizes import in_units
from infinistore.statistics import Stats


class AwaitDisk(NamedTuple):
    """Wait until the future is done; the result is nothing.

    Without `within_s` it ends by itself, in time; with it, the wait ends after so many
    seconds at the latest. A call that is given up just forgets it.
    """

    done: Future[None]
    within_s: float | None = None

    def __await__(self) -> Generator["AwaitDisk", None, None]:
        yield self


def future_of(wait: Wait) -> Future[None]:
    """Return what is done when a wait is settled. Under the lock."""
    done: Future[None] = Future()
    done.set_running_or_notify_cancel()  # whoever waits may go, and the result come all the same
    wait.when_settled(lambda: done.set_result(None))
    return done


_Buffer = TypeVar("_Buffer", bytearray, memoryview)
_T = TypeVar("_T")
_MAX_BATCH_KEYS = 1024 * 1024
_LAST_WRITES_S = 10.0
"""How long a store that is closed writes what waits for its disks."""
_THREADS_END_S = 5.0


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


class EmbeddedDisks:
    """The disks of one store, whose core has a journal. Blocking to open and to close.

    Raises:
        ConfigError: a disk cannot be used. Nothing on it was changed.
        StoreUnavailable: this process gets no more threads.
    """

    def __init__(
        self,
        options: Options,
        core: StoreCore,
        returns: Returns[Any],
        clock: Callable[[], float],
        random: Random | None = None,
    ) -> None:
        from infinistore.disk_io.store_disks import open_disks  # late: it needs numpy

        random = random or SystemRandom()
        opened = open_disks(options.disks, random)
        settings = TierSettings(admission=options.disk_admission, wait_s=options.disk_wait_s)
        self.tiers = opened.below(core, clock=clock, settings=settings, random=random)
        """The store and its disks. To be used under the lock of the store."""
        self._runner = opened.runner
        self._returns = returns
        self._clock = clock
        self._ending = False
        self._asleep = False
        self._wake_fd = make_eventfd()
        self.tiers.when_there_is_work(self._wake)
        self._thread = threading.Thread(target=self._run, name="infinistore-disks", daemon=True)
        try:
            start_thread(self._thread)
        except StoreUnavailable:
            self._runner.close(timeout_s=_THREADS_END_S)
            os.close(self._wake_fd)
            raise

    def close(self) -> None:
        """Write what waits for the disks, end all waiting, and unlock the disks.

        Nothing reads or writes the pool afterwards, unless a disk hangs: that memory
        stays mapped.
        """
        with self._returns.lock:
            finished = future_of(self.tiers.close(_LAST_WRITES_S))
        finished.result()
        with self._returns.lock:
            self._ending = True
            self._wake()
        self._thread.join()
        self._runner.close(timeout_s=_THREADS_END_S)
        os.close(self._wake_fd)

    def let_go(self) -> None:
        """In a forked child, which lacks the threads: close the descriptor."""
        os.close(self._wake_fd)

    def _wake(self) -> None:
        """Have the thread look at the disks. Under the lock."""
        if self._asleep:
            self._asleep = False
            os.write(self._wake_fd, ONE)

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody waits for this thread
            with self._returns.lock:
                self.tiers.fail(error)
        finally:
            with self._returns.lock:
                self._ending = True
                self.tiers.stop()

    def _work(self) -> None:
        poll = select.poll()
        poll.register(self._runner.fd, select.POLLIN)
        poll.register(self._wake_fd, select.POLLIN)
        tiers, runner = self.tiers, self._runner
        while not self._ending:
            results = runner.take()
            for result in results:  # one at a time: each may take a millisecond, and calls wait for the lock
                with self._returns.lock:
                    tiers.done([result])
            with self._returns.lock:
                self._asleep = True
                jobs = tiers.jobs()
                deadline = tiers.next_deadline()
            self._returns.flush()
            runner.submit(jobs)
            timeout_ms = None if deadline is None else max(0.0, deadline - self._clock()) * 1000
            if any(fd == self._wake_fd for fd, _ in poll.poll(timeout_ms)):
                os.read(self._wake_fd, len(ONE))


class EmbeddedStore:
    """A core with its pool and its disks, for one process. Blocking to make: it takes
    the memory of the pool.

    Raises:
        OutOfMemory: no memory for the pool.
        ConfigError: a disk cannot be used. Nothing on it was changed.
        StoreUnavailable: this process gets no more threads, which disks need.
    """

    def __init__(self, options: Options, clock: Callable[[], float] = time.monotonic) -> None:
        eviction = eviction_class(options.eviction)
        self.pool = Pool(create_allocator(options.allocator, options.minimal_allocate_bytes))
        node = options.numa_node if options.numa_node >= 0 else None
        arena = create_arena(0, options.pool_bytes, huge_pages=options.huge_pages, prefault_threads=1, numa_node=node)
        self.pool.add_arena(arena)
        journal = Journal(reads=options.disk_admission == "second-use") if options.disk else None
        limits = CoreLimits(max_batch_keys=_MAX_BATCH_KEYS, max_page_keys=2**64 - 1)
        self.core = StoreCore(self.pool, clock=clock, limits=limits, journal=journal, eviction=eviction)
        self.returns = _CoreReturns(self.core)
        self.lock = self.returns.lock
        """Around every call into the core; taken by `with` alone."""
        self.clock = clock
        self.deadline_s = options.deadline_s
        self.tiers = Tiers(self.core)
        """The store, with its disks."""
        self.disks: EmbeddedDisks | None = None
        """Runs the disks, if there are any."""
        self._looker: Client | None = None
        self._closed = ""
        self._closing = threading.RLock()  # a signal handler may close it, too
        self.forked = False
        """Whether this is a forked child, which has to leave it alone."""
        let_go_in_child(self)
        if options.disk:
            try:
                self.disks = EmbeddedDisks(options, self.core, self.returns, clock)
            except BaseException:
                self.close()
                raise
            self.tiers = self.disks.tiers

    def close(self) -> None:
        """Give the memory back as soon as nobody looks at it. With disks, write what
        waits for them first, which takes some seconds at most. Another thread that
        closes it meanwhile waits, too.
        """
        with self._closing:
            with self.lock:
                first = not self._closed
                self._closed = self._closed or "this store is closed; open another one"
            if first and self.disks is not None:
                self.disks.close()
            with self.lock:
                self.pool.close()
            self.returns.flush()

    def let_go(self) -> None:
        """In a forked child, without the memory and the thread that has the lock."""
        self._closed = FORKED
        self.forked = True
        self.returns = _CoreReturns(self.core)
        self.lock = self.returns.lock
        self._closing = threading.RLock()
        for arena in self.pool.arenas:
            arena.abandon()
        if self.disks is not None:
            self.disks.let_go()

    @property
    def looker(self) -> Client:
        """Who has the pins of leases and reservations in place. Under the lock."""
        if self._looker is None:
            self._looker = self.core.open_client("in place")
        return self._looker

    def mapped_arenas(self) -> list[tuple[memoryview, memoryview | None]]:
        """Return each arena to be read and written; none when the store is closed."""
        with self.lock:
            return [] if self._closed else [(arena.memory, arena.memory) for arena in self.pool.arenas]

    def arena(self, index: int) -> memoryview:
        """Return all the bytes of an arena."""
        return self.pool.arenas[index].memory

    def check_usable(self) -> None:
        """Raise `StoreUnavailable` if the store was closed, or opened before a fork."""
        if self._closed:
            raise store_closed_error(self._closed)


class EmbeddedOperations:
    """The operations of an embedded store, for one caller: its pins are its own."""

    def __init__(self, store: EmbeddedStore, *, verify: bool) -> None:
        self._store = store
        self._lock = store.lock
        self._verify = verify
        with self._lock:
            self._client = self._core.open_client("embedded")

    def close(self) -> None:
        """Give back what the caller has pinned. Its copies are done."""
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

    @property
    def _tiers(self) -> Tiers:
        """As `_core`, with the disks."""
        self._store.check_usable()
        return self._store.tiers

    async def _settle(self, steps: Steps[_T]) -> _T:
        """Take the steps of a request, each under the lock, and wait where they
        wait."""
        wait: Wait | None = None
        while True:
            with self._lock:
                if wait is None:
                    self._store.check_usable()
                try:
                    wait = next(steps)
                except StopIteration as end:
                    return cast("_T", end.value)
                done = None if wait is None or wait.settled else future_of(wait)
            if done is not None:
                await AwaitDisk(done)

    async def put(self, request: requests.Put) -> list[str]:
        """Put the batch; return the keys that were skipped because they were there."""
        batch, replace, ttl_us = request.batch, request.replace, request.ttl_us
        if replace:
            return await self._put(batch, replace, ttl_us)
        present = await self.ask(Exists(Keys(batch.keys), touch=True))
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

        def room(lease: Lease, first: int) -> list[bytearray | None]:
            return [bytearray(length) if length else None for length in lease.lengths]

        return await self._read(request.keys, room)

    async def get_into(self, request: requests.GetInto) -> list[int | None]:
        """Read the batch into memory; return the stored lengths, None if missing."""
        batch, all_or_nothing = request.batch, request.all_or_nothing

        def room(lease: Lease, first: int) -> list[memoryview | None]:
            keys, views = batch
            if len(lease.lengths) < len(keys):
                part = slice(first, first + len(lease.lengths))
                keys, views = keys[part], views[part]
            for key, view, length in zip(keys, views, lease.lengths, strict=True):
                if length > len(view):
                    raise BufferTooSmall(f"{key[:100]!r} has {in_units(length)}, its buffer {in_units(len(view))}")
            if all_or_nothing:
                check_all_there(keys, lease.entries)
            return [view[:length] if length else None for view, length in zip(views, lease.lengths, strict=True)]

        filled = await self._read(batch.keys, room, all_or_nothing=all_or_nothing)
        return [None if view is None else len(view) for view in filled]

    async def _read(
        self, keys: Sequence[str], room: Callable[[Lease, int], list[_Buffer | None]], *, all_or_nothing: bool = False
    ) -> list[_Buffer | None]:
        """Copy leased blocks into the buffers that `room` finds for them, and check
        them there. If the pool has no room for all that is on disk, do so in parts:
        `room` gets the lease of one, and the position of its first key.

        With `all_or_nothing`, nothing is read from disk if a key is missing.
        """
        found: list[_Buffer | None] = []
        while True:
            part = keys[len(found) :] if found else keys
            waits: Iterator[Wait] | None = None
            taken: tuple[Lease, list[memoryview | None]] | None = None
            while taken is None:
                with self._lock:
                    tiers = self._tiers
                    if waits is None:
                        part, waits = tiers.fetch(part, self._store.deadline_s)
                    wait = next(waits, None)
                    if all_or_nothing and (wait is not None or len(part) < len(keys)):
                        check_all_there(keys, [there or None for there in tiers.exists(keys)])
                    if wait is None:
                        lease = tiers.core.lease(self._client, part)
                        taken = lease, lease.views
                    done = None if wait is None else future_of(wait)
                if done is not None:
                    await AwaitDisk(done)
            lease, views = taken
            try:
                buffers = room(lease, len(found))
                bad: list[str] = []
                copied = 0
                for key, buffer, view, checksum in zip(part, buffers, views, lease.checksums, strict=True):
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
            self._report(bad, len(part))
            found += buffers
            if len(found) == len(keys):
                return found

    def _report(self, bad: list[str], count: int) -> None:
        """If blocks are wrong, forget those that are wrong in the pool, and raise."""
        if bad:
            with self._lock:
                for key in bad:
                    self._core.verify(key)
            raise ChecksumMismatch(f"{len(bad)} of {count} blocks are not what was written, first {bad[0][:100]!r}")

    async def lease(self, request: requests.Lease) -> Leased:
        """Pin the batch, and return views of the pool."""
        keys, verify = request.keys, request.verify

        _, waits = self._store.tiers.fetch(keys, self._store.deadline_s, whole=True)
        taken: tuple[Lease, Watch, list[memoryview]] | None = None
        while taken is None:
            with self._lock:
                core = self._core
                wait = next(waits, None)
                if wait is None:
                    lease = core.lease(self._store.looker, keys)
                    watch = Watch(self._store.returns, lease)
                    taken = lease, watch, views_at(watch, self._store.arena, lease.extents, writable=False)
                done = None if wait is None else future_of(wait)
            if done is not None:
                await AwaitDisk(done)
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

    # Without blocks

    async def ask(self, request: Any) -> Any:
        """Return the result that the reply of the store has."""
        with self._lock:
            answer = ANSWERS[type(request)](request, self._tiers, self._client, self._store.deadline_s)
        reply = answer if isinstance(answer, Reply) else await self._settle(answer)
        return reply.result

    async def list_keys_of_every_node(self, request: requests.ListKeysOfEveryNode) -> list[str]:
        """Return one page of keys: this store is the only node."""
        return await self.ask(ListKeys(request.prefix, request.after, request.limit))  # type: ignore[no-any-return]

    async def release_holds(self, request: requests.ReleaseHolds) -> bool:
        """End the hold that a token names; False if it has ended, or if it was a
        server's."""
        try:
            release = ReleaseHold(int(request.hold, 16))
        except ValueError:
            return False
        return bool(await self.ask(release))

    async def follow_removals(self, request: FollowRemovalsOfNodes) -> Followed:
        """Ask which keys were removed, and wait for one."""
        message, log = request.message, self._core.removal_log
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()  # nobody can cancel it from here on
        wake = partial(done.set_result, None)
        with self._lock:
            reply = removals(message, self._tiers)
            is_over = (reply.log, reply.number) != (message.log, message.number) or bool(reply.keys)
            if not is_over:
                log.waiting.append(wake)
        if not is_over:
            try:
                await AwaitDisk(done, request.wait_s)
            finally:
                with self._lock:
                    log.stop_waiting(wake)
            with self._lock:
                reply = removals(message, self._tiers)
        return followed(reply)

    async def statistics(self, request: Statistics) -> Stats:
        """The statistics of the store and its disks; the details are a server's."""
        with self._lock:
            tiers = self._tiers
            why = "no URL was given: the store is in this process"
            return Stats("embedded", why, tiers.core.statistics(), disk=tiers.statistics())

    handlers: ClassVar[Mapping[type[Any], Callable[[Any, Any], Coroutine[Any, Any, Any]]]] = {
        **dict.fromkeys(ANSWERS, ask),
        requests.Put: put,
        requests.Get: get,
        requests.GetInto: get_into,
        requests.Lease: lease,
        requests.Reserve: reserve,
        requests.Commit: commit,
        requests.ReleaseHolds: release_holds,
        FollowRemovalsOfNodes: follow_removals,
        requests.ListKeysOfEveryNode: list_keys_of_every_node,
        Statistics: statistics,
    }
    """What carries out each kind of request."""
