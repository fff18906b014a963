"""The metrics for Prometheus: the statistics under names with units.

`METRICS` is the one place that names, explains and reads a metric. Tests hold the table
in the documentation, the dashboard and the alerts to it. This module counts nothing and
has no global state: each scrape reads one snapshot.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeAlias

import attrs
import trio
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from infinistore.statistics import (
    LATENCY_BOUNDS_S,
    DiskTierStatistics,
    MembershipStatistics,
    OperationStatistics,
    ServerStatistics,
    StoreStatistics,
    TenantStatistics,
)

METRICS_MEDIA_TYPE = CONTENT_TYPE_LATEST
_SLICE_SERIES = 8
MOST_TENANTS = 256
"""How many tenants have metrics of their own: the first of the tenants file."""


class Snapshot(NamedTuple):
    """The values for one scrape. `state` is that of
    `infinistore.statistics.ServerDetails`.
    """

    server: ServerStatistics
    store: StoreStatistics
    operations: list[OperationStatistics]
    state: str
    disk: DiskTierStatistics | None = None
    cluster: MembershipStatistics | None = None
    tenants: Sequence[TenantStatistics] | None = None


_Samples: TypeAlias = Iterable[tuple[tuple[str, ...], Any]]
"""The values of the labels, in order, and the value: a number, or an
`OperationStatistics` for a histogram.
"""


@attrs.frozen
class Described:
    """One metric. The name of a counter ends in `_total`, as in a scrape."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...]
    read: Callable[[Snapshot], _Samples]

    def family(self, samples: _Samples) -> Metric:
        """Return the metric with these samples, as a family of prometheus_client."""
        if self.kind == "histogram":
            histogram = HistogramMetricFamily(self.name, self.help, labels=self.labels)
            for labels, operation in samples:
                bounds = [*map(repr, LATENCY_BOUNDS_S), "+Inf"]
                buckets = list(zip(bounds, accumulate(operation.latency_counts), strict=True))
                histogram.add_metric(labels, buckets, operation.latency_sum_s)
            return histogram
        kind = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family = kind(self.name, self.help, labels=self.labels)
        for labels, value in samples:
            family.add_metric(labels, value)
        return family


