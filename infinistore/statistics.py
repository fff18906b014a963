"""The statistics of a store, as records of numbers; and those of several servers as
those of one store.

The core, the allocators and the transports write them. The client, the command line,
the monitor and the management API read them. `infinistore.protocol.codec` encodes them
for the wire. Summed, counts and sizes are added, limits of one connection are the
smallest of all, lists are joined, and `instance` changes when any of the servers
restarts, so that readers of counters notice.
"""

import hashlib
import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, zip_longest
from typing import Any, Final, TypeVar

import attrs

__all__ = [
    "LATENCY_BOUNDS_S",
    "AllocatorStatistics",
    "ArenaStatistics",
    "ClientStatistics",
    "ClusterStatistics",
    "DiskStatistics",
    "DiskTierStatistics",
    "EvictionStatistics",
    "ListedNode",
    "MembershipStatistics",
    "NodeStatistics",
    "OperationStatistics",
    "PrefixStatistics",
    "ServerDetails",
    "ServerStatistics",
    "SpinStatistics",
    "Stats",
    "StoreStatistics",
]


@attrs.frozen(kw_only=True)
class AllocatorStatistics:
    """The state of an allocator at one moment. All sizes in bytes."""

    name: str
    """The strategy's name."""
    unit_bytes: int
    """Every offset is a multiple of this."""
    arenas: int
    """Number of arenas."""
    capacity_bytes: int
    """Usable space: the lengths of the arenas, without unusable rests at their ends."""
    used_bytes: int
    """The sum of the footprints of all allocated extents."""
    extents: int
    """Number of allocated extents."""
    largest_free_extent_bytes: int
    """The size of the largest block that can be placed now.

    It is exact: a block of this size is placed, a block with one more byte is refused.
    """

    @property
    def free_bytes(self) -> int:
        """Free space. A block of this size fits only if it is contiguous."""
        return self.capacity_bytes - self.used_bytes


@attrs.frozen
class EvictionStatistics:
    """Number of blocks evicted since the start, by cause."""

    on_demand: int
    """To make space for a put."""
    fragmentation: int
    """Because the free space was fragmented."""
    periodic: int
    """By the server's timer."""
    manual: int
    """On request of a person or a program."""


@attrs.frozen
class StoreStatistics:
    """A snapshot of one store.

    Sizes are in bytes and, unless stated otherwise, footprints. Fields from
    `capacity_bytes` to `arenas` are current values, fields from `hits` on are counters
    since the start.
    """

    capacity_bytes: int
    """The usable space of all arenas."""
    growable_bytes: int
    """How much the pool can still grow."""
    used_bytes: int
    """Space of blocks with a key, reservations, and pinned blocks without a key."""
    reserved_bytes: int
    """Space of unfinished writes."""
    pinned_bytes: int
    """Space of blocks that are leased, held, protected, or read without a request, each
    counted once. They cannot be evicted."""
    held_bytes: int
    """The part of `pinned_bytes` that holds pin; each block counts once."""
    condemned_bytes: int
    """The part of `pinned_bytes` whose key is gone. It is freed with its last pin."""
    quarantined_bytes: int
    """Space reserved or leased by lost clients that could still write.

    A block that two of them lease counts twice.
    """
    keys: int
    clients: int
    quarantined_clients: int
    reservations: int
    leases: int
    """Leases, and batches that clients read without a request."""
    holds: int
    arenas: int
    hits: int
    """Keys found by a lease, or by a read without a request."""
    misses: int
    """Keys not found by a lease."""
    puts: int
    """Committed blocks, without skipped ones."""
    put_bytes: int
    """The total length of these blocks."""
    hit_bytes: int
    """The total length of the found blocks."""
    deleted: int
    """Deleted or purged keys."""
    checksum_drops: int
    """Blocks dropped because their bytes did not match their checksum."""
    evicted: EvictionStatistics
    allocator: AllocatorStatistics
    protected_keys: int = attrs.field(default=0, kw_only=True)
    """Keys that `pin` keeps from eviction. (These three are 0 if not reported.)"""
    protected_bytes: int = attrs.field(default=0, kw_only=True)
    """The part of `pinned_bytes` that they take."""
    expired: int = attrs.field(default=0, kw_only=True)
    """Keys whose time to live was over."""


@attrs.frozen
class SpinStatistics:
    """How often the server spun, how often that succeeded, and the total time in s."""

    spins: int
    hits: int
    burned_s: float


@attrs.frozen
class ServerStatistics:
    """The activity of a server since its start. Bytes are payload only."""

    instance: str
    version: str
    uptime_s: float
    connections_open: int
    connections_total: int
    connections_refused: int
    strangers_open: int = attrs.field(default=0, kw_only=True)
    """Connections that have not completed their hello, not in `connections_open`."""
    strangers_dropped: int = attrs.field(default=0, kw_only=True)
    """How many of these were closed for others; 0 if it is not reported."""
    requests: int
    errors: int
    received_bytes: int
    sent_bytes: int
    spin: SpinStatistics
    """Spinning for fast clients: its cost and success."""


