"""DiskTier: disks below a store's memory. It decides; others do the I/O.

The tier learns from the core's journal what was put and removed. It writes blocks that
have aged to the disks, reads blocks that are asked for back into the pool, and keeps
both tiers telling one story. It is as the core is: synchronous calls, a clock that is
given, one thread at a time.

Whoever drives it does this, in a loop:

- start the jobs that `jobs` returns, now;
- hand the results in with `done`, as they come;
- call `jobs` again after `done`, at `next_deadline`, and when `on_work` was called.

What it promises:

- A read never finds anything but the newest block of its key, from wherever it comes.
  What is late, damaged or has no room is a miss.
- A key that was deleted, or purged, does not come back once the deletion's wait was
  settled with nothing unmet, whatever crashes.
- Eviction waits for nothing here, and a put only pays for one item of the journal.
- Everything is bounded: what is pinned, queued, read ahead and held; every wait has a
  deadline.

This module puts the parts together: what is due (`admission`), writing (`demotion`,
`flushes`), reading (`promotion`), removal (`deletions`), room on disk (`reinsertion`),
`holds`, and each disk's jobs and health (`disks`, `traffic`, `health`).
"""

import errno
import random as random_module
from collections.abc import Callable, Sequence
from itertools import compress

import attrs

from infinistore.core import Client, Reservation, StoreCore
from infinistore.disk.deletions import Deletions
from infinistore.disk.demotion import AdmissionQueue, Demotion, Flushes
from infinistore.disk.disks import Disk, Disks, Membership, Place, TierStatistics
from infinistore.disk.following import JournalFollower
from infinistore.disk.holds import TierHolds
from infinistore.disk.jobs import Job, Result
from infinistore.disk.outcomes import Outcomes
from infinistore.disk.promotion import Promotion, leading_at_once
from infinistore.disk.reinsertion import Reinsertion
from infinistore.disk.settings import TierSettings
from infinistore.disk.volume import Volume
from infinistore.disk.waits import Deletion, Prefetch, PrefixMatch, Wait, Waits

__all__ = ["DiskTier"]

_WRITING_RATIO = 0.8  # of the time to close: the rest is for snapshots


