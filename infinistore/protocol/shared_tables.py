"""Tables in shared memory, by which a client reads known blocks without a request.

The server writes the *removal table*, and every client reads it. It says when a block
near an offset last lost its key. Removals are counted. A client that learned the offset
of a block at the count n knows that the block is still there, with the same key, as
long as the entry of the offset is not above n. Several offsets share an entry, so the
answer may be "perhaps not" without need, but is never a wrong "yes".

The client writes the *hazard table* (as in hazard pointers): the blocks that it is
reading. The server does not reuse their space in the meantime. Each connection has its
own table, which is valid while the connection is open. After it come the *touch log*,
in which the client records what it used, for the server to read when recency matters,
and the *commit word*: the number of the last reservation whose blocks, named before,
the client has made visible. The server looks at it before it looks up a key.

The order of operations makes this safe. A client writes its hazards, executes a fence,
and checks that the blocks were not removed (`is_unchanged`) and that the table is not
closed; only then does it read. A server records a removal, executes a fence, looks at
the hazards, and only then reuses the space. So either the client sees the removal, or
the server sees the hazard.

A hazard table has an *epoch*, which tells the server that nothing has changed since its
last look. A client increments it after it has written its hazards and before the fence,
and again after it has erased them. The server reads the epoch before the hazards.

All numbers are unsigned, of 64 bits, in the byte order of the machine.
"""

import os
import platform
import threading
from array import array
from collections.abc import Sequence
from itertools import repeat
from operator import gt
from typing import Any

from infinistore.errors import ProtocolError
from infinistore.protocol.messages import Numbers
from infinistore.protocol.packed_offsets import arena_of, offset_of, pack_offset

HAZARD_SLOTS = 2046
"""The maximum number of blocks that a client may read at a time without a request."""
_NUMBER_BYTES = 8
_HEADER_NUMBERS = 8  # of either table: a cache line
_COLUMNS = 4  # of the hazard table: place, length, checksum, number of the read
HAZARD_BYTES = (_HEADER_NUMBERS + _COLUMNS * HAZARD_SLOTS) * _NUMBER_BYTES
LOG_BYTES = 32 * 1024
_COMMIT_BYTES = HAZARD_SLOTS * _NUMBER_BYTES
READER_BYTES = HAZARD_BYTES + LOG_BYTES + _COMMIT_BYTES
"""The length of hazard table, touch log and commit word together, in bytes."""
LEAST_REMOVAL_TABLE_BYTES = (_HEADER_NUMBERS + 1) * _NUMBER_BYTES
"""The length of the shortest usable removal table, in bytes."""
_ARENA_STEP = 0x9E3779B97F4A7C15  # spreads arenas over the removal table
_LEAST_GRANULE_BYTES = 4096
_MOST = 2**64 - 1
_MOST_ENTRIES = 1 << 20
_fence_lock = threading.Lock()


def tables_are_safe_here() -> bool:
    """Return whether this machine keeps stores in order, as x86-64 does.

    On such a machine a lock of Python is a full fence.
    """
    return platform.machine() in ("x86_64", "AMD64")


def fence() -> None:
    """Make earlier writes visible to others before later reads.

    Taking a lock is a locked instruction, which is a full fence on x86-64.
    """
    with _fence_lock:
        pass


def _after_fork_in_child() -> None:
    # It may have been held by a thread that the child does not have.
    global _fence_lock  # noqa: PLW0603
    _fence_lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)


def granule_bytes_for(pool_bytes: int, unit_bytes: int = 1) -> int:
    """Return how many bytes of a pool share one removal entry: a power of two.

    `unit_bytes` is the space that the shortest block takes in the pool.
    """
    granule_bytes = _LEAST_GRANULE_BYTES
    while granule_bytes * 2 <= unit_bytes or pool_bytes > granule_bytes * _MOST_ENTRIES:
        granule_bytes *= 2
    return granule_bytes


def removal_table_bytes(pool_bytes: int, unit_bytes: int = 1) -> int:
    """Return the length of the removal table of a pool, in bytes.

    If the pool grows beyond `pool_bytes`, more offsets share an entry.
    """
    entries = 1
    while entries * granule_bytes_for(pool_bytes, unit_bytes) < pool_bytes:
        entries *= 2
    return (_HEADER_NUMBERS + entries) * _NUMBER_BYTES


