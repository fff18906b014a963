"""Purging: both tiers are emptied, whatever is written, read or evicted meanwhile.

A disk is purged by one record, and needs one for each key otherwise. So the disks are
purged first, and that is waited for. Meanwhile, what is in memory may be written to
them again, and then be evicted. So what was in memory when the purge began is deleted
by name, from both tiers, and that is waited for, too.
"""

from collections.abc import Sequence

from infinistore.disk.guarded_tier import GuardedTier
from infinistore.disk.tier import DiskTier
from infinistore.disk.waits import Wait

__all__ = ["Purging", "names_on_disk"]

_SLICE_KEYS = 4096


class Purging:
    """One purge: wait for `disks`; call `delete_some` until it returns False; wait for
    all `waits`; then `check`.

    New keys stay.
    """

    def __init__(self, tier: GuardedTier | DiskTier, deadline: float) -> None:
        self._tier = tier
        self._deadline = deadline
        self._keys = tier.core.all_keys()
        tier.core.deletions.note_all()
        self._slice_keys = min(_SLICE_KEYS, tier.core.limits.max_batch_keys)
        self.disks = tier.purge(deadline)
        """Settled when the disks are purged."""
        self.waits: list[Wait] = [self.disks]
        """What to wait for in the end: until then, a crash may bring keys back."""
        self.deleted = 0
        """Keys that were in memory, and are deleted."""

    def delete_some(self) -> bool:
        """Delete some of the keys, which takes a few milliseconds; return whether there
        are more."""
        some = self._keys[-self._slice_keys :]
        del self._keys[-self._slice_keys :]
        if some:
            deletion = self._tier.delete(some, self._deadline)
            self.deleted += deletion.deleted
            self.waits.append(deletion.wait)
        return bool(self._keys)

    def check(self) -> None:
        """Raise `DiskFailed` if a disk failed, or cannot be written, and
        `DeadlineExceeded` if one did not answer by the deadline."""
        for wait in self.waits:
            wait.check(in_time=True)


def names_on_disk(tier: GuardedTier | DiskTier, keys: Sequence[str]) -> list[str]:
    """Return those of these keys that are on disk only, if somebody follows removals:
    that a disk forgets them is not a removal from memory."""
    if not tier.core.removal_log.is_kept:
        return []
    return [key for key, place in zip(keys, tier.exists(keys), strict=True) if place == 2]  # on disk
