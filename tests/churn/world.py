"""A cluster in virtual time without a network: servers that are only their cores, an
etcd in memory, and clients that hear of it late.

What decides is the product: each client has the follower, the placement and the calls
of a cluster's store. What it asks of a server is carried out at once by the core; what
it hears from etcd comes after a while, over streams that break.
"""

import bisect
import heapq
import itertools
import json
import random
from collections.abc import Callable, Coroutine
from functools import partial
from types import SimpleNamespace
from typing import Any

from infinistore.client.cluster.calls import ClusterCalls
from infinistore.client.cluster.everywhere import HANDLERS
from infinistore.client.cluster.nodes import Nodes
from infinistore.client.connection.circuit_breaker import CircuitBreaker
from infinistore.client.connection.effects import Background, Part, Sleep, Together
from infinistore.client.operations.embedded import EmbeddedOperations, EmbeddedStore
from infinistore.client.options import Options, StoreUrl
from infinistore.client.requests import Put
from infinistore.cluster.documents import ClusterConfig, write_config, write_node
from infinistore.cluster.etcd.follower import Follower
from infinistore.cluster.etcd.layout import Layout
from infinistore.cluster.etcd.session import (
    EtcdSession,
    EtcdUnavailable,
    Exchange,
    Flow,
    NextLine,
    OpenStream,
    Pause,
    Probe,
)
from infinistore.cluster.membership import Listener, Node, View
from infinistore.errors import InfiniStoreException, StoreUnavailable
from infinistore.kept_errors import KeptError
from infinistore.protocol.messages import Mark, StoreRequest
from tests.cluster.etcd.fake_etcd import FakeEtcd

__all__ = ["ChurnWorld", "Client", "Server"]

LAYOUT = Layout("churn")
_POOL_BYTES = 64 * 1024
_UNIT_BYTES = 64
_NEVER = 1 << 62


