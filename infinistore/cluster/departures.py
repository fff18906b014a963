"""Which nodes that vanished from a membership are believed to be gone.

One node that vanishes is gone. If a third of the nodes vanish within the time of one
lease, the membership itself may be at fault: then they are to be asked, and those that
answer stay until they do not, or are listed again. A node that drained is gone without
being asked.
"""

from collections.abc import Collection, Mapping

from infinistore.cluster.membership import Node, NodeState

__all__ = ["Departures"]


class Departures:
    """What became of the nodes of one cluster. `window_s` is the time of a lease."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._listed: dict[str, Node] = {}
        self._left: dict[str, tuple[float, Node]] = {}
        self._kept: dict[str, Node] = {}

    @property
    def nodes(self) -> dict[str, Node]:
        """The nodes that are listed, and those that stay though they are not."""
        return {**self._kept, **self._listed}

    @property
    def kept(self) -> Collection[str]:
        """Those that stay though they are not listed."""
        return self._kept.keys()

    def listed(self, nodes: Mapping[str, Node], now: float) -> tuple[Node, ...]:
        """Take a new list. Return the nodes to ask before `answered` is called; until
        then those that are in doubt stay.
        """
        for node_id, node in self._listed.items():
            if node_id not in nodes and node.state is not NodeState.DRAINING:
                self._left[node_id] = now, node
        self._listed = dict(nodes)
        self._left = {
            node_id: (when, node)
            for node_id, (when, node) in self._left.items()
            if node_id not in nodes and (node_id in self._kept or now - when < self._window_s)
        }
        self._kept = {node_id: node for node_id, node in self._kept.items() if node_id not in nodes}
        if 3 * len(self._left) < len(self._left) + len(nodes):
            doubtful = list(self._kept.values())
        else:
            doubtful = [node for _, node in self._left.values()]
        self._kept = {node.id: node for node in doubtful}
        return tuple(doubtful)

    def answered(self, ids: Collection[str]) -> None:
        """Of the nodes that were to be asked, these answered. The others are gone."""
        for node_id in self._kept.keys() - set(ids):
            del self._left[node_id]
        self._kept = {node_id: node for node_id, node in self._kept.items() if node_id in ids}
