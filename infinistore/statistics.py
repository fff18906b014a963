"""The statistics of a store, as records of numbers; and those of several servers as
those of one store.

The core, the allocators and the transports write them. The client, the command line,
the monitor and the management API read them. `infinistore.protocol.codec` encodes them
for the wire. The metadata of a field declares everything else: its metric for
Prometheus, if it has one, and the rule by which `merged` turns the values of several
servers into one. Without a rule, numbers are added.
"""

import hashlib
import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from statistics import fmean
from typing import Any, Final, Literal, TypeAlias, TypeVar

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

# What the metadata of a field says

_Record = TypeVar("_Record", bound=attrs.AttrsInstance)
_Metadata: TypeAlias = dict[str, Any]
Rule: TypeAlias = Callable[[Sequence[Any]], Any]
"""Makes one value of those of several servers, at least one."""


@attrs.frozen
class Metric:
    """The metric of a field."""

    kind: Literal["counter", "gauge"]
    name: str
    """Without the prefix `infinistore_`. A counter may have none: it is not scraped."""
    help: str
    label: str = ""
    """If not empty, `value` returns a number for each value of this label."""
    value: Callable[[Any], Any] = lambda number: number
    """Turns the value of the field into the number of the metric."""

    def numbers(self, value: Any) -> Mapping[str, float]:
        """Return its numbers, by the value of its label."""
        shown = self.value(value)
        return shown if self.label else {"": shown}


def counter(name: str = "", help: str = "", **others: Any) -> _Metadata:  # noqa: A002
    """Return the metadata of a field that only grows, and is added. Without a name, it
    has no metric.
    """
    return {"metric": Metric("counter", name, help, **others)}


def gauge(name: str, help: str, *, merge: Rule | None = None, **others: Any) -> _Metadata:  # noqa: A002
    """Return the metadata of a field that may go up and down."""
    return {"metric": Metric("gauge", name, help, **others), "merge": merge}


def merge(rule: Rule) -> _Metadata:
    """Return the metadata of a field without a metric."""
    return {"merge": rule}


def metric_of(field: "attrs.Attribute[Any]") -> Metric | None:
    """Return the metric of a field of statistics."""
    found: Metric | None = field.metadata.get("metric")
    return found


def counters(record: attrs.AttrsInstance) -> Iterator[float]:
    """Yield all that only grows while a server runs, in a fixed order."""
    for field in attrs.fields(type(record)):
        value, metric = getattr(record, field.name), metric_of(field)
        if metric is not None and metric.kind == "counter":
            yield from metric.numbers(value).values()
        elif attrs.has(type(value)):
            yield from counters(value)


def merged(records: Sequence[_Record]) -> _Record:
    """Return records of several servers, at least one, as one: each field by its rule.
    Without one, records are merged and numbers are added.
    """
    return type(records[0])(
        **{
            field.name: _rule(field)([getattr(one, field.name) for one in records])
            for field in attrs.fields(type(records[0]))
        }
    )


def _rule(field: "attrs.Attribute[Any]") -> Rule:
    rule: Rule = field.metadata.get("merge") or (merged if field.type and attrs.has(field.type) else sum)
    return rule


def words(several: Iterable[str], separator: str = ", ") -> str:
    """Return each of these texts once."""
    return separator.join(dict.fromkeys(several))


def last(values: Sequence[Any]) -> Any:
    """Return the last of these values, which are usually all the same."""
    return values[-1]


def _if_all_tell(rule: Rule) -> Rule:
    return lambda values: None if None in values else rule(values)


def _if_any_tells(rule: Rule) -> Rule:
    def of_those(values: Sequence[Any]) -> Any:
        known = [value for value in values if value is not None]
        return rule(known) if known else None

    return of_those


def _untold(values: Sequence[Any]) -> None:
    """Return None: all together have none."""


