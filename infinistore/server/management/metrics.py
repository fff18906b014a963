"""The metrics for Prometheus: the statistics under names with units.

The metadata of a field of the statistics names and explains its metric. Here are those
that no single field gives, and `METRICS`, the list of all. Tests hold the table in the
documentation, the dashboard and the alerts to it. This module counts nothing and has no
global state: each scrape reads one snapshot.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeAlias

import attrs
import trio
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from infinistore.statistics import (
    LATENCY_BOUNDS_S,
    DiskStatistics,
    DiskTierStatistics,
    MembershipStatistics,
    OperationStatistics,
    ServerStatistics,
    StoreStatistics,
    TenantStatistics,
    merged_by,
    metric_of,
)

METRICS_MEDIA_TYPE = CONTENT_TYPE_LATEST
_SLICE_SERIES = 8
MOST_TENANTS = 256
"""How many tenants have metrics of their own: the first of the tenants file."""


class Snapshot(NamedTuple):
    """The values for one scrape; `state` is that of `ServerDetails`."""

    server: ServerStatistics
    store: StoreStatistics
    operations: list[OperationStatistics]
    state: str
    disk: DiskTierStatistics | None = None
    cluster: MembershipStatistics | None = None
    tenants: Sequence[TenantStatistics] | None = None


_Samples: TypeAlias = Iterable[tuple[tuple[str, ...], Any]]
"""The values of the labels, and a number, or `OperationStatistics` for a histogram."""


@attrs.frozen
class Described:
    """One metric. The name of a counter ends in `_total`, as in a scrape."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...]
    read: Callable[[Any], _Samples]
    """Reads the samples: of a `Snapshot`, if it is one of `METRICS`."""

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


async def render(snapshot: Snapshot) -> bytes:
    """Return a scrape in Prometheus's text format: what `generate_latest` makes of all
    metrics that have samples.

    A line takes 10 us, and there can be a thousand lines, so other tasks run after
    every few series.
    """
    parts: list[bytes] = []
    for metric in METRICS:
        samples = list(metric.read(snapshot))
        for first in range(0, len(samples), _SLICE_SERIES):
            text = text_of([metric.family(samples[first : first + _SLICE_SERIES])])
            parts.append(text if not first else text.split(b"\n", 2)[2])  # HELP and TYPE stand there once
            await trio.lowlevel.checkpoint()
    return b"".join(parts)


def text_of(families: Sequence[Metric]) -> bytes:
    """Return these families of prometheus_client in its text format."""
    return generate_latest(_Families(families))


class _Families(CollectorRegistry):
    """A registry that is only read."""

    def __init__(self, families: Sequence[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


def markdown_table() -> str:
    """Return the metrics as a table in Markdown. `docs/reference/metrics.md` holds it.

    It leaves out the kind, which the name tells: a counter ends in `_total`.
    """
    lines = ["| Metric | What it is |", "|---|---|"]
    for metric in METRICS:
        labels = f"{{{', '.join(metric.labels)}}}" if metric.labels else ""
        lines.append(f"| `{metric.name}{labels}` | {metric.help} |")
    return "\n".join(lines)


_Records: TypeAlias = Callable[[Snapshot], Iterable[tuple[tuple[str, ...], Any]]]
"""Returns records, each with the values of its labels."""


def _declared(cls: type[attrs.AttrsInstance], labels: tuple[str, ...], records: _Records) -> Iterator[Described]:
    """Yield the metrics of the fields of a record, and of the records in it."""
    for field in attrs.fields(cls):
        metric = metric_of(field)
        values = _values(records, field.name)
        if metric is None or not metric.name:
            if field.type is not None and attrs.has(field.type):
                yield from _declared(field.type, labels, values)
            continue

        def read(snapshot: Snapshot, values: _Records = values, metric: Any = metric) -> _Samples:
            for given, value in values(snapshot):
                for label, number in metric.numbers(value).items():
                    yield (*given, label) if metric.label else given, number

        suffix = "_total" if metric.kind == "counter" else ""
        own = (*labels, metric.label) if metric.label else labels
        yield Described(f"infinistore_{metric.name}{suffix}", metric.kind, metric.help, own, read)


def _values(records: _Records, name: str) -> _Records:
    return lambda snapshot: [(given, getattr(record, name)) for given, record in records(snapshot)]


def _latencies(snapshot: Snapshot) -> _Samples:
    """Return the latencies, with all outcomes merged: each series is twenty lines."""
    return [((one.kind, one.transport), one) for one in merged_by("kind", "transport")([snapshot.operations])]


def _disks(snapshot: Snapshot) -> list[DiskStatistics]:
    return snapshot.disk.disks if snapshot.disk else []


def _disk_errors(snapshot: Snapshot) -> _Samples:
    kinds = ("read_errors", "write_errors", "damaged_blocks")
    return [((one.path, kind.partition("_")[0]), getattr(one, kind)) for one in _disks(snapshot) for kind in kinds]


def _share(cluster: MembershipStatistics) -> float:
    weights = {node.id: 0 if node.state == "draining" else node.weight for node in cluster.nodes}
    return weights.get(cluster.node, 0) / max(1, sum(weights.values()))


def _fragmentation(snapshot: Snapshot) -> float:
    allocator = snapshot.store.allocator
    return 1 - allocator.largest_free_extent_bytes / allocator.free_bytes if allocator.free_bytes else 0.0


METRICS: tuple[Described, ...] = (
    Described(
        "infinistore_server_info", "gauge", "1; the labels identify the server", ("version", "instance", "allocator"),
        lambda s: [((s.server.version, s.server.instance, s.store.allocator.name), 1)],
    ),
    Described(
        "infinistore_serving", "gauge", "1 while the server accepts clients, 0 while it drains", (),
        lambda s: [((), int(s.state == "serving"))],
    ),
    *_declared(ServerStatistics, (), lambda s: [((), s.server)]),
    *_declared(
        OperationStatistics, ("kind", "transport", "outcome"),
        lambda s: [((one.kind, one.transport, one.outcome), one) for one in s.operations],
    ),
    Described(
        "infinistore_operation_duration_seconds", "histogram",
        "From the arrival of a request's head until its reply was sent", ("kind", "transport"), _latencies,
    ),
    *_declared(StoreStatistics, (), lambda s: [((), s.store)]),
    Described(
        "infinistore_pool_fragmentation_ratio", "gauge",
        "Fraction of the free space that is outside the largest free extent", (), lambda s: [((), _fragmentation(s))],
    ),
    *_declared(DiskStatistics, ("path",), lambda s: [((one.path,), one) for one in _disks(s)]),
    Described(
        "infinistore_disk_errors_total", "counter", "Failed reads and writes, and damaged blocks", ("path", "kind"),
        _disk_errors,
    ),
    *_declared(DiskTierStatistics, (), lambda s: [((), s.disk)] if s.disk else []),
    *_declared(MembershipStatistics, (), lambda s: [((), s.cluster)] if s.cluster else []),
    Described(
        "infinistore_cluster_share_ratio", "gauge",
        "Part of the keys that this server owns, by the weights in its view", (),
        lambda s: [((), _share(s.cluster))] if s.cluster else [],
    ),
    Described(
        "infinistore_tenants", "gauge", "Tenants of the server", (),
        lambda s: [] if s.tenants is None else [((), len(s.tenants))],
    ),
    *_declared(
        TenantStatistics, ("tenant",), lambda s: [((one.tenant,), one) for one in (s.tenants or ())[:MOST_TENANTS]]
    ),
)  # fmt: skip
