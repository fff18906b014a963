"""Outcomes: what becomes of disks, and of what they were asked to write.

Whose batch ended is told so; a disk that recovered begins, one that fails is given up,
one that is to go is taken out when nothing of it is under way any more.
"""

from infinistore.disk.deletions import Deletions
from infinistore.disk.demotion import Demotion
from infinistore.disk.disks import Disk, Disks, Membership
from infinistore.disk.reinsertion import Reinsertion
from infinistore.disk.volume import Durable, Lost, Reclaim, Shrunk
from infinistore.disk.waits import Wait

__all__ = ["Outcomes"]


class Outcomes:
    """What becomes of the disks of one tier."""

    def __init__(
        self,
        disks: Disks,
        *,
        demotion: Demotion,
        deletions: Deletions,
        reinsertion: Reinsertion,
        membership: Membership,
    ) -> None:
        self._disks = disks
        self._demotion = demotion
        self._deletions = deletions
        self._reinsertion = reinsertion
        self._membership = membership
        self._purges: dict[tuple[Disk, int], list[Wait]] = {}
        self._given_up: set[Disk] = set()
        self._leaving: dict[Disk, list[Wait]] = {}
        self._failed: list[Disk] = []

    @property
    def is_purging(self) -> bool:
        """Whether a purge is not durable yet."""
        return bool(self._purges)

    @property
    def has_failure(self) -> bool:
        """Whether a disk has failed that is not given up yet."""
        return any(disk.has_failed and disk not in self._given_up for disk in self._disks)

    def step(self, disk: Disk, now: float) -> bool:
        """Let a volume work, and act on what became of it; return whether there is
        more to do now."""
        has_more = disk.step()
        for event in disk.events():
            has_more = True
            if isinstance(event, Reclaim):
                self._reinsertion.begin(disk, event)
            elif isinstance(event, Shrunk):
                disk.health.shrank(event.errno)
            else:
                self._ended(disk, event, now)
        has_recovered = disk.has_recovered()
        for waits in disk.begin_purges():
            self._begin_purge(disk, waits)
        if has_recovered:  # one that is purged first belongs to the others not before that is durable
            self._membership.recovered()
        if disk.volume.state == "read-only" and disk.health.state == "healthy":
            disk.health.refused(disk.volume.errno)
        if disk.health.state != "healthy" and disk not in self._given_up:
            disk.volume.stop_writing()
            self._give_up(disk)
            if disk.has_failed:
                self._take_out_failed(disk)
            has_more = True
        return has_more

    def shown(self) -> list[Disk]:
        """Return the disks to be shown, with those that failed."""
        return sorted([*self._disks, *self._failed], key=lambda disk: disk.number)

    def _take_out_failed(self, disk: Disk) -> None:
        """Have a disk taken out whose volume will tell no more how anything ended."""
        disk.is_leaving = True
        for key in [key for key in self._purges if key[0] is disk]:
            self._end(disk, self._purges.pop(key), met=False)
        self._leaving.setdefault(disk, [])

    def remove(self, disk: Disk, wait: Wait) -> None:
        """Take a disk out, as soon as nothing of it is under way."""
        disk.is_leaving = True
        self._give_up(disk)
        disk.volume.close()
        self._leaving.setdefault(disk, []).append(wait)

    def purge(self, waits: list[Wait]) -> None:
        """Purge every disk, or have it purged when it has recovered. What a failed one
        has may be back when it is opened again."""
        for disk in self._failed:
            self._end(disk, waits, met=False)
        for disk in self._disks:
            disk.purges.append(waits)
            for ready in disk.begin_purges():
                self._begin_purge(disk, ready)

    def _give_up(self, disk: Disk) -> None:
        if disk not in self._given_up:
            self._given_up.add(disk)
            self._demotion.give_up(disk)
            self._deletions.give_up(disk)
            self._membership.exclude(disk)

    def take_out(self) -> bool:
        """Forget the disks that were to go, and have ended; return whether there were
        any: what waited for them goes elsewhere."""
        ended = [one for one in self._leaving if one.has_ended]
        for disk in ended:
            self._disks.remove(disk)
            if disk.has_failed:
                self._failed.append(disk)
            self._demotion.remove(disk)
            self._deletions.remove(disk)
            self._reinsertion.remove(disk)
            for wait in self._leaving.pop(disk):
                wait.end(met=True)
        return bool(ended)

    def _ended(self, disk: Disk, event: Durable | Lost, now: float) -> None:
        waits = self._purges.pop((disk, event.token), None)
        met = isinstance(event, Durable)
        if isinstance(event, Lost):
            disk.health.write_failed(event.errno, now)
        if waits is not None:
            self._end(disk, waits, met=met)
        elif not self._reinsertion.ended(disk, event.token):
            for part in (self._demotion, self._deletions):
                if part.durable(disk, event.token, now) if met else part.lost(disk, event.token):
                    break

    def _begin_purge(self, disk: Disk, waits: list[Wait]) -> None:
        if disk.health.state == "off" or disk.volume.state in ("closing", "closed"):
            self._end(disk, waits, met=False)
        else:
            self._purges[disk, disk.volume.purge()] = waits

    def _end(self, disk: Disk, waits: list[Wait], *, met: bool) -> None:
        """End a purge on a disk. It does not matter where that will be emptied."""
        for wait in waits:
            wait.end(met=met or not self._membership.counts(disk))
