"""Batches under way: appended to the log, neither durable nor lost yet.

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
from collections.abc import Sequence
from enum import Enum

import attrs

from infinistore.disk.format import END_BYTES, End, Listing, Table, encode_end, encode_table, table_bytes
from infinistore.disk.jobs import Flush, Job, Result, Write, aligned, file_bytes
from infinistore.disk.log import Durable, Log, Lost, Segment, SegmentState, rows_of

__all__ = ["Batch", "Batches"]

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
    """The batches of a volume that are under way."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._batches: deque[Batch] = deque()
        self._newest: dict[str, tuple[Batch, int]] = {}  # of each key under way
        self._writes: dict[Job, Batch] = {}
        self._flushes: dict[Job, tuple[Segment, list[Batch]]] = {}
        self._flushing: set[Segment] = set()
        self.jobs: list[Job] = []
        """New jobs, in the order of the log."""

    def __len__(self) -> int:
        return len(self._batches)

    def ended_until(self, sequence: int) -> bool:
        """Return whether no batch up to a sequence is under way. Purges and batches of
        nothing take sequences, too, and are none."""
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

    def begin(
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
        """Let the index know the records. Those of a lost batch are stale: nobody knows
        what of it is on the disk."""
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
