"""Who owns which key, and what a change of the view does to that: every process with
the same view gives the same answer.

The hash tag of a key is the text in its first `{...}`, as in Redis; without one, the
whole key. The tag's xxh3 selects one of 65,536 slots, and each slot ranks the nodes by
weighted rendezvous hashing (`Rendezvous`): a node that joins takes keys from the others
and moves none between them. Copies are on nodes of different machines, if there are
any, and of different zones (`ReplicaSpread`). Slots are filled on first use.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

from xxhash import xxh3_64_intdigest

from infinistore.cluster.membership import Node, NodeState, View
from infinistore.errors import StoreUnavailable
from infinistore.keys import hash_tag

_WORD: Final = (1 << 64) - 1
_STEP: Final = 0x9E3779B97F4A7C15  # this and the next two are splitmix64's
_FIRST_FACTOR: Final = 0xBF58476D1CE4E5B9
_SECOND_FACTOR: Final = 0x94D049BB133111EB
_HALF_ROOT: Final = 0.7071067811865476
_LN_2: Final = 0.6931471805599453
_ODD_RECIPROCALS: Final = tuple(1.0 / odd for odd in range(19, 0, -2))
_WORTH_AN_ARRAY: Final = 256
"""From so many hashes on, numpy is faster than Python."""
_HASHES_AT_A_TIME: Final = 1 << 18


class Rendezvous:
    """The ranks of nodes, which are named by their indices. `shares` are their weights;
    a node with a share of 0 must not be asked for.
    """

    def __init__(self, ids: Sequence[str], shares: Sequence[int], arrays: Any | None) -> None:
        """`arrays` is numpy, or None to do without it."""
        self._seeds = [xxh3_64_intdigest(one.encode()) for one in ids]
        self._shares = shares
        self._equal = len({share for share in shares if share}) <= 1
        self._arrays = arrays

    def first(self, slots: Sequence[int], nodes: Sequence[int], count: int) -> list[tuple[int, ...]]:
        """Return the first `count` of these nodes in each of these slots. `nodes`
        ascend: of two that are equal to the last bit, the lower one comes first.
        """
        if len(nodes) == 1:
            return [tuple(nodes)] * len(slots)
        if self._arrays is None or len(slots) * len(nodes) < _WORTH_AN_ARRAY:
            return [self._first_in_one(slot, nodes, count) for slot in slots]
        step = max(1, _HASHES_AT_A_TIME // len(nodes))
        found: list[tuple[int, ...]] = []
        for start in range(0, len(slots), step):
            found += self._first_in_many(self._arrays, slots[start : start + step], nodes, count)
        return found

    def better(self, slots: Sequence[int], owners: Sequence[int], others: Sequence[int]) -> list[int]:
        """Return the first of each slot, of its owner so far and these others."""
        if self._arrays is None or len(slots) * (1 + len(others)) < _WORTH_AN_ARRAY:
            among = (sorted({owner, *others}) for owner in owners)
            return [self._first_in_one(slot, nodes, 1)[0] for slot, nodes in zip(slots, among, strict=True)]
        numpy = self._arrays
        nodes = numpy.empty((len(slots), 1 + len(others)), numpy.int64)
        nodes[:, 0] = owners
        nodes[:, 1:] = others
        costs = self._costs_of_many(numpy, slots, nodes)
        least = costs.min(axis=1, keepdims=True)
        found: list[int] = numpy.where(costs == least, nodes, len(self._seeds)).min(axis=1).tolist()
        return found

    def _first_in_one(self, slot: int, nodes: Sequence[int], count: int) -> tuple[int, ...]:
        offset = (slot + 1) * _STEP
        costs: list[float] = []
        for node in nodes:
            mixed = (self._seeds[node] + offset) & _WORD
            mixed = (mixed ^ (mixed >> 30)) * _FIRST_FACTOR & _WORD
            mixed = (mixed ^ (mixed >> 27)) * _SECOND_FACTOR & _WORD
            drawn = (mixed ^ (mixed >> 31)) >> 32
            # -ln(u) falls as u rises, so that equal shares need no logarithm.
            costs.append(-drawn if self._equal else _minus_ln(*math.frexp(drawn + 0.5)) / self._shares[node])
        if count == 1:
            return (nodes[costs.index(min(costs))],)
        return tuple(nodes[position] for position in sorted(range(len(nodes)), key=costs.__getitem__)[:count])

    def _first_in_many(
        self, numpy: Any, slots: Sequence[int], nodes: Sequence[int], count: int
    ) -> list[tuple[int, ...]]:
        among = numpy.array(nodes)
        costs = self._costs_of_many(numpy, slots, among)
        best = costs.argmin(axis=1)[:, None] if count == 1 else costs.argsort(axis=1, kind="stable")[:, :count]
        return [tuple(row) for row in among[best].tolist()]

    def _costs_of_many(self, numpy: Any, slots: Sequence[int], nodes: Any) -> Any:
        """Return the costs in each slot, a row each, of the same or its own nodes."""
        offsets = (numpy.array(slots, numpy.uint64) + numpy.uint64(1)) * numpy.uint64(_STEP)
        mixed = offsets[:, None] + numpy.array(self._seeds, numpy.uint64)[nodes]
        for shift, factor in ((30, _FIRST_FACTOR), (27, _SECOND_FACTOR)):
            mixed ^= mixed >> numpy.uint64(shift)
            mixed *= numpy.uint64(factor)
        mixed ^= mixed >> numpy.uint64(31)
        costs = -(mixed >> numpy.uint64(32)).astype(numpy.int64)
        if self._equal:
            return costs
        fractions, exponents = numpy.frexp(0.5 - costs)
        return self._minus_ln_of_many(numpy, fractions, exponents) / numpy.array(self._shares)[nodes]

    @staticmethod
    def _minus_ln_of_many(numpy: Any, fractions: Any, exponents: Any) -> Any:
        low = fractions < _HALF_ROOT
        return _minus_ln_near_1(numpy.where(low, 2 * fractions, fractions), exponents - low)


def _minus_ln(fraction: float, exponent: int) -> float:
    """Return -ln(fraction * 2 ** (exponent - 32)), the same on every platform."""
    low = fraction < _HALF_ROOT
    cost: float = _minus_ln_near_1(2 * fraction if low else fraction, exponent - low)
    return cost


def _minus_ln_near_1(fraction: Any, exponent: Any) -> Any:
    """The same for a fraction between the roots of 1/2 and of 2; also of arrays.

    ln(f) is twice the inverse hyperbolic tangent of (f - 1) / (f + 1), whose square is
    at most 0.03: ten terms of its series are enough.
    """
    ratio = (fraction - 1.0) / (fraction + 1.0)
    square = ratio * ratio
    total = 0.0
    for reciprocal in _ODD_RECIPROCALS:
        total = total * square + reciprocal
    return (32 - exponent) * _LN_2 - 2.0 * ratio * total


def machine_of(node: Node) -> str:
    """Return a node's machine: what the node says, else the host of its address."""
    return node.host or node.address.partition("://")[2].rpartition(":")[0]


