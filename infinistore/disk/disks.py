"""The disks of one tier: each with its volume, its jobs, its health and its figures;
lookups in all.

A key is on one disk at a time: what replaces it, or hides it, goes to the disk that
could bring it back after a crash. So the newest record of a key needs to be known
within one disk only.

`Traffic` says which jobs of a disk may start now. Reads that somebody waits for come
before writes: while a disk has any, and a moment longer, it is written at a bounded
rate, one job at a time. This is the one place that does so. Measured: four writers at
full speed cut reads to a fifth; writers at 200 MB/s cost them nothing. What a volume
reads for itself, such as the footer of a segment that is to be overwritten, slows
nothing down: writing waits for it. A job that does not come back in time counts as
hung. While one hangs, the disk gets no others: they would hang, too, and block its
threads.

`Health` says what the errors of a disk mean for it. The log has what it becomes. A
single error costs what it hit. Repeated ones make a disk read-only, then turn it off;
so does at once what cannot pass, such as a device that is gone. It stays so until the
store is opened again, because somebody has to look at it: `alarm` says so.

`Disks` also knows which disks belong together: its members. Every disk keeps the number
of the last change of the set. It is raised when a store opens its disks, when one is
added, and when one is given up. A disk that comes back with a lower number may have
keys that were deleted or put again meanwhile, so it is purged before it is read.
"""

import errno
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Literal, TypeAlias, TypeVar

import attrs

from infinistore.disk.jobs import Job, Result, Write, file_bytes
from infinistore.disk.settings import TierSettings
from infinistore.disk.volume import Event, Location, Volume
from infinistore.disk.waits import Wait
from infinistore.statistics import DiskStatistics

_log: Final = logging.getLogger("infinistore.disk")

DiskState: TypeAlias = Literal["healthy", "read-only", "off"]

_WINDOW_S = 60.0
_MOST_WRITE_ERRORS = 3
_MOST_READ_ERRORS = 8
_MOST_HANGS = 3
_GONE = {errno.ENODEV, errno.ENXIO, errno.ESHUTDOWN}
_REMOVED = {errno.ENOENT, errno.ESTALE}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_NO_FAULT = {*_FULL, errno.ENOMEM}
_LOOK = "check it, replace it if need be"


class Health:
    """Counts the errors of one disk, which the log calls by its name."""

    def __init__(self, name: str = "") -> None:
        self._name = name
        self.state: DiskState = "healthy"
        self.alarm = ""
        """Why the disk is not healthy, or too small, and what to do; else empty."""
        self.read_errors = 0
        self.write_errors = 0
        self._recent: dict[str, deque[float]] = {kind: deque() for kind in ("read", "write", "hang")}

    def read_failed(self, code: int, now: float) -> None:
        """Note a read that ended with this errno."""
        self.read_errors += 1
        if code in _GONE:
            self._become("off", f"its device is gone ({errno.errorcode[code]})")
        elif self._often("read", _MOST_READ_ERRORS, now):
            self._become("off", f"{_MOST_READ_ERRORS} reads failed within {_WINDOW_S:g} s")

    def write_failed(self, code: int, now: float) -> None:
        """Note a batch that was lost because of this errno."""
        self.write_errors += 1
        if code in _GONE:
            self._become("off", f"its device is gone ({errno.errorcode[code]})")
        elif code == errno.EROFS:
            self._become("read-only", "its file system is read-only")
        elif code in _REMOVED:
            self._become("read-only", "its files were removed from its folder")
        elif code not in _NO_FAULT and self._often("write", _MOST_WRITE_ERRORS, now):
            self._become("read-only", f"{_MOST_WRITE_ERRORS} batches could not be written within {_WINDOW_S:g} s")

    def refused(self, code: int) -> None:
        """Note that a volume stopped to write because of this errno."""
        if code in _FULL:
            self._become("read-only", f"its file system is full ({errno.errorcode[code]})", "free some room")
        else:
            self._become("read-only", f"it refused to be written ({errno.errorcode.get(code, code)})")

    def shrank(self, code: int) -> None:
        """Note that the disk gave no room for another segment."""
        if self.state == "healthy":
            name = errno.errorcode.get(code, code)
            why = f"its file system is full ({name}); free some room" if code in _FULL else f"it gave no more ({name})"
            self._alarm("the disk has less room than it was given", f"{why}, and start the store again to get the rest")

    def hung(self, now: float) -> None:
        """Note a time at which jobs hang."""
        if self._often("hang", _MOST_HANGS, now):
            self._become("off", f"it hung {_MOST_HANGS} times within {_WINDOW_S:g} s")

    def failed(self, error: Exception) -> None:
        """Note an error of the store itself."""
        self._become("off", f"an internal error ({type(error).__name__}: {error}), which the log has")

    def _often(self, kind: str, most: int, now: float) -> bool:
        recent = self._recent[kind]
        recent.append(now)
        while recent[0] < now - _WINDOW_S:
            recent.popleft()
        return len(recent) >= most

    def _become(self, state: DiskState, why: str, remedy: str = _LOOK) -> None:
        order = ("healthy", "read-only", "off")
        if order.index(state) > order.index(self.state):
            self.state = state
            self._alarm(f"the disk is {state}", f"{why}; {remedy}, and start the store again")

    def _alarm(self, what: str, why: str) -> None:
        self.alarm = f"{what}: {why}"
        _log.warning(what, extra={"disk": self._name, "problem": why})


