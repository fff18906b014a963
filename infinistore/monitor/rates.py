"""What happened between two samples of the same server: differences of counters, by second.

No rate is ever negative. Whether the two samples are of one run of the server is for `is_restart` to say; the others
expect that they are.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Final

import attrs

from infinistore.monitor.quantiles import Quantile, quantile
from infinistore.statistics import ClientStatistics, OperationStatistics, Stats

__all__ = ["ClientRow", "OperationRow", "Rates", "Sample", "client_rows", "is_restart", "operation_rows", "rates"]

_OK: Final = "ok"
_SHORTEST_S: Final = 1e-6  # less is no time at all: what is divided by it may be more than a float can hold
_SAME_START_S: Final = 0.05  # how far the starts of one connection may lie apart in two samples, by rounding and delay


@attrs.frozen
class Sample:
    """Statistics, and when they were taken: seconds on a clock that never goes back."""

    at_s: float
    stats: Stats


@attrs.frozen
class Rates:
    """What a store did between two samples, each by second; `hit_rate` is None if nobody looked anything up."""

    elapsed_s: float
    received_bytes: float
    sent_bytes: float
    requests: float
    errors: float
    hit_rate: float | None
    puts: float
    deleted: float
    evicted: Mapping[str, float]
    """By cause."""


@attrs.frozen
class OperationRow:
    """One kind of request: by second since the sample before, and how long it took over a longer while."""

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
    """The connections that one client has open over one transport, added up."""

    name: str
    transport: str
    connections: int
    requests_per_s: float | None
    received_bytes_per_s: float | None
    sent_bytes_per_s: float | None
    recent_requests_per_s: float
    recent_bytes_per_s: float
    """These two are over a longer while, for an order that does not change with every sample."""
    errors: int
    pinned_bytes: int


def _counters(stats: Stats) -> Iterator[int]:
    store, server = stats.store, stats.server
    yield from (store.hits, store.misses, store.puts, store.put_bytes, store.hit_bytes, store.deleted)
    yield from (store.checksum_drops, *attrs.astuple(store.evicted))
    if server is not None:
        yield from (server.requests, server.errors, server.received_bytes, server.sent_bytes)
        yield from (server.connections_total, server.connections_refused)


def is_restart(before: Stats, now: Stats) -> bool:
    """Whether the server was started anew between the two: it says so itself, or a counter went back."""
    if before.server is not None and now.server is not None:
        if before.server.instance != now.server.instance or before.server.uptime_s > now.server.uptime_s:
            return True
    elif (before.server is None) != (now.server is None):
        return True
    return any(new < old for old, new in zip(_counters(before), _counters(now), strict=True))


def elapsed_s(before: Sample, now: Sample) -> float:
    """Seconds between two samples: by the server's clock, which knows when it counted, else by ours; 0 if too few."""
    if before.stats.server is not None and now.stats.server is not None:
        by_server = now.stats.server.uptime_s - before.stats.server.uptime_s
        if by_server >= _SHORTEST_S:
            return by_server
    by_us = now.at_s - before.at_s
    return by_us if by_us >= _SHORTEST_S else 0.0


def rates(before: Sample, now: Sample) -> Rates | None:
    """What happened between two samples of one run of a server; None if no time passed."""
    elapsed = elapsed_s(before, now)
    if elapsed <= 0:
        return None
    old, new = before.stats.store, now.stats.store
    hits, misses = new.hits - old.hits, new.misses - old.misses
    received, sent = _moved_bytes(now.stats, before.stats)
    causes = attrs.asdict(new.evicted)
    return Rates(
        elapsed_s=elapsed,
        received_bytes=received / elapsed,
        sent_bytes=sent / elapsed,
        requests=_server_difference(before, now, "requests") / elapsed,
        errors=_server_difference(before, now, "errors") / elapsed,
        hit_rate=hits / (hits + misses) if hits + misses > 0 else None,
        puts=(new.puts - old.puts) / elapsed,
        deleted=(new.deleted - old.deleted) / elapsed,
        evicted={cause: (count - getattr(old.evicted, cause)) / elapsed for cause, count in causes.items()},
    )


def _moved_bytes(now: Stats, before: Stats) -> tuple[int, int]:
    if now.server is not None and before.server is not None:
        received = now.server.received_bytes - before.server.received_bytes
        return received, now.server.sent_bytes - before.server.sent_bytes
    return now.store.put_bytes - before.store.put_bytes, now.store.hit_bytes - before.store.hit_bytes


