"""A cluster that registers in etcd: what goes wrong with etcd and with who reaches it,
and what must hold meanwhile.

Servers and clients have their production code for it: each server registers and renews
its lease, each client follows etcd in a task of its own. What must hold:

- No lease runs out of a server that is up and reaches etcd, whatever etcd does.
- A node that answers requests stands in etcd, or knows within the time of a lease that
  it may not. It never gives its registration up before it has served.
- No client loses a node that is up and that it reaches.
- What changes is known to all clients within the time of a lease and a second, as long
  as nothing is wrong with etcd; and so soon after everything has been healed.
"""

import json
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import attrs
import trio

from infinistore.client.extension import Environment as ClientEnvironment
from infinistore.client.options import StoreUrl
from infinistore.cluster.etcd.follower import LEASE_S, READ_AGAIN_S
from infinistore.cluster.etcd.gateway import Item
from infinistore.cluster.etcd.layout import Layout, Listing
from infinistore.cluster.etcd.registration import RegistrationState
from infinistore.cluster.locate import EtcdPlace, parse_cluster_url
from infinistore.cluster.membership import DEFAULT_WEIGHT, Membership, NodeState, View
from infinistore.cluster_io.memberships import RunningMembership, make_membership
from infinistore.cluster_io.probing import ClusterEnvironment
from infinistore.cluster_io.thread import Share
from infinistore.config import ServerConfig
from infinistore.errors import StoreUnavailable
from infinistore.server.environment import Environment
from tests.simulation.clusters import ClusterSettings
from tests.simulation.etcd import MEMBERS, EtcdNetwork, SimulatedEtcd
from tests.simulation.history import History
from tests.simulation.network import Network
from tests.simulation.nodes import ServerNode
from tests.simulation.streams import SimulatedStream
from tests.simulation.world import Plug, World

__all__ = ["EVENTS", "EtcdSettings", "RegisteredCluster"]

_LAYOUT = Layout("simulated")
_WITHIN_S = LEASE_S + 1.0
"""How soon everybody knows of what has changed."""
_MARGIN_S = 0.01
"""What rounding makes of a time, and more."""
_LOOKS_WITHIN_S = READ_AGAIN_S + 6.0
"""How soon a node, or a watch that is silent, looks what there is."""
_LOOKS_EVERY_S = 2.5
"""How often nodes are looked at while etcd does not change."""
_ELECTION_S = (1.0, 3.2)
EVENTS = (
    *("leader_lost", "quorum_lost", "member_apart", "restarted", "emptied", "compacted"),
    *("watches_cut", "answers_lost", "client_cut_off", "server_cut_off", "server_down"),
    *("key_deleted", "key_detached"),
)
"""What may happen; `RegisteredCluster` has a method for each."""
_OF_ETCD = EVENTS[:8]
"""What has no server or client do worse."""


@attrs.frozen
class EtcdSettings:
    """The etcd that the nodes of a cluster register in, and what happens to it."""

    registers: bool = False
    """Whether there is one."""
    events: int = 0
    """How much happens."""
    kinds: tuple[str, ...] = EVENTS
    """Which of `EVENTS`."""
    most_pause_s: float = 5.0
    """How much time passes between two of these at most."""
    most_outage_s: float = 15.0
    """How long something is away at most."""
    warm_up_s: float = 0.0
    settles_first: bool = True
    """Whether clients start when all nodes are there."""

    @classmethod
    def choose(cls, chance: random.Random) -> "EtcdSettings":
        """Choose what happens."""
        kinds = [kind for kind in EVENTS if chance.random() < 0.5]
        return cls(
            registers=True,
            events=chance.choice([2, 6, 12]),
            kinds=tuple(kinds) or _OF_ETCD,
            most_pause_s=chance.choice([2.0, 8.0, 20.0]),
            most_outage_s=chance.choice([6.0, 25.0, 40.0]),
            warm_up_s=chance.choice([0.0, 2.0, 30.0]),
            settles_first=chance.random() < 0.7,
        )