class RemovalTable:
    """When a block near each offset last lost its key."""

    def __init__(self, memory: memoryview, granule_bytes: int) -> None:
        """Use the whole file that the server created, initially all zeros.

        Both ends must pass the same length, of at least `removal_table_bytes`: it
        determines the number of entries.
        """
        self.numbers: Any = memory.cast("Q")
        self._shift = granule_bytes.bit_length() - 1
        self._mask = (1 << (len(self.numbers) - _HEADER_NUMBERS).bit_length() - 1) - 1

    @property
    def count(self) -> int:
        """The number of removals so far."""
        return self.numbers[0]  # type: ignore[no-any-return]

    def note(self, places: Sequence[int]) -> None:
        """Record that the blocks at these packed offsets lose their keys.

        For the server.
        """
        numbers = self.numbers
        numbers[0] = count = numbers[0] + 1
        for entry in self._entries(places):
            numbers[entry] = count
        fence()

    def is_unchanged(self, places: Sequence[int], counts: Sequence[int]) -> bool:
        """Return whether each block, known as of its count, still has its key."""
        found = self._at(self.entries_of(places))
        return not found or max(found) <= min(counts) or not any(map(gt, found, counts))

    def are_unchanged(self, entries: "slice | list[int]", count: int) -> bool:
        """Return whether all blocks of these entries have had keys since `count`."""
        return max(self._at(entries), default=0) <= count

    def entries_of(self, places: Sequence[int]) -> "slice | list[int]":
        """Return the entries of these offsets: a slice, if evenly spaced, is faster."""
        entries = self._entries(places)
        if len(entries) > 1 and entries == list(range(entries[0], entries[-1] + 1, max(1, entries[1] - entries[0]))):
            return slice(entries[0], entries[-1] + 1, entries[1] - entries[0])
        return entries

    def _at(self, entries: "slice | list[int]") -> list[int]:
        if isinstance(entries, slice):
            return self.numbers[entries].tolist()  # type: ignore[no-any-return]
        return list(map(self.numbers.__getitem__, entries))

    def _entries(self, places: Sequence[int]) -> list[int]:
        shift, mask = self._shift, self._mask
        if places and arena_of(max(places)):
            places = [place + arena_of(place) * _ARENA_STEP for place in places]
        return [(place >> shift & mask) + _HEADER_NUMBERS for place in places]


class HazardTable:
    """The blocks that the client of one connection is reading. The client's end.

    `memory` has `READER_BYTES`. Not for two threads at a time.
    """

    def __init__(self, memory: memoryview) -> None:
        self.numbers: Any = memory[:HAZARD_BYTES].cast("Q")
        self._ends: dict[int, int] = {}  # of each read, by its first slot
        self._end = 0  # of the last of them
        self._reads = 0
        self._epoch = 0

    @property
    def closed(self) -> bool:
        """Whether the server ignores it, so that new hazards protect nothing."""
        return bool(self.numbers[0])

    def add(self, places: Numbers, sizes: Numbers, checksums: Numbers) -> int | None:
        """Add the blocks of one read, at least one block.

        Returns:
            what `remove` needs for it, or None if there is no space.
        """
        first, numbers = self._end, self.numbers
        end = first + len(places)
        if end > HAZARD_SLOTS:
            return None
        self._ends[first] = self._end = end
        self._reads += 1
        start, stop = _HEADER_NUMBERS + first, _HEADER_NUMBERS + end
        numbers[start:stop] = memoryview(places)
        numbers[start + HAZARD_SLOTS : stop + HAZARD_SLOTS] = memoryview(sizes)
        numbers[start + 2 * HAZARD_SLOTS : stop + 2 * HAZARD_SLOTS] = memoryview(checksums)
        numbers[start + 3 * HAZARD_SLOTS : stop + 3 * HAZARD_SLOTS] = memoryview(
            array("Q", [self._reads]) * len(places)
        )
        numbers[1] = end
        self._count_epoch()
        fence()
        return first

    def remove(self, first: int) -> None:
        """Remove the blocks of one read."""
        count = self._ends.pop(first) - first
        start = _HEADER_NUMBERS + 3 * HAZARD_SLOTS + first
        self.numbers[start : start + count] = memoryview(array("Q", bytes(count * _NUMBER_BYTES)))
        self.numbers[1] = self._end = max(self._ends.values()) if self._ends else 0
        self._count_epoch()

    def _count_epoch(self) -> None:
        """Increment the epoch, so that the server looks again. Before the fence."""
        self._epoch += 1
        self.numbers[5] = self._epoch


