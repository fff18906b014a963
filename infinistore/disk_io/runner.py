"""The interface of what runs the jobs of the tier: given jobs, it answers with results.

Whoever drives a tier submits its jobs, waits until `fd` is readable, and takes the
results. That works in an event loop and with poll(2) alike. `run_steps` does it for a
caller that waits until the end.
"""

import select
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TypeVar

import attrs

from infinistore.disk.jobs import WAIT, Job, Result, Steps
from infinistore.disk_io.folder import DiskFolder


@attrs.frozen(kw_only=True)
class RunnerStatistics:
    """What a runner has to do for one disk."""

    direct: bool
    """Whether files are read and written past the page cache."""
    queued_reads: int
    """Reads that have not begun, in pieces."""
    queued_writes: int
    """The same of everything else."""
    running: int
    """What threads are at, hung ones included."""
    oldest_s: float
    """For how long the oldest of these has been running; 0 without any."""


class DiskRunner(ABC):
    """Runs jobs on disks, and answers each with one `Result`. Thread-safe."""

    fd: int
    """A descriptor that is readable while there are results to take."""

    @abstractmethod
    def add(self, volume: int, folder: DiskFolder) -> None:
        """Serve a disk from now on. The runner closes the folder at the end.

        Raises:
            StoreUnavailable: this process gets no more threads; the caller keeps the
                folder.
        """

    @abstractmethod
    def remove(self, volume: int, *, timeout_s: float) -> bool:
        """Serve a disk no longer: forget jobs that have not begun, wait for the others
        for `timeout_s`, and close the folder.

        Returns False if some of them hang. These still own the memory that they read
        or write; their results come when, and if, the kernel returns.
        """

    @abstractmethod
    def submit(self, jobs: Iterable[Job]) -> None:
        """Begin jobs. It neither blocks nor fails: what goes wrong is in their results.

        Jobs for a disk that is not served end in ENODEV.

        Raises:
            StoreUnavailable: the runner was closed, or the process is a forked child.
        """

    @abstractmethod
    def take(self) -> list[Result]:
        """Return the results since the last call; never blocks."""

    @abstractmethod
    def statistics(self) -> dict[int, RunnerStatistics]:
        """Return what there is to do now, by volume."""

    @abstractmethod
    def close(self, *, timeout_s: float) -> bool:
        """Remove all disks, and close `fd`; idempotent. Returns False as `remove`."""


_Returned = TypeVar("_Returned")


def run_steps(steps: Steps[_Returned], runner: DiskRunner) -> _Returned:
    """Run steps that need nothing but the results of their jobs, and return what they
    return. Nobody else may use the runner meanwhile.
    """
    try:
        wanted = next(steps)
        while True:
            if wanted == WAIT:
                raise RuntimeError("these steps wait for something that nobody else does")
            assert not isinstance(wanted, str)
            wanted = steps.send(_run(wanted, runner))
    except StopIteration as end:
        returned: _Returned = end.value
        return returned


def _run(jobs: Sequence[Job], runner: DiskRunner) -> list[Result]:
    runner.submit(jobs)
    results: dict[Job, Result] = {}
    while len(results) < len(jobs):
        select.select([runner.fd], [], [])
        results.update((result.job, result) for result in runner.take())
    return [results[job] for job in jobs]
