"""What is in a segment without a footer: its tables, found page by page.

The search goes from table to table, and where the next one is damaged, on to the next
page that begins with a valid one. Of several lives of the segment only the newest
counts.

Batches up to the highest `synced` among the tables of a life are durable, so their
blocks are not looked at. Of the others each block is hashed, and a record whose block
is torn is left out. Tombstones have no block: they count as soon as their table is
whole.
"""

from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

from infinistore.disk.format import Listing, Table, decode_table, joined
from infinistore.disk.jobs import ALIGNMENT_BYTES, PAUSE, ReadInto, Steps, aligned
from infinistore.disk.log import Log

__all__ = ["Content", "find_batches", "read", "without_torn_blocks"]

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


def find_batches(log: Log, number: int, least: int = 0) -> Steps[Found]:
    """Return the valid tables of the newest life that a segment has, if that is not
    before the incarnation `least`."""
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
        table = decode_table(
            data,
            uuid=log.uuid,
            seed=log.seed,
            segment=number,
            offset=offset,
            segment_bytes=log.segment_bytes,
        )
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


def _whole(log: Log, number: int, listing: Listing) -> Steps[npt.NDArray[np.bool_]]:
    """Return which rows are tombstones, or have their block on the disk."""
    whole: npt.NDArray[np.bool_] = listing.length == 0
    rows = np.flatnonzero(~whole).tolist()
    lengths, pages = listing.length.tolist(), listing.page.tolist()
    checksums = listing.checksum.tolist()
    groups: list[list[int]] = []
    for row in rows:
        group = groups[-1] if groups else []
        span = (pages[row] - pages[group[0]]) * ALIGNMENT_BYTES if group else _CHUNK_BYTES
        adjacent = group and pages[row] * ALIGNMENT_BYTES == pages[group[-1]] * ALIGNMENT_BYTES + aligned(
            lengths[group[-1]]
        )
        if adjacent and span + lengths[row] <= _CHUNK_BYTES:
            group.append(row)
        else:
            groups.append([row])
    while groups:
        group = groups.pop(0)
        blocks = [lengths[row] for row in group]
        starts = np.cumsum([0, *map(aligned, blocks)]).tolist()
        data = memoryview(bytearray(starts[-1]))
        views = [data[start : start + length] for start, length in zip(starts, blocks, strict=False)]
        job = ReadInto(log.number, f"segments/{number}", pages[group[0]] * ALIGNMENT_BYTES, views, hash_lengths=blocks)
        [result] = yield [job]
        if result.errno and len(group) > 1:
            groups[:0] = [[row] for row in group]
        elif result.errno:
            log.unread.add(number)
        else:
            for row, checksum in zip(group, result.checksums, strict=True):
                whole[row] = checksum == checksums[row]
    return whole
