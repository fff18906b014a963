"""Gathers the statistics of a server, for clients and for the management API.

Details are gathered in slices, on request. Every list is bounded, because it travels in
one message and is shown on one screen: the connections that moved the most bytes, and
the largest prefixes.
"""

import heapq
import math
import re
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final, TypeVar

import attrs
import trio

from infinistore.core.store import StoreCore
from infinistore.protocol.codec import statistics_to_tree
from infinistore.protocol.messages import Tree
from infinistore.server.connection import ROOM_ONLY, Traffic
from infinistore.server.recorder import OK, Recorder
from infinistore.server.session.handshake import Handshakes
from infinistore.server.session.session import SHARED_MEMORY, SessionRegistry
from infinistore.statistics import (
    MAX_PREFIXES,
    ArenaStatistics,
    ClientStatistics,
    DiskTierStatistics,
    MembershipStatistics,
    OperationStatistics,
    PrefixStatistics,
    ServerDetails,
    ServerStatistics,
    SpinStatistics,
    TenantStatistics,
    busiest,
    merged_by,
)
from infinistore.transports.sockets.spin import Spinner
from infinistore.version import __version__

_T = TypeVar("_T")
_MAX_ARENAS = 256
MAX_SAMPLE_KEYS = 4096
_MAX_OPERATIONS = 512
ARENA_PARTS = 128
"""The number of parts that an arena's fill is reported in, if it has as many units."""

_SLICE_KEYS = 512
_MAX_CUTS = 16
_SEPARATORS = "/:@#|"
_UP_TO_SEPARATOR = re.compile(r".*[/:@#|]", re.DOTALL)
_UP_TO_SEPARATOR_BEFORE = re.compile(r".*[/:@#|](?=.)", re.DOTALL)


