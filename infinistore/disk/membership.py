"""Membership: which disks belong together, so that one that was away is found out.

Every disk keeps the number of the last change of the set. It is raised when a store
opens its disks, when one is added, and when one is given up. A disk that comes back
with a lower number may have keys that were deleted or put again meanwhile, so it is
purged before it is read.
"""

from infinistore.disk.disks import Disk

__all__ = ["Membership"]


class Membership:
    """The set of disks of one tier."""

    def __init__(self) -> None:
        self._members: list[Disk] = []
        self._newest = 0

    def add(self, disk: Disk) -> None:
        """Take a disk in: of two that know different numbers, the one with the lower
        is purged, whichever was opened first."""
        known = disk.volume.membership
        if self._members and known != self._newest:
            outdated = [disk] if known < self._newest else self._members
            for one in outdated:
                one.purges.append([])
        self._members.append(disk)
        self._newest = max(self._newest, known)

    def recovered(self) -> None:
        """A disk has recovered; once all have, let the set begin anew."""
        if not any(one.is_recovering for one in self._members):
            self._raise()

    def exclude(self, disk: Disk) -> None:
        """Give a disk up: what it has does not count when it comes back."""
        if disk in self._members:
            self._members.remove(disk)
            self._raise()

    def counts(self, disk: Disk) -> bool:
        """Whether what a disk has may be there when the store is opened again: not if
        it was given up, and another one knows that durably."""
        return disk in self._members or all(one.volume.membership < self._newest for one in self._members)

    def _raise(self) -> None:
        self._newest += 1
        for disk in self._members:
            disk.awaited_membership = self._newest
            disk.volume.set_membership(self._newest)
