"""Jobs: what the tier asks of a disk, as data, and what comes back; and longer work,
which asks for jobs step by step.

A job names a disk by its number in the tier, and a file in the folder of that disk:
`segments/17`, `snapshot` or `disk` (the superblock). Whoever runs a job answers it with
exactly one `Result`, however late. Jobs compare and hash by identity.

What a runner has to know:

- Offsets in files are multiples of `ALIGNMENT_BYTES`. The views of a job lie one after
  the other in the file, each from a multiple of `ALIGNMENT_BYTES` on. After a view
  whose length is no such multiple, there is padding up to the next: zeros when it is
  written, anything when it is read. O_DIRECT takes addresses and lengths that are such
  multiples; a runner copies what is not by a bounce buffer.
- Jobs have no order but what their results give: two that are under way at a time do
  not depend on each other.
- A view belongs to the job until its result is handed in, also if nobody waits for it
  any more. So a job is never answered before the kernel has returned.
- A runner repeats calls that are interrupted or short. Nothing else is ever repeated:
  above all not a flush that failed, because the kernel forgets what it could not write.

Longer work of a volume is done in generators, whose steps take a few milliseconds each.
A generator yields a list of jobs and is sent their results, in the same order; an empty
list is a pause. It yields WAIT to be asked again after something has changed (`poke`).
"""

from collections import deque
from collections.abc import Generator, Sequence
from typing import Any, Final, Literal, TypeAlias, TypeVar

import attrs

ALIGNMENT_BYTES = 4096
"""What offsets in files, and with O_DIRECT addresses and lengths, are multiples of."""


def aligned(length_bytes: int) -> int:
    """Return a length rounded up to a multiple of `ALIGNMENT_BYTES`."""
    return -(-length_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def file_bytes(views: Sequence[memoryview]) -> int:
    """Return how many bytes of a file the views of a job take, with their padding."""
    return sum(aligned(len(view)) for view in views)


@attrs.frozen(eq=False)
class ReadInto:
    """Read from a file into views (writable, format "B"), and hash what was read.

    A file that ends before the last view is full is a short read, and no error: see
    `Result.transferred_bytes`.
    """

    volume: int
    file: str
    offset: int
    views: Sequence[memoryview] = attrs.field(repr=False)
    hash_lengths: Sequence[int] = attrs.field(default=(), repr=False)
    """If not empty, a number for each view: hash so many of its bytes, the first ones
    (xxh3-64), right where they were read. The hashes are `Result.checksums`; 0 for a
    view that was not read in full."""
    blocks: Sequence[memoryview | None] = attrs.field(default=(), repr=False)
    """If not empty, for each view None, or where the compressed block goes that is in
    it. It is decompressed right after it was read, and then its hash is that of the
    block, whatever `hash_lengths` says; 0 if it is damaged."""


@attrs.frozen(eq=False)
class Write:
    """Write views (format "B") to a file; their padding becomes zeros."""

    volume: int
    file: str
    offset: int
    views: Sequence[memoryview] = attrs.field(repr=False)


@attrs.frozen(eq=False)
class HashBlocks:
    """Hash each view (xxh3-64) into `Result.checksums`, in a thread."""

    volume: int
    views: Sequence[memoryview] = attrs.field(repr=False)


@attrs.frozen(eq=False)
class Compress:
    """Compress each view into `Result.compressed`, in a thread."""

    volume: int
    views: Sequence[memoryview] = attrs.field(repr=False)


@attrs.frozen(eq=False)
class Flush:
    """Make what was written durable (fdatasync). Never repeated after a failure."""

    volume: int
    file: str


@attrs.frozen(eq=False)
class Allocate:
    """Create a file durably, and preallocate `length_bytes` of it."""

    volume: int
    file: str
    length_bytes: int


@attrs.frozen(eq=False)
class Replace:
    """Write a file anew in one step: under another name, flushed, and renamed."""

    volume: int
    file: str
    views: Sequence[memoryview] = attrs.field(repr=False)
    """Its contents, one after the other without padding."""


@attrs.frozen(eq=False)
class WriteSuperblock:
    """Write one of the two copies of the superblock, and make it durable."""

    volume: int
    copy: int
    """Which copy, 0 or 1 in turn, so that one is whole; at `copy * ALIGNMENT_BYTES`."""
    data: bytes = attrs.field(repr=False)
    """At most `ALIGNMENT_BYTES`."""


Job: TypeAlias = ReadInto | Write | HashBlocks | Compress | Flush | Allocate | Replace | WriteSuperblock


@attrs.frozen(eq=False)
class Result:
    """What became of a job."""

    job: Job
    errno: int = 0
    """0 if it was done, else why not, as in `errno`: EIO, ENOSPC, ENOENT, EROFS, and
    ENOMEM where the runner itself had no memory."""
    transferred_bytes: int = 0
    """Of a read or write: how many bytes of the file were read or written, padding
    included. Of a read without error, fewer than asked for mean that the file ends
    there."""
    checksums: Sequence[int] = attrs.field(default=(), repr=False)
    """The hashes that the job asked for."""
    compressed: Sequence[bytes | None] = attrs.field(default=(), repr=False)
    """The blocks that were compressed; None for one that is not worth it."""


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
        """New jobs, from where their runner takes them."""
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