def _server_difference(before: Sample, now: Sample, counter: str) -> int:
    if before.stats.server is None or now.stats.server is None:
        return 0
    difference: int = getattr(now.stats.server, counter) - getattr(before.stats.server, counter)
    return difference


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


def operation_rows(oldest: Sample | None, before: Sample | None, now: Sample) -> tuple[OperationRow, ...]:
    """One row for each kind of request, whatever its transport and outcome, in the order of their names.

    Rates are since the sample `before`; latencies are since `oldest`, so that a kind that comes once in a while has
    some. Without these, rates are unknown and latencies are those since the server's start.
    """
    newest, previous, first = (_by_kind(_operations(sample)) for sample in (now, before, oldest))
    elapsed = elapsed_s(before, now) if before is not None and before.stats.details is not None else 0.0

    def row(kind: str, tally: _Tally) -> OperationRow:
        old, start = previous.get(kind, _Tally()), first.get(kind, _Tally())
        took = [max(0, b - a) for a, b in zip_longest(start.latencies, tally.latencies, fillvalue=0)]

        def per_s(new: int, old: int) -> float | None:
            return max(0, new - old) / elapsed if elapsed > 0 else None

        return OperationRow(
            kind=kind,
            total=tally.count,
            per_s=per_s(tally.count, old.count),
            bytes_per_s=per_s(tally.payload_bytes, old.payload_bytes),
            errors_per_s=per_s(tally.errors, old.errors),
            p50=quantile(took, 0.5),
            p90=quantile(took, 0.9),
            p99=quantile(took, 0.99),
        )

    return tuple(row(kind, tally) for kind, tally in sorted(newest.items()))


def client_rows(oldest: Sample | None, before: Sample | None, now: Sample) -> tuple[ClientRow, ...]:
    """One row for each name and transport of the connections that are open now, in the order of their names.

    Rates are since the sample `before`, the recent ones since `oldest`; without these, they are unknown, and 0.

    A connection has no number of its own, so it is known again by when it was opened. What one did that has closed
    since `before` is not counted.
    """
    since_before, since_oldest = _client_rates(before, now), _client_rates(oldest, now)

    def row(group: _Group, connections: Sequence[tuple[float, ClientStatistics]]) -> ClientRow:
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
            errors=sum(one.errors for _, one in connections),
            pinned_bytes=sum(one.pinned_bytes for _, one in connections),
        )

    return tuple(row(group, connections) for group, connections in sorted(_connections(now).items()))


_Group = tuple[str, str]
"""Name and transport."""


def _client_rates(before: Sample | None, now: Sample) -> dict[_Group, tuple[float, float, float]]:
    """Requests, bytes received and bytes sent by second."""
    elapsed = elapsed_s(before, now) if before is not None and before.stats.details is not None else 0.0
    if elapsed <= 0:
        return {}
    old_groups = _connections(before)
    found = {}
    for group, connections in _connections(now).items():
        pairs = list(_matched(old_groups.get(group, []), connections))
        requests = sum(new.requests - (old.requests if old else 0) for old, new in pairs)
        received = sum(new.received_bytes - (old.received_bytes if old else 0) for old, new in pairs)
        sent = sum(new.sent_bytes - (old.sent_bytes if old else 0) for old, new in pairs)
        found[group] = (max(0, requests) / elapsed, max(0, received) / elapsed, max(0, sent) / elapsed)
    return found


def _connections(sample: Sample | None) -> dict[_Group, list[tuple[float, ClientStatistics]]]:
    """The connections by name and transport, each with when it was opened, the oldest first."""
    groups: dict[_Group, list[tuple[float, ClientStatistics]]] = defaultdict(list)
    if sample is not None and sample.stats.details is not None:
        now_s = sample.stats.server.uptime_s if sample.stats.server is not None else sample.at_s
        for one in sample.stats.details.clients:
            groups[one.name, one.transport].append((now_s - one.connected_s, one))
    for connections in groups.values():
        connections.sort(key=lambda pair: pair[0])
    return groups


def _matched(
    old: Sequence[tuple[float, ClientStatistics]], new: Sequence[tuple[float, ClientStatistics]]
) -> Iterator[tuple[ClientStatistics | None, ClientStatistics]]:
    """Pair each connection with its own former self, or with None if it is new. Both are sorted by when they opened."""
    index = 0
    for opened_s, one in new:
        while index < len(old) and old[index][0] < opened_s - _SAME_START_S:
            index += 1  # this one has closed
        if index < len(old) and old[index][0] <= opened_s + _SAME_START_S:
            yield old[index][1], one
            index += 1
        else:
            yield None, one
