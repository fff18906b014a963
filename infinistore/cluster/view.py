"""What one process believes a cluster to be. Immutable: a newer view replaces it."""

import enum

import attrs
from attrs.validators import ge, in_, le

__all__ = ["DEFAULT_WEIGHT", "MOST_COPIES", "MOST_WEIGHT", "Node", "NodeState", "View"]

DEFAULT_WEIGHT = 100
MOST_WEIGHT = 10_000
MOST_COPIES = 8


class NodeState(enum.Enum):
    """What a node says of itself."""

    JOINING = "joining"
    """It serves, its weight grows, and its blocks are still with their former
    owners.
    """
    SERVING = "serving"
    DRAINING = "draining"
    """It is about to leave: it is read, and nothing more is written to it."""


@attrs.frozen
class Node:
    """One server of a cluster."""

    id: str
    address: str
    """The URL of its server: `infinistore://HOST:PORT`."""
    instance: str = ""
    """The random identity of its process; empty if the membership does not know it."""
    generation: int = 0
    """Grows when another process registers under the same id."""
    weight: int = attrs.field(default=DEFAULT_WEIGHT, validator=[ge(0), le(MOST_WEIGHT)])
    """Its share of the keys, relative to the other nodes' weights; 0 for none."""
    capacity_bytes: int = 0
    state: NodeState = NodeState.SERVING
    zone: str = ""
    host: str = ""
    """The name of its machine."""
    protocol: int = 0
    """The newest version of the protocol that it speaks; 0 if that is not known."""
    founding: bool = attrs.field(default=False, eq=False)
    """Whether it came lately, when nobody was there but such nodes. For those who
    register: two views that differ in this alone are the same."""


def _in_order_of_id(view: "View", attribute: object, nodes: tuple[Node, ...]) -> None:
    ids = [node.id for node in nodes]
    if ids != sorted(set(ids)):
        raise ValueError(f"the nodes of a view must be in order of their ids, each once, not {ids}")


@attrs.frozen
class View:
    """The nodes of a cluster and what its configuration says."""

    epoch: int
    """Which of two views of one membership is newer."""
    nodes: tuple[Node, ...] = attrs.field(default=(), validator=_in_order_of_id)
    copies: int = attrs.field(default=1, validator=in_(range(1, MOST_COPIES + 1)))
    """How many nodes have each block."""
    purged_revision: int = 0
    """Blocks that were put before this revision are not to be found again."""
    drains: tuple[str, ...] = ()
    """The ids of nodes that drain, or have drained, because somebody asked for it, in
    order. Those that have are not among the nodes."""
