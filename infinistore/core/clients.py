"""Who uses the store, and what they hold: clients, reservations and leases.

These are records that `StoreCore` makes and changes; nobody else constructs or writes them. A reservation is an
unfinished write and has nothing to read; a lease is a read pin and has nothing to write.

The properties that cost time (views) are made when first asked for: who moves bytes by offsets never pays for them.
"""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Literal, TypeAlias

from infinistore.allocators.base import Extent
from infinistore.core.index import NO_CHECKSUM, Entry
from infinistore.core.pool import Pool

__all__ = ["Client", "Lease", "OwnRead", "Reservation"]

OwnRead: TypeAlias = tuple[int, int, int, int, int]
"""A block that a client reads by itself: its entry, and a number that all blocks of one read have in common."""
_EXTENT = itemgetter(0, 1, 2)
_CHECKSUM = itemgetter(3)


class Client:
    """One user of the store: everything that it has reserved or leased ends with it.

    `state` goes from "open" to "closed", by way of "quarantined" when its connection was lost and it may still write.
    """

    __slots__ = (
        "leased_bytes",
        "leases",
        "look",
        "name",
        "own_pins",
        "reading",
        "reservations",
        "reserved_bytes",
        "state",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        """For messages only; need not be unique."""
        self.state: Literal["open", "quarantined", "closed"] = "open"
        self.reservations: set[Reservation] = set()
        self.leases: set[Lease] = set()
        self.reserved_bytes = 0
        """The footprints of its open reservations."""
        self.leased_bytes = 0
        """The footprints of its leases, and of what it reads by itself; a block leased twice counts twice."""
        self.look: Callable[[], list[OwnRead]] | None = None
        """Tells what it reads by itself just now, if it may do that."""
        self.reading: list[OwnRead] = []
        """What `look` told last."""
        self.own_pins: list[Entry] = []
        """Those of these blocks that can be there."""

    def __repr__(self) -> str:
        return f"<Client {self.name!r}: {self.state}, {self.reserved_bytes} reserved, {self.leased_bytes} leased>"

    @property
    def pinned_bytes(self) -> int:
        """Leased plus reserved: what `CoreLimits.max_pinned_ratio` bounds."""
        return self.reserved_bytes + self.leased_bytes


class Reservation:
    """Room for one batch that is being written. Nobody else can see it, and no eviction takes it.

    `extents` has one (arena, offset, length in bytes) per block, in the order of the sizes asked for. `state` is
    "open", "committed" or "aborted".
    """

    __slots__ = ("_entries", "_pool", "client", "extents", "footprint_bytes", "replaced", "skipped", "state")

    def __init__(self, pool: Pool, client: Client, extents: list[Extent], footprint_bytes: int) -> None:
        self._pool = pool
        self.client = client
        self.extents = extents
        self.footprint_bytes = footprint_bytes
        self.state: Literal["open", "committed", "aborted"] = "open"
        self.skipped: list[int] = []
        """After commit: what it returned."""
        self.replaced: list[Entry] = []
        """After commit: blocks that lost their keys to it, and whose room has not been given back yet."""
        self._entries: list[Entry] = []

    def entries(self, checksums: Sequence[int] | None = None) -> list[Entry]:
        """One entry per block. Without checksums they are made once: to ask for them before a commit makes that
        quicker."""
        if checksums is not None:
            places = zip(self.extents, checksums, strict=True)
            return [(arena, offset, length, checksum) for (arena, offset, length), checksum in places]
        if not self._entries:
            self._entries = [(arena, offset, length, NO_CHECKSUM) for arena, offset, length in self.extents]
        return self._entries

    @property
    def views(self) -> list[memoryview]:
        """One writable view per block. They must not be used after commit or abort."""
        return self._pool.views(self.extents, writable=True)

    @property
    def merged_views(self) -> list[memoryview]:
        """The same bytes in the same order, with neighbours that touch made one view: often a single one."""
        return self._pool.merged_views(self.extents, writable=True)


class Lease:
    """A read pin on a batch: until it is released, the bytes of its blocks stay where and what they are.

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
        """One read-only view per key, None for a missing one. They must not be used after release."""
        views = self._pool.views(self.extents, writable=False)
        if len(views) == len(self.entries):
            return list(views)
        present = iter(views)
        return [None if entry is None else next(present) for entry in self.entries]

    @property
    def merged_views(self) -> list[memoryview]:
        """The bytes of the blocks that are there, in order, read-only, with neighbours that touch made one view."""
        return self._pool.merged_views(self.pinned, writable=False)

    @property
    def extents(self) -> list[Extent]:
        """The extents of the blocks that are there, in key order."""
        return list(map(_EXTENT, self.pinned))

    @property
    def checksums(self) -> list[int]:
        """One xxh3-64 checksum per key; NO_CHECKSUM for a missing one, and for one whose writer made none."""
        if len(self.pinned) == len(self.entries):
            return list(map(_CHECKSUM, self.pinned))
        return [NO_CHECKSUM if entry is None else entry[3] for entry in self.entries]
