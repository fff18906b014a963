"""A store hands its pool over to another process, or takes over what one has handed.

`export` writes down what is where. `adopt` reads it into a store that has the same
arenas and no block yet. It promises that no byte that somebody may still touch is used
for anything else: what clients of the earlier process had leased, reserved or were
reading stays in quarantine, for a client of this store that stands in for them, until
that one is closed. Blocks without a checksum are dropped: nobody could tell whether
they are what was written. The others are hashed before they are read (`reads`).

Leaves to others: that the earlier process changes nothing after `export`; the memory
itself; and to close the stand-ins when their clients are gone.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, compress
from typing import NamedTuple

import attrs

from infinistore.core.clients import Client, Lease
from infinistore.core.committed import CommittedIndex
from infinistore.core.index import NO_CHECKSUM, Entry, checksum_of, extent_of, length_of
from infinistore.core.pins import Holds, PinTable, Retired
from infinistore.core.pool import Pool
from infinistore.core.pool_state import HeldBlocks, PoolState
from infinistore.core.reads import Reads, Unverified
from infinistore.core.removals import Removals
from infinistore.core.retention import Retention
from infinistore.errors import ConfigError
from infinistore.sizes import in_units


@attrs.frozen
class Adopted:
    """What became of the blocks of an earlier process."""

    kept: int
    dropped: int
    """Blocks that had no checksum, or no place in this pool."""
    stand_ins: list[Client]
    """One for each of `PoolState.pins`, in quarantine. Close it when nobody can touch
    its room any more."""


class PoolParts(NamedTuple):
    """The parts of a store that know of the blocks of its pool."""

    pool: Pool
    committed: CommittedIndex
    pins: PinTable
    retired: Retired
    removals: Removals
    retention: Retention
    holds: Holds
    reads: Reads


class HandOver:
    """Hands the pool of one store over. `open_client` is that of the store."""

    def __init__(self, parts: PoolParts, open_client: Callable[[str], Client]) -> None:
        self._pool = parts.pool
        self._parts = parts
        self._open_client = open_client

    def export(self, instance: str, groups: Sequence[Iterable[Client]]) -> PoolState:
        """Return what is where. Each group of clients becomes one of `PoolState.pins`.

        Nothing of the store may be changed afterwards, except to close it, unless it
        goes on and what was returned is thrown away.
        """
        index = self._parts.committed.up_to_date()
        self._parts.holds.expire()
        self._parts.retired.reclaim()
        ends, protected, protected_ends = self._parts.retention.export(list(index))
        return PoolState(
            instance=instance,
            allocator=self._pool.allocator.name,
            unit_bytes=self._pool.allocator.unit_bytes,
            arenas=[arena.length for arena in self._pool.arenas],
            keys=list(index),
            entries=list(index.entries()),
            holds=[HeldBlocks(*held) for held in self._parts.holds.export()],
            pins=[list(dict.fromkeys(chain.from_iterable(map(_pinned_by, group)))) for group in groups],
            ends=ends,
            protected=protected,
            protected_ends=protected_ends,
        )

    def adopt(self, state: PoolState) -> Adopted:
        """Take over the blocks of an earlier process, whose arenas this pool has. The
        store has no block yet.

        Raises:
            ConfigError: something that is still in use has no place in this pool.
                Nothing has changed.
        """
        return self.adopt_rest(state, self.adopt_pinned(state))

    def adopt_rest(self, state: PoolState, pinned: Sequence[Entry]) -> Adopted:
        """Take over the other blocks; `pinned` is what `adopt_pinned` returned."""
        stored, dropped = self._adopt_stored(state, set(pinned))
        index = self._parts.committed.up_to_date()
        warmest_first = dict(reversed(stored.items()))
        index.insert(list(warmest_first), list(warmest_first.values()))
        self._parts.retired.note_stored([*stored.values(), *pinned])
        self._parts.retired.condemned.update(set(pinned).difference(stored.values()))
        self._parts.reads.unverified = Unverified(self._parts.removals, warmest_first)
        self._parts.retention.adopt(
            ((key, left_s) for position, left_s in state.ends if (key := state.keys[position]) in stored),
            ((key, stored[key]) for position in state.protected if (key := state.keys[position]) in stored),
            ((key, left_s) for position, left_s in state.protected_ends if (key := state.keys[position]) in stored),
        )
        for held in state.holds:
            self._parts.holds.adopt(held.hold, held.entries, held.left_s)
        stand_ins = [self._stand_in(number, entries) for number, entries in enumerate(state.pins, 1)]
        return Adopted(len(stored), dropped, stand_ins)

    def verify_some(self, most_bytes: int) -> bool:
        """Hash about so many bytes of blocks of the earlier process; whether any is
        left to be hashed."""
        unverified = self._parts.reads.unverified
        if unverified is None or not unverified.verify_some(self._parts.committed.up_to_date(), most_bytes):
            self._parts.reads.unverified = None
            return False
        return True

    def adopt_pinned(self, state: PoolState) -> list[Entry]:
        """Take the places of what is still in use, and return it. Stores that share a
        pool do this before any of them does the rest.

        Raises:
            ConfigError: something has no place in this pool. Nothing has changed.
        """
        pinned = list(dict.fromkeys(chain(*state.pins, *(held.entries for held in state.holds))))
        adopted = self._pool.adopt(list(map(extent_of, pinned)))
        if not all(adopted):
            self._pool.free(list(map(extent_of, compress(pinned, adopted))))
            raise ConfigError(
                f"clients still use blocks that were placed by the allocator {state.allocator!r} in units of"
                f" {in_units(state.unit_bytes)}, and have no place in this pool"
            )
        return pinned

    def _adopt_stored(self, state: PoolState, pinned: set[Entry]) -> tuple[dict[str, Entry], int]:
        """Take the places of the blocks that have a key; return them, and how many are
        dropped."""
        stored = {
            key: entry
            for key, entry in zip(state.keys, state.entries, strict=True)
            if checksum_of(entry) != NO_CHECKSUM
        }
        others = [key for key, entry in stored.items() if entry not in pinned]
        adopted = self._pool.adopt([extent_of(stored[key]) for key in others])
        if not all(adopted):
            for key, taken in zip(others, adopted, strict=True):
                if not taken:
                    del stored[key]
        return stored, len(state.keys) - len(stored)

    def _stand_in(self, number: int, entries: list[Entry]) -> Client:
        client = self._open_client(f"of the earlier process, {number}")
        lengths = list(map(length_of, entries))
        footprint_bytes = self._pool.footprints(lengths)
        self._parts.pins.add(entries, footprint_bytes)
        lease = Lease(self._pool, client, list(entries), entries, lengths=lengths, footprint_bytes=footprint_bytes)
        client.leases[lease] = None
        client.leased_bytes = footprint_bytes
        client.state = "quarantined"
        return client


def _pinned_by(client: Client) -> list[Entry]:
    reserved = [(*extent, NO_CHECKSUM) for reservation in client.reservations for extent in reservation.extents]
    return [*reserved, *client.hazard_pins, *chain.from_iterable(lease.pinned for lease in client.leases)]
