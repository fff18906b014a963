"""The index of one disk: which block of which segment is whose, in 40 bytes a record.

A hash table in numpy, in 64 shards. A shard that is full is rebuilt a quarter larger,
one at a time, so no call stalls for long, and the whole needs little more memory than
its records. All shards lie in one reserved range of addresses, so one gather looks up
a batch whatever its shards are; memory is used only as far as shards have grown.

Each slot has the low half of the key's fingerprint, a *seal*, a place and a length.
The seal is the block's checksum XOR the high half of the fingerprint. Looked up with
another key of the same low half, it gives a wrong checksum, and the block is a miss
once it is verified. So all 128 bits of a fingerprint decide, in the room of 64.

A record is *live*, or *stale*: nobody finds it, but it is still on the disk, where a
crash may bring it back (`Volume.lingers`). Records of a segment all end together, with
the next life of the segment: each place has the *lap* of its segment, a counter of 8
bits, and a place of another lap is no record. `sweep` takes such slots away, long
before a counter comes round.

What it leaves to others: order. The last `insert` of a key wins.
"""

import mmap
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_digest

from infinistore.disk.jobs import ALIGNMENT_BYTES

U64: TypeAlias = npt.NDArray[np.uint64]
U32: TypeAlias = npt.NDArray[np.uint32]
U16: TypeAlias = npt.NDArray[np.uint16]
Int: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]

SHARDS = 64
_SHARD_SHIFT, _HASH_SHIFT, _HASH_MASK = np.uint64(58), np.uint64(26), np.uint64(0xFFFFFFFF)
_SHARD_STARTS = np.arange(SHARDS, dtype=np.uint64) << _SHARD_SHIFT
_BUCKET = 8  # slots; their low halves fill one cache line
_TAIL = 4  # buckets behind a shard's last one, for what overflows there; the last stays empty
_FULL = 0.75  # at most; 0.6 once a shard has grown
_GROWTH = 1.25
_SLOT_BYTES = 28
_LEAST_LOADED = 1 << 20
_MAP_NORESERVE = 0x4000  # Linux; the mmap module has no name for it before 3.13

_EMPTY, _DELETED, _LEAST_LOW = np.uint64(0), np.uint64(1), np.uint64(2)
MOST_SEGMENT_BYTES = ALIGNMENT_BYTES << 16
MOST_SAVED_PAGES = (1 << 12) - 1
"""The most pages that a block may take less on disk, because it is compressed."""
# A place: segment (24 bits), page (16), saved pages (12), lap (8), own checksum, live,
# reads (2).
_SEGMENT_SHIFT, _PAGE_SHIFT, _SAVED_SHIFT, _LAP_SHIFT = np.uint64(40), np.uint64(24), np.uint64(12), np.uint64(4)
_PAGE_MASK, _SAVED_MASK, _LAP_MASK = np.uint64(0xFFFF), np.uint64(MOST_SAVED_PAGES), np.uint64(0xFF)
_WHERE_MASK = ~np.uint64((1 << 24) - 1)
_OWN, _LIVE, _READS = np.uint64(8), np.uint64(4), np.uint64(3)


class Fingerprints(NamedTuple):
    """The 128-bit fingerprints of a batch of keys, as two columns."""

    low: U64
    high: U64


class Rows(NamedTuple):
    """Records as columns. Places are in units of 4 KiB (`page`), lengths in bytes.

    `saved` is by how many pages of 4 KiB a block is shorter on disk: 0, unless it is
    compressed.
    """

    low: U64
    seal: U64
    segment: U32
    page: U32
    length: U32
    saved: U16
    own: Flags
    live: Flags

    def only(self, wanted: Flags) -> "Rows":
        """Return some of the rows."""
        if wanted.all():
            return self
        return Rows(
            *(self.low[wanted], self.seal[wanted], self.segment[wanted], self.page[wanted], self.length[wanted]),
            saved=self.saved[wanted],
            own=self.own[wanted],
            live=self.live[wanted],
        )


class _Columns(NamedTuple):
    """Slots as columns."""

    low: U64
    seal: U64
    place: U64
    length: U32

    def at(self, slots: npt.NDArray[Any] | slice) -> "_Columns":
        return _Columns(self.low[slots], self.seal[slots], self.place[slots], self.length[slots])


