"""Converts samples of a server to the contents of a screen. Pure; the caller has a
clock.

`Model` keeps only what a screen can show: the last samples for latencies and warnings,
and one `Point` of history per sample. A restarted server begins a new series; the
history remains, with a gap. Rates are never negative.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import attrs

from infinistore.monitor.alarms import Alarm, alarms
from infinistore.monitor.rates import (
    ClientRow,
    DiskRow,
    OperationRow,
    Rates,
    Sample,
    busiest,
    client_rows,
    disk_rows,
    elapsed_s,
    is_restart,
    operation_rows,
    rates,
)
from infinistore.monitor.tenants import Tenants, TenantsModel
from infinistore.statistics import Stats

__all__ = ["HISTORY_POINTS", "WINDOW_SAMPLES", "Lost", "Model", "Point", "Snapshot"]

HISTORY_POINTS: Final = 512
"""Length of the history: more than the widest screen shows."""
WINDOW_SAMPLES: Final = 10
"""Number of samples that latencies and warnings cover."""


@attrs.frozen
class Point:
    """One sample of the history; None is unknown. `span_s` is the time it covers."""

    span_s: float
    received_bytes: float | None = None
    sent_bytes: float | None = None
    hit_rate: float | None = None


@attrs.frozen
class Lost:
    """The server does not answer."""

    since: datetime
    reason: str
    attempts: int


@attrs.frozen
class Kept:
    """The number of keys before another process served, and after it."""

    before: int
    after: int


@attrs.frozen
class Snapshot:
    """The contents of a screen. A lost server keeps its last figures."""

    url: str
    at: datetime | None = None
    """When `stats` were taken, or None."""
    stats: Stats | None = None
    rates: Rates | None = None
    """Rates since the previous sample; None after the first one and after a restart."""
    history: Sequence[Point] = ()
    operations: Sequence[OperationRow] = ()
    busiest: Sequence[str] = ()
    """The kinds of requests, those with the most of late first."""
    latency_span_s: float | None = None
    """The time that latencies cover; None: since the server's start."""
    clients: Sequence[ClientRow] = ()
    disks: Sequence[DiskRow] = ()
    """Empty if the store has none."""
    tenants: Tenants | None = None
    """What the management API tells; None if it is not asked."""
    alarms: Sequence[Alarm] = ()
    lost: Lost | None = None
    restarts: int = 0
    restarted_at: datetime | None = None
    kept: Kept | None = None
    """What the restart has cost; None if that is unknown."""


class Model:
    """The state of one server: `observe` and `lose` update it, `snapshot` reads it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._tenants: TenantsModel | None = None
        self._samples: deque[Sample] = deque(maxlen=WINDOW_SAMPLES + 1)  # of the current run of the server
        self._history: deque[Point] = deque(maxlen=HISTORY_POINTS)
        self._at: datetime | None = None
        self._seen_s: float | None = None
        self._lost: Lost | None = None
        self._restarts = 0
        self._restarted_at: datetime | None = None
        self._kept: Kept | None = None
        self._busiest: list[str] = []

    @property
    def answered(self) -> bool:
        """Whether a sample has ever been taken."""
        return bool(self._samples)

    def observe(self, stats: Stats, *, now_s: float, at: datetime) -> None:
        """Record a sample. `now_s` is monotonic; `at` is the same moment as a date."""
        sample = Sample(now_s, stats)
        if self._samples and is_restart(self._samples[-1].stats, stats):
            self._kept = _kept(self._samples[-1].stats, stats)
            self._samples.clear()
            self._restarts += 1
            self._restarted_at = at
        if self._samples:
            self._add_point(rates(self._samples[-1], sample), now_s)
        elif self._seen_s is not None:
            self._add_point(None, now_s)
        self._samples.append(sample)
        self._busiest = busiest(self._busiest, self._first_detailed(), sample)
        self._at, self._seen_s, self._lost = at, now_s, None

    def observe_tenants(self, told: Mapping[str, Any], *, now_s: float) -> None:
        """Record what the management API tells of tenants.

        Raises:
            ValueError: it tells something else.
        """
        self._tenants = self._tenants or TenantsModel()
        self._tenants.observe(told, now_s)

    def lose_tenants(self, problem: str) -> None:
        """Record that the management API has told nothing, and why."""
        self._tenants = self._tenants or TenantsModel()
        self._tenants.lose(problem)

    def lose(self, reason: str, *, now_s: float, at: datetime) -> None:
        """Record that the server did not answer, and why."""
        since, attempts = (at, 1) if self._lost is None else (self._lost.since, self._lost.attempts + 1)
        self._lost = Lost(since, reason, attempts)
        if self._seen_s is not None:
            self._add_point(None, now_s)
        self._seen_s = now_s

    def _add_point(self, found: Rates | None, now_s: float) -> None:
        span_s = found.elapsed_s if found is not None else max(0.0, now_s - (self._seen_s or now_s))
        self._history.append(
            Point(span_s) if found is None else Point(span_s, found.received_bytes, found.sent_bytes, found.hit_rate)
        )

    def _first_detailed(self) -> Sample | None:
        """The oldest sample before the newest one that has details, which may have been
        asked for only lately.
        """
        detailed = next((one for one in self._samples if one.stats.details is not None), self._samples[0])
        return detailed if detailed is not self._samples[-1] else None

    def snapshot(self) -> Snapshot:
        """Return the current snapshot."""
        tenants = None if self._tenants is None else self._tenants.tenants
        if not self._samples:
            return Snapshot(self._url, history=tuple(self._history), lost=self._lost, tenants=tenants)
        now, oldest = self._samples[-1], self._samples[0]
        before = self._samples[-2] if len(self._samples) > 1 else None
        first = self._first_detailed()
        return Snapshot(
            url=self._url,
            at=self._at,
            stats=now.stats,
            rates=rates(before, now) if before is not None else None,
            history=tuple(self._history),
            operations=operation_rows(first, before, now),
            busiest=tuple(self._busiest),
            latency_span_s=elapsed_s(first, now) if first is not None else None,
            clients=client_rows(first, before, now),
            disks=disk_rows(before, now),
            alarms=alarms(oldest, now),
            tenants=tenants,
            lost=self._lost,
            restarts=self._restarts,
            restarted_at=self._restarted_at,
            kept=self._kept,
        )


def _kept(before: Stats, now: Stats) -> Kept | None:
    """What is left in memory. With disks, nobody knows: what they hold comes back."""
    return Kept(before.store.keys, now.store.keys) if before.disk is None and now.disk is None else None
