"""What a server tells of its state, to clients that ask and to the management API."""

from collections.abc import Callable

import attrs
import trio

from infinistore.core.store import StoreCore
from infinistore.protocol.messages import Tree
from infinistore.protocol.statistics_tree import statistics_to_tree
from infinistore.server.session.handshake import Handshakes
from infinistore.server.session_registry import SessionRegistry
from infinistore.server.statistics import details
from infinistore.server.statistics.recorder import Recorder
from infinistore.statistics import (
    ClientStatistics,
    DiskTierStatistics,
    MembershipStatistics,
    OperationStatistics,
    ServerDetails,
    ServerStatistics,
)
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
        disk: Callable[[], DiskTierStatistics] | None = None,
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

    async def tree(self, with_details: bool) -> Tree:
        """The answer to a Statistics request."""
        found = await self.details() if with_details else None
        return statistics_to_tree(self.statistics(), self.core.statistics(), found, self.disk())
