"""The log of a volume: its segments, and what all parts of the volume share.

The log is written to one open segment. When that is full it is sealed with a footer,
and the next one is opened: one that was never used, while the capacity lasts, else the
oldest. So the log always is a range of sequences, from a *floor* on, and only ever
loses its oldest part. That is why a tombstone needs no copies: it is lost with its
segment, and by then everything that it hides is lost already.

The one thing to watch is that what was lost stays lost, also if a write that would have
overwritten it failed. Each table has the floor of its time. `needs_floor` says when no
durable table has a floor that is high enough; the superblock then gets it first.

A segment has an *incarnation*: the sequence of the first batch of its present life. It
is in everything that is written there, so what is left of an earlier life is not taken
for part of this one.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import attrs
import numpy as np

from infinistore.disk.format import (
    COPIES,
    END_BYTES,
    OWN_CHECKSUM,
    SUPERBLOCK_BYTES,
    Listing,
    Origin,
    Superblock,
    encode_superblock,
    footer_bytes,
    most_snapshot_bytes,
)
from infinistore.disk.jobs import ALIGNMENT_BYTES, WAIT, Steps, Tasks, WriteSuperblock, aligned
from infinistore.disk.records import Records, Rows
from infinistore.errors import ConfigError
from infinistore.sizes import in_units

_LARGEST, _SMALLEST, _FEWEST = 256 << 20, 1 << 20, 2
_DISK_BYTES = COPIES * SUPERBLOCK_BYTES


class SegmentState(Enum):
    """What a segment is used for."""

    MISSING = "missing"
    """It has no file."""
    FREE = "free"
    """It has a file, and nothing in it counts."""
    OPEN = "open"
    """Batches are appended."""
    FULL = "full"
    """No more batches are appended; the footer is not there yet."""
    SEALED = "sealed"
    ABANDONED = "abandoned"
    """A write or flush failed. What was durable before is read; nothing is written."""


_IN_LOG = {SegmentState.OPEN, SegmentState.FULL, SegmentState.SEALED, SegmentState.ABANDONED}


@attrs.define(eq=False)
class Segment:
    """One segment and its file."""

    number: int
    state: SegmentState = SegmentState.MISSING
    incarnation: int = 0
    oldest_content: int = 0
    """The lowest incarnation that its file may have records of; 0: none."""
    end_bytes: int = 0
    """Where the next batch goes."""
    sequence: int = 0
    """Of its last batch."""
    batches: list[tuple[int, Listing]] = attrs.field(factory=list, repr=False)
    """While it is open or full: the sequence and the records of each batch."""
    rows: int = 0
    key_bytes: int = 0
    """Of all its batches."""
    unsettled: int = 0
    """Batches that are neither durable nor lost yet."""
    pins: int = 0

    @property
    def file(self) -> str:
        """The name of its file."""
        return f"segments/{self.number}"

    def add(self, sequence: int, listing: Listing, batch_bytes: int) -> None:
        """Note a batch."""
        self.batches.append((sequence, listing))
        self.sequence = sequence
        self.rows += len(listing)
        self.key_bytes += len(listing.key_bytes)
        self.end_bytes += batch_bytes

    def take(self, batches: list[tuple[int, Listing]]) -> None:
        """Note batches that were found."""
        for sequence, listing in batches:
            self.add(sequence, listing, 0)

    def room_bytes(self, segment_bytes: int, rows: int, key_bytes: int) -> int:
        """Return the longest batch of so many rows, with table and padding."""
        footer = footer_bytes(len(self.batches) + 1, self.rows + rows, self.key_bytes + key_bytes)
        return segment_bytes - self.end_bytes - aligned(footer) - END_BYTES

    def clear(self, state: SegmentState) -> None:
        """Forget what it had."""
        self.state = state
        self.incarnation = self.end_bytes = self.sequence = self.rows = self.key_bytes = 0
        self.batches = []


class Segments:
    """All segments of one volume."""

    def __init__(self, segment_bytes: int, most: int) -> None:
        self.segment_bytes = segment_bytes
        self.most = most
        """How many may have a file."""
        self._all: dict[int, Segment] = {}
        self.open: Segment | None = None
        self.spare: Segment | None = None
        """The segment that is opened next; nothing in it counts."""
        self.overwrites = True
        """Whether the oldest segment is overwritten when there is no other."""

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._all.values())

    def __getitem__(self, number: int) -> Segment:
        return self._all[number]

    def get(self, number: int) -> Segment | None:
        """Return a segment by its number; None if there is no such."""
        return self._all.get(number)

    def add(self, segment: Segment) -> Segment:
        """Add a segment."""
        self._all[segment.number] = segment
        return segment

    def remove(self, segment: Segment) -> None:
        """Forget a segment whose file is gone."""
        del self._all[segment.number]

    @property
    def allocated(self) -> int:
        """How many segments have a file, or are about to."""
        return len(self._all)

    def in_log(self) -> list[Segment]:
        """Return the segments with batches that count, the oldest first."""
        return sorted((one for one in self if one.state in _IN_LOG), key=lambda one: one.incarnation)

    def free(self) -> Segment | None:
        """Return a segment whose file can be overwritten."""
        for segment in self:
            if segment.state is SegmentState.FREE and not segment.pins and segment is not self.spare:
                return segment
        return None

    def unused_number(self) -> int | None:
        """Return the number of a segment to allocate; None at full capacity."""
        if self.allocated >= self.most:
            return None
        return next(number for number in range(self.most) if number not in self._all)

    @property
    def are_used_up(self) -> bool:
        """Whether there is none beside the spare that nothing counts in."""
        return self.free() is None and self.unused_number() is None

    @property
    def can_open(self) -> bool:
        """Whether the spare segment may be opened. If nothing is overwritten now, the
        last one stays: without it, the next start would have to overwrite."""
        return self.spare is not None and (self.overwrites or not self.are_used_up)

    def needs_floor(self, segment: Segment, incarnation: int, durable_floor: int) -> bool:
        """Return whether the superblock needs a floor of this incarnation, the one that
        the segment had, before the segment is overwritten.

        It does if another file has older records that would count again after a crash.
        """
        return any(
            one.oldest_content and durable_floor <= one.oldest_content < incarnation
            for one in self
            if one is not segment
        )

    def open_spare(self, incarnation: int) -> Segment:
        """Make the spare segment the open one."""
        segment, self.spare = self.spare, None
        assert segment is not None
        segment.clear(SegmentState.OPEN)
        segment.incarnation = incarnation
        segment.oldest_content = segment.oldest_content or incarnation
        self.open = segment
        return segment


def default_segment_bytes(capacity_bytes: int) -> int:
    """Return the length of segments for a disk: 256 MiB, less for a small disk."""
    length = _LARGEST
    while length > _SMALLEST and length * 32 > capacity_bytes:
        length //= 2
    return length


def segments_within(capacity_bytes: int, segment_bytes: int) -> int:
    """Return how many segments a disk may have, with room for superblock and snapshots.

    ConfigError: too few to write anything.
    """
    count = capacity_bytes // segment_bytes
    while (
        count > 0 and count * segment_bytes + most_snapshot_bytes(count, segment_bytes) + _DISK_BYTES > capacity_bytes
    ):
        count -= 1
    if count < _FEWEST:
        raise ConfigError(
            f"a disk of {in_units(capacity_bytes)} has no room for {_FEWEST} segments of {in_units(segment_bytes)}:"
            " give it more"
        )
    return count


SESSION_SHIFT = 32


class Location(NamedTuple):
    """Where a block is on a disk."""

    segment: int
    """The number of the segment: the block is in the file `segments/NUMBER`."""
    incarnation: int
    """Which life of the segment it belongs to: a segment is used again and again."""
    offset: int
    """In bytes, a multiple of `ALIGNMENT_BYTES`."""
    length: int
    """In bytes, without padding; at least 1."""
    checksum: int
    """The xxh3-64 of the block, always there. A block whose bytes have another one is
    not this key's: call `drop`, and treat it as a miss."""
    own_checksum: bool
    """The tier computed it for a block without one: readers see no checksum."""
    saved_pages: int = 0
    """By how many pages of `ALIGNMENT_BYTES` it is shorter on the disk, because it is
    compressed; 0: it is not."""

    @property
    def stored_bytes(self) -> int:
        """What it takes on the disk, with padding."""
        return aligned(self.length) - self.saved_pages * ALIGNMENT_BYTES


