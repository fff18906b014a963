"""Ends a call that another thread carries out."""

from typing import Any

from infinistore.client.connection.pool import ConnectionPool, Turns
from infinistore.client.connection.routing import ENDED, Attempt

__all__ = ["Ending"]


class Ending:
    """Of one call. It ends with an error of this package, soon: whatever it waits for
    is cut short, except for the moment in which it connects.
    """

    __slots__ = ("_at_work", "ended")

    def __init__(self) -> None:
        self.ended = False
        """Whether `end` was called."""
        self._at_work: tuple[Attempt, Turns, ConnectionPool[Any]] | None = None

    def begun(self, attempt: Attempt, turns: Turns, pool: ConnectionPool[Any]) -> None:
        """Say that the call begins, and what it may wait for."""
        self._at_work = attempt, turns, pool
        if self.ended:
            attempt.deadline = ENDED

    def end(self) -> None:
        """End the call, from any thread. After its end, this changes nothing that
        matters.
        """
        self.ended = True
        if self._at_work is not None:
            attempt, turns, pool = self._at_work
            attempt.deadline = ENDED
            turns.wake()
            pool.shut_down(attempt.turn)
