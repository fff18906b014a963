"""Tables in shared memory, by which a client on this host reads again what it has read before, without asking.

The *removal table* is the server's to write and everybody's to read: when did a block near this place last lose its
key? Removals are counted. A client that learned, when there had been n, where a block lies knows that it is still
there, and is still what its key means, while the table has no number above n for its place. Places share an entry, here
and there; so the answer may be "perhaps not", but never wrongly "yes".

The *hazard table* (as in hazard pointers) is the client's to write: the blocks that it reads just now. The server does
not use their room again meanwhile. Each connection has one of its own, and it means something as long as that is open.
Behind it lies the *touch log*, where the client notes what it used: the server reads that when recency matters to it.
And the *commit word*: the number of the last reservation whose blocks, named before, the client has made visible. The
server looks at it before it looks anything up.

The order makes it safe. A client writes its hazards, then a fence, then looks whether the blocks were removed
(`is_unchanged`) or the table was closed; only then does it read. A server notes a removal, then a fence, then looks at
the hazards, and only then gives the room away. So either the client sees the removal, or the server sees the hazard.

All numbers are unsigned, of 64 bits, in the machine's own order: nobody on another machine can read them.
"""

import platform
import threading
from array import array
from collections.abc import Sequence
from operator import gt
from typing import Any

from infinistore.errors import ProtocolError
from infinistore.protocol.fields import Numbers
from infinistore.protocol.places import arena_of, offset_of

__all__ = [
    "HAZARD_SLOTS",
    "LEAST_REMOVAL_TABLE_BYTES",
    "READER_BYTES",
    "CommitWord",
    "HazardTable",
    "Hazards",
    "RemovalTable",
    "TouchLog",
    "granule_bytes_for",
    "removal_table_bytes",
    "tables_are_safe_here",
]

HAZARD_SLOTS = 2046
"""How many blocks a client may read at a time without asking."""
_NUMBER_BYTES = 8
_HEADER_NUMBERS = 8  # of either table: a cache line
_COLUMNS = 4  # of the hazard table: place, length, checksum, number of the read
_HAZARD_BYTES = (_HEADER_NUMBERS + _COLUMNS * HAZARD_SLOTS) * _NUMBER_BYTES
_LOG_BYTES = 32 * 1024
_COMMIT_BYTES = HAZARD_SLOTS * _NUMBER_BYTES
READER_BYTES = _HAZARD_BYTES + _LOG_BYTES + _COMMIT_BYTES
"""How long hazard table, touch log and commit word of a connection are together."""
LEAST_REMOVAL_TABLE_BYTES = (_HEADER_NUMBERS + 1) * _NUMBER_BYTES
"""How long the shortest removal table is that can be used."""
_ARENA_STEP = 0x9E3779B97F4A7C15  # spreads arenas over the removal table
_LEAST_GRANULE_BYTES = 4096
_MOST_ENTRIES = 1 << 20
_fence_lock = threading.Lock()


def tables_are_safe_here() -> bool:
    """Whether this machine keeps stores in order, as x86-64 does, and a lock of Python's is a fence on it."""
    return platform.machine() in ("x86_64", "AMD64")


def _fence() -> None:
    """See to it that what was written before this is seen by others before what is read after it.

    Taking a lock is a locked instruction, which on x86-64 is a full fence.
    """
    with _fence_lock:
        pass


def granule_bytes_for(pool_bytes: int, unit_bytes: int = 1) -> int:
    """How many bytes of a pool share one entry of its removal table: a power of two. `unit_bytes` is what the shortest
    block takes of the pool."""
    granule_bytes = _LEAST_GRANULE_BYTES
    while granule_bytes * 2 <= unit_bytes or pool_bytes > granule_bytes * _MOST_ENTRIES:
        granule_bytes *= 2
    return granule_bytes


def removal_table_bytes(pool_bytes: int, unit_bytes: int = 1) -> int:
    """How long the removal table of a pool is; one that grows beyond this shares more of its entries."""
    entries = 1
    while entries * granule_bytes_for(pool_bytes, unit_bytes) < pool_bytes:
        entries *= 2
    return (_HEADER_NUMBERS + entries) * _NUMBER_BYTES