def locations_of(*columns: Iterable[int]) -> Iterator[Location]:
    """Return locations from columns, for a third of the price of calls."""
    return map(_location, zip(*columns, strict=True))


_location: Callable[[tuple[int, ...]], Location] = partial(tuple.__new__, Location)


@attrs.frozen
class Durable:
    """A batch is on the disk: `find` knows its records, but those forgotten since."""

    token: int


@attrs.frozen
class Lost:
    """A batch will not become durable. Append what is still needed again."""

    token: int
    errno: int


@attrs.frozen
class Reclaim:
    """The oldest segment will be overwritten: the last chance for its blocks.

    What is worth it is read and appended again with `sources`, at most
    `reinsertion_bytes` of `Volume`. Call `reclaimed` then, or at once if nothing is, or
    if there is no room. Until then the segment stays, and the volume may run out of
    room.
    """

    segment: int
    keys: Sequence[str] = attrs.field(repr=False)
    """The keys of its live blocks, in the order of the log."""
    locations: Sequence[Location] = attrs.field(repr=False)
    reads: Sequence[int] = attrs.field(repr=False)
    """How often each was read of late (`note_reads`), 0 to 3."""


@attrs.frozen
class Shrunk:
    """The disk gave no room for another segment: it has what there is, and no more."""

    errno: int


