"""A store hands its pool over to another process, or takes over what one has handed.

`export` writes down what is where. `adopt` reads it into a store that has the same
arenas and no block yet. It promises that no byte that somebody may still touch is used
for anything else: what clients of the earlier process had leased, reserved or were
reading stays in quarantine, for a client of this store that stands in for them, until
that one is closed. Blocks without a checksum are dropped: nobody could tell whether
they are what was written. The others are hashed before they are read.

Leaves to others: that the earlier process changes nothing after `export`; the memory
itself; and to close the stand-ins when their clients are gone.
"""

from collections.abc import Iterable, Sequence
from itertools import chain, compress

import attrs

from infinistore.core.clients import Client, Lease
from infinistore.core.index import NO_CHECKSUM, Entry, checksum_of, extent_of, length_of
from infinistore.core.pool_state import HeldBlocks, PoolState
from infinistore.core.removals import Unverified
from infinistore.core.store import StoreCore
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


def export(core: StoreCore, instance: str, groups: Sequence[Iterable[Client]]) -> PoolState:
    """Return what is where. Each group of clients becomes one of `PoolState.pins`.

    Nothing of the store may be changed afterwards, except to close it, unless it
    goes on and what was returned is thrown away.
    """
    index = core.committed.up_to_date()
    core.holds.expire()
    core.retired.reclaim()
    ends, protected, protected_ends = core.retention.export(list(index))
    return PoolState(
        instance=instance,
        allocator=core.pool.allocator.name,
        unit_bytes=core.pool.allocator.unit_bytes,
        arenas=[arena.length for arena in core.pool.arenas],
        keys=list(index),
        entries=list(index.entries()),
        holds=[HeldBlocks(*held) for held in core.holds.export()],
        pins=[list(dict.fromkeys(chain.from_iterable(map(_pinned_by, group)))) for group in groups],
        ends=ends,
        protected=protected,
        protected_ends=protected_ends,
    )


def adopt(core: StoreCore, state: PoolState) -> Adopted:
    """Take over the blocks of an earlier process, whose arenas this pool has. The
    store has no block yet.

    Raises:
        ConfigError: something that is still in use has no place in this pool.
            Nothing has changed.
    """
    return adopt_rest(core, state, adopt_pinned(core, state))


def adopt_rest(core: StoreCore, state: PoolState, pinned: Sequence[Entry]) -> Adopted:
    """Take over the other blocks; `pinned` is what `adopt_pinned` returned."""
    stored, dropped = _adopt_stored(core, state, set(pinned))
    index = core.committed.up_to_date()
    warmest_first = dict(reversed(stored.items()))
    index.insert(list(warmest_first), list(warmest_first.values()))
    core.retired.note_stored([*stored.values(), *pinned])
    core.retired.condemned.update(set(pinned).difference(stored.values()))
    core.unverified = Unverified(core.removals, warmest_first)
    core.retention.adopt(
        ((key, left_s) for position, left_s in state.ends if (key := state.keys[position]) in stored),
        ((key, stored[key]) for position in state.protected if (key := state.keys[position]) in stored),
        ((key, left_s) for position, left_s in state.protected_ends if (key := state.keys[position]) in stored),
    )
    for held in state.holds:
        core.holds.adopt(held.hold, held.entries, held.left_s)
    stand_ins = [_stand_in(core, number, entries) for number, entries in enumerate(state.pins, 1)]
    return Adopted(len(stored), dropped, stand_ins)


def verify_some(core: StoreCore, most_bytes: int) -> bool:
    """Hash about so many bytes of blocks of the earlier process; whether any is
    left to be hashed."""
    unverified = core.unverified
    if unverified is None or not unverified.verify_some(core.committed.up_to_date(), most_bytes):
        core.unverified = None
        return False
    return True


def adopt_pinned(core: StoreCore, state: PoolState) -> list[Entry]:
    """Take the places of what is still in use, and return it. Stores that share a
    pool do this before any of them does the rest.

    Raises:
        ConfigError: something has no place in this pool. Nothing has changed.
    """
    pinned = list(dict.fromkeys(chain(*state.pins, *(held.entries for held in state.holds))))
    adopted = core.pool.adopt(list(map(extent_of, pinned)))
    if not all(adopted):
        core.pool.free(list(map(extent_of, compress(pinned, adopted))))
        raise ConfigError(
            f"clients still use blocks that were placed by the allocator {state.allocator!r} in units of"
            f" {in_units(state.unit_bytes)}, and have no place in this pool"
        )
    return pinned


def _adopt_stored(core: StoreCore, state: PoolState, pinned: set[Entry]) -> tuple[dict[str, Entry], int]:
    """Take the places of the blocks that have a key; return them, and how many are
    dropped."""
    stored = {
        key: entry for key, entry in zip(state.keys, state.entries, strict=True) if checksum_of(entry) != NO_CHECKSUM
    }
    others = [key for key, entry in stored.items() if entry not in pinned]
    adopted = core.pool.adopt([extent_of(stored[key]) for key in others])
    if not all(adopted):
        for key, taken in zip(others, adopted, strict=True):
            if not taken:
                del stored[key]
    return stored, len(state.keys) - len(stored)


def _stand_in(core: StoreCore, number: int, entries: list[Entry]) -> Client:
    client = core.open_client(f"of the earlier process, {number}")
    lengths = list(map(length_of, entries))
    footprint_bytes = core.pool.footprints(lengths)
    core.pins.add(entries, footprint_bytes)
    lease = Lease(core.pool, client, list(entries), entries, lengths=lengths, footprint_bytes=footprint_bytes)
    client.leases[lease] = None
    client.leased_bytes = footprint_bytes
    client.state = "quarantined"
    return client


def _pinned_by(client: Client) -> list[Entry]:
    reserved = [(*extent, NO_CHECKSUM) for reservation in client.reservations for extent in reservation.extents]
    return [*reserved, *client.hazard_pins, *chain.from_iterable(lease.pinned for lease in client.leases)]