class Hazards:
    """The hazard table of one client, as the server sees it.

    The server trusts nothing in it.
    """

    def __init__(self, memory: memoryview) -> None:
        self.numbers: Any = memory[:HAZARD_BYTES].cast("Q")
        self._epoch = 0  # before the last look; 0 if the client does not count
        self._columns: list[bytes] = []  # as they were then
        self._seen: list[tuple[int, int, int, int, int]] = []

    def close(self) -> None:
        """Close the table: the server looks at it once more, and then never again."""
        self.numbers[0] = 1
        fence()

    def look(self) -> list[tuple[int, int, int, int, int]]:
        """Return (arena, offset, length, checksum, read) for each block being read.

        A block that is being added or removed at this moment may be missing. The list
        is the same object while nothing changes, and must not be modified.
        """
        epoch, used = self.numbers[5], min(self.numbers[1], HAZARD_SLOTS)
        if epoch == self._epoch and (epoch or not (used or self._seen)):  # usual
            return self._seen
        self._epoch = epoch  # as before the look: later changes count up again
        # The number of a read is written last, erased first, and never reused. A row
        # with the same number before and after was complete; any other changed
        # meanwhile.
        starts = [_HEADER_NUMBERS + column * HAZARD_SLOTS for column in (3, 0, 1, 2, 3)]
        columns = [self.numbers[start : start + used].tobytes() for start in starts]
        if columns != self._columns:
            self._columns = columns
            self._seen = _rows(*(memoryview(column).cast("Q").tolist() for column in columns))
        return self._seen

    @property
    def news(self) -> int:
        """The number of slots that a look would examine; 0 if nothing has changed."""
        epoch = self.numbers[5]
        if epoch == self._epoch and (epoch or not (self.numbers[1] or self._seen)):  # usual
            return 0
        return 1 + min(self.numbers[1], HAZARD_SLOTS)  # type: ignore[no-any-return]


def _rows(
    reads: list[int], places: list[int], lengths: list[int], checksums: list[int], reads_after: list[int]
) -> list[tuple[int, int, int, int, int]]:
    """Combine columns to rows, without those that are empty or changed meanwhile."""
    if max(places, default=0) < pack_offset(1, 0):  # usual, and faster
        rows = list(zip(repeat(0), places, lengths, checksums, reads))  # the first has no end
    else:
        rows = list(zip(map(arena_of, places), map(offset_of, places), lengths, checksums, reads, strict=True))
    if reads != reads_after or not all(reads):
        rows = [row for row, after in zip(rows, reads_after, strict=True) if row[4] and row[4] == after]
    return rows


class TouchLog:
    """Bytes that the client of one connection leaves for the server to take.

    `memory` has `READER_BYTES`. Each end has its own object, and calls either `append`
    or `take`.
    """

    def __init__(self, memory: memoryview) -> None:
        self._counts: Any = memory[: _HEADER_NUMBERS * _NUMBER_BYTES].cast("Q")  # number 2: appended, 3: taken
        self._bytes = memory[HAZARD_BYTES : HAZARD_BYTES + LOG_BYTES]
        self._done = 0
        self._asked = False

    def append(self, data: bytes) -> bool:
        """Append data as a whole, or return False if there is no space for it.

        It also returns False once when half of the log is full: the caller then sends a
        message instead, which makes the server take what is there before the log
        overflows.
        """
        waiting = self._done - self._counts[3]
        if waiting <= LOG_BYTES // 2:
            self._asked = False
        elif not self._asked:
            self._asked = True
            return False
        if waiting + len(data) > LOG_BYTES:
            return False
        start = self._done % LOG_BYTES
        fitting = min(len(data), LOG_BYTES - start)
        self._bytes[start : start + fitting] = data[:fitting]
        self._bytes[: len(data) - fitting] = data[fitting:]
        self._done += len(data)
        self._counts[2] = self._done
        return True

    @property
    def waiting_bytes(self) -> int:
        """The number of bytes since the last `take`, at most the log's size."""
        if self._counts[2] == self._done:  # usual
            return 0
        return min(self._counts[2] - self._done & _MOST, LOG_BYTES)  # type: ignore[no-any-return]

    def take(self) -> bytes:
        """Return what was appended since the last call.

        Raises:
            ProtocolError: the client says that it appended more than fits.
        """
        appended = self._counts[2]
        if appended == self._done:  # usual
            return b""
        if not 0 < appended - self._done <= LOG_BYTES:
            raise ProtocolError("the client says that it logged more than there is room for")
        start, end = self._done % LOG_BYTES, (appended - 1) % LOG_BYTES + 1
        both = (self._bytes[start:end],) if start < end else (self._bytes[start:], self._bytes[:end])
        data = b"".join(both)
        self._done = self._counts[3] = appended
        return data


class CommitWord:
    """The prepared reservation that a connection committed last, and its checksums.

    `memory` has `READER_BYTES`. One end calls `commit`, the other `checksums_of`.
    """

    def __init__(self, memory: memoryview) -> None:
        self.word: Any = memory[: _HEADER_NUMBERS * _NUMBER_BYTES].cast("Q")  # number 4
        start = HAZARD_BYTES + LOG_BYTES
        self.checksums: Any = memory[start : start + _COMMIT_BYTES].cast("Q")

    def commit(self, reservation: int, checksums: Numbers) -> None:
        """Make the blocks of a prepared reservation visible, all at once."""
        self.checksums[: len(checksums)] = memoryview(checksums)
        self.word[4] = reservation
        fence()

    def checksums_of(self, reservation: int, count: int) -> list[int] | None:
        """Return `count` checksums if this reservation was committed, else None."""
        if self.word[4] != reservation:
            return None
        return self.checksums[:count].tolist()  # type: ignore[no-any-return]