class RemovalTable:
    """When a block near each place last lost its key."""

    def __init__(self, memory: memoryview, granule_bytes: int) -> None:
        """`memory` is a whole file, as the server made it: at least as long as `removal_table_bytes` says, and at first
        all zeros. Both ends have to take the same, as it says how many entries there are."""
        self._numbers: Any = memory.cast("Q")
        self._shift = granule_bytes.bit_length() - 1
        self._mask = (1 << (len(self._numbers) - _HEADER_NUMBERS).bit_length() - 1) - 1

    @property
    def count(self) -> int:
        """How many removals there have been."""
        return self._numbers[0]  # type: ignore[no-any-return]

    def note(self, places: Sequence[int]) -> None:
        """Say that the blocks at these places are losing their keys. For the server."""
        numbers = self._numbers
        numbers[0] = count = numbers[0] + 1
        for entry in self._entries(places):
            numbers[entry] = count
        _fence()

    def is_unchanged(self, places: Sequence[int], counts: Sequence[int]) -> bool:
        """Whether each block, known to be at its place when `count` was so much, still has its key."""
        found = self._at(self.entries_of(places))
        return not found or max(found) <= min(counts) or not any(map(gt, found, counts))

    def are_unchanged(self, entries: "slice | list[int]", count: int) -> bool:
        """Whether all blocks, known to be at places that have these entries when `count` was so much, have their
        keys."""
        return max(self._at(entries), default=0) <= count

    def entries_of(self, places: Sequence[int]) -> "slice | list[int]":
        """Return the entries of these places: as a slice, which takes a fraction of the time, if they are in a row."""
        entries = self._entries(places)
        if len(entries) > 1 and entries == list(range(entries[0], entries[-1] + 1, max(1, entries[1] - entries[0]))):
            return slice(entries[0], entries[-1] + 1, entries[1] - entries[0])
        return entries

    def _at(self, entries: "slice | list[int]") -> list[int]:
        if isinstance(entries, slice):
            return self._numbers[entries].tolist()  # type: ignore[no-any-return]
        return list(map(self._numbers.__getitem__, entries))

    def _entries(self, places: Sequence[int]) -> list[int]:
        shift, mask = self._shift, self._mask
        if places and arena_of(max(places)):
            places = [place + arena_of(place) * _ARENA_STEP for place in places]
        return [(place >> shift & mask) + _HEADER_NUMBERS for place in places]


class HazardTable:
    """What the client of one connection reads just now. The client's end; not for two threads at a time.

    `memory` is of `READER_BYTES`.
    """

    def __init__(self, memory: memoryview) -> None:
        self._numbers: Any = memory[:_HAZARD_BYTES].cast("Q")
        self._ends: dict[int, int] = {}  # of each read, by its first slot
        self._end = 0  # of the last of them
        self._reads = 0

    @property
    def closed(self) -> bool:
        """Whether the server looks at it no more: then nothing is safe that was not there before."""
        return bool(self._numbers[0])

    def add(self, places: Numbers, sizes: Numbers, checksums: Numbers) -> int | None:
        """Add what one read is about to look at, at least one block.

        Returns what `remove` wants for it, or None if there is no room.
        """
        first, numbers = self._end, self._numbers
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
        _fence()
        return first

    def remove(self, first: int) -> None:
        """Say that nobody looks at what was added there any more."""
        count = self._ends.pop(first) - first
        start = _HEADER_NUMBERS + 3 * HAZARD_SLOTS + first
        self._numbers[start : start + count] = memoryview(array("Q", bytes(count * _NUMBER_BYTES)))
        self._numbers[1] = self._end = max(self._ends.values()) if self._ends else 0


