"""A bound on the memory for long request bodies while they arrive, for all connections
together.

A body that does not fit a connection's own buffer takes memory of its length. Clients
decide how many such bodies there are, so each one acquires a grant before the server
reads it, and waits if the budget is spent. Short bodies never wait. While somebody
waits, the server gives up a body that arrives too slowly: a body that was announced and
never sent blocks nobody for long. The shortest waiting body is granted first.
"""

import heapq
from collections.abc import Callable
from itertools import count
from typing import Final

import attrs
import trio

from infinistore.protocol.effects import LongBody

__all__ = ["BODY_BUDGET_BYTES", "BodyBudget", "BodyGrant"]

BODY_BUDGET_BYTES: Final = 128 * 1024 * 1024
_PATIENCE_S: Final = 1.0
_LEAST_BYTES_PER_S: Final = 64 * 1024


@attrs.define(eq=False)
class BodyGrant:
    """The memory for one body, until `BodyBudget.release`. `end` is called once if the
    server gives the body up.
    """

    body: LongBody
    end: Callable[[], None]
    granted: trio.Event = attrs.field(factory=trio.Event)
    ended: bool = False
    arrived_before: int = 0
    """How much had arrived at the last check, at `looked_at`."""
    looked_at: float = 0.0


class BodyBudget:
    """The memory that all connections share."""

    def __init__(self, budget_bytes: int = BODY_BUDGET_BYTES) -> None:
        self._budget_bytes = budget_bytes
        self._numbers = count()
        self._waiting: list[tuple[int, int, BodyGrant]] = []  # a heap
        self._grants: dict[BodyGrant, None] = {}  # a set, in the order in which they came
        self.taken_bytes = 0

    async def acquire(self, body: LongBody, end: Callable[[], None]) -> BodyGrant:
        """Wait until an announced body may be received."""
        grant = BodyGrant(body, end)
        entry = (body.length, next(self._numbers), grant)
        heapq.heappush(self._waiting, entry)
        self._grant()
        try:
            while not grant.granted.is_set():
                with trio.move_on_after(_PATIENCE_S) as scope:
                    await grant.granted.wait()
                if scope.cancelled_caught:
                    self._end_slow_ones()
        except BaseException:
            if entry in self._waiting:
                self._waiting.remove(entry)
                heapq.heapify(self._waiting)
            self.release(grant)
            raise
        return grant

    def release(self, grant: BodyGrant) -> None:
        """Give the memory back. Idempotent."""
        if grant in self._grants:
            del self._grants[grant]
            self.taken_bytes -= grant.body.length
            self._grant()

    def _grant(self) -> None:
        while self._waiting:
            length, _, grant = self._waiting[0]
            if self._grants and self.taken_bytes + length > self._budget_bytes:
                return
            heapq.heappop(self._waiting)
            self._grants[grant] = None
            self.taken_bytes += length
            grant.looked_at = trio.current_time()
            grant.granted.set()

    def _end_slow_ones(self) -> None:
        now = trio.current_time()
        for grant in list(self._grants):
            elapsed_s = now - grant.looked_at
            if elapsed_s < _PATIENCE_S or grant.ended:
                continue
            if grant.body.arrived - grant.arrived_before < elapsed_s * _LEAST_BYTES_PER_S:
                grant.ended = True
                grant.end()
            grant.arrived_before, grant.looked_at = grant.body.arrived, now
