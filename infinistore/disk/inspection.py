"""What is on a disk, for people: looked at, and verified, without writing anything.

An inspection finds the same records as the recovery of a volume, by the same code.
Verification then reads every block that a table or footer lists, live or not, and
compares hashes.

It is work in steps, see `Tasks` in `jobs`; whoever drives them runs the jobs.
"""

from collections.abc import Callable, Mapping

import attrs
import numpy as np

from infinistore.disk.format import Listing, Superblock, joined
from infinistore.disk.jobs import ALIGNMENT_BYTES, Steps
from infinistore.disk.log import Log, Segment, Segments, SegmentState
from infinistore.disk.records import SHARDS, Records
from infinistore.disk.recovery import find_batches, groups_of, read_blocks, read_footer, recover

_GROUPS_AT_ONCE = 8


@attrs.frozen(kw_only=True)
class SegmentContents:
    """One segment; sizes in bytes."""

    number: int
    state: str
    """free, open, sealed or abandoned; full if a crash left it without a footer."""
    incarnation: int
    batches: int
    blocks: int
    """That its batches list, also those that were replaced or deleted since."""
    tombstones: int
    blocks_bytes: int
    """Of these blocks, without padding."""


@attrs.frozen(kw_only=True)
class DiskContents:
    """A disk; sizes in bytes."""

    superblock: Superblock
    segments: list[SegmentContents]
    keys: int
    """That a server finds."""
    keys_bytes: int
    """The bytes of their blocks."""
    damaged_batches: int
    """Whose table or blocks are not whole: torn by a crash, or damaged since."""
    unreadable_segments: list[int]


@attrs.frozen
class DamagedBlock:
    """A block that cannot be read, or does not have its checksum."""

    key: str
    segment: int
    offset: int
    length: int
    live: bool
    """Whether a server would look for the key here."""
    errno: int
    """Why it cannot be read; 0: its checksum is wrong."""


@attrs.frozen
class Verified:
    """What was verified of a segment."""

    blocks: int
    blocks_bytes: int
    damaged: list[DamagedBlock]


class Inspector:
    """Looks at one disk, by its newest superblock and the lengths of its files."""

    def __init__(self, superblock: Superblock, files: Mapping[str, int]) -> None:
        numbers = [int(name.removeprefix("segments/")) for name in files if name.startswith("segments/")]
        slots = max(numbers, default=0) + 1
        records = Records(slots * (superblock.segment_bytes // ALIGNMENT_BYTES), slots)
        self._lengths = files
        self._log = Log(0, superblock, Segments(superblock.segment_bytes, slots), records)
        self.numbers = sorted(numbers)
        """Of the segments."""

    def inspect(self, progress: Callable[[], object]) -> Steps[DiskContents]:
        """Find what a server would find; call `progress` after each segment."""
        log = self._log
        superblock = log.superblock
        yield from recover(log, self._lengths)
        segments = []
        for number in self.numbers:
            batches, listing = yield from self._listed(log.segments[number])
            segments.append(_contents(log.segments[number], batches, listing))
            progress()
        shards = [log.records.dump(shard) for shard in range(SHARDS)]
        return DiskContents(
            superblock=superblock,
            segments=segments,
            keys=sum(int(rows.live.sum()) for rows in shards),
            keys_bytes=sum(int(rows.length[rows.live].sum(dtype=np.int64)) for rows in shards),
            damaged_batches=log.counters.damaged_batches,
            unreadable_segments=sorted(log.unread),
        )

    def verify(self, number: int) -> Steps[Verified]:
        """After `inspect`: read the blocks of a segment, and compare hashes."""
        _, listing = yield from self._listed(self._log.segments[number])
        listing = listing.only(listing.length > 0)
        groups = groups_of(listing, range(len(listing)))
        bad: dict[int, int] = {}
        while groups:
            some, groups = groups[:_GROUPS_AT_ONCE], groups[_GROUPS_AT_ONCE:]
            jobs = [read_blocks(0, number, listing, group) for group in some]
            for group, result in zip(some, (yield jobs), strict=True):
                if result.errno and len(group) > 1:
                    groups += [[row] for row in group]  # to learn which of them it is
                    continue
                for row, checksum in zip(group, result.checksums, strict=True):
                    if result.errno or checksum != int(listing.checksum[row]):
                        bad[row] = result.errno
        return Verified(len(listing), int(listing.length.sum(dtype=np.int64)), self._damaged(number, listing, bad))

    def _damaged(self, number: int, listing: Listing, bad: Mapping[int, int]) -> list[DamagedBlock]:
        if not bad:
            return []
        rows = np.array(sorted(bad))
        records, keys = self._log.records, listing.keys()
        slots = records.find(listing.low[rows])
        here = records.at(slots, np.full(len(rows), number), listing.page[rows])
        live = here & records.live(slots)
        return [
            DamagedBlock(
                keys[row],
                number,
                int(listing.page[row]) * ALIGNMENT_BYTES,
                int(listing.length[row]),
                bool(is_live),
                bad[row],
            )
            for row, is_live in zip(rows.tolist(), live.tolist(), strict=True)
        ]

    def _listed(self, segment: Segment) -> Steps[tuple[int, Listing]]:
        """Return how many batches a segment has, and their rows."""
        log = self._log
        if segment.state is SegmentState.FREE:
            return 0, joined([])
        if segment.batches:
            return len(segment.batches), joined([listing for _, listing in segment.batches])
        if segment.state is SegmentState.SEALED:
            footer = yield from read_footer(log, segment)
            if footer is not None:
                return len(footer[1]), footer[3]
        tables = yield from find_batches(log, segment.number, segment.incarnation)
        return len(tables), joined([listing for _, listing in tables])


def _contents(segment: Segment, batches: int, listing: Listing) -> SegmentContents:
    tombstones = int((listing.length == 0).sum())
    return SegmentContents(
        number=segment.number,
        state=segment.state.value,
        incarnation=segment.incarnation,
        batches=batches,
        blocks=len(listing) - tombstones,
        tombstones=tombstones,
        blocks_bytes=int(listing.length.sum(dtype=np.int64)),
    )
