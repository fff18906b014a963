"""Follows a cluster in etcd: reads all of it, watches it, and reads it again now and
then, because a watch is silent when its member has lost the others.

What is not heard changes nothing: while etcd does not answer, or holds what cannot be
used, the last view holds. One node that vanishes is gone. If a third of the nodes
vanish within the time of one lease, the membership itself may be at fault: then they
are asked, and those that answer stay until they do not, or are listed again. A node
that drained is gone without being asked (`Departures`).
"""

import logging
from collections.abc import Callable, Collection, Mapping
from random import Random
from typing import Final

import attrs

from infinistore.cluster.documents import ClusterConfig, WrongDocument
from infinistore.cluster.etcd.gateway import (
    Change,
    EtcdMisbehaved,
    EtcdRefused,
    Found,
    Item,
    range_of,
    read_range,
    read_watch,
    watch,
)
from infinistore.cluster.etcd.layout import Layout, Listing
from infinistore.cluster.etcd.session import EtcdSession, EtcdUnavailable, NextLine, Pause, Probe
from infinistore.cluster.membership import Node, NodeState, View

_log = logging.getLogger("infinistore.cluster")


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
        """Take a new list. Return the nodes in doubt, to be asked before `answered`."""
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


LEASE_S: Final = 10
"""The lease of a node."""
READ_AGAIN_S: Final = 30.0
_CREATED_S: Final = 5.0
"""How long etcd may take to say that it has created a watch."""
PROBE_S: Final = 0.5
"""How long nodes may take to answer who they are."""
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 2.0


class Follower:
    """What one process knows of a cluster in etcd. `run` is a flow that never ends."""

    def __init__(
        self,
        session: EtcdSession,
        layout: Layout,
        *,
        clock: Callable[[], float],
        random: Random,
        on_view: Callable[[View], None],
        on_problem: Callable[[str], None] = lambda problem: None,
        lease_s: float = LEASE_S,
    ) -> None:
        """`on_view` gets each new view, and `on_problem` what keeps one from coming."""
        self._session = session
        self._layout = layout
        self._clock = clock
        self._random = random
        self._on_view = on_view
        self._on_problem = on_problem
        self._items: dict[str, Item] = {}
        self._revision = 0
        self._departures = Departures(lease_s)
        self._told: set[str] = set()
        self._refused = False  # since etcd last said what there is
        # An etcd that lost everything says nothing of these, which is no news of them.
        self._config = ClusterConfig()
        self._purged_revision = 0
        self.view: View | None = None
        self.confirmed_at: float | None = None
        """When etcd last said what there is, by the clock that was given."""

    async def run(self) -> None:
        """Follow the cluster, for ever."""
        pause_s = _FIRST_PAUSE_S
        while True:
            before = self.confirmed_at
            try:
                await self._read()
                await self._watch()
            except (EtcdUnavailable, EtcdMisbehaved, EtcdRefused) as error:
                self._refused |= isinstance(error, EtcdRefused)
                # Silence does not take the place of the reason for a refusal.
                if not (self._refused and isinstance(error, EtcdUnavailable)):
                    self._tell(f"etcd: {error}", "etcd")
                self._session.turn()
            if self.confirmed_at != before:
                pause_s = _FIRST_PAUSE_S
            # Clients that lost etcd at the same time must not come back at the same
            # time.
            await Pause(pause_s * (0.5 + self._random.random()))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _read(self) -> bool:
        """Read all there is. Returns whether it was news."""
        found: Found = read_range(await self._session.call(range_of(self._layout.prefix)))
        items = {item.key: item for item in found.items}
        news = items != self._items
        self._items, self._revision = items, found.revision
        self.confirmed_at = self._clock()
        self._told.discard("etcd")
        self._refused = False
        if news or self.view is None or self._departures.kept:
            await self._believe()
        return news

    async def _watch(self) -> None:
        """Watch until the stream ends or what it says cannot be relied on."""
        await self._session.open_stream(watch(self._layout.prefix, self._revision + 1))
        read_at = self._clock() + READ_AGAIN_S
        created_by = self._clock() + _CREATED_S
        created = False
        while True:
            line = await NextLine(max(0.0, (read_at if created else created_by) - self._clock()))
            if line is not None:
                change = read_watch(line)
                if change.canceled:
                    # Such as one from a revision that is compacted. The stream would
                    # stay open, and be silent for ever.
                    return
                created = True
                await self._apply(change)
            elif not created:
                raise EtcdUnavailable("a watch was not created in time")
            elif await self._read_while_watching():
                self._session.turn()
                return  # the watch missed what is there
            else:
                read_at = self._clock() + READ_AGAIN_S

    async def _read_while_watching(self) -> bool:
        try:
            return await self._read()
        except (EtcdUnavailable, EtcdMisbehaved) as error:
            self._tell(f"etcd: {error}", "etcd")
            return False

    async def _apply(self, change: Change) -> None:
        self.confirmed_at = self._clock()
        revision = change.apply_to(self._items)
        if revision:
            self._revision = revision
            await self._believe()

    async def _believe(self) -> None:
        """Make a view of what is listed."""
        try:
            listing = Listing.of(self._layout, self._items.values())
        except WrongDocument as error:
            self._tell(str(error), self._layout.config)
            return
        self._told &= listing.problems.keys()
        for key, problem in listing.problems.items():
            self._tell(f"{key} in etcd {problem}", key, leaves_out=True)
        self._config = listing.config or self._config
        self._purged_revision = listing.purged_revision or self._purged_revision
        doubtful = self._departures.listed(listing.nodes, self._clock())
        if doubtful:
            alive = await Probe(doubtful, PROBE_S)
            self._departures.answered(alive)
            if alive:
                _log.warning(
                    "nodes vanished from etcd at once; those that answer stay",
                    extra={"vanished": len(doubtful), "stay": len(alive)},
                )
        nodes = self._departures.nodes
        view = View(
            epoch=self._revision,
            nodes=tuple(nodes[node_id] for node_id in sorted(nodes)),
            copies=self._config.copies,
            purged_revision=self._purged_revision,
            drains=tuple(sorted(listing.drains)),
        )
        self._publish(view)

    def _publish(self, view: View) -> None:
        old = self.view
        if old is not None and attrs.evolve(old, epoch=view.epoch) == view:
            return
        self.view = view
        self._on_view(view)

    def _tell(self, problem: str, about: str, *, leaves_out: bool = False) -> None:
        """Log once what is wrong, until it is over, whatever members of etcd say."""
        if about not in self._told:
            self._told.add(about)
            if leaves_out:
                _log.warning("the view of the cluster leaves a node out: %s", problem)
            else:
                _log.warning("the view of the cluster stays as it is: %s", problem)
        self._on_problem(problem)
