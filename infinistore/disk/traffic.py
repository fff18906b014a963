"""The jobs of one disk: which may start now, which are under way, which hang.

Reads that somebody waits for come before writes: while a disk has any, and a moment
longer, it is written at a bounded rate, one job at a time. This is the one place that
does so. Measured: four writers at full speed cut reads to a fifth; writers at 200 MB/s
cost them nothing. What a volume reads for itself, such as the footer of a segment that
is to be overwritten, slows nothing down: writing waits for it.

A job that does not come back in time counts as hung. While one hangs, the disk gets no
others: they would hang, too, and block its threads.
"""

from collections import deque
from collections.abc import Callable
from typing import TypeAlias

import attrs

from infinistore.disk.jobs import Job, Result, Write, file_bytes
from infinistore.disk.settings import TierSettings

__all__ = ["Ended", "TimedOut", "Traffic"]

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
    """The jobs of one disk. Each ends with a call of its `ended`, once, with its
    result."""

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
        """Return the jobs to start now, after telling those that wait for one that
        hangs."""
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
        """End what has not been started, with this errno: the disk is given up. Return
        whether there was anything."""
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
