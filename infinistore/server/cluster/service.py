"""The tasks of a server that is a node of a cluster: it registers, stays registered,
purges when the cluster was purged, drains on request, says that it drains, and leaves.

A server that has blocks of an earlier process, on disk, serves as soon as it knows that
it missed no purge of the cluster. Any other serves at once, and goes on whatever
becomes of etcd. An id that another server uses, and whatever else no retry would mend,
ends a server that has not been registered yet.
"""

import logging
import math
from collections.abc import Awaitable, Callable
from functools import partial

import attrs
import trio

from infinistore.addresses import host_and_port, with_port
from infinistore.client import StoreOptions
from infinistore.client.extension import Environment as ClientEnvironment
from infinistore.cluster.documents import ClusterConfig, Drain
from infinistore.cluster.etcd.layout import Layout
from infinistore.cluster.etcd.registration import Registration
from infinistore.cluster.locate import EtcdPlace, FilePlace, StaticPlace, parse_cluster_url
from infinistore.cluster.membership import Node, NodeState, StaticMembership, View
from infinistore.cluster_io.etcd import EtcdConnections, FlowRunner
from infinistore.cluster_io.memberships import RunningMembership, make_membership, make_session
from infinistore.cluster_io.probing import ClusterEnvironment, Token, instance_asker
from infinistore.config import ServerConfig
from infinistore.errors import ConfigError, DeadlineExceeded, DiskFailed
from infinistore.kept_errors import KeptError
from infinistore.protocol.versions import MINOR
from infinistore.server.cluster.asking import PeerToken, Refusals
from infinistore.server.cluster.draining import Drainer
from infinistore.server.cluster.others import Others
from infinistore.server.cluster.pushing import PushLimits, open_nodes, push
from infinistore.server.environment import Environment
from infinistore.server.server import Server
from infinistore.statistics import ListedNode, MembershipStatistics

__all__ = ["ClusterService"]

_log = logging.getLogger("infinistore.cluster")

_LEAVE_S = 2.0
"""How long a server that ends tries to give its lease up."""
_PUT_S = 5.0
"""How long another node may take for what it is passed."""
_ORIGIN = "cluster"
"""Where something comes from, in the audit log, that whoever may write to etcd, or to
the file of the cluster, has asked for: who that was is not known here."""


@attrs.frozen
class _Registrar:
    """The registration of this server, and what runs it."""

    registration: Registration
    runner: FlowRunner
    may_serve: trio.Event

    def look(self, view: View) -> None:
        if self.registration.seen(view):
            self.runner.wake()

    def drain(self) -> None:
        self.registration.drain()
        self.may_serve.set()
        self.runner.wake()


