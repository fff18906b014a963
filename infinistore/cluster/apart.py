"""Which of the nodes that come first for a key have its copies: nodes of different
machines, if there are any.

The owner is the first node. Each further copy goes to the next node of a machine that
has no copy yet, of another zone if one has such a machine; without another machine, to
the next node of another zone, or to the next one. So the copies of a key outlive a
machine whose shards are nodes, and what follows from a view does so for everybody who
has that view.

With two copies, whoever of the two is left is among the first two of those that are
left, as in an order without machines. This holds if no machine is in two zones.
"""

from collections import Counter
from collections.abc import Sequence

from infinistore.cluster.membership import Node

__all__ = ["Apart", "machine_of"]


def machine_of(node: Node) -> str:
    """Return the name of a node's machine: what the node says, else the host of its
    address.
    """
    return node.host or node.address.partition("://")[2].rpartition(":")[0]


class Apart:
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
                apart = 2 * (self._machines[node] not in machines) + (self._zones[node] not in zones)
                if apart > most:
                    found, most = node, apart
                    if most == 3:
                        break
        return found
