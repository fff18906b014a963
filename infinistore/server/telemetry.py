"""What a server tells of its state, to clients that ask and to the management API."""

from collections import Counter
from collections.abc import Awaitable, Callable

import attrs
import trio

from infinistore.core.store import StoreCore
from infinistore.protocol.codec import statistics_to_tree
from infinistore.protocol.messages import Tree
from infinistore.server.connection.conversation import Traffic
from infinistore.server.recorder import Recorder
from infinistore.server.session.handshake import Handshakes
from infinistore.server.session_registry import SessionRegistry
from infinistore.server.statistics import details
from infinistore.statistics import (
    ClientStatistics,
    DiskTierStatistics,
    MembershipStatistics,
    OperationStatistics,
    ServerDetails,
    ServerStatistics,
    SpinStatistics,
)
from infinistore.tenant_limits import TenantStatistics
from infinistore.transports.sockets.spin import Spinner
from infinistore.version import __version__

__all__ = ["Telemetry"]


class Telemetry:
    """Reads the figures of one server where they are counted. It counts only accepted
    connections.
    """

    def __init__(
        self,
        instance: str,
        core: StoreCore,
        sessions: SessionRegistry,
        *,
        handshakes: Handshakes,
        recorder: Recorder,
        spinner: Spinner,
        disk: Callable[[], DiskTierStatistics | None] | None = None,
    ) -> None:
        self.instance = instance
        self.core = core
        self.sessions = sessions
        self._handshakes = handshakes
        self._recorder = recorder
        self._spinner = spinner
        self._disk = disk
        self._started_at = trio.current_time()
        self.cluster: Callable[[], MembershipStatistics] | None = None
        """What it knows of its cluster, if it is in one."""
        self.tenants: Callable[[Counter[str], Counter[str]], Awaitable[list[TenantStatistics]]] | None = None
        """Returns the figures of each tenant, if the server has tenants: see
        `Tenancy.statistics`."""
        self.draining = False
        """Whether the server accepts no more connections."""
        self.connections_total = 0
        """How many connections were accepted, the refused ones included."""

    @property
    def state(self) -> str:
        """ "serving" or "draining"."""
        return "draining" if self.draining else "serving"

    def statistics(self) -> ServerStatistics:
        """What the server has done so far."""
        self.core.catch_up()
        traffic = self.sessions.traffic()
        return ServerStatistics(
            instance=self.instance,
            version=__version__,
            uptime_s=trio.current_time() - self._started_at,
            connections_open=len(self.sessions),
            connections_total=self.connections_total,
            connections_refused=self.sessions.refused,
            strangers_open=len(self._handshakes),
            strangers_dropped=self._handshakes.dropped,
            requests=traffic.requests,
            errors=traffic.errors + self._handshakes.errors,
            received_bytes=traffic.received_bytes,
            sent_bytes=traffic.sent_bytes,
            spin=self._spinner.statistics(),
        )

    def operations(self) -> list[OperationStatistics]:
        """How many requests there were of each kind, and how long they took."""
        return self._recorder.statistics()

    def clients(self) -> list[ClientStatistics]:
        """The open connections; of many, those that moved the most bytes."""
        self.core.catch_up()
        return details.busiest(self.sessions.statistics())

    async def details(self) -> ServerDetails:
        """What takes a few milliseconds to gather. Other tasks run meanwhile."""
        self.core.catch_up()
        found = await details.gather(self.core, self.sessions.statistics(), self._recorder, self.state)
        return attrs.evolve(found, max_connections=self.sessions.most, max_pinned_bytes=self.core.max_pinned_bytes)

    def disk(self) -> DiskTierStatistics | None:
        """What the disks have done; None without disks."""
        return None if self._disk is None else self._disk()

    async def of_tenants(self) -> list[TenantStatistics] | None:
        """What each tenant has; None without tenants."""
        return None if self.tenants is None else await self.tenants(*self.sessions.of_tenants())

    async def tenant_tree(
        self, tenant: str, store: StoreCore, with_details: bool, disk: DiskTierStatistics | None = None
    ) -> Tree:
        """The answer to a tenant: its own store and its own open connections, and
        nothing of the others.
        """
        store.catch_up()
        sessions = [session for session in self.sessions if session.identity.tenant == tenant]
        traffic = Traffic()
        for session in sessions:
            traffic.add(session.traffic)
        own = ServerStatistics(
            instance=self.instance,
            version=__version__,
            uptime_s=trio.current_time() - self._started_at,
            connections_open=len(sessions),
            connections_total=len(sessions),
            connections_refused=0,
            requests=traffic.requests,
            errors=traffic.errors,
            received_bytes=traffic.received_bytes,
            sent_bytes=traffic.sent_bytes,
            spin=SpinStatistics(0, 0, 0.0),
        )
        found = None
        if with_details:
            clients = details.busiest(session.statistics() for session in sessions)
            found = ServerDetails([], clients, [], await details.prefixes(store), self.state)
            found = attrs.evolve(found, max_pinned_bytes=store.max_pinned_bytes)
        return statistics_to_tree(own, store.statistics(), found, disk)

    async def tree(self, with_details: bool) -> Tree:
        """The answer to a Statistics request."""
        found = await self.details() if with_details else None
        drain = None if self.cluster is None else self.cluster().drain
        shown = None if drain is None or drain.state == "none" else drain
        return statistics_to_tree(self.statistics(), self.core.statistics(), found, self.disk(), shown)
