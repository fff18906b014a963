"""What the parts of a volume share: its identity, its log, its index, its counters."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import attrs
import numpy as np

from infinistore.disk.format import OWN_CHECKSUM, Listing, Superblock, encode_superblock
from infinistore.disk.jobs import ALIGNMENT_BYTES, WAIT, Steps, Tasks, WriteSuperblock
from infinistore.disk.records import Records, Rows
from infinistore.disk.segments import Segments

__all__ = [
    "SESSION_SHIFT",
    "Counters",
    "Durable",
    "Event",
    "Location",
    "Log",
    "Lost",
    "Reclaim",
    "Shrunk",
    "locations_of",
    "rows_of",
]

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
    """The tier computed it, because the writer of the block had none: readers see no
    checksum."""


def locations_of(*columns: Iterable[int]) -> Iterator[Location]:
    """Return locations, given as columns in the order of the fields: a third of the
    price of one call each."""
    return map(_location, zip(*columns, strict=True))


_location: Callable[[tuple[int, ...]], Location] = partial(tuple.__new__, Location)


@attrs.frozen
class Durable:
    """A batch is on the disk: `find` knows its records, but those forgotten since."""

    token: int


@attrs.frozen
class Lost:
    """A batch will not become durable: its segment was abandoned. Append what is still
    needed again, to this volume or another one."""

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
        """Write the superblock with some fields changed, and with the floor; return an
        errno, 0 if it is durable."""
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
        own=(listing.flags & OWN_CHECKSUM) != 0,
        live=np.ones(count, np.bool_),
    )


def pages(length_bytes: int) -> int:
    """Return how many pages of 4 KiB a length takes."""
    return -(-length_bytes // ALIGNMENT_BYTES)