@attrs.frozen
class OperationStatistics:
    """Requests of one kind, transport and outcome ("ok", or an error's name)."""

    kind: str
    transport: str
    outcome: str
    count: int
    payload_bytes: int
    latency_sum_s: float
    latency_counts: list[int]
    """A histogram with the bounds of `LATENCY_BOUNDS_S` and a last bucket above them.

    Each request counts in one bucket. A latency is the time from the arrival of a
    request's head until its reply was sent.
    """


@attrs.frozen
class ClientStatistics:
    """One open connection.

    Bytes are payload only; `pinned_bytes` is leased and reserved space.
    """

    name: str
    transport: str
    connected_s: float
    requests: int
    errors: int
    received_bytes: int
    sent_bytes: int
    pinned_bytes: int


@attrs.frozen
class ArenaStatistics:
    """One arena. `fill` is the usage of parts of equal length, in order; 0.0 to 1.0."""

    index: int
    length_bytes: int
    used_bytes: int
    fill: list[float]


@attrs.frozen
class PrefixStatistics:
    """Keys with the same prefix, up to the separator.

    In a large store, an estimate from a random sample.
    """

    prefix: str
    keys: int
    payload_bytes: int
    keys_error: int = 0
    """Two standard errors: 19 of 20 estimates are this close. 0: exact."""
    payload_error_bytes: int = 0
    """The same for `payload_bytes`."""


@attrs.frozen
class ServerDetails:
    """Details for operators, which cost more to gather."""

    operations: list[OperationStatistics]
    clients: list[ClientStatistics]
    arenas: list[ArenaStatistics]
    prefixes: list[PrefixStatistics]
    state: str
    """"serving" or "draining"."""
    max_connections: int | None = None
    """The server's limit of connections; None if not reported."""
    max_pinned_bytes: int | None = None
    """The limit of one connection's leases and reservations; None if not reported."""


LATENCY_BOUNDS_S = (
    20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
)  # fmt: skip
"""The upper bounds of the latency histograms, in seconds."""


@attrs.frozen(kw_only=True)
class TenantStatistics:
    """What one tenant has of a server, and has done there."""

    tenant: str
    group: str
    connections: int
    """How many it has open now."""
    keys: int
    used_bytes: int
    """Space of its blocks and of its unfinished writes."""
    pinned_bytes: int
    """What of that cannot be evicted, because it is read, held or being written."""
    reserved_bytes: int
    """What its limits reserve for it."""
    max_bytes: int | None
    """What its limits allow it at most."""
    hits: int
    """Keys that its gets found."""
    misses: int
    """Keys that its gets did not find."""
    evicted: int
    """Its blocks that were evicted."""
    refused: int
    """Its connections and requests that were refused."""
    pauses: int
    """How often one of its connections was made to wait, because of its rates."""


@attrs.frozen(kw_only=True)
class DiskStatistics:
    """One disk. Counts are since the start, sizes in bytes."""

    path: str
    """Its folder."""
    state: str
    """"recovering" until its index is there, then "healthy", "read-only" or "off"."""
    alarm: str
    """Why it is read-only or off, or has less room than it was given, and what to do;
    else empty."""
    direct: bool
    """Whether it is read and written past the page cache (O_DIRECT)."""
    capacity_bytes: int
    """What it may take. It shrinks when the file system is full."""
    used_bytes: int
    """What of this holds blocks, those included that were replaced since."""
    keys: int
    index_bytes: int
    """The memory that its index takes."""
    read_blocks: int
    """Blocks read into the pool, and verified."""
    read_bytes: int
    written_blocks: int
    """Blocks made durable."""
    written_bytes: int
    device_written_bytes: int
    """All that was written, with padding, tables and snapshots: what wears the disk."""
    queued_reads: int
    """Reads that have not begun, in pieces of a few MiB."""
    queued_writes: int
    hung_jobs: int
    """Reads and writes that are late."""
    damaged_blocks: int
    """Blocks that did not have their checksum."""
    read_errors: int
    write_errors: int


