"""Which copy of a block a client reads first, where there are several.

Copies on the client's own machine come first, where shared memory reaches them, then
those in its zone, then the others. Copies that are equally near take turns: one is
first for some reads, then the next one is. Which of them begins, the names of the slot
and the client decide. So each node serves its part of a hot group, however few clients
read it, and a block that was prefetched, or is known, is usually read where it is.
"""

from collections.abc import Sequence
from typing import Final

import attrs
from xxhash import xxh3_64_intdigest

from infinistore.cluster.membership import Node, NodeState
from infinistore.cluster.placement import Placement, machine_of, slot_of

READS_IN_A_TURN: Final = 64
"""How many reads of a client come before another copy is the first."""


@attrs.frozen
class Reader:
    """The client that reads: its name, and the names of its machine and zone; empty if
    they are not known."""

    name: str = ""
    machine: str = ""
    zone: str = ""

    def distance(self, node: Node) -> int:
        """Return how far away a node is: 0 on this machine, 1 in this zone, else 2."""
        if self.machine and machine_of(node) == self.machine:
            return 0
        return 1 if self.zone and node.zone == self.zone else 2


class ReadOrder:
    """In which order a client asks the places of keys. Threads may share it."""

    def __init__(self, placement: Placement, reader: Reader) -> None:
        nodes = placement.view.nodes
        self._placement = placement
        self._distances = [reader.distance(node) for node in nodes]
        self._serving = [node.state is NodeState.SERVING for node in nodes]
        self._seed = xxh3_64_intdigest(reader.name.encode())
        self._orders: dict[int, Sequence[Sequence[int]]] = {}

    def places(self, keys: Sequence[str], reads: int) -> list[Sequence[int]]:
        """Return the places of each key as `Placement.places` does, in the order for a
        client that has read so many times.

        Where a node joins or drains, that order stays: it says who should have the key.
        """
        slots = [slot_of(key) for key in keys]
        orders = self._orders
        first = {slot: key for slot, key in zip(slots, keys, strict=True) if slot not in orders}
        if first:
            places = self._placement.places(list(first.values()))
            orders.update(zip(first, map(self._orders_of, first, places), strict=True))
        turn = reads // READS_IN_A_TURN
        return [(one := orders[slot])[turn % len(one)] for slot in slots]

    def _orders_of(self, slot: int, places: Sequence[int]) -> Sequence[Sequence[int]]:
        """Return the orders of a slot, which take turns."""
        if len(places) < 2 or not self.may_swap(places):
            return [places]
        distances = self._distances
        nearest = min(distances[node] for node in places)
        near = [node for node in places if distances[node] == nearest]
        others = sorted((node for node in places if distances[node] > nearest), key=distances.__getitem__)
        start = xxh3_64_intdigest(slot.to_bytes(2, "little"), self._seed) % len(near)
        return [(*near[turn:], *near[:turn], *others) for turn in (*range(start, len(near)), *range(start))]

    def may_swap(self, places: Sequence[int]) -> bool:
        """Whether it makes no difference to what is found in which order these nodes
        are asked: none of them joins or drains."""
        return all(self._serving[node] for node in places)
