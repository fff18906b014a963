"""Registers one node in etcd, under a lease that it renews, and has it drain on
request.

A node that loses its lease goes on serving, keeps its blocks and registers again. An id
or an address that another process uses stops the newcomer, never the one that was
there; what an earlier process of this node on this machine left is replaced, unless
that one answers. A node that missed a purge purges first. One that joins others begins
with a part of its weight, so that not everybody misses there at once; servers that
start together (*founding*) have equal shares. One that drained on request stays out,
also when its process is started again, until the request is taken back.
"""

import enum
import logging
import math
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, Final

import attrs

from infinistore.cluster.documents import (
    ClusterConfig,
    Drain,
    WrongDocument,
    read_drain,
    read_purged,
    write_config,
    write_drain,
    write_node,
)
from infinistore.cluster.etcd.follower import LEASE_S, PROBE_S, READ_AGAIN_S
from infinistore.cluster.etcd.gateway import (
    NOT_FOUND_CODE,
    EtcdMisbehaved,
    EtcdRefused,
    Item,
    Outcome,
    Request,
    delete,
    grant_lease,
    keep_alive,
    put,
    range_of,
    read_lease,
    read_outcome,
    read_range,
    read_ttl,
    revoke_lease,
    transaction,
    unless_changed,
)
from infinistore.cluster.etcd.layout import Layout, Listing, is_unique
from infinistore.cluster.etcd.session import EtcdSession, EtcdUnavailable, Pause, Probe
from infinistore.cluster.membership import Node, NodeState, View
from infinistore.cluster.placement import machine_of
from infinistore.errors import ConfigError

_log = logging.getLogger("infinistore.cluster")


class RequestedDrain:
    """What is asked of a node, and what the node says of it."""

    def __init__(self, layout: Layout, node_id: str, on_change: Callable[[bool], None]) -> None:
        """Calls `on_change` with whether a drain is wanted, when that changes."""
        self._item = Item(layout.drain(node_id))
        self._on_change = on_change
        self.progress = Drain()
        """How far the node is, whether etcd has been told or not."""

    @property
    def wanted(self) -> bool:
        """Whether the node is to drain, or has drained."""
        return self._item.mod_revision > 0

    @property
    def over(self) -> bool:
        """Whether etcd says that the node has drained."""
        return self.is_over(self._item)

    @staticmethod
    def is_over(item: Item | None) -> bool:
        """Whether an item is that of a drain which is done."""
        return item is not None and item.mod_revision > 0 and read_drain(item.value).done

    @property
    def key(self) -> str:
        """Its key in etcd."""
        return self._item.key

    @property
    def has_news(self) -> bool:
        """Whether etcd is to be told how far the node is."""
        return self.wanted and not self.over and write_drain(self.progress) != self._item.value

    def found(self, items: Mapping[str, Item]) -> bool:
        """Take what etcd lists. Returns whether a drain is wanted no longer."""
        former, self._item = self._item, items.get(self.key, Item(self.key))
        if self._item.create_revision == former.create_revision:
            return False
        self.progress = Drain()
        if former.mod_revision:
            self._on_change(False)
        if self.wanted and not self.over:
            self._on_change(True)
        return former.mod_revision > 0

    def told(self, node: Item) -> Request:
        """Return the request that says how far the node is; the last one deletes it."""
        then = [put(self.key, write_drain(self.progress))]
        compare = [unless_changed(self._item)]
        if self.progress.done:
            then.append(delete(node.key))
            compare.append(unless_changed(node))
        return transaction(compare, then, self.key)

    def was_told(self, outcome: Outcome, progress: Drain) -> None:
        """Take what became of that request, which has said this."""
        if outcome.succeeded:
            self._item = attrs.evolve(self._item, value=write_drain(progress), mod_revision=outcome.revision)


_CALL_S: Final = 1.0
SHORTEST_PAUSE_S: Final = 0.25
_RETRY_S: Final = 1.0
_STEPS: Final = 5
"""In so many steps the weight of a newcomer grows. In the last it is whole, and the
node is still joining, so that clients look elsewhere for the keys of that step, too."""


