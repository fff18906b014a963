"""DiskTier: disks below a store's memory. It decides; others do the I/O.

The tier follows the core's journal of what was put and removed: after `follow`, no disk
finds a block that is not its key's newest one, and what is on no disk is queued. It
writes blocks that have aged to the disks, reads blocks that are asked for back into the
pool, and keeps both tiers telling one story. It is as the core is: synchronous calls, a
clock that is given, one thread at a time.

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

This module puts the parts together: writing (`demotion`), reading (`promotion`),
removal (`deletions`), room on disk (`reinsertion`), each disk's jobs and health
(`disks`). It keeps the holds over both tiers: what is in memory is held there, the rest
on disk, bounded as the core's holds are, in time and in bytes. It wakes the writers of
a finished batch, starts a disk once its recovery is done, drops a disk that failed, and
removes a retired disk when its last job has finished.
"""

import errno
import heapq
import random
import random as random_module
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from itertools import compress

import attrs

from infinistore.allocators.base import Extent
from infinistore.core import Client, Reservation, StoreCore
from infinistore.core.index import Entry, extent_of
from infinistore.disk.deletions import Deletions
from infinistore.disk.demotion import AdmissionQueue, Demotion, Flushes, same_block
from infinistore.disk.disks import Disk, Disks, Place
from infinistore.disk.jobs import Job, Result
from infinistore.disk.promotion import Promotion, leading_at_once
from infinistore.disk.reinsertion import Reinsertion
from infinistore.disk.settings import TierSettings
from infinistore.disk.volume import Durable, Lost, Reclaim, Shrunk, Volume
from infinistore.disk.waits import Deletion, Prefetch, PrefixMatch, Wait, Waits
from infinistore.errors import LimitExceeded
from infinistore.sizes import in_units
from infinistore.statistics import DiskTierStatistics

_MOST_HELD_RATIO = 1 / 8


@attrs.define(eq=False)
class _Hold:
    """One hold: by the core, and on disk."""

    end: float
    core_ids: list[int]
    places: dict[str, Place]
    bytes: int


