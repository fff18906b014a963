"""What a volume does beside its batches: spare segments, footers, snapshots, its end.

Each is a task (see `Tasks` in `jobs`), so none of it stalls the caller.
"""

from collections.abc import Callable

import numpy as np

from infinistore.disk.batches import Batches
from infinistore.disk.format import (
    ABANDONED,
    END_BYTES,
    OPEN,
    OWN_CHECKSUM,
    SAVED_SHIFT,
    SEALED,
    End,
    Footer,
    Listing,
    SnapshotSegment,
    encode_end,
    encode_footer,
    encode_section,
    encode_snapshot_header,
    joined,
    most_footer_bytes,
)
from infinistore.disk.jobs import ALIGNMENT_BYTES, PAUSE, WAIT, Allocate, Flush, Replace, Steps, Write, aligned
from infinistore.disk.log import Durable, Location, Log, Lost, Reclaim, Segment, SegmentState, Shrunk
from infinistore.disk.records import SHARDS
from infinistore.disk.recovery import read_footer

_ROWS_A_STEP = 2048
_STATES = {SegmentState.OPEN: OPEN, SegmentState.FULL: OPEN, SegmentState.SEALED: SEALED}


class Upkeep:
    """The longer work of one volume. `stop` is called with the errno that ends it."""

    def __init__(
        self, log: Log, batches: Batches, *, writable: Callable[[], bool], stop: Callable[[int], None]
    ) -> None:
        self._log = log
        self._batches = batches
        self._writable = writable
        self._stop = stop
        self._reclaimed: set[int] = set()
        self._in_reclaim: Segment | None = None
        self._sealing = 0
        self._snapshots = 0
        self._swept = 0

    # A spare segment

    def keep_spare(self) -> Steps[None]:
        """Have a segment ready for when the open one is full."""
        segments = self._log.segments
        while True:
            while segments.spare is not None or not self._writable():
                yield WAIT
            segment, number = segments.free(), segments.unused_number()
            if segment is None and number is not None:
                segment = yield from self._allocate(number)
                if segment is None:
                    continue  # the disk has no more than there is: one of these is next
            elif segment is None:
                segment = yield from self._reclaim()
            if segment is None:
                yield WAIT
            elif (yield from self._void_older(segment)):
                segments.spare = segment

    def _allocate(self, number: int) -> Steps[Segment | None]:
        """Make the file of a new segment; without room, the disk stays as it is."""
        segments = self._log.segments
        segment = segments.add(Segment(number))
        [result] = yield [Allocate(self._log.number, segment.file, self._log.segment_bytes)]
        if not result.errno:
            segment.state = SegmentState.FREE
            return segment
        segments.remove(segment)
        segments.most = segments.allocated
        if segments.most < 2:
            self._stop(result.errno)
        else:
            self._log.events.append(Shrunk(result.errno))
        return None

    def _void_older(self, segment: Segment) -> Steps[bool]:
        """Make sure that what is overwritten, and all before it, does not come back."""
        log = self._log
        if not log.segments.needs_floor(segment, log.floor, log.durable_floor):
            return True
        errno = yield from log.write_superblock()
        if errno:
            self._stop(errno)
        return not errno

    def _reclaim(self) -> Steps[Segment | None]:
        """Empty the oldest segment. None: there is none now, or it cannot be used."""
        log = self._log
        oldest = next(iter(log.segments.in_log()), None)
        is_finished = oldest is not None and oldest.state in (SegmentState.SEALED, SegmentState.ABANDONED)
        if oldest is None or not is_finished or not self._overwriting():
            return None
        self._in_reclaim = oldest
        footer = yield from read_footer(log, oldest)
        listing = joined([]) if footer is None else footer[3]
        yield from self._offer(oldest, listing)
        barrier = log.next_sequence - 1  # what was appended again is durable first
        while not self._batches.ended_until(barrier) or oldest.pins:
            if not self._overwriting():
                break
            yield WAIT
        self._in_reclaim = None
        if not self._overwriting():
            return None
        for start in range(0, len(listing), _ROWS_A_STEP):
            rows = slice(start, start + _ROWS_A_STEP)
            slots = log.records.find(listing.low[rows])
            here = log.records.at(slots, np.full(slots.size, oldest.number), listing.page[rows])
            log.records.remove(slots[here])
            yield PAUSE
        yield from self._end(oldest)
        return oldest

    def _offer(self, segment: Segment, listing: Listing) -> Steps[None]:
        """Tell the tier what it may append again, and wait until it has."""
        log = self._log
        wanted = np.zeros(len(listing), np.bool_)
        reads = np.zeros(len(listing), np.int64)
        purges = log.purges
        for start in range(0, len(listing), _ROWS_A_STEP):
            rows = slice(start, start + _ROWS_A_STEP)
            slots = log.records.find(listing.low[rows])
            here = log.records.at(slots, np.full(slots.size, segment.number), listing.page[rows])
            wanted[rows] = here & log.records.live(slots) & (listing.length[rows] > 0)
            reads[rows] = log.records.reads(slots)
            yield PAUSE
        if log.purges != purges or not wanted.any():
            return
        keys: list[str] = []
        locations: list[Location] = []
        for start in range(0, len(listing), _ROWS_A_STEP):
            some = listing.between(start, start + _ROWS_A_STEP).only(wanted[start : start + _ROWS_A_STEP])
            keys.extend(some.keys())
            locations.extend(
                Location(
                    segment.number,
                    segment.incarnation,
                    page * ALIGNMENT_BYTES,
                    length,
                    checksum,
                    bool(flags & OWN_CHECKSUM),
                    flags >> SAVED_SHIFT,
                )
                for page, length, checksum, flags in zip(
                    some.page.tolist(), some.length.tolist(), some.checksum.tolist(), some.flags.tolist(), strict=True
                )
            )
            yield PAUSE
        self._reclaimed.discard(segment.number)
        log.events.append(Reclaim(segment.number, keys, locations, reads[wanted].tolist()))
        while segment.number not in self._reclaimed and self._overwriting():
            yield WAIT
        self._reclaimed.discard(segment.number)

    def _overwriting(self) -> bool:
        return self._log.segments.overwrites and self._writable()

    def reclaimed(self, segment: int) -> None:
        """See `Volume.reclaimed`."""
        self._reclaimed.add(segment)

    def _end(self, segment: Segment) -> Steps[None]:
        """End the life of the oldest segment."""
        log = self._log
        log.records.end_segment(segment.number)
        log.counters.recycled_segments += 1
        segment.clear(SegmentState.FREE)
        log.raise_floor()
        # All shards are swept long before a lap of 8 bits comes round.
        for _ in range(-(-SHARDS * 8 // max(log.segments.most, 8))):
            log.records.sweep(self._swept)
            self._swept = (self._swept + 1) % SHARDS
            yield PAUSE

    # Footers

    def seal(self, segment: Segment) -> Steps[None]:
        """Write the footer of a full segment, when all its batches have ended."""
        self._sealing += 1
        while segment.unsettled:
            yield WAIT
        if segment.state is SegmentState.FULL:
            yield from self.write_footer(segment)
        self._sealing -= 1
        self._log.tasks.poke()

    def write_footer(self, segment: Segment) -> Steps[None]:
        """Seal a segment whose batches are all durable."""
        log = self._log
        footer = self._footer_of(segment)
        end = End(segment.number, log.uuid, segment.incarnation, log.floor, 1, len(footer), segment.sequence)
        views = [memoryview(footer), memoryview(encode_end(end, log.seed))]
        offset = log.segment_bytes - END_BYTES - aligned(len(footer))
        [result] = yield [Write(log.number, segment.file, offset, views)]
        if not result.errno:
            log.counters.written_bytes += log.segment_bytes - offset
            [result] = yield [Flush(log.number, segment.file)]
        if result.errno:
            self._batches.abandon(segment, result.errno)
            return
        segment.state = SegmentState.SEALED
        log.unread.discard(segment.number)
        segment.oldest_content = segment.incarnation
        segment.batches = []

    def _footer_of(self, segment: Segment) -> bytes:
        log = self._log
        sequences = [sequence for sequence, _ in segment.batches]
        rows = [len(listing) for _, listing in segment.batches]
        listing = joined([listing for _, listing in segment.batches])
        header = Footer(
            segment.number,
            log.uuid,
            segment.incarnation,
            log.floor,
            len(rows),
            len(listing),
            len(listing.key_bytes),
        )
        return encode_footer(header, sequences, rows, listing, log.seed)

    # Purge

    def purge(self, token: int) -> Steps[None]:
        """Make a purge durable, in both copies of the superblock."""
        log = self._log
        for _ in range(2):
            errno = yield from log.write_superblock()
            if errno:
                log.events.append(Lost(token, errno))
                self._stop(errno)
                return
        for segment in log.segments.in_log():
            finished = segment.state in (SegmentState.SEALED, SegmentState.ABANDONED)
            if finished and segment.sequence < token and segment is not self._in_reclaim and not segment.unsettled:
                log.records.end_segment(segment.number)
                segment.clear(SegmentState.FREE)
        log.unread.clear()
        log.events.append(Durable(token))

    def note_membership(self, membership: int) -> Steps[None]:
        """Note that the set of disks has changed."""
        errno = yield from self._log.write_superblock(membership=membership)
        if errno:
            self._stop(errno)

    # Snapshots

    def snapshot(self) -> Steps[int]:
        """Write a snapshot; return the checksum of its header, 0 if there is none."""
        log = self._log
        sequence, floor, purges = log.settled, log.floor, log.purges
        segments = [
            SnapshotSegment(one.number, _STATES.get(one.state, ABANDONED), one.incarnation, one.end_bytes, one.sequence)
            for one in log.segments.in_log()
        ]
        footer = b""
        current = log.segments.open
        if current is not None and not self._writable():
            footer = self._footer_of(current)
        sections: list[bytes] = []
        for shard in range(SHARDS):
            rows = log.records.dump(shard)
            sections.append(encode_section(shard, rows, uuid=log.uuid, sequence=sequence, seed=log.seed))
            yield PAUSE
            if log.purges != purges:
                return 0
        header = encode_snapshot_header(
            uuid=log.uuid,
            sequence=sequence,
            floor=floor,
            sections=list(map(len, sections)),
            segments=segments,
            footer=footer,
            seed=log.seed,
        )
        views = [memoryview(part) for part in (header, *sections)]
        [result] = yield [Replace(log.number, "snapshot", views)]
        if result.errno:
            return 0
        log.counters.snapshots += 1
        log.counters.written_bytes += sum(map(len, views))
        return int.from_bytes(header[8:16], "little")

    def close(self) -> Steps[None]:
        """Let all end, then write a snapshot and the mark of a clean end."""
        log = self._log
        while len(self._batches) or self._sealing:
            yield WAIT
        current = log.segments.open
        if current is not None and len(self._footer_of(current)) > most_footer_bytes(log.segment_bytes):
            log.segments.open, current.state = None, SegmentState.FULL
            yield from self.write_footer(current)
        checksum = yield from self.snapshot()
        if checksum:
            yield from log.write_superblock(clean=1, snapshot=checksum)