class RegistrationState(enum.Enum):
    """Whether other processes can see this node."""

    REGISTERING = "registering"
    REGISTERED = "registered"
    LOST = "lost"
    """It was registered, and is being registered again."""
    DRAINED = "drained"
    """It has drained on request, and stays out until that is taken back."""
    LEFT = "left"


class Registration:
    """The registration of one node: the flows `run`, without end, and `leave`."""

    def __init__(
        self,
        session: EtcdSession,
        layout: Layout,
        node: Node,
        *,
        clock: Callable[[], float],
        random: Random,
        config: ClusterConfig | None = None,
        has_old_blocks: bool = False,
        on_registered: Callable[[], None] = lambda: None,
        on_drain: Callable[[bool], None] = lambda wanted: None,
        on_purge: Callable[[], None] = lambda: None,
        warm_up_s: float = 30.0,
        lease_s: int = LEASE_S,
    ) -> None:
        """`node` has its full weight. `config` is for a cluster that has none yet.
        `has_old_blocks` says that the node has blocks of an earlier process.
        `on_registered` is called each time that the node has been registered, or knows
        that it stays out. `on_drain` is called with True when somebody asks the node to
        drain, and with False when that is taken back. `on_purge` is called when the
        node is to delete its blocks; `purged` says that it has.
        """
        self._session = session
        self._layout = layout
        self._clock = clock
        self._random = random
        self._config = config or ClusterConfig()
        self._node = node
        self._warm_up_s = warm_up_s
        self._lease_s = lease_s
        self._lease = 0
        self._item = Item(layout.node(node.id))
        """What is written, as far as is known."""
        self._draining = False
        self._request = RequestedDrain(layout, node.id, on_drain)
        self._joined_at = -math.inf
        self._begins_as = node
        """What it is until its warm-up is over, but for the weight."""
        self._grows = False
        self._met: set[tuple[str, str]] = set()
        """The ids and instances that were there while this node has been founding."""
        self._conflict_since: float | None = None
        self._purged: int | None = None if has_old_blocks else 0
        """The last purge that was carried out; None if only etcd can know."""
        self._purging: int | None = None
        """The purge that is being carried out. Meanwhile, the lease is renewed."""
        self._purge = Item(layout.purge)
        """What stood in etcd of the last of these."""
        self._on_purge = on_purge
        self._lasting_purge = 0
        """The last one that no restart undoes: the next process carries out what came
        later."""
        self._look_soon = False
        self._on_registered = on_registered
        self.state = RegistrationState.REGISTERING
        self.problem = ""
        """What keeps the node from being registered; empty if nothing does."""
        self.registrations = 0
        """How often this process has registered the node."""

    @property
    def node(self) -> Node:
        """The node as it ought to stand in etcd now."""
        if self.draining:
            return attrs.evolve(self._node, state=NodeState.DRAINING)
        step = self._step()
        if step > _STEPS:
            return self._node
        weight = max(min(self._node.weight, 1), self._node.weight * step // _STEPS)
        return attrs.evolve(self._begins_as, weight=weight)

    @property
    def draining(self) -> bool:
        """Whether others are not to write to this node any more."""
        return self._draining or self._request.wanted

    def drain(self) -> None:
        """Have others read from this node and not write to it, when the pause ends."""
        self._draining = True

    def drained(self, progress: Drain) -> None:
        """Say how far the drain is that was asked for. If it is done, the node leaves.
        Takes effect when the flow's pause ends.
        """
        self._request.progress = progress

    def purged(self, *, lasting: bool) -> None:
        """Say that blocks are deleted, and if for good; in effect after the pause."""
        self._purged, self._purging = self._purging, None
        if lasting:
            self._lasting_purge = self._purged or 0
        self._look_soon = True

    def seen(self, view: View) -> bool:
        """Whether a view gives reason to look at etcd when the flow's pause ends."""
        if self.state in (RegistrationState.REGISTERED, RegistrationState.DRAINED):
            self._look_soon |= (self._node.id in view.drains) != self._request.wanted
        if self.state is RegistrationState.REGISTERED:
            mine = [node.instance for node in view.nodes if node.id == self._node.id]
            known = self._purging or self._purged or 0
            self._look_soon |= mine != [self._node.instance] or view.purged_revision not in (0, known)
        return self._look_soon

    async def run(self) -> None:
        """Register, and stay registered.

        Raises:
            ConfigError: another process uses the id or the address, the cluster has
                another placement version, or etcd refuses this user. Only before the
                first success.
        """
        while True:
            try:
                await self._register()
                await self._keep()
            except (EtcdUnavailable, EtcdMisbehaved) as error:
                self._tell(f"etcd: {error}")
            except EtcdRefused as error:
                # An etcd that comes back empty loses a lease that it has just granted.
                if not self.registrations and error.code != NOT_FOUND_CODE:
                    raise ConfigError(f"etcd refuses the registration of {self._node.id}: {error}") from None
                self._tell(f"etcd: {error}")
            except ConfigError as error:
                if not self.registrations:
                    raise
                self._tell(str(error))
            await Pause(_RETRY_S * (0.5 + self._random.random()))

    async def leave(self) -> None:
        """Give the lease up. If etcd does not answer, the lease runs out by itself."""
        self.state = RegistrationState.LEFT
        await self._revoke()

    async def _revoke(self) -> None:
        lease, self._lease = self._lease, 0
        if lease:
            try:
                await self._session.call(revoke_lease(lease), _CALL_S)
            except (EtcdUnavailable, EtcdMisbehaved, EtcdRefused) as error:
                _log.info("the lease in etcd is left to run out", extra={"problem": str(error)})

    async def _register(self) -> None:
        while True:
            found = read_range(await self._session.call(range_of(self._layout.prefix)))
            items = {item.key: item for item in found.items}
            await self._check_config(items)
            self._purge_if_told(items)
            if self._purging is None:
                break
            await Pause(READ_AGAIN_S)
        came_back = self._request.found(items)
        if self._request.over:
            await self._stay_out()
            return
        key = self._layout.node(self._node.id)
        standing = items.get(key, Item(key))
        nodes = Listing.of(self._layout, found.items).nodes
        other = nodes.get(self._node.id)
        for one in nodes.values():
            is_rival = one.id == self._node.id or one.address == self._node.address
            if is_rival and one.instance != self._node.instance and not await self._is_gone(one):
                return
        self._conflict_since = None
        if standing.mod_revision and (other is None or other.instance != self._node.instance):
            request = transaction([unless_changed(standing)], [delete(key)], key)
            if not read_outcome(await self._session.call(request, _CALL_S)).succeeded:
                return
            standing = Item(key)
        if not self.registrations or came_back:
            self._join(items)
        await self._write_under_new_lease(standing)

    @property
    def _is_founding(self) -> bool:
        return self.node.founding

    def _meets_older(self, items: Mapping[str, Item]) -> bool:
        """Take what etcd lists while this node is founding. Returns whether a node was
        registered before etcd lost everything: who registers for the first time beside
        a founder founds, too, or is joining. One that was met before has only lost its
        lease.
        """
        nodes = Listing.of(self._layout, self._nodes_of(items)).nodes.values()
        for node in nodes:
            is_new = self._item.create_revision < node.generation == items[self._layout.node(node.id)].mod_revision
            is_older = is_new and node.state is NodeState.SERVING and not node.founding
            if is_older and (node.id, node.instance) not in self._met:
                return True
        self._met.update((node.id, node.instance) for node in nodes)
        return False

    def _nodes_of(self, items: Mapping[str, Item]) -> list[Item]:
        return [item for key, item in items.items() if key.startswith(self._layout.nodes)]

    def _join(self, items: Mapping[str, Item]) -> None:
        """Begin with a part of the weight, if others have what this node lacks."""
        others = [item for item in self._nodes_of(items) if item.key != self._item.key]
        listing = Listing.of(self._layout, others)
        self._met = {(other.id, other.instance) for other in listing.nodes.values()}
        self._grows = bool(listing.problems) or not all(other.founding for other in listing.nodes.values())
        founds = not self._grows and not self.registrations
        if others or founds:
            self._joined_at = self._clock()
        state = NodeState.JOINING if others else NodeState.SERVING
        self._begins_as = attrs.evolve(self._node, state=state, founding=founds)

    async def _stay_out(self) -> None:
        """Wait until the drain that is over is taken back."""
        if self.state is not RegistrationState.DRAINED:
            self.state = RegistrationState.DRAINED
            _log.info("drained on request; out of the cluster", extra={"node": self._node.id})
        self.problem = ""
        self._on_registered()
        while True:
            await Pause(READ_AGAIN_S)
            self._look_soon = False
            found = read_range(await self._session.call(range_of(self._request.key)))
            if not any(item.key == self._request.key and self._request.is_over(item) for item in found.items):
                return

    async def _write_under_new_lease(self, standing: Item) -> None:
        lease = read_lease(await self._session.call(grant_lease(self._lease_s), _CALL_S))
        value = write_node(self.node)
        then = [put(standing.key, value, lease), self._put_purged()]
        reply = await self._session.call(transaction([unless_changed(standing)], then, standing.key), _CALL_S)
        outcome = read_outcome(reply)
        if not outcome.succeeded:
            return  # somebody was faster; what stands there now is looked at again
        created = standing.create_revision or outcome.revision
        self._item = Item(standing.key, value, created, outcome.revision, lease)
        self._lease = lease
        self.registrations += 1
        self.state = RegistrationState.REGISTERED
        self.problem = ""
        self._on_registered()
        _log.info(
            "registered in etcd", extra={"node": self._node.id, "cluster": self._layout.cluster, "generation": created}
        )

    async def _keep(self) -> None:
        """Renew the lease until it is lost, and write what changes."""
        left_until = self._clock() + self._lease_s
        looked_at = self._clock()
        while self.state is RegistrationState.REGISTERED:
            left_s = left_until - self._clock()
            pause_s = max(left_s / 2, SHORTEST_PAUSE_S) if left_s > 0 else _RETRY_S
            await Pause(min(pause_s, self._until_next_step_s()))
            try:
                ttl_s = read_ttl(await self._session.call(keep_alive(self._lease), _CALL_S))
                left_until = self._clock() + ttl_s
                if not ttl_s:
                    self._lose("the lease ran out")
                    return
                if write_node(self.node) != self._item.value:
                    await self._rewrite()
                if self._look_soon or self._is_founding or self._clock() - looked_at >= READ_AGAIN_S:
                    self._look_soon = False
                    looked_at = self._clock()
                    await self._look()
                if self.state is RegistrationState.REGISTERED and self._request.has_news:
                    await self._tell_drain()
                self.problem = ""
            except (EtcdUnavailable, EtcdMisbehaved) as error:
                # The lease may live on: an etcd that was away gives leases their time
                # again.
                self._tell(f"etcd: {error}")

    def _lose(self, problem: str) -> None:
        self.state = RegistrationState.LOST
        self._lease = 0
        _log.warning(
            "this node is no longer registered; it keeps its blocks and registers again",
            extra={"node": self._node.id, "problem": problem},
        )

    async def _rewrite(self) -> None:
        value = write_node(self.node)
        then = [put(self._item.key, value, self._lease)]
        request = transaction([unless_changed(self._item)], then, self._item.key)
        outcome = read_outcome(await self._session.call(request, _CALL_S))
        if outcome.succeeded:
            self._item = attrs.evolve(self._item, value=value, mod_revision=outcome.revision)
        else:
            self._look_soon = True

    async def _look(self) -> None:
        """See whether what was written still stands, and whether there was a purge."""
        found = read_range(await self._session.call(range_of(self._layout.prefix), _CALL_S))
        items = {item.key: item for item in found.items}
        if self._request.found(items):
            self._join(items)
        if self._is_founding and self._meets_older(items):
            _log.info("others were here before; beginning with a part of the weight", extra={"node": self._node.id})
            self._join(items)
        standing = items.get(self._item.key)
        if standing is not None and standing.lease == self._lease:
            self._item = standing  # whatever somebody wrote there, the lease is still this node's
        if standing != self._item:
            self._lose("somebody else wrote what stands in etcd, or deleted it")
            return
        self._purge_if_told(items)
        if read_purged(items.get(self._layout.purged(self._node.id), Item("")).value) != self._lasting_purge:
            await self._session.call(transaction([], [self._put_purged()], self._item.key), _CALL_S)
        if write_node(self.node) != self._item.value:
            await self._rewrite()

    async def _tell_drain(self) -> None:
        """Say in etcd how far the drain is; with the last word, leave."""
        progress = self._request.progress
        outcome = read_outcome(await self._session.call(self._request.told(self._item), _CALL_S))
        self._request.was_told(outcome, progress)
        if not outcome.succeeded:
            await self._look()
        elif progress.done:
            self.state = RegistrationState.DRAINED
            _log.info("drained on request; out of the cluster", extra={"node": self._node.id})
            await self._revoke()

    async def _check_config(self, items: dict[str, Item]) -> None:
        try:
            Listing.of(self._layout, items.values())
        except WrongDocument as error:
            raise ConfigError(str(error)) from None
        if self._layout.config not in items:
            await self._write_missing(self._layout.config, write_config(self._config))
        if self._layout.purge not in items and is_unique(self._purge.value):
            # An etcd that came back empty would let off who missed it.
            await self._write_missing(self._layout.purge, self._purge.value)

    async def _write_missing(self, key: str, value: bytes) -> None:
        request = transaction([unless_changed(Item(key))], [put(key, value)], key)
        await self._session.call(request, _CALL_S)

    def _purge_if_told(self, items: dict[str, Item]) -> None:
        """Begin to purge, if the last purge of the cluster is not one that this node
        has carried out. Revisions of an etcd that was replaced mean nothing, so any
        other counts; but one that a node has put there again is known by its value.
        """
        purge = items.get(self._layout.purge)
        if purge is None or self._purging is not None:
            return
        if self._purged is None:
            self._purged = read_purged(items.get(self._layout.purged(self._node.id), Item("")).value)
            self._lasting_purge = self._purged
        if self._purged == purge.mod_revision:
            self._purge = purge
        elif purge.value == self._purge.value and is_unique(purge.value):
            lasting, self._purging = self._lasting_purge == self._purged, purge.mod_revision
            self.purged(lasting=lasting)
        else:
            self._purge, self._purging = purge, purge.mod_revision
            self._on_purge()

    def _put_purged(self) -> dict[str, Any]:
        return put(self._layout.purged(self._node.id), b"%d" % self._lasting_purge)

    async def _is_gone(self, other: Node) -> bool:
        """Whether another process that has this node's id or address was an earlier one
        of this server. If not, note the conflict.
        """
        is_here = (other.address, other.host) == (self._node.address, self._node.host)
        if is_here and not self.registrations and not await Probe((other,), PROBE_S):
            return True
        if self._conflict_since is None:
            self._conflict_since = self._clock()
        problem = (
            f"another server, at {other.address}, is registered in the cluster {self._layout.cluster} as {other.id!r} "
            f"(instance {other.instance or 'unknown'}, on the machine {machine_of(other)}): give each its own "
            f"{'--advertise HOST:PORT' if other.address == self._node.address else '--node-id'}"
        )
        if not self.registrations and self._clock() - self._conflict_since > self._lease_s + 1:
            raise ConfigError(problem)
        self._tell(problem)  # a lease that its process has left behind runs out
        return False

    def _step(self) -> int:
        passed_s = self._clock() - self._joined_at
        if passed_s >= self._warm_up_s:
            return _STEPS + 1
        return 1 + int(_STEPS * passed_s / self._warm_up_s) if self._grows else _STEPS

    def _until_next_step_s(self) -> float:
        step = self._step()
        if step > _STEPS or self.draining:
            return math.inf
        return max(SHORTEST_PAUSE_S, self._joined_at + step * self._warm_up_s / _STEPS - self._clock())

    def _tell(self, problem: str) -> None:
        """Log a problem once, until it is over, whatever members of etcd say."""
        if not self.problem:
            _log.warning("this node cannot register or renew its lease", extra={"problem": problem})
        self.problem = problem