class TierHolds:
    """The holds of one tier that are not the core's alone. Ids are random."""

    def __init__(self, core: StoreCore, client: Client, disks: Disks, chance: random.Random) -> None:
        self.bytes = 0
        """What is held on disks; a block held twice counts twice."""
        self._core = core
        self._client = client
        self._disks = disks
        self._random = chance
        self._holds: dict[int, _Hold] = {}
        self._by_key: dict[str, list[_Hold]] = {}
        self._ends: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._holds)

    def hold(self, in_memory: Sequence[str], on_disk: dict[str, Place], hold_s: float, now: float) -> int:
        """Hold these keys; return the id. Errors: see `StoreCore.hold_prefix`."""
        held_bytes = sum(place.location.length for place in on_disk.values())
        bound_bytes = int(_MOST_HELD_RATIO * sum(disk.volume.statistics().capacity_bytes for disk in self._disks))
        if on_disk and self.bytes + held_bytes > bound_bytes:
            raise LimitExceeded(
                f"all holds together would keep {in_units(self.bytes + held_bytes)} on disk, and"
                f" {_MOST_HELD_RATIO:g} of its capacity is {in_units(bound_bytes)}; release holds sooner, or hold a"
                " shorter prefix"
            )
        # The core checks the time even if nothing is held in memory.
        _, core_id = self._core.hold_prefix(self._client, in_memory, hold_s)
        if not on_disk:
            return core_id
        hold = _Hold(now + hold_s, [core_id] if core_id else [], dict(on_disk), held_bytes)
        hold_id = 0
        while not hold_id or hold_id in self._holds:
            hold_id = self._random.getrandbits(63)
        self._holds[hold_id] = hold
        heapq.heappush(self._ends, (hold.end, hold_id))
        self.bytes += held_bytes
        for key, place in on_disk.items():
            self._by_key.setdefault(key, []).append(hold)
            place.disk.volume.pin([place.location])
        return hold_id

    def release(self, hold_id: int) -> bool:
        """End a hold; False if there is none with this id here."""
        hold = self._holds.pop(hold_id, None)
        if hold is None:
            return False
        self.bytes -= hold.bytes
        for core_id in hold.core_ids:
            self._core.release_hold(core_id)
        for key, place in hold.places.items():
            place.disk.volume.unpin([place.location])
            others = self._by_key[key]
            others.remove(hold)
            if not others:
                del self._by_key[key]
        return True

    def expire(self, now: float) -> None:
        """End the holds whose time is over."""
        while self._ends and (self._ends[0][0] <= now or self._ends[0][1] not in self._holds):
            self.release(heapq.heappop(self._ends)[1])

    def next_deadline(self) -> float | None:
        """Return when the next hold ends."""
        return self._ends[0][0] if self._ends else None

    def promoted(self, keys: Sequence[str], now: float) -> None:
        """Hold keys that came up in memory, too, as far as the core's bounds allow."""
        by_hold: dict[_Hold, list[str]] = {}
        for key in keys:
            for hold in self._by_key.get(key, ()):
                by_hold.setdefault(hold, []).append(key)
        for hold, held in by_hold.items():
            if hold.end > now:
                try:
                    _, core_id = self._core.hold_prefix(self._client, held, hold.end - now)
                except LimitExceeded:
                    continue  # they stay held on disk
                if core_id:
                    hold.core_ids.append(core_id)


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
        self.clock = clock
        self._journal = core.journal
        self._journal.on_first = self._has_work
        self._writer = core.open_client("the disks' writer", counted=False)
        self._reader = core.open_client("the disks' reader", counted=False)
        self._disks = Disks()
        self._queue = AdmissionQueue(self.settings.admission, core.pool, self._most_queued_bytes)
        self._flushes = Flushes(core, self._disks, self._queue)
        self._demotion = Demotion(
            core, self._writer, disks=self._disks, queue=self._queue, flushes=self._flushes, settings=self.settings
        )
        self._promotion = Promotion(core, self._reader, self._disks, self._commit, clock)
        self._deletions = Deletions(self._disks)
        self._demotion.on_doubt = self._deletions.outdate
        self._reinsertion = Reinsertion(core)
        self._holds = TierHolds(core, self._reader, self._disks, random or random_module.SystemRandom())
        self._promotion.on_promoted = lambda keys: self._holds.promoted(keys, self.clock())
        self._waits = Waits()
        self._purges: dict[tuple[Disk, int], list[Wait]] = {}
        self._given_up: set[Disk] = set()
        self._leaving: set[Disk] = set()
        self._failed: list[Disk] = []
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
        volume.compresses = self.settings.compress
        disk = Disk(volume, self.settings)
        self._disks.add(disk)
        self._demotion.add(disk)
        self._deletions.add(disk)
        self._has_work()

    # Driving

    def jobs(self) -> list[Job]:
        """Return the jobs to start now, and settle what is late."""
        now = self.clock()
        self._follow()
        self._waits.expire(now)
        self._holds.expire(now)
        self._has_more = False
        for disk in self._disks:
            self._has_more |= self._step(disk, now)
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
        now = self.clock()
        self._follow()
        for result in results:
            disk = self._disks.of(result.job.volume)
            if disk is not None:
                disk.traffic.done(result)
        for disk in self._disks:
            self._has_more |= self._step(disk, now)

    def next_deadline(self) -> float | None:
        """Return when to call `jobs` at the latest; None: after the next event."""
        has_failure = any(disk.has_failed and disk not in self._given_up for disk in self._disks)
        has_waiting = any(disk.traffic.has_waiting for disk in self._disks)
        if self._has_more or self._journal or has_failure or has_waiting:
            return self.clock()
        times = [
            self._waits.next_deadline(),
            self._holds.next_deadline(),
            self._demotion.next_deadline(self.clock()),
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
        found = self._on_disk_only(keys) if self.clock() < deadline else {}
        if not found:
            return None
        self.core.touch(keys)  # else what comes up could evict what is in memory of them
        wait = Wait(deadline, len(found))
        self._promotion.read(list(found), list(found.values()), wait)
        self._has_work()
        return self._waits.add(wait)

    def last_moment(self, deadline: float) -> float:
        """Return when a read that begins now ends: after `wait_s` at the latest."""
        return min(deadline, self.clock() + self.settings.wait_s)

    def fitting(self, keys: Sequence[str]) -> int:
        """Count the leading keys to read at a time, if some are on disk only: what they
        take of the pool is bounded, so that the last ones do not evict the first."""
        on_disk = self._on_disk_only(keys)
        return leading_at_once(self.core, keys, on_disk) if on_disk else len(keys)

    def prefetch(self, keys: Sequence[str], hold_s: float | None = None) -> Prefetch:
        """Bring keys into memory in the background, heads first (in parts of
        `SORTED_BYTES`); return at once.

        With `hold_s`, hold what is there as `hold_prefix` does, on disk, and in memory
        as it comes. Errors are those of `StoreCore.hold_prefix`.
        """
        found = self._on_disk_only(keys)
        hold_id = 0
        if hold_s is not None:
            hold_id = self._holds.hold(self._in_memory(keys), found, hold_s, self.clock())
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
        hold_id = self._holds.hold(self._in_memory(held), self._on_disk_only(held), hold_s, self.clock())
        return attrs.evolve(match, hold_id=hold_id)

    def release_hold(self, hold_id: int) -> bool:
        """End a hold, the tier's or the core's; False if there is none."""
        self._holds.expire(self.clock())
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
        wait = Wait(deadline, len(self._shown()))
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
            now = self.clock()
            self._close_at = now + _WRITING_RATIO * (deadline - now)
            self._follow()
            self._disks.stop_overwriting()
            # What was used last comes first. Who wants reads to decide still has that.
            by_use = None if self.settings.admission == "second-use" else list(self.core.index)[::-1]
            self.flush(by_use and self._disks.replaced_first(by_use), self._close_at)
            self._promotion.give_up()
            self._closing = self._waits.add(Wait(deadline, len(self._disks)))
        return self._closing

    def statistics(self) -> DiskTierStatistics:
        """Return the current figures, but for those of the disks' folders and jobs."""
        demotion, promotion = self._demotion, self._promotion
        return DiskTierStatistics(
            disks=[disk.statistics() for disk in self._shown()],
            queued_bytes=demotion.waiting_bytes,
            ageing_bytes=self._queue.ageing_bytes,
            pinned_bytes=demotion.pinned_bytes,
            skipped_blocks=self._queue.skipped_blocks,
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
        self._journal.take()
        self._journal.on_first = self._journal.take
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
        self._follow(extents)

    def _follow(self, promoted: AbstractSet[Extent] = frozenset()) -> None:
        """Learn what the core committed and removed; `promoted` came from a disk."""
        self.core.commit_written()
        for change, keys, entries in self._journal.take() if self._journal else ():
            if change == "put":
                if promoted and extent_of(entries[0]) in promoted:
                    self._queue.pass_by(entries)
                else:
                    self._follow_put(keys, entries)
            elif change == "delete":
                self._demotion.changed(keys, None)
                self._deletions.delete(keys)
            elif change == "purge":
                self._purge([])
            elif change == "read":
                self._follow_read(keys)
            # A block that was dropped from memory stays on disk: that copy may be good.

    def _follow_put(self, keys: Sequence[str], entries: Sequence[Entry]) -> None:
        """Forget older blocks of these keys, and queue those that are on no disk."""
        equal, outdated = self._demotion.changed(keys, entries)
        for disk in self._disks:
            if disk.is_recovering:
                disk.note_changes(keys)
                continue
            for key, entry, location in zip(keys, entries, disk.volume.find(keys), strict=True):
                if location is not None:
                    same = not location.own_checksum and same_block(entry, location.length, location.checksum)
                    (equal if same else outdated).add(key)
        if outdated:
            self._disks.forget(outdated)
        if not equal:
            self._queue.put(keys, entries)
        else:
            self._queue.pass_by([entry for key, entry in zip(keys, entries, strict=True) if key in equal])
            fresh = [(key, entry) for key, entry in zip(keys, entries, strict=True) if key not in equal]
            if fresh:
                self._queue.put([key for key, _ in fresh], [entry for _, entry in fresh])

    def _follow_read(self, keys: Sequence[str]) -> None:
        """Queue blocks that were read and are on no disk."""
        current = self.core.index.get_many(keys)
        fresh = {
            key: entry
            for key, entry, on_disk in zip(keys, current, self._disks.contains(keys), strict=True)
            if entry is not None and not on_disk and not self._demotion.is_in_flight(key)
        }
        if fresh:
            self._queue.read(list(fresh), list(fresh.values()))

    # What becomes of disks

    def _step(self, disk: Disk, now: float) -> bool:
        """Let a volume work, and act on events; return whether there is more to do."""
        has_more = disk.step()
        for event in disk.events():
            has_more = True
            if isinstance(event, Reclaim):
                self._reinsertion.begin(disk, event)
            elif isinstance(event, Shrunk):
                disk.health.shrank(event.errno)
            else:
                self._end_batch(disk, event, now)
        has_recovered = disk.has_recovered()
        for waits in disk.begin_purges():
            self._begin_purge(disk, waits)
        if has_recovered:  # one that is purged first belongs to the others not before that is durable
            self._disks.recovered()
        if disk.volume.state == "read-only" and disk.health.state == "healthy":
            disk.health.refused(disk.volume.errno)
        if disk.health.state != "healthy" and disk not in self._given_up:
            disk.volume.stop_writing()
            self._give_up(disk)
            if disk.has_failed:
                self._take_out_failed(disk)
            has_more = True
        return has_more

    def _shown(self) -> list[Disk]:
        """Return the disks to be shown, with those that failed."""
        return sorted([*self._disks, *self._failed], key=lambda disk: disk.number)

    def _take_out_failed(self, disk: Disk) -> None:
        """Take a disk out whose volume will no longer say how anything ended."""
        disk.is_leaving = True
        for key in [key for key in self._purges if key[0] is disk]:
            self._end_purge(disk, self._purges.pop(key), met=False)
        self._leaving.add(disk)

    def _give_up(self, disk: Disk) -> None:
        if disk not in self._given_up:
            self._given_up.add(disk)
            self._demotion.give_up(disk)
            self._deletions.give_up(disk)
            self._disks.exclude(disk)

    def _take_out(self) -> bool:
        """Forget the failed disks that have ended; return whether there were any."""
        ended = [one for one in self._disks if one in self._leaving and one.has_ended]
        for disk in ended:
            self._leaving.remove(disk)
            self._failed.append(disk)
            for part in (self._disks, self._demotion, self._deletions, self._reinsertion):
                part.remove(disk)
        return bool(ended)

    def _end_batch(self, disk: Disk, event: Durable | Lost, now: float) -> None:
        waits = self._purges.pop((disk, event.token), None)
        met = isinstance(event, Durable)
        if isinstance(event, Lost):
            disk.health.write_failed(event.errno, now)
        if waits is not None:
            self._end_purge(disk, waits, met=met)
        elif not self._reinsertion.ended(disk, event.token):
            for part in (self._demotion, self._deletions):
                if part.durable(disk, event.token, now) if met else part.lost(disk, event.token):
                    break

    def _begin_purge(self, disk: Disk, waits: list[Wait]) -> None:
        if disk.health.state == "off" or disk.volume.state in ("closing", "closed"):
            self._end_purge(disk, waits, met=False)
        else:
            self._purges[disk, disk.volume.purge()] = waits

    def _end_purge(self, disk: Disk, waits: list[Wait], *, met: bool) -> None:
        """End a purge on a disk. It does not matter where that will be emptied."""
        for wait in waits:
            wait.end(met=met or not self._disks.counts(disk))

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
        self._has_more |= self._take_out()
        if self._closing is not None:
            self._close(self._closing, now)

    def _purge(self, waits: list[Wait]) -> None:
        """Purge every disk, or have it purged when it has recovered."""
        self._queue.clear()
        self._demotion.clear()
        for disk in self._failed:
            self._end_purge(disk, waits, met=False)
        for disk in self._disks:
            disk.purges.append(waits)
            for ready in disk.begin_purges():
                self._begin_purge(disk, ready)

    def _close(self, wait: Wait, now: float) -> None:
        is_written = self._demotion.is_idle and self._deletions.is_idle and not self._purges
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
