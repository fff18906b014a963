"""A snapshot as plain values for `--json`: the screen's figures and their statistics.

Names end in their unit. An unknown rate is None: after the first sample, and after the
first one of a restarted server.
"""

from typing import Any

import attrs

from infinistore.monitor.model import Snapshot
from infinistore.monitor.rates import OperationRow, Quantile
from infinistore.monitor.view import shown_alarms
from infinistore.statistics import Stats


def document(snapshot: Snapshot) -> dict[str, Any]:
    """Return a snapshot as a JSON object."""
    stats, lost, rates = snapshot.stats, snapshot.lost, snapshot.rates
    return {
        "at": snapshot.at.isoformat(timespec="milliseconds") if snapshot.at is not None else None,
        "url": snapshot.url,
        "state": _state(snapshot),
        "lost_since": lost.since.isoformat(timespec="milliseconds") if lost is not None else None,
        "lost_reason": lost.reason if lost is not None else None,
        "restarts": snapshot.restarts,
        "warnings": [attrs.asdict(alarm) for alarm in shown_alarms(snapshot)],
        "elapsed_s": rates.elapsed_s if rates is not None else None,
        "per_s": _rates(snapshot),
        "hit_rate": rates.hit_rate if rates is not None else None,
        "latency_span_s": snapshot.latency_span_s,
        "operations": [_operation(row) for row in snapshot.operations],
        "clients": [attrs.asdict(row) for row in snapshot.clients],
        "stats": _stats(stats) if stats is not None else None,
        **_tenants(snapshot),
        **({"disks": [attrs.asdict(row) for row in snapshot.disks]} if snapshot.disks else {}),
    }


def _tenants(snapshot: Snapshot) -> dict[str, Any]:
    if snapshot.tenants is None:
        return {}
    problem = snapshot.tenants.problem or None
    return {"tenants": [attrs.asdict(row) for row in snapshot.tenants.rows], "tenants_problem": problem}


def _stats(stats: Stats) -> dict[str, Any]:
    """`disk` is there only if the store has disks."""
    return {name: value for name, value in attrs.asdict(stats).items() if name != "disk" or value is not None}


def _state(snapshot: Snapshot) -> str:
    if snapshot.lost is not None or snapshot.stats is None:
        return "lost"
    return snapshot.stats.details.state if snapshot.stats.details is not None else "serving"


def _rates(snapshot: Snapshot) -> dict[str, Any] | None:
    rates = snapshot.rates
    if rates is None or snapshot.lost is not None:
        return None
    return {
        "received_bytes": rates.received_bytes,
        "sent_bytes": rates.sent_bytes,
        "requests": rates.requests,
        "errors": rates.errors,
        "puts": rates.puts,
        "deleted": rates.deleted,
        "evicted": dict(rates.evicted),
    }


def _operation(row: OperationRow) -> dict[str, Any]:
    return {
        "kind": row.kind,
        "total": row.total,
        "per_s": row.per_s,
        "bytes_per_s": row.bytes_per_s,
        "errors_per_s": row.errors_per_s,
        **{name: _quantile(getattr(row, name)) for name in ("p50", "p90", "p99")},
    }


def _quantile(found: Quantile | None) -> dict[str, Any] | None:
    """`bound` is "<" or ">" if the value is only a bound, else empty."""
    return {"s": found.value_s, "bound": found.bound} if found is not None else None