def _chained(lists: Sequence[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(lists))


def merged_by(*names: str) -> Callable[[Sequence[list[_Record]]], list[_Record]]:
    """Return the rule for lists of records: those alike in these fields are one."""

    def rule(lists: Sequence[list[_Record]]) -> list[_Record]:
        alike: dict[tuple[Any, ...], list[_Record]] = {}
        for one in chain.from_iterable(lists):
            alike.setdefault(tuple(getattr(one, name) for name in names), []).append(one)
        return list(map(merged, alike.values()))

    return rule


def _instance(instances: Sequence[str]) -> str:
    """Return a text in the form of an instance. It changes when any of the servers
    restarts, so that readers of counters notice.
    """
    if len(instances) == 1:
        return instances[0]
    return hashlib.blake2b("\0".join(instances).encode(), digest_size=16).hexdigest()


def _buckets(histograms: Sequence[list[int]]) -> list[int]:
    """Add histograms; another release may have other bounds."""
    return [sum(counts) for counts in zip_longest(*histograms, fillvalue=0)]


def _error(errors: Sequence[float]) -> int:
    """Errors of independent samples add as squares."""
    return math.ceil(math.hypot(*errors))


@attrs.frozen(kw_only=True)
class AllocatorStatistics:
    """The state of an allocator at one moment. All sizes in bytes."""

    name: str = attrs.field(metadata=merge(words))
    """The strategy's name."""
    unit_bytes: int = attrs.field(metadata=merge(max))
    """Every offset is a multiple of this."""
    arenas: int
    capacity_bytes: int
    """Usable space: the lengths of the arenas, without unusable rests at their ends."""
    used_bytes: int
    """The sum of the footprints of all allocated extents."""
    extents: int = attrs.field(metadata=gauge("pool_extents", "Number of allocated extents"))
    largest_free_extent_bytes: int = attrs.field(
        metadata=gauge("pool_largest_free_extent_bytes", "Largest block that can be placed without eviction", merge=max)
    )
    """It is exact: a block of this size is placed, a block with one more byte is
    refused.
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

    capacity_bytes: int = attrs.field(metadata=gauge("pool_capacity_bytes", "Size of the pool"))
    """The usable space of all arenas."""
    growable_bytes: int = attrs.field(metadata=gauge("pool_growable_bytes", "How much the pool can still grow"))
    used_bytes: int = attrs.field(metadata=gauge("pool_used_bytes", "Space of the pool that is in use"))
    """Space of blocks with a key, reservations, and pinned blocks without a key."""
    reserved_bytes: int = attrs.field(
        metadata=gauge("pool_reserved_bytes", "Space of the pool that is reserved by unfinished puts")
    )
    pinned_bytes: int = attrs.field(metadata=gauge("pool_pinned_bytes", "Space of the pool that gets and holds pin"))
    """Space of blocks that are leased, held, protected, or read without a request, each
    counted once. They cannot be evicted."""
    held_bytes: int = attrs.field(metadata=gauge("pool_held_bytes", "Space of the pool that only holds pin"))
    """The part of `pinned_bytes` that holds pin; each block counts once."""
    condemned_bytes: int = attrs.field(
        metadata=gauge("pool_condemned_bytes", "Space of the pool that is freed when its last reader has finished")
    )
    """The part of `pinned_bytes` whose key is gone. It is freed with its last pin."""
    quarantined_bytes: int = attrs.field(
        metadata=gauge("pool_quarantined_bytes", "Space of the pool that lost clients can still write to")
    )
    """A block that two of them lease counts twice."""
    keys: int = attrs.field(metadata=gauge("keys", "Keys in the store"))
    clients: int
    quarantined_clients: int = attrs.field(metadata=gauge("quarantined_clients", "Lost clients that can still write"))
    reservations: int = attrs.field(
        metadata=gauge("reservations_open", "Unfinished puts, and space reserved ahead for the next put")
    )
    leases: int = attrs.field(metadata=gauge("leases_open", "Unfinished gets, and leases in place"))
    """Leases, and batches that clients read without a request."""
    holds: int = attrs.field(metadata=gauge("holds_open", "Holds on prefixes"))
    arenas: int = attrs.field(metadata=gauge("pool_arenas", "Number of arenas of the pool"))
    hits: int = attrs.field(metadata=counter("key_hits", "Keys that gets found"))
    """Keys found by a lease, or by a read without a request."""
    misses: int = attrs.field(metadata=counter("key_misses", "Keys that gets did not find"))
    puts: int = attrs.field(metadata=counter("put_blocks", "Blocks stored"))
    """Committed blocks, without skipped ones."""
    put_bytes: int = attrs.field(metadata=counter("put_bytes", "Bytes of these blocks"))
    hit_bytes: int = attrs.field(metadata=counter("hit_bytes", "Bytes of the blocks that gets found"))
    deleted: int = attrs.field(metadata=counter("deleted_keys", "Keys deleted or purged"))
    checksum_drops: int = attrs.field(
        metadata=counter("checksum_dropped_blocks", "Blocks dropped because they did not match their checksum")
    )
    evicted: EvictionStatistics = attrs.field(
        metadata=counter("evicted_blocks", "Blocks evicted, by cause", label="cause", value=attrs.asdict)
    )
    allocator: AllocatorStatistics
    protected_keys: int = attrs.field(
        default=0, kw_only=True, metadata=gauge("protected_keys", "Keys that pin keeps from eviction")
    )
    """This and the following fields are 0 if not reported."""
    protected_bytes: int = attrs.field(
        default=0, kw_only=True, metadata=gauge("pool_protected_bytes", "Space of the pool that these take")
    )
    """The part of `pinned_bytes` that they take."""
    expired: int = attrs.field(
        default=0, kw_only=True, metadata=counter("expired_keys", "Keys whose time to live was over")
    )
    wanted_capacity_bytes: int = attrs.field(
        default=0,
        kw_only=True,
        metadata=gauge(
            "pool_wanted_bytes",
            "Size of a pool that would have had nine tenths of the blocks that came again after they had been evicted",
        ),
    )
    """The present size if there were none lately. It is at most eight times that."""
    hottest_group_share: float = attrs.field(
        default=0.0,
        kw_only=True,
        metadata=gauge(
            "hottest_group_ratio",
            "The part of the blocks read lately, at least, that belong to the group of keys that is read most",
            merge=max,
        ),
    )
    """A group is the keys with one hash tag. It is a sample of one block in 1,024."""
    avoidable_puts: float = attrs.field(
        default=0.0,
        kw_only=True,
        metadata=gauge(
            "avoidable_puts_ratio",
            "The part of the blocks put lately that a pool of pool_wanted_bytes would have had",
            merge=fmean,
        ),
    )


@attrs.frozen
class SpinStatistics:
    """Spinning for fast clients: its cost and success."""

    spins: int = attrs.field(
        metadata=counter("spins", "How often the server spun for the next request of a fast client")
    )
    hits: int = attrs.field(metadata=counter("spin_hits", "How often a request arrived while it spun"))
    burned_s: float = attrs.field(metadata=counter("spin_seconds", "Total time spent spinning"))


@attrs.frozen
class ServerStatistics:
    """The activity of a server since its start. Bytes are payload only."""

    instance: str = attrs.field(metadata=merge(_instance))
    version: str = attrs.field(metadata=merge(words))
    uptime_s: float = attrs.field(metadata=gauge("uptime_seconds", "Time since the server started", merge=min))
    connections_open: int = attrs.field(metadata=gauge("connections_open", "Open connections of clients"))
    connections_total: int = attrs.field(metadata=counter("connections", "Connections so far, including refused ones"))
    connections_refused: int = attrs.field(
        metadata=counter("connections_refused", "Connections refused by --max-connections")
    )
    strangers_open: int = attrs.field(
        default=0,
        kw_only=True,
        metadata=gauge("strangers_open", "Connections that have not completed their hello"),
    )
    """They are not in `connections_open`."""
    strangers_dropped: int = attrs.field(
        default=0,
        kw_only=True,
        metadata=counter("strangers_dropped", "Connections closed before their hello to make room for others"),
    )
    """0 if it is not reported."""
    requests: int = attrs.field(metadata=counter())
    """Those included that gets of shared memory do without."""
    errors: int = attrs.field(
        metadata=counter("errors", "Requests that were refused, and connections that an error ended")
    )
    received_bytes: int = attrs.field(metadata=counter("received_bytes", "Payload received from clients"))
    sent_bytes: int = attrs.field(metadata=counter("sent_bytes", "Payload sent to clients"))
    spin: SpinStatistics


@attrs.frozen
class OperationStatistics:
    """Requests of one kind, transport and outcome ("ok", or an error's name).

    Puts and gets are of the kinds "put" and "get", whatever moves their bytes. The
    transport of those in memory that client and server share is "shm".
    """

    kind: str = attrs.field(metadata=merge(last))
    transport: str = attrs.field(metadata=merge(last))
    outcome: str = attrs.field(metadata=merge(last))
    count: int = attrs.field(metadata=counter("operations", "Requests, by kind, transport and outcome"))
    payload_bytes: int = attrs.field(
        metadata=counter("operation_payload_bytes", "Payload of these requests, in either direction")
    )
    latency_sum_s: float
    latency_counts: list[int] = attrs.field(metadata=merge(_buckets))
    """A histogram with the bounds of `LATENCY_BOUNDS_S` and a last bucket above them.

    Each request counts in one bucket. A latency is the time from the arrival of a
    request's head until its reply was sent. Of the gets of shared memory without a
    request, one of 16 counts, which the client has timed.
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
    id: str = ""
    """No other connection has it, at any server or run of one. Empty if not reported.
    """


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

    prefix: str = attrs.field(metadata=merge(last))
    keys: int
    payload_bytes: int
    keys_error: int = attrs.field(default=0, metadata=merge(_error))
    """Two standard errors: 19 of 20 estimates are this close. 0: exact."""
    payload_error_bytes: int = attrs.field(default=0, metadata=merge(_error))
    """The same for `payload_bytes`."""


MAX_CLIENTS: Final = 256
MAX_PREFIXES: Final = 64


def busiest(clients: Iterable[ClientStatistics]) -> list[ClientStatistics]:
    """Return the connections that moved the most bytes, the busiest first."""
    return heapq.nlargest(MAX_CLIENTS, clients, key=lambda client: client.received_bytes + client.sent_bytes)


def _numbered(lists: Sequence[list[ArenaStatistics]]) -> list[ArenaStatistics]:
    return [attrs.evolve(arena, index=index) for index, arena in enumerate(_chained(lists))]


def _largest(lists: Sequence[list[PrefixStatistics]]) -> list[PrefixStatistics]:
    return heapq.nlargest(MAX_PREFIXES, merged_by("prefix")(lists), key=lambda one: one.payload_bytes)


@attrs.frozen
class ServerDetails:
    """Details for operators, which cost more to gather."""

    operations: list[OperationStatistics] = attrs.field(metadata=merge(merged_by("kind", "transport", "outcome")))
    clients: list[ClientStatistics] = attrs.field(metadata=merge(lambda lists: busiest(_chained(lists))))
    arenas: list[ArenaStatistics] = attrs.field(metadata=merge(_numbered))
    prefixes: list[PrefixStatistics] = attrs.field(metadata=merge(_largest))
    state: str = attrs.field(metadata=merge(lambda states: "draining" if "draining" in states else "serving"))
    """"serving" or "draining"."""
    max_connections: int | None = attrs.field(default=None, metadata=merge(_if_all_tell(sum)))
    """The server's limit of connections; None if not reported."""
    max_pinned_bytes: int | None = attrs.field(default=None, metadata=merge(_if_all_tell(min)))
    """The limit of one connection's leases and reservations; None if not reported."""


LATENCY_BOUNDS_S = (
    20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
)  # fmt: skip
"""The upper bounds of the latency histograms, in seconds."""


@attrs.frozen(kw_only=True)
class TenantStatistics:
    """The figures of one tenant at a server."""

    tenant: str = attrs.field(metadata=merge(last))
    group: str = attrs.field(metadata=merge(last))
    connections: int = attrs.field(
        metadata=gauge("tenant_connections_open", "Open connections of a tenant, of at most 256 tenants")
    )
    keys: int = attrs.field(metadata=gauge("tenant_keys", "Keys of a tenant"))
    used_bytes: int = attrs.field(metadata=gauge("tenant_used_bytes", "Space of the pool that a tenant takes"))
    """Space of its blocks and of its unfinished writes."""
    pinned_bytes: int = attrs.field(
        metadata=gauge("tenant_pinned_bytes", "What of that is read, held or being written")
    )
    """It cannot be evicted."""
    reserved_bytes: int = attrs.field(
        metadata=gauge("tenant_reserved_bytes", "Space of the pool that is reserved for a tenant")
    )
    max_bytes: int | None = attrs.field(metadata=merge(_if_all_tell(sum)))
    """The most that its limits allow."""
    hits: int = attrs.field(metadata=counter("tenant_key_hits", "Keys that gets of a tenant found"))
    misses: int = attrs.field(metadata=counter("tenant_key_misses", "Keys that gets of a tenant did not find"))
    evicted: int = attrs.field(metadata=counter("tenant_evicted_blocks", "Blocks of a tenant that were evicted"))
    refused: int = attrs.field(
        metadata=counter("tenant_refused", "Connections and requests of a tenant that were refused")
    )
    pauses: int = attrs.field(
        metadata=counter("tenant_pauses", "How often a connection of a tenant had to wait because of its rates")
    )


@attrs.frozen(kw_only=True)
class DiskStatistics:
    """One disk. Counts are since the start, sizes in bytes."""

    path: str
    """Its folder."""
    state: str = attrs.field(
        metadata=gauge(
            "disk_state",
            "1; the state is recovering, healthy, read-only or off",
            label="state",
            value=lambda state: {state: 1},
        )
    )
    """"recovering" until its index is there, then one of the others."""
    alarm: str
    """Why it is read-only or off, or has less room than it was given, and what to do;
    else empty."""
    direct: bool
    """Whether it is read and written past the page cache (O_DIRECT)."""
    capacity_bytes: int = attrs.field(metadata=gauge("disk_capacity_bytes", "How much of the disk the store may take"))
    """It shrinks when the file system is full."""
    used_bytes: int = attrs.field(metadata=gauge("disk_used_bytes", "How much of it holds blocks"))
    """Those included that were replaced since."""
    keys: int = attrs.field(metadata=gauge("disk_keys", "Keys on the disk"))
    index_bytes: int
    """The memory that its index takes."""
    read_blocks: int = attrs.field(metadata=counter("disk_read_blocks", "Blocks read into the pool"))
    """And verified."""
    read_bytes: int = attrs.field(metadata=counter("disk_read_bytes", "Bytes of these blocks"))
    written_blocks: int = attrs.field(metadata=counter("disk_written_blocks", "Blocks made durable"))
    written_bytes: int = attrs.field(metadata=counter("disk_written_bytes", "Bytes of these blocks"))
    stored_bytes: int = attrs.field(
        metadata=counter("disk_stored_bytes", "What these blocks take on the disk, compressed and with padding")
    )
    device_written_bytes: int = attrs.field(
        metadata=counter(
            "disk_device_written_bytes", "All bytes written, with padding, tables and snapshots: what wears the disk"
        )
    )
    queued_reads: int
    """Reads that have not begun, in pieces of a few MiB."""
    queued_writes: int
    hung_jobs: int = attrs.field(metadata=gauge("disk_hung_jobs", "Reads and writes that are late"))
    damaged_blocks: int
    """Blocks that did not have their checksum."""
    read_errors: int
    write_errors: int


@attrs.frozen(kw_only=True)
class DiskTierStatistics:
    """The disks of a store. Counts are since the start, sizes in bytes."""

    disks: list[DiskStatistics] = attrs.field(metadata=merge(_chained))
    queued_bytes: int = attrs.field(metadata=gauge("disk_queued_bytes", "What waits to be written to a disk"))
    ageing_bytes: int
    """Blocks that are too young to be written."""
    pinned_bytes: int
    """Blocks that are pinned in the pool while they are written."""
    skipped_blocks: int = attrs.field(
        metadata=counter("disk_skipped_blocks", "Blocks not written because too much waited")
    )
    evicted_blocks: int
    """Blocks that were evicted or replaced before they were written."""
    failed_blocks: int
    """Blocks that no disk took."""
    promoted_blocks: int
    """Blocks read into the pool."""
    promoted_bytes: int
    late_blocks: int = attrs.field(
        metadata=counter("disk_late_blocks", "Blocks not read because nobody waited any more")
    )
    no_room_blocks: int = attrs.field(
        metadata=counter("disk_no_room_blocks", "Blocks not read because the pool had no room")
    )
    prefetch_bytes: int
    """Blocks still to be read ahead."""
    prefetch_skipped_blocks: int
    """Blocks not read ahead because that would have taken too much of the pool."""
    reinserted_blocks: int
    """Blocks written again because their segment was overwritten."""
    held_bytes: int
    """Blocks that holds keep on disk."""
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

    state: str = attrs.field(
        metadata=gauge(
            "cluster_draining",
            "1 while this server drains on request, or has done so",
            value=lambda state: int(state != "none"),
        )
    )
    """ "none", "draining" or "drained"."""
    groups: int
    """How many are to be moved."""
    moved_groups: int
    skipped_groups: int
    """Those that were with their new owners already."""
    failed_groups: int
    """Those that could not be moved as a whole."""
    moved_groups_total: int = attrs.field(
        metadata=counter("cluster_moved_groups", "Groups of keys that it has passed on while it drained")
    )
    """This and the next one are since the server started."""
    moved_bytes_total: int = attrs.field(
        metadata=counter("cluster_moved_bytes", "Bytes of blocks that it has passed on while it drained")
    )
    size_bytes: int = 0
    """The size of all blocks to be moved."""
    done_bytes: int = 0
    """The part that was moved, was there already, is gone, or could not be moved."""
    elapsed_s: int = 0
    left_s: float | None = None
    """About how long the rest takes; None if that cannot be said."""


@attrs.frozen
class MembershipStatistics:
    """A server's view of its cluster, and its own registration there."""

    cluster: str
    """The URL, without options."""
    node: str
    """The id of the server itself."""
    registration: str = attrs.field(
        metadata=gauge(
            "cluster_registered",
            "1 while this server is registered in its cluster, or listed in its file",
            value=lambda registration: int(registration in ("registered", "listed")),
        )
    )
    """ "registering", "registered", "lost", "drained" or "left"; where servers do not
    register, "listed", or "not listed" if the file of the cluster lacks this one.
    """
    registrations: int = attrs.field(metadata=counter("cluster_registrations", "How often it has registered"))
    problem: str
    """Why it is not registered or listed; empty without a problem."""
    view_age_s: float = attrs.field(
        metadata=gauge(
            "cluster_view_age_seconds", "For how long nothing has confirmed its view of the cluster; -1 without a view"
        )
    )
    epoch: int
    """Which view it is; -1 if it has none."""
    copies: int
    purged_revision: int
    nodes: list[ListedNode] = attrs.field(
        metadata=gauge("cluster_nodes", "Nodes of the cluster, as this server sees it", value=len)
    )
    drains: list[str]
    """The ids of nodes that were asked to drain, also of those that have left."""
    drain: DrainStatistics
    """Its own."""


@attrs.frozen
class Stats:
    """Transport and reason, the store, and the server if there is one."""

    transport: str = attrs.field(metadata=merge(words))
    transport_reason: str = attrs.field(metadata=merge(lambda reasons: words(reasons, "; ")))
    store: StoreStatistics
    server: ServerStatistics | None = attrs.field(default=None, metadata=merge(_if_all_tell(merged)))
    details: ServerDetails | None = attrs.field(default=None, metadata=merge(_if_all_tell(merged)))
    """Only on request, and only from a server."""
    disk: DiskTierStatistics | None = attrs.field(default=None, metadata=merge(_if_any_tells(merged)))
    """None if the store has no disks."""
    cluster: "ClusterStatistics | None" = attrs.field(default=None, metadata=merge(_untold))
    """Only from a cluster, whose nodes' statistics the other records add up."""
    drain: DrainStatistics | None = attrs.field(default=None, metadata=merge(_untold))
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
