"""Waits: what a request waits for while the disks work, without waiting itself; and
what the tier answers to requests.

Whoever asked looks at `settled`, or gives a function that is called when it becomes
true. A wait has a deadline and is settled by then, whatever the disks do. To forget a
wait releases nothing that a disk still reads or writes.
"""

import heapq
from collections.abc import Callable
from itertools import count

import attrs

from infinistore.errors import DeadlineExceeded, DiskFailed


class Wait:
    """Something that will be settled, by its deadline at the latest.

    It consists of `pending` parts, one for each key or disk; without parts it is
    settled from the start.
    """

    __slots__ = ("_failure", "_is_late", "_on_settled", "deadline", "pending", "settled", "unmet")

    def __init__(self, deadline: float, pending: int = 0, unmet: int = 0) -> None:
        self.deadline = deadline
        """When it is settled at the latest, on the tier's clock."""
        self.pending = pending
        """Parts whose end is not known yet."""
        self.unmet = unmet
        """Parts that did not get what was asked for: not read, not durable, or without
        a durable tombstone. Final once settled."""
        self.settled = not pending
        self._on_settled: Callable[[], object] | None = None
        self._is_late = False
        self._failure = ""

    def when_settled(self, call: Callable[[], object]) -> None:
        """Call this once, when the wait is settled: now, if it is already."""
        if self.settled:
            call()
        else:
            self._on_settled = call

    def check(self, *, in_time: bool = False) -> None:
        """Of a settled wait: raise `DiskFailed` if the disks failed meanwhile; with
        `in_time`, also if a part is unmet, and `DeadlineExceeded` if the disks did not
        answer by its deadline."""
        if self._failure:
            raise DiskFailed(self._failure)
        if in_time and self._is_late:
            raise DeadlineExceeded(
                "a disk did not make it durable in time: after a crash, what was deleted may be back; see the disk's"
                " state in the statistics, and call again"
            )
        if in_time and self.unmet:
            raise DiskFailed(
                "it is done in memory and where disks take it, but one cannot be written: when that is opened again,"
                " what was deleted may be back; see the disk's state in the statistics, and call again then"
            )

    def end(self, *, met: bool, parts: int = 1) -> None:
        """Note how parts ended. For the tier."""
        if not self.settled:
            self.pending -= parts
            self.unmet += 0 if met else parts
            if self.pending <= 0:
                self._settle()

    def expire(self) -> None:
        """Settle it as it is; what is still pending is unmet. For the tier."""
        if not self.settled:
            self._is_late = True
            self._give_up()

    def fail(self, why: str) -> None:
        """Settle it because the disks failed. For the tier."""
        if not self.settled:
            self._failure = why
            self._give_up()

    def _give_up(self) -> None:
        self.unmet += self.pending
        self.pending = 0
        self._settle()

    def _settle(self) -> None:
        self.settled = True
        call, self._on_settled = self._on_settled, None
        if call is not None:
            call()


class Waits:
    """The waits of one tier that are not settled, by deadline."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Wait]] = []
        self._numbers = count()

    def add(self, wait: Wait) -> Wait:
        """Expire a wait when its time has come; returns it."""
        if not wait.settled:
            heapq.heappush(self._heap, (wait.deadline, next(self._numbers), wait))
        return wait

    def expire(self, now: float) -> None:
        """Settle what is late."""
        while self._heap and (self._heap[0][0] <= now or self._heap[0][2].settled):
            heapq.heappop(self._heap)[2].expire()

    def fail(self, why: str) -> None:
        """Settle all."""
        waits, self._heap = self._heap, []
        for _, _, wait in waits:
            wait.fail(why)

    def next_deadline(self) -> float | None:
        """Return when the next one is late."""
        while self._heap and self._heap[0][2].settled:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None


@attrs.frozen
class PrefixMatch:
    """How much of a prefix the two tiers have."""

    matched: int
    """Leading keys that are in memory or on disk."""
    in_memory: int
    """How many of these are in memory."""
    hold_id: int = 0
    """The hold on all of them; 0 if none was asked for, or nothing matched."""


@attrs.frozen
class Prefetch:
    """What a prefetch does from now on, in the background."""

    reading: int
    """Keys that are being read, heads first."""
    skipped: int
    """Keys on disk that are not, because prefetches have a bounded part of the pool."""
    hold_id: int = 0
    """The hold on all of them that exist; 0 if there is none."""


@attrs.frozen
class Deletion:
    """What a deletion removed, and when that is durable."""

    deleted: int
    """Keys that were there, in either tier."""
    wait: Wait
    """Settled when none can come back after a crash; keys that may be are `unmet`."""