@attrs.frozen(kw_only=True)
class DiskTierStatistics:
    """The disks of a store. Counts are since the start, sizes in bytes."""

    disks: list[DiskStatistics]
    queued_bytes: int
    """What waits to be written now."""
    ageing_bytes: int
    """What was put and is too young to be written."""
    pinned_bytes: int
    """What is pinned in the pool because it is being written."""
    skipped_blocks: int
    """Blocks that were not written because too much waited."""
    evicted_blocks: int
    """Blocks that were evicted or replaced before they were written."""
    failed_blocks: int
    """Blocks that no disk took."""
    promoted_blocks: int
    """Blocks read into the pool."""
    promoted_bytes: int
    late_blocks: int
    """Blocks that were not read because nobody waited for them any more."""
    no_room_blocks: int
    """Blocks that were not read because the pool had no room."""
    prefetch_bytes: int
    """What is still to be read ahead."""
    prefetch_skipped_blocks: int
    """Blocks not read ahead because that would have taken too much of the pool."""
    reinserted_blocks: int
    """Blocks written again because their segment was overwritten."""
    held_bytes: int
    """What holds keep on disk."""
    unsafe_keys: int
    """Deleted keys that a disk which cannot be written may bring back."""


@attrs.frozen
class ListedNode:
    """A node of a cluster, as a server sees it."""

    id: str
    address: str
    instance: str
    generation: int
    weight: int
    state: str
    """ "joining", "serving" or "draining"."""
    zone: str
    host: str


@attrs.frozen
class DrainStatistics:
    """How far the last drain on request is. Groups are keys with one hash tag."""

    state: str
    """ "none", "draining" or "drained"."""
    groups: int
    """How many are to be moved."""
    moved_groups: int
    skipped_groups: int
    """Those that were with their new owners already."""
    failed_groups: int
    """Those that could not be moved as a whole."""
    moved_groups_total: int  # since the server started
    moved_bytes_total: int
    size_bytes: int = 0
    """What the blocks to be moved have together."""
    done_bytes: int = 0
    """What of this was moved, was there, is gone, or could not be moved."""
    elapsed_s: int = 0
    left_s: float | None = None
    """About how long the rest takes; None if that cannot be said."""


@attrs.frozen
class MembershipStatistics:
    """What a server knows of its cluster, and whether the cluster knows it."""

    cluster: str
    """The URL, without options."""
    node: str
    """The id of the server itself."""
    registration: str
    """ "registering", "registered", "lost", "drained" or "left"; where servers do not
    register, "listed", or "not listed" if the file of the cluster lacks this one.
    """
    registrations: int
    """How often it has registered."""
    problem: str
    """What keeps it from being registered or listed; empty if nothing does."""
    view_age_s: float
    """For how long nothing has confirmed its view; -1 if it has none."""
    epoch: int
    """Which view it is; -1 if it has none."""
    copies: int
    purged_revision: int
    nodes: list[ListedNode]
    drains: list[str]
    """The ids of nodes that were asked to drain, also of those that have left."""
    drain: DrainStatistics
    """Its own."""


@attrs.frozen
class Stats:
    """Transport and reason, the store, and the server if there is one."""

    transport: str
    transport_reason: str
    store: StoreStatistics
    server: ServerStatistics | None = None
    details: ServerDetails | None = None
    """Only on request, and only from a server."""
    disk: DiskTierStatistics | None = None
    """None if the store has no disks."""
    cluster: "ClusterStatistics | None" = None
    """Only from a cluster, whose nodes' statistics the other records add up."""
    drain: DrainStatistics | None = None
    """Only from a node of a cluster that drains on request, or has done so."""


@attrs.frozen(kw_only=True)
class NodeStatistics:
    """One node of a cluster, as this client sees it."""

    id: str
    address: str
    state: str
    """"joining", "serving" or "draining"."""
    problem: str
    """Why it does not answer; empty if it does."""
    stats: Stats | None
    """None if it does not answer."""


@attrs.frozen(kw_only=True)
class ClusterStatistics:
    """A cluster, as this client sees it. Counts are since the store was opened."""

    epoch: int
    """Of the view."""
    view_age_s: float
    """For how long nothing has confirmed the view; 0 if it cannot change."""
    copies: int
    lost_reads: int
    """Keys that counted as missing because their node did not answer."""
    lost_copies: int
    """Keys that puts stored on fewer nodes than they should have."""
    warmed_blocks: int
    """Blocks copied to nodes that had joined."""
    hedges: int = 0
    """How often a node was late with its part of a read, so that the other copies were
    asked, too.
    """
    hedges_won: int = 0
    """How often these answered first."""
    moved_slots: int = 0
    """Groups of keys that changed hands, as far as this client had met them before: of
    the 65,536 slots that keys fall into, those that have got another owner.
    """
    nodes: list[NodeStatistics]


_MOST_CLIENTS: Final = 256
_MOST_PREFIXES: Final = 64

_Record = TypeVar("_Record", bound=attrs.AttrsInstance)


