"""Who owns which key: every process with the same view gives the same answer.

The hash tag of a key is the text in its first `{...}`, as in Redis; without one, the
whole key. Keys with one tag have one owner. The tag's xxh3 selects one of 65,536 slots,
and each slot ranks the nodes (`rendezvous`): a node that joins takes keys from the
others and moves none between them, and the keys of a node that leaves go to the node of
their next rank. Copies are on different machines (`apart`).

Slots are filled when they are first asked for, and after a change of the view only from
what has changed.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from xxhash import xxh3_64_intdigest

from infinistore.cluster.apart import Apart
from infinistore.cluster.membership import NodeState, View
from infinistore.cluster.rendezvous import Rendezvous
from infinistore.errors import StoreUnavailable

__all__ = ["MOST_WITHOUT_NUMPY", "PLACEMENT_VERSION", "SLOTS", "Placement", "hash_tag", "slot_of"]

PLACEMENT_VERSION: Final = 1
"""The version of the rules in this module, in `apart` and in `rendezvous`."""
SLOTS: Final = 1 << 16
MOST_WITHOUT_NUMPY: Final = 30
"""With more nodes, computing slots without numpy holds a caller up for long: the first
1,000 keys take 7 ms a node."""
_SLOT_BITS: Final = SLOTS - 1
_NO_KEY: Final = "\0"  # keys have no NUL, so that none begins with it


def hash_tag(key: str) -> str:
    """Return the text in the first `{...}` of a key; the key, if there is none or it is
    empty.
    """
    start = key.find("{")
    if start >= 0:
        end = key.find("}", start)
        if end > start + 1:
            return key[start + 1 : end]
    return key


def slot_of(key: str) -> int:
    """Return the slot of a key."""
    return xxh3_64_intdigest(hash_tag(key).encode()) & _SLOT_BITS


class Placement:
    """Who owns what in a view. Threads may share it.

    Nodes are named by their index in `view.nodes`. A draining node owns nothing that is
    written, and is read as if it did not drain: `reading` says which of the two is
    asked for.
    """

    def __init__(self, view: View, previous: "Placement | None" = None, *, with_numpy: bool = True) -> None:
        """`previous` is the placement of an older view of the same cluster: what it
        knows is not computed again. Without numpy, the result is the same.
        """
        self.view = view
        self._moves: _Moves = _Moves() if previous is None else previous._moves
        arrays = _import_numpy() if with_numpy else None
        self.lacks_numpy = arrays is None and len(view.nodes) > MOST_WITHOUT_NUMPY
        """Whether there are so many nodes that it should be installed."""
        self._apart = Apart(view.nodes, view.copies)
        self._states = [node.state for node in view.nodes]
        self._changing = len(view.nodes) - self._states.count(NodeState.SERVING)
        self._places: dict[int, Sequence[int]] = {}
        weights = [node.weight for node in view.nodes]
        older = None if previous is None else previous._readers
        self._readers: _Owners = _Owners(view, weights, older, self._moves, apart=self._apart, arrays=arrays)
        self._writers = self._readers
        draining = [state is NodeState.DRAINING for state in self._states]
        if any(draining):
            weights = [0 if drains else weight for weight, drains in zip(weights, draining, strict=True)]
            older = None if previous is None else previous._writers
            self._readers.moves = None  # an owner is who is written to
            self._writers = _Owners(view, weights, older, self._moves, apart=self._apart, arrays=arrays)

    @property
    def moved_slots(self) -> int:
        """How many slots have got another owner by changes of the view, of those that
        were asked for before and after a change.
        """
        return self._moves.count

    def owners(self, keys: Sequence[str], *, reading: bool = False) -> Sequence[int]:
        """Return the owner of each key, its rank 1.

        Raises:
            StoreUnavailable: no node of the view owns anything.
        """
        return (self._readers if reading else self._writers).of(keys)

    def split(self, keys: Sequence[str], *, reading: bool = False) -> list[tuple[int, Sequence[int]]]:
        """Return the owners of the keys, each with the positions of its keys, both in
        the order of the keys.

        Raises:
            StoreUnavailable: no node of the view owns anything.
        """
        owners = self.owners(keys, reading=reading)
        if owners and owners.count(owners[0]) == len(owners):
            return [(owners[0], range(len(owners)))]
        parts: dict[int, list[int]] = {}
        for position, owner in enumerate(owners):
            part = parts.get(owner)
            if part is None:
                parts[owner] = [position]
            else:
                part.append(position)
        return list(parts.items())

    def ranked(self, key: str, count: int, *, reading: bool = False) -> Sequence[int]:
        """Return the first `count` ranks of a key: its owner, the nodes of its other
        copies, then those that would own it if those before them were gone. Fewer, if
        there are fewer nodes.
        """
        return self.ranks([key], count, reading=reading)[0]

    def ranks(self, keys: Sequence[str], count: int, *, reading: bool = False) -> list[Sequence[int]]:
        """Return the first `count` ranks of each key, as `ranked` does of one."""
        return (self._readers if reading else self._writers).ranks([slot_of(key) for key in keys], count)

    def places(self, keys: Sequence[str]) -> list[Sequence[int]]:
        """Return for each key the nodes that may have it, those that should have it
        first.

        Then come those that had it before nodes joined, and the draining nodes.
        """
        copies = self.view.copies
        slots = [slot_of(key) for key in keys]
        if not self._changing:
            return self._writers.ranks(slots, copies)
        places = self._places
        unknown = sorted({slot for slot in slots if slot not in places})
        if unknown:
            ranks = self._writers.ranks(unknown, copies + 1)
            orders = self._readers.orders(unknown, copies + self._changing)
            places.update(zip(unknown, map(self._places_in, ranks, orders), strict=True))
        return [places[slot] for slot in slots]

    def _places_in(self, ranks: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
        """Return the places of a slot, from its ranks and all nodes in their order."""
        copies, states = self.view.copies, self._states
        serving = [node for node in order if states[node] is NodeState.SERVING]
        places = dict.fromkeys(ranks[:copies])
        if any(states[node] is NodeState.JOINING for node in ranks):
            # Several may have joined one after the other: the next rank is a guess.
            places |= dict.fromkeys([*self._apart.first(serving, copies), *ranks[copies:]])
        for node in order:
            if states[node] is NodeState.DRAINING:
                # It may have what it would have if it were the only one that changes.
                among = [other for other in order if other == node or states[other] is NodeState.SERVING]
                if node in self._apart.first(among, copies):
                    places[node] = None
        return tuple(places)


def _import_numpy() -> Any:
    try:
        import numpy  # late: it takes a tenth of a second, and only a cluster needs it
    except ImportError:
        return None
    return numpy


class _Moves:
    """Which slots changed hands, over all views of a cluster. What threads do at the
    same time may be counted twice.
    """

    def __init__(self) -> None:
        self.count = 0
        self._owners: dict[int, str] = {}

    def note(self, slot: int, owner: str) -> None:
        """Note who owns a slot now."""
        former = self._owners.get(slot, owner)
        self._owners[slot] = owner
        self.count += former != owner


class _Owners:
    """The owners of all slots. Threads may share it: what they fill in is the same."""

    def __init__(
        self, view: View, weights: Sequence[int], older: "_Owners | None", moves: _Moves, *, apart: Apart, arrays: Any
    ) -> None:
        self._ids = [node.id for node in view.nodes]
        self._weight_of = {node.id: weight for node, weight in zip(view.nodes, weights, strict=True)}
        self._nodes = [index for index, weight in enumerate(weights) if weight]
        self._apart = apart
        self._rendezvous = Rendezvous(list(self._weight_of), weights, arrays)
        self._table = [-1] * SLOTS
        self.moves: _Moves | None = moves
        self._ranks: dict[int, tuple[int, ...]] = {}
        # What an older view knew: its table, the indices of its nodes in this view (-1
        # for one that may have lost slots to any other), and the nodes that may have
        # gained some.
        self._older_table: list[int] = []
        self._new_index: list[int] = []
        self._gaining: list[int] = []
        if older is not None:
            self._inherit(older)

    def _inherit(self, older: "_Owners") -> None:
        ids = list(self._weight_of)
        gaining = [node for node in self._nodes if self._weight_of[ids[node]] > older._weight_of.get(ids[node], 0)]
        if 2 * len(gaining) > len(self._nodes):
            return
        self._gaining = gaining
        self._older_table = older._table
        index_of = {id_: index for index, id_ in enumerate(ids)}
        self._new_index = [
            index_of[id_] if self._weight_of.get(id_, 0) >= max(weight, 1) else -1
            for id_, weight in older._weight_of.items()
        ]

    def of(self, keys: Sequence[str]) -> list[int]:
        """Return the owner of each key."""
        table = self._table
        found: list[int] = []
        append = found.append
        prefix, owner = _NO_KEY, -1
        for key in keys:
            # The keys of a group follow each other, and begin alike up to their tag.
            if not key.startswith(prefix):
                tag, prefix = key, _NO_KEY
                start = key.find("{")
                if start >= 0:
                    end = key.find("}", start)
                    if end > start + 1:
                        tag, prefix = key[start + 1 : end], key[: end + 1]
                owner = table[xxh3_64_intdigest(tag.encode()) & _SLOT_BITS]
            append(owner)
        if -1 in found:
            unknown = {position: slot_of(keys[position]) for position, owner in enumerate(found) if owner < 0}
            self._fill({slot for slot in unknown.values() if table[slot] < 0})
            for position, slot in unknown.items():
                found[position] = table[slot]
        return found

    def ranks(self, slots: Sequence[int], count: int) -> list[Sequence[int]]:
        """Return the first `count` nodes of each slot, or all if there are fewer."""
        count = min(count, len(self._nodes))
        known = self._ranks
        unknown = sorted({slot for slot in slots if len(known.get(slot, ())) < count})
        orders: Sequence[tuple[int, ...]] = self.orders(unknown, count) if count else ((),) * len(unknown)
        if count > 1 and self._apart.reach:
            orders = [self._apart.first(order, count) for order in orders]
        known.update(zip(unknown, orders, strict=True))
        if self.moves is not None and count:
            for slot in unknown:
                self.moves.note(slot, self._ids[known[slot][0]])
        return [known[slot][:count] if count else () for slot in slots]

    def orders(self, slots: Sequence[int], count: int) -> list[tuple[int, ...]]:
        """Return the first `count` nodes of each slot, whatever machines they are on,
        and as many more as it takes to have others; all if there are fewer.
        """
        most = count + self._apart.reach if count > 1 else count
        return self._rendezvous.first(slots, self._nodes, min(most, len(self._nodes)))

    def _fill(self, slots: Iterable[int]) -> None:
        if not self._nodes:
            raise StoreUnavailable(
                "no node of the cluster takes blocks: each is gone, draining, or has weight 0; start one"
            )
        fresh: list[int] = []
        known: list[int] = []
        owners: list[int] = []
        for slot in sorted(slots):
            former = self._older_table[slot] if self._older_table else -1
            owner = self._new_index[former] if former >= 0 else -1
            if owner < 0:
                fresh.append(slot)
            else:
                known.append(slot)
                owners.append(owner)
        for slot, (owner,) in zip(fresh, self._rendezvous.first(fresh, self._nodes, 1), strict=True):
            self._table[slot] = owner
        if self._gaining:
            owners = self._rendezvous.better(known, owners, self._gaining)
        for slot, owner in zip(known, owners, strict=True):
            self._table[slot] = owner
        if self.moves is not None:
            for slot in [*fresh, *known]:
                self.moves.note(slot, self._ids[self._table[slot]])
