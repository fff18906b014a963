"""Pins: what nobody may move, free or re-use, and when the space of a block that has
lost its key is free.

A pin says: somebody reads here. Several readers may pin one block, so pins are counted.

A *hold* is a pin that outlives its connection, and expires. A scheduler matches a
prefix in one process, and another process reads it a moment later. In between, a hold
keeps the matched blocks from being evicted. It ends when it is released, by anyone who
knows its id, or when its time is over.

A *hazard* is a pin that a client sets in shared memory, without a request. The store
scans hazards when it matters: before it uses space again, when somebody asks for more
than their share, and for the statistics. What it finds becomes pins of its own. Clients
are not trusted. A hazard counts if its block was committed and still has its space: the
block has a key, or is pinned, or is losing its key just now. So a block that is pinned
once stays pinned until the client takes the hazard away, whatever else the client
writes. All pins together never exceed the pool. Hazards for blocks that never existed,
or are long gone, are ignored.

A *retired* block has lost its key, and its space is not free yet: hazards have to be
scanned between the moment when a removal is announced (`on_removal` of the store) and
the moment when the space is used again. The number of hazards is bounded, but not how
often clients change them. So a removal does not scan on its own: retired blocks *wait*
until there are enough of them to pay for the scan, or until their space is needed.
Usually there is little to scan, and they wait for nothing. So the cost of a removal
does not depend on what clients write. After the scan, a block that is pinned is
*condemned*: it keeps its space until its last pin ends, and then waits again.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat

from infinistore.core.clients import Client, Hazard, entry_at
from infinistore.core.index import Entry, extent_of, length_of
from infinistore.core.limits import CoreLimits
from infinistore.core.pool import Pool
from infinistore.errors import LimitExceeded


class PinTable:
    """The number of pins of each entry.

    `footprint(size_bytes)` returns what a block of that size takes of the pool.
    """

    __slots__ = ("_footprint", "bytes", "counts")

    def __init__(self, footprint: Callable[[int], int]) -> None:
        self._footprint = footprint
        self.counts: dict[Entry, int] = {}
        """Entry to number of pins, at least 1. Read it; change it only through `add`
        and `remove`."""
        self.bytes = 0
        """The footprints of all pinned blocks, each counted once."""

    def footprint(self, entries: Iterable[Entry]) -> int:
        """Return what entries take of the pool, in bytes; duplicates count twice."""
        lengths = list(map(length_of, entries))
        if lengths and lengths.count(lengths[0]) == len(lengths):  # the usual case
            return self._footprint(lengths[0]) * len(lengths)
        return sum(map(self._footprint, lengths))

    def add(self, entries: Sequence[Entry], footprint_bytes: int) -> None:
        """Pin each entry once more; duplicates get two pins.

        `footprint_bytes` is `footprint(entries)`.
        """
        counts = self.counts
        # Usually no block is pinned yet; then this runs at C speed.
        first = dict.fromkeys(entries, 1)
        if len(first) == len(entries) and (not counts or counts.keys().isdisjoint(first)):
            counts.update(first)
            self.bytes += footprint_bytes
        else:
            self.bytes += self.footprint(self._add_singly(entries))

    def _add_singly(self, entries: Sequence[Entry]) -> dict[Entry, int]:
        """Pin entries one by one; return those that had no pin."""
        counts = self.counts
        first: dict[Entry, int] = {}
        for entry in entries:
            if entry in counts:
                counts[entry] += 1
            else:
                counts[entry] = first[entry] = 1
        return first

    def remove(self, entries: Sequence[Entry], footprint_bytes: int) -> Sequence[Entry]:
        """Take one pin from each entry, and return those that have none left.

        `footprint_bytes` is `footprint(entries)`, as for `add`.
        """
        counts = self.counts
        # Usually each block is pinned once. Taking all pins out at C speed finds
        # that out and is done.
        taken = list(map(counts.pop, entries, repeat(0)))
        if taken.count(1) == len(taken):
            self.bytes -= footprint_bytes
            return entries
        counts.update((entry, count) for entry, count in zip(entries, taken, strict=True) if count)
        ended = self._remove_singly(entries)
        self.bytes -= self.footprint(ended)
        return ended

    def _remove_singly(self, entries: Sequence[Entry]) -> list[Entry]:
        counts = self.counts
        ended: list[Entry] = []
        for entry in entries:
            count = counts[entry] - 1
            if count:
                counts[entry] = count
            else:
                del counts[entry]
                ended.append(entry)
        return ended

    def added_bytes(self, entries: Sequence[Entry]) -> int:
        """Return by how much `bytes` would grow if these entries were pinned too."""
        return self.footprint(set(entries).difference(self.counts))


HAZARDS_PER_BLOCK = 16
"""How many hazards may be read for each block that has lost its key: about 20 us."""
MOST_WAITING_RATIO = 1 / 32
"""The part of the pool that may wait although it could be freed."""
_MOST_UNREAD = 16 * 1024
_MOST_UNREAD_EACH = 512


class Retired:
    """The blocks of one pool that have no key any more, and how they are freed."""

    def __init__(self, pool: Pool, pins: PinTable) -> None:
        self.stored: set[Entry] | None = None
        """Blocks that were committed and still have their space; None where no client
        sets hazards."""
        self.condemned: set[Entry] = set()
        """Blocks that are pinned but have no key any more."""
        self.scan_hazards: Callable[[int | None], object] = _nothing
        """Updates the pins that hazards stand for; with a number, of those clients only
        that have at most so many hazards to read."""
        self.unread_hazards: Callable[[int], int] = _none
        """Returns about how many hazards that would read, or more than the number
        given; 0 if it would change nothing."""
        self._pool = pool
        self._pins = pins
        self._waiting: list[Entry] = []
        self._counted = self._counted_bytes = 0  # of those that wait: how many have been counted, and their footprints

    @property
    def waiting_bytes(self) -> int:
        """The footprints of the blocks that wait, counted when this is read: usually
        they are freed before."""
        if self._counted < len(self._waiting):
            self._counted_bytes += self._pool.footprints(list(map(length_of, self._waiting[self._counted :])))
            self._counted = len(self._waiting)
        return self._counted_bytes

    def expect_hazards(self, entries: Iterable[Entry]) -> None:
        """Get ready for clients that set hazards; `entries` are the blocks that have
        keys."""
        self.stored = {*entries, *self.condemned, *self._waiting}

    def note_stored(self, entries: Iterable[Entry]) -> None:
        """Note blocks that have just been committed."""
        if self.stored is not None:
            self.stored.update(entries)

    def scan_for(self, entries: Sequence[Entry]) -> bool:
        """Scan all hazards before these blocks are added, unless that is too much for
        so few.

        Returns whether it was done. Only this calls others, and may fail; `add` does
        not.
        """
        if self.stored is None:
            return True
        most = HAZARDS_PER_BLOCK * (1 + len(self._waiting) + len(entries))
        unread = self.unread_hazards(most)
        if unread > most and self.waiting_bytes <= MOST_WAITING_RATIO * self._pool.capacity_bytes:
            return False
        if unread:
            self.scan_hazards(None)
        return True

    def add(self, entries: Sequence[Entry], *, scanned: bool) -> None:
        """Free blocks, now or with their last pin, if hazards were `scanned` after
        their removal was announced.

        Otherwise they wait for `tidy`.
        """
        if scanned and not self._waiting:  # the usual case
            self._free(entries)
            return
        self._waiting += entries
        if scanned:
            self._free_waiting()

    def unpin(self, entries: Sequence[Entry], footprint_bytes: int) -> None:
        """Take one pin from each block; condemned blocks that have none left are freed
        soon."""
        if self.take_pins(entries, footprint_bytes):
            self.tidy()

    def take_pins(self, entries: Sequence[Entry], footprint_bytes: int) -> bool:
        """As `unpin`, for callers that call `tidy` afterwards. Returns whether they
        have to."""
        ended = self._pins.remove(entries, footprint_bytes)
        if not self.condemned or self.condemned.isdisjoint(ended):
            return False
        gone = [entry for entry in ended if entry in self.condemned]
        self.condemned.difference_update(gone)
        self._waiting += gone
        return True

    def scan_some(self) -> None:
        """Scan all hazards, or most of them if all would take much longer than to evict
        the next blocks."""
        unread = self.unread_hazards(_MOST_UNREAD)
        if unread:
            self.scan_hazards(None if unread <= _MOST_UNREAD else _MOST_UNREAD_EACH)

    def tidy(self) -> None:
        """Free the blocks that wait, unless there is too much to scan for so few of
        them."""
        if self._waiting and self.scan_for(()):
            self._free_waiting()

    def reclaim(self) -> None:
        """Scan all hazards, and free the blocks that wait: now, or with their last
        pin."""
        if self.unread_hazards(0):
            self.scan_hazards(None)
        self._free_waiting()

    def _free_waiting(self) -> None:
        # All of them were announced before the scan began: those that came during it
        # were condemned.
        if self._waiting:
            entries, self._waiting = self._waiting, []
            self._counted = self._counted_bytes = 0
            self._free(entries)

    def _free(self, entries: Sequence[Entry]) -> None:
        pinned = self._pins.counts
        if pinned and not pinned.keys().isdisjoint(entries):
            self.condemned.update(entry for entry in entries if entry in pinned)
            entries = [entry for entry in entries if entry not in pinned]
        self._pool.free(list(map(extent_of, entries)))
        if self.stored is not None:
            self.stored.difference_update(entries)


def _nothing(most_unread: int | None) -> None:
    """Update nothing: no client sets hazards."""


def _none(most: int) -> int:
    return 0


class Holds:
    """The open holds of a store, by id. Their ids come from `random`: 64 bits, so that
    nobody guesses one if that is the system's generator.

    `pins` are those of all readers together. Blocks whose last pin ends go back to
    `retired`.
    """

    def __init__(
        self,
        pool: Pool,
        pins: PinTable,
        retired: Retired,
        limits: CoreLimits,
        *,
        clock: Callable[[], float],
        random: random.Random,
    ) -> None:
        self._pool = pool
        self._pins = pins
        self._own = PinTable(pool.footprint)  # by holds alone
        self._retired = retired
        self._limits = limits
        self._clock = clock
        self._random = random
        self._entries: dict[int, list[Entry]] = {}
        self._ends: list[tuple[float, int]] = []  # a heap; ids released early stay in it until their time

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bytes(self) -> int:
        """The footprints of all blocks that are held, each counted once."""
        return self._own.bytes

    def check_time(self, hold_s: float) -> None:
        """Raise ValueError or LimitExceeded unless a hold may last `hold_s` seconds."""
        if not hold_s > 0:
            raise ValueError(f"hold_s must be more than 0 seconds, not {hold_s}")
        most_s = self._limits.max_hold_s
        if hold_s > most_s:
            raise LimitExceeded(f"hold_s={hold_s:g} is above the limit max_hold_s={most_s:g} seconds")

    def add(self, entries: list[Entry], hold_s: float) -> int:
        """Pin blocks for `hold_s` seconds; return the id of the hold, 1 to 2**64 - 1.

        LimitExceeded: all holds together would pin too much.
        """
        held_bytes = self._own.bytes + self._own.added_bytes(entries)
        footprint_bytes = self._pins.footprint(entries)
        self._limits.check_held(held_bytes, footprint_bytes, self._pool.capacity_bytes)
        self._pins.add(entries, footprint_bytes)
        self._own.add(entries, footprint_bytes)
        hold_id = 0
        while not hold_id or hold_id in self._entries:
            hold_id = self._random.getrandbits(64)
        self._keep(hold_id, entries, self._clock() + hold_s)
        return hold_id

    def export(self) -> list[tuple[int, float, list[Entry]]]:
        """Return (id, seconds left, entries) of each hold, for another process."""
        ends = {hold_id: end for end, hold_id in self._ends}
        now = self._clock()
        return [(hold_id, max(0.0, ends[hold_id] - now), entries) for hold_id, entries in self._entries.items()]

    def adopt(self, hold_id: int, entries: list[Entry], left_s: float) -> None:
        """Go on with a hold of another process."""
        footprint_bytes = self._pins.footprint(entries)
        self._pins.add(entries, footprint_bytes)
        self._own.add(entries, footprint_bytes)
        self._keep(hold_id, entries, self._clock() + min(left_s, self._limits.max_hold_s))

    def _keep(self, hold_id: int, entries: list[Entry], end: float) -> None:
        self._entries[hold_id] = entries
        if len(self._ends) > 2 * len(self._entries) + 64:  # mostly released early: forget those
            self._ends = [(end, hold) for end, hold in self._ends if hold in self._entries]
            heapq.heapify(self._ends)
        heapq.heappush(self._ends, (end, hold_id))

    def release(self, hold_id: int) -> bool:
        """End a hold; False if there is none of this id."""
        entries = self._entries.pop(hold_id, None)
        if entries is None:
            return False
        footprint_bytes = self._pins.footprint(entries)
        self._own.remove(entries, footprint_bytes)
        self._retired.unpin(entries, footprint_bytes)
        return True

    def release_all(self) -> None:
        """End every hold."""
        for hold_id in list(self._entries):
            self.release(hold_id)

    def expire(self) -> float | None:
        """End the holds whose time is over.

        Returns when the next one ends, on the clock; None if there is none.
        """
        if not self._entries:  # the usual case
            return None
        now = self._clock()
        while self._ends and (self._ends[0][0] <= now or self._ends[0][1] not in self._entries):
            self.release(heapq.heappop(self._ends)[1])
        return self._ends[0][0] if self._ends else None


_MOST_CREDIT = 8192  # more than one client can have to read


class HazardPins:
    """The clients that may set hazards, and the blocks that these pin."""

    def __init__(self, pins: PinTable, retired: Retired) -> None:
        self._pins = pins
        self._retired = retired
        self.clients: deque[Client] = deque()
        """Those clients. Read it; change it only through `add` and `remove`."""
        self._credit = _MOST_CREDIT  # of `scan_in_turns`

    def add(self, client: Client, read_hazards: Callable[[], list[Hazard]], count_unread: Callable[[], int]) -> None:
        """Respect the hazards that `read_hazards` returns from now on."""
        client.read_hazards, client.count_unread = read_hazards, count_unread
        self.clients.append(client)

    def remove(self, client: Client) -> None:
        """Scan a client for the last time and drop its pins, if it may set hazards."""
        if client.read_hazards is not None:
            client.read_hazards()  # it also learns what the client has used meanwhile
            client.read_hazards = None
            self._set(client, [])
            self.clients.remove(client)
            self._retired.tidy()

    def scan(self, most_unread: int | None = None) -> None:
        """Update the pins of all clients, or of those that have at most `most_unread`
        hazards to read."""
        for client in self.clients:
            if most_unread is None or _unread(client) <= most_unread:
                self.scan_client(client)

    def unread(self, most: int) -> int:
        """Return about how many hazards `scan` would read; 0 if it would change
        nothing.

        It stops to count once they are more than `most`.
        """
        unread = 0
        for client in self.clients:
            unread += _unread(client)
            if unread > most:
                break
        return unread

    def scan_in_turns(self, requester: Client, most_unread: int) -> None:
        """Scan the client that makes a request, and others in turn, for a bounded cost.

        What clients have used has to count before the next eviction, and must not make
        this request expensive. So the others share `most_unread` hazards, and what
        earlier calls left of theirs.
        """
        self.scan_client(requester)
        if len(self.clients) == 1 and requester.read_hazards is not None:  # it is the only one
            return
        self._credit = min(self._credit + most_unread, _MOST_CREDIT)
        for _ in range(len(self.clients)):
            client = self.clients[0]
            unread = _unread(client)
            if unread > self._credit:
                return
            if unread:
                self._credit -= unread
                self.scan_client(client)
            self.clients.rotate(-1)

    def scan_client(self, client: Client) -> None:
        """Update the pins of one client."""
        if client.read_hazards is not None:
            hazards = client.read_hazards()
            # A hazard that did not count may name a block by now: a client sees its
            # block before we have committed it.
            if hazards != client.hazards or len(hazards) != len(client.hazard_pins):
                self._set(client, hazards)

    def _set(self, client: Client, hazards: list[Hazard]) -> None:
        stored = self._retired.stored
        assert stored is not None
        entries = [entry for row in hazards if (entry := entry_at(row)) in stored]
        before = client.hazard_pins
        client.hazards, client.hazard_pins = hazards, entries
        if entries == before:
            return
        footprint_bytes, footprint_bytes_before = map(self._pins.footprint, (entries, before))
        self._pins.add(entries, footprint_bytes)  # first, lest space be freed that is still pinned
        self._retired.take_pins(before, footprint_bytes_before)
        client.leased_bytes += footprint_bytes - footprint_bytes_before


def _unread(client: Client) -> int:
    # Hazards that did not count are looked up again each time.
    return client.count_unread() + len(client.hazards) - len(client.hazard_pins)
