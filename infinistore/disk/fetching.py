"""Fetching: keys are brought into memory for a read, until all of them are there.

While some are read from disk, others may be evicted, and even those that have just come
up, before whoever waits for them is awake. So it looks again before the lease.
"""

from collections.abc import Sequence

from infinistore.disk.guarded_tier import GuardedTier
from infinistore.disk.tier import DiskTier
from infinistore.disk.waits import Wait

__all__ = ["Fetch"]

_MOST_WAITS = 8
"""So that clients that evict each other's blocks do not read them for ever."""


class Fetch:
    """One read of `keys`: call `next` and wait for what it returns, until it returns
    None; then lease at once, before anybody else can evict.

    It ends by the deadline, or when `wait_s` of the tier's settings is over.
    """

    def __init__(self, tier: GuardedTier | DiskTier, keys: Sequence[str], deadline: float) -> None:
        self._tier = tier
        self._keys = keys
        self._deadline = tier.last_moment(deadline)
        self._waits = 0

    def next(self) -> Wait | None:
        """Return what to wait for now; None if there is nothing, or no time left."""
        if self._waits == _MOST_WAITS:
            return None
        self._waits += 1
        return self._tier.want(self._keys, self._deadline)
