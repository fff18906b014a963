"""Flushes: who waits until which keys are durable.

A flush means the block that a key has when its turn comes. If it was put again
meanwhile, the flush waits for the newer block; if it was deleted, or evicted before it
was written, the key is unmet.
"""

from collections.abc import Callable, Sequence

from infinistore.core import StoreCore
from infinistore.disk.admission import AdmissionQueue, run_of
from infinistore.disk.disks import Disk, Disks
from infinistore.disk.waits import Wait

__all__ = ["Flushes"]


class Flushes:
    """The flushes of one tier."""

    def __init__(self, core: StoreCore, disks: Disks, queue: AdmissionQueue) -> None:
        self._core = core
        self._disks = disks
        self._queue = queue
        self._waiting: dict[str, list[Wait]] = {}

    def flush(self, keys: Sequence[str], deadline: float, is_in_flight: Callable[[str], bool]) -> Wait:
        """Wait for these distinct keys, and queue what is not on its way before all
        others."""
        durable = self._disks.contains(keys)
        wanted = [key for key, there in zip(keys, durable, strict=True) if not there]
        there = [key for key, entry in zip(wanted, self._core.index.get_many(wanted), strict=True) if entry is not None]
        wait = Wait(deadline, len(there), len(wanted) - len(there))
        for key in there:
            self._waiting.setdefault(key, []).append(wait)
        self._queue_now([key for key in there if not is_in_flight(key)])
        return wait

    def written(self, disk: Disk, keys: Sequence[str]) -> None:
        """Note keys of a durable batch."""
        waiting = self._waiting_of(keys)
        if waiting:
            there = disk.volume.contains(waiting)
            self._end([key for key, found in zip(waiting, there, strict=True) if found], met=True)
            self.gone([key for key, found in zip(waiting, there, strict=True) if not found])

    def found(self, keys: Sequence[str]) -> None:
        """Note keys whose newest block is on a disk."""
        self._end(self._waiting_of(keys), met=True)

    def gone(self, keys: Sequence[str]) -> None:
        """Note keys whose queued block is not their block any more."""
        waiting = self._waiting_of(keys)
        if waiting:
            entries = self._core.index.get_many(waiting)
            self._queue_now([key for key, entry in zip(waiting, entries, strict=True) if entry is not None])
            self._end([key for key, entry in zip(waiting, entries, strict=True) if entry is None], met=False)

    def failed(self, keys: Sequence[str]) -> None:
        """Note keys that will not be written."""
        self._end(self._waiting_of(keys), met=False)

    def _waiting_of(self, keys: Sequence[str]) -> list[str]:
        # A key may have been queued more than once.
        return [key for key in dict.fromkeys(keys) if key in self._waiting] if self._waiting else []

    def _end(self, keys: Sequence[str], *, met: bool) -> None:
        for key in keys:
            for wait in self._waiting.pop(key):
                wait.end(met=met)

    def _queue_now(self, keys: Sequence[str]) -> None:
        # Those that nobody waits for any more are forgotten here.
        wanted = []
        for key in keys:
            if all(wait.settled for wait in self._waiting[key]):
                del self._waiting[key]
            else:
                wanted.append(key)
        entries = self._core.index.get_many(wanted)
        there = [(key, entry) for key, entry in zip(wanted, entries, strict=True) if entry is not None]
        if there:
            self._queue.put_back(run_of(*map(list, zip(*there, strict=True)), urgent=True))
