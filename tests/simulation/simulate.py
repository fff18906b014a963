"""One run: build the world of a scenario, let it happen, heal it, and check it."""

import logging
import math
import traceback
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import attrs
import trio

from tests.simulation.buggify import Point
from tests.simulation.checker import check
from tests.simulation.clusters import SimulatedCluster, single_places
from tests.simulation.disks import SimulatedDisks
from tests.simulation.faults import Faults
from tests.simulation.history import History
from tests.simulation.host import SharedHost
from tests.simulation.network import Network
from tests.simulation.nodes import ClientNode, ServerNode, Sharing
from tests.simulation.registered import RegisteredCluster
from tests.simulation.scenario import Scenario
from tests.simulation.tenants import SimulatedTenants
from tests.simulation.trace import Event
from tests.simulation.workload import Workload, WorkloadSettings
from tests.simulation.world import Plug, World

__all__ = ["Outcome", "simulate"]

_LONGEST_S = 24 * 3600.0
_HEALED_WITHIN_S = 60.0
_AT_REST_AFTER_S = 120.0
_RECOVERED_AFTER_S = 20.0


@attrs.frozen
class Outcome:
    """What a run came to. Runs of equal scenarios have equal outcomes."""

    trace_hash: str
    calls: int
    """Calls of clients."""
    key_operations: int
    """The keys of these calls, together."""
    ends: Counter[str]
    """How many calls ended how."""
    errors: Counter[str]
    """How many calls of each method raised which error."""
    faults: Counter[str]
    """How many faults there were of each kind."""
    buggified: Counter[str]
    """How often each point of `tests.simulation.buggify` has happened."""
    violations: list[str]
    """What was found wrong."""
    last_events: list[Event]
    virtual_s: float
    """How long the run took in the world."""


def simulate(scenario: Scenario, plugs: Sequence[Plug] = ()) -> Outcome:
    """Run a scenario."""
    host = SharedHost(scenario.sharing) if scenario.sharing.clients else None
    disks = SimulatedDisks(scenario.disks) if scenario.disks.disks else None
    world = World(scenario.seed, [*plugs, *(plug for plug in (host, disks) if plug is not None)])
    history = History(
        has_disks=disks is not None,
        may_lose_nodes=bool(scenario.faults.chances or scenario.buggify.points or scenario.cluster.stops),
    )
    log = _ErrorsAreViolations(world)
    logger = logging.getLogger("infinistore")
    logger.addHandler(log)
    run = _Run(world, history, scenario, host)
    try:
        world.run(run.run)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is what the run came to
        world.violation("".join(traceback.format_exception(error)))
    finally:
        logger.removeHandler(log)
    if run.cluster is not None:
        history.places = single_places(
            run.cluster.views, [scenario.workload.key(i) for i in range(scenario.workload.keys)]
        )
    for problem in check(history):
        world.violation(problem)
    return Outcome(
        trace_hash=world.trace.hash,
        calls=len(history.calls),
        key_operations=sum(len(call.keys) for call in history.calls),
        ends=Counter(call.end.name for call in history.calls),
        errors=Counter(
            f"{call.method}: {type(call.error).__name__}" for call in history.calls if call.error is not None
        ),
        faults=world.faults,
        buggified=Counter({point.name: times for point, times in run.buggify.fired.items()}),
        violations=world.violations,
        last_events=list(world.trace.last),
        virtual_s=world.clock.now,
    )


