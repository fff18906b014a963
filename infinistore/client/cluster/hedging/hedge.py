"""Hedged reads: when a node is late, the other copies of its blocks are asked, too.

The first answer that has everything wins ("The Tail at Scale", Dean and Barroso, 2013).
What the other copies send goes to new memory, and to the caller's only when nothing
else can write there any more. A budget bounds it: where everything is slow, more
requests make it slower.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

from infinistore.client.cluster.calls import CallInView
from infinistore.client.connection.effects import Outcome, Part
from infinistore.client.memory.views import Leased
from infinistore.client.requests import Exists, Get, GetInto, Lease
from infinistore.kept_errors import KeptError

__all__ = ["Hedge", "hedges_for"]

_LEAST_S: Final = 0.002
"""Nothing is late before that: a busy process wakes up about as late."""
_PATIENCE: Final = 2
"""How many of the other copy's usual answers a late node is waited for at least."""


class Hedge:
    """What a driver does about a part that is late: the `hedge` of that part."""

    def __init__(
        self,
        call: CallInView,
        request: Get | GetInto | Exists | Lease,
        index: int,
        positions: Sequence[int],
        places: Sequence[Sequence[int]],
    ) -> None:
        self.won = False
        """Whether the other copies answered for the node."""
        self.node = node = call.view.nodes[index]
        self._call = call
        self._request = request
        self._positions = positions
        self._places = places
        self._asked: list[Sequence[int]] = []
        self._clock: Callable[[], float] = call.calls.clock
        self._begun = self._clock()
        self._until = self._begun + call.left_s / 2  # as for the part: the other half is for the copies in turn
        kind, count = type(request), len(positions)
        other = call.view.nodes[places[positions[0]][1]]
        most_s = max(call.calls.lookup_s / 2, _PATIENCE * other.answers.usual_s(kind, count))
        late_s = node.answers.late_s(kind, count)
        self.after_s = most_s if late_s is None else max(_LEAST_S, min(late_s, most_s))
        """After how many seconds the part is late."""

    def begin(self) -> list[Part]:
        """Return what to ask the other copies now that the part is late; nothing if
        they cannot have everything, or if the budget is spent.
        """
        calls = self._call.calls
        nodes = self._call.view.nodes
        by_node: dict[int, list[int]] = {}
        for position in self._positions:
            by_node.setdefault(self._places[position][1], []).append(position)
        if any(nodes[index].lost for index in by_node) or not calls.budget.spend(len(self._positions)):
            return []
        self._call.counters.hedges += 1
        self._asked = list(by_node.values())
        left_s = self._until - self._clock()
        within_s = min(calls.lookup_s, left_s) if isinstance(self._request, Exists) else left_s
        return [Part(nodes[index].store, self._asking(positions), within_s) for index, positions in by_node.items()]

    def _asking(self, positions: Sequence[int]) -> Get | Exists | Lease:
        """Return the request for other copies, which writes to new memory."""
        if isinstance(self._request, GetInto):
            return Get([self._request.keys[i] for i in positions])
        return self._request.at(positions)

    def is_full(self, outcomes: Sequence[Outcome]) -> bool:
        """Whether the other copies have everything."""
        return not any(isinstance(outcome, KeptError) for outcome in outcomes) and all(
            self._fits(position, value)
            for positions, outcome in zip(self._asked, outcomes, strict=True)
            for position, value in zip(
                positions, outcome.handed if isinstance(outcome, Leased) else outcome, strict=True
            )
        )

    def _fits(self, position: int, value: Any) -> bool:
        if isinstance(self._request, GetInto):
            return value is not None and len(value) <= len(self._request.batch.views[position])
        return value is not None and value is not False

    def settle(self, first: Outcome | None, others: Sequence[Outcome] | None) -> Outcome:
        """Return the outcome of the part, when everything has ended. `first` is None if
        the other copies had everything before it had.
        """
        failed = isinstance(first, KeptError)
        if not failed:  # an error says nothing about how long answers take
            self.node.answers.note(type(self._request), len(self._positions), self._clock() - self._begun)
        answered = first is not None and not failed
        if answered or others is None or not self.is_full(others):
            for other in others or ():
                if isinstance(other, Leased):
                    other.leave(quietly=True, stacklevel=1)
            return first
        self.won = True
        self._call.counters.hedges_won += 1
        if isinstance(self._request, Lease):
            place = {position: number for number, position in enumerate(self._positions)}
            parts = [[place[position] for position in positions] for positions in self._asked]
            return Leased.merged(len(self._positions), zip(parts, others, strict=True))
        found = dict(
            pair
            for positions, outcome in zip(self._asked, others, strict=True)
            for pair in zip(positions, outcome, strict=True)
        )
        if isinstance(self._request, GetInto):
            for position, value in found.items():
                self._request.batch.views[position][: len(value)] = value
                found[position] = len(value)
        return [found[position] for position in self._positions]


def hedges_for(
    call: CallInView, request: Any, parts: Sequence[tuple[int, Sequence[int]]], places: Sequence[Sequence[int]]
) -> list[Hedge | None]:
    """Return the hedge of each part of a read, in order; none without another copy, or
    if the store was opened without.
    """
    calls = call.calls
    if not calls.hedges or call.view.view.copies == 1 or not isinstance(request, Get | GetInto | Exists | Lease):
        return []
    calls.budget.earn(len(request.keys))
    return [
        Hedge(call, request, index, positions, places) if all(len(places[i]) > 1 for i in positions) else None
        for index, positions in parts
    ]
