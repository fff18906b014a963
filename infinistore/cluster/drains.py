"""Drains on request: what an operator asks of a node, and how far the node is.

In etcd, a drain is one key beside those of the nodes. An operator writes it, the node
writes there how far it is, and whoever deletes it lets the node serve again. So a drain
outlives the node's lease and its process, and nobody but a node writes what stands
under its lease.
"""

import json
from typing import Final

import attrs

from infinistore.cluster.documents import WrongDocument, read_object

__all__ = ["Drain", "read_drain", "write_drain"]

_MOST_COUNT: Final = 2**63


@attrs.frozen
class Drain:
    """How far a node is. Groups are keys with one hash tag."""

    done: bool = False
    """Whether it has passed on what it could, and gave its lease up."""
    groups: int = 0
    """How many groups are to be moved: the hottest ones."""
    moved_groups: int = 0
    skipped_groups: int = 0
    """Groups that their new owners had already."""
    failed_groups: int = 0
    """Groups that could not be moved as a whole."""
    moved_blocks: int = 0
    moved_bytes: int = 0
    size_bytes: int = 0
    """What the blocks to be moved have together."""
    done_bytes: int = 0
    """What of this was moved, was there, is gone, or could not be moved."""
    elapsed_s: int = 0
    """For how long it has been passing blocks on."""

    @property
    def ratio(self) -> float:
        """Which part of the blocks is done: 0.0 to 1.0."""
        return min(1.0, self.done_bytes / self.size_bytes) if self.size_bytes else 0.0

    @property
    def left_s(self) -> float | None:
        """About how many seconds the rest takes at the pace so far; None if that cannot
        be said yet.
        """
        if not self.elapsed_s or not self.ratio:
            return None
        return self.elapsed_s * (1 - self.ratio) / self.ratio

    def __str__(self) -> str:
        told = f"{self.moved_groups + self.skipped_groups} of {self.groups} groups"
        return told + (f", {self.failed_groups} could not be moved" if self.failed_groups else "")


_COUNTS: Final = tuple(field.name for field in attrs.fields(Drain) if field.name != "done")


def write_drain(drain: Drain) -> bytes:
    """Write a drain as it stands in etcd."""
    return json.dumps(attrs.asdict(drain)).encode()


def read_drain(document: bytes) -> Drain:
    """Read a drain. Whatever stands there asks for one: what cannot be read counts as
    not begun.
    """
    try:
        given = read_object(document)
    except WrongDocument:
        return Drain()
    counts = {name: given[name] for name in _COUNTS if type(given.get(name)) is int and 0 <= given[name] <= _MOST_COUNT}
    return Drain(done=given.get("done") is True, **counts)
