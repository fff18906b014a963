"""Waiting for the results of jobs, as an event loop would."""

import select
from collections.abc import Iterable

from infinistore.disk.jobs import Job, Result
from infinistore.disk_io import DiskRunner
from infinistore.disk_io.direct_io import aligned_memory

__all__ = ["is_woken", "memory_of", "run"]

_PATIENCE_S = 60


def run(runner: DiskRunner, jobs: Iterable[Job]) -> list[Result]:
    """Run jobs to their end, and return the results in the order of the jobs."""
    jobs = list(jobs)
    runner.submit(jobs)
    results: dict[Job, Result] = {}
    while len(results) < len(jobs):
        assert is_woken(runner, _PATIENCE_S), "the runner does not answer"
        for result in runner.take():
            assert result.job not in results, "answered twice"
            results[result.job] = result
    return [results[job] for job in jobs]


def is_woken(runner: DiskRunner, timeout_s: float = 0.0) -> bool:
    """Whether there are results to take, in time."""
    return bool(select.select([runner.fd], [], [], timeout_s)[0])


def memory_of(*blocks: bytes) -> list[memoryview]:
    """Blocks in pages of their own."""
    views = []
    for block in blocks:
        views.append(aligned_memory(max(1, len(block)))[: len(block)])
        views[-1][:] = block
    return views
