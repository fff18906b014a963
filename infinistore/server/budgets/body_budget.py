"""A bound on the memory for long request bodies while they arrive, for all connections
together.

A body that does not fit a connection's own buffer takes memory of its length. Clients
decide how many such bodies there are, so each one acquires a grant before the server
reads it, and waits if the budget is spent. Short bodies never wait. While somebody
waits, the server gives up bodies that arrive too slowly for their length: what was
announced and is not sent blocks nobody for long. The tenant that has least comes first,
and of its bodies the shortest.
"""

from collections import Counter
from collections.abc import Callable
from operator import itemgetter
from typing import Final

import attrs
import trio

from infinistore.protocol.effects import LongBody

__all__ = ["BODY_BUDGET_BYTES", "BodyBudget", "BodyGrant"]

BODY_BUDGET_BYTES: Final = 128 * 1024 * 1024
_PATIENCE_S: Final = 1.0
_LONGEST_S: Final = 8.0
_LEAST_BYTES_PER_S: Final = 64 * 1024


@attrs.define(eq=False)
class BodyGrant:
    """The memory for one body, until `BodyBudget.release`. `end` is called once if the
    server gives the body up.
    """

    body: LongBody
    end: Callable[[], None]
    tenant: str
    granted: trio.Event = attrs.field(factory=trio.Event)
    ended: bool = False
    arrived_before: int = 0
    """How much had arrived at the last check, at `looked_at`."""
    looked_at: float = 0.0


class BodyBudget:
    """The memory that all connections share. Each has one body at a time."""

    def __init__(self, budget_bytes: int = BODY_BUDGET_BYTES) -> None:
        self._budget_bytes = budget_bytes
        self._waiting: dict[BodyGrant, None] = {}  # sets, in the order in which they came
        self._grants: dict[BodyGrant, None] = {}
        self._of_tenants: Counter[str] = Counter()
        self.taken_bytes = 0

    async def acquire(self, body: LongBody, end: Callable[[], None], tenant: str = "") -> BodyGrant:
        """Wait until an announced body of a tenant may be received."""
        grant = BodyGrant(body, end, tenant)
        self._waiting[grant] = None
        self._grant()
        try:
            while not grant.granted.is_set():
                with trio.move_on_after(_PATIENCE_S) as scope:
                    await grant.granted.wait()
                if scope.cancelled_caught:
                    self._end_slow_ones()
        except BaseException:
            self._waiting.pop(grant, None)
            self.release(grant)
            raise
        return grant

    def release(self, grant: BodyGrant) -> None:
        """Give the memory back. Idempotent."""
        if grant in self._grants:
            del self._grants[grant]
            self._of_tenants[grant.tenant] -= grant.body.length
            if not self._of_tenants[grant.tenant]:
                del self._of_tenants[grant.tenant]
            self.taken_bytes -= grant.body.length
            self._grant()

    def _grant(self) -> None:
        while self._waiting:
            grant = min(self._waiting, key=lambda grant: (self._of_tenants[grant.tenant], grant.body.length))
            length = grant.body.length
            if self._grants and self.taken_bytes + length > self._budget_bytes:
                return
            del self._waiting[grant]
            self._grants[grant] = None
            self._of_tenants[grant.tenant] += length
            self.taken_bytes += length
            grant.looked_at = trio.current_time()
            grant.granted.set()

    def _end_slow_ones(self) -> None:
        """Give up bodies that are too slow, of the tenant that has most and the slowest
        first, until there will be room for all that wait."""
        now = trio.current_time()
        slow: list[tuple[int, float, BodyGrant]] = []
        for grant in self._grants:
            elapsed_s = now - grant.looked_at
            if elapsed_s < _PATIENCE_S or grant.ended:
                continue
            due = elapsed_s * max(_LEAST_BYTES_PER_S, grant.body.length / _LONGEST_S)
            done = (grant.body.arrived - grant.arrived_before) / due
            if done < 1:
                slow.append((-self._of_tenants[grant.tenant], done, grant))
            grant.arrived_before, grant.looked_at = grant.body.arrived, now
        if not slow:
            return
        wanted_bytes = sum(grant.body.length for grant in self._waiting) + self.taken_bytes - self._budget_bytes
        wanted_bytes -= sum(grant.body.length for grant in self._grants if grant.ended)
        for *_, grant in sorted(slow, key=itemgetter(0, 1)):
            if wanted_bytes <= 0:
                break
            wanted_bytes -= grant.body.length
            grant.ended = True
            grant.end()