class ReplicaSpread:
    """Chooses nodes, named by their indices, for the copies of keys."""

    def __init__(self, nodes: Sequence[Node], copies: int) -> None:
        self._copies = copies
        machines = [machine_of(node) for node in nodes]
        zones = [node.zone for node in nodes]
        # One zone, or one machine, tells nothing apart. Then the other is enough, and a
        # search ends at the first node that differs.
        self._machines = zones if len(set(machines)) == 1 else machines
        self._zones = machines if len(set(zones)) == 1 else zones
        self.reach = self._reach(len(nodes))
        """How many nodes beyond those that are asked for an order must have; 0 if
        machines and zones make no difference."""

    def _reach(self, count: int) -> int:
        pairs = set(zip(self._machines, self._zones, strict=True))
        machines, zones = Counter(self._machines), Counter(self._zones)
        if self._copies == 1 or (len(machines) == len(zones) and len(machines) in (1, count)):
            return 0
        if len(pairs) > len(machines):  # a machine in two zones may be found anywhere
            return count
        return (self._copies - 1) * max(zones.values())

    def first(self, order: Sequence[int], count: int) -> tuple[int, ...]:
        """Return the first `count` of these nodes, which are in their order for a key,
        with `reach` more: those that have its copies, then the others in this order.
        """
        chosen = list(order[:1])
        while len(chosen) < min(self._copies, len(order), count):
            chosen.append(self._next(order, chosen))
        if len(chosen) < count:
            chosen += [node for node in order if node not in chosen]
        return tuple(chosen[:count])

    def _next(self, order: Sequence[int], chosen: Sequence[int]) -> int:
        """Return the node of the next copy."""
        machines = {self._machines[node] for node in chosen}
        zones = {self._zones[node] for node in chosen}
        found, most = -1, -1
        for node in order:
            if node not in chosen:
                spread = 2 * (self._machines[node] not in machines) + (self._zones[node] not in zones)
                if spread > most:
                    found, most = node, spread
                    if most == 3:
                        break
        return found


