"""Longer work of a volume, in generators that are advanced step by step.

A step takes a few milliseconds.

A generator yields a list of jobs and is sent their results, in the same order; an empty
list is a pause. It yields WAIT to be asked again after something has changed (`poke`).
"""

from collections import deque
from collections.abc import Generator, Sequence
from typing import Any, Final, Literal, TypeAlias, TypeVar

from infinistore.disk.jobs import Job, Result

__all__ = ["PAUSE", "WAIT", "Steps", "Tasks"]

_Returned = TypeVar("_Returned")

WAIT: Final = "wait"
PAUSE: Final[Sequence[Job]] = ()
Steps: TypeAlias = Generator[Sequence[Job] | Literal["wait"], list[Result], _Returned]


class _Task:
    def __init__(self, steps: Steps[Any]) -> None:
        self.steps = steps
        self.jobs: Sequence[Job] = ()
        self.results: dict[Job, Result] = {}
        self.begun = False

    @property
    def ready(self) -> bool:
        return len(self.results) == len(self.jobs)


class Tasks:
    """The tasks of one volume. They take turns, one step each."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        """New jobs; whoever starts them takes them from here."""
        self._ready: deque[_Task] = deque()
        self._waiting: list[_Task] = []
        self._by_job: dict[Job, _Task] = {}

    def __len__(self) -> int:
        return len(self._ready) + len(self._waiting) + len({id(task) for task in self._by_job.values()})

    def start(self, steps: Steps[Any]) -> None:
        """Add a task. Its first step is taken in `step`."""
        self._ready.append(_Task(steps))

    def poke(self) -> None:
        """Ask the tasks that wait for something again."""
        self._ready.extend(self._waiting)
        self._waiting.clear()

    def done(self, result: Result) -> bool:
        """Take a result; return whether it is of a job of these tasks."""
        task = self._by_job.pop(result.job, None)
        if task is None:
            return False
        task.results[result.job] = result
        if task.ready:
            self._ready.append(task)
        return True

    def step(self) -> bool:
        """Advance one task by one step; return whether another can be advanced."""
        if self._ready:
            self._advance(self._ready.popleft())
        return bool(self._ready)

    def _advance(self, task: _Task) -> None:
        results = [task.results[job] for job in task.jobs]
        task.jobs, task.results = (), {}
        try:
            wanted = task.steps.send(results) if task.begun else next(task.steps)
        except StopIteration:
            self.poke()
            return
        task.begun = True
        if wanted == WAIT:
            self._waiting.append(task)
        elif wanted:
            task.jobs = wanted
            self._by_job.update(dict.fromkeys(wanted, task))
            self.jobs.extend(wanted)
        else:
            self._ready.append(task)