def fingerprints(keys: Sequence[str], seed: int) -> Fingerprints:
    """Return the fingerprints of keys: xxh3-128 of their UTF-8, with a secret seed.

    A low half below 2 counts as 2, because the index marks free slots with 0 and 1.
    """
    digests = b"".join(map(xxh3_128_digest, map(str.encode, keys), repeat(seed)))
    halves = np.frombuffer(digests, ">u8").astype(np.uint64)
    return Fingerprints(np.maximum(halves[1::2], _LEAST_LOW), halves[::2])


class Records:
    """The records of one disk of `segments` segments, at most `most_records`.

    Reads and changes take slots: numbers that `find` gives, and that any other change
    than theirs may move. -1 is no slot.
    """

    def __init__(self, most_records: int, segments: int) -> None:
        self.most_records = most_records
        per_shard = most_records / SHARDS
        per_shard += 6 * per_shard**0.5 + 16  # keys are not spread evenly
        self._region = int(per_shard / _FULL / _BUCKET * _GROWTH) + 2 * _TAIL  # buckets of a shard, at most
        self._base = np.arange(SHARDS, dtype=np.int64) * self._region
        self._laps = np.zeros(segments, np.uint64)
        self.clear()

    def clear(self) -> None:
        """Remove all records."""
        slots = SHARDS * self._region * _BUCKET
        memory = mmap.mmap(-1, slots * _SLOT_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        memory.madvise(mmap.MADV_NOHUGEPAGE)  # shards grow by less than a huge page
        self._columns = _Columns(
            np.frombuffer(memory, np.uint64, slots),
            np.frombuffer(memory, np.uint64, slots, slots * 8),
            np.frombuffer(memory, np.uint64, slots, slots * 16),
            np.frombuffer(memory, np.uint32, slots, slots * 24),
        )
        self._low, self._seal, self._place, self._length = self._columns
        self._by_bucket = self._low.reshape(-1, _BUCKET)
        self._buckets = np.ones(SHARDS, np.int64)
        self._used = np.zeros(SHARDS, np.int64)  # slots that are not empty, deleted ones included
        self._live = np.zeros(self._laps.size, np.int64)  # live records of each segment

    @property
    def occupied(self) -> int:
        """How many slots are taken, also by what has ended and was not swept yet."""
        return int(self._used.sum())

    @property
    def live_records(self) -> int:
        """How many records are live."""
        return int(self._live.sum())

    @property
    def memory_bytes(self) -> int:
        """The memory that the shards take, in bytes."""
        return int((self._buckets + _TAIL).sum()) * _BUCKET * _SLOT_BYTES

    # Looking up

    def find(self, low: U64) -> Int:
        """Return the slot of each record, live or stale; -1 for what is not there."""
        slots = self._find(low)
        slots[~self._valid(self._place[slots])] = -1
        return slots

    def live(self, slots: Int) -> Flags:
        """Return which slots are live records; a slot of -1 is none."""
        found: Flags = (slots >= 0) & ((self._place[slots] & _LIVE) != 0)
        return found

    def at(self, slots: Int, segments: U32 | Int, pages: U32 | Int) -> Flags:
        """Return which slots are records of a block at this place."""
        found: Flags = (slots >= 0) & ((self._place[slots] & _WHERE_MASK) == _where(segments, pages))
        return found

    def reads(self, slots: Int) -> U64:
        """Return how often these records were read of late: 0 to 3."""
        return self._place[slots] & _READS

    def rows(self, slots: Int | slice) -> Rows:
        """Return what slots have."""
        return _decoded(self._columns.at(slots))

    # Changing

    def note_reads(self, slots: Int) -> None:
        """Count a read of each slot."""
        slots = slots[slots >= 0]
        place = self._place[slots]
        self._place[slots] = place + ((place & _READS) != _READS)

    def make_stale(self, slots: Int) -> None:
        """Let nobody find these records any more."""
        slots = slots[self.live(slots)]
        place = self._place[slots]
        np.subtract.at(self._live, (place >> _SEGMENT_SHIFT).astype(np.int64), 1)
        self._place[slots] = place & ~_LIVE

    def remove(self, slots: Int) -> None:
        """Remove records that are not on the disk any more, or hidden for good."""
        self.make_stale(slots)
        self._low[slots[slots >= 0]] = _DELETED

    def end_segment(self, segment: int) -> None:
        """End all records of a segment."""
        self._laps[segment] = (self._laps[segment] + np.uint64(1)) & _LAP_MASK
        self._live[segment] = 0

    def insert(self, rows: Rows) -> None:
        """Add or replace records. No fingerprint may be in `rows` twice."""
        new = self._encoded(rows)
        self._grow_for(new.low)
        slots = self._find(new.low)
        absent = np.flatnonzero(slots < 0)
        replaced = slots[slots >= 0]
        self.make_stale(replaced[self._valid(self._place[replaced])])
        if absent.size:
            slots[absent] = self._take_slots(new.low[absent])
        self._seal[slots], self._place[slots], self._length[slots] = new.seal, new.place, new.length
        np.add.at(self._live, rows.segment, rows.live)

    def sweep(self, shard: int) -> None:
        """Remove what has ended from one shard. It takes as long as a rebuild."""
        slots = self._slots_of(shard)
        low = self._low[slots]
        low[(low > _DELETED) & ~self._valid(self._place[slots])] = _DELETED
        if 4 * int((low == _DELETED).sum()) > int(self._used[shard]) > _BUCKET:
            self._build(shard, self._sorted(shard))

    def dump(self, shard: int) -> Rows:
        """Return the records of one shard, in the order of their low halves."""
        return _decoded(self._sorted(shard))

    def load(self, shard: int, rows: Rows) -> None:
        """Fill an empty shard with what `dump` gave."""
        columns = self._encoded(rows)
        self._build(shard, columns)
        self._live += self._live_by_segment(columns)

    # Inside

    def _encoded(self, rows: Rows) -> _Columns:
        place = _where(rows.segment, rows.page) | (self._laps[rows.segment] << _LAP_SHIFT)
        place |= rows.saved.astype(np.uint64) << _SAVED_SHIFT
        place |= rows.own * _OWN
        place |= rows.live * _LIVE
        return _Columns(rows.low, rows.seal, place, rows.length)

    def _valid(self, place: U64) -> Flags:
        """Return which places are of the present lives of their segments."""
        valid: Flags = self._laps[place >> _SEGMENT_SHIFT] == (place >> _LAP_SHIFT) & _LAP_MASK
        return valid

    def _homes(self, low: U64) -> Int:
        """Return the bucket that each record should be in."""
        shard = (low >> _SHARD_SHIFT).astype(np.int64)
        return self._base[shard] + self._home_in(low, self._buckets[shard])

    @staticmethod
    def _home_in(low: U64, buckets: Int | int) -> Int:
        """Return it relative to the shard, in the order of buckets."""
        return (((low >> _HASH_SHIFT) & _HASH_MASK).astype(np.int64) * buckets) >> 32

    def _find(self, low: U64) -> Int:
        """`find`, with records that have ended."""
        bucket = self._homes(low)
        slots, open_ = self._look(bucket, low)
        rest = np.flatnonzero(open_)
        while rest.size:  # their buckets have overflowed
            bucket[rest] += 1
            slots[rest], open_ = self._look(bucket[rest], low[rest])
            rest = rest[open_]
        return slots

    def _look(self, bucket: Int, low: U64) -> tuple[Int, Flags]:
        """Look into one bucket for each record: its slot or -1; whether to go on."""
        found = self._by_bucket[bucket]
        hits = found == low[:, None]
        hit = hits.any(1)
        return np.where(hit, bucket * _BUCKET + hits.argmax(1), -1), ~(hit | (found == _EMPTY).any(1))

    def _take_slots(self, low: U64) -> Int:
        """Give each of these new, distinct records a free slot."""
        bucket = self._homes(low)
        slots = np.empty(low.size, np.int64)
        rest = np.arange(low.size)
        while rest.size:
            free = self._by_bucket[bucket[rest]] <= _DELETED
            some = free.any(1)
            wanted = bucket[rest] * _BUCKET + free.argmax(1)
            first = np.zeros(rest.size, np.bool_)  # one record for each slot
            first[np.unique(wanted, return_index=True)[1]] = True
            winners, won = rest[first & some], wanted[first & some]
            slots[winners] = won
            shard = (low[winners] >> _SHARD_SHIFT).astype(np.int64)
            np.add.at(self._used, shard, self._low[won] == _EMPTY)
            self._low[won] = low[winners]
            bucket[rest[~some]] += 1
            rest = rest[~(first & some)]
        return slots

    def _grow_for(self, low: U64) -> None:
        """Rebuild the shards that have no room for so many new records."""
        coming = np.bincount((low >> _SHARD_SHIFT).astype(np.int64), minlength=SHARDS)
        full = self._used + coming > self._buckets * (_FULL * _BUCKET)
        for shard in np.flatnonzero(full).tolist():
            self._build(shard, self._sorted(shard), int(coming[shard]))

    def _slots_of(self, shard: int) -> slice:
        """The slots that a shard may use now."""
        start = int(self._base[shard]) * _BUCKET
        return slice(start, start + (int(self._buckets[shard]) + _TAIL) * _BUCKET)

    def _sorted(self, shard: int) -> _Columns:
        """Return the records of a shard in the order of their low halves."""
        slots = self._slots_of(shard)
        valid = np.flatnonzero((self._low[slots] > _DELETED) & self._valid(self._place[slots])) + slots.start
        return self._columns.at(valid[np.argsort(self._low[valid])])

    def _build(self, shard: int, columns: _Columns, coming: int = 0) -> None:
        """Fill a shard with these records, sorted, and leave room for `coming` more."""
        low = columns.low
        self._low[self._slots_of(shard)] = _EMPTY
        buckets = int(self._buckets[shard])
        needed = int((low.size + coming) / (_FULL * _BUCKET)) + 1
        if needed > 0.9 * buckets:
            buckets = int(needed * _GROWTH) + 1
        order = np.arange(low.size)
        while True:
            # As linear probing would place them, one after the other.
            positions = np.maximum.accumulate(self._home_in(low, buckets) * _BUCKET - order) + order
            if not low.size or positions[-1] < (buckets + _TAIL - 1) * _BUCKET:
                break
            buckets += 1 + buckets // 16
        if buckets + _TAIL > self._region:
            raise MemoryError(f"the index of a disk has room for {self.most_records:,} records, and more were added")
        self._buckets[shard] = buckets
        self._used[shard] = low.size
        positions += int(self._base[shard]) * _BUCKET
        self._low[positions], self._seal[positions] = low, columns.seal
        self._place[positions], self._length[positions] = columns.place, columns.length

    def _merge(self, shard: int, parts: Sequence[_Columns]) -> None:
        """Add sorted records to a shard over earlier ones; length 0 removes."""
        before = self._sorted(shard)
        parts = [before, *parts]
        merged = _Columns(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
        order = np.argsort(merged.low, kind="stable")
        low = merged.low[order]
        last = np.ones(low.size, np.bool_)
        np.not_equal(low[1:], low[:-1], out=last[:-1])
        kept = order[last & (merged.length[order] > 0)]
        merged = merged.at(kept)
        self._build(shard, merged)
        self._live += self._live_by_segment(merged) - self._live_by_segment(before)

    def _live_by_segment(self, columns: _Columns) -> Int:
        live = columns.place[(columns.place & _LIVE) != 0]
        return np.bincount((live >> _SEGMENT_SHIFT).astype(np.int64), minlength=self._laps.size)


class Loader:
    """Adds very many records to an index, each a tenth of the price of `insert`.

    `add` only keeps them, `merge` adds them. Between the two the index is as before.
    Rows of length 0 remove; of rows with one fingerprint, the last added wins.
    """

    def __init__(self, records: Records) -> None:
        self._records = records
        self._parts: list[tuple[_Columns, list[int]]] = []
        self._kept = 0

    def add(self, rows: Rows) -> None:
        """Keep rows, in the order of the log."""
        columns = self._records._encoded(rows)
        columns = columns.at(np.argsort(columns.low, kind="stable"))
        bounds = np.searchsorted(columns.low, _SHARD_STARTS).tolist()
        self._parts.append((columns, [*bounds, columns.low.size]))
        self._kept += columns.low.size

    @property
    def full(self) -> bool:
        """Whether to merge: what is kept takes up to half of the index's memory."""
        return self._kept > max(_LEAST_LOADED, self._records.occupied // 2)

    def merge(self) -> Iterator[None]:
        """Add all that is kept, a shard a step."""
        parts, self._parts, self._kept = self._parts, [], 0
        for shard in range(SHARDS):
            mine = [columns.at(slice(bounds[shard], bounds[shard + 1])) for columns, bounds in parts]
            self._records._merge(shard, mine)
            yield


def _where(segments: U32 | Int, pages: U32 | Int) -> U64:
    """The upper part of a place."""
    where: U64 = (segments.astype(np.uint64) << _SEGMENT_SHIFT) | (pages.astype(np.uint64) << _PAGE_SHIFT)
    return where


def _decoded(columns: _Columns) -> Rows:
    place = columns.place
    return Rows(
        columns.low,
        columns.seal,
        (place >> _SEGMENT_SHIFT).astype(np.uint32),
        ((place >> _PAGE_SHIFT) & _PAGE_MASK).astype(np.uint32),
        columns.length,
        ((place >> _SAVED_SHIFT) & _SAVED_MASK).astype(np.uint16),
        (place & _OWN) != 0,
        (place & _LIVE) != 0,
    )