PLACEMENT_VERSION: Final = 1
"""The version of the rules in this module."""
SLOTS: Final = 1 << 16
_MOST_WITHOUT_NUMPY: Final = 30
"""With more nodes, computing slots without numpy holds a caller up for long: the first
1,000 keys take 7 ms a node."""
_SLOT_BITS: Final = SLOTS - 1
_NO_KEY: Final = "\0"  # keys have no NUL, so that none begins with it


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
        self.lacks_numpy = arrays is None and len(view.nodes) > _MOST_WITHOUT_NUMPY
        """Whether there are so many nodes that it should be installed."""
        self._spread = ReplicaSpread(view.nodes, view.copies)
        self._states = [node.state for node in view.nodes]
        self._changing = len(view.nodes) - self._states.count(NodeState.SERVING)
        self._places: dict[int, Sequence[int]] = {}
        weights = [node.weight for node in view.nodes]
        older = None if previous is None else previous._readers
        self._readers: _Owners = _Owners(view, weights, older, self._moves, spread=self._spread, arrays=arrays)
        self._writers = self._readers
        draining = [state is NodeState.DRAINING for state in self._states]
        if any(draining):
            weights = [0 if drains else weight for weight, drains in zip(weights, draining, strict=True)]
            older = None if previous is None else previous._writers
            self._readers.moves = None  # an owner is who is written to
            self._writers = _Owners(view, weights, older, self._moves, spread=self._spread, arrays=arrays)

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
            places |= dict.fromkeys([*self._spread.first(serving, copies), *ranks[copies:]])
        for node in order:
            if states[node] is NodeState.DRAINING:
                # It may have what it would have if it were the only one that changes.
                among = [other for other in order if other == node or states[other] is NodeState.SERVING]
                if node in self._spread.first(among, copies):
                    places[node] = None
        return tuple(places)


def _import_numpy() -> Any:
    try:
        import numpy  # late: it takes a tenth of a second, and only a cluster needs it
    except ImportError:
        return None
    return numpy


class _Moves:
    """Which slots changed hands, over all views. Threads may count one twice."""

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
        self,
        view: View,
        weights: Sequence[int],
        older: "_Owners | None",
        moves: _Moves,
        *,
        spread: ReplicaSpread,
        arrays: Any,
    ) -> None:
        self._ids = [node.id for node in view.nodes]
        self._weight_of = {node.id: weight for node, weight in zip(view.nodes, weights, strict=True)}
        self._nodes = [index for index, weight in enumerate(weights) if weight]
        self._spread = spread
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
        if count > 1 and self._spread.reach:
            orders = [self._spread.first(order, count) for order in orders]
        known.update(zip(unknown, orders, strict=True))
        if self.moves is not None and count:
            for slot in unknown:
                self.moves.note(slot, self._ids[known[slot][0]])
        return [known[slot][:count] if count else () for slot in slots]

    def orders(self, slots: Sequence[int], count: int) -> list[tuple[int, ...]]:
        """Return the first `count` nodes of each slot, whatever machines they are on,
        and as many more as it takes to have others; all if there are fewer.
        """
        most = count + self._spread.reach if count > 1 else count
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


def still_finds(view: View, former: View) -> bool:
    """Whether reads look for each key at all the nodes at which they looked in a former
    view.

    So they do if nothing changes that placement depends on; without copies, also while
    nodes begin to drain, and while the weight of a single node that joins grows.
    """
    if len(view.nodes) != len(former.nodes) or view.copies != former.copies:
        return False
    is_alone = [node.state for node in former.nodes].count(NodeState.JOINING) == 1
    return all(
        _place_of(node) == _place_of(before)
        and (
            (node.state, node.weight) == (before.state, before.weight)
            or (view.copies == 1 and (_starts_draining(node, before) or (is_alone and _grows(node, before))))
        )
        for node, before in zip(view.nodes, former.nodes, strict=True)
    )


def _place_of(node: Node) -> tuple[str, str, str]:
    return node.id, machine_of(node), node.zone


def _starts_draining(node: Node, before: Node) -> bool:
    return (before.state, node.state, node.weight) == (NodeState.SERVING, NodeState.DRAINING, before.weight)


def _grows(node: Node, before: Node) -> bool:
    return node.state is before.state is NodeState.JOINING and node.weight > before.weight