class Hazards:
    """The hazard table of one client as the server sees it, who believes nothing of what is in it."""

    def __init__(self, memory: memoryview) -> None:
        self._numbers: Any = memory[:_HAZARD_BYTES].cast("Q")
        self._columns: list[bytes] = []  # as they were when the client was last seen reading
        self._seen: list[tuple[int, int, int, int, int]] = []

    def close(self) -> None:
        """Look at it no more after the next look."""
        self._numbers[0] = 1
        _fence()

    def look(self) -> list[tuple[int, int, int, int, int]]:
        """Return what the client reads just now: (arena, offset, length, checksum, number of the read) of each block.

        One that it is adding or removing at this moment may be left out. The list is the same as long as nothing
        changes, and must not be changed.
        """
        used = min(self._numbers[1], HAZARD_SLOTS)
        if not used:  # nearly always
            return []
        # The number of a read is written last, erased first, and never used again. So a row that has the same before
        # and after is one that was there as a whole; one that has not was changed since this look began.
        starts = [_HEADER_NUMBERS + column * HAZARD_SLOTS for column in (3, 0, 1, 2, 3)]
        columns = [self._numbers[start : start + used].tobytes() for start in starts]
        if columns != self._columns:  # who looks at memory in place does so for long, and is looked at often
            self._columns = columns
            rows = zip(*(memoryview(column).cast("Q").tolist() for column in columns), strict=True)
            self._seen = [
                (arena_of(place), offset_of(place), length, checksum, read)
                for read, place, length, checksum, read_after in rows
                if read and read == read_after
            ]
        return self._seen


class TouchLog:
    """Bytes that the client of one connection leaves for the server, which takes them when it likes.

    `memory` is of `READER_BYTES`. Each end has an object of its own, and calls either `append` or `take`.
    """

    def __init__(self, memory: memoryview) -> None:
        self._counts: Any = memory[: _HEADER_NUMBERS * _NUMBER_BYTES].cast("Q")  # number 2: appended, 3: taken
        self._bytes = memory[_HAZARD_BYTES : _HAZARD_BYTES + _LOG_BYTES]
        self._done = 0
        self._asked = False

    def append(self, data: bytes) -> bool:
        """Append data as a whole; False, and nothing, if there is no room for it now.

        False also once in a while: to say it in a message instead has the server take what is there before there is no
        room for more.
        """
        waiting = self._done - self._counts[3]
        if waiting <= _LOG_BYTES // 2:
            self._asked = False
        elif not self._asked:
            self._asked = True
            return False
        if waiting + len(data) > _LOG_BYTES:
            return False
        start = self._done % _LOG_BYTES
        fitting = min(len(data), _LOG_BYTES - start)
        self._bytes[start : start + fitting] = data[:fitting]
        self._bytes[: len(data) - fitting] = data[fitting:]
        self._done += len(data)
        self._counts[2] = self._done
        return True

    def take(self) -> bytes:
        """Return what was appended since the last call.

        Raises:
            ProtocolError: more than there is room for.
        """
        appended = self._counts[2]
        if appended == self._done:  # nearly always
            return b""
        if not 0 < appended - self._done <= _LOG_BYTES:
            raise ProtocolError("the client says that it logged more than there is room for")
        start, end = self._done % _LOG_BYTES, (appended - 1) % _LOG_BYTES + 1
        both = (self._bytes[start:end],) if start < end else (self._bytes[start:], self._bytes[:end])
        data = b"".join(both)
        self._done = self._counts[3] = appended
        return data


class CommitWord:
    """Which prepared reservation of one connection was committed last, and the checksums of its blocks.

    `memory` is of `READER_BYTES`. One end calls `commit`, the other `checksums_of`.
    """

    def __init__(self, memory: memoryview) -> None:
        self._word: Any = memory[: _HEADER_NUMBERS * _NUMBER_BYTES].cast("Q")  # number 4
        start = _HAZARD_BYTES + _LOG_BYTES
        self._checksums: Any = memory[start : start + _COMMIT_BYTES].cast("Q")

    def commit(self, reservation: int, checksums: Numbers) -> None:
        """Make the blocks of a prepared reservation visible, all at once."""
        self._checksums[: len(checksums)] = memoryview(checksums)
        self._word[4] = reservation
        _fence()

    def checksums_of(self, reservation: int, count: int) -> list[int] | None:
        """Return the first `count` checksums if this reservation has been committed, else None."""
        if self._word[4] != reservation:
            return None
        return self._checksums[:count].tolist()  # type: ignore[no-any-return]
