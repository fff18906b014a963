"""What the tier answers to requests."""

import attrs

from infinistore.disk.waits import Wait

__all__ = ["Deletion", "Prefetch", "PrefixMatch"]


@attrs.frozen
class PrefixMatch:
    """How much of a prefix the two tiers have."""

    matched: int
    """Leading keys that are in memory or on disk."""
    in_memory: int
    """How many of these are in memory."""
    hold_id: int = 0
    """The hold on all of them; 0 if none was asked for, or nothing matched."""


@attrs.frozen
class Prefetch:
    """What a prefetch does from now on, in the background."""

    reading: int
    """Keys that are being read, heads first."""
    skipped: int
    """Keys on disk that are not, because prefetches have a bounded part of the pool."""
    hold_id: int = 0
    """The hold on all of them that exist; 0 if none was asked for, or nothing
    exists."""


@attrs.frozen
class Deletion:
    """What a deletion removed, and when that is durable."""

    deleted: int
    """Keys that were there, in either tier."""
    wait: Wait
    """Settled when none of them can come back after a crash. `unmet` counts keys whose
    disk failed before."""