Ended: TypeAlias = Callable[[Result], object]
TimedOut: TypeAlias = Callable[[], object]

_MOST_WRITES = 4
_READS_LINGER_S = 0.05  # between two reads of one request, writers do not come back at full speed


@attrs.define(eq=False)
class _Task:
    job: Job
    ended: Ended
    timed_out: TimedOut | None
    is_before_writes: bool
    deadline: float = 0.0


class Traffic:
    """The jobs of one disk. Each ends with one call of its `ended`."""

    def __init__(self, settings: TierSettings) -> None:
        self.reads = 0
        """Reads before writes that were started and have not ended."""
        self.hung: dict[Job, Ended] = {}
        """Jobs that did not come back in time, and are still out."""
        self.hangs = 0
        """Jobs that did not come back in time, since the start."""
        self.on_hang: Callable[[], object] | None = None
        """Called after a job was found to hang."""
        self._settings = settings
        self._waiting: deque[_Task] = deque()
        self._waiting_writes: deque[_Task] = deque()
        self._under_way: dict[Job, _Task] = {}
        self._writes = 0
        self._beside_reads_until = 0.0
        self._next_write_at = 0.0

    def start(self, job: Job, ended: Ended, timed_out: TimedOut | None = None, *, before_writes: bool = False) -> None:
        """Start a job when it is its turn; with `before_writes`, writes make way for
        it.

        `timed_out` is called if it hangs. `ended` is called in any case, when it is
        back: only then are its views free.
        """
        task = _Task(job, ended, timed_out, before_writes)
        self.reads += before_writes
        (self._waiting_writes if isinstance(job, Write) else self._waiting).append(task)

    def take(self, now: float) -> list[Job]:
        """Return the jobs to start now, after telling of those that hang."""
        self._time_out(now)
        if self.hung:
            return []
        deadline = now + self._settings.hang_s
        tasks = list(self._waiting)
        self._waiting.clear()
        if self.reads:
            self._beside_reads_until = now + _READS_LINGER_S
        while (write := self._next_write(now)) is not None:
            self._writes += 1
            tasks.append(write)
        for task in tasks:
            task.deadline = deadline
            self._under_way[task.job] = task
        return [task.job for task in tasks]

    def done(self, result: Result) -> None:
        """Take a result."""
        job = result.job
        task = self._under_way.pop(job, None)
        if task is not None:
            self._count_off(task)
            task.ended(result)
        elif job in self.hung:
            self.hung.pop(job)(result)

    def fail_waiting(self, code: int) -> bool:
        """End what has not begun with this errno; return whether there was any."""
        waiting = [*self._waiting, *self._waiting_writes]
        self._waiting.clear()
        self._waiting_writes.clear()
        for task in waiting:
            self.reads -= task.is_before_writes
            task.ended(Result(task.job, code))
        return bool(waiting)

    def next_deadline(self) -> float | None:
        """Return when `take` has something to do at the latest."""
        started = next(iter(self._under_way.values()), None)  # the oldest: all have the same time
        times = [] if started is None else [started.deadline]
        if self._waiting_writes and not self.hung and self._writes == 0:
            times.append(min(self._next_write_at, self._beside_reads_until) if not self.reads else self._next_write_at)
        return min(times, default=None)

    @property
    def is_busy(self) -> bool:
        """Whether any job is under way, or hangs."""
        return bool(self._under_way or self.hung)

    @property
    def has_waiting(self) -> bool:
        """Whether `take` would return jobs, apart from writes that keep a rate."""
        return bool(self._waiting) and not self.hung

    def _next_write(self, now: float) -> _Task | None:
        if not self._waiting_writes:
            return None
        if self.reads or now < self._beside_reads_until:
            if self._writes or now < self._next_write_at:
                return None
            job = self._waiting_writes[0].job
            assert isinstance(job, Write)
            self._next_write_at = now + file_bytes(job.views) / self._settings.write_rate_beside_reads
        elif self._writes >= _MOST_WRITES:
            return None
        return self._waiting_writes.popleft()

    def _time_out(self, now: float) -> None:
        late = []
        for task in self._under_way.values():
            if task.deadline > now:
                break
            late.append(task)
        for task in late:
            del self._under_way[task.job]
            self._count_off(task)
            self.hung[task.job] = task.ended
            self.hangs += 1
        for task in late:
            if task.timed_out is not None:
                task.timed_out()
        if late and self.on_hang is not None:
            self.on_hang()

    def _count_off(self, task: _Task) -> None:
        self.reads -= task.is_before_writes
        self._writes -= isinstance(task.job, Write)


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
        self.stored_bytes = 0
        """What these take on it, with padding."""
        self.write_rate = 0.0
        """Its rate of late, in bytes per second; 0 if unknown."""
        self.purges: list[list[Wait]] = []
        """Purges that have to be begun, each with those who wait for it: a volume that
        recovers cannot be purged, and gives nothing meanwhile."""
        self.is_recovering = True
        """Whether it gives nothing yet, and takes nothing."""
        self.is_leaving = False
        """Whether it is being taken out."""
        self.has_failed = False
        """Whether its volume raised an unexpected error, so that it is not trusted."""
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
        """Note changed keys for a volume that recovers, to be forgotten then."""
        if self.is_recovering:
            self._changed.update(keys)

    def has_recovered(self) -> bool:
        """Return True once: when the volume has recovered, and forgotten changes."""
        if not self.is_recovering or not self.volume.has_recovered:
            return False
        self.is_recovering = False
        self.volume.forget(list(self._changed))
        self._changed.clear()
        return True

    def begin_purges(self) -> list[list[Wait]]:
        """Take the purges that can begin now, or have failed with the disk."""
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
        """Return the current figures, but for those of its folder and its jobs."""
        health, volume = self.health, self.volume.statistics()
        return DiskStatistics(
            path=self.volume.name,
            state="recovering" if volume.state == "recovering" and health.state == "healthy" else health.state,
            alarm=health.alarm,
            direct=False,
            capacity_bytes=volume.capacity_bytes,
            used_bytes=volume.used_bytes,
            keys=volume.records,
            index_bytes=volume.index_bytes,
            read_blocks=self.read_blocks,
            read_bytes=self.read_bytes,
            written_blocks=self.written_blocks,
            written_bytes=self.written_bytes,
            stored_bytes=self.stored_bytes,
            device_written_bytes=volume.written_bytes,
            queued_reads=0,
            queued_writes=0,
            hung_jobs=len(self.traffic.hung),
            damaged_blocks=self.damaged_blocks,
            read_errors=health.read_errors,
            write_errors=health.write_errors,
        )