class RegisteredCluster(Plug):
    """The cluster of a run, and what happens to its etcd until `heal`. `is_quiet` says
    that nothing else goes wrong.
    """

    def __init__(
        self,
        world: World,
        network: Network,
        servers: Sequence[ServerNode],
        settings: ClusterSettings,
        etcd: EtcdSettings,
        *,
        history: History,
        is_quiet: bool,
    ) -> None:
        self._world = world
        self._network = network
        self._servers = {server.name: server for server in servers}
        self._settings = etcd
        self._history = history
        self._is_quiet = is_quiet
        self._random = world.generator("cluster")
        self._ways = EtcdNetwork(world, network.settings)
        self.etcd = SimulatedEtcd(world, self._ways, on_expired=self._on_expired, on_change=self._check_nodes)
        endpoints = ",".join(f"{member}:2379" for member in MEMBERS)
        self._url = f"infinistore+etcd://{endpoints}/{_LAYOUT.cluster}?copies={settings.copies}"
        self._members: dict[str, RunningMembership] = {}
        self._known: dict[str, trio.Event] = {}
        self._seen: dict[str, View] = {}
        self._seen_at: dict[str, float] = {}
        self._calm_since: dict[str, float] = dict.fromkeys(["etcd", *self._servers, *map(_key_of, self._servers)], 0.0)
        """Since when nothing is wrong with etcd, or with who reaches it; infinite while
        something is."""
        self._disturbed_until: dict[str, float] = {}
        self._misled_since: dict[str, tuple[str, float]] = {}
        """The processes that believe to be registered and are not, and since when."""
        self._active = True
        self.views: list[View] = []
        """All that clients had."""

    # What servers and clients are given

    def config(self, server: ServerNode, config: ServerConfig) -> ServerConfig:
        """Return the configuration of a node that starts."""
        return attrs.evolve(
            config,
            cluster=self._url,
            node_id=server.name,
            advertise=f"{server.name}:1",
            node_warm_up_s=self._settings.warm_up_s,
        )

    def environment(self, server: ServerNode, environment: Environment) -> Environment:
        """Return what a node that starts reaches others with."""
        connect_node = self._connector(server.name)

        async def connect_store(address: StoreUrl, *_: object) -> SimulatedStream:
            return await self._network.connect(server.name, address.host)

        self._world.clock.after(_WITHIN_S + _MARGIN_S, self._check_clients)
        client = ClientEnvironment(connect=connect_store, random=environment.random)
        cluster = ClusterEnvironment(
            connect_etcd=self._ways.connector(server.name),
            connect_node=connect_node,
            host_name=lambda: server.name,
        )
        return attrs.evolve(environment, cluster=cluster, client=client)

    def _connector(self, node: str) -> Callable[[str, int], Awaitable[SimulatedStream]]:
        async def connect(host: str, port: int) -> SimulatedStream:
            return await self._network.connect(node, host)

        return connect

    def membership(self, client: str) -> Membership:
        """Return what tells a client who is in the cluster. What it is a share of
        outlives the lives of the client.
        """
        return Share(self._members[client], lambda: None)

    async def known(self, client: str) -> None:
        """Wait until a client knows a view."""
        if client not in self._members:
            if self._settings.settles_first:
                await self._settled()
            place = parse_cluster_url(self._url).place
            assert isinstance(place, EtcdPlace)
            member = self._members[client] = make_membership(
                place,
                "",
                clock=self._world.clock.current_time,
                random=self._world.generator(f"membership of {client}"),
                connect_etcd=self._ways.connector(client),
                connect_node=self._connector(client),
            )
            self._known[client] = trio.Event()
            self._calm_since[client] = self._world.clock.now
            member.add_listener(partial(self._on_view, client))
            self._tasks.start_soon(member.run)
        await self._known[client].wait()

    async def _settled(self) -> None:
        """Wait until all nodes are registered, with their whole weights."""
        while not self._is_settled():
            await self.etcd.changed.park()

    def _is_settled(self) -> bool:
        nodes = self._listing().nodes.values()
        return len(nodes) == len(self._servers) and all(node.state is NodeState.SERVING for node in nodes)

    def _listing(self) -> Listing:
        """Return what etcd lists."""
        kvs = self.etcd.memory.kvs.items()
        items = [Item(key, kv.value.encode(), kv.create_revision, kv.mod_revision, kv.lease) for key, kv in kvs]
        return Listing.of(_LAYOUT, [item for item in items if item.key.startswith(_LAYOUT.prefix)])

    # What happens

    async def serve(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Let etcd and memberships run until cancelled."""
        async with trio.open_nursery() as self._tasks:
            await self._tasks.start(self.etcd.run)
            self._tasks.start_soon(self._look_at_nodes)
            task_status.started()

    async def run(self) -> None:
        """Let something happen now and then."""
        if self._settings.settles_first:
            await self._settled()
        for _ in range(self._settings.events):
            await trio.sleep(self._settings.most_pause_s * self._random.random())
            if not self._active:
                return
            kind = self._random.choice(self._settings.kinds)
            self._world.fault(f"ETCD_{kind.upper()}", "etcd")
            getattr(self, f"_{kind}")()

    def heal(self) -> None:
        """Nothing goes wrong any more."""
        if not self._active:
            return
        self._active = False
        self._ways.heal()
        self.etcd.heal()
        now = self._world.clock.now
        for who in sorted(self._calm_since.keys() - set(map(_key_of, self._servers))):
            self._disturbed_until.pop(who, None)
            self._calm_since[who] = min(self._calm_since[who], now)
        self._world.clock.after(_WITHIN_S + _MARGIN_S, self._check_clients)

    def _disturb(self, who: str, seconds: float) -> None:
        """Something is wrong for so long."""
        clock = self._world.clock
        ends = self._disturbed_until[who] = max(clock.now + seconds, self._disturbed_until.get(who, 0.0))
        self._calm_since[who] = math.inf

        def calm() -> None:
            if self._disturbed_until.get(who) == ends:
                self._calm_since[who] = clock.now
                clock.after(_WITHIN_S + _MARGIN_S, self._check_clients)

        clock.at(ends, calm)

    def _outage_s(self) -> float:
        return self._settings.most_outage_s * self._random.random()

    def _leader_lost(self) -> None:
        seconds = self._random.uniform(*_ELECTION_S)
        self._disturb("etcd", seconds)
        self.etcd.lose_leader(seconds)

    def _quorum_lost(self) -> None:
        seconds = self._outage_s()
        self._disturb("etcd", seconds)
        self.etcd.lose_leader(seconds)

    def _member_apart(self) -> None:
        if self.etcd.apart:
            return
        member, seconds = self._random.choice(MEMBERS), 3 * self._outage_s()
        # Watches of that member are silent, until they are not believed any more.
        self._disturb("etcd", min(seconds, _LOOKS_WITHIN_S))
        self.etcd.apart.add(member)

        def join() -> None:
            self._disturb("etcd", 0.0)  # what has waited at this member is carried out now
            self.etcd.apart.discard(member)
            self.etcd.told()

        self._world.clock.after(seconds, join)

    def _restarted(self) -> None:
        seconds = self._outage_s()
        self._disturb("etcd", seconds)
        self.etcd.restart(seconds)

    def _emptied(self) -> None:
        seconds = self._outage_s()
        self._disturb("etcd", seconds)
        self.etcd.restart(seconds, empty=True)

    def _compacted(self) -> None:
        if self._random.random() < 0.5:
            self.etcd.compact()
        else:
            self.etcd.compacts_before_watches = True
            self._watches_cut()

    def _watches_cut(self) -> None:
        for connection in list(self._ways.connections.values()):
            if self._random.random() < 0.7:
                connection.cut("the network cut it")

    def _answers_lost(self) -> None:
        self.etcd.loses_answers = 1

    def _client_cut_off(self) -> None:
        if self._members:
            self._cut_off(self._random.choice(sorted(self._members)))

    def _server_cut_off(self) -> None:
        self._cut_off(self._random.choice(sorted(self._servers)))

    def _cut_off(self, node: str) -> None:
        """Let nothing get from a node to etcd, or back, or both."""
        seconds = self._outage_s()
        self._disturb(node, seconds)
        both = [[(node, member), (member, node)] for member in MEMBERS]
        kept = self._random.choice([slice(1), slice(1, 2), slice(2)])
        for way in [way for ways in both for way in ways[kept]]:
            self._ways.block(*way)
            self._world.clock.after(seconds, partial(self._ways.unblock, *way))

    def _server_down(self) -> None:
        server = self._servers[self._random.choice(sorted(self._servers))]
        if server.is_up:
            server.crash(self._outage_s(), silently=self._random.random() < 0.3)

    def _key_deleted(self) -> None:
        name = self._random.choice(sorted(self._servers))
        self._disturb(_key_of(name), _LOOKS_WITHIN_S)  # it stays in its own view, for it answers itself
        self.etcd.memory.delete(_LAYOUT.node(name))
        self.etcd.told()

    def _key_detached(self) -> None:
        """Somebody writes what is there, and forgets the lease."""
        name = self._random.choice(sorted(self._servers))
        key = _LAYOUT.node(name)
        if key in self.etcd.memory.kvs:
            self._disturb(_key_of(name), _LOOKS_WITHIN_S)
            self.etcd.memory.put(key, self.etcd.memory.kvs[key].value)
            self.etcd.told()

    # What must hold

    def kill(self, server: ServerNode) -> None:
        """A node is about to crash."""
        for connection in self._ways.of_node(server.name):
            connection.cut("the server has crashed")
        if not self._is_calm(server.name, self._world.clock.now - _WITHIN_S):
            # Perhaps etcd knew it no more, and clients only because it answered them.
            self._disturb(_key_of(server.name), _LOOKS_WITHIN_S)
        self._world.clock.after(_WITHIN_S + _MARGIN_S, self._check_clients)

    def _instance_on(self, name: str, since_s: float = math.inf) -> str | None:
        """Return which process has been up on a node since then, empty if none was;
        None if that has changed since.
        """
        server = self._servers[name]
        life = server.history.lives[-1] if server.history.lives else None
        if life is None or life.ended < math.inf:
            return "" if life is not None and life.ended <= since_s else None
        if server.is_up and server.server is not None and life.begun <= since_s:
            return server.server.telemetry.instance
        return None

    def _is_calm(self, name: str, since_s: float) -> bool:
        """Whether nothing has been wrong with a node, and what it wrote, since then."""
        return max(self._calm_since[name], self._calm_since[_key_of(name)]) <= since_s

    def _on_expired(self, keys: Sequence[str]) -> None:
        """A lease that wrote these keys has run out."""
        since_s = self._world.clock.now - _WITHIN_S
        for key in keys:
            name = key.removeprefix(_LAYOUT.nodes)
            if name in self._servers and self._is_calm(name, since_s):
                written = json.loads(self.etcd.memory.kvs[key].value)["instance"]
                if written == self._instance_on(name, since_s):
                    self._world.violation(f"the lease of {name} has run out, and nothing was wrong with it")

    async def _look_at_nodes(self) -> None:
        while True:
            self._check_nodes()
            await trio.sleep(_LOOKS_EVERY_S)

    def _check_nodes(self) -> None:
        """Whether each node that answers is registered, or knows that it may not be."""
        now = self._world.clock.now
        misled: dict[str, tuple[str, float]] = {}
        for name, node in self._servers.items():
            server = node.server
            if server is None or not node.serves or server.telemetry.cluster is None:
                continue
            instance, known = server.telemetry.instance, server.telemetry.cluster()
            if known.registration == RegistrationState.LEFT.value:
                self._world.violation(f"{name} has left the cluster and still answers")
            believes = known.registration == RegistrationState.REGISTERED.value and not known.problem
            if not believes or self._stands(name, instance):
                continue
            before, since_s = self._misled_since.get(name, (instance, now))
            since_s = since_s if before == instance else now
            misled[name] = instance, since_s
            if now - max(since_s, self._calm_since[_key_of(name)]) > LEASE_S:
                self._world.violation(f"{name} answers and believes to be registered, and is not since {since_s:g} s")
        self._misled_since = misled

    def _stands(self, name: str, instance: str) -> bool:
        """Whether etcd has a process on a node, under a lease."""
        kv = self.etcd.memory.kvs.get(_LAYOUT.node(name))
        return kv is not None and kv.lease in self.etcd.memory.leases and json.loads(kv.value)["instance"] == instance

    def _on_view(self, client: str, view: View) -> None:
        """A client has another view."""
        self.views.append(view)
        self._known[client].set()
        nodes = {node.id: node for node in view.nodes}
        self._world.trace.add(client, "view", *(f"{node.id}: {node.state.value} {node.weight}" for node in view.nodes))
        before = self._seen.get(client)
        self._seen[client] = view
        if before is not None and not any(node.state is not NodeState.DRAINING for node in before.nodes):
            self._history.without_nodes.append((client, self._seen_at[client], self._world.clock.now))
        self._seen_at[client] = self._world.clock.now
        for node in () if before is None or not self._is_quiet else before.nodes:
            if node.id not in nodes and node.instance == self._instance_on(node.id):
                self._world.violation(f"{client} has lost {node.id} out of its view, which is up and answers")

    def _check_clients(self) -> None:
        """Whether those that nothing was wrong with know what has been so for long."""
        since_s = self._world.clock.now - _WITHIN_S
        if self._calm_since["etcd"] > since_s:
            return
        up = {name: self._instance_on(name, since_s) for name in self._servers if self._is_calm(name, since_s)}
        listed = {name: node.instance for name, node in self._listing().nodes.items()}
        for name, instance in up.items():
            if instance is not None and listed.get(name, "") != instance:
                self._world.violation(
                    f"etcd lists {listed.get(name)!r} on {name}, where {instance!r} has been for {_WITHIN_S:g} s"
                )
        for client, view in self._seen.items():
            if self._calm_since[client] <= since_s:
                known = {node.id: node.instance for node in view.nodes}
                for name, instance in up.items():
                    if instance is not None and known.get(name, "") != instance:
                        self._world.violation(
                            f"{client} knows {known.get(name)!r} on {name}, where {instance!r} has been for"
                            f" {_WITHIN_S:g} s"
                        )

    def check(self) -> list[str]:
        """Return what is wrong at the end."""
        problems = []
        listing = self._listing()
        whole = {name: (self._instance_on(name), DEFAULT_WEIGHT, NodeState.SERVING) for name in self._servers}
        listed = {name: (node.instance, node.weight, node.state) for name, node in listing.nodes.items()}
        if listed != whole:
            problems.append(f"etcd lists {listed} in the end, and there are {whole}")
        for client, view in self._seen.items():
            if view.nodes != tuple(listing.nodes[name] for name in sorted(listing.nodes)):
                problems.append(f"{client} believes {view} in the end, and etcd lists {listing.nodes}")
        if self._is_quiet and set(self._settings.kinds) <= set(_OF_ETCD):
            problems += [
                f"call {call.number} ({call.method} of {call.client}) lost a node although none was: {call.error}"
                for call in self._history.calls
                if call.lost or isinstance(call.error, StoreUnavailable)
            ]
        return problems


def _key_of(server: str) -> str:
    return f"the key of {server}"
