"""What Prometheus scrapes: the statistics that everybody else reads, under names with units.

`METRICS` is the one place where a metric is named, explained and read. The documentation's table, the dashboard and the
alerts are held to it by tests. Nothing is counted here, and nothing is global: each scrape reads one snapshot.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeAlias

import attrs
import trio
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from infinistore.core.statistics import StoreStatistics
from infinistore.statistics import LATENCY_BOUNDS_S, OperationStatistics, ServerStatistics

__all__ = ["METRICS", "METRICS_MEDIA_TYPE", "Described", "Snapshot", "StatisticsCollector", "markdown_table", "render"]

METRICS_MEDIA_TYPE = CONTENT_TYPE_LATEST
_SLICE_SERIES = 8


class Snapshot(NamedTuple):
    """What one scrape reads. `state` is that of `infinistore.statistics.ServerDetails`."""

    server: ServerStatistics
    store: StoreStatistics
    operations: list[OperationStatistics]
    state: str


_Samples: TypeAlias = Iterable[tuple[tuple[str, ...], Any]]
"""The values of the labels, in order, and the value: a number, or an `OperationStatistics` of a histogram."""


@attrs.frozen
class Described:
    """One metric. The name of a counter ends in `_total`, as it is scraped."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...]
    read: Callable[[Snapshot], _Samples]

    def family(self, samples: _Samples) -> Metric:
        """Return the metric with these samples, as prometheus_client has it."""
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
    """Gives a registry of prometheus_client what one snapshot has."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """Yield every metric with its samples."""
        for metric in METRICS:
            yield metric.family(metric.read(self._snapshot))


async def render(
    server: ServerStatistics, store: StoreStatistics, operations: list[OperationStatistics], state: str
) -> bytes:
    """Return a scrape in Prometheus's text format: what `generate_latest` makes of a `StatisticsCollector`.

    It takes 10 us for each line, and there can be a thousand, so that others have their turn after every few series.
    """
    snapshot = Snapshot(server, store, operations, state)
    parts: list[bytes] = []
    for metric in METRICS:
        samples = list(metric.read(snapshot))
        for first in range(0, len(samples), _SLICE_SERIES):
            text = generate_latest(_One(metric.family(samples[first : first + _SLICE_SERIES])))
            parts.append(text if not first else text.split(b"\n", 2)[2])  # HELP and TYPE stand there once
            await trio.lowlevel.checkpoint()
    return b"".join(parts)


class _One(CollectorRegistry):
    """A registry of one metric, for as long as it takes to write it."""

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
    """Outcomes together: failures are counted elsewhere, and each series of a histogram is twenty lines of a scrape."""
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
        "1; the labels say what runs",
        ("version", "instance", "allocator"),
        lambda snapshot: [
            ((snapshot.server.version, snapshot.server.instance, snapshot.store.allocator.name), 1),
        ],
    ),
    _gauge("serving", "1 while clients are served, 0 while draining", _one(lambda s: int(s.state == "serving"))),
    _gauge("uptime_seconds", "How long the server has been up", _of_server("uptime_s")),
    _counter(
        "operations", "Requests, by what they asked for and how they ended", _by_operation("count"),
        "kind", "transport", "outcome",
    ),
    _counter(
        "operation_payload_bytes", "Payload of those requests, whichever way it went", _by_operation("payload_bytes"),
        "kind", "transport", "outcome",
    ),
    Described(
        "infinistore_operation_duration_seconds",
        "histogram",
        "From the arrival of a request's head until its reply had left",
        ("kind", "transport"),
        _latencies,
    ),
    _counter("errors", "Requests refused, and connections ended by an error", _of_server("errors")),
    _counter("received_bytes", "Payload that came from clients", _of_server("received_bytes")),
    _counter("sent_bytes", "Payload that went to clients", _of_server("sent_bytes")),
    _gauge("connections_open", "Connections that are open", _connections),
    _counter("connections", "Connections that came, refused ones too", _of_server("connections_total")),
    _counter("connections_refused", "Connections refused by --max-connections", _of_server("connections_refused")),
    _counter("key_hits", "Keys of gets that were there", _of_store("hits")),
    _counter("key_misses", "Keys of gets that were not there", _of_store("misses")),
    _counter("hit_bytes", "The lengths of the blocks that gets found", _of_store("hit_bytes")),
    _counter("put_blocks", "Blocks stored", _of_store("puts")),
    _counter("put_bytes", "Their lengths", _of_store("put_bytes")),
    _counter("deleted_keys", "Keys deleted or purged", _of_store("deleted")),
    _counter("evicted_blocks", "Blocks evicted, by cause", _evicted, "cause"),
    _counter(
        "checksum_dropped_blocks", "Blocks dropped because they no longer matched their checksum",
        _of_store("checksum_drops"),
    ),
    _gauge("keys", "Keys in the store", _of_store("keys")),
    _gauge("pool_capacity_bytes", "Size of the pool", _of_store("capacity_bytes")),
    _gauge("pool_growable_bytes", "How much larger the pool may still become", _of_store("growable_bytes")),
    _gauge("pool_used_bytes", "Part of the pool that is taken", _of_store("used_bytes")),
    _gauge("pool_reserved_bytes", "Part of the pool that unfinished puts have taken", _of_store("reserved_bytes")),
    _gauge("pool_pinned_bytes", "Part of the pool that gets and holds keep from eviction", _of_store("pinned_bytes")),
    _gauge("pool_held_bytes", "Part of the pool that holds alone keep from eviction", _of_store("held_bytes")),
    _gauge(
        "pool_condemned_bytes", "Part of the pool that is free as soon as its last reader is done",
        _of_store("condemned_bytes"),
    ),
    _gauge(
        "pool_quarantined_bytes", "Part of the pool that lost clients may write to", _of_store("quarantined_bytes")
    ),
    _gauge("pool_arenas", "Arenas of the pool", _of_store("arenas")),
    _gauge("pool_extents", "Extents that are allocated", _one(lambda s: s.store.allocator.extents)),
    _gauge(
        "pool_largest_free_extent_bytes", "The largest block that could be placed without evicting",
        _one(lambda s: s.store.allocator.largest_free_extent_bytes),
    ),
    _gauge(
        "pool_fragmentation_ratio", "Part of the free room that is outside the largest free extent",
        _one(_fragmentation),
    ),
    _gauge("reservations_open", "Puts that are not finished, or whose room was taken ahead", _of_store("reservations")),
    _gauge("leases_open", "Gets that are not finished, and leases in place", _of_store("leases")),
    _gauge("holds_open", "Prefixes that are held", _of_store("holds")),
    _gauge("quarantined_clients", "Clients that are lost and may still write", _of_store("quarantined_clients")),
    _counter("spins", "How often the server waited awake for a quick client", _one(lambda s: s.server.spin.spins)),
    _counter("spin_hits", "How often that paid", _one(lambda s: s.server.spin.hits)),
    _counter("spin_seconds", "How long it waited awake in all", _one(lambda s: s.server.spin.burned_s)),
)  # fmt: skip
