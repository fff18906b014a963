"""Promotion: blocks are read from disks back into the pool.

A few blocks at a time are read into a reservation, hashed where they were read, and
committed if nothing was put in their place meanwhile. They stay on disk. A key is read
once, however many wait for it. What is late, damaged or finds no room is a miss.

Blocks are asked for token by token, and were written layer by layer. So each part of a
request is read in the order in which it lies on the disks, where neighbours are one
read. Measured: blocks of 64 KiB, asked for across that order, came at 2.7 GB/s instead
of 0.7 (`bench/disk.py`).

Once started, a read goes on, whoever still waits for it: its room in the pool is free
when the disk has let go of it, and no earlier. A disk that is slow, or hangs, holds up
no other one's reads.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, groupby
from typing import TypeAlias

import attrs

from infinistore.allocators.base import Extent
from infinistore.core import NO_CHECKSUM, Client, Reservation, StoreCore
from infinistore.core.index import length_of
from infinistore.disk.disks import Disk, Disks, Place
from infinistore.disk.jobs import ALIGNMENT_BYTES, ReadInto, Result, aligned
from infinistore.disk.reinsertion import aligned_memory
from infinistore.disk.settings import LARGEST_READ_BYTES, MOST_BLOCKS_PER_GROUP, MOST_READS, SORTED_BYTES
from infinistore.disk.waits import Wait
from infinistore.errors import LimitExceeded, OutOfMemory, ValueTooLarge

_READ_AT_ONCE_RATIO = 1 / 8
"""The part of the pool that one request reads back at a time."""
_MOST_READING_RATIO = 1 / 4
"""The part of the pool that reads under way, and prefetches to come, may take."""


@attrs.define(eq=False)
class _Group:
    """Blocks of one disk that are read and committed together."""

    disk: Disk
    is_background: bool
    keys: list[str] = attrs.field(factory=list)
    places: list[Place] = attrs.field(factory=list)
    bytes: int = 0
    waits: list[list[Wait]] = attrs.field(factory=list)
    reservation: Reservation | None = None
    jobs: int = 0
    """Reads that somebody waits for."""
    hung: int = 0
    """Reads that nobody waits for any more, and that may still write."""
    good: set[int] = attrs.field(factory=set)
    """The positions of blocks that were read and have their checksums."""

    @property
    def is_wanted(self) -> bool:
        return self.is_background or any(not wait.settled for waits in self.waits for wait in waits)


_Queues: TypeAlias = defaultdict[Disk, deque[_Group]]
"""What each disk is still to read."""


class Promotion:
    """What is on its way from the disks of one tier to memory.

    `commit` commits a reservation to the core as blocks that come from a disk, after
    the journal was followed; `now` returns the time.
    """

    def __init__(
        self,
        core: StoreCore,
        client: Client,
        disks: Disks,
        commit: Callable[[Reservation, list[str], list[int]], object],
        now: Callable[[], float],
    ) -> None:
        self.promoted_blocks = 0
        self.promoted_bytes = 0
        self.no_room_blocks = 0
        """Blocks not read, or read in vain, because the pool had no room for them."""
        self.late_blocks = 0
        """Blocks that nobody waited for any more when it was their turn."""
        self.prefetch_bytes = 0
        """What prefetches have asked for that was not read yet."""
        self.on_promoted: Callable[[Sequence[str]], object] | None = None
        """Called with keys that have just been committed."""
        self._core = core
        self._client = client
        self._disks = disks
        self._commit = commit
        self._now = now
        self._flights: dict[str, tuple[_Group, int]] = {}
        self._demand: _Queues = defaultdict(deque)
        self._background: _Queues = defaultdict(deque)
        self._reading_bytes = 0

    @property
    def prefetch_room_bytes(self) -> int:
        """How much more prefetches may ask for."""
        return int(_MOST_READING_RATIO * self._core.pool.capacity_bytes) - self.prefetch_bytes

    def read(self, keys: Sequence[str], places: Sequence[Place], wait: Wait | None) -> None:
        """Read distinct keys that are here, the first ones first. Without a wait, it is
        done later."""
        new: list[int] = []
        for position, key in enumerate(keys):
            flight = self._flights.get(key)
            if flight is None:
                new.append(position)
            elif wait is not None:
                group, place = flight
                group.waits[place].append(wait)
                if group.is_background and group.reservation is None:
                    self._hurry(group)
        for group in self._groups([keys[i] for i in new], [places[i] for i in new], wait):
            (self._background if group.is_background else self._demand)[group.disk].append(group)
            if group.is_background:
                self.prefetch_bytes += group.bytes
            for position, key in enumerate(group.keys):
                self._flights[key] = group, position

    def work(self) -> None:
        """Start what can be read now: first what somebody waits for."""
        for queues in (self._demand, self._background):
            turns = deque(queues)
            while turns:
                disk = turns.popleft()
                if not queues[disk]:
                    del queues[disk]
                    continue
                group = queues[disk].popleft()
                if not group.is_wanted or disk.health.state == "off":
                    self.late_blocks += len(group.keys)
                    self._finish(group)
                elif self._may_start(group):
                    queues[disk] = queues.pop(disk)  # the next time, the others come first
                    self._start(group)
                else:
                    queues[disk].appendleft(group)
                    continue
                turns.append(disk)

    def give_up(self) -> None:
        """Start none of what waits to be read."""
        for queues in (self._demand, self._background):
            for queue in tuple(queues.values()):
                while queue:
                    self._finish(queue.popleft())

    # Starting

    def _groups(self, keys: Sequence[str], places: Sequence[Place], wait: Wait | None) -> list[_Group]:
        groups: list[_Group] = []
        starts = list(accumulate((place.location.length for place in places), initial=0))
        for _, part in groupby(range(len(places)), lambda i: starts[i] // SORTED_BYTES):
            last: dict[Disk, _Group] = {}
            for i in sorted(part, key=lambda i: (places[i].location.segment, places[i].location.offset)):
                place = places[i]
                size = self._core.pool.footprint(place.location.length)
                group = last.get(place.disk)
                if group is None or group.bytes + size > LARGEST_READ_BYTES or len(group.keys) == MOST_BLOCKS_PER_GROUP:
                    group = last[place.disk] = _Group(place.disk, wait is None)
                    groups.append(group)
                group.keys.append(keys[i])
                group.places.append(place)
                group.waits.append([] if wait is None else [wait])
                group.bytes += size
        return groups

    def _hurry(self, group: _Group) -> None:
        self._background[group.disk].remove(group)
        self.prefetch_bytes -= group.bytes
        group.is_background = False
        self._demand[group.disk].append(group)

    def _may_start(self, group: _Group) -> bool:
        if self._reading_bytes and (
            self._reading_bytes + group.bytes > _MOST_READING_RATIO * self._core.pool.capacity_bytes
        ):
            return False
        return group.disk.traffic.reads < MOST_READS and not group.disk.traffic.hung

    def _start(self, group: _Group) -> None:
        try:
            group.reservation = self._core.reserve(self._client, [place.location.length for place in group.places])
        except (OutOfMemory, LimitExceeded, ValueTooLarge):
            self.no_room_blocks += len(group.keys)
            self._finish(group)
            return
        self._reading_bytes += group.bytes
        for positions in _neighbours(group.places):
            self._start_read(group, group.reservation, positions)

    def _start_read(self, group: _Group, reservation: Reservation, positions: list[int]) -> None:
        disk = group.disk
        locations = [group.places[i].location for i in positions]
        lengths = [one.length for one in locations]
        views = [self._room(reservation.extents[i]) for i in positions]
        blocks: list[memoryview | None] = [None] * len(views)
        for number, one in enumerate(locations):
            if one.saved_pages:
                blocks[number] = views[number][: one.length]
                views[number] = aligned_memory(one.stored_bytes)
        job = ReadInto(disk.number, f"segments/{locations[0].segment}", locations[0].offset, views, lengths, blocks)
        group.jobs += 1
        disk.volume.pin(locations)

        is_late = False

        def timed_out() -> None:
            nonlocal is_late
            is_late = True
            group.hung += 1
            end()

        def ended(result: Result) -> None:
            if is_late:
                group.hung -= 1
                if not group.hung and not group.jobs:
                    self._core.abort(reservation)  # nothing if it was given up before
            else:
                self._check(group, positions, result)
                end()

        def end() -> None:
            disk.volume.unpin(locations)
            group.jobs -= 1
            if not group.jobs:
                self._end(group)

        disk.traffic.start(job, ended, timed_out, before_writes=True)

    def _room(self, extent: Extent) -> memoryview:
        """Return where a block is read to, with its padding if that is its own."""
        pool = self._core.pool
        arena, offset, length = extent
        padded = aligned(length)
        if offset % ALIGNMENT_BYTES == 0 and padded <= pool.footprint(length):
            return pool.view((arena, offset, padded))
        return pool.view(extent)

    # Ending

    def _check(self, group: _Group, positions: list[int], result: Result) -> None:
        disk = group.disk
        if result.errno:
            disk.health.read_failed(result.errno, self._now())
            for i in positions:
                disk.volume.drop(group.keys[i], group.places[i].location)
            return
        for i, checksum in zip(positions, result.checksums, strict=True):
            location = group.places[i].location
            if checksum == location.checksum:
                group.good.add(i)
                disk.read_blocks += 1
                disk.read_bytes += location.length
            else:
                disk.damaged_blocks += disk.volume.drop(group.keys[i], location)

    def _end(self, group: _Group) -> None:
        """Commit the blocks read that are still current; the rest are misses."""
        reservation = group.reservation
        assert reservation is not None
        self._reading_bytes -= group.bytes
        current = self._disks.find(group.keys)
        kept = [
            i
            for i, (place, now_at) in enumerate(zip(group.places, current, strict=True))
            if i in group.good and now_at is not None and now_at.has_same_block(place)
        ]
        if len(kept) < len(group.keys):
            reservation = self._moved(group, reservation, kept)
        if reservation is not None:
            keys = [group.keys[i] for i in kept]
            locations = [group.places[i].location for i in kept]
            self._commit(reservation, keys, [NO_CHECKSUM if one.own_checksum else one.checksum for one in locations])
            self.promoted_blocks += len(keys)
            self.promoted_bytes += sum(one.length for one in locations)
            self._disks.note_reads((group.keys[i], group.places[i]) for i in kept)
        self._finish(group, set(kept) if reservation is not None else set())

    def _moved(self, group: _Group, reservation: Reservation, kept: list[int]) -> Reservation | None:
        """Return a reservation of only those blocks, with their bytes; None if there
        are none, or no room. The other one is given up."""
        moved = None
        if kept:
            try:
                moved = self._core.reserve(self._client, [group.places[i].location.length for i in kept])
            except (OutOfMemory, LimitExceeded):
                self.no_room_blocks += len(kept)
            else:
                views = reservation.views
                for i, view in zip(kept, moved.views, strict=True):
                    view[:] = views[i]
        if not group.hung:
            self._core.abort(reservation)
        return moved

    def _finish(self, group: _Group, met: "set[int] | frozenset[int]" = frozenset()) -> None:
        if group.is_background:
            self.prefetch_bytes -= group.bytes
        for position, key in enumerate(group.keys):
            del self._flights[key]
            for wait in group.waits[position]:
                wait.end(met=position in met)
        if met and self.on_promoted is not None:
            self.on_promoted([group.keys[i] for i in sorted(met)])


def leading_at_once(core: StoreCore, keys: Sequence[str], on_disk: Mapping[str, Place]) -> int:
    """Count the leading keys, at least one, that take a bounded part of the pool."""
    most_bytes = _READ_AT_ONCE_RATIO * core.pool.capacity_bytes
    total = 0
    for count, (key, entry) in enumerate(zip(keys, core.index.get_many(keys), strict=True)):
        if entry is not None:
            total += core.pool.footprint(length_of(entry))
        elif key in on_disk:
            total += core.pool.footprint(on_disk[key].location.length)
        if total > most_bytes:
            return max(count, 1)
    return len(keys)


def _neighbours(places: Sequence[Place]) -> list[list[int]]:
    """Return the positions of neighbours on a disk, to be read as one."""
    runs: list[list[int]] = []
    before: Place | None = None
    for position, place in enumerate(places):
        if before is not None and _follows(before, place):
            runs[-1].append(position)
        else:
            runs.append([position])
        before = place
    return runs


def _follows(one: Place, other: Place) -> bool:
    return (
        one.location.segment == other.location.segment
        and one.location.incarnation == other.location.incarnation
        and one.location.offset + one.location.stored_bytes == other.location.offset
    )
