"""Demotion: blocks of the pool are written to disks, in commit order, batch by batch.

The queue before the disks is the journal's order: heads of prefixes come before their
tails. It is bounded: a batch that is due while too much waits already is skipped as a
whole. So the newest batch goes without a copy, which is the tail of what was put last,
and the heads before it keep theirs.

A batch is leased as by a client, so that its bytes stay where they are, but neither
touched nor counted; then it is appended to the log of a disk. When it is durable, the
disk finds its keys. What was put again or deleted meanwhile was forgotten by then
(`Removals`), so a record that is found is always that of its key's newest block.

A flush waits until keys are durable. It means the block that a key has when its turn
comes. If it was put again meanwhile, the flush waits for the newer block; if it was
deleted, or evicted before it was written, the key is unmet.

Leaves to others: deletion (`Deletions`).
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Final

import attrs

from infinistore.core import Client, Lease, Pool, StoreCore
from infinistore.core.clients import leased_in_quarantine
from infinistore.core.index import NO_CHECKSUM, Entry, checksum_of, extent_of, length_of
from infinistore.disk.disks import Disk, Disks
from infinistore.disk.jobs import Compress, HashBlocks, Result, aligned
from infinistore.disk.settings import (
    LARGEST_READ_BYTES,
    MOST_BLOCKS_PER_GROUP,
    MOST_GROUPS,
    MOST_PINNED_BYTES,
    Admission,
    TierSettings,
)
from infinistore.disk.volume import Volume
from infinistore.disk.waits import Wait
from infinistore.errors import LimitExceeded

_AGE_RATIO: Final = 1 / 4


@attrs.frozen(eq=False)
class Run:
    """Blocks to be written, in commit order."""

    keys: Sequence[str]
    entries: Sequence[Entry]
    bytes: int
    """What they take on a disk, with padding."""
    attempts: int = 0
    """How often it was tried in vain."""
    urgent: bool = False
    """Somebody waits for it."""

    def split(self, most_bytes: int, most_blocks: int) -> "tuple[Run, Run | None]":
        """Return the leading blocks within these bounds, at least one, and the rest."""
        count = total = 0
        for entry in self.entries[:most_blocks]:
            if count and total + aligned(length_of(entry)) > most_bytes:
                break
            count += 1
            total += aligned(length_of(entry))
        if count == len(self.entries):
            return self, None
        first = attrs.evolve(self, keys=self.keys[:count], entries=self.entries[:count], bytes=total)
        rest = attrs.evolve(self, keys=self.keys[count:], entries=self.entries[count:], bytes=self.bytes - total)
        return first, rest


def run_of(keys: Sequence[str], entries: Sequence[Entry], *, attempts: int = 0, urgent: bool = False) -> Run:
    """Make a run of blocks."""
    return Run(keys, entries, sum(aligned(length_of(entry)) for entry in entries), attempts, urgent)


def same_block(entry: Entry, length: int, checksum: int) -> bool:
    """Whether a block in memory is known to equal one elsewhere."""
    return length_of(entry) == length and checksum_of(entry) == checksum != NO_CHECKSUM


class AdmissionQueue:
    """The runs of one tier that wait: to age in this pool, or for a disk.

    `most_bytes` returns how much may be due and wait at a time.
    """

    def __init__(self, admission: Admission, pool: Pool, most_bytes: Callable[[], float]) -> None:
        self.due: deque[Run] = deque()
        """What is to be written, oldest first; what is urgent before all others."""
        self.due_bytes = 0
        self.ageing_bytes = 0
        """What was put and is not due yet."""
        self.skipped_blocks = 0
        """Blocks that were due and not queued, because too much waited already."""
        self._admission = admission
        self._pool = pool
        self._most_bytes = most_bytes
        self._ageing: deque[tuple[int, Run]] = deque()
        self._put_bytes = 0

    def pass_by(self, entries: Sequence[Entry]) -> None:
        """Count blocks that are not to be written: they age those put before."""
        self._put_bytes += self._pool.footprints(list(map(length_of, entries)))
        while self._ageing and self._put_bytes - self._ageing[0][0] >= _AGE_RATIO * self._pool.capacity_bytes:
            run = self._ageing.popleft()[1]
            self.ageing_bytes -= run.bytes
            self._make_due(run)

    def put(self, keys: Sequence[str], entries: Sequence[Entry]) -> None:
        """Take blocks that were put."""
        run = run_of(keys, entries)
        if self._admission == "eager":
            self._make_due(run)
        elif self._admission == "lazy":
            self.pass_by(entries)
            self._ageing.append((self._put_bytes, run))
            self.ageing_bytes += run.bytes

    def read(self, keys: Sequence[str], entries: Sequence[Entry]) -> None:
        """Take blocks that were read, and that no disk has."""
        if self._admission == "second-use":
            self._make_due(run_of(keys, entries))

    def put_back(self, run: Run) -> None:
        """Queue a run again, before all others: it could not be written."""
        self.due.appendleft(run)
        self.due_bytes += run.bytes

    def take(self, most_bytes: int, most_blocks: int) -> Run | None:
        """Take the leading blocks that are due, of one run; None if there are none."""
        if not self.due:
            return None
        run, rest = self.due.popleft().split(most_bytes, most_blocks)
        if rest is not None:
            self.due.appendleft(rest)
        self.due_bytes -= run.bytes
        return run

    def stop_ageing(self) -> None:
        """Make everything due, however much that is."""
        for _, run in self._ageing:
            self.due.append(run)
            self.due_bytes += run.bytes
        self._ageing.clear()
        self.ageing_bytes = 0

    def clear(self) -> None:
        """Forget everything."""
        self.due.clear()
        self._ageing.clear()
        self.due_bytes = self.ageing_bytes = 0

    def _make_due(self, run: Run) -> None:
        if self.due and self.due_bytes + run.bytes > self._most_bytes():
            self.skipped_blocks += len(run.keys)
        else:
            self.due.append(run)
            self.due_bytes += run.bytes


@attrs.define(eq=False)
class WriteBatch:
    """Blocks that are written as one batch."""

    disk: Disk
    keys: list[str]
    entries: list[Entry]
    lease: Lease
    attempts: int
    checksums: list[int]
    own_checksums: list[bool]
    compressed: list[bytes | None]
    """The bytes of blocks that are compressed on the disk."""
    doubtful: list[str] = attrs.field(factory=list)
    """Keys of which another disk may have an older block, for all that is known."""
    token: int | None = None
    appended_at: float = 0.0

    @property
    def bytes(self) -> int:
        """The length of all blocks."""
        return sum(map(length_of, self.entries))

    @property
    def stored_bytes(self) -> int:
        """What they take on the disk, with padding."""
        packed = zip(self.entries, self.compressed, strict=True)
        return sum(aligned(length_of(entry) if block is None else len(block)) for entry, block in packed)


@attrs.define(eq=False)
class Writer:
    """What one disk has to write."""

    disk: Disk
    pending: deque[Run] = attrs.field(factory=deque)
    pending_bytes: int = 0
    pending_since: float = 0.0
    pending_entries: dict[str, Entry] = attrs.field(factory=dict)
    """Of what is pending, the newest entry of each key."""
    is_urgent: bool = False
    """Whether somebody waits for something that is pending."""
    ready: deque[WriteBatch] = attrs.field(factory=deque)
    """Leased, hashed and compressed, and not appended yet."""
    groups: dict[int, WriteBatch] = attrs.field(factory=dict)
    """Appended, by token."""
    preparing: int = 0
    """Leased, and being hashed or compressed."""
    durable_at: float = 0.0

    @property
    def under_way(self) -> int:
        """Batches that are leased."""
        return self.preparing + len(self.ready) + len(self.groups)

    def add(self, run: Run, now: float) -> None:
        """Queue what is due."""
        if not self.pending:
            self.pending_since = now
        self.pending.append(run)
        self._count(run)

    def _count(self, run: Run) -> None:
        self.pending_bytes += run.bytes
        self.pending_entries.update(zip(run.keys, run.entries, strict=True))
        self.is_urgent |= run.urgent

    def clear(self) -> list[Run]:
        """Return what is pending, and forget it."""
        runs = list(self.pending)
        self.pending.clear()
        self.pending_entries.clear()
        self.pending_bytes, self.is_urgent = 0, False
        return runs

    def take(self, most_bytes: int) -> tuple[list[str], list[Entry], int]:
        """Take leading blocks: keys, entries, and how often they were tried."""
        keys: list[str] = []
        entries: list[Entry] = []
        attempts = taken = 0
        while self.pending and len(keys) < MOST_BLOCKS_PER_GROUP and taken < most_bytes:
            run, rest = self.pending[0].split(most_bytes - taken, MOST_BLOCKS_PER_GROUP - len(keys))
            if keys and taken + run.bytes > most_bytes:
                break
            if rest is None:
                self.pending.popleft()
            else:
                self.pending[0] = rest
            keys += run.keys
            entries += run.entries
            attempts = max(attempts, run.attempts)
            taken += run.bytes
            self.pending_bytes -= run.bytes
        for key in keys:
            self.pending_entries.pop(key, None)
        self.is_urgent &= bool(self.pending)
        return keys, entries, attempts

    def put_back(self, keys: list[str], entries: list[Entry], attempts: int) -> None:
        """Queue blocks again, before all others, that were taken and did not fit."""
        if keys:
            run = run_of(keys, entries, attempts=attempts, urgent=True)
            self.pending.appendleft(run)
            self._count(run)


class Flushes:
    """The flushes of one tier."""

    def __init__(self, core: StoreCore, disks: Disks, queue: AdmissionQueue) -> None:
        self._core = core
        self._disks = disks
        self._queue = queue
        self._waiting: dict[str, list[Wait]] = {}

    def flush(self, keys: Sequence[str], deadline: float, is_in_flight: Callable[[str], bool]) -> Wait:
        """Wait for these distinct keys, and hurry those that are not on their way."""
        durable = self._disks.contains(keys)
        wanted = [key for key, there in zip(keys, durable, strict=True) if not there]
        there = [key for key, entry in zip(wanted, self._core.index.get_many(wanted), strict=True) if entry is not None]
        wait = Wait(deadline, len(there), len(wanted) - len(there))
        for key in there:
            self._waiting.setdefault(key, []).append(wait)
        self._queue_now([key for key in there if not is_in_flight(key)])
        return wait

    def written(self, disk: Disk, keys: Sequence[str]) -> None:
        """Note keys of a durable batch."""
        waiting = self._waiting_of(keys)
        if waiting:
            there = disk.volume.contains(waiting)
            self._end([key for key, found in zip(waiting, there, strict=True) if found], met=True)
            self.gone([key for key, found in zip(waiting, there, strict=True) if not found])

    def found(self, keys: Sequence[str]) -> None:
        """Note keys whose newest block is on a disk."""
        self._end(self._waiting_of(keys), met=True)

    def gone(self, keys: Sequence[str]) -> None:
        """Note keys whose queued block is not their block any more."""
        waiting = self._waiting_of(keys)
        if waiting:
            entries = self._core.index.get_many(waiting)
            self._queue_now([key for key, entry in zip(waiting, entries, strict=True) if entry is not None])
            self._end([key for key, entry in zip(waiting, entries, strict=True) if entry is None], met=False)

    def failed(self, keys: Sequence[str]) -> None:
        """Note keys that will not be written."""
        self._end(self._waiting_of(keys), met=False)

    def _waiting_of(self, keys: Sequence[str]) -> list[str]:
        # A key may have been queued more than once.
        return [key for key in dict.fromkeys(keys) if key in self._waiting] if self._waiting else []

    def _end(self, keys: Sequence[str], *, met: bool) -> None:
        for key in keys:
            for wait in self._waiting.pop(key):
                wait.end(met=met)

    def _queue_now(self, keys: Sequence[str]) -> None:
        # Those that nobody waits for any more are forgotten here.
        wanted = []
        for key in keys:
            if all(wait.settled for wait in self._waiting[key]):
                del self._waiting[key]
            else:
                wanted.append(key)
        entries = self._core.index.get_many(wanted)
        there = [(key, entry) for key, entry in zip(wanted, entries, strict=True) if entry is not None]
        if there:
            self._queue.put_back(run_of(*map(list, zip(*there, strict=True)), urgent=True))


_MOST_ATTEMPTS = 3
_PINNED_RATIO = 1 / 8
_FIRST_RATE = 200e6  # until the first batch was measured
_RATE_WEIGHT = 0.3
_LEAST_MEASURED_BYTES = 1 << 20


class Demotion:
    """What is on its way from memory to the disks of one tier."""

    def __init__(
        self,
        core: StoreCore,
        client: Client,
        *,
        disks: Disks,
        queue: AdmissionQueue,
        flushes: Flushes,
        settings: TierSettings,
    ) -> None:
        self.evicted_blocks = 0
        """Blocks that were evicted, put again or deleted before it was their turn."""
        self.failed_blocks = 0
        """Blocks given up because no disk took them."""
        self.pinned_bytes = 0
        """What is leased to be written, by footprint."""
        self.on_doubt: Callable[[Disk, Sequence[str]], object] | None = None
        """Called with a disk and keys of which another may have older blocks."""
        self._core = core
        self._client = client
        self._disks = disks
        self._queue = queue
        self._flushes = flushes
        self._settings = settings
        self._writers: dict[Disk, Writer] = {}
        self._in_flight: dict[str, Entry] = {}
        self._turn = 0

    # What the tier tells

    def add(self, disk: Disk) -> None:
        """Write to this disk, too."""
        self._writers[disk] = Writer(disk)

    def give_up(self, disk: Disk) -> None:
        """Write nothing more to a disk; what waited for it goes to others.

        What was appended ends when its jobs have returned.
        """
        writer = self._writers[disk]
        while writer.ready:
            group = writer.ready.popleft()
            self._end(group)
            self._retry(group)
        for run in reversed(writer.clear()):
            self._queue.put_back(run)

    def remove(self, disk: Disk) -> None:
        """Forget a disk that has been given up, and whose jobs have all returned."""
        for group in self._writers.pop(disk).groups.values():
            self._end(group)
            self._retry(group)

    def changed(self, keys: Sequence[str], entries: Sequence[Entry] | None) -> tuple[set[str], set[str]]:
        """Note keys that were put (with these entries) or removed.

        Of those on their way, return the keys whose new blocks are equal, and so need
        not be written, and the others, which do not count any more.
        """
        equal: set[str] = set()
        outdated: set[str] = set()
        for position, key in enumerate(keys) if self._in_flight else ():
            if (other := self._in_flight.get(key)) is not None:
                if entries is not None and same_block(entries[position], length_of(other), checksum_of(other)):
                    equal.add(key)
                else:
                    outdated.add(key)
                    del self._in_flight[key]
        return equal, outdated

    def clear(self) -> None:
        """Forget what has not been appended: everything was purged."""
        for writer in self._writers.values():
            keys = [key for run in writer.clear() for key in run.keys]
            while writer.ready:
                group = writer.ready.popleft()
                keys += group.keys
                self._end(group)
            self._flushes.failed(keys)
        self._in_flight.clear()

    def is_in_flight(self, key: str) -> bool:
        """Whether the newest block of a key is leased to be written, or appended."""
        return key in self._in_flight

    def is_appended(self, disk: Disk, key: str) -> bool:
        """Whether a key's newest block was appended here and is not durable yet."""
        return key in self._in_flight and any(key in group.keys for group in self._writers[disk].groups.values())

    @property
    def is_idle(self) -> bool:
        """Whether nothing is due or on its way."""
        return not self._queue.due and all(
            not writer.pending and not writer.under_way for writer in self._writers.values()
        )

    @property
    def waiting_bytes(self) -> int:
        """What is due and not leased yet."""
        return self._queue.due_bytes + sum(writer.pending_bytes for writer in self._writers.values())

    @property
    def rate(self) -> float:
        """What the disks take, in bytes per second, as measured of late."""
        return sum(disk.write_rate or _FIRST_RATE for disk in self._disks if disk.is_writable)

    def waiting_keys(self) -> list[str]:
        """Return the keys that are due, or on their way."""
        runs = [*self._queue.due, *(run for writer in self._writers.values() for run in writer.pending)]
        return [*(key for run in runs for key in run.keys), *self._in_flight]

    # Working

    def work(self, now: float, *, blocked: Sequence[Disk] = ()) -> bool:
        """Lease and append a batch for each free disk; return whether there is more."""
        self._deal(now)
        has_more = False
        for writer in self._writers.values():
            if writer.disk not in blocked and writer.disk.takes_blocks:
                has_more |= not writer.ready and self._lease(writer, now)
                has_more |= bool(writer.ready) and self._append(writer, now)
        return has_more

    def next_deadline(self, now: float) -> float | None:
        """Return when the oldest batch is due, or now, if there is more to deal."""
        takers = (writer for writer in self._writers.values() if writer.disk.is_writable)
        if self._queue.due and any(writer.pending_bytes < self._settings.group_bytes for writer in takers):
            return now
        times = (writer.pending_since + self._settings.group_s for writer in self._writers.values() if writer.pending)
        return min((time for time in times if time > now), default=None)

    def durable(self, disk: Disk, token: int, now: float) -> bool:
        """Note that a batch is durable; False if it is not one of these."""
        writer = self._writers[disk]
        group = writer.groups.pop(token, None)
        if group is None:
            return False
        self._measure(writer, group, now)
        disk.written_blocks += len(group.keys)
        disk.written_bytes += group.bytes
        disk.stored_bytes += group.stored_bytes
        self._end(group)
        if group.doubtful and self.on_doubt is not None:
            self.on_doubt(disk, group.doubtful)
        self._flushes.written(disk, group.keys)
        return True

    def lost(self, disk: Disk, token: int) -> bool:
        """Note that a batch was lost; False if it is not one of these."""
        writer = self._writers[disk]
        group = writer.groups.pop(token, None)
        if group is None:
            return False
        self._end(group)
        self._retry(group)
        return True

    # Dealing

    def _deal(self, now: float) -> None:
        """Give what is due to the disks in turn, or to the one that has to have it."""
        takers = [writer for writer in self._writers.values() if writer.disk.is_writable]
        if not takers:
            self._give_up_due()
            return
        while self._queue.due and any(writer.pending_bytes < self._settings.group_bytes for writer in takers):
            most_bytes = LARGEST_READ_BYTES if len(self._disks) > 1 else self._settings.group_bytes
            run = self._queue.take(most_bytes, MOST_BLOCKS_PER_GROUP)
            run = run and self._fresh(run)
            if run is None:
                continue
            while takers[self._turn % len(takers)].pending_bytes >= self._settings.group_bytes:
                self._turn += 1
            in_turn = takers[self._turn % len(takers)]
            self._turn += 1
            if len(self._disks) == 1:
                in_turn.add(run, now)
            else:
                self._deal_by_disk(run, in_turn, now)

    def _fresh(self, run: Run) -> Run | None:
        """Return the part of a run that is not on its way; hurry the rest if urgent."""
        entries = dict(zip(run.keys, run.entries, strict=True))
        for writer in self._writers.values():
            if not writer.pending_entries.keys().isdisjoint(entries):
                again = {key for key, entry in entries.items() if writer.pending_entries.get(key) == entry}
                writer.is_urgent |= run.urgent and bool(again)
                entries = {key: entry for key, entry in entries.items() if key not in again}
        if not self._in_flight.keys().isdisjoint(entries):
            entries = {key: entry for key, entry in entries.items() if self._in_flight.get(key) != entry}
        if len(entries) == len(run.keys):
            return run
        return (
            run_of(list(entries), list(entries.values()), attempts=run.attempts, urgent=run.urgent) if entries else None
        )

    def _deal_by_disk(self, run: Run, in_turn: Writer, now: float) -> None:
        chosen = [in_turn.disk] * len(run.keys)
        # What a disk that goes has does not count when it comes back.
        staying = [disk for disk in self._disks if not disk.is_leaving]
        # One that may have any key does not take a block from the one that has its key.
        for lingers in (Volume.lingers, Volume.is_known):
            for disk in staying:
                for position, is_there in enumerate(lingers(disk.volume, run.keys)):
                    if is_there:
                        chosen[position] = disk
        for disk in dict.fromkeys(chosen):
            positions = [i for i, one in enumerate(chosen) if one is disk]
            keys = [run.keys[i] for i in positions]
            part = run_of(keys, [run.entries[i] for i in positions], attempts=run.attempts, urgent=run.urgent)
            # A disk that has to have them, and is slow, does not hold up the others.
            if disk.is_writable and self._writers[disk].pending_bytes < 2 * self._settings.group_bytes:
                self._writers[disk].add(part, now)
            else:
                self._give_up(keys)

    def _give_up_due(self) -> None:
        while (run := self._queue.take(self._settings.group_bytes, MOST_BLOCKS_PER_GROUP)) is not None:
            self._give_up(run.keys)

    def _give_up(self, keys: Sequence[str]) -> None:
        self.failed_blocks += len(keys)
        self._flushes.failed(keys)

    # Leasing

    def _lease(self, writer: Writer, now: float) -> bool:
        """Lease the next batch of a disk; return whether there was one."""
        if not writer.pending or writer.under_way >= MOST_GROUPS or not self._is_time(writer, now):
            return False
        bound = min(MOST_PINNED_BYTES, int(_PINNED_RATIO * self._core.pool.capacity_bytes))
        most_bytes = min(self._settings.group_bytes, bound - self.pinned_bytes, writer.disk.volume.room())
        if (most_bytes <= 0 and self.pinned_bytes) or writer.disk.volume.room() <= 0:
            return False
        keys, entries, attempts = writer.take(max(1, most_bytes))
        count = writer.disk.volume.fitting(keys, list(map(length_of, entries)))
        count = min(count, self._core.limits.max_batch_keys)  # what can be leased at once
        writer.put_back(keys[count or 1 :], entries[count or 1 :], attempts)
        writer.pending_since = now
        if not count:  # the first block is longer than a segment
            self._give_up(keys[:1])
            return True
        group = self._group(writer, keys[:count], entries[:count], attempts)
        if group is not None:
            self._hash(writer, group)
        return True

    def _is_time(self, writer: Writer, now: float) -> bool:
        return (
            writer.pending_bytes >= min(self._settings.group_bytes, _PINNED_RATIO * self._core.pool.capacity_bytes)
            or writer.is_urgent
            or now >= writer.pending_since + self._settings.group_s
        )

    def _group(self, writer: Writer, keys: list[str], entries: list[Entry], attempts: int) -> WriteBatch | None:
        """Lease those of the blocks that are still there, and on no disk yet."""
        current = self._core.index.get_many(keys)
        gone = [i for i, entry in enumerate(entries) if current[i] != entry]
        self.evicted_blocks += len(gone)
        self._flushes.gone([keys[i] for i in gone])
        found = self._disks.contains(keys)
        self._flushes.found(list(compress(keys, found)))
        untrusted = leased_in_quarantine(self._core.clients)
        ending = self._core.retention.ending(keys)  # nothing on disk would end with them
        untrusted.update(entry for key, entry in zip(keys, entries, strict=True) if key in ending)
        wanted = {
            key: entry
            for key, entry, now_there, on_disk in zip(keys, entries, current, found, strict=True)
            if now_there == entry and not on_disk and key not in self._in_flight and entry not in untrusted
        }
        self._flushes.failed([key for key, entry in zip(keys, entries, strict=True) if entry in untrusted])
        if not wanted:
            return None
        try:
            lease = self._core.lease(self._client, list(wanted), touch=False)
        except LimitExceeded:  # a pool so small that its blocks cannot be pinned beside each other
            self._give_up(list(wanted))
            return None
        self.pinned_bytes += lease.footprint_bytes
        kept = [(key, entry) for key, entry in zip(wanted, lease.entries, strict=True) if entry == wanted[key]]
        keys, entries = [key for key, _ in kept], [wanted[key] for key, _ in kept]
        self._in_flight.update(kept)
        checksums = list(map(checksum_of, entries))
        own_checksums = [one == NO_CHECKSUM for one in checksums]
        doubtful = self._doubtful(writer.disk, keys)
        plain: list[bytes | None] = [None] * len(keys)
        return WriteBatch(writer.disk, keys, entries, lease, attempts, checksums, own_checksums, plain, doubtful)

    def _doubtful(self, disk: Disk, keys: Sequence[str]) -> list[str]:
        """Return those of the keys that this disk is not known to have, and others may
        bring back: they recovered when the keys were dealt, or use a segment again."""
        elsewhere: set[str] = set()
        for other in self._disks:
            if other is not disk and not other.is_leaving:
                elsewhere.update(compress(keys, other.volume.lingers(keys)))
        if not elsewhere:
            return []
        known = disk.volume.is_known(keys)
        return [key for key, is_known in zip(keys, known, strict=True) if key in elsewhere and not is_known]

    def _hash(self, writer: Writer, group: WriteBatch) -> None:
        """Have the blocks hashed that have no checksum, and then compress them."""
        positions = [i for i, own in enumerate(group.own_checksums) if own]
        if not positions:
            self._compress(writer, group)
            return

        def hashed(result: Result) -> None:
            for position, checksum in zip(positions, result.checksums, strict=True):
                group.checksums[position] = checksum
            self._compress(writer, group)

        views = self._core.pool.views([extent_of(group.entries[i]) for i in positions], writable=False)
        self._prepare(writer, group, HashBlocks(writer.disk.number, views), hashed)

    def _compress(self, writer: Writer, group: WriteBatch) -> None:
        """Have the blocks compressed, if they should be, and then queue the batch."""
        if not writer.disk.volume.compresses:
            writer.ready.append(group)
            return

        def compressed(result: Result) -> None:
            group.compressed = list(result.compressed)
            writer.ready.append(group)

        views = self._core.pool.views(list(map(extent_of, group.entries)), writable=False)
        self._prepare(writer, group, Compress(writer.disk.number, views), compressed)

    def _prepare(
        self, writer: Writer, group: WriteBatch, job: HashBlocks | Compress, done: Callable[[Result], None]
    ) -> None:
        writer.preparing += 1

        def ended(result: Result) -> None:
            writer.preparing -= 1
            if result.errno or not writer.disk.is_writable:  # it may have been given up meanwhile
                self._end(group)
                self._retry(group)
            else:
                done(result)

        writer.disk.traffic.start(job, ended)

    # Appending

    def _append(self, writer: Writer, now: float) -> bool:
        """Append the first ready batch as it is now; return whether there was room."""
        group = writer.ready[0]
        current = self._core.index.get_many(group.keys)
        kept = [i for i, entry in enumerate(group.entries) if current[i] == entry]
        if len(kept) < len(group.keys):
            changed = sorted(set(range(len(group.keys))).difference(kept))
            self._leave_flight([group.keys[i] for i in changed], [group.entries[i] for i in changed])
            self.evicted_blocks += len(changed)
            self._flushes.gone([group.keys[i] for i in changed])
            for name in ("keys", "entries", "checksums", "own_checksums", "compressed"):
                values = getattr(group, name)
                setattr(group, name, [values[i] for i in kept])
        if not group.keys:
            writer.ready.popleft()
            self._end(group)
            return True
        plain = self._core.pool.views(list(map(extent_of, group.entries)), writable=False)
        views = [
            view if compressed is None else memoryview(compressed)
            for view, compressed in zip(plain, group.compressed, strict=True)
        ]
        token = writer.disk.volume.append(
            group.keys,
            list(map(length_of, group.entries)),
            group.checksums,
            views,
            own_checksums=group.own_checksums,
        )
        if token is None:
            return False
        writer.ready.popleft()
        group.token, group.appended_at = token, now
        writer.groups[token] = group
        return True

    def _end(self, group: WriteBatch) -> None:
        self._leave_flight(group.keys, group.entries)
        self.pinned_bytes -= group.lease.footprint_bytes
        self._core.release(group.lease)

    def _leave_flight(self, keys: Sequence[str], entries: Sequence[Entry]) -> None:
        for key, entry in zip(keys, entries, strict=True):
            if self._in_flight.get(key) == entry:
                del self._in_flight[key]

    def _retry(self, group: WriteBatch) -> None:
        """Queue a batch again that was lost: its blocks are still in memory."""
        current = self._core.index.get_many(group.keys)
        there = {key: entry for key, entry in zip(group.keys, current, strict=True) if entry is not None}
        self._flushes.gone([key for key in group.keys if key not in there])
        if group.attempts + 1 < _MOST_ATTEMPTS:
            if there:
                self._queue.put_back(
                    run_of(list(there), list(there.values()), attempts=group.attempts + 1, urgent=True)
                )
        else:
            self._give_up(list(there))

    def _measure(self, writer: Writer, group: WriteBatch, now: float) -> None:
        seconds = now - max(group.appended_at, writer.durable_at)
        writer.durable_at = now
        if group.bytes >= _LEAST_MEASURED_BYTES and seconds > 0:
            rate = group.bytes / seconds
            before = writer.disk.write_rate
            writer.disk.write_rate = rate if not before else before + _RATE_WEIGHT * (rate - before)