def arena(core: StoreCore, index: int) -> ArenaStatistics:
    """Return how full an arena is, and each of its parts."""
    pool = core.pool
    length = pool.arenas[index].length
    parts = max(1, min(ARENA_PARTS, length // pool.allocator.unit_bytes))
    taken = pool.allocator.occupied_bytes(index, parts)
    return ArenaStatistics(
        index=index,
        length_bytes=length,
        used_bytes=sum(taken),
        fill=[min(1.0, part * parts / length) for part in taken],
    )


async def prefixes(core: StoreCore) -> list[PrefixStatistics]:
    """Return the prefixes of keys with their figures, the largest first.

    A key's prefix ends with its last separator, one of `/ : @ # |`; keys without one
    have the empty prefix. While there are too many prefixes, those with the most
    separators are cut at the previous one. Of more than `MAX_SAMPLE_KEYS` keys, a
    sample of at most that many is read (`StoreCore.sample`), and the figures are
    estimates.
    """
    sample = core.sample(MAX_SAMPLE_KEYS)
    known = len(core)
    tallies: defaultdict[str, _Tally] = defaultdict(_Tally)
    for sampled in _in_slices(sample):
        for key, length in sampled:
            match = _UP_TO_SEPARATOR.match(key)
            tally = tallies[match[0] if match else ""]
            tally.keys += 1
            tally.payload_bytes += length
            tally.squares += length * length
        await trio.lowlevel.checkpoint()
    if len(tallies) > MAX_PREFIXES:
        await _shorten(tallies)
    largest = heapq.nlargest(MAX_PREFIXES, tallies.items(), key=lambda item: item[1].payload_bytes)
    return [_estimate(prefix, tally, len(sample), known) for prefix, tally in largest]


@attrs.define
class _Tally:
    """The counts of one prefix. `squares` is the sum of the squared lengths."""

    keys: int = 0
    payload_bytes: int = 0
    squares: int = 0

    def add(self, other: "_Tally") -> None:
        self.keys += other.keys
        self.payload_bytes += other.payload_bytes
        self.squares += other.squares


def _estimate(prefix: str, tally: _Tally, sampled: int, known: int) -> PrefixStatistics:
    """Estimate the figures for all keys from a sample, with an error of two standard
    errors.

    The error of a share is that of Agresti and Coull (The American Statistician 52,
    1998), which also holds for shares close to 0 and 1. It is smaller if the sample is
    a large part of all keys.
    """
    scale = known / sampled
    whole = math.sqrt(1 - sampled / known)
    share = (tally.keys + 2) / (sampled + 4)
    keys_error = 2 * whole * known * math.sqrt(share * (1 - share) / (sampled + 4))
    mean = tally.payload_bytes / tally.keys
    variance = max(0.0, tally.squares / tally.keys - mean * mean)
    payload_error = math.hypot(keys_error * mean, 2 * whole * scale * math.sqrt(tally.keys * variance))
    return PrefixStatistics(
        prefix,
        keys=round(tally.keys * scale),
        payload_bytes=round(tally.payload_bytes * scale),
        keys_error=math.ceil(keys_error),
        payload_error_bytes=math.ceil(payload_error),
    )


async def _shorten(tallies: defaultdict[str, _Tally]) -> None:
    """Cut prefixes at the separator before the last, the deepest first."""
    by_depth: defaultdict[int, set[str]] = defaultdict(set)
    for some in _in_slices(list(tallies)):
        for prefix in some:
            by_depth[sum(map(prefix.count, _SEPARATORS))].add(prefix)
        await trio.lowlevel.checkpoint()
    for depth in range(max(by_depth), 1, -1)[:_MAX_CUTS]:
        for some in _in_slices(list(by_depth[depth])):
            for prefix in some:
                match = _UP_TO_SEPARATOR_BEFORE.match(prefix)
                assert match is not None, "it has more than one separator"
                by_depth[depth - 1].add(match[0])
                tallies[match[0]].add(tallies.pop(prefix))
            await trio.lowlevel.checkpoint()
        if len(tallies) <= MAX_PREFIXES:
            return


def _in_slices(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    return (items[first : first + _SLICE_KEYS] for first in range(0, len(items), _SLICE_KEYS))


_OPERATIONS: Final = {"commit": "put", "prepare": "put", "rdma_put": "put", "lease": "get", "rdma_get": "get"}
_OF_SHARED_MEMORY: Final = frozenset(
    ("abort", "commit", "lease", "map_arenas", "map_tables", "prepare", "release", "reserve", "touch")
)


def as_operations(requests: Sequence[OperationStatistics], traffic: Traffic) -> list[OperationStatistics]:
    """Return counts of requests as those of what clients have done, sorted by kind,
    transport and outcome.

    The requests that make a batch visible, or tell where one is, are puts and gets. One
    for room is a put if it was refused. `traffic` has the gets without a request.
    Memory that is shared is a transport of its own, "shm".
    """
    found = [_as_operation(one) for one in requests]
    if traffic.gets:
        found.append(
            OperationStatistics(
                *("get", SHARED_MEMORY, OK, traffic.gets, traffic.got_bytes), traffic.got_s, traffic.got_counts
            )
        )
    merged = merged_by("kind", "transport", "outcome")([found])
    return sorted(merged, key=lambda one: (one.kind, one.transport, one.outcome))


def _as_operation(one: OperationStatistics) -> OperationStatistics:
    kind, outcome = one.kind, one.outcome
    if outcome == ROOM_ONLY:
        kind, outcome = "reserve", OK
    elif kind == "reserve" and outcome != OK:
        kind = "put"
    shared = one.kind in _OF_SHARED_MEMORY and one.transport == "unix"
    return attrs.evolve(
        one,
        kind=_OPERATIONS.get(kind, kind),
        transport=SHARED_MEMORY if shared else one.transport,
        outcome=outcome,
    )


class Telemetry:
    """Reads the figures of one server where they are counted."""

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
        """Returns its view of its cluster; None without one."""
        self.tenants: Callable[[Counter[str], Counter[str]], Awaitable[list[TenantStatistics]]] | None = None
        """Returns the figures of each tenant; see `Tenancy.statistics`."""
        self.draining = False
        """Whether the server accepts no more connections."""
        self.connections_total = 0
        """How many connections were accepted, the refused ones included."""

    @property
    def state(self) -> str:
        """ "serving" or "draining"."""
        return "draining" if self.draining else "serving"

    def statistics(self) -> ServerStatistics:
        """The counters of the server."""
        self.core.catch_up()
        traffic = self.sessions.traffic()
        return attrs.evolve(
            self._served(traffic, connections=len(self.sessions)),
            connections_total=self.connections_total,
            connections_refused=self.sessions.refused,
            strangers_open=len(self._handshakes),
            strangers_dropped=self._handshakes.dropped,
            errors=traffic.errors + self._handshakes.errors,
            spin=self._spinner.statistics(),
        )

    def _served(self, traffic: Traffic, *, connections: int) -> ServerStatistics:
        """The figures of a server that has only these open connections."""
        return ServerStatistics(
            instance=self.instance,
            version=__version__,
            uptime_s=trio.current_time() - self._started_at,
            connections_open=connections,
            connections_total=connections,
            connections_refused=0,
            spin=SpinStatistics(0, 0, 0.0),
            **traffic.figures(),
        )

    def operations(self) -> list[OperationStatistics]:
        """The counts and latencies of what clients have done, by kind."""
        self.core.catch_up()
        return as_operations(self._recorder.statistics(), self.sessions.traffic())

    def clients(self) -> list[ClientStatistics]:
        """The open connections; of many, those that moved the most bytes."""
        self.core.catch_up()
        return busiest(self.sessions.statistics())

    async def details(self) -> ServerDetails:
        """Details, which take a few milliseconds. Other tasks run meanwhile."""
        core = self.core
        operations = self.operations()
        if len(operations) > _MAX_OPERATIONS:
            operations = heapq.nlargest(_MAX_OPERATIONS, operations, key=lambda one: one.count)
        clients = busiest(self.sessions.statistics())
        await trio.lowlevel.checkpoint()
        arenas = []
        for index in range(min(len(core.pool.arenas), _MAX_ARENAS)):
            arenas.append(arena(core, index))
            await trio.lowlevel.checkpoint()
        return ServerDetails(
            *(operations, clients, arenas, await prefixes(core), self.state),
            max_connections=self.sessions.most,
            max_pinned_bytes=core.max_pinned_bytes,
        )

    def disk(self) -> DiskTierStatistics | None:
        """The figures of the disks; None without disks."""
        return None if self._disk is None else self._disk()

    async def of_tenants(self) -> list[TenantStatistics] | None:
        """The figures of each tenant; None without tenants."""
        return None if self.tenants is None else await self.tenants(*self.sessions.of_tenants())

    async def tenant_tree(
        self, tenant: str, store: StoreCore, with_details: bool, disk: DiskTierStatistics | None = None
    ) -> Tree:
        """The answer to a tenant: its own store and its own open connections."""
        store.catch_up()
        sessions = [session for session in self.sessions if session.identity.tenant == tenant]
        traffic = Traffic()
        for session in sessions:
            traffic.add(session.traffic)
        own = self._served(traffic, connections=len(sessions))
        found = None
        if with_details:
            now = trio.current_time()
            clients = busiest(session.statistics(now) for session in sessions)
            found = ServerDetails(
                *([], clients, [], await prefixes(store), self.state), max_pinned_bytes=store.max_pinned_bytes
            )
        return statistics_to_tree(own, store.statistics(), found, disk)

    async def tree(self, with_details: bool) -> Tree:
        """The answer to a Statistics request."""
        found = await self.details() if with_details else None
        drain = None if self.cluster is None else self.cluster().drain
        shown = None if drain is None or drain.state == "none" else drain
        return statistics_to_tree(self.statistics(), self.core.statistics(), found, self.disk(), shown)
