"""Several servers as one cluster: who is in it, what clients have heard of that, and
nodes that are stopped.

A client has the store of a cluster as it is, and a membership of the world's: what it
is told comes late, and to each client at another time. The servers know nothing of it.
"""

import random
from collections.abc import Callable, Sequence
from functools import partial

import attrs
import trio

from infinistore.cluster.membership import Listener, Node, NodeState, View
from infinistore.cluster.placement import Placement
from tests.simulation.network import Network
from tests.simulation.nodes import ServerNode
from tests.simulation.world import World

__all__ = ["ClusterSettings", "Heard", "SimulatedCluster", "single_places"]


@attrs.frozen
class ClusterSettings:
    """What the cluster of a run is like."""

    nodes: int = 0
    """How many servers it has; 0 for one server that is in no cluster."""
    copies: int = 1
    changes: int = 0
    """How often it changes who is in it."""
    stops: int = 0
    """How often a node is stopped for a while, as by a signal."""
    most_news_s: float = 0.1
    """How late a client hears of a change at most."""
    most_pause_s: float = 0.5
    """How much time passes between two of these at most."""
    lookup_deadline_s: float = 0.4

    @classmethod
    def choose(cls, chance: random.Random) -> "ClusterSettings":
        """Choose a cluster."""
        return cls(
            nodes=chance.choice([2, 3, 3]),
            copies=chance.choice([1, 1, 1, 2]),
            changes=chance.choice([0, 0, 3, 10]),
            stops=chance.choice([0, 0, 3]),
            most_news_s=chance.choice([0.01, 0.3, 5.0]),
            most_pause_s=chance.choice([0.05, 0.5, 3.0]),
            lookup_deadline_s=chance.choice([0.05, 0.4]),
        )


class Heard:
    """What one client has heard of the cluster: a membership."""

    age_s = 0.0

    def __init__(self, view: View) -> None:
        self.view = view

    def wait_known(self, timeout_s: float) -> None:
        """There is a view from the beginning."""

    def add_listener(self, listener: Listener) -> Callable[[], None]:
        """Nobody listens."""
        return lambda: None

    def close(self) -> None:
        """There is nothing to end."""

    def hear(self, view: View) -> None:
        """Hear of a view, unless it is older than the one that is known."""
        if view.epoch > self.view.epoch:
            self.view = view


class SimulatedCluster:
    """The cluster of a run, and what happens to it until `heal`."""

    def __init__(
        self, world: World, network: Network, servers: Sequence[ServerNode], settings: ClusterSettings
    ) -> None:
        self._world = world
        self._network = network
        self._settings = settings
        self._random = world.generator("cluster")
        self._nodes: dict[str, Node] = {}
        self._all = {server.name: Node(server.name, f"infinistore://{server.name}:1") for server in servers}
        self._members: dict[str, Heard] = {}
        self._active = True
        self.views: list[View] = []
        """All that there were."""
        if settings.changes:
            self._publish_with_weight(30)
        self._nodes = dict(self._all)
        self._publish()

    async def known(self, client: str) -> None:
        """Clients know a view from the beginning."""
        await trio.lowlevel.checkpoint()

    def membership(self, client: str) -> Heard:
        """Return what a client has heard. It outlives the lives of the client. At first
        that may be old.
        """
        if client not in self._members:
            heard = self._members[client] = Heard(self._random.choice(self.views))
            self._tell(heard)
        return self._members[client]

    async def run(self) -> None:
        """Let nodes come, go and stop."""
        events = [self._change] * self._settings.changes + [self._stop] * self._settings.stops
        self._random.shuffle(events)
        for event in events:
            await trio.sleep(self._settings.most_pause_s * self._random.random())
            if not self._active:
                return
            event()

    def heal(self) -> None:
        """Nothing changes any more; everybody hears of the last view, soon: all nodes
        are in it, and serve, but not as in the first one.
        """
        self._active = False
        if self._settings.changes:
            self._publish_with_weight(60)

    def _publish(self) -> None:
        nodes = tuple(self._nodes[name] for name in sorted(self._nodes))
        view = View(len(self.views), nodes, copies=self._settings.copies)
        self.views.append(view)
        self._world.trace.add("cluster", "view", view.epoch, *(f"{node.id}: {node.state.value}" for node in nodes))
        for heard in self._members.values():
            self._tell(heard)

    def _publish_with_weight(self, weight: int) -> None:
        """Let all nodes be there and serve, but one of them has another weight."""
        first, *_ = self._all.values()
        self._nodes = self._all | {first.id: attrs.evolve(first, weight=weight)}
        self._publish()

    def _tell(self, heard: Heard) -> None:
        delay_s = self._settings.most_news_s * self._random.random()
        self._world.clock.after(delay_s, partial(heard.hear, self.views[-1]))

    def _change(self) -> None:
        """Let a node leave, return, drain, join, or have another weight."""
        name = self._random.choice(sorted(self._all))
        others = [node for node in self._nodes.values() if node.id != name and node.state is NodeState.SERVING]
        node = self._all[name]
        kind = self._random.choice(["gone", "draining", "joining", "serving", "light"])
        if not others and kind in ("gone", "draining"):
            return
        self._world.fault(f"NODE_{kind.upper()}", name)
        if kind == "gone":
            self._nodes.pop(name, None)
        elif kind == "light":
            self._nodes[name] = attrs.evolve(node, weight=20)
        else:
            self._nodes[name] = attrs.evolve(node, state=NodeState(kind))
        self._publish()

    def _stop(self) -> None:
        """Let nothing get to a node or from it for a while: it does not even say that
        it is gone.
        """
        name = self._random.choice(sorted(self._all))
        seconds = 3.0 * self._random.random()
        self._world.fault("NODE_STOPPED", name, seconds)
        for client in self._members:
            for way in ((client, name), (name, client)):
                self._network.block(*way)
                self._world.clock.after(seconds, partial(self._network.unblock, *way))


def single_places(views: Sequence[View], keys: Sequence[str]) -> dict[str, str]:
    """Return the node of each key that has one place, and the same in all views."""
    places: dict[str, set[str]] = {key: set() for key in keys}
    for view in dict.fromkeys(map(_without_runs, views)):
        placement = Placement(view, with_numpy=False)
        joins = any(node.state is NodeState.JOINING for node in view.nodes)
        for reading in (False, True):
            ranks = placement.ranks(keys, view.copies + joins, reading=reading)
            for key, rank in zip(keys, ranks, strict=True):
                places[key].update(view.nodes[index].id for index in rank)
    return {key: min(nodes) for key, nodes in places.items() if len(nodes) == 1}


def _without_runs(view: View) -> View:
    """Return what places follow from: not which process runs on a node, and when."""
    nodes = tuple(attrs.evolve(node, instance="", generation=0) for node in view.nodes)
    return View(0, nodes, copies=view.copies)
