"""What stands where in etcd, under `/infinistore/CLUSTER/`.

| key | value |
|---|---|
| `config` | the placement version and the number of copies |
| `nodes/ID` | a node, under a lease; its create revision is the generation |
| `purge` | 32 random digits, or anything; its revision is that of the last purge |
| `purged/ID` | the last purge that a node has carried out |
"""

import re
from collections.abc import Iterable, Mapping

import attrs

from infinistore.cluster.documents import ClusterConfig, Drain, WrongDocument, read_config, read_drain, read_node
from infinistore.cluster.etcd.gateway import Item
from infinistore.cluster.membership import Node, NodeState

_UNIQUE = re.compile(rb"[0-9a-f]{32}")


def is_unique(purge: bytes) -> bool:
    """Whether the value of a purge tells it from all others."""
    return bool(_UNIQUE.fullmatch(purge))


@attrs.frozen
class Layout:
    """The keys of one cluster."""

    cluster: str

    @property
    def prefix(self) -> str:
        """What all keys of the cluster begin with."""
        return f"/infinistore/{self.cluster}/"

    @property
    def config(self) -> str:
        """The key of the configuration."""
        return self.prefix + "config"

    @property
    def purge(self) -> str:
        """The key of the last purge."""
        return self.prefix + "purge"

    @property
    def nodes(self) -> str:
        """What the keys of nodes begin with."""
        return self.prefix + "nodes/"

    def node(self, node_id: str) -> str:
        """The key of a node."""
        return self.nodes + node_id

    @property
    def drains(self) -> str:
        """What the keys of drains begin with."""
        return self.prefix + "drains/"

    def drain(self, node_id: str) -> str:
        """The key that is there while a node is to drain, or has drained."""
        return self.drains + node_id

    def purged(self, node_id: str) -> str:
        """The key of the last purge that a node has carried out."""
        return f"{self.prefix}purged/{node_id}"


@attrs.frozen
class Listing:
    """What etcd lists of a cluster. `config` is None and `purged_revision` 0 if it says
    nothing of them. `problems` are half sentences about items that cannot be read, by
    their keys. `drains` are those that were asked for, by the ids of their nodes, which
    are registered or not; one that is counts as draining.
    """

    config: ClusterConfig | None
    nodes: Mapping[str, Node]
    purged_revision: int
    problems: Mapping[str, str]
    drains: Mapping[str, Drain]

    @classmethod
    def of(cls, layout: Layout, items: Iterable[Item]) -> "Listing":
        """Read all items of a cluster.

        Raises:
            WrongDocument: the configuration cannot be used, as the message says.
        """
        config: ClusterConfig | None = None
        purged_revision = 0
        nodes: dict[str, Node] = {}
        problems: dict[str, str] = {}
        drains: dict[str, Drain] = {}
        for item in items:
            if item.key == layout.config:
                try:
                    config = read_config(item.value)
                except WrongDocument as error:
                    raise WrongDocument(f"{layout.config} in etcd {error}") from None
            elif item.key == layout.purge:
                purged_revision = item.mod_revision
            elif item.key.startswith(layout.drains):
                drains[item.key.removeprefix(layout.drains)] = read_drain(item.value)
            elif item.key.startswith(layout.nodes):
                node_id = item.key.removeprefix(layout.nodes)
                try:
                    nodes[node_id] = read_node(item.value, id=node_id, generation=item.create_revision)
                except WrongDocument as error:
                    problems[item.key] = str(error)
        for node_id in drains.keys() & nodes.keys():
            nodes[node_id] = attrs.evolve(nodes[node_id], state=NodeState.DRAINING)
        return cls(config, nodes, purged_revision, problems, drains)
