"""Deletions: tombstones, and who waits until they are durable.

What a crash could bring back needs a tombstone on the disk that could do so: a key that
was deleted, or an older block of one that another disk has. Tombstones go to a disk
before any block that was put after them. So while some wait there, no block is appended
(`blocked`).
"""

from collections.abc import Callable, Sequence
from itertools import islice

from infinistore.disk.disks import Disk, Disks
from infinistore.disk.settings import MOST_BLOCKS_PER_GROUP
from infinistore.disk.waits import Wait

_NOTHING = memoryview(b"")


class _Grave:
    """The tombstones of one disk: key to the waits for it."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Wait]] = {}
        self.under_way: dict[int, dict[str, list[Wait]]] = {}


class Deletions:
    """The deletions of one tier that are not durable yet."""

    def __init__(self, disks: Disks) -> None:
        self.unsafe_keys = 0
        """Deleted keys that a disk, which cannot be written, may bring back."""
        self._disks = disks
        self._graves: dict[Disk, _Grave] = {}
        self._failed: list[Disk] = []

    def add(self, disk: Disk) -> None:
        """Expect deletions on this disk, too."""
        self._graves[disk] = _Grave()

    def remove(self, disk: Disk) -> None:
        """Forget a disk that failed. It may come back alone, with any key."""
        self._failed.append(disk)
        for tombstones in self._graves.pop(disk).under_way.values():
            self._end(tombstones, met=False)

    def delete(self, keys: Sequence[str]) -> None:
        """Let no disk have these keys, and none bring them back."""
        self._disks.note_changes(keys)
        for disk in self._disks:
            lingering = [key for key, lingers in zip(keys, disk.volume.lingers(keys), strict=True) if lingers]
            if lingering:
                disk.volume.forget(lingering)
                self._bury(disk, {key: [] for key in lingering})

    def outdate(self, disk: Disk, keys: Sequence[str]) -> None:
        """Let no other disk bring back older blocks of these durable keys."""
        for other in self._disks:
            if other is not disk and not other.is_leaving:
                lingering = [key for key, lingers in zip(keys, other.volume.lingers(keys), strict=True) if lingers]
                self._bury(other, {key: [] for key in lingering})

    def wait(self, keys: Sequence[str], deadline: float) -> Wait:
        """Wait until the tombstones of these keys are durable that are not yet.

        Those that a disk does not take any more are unmet.
        """
        found = [
            tombstones[key]
            for grave in self._graves.values()
            for tombstones in (grave.waiting, *grave.under_way.values())
            for key in tombstones.keys() & set(keys)
        ]
        counts = self._disks.counts
        lingering = [disk.volume.lingers(keys) for disk in self._disks if not disk.is_writable and counts(disk)]
        lingering += [[True] * len(keys) for disk in self._failed if counts(disk)]
        unsafe = sum(map(any, zip(*lingering, strict=True)))
        wait = Wait(deadline, len(found), unsafe)
        for waits in found:
            waits.append(wait)
        return wait

    def blocked(self) -> list[Disk]:
        """Return the disks that get no blocks now."""
        return [disk for disk, grave in self._graves.items() if grave.waiting]

    @property
    def is_idle(self) -> bool:
        """Whether every tombstone is durable, or given up."""
        return not any(grave.waiting or grave.under_way for grave in self._graves.values())

    def work(self, is_in_flight: Callable[[Disk, str], bool]) -> bool:
        """Append a batch of tombstones where there is room; return whether there are
        more.

        A tombstone that was lost has to wait for a newer block of its key that was
        appended since: it would hide it.
        """
        has_more = False
        for disk, grave in self._graves.items():
            if grave.waiting and disk.is_writable and not disk.is_recovering and not disk.traffic.hung:
                free = (key for key in grave.waiting if not is_in_flight(disk, key))
                keys = list(islice(free, MOST_BLOCKS_PER_GROUP))
                has_more |= bool(keys) and self._append(disk, grave, keys)
        return has_more

    def give_up(self, disk: Disk) -> None:
        """Stop waiting for a disk that is not written any more."""
        grave = self._graves[disk]
        self.unsafe_keys += len(grave.waiting)
        waiting, grave.waiting = grave.waiting, {}
        self._end(waiting, met=False)

    def durable(self, disk: Disk, token: int, now: float) -> bool:
        """Note that a batch is durable; False if it is not one of these."""
        tombstones = self._graves[disk].under_way.pop(token, None)
        if tombstones is None:
            return False
        self._end(tombstones, met=True)
        return True

    def lost(self, disk: Disk, token: int) -> bool:
        """Note that a batch was lost; False if it is not one of these."""
        tombstones = self._graves[disk].under_way.pop(token, None)
        if tombstones is None:
            return False
        self._bury(disk, tombstones)
        return True

    def _bury(self, disk: Disk, tombstones: dict[str, list[Wait]]) -> None:
        if not disk.is_writable:
            self.unsafe_keys += len(tombstones)
            self._end(tombstones, met=False)
            return
        waiting = self._graves[disk].waiting
        for key, waits in tombstones.items():
            waiting.setdefault(key, []).extend(waits)

    def _append(self, disk: Disk, grave: _Grave, keys: list[str]) -> bool:
        newer = [key for key, there in zip(keys, disk.volume.contains(keys), strict=True) if there]
        self._end({key: grave.waiting.pop(key) for key in newer}, met=True)
        keys = [key for key in keys if key in grave.waiting]
        if keys:
            zeros = [0] * len(keys)
            token = disk.volume.append(keys, zeros, zeros, [_NOTHING] * len(keys))
            if token is None:
                return False
            grave.under_way[token] = {key: grave.waiting.pop(key) for key in keys}
        return True

    @staticmethod
    def _end(tombstones: dict[str, list[Wait]], *, met: bool) -> None:
        for waits in tombstones.values():
            for wait in waits:
                wait.end(met=met)
