"""What clients of a cluster see when a store, or the network, fails."""

import signal
import time
from typing import Any

import pytest

from tests.cluster_network.conftest import NODES, Cluster

TTL_S = 10
"""The lease of a node."""
LOOKUP_S = 0.5
"""The longest that a node may hold a lookup up."""
SCHEDULING_S = 1.0
"""How long a process may wait for a core that others use."""


def check(report: dict[str, Any], victim: str) -> None:
    """No error and no wrong byte, and the other nodes have all that they should."""
    assert report["errors"] == []
    assert report["wrong"] == []
    assert report["puts"] > 0
    for node in NODES:
        if node != victim:
            assert report["hits"][node] >= 0.99 * report["asked"][node] > 0, report


def without(victim: str) -> list[str]:
    return [node for node in NODES if node != victim]


def test_a_store_is_killed_and_comes_back(cluster: Cluster) -> None:
    cluster.ask("begin", "a")
    killed_at = time.monotonic()
    cluster.kill("a")
    right_at = cluster.ask("view", without("a"), 30)
    report = cluster.ask("report")
    cluster.start_store("a")
    assert cluster.ask("view", NODES, 30)
    check(report, "a")
    assert report["first_miss_at"]["a"] - killed_at <= LOOKUP_S + SCHEDULING_S
    assert right_at - killed_at <= TTL_S + 1 + SCHEDULING_S
    assert report["longest_lookup_s"] <= LOOKUP_S + SCHEDULING_S
    assert cluster.ask("hits", "a", 30)
    check(cluster.ask("report"), "a")


def test_a_store_that_is_stopped_holds_nobody_up(cluster: Cluster) -> None:
    cluster.ask("begin", "b")
    cluster.stores["b"].send_signal(signal.SIGSTOP)
    try:
        assert cluster.ask("view", without("b"), 30)
        report = cluster.ask("report")
    finally:
        cluster.stores["b"].send_signal(signal.SIGCONT)
    check(report, "b")
    assert report["longest_lookup_s"] <= LOOKUP_S + SCHEDULING_S
    assert cluster.ask("view", NODES, 30)
    assert cluster.ask("hits", "b", 30)
    check(cluster.ask("report"), "b")


def test_a_store_that_only_etcd_cannot_see_stays_for_its_clients_still_can(cluster: Cluster) -> None:
    cluster.ask("begin", "")
    with cluster.registrations("c") as wait:
        with cluster.network.cut(("c", "etcd"), ("etcd", "c")):
            wait("DELETE")
            assert not cluster.ask("view", without("c"), 1)
        wait("PUT")
    report = cluster.ask("report")
    check(report, "")
    assert {*map(tuple, (ids for _, ids in report["views"]))} == {NODES}


@pytest.mark.parametrize("way", [("client", "b"), ("b", "client")], ids=["requests", "answers"])
def test_a_partition_one_way_is_misses_and_moves_no_key(cluster: Cluster, way: tuple[str, str]) -> None:
    cluster.ask("begin", "b")
    with cluster.network.cut(way):
        assert not cluster.ask("hits", "b", 3)
        report = cluster.ask("report")
    assert cluster.ask("hits", "b", 30)
    check(report, "b")
    assert report["longest_lookup_s"] <= LOOKUP_S + SCHEDULING_S
    after = cluster.ask("report")
    check(after, "b")
    assert {*map(tuple, (ids for _, ids in after["views"]))} == {NODES}