class ClusterService:
    """What one server does in its cluster. `token` is that of its clients, with which
    it asks other nodes who they are. `has_old_blocks`: the memory of the server has
    blocks of an earlier process.
    """

    def __init__(
        self,
        config: ServerConfig,
        server: Server,
        environment: Environment,
        token: str,
        *,
        has_old_blocks: bool = False,
    ) -> None:
        """Raises ConfigError if a file that it needs cannot be used."""
        self._server = server
        machine = environment.cluster or ClusterEnvironment()
        self._client = environment.client or ClientEnvironment()
        self._node = _node_of(config, server, machine.host_name())
        self._drainer = Drainer(partial(self._push, config, token), self._tell_drain)
        self._waits = bool(config.disks) or (has_old_blocks and not config.take_over)
        self._url = parse_cluster_url(config.cluster or "")
        self._membership: StaticMembership | RunningMembership
        self._registrar: _Registrar | None = None
        self._listed_as_draining = False
        place = self._url.place
        if isinstance(place, StaticPlace):
            self._membership = StaticMembership(place.nodes, copies=place.copies)
            return
        tls = None
        if server.tls is not None:
            server.tls.peer_context()  # so that a file that cannot be used is known at once
            tls = server.tls.peer_context
        ask_instance = instance_asker(
            self._peer_token(config, token), tls, connect=machine.connect_node, on_answer=Refusals().note
        )
        self._membership = make_membership(
            place,
            clock=environment.clock,
            random=environment.random,
            connect_etcd=machine.connect_etcd,
            ask_instance=ask_instance,
        )
        if isinstance(place, EtcdPlace):
            may_serve = trio.Event()
            registration = Registration(
                make_session(place, environment.random),
                Layout(place.cluster),
                self._node,
                clock=environment.clock,
                random=environment.random,
                config=ClusterConfig(place.copies),
                has_old_blocks=bool(config.disks) or has_old_blocks,
                on_registered=may_serve.set,
                on_drain=self._want_drain,
                on_purge=lambda: self._tasks.start_soon(self._purge, registration, runner),
                warm_up_s=config.node_warm_up_s,
            )
            connections = EtcdConnections(place, machine.connect_etcd)
            runner = FlowRunner(connections, ask_instance=ask_instance)
            self._registrar = _Registrar(registration, runner, may_serve)

    def _peer_token(self, config: ServerConfig, token: str) -> Token:
        """Return what other nodes are asked with."""
        if config.peer_token_file is None:
            return token
        peer_token = PeerToken(config.peer_token_file, self._server.policy)
        self._server.reloads.add(peer_token.reload_and_log)
        return lambda: peer_token.token

    async def run(self, serve: Callable[[], Awaitable[None]]) -> KeptError | None:
        """Run the server in its cluster until it has served. Returns the error that
        ended it, if one did.
        """
        refused: KeptError | None = None
        async with trio.open_nursery() as nursery:
            if isinstance(self._membership, RunningMembership):
                nursery.start_soon(self._membership.run)
                nursery.start_soon(self._drain_on_request)
            if self._registrar is None:
                await serve()
            else:
                refused = await self._serve_registered(serve, self._registrar)
            nursery.cancel_scope.cancel()
        return refused

    async def may_serve(self) -> None:
        """Wait until the server may serve."""
        if self._waits and self._registrar is not None:
            await self._registrar.may_serve.wait()

    async def _serve_registered(self, serve: Callable[[], Awaitable[None]], registrar: _Registrar) -> KeptError | None:
        refused: KeptError | None = None
        remove = self._membership.add_listener(registrar.look)
        async with trio.open_nursery() as nursery:
            self._tasks = nursery

            async def register() -> None:
                nonlocal refused
                try:
                    await registrar.runner.run(registrar.registration.run())
                except ConfigError as error:
                    refused = KeptError(error)
                    nursery.cancel_scope.cancel()

            async def drain() -> None:
                await self._server.drain_begun()
                registrar.drain()

            nursery.start_soon(register)
            nursery.start_soon(drain)
            await serve()
            nursery.cancel_scope.cancel()
        remove()
        with trio.move_on_after(_LEAVE_S):
            await registrar.runner.run(registrar.registration.leave())
        return refused

    async def _purge(self, registration: Registration, runner: FlowRunner) -> None:
        self._server.policy.audit.note("purge", origin=_ORIGIN, count=len(self._server.core))
        lasting = True
        with self._drainer.suspended():
            try:
                await self._server.purge()
            except (DiskFailed, DeadlineExceeded) as error:
                lasting = False
                _log.warning("a purge of the cluster is not done on disk", extra={"problem": str(error)})
        registration.purged(lasting=lasting)
        runner.wake()

    async def _drain_on_request(self) -> None:
        """Drain whenever somebody asks for it, until the server is told to stop."""
        remove = self._membership.add_listener(self._look) if self._registrar is None else _nothing
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._drainer.run)
                await self._server.drain_begun()
                nursery.cancel_scope.cancel()
        finally:
            remove()

    def _look(self, view: View) -> None:
        """Look what a file says of this node, and warn if it says nothing."""
        if problem := self._not_listed(view):
            _log.warning("this node is not in the file of its cluster", extra={"problem": problem})
        wanted = any(node.id == self._node.id and node.state is NodeState.DRAINING for node in view.nodes)
        if wanted != self._listed_as_draining:
            self._listed_as_draining = wanted
            self._want_drain(wanted)

    def _not_listed(self, view: View) -> str:
        """Why the cluster does not know this node, if a file that lists it does not."""
        ids = [node.id for node in view.nodes]
        place = self._url.place
        if not isinstance(place, FilePlace) or self._node.id in ids:
            return ""
        return f"{place.path} does not list {self._node.id} (--node-id), but {', '.join(ids) or 'nobody'}"

    def _want_drain(self, wanted: bool) -> None:
        self._server.policy.audit.note("node-drain", origin=_ORIGIN, wanted=wanted)
        self._drainer.want(wanted)

    async def _push(self, config: ServerConfig, token: str, on_progress: Callable[[Drain], None]) -> None:
        """Pass blocks on, as a client of the other nodes. Those of tenants stay: a node
        could not put them as theirs."""
        if self._server.tenancy is not None:
            if keys := len(self._server.core):
                _log.warning("blocks of tenants are not passed on", extra={"keys": keys})
            return
        core = self._server.core
        most_bytes = config.node_drain_bytes
        limits = PushLimits(
            most_bytes=core.pool.capacity_bytes // 2 if most_bytes is None else most_bytes,
            bytes_per_s=config.node_drain_bytes_per_s,
        )
        others = Others(self._membership, self._node.id)
        environment = attrs.evolve(self._client, membership=lambda url: others)
        options: StoreOptions = {"name": f"drain of {self._node.id}", "lazy": True, "deadline_s": _PUT_S}
        if token:
            options["token"] = token
        if self._server.tls is not None:
            options["tls"] = self._server.tls.peer_context()
        open_others = partial(open_nodes, config.cluster, environment, **options)
        await push(core, open_others, limits, on_progress)

    def _tell_drain(self, drain: Drain) -> None:
        if self._registrar is not None:
            self._registrar.registration.drained(drain)
            self._registrar.runner.wake()

    def statistics(self) -> MembershipStatistics:
        """What the server knows of its cluster."""
        view, age_s = self._membership.view, self._membership.age_s
        registration = None if self._registrar is None else self._registrar.registration
        if registration is not None:
            state, problem = registration.state.value, registration.problem
        else:
            problem = self._not_listed(view)
            state = "not listed" if problem else "listed"
            if isinstance(self._membership, RunningMembership) and self._membership.problem:
                problem = self._membership.problem  # of the file itself
        return MembershipStatistics(
            cluster=str(self._url),
            node=self._node.id,
            registration=state,
            registrations=0 if registration is None else registration.registrations,
            problem=problem,
            view_age_s=-1.0 if math.isinf(age_s) else age_s,
            epoch=view.epoch,
            copies=view.copies,
            purged_revision=view.purged_revision,
            nodes=[_statistics_of(node) for node in view.nodes],
            drains=list(view.drains),
            drain=self._drainer.statistics(),
        )


def _nothing() -> None:
    """There is nothing to end."""


def _node_of(config: ServerConfig, server: Server, host_name: str) -> Node:
    host, port = config.host, server.addresses.port
    address = with_port(host, port) if config.advertise is None else with_port(*host_and_port(config.advertise, port))
    return Node(
        id=config.node_id or address,
        address=f"{'infinistore' if config.tls_cert is None else 'infinistores'}://{address}",
        instance=server.telemetry.instance,
        weight=config.node_weight,
        capacity_bytes=server.core.pool.capacity_bytes,
        zone=config.node_zone or "",
        host=host_name,
        protocol=MINOR,
    )


def _statistics_of(node: Node) -> ListedNode:
    return ListedNode(
        id=node.id,
        address=node.address,
        instance=node.instance,
        generation=node.generation,
        weight=node.weight,
        state=node.state.value,
        zone=node.zone,
        host=node.host,
    )
