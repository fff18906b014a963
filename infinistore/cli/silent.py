"""The nodes of a cluster that do not answer, and what is done without them."""

from typing import TYPE_CHECKING

from infinistore.errors import PermissionDenied, StoreUnavailable

if TYPE_CHECKING:
    from infinistore.blocking import BlockingStore

__all__ = ["demand_all_nodes", "silent_nodes"]


def silent_nodes(store: "BlockingStore") -> str:
    """Return their ids, separated by commas; nothing if the store is no cluster, or
    does not tell.
    """
    try:
        cluster = store.stats().cluster if store.is_cluster else None
    except PermissionDenied:  # a tenant without the role monitor
        return ""
    return "" if cluster is None else ", ".join(node.id for node in cluster.nodes if node.problem)


def demand_all_nodes(lost: str, done: str) -> None:
    """Refuse to call something done if a node has had no part in it: `lost` is its
    error in words.

    Raises:
        StoreUnavailable: these nodes do not answer.
    """
    if lost:
        remedy = "start these nodes, or take them out of the cluster, and repeat"
        raise StoreUnavailable(f"some keys may not be {done}: {lost}; {remedy}")
