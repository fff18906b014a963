"""The disks of an embedded store, the thread that runs them, and the operations of a
store that has them.

The tier is used under the lock of the store, as the core is. The thread starts jobs,
takes their results, and wakes the calls that wait for them. What it promises, and what
it leaves to others, is as in a server (`infinistore/server/disk.py`).

The operations say what both tiers have, and wait for disks where they must: reads until
blocks are in memory, `delete` and `purge` until no crash can bring a key back, `flush`
until blocks are durable. Calls that wait for a disk end at the store's deadline.
"""

import os
import select
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from random import Random, SystemRandom
from typing import Any, ClassVar, TypeVar

import attrs

from infinistore.client import requests
from infinistore.client.memory.views import Returns
from infinistore.client.operations.embedded import AwaitDisk, EmbeddedOperations, hold_token
from infinistore.client.options import Options
from infinistore.client.requests import check_all_there
from infinistore.core.removals import MAX_TOLD_KEYS, Told
from infinistore.core.store import StoreCore
from infinistore.disk.guarded_tier import Fetch, GuardedTier, Purging, names_on_disk
from infinistore.disk.settings import TierSettings
from infinistore.disk.tier import DiskTier
from infinistore.disk.waits import Wait
from infinistore.disk_io.store_disks import open_disks
from infinistore.errors import StoreUnavailable
from infinistore.host import start_thread
from infinistore.protocol import messages
from infinistore.protocol.messages import Found, Matched, Prefetched
from infinistore.statistics import DiskTierStatistics, Stats

_LAST_WRITES_S = 10.0
"""How long a store that is closed writes what waits for its disks."""
_THREADS_END_S = 5.0


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
        random = random or SystemRandom()
        opened = open_disks(options.disks, random)
        settings = TierSettings(admission=options.disk_admission, wait_s=options.disk_wait_s)
        tier = DiskTier(core, clock=clock, settings=settings, random=random)
        self.tier = GuardedTier(tier)
        """To be used under the lock of the store."""
        self._opened = opened
        self._runner = opened.runner
        self._returns = returns
        self._clock = clock
        self._ending = False
        self._asleep = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        for volume in opened.volumes:
            tier.add(volume)
        self.tier.when_there_is_work(self._wake)
        self._thread = threading.Thread(target=self._run, name="infinistore-disks", daemon=True)
        try:
            start_thread(self._thread)
        except StoreUnavailable:
            self._runner.close(timeout_s=_THREADS_END_S)
            os.close(self._wake_fd)
            raise

    def waiting(self, wait: Wait) -> Future[None]:
        """Return what is done when a wait is settled. Under the lock."""
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()  # whoever waits may go, and the result come all the same
        wait.when_settled(lambda: done.set_result(None))
        return done

    def statistics(self) -> DiskTierStatistics:
        """Return the figures of the tier and its disks. Under the lock."""
        return self._opened.statistics(self.tier)

    def close(self) -> None:
        """Write what waits for the disks, end all waiting, and unlock the disks.

        Nothing reads or writes the pool afterwards, unless a disk hangs: that memory
        stays mapped.
        """
        with self._returns.lock:
            finished = self.waiting(self.tier.close(self._clock() + _LAST_WRITES_S))
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
        """Have the thread look at the tier. Under the lock."""
        if self._asleep:
            self._asleep = False
            os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody waits for this thread
            with self._returns.lock:
                self.tier.fail(error)
        finally:
            with self._returns.lock:
                self._ending = True
                self.tier.stop()

    def _work(self) -> None:
        poll = select.poll()
        poll.register(self._runner.fd, select.POLLIN)
        poll.register(self._wake_fd, select.POLLIN)
        tier, runner = self.tier, self._runner
        while not self._ending:
            results = runner.take()
            for result in results:  # one at a time: each may take a millisecond, and calls wait for the lock
                with self._returns.lock:
                    tier.done([result])
            with self._returns.lock:
                self._asleep = True
                jobs = tier.jobs()
                deadline = tier.next_deadline()
            self._returns.flush()
            runner.submit(jobs)
            timeout_ms = None if deadline is None else max(0.0, deadline - self._clock()) * 1000
            if any(fd == self._wake_fd for fd, _ in poll.poll(timeout_ms)):
                os.eventfd_read(self._wake_fd)


_T = TypeVar("_T")