class Place:
    """Where a block is: on which disk, and where there."""

    __slots__ = ("disk", "location")

    def __init__(self, disk: Disk, location: Location) -> None:
        self.disk = disk
        self.location = location

    def has_same_block(self, other: "Place") -> bool:
        """Whether both places have the same bytes, as readers see them."""
        one, two = self.location, other.location
        return (one.checksum, one.length, one.own_checksum) == (two.checksum, two.length, two.own_checksum)


class Disks:
    """All disks of a tier, in the order of their numbers."""

    def __init__(self) -> None:
        self._disks: list[Disk] = []
        self._members: list[Disk] = []
        self._newest_membership = 0

    def __iter__(self) -> Iterator[Disk]:
        return iter(self._disks)

    def __len__(self) -> int:
        return len(self._disks)

    def add(self, disk: Disk) -> None:
        """Add a disk; of two memberships, the disk with the lower one is purged."""
        self._disks.append(disk)
        known = disk.volume.membership
        if self._members and known != self._newest_membership:
            outdated = [disk] if known < self._newest_membership else self._members
            for one in outdated:
                one.purges.append([])
        self._members.append(disk)
        self._newest_membership = max(self._newest_membership, known)

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
        """Return the keys, those first of which a disk has an outdated block."""
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

    # Which disks belong together

    def recovered(self) -> None:
        """A disk has recovered; once all have, let the set begin anew."""
        if not any(one.is_recovering for one in self._members):
            self._raise_membership()

    def exclude(self, disk: Disk) -> None:
        """Give a disk up: what it has does not count when it comes back."""
        if disk in self._members:
            self._members.remove(disk)
            self._raise_membership()

    def counts(self, disk: Disk) -> bool:
        """Whether what a disk has may be there after a restart of the store."""
        return disk in self._members or all(one.volume.membership < self._newest_membership for one in self._members)

    def _raise_membership(self) -> None:
        self._newest_membership += 1
        for disk in self._members:
            disk.awaited_membership = self._newest_membership
            disk.volume.set_membership(self._newest_membership)