def summed(several: Sequence[Stats]) -> Stats:
    """Return the statistics of servers, at least one, as those of one store.

    `details` and `server` are there if all servers gave them, `disk` if any did.
    """
    servers = [one.server for one in several if one.server is not None]
    details = [one.details for one in several if one.details is not None]
    disks = [one.disk for one in several if one.disk is not None]
    return Stats(
        transport=_words(one.transport for one in several),
        transport_reason=_words((one.transport_reason for one in several), separator="; "),
        store=summed_store([one.store for one in several]),
        server=_server(servers) if len(servers) == len(several) else None,
        details=_details(details) if len(details) == len(several) else None,
        disk=summed_disks(disks) if disks else None,
    )


def _added(records: Sequence[_Record], **others: Any) -> _Record:
    """Add all fields of these records, except for `others`."""
    names = [field.name for field in attrs.fields(type(records[0])) if field.name not in others]
    return type(records[0])(**{name: sum(getattr(one, name) for one in records) for name in names}, **others)


def _words(words: Iterable[str], separator: str = ", ") -> str:
    return separator.join(dict.fromkeys(words))


def summed_store(stores: Sequence[StoreStatistics]) -> StoreStatistics:
    """Return the statistics of stores, at least one, as those of one."""
    allocators: list[AllocatorStatistics] = [one.allocator for one in stores]
    evicted: list[EvictionStatistics] = [one.evicted for one in stores]
    allocator = _added(
        allocators,
        name=_words(one.name for one in allocators),
        unit_bytes=max(one.unit_bytes for one in allocators),
        largest_free_extent_bytes=max(one.largest_free_extent_bytes for one in allocators),
    )
    return _added(stores, evicted=_added(evicted), allocator=allocator)


def _server(servers: Sequence[ServerStatistics]) -> ServerStatistics:
    spins: list[SpinStatistics] = [one.spin for one in servers]
    return _added(
        servers,
        instance=_instance([one.instance for one in servers]),
        version=_words(one.version for one in servers),
        uptime_s=min(one.uptime_s for one in servers),
        spin=_added(spins),
    )


def _instance(instances: Sequence[str]) -> str:
    """Return a text in the form of an instance that stands for all of these."""
    if len(instances) == 1:
        return instances[0]
    return hashlib.blake2b("\0".join(instances).encode(), digest_size=16).hexdigest()


def _details(several: Sequence[ServerDetails]) -> ServerDetails:
    arenas = chain.from_iterable(one.arenas for one in several)
    clients = chain.from_iterable(one.clients for one in several)
    return ServerDetails(
        operations=_operations(chain.from_iterable(one.operations for one in several)),
        clients=heapq.nlargest(_MOST_CLIENTS, clients, key=_moved_bytes),
        arenas=[attrs.evolve(arena, index=index) for index, arena in enumerate(arenas)],
        prefixes=_prefixes(chain.from_iterable(one.prefixes for one in several)),
        state="draining" if any(one.state == "draining" for one in several) else "serving",
        max_connections=_unless_unknown(sum, [one.max_connections for one in several]),
        max_pinned_bytes=_unless_unknown(min, [one.max_pinned_bytes for one in several]),
    )


def _moved_bytes(client: ClientStatistics) -> int:
    return client.received_bytes + client.sent_bytes


def _unless_unknown(combine: Callable[[list[int]], int], numbers: Sequence[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return combine(known) if len(known) == len(numbers) else None


def _operations(several: Iterable[OperationStatistics]) -> list[OperationStatistics]:
    alike: dict[tuple[str, str, str], list[OperationStatistics]] = {}
    for one in several:
        alike.setdefault((one.kind, one.transport, one.outcome), []).append(one)
    return [
        _added(
            ones,
            kind=kind,
            transport=transport,
            outcome=outcome,
            latency_counts=[sum(counts) for counts in zip_longest(*(one.latency_counts for one in ones), fillvalue=0)],
        )
        for (kind, transport, outcome), ones in alike.items()
    ]


def _prefixes(several: Iterable[PrefixStatistics]) -> list[PrefixStatistics]:
    """Add what has the same prefix. Errors of independent samples add as squares."""
    alike: dict[str, list[PrefixStatistics]] = {}
    for one in several:
        alike.setdefault(one.prefix, []).append(one)
    added = [
        _added(
            ones,
            prefix=prefix,
            keys_error=math.ceil(math.hypot(*(one.keys_error for one in ones))),
            payload_error_bytes=math.ceil(math.hypot(*(one.payload_error_bytes for one in ones))),
        )
        for prefix, ones in alike.items()
    ]
    return heapq.nlargest(_MOST_PREFIXES, added, key=lambda one: one.payload_bytes)


def summed_disks(tiers: Sequence[DiskTierStatistics]) -> DiskTierStatistics:
    """Return the statistics of the disks of stores, at least one, as those of one."""
    return _added(tiers, disks=[disk for tier in tiers for disk in tier.disks])
