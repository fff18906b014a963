"""Admission: which blocks are to be written, and when; the queue before the disks.

The queue is the journal's order: heads of prefixes come before their tails. It is
bounded: a batch that is due while too much waits already is skipped as a whole. So the
newest batch goes without a copy, which is the tail of what was put last, and the heads
before it keep theirs.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import attrs

from infinistore.core import Pool
from infinistore.core.index import NO_CHECKSUM, Entry, checksum_of, length_of
from infinistore.disk.jobs import aligned
from infinistore.disk.settings import Admission

__all__ = ["AdmissionQueue", "Run", "run_of", "same_block"]

_AGE_RATIO: Final = 1 / 4


@attrs.frozen(eq=False)
class Run:
    """Blocks to be written, in commit order."""

    keys: Sequence[str]
    entries: Sequence[Entry]
    bytes: int
    """What they take on a disk, with padding."""
    attempts: int = 0
    """How often it was tried in vain."""
    urgent: bool = False
    """Somebody waits for it."""

    def split(self, most_bytes: int, most_blocks: int) -> "tuple[Run, Run | None]":
        """Return the leading blocks within these bounds, at least one, and the rest."""
        count = total = 0
        for entry in self.entries[:most_blocks]:
            if count and total + aligned(length_of(entry)) > most_bytes:
                break
            count += 1
            total += aligned(length_of(entry))
        if count == len(self.entries):
            return self, None
        first = attrs.evolve(self, keys=self.keys[:count], entries=self.entries[:count], bytes=total)
        rest = attrs.evolve(self, keys=self.keys[count:], entries=self.entries[count:], bytes=self.bytes - total)
        return first, rest


def run_of(keys: Sequence[str], entries: Sequence[Entry], *, attempts: int = 0, urgent: bool = False) -> Run:
    """Make a run of blocks."""
    return Run(keys, entries, sum(aligned(length_of(entry)) for entry in entries), attempts, urgent)


def same_block(entry: Entry, length: int, checksum: int) -> bool:
    """Whether a block in memory is known to equal one elsewhere."""
    return length_of(entry) == length and checksum_of(entry) == checksum != NO_CHECKSUM


class AdmissionQueue:
    """The runs of one tier that wait: to age in this pool, or for a disk.

    `most_bytes` returns how much may be due and wait at a time.
    """

    def __init__(self, admission: Admission, pool: Pool, most_bytes: Callable[[], float]) -> None:
        self.due: deque[Run] = deque()
        """What is to be written, oldest first; what is urgent before all others."""
        self.due_bytes = 0
        self.ageing_bytes = 0
        """What was put and is not due yet."""
        self.skipped_blocks = 0
        """Blocks that were due and not queued, because too much waited already."""
        self.skipped_bytes = 0
        self._admission = admission
        self._pool = pool
        self._most_bytes = most_bytes
        self._ageing: deque[tuple[int, Run]] = deque()
        self._put_bytes = 0

    def pass_by(self, entries: Sequence[Entry]) -> None:
        """Note blocks that came into the pool and are not to be written: what was put
        before them is older now."""
        self._put_bytes += self._pool.footprints(list(map(length_of, entries)))
        while self._ageing and self._put_bytes - self._ageing[0][0] >= _AGE_RATIO * self._pool.capacity_bytes:
            run = self._ageing.popleft()[1]
            self.ageing_bytes -= run.bytes
            self._make_due(run)

    def put(self, keys: Sequence[str], entries: Sequence[Entry]) -> None:
        """Take blocks that were put."""
        run = run_of(keys, entries)
        if self._admission == "eager":
            self._make_due(run)
        elif self._admission == "lazy":
            self.pass_by(entries)
            self._ageing.append((self._put_bytes, run))
            self.ageing_bytes += run.bytes

    def read(self, keys: Sequence[str], entries: Sequence[Entry]) -> None:
        """Take blocks that were read, and that no disk has."""
        if self._admission == "second-use":
            self._make_due(run_of(keys, entries))

    def put_back(self, run: Run) -> None:
        """Queue a run again, before all others: it could not be written."""
        self.due.appendleft(run)
        self.due_bytes += run.bytes

    def take(self, most_bytes: int, most_blocks: int) -> Run | None:
        """Take the leading blocks that are due, of one run; None if there are none."""
        if not self.due:
            return None
        run, rest = self.due.popleft().split(most_bytes, most_blocks)
        if rest is not None:
            self.due.appendleft(rest)
        self.due_bytes -= run.bytes
        return run

    def stop_ageing(self) -> None:
        """Make everything due, however much that is."""
        for _, run in self._ageing:
            self.due.append(run)
            self.due_bytes += run.bytes
        self._ageing.clear()
        self.ageing_bytes = 0

    def clear(self) -> None:
        """Forget everything."""
        self.due.clear()
        self._ageing.clear()
        self.due_bytes = self.ageing_bytes = 0

    def _make_due(self, run: Run) -> None:
        if self.due and self.due_bytes + run.bytes > self._most_bytes():
            self.skipped_blocks += len(run.keys)
            self.skipped_bytes += run.bytes
        else:
            self.due.append(run)
            self.due_bytes += run.bytes
