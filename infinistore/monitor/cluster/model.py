"""What the screen of a cluster shows: its nodes, what each does, and the sum."""

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime

import attrs

from infinistore.cluster.membership import Node
from infinistore.monitor.model import Snapshot
from infinistore.monitor.rates import Rates

__all__ = ["ClusterSnapshot", "NodeRow", "Total", "total"]


@attrs.frozen
class NodeRow:
    """One node. What a silent one did last is still in `snapshot`."""

    node: Node
    snapshot: Snapshot
    age_s: float | None = None
    """For how long it has not answered; None if it never has."""
    silent_s: float | None = None
    """For how long it has been silent; None if it answers, or was asked just now."""

    @property
    def answers(self) -> bool:
        """Whether it has answered, and still does."""
        return self.age_s is not None and self.silent_s is None

    @property
    def rates(self) -> Rates | None:
        """What it does now; None if that is not known."""
        return self.snapshot.rates if self.answers else None


@attrs.frozen
class ClusterSnapshot:
    """The contents of a screen."""

    url: str
    at: datetime
    kind: str
    """Where the view comes from: "static", "file" or "etcd"."""
    epoch: int
    copies: int
    view_age_s: float
    """For how long nothing has confirmed the view."""
    problem: str
    """What keeps a newer view from coming; empty if nothing does."""
    rows: Sequence[NodeRow] = ()


@attrs.frozen(kw_only=True)
class Total:
    """The sum of the nodes that answer. None is unknown."""

    nodes: int
    answering: int
    weight: int
    """Of all nodes."""
    keys: int | None
    used_bytes: int | None
    capacity_bytes: int | None
    disk_used_bytes: int | None
    disk_capacity_bytes: int | None
    requests: float | None
    received_bytes: float | None
    sent_bytes: float | None
    hit_rate: float | None


def total(rows: Sequence[NodeRow]) -> Total:
    """Add the nodes up."""
    found = [one.snapshot.stats for one in rows if one.answers and one.snapshot.stats is not None]
    rates = [one.rates for one in rows if one.rates is not None]
    disks = [disk for stats in found if stats.disk is not None for disk in stats.disk.disks]
    reads = sum(one.reads for one in rates)
    hits = sum(one.reads * one.hit_rate for one in rates if one.hit_rate is not None)

    def added(of: Callable[[Rates], float]) -> float | None:
        return sum(map(of, rates)) if rates else None

    return Total(
        nodes=len(rows),
        answering=sum(one.answers for one in rows),
        weight=sum(one.node.weight for one in rows),
        keys=_added(one.store.keys for one in found),
        used_bytes=_added(one.store.used_bytes for one in found),
        capacity_bytes=_added(one.store.capacity_bytes for one in found),
        disk_used_bytes=_added(one.used_bytes for one in disks),
        disk_capacity_bytes=_added(one.capacity_bytes for one in disks),
        requests=added(lambda one: one.requests),
        received_bytes=added(lambda one: one.received_bytes),
        sent_bytes=added(lambda one: one.sent_bytes),
        hit_rate=hits / reads if reads > 0 else None,
    )


def _added(values: Iterable[int]) -> int | None:
    several = list(values)
    return sum(several) if several else None
