"""Converts samples of a server to the contents of a screen, warnings for operators
among them. Pure; the caller has a clock.

`Model` keeps only what a screen can show: the last samples for latencies and warnings,
and one `Point` of history per sample. A restarted server begins a new series; the
history remains, with a gap. Rates are never negative.

Each warning describes the problem with its numbers and, where useful, a remedy.
Warnings cover several samples, so that they do not flicker.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Final, Literal

import attrs

from infinistore.monitor import figures
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
from infinistore.statistics import DiskTierStatistics, DrainStatistics, ServerDetails, Stats

_NEARLY_FULL: Final = 0.9
_NEAR_LIMIT: Final = 0.8

Severity = Literal["error", "warning", "notice"]


@attrs.frozen
class Alarm:
    """One warning. `kind` is for programs, `text` for people."""

    kind: str
    severity: Severity
    text: str


def alarms(oldest: Sample, now: Sample) -> tuple[Alarm, ...]:
    """Return the warnings, the worst first.

    `oldest` and `now` are samples of one run of a server.
    """
    recent = rates(oldest, now)
    found = [
        *_state_alarms(now.stats),
        *_damage_alarms(oldest.stats, now.stats),
        *_error_alarms(oldest, now, recent),
        *_connection_alarms(oldest.stats, now.stats),
        *_room_alarms(now.stats, recent),
        *_disk_alarms(oldest, now),
        *_pin_alarms(now.stats),
    ]
    order: dict[Severity, int] = {"error": 0, "warning": 1, "notice": 2}
    return tuple(sorted(found, key=lambda alarm: order[alarm.severity]))


def _state_alarms(now: Stats) -> Iterator[Alarm]:
    if now.details is not None and now.details.state == "draining":
        yield Alarm("draining", "warning", "the server is draining: it accepts nobody and stops when requests are done")
    if now.drain is not None and now.drain.state == "draining":
        yield Alarm("drain", "notice", f"the node drains: {_progress(now.drain)}")
    if now.drain is not None and now.drain.state == "drained":
        yield Alarm("drain", "notice", f"the node has drained, and stays out until it is added: {_progress(now.drain)}")


def _progress(drain: DrainStatistics) -> str:
    groups = f"{drain.moved_groups + drain.skipped_groups} of {drain.groups} groups"
    done = f"{figures.size(drain.done_bytes)} of {figures.size(drain.size_bytes)}"
    failed = f", {drain.failed_groups} could not be moved" if drain.failed_groups else ""
    left = "" if drain.left_s is None else f", about {figures.duration(round(drain.left_s))} left"
    return f"{groups}, {done}{failed}{left}"


def _damage_alarms(before: Stats, now: Stats) -> Iterator[Alarm]:
    drops = now.store.checksum_drops
    if drops:
        fresh = drops > before.store.checksum_drops
        blocks = "block was" if drops == 1 else "blocks were"
        text = f"{figures.count(drops)} {blocks} dropped since the start: the bytes did not match the checksum"
        yield Alarm("checksum_drops", "error" if fresh else "warning", text)


def _error_alarms(oldest: Sample, now: Sample, recent: Rates | None) -> Iterator[Alarm]:
    if recent is None or not recent.errors:
        return
    failed = _failures(now.stats.details) - _failures(oldest.stats.details)
    named = ", ".join(f"{name} {figures.rate(times / recent.elapsed_s)}" for name, times in failed.most_common(3))
    share = recent.errors / recent.requests if recent.requests else 1.0
    of_all = f" ({figures.percent(min(1.0, share))} of requests)"
    text = f"{figures.rate(recent.errors)} errors a second{of_all}" + (f": {named}" if named else "")
    yield Alarm("errors", "error" if share >= 0.5 else "warning", text)


def _failures(details: ServerDetails | None) -> Counter[str]:
    counted: Counter[str] = Counter()
    for one in details.operations if details is not None else ():
        if one.outcome != "ok":
            counted[one.outcome] += one.count
    return counted


def _connection_alarms(before: Stats, now: Stats) -> Iterator[Alarm]:
    if now.server is None:
        return
    most = now.details.max_connections if now.details is not None else None
    refused = now.server.connections_refused - (before.server.connections_refused if before.server is not None else 0)
    if refused > 0:
        text = f"{figures.count(refused)} connections were refused just now: close some, or raise --max-connections"
        yield Alarm("connections_refused", "error", text)
    elif most and now.server.connections_open >= _NEAR_LIMIT * most:
        text = f"{figures.count(now.server.connections_open)} of {figures.count(most)} connections are open"
        yield Alarm("connections", "warning", f"{text}; --max-connections is the limit")


def _room_alarms(now: Stats, recent: Rates | None) -> Iterator[Alarm]:
    store = now.store
    evicted = {} if recent is None else recent.evicted
    free = max(0, store.capacity_bytes - store.used_bytes)
    if evicted.get("fragmentation", 0):
        text = f"evicts {figures.rate(evicted['fragmentation'])} blocks/s because free room is scattered"
        largest = figures.size(store.allocator.largest_free_extent_bytes)
        yield Alarm("fragmentation", "warning", f"{text}: {figures.size(free)} free, the largest piece {largest}")
    used = store.used_bytes / store.capacity_bytes if store.capacity_bytes else 0.0
    making_room = evicted.get("on_demand", 0) + evicted.get("periodic", 0)
    if making_room and not store.growable_bytes:
        # Eviction is normal for a cache; if it is also nearly full, its writers wait.
        text = f"the pool is {figures.percent(used)} full and evicts {figures.rate(making_room)} blocks/s"
        yield Alarm("evicting", "warning" if used >= _NEARLY_FULL else "notice", text)
    elif used >= _NEARLY_FULL:
        growing = f"; it may grow by {figures.size(store.growable_bytes)}" if store.growable_bytes else ""
        yield Alarm("nearly_full", "notice", f"the pool is {figures.percent(used)} full{growing}")
    if store.quarantined_bytes:
        text = f"{figures.size(store.quarantined_bytes)} wait for {store.quarantined_clients} clients that were lost"
        yield Alarm("quarantine", "notice", text)


def _pin_alarms(now: Stats) -> Iterator[Alarm]:
    limit = now.details.max_pinned_bytes if now.details is not None else None
    near = (
        [one for one in now.details.clients if limit and one.pinned_bytes >= _NEAR_LIMIT * limit] if now.details else []
    )
    if limit and near:
        most = max(near, key=lambda one: one.pinned_bytes)
        others = f" (and {len(near) - 1} more)" if len(near) > 1 else ""
        text = f"{most.name}{others} pins {figures.size(most.pinned_bytes)} of the {figures.size(limit)} that one may"
        yield Alarm("pinned", "warning", text)


def _disk_alarms(oldest: Sample, now: Sample) -> Iterator[Alarm]:
    tier = now.stats.disk
    if tier is None:
        return
    before = oldest.stats.disk or tier
    for one in tier.disks:
        failed = one.state in ("read-only", "off")
        if one.alarm:
            yield Alarm("disk", "error" if failed else "warning", f"{one.path}: {one.alarm}")
        if one.hung_jobs and not failed:
            text = f"{one.path}: {figures.count(one.hung_jobs)} reads and writes are late; it gets no others meanwhile"
            yield Alarm("disk_hangs", "warning", text)
    yield from _disk_error_alarms(before, tier)
    skipped = tier.skipped_blocks - before.skipped_blocks
    elapsed = elapsed_s(oldest, now)
    if skipped > 0 and elapsed > 0:
        text = f"{figures.rate(skipped / elapsed)} blocks/s are not written to disk: {figures.size(tier.queued_bytes)}"
        yield Alarm("disk_skips", "notice", f"{text} wait, and the disks take no more")
    if tier.unsafe_keys:
        text = f"{figures.count(tier.unsafe_keys)} deleted keys may come back: a disk that has them cannot be written"
        yield Alarm("disk_deletions", "error", f"{text}; wipe it before it is used again")


def _disk_error_alarms(before: DiskTierStatistics, now: DiskTierStatistics) -> Iterator[Alarm]:
    earlier = {one.path: one for one in before.disks}
    for one in now.disks:
        old = earlier.get(one.path, one)
        fresh = {
            "reads failed": one.read_errors - old.read_errors,
            "writes failed": one.write_errors - old.write_errors,
            "blocks did not match their checksum": one.damaged_blocks - old.damaged_blocks,
        }
        said = [f"{figures.count(times)} {what}" for what, times in fresh.items() if times > 0]
        if said:
            yield Alarm("disk_errors", "warning", f"{one.path}: {', '.join(said)} just now; check the disk")


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
class KeptKeys:
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
    """Those of the management API; None if it is not asked."""
    alarms: Sequence[Alarm] = ()
    lost: Lost | None = None
    restarts: int = 0
    restarted_at: datetime | None = None
    kept: KeptKeys | None = None
    """The keys before and after the restart; None if unknown."""


class Model:
    """The state of one server: `observe` and `lose` update it, `snapshot` reads it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.tenants: TenantsModel | None = None
        """The tenants by the management API; None if it is not asked."""
        self._samples: deque[Sample] = deque(maxlen=WINDOW_SAMPLES + 1)  # of the current run of the server
        self._history: deque[Point] = deque(maxlen=HISTORY_POINTS)
        self._at: datetime | None = None
        self._seen_s: float | None = None
        self.answered_s: float | None = None
        """When the last sample was taken."""
        self._lost: Lost | None = None
        self._restarts = 0
        self._restarted_at: datetime | None = None
        self._kept: KeptKeys | None = None
        self._busiest: list[str] = []

    @property
    def has_two(self) -> bool:
        """Whether two samples were taken, or none can be."""
        return bool(self._history) or self._lost is not None

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
        self._at, self._lost = at, None
        self._seen_s = self.answered_s = now_s

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
        """The oldest sample with details, unless it is the newest."""
        detailed = next((one for one in self._samples if one.stats.details is not None), self._samples[0])
        return detailed if detailed is not self._samples[-1] else None

    def snapshot(self) -> Snapshot:
        """Return the current snapshot."""
        tenants = None if self.tenants is None else self.tenants.tenants
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


def _kept(before: Stats, now: Stats) -> KeptKeys | None:
    """The keys in memory before and after. None with disks, whose keys come back."""
    return KeptKeys(before.store.keys, now.store.keys) if before.disk is None and now.disk is None else None
