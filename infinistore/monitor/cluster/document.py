"""A cluster as plain values for `--json`: the screen's figures, and those of each node.

Names end in their unit. What is not known is None.
"""

from typing import Any

import attrs

from infinistore.monitor.cluster.model import ClusterSnapshot, NodeRow, total
from infinistore.monitor.cluster.view import cluster_alarms
from infinistore.monitor.document import document as store_document

__all__ = ["document"]


def document(snapshot: ClusterSnapshot) -> dict[str, Any]:
    """Return a snapshot as a JSON object."""
    sums = total(snapshot.rows)
    return {
        "at": snapshot.at.isoformat(timespec="milliseconds"),
        "url": snapshot.url,
        "kind": snapshot.kind,
        "epoch": snapshot.epoch,
        "copies": snapshot.copies,
        "view_age_s": snapshot.view_age_s,
        "problem": snapshot.problem,
        "warnings": [attrs.asdict(alarm) for alarm in cluster_alarms(snapshot)],
        "total": {
            "nodes": sums.nodes,
            "answering": sums.answering,
            "weight": sums.weight,
            "keys": sums.keys,
            "used_bytes": sums.used_bytes,
            "capacity_bytes": sums.capacity_bytes,
            "disk_used_bytes": sums.disk_used_bytes,
            "disk_capacity_bytes": sums.disk_capacity_bytes,
            "hit_rate": sums.hit_rate,
            "per_s": {
                "requests": sums.requests,
                "received_bytes": sums.received_bytes,
                "sent_bytes": sums.sent_bytes,
            },
        },
        "nodes": [_node(row) for row in snapshot.rows],
    }


def _node(row: NodeRow) -> dict[str, Any]:
    node = row.node
    return {
        "id": node.id,
        "address": node.address,
        "state": node.state.value,
        "weight": node.weight,
        "zone": node.zone,
        "answers": row.answers,
        "age_s": row.age_s,
        "silent_s": row.silent_s,
        "server": store_document(row.snapshot),
    }