class DiskTier:
    """The disks below one store. `core` was made with a journal, which the tier
    follows: with `reads` for the admission "second-use".

    Times are those of `clock`, in seconds, the core's own. `random` creates the ids of
    holds; the default is the operating system's generator.
    """

    def __init__(
        self,
        core: StoreCore,
        *,
        clock: Callable[[], float],
        settings: TierSettings | None = None,
        random: random_module.Random | None = None,
    ) -> None:
        if core.journal is None:
            raise ValueError("a disk tier needs a core with a journal: StoreCore(journal=Journal())")
        self.core = core
        self.settings = settings or TierSettings()
        if self.settings.admission == "second-use" and not core.journal.reads:
            raise ValueError("the admission second-use needs to know of reads: Journal(reads=True)")
        self.on_work: Callable[[], object] | None = None
        """Called when `jobs` should be called, or `next_deadline` is earlier than it
        was. It may be called often, and from within any call of the core."""
        self.prefetch_skipped_blocks = 0
        self._clock = clock
        core.journal.on_first = self._has_work
        self._writer = core.open_client("the disks' writer", counted=False)
        self._reader = core.open_client("the disks' reader", counted=False)
        self._disks = Disks()
        self._queue = AdmissionQueue(self.settings.admission, core.pool, self._most_queued_bytes)
        self._flushes = Flushes(core, self._disks, self._queue)
        self._demotion = Demotion(
            core, self._writer, disks=self._disks, queue=self._queue, flushes=self._flushes, settings=self.settings
        )
        self._promotion = Promotion(core, self._reader, self._disks, self._commit, clock)
        self._membership = Membership()
        self._deletions = Deletions(self._disks, self._membership)
        self._demotion.on_doubt = self._deletions.outdate
        self._journal = JournalFollower(
            core,
            core.journal,
            disks=self._disks,
            queue=self._queue,
            demotion=self._demotion,
            deletions=self._deletions,
            purge=lambda: self._purge([]),
        )
        self._reinsertion = Reinsertion(core)
        self._outcomes = Outcomes(
            self._disks,
            demotion=self._demotion,
            deletions=self._deletions,
            reinsertion=self._reinsertion,
            membership=self._membership,
        )
        self._holds = TierHolds(core, self._reader, self._disks, random or random_module.SystemRandom())
        self._promotion.on_promoted = lambda keys: self._holds.promoted(keys, self._clock())
        self._waits = Waits()
        self._has_more = False
        self._closing: Wait | None = None
        self._closed: set[Disk] = set()
        self._close_at = 0.0
        self._next_snapshot = clock() + self.settings.snapshot_s

    # Disks

    def add(self, volume: Volume) -> None:
        """Use one more disk. It is written and read as soon as it has recovered."""
        if self._disks.of(volume.number) is not None:
            raise ValueError(f"there is a disk {volume.number} already")
        disk = Disk(volume, self.settings)
        self._disks.add(disk)
        self._membership.add(disk)
        self._demotion.add(disk)
        self._deletions.add(disk)
        self._has_work()

    def remove(self, number: int, deadline: float) -> Wait:
        """Take a disk out: what is only there is missing from now on, and what waited
        for it goes to others.

        The wait is settled when its folder may be closed: no job is under way, and its
        index is saved. When it comes back, it is emptied. KeyError: there is none.
        """
        disk = self._disks.of(number)
        if disk is None:
            raise KeyError(f"there is no disk {number}")
        self._follow()
        wait = Wait(deadline, 1)
        self._outcomes.remove(disk, wait)
        self._has_work()
        return self._waits.add(wait)

    # Driving

    def jobs(self) -> list[Job]:
        """Return the jobs to start now, and settle what is late."""
        now = self._clock()
        self._follow()
        self._waits.expire(now)
        self._holds.expire(now)
        self._has_more = False
        for disk in self._disks:
            self._has_more |= self._outcomes.step(disk, now)
        self._work(now)
        jobs = []
        for disk in self._disks:
            if disk.health.state == "off":
                disk.start_jobs()  # what a job that hung has led to ends, too
                self._has_more |= disk.traffic.fail_waiting(errno.EIO)
            else:
                self._has_more |= disk.step()  # what the work above began
                disk.start_jobs()
                hangs = disk.traffic.hangs
                jobs += disk.traffic.take(now)
                if disk.traffic.hangs > hangs:
                    disk.health.hung(now)
        return jobs

    def done(self, results: Sequence[Result]) -> None:
        """Take the results of jobs, in any order."""
        now = self._clock()
        self._follow()
        for result in results:
            disk = self._disks.of(result.job.volume)
            if disk is not None:
                disk.traffic.done(result)
        for disk in self._disks:
            self._has_more |= self._outcomes.step(disk, now)

    def next_deadline(self) -> float | None:
        """Return when to call `jobs` at the latest; None: not before something
        happens."""
        has_more = self._has_more or self._journal.has_items or self._outcomes.has_failure
        if has_more or any(disk.traffic.has_waiting for disk in self._disks):
            return self._clock()
        times = [
            self._waits.next_deadline(),
            self._holds.next_deadline(),
            self._demotion.next_deadline(self._clock()),
            self._next_snapshot if any(disk.has_unsaved for disk in self._disks) else None,
            *(disk.traffic.next_deadline() for disk in self._disks),
        ]
        return min((time for time in times if time is not None), default=None)

    # Reading

    def want(self, keys: Sequence[str], deadline: float) -> Wait | None:
        """Bring the keys that are on disk only into memory; None if there are none.

        Lease the same keys when it is settled, by the `last_moment` before the
        deadline. What is late, damaged or finds no room in the pool is simply not there
        then, and others may have been evicted meanwhile: a `Fetch` asks again. Keys
        that are already being read are not read twice.
        """
        deadline = self.last_moment(deadline)
        found = self._on_disk_only(keys) if self._clock() < deadline else {}
        if not found:
            return None
        self.core.touch(keys)  # else what comes up could evict what is in memory of them
        wait = Wait(deadline, len(found))
        self._promotion.read(list(found), list(found.values()), wait)
        self._has_work()
        return self._waits.add(wait)

    def last_moment(self, deadline: float) -> float:
        """Return how long a read waits that begins now: until its deadline, and for
        `wait_s` at most."""
        return min(deadline, self._clock() + self.settings.wait_s)

    def fitting(self, keys: Sequence[str]) -> int:
        """Count the leading keys to read at a time, if some are on disk only: what they
        take of the pool is bounded, so that the last ones do not evict the first."""
        on_disk = self._on_disk_only(keys)
        return leading_at_once(self.core, keys, on_disk) if on_disk else len(keys)

    def prefetch(self, keys: Sequence[str], hold_s: float | None = None) -> Prefetch:
        """Bring keys into memory in the background, heads first; return at once.

        With `hold_s`, hold what is there as `hold_prefix` does, on disk, and in memory
        as it comes. Errors are those of `StoreCore.hold_prefix`.
        """
        found = self._on_disk_only(keys)
        hold_id = 0
        if hold_s is not None:
            hold_id = self._holds.hold(self._in_memory(keys), found, hold_s, self._clock())
        room_bytes = self._promotion.prefetch_room_bytes
        chosen = []
        for key, place in found.items():
            room_bytes -= self.core.pool.footprint(place.location.length)
            if room_bytes < 0:
                break
            chosen.append(key)
        self._promotion.read(chosen, [found[key] for key in chosen], None)
        self.prefetch_skipped_blocks += len(found) - len(chosen)
        self._has_work()
        return Prefetch(len(chosen), len(found) - len(chosen), hold_id)

    def exists(self, keys: Sequence[str]) -> bytes:
        """Return one byte per key: 0 if it is nowhere, 1 in memory, 2 on disk only."""
        in_memory = self.core.exists(keys)
        self._follow()
        if 0 not in in_memory:
            return in_memory
        return bytes(there or 2 * on_disk for there, on_disk in zip(in_memory, self._disks.contains(keys), strict=True))

    def match_prefix(self, keys: Sequence[str], *, touch: bool = True) -> PrefixMatch:
        """Count the leading keys that either tier has; touch those in memory."""
        where = self.exists(keys)
        matched = where.find(0)
        matched = len(keys) if matched < 0 else matched
        in_memory = where[:matched].count(1)
        if touch and in_memory:
            self.core.touch(keys[:matched])
        return PrefixMatch(matched, in_memory)

    def hold_prefix(self, client: Client, keys: Sequence[str], hold_s: float) -> PrefixMatch:
        """Match a prefix and hold it for `hold_s` seconds: in memory from eviction, on
        disk from being overwritten. Errors are those of `StoreCore.hold_prefix`."""
        client.check_open()
        match = self.match_prefix(keys)
        held = keys[: match.matched]
        hold_id = self._holds.hold(self._in_memory(held), self._on_disk_only(held), hold_s, self._clock())
        return attrs.evolve(match, hold_id=hold_id)

    def release_hold(self, hold_id: int) -> bool:
        """End a hold of either kind, the tier's or the core's own; False if there is
        none with this id."""
        self._holds.expire(self._clock())
        return self._holds.release(hold_id) or self.core.release_hold(hold_id)

    # Writing and removing

    def flush(self, keys: Sequence[str] | None, deadline: float) -> Wait:
        """Write the blocks that these keys have now, without ageing them; all that is
        queued, if None.

        The wait is settled when they are durable. `unmet` counts keys that exist
        nowhere, or could not be written by the deadline.
        """
        self._follow()
        if keys is None:
            self._queue.stop_ageing()
            waiting = self._demotion.waiting_keys()
            keys = list(compress(waiting, self.core.index.contains_many(waiting)))
        wait = self._flushes.flush(list(dict.fromkeys(keys)), deadline, self._demotion.is_in_flight)
        self._has_work()
        return self._waits.add(wait)

    def delete(self, keys: Sequence[str], deadline: float) -> Deletion:
        """Delete keys from both tiers. From now on nobody finds them."""
        keys = list(dict.fromkeys(keys))
        deleted = len(keys) - self.exists(keys).count(0)
        self.core.delete(keys)
        self._follow()
        self._has_work()
        return Deletion(deleted, self._waits.add(self._deletions.wait(keys, deadline)))

    def purge(self, deadline: float) -> Wait:
        """Forget everything on every disk, also what is being written; `Purging` does
        so in memory, too. `unmet` counts disks that failed.
        """
        self._follow()
        wait = Wait(deadline, len(self._outcomes.shown()))
        self._purge([wait])
        self._has_work()
        return self._waits.add(wait)

    def close(self, deadline: float) -> Wait:
        """Write what is queued, and what was skipped, where that overwrites nothing.
        Then write a snapshot and the mark of a clean end, on every disk.

        From now on nothing new is read or written. Jobs that hang still have to return
        before the pool is closed. `unmet` counts disks that did not end in time.
        """
        if self._closing is None:
            now = self._clock()
            self._close_at = now + _WRITING_RATIO * (deadline - now)
            self._follow()
            self._disks.stop_overwriting()
            # What was used last comes first. Who wants reads to decide still has that.
            by_use = None if self.settings.admission == "second-use" else list(self.core.index)[::-1]
            self.flush(by_use and self._disks.replaced_first(by_use), self._close_at)
            self._promotion.give_up()
            self._closing = self._waits.add(Wait(deadline, len(self._disks)))
        return self._closing

    def statistics(self) -> TierStatistics:
        """Return the current figures."""
        demotion, promotion = self._demotion, self._promotion
        return TierStatistics(
            disks=tuple(disk.statistics() for disk in self._outcomes.shown()),
            queued_bytes=demotion.waiting_bytes,
            ageing_bytes=self._queue.ageing_bytes,
            pinned_bytes=demotion.pinned_bytes,
            skipped_blocks=self._queue.skipped_blocks,
            skipped_bytes=self._queue.skipped_bytes,
            evicted_blocks=demotion.evicted_blocks,
            failed_blocks=demotion.failed_blocks,
            promoted_blocks=promotion.promoted_blocks,
            promoted_bytes=promotion.promoted_bytes,
            no_room_blocks=promotion.no_room_blocks,
            late_blocks=promotion.late_blocks,
            prefetch_bytes=promotion.prefetch_bytes,
            prefetch_skipped_blocks=self.prefetch_skipped_blocks,
            reinserted_blocks=self._reinsertion.reinserted_blocks,
            held_bytes=self._holds.bytes,
            unsafe_keys=self._deletions.unsafe_keys,
        )

    def stop(self, why: str, error: Exception | None = None) -> None:
        """Settle all waits; because of an error, turn all disks off. From then on, call
        nothing but `statistics` and `let_go`."""
        if error is not None:
            for disk in self._disks:
                disk.health.failed(error)
        self._journal.stop()
        self._waits.fail(why)

    def let_go(self) -> None:
        """After `stop`, when no job is out: give back what is pinned for the disks."""
        self.core.close_client(self._writer)
        self.core.close_client(self._reader)

    # Following the core

    def _has_work(self) -> None:
        if self.on_work is not None:
            self.on_work()

    def _commit(self, reservation: Reservation, keys: list[str], checksums: list[int]) -> None:
        """Commit blocks that were read from disks."""
        self._follow()
        extents = set(reservation.extents)
        self.core.commit(reservation, keys, checksums, replace=False)
        self._journal.follow(extents)

    def _follow(self) -> None:
        self._journal.follow()

    # Looking

    def _on_disk_only(self, keys: Sequence[str]) -> dict[str, Place]:
        """Return the distinct keys that are on disk and not in memory, in order."""
        in_memory = self.core.exists(keys)
        self._follow()
        if 0 not in in_memory or self._closing is not None:
            return {}
        missing = list(dict.fromkeys(key for key, there in zip(keys, in_memory, strict=True) if not there))
        return {key: place for key, place in zip(missing, self._disks.find(missing), strict=True) if place is not None}

    def _in_memory(self, keys: Sequence[str]) -> list[str]:
        return [key for key, there in zip(keys, self.core.exists(keys), strict=True) if there]

    def _most_queued_bytes(self) -> float:
        return max(self.settings.group_bytes, self.settings.queue_s * self._demotion.rate)

    # Working

    def _work(self, now: float) -> None:
        self._has_more |= self._deletions.work(self._demotion.is_appended)
        self._has_more |= self._demotion.work(now, blocked=self._deletions.blocked())
        self._promotion.work()
        self._reinsertion.work()
        if now >= self._next_snapshot:
            self._next_snapshot = now + self.settings.snapshot_s
            for disk in self._disks:
                disk.save_index()
        self._has_more |= self._outcomes.take_out()
        if self._closing is not None:
            self._close(self._closing, now)

    def _purge(self, waits: list[Wait]) -> None:
        self._queue.clear()
        self._demotion.clear()
        self._outcomes.purge(waits)

    def _close(self, wait: Wait, now: float) -> None:
        is_written = self._demotion.is_idle and self._deletions.is_idle and not self._outcomes.is_purging
        for disk in self._disks:
            if is_written or now >= self._close_at or not disk.is_writable or disk.volume.is_full:
                if disk.volume.state not in ("closing", "closed"):
                    disk.volume.close()
                    self._demotion.give_up(disk)
                    self._deletions.give_up(disk)
                    self._has_more = True
                if disk.volume.state == "closed" and disk not in self._closed:
                    self._closed.add(disk)
                    wait.end(met=not disk.volume.errno)