class StatisticsCollector(Collector):
    """Passes one snapshot to a registry of prometheus_client."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """Yield every metric that has samples."""
        for metric in METRICS:
            samples = list(metric.read(self._snapshot))
            if samples:
                yield metric.family(samples)


async def render(
    server: ServerStatistics,
    store: StoreStatistics,
    operations: list[OperationStatistics],
    state: str,
    disk: DiskTierStatistics | None = None,
    *,
    cluster: MembershipStatistics | None = None,
    tenants: Sequence[TenantStatistics] | None = None,
) -> bytes:
    """Return a scrape in Prometheus's text format: what `generate_latest` makes of a
    `StatisticsCollector`.

    A line takes 10 us, and there can be a thousand lines, so other tasks run after
    every few series.
    """
    snapshot = Snapshot(server, store, operations, state, disk, cluster, tenants)
    parts: list[bytes] = []
    for metric in METRICS:
        samples = list(metric.read(snapshot))
        for first in range(0, len(samples), _SLICE_SERIES):
            text = generate_latest(_One(metric.family(samples[first : first + _SLICE_SERIES])))
            parts.append(text if not first else text.split(b"\n", 2)[2])  # HELP and TYPE stand there once
            await trio.lowlevel.checkpoint()
    return b"".join(parts)


class _One(CollectorRegistry):
    """A registry of one metric, while it is being formatted."""

    def __init__(self, metric: Metric) -> None:
        super().__init__()
        self._metric = metric

    def collect(self) -> Iterator[Metric]:
        yield self._metric


def markdown_table() -> str:
    """Return the metrics as a table in Markdown. `docs/operations.md` holds it."""
    lines = ["| Metric | Kind | Labels | What it is |", "|---|---|---|---|"]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels) or "-"
        lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(lines)


def _one(read: Callable[[Snapshot], Any]) -> Callable[[Snapshot], _Samples]:
    return lambda snapshot: [((), read(snapshot))]


def _of_server(attribute: str) -> Callable[[Snapshot], _Samples]:
    return _one(lambda snapshot: getattr(snapshot.server, attribute))


def _of_store(attribute: str) -> Callable[[Snapshot], _Samples]:
    return _one(lambda snapshot: getattr(snapshot.store, attribute))


def _by_operation(attribute: str) -> Callable[[Snapshot], _Samples]:
    return lambda snapshot: [
        ((one.kind, one.transport, one.outcome), getattr(one, attribute)) for one in snapshot.operations
    ]


def _latencies(snapshot: Snapshot) -> _Samples:
    """Return the latencies with all outcomes merged. Failures are counted elsewhere,
    and each series of a histogram is twenty lines of a scrape.
    """
    merged: dict[tuple[str, str], OperationStatistics] = {}
    for one in snapshot.operations:
        other = merged.get((one.kind, one.transport))
        if other is not None:
            counts = map(sum, zip(one.latency_counts, other.latency_counts, strict=True))
            one = attrs.evolve(  # noqa: PLW2901
                one, latency_counts=list(counts), latency_sum_s=one.latency_sum_s + other.latency_sum_s
            )
        merged[one.kind, one.transport] = one
    return merged.items()


def _evicted(snapshot: Snapshot) -> _Samples:
    return [((cause,), count) for cause, count in attrs.asdict(snapshot.store.evicted).items()]


def _by_disk(attribute: str) -> Callable[[Snapshot], _Samples]:
    return lambda snapshot: [
        ((one.path,), getattr(one, attribute)) for one in (snapshot.disk.disks if snapshot.disk else ())
    ]


def _disk_states(snapshot: Snapshot) -> _Samples:
    return [((one.path, one.state), 1) for one in (snapshot.disk.disks if snapshot.disk else ())]


def _disk_errors(snapshot: Snapshot) -> _Samples:
    kinds = ("read_errors", "write_errors", "damaged_blocks")
    disks = snapshot.disk.disks if snapshot.disk else ()
    return [((one.path, kind.partition("_")[0]), getattr(one, kind)) for one in disks for kind in kinds]


def _of_disks(attribute: str) -> Callable[[Snapshot], _Samples]:
    return lambda snapshot: [((), getattr(snapshot.disk, attribute))] if snapshot.disk else []


def _share(cluster: MembershipStatistics) -> float:
    weights = {node.id: 0 if node.state == "draining" else node.weight for node in cluster.nodes}
    return weights.get(cluster.node, 0) / max(1, sum(weights.values()))


def _of_cluster(read: Callable[[MembershipStatistics], Any]) -> Callable[[Snapshot], _Samples]:
    return lambda snapshot: [((), read(snapshot.cluster))] if snapshot.cluster else []


def _of_tenants(attribute: str) -> Callable[[Snapshot], _Samples]:
    return lambda snapshot: [
        ((one.tenant,), getattr(one, attribute)) for one in (snapshot.tenants or ())[:MOST_TENANTS]
    ]


def _connections(snapshot: Snapshot) -> _Samples:
    return [((), snapshot.server.connections_open)]


def _fragmentation(snapshot: Snapshot) -> float:
    allocator = snapshot.store.allocator
    return 1 - allocator.largest_free_extent_bytes / allocator.free_bytes if allocator.free_bytes else 0.0


def _gauge(name: str, help_text: str, read: Callable[[Snapshot], _Samples]) -> Described:
    return Described(f"infinistore_{name}", "gauge", help_text, (), read)


def _counter(name: str, help_text: str, read: Callable[[Snapshot], _Samples], *labels: str) -> Described:
    return Described(f"infinistore_{name}_total", "counter", help_text, labels, read)


METRICS: tuple[Described, ...] = (
    Described(
        "infinistore_server_info",
        "gauge",
        "1; the labels identify the server",
        ("version", "instance", "allocator"),
        lambda snapshot: [
            ((snapshot.server.version, snapshot.server.instance, snapshot.store.allocator.name), 1),
        ],
    ),
    _gauge(
        "serving", "1 while the server accepts clients, 0 while it drains",
        _one(lambda s: int(s.state == "serving")),
    ),
    _gauge("uptime_seconds", "Time since the server started", _of_server("uptime_s")),
    _counter(
        "operations", "Requests, by kind, transport and outcome", _by_operation("count"),
        "kind", "transport", "outcome",
    ),
    _counter(
        "operation_payload_bytes", "Payload of these requests, in either direction", _by_operation("payload_bytes"),
        "kind", "transport", "outcome",
    ),
    Described(
        "infinistore_operation_duration_seconds",
        "histogram",
        "From the arrival of a request's head until its reply was sent",
        ("kind", "transport"),
        _latencies,
    ),
    _counter("errors", "Requests that were refused, and connections that an error ended", _of_server("errors")),
    _counter("received_bytes", "Payload received from clients", _of_server("received_bytes")),
    _counter("sent_bytes", "Payload sent to clients", _of_server("sent_bytes")),
    _gauge("connections_open", "Open connections of clients", _connections),
    _counter("connections", "Connections so far, including refused ones", _of_server("connections_total")),
    _counter("connections_refused", "Connections refused by --max-connections", _of_server("connections_refused")),
    _gauge("strangers_open", "Connections that have not completed their hello", _of_server("strangers_open")),
    _counter(
        "strangers_dropped", "Connections closed before their hello to make room for others",
        _of_server("strangers_dropped"),
    ),
    _counter("key_hits", "Keys that gets found", _of_store("hits")),
    _counter("key_misses", "Keys that gets did not find", _of_store("misses")),
    _counter("hit_bytes", "Bytes of the blocks that gets found", _of_store("hit_bytes")),
    _counter("put_blocks", "Blocks stored", _of_store("puts")),
    _counter("put_bytes", "Bytes of these blocks", _of_store("put_bytes")),
    _counter("deleted_keys", "Keys deleted or purged", _of_store("deleted")),
    _counter("expired_keys", "Keys whose time to live was over", _of_store("expired")),
    _counter("evicted_blocks", "Blocks evicted, by cause", _evicted, "cause"),
    _counter(
        "checksum_dropped_blocks", "Blocks dropped because they did not match their checksum",
        _of_store("checksum_drops"),
    ),
    _gauge("keys", "Keys in the store", _of_store("keys")),
    _gauge("pool_capacity_bytes", "Size of the pool", _of_store("capacity_bytes")),
    _gauge("pool_growable_bytes", "How much the pool can still grow", _of_store("growable_bytes")),
    _gauge("pool_used_bytes", "Space of the pool that is in use", _of_store("used_bytes")),
    _gauge("pool_reserved_bytes", "Space of the pool that is reserved by unfinished puts", _of_store("reserved_bytes")),
    _gauge("pool_pinned_bytes", "Space of the pool that gets and holds pin", _of_store("pinned_bytes")),
    _gauge("pool_held_bytes", "Space of the pool that only holds pin", _of_store("held_bytes")),
    _gauge("protected_keys", "Keys that pin keeps from eviction", _of_store("protected_keys")),
    _gauge("pool_protected_bytes", "Space of the pool that these take", _of_store("protected_bytes")),
    _gauge(
        "pool_condemned_bytes", "Space of the pool that is freed when its last reader has finished",
        _of_store("condemned_bytes"),
    ),
    _gauge(
        "pool_quarantined_bytes", "Space of the pool that lost clients can still write to",
        _of_store("quarantined_bytes"),
    ),
    _gauge("pool_arenas", "Number of arenas of the pool", _of_store("arenas")),
    _gauge("pool_extents", "Number of allocated extents", _one(lambda s: s.store.allocator.extents)),
    _gauge(
        "pool_largest_free_extent_bytes", "Largest block that can be placed without eviction",
        _one(lambda s: s.store.allocator.largest_free_extent_bytes),
    ),
    _gauge(
        "pool_fragmentation_ratio", "Fraction of the free space that is outside the largest free extent",
        _one(_fragmentation),
    ),
    _gauge(
        "reservations_open", "Unfinished puts, and space reserved ahead for the next put",
        _of_store("reservations"),
    ),
    _gauge("leases_open", "Unfinished gets, and leases in place", _of_store("leases")),
    _gauge("holds_open", "Holds on prefixes", _of_store("holds")),
    _gauge("quarantined_clients", "Lost clients that can still write", _of_store("quarantined_clients")),
    _counter(
        "spins", "How often the server spun for the next request of a fast client",
        _one(lambda s: s.server.spin.spins),
    ),
    _counter("spin_hits", "How often a request arrived while it spun", _one(lambda s: s.server.spin.hits)),
    _counter("spin_seconds", "Total time spent spinning", _one(lambda s: s.server.spin.burned_s)),
    Described(
        "infinistore_disk_state", "gauge", "1; the state is recovering, healthy, read-only or off",
        ("path", "state"), _disk_states,
    ),
    Described(
        "infinistore_disk_capacity_bytes", "gauge", "How much of the disk the store may take",
        ("path",), _by_disk("capacity_bytes"),
    ),
    Described(
        "infinistore_disk_used_bytes", "gauge", "How much of it holds blocks", ("path",), _by_disk("used_bytes"),
    ),
    Described("infinistore_disk_keys", "gauge", "Keys on the disk", ("path",), _by_disk("keys")),
    Described(
        "infinistore_disk_hung_jobs", "gauge", "Reads and writes that are late", ("path",), _by_disk("hung_jobs"),
    ),
    _counter("disk_read_blocks", "Blocks read into the pool", _by_disk("read_blocks"), "path"),
    _counter("disk_read_bytes", "Bytes of these blocks", _by_disk("read_bytes"), "path"),
    _counter("disk_written_blocks", "Blocks made durable", _by_disk("written_blocks"), "path"),
    _counter("disk_written_bytes", "Bytes of these blocks", _by_disk("written_bytes"), "path"),
    _counter(
        "disk_device_written_bytes", "All bytes written, with padding, tables and snapshots: what wears the disk",
        _by_disk("device_written_bytes"), "path",
    ),
    _counter("disk_errors", "Failed reads and writes, and damaged blocks", _disk_errors, "path", "kind"),
    _gauge("disk_queued_bytes", "What waits to be written to a disk", _of_disks("queued_bytes")),
    _counter(
        "disk_skipped_blocks", "Blocks not written because too much waited", _of_disks("skipped_blocks"),
    ),
    _counter("disk_late_blocks", "Blocks not read because nobody waited any more", _of_disks("late_blocks")),
    _counter("disk_no_room_blocks", "Blocks not read because the pool had no room", _of_disks("no_room_blocks")),
    _gauge("cluster_nodes", "Nodes of the cluster, as this server sees it", _of_cluster(lambda c: len(c.nodes))),
    _gauge(
        "cluster_share_ratio", "Part of the keys that this server owns, by the weights in its view",
        _of_cluster(_share),
    ),
    _gauge(
        "cluster_registered", "1 while this server is registered in its cluster, or listed in its file",
        _of_cluster(lambda c: int(c.registration in ("registered", "listed"))),
    ),
    _counter(
        "cluster_registrations", "How often it has registered", _of_cluster(lambda c: c.registrations),
    ),
    _gauge(
        "cluster_draining", "1 while this server drains on request, or has done so",
        _of_cluster(lambda c: int(c.drain.state != "none")),
    ),
    _counter(
        "cluster_moved_groups", "Groups of keys that it has passed on while it drained",
        _of_cluster(lambda c: c.drain.moved_groups_total),
    ),
    _counter(
        "cluster_moved_bytes", "Bytes of blocks that it has passed on while it drained",
        _of_cluster(lambda c: c.drain.moved_bytes_total),
    ),
    _gauge(
        "cluster_view_age_seconds", "For how long nothing has confirmed its view of the cluster; -1 without a view",
        _of_cluster(lambda c: c.view_age_s),
    ),
    _gauge("tenants", "Tenants of the server", lambda s: [] if s.tenants is None else [((), len(s.tenants))]),
    Described(
        "infinistore_tenant_connections_open", "gauge", "Open connections of a tenant, of at most 256 tenants",
        ("tenant",), _of_tenants("connections"),
    ),
    Described("infinistore_tenant_keys", "gauge", "Keys of a tenant", ("tenant",), _of_tenants("keys")),
    Described(
        "infinistore_tenant_used_bytes", "gauge", "Space of the pool that a tenant takes",
        ("tenant",), _of_tenants("used_bytes"),
    ),
    Described(
        "infinistore_tenant_pinned_bytes", "gauge", "What of that is read, held or being written",
        ("tenant",), _of_tenants("pinned_bytes"),
    ),
    Described(
        "infinistore_tenant_reserved_bytes", "gauge", "Space of the pool that is reserved for a tenant",
        ("tenant",), _of_tenants("reserved_bytes"),
    ),
    _counter("tenant_key_hits", "Keys that gets of a tenant found", _of_tenants("hits"), "tenant"),
    _counter("tenant_key_misses", "Keys that gets of a tenant did not find", _of_tenants("misses"), "tenant"),
    _counter("tenant_evicted_blocks", "Blocks of a tenant that were evicted", _of_tenants("evicted"), "tenant"),
    _counter(
        "tenant_refused", "Connections and requests of a tenant that were refused", _of_tenants("refused"), "tenant",
    ),
    _counter(
        "tenant_pauses", "How often a connection of a tenant had to wait because of its rates", _of_tenants("pauses"),
        "tenant",
    ),
)  # fmt: skip
