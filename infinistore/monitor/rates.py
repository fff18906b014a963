"""Rates between two samples of a server: differences of counters per second; and
percentiles of a histogram, interpolated; beyond the outer bounds only a bound.

Rates are never negative. `is_restart` detects samples of different runs of the server;
the other functions require samples of the same run.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import Final, Literal

import attrs

from infinistore.statistics import (
    LATENCY_BOUNDS_S,
    MAX_CLIENTS,
    ClientStatistics,
    DiskStatistics,
    OperationStatistics,
    Stats,
    counters,
)


@attrs.frozen
class Quantile:
    """A quantile of latencies.

    `bound` is "" for a value interpolated between two bounds of the histogram, "<" for
    a value in the first bucket (at most `value_s`), and ">" for a value beyond the last
    bound (more than `value_s`).
    """

    value_s: float
    bound: Literal["", "<", ">"] = ""


def quantile(counts: Sequence[int], part: float) -> Quantile | None:
    """Return the quantile `part` (0 to 1) of a histogram; None if it is empty.

    `counts` has one number per bound in `LATENCY_BOUNDS_S` and one more, as in
    `OperationStatistics.latency_counts`. Values are assumed to be evenly distributed in
    their bucket.
    """
    rank = part * sum(counts)
    below = 0
    edges = (0.0, *LATENCY_BOUNDS_S)
    for index, (low_s, high_s) in enumerate(pairwise(edges)):
        count = counts[index] if index < len(counts) else 0
        if count and below + count >= rank:
            if index == 0:
                return Quantile(high_s, "<")
            share = (rank - below) / count
            return Quantile(min(max(low_s, low_s + share * (high_s - low_s)), high_s))
        below += count
    return Quantile(edges[-1], ">") if sum(counts) > 0 else None


_OK: Final = "ok"
_SHORTEST_S: Final = 1e-6  # dividing by less may overflow a float
_OVERTAKES: Final = 2
"""How many times as many requests as those of another kind take its place."""


@attrs.frozen
class Sample:
    """Statistics and their time, in seconds on a monotonic clock."""

    at_s: float
    stats: Stats


@attrs.frozen
class Rates:
    """Rates of a store per second; `hit_rate` is None without reads."""

    elapsed_s: float
    received_bytes: float
    sent_bytes: float
    requests: float
    errors: float
    hit_rate: float | None
    reads: float
    """Keys that were read: the base of the hit rate."""
    puts: float
    deleted: float
    evicted: Mapping[str, float]
    """By cause."""


@attrs.frozen
class OperationRow:
    """A kind of request: rates since the previous sample, latencies over more time."""

    kind: str
    total: int
    per_s: float | None
    bytes_per_s: float | None
    errors_per_s: float | None
    p50: Quantile | None
    p90: Quantile | None
    p99: Quantile | None


@attrs.frozen
class ClientRow:
    """The sum of one client's open connections over one transport."""

    name: str
    transport: str
    connections: int
    requests_per_s: float | None
    received_bytes_per_s: float | None
    sent_bytes_per_s: float | None
    recent_requests_per_s: float
    recent_bytes_per_s: float
    """These two cover more time, for a stable sort order."""
    errors: int
    pinned_bytes: int


@attrs.frozen
class DiskRow:
    """One disk: its state, and rates since the previous sample."""

    path: str
    state: str
    capacity_bytes: int
    used_bytes: int
    read_bytes_per_s: float | None
    written_bytes_per_s: float | None
    """Blocks that were made durable."""
    hits_per_s: float | None
    """Blocks that were read into the pool."""
    queue: int
    """Reads and writes that have not begun, or are late."""
    errors: int
    """Since the start: reads and writes that failed, and blocks without their
    checksum."""


def is_restart(before: Stats, now: Stats) -> bool:
    """Whether the server was restarted: another instance, or a decreased counter."""
    old, new = before.server, now.server
    if old is None or new is None:
        return old is not new or _fell(before.store, now.store)
    return (
        old.instance != new.instance or old.uptime_s > new.uptime_s or _fell(before.store, now.store) or _fell(old, new)
    )


def _fell(before: attrs.AttrsInstance, now: attrs.AttrsInstance) -> bool:
    return any(new < old for old, new in zip(counters(before), counters(now), strict=True))