class Timeline:
    """Virtual time: what is due is called in order."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, call: Callable[[], object]) -> None:
        """Call a function when so many seconds have passed."""
        heapq.heappush(self._heap, (self.now + seconds, next(self._numbers), call))

    def run(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        while self._heap and self._heap[0][0] <= end:
            self.now, _, call = heapq.heappop(self._heap)
            call()
        self.now = end


class Server:
    """One run of a server: a core, as long as it is up."""

    def __init__(self, node: Node, clock: Callable[[], float]) -> None:
        self.node = node
        self.is_up = True
        options = Options(pool_bytes=_POOL_BYTES, minimal_allocate_bytes=_UNIT_BYTES, name=node.id)
        self._store = EmbeddedStore(options, clock)
        self._operations = EmbeddedOperations(self._store, verify=True)

    def carry_out(self, request: StoreRequest[Any]) -> Any:
        """Do what is asked for, now."""
        deletions = self._store.core.deletions
        if isinstance(request, Mark):
            return deletions.mark(ends_earlier=request.ends_earlier)
        if isinstance(request, Put) and request.since:
            gone = deletions.since(request.since, request.batch.keys)
            request = request.at([place for place, is_gone in enumerate(gone) if not is_gone])
        call = EmbeddedOperations.handlers[type(request)](self._operations, request)
        try:
            while True:
                call.send(None)
        except StopIteration as stop:
            return stop.value

    def end(self) -> None:
        """Lose everything."""
        self.is_up = False
        self._store.close()


class Client:
    """A store of the cluster, and what it has heard."""

    age_s = 0.0

    def __init__(self, world: "ChurnWorld", name: str) -> None:
        self.world = world
        self.name = name
        self.random = world.generator(name)
        self.view = View(-1)
        self.views = 0
        """How many views it has heard of."""
        self.nodes: Nodes[Any] = Nodes(self, self._make)
        self._calls = ClusterCalls(self.nodes, HANDLERS, Options(name=name), world.clock)
        self._follower = Follower(
            EtcdSession(1), LAYOUT, clock=world.clock, random=self.random, on_view=self._hear, on_problem=lambda _: None
        )
        self.hearing = _Hearing(world, self.random)

    def listen(self) -> None:
        """Begin to follow the cluster."""
        self.hearing.run(self._follower.run())

    def _hear(self, view: View) -> None:
        self.view = view
        self.views += 1

    def wait_known(self, timeout_s: float) -> None:
        """A client calls nothing before it has a view."""

    def add_listener(self, listener: Listener) -> Callable[[], None]:
        """Nobody listens."""
        return lambda: None

    def close(self) -> None:
        """There is nothing to end."""

    def _make(self, url: StoreUrl, instance: str) -> "_Reached":
        return _Reached(self.world, str(url), instance, self.random)

    def call(self, request: StoreRequest[Any]) -> Any:
        """Make a call, which takes no time."""
        done: list[Any] = []
        self._go_on(self._calls.call(request), done.append)
        return done[0]

    def _go_on(self, call: Coroutine[Any, Any, Any], on_done: Callable[[Any], object] = lambda _: None) -> None:
        result: Any = None
        try:
            while True:
                match call.send(result):
                    case Together(parts=parts):
                        result = self._together(list(parts))
                    case Background(work=work):
                        self.world.timeline.after(self.random.random(), partial(self._go_on, work))
                        result = True
                    case Sleep(seconds=seconds):
                        self.world.timeline.after(seconds, partial(self._go_on, call))
                        return
                    case effect:
                        raise AssertionError(effect)
        except StopIteration as stop:
            on_done(stop.value)

    def _together(self, parts: list[Part]) -> list[Any]:
        """Carry parts out in any order."""
        outcomes: list[Any] = [None] * len(parts)
        for place in self.random.sample(range(len(parts)), len(parts)):
            try:
                outcomes[place] = parts[place].store.carry_out(parts[place].request)
            except InfiniStoreException as error:
                outcomes[place] = KeptError(error)
        return outcomes


class _Reached:
    """The store of one node, as a client has it."""

    def __init__(self, world: "ChurnWorld", address: str, instance: str, chance: random.Random) -> None:
        self._world = world
        self._address = address
        self._instance = instance
        self._breaker = CircuitBreaker(world.clock, chance, 2)
        self.calls = SimpleNamespace(breaker=self._breaker)

    def mapped_arenas(self) -> list[tuple[memoryview, memoryview | None]]:
        """Nothing is shared."""
        return []

    def close(self) -> None:
        """There is nothing to end."""

    def carry_out(self, request: StoreRequest[Any]) -> Any:
        """Have the server carry a request out, if it is up and the one that it was."""
        probe = self._breaker.check()
        server = self._world.servers.get(self._address)
        if server is None or not server.is_up or server.node.instance != self._instance:
            error = StoreUnavailable(f"{self._address} does not answer")
            self._breaker.failed(error, probe)
            raise error
        self._breaker.succeeded()
        return server.carry_out(request)


class _Hearing:
    """What runs a flow, over a network that is slow."""

    def __init__(self, world: "ChurnWorld", chance: random.Random) -> None:
        self._world = world
        self._random = chance
        self._flow: Flow[Any]
        self._steps = 0
        self._reads = False
        self._start: int | None = None
        """From which revision on the watch has to tell; None without a watch."""
        self._lines: list[bytes] = []
        self._last_arrival = 0.0

    def run(self, flow: Flow[Any]) -> None:
        """Run a flow that never ends."""
        self._flow = flow
        self._resume(None)

    def _delay_s(self) -> float:
        return self._world.most_delay_s * self._random.random() ** 4

    def _later(self, seconds: float, value: Any = None) -> None:
        """Resume the flow after a while, unless something else does before."""
        steps = self._steps
        self._world.timeline.after(seconds, lambda: self._resume(value) if self._steps == steps else None)

    def _resume(self, value: Any) -> None:
        self._steps += 1
        self._reads = False
        etcd = self._world.etcd
        effect = self._flow.throw(value) if isinstance(value, Exception) else self._flow.send(value)
        match effect:
            case Exchange() | OpenStream() if etcd.away:
                self._later(effect.timeout_s, EtcdUnavailable("etcd is away"))
            case Exchange():
                steps = self._steps

                def answer() -> None:
                    if self._steps == steps:
                        self._later(self._delay_s(), etcd.answer(effect))

                self._world.timeline.after(self._delay_s(), answer)
            case OpenStream():
                self._open(int(json.loads(effect.body)["create_request"]["start_revision"]))
                self._later(0.0)
            case NextLine():
                self._reads = True
                self._later(effect.timeout_s)
                self._deliver()
            case Pause():
                self._later(effect.seconds)
            case Probe():
                up = {(one.node.id, one.node.instance) for one in self._world.servers.values() if one.is_up}
                answered = frozenset(node.id for node in effect.nodes if (node.id, node.instance) in up)
                self._later(self._delay_s(), answered)
            case _:
                raise AssertionError(effect)

    def _deliver(self) -> None:
        if self._reads and (self._lines or self._start is None):
            self._reads = False
            self._later(0.0, self._lines.pop(0) if self._lines else EtcdUnavailable("the watch broke"))

    def _open(self, start: int) -> None:
        etcd = self._world.etcd
        self._lines, self._start, self._last_arrival = [], start, 0.0
        self._tell({"created": True})
        if start <= etcd.compacted:
            self._tell({"canceled": True, "compact_revision": str(etcd.compacted)})
            self._start = _NEVER
        self.tell()

    def tell(self) -> None:
        """Send what the watch has not told yet."""
        etcd = self._world.etcd
        if self._start is None or etcd.away or self._start > etcd.revision:
            return
        first = bisect.bisect_left(etcd.events, self._start, key=lambda event: event[0])
        self._start = etcd.revision + 1
        if events := [event for _, event in etcd.events[first:]]:
            self._tell({"events": events})

    def cut(self) -> None:
        """Break the watch."""
        self._start = None
        self._lines = []
        self._deliver()

    def _tell(self, result: dict[str, Any]) -> None:
        line = json.dumps({"result": {"header": {"revision": str(self._world.etcd.revision)}, **result}}).encode()
        now, lines = self._world.timeline.now, self._lines
        self._last_arrival = max(self._last_arrival, now + self._delay_s())

        def arrive() -> None:
            if lines is self._lines:
                lines.append(line)
                self._deliver()

        self._world.timeline.after(self._last_arrival - now, arrive)


class ChurnWorld:
    """All there is. `most_delay_s` is how late what etcd says may be heard."""

    def __init__(self, seed: int, *, clients: int, most_delay_s: float, copies: int) -> None:
        self._seed = seed
        self.most_delay_s = most_delay_s
        self.timeline = Timeline()
        self.etcd = FakeEtcd(self.clock)
        self.servers: dict[str, Server] = {}
        """Those that run, or ran last, by their addresses."""
        self.written: dict[str, Node] = {}
        """What each node that is there has written, or will write again, to etcd."""
        self._config = write_config(ClusterConfig(copies)).decode()
        self._numbers = itertools.count(1)
        self._random = self.generator("world")
        self.etcd.put(LAYOUT.config, self._config)
        self.clients = [Client(self, f"client-{number + 1}") for number in range(clients)]

    def close(self) -> None:
        """End the servers that are up."""
        for server in self.servers.values():
            if server.is_up:
                server.end()

    def generator(self, name: str) -> random.Random:
        """Return the generator of one purpose."""
        return random.Random(f"{self._seed}/{name}")

    def clock(self) -> float:
        """Return the virtual time."""
        return self.timeline.now

    # Servers

    def start(self, node_id: str, address: str, **facts: Any) -> Node:
        """Start a server, with nothing in it. Nobody is told."""
        instance = f"{self._random.getrandbits(64):x}"
        node = Node(node_id, f"infinistore://{address}", instance=instance, **facts)
        if node.address in self.servers:
            self.servers[node.address].end()
        self.servers[node.address] = Server(node, self.clock)
        return node

    def add(self, weight: int = 100) -> Node:
        """Start a server that nobody has heard of, with a name of its own."""
        number = next(self._numbers)
        address = f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}:22345"
        return self.start(f"node-{number}", address, weight=weight)

    def write(self, node: Node) -> None:
        """Let a node write what it says of itself."""
        self.written[node.id] = node
        if not self.etcd.away:
            self.etcd.put(LAYOUT.node(node.id), write_node(node).decode())
            self._tell()

    def erase(self, *node_ids: str) -> None:
        """Let leases of nodes end, at the same moment."""
        for node_id in node_ids:
            self.etcd.delete(LAYOUT.node(node_id))
        self._tell()

    def _tell(self) -> None:
        for client in self.clients:
            client.hearing.tell()

    # etcd

    def cut_watches(self) -> None:
        """Break the watches of some clients."""
        for client in self.clients:
            if self._random.random() < 0.5:
                client.hearing.cut()

    def restart_etcd(self, *, empty: bool) -> None:
        """Start etcd again, with or without its data."""
        if empty:
            self.etcd.empty()
        for client in self.clients:
            client.hearing.cut()

    def write_again(self) -> None:
        """Let every node that is there see to it that it stands in etcd."""
        standing = self.etcd.kvs
        if LAYOUT.config not in standing:
            self.etcd.put(LAYOUT.config, self._config)
        for node in self.written.values():
            key = LAYOUT.node(node.id)
            if key not in standing or standing[key].value != write_node(node).decode():
                self.write(node)
