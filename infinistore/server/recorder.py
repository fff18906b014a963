"""Counts of requests and their latencies, for each kind, transport and outcome.

It is called once for each request, so a call has to cost less than a microsecond: one
lookup, one binary search and three additions. Readers pay for the formatting.
"""

import re
import time
from bisect import bisect_left
from collections.abc import Callable

import attrs

from infinistore.errors import InfiniStoreException
from infinistore.protocol.messages import Message
from infinistore.statistics import LATENCY_BOUNDS_S, OperationStatistics

OK = "ok"
CANCELLED = "cancelled"
"""The outcome of a request that was under way when the server stopped."""

_CAPITAL = re.compile(r"(?<!^)(?=[A-Z])")


@attrs.define
class _Tally:
    payload_bytes: int = 0
    latency_sum_s: float = 0.0
    latency_counts: list[int] = attrs.field(factory=lambda: [0] * (len(LATENCY_BOUNDS_S) + 1))


def outcome_of(error: Exception) -> str:
    """Return the outcome of a request that ended in this error."""
    return type(error if isinstance(error, InfiniStoreException) else InfiniStoreException()).__name__


class Recorder:
    """Counts requests. `clock` returns seconds from an arbitrary start."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._tallies: dict[tuple[type[Message], str, str], _Tally] = {}

    def record(self, kind: type[Message], transport: str, outcome: str, payload_bytes: int, elapsed_s: float) -> None:
        """Count a request that took `elapsed_s` and meant to move `payload_bytes`."""
        tally = self._tallies.get((kind, transport, outcome))
        if tally is None:
            tally = self._tallies[kind, transport, outcome] = _Tally()
        tally.latency_counts[bisect_left(LATENCY_BOUNDS_S, elapsed_s)] += 1
        tally.latency_sum_s += elapsed_s
        tally.payload_bytes += payload_bytes

    def statistics(self) -> list[OperationStatistics]:
        """Return the counts so far, sorted by kind, transport and outcome."""
        found = [
            OperationStatistics(
                kind=_CAPITAL.sub("_", kind.__name__).lower(),
                transport=transport,
                outcome=outcome,
                count=sum(tally.latency_counts),
                payload_bytes=tally.payload_bytes,
                latency_sum_s=tally.latency_sum_s,
                latency_counts=tally.latency_counts.copy(),
            )
            for (kind, transport, outcome), tally in self._tallies.items()
        ]
        return sorted(found, key=lambda one: (one.kind, one.transport, one.outcome))
