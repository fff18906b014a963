"""How the index of a volume comes back after a restart.

After a clean end the snapshot is all there is to know. Otherwise each segment is asked
which life it is in, by its last page and its first table. A segment that is as the
snapshot knew it needs nothing more; of a newer one the footer is read; and one without
a footer, usually the one that was open, is searched for tables: from table to table,
and where the next one is damaged, on to the next page that begins with a valid one. Of
several lives of the segment only the newest counts.

Of the batches found there, those that a later table of the same segment calls synced
are durable, and not looked at. Of the others any sector may be missing, so their blocks
are hashed, and what is torn is left out; a tombstone has no block, and counts as soon
as its table is whole. A table that is damaged costs its batch. What is found is applied
in the order of the log, so the newest record of each key wins, tombstones included.

Afterwards each segment without a footer is flushed, and gets a footer that leaves out
what was torn: from then on the next recovery finds what this one did. Nothing is
written before, so a crash meanwhile changes nothing.
"""

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from infinistore.disk.format import (
    ABANDONED,
    END_BYTES,
    OPEN,
    SEALED,
    End,
    Footer,
    Listing,
    SnapshotHeader,
    SnapshotSegment,
    Table,
    decode_end,
    decode_footer,
    decode_section,
    decode_snapshot_header,
    decode_table,
    joined,
    peek_table,
)
from infinistore.disk.jobs import ALIGNMENT_BYTES, PAUSE, ReadInto, Steps, aligned
from infinistore.disk.log import SESSION_SHIFT, Log, Segment, SegmentState, rows_of
from infinistore.disk.records import Loader

_CHUNK_BYTES = 4 << 20
_MAGIC = int.from_bytes(Table.MAGIC, "little")


@attrs.frozen
class Content:
    """Batches of one life of a segment, in the order of the log."""

    sequences: Sequence[int]
    counts: Sequence[int]
    """How many rows each has."""
    listing: Listing
    end_bytes: int
    """Where they end."""

    def batches(self) -> list[tuple[int, Listing]]:
        """Return the sequence and the rows of each."""
        ends = np.cumsum(self.counts).tolist()
        return [
            (sequence, self.listing.between(end - count, end))
            for sequence, count, end in zip(self.sequences, self.counts, ends, strict=True)
        ]


Found = list[tuple[Table, Listing]]


def read(log: Log, file: str, offset: int, length: int) -> Steps[memoryview | None]:
    """Read so many bytes, zeros behind the end of the file; None after an error."""
    data = memoryview(bytearray(length))
    [result] = yield [ReadInto(log.number, file, offset, [data])]
    return None if result.errno else data


def read_footer(log: Log, segment: Segment) -> Steps[tuple[Footer, list[int], list[int], Listing] | None]:
    """Read the footer of a sealed segment, as `decode_footer` returns it."""
    origin, offset = log.origin(segment.number), log.segment_bytes - END_BYTES
    page = yield from read(log, segment.file, offset, END_BYTES)
    end = None if page is None else decode_end(page, origin)
    if end is None or not end.sealed:
        return None
    length = aligned(end.footer_bytes)
    data = yield from read(log, segment.file, offset - length, length)
    return None if data is None else decode_footer(data[: end.footer_bytes], origin, segment.incarnation)


