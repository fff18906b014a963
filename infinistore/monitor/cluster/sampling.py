"""Follows a cluster, and asks each of its nodes periodically.

A node is asked by a task of its own, so that one that does not answer delays no other.
Only the node whose screen is shown is asked for its details, which cost more.
"""

import logging
import math
from collections.abc import Callable
from datetime import datetime
from urllib.parse import urlencode

import attrs
import trio

from infinistore.client import open_store
from infinistore.cluster.locate import ClusterUrl, EtcdPlace, FilePlace, StaticPlace
from infinistore.cluster.membership import Node, StaticMembership
from infinistore.cluster_io.memberships import RunningMembership, make_membership
from infinistore.cluster_io.probing import credentials
from infinistore.errors import InfiniStoreException
from infinistore.monitor.app import Pace, Source
from infinistore.monitor.cluster_view import ClusterSnapshot, NodeRow
from infinistore.monitor.model import Model

__all__ = ["ClusterWatch"]

_LATE_S = 1.0
"""How much later than it is due an answer may come before its node counts as silent."""


@attrs.define(eq=False)
class _Watched:
    """One node that is asked."""

    node: Node
    model: Model
    pace: Pace
    asked_s: float
    """When it was asked for the first time."""
    answered_s: float | None = None
    has_left: bool = False
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    @property
    def has_two(self) -> bool:
        """Whether it was sampled twice, or does not answer."""
        snapshot = self.model.snapshot()
        return bool(snapshot.history) or snapshot.lost is not None


class ClusterWatch:
    """The nodes of a cluster and what they do. `source` says how to reach them."""

    def __init__(self, source: Source, cluster: ClusterUrl, interval_s: float) -> None:
        """Raises ConfigError if a file that the URL names cannot be used."""
        self.on_change: Callable[[str], None] = lambda node_id: None
        """Called with the id of a node that has answered or failed to, and with an
        empty one after a change of the view.
        """
        self._source = source
        self._cluster = cluster
        self._interval_s = interval_s
        self._options = f"?{urlencode(cluster.options)}" if cluster.options else ""
        place = cluster.place
        # What a membership logs, the screen says, too.
        logging.getLogger("infinistore.cluster").addHandler(logging.NullHandler())
        self._membership: StaticMembership | RunningMembership = (
            StaticMembership(place.nodes, copies=place.copies)
            if isinstance(place, StaticPlace)
            else make_membership(place, *credentials(cluster.options, source.token))
        )
        self._watched: dict[str, _Watched] = {}
        self._opened: str | None = None
        self._has_new_view = trio.Event()

    async def run(self, *, wait_s: float, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Follow the cluster until cancelled. The task has started when it knows one
        view.

        Raises:
            StoreUnavailable: there is none within `wait_s`.
        """
        membership = self._membership
        async with trio.open_nursery() as nursery:
            if isinstance(membership, RunningMembership):
                membership.add_listener(lambda view: self._has_new_view.set())
                nursery.start_soon(membership.run)
                with trio.move_on_after(wait_s):
                    await self._has_new_view.wait()
                membership.wait_known(0.0 if membership.view.epoch >= 0 else wait_s)
            task_status.started()
            while True:
                self._has_new_view = trio.Event()
                self._follow(nursery)
                self.on_change("")
                await self._has_new_view.wait()

    def _follow(self, nursery: trio.Nursery) -> None:
        """Ask the nodes of the newest view, and no others."""
        nodes = {node.id: node for node in self._membership.view.nodes}
        for node_id, watched in list(self._watched.items()):
            node = nodes.get(node_id)
            if node is not None and node.address == watched.node.address:
                watched.node, watched.has_left = node, False
            elif node_id == self._opened and node is None:
                watched.has_left = True  # whoever looks at it shall see its end
            else:
                self._forget(watched)
        for node in nodes.values():
            if node.id not in self._watched:
                watched = _Watched(node, Model(node.address), Pace(self._interval_s), trio.current_time())
                self._watched[node.id] = watched
                nursery.start_soon(self._ask, watched)

    def _forget(self, watched: _Watched) -> None:
        watched.scope.cancel()
        del self._watched[watched.node.id]

    async def _ask(self, watched: _Watched) -> None:
        with watched.scope:
            while True:
                try:
                    async with open_store(watched.node.address + self._options, **self._source.options()) as store:
                        while True:
                            details = watched.node.id == self._opened
                            stats = await store.stats(details=details)
                            watched.answered_s = trio.current_time()
                            watched.model.observe(stats, now_s=watched.answered_s, at=_now())
                            self.on_change(watched.node.id)
                            await watched.pace.next()
                except InfiniStoreException as error:
                    reason = str(error) or type(error).__name__
                    watched.model.lose(reason, now_s=trio.current_time(), at=_now())
                self.on_change(watched.node.id)
                await watched.pace.next()

    def open(self, node_id: str | None) -> None:
        """Ask one node, or none, for details, too."""
        before = self._watched.get(self._opened or "")
        self._opened = node_id
        if before is not None and before.has_left and before.node.id != node_id:
            self._forget(before)
        if node_id in self._watched:
            self._watched[node_id].pace.hurry()

    @property
    def interval_s(self) -> float:
        """Seconds between two questions to a node."""
        return self._interval_s

    @interval_s.setter
    def interval_s(self, interval_s: float) -> None:
        self._interval_s = interval_s
        for watched in self._watched.values():
            watched.pace.interval_s = interval_s

    @property
    def all_sampled(self) -> bool:
        """Whether each node was sampled twice, or does not answer."""
        return all(watched.has_two for watched in self._watched.values())

    def snapshot(self) -> ClusterSnapshot:
        """Return what is known now."""
        membership = self._membership
        view = membership.view
        age_s = membership.age_s
        return ClusterSnapshot(
            url=str(self._cluster),
            at=_now(),
            kind=_KINDS[type(self._cluster.place)],
            epoch=view.epoch,
            copies=view.copies,
            view_age_s=0.0 if math.isinf(age_s) else age_s,
            problem=membership.problem if isinstance(membership, RunningMembership) else "",
            rows=[self._row(self._watched[node_id]) for node_id in sorted(self._watched)],
        )

    def _row(self, watched: _Watched) -> NodeRow:
        now_s = trio.current_time()
        snapshot = watched.model.snapshot()
        age_s = None if watched.answered_s is None else now_s - watched.answered_s
        quiet_s = now_s - watched.asked_s if age_s is None else age_s
        is_silent = snapshot.lost is not None or quiet_s > self._interval_s + _LATE_S
        return NodeRow(watched.node, snapshot, age_s, quiet_s if is_silent else None)


_KINDS = {StaticPlace: "static", FilePlace: "file", EtcdPlace: "etcd"}


def _now() -> datetime:
    return datetime.now().astimezone()
