"""Deletes all blocks of an engine from a store, as for new weights."""

from collections.abc import Iterable

from infinistore.blocking import BlockingStore, delete_by_prefix
from infinistore.errors import InfiniStoreException, PermissionDenied


class BlocksLeft(Exception):
    """Blocks of an engine may be left, and would be read again. Says what to do."""


def delete_all(store: BlockingStore, prefixes: Iterable[str]) -> int:
    """Delete the keys with any of these prefixes. Return how many were deleted.

    Raises:
        BlocksLeft: a node of a cluster does not answer, and may have some still (the
            others have none), the store does not answer, or it has blocks on disk: it
            does not list those that are in no memory.
    """
    names = ", ".join(prefixes := sorted(prefixes))
    try:
        outcomes = [delete_by_prefix(store, prefix) for prefix in prefixes]
        disk = store.stats().disk
    except PermissionDenied:
        raise _left(names, "it is not known whether the store has disks", "Give its tenant the role monitor") from None
    except InfiniStoreException as error:
        raise _left(names, str(error), "Repeat the reset") from None
    for _, lost in outcomes:
        if lost:
            raise _left(names, lost, "Start these nodes, or take them out of the cluster, and repeat the reset")
    if disk is not None and (on_disk := sum(one.keys for one in disk.disks)):
        raise BlocksLeft(
            f"{on_disk} blocks are on disks, where some under {names} may be, and would be read again. Purge the store "
            "(infinistore purge), or start the engine with another namespace"
        )
    return sum(deleted for deleted, _ in outcomes)


def _left(names: str, problem: str, remedy: str) -> BlocksLeft:
    return BlocksLeft(f"blocks under {names} may be left, and would be read again: {problem}. {remedy}")
