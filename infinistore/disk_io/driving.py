"""Running work in steps to its end, for a caller that waits."""

import select
from collections.abc import Sequence
from typing import TypeVar

from infinistore.disk.jobs import WAIT, Job, Result, Steps
from infinistore.disk_io.runner import DiskRunner

__all__ = ["run_steps"]

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
