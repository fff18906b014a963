"""What a change of the view does to what is stored: whether reads may miss some of it
from then on, although no node has removed it.
"""

from infinistore.cluster.apart import machine_of
from infinistore.cluster.membership import Node, NodeState, View

__all__ = ["still_finds"]


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
