"""Whose blocks go when tenants share a pool that is full: the order of the victims.

The victim is whoever is most above what is reserved for it, in proportion to its
weight. It gives blocks until the next one is as far above, and so on. Whoever is at or
below what is reserved for it gives nothing, except that the last block that it gives
may cross that line.

The victims are in a heap, so that a choice costs O(log n) of n tenants. What is in the
heap is never below what it should be: a tenant that has grown is listed anew, one that
has shrunk is found out when it is looked at.

Leaves to others: which blocks of a victim go (`tenant_space`).
"""

import heapq
from collections.abc import Iterable
from math import ceil
from typing import Generic, Protocol, TypeAlias, TypeVar

from infinistore.tenant_limits import TenantLimits

__all__ = ["Victim", "Victims"]

_FEW = 64


class Victim(Protocol):
    """A tenant that has blocks in a shared pool."""

    tenant_limits: TenantLimits
    listed: float
    """How far above its reserved size the heap has it; minus infinity: it is not
    there. For `Victims`."""

    @property
    def taken_bytes(self) -> int:
        """What it takes of the pool."""

    def settle(self) -> None:
        """Bring up to date what it has, and what of that is pinned."""

    def evictable_bytes(self) -> int:
        """What of that eviction could free now."""

    def piece_bytes(self) -> int:
        """What its coldest block takes; at least 1."""


_V = TypeVar("_V", bound=Victim)
_Candidate: TypeAlias = tuple[float, int, _V, int, int]
"""(minus how far above, number, tenant, bytes above what is reserved, bytes that can be
evicted). Bytes are whole, so that sums of steps are exact."""
_INFINITE = float("inf")


class Victims(Generic[_V]):
    """The tenants of one pool, by how far they are above what is reserved for them."""

    def __init__(self) -> None:
        self.looked_at = 0
        """How many tenants were looked at in order to choose, since the start."""
        self._heap: list[tuple[float, int, _V]] = []
        self._number = 0  # breaks ties: the heap never compares victims
        self._listed = 0  # tenants that are in the heap

    def note(self, victim: _V) -> None:
        """Say that a tenant has grown, or that its limits have changed."""
        limits = victim.tenant_limits
        above = (victim.taken_bytes - limits.reserved_bytes) / limits.weight
        if above > 0 and above > victim.listed:
            self._list(victim, above)

    def drop(self, victim: _V) -> None:
        """Forget a tenant."""
        if victim.listed > -_INFINITE:
            victim.listed = -_INFINITE
            self._listed -= 1

    def rebuild(self, victims: Iterable[_V]) -> None:
        """List all tenants anew: limits have changed."""
        self._heap, self._listed = [], 0
        for victim in victims:
            victim.listed = -_INFINITE
            self.note(victim)

    def plan(
        self, wanted_bytes: float, asking: _V | None = None, asked_bytes: int = 0, most_pieces: int | None = None
    ) -> dict[_V, int]:
        """Return how many bytes each victim is to give, `wanted_bytes` in all; less if
        there is no more that may be taken.

        `asking` counts as if it had what it asks for already. With `most_pieces`, the
        plan has at most so many steps, each of at least a block.
        """
        gifts: dict[_V, int] = {}
        wanted_bytes = ceil(wanted_bytes)
        seen: list[_V] = []
        candidates: list[_Candidate[_V]] = []
        try:
            if asking is not None:
                self._consider(asking, asked_bytes, candidates)
            while wanted_bytes > 0 and most_pieces != 0:
                self._bring_in(asking, candidates, seen)
                if not candidates:
                    break
                above, _, victim, above_bytes, evictable_bytes = heapq.heappop(candidates)
                step_bytes = min(
                    wanted_bytes, evictable_bytes, above_bytes, self._step_bytes(-above, victim, candidates)
                )
                gifts[victim] = gifts.get(victim, 0) + step_bytes
                wanted_bytes -= step_bytes
                self._keep(victim, above_bytes - step_bytes, evictable_bytes - step_bytes, candidates)
                if most_pieces is not None:
                    most_pieces -= 1
        finally:
            for victim in seen:
                self.note(victim)
        return gifts

    def _step_bytes(self, above: float, victim: _V, candidates: list[_Candidate[_V]]) -> int:
        """Return how much the first victim gives before the next one is as far above,
        but a block at least."""
        after = max(0.0, -candidates[0][0] if candidates else 0.0, -self._heap[0][0] if self._heap else 0.0)
        return max(ceil((above - after) * victim.tenant_limits.weight), victim.piece_bytes())

    def _bring_in(self, asking: _V | None, candidates: list[_Candidate[_V]], seen: list[_V]) -> None:
        """Make candidates of those that may be above all candidates so far."""
        while self._heap and -self._heap[0][0] > (max(0.0, -candidates[0][0]) if candidates else 0.0):
            above, _, victim = heapq.heappop(self._heap)
            if -above != victim.listed:  # it was listed again since
                continue
            self.drop(victim)
            self.looked_at += 1
            seen.append(victim)
            if victim is not asking:
                self._consider(victim, 0, candidates)

    def _consider(self, victim: _V, more_bytes: int, candidates: list[_Candidate[_V]]) -> None:
        victim.settle()
        above_bytes = victim.taken_bytes + more_bytes - victim.tenant_limits.reserved_bytes
        self._keep(victim, above_bytes, victim.evictable_bytes(), candidates)

    def _keep(self, victim: _V, above_bytes: int, evictable_bytes: int, candidates: list[_Candidate[_V]]) -> None:
        if above_bytes > 0 and evictable_bytes > 0:
            self._number += 1
            above = above_bytes / victim.tenant_limits.weight
            heapq.heappush(candidates, (-above, self._number, victim, above_bytes, evictable_bytes))

    def _list(self, victim: _V, above: float) -> None:
        self._listed += victim.listed == -_INFINITE
        victim.listed = above
        self._number += 1
        heapq.heappush(self._heap, (-above, self._number, victim))
        if len(self._heap) > 2 * self._listed + _FEW:  # mostly out of date: forget those
            self._heap = [(above, number, victim) for above, number, victim in self._heap if -above == victim.listed]
            heapq.heapify(self._heap)