class _Run:
    """The phases of one run."""

    def __init__(self, world: World, history: History, scenario: Scenario, host: SharedHost | None) -> None:
        self.world = world
        self.history = history
        self.scenario = scenario
        self.host = host
        self.network = Network(world, scenario.network)
        count = scenario.cluster.nodes
        names = [f"node-{number + 1}" for number in range(count)] or ["server"]
        self.servers = {
            name: ServerNode(world, self.network, self._lives_of(name), name, scenario.server) for name in names
        }
        self.server = self.servers[names[0]]
        self.buggify = scenario.buggify.make(world.generator("buggify"))
        for server in self.servers.values():
            server.buggify = self.buggify
        if host is not None:
            host.buggify = self.buggify
        self.cluster = self._make_cluster() if count else None
        self.faults = Faults(world, self.network, self.servers, history, scenario.faults)
        self.tenants: SimulatedTenants | None = None
        if scenario.tenants.tenants:
            self.tenants = SimulatedTenants(world, scenario.tenants, scenario.server.pool_bytes, history)
            for server in self.servers.values():
                server.tenants = self.tenants
        self._at_work = _Countdown(scenario.clients)
        self._healed = trio.Event()
        self._to_succeed = _Countdown(scenario.clients)
        self._checked = trio.Event()
        self._last: list[Workload] = []
        """Those of the clients' last lives, for when nothing goes wrong any more."""

    def _make_cluster(self) -> SimulatedCluster | RegisteredCluster:
        scenario, servers = self.scenario, [*self.servers.values()]
        if not scenario.etcd.registers:
            return SimulatedCluster(self.world, self.network, servers, scenario.cluster)
        cluster = RegisteredCluster(
            self.world,
            self.network,
            servers,
            scenario.cluster,
            scenario.etcd,
            history=self.history,
            is_quiet=not scenario.faults.chances and not scenario.buggify.points,
        )
        self.world.plugs = [*self.world.plugs, cluster]
        return cluster

    def _lives_of(self, name: str) -> History:
        """Return where a server notes its lives: each node of a cluster has its own."""
        if not self.scenario.cluster.nodes:
            return self.history
        of_node = History()
        self.history.nodes[name] = of_node.lives
        return of_node

    async def run(self) -> None:
        """Let clients work, heal everything, and see whether all is well."""
        running = [partial(getattr, server, "server") for server in self.servers.values()]
        with trio.move_on_after(_LONGEST_S) as limit:
            async with self._cluster_there(), trio.open_nursery() as nursery:
                for server in self.servers.values():
                    await nursery.start(server.run)
                if self.cluster is not None:
                    nursery.start_soon(self.cluster.run)
                async with trio.open_nursery() as clients:
                    if self.tenants is not None:
                        clients.start_soon(self.tenants.change, running, self.server.run_in_thread)
                    for number in range(self.scenario.clients):
                        clients.start_soon(self._be_client, f"client-{number + 1}", number)
                    await self._at_work.over.wait()
                    if self.tenants is not None:
                        await self.tenants.restore(running, self.server.run_in_thread)
                    self._heal()
                    await self._to_succeed.over.wait()
                    await trio.sleep(_AT_REST_AFTER_S)
                    self._check_rest("when all clients are idle")
                    if self.cluster is not None:
                        await self._look_at_cluster()
                        await trio.sleep(_AT_REST_AFTER_S)
                        self._check_rest("when all clients have looked at the cluster")
                    self._checked.set()
                if self.scenario.disks.disks:
                    await self._audit()
                await trio.sleep(_AT_REST_AFTER_S)
                self._check_rest("when all clients have gone", clients=0)
                self._check_plugs()
                for server in self.servers.values():
                    server.stop()
        if limit.cancelled_caught:
            self.world.violation(f"the run was not over after {_LONGEST_S:g} s")

    @asynccontextmanager
    async def _cluster_there(self) -> AsyncGenerator[None, None]:
        """Have the etcd of a cluster, if it has one, within the block."""
        async with trio.open_nursery() as nursery:
            if isinstance(self.cluster, RegisteredCluster):
                await nursery.start(self.cluster.serve)
            yield
            nursery.cancel_scope.cancel()

    async def _be_client(self, name: str, number: int) -> None:
        """Be a client, one life after the other."""
        chance = self.world.generator(f"lives of {name}")
        lives = 1 + sum(chance.random() < self.scenario.client_restart_chance for _ in range(2))
        host = self.host if number < self.scenario.sharing.clients else None
        for life in range(1, lives):
            if host is None:
                with trio.move_on_after(2 * chance.random()):
                    await self._live(name, number, life)
            else:
                live = partial(self._live, name, number, life)
                await host.live(f"{name}.{life}", self.server.name, 2 * chance.random(), live)
            self.world.fault("client ended", name)
        live = partial(self._live, name, number, lives, last=True)
        await (live() if host is None else host.live(f"{name}.{lives}", self.server.name, math.inf, live))

    async def _live(
        self, name: str, number: int, life: int, share: Sharing | None = None, *, last: bool = False
    ) -> None:
        """Be a client with one store; in its last life, also when faults are over."""
        if self.cluster is not None:
            await self.cluster.known(name)
        scenario, rates = self.scenario, self.scenario.client_clock_rates
        options = {
            "deadline_s": scenario.deadline_s / rates[number % len(rates)],
            "max_connections": scenario.max_connections,
            "verify": "never" if number >= scenario.clients - scenario.trusting else "always",
        }
        if self.tenants is not None:
            options["token"] = self.tenants.token(name, number)
        settings = attrs.evolve(
            self.scenario.workload,
            answers_may_be_short=Point.SHORT_ANSWER.name in self.scenario.buggify.points
            or self.scenario.disks.disks > 0,
        )
        if number < self.scenario.readers:
            settings = settings.reading_only()
        node = self._client(name, life, options, share)
        async with node.open() as store:

            def workload(task: str, settings: WorkloadSettings) -> Workload:
                return Workload(
                    self.world,
                    self.history,
                    client=name,
                    label=f"{name}.{life}.{task}",
                    store=store,
                    settings=settings,
                    server=self.scenario.server,
                )

            async with trio.open_nursery() as tasks:
                for task in range(settings.tasks):
                    tasks.start_soon(workload(str(task), settings).run)
            if last:
                self._last.append(
                    workload("cluster", attrs.evolve(settings, cancel_chance=0.0, answers_may_be_short=True))
                )
                self._at_work.count_down()
                await self._healed.wait()
                await self._succeed(name, workload("healed", attrs.evolve(settings, cancel_chance=0.0)))
                self._to_succeed.count_down()
                await self._checked.wait()

    def _client(self, name: str, life: int, options: dict[str, Any], share: Sharing | None = None) -> ClientNode:
        if self.cluster is None:
            return ClientNode(self.network, name, self.server.name, life, options, share=share)
        options = {**options, "lookup_deadline_s": self.scenario.cluster.lookup_deadline_s}
        return ClientNode(self.network, name, "", life, options, membership=self.cluster.membership(name))

    async def _look_at_cluster(self) -> None:
        """When nothing goes wrong any more and everybody has heard of the last view,
        let one client at a time write, and all see it.
        """
        by_tenant: dict[str, list[Workload]] = {}
        for workload in self._last:
            by_tenant.setdefault(self.history.tenant_of.get(workload.client, ("", ""))[0], []).append(workload)
        for workloads in by_tenant.values():
            await self._look_with(workloads)

    async def _look_with(self, workloads: Sequence[Workload]) -> None:
        """Let clients that see the same keys look at the cluster."""
        with trio.move_on_after(_HEALED_WITHIN_S) as limit:
            await workloads[0].unpin_all()  # a node may have been away when its keys were unpinned
            for number in range(self.scenario.workload.keys):
                key = self.scenario.workload.key(number)
                value = await workloads[number % len(workloads)].put_until_done(key)
                await self._see(workloads, key, value)
                if number % 2:
                    await workloads[-number % len(workloads)].delete_until_done(key)
                    await self._see(workloads, key, None)
        if limit.cancelled_caught:
            self.world.violation(f"a cluster without faults could not be used within {_HEALED_WITHIN_S:g} s")

    async def _see(self, workloads: Sequence[Workload], key: str, value: bytes | None) -> None:
        for one in workloads:
            found = dict(await one.look_at_all()).get(key)
            for server in self.servers.values():
                server.note_losses()
            may_lose = any(lives[-1].evicted or lives[-1].dropped for lives in self.history.nodes.values())
            if found != value and not (found is None and may_lose):
                said = "put" if value is not None else "deleted"
                self.world.violation(f"{one.client}: {key} was {said}, and {found and found[:40]!r} is there")

    async def _audit(self) -> None:
        """Have everything flushed and perhaps something deleted, let the server crash,
        and read what it has then.
        """
        settings = attrs.evolve(self.scenario.workload, cancel_chance=0.0, answers_may_be_short=True)
        node = ClientNode(self.network, "auditor", self.server.name, 1, {"deadline_s": 30.0})
        async with node.open() as store:
            workload = Workload(
                self.world,
                self.history,
                client="auditor",
                label="auditor",
                store=store,
                settings=settings,
                server=self.scenario.server,
            )
            with trio.move_on_after(_HEALED_WITHIN_S) as limit:
                await workload.flush_all()
                await workload.delete_perhaps()
                self.server.crash(0.1)
                await trio.sleep(_RECOVERED_AFTER_S)
                self.history.calm_since_s = self.world.clock.now
                await workload.read_each()
            if limit.cancelled_caught:
                self.world.violation(f"what was flushed could not be read within {_HEALED_WITHIN_S:g} s")

    async def _succeed(self, name: str, workload: Workload) -> None:
        with trio.move_on_after(_HEALED_WITHIN_S):
            if await workload.succeeds():
                return
        self.world.violation(f"{name} had no success within {_HEALED_WITHIN_S:g} s after all faults were over")

    def _heal(self) -> None:
        self.world.trace.add("world", "heal")
        self.faults.heal()
        if isinstance(self.cluster, SimulatedCluster):
            self.cluster.heal()
        self.buggify.chances = {}
        for plug in self.world.plugs:
            plug.heal()
        self._healed.set()

    def _check_rest(self, when: str, *, clients: int | None = None) -> None:
        """Check that nothing is reserved or pinned, and nothing lost."""
        for node in self.servers.values():
            self._check_rest_of(node, when, clients=clients)

    def _check_rest_of(self, node: ServerNode, when: str, *, clients: int | None) -> None:
        assert node.server is not None
        core = node.server.core
        core.expire_holds()
        if self.tenants is not None:
            self.tenants.expire_holds(node.name)
        statistics = core.statistics()
        named: tuple[str, ...] = (
            "reservations",
            "leases",
            "holds",
            "reserved_bytes",
            "pinned_bytes",
            "quarantined_bytes",
        )
        if clients is None and self.scenario.sharing.asks_ahead:  # a client keeps the space of its next put
            named = tuple(name for name in named if name not in ("reservations", "reserved_bytes"))
        unpinned = attrs.evolve(statistics, pinned_bytes=statistics.pinned_bytes - statistics.protected_bytes)
        left = {name: getattr(unpinned, name) for name in named if getattr(unpinned, name)}
        at_node = [one for one in self.network.of_node(node.name) if one.server == node.name]
        if self.cluster is not None or clients is None:  # a client may never use one again, and learn that it is closed
            at_node = [one for one in at_node if not one.server_end.closed]
        connections = len(at_node)
        if self.host is not None:
            connections += len(self.host.network.connections)
        expected = connections if clients is None else clients
        if statistics.clients != expected or connections != expected:
            left["clients"] = statistics.clients
            left["connections"] = connections
        if left:
            self.world.violation(f"{when}, this is left on {node.name}: {left}")
        if self.tenants is not None:
            self.tenants.check_rest(node.name, when)
            return
        footprints = sum(core.pool.footprint(length) for _, length in core.sample(1 << 20))
        if statistics.used_bytes - statistics.reserved_bytes != footprints:
            self.world.violation(f"{when}, {statistics.used_bytes} bytes are used for blocks of {footprints} bytes")

    def _check_plugs(self) -> None:
        for plug in self.world.plugs:
            for problem in plug.check():
                self.world.violation(problem)


class _Countdown:
    """An event that happens when it was counted down to 0."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.over = trio.Event()

    def count_down(self) -> None:
        self._count -= 1
        if not self._count:
            self.over.set()


class _ErrorsAreViolations(logging.Handler):
    """What the product logs as an error is one of its own faults."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        why = "".join(traceback.format_exception(record.exc_info[1])) if record.exc_info else ""
        self._world.violation(f"{record.name} logged: {record.getMessage()}\n{why}")