def find_batches(log: Log, number: int, least: int = 0) -> Steps[Found]:
    """Return the valid tables of a segment's newest life, if not before `least`."""
    file, incarnation = f"segments/{number}", least
    found: Found = []
    position = offset = 0
    while offset < log.segment_bytes:
        chunk = yield from read(log, file, offset, min(_CHUNK_BYTES, log.segment_bytes - offset))
        if chunk is None:
            log.unread.add(number)
            chunk = memoryview(b"")
        words = np.frombuffer(chunk, "<u8")[:: ALIGNMENT_BYTES // 8]
        for page in np.flatnonzero(words == _MAGIC).tolist():
            here = offset + page * ALIGNMENT_BYTES
            table = None
            if here >= position:
                table = yield from _table_at(log, number, here, chunk[page * ALIGNMENT_BYTES :])
            if table is None or table[0].incarnation < incarnation:
                continue
            if table[0].incarnation > incarnation:
                incarnation, found = table[0].incarnation, []
            found.append(table)
            position = here + table[0].batch_bytes
        offset = max(offset + _CHUNK_BYTES, position)
        yield PAUSE
    return found


def _table_at(log: Log, number: int, offset: int, data: memoryview) -> Steps[tuple[Table, Listing] | None]:
    """Read the table at an offset, of which `data` may be only the beginning."""
    for _ in range(2):
        table = decode_table(data, log.origin(number), offset)
        if not isinstance(table, int):
            return table
        more = yield from read(log, f"segments/{number}", offset, aligned(table))
        if more is None:
            log.unread.add(number)
            return None
        data = more
    return None


def without_torn_blocks(log: Log, number: int, found: Found) -> Steps[Content]:
    """Return what counts of these batches."""
    synced = max((table.synced for table, _ in found), default=0)
    listings: list[Listing] = []
    end = 0
    for table, listing in found:
        kept = listing
        if table.sequence > synced:
            whole = yield from _whole(log, number, listing)
            kept = listing.only(whole)
            log.counters.damaged_batches += not whole.all()
        listings.append(kept)
        end = table.offset + table.batch_bytes
    return Content([table.sequence for table, _ in found], list(map(len, listings)), joined(listings), end)


def groups_of(listing: Listing, rows: Sequence[int]) -> list[list[int]]:
    """Return rows whose blocks lie next to each other, and have up to 4 MiB together:
    decompressed, because a page may have very much."""
    pages, ends = listing.page.tolist(), (listing.page + listing.pages).tolist()
    lengths = listing.length.tolist()
    groups: list[list[int]] = []
    gathered_bytes = 0
    for row in rows:
        is_next = bool(groups) and pages[row] == ends[groups[-1][-1]]
        if not is_next or gathered_bytes + lengths[row] > _CHUNK_BYTES:
            groups.append([])
            gathered_bytes = 0
        groups[-1].append(row)
        gathered_bytes += aligned(lengths[row])
    return groups


def read_blocks(volume: int, segment: int, listing: Listing, rows: Sequence[int]) -> ReadInto:
    """Return a job that reads and hashes the blocks of rows, which lie next to each
    other, into new memory."""
    lengths = listing.length[rows].tolist()
    ends = (np.cumsum(listing.pages[rows]) * ALIGNMENT_BYTES).tolist()
    memory = memoryview(bytearray(ends[-1]))
    views = [memory[start:end][:length] for start, end, length in zip([0, *ends], ends, lengths, strict=False)]
    saved = listing.saved[rows].tolist()
    blocks = [memoryview(bytearray(length)) if one else None for length, one in zip(lengths, saved, strict=True)]
    offset = int(listing.page[rows[0]]) * ALIGNMENT_BYTES
    return ReadInto(volume, f"segments/{segment}", offset, views, lengths, blocks)


def _whole(log: Log, number: int, listing: Listing) -> Steps[npt.NDArray[np.bool_]]:
    """Return which rows are tombstones, or have their block on the disk."""
    whole: npt.NDArray[np.bool_] = listing.length == 0
    checksums = listing.checksum.tolist()
    groups = groups_of(listing, np.flatnonzero(~whole).tolist())
    while groups:
        group = groups.pop(0)
        [result] = yield [read_blocks(log.number, number, listing, group)]
        if result.errno and len(group) > 1:
            groups[:0] = [[row] for row in group]
        elif result.errno:
            log.unread.add(number)
        else:
            for row, checksum in zip(group, result.checksums, strict=True):
                whole[row] = checksum == checksums[row]
    return whole


_PROBED_AT_ONCE = 32
_READ_AT_ONCE = 8
_STATES = {OPEN: SegmentState.OPEN, SEALED: SegmentState.SEALED, ABANDONED: SegmentState.ABANDONED}


@attrs.frozen
class _Snapshot:
    header: SnapshotHeader
    checksum: int
    sections: list[int]
    segments: dict[int, SnapshotSegment]
    footer: memoryview


@attrs.define
class _Life:
    """The life that a segment is in."""

    number: int
    incarnation: int
    end: End | None = None
    """Its last page, if it is sealed."""
    found: Found | None = None
    """Its tables, if they were searched for."""
    content: Content | None = None
    """What is applied of it."""
    torn: bool = False
    """It was sealed, and its footer is damaged."""


def recover(log: Log, files: Mapping[str, int]) -> Steps[None]:
    """Fill a log from its disk. `files` are the lengths of the files, by name.

    Afterwards one segment may be open, and those that need a footer are FULL.
    """
    yield from _Recovery(log, files).run()


class _Recovery:
    def __init__(self, log: Log, files: Mapping[str, int]) -> None:
        self._log = log
        self._files = files
        self._numbers = sorted(int(name.removeprefix("segments/")) for name in files if name.startswith("segments/"))
        self._newest = log.superblock.session << SESSION_SHIFT  # the highest sequence seen

    def run(self) -> Steps[None]:
        log = self._log
        for number in self._numbers:
            log.segments.add(Segment(number, SegmentState.FREE))
        snapshot = yield from self._snapshot()
        clean = snapshot is not None and log.superblock.clean and log.superblock.snapshot == snapshot.checksum
        restored = clean and snapshot is not None and (yield from self._restored(snapshot))
        if not restored:
            lives = yield from self._lives()
            trusted = yield from self._trusted(lives, snapshot)
            yield from self._replay(lives, trusted, snapshot.header.sequence if snapshot is not None else 0)
        log.begin_session((self._newest >> SESSION_SHIFT) + 1, log.floor)

    def _see(self, sequence: int, floor: int) -> None:
        self._newest = max(self._newest, sequence)
        self._log.floor = max(self._log.floor, floor)

    # Snapshots

    def _snapshot(self) -> Steps[_Snapshot | None]:
        """Read the header of the snapshot, if there is a whole one of this disk."""
        log = self._log
        length = ALIGNMENT_BYTES
        while length <= aligned(self._files.get("snapshot", 0)):
            data = yield from read(log, "snapshot", 0, length)
            found = None if data is None else decode_snapshot_header(data, uuid=log.uuid, seed=log.seed)
            if data is None or found is None:
                return None
            if not isinstance(found, int):
                header, sections, segments, footer = found
                checksum = int.from_bytes(data[8:16], "little")
                return _Snapshot(header, checksum, sections, {one.number: one for one in segments}, footer)
            length = aligned(found)
        return None

    def _restored(self, snapshot: _Snapshot) -> Steps[bool]:
        """Take everything from the snapshot of a clean end; False: it is damaged."""
        log = self._log
        if not snapshot.segments.keys() <= set(self._numbers):
            return False
        if not (yield from self._sections(snapshot, set(snapshot.segments))):
            return False
        for known in snapshot.segments.values():
            segment = log.segments[known.number]
            segment.state, segment.incarnation = _STATES[known.state], known.incarnation
            segment.oldest_content, segment.sequence = known.incarnation, known.sequence
            if segment.state is SegmentState.OPEN:
                found = decode_footer(snapshot.footer, log.origin(known.number), known.incarnation)
                if found is None:
                    segment.state = SegmentState.ABANDONED
                else:
                    segment.take(Content(*found[1:], known.end_bytes).batches())
                    log.segments.open = segment
            segment.end_bytes = known.end_bytes
            self._see(known.sequence, 0)
        self._see(snapshot.header.sequence, snapshot.header.floor)
        return True

    def _sections(self, snapshot: _Snapshot, trusted: set[int]) -> Steps[bool]:
        """Load a snapshot's records of some segments; False: it is damaged."""
        log, header = self._log, snapshot.header
        wanted = np.zeros(max(snapshot.segments, default=0) + 1, np.bool_)
        wanted[list(trusted)] = True
        offset = aligned(header.header_bytes)
        for shard, length in enumerate(snapshot.sections):
            data = yield from read(log, "snapshot", offset, length)
            offset += length
            rows = None
            if data is not None:
                rows = decode_section(data, shard=shard, uuid=log.uuid, sequence=header.sequence, seed=log.seed)
            if rows is None:
                log.records.clear()
                return False
            kept = wanted[rows.segment]
            log.records.load(shard, rows.only(kept))
            yield PAUSE
        return True

    # Segments

    def _lives(self) -> Steps[list[_Life]]:
        """Ask every segment which life it is in; return those that count, in order."""
        log = self._log
        lives: list[_Life] = []
        for start in range(0, len(self._numbers), _PROBED_AT_ONCE):
            numbers = self._numbers[start : start + _PROBED_AT_ONCE]
            pages = [memoryview(bytearray(ALIGNMENT_BYTES)) for _ in range(2 * len(numbers))]
            places = [(number, offset) for number in numbers for offset in (0, log.segment_bytes - END_BYTES)]
            results = yield [
                ReadInto(log.number, f"segments/{number}", offset, [page])
                for (number, offset), page in zip(places, pages, strict=True)
            ]
            for index, number in enumerate(numbers):
                if results[2 * index].errno or results[2 * index + 1].errno:
                    log.unread.add(number)
                    log.segments[number].oldest_content = 1  # anything may be there
                life = yield from self._life(number, pages[2 * index], pages[2 * index + 1])
                if life is not None:
                    lives.append(life)
        for life in lives:  # before anything is applied, because their floors count
            if life.end is None:
                if life.found is None:
                    life.found = yield from find_batches(log, life.number, life.incarnation)
                for table, _ in life.found:
                    self._see(table.sequence, table.floor)
        return sorted(lives, key=lambda one: one.incarnation)

    def _life(self, number: int, first: memoryview, last: memoryview) -> Steps[_Life | None]:
        """Tell the life of a segment by its first and last page, or by all of it."""
        log = self._log
        end = decode_end(last, log.origin(number))
        if end is None and number not in log.unread and not any(first) and not any(last):
            return None  # it was allocated, and never written
        by_end = None
        if end is not None:
            self._see(max(end.sequence, end.incarnation), end.floor)
            by_end = _Life(number, end.incarnation, end if end.sealed else None)
            if peek_table(first, uuid=log.uuid, segment=number) <= end.incarnation:
                return by_end
        found = yield from find_batches(log, number)
        incarnation = found[0][0].incarnation if found else 0
        if by_end is not None and by_end.incarnation >= incarnation:
            return by_end
        return _Life(number, incarnation, found=found) if found else None

    def _trusted(self, lives: Sequence[_Life], snapshot: _Snapshot | None) -> Steps[dict[int, int]]:
        """Load the snapshot; return the segments that it fits, and their states."""
        log = self._log
        if snapshot is None:
            return {}
        self._see(snapshot.header.sequence, snapshot.header.floor)
        # A floor in the middle of a segment is that of a purge: all that a later
        # snapshot has is newer.
        later = snapshot.header.floor >= log.floor
        trusted = {
            life.number: snapshot.segments[life.number].state
            for life in lives
            if life.number in snapshot.segments
            and snapshot.segments[life.number].incarnation == life.incarnation
            and (later or life.incarnation >= log.floor)
        }
        loaded = yield from self._sections(snapshot, set(trusted))
        return trusted if loaded else {}

    def _replay(self, lives: Sequence[_Life], trusted: Mapping[int, int], applied: int) -> Steps[None]:
        """Apply what segments have and the index does not, in the order of the log."""
        log = self._log
        loader = Loader(log.records)
        for start in range(0, len(lives), _READ_AT_ONCE):
            some = lives[start : start + _READ_AT_ONCE]
            yield from self._read_footers(
                [one for one in some if one.end is not None and trusted.get(one.number) != SEALED]
            )
            for life in some:
                segment = log.segments[life.number]
                segment.oldest_content = segment.oldest_content or life.incarnation
                if life.end is None:
                    life.content = yield from without_torn_blocks(log, life.number, life.found or [])
                content = life.content
                if life.end is not None:
                    last = life.end.sequence
                else:
                    last = content.sequences[-1] if content is not None and content.sequences else 0
                if last < max(log.floor, 1):
                    continue
                segment.incarnation, segment.sequence = life.incarnation, last
                if life.end is not None and not life.torn:
                    segment.state, segment.end_bytes = SegmentState.SEALED, log.segment_bytes
                elif content is not None:
                    segment.state = SegmentState.FULL
                    segment.take(content.batches())
                    segment.end_bytes = content.end_bytes
                if content is not None:
                    after = max(log.floor, applied + 1 if life.number in trusted else 0)
                    self._add(loader, life.number, content, after)
                    yield PAUSE
                if loader.full:
                    yield from self._merge(loader)
                life.found = life.content = None
        yield from self._merge(loader)

    def _read_footers(self, lives: Sequence[_Life]) -> Steps[None]:
        """Read the footers of sealed segments; where that fails, search for tables."""
        log = self._log
        views = [memoryview(bytearray(aligned(life.end.footer_bytes))) for life in lives if life.end is not None]
        results = yield [
            ReadInto(log.number, f"segments/{life.number}", log.segment_bytes - END_BYTES - len(view), [view])
            for life, view in zip(lives, views, strict=True)
        ]
        for life, view, result in zip(lives, views, results, strict=True):
            assert life.end is not None
            found = decode_footer(view[: life.end.footer_bytes], log.origin(life.number), life.incarnation)
            if found is not None and not result.errno:
                life.content = Content(*found[1:], log.segment_bytes)
            else:
                log.counters.damaged_batches += 1
                life.torn = True
                tables = yield from find_batches(log, life.number, life.incarnation)
                life.content = yield from without_torn_blocks(log, life.number, tables)
            yield PAUSE

    def _add(self, loader: Loader, number: int, content: Content, after: int) -> None:
        rows = rows_of(content.listing, number)
        wanted = np.repeat(np.array(content.sequences, np.uint64) >= after, content.counts)
        if wanted.any():
            loader.add(rows.only(wanted))

    def _merge(self, loader: Loader) -> Steps[None]:
        for _ in loader.merge():
            yield PAUSE