def elapsed_s(before: Sample, now: Sample) -> float:
    """Seconds between two samples, by the server's clock if possible; 0 if too few."""
    if before.stats.server is not None and now.stats.server is not None:
        by_server = now.stats.server.uptime_s - before.stats.server.uptime_s
        if by_server >= _SHORTEST_S:
            return by_server
    by_us = now.at_s - before.at_s
    return by_us if by_us >= _SHORTEST_S else 0.0


def rates(before: Sample, now: Sample) -> Rates | None:
    """Return the rates between two samples of one run; None if no time passed."""
    elapsed = elapsed_s(before, now)
    if elapsed <= 0:
        return None
    earlier, counted = _counted(before.stats), _counted(now.stats)
    per_s = {name: (count - earlier[name]) / elapsed for name, count in counted.items()}
    hits, reads = (counted[name] - earlier[name] for name in ("hits", "reads"))
    causes, old_causes = attrs.asdict(now.stats.store.evicted), attrs.asdict(before.stats.store.evicted)
    return Rates(
        elapsed_s=elapsed,
        hit_rate=hits / reads if reads > 0 else None,
        evicted={cause: (count - old_causes[cause]) / elapsed for cause, count in causes.items()},
        **{name: rate for name, rate in per_s.items() if name != "hits"},
    )


def _counted(stats: Stats) -> dict[str, int]:
    """The counters of which there are rates; without a server, of the store."""
    store, server = stats.store, stats.server
    return {
        "received_bytes": store.put_bytes if server is None else server.received_bytes,
        "sent_bytes": store.hit_bytes if server is None else server.sent_bytes,
        "requests": 0 if server is None else server.requests,
        "errors": 0 if server is None else server.errors,
        "hits": store.hits,
        "reads": store.hits + store.misses,
        "puts": store.puts,
        "deleted": store.deleted,
    }


@attrs.define
class _Tally:
    count: int = 0
    payload_bytes: int = 0
    errors: int = 0
    latencies: list[int] = attrs.field(factory=list)


def _by_kind(operations: Iterable[OperationStatistics]) -> dict[str, _Tally]:
    tallies: dict[str, _Tally] = defaultdict(_Tally)
    for one in operations:
        tally = tallies[one.kind]
        tally.count += one.count
        tally.payload_bytes += one.payload_bytes
        tally.errors += one.count if one.outcome != _OK else 0
        tally.latencies = [a + b for a, b in zip_longest(tally.latencies, one.latency_counts, fillvalue=0)]
    return tallies


def _operations(sample: Sample | None) -> list[OperationStatistics]:
    return sample.stats.details.operations if sample is not None and sample.stats.details is not None else []


def _per_s(counter: str, old: object, new: object, elapsed: float) -> float | None:
    """The rate of a counter; None without an earlier record, or without time."""
    if old is None or elapsed <= 0:
        return None
    difference: int = getattr(new, counter) - getattr(old, counter)
    return max(0, difference) / elapsed


def operation_rows(oldest: Sample | None, before: Sample | None, now: Sample) -> tuple[OperationRow, ...]:
    """Return a row per kind of request, over all transports and outcomes, by name.

    Rates are since the sample `before`; latencies are since `oldest`, so that rare
    kinds have some. Without these samples, rates are unknown and latencies are since
    the server's start.
    """
    newest, previous, first = (_by_kind(_operations(sample)) for sample in (now, before, oldest))
    elapsed = elapsed_s(before, now) if before is not None and before.stats.details is not None else 0.0

    def row(kind: str, tally: _Tally) -> OperationRow:
        old, start = previous.get(kind, _Tally()), first.get(kind, _Tally())
        took = [max(0, b - a) for a, b in zip_longest(start.latencies, tally.latencies, fillvalue=0)]

        return OperationRow(
            kind=kind,
            total=tally.count,
            per_s=_per_s("count", old, tally, elapsed),
            bytes_per_s=_per_s("payload_bytes", old, tally, elapsed),
            errors_per_s=_per_s("errors", old, tally, elapsed),
            p50=quantile(took, 0.5),
            p90=quantile(took, 0.9),
            p99=quantile(took, 0.99),
        )

    return tuple(row(kind, tally) for kind, tally in sorted(newest.items()))


