"""The disks of one tier: each with its volume, its jobs and its health; lookups in all.

A key is on one disk at a time: what replaces it, or hides it, goes to the disk that
could bring it back after a crash. So the newest record of a key needs to be known
within one disk only.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

from infinistore.disk.health import Health
from infinistore.disk.jobs import Job, Result
from infinistore.disk.settings import TierSettings
from infinistore.disk.statistics import DiskStatistics
from infinistore.disk.traffic import Traffic
from infinistore.disk.volume import Event, Location, Volume
from infinistore.disk.waits import Wait

__all__ = ["Disk", "Disks", "Place"]

_log: Final = logging.getLogger("infinistore.disk")
_T = TypeVar("_T")


class Disk:
    """One disk of a tier."""

    def __init__(self, volume: Volume, settings: TierSettings) -> None:
        self.volume = volume
        self.number = volume.number
        self.health = Health(volume.name)
        self.traffic = Traffic(settings)
        self.read_blocks = 0
        """Blocks read from it, and verified."""
        self.read_bytes = 0
        self.damaged_blocks = 0
        """Blocks that did not have their checksum."""
        self.written_blocks = 0
        """Blocks made durable."""
        self.written_bytes = 0
        self.write_rate = 0.0
        """What it took of late while it was written, in bytes per second; 0 if
        unknown."""
        self.purges: list[list[Wait]] = []
        """Purges that have to be begun, each with those who wait for it: a volume that
        recovers cannot be purged, and gives nothing meanwhile."""
        self.is_recovering = True
        """Whether it gives nothing yet, and takes nothing."""
        self.is_leaving = False
        """Whether it is being taken out."""
        self.has_failed = False
        """Whether its volume raised what it should not, so that nobody knows what it
        knows."""
        self.awaited_membership = 0
        """The membership that it has to know before it is written."""
        self._changed: set[str] = set()
        self._saved_bytes = 0

    # The volume's own work: an error there turns this disk off, and nothing else.

    def step(self) -> bool:
        """Let the volume work; see `Volume.step`."""
        return self._guarded(self.volume.step, False)

    def events(self) -> list[Event]:
        """Take what happened to the volume."""
        return self._guarded(self.volume.events, [])

    def start_jobs(self) -> None:
        """Start the jobs of the volume."""
        jobs: list[Job] = self._guarded(self.volume.jobs, [])
        for job in jobs:
            self.traffic.start(job, self._done)

    def _done(self, result: Result) -> None:
        self._guarded(lambda: self.volume.done(result), None)

    def _guarded(self, call: Callable[[], _T], otherwise: _T) -> _T:
        if not self.has_failed:
            try:
                return call()
            except Exception as error:  # noqa: BLE001 - whatever it is, the other disks go on
                _log.exception("a disk is off because of an internal error", extra={"disk": self.volume.name})
                self.has_failed = True
                self.is_recovering = False
                self._changed.clear()
                self.health.failed(error)
        return otherwise

    @property
    def is_readable(self) -> bool:
        """Whether its blocks can be asked for."""
        return (
            not self.is_recovering
            and not self.traffic.hung
            and self.health.state != "off"
            and self.volume.state in ("open", "read-only")
        )

    def note_changes(self, keys: Iterable[str]) -> None:
        """Note keys that were put or removed. A volume that recovers does not know
        what it has to forget."""
        if self.is_recovering:
            self._changed.update(keys)

    def has_recovered(self) -> bool:
        """Return True once: when the volume has recovered, and forgotten what has
        changed meanwhile. One that ended before never has."""
        if not self.is_recovering or not self.volume.has_recovered:
            return False
        self.is_recovering = False
        self.volume.forget(list(self._changed))
        self._changed.clear()
        return True

    def begin_purges(self) -> list[list[Wait]]:
        """Take the purges that can be begun now, or have failed: a disk that was given
        up may never recover."""
        if self.is_recovering and self.health.state != "off" and self.volume.state != "closed":
            return []
        purges, self.purges = self.purges, []
        return purges

    @property
    def has_unsaved(self) -> bool:
        """Whether anything was written since the last snapshot."""
        return self.written_bytes > self._saved_bytes

    def save_index(self) -> None:
        """Begin a snapshot, if that saves anything."""
        if self.has_unsaved and self.is_writable:
            self._saved_bytes = self.written_bytes
            self.volume.snapshot()

    @property
    def is_writable(self) -> bool:
        """Whether it may be written, now or when it has recovered."""
        return self.health.state == "healthy" and not self.is_leaving and self.volume.state in ("recovering", "open")

    @property
    def takes_blocks(self) -> bool:
        """Whether blocks can be appended now. Not so before it knows that another disk
        was taken out, which may have older blocks of the same keys."""
        return self.is_writable and not self.traffic.hung and self.volume.membership >= self.awaited_membership

    @property
    def has_ended(self) -> bool:
        """Whether its volume does nothing any more, and no job is out."""
        return (self.has_failed or self.volume.state == "closed") and not self.traffic.is_busy

    def statistics(self) -> DiskStatistics:
        """Return the current figures."""
        return DiskStatistics(
            number=self.number,
            state=self.health.state,
            alarm=self.health.alarm,
            hung_jobs=len(self.traffic.hung),
            hangs=self.traffic.hangs,
            read_blocks=self.read_blocks,
            read_bytes=self.read_bytes,
            written_blocks=self.written_blocks,
            written_bytes=self.written_bytes,
            write_rate=self.write_rate,
            damaged_blocks=self.damaged_blocks,
            read_errors=self.health.read_errors,
            write_errors=self.health.write_errors,
            volume=self.volume.statistics(),
        )


class Place:
    """Where a block is: on which disk, and where there."""

    __slots__ = ("disk", "location")

    def __init__(self, disk: Disk, location: Location) -> None:
        self.disk = disk
        self.location = location

    def has_same_block(self, other: "Place") -> bool:
        """Whether the bytes at both places are the same, and what readers see of
        them."""
        one, two = self.location, other.location
        return (one.checksum, one.length, one.own_checksum) == (two.checksum, two.length, two.own_checksum)


class Disks:
    """All disks of a tier, in the order of their numbers."""

    def __init__(self) -> None:
        self._disks: list[Disk] = []

    def __iter__(self) -> Iterator[Disk]:
        return iter(self._disks)

    def __len__(self) -> int:
        return len(self._disks)

    def add(self, disk: Disk) -> None:
        """Add a disk."""
        self._disks.append(disk)

    def remove(self, disk: Disk) -> None:
        """Take a disk out."""
        self._disks.remove(disk)

    def of(self, number: int) -> Disk | None:
        """Return the disk of this number."""
        return next((disk for disk in self._disks if disk.number == number), None)

    def find(self, keys: Sequence[str]) -> list[Place | None]:
        """Return the place of each key; None for those that no disk can give."""
        places: list[Place | None] = [None] * len(keys)
        for disk in self._disks:
            if keys and disk.is_readable:
                for position, location in enumerate(disk.volume.find(keys)):
                    if location is not None:
                        places[position] = Place(disk, location)
        return places

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Return for each key whether `find` finds it."""
        found = [False] * len(keys)
        for disk in self._disks:
            if keys and disk.is_readable:
                found = [one or other for one, other in zip(found, disk.volume.contains(keys), strict=True)]
        return found

    def replaced_first(self, keys: list[str]) -> list[str]:
        """Return the keys in this order, but first those of which a disk has a block
        that counts no more."""
        known = [False] * len(keys)
        for disk in self._disks:
            known = [one or other for one, other in zip(known, disk.volume.is_known(keys), strict=True)]
        found = self.contains(keys)
        replaced = {key for key, was, there in zip(keys, known, found, strict=True) if was and not there}
        return sorted(keys, key=lambda key: key not in replaced)

    def stop_overwriting(self) -> None:
        """Overwrite nothing on any disk from now on."""
        for disk in self._disks:
            disk.volume.stop_overwriting()

    def forget(self, keys: Iterable[str]) -> None:
        """Let no disk have these keys."""
        forgotten = list(keys)
        for disk in self._disks:
            disk.volume.forget(forgotten)

    def note_changes(self, keys: Sequence[str]) -> None:
        """Note keys that were put or removed."""
        for disk in self._disks:
            disk.note_changes(keys)

    def note_reads(self, places: Iterable[tuple[str, Place]]) -> None:
        """Count a read of each key where it is."""
        by_disk: dict[Disk, list[str]] = {}
        for key, place in places:
            by_disk.setdefault(place.disk, []).append(key)
        for disk, keys in by_disk.items():
            disk.volume.note_reads(keys)