Event: TypeAlias = Durable | Lost | Reclaim | Shrunk


@attrs.define
class Counters:
    """What a volume has done, since it was opened."""

    appended_blocks: int = 0
    appended_bytes: int = 0
    reinserted_bytes: int = 0
    written_bytes: int = 0
    tombstones: int = 0
    lost_batches: int = 0
    abandoned_segments: int = 0
    recycled_segments: int = 0
    damaged_batches: int = 0
    snapshots: int = 0


class Log:
    """The state of one volume."""

    def __init__(self, number: int, superblock: Superblock, segments: Segments, records: Records) -> None:
        self.number = number
        self.superblock = superblock
        """As it is on the disk."""
        self.segments = segments
        self.records = records
        self.tasks = Tasks()
        self.events: list[Event] = []
        self.counters = Counters()
        self.next_sequence = 0
        self.settled = 0
        """All batches up to this sequence have ended: each is durable, or was lost."""
        self.floor = superblock.floor
        """Records with a lower sequence are void."""
        self.durable_floor = superblock.floor
        """The highest floor that recovery would find."""
        self.unread: set[int] = set()
        """Segments that recovery could not read: nobody knows what comes back."""
        self.purges = 0
        """How often the log was purged: what was begun before one is void after it."""
        self._superblock_busy = False

    @property
    def uuid(self) -> bytes:
        """The identity of the disk."""
        return self.superblock.uuid

    @property
    def seed(self) -> int:
        """The secret of the disk."""
        return self.superblock.seed

    @property
    def segment_bytes(self) -> int:
        """The length of each segment."""
        return self.superblock.segment_bytes

    def origin(self, number: int) -> Origin:
        """Return what the bytes of a segment must belong to."""
        return Origin(self.uuid, self.seed, number, self.segment_bytes)

    def take_sequence(self) -> int:
        """Return the next sequence."""
        sequence = self.next_sequence
        self.next_sequence += 1
        return sequence

    def begin_session(self, session: int, floor: int) -> None:
        """Set what sequences of this session begin with."""
        self.settled = session << SESSION_SHIFT
        self.next_sequence = self.settled + 1
        self.floor = self.durable_floor = floor

    def raise_floor(self) -> None:
        """Let the log begin with the oldest segment that it has now."""
        in_log = self.segments.in_log()
        self.floor = max(self.floor, in_log[0].incarnation if in_log else self.next_sequence)

    def write_superblock(self, **changes: Any) -> Steps[int]:
        """Write the superblock with these changes and the floor; return the errno."""
        while self._superblock_busy:
            yield WAIT
        self._superblock_busy = True
        # The copy that is overwritten is the older one, also after a failure.
        revision = self.superblock.revision + 1
        wanted = attrs.evolve(self.superblock, revision=revision, floor=self.floor, **changes)
        [result] = yield [WriteSuperblock(self.number, wanted.revision % 2, encode_superblock(wanted))]
        self._superblock_busy = False
        self.tasks.poke()
        if not result.errno:
            self.superblock = wanted
            self.durable_floor = max(self.durable_floor, wanted.floor)
        return result.errno


def rows_of(listing: Listing, segment: int) -> Rows:
    """Return the records of a listing as rows of the index, live ones."""
    count = len(listing)
    return Rows(
        low=listing.low,
        seal=listing.checksum ^ listing.high,
        segment=np.full(count, segment, np.uint32),
        page=listing.page,
        length=listing.length,
        saved=listing.saved,
        own=(listing.flags & OWN_CHECKSUM) != 0,
        live=np.ones(count, np.bool_),
    )


def pages(length_bytes: int) -> int:
    """Return how many pages of 4 KiB a length takes."""
    return -(-length_bytes // ALIGNMENT_BYTES)