def busiest(ranking: Sequence[str], oldest: Sample | None, now: Sample) -> list[str]:
    """Return the kinds of requests, those with the most since `oldest` first.

    A kind keeps its place in `ranking` until another one has more than twice as many,
    so that no two take turns.
    """
    counts: Counter[str] = Counter()
    for sample, sign in ((now, 1), (oldest, -1)):
        for one in _operations(sample):
            counts[one.kind] += sign * one.count
    ranked = [kind for kind in ranking if kind in counts]
    ranked += sorted(counts.keys() - set(ranked), key=lambda kind: (-counts[kind], kind))
    for end in range(1, len(ranked)):
        place = end
        while place and counts[ranked[place]] > _OVERTAKES * max(0, counts[ranked[place - 1]]):
            ranked[place - 1 : place + 1] = reversed(ranked[place - 1 : place + 1])
            place -= 1
    return ranked


def client_rows(oldest: Sample | None, before: Sample | None, now: Sample) -> tuple[ClientRow, ...]:
    """Return a row per name and transport of the open connections, by name.

    Rates are since the sample `before`, recent rates since `oldest`. Without these
    samples, they are unknown and 0, respectively. Connections that closed since
    `before` do not count.
    """
    since_before, since_oldest = _client_rates(before, now), _client_rates(oldest, now)

    def row(group: _Group, connections: Sequence[ClientStatistics]) -> ClientRow:
        requests, received, sent = since_before.get(group, (None, None, None))
        recent_requests, recent_received, recent_sent = since_oldest.get(group, (0.0, 0.0, 0.0))
        return ClientRow(
            name=group[0],
            transport=group[1],
            connections=len(connections),
            requests_per_s=requests,
            received_bytes_per_s=received,
            sent_bytes_per_s=sent,
            recent_requests_per_s=recent_requests,
            recent_bytes_per_s=recent_received + recent_sent,
            errors=sum(one.errors for one in connections),
            pinned_bytes=sum(one.pinned_bytes for one in connections),
        )

    return tuple(row(group, connections) for group, connections in sorted(_connections(now).items()))


def disk_rows(before: Sample | None, now: Sample) -> tuple[DiskRow, ...]:
    """Return a row per disk, in the server's order; rates are since `before`."""
    if now.stats.disk is None:
        return ()
    earlier = {} if before is None or before.stats.disk is None else {one.path: one for one in before.stats.disk.disks}
    elapsed = elapsed_s(before, now) if before is not None else 0.0

    def row(new: DiskStatistics) -> DiskRow:
        old = earlier.get(new.path)

        return DiskRow(
            path=new.path,
            state=new.state,
            capacity_bytes=new.capacity_bytes,
            used_bytes=new.used_bytes,
            read_bytes_per_s=_per_s("read_bytes", old, new, elapsed),
            written_bytes_per_s=_per_s("written_bytes", old, new, elapsed),
            hits_per_s=_per_s("read_blocks", old, new, elapsed),
            queue=new.queued_reads + new.queued_writes + new.hung_jobs,
            errors=new.read_errors + new.write_errors + new.damaged_blocks,
        )

    return tuple(map(row, now.stats.disk.disks))


_Group = tuple[str, str]
"""Name and transport."""


def _client_rates(before: Sample | None, now: Sample) -> dict[_Group, tuple[float, float, float]]:
    """Requests, received bytes and sent bytes per second; of a group of which a
    connection has no id, nothing is known."""
    details = before.stats.details if before is not None else None
    elapsed = elapsed_s(before, now) if before is not None else 0.0
    if details is None or elapsed <= 0:
        return {}
    old = {one.id: one for one in details.clients}
    all_listed = len(details.clients) < MAX_CLIENTS

    def per_s(counter: str, connections: Sequence[ClientStatistics]) -> float:
        found = 0
        for one in connections:
            if one.id in old:
                found += getattr(one, counter) - getattr(old[one.id], counter)
            elif all_listed:  # it is new
                found += getattr(one, counter)
        return max(0, found) / elapsed

    return {
        group: (
            per_s("requests", connections),
            per_s("received_bytes", connections),
            per_s("sent_bytes", connections),
        )
        for group, connections in _connections(now).items()
        if all(one.id for one in connections)
    }


def _connections(sample: Sample) -> dict[_Group, list[ClientStatistics]]:
    groups: dict[_Group, list[ClientStatistics]] = defaultdict(list)
    for one in sample.stats.details.clients if sample.stats.details is not None else ():
        groups[one.name, one.transport].append(one)
    return groups
