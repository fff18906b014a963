"""What a store tells about itself: numbers only, taken without a scan."""

import attrs

from infinistore.allocators.base import AllocatorStatistics

__all__ = ["EvictionStatistics", "StoreStatistics"]


@attrs.frozen
class EvictionStatistics:
    """Blocks evicted since the start, by cause."""

    on_demand: int
    """To make room for a put."""
    fragmentation: int
    """Because there was room, but not in pieces large enough."""
    periodic: int
    """By the server's own timer."""
    manual: int
    """Because a person or a program asked for it."""


@attrs.frozen
class StoreStatistics:
    """A snapshot of one store. Sizes are in bytes, by footprint unless said otherwise; the rest are counts.

    "Now" values: capacity to holds. Counters since the start: hits and below.
    """

    capacity_bytes: int
    """All arenas together."""
    growable_bytes: int
    """How much larger the pool may still become."""
    used_bytes: int
    """Taken by blocks that have a key, reservations, and blocks without a key that are still pinned."""
    reserved_bytes: int
    """Taken by writes that are not finished."""
    pinned_bytes: int
    """Blocks that are leased, held or read by a client by itself, each counted once: eviction cannot take them."""
    held_bytes: int
    """The part of `pinned_bytes` that holds pin, each block counted once."""
    condemned_bytes: int
    """The part of `pinned_bytes` that has lost its key: deleted or replaced while pinned, free with its last pin."""
    quarantined_bytes: int
    """Reserved or leased by clients that are lost but not proven quiet. A block two of them lease counts twice."""
    keys: int
    clients: int
    quarantined_clients: int
    reservations: int
    leases: int
    """Leases, and batches that clients read by themselves."""
    holds: int
    arenas: int
    hits: int
    """Keys that a lease found, or a client by itself."""
    misses: int
    """Keys that a lease did not find."""
    puts: int
    """Blocks committed, without those skipped."""
    put_bytes: int
    """Their lengths."""
    hit_bytes: int
    """The lengths of the blocks that were found so."""
    deleted: int
    """Keys deleted or purged."""
    checksum_drops: int
    """Blocks dropped because their bytes did not match their checksum."""
    evicted: EvictionStatistics
    allocator: AllocatorStatistics
