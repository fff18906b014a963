"""Batches under way: appended to the log, neither durable nor lost yet; and how a batch
gets its place there: its segment, its pages, its table.

A batch is written by several jobs, then flushed; one flush serves all batches of its
segment that were written before it began. Batches end in the order in which they were
appended, so the index changes in the order of the log. If one write or flush fails,
the segment is abandoned, and all its batches that have not ended are lost: nothing is
written there, or flushed, ever again. So what is durable in a segment is all that it
has up to some batch, its last page and first table included.

A batch that is lost ends when its last job has returned: until then its memory may
still be read.
"""

from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum

import attrs
import numpy as np
import numpy.typing as npt

from infinistore.disk.format import (
    END_BYTES,
    OWN_CHECKSUM,
    SAVED_SHIFT,
    End,
    Listing,
    Table,
    encode_end,
    encode_table,
    table_bytes,
)
from infinistore.disk.jobs import ALIGNMENT_BYTES, Flush, Job, Result, Write, aligned, file_bytes
from infinistore.disk.log import Durable, Location, Log, Lost, Segment, SegmentState, rows_of
from infinistore.disk.records import fingerprints
from infinistore.keys import MAX_KEY_BYTES
from infinistore.sizes import in_units

_WRITE_BYTES = 4 << 20
_EIO = 5


class _State(Enum):
    WRITING = "writing"
    WRITTEN = "written"
    FLUSHING = "flushing"
    DURABLE = "durable"
    LOST = "lost"


@attrs.define(eq=False)
class Batch:
    """One batch, from `append` to its end. Its sequence is its token."""

    sequence: int
    segment: Segment
    floor: int
    listing: Listing
    keys: Sequence[str]
    dead: set[int] = attrs.field(factory=set)
    """Rows whose keys were forgotten, or appended again, since."""
    state: _State = _State.WRITING
    errno: int = 0
    writing: int = 0


