"""A runner of jobs whose disks fail as told: errors, short transfers, rot, hangs."""

import errno
import os
import select
import threading
from collections.abc import Callable, Iterable
from typing import TypeAlias

import attrs

from infinistore.disk.jobs import Job, ReadInto, Result, Write, file_bytes
from infinistore.disk_io import DiskFolder, DiskRunner, RunnerStatistics

__all__ = ["Fail", "Fault", "FaultyRunner", "Hang", "Rot", "Short"]


@attrs.frozen
class Fail:
    """The job does nothing, and ends in this error: EIO, ENOSPC, ..."""

    errno: int = errno.EIO


@attrs.frozen
class Short:
    """A read or write is carried out for its first `views` views only.

    A read ends there, as at the end of a file. A write ends in ENOSPC.
    """

    views: int = 0


@attrs.frozen
class Rot:
    """A read flips a bit in each view, after it was hashed or not."""


@attrs.frozen
class Hang:
    """The job does not end before `FaultyRunner.end_hangs`; then it is carried out."""


Fault: TypeAlias = Fail | Short | Rot | Hang


class FaultyRunner(DiskRunner):
    """Passes jobs on to `runner`, except those for which `fault_of` has a fault."""

    def __init__(self, runner: DiskRunner, fault_of: Callable[[Job], Fault | None]) -> None:
        self.fault_of = fault_of
        self._runner = runner
        self._lock = threading.Lock()
        self._own = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._either = select.epoll()
        self._either.register(runner.fd, select.EPOLLIN)
        self._either.register(self._own, select.EPOLLIN)
        self.fd = self._either.fileno()
        self._answers: list[Result] = []
        self._hanging: list[Job] = []
        self._short: dict[Job, tuple[Job, Result]] = {}
        """For a job that was passed on in part: the whole one, and how it ends."""
        self._rotten: set[Job] = set()

    def add(self, volume: int, folder: DiskFolder) -> None:
        """Serve a disk."""
        self._runner.add(volume, folder)

    def submit(self, jobs: Iterable[Job]) -> None:
        """Begin jobs, or let them fail."""
        passed_on: list[Job] = []
        with self._lock:
            for job in jobs:
                match self.fault_of(job):
                    case None:
                        passed_on.append(job)
                    case Fail(errno=code):
                        self._answers.append(Result(job, code))
                    case Hang():
                        self._hanging.append(job)
                    case Rot():
                        self._rotten.add(job)
                        passed_on.append(job)
                    case Short(views=views) if isinstance(job, ReadInto | Write):
                        part = attrs.evolve(job, views=job.views[:views])
                        count = file_bytes(part.views)
                        if isinstance(part, ReadInto):
                            part = attrs.evolve(
                                part, hash_lengths=part.hash_lengths[:views], blocks=part.blocks[:views]
                            )
                        code = 0 if isinstance(job, ReadInto) else errno.ENOSPC
                        self._short[part] = (job, Result(job, code, count))
                        passed_on.append(part)
                    case fault:
                        raise AssertionError(f"{fault} does not apply to {job}")
            if self._answers:
                os.eventfd_write(self._own, 1)
        self._runner.submit(passed_on)

    def take(self) -> list[Result]:
        """Return the results since the last call."""
        with self._lock:
            if self._answers:
                os.eventfd_read(self._own)
            results, self._answers = self._answers, []
            for result in self._runner.take():
                job = result.job
                if job in self._short:
                    whole, instead = self._short.pop(job)
                    missing = len(whole.hash_lengths) - len(result.checksums) if isinstance(whole, ReadInto) else 0
                    results.append(attrs.evolve(instead, checksums=[*result.checksums, *[0] * missing]))
                elif job in self._rotten:
                    self._rotten.remove(job)
                    assert isinstance(job, ReadInto)
                    for view in job.views:
                        view[len(view) // 2] ^= 1
                    results.append(attrs.evolve(result, checksums=[checksum ^ 1 for checksum in result.checksums]))
                else:
                    results.append(result)
        return results

    def end_hangs(self) -> None:
        """Let what hangs be carried out."""
        with self._lock:
            hanging, self._hanging = self._hanging, []
        self._runner.submit(hanging)

    def hanging(self) -> list[Job]:
        """Return the jobs that hang."""
        return list(self._hanging)

    def statistics(self) -> dict[int, RunnerStatistics]:
        """Return what there is to do now."""
        return self._runner.statistics()

    def close(self, *, timeout_s: float) -> bool:
        """Close the runner that it stands for; False if jobs hang."""
        ended = self._runner.close(timeout_s=timeout_s) and not self._hanging
        if not self._either.closed:
            self._either.close()
            os.close(self._own)
        return ended
