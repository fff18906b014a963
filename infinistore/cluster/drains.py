"""Drains on request: what an operator asks of a node, and how far the node is.

In etcd, a drain is one key beside those of the nodes. An operator writes it, the node
writes there how far it is, and whoever deletes it lets the node serve again. So a drain
outlives the node's lease and its process, and nobody but a node writes what stands
under its lease.
"""

import json
from typing import Any, Final

import attrs

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
        given: Any = json.loads(document)
    except (ValueError, RecursionError):
        return Drain()
    if not isinstance(given, dict):
        return Drain()
    counts = {name: given[name] for name in _COUNTS if type(given.get(name)) is int and 0 <= given[name] <= _MOST_COUNT}
    return Drain(done=given.get("done") is True, **counts)