class Batches:
    """The batches under way in a volume. `seal` is called with each full segment."""

    def __init__(self, log: Log, seal: Callable[[Segment], None]) -> None:
        self._log = log
        self._seal = seal
        self._batches: deque[Batch] = deque()
        self._newest: dict[str, tuple[Batch, int]] = {}  # of each key under way
        self._writes: dict[Job, Batch] = {}
        self._flushes: dict[Job, tuple[Segment, list[Batch]]] = {}
        self._flushing: set[Segment] = set()
        self.jobs: list[Job] = []
        """New jobs, in the order of the log."""
        self.was_refused = False
        """Whether there was no room for the last batch."""

    def __len__(self) -> int:
        return len(self._batches)

    def ended_until(self, sequence: int) -> bool:
        """Return whether no batch up to a sequence is under way."""
        return not self._batches or self._batches[0].sequence > sequence

    def under_way(self, key: str) -> bool:
        """Return whether a record of this key is under way, block or tombstone."""
        return key in self._newest

    def forget(self, keys: Sequence[str]) -> None:
        """Let the records of these keys that are under way be dead when they end."""
        if self._newest:
            for key in keys:
                found = self._newest.get(key)
                if found is not None:
                    found[0].dead.add(found[1])

    def forget_all(self) -> None:
        """Forget everything that is under way."""
        self._newest.clear()

    # The beginning of a batch

    def room(self) -> int:
        """See `Volume.room`."""
        segments = self._log.segments
        left = 0 if segments.open is None else self.room_in(segments.open)
        whole = self.room_in(Segment(0))
        return left if left >= whole // 32 or not segments.can_open else whole

    def room_in(self, segment: Segment) -> int:
        """Return how many bytes of blocks go into a segment, if most have 256 KiB."""
        length = self._log.segment_bytes
        rows = max(1, (length - segment.end_bytes) >> 18)
        key_bytes = max(MAX_KEY_BYTES, rows * 64)
        room = segment.room_bytes(length, rows, key_bytes) - aligned(table_bytes(rows, key_bytes))
        return max(0, room // ALIGNMENT_BYTES * ALIGNMENT_BYTES)

    def fitting(self, keys: Sequence[str], lengths: Sequence[int]) -> int:
        """See `Volume.fitting`."""
        sizes = [(len(key.encode()), aligned(length)) for key, length in zip(keys, lengths, strict=True)]
        if self._fits_alone(len(sizes), sum(size for size, _ in sizes), sum(size for _, size in sizes)):
            return len(sizes)
        key_bytes = block_bytes = 0
        for count, (key_size, block_size) in enumerate(sizes):
            key_bytes += key_size
            block_bytes += block_size
            if not self._fits_alone(count + 1, key_bytes, block_bytes):
                return count
        return len(sizes)

    def _fits_alone(self, rows: int, key_bytes: int, block_bytes: int) -> bool:
        batch_bytes = aligned(table_bytes(rows, key_bytes)) + block_bytes
        return batch_bytes <= Segment(0).room_bytes(self._log.segment_bytes, rows, key_bytes)

    def append(
        self,
        keys: Sequence[str],
        lengths: Sequence[int],
        checksums: Sequence[int],
        views: Sequence[memoryview],
        *,
        own_checksums: Sequence[bool] | None,
        sources: Sequence[Location | None] | None,
    ) -> int | None:
        """See `Volume.append`."""
        log, count = self._log, len(keys)
        marks = fingerprints(keys, log.seed)
        slots = log.records.find(marks.low)
        again = np.zeros(count, np.bool_)
        kept = ~again
        if sources is not None:
            again = np.array([source is not None for source in sources], np.bool_)
            kept = ~again | self._still_at(keys, slots, sources)
        rows = np.flatnonzero(kept).tolist()
        encoded = [keys[row].encode() for row in rows]
        paged = [aligned(len(views[row])) for row in rows]
        key_bytes = sum(map(len, encoded))
        segment = self._segment_for(len(rows), key_bytes, sum(paged))
        self.was_refused = segment is None
        if segment is None:
            return None
        log.records.make_stale(slots[~again])
        self.forget([keys[row] for row in rows])
        token = log.take_sequence()
        if not rows:
            log.events.append(Durable(token))
            return token
        blocks = np.array(paged, np.int64)
        saved = (np.array([aligned(lengths[row]) for row in rows], np.int64) - blocks) // ALIGNMENT_BYTES
        own = 0 if own_checksums is None else np.array(own_checksums, np.int64)[kept] * OWN_CHECKSUM
        starts = segment.end_bytes + aligned(table_bytes(len(rows), key_bytes)) + np.cumsum(blocks) - blocks
        listing = Listing.of(
            encoded,
            marks.low[kept],
            marks.high[kept],
            checksum=np.array(checksums, np.uint64)[kept],
            page=np.where(blocks > 0, starts // ALIGNMENT_BYTES, 0),
            length=np.array(lengths, np.uint32)[kept],
            flags=saved << SAVED_SHIFT | own,
            tenant=0,
            expiry=0,
        )
        blocks_of = [views[row] for row in rows if lengths[row]]
        self._begin(segment, token, listing, [keys[row] for row in rows], blocks_of)
        counters = log.counters
        counters.appended_blocks += len(blocks_of)
        counters.appended_bytes += int(listing.length.sum(dtype=np.int64))
        counters.reinserted_bytes += int(listing.length[again[kept]].sum(dtype=np.int64))
        counters.tombstones += len(rows) - len(blocks_of)
        return token

    def _still_at(
        self, keys: Sequence[str], slots: npt.NDArray[np.int64], sources: Sequence[Location | None]
    ) -> npt.NDArray[np.bool_]:
        """Return which keys still have the block of their source as their newest."""
        log = self._log
        places = np.full((len(keys), 2), -1, np.int64)
        for row, (key, source) in enumerate(zip(keys, sources, strict=True)):
            if source is not None and not self.under_way(key):
                segment = log.segments.get(source.segment)
                if segment is not None and segment.incarnation == source.incarnation:
                    places[row] = source.segment, source.offset // ALIGNMENT_BYTES
        there = (places[:, 0] >= 0) & log.records.live(slots)
        there[there] = log.records.at(slots[there], places[there, 0], places[there, 1])
        return there

    def _segment_for(self, rows: int, key_bytes: int, block_bytes: int) -> Segment | None:
        """Return the segment that a batch goes to, which is the open one then."""
        log = self._log
        segments, length = log.segments, log.segment_bytes
        batch_bytes = aligned(table_bytes(rows, key_bytes)) + block_bytes
        current = segments.open
        if current is not None and batch_bytes <= current.room_bytes(length, rows, key_bytes):
            return current
        if not self._fits_alone(rows, key_bytes, block_bytes):
            raise ValueError(f"a batch of {in_units(batch_bytes)} does not fit into a segment of {in_units(length)}")
        if not segments.can_open:
            return None
        if current is not None:
            current.state = SegmentState.FULL
            self._seal(current)
        opened = segments.open_spare(log.next_sequence)
        log.raise_floor()
        log.tasks.poke()
        return opened

    def _begin(
        self, segment: Segment, sequence: int, listing: Listing, keys: Sequence[str], views: Sequence[memoryview]
    ) -> int:
        """Start to write a batch at the end of the open segment; return how many bytes
        it takes. `views` are of the rows that are blocks."""
        log = self._log
        batch = Batch(sequence, segment, log.floor, listing, keys)
        length = aligned(table_bytes(len(listing), len(listing.key_bytes)))
        batch_bytes = length + file_bytes(views)
        table = Table(
            segment=segment.number,
            uuid=log.uuid,
            incarnation=segment.incarnation,
            offset=segment.end_bytes,
            sequence=sequence,
            synced=log.settled,
            floor=log.floor,
            batch_bytes=batch_bytes,
            number=len(segment.batches),
            rows=len(listing),
            key_bytes=len(listing.key_bytes),
        )
        head = memoryview(encode_table(table, listing, log.seed))
        if not segment.batches:
            self._write(batch, log.segment_bytes - END_BYTES, [memoryview(self._end_of(segment))])
        offset, part, part_bytes = segment.end_bytes, [head], aligned(len(head))
        for view in views:
            if part_bytes >= _WRITE_BYTES:
                self._write(batch, offset, part)
                offset, part, part_bytes = offset + part_bytes, [], 0
            part.append(view)
            part_bytes += aligned(len(view))
        self._write(batch, offset, part)
        segment.unsettled += 1
        segment.add(sequence, listing, batch_bytes)
        self._batches.append(batch)
        for row, key in enumerate(keys):
            self._newest[key] = batch, row
        return batch_bytes

    def _end_of(self, segment: Segment) -> bytes:
        log = self._log
        return encode_end(End(segment.number, log.uuid, segment.incarnation, log.floor, 0, 0, 0), log.seed)

    def _write(self, batch: Batch, offset: int, views: list[memoryview]) -> None:
        job = Write(self._log.number, batch.segment.file, offset, views)
        self._writes[job] = batch
        batch.writing += 1
        self.jobs.append(job)

    def done(self, result: Result) -> bool:
        """Take a result; return whether it is of a job of a batch."""
        job = result.job
        batch = self._writes.pop(job, None)
        if batch is not None and isinstance(job, Write):
            self._written(batch, job, result)
        elif job in self._flushes:
            self._flushed(*self._flushes.pop(job), result.errno)
        else:
            return False
        self._settle()
        return True

    def _written(self, batch: Batch, job: Write, result: Result) -> None:
        expected = file_bytes(job.views)
        errno = result.errno or (_EIO if result.transferred_bytes < expected else 0)
        self._log.counters.written_bytes += 0 if errno else expected
        batch.writing -= 1
        if errno:
            self.abandon(batch.segment, errno)
        elif not batch.writing and batch.state is _State.WRITING:
            batch.state = _State.WRITTEN
            self._flush(batch.segment)

    def _flush(self, segment: Segment) -> None:
        """Flush what was written to a segment, unless a flush is under way."""
        covered = [one for one in self._batches if one.segment is segment and one.state is _State.WRITTEN]
        if not covered or segment in self._flushing:
            return
        for batch in covered:
            batch.state = _State.FLUSHING
        self._flushing.add(segment)
        job = Flush(self._log.number, segment.file)
        self._flushes[job] = segment, covered
        self.jobs.append(job)

    def _flushed(self, segment: Segment, covered: list[Batch], errno: int) -> None:
        self._flushing.remove(segment)
        if errno:
            self.abandon(segment, errno)
            return
        for batch in covered:
            if batch.state is _State.FLUSHING:
                batch.state = _State.DURABLE
        self._flush(segment)

    def abandon(self, segment: Segment, errno: int) -> None:
        """Write nothing more to a segment, because a write or flush of it failed."""
        log = self._log
        if segment.state in (SegmentState.OPEN, SegmentState.FULL):
            segment.state = SegmentState.ABANDONED
            log.counters.abandoned_segments += 1
            if log.segments.open is segment:
                log.segments.open = None
        for batch in self._batches:
            if batch.segment is segment and batch.state is not _State.LOST:
                batch.state, batch.errno = _State.LOST, errno
        unstarted = [job for job in self.jobs if job in self._writes and self._writes[job].segment is segment]
        self.jobs = [job for job in self.jobs if job not in set(unstarted)]
        for job in unstarted:
            batch = self._writes.pop(job)
            batch.writing -= 1

    # The end of a batch

    def _settle(self) -> None:
        """End the batches that can, in order."""
        while self._batches:
            batch = self._batches[0]
            if batch.writing or batch.state not in (_State.DURABLE, _State.LOST):
                return
            self._batches.popleft()
            self._end(batch)

    def _end(self, batch: Batch) -> None:
        log = self._log
        durable = batch.state is _State.DURABLE
        batch.segment.unsettled -= 1
        log.settled = batch.sequence
        if durable:
            log.durable_floor = max(log.durable_floor, batch.floor)
        else:
            log.counters.lost_batches += 1
        if batch.sequence >= log.floor:
            self._apply(batch, durable)
        for key in batch.keys:
            newest = self._newest.get(key)
            if newest is not None and newest[0] is batch:
                del self._newest[key]
        log.events.append(Durable(batch.sequence) if durable else Lost(batch.sequence, batch.errno))

    def _apply(self, batch: Batch, durable: bool) -> None:
        """Index the records; those of a lost batch are stale."""
        log, listing = self._log, batch.listing
        blocks = listing.length > 0
        rows = rows_of(listing, batch.segment.number)
        live = rows.live if durable else ~rows.live
        if batch.dead:
            live[list(batch.dead)] = False
        rows = rows._replace(live=live)
        if durable and not blocks.all():
            log.records.remove(log.records.find(listing.low[~blocks]))
        if blocks.any():
            log.records.insert(rows.only(blocks))
