"""Who uses the store, and what they hold: clients, reservations and leases.

These are records. Only the store creates and changes them. A reservation is an
unfinished write, a lease a read pin.

Expensive properties (views) are computed when they are read. Code that moves bytes by
offsets never pays for them.
"""

from collections.abc import Callable, Iterable, Sequence
from operator import add, itemgetter
from typing import Literal, TypeAlias

from infinistore.allocators.base import Extent
from infinistore.core.index import NO_CHECKSUM, Entry, checksum_of, extent_of
from infinistore.core.pool import Pool

Hazard: TypeAlias = tuple[int, int, int, int, int]
"""A pin that a client has set in shared memory: an entry, and a number that all blocks
of one read have in common."""

read_of: Callable[[Hazard], int] = itemgetter(4)
entry_at: Callable[[Hazard], Entry] = itemgetter(slice(4))


class Client:
    """One user of the store. Its reservations and leases end with it.

    `state` goes from "open" to "closed", by way of "quarantined" if its connection was
    lost and it may still write.
    """

    __slots__ = (
        "count_unread",
        "counted",
        "hazard_pins",
        "hazards",
        "leased_bytes",
        "leases",
        "name",
        "read_hazards",
        "reservations",
        "reserved_bytes",
        "state",
    )

    def __init__(self, name: str, *, counted: bool = True) -> None:
        self.name = name
        """For messages only; need not be unique."""
        self.counted = counted
        """Whether the statistics count it, its reads and its writes. Not so for a part
        of the store itself."""
        self.state: Literal["open", "quarantined", "closed"] = "open"
        self.reservations: dict[Reservation, None] = {}  # a set, in the order in which they came
        self.leases: dict[Lease, None] = {}
        self.reserved_bytes = 0
        """The footprints of its open reservations."""
        self.leased_bytes = 0
        """The footprints of its leases and of what its hazards pin; a block leased
        twice counts twice."""
        self.read_hazards: Callable[[], list[Hazard]] | None = None
        """Returns the hazards that it has set now; None if it may not set any."""
        self.count_unread: Callable[[], int] = int
        """Returns about how many hazards `read_hazards` would read; 0 if it would
        return the same as the last time."""
        self.hazards: list[Hazard] = []
        """What `read_hazards` returned last."""
        self.hazard_pins: list[Entry] = []
        """The entries of those hazards that pin a block."""

    def __repr__(self) -> str:
        return f"<Client {self.name!r}: {self.state}, {self.reserved_bytes} reserved, {self.leased_bytes} leased>"

    def check_open(self) -> None:
        """Raise ValueError if its connection has ended, or was lost."""
        if self.state != "open":
            raise ValueError(f"client {self.name!r} is {self.state}")

    @property
    def pinned_bytes(self) -> int:
        """Leased plus reserved: what `CoreLimits.max_pinned_ratio` bounds."""
        return self.reserved_bytes + self.leased_bytes


class Reservation:
    """Space for one batch that is being written, invisible and safe from eviction.

    `extents` has one (arena, offset, length in bytes) per block, in the order of the
    sizes. `state` is "open", "committed" or "aborted".
    """

    __slots__ = ("_entries", "_pool", "client", "extents", "footprint_bytes", "skipped", "state")

    def __init__(self, pool: Pool, client: Client, extents: list[Extent], footprint_bytes: int) -> None:
        self._pool = pool
        self.client = client
        self.extents = extents
        self.footprint_bytes = footprint_bytes
        self.state: Literal["open", "committed", "aborted"] = "open"
        self.skipped: list[int] = []
        """After commit: what it returned."""
        self._entries: list[Entry] = []

    def entries(self, checksums: Sequence[int] | None = None) -> list[Entry]:
        """Return one entry per block.

        Without checksums they are made once. Calling this before the commit makes the
        commit faster.
        """
        if checksums is not None:
            return self._joined(checksums)
        if not self._entries:
            self._entries = self._joined([NO_CHECKSUM] * len(self.extents))
        return self._entries

    def _joined(self, checksums: Sequence[int]) -> list[Entry]:
        if len(checksums) != len(self.extents):
            raise ValueError(f"{len(self.extents)} blocks need as many checksums, not {len(checksums)}")
        return list(map(add, self.extents, zip(checksums, strict=False)))  # a third of what a loop takes

    @property
    def views(self) -> list[memoryview]:
        """One writable view per block. They must not be used after commit or abort."""
        return self._pool.views(self.extents, writable=True)

    @property
    def merged_views(self) -> list[memoryview]:
        """The same bytes in the same order, with adjacent blocks joined."""
        return self._pool.merged_views(self.extents, writable=True)


class Lease:
    """A read pin on a batch. Until it is released, its blocks neither move nor change.

    `entries` has one entry per key, in order, None for a missing one.
    """

    __slots__ = ("_pool", "client", "entries", "footprint_bytes", "lengths", "pinned", "released")

    def __init__(
        self,
        pool: Pool,
        client: Client,
        entries: list[Entry | None],
        pinned: Sequence[Entry],
        *,
        lengths: list[int],
        footprint_bytes: int,
    ) -> None:
        self._pool = pool
        self.client = client
        self.entries = entries
        self.pinned = pinned
        """The entries that are there, in key order."""
        self.lengths = lengths
        """One length in bytes per key; 0 for a missing one (no value is empty)."""
        self.footprint_bytes = footprint_bytes
        self.released = False

    @property
    def views(self) -> list[memoryview | None]:
        """One read-only view per key, None for a missing one; invalid after release."""
        views = self._pool.views(self.extents, writable=False)
        if len(views) == len(self.entries):
            return list(views)
        present = iter(views)
        return [None if entry is None else next(present) for entry in self.entries]

    @property
    def merged_views(self) -> list[memoryview]:
        """The bytes of the existing blocks, adjacent ones joined; read-only."""
        return self._pool.merged_views(self.pinned, writable=False)

    @property
    def extents(self) -> list[Extent]:
        """The extents of the blocks that are there, in key order."""
        return list(map(extent_of, self.pinned))

    @property
    def checksums(self) -> list[int]:
        """One xxh3-64 per key; NO_CHECKSUM for a missing key, or if there is none."""
        if len(self.pinned) == len(self.entries):
            return list(map(checksum_of, self.pinned))
        return [NO_CHECKSUM if entry is None else checksum_of(entry) for entry in self.entries]


def leased_in_quarantine(clients: Iterable[Client]) -> set[Entry]:
    """Return the blocks that clients lease which were lost and may still write."""
    return {
        entry
        for client in clients
        if client.state == "quarantined"
        for entries in (client.hazard_pins, *(lease.pinned for lease in client.leases))
        for entry in entries
    }