class OperationsOnDisk(EmbeddedOperations):
    """The operations for one caller. What they leave as it is, the class above has."""

    @property
    def _disks(self) -> EmbeddedDisks:
        """For a call, under the lock. StoreUnavailable: the store was closed."""
        self._store.check_usable()
        disks = self._store.disks
        assert isinstance(disks, EmbeddedDisks)
        return disks

    async def get(self, request: requests.Get) -> list[bytearray | None]:
        """Read the batch into memory of its own; None for what is missing."""
        return await self._in_parts(request.keys, lambda part: super(OperationsOnDisk, self).get(request.at(part)))

    async def get_into(self, request: requests.GetInto) -> list[int | None]:
        """Read the batch into the caller's memory; return the stored lengths, None for
        what is missing.
        """
        if request.all_or_nothing:
            present = await self.exists(messages.Exists(messages.Keys(request.batch.keys)))
            check_all_there(request.keys, [there or None for there in present])
        return await self._in_parts(request.keys, lambda part: super(OperationsOnDisk, self).get_into(request.at(part)))

    async def _in_parts(self, keys: Sequence[str], read: Callable[[range], Coroutine[Any, Any, list[_T]]]) -> list[_T]:
        """Read a batch, in parts if the pool has no room for all that is on disk."""
        found: list[_T] = []
        while len(found) < len(keys):
            with self._lock:
                count = self._disks.tier.fitting(keys[len(found) :])
            found += await read(range(len(found), len(found) + count))
        return found

    def _reading(self, keys: Sequence[str]) -> Callable[[], AwaitDisk | None]:
        """Return what says what to wait for, until what is on disk is in memory, too.

        What is late, fails, or finds no room stays missing.
        """
        fetch: Fetch | None = None

        def to_wait_for() -> AwaitDisk | None:
            nonlocal fetch
            disks = self._disks
            fetch = fetch or Fetch(disks.tier, keys, self._deadline)
            wait = fetch.next()
            return None if wait is None else AwaitDisk(disks.waiting(wait))

        return to_wait_for

    @property
    def _deadline(self) -> float:
        return self._store.clock() + self._store.deadline_s

    async def exists(self, request: messages.Exists) -> Found:
        """Ask which keys are there."""
        with self._lock:
            present = self._disks.tier.exists(request.keys)
        return Found.partly_on_disk(map(bool, present), present.count(2))

    async def match_prefix(self, request: messages.MatchPrefix) -> Matched:
        """Count the leading keys that are there."""
        keys, hold_s = request.keys, request.hold_us / 1e6
        with self._lock:
            tier = self._disks.tier
            match = tier.hold_prefix(self._client, keys, hold_s) if hold_s else tier.match_prefix(keys)
        return Matched(match.matched, hold_token(match.hold_id), match.matched - match.in_memory)

    def _release_hold(self, hold_id: int) -> bool:
        return self._disks.tier.release_hold(hold_id)

    def _told(self, place: tuple[int, int]) -> Told:
        tier = self._disks.tier
        return tier.core.removal_log.told(place, MAX_TOLD_KEYS, tier.exists)

    async def prefetch(self, request: messages.Prefetch) -> Prefetched:
        """Have blocks read ahead."""
        with self._lock:
            ahead = self._disks.tier.prefetch(request.keys, request.hold_us / 1e6 or None)
        return Prefetched(ahead.reading, ahead.skipped, hold_token(ahead.hold_id))

    async def flush(self, request: messages.Flush) -> int:
        """Make blocks durable; return how many keys have a durable one."""
        with self._lock:
            disks = self._disks
            wait = disks.tier.flush(request.keys, self._deadline)
            done = disks.waiting(wait)
        await AwaitDisk(done)
        wait.check()
        return len(set(request.keys)) - wait.unmet

    async def delete(self, request: messages.Delete) -> int:
        """Delete keys; return how many were there."""
        with self._lock:
            disks = self._disks
            on_disk = names_on_disk(disks.tier, request.keys)
            deletion = disks.tier.delete(request.keys, self._deadline)
            disks.tier.core.removal_log.note(on_disk)
            done = disks.waiting(deletion.wait)
        await AwaitDisk(done)
        deletion.wait.check(in_time=True)
        return deletion.deleted

    async def purge(self, request: messages.Purge) -> int:
        """Delete everything; return how many keys there were in memory."""
        with self._lock:
            disks = self._disks
            purging = Purging(disks.tier, self._deadline)
            done = disks.waiting(purging.disks)
        await AwaitDisk(done)
        has_more = True
        while has_more:
            with self._lock:
                self._store.check_usable()
                has_more = purging.delete_some()
        for wait in purging.waits:
            with self._lock:
                done = disks.waiting(wait)
            await AwaitDisk(done)
        with self._lock:
            disks.tier.core.removal_log.end()  # what was on disk only has no names here
        purging.check()
        return purging.deleted

    async def statistics(self, request: messages.Statistics) -> Stats:
        """The statistics of the store and of its disks."""
        stats = await super().statistics(request)
        with self._lock:
            return attrs.evolve(stats, disk=self._disks.statistics())

    handlers: ClassVar[Mapping[type[Any], Callable[[Any, Any], Coroutine[Any, Any, Any]]]] = {
        **EmbeddedOperations.handlers,
        requests.Get: get,
        requests.GetInto: get_into,
        messages.Exists: exists,
        messages.MatchPrefix: match_prefix,
        messages.Prefetch: prefetch,
        messages.Flush: flush,
        messages.Delete: delete,
        messages.Purge: purge,
        messages.Statistics: statistics,
    }
