"""The journal of the core, followed: what each change means for the disks.

After `follow`, no disk finds a block that is not its key's newest one, and what is on
no disk is queued. So it is called before every lookup.
"""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

from infinistore.allocators.base import Extent
from infinistore.core import Journal, StoreCore
from infinistore.core.index import Entry, extent_of
from infinistore.disk.deletions import Deletions
from infinistore.disk.demotion import AdmissionQueue, Demotion, same_block
from infinistore.disk.disks import Disks

__all__ = ["JournalFollower"]


class JournalFollower:
    """Follows the journal of one core. `purge` is called when all keys were removed."""

    def __init__(
        self,
        core: StoreCore,
        journal: Journal,
        *,
        disks: Disks,
        queue: AdmissionQueue,
        demotion: Demotion,
        deletions: Deletions,
        purge: Callable[[], object],
    ) -> None:
        self._core = core
        self._journal = journal
        self._disks = disks
        self._queue = queue
        self._demotion = demotion
        self._deletions = deletions
        self._purge = purge

    @property
    def has_items(self) -> bool:
        """Whether there is something to follow."""
        return len(self._journal) > 0

    def stop(self) -> None:
        """Forget what the core tells, now and later."""
        self._journal.take()
        self._journal.on_first = self._journal.take

    def follow(self, promoted: AbstractSet[Extent] = frozenset()) -> None:
        """Learn what the core committed and removed; `promoted` came from a disk."""
        self._core.commit_written()
        for change, keys, entries in self._journal.take() if self.has_items else ():
            if change == "put":
                if promoted and extent_of(entries[0]) in promoted:
                    self._queue.pass_by(entries)
                else:
                    self._put(keys, entries)
            elif change == "delete":
                self._demotion.changed(keys, None)
                self._deletions.delete(keys)
            elif change == "purge":
                self._purge()
            elif change == "read":
                self._read(keys)
            # A block that was dropped from memory stays on disk: that copy may be good.

    def _put(self, keys: Sequence[str], entries: Sequence[Entry]) -> None:
        """Forget older blocks of these keys, and queue those that are on no disk."""
        equal, outdated = self._demotion.changed(keys, entries)
        for disk in self._disks:
            if disk.is_recovering:
                disk.note_changes(keys)
                continue
            for key, entry, location in zip(keys, entries, disk.volume.find(keys), strict=True):
                if location is not None:
                    same = not location.own_checksum and same_block(entry, location.length, location.checksum)
                    (equal if same else outdated).add(key)
        if outdated:
            self._disks.forget(outdated)
        if not equal:
            self._queue.put(keys, entries)
        else:
            self._queue.pass_by([entry for key, entry in zip(keys, entries, strict=True) if key in equal])
            fresh = [(key, entry) for key, entry in zip(keys, entries, strict=True) if key not in equal]
            if fresh:
                self._queue.put([key for key, _ in fresh], [entry for _, entry in fresh])

    def _read(self, keys: Sequence[str]) -> None:
        """Queue blocks that were read and are on no disk."""
        current = self._core.index.get_many(keys)
        fresh = {
            key: entry
            for key, entry, on_disk in zip(keys, current, self._disks.contains(keys), strict=True)
            if entry is not None and not on_disk and not self._demotion.is_in_flight(key)
        }
        if fresh:
            self._queue.read(list(fresh), list(fresh.values()))
