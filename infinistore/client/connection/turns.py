"""Limits how many calls of threads run at a time, and detects interrupted calls.

Ctrl-C, like any signal whose handler raises, may arrive between any two bytecodes, even
in a `finally`: what Python code takes and gives back can be lost. There is one
exception: a lock implemented in C and taken by `with` is released however its block is
left. So each call holds such a lock, its *turn*, which no thread waits for. A call
whose turn is not locked is over, whether it has reported so or not, and any thread may
give back what it had: the next call does.
"""

import queue
import threading
import time
from typing import Protocol

__all__ = ["Turn", "Turns", "new_turn"]

new_turn = threading.Lock
_LOOK_AGAIN_S = 1.0
"""An interrupted call may not have notified the waiting ones."""


class Turn(Protocol):
    """Something that is under way as long as it is locked."""

    def locked(self) -> bool:
        """Whether it is."""


class Limit(Protocol):
    """Until when a call may take."""

    deadline: float
    """On `time.monotonic`. Another thread may move it up, and wake the call."""


class Turns:
    """Limits the calls that run at a time; the others wait. Any thread may use it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self.under_way: dict[Turn, None] = {}
        self.waiting: dict[Turn, None] = {}
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()

    def begin(self, turn: Turn, limit: Limit) -> bool:
        """Wait until another call may begin. `turn` is its own, which it has locked.

        Returns whether an earlier call was found to have been interrupted.

        Raises:
            TimeoutError: the deadline has passed.
        """
        interrupted = False
        with self._lock:
            if self.under_way:  # usually by other threads
                interrupted = self._forget_interrupted()
            if len(self.under_way) < self._most:
                self.under_way[turn] = None
                return interrupted
        return self._wait(turn, limit) or interrupted

    def end(self, turn: Turn) -> None:
        """Say that a call is over, and was not interrupted."""
        self.under_way.pop(turn, None)
        if self.waiting:
            self.tell()

    @property
    def free(self) -> int:
        """How many calls could begin now."""
        with self._lock:
            self._forget_interrupted()
            return self._most - len(self.under_way)

    def wake(self) -> None:
        """Have all that wait look at their limits."""
        for _ in list(self.waiting):
            self._ended.put(None)

    def _wait(self, turn: Turn, limit: Limit) -> bool:
        self.waiting[turn] = None
        interrupted = False
        try:
            while True:
                with self._lock:
                    interrupted = self._forget_interrupted() or interrupted
                    if len(self.under_way) < self._most:
                        self.under_way[turn] = None
                        return interrupted
                left_s = limit.deadline - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError
                try:
                    self._ended.get(timeout=min(left_s, _LOOK_AGAIN_S))
                except queue.Empty:
                    continue
        finally:
            self.waiting.pop(turn, None)

    def _forget_interrupted(self) -> bool:
        """Forget the calls that ended without reporting it, under the lock."""
        # a copy, because others begin and end meanwhile
        found = [turn for turn in list(self.under_way) if not turn.locked()]
        for turn in found:
            self.under_way.pop(turn, None)
        return bool(found)

    def tell(self) -> None:
        """Wake one of the waiting calls."""
        with self._lock:
            for turn in [turn for turn in list(self.waiting) if not turn.locked()]:
                self.waiting.pop(turn, None)  # it was interrupted
            if self._ended.qsize() < len(self.waiting):
                self._ended.put(None)
