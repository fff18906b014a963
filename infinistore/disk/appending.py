"""How a batch gets its place in the log: its segment, its pages, its table."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from infinistore.disk.batches import Batches
from infinistore.disk.format import OWN_CHECKSUM, Listing, table_bytes
from infinistore.disk.jobs import ALIGNMENT_BYTES, aligned
from infinistore.disk.log import Durable, Location, Log, Segment, SegmentState
from infinistore.disk.records import fingerprints
from infinistore.keys import MAX_KEY_BYTES
from infinistore.sizes import in_units

__all__ = ["Appending"]


class Appending:
    """Appends batches to a log. `seal` is called with a segment that is full."""

    def __init__(self, log: Log, batches: Batches, seal: Callable[[Segment], None]) -> None:
        self._log = log
        self._batches = batches
        self._seal = seal
        self.was_refused = False
        """Whether there was no room for the last batch."""

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
        tenants: Sequence[int] | None,
        expiries: Sequence[int] | None,
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
        paged = [aligned(lengths[row]) for row in rows]
        key_bytes = sum(map(len, encoded))
        segment = self._segment_for(len(rows), key_bytes, sum(paged))
        self.was_refused = segment is None
        if segment is None:
            return None
        log.records.make_stale(slots[~again])
        self._batches.forget([keys[row] for row in rows])
        token = log.take_sequence()
        if not rows:
            log.events.append(Durable(token))
            return token
        blocks = np.array(paged, np.int64)
        starts = segment.end_bytes + aligned(table_bytes(len(rows), key_bytes)) + np.cumsum(blocks) - blocks
        listing = Listing.of(
            encoded,
            marks.low[kept],
            marks.high[kept],
            checksum=np.array(checksums, np.uint64)[kept],
            page=np.where(blocks > 0, starts // ALIGNMENT_BYTES, 0),
            length=np.array(lengths, np.uint32)[kept],
            flags=0 if own_checksums is None else np.array(own_checksums, np.uint16)[kept] * OWN_CHECKSUM,
            tenant=0 if tenants is None else np.array(tenants, np.uint32)[kept],
            expiry=0 if expiries is None else np.array(expiries, np.uint64)[kept],
        )
        blocks_of = [views[row] for row in rows if lengths[row]]
        self._batches.begin(segment, token, listing, [keys[row] for row in rows], blocks_of)
        counters = log.counters
        counters.appended_blocks += len(blocks_of)
        counters.appended_bytes += int(listing.length.sum(dtype=np.int64))
        counters.reinserted_bytes += int(listing.length[again[kept]].sum(dtype=np.int64))
        counters.tombstones += len(rows) - len(blocks_of)
        return token

    def _still_at(
        self, keys: Sequence[str], slots: npt.NDArray[np.int64], sources: Sequence[Location | None]
    ) -> npt.NDArray[np.bool_]:
        """Return which keys still have the block that their source says, and nothing
        newer."""
        log = self._log
        places = np.full((len(keys), 2), -1, np.int64)
        for row, (key, source) in enumerate(zip(keys, sources, strict=True)):
            if source is not None and not self._batches.under_way(key):
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
