"""What clients of a cluster see when a store fails, or something pretends to be one."""

import time

import pytest

from tests.cluster_network.checks import LOOKUP_S, SCHEDULING_S, TTL_S, check, views_of
from tests.cluster_network.cluster import NODES, Cluster, kill, without


def test_a_store_is_killed_and_comes_back(cluster: Cluster) -> None:
    cluster.ask("begin", "b")
    killed_at = time.monotonic()
    kill(cluster.stores["b"])
    right_at = cluster.viewed(without("b"))
    reports = check(cluster, "b")
    cluster.start_store("b")
    assert cluster.viewed(NODES)
    assert 0 < right_at - killed_at <= TTL_S + 1 + SCHEDULING_S
    for report in reports.values():
        assert report["first_miss_at"]["b"] - killed_at <= LOOKUP_S + SCHEDULING_S
    assert cluster.found("b")
    check(cluster, "b")


@pytest.mark.nightly
def test_a_store_that_is_stopped_holds_nobody_up(cluster: Cluster) -> None:
    cluster.ask("begin", "c")
    with cluster.stopped(cluster.stores["c"]):
        assert cluster.viewed(without("c"))
        check(cluster, "c")
    assert cluster.viewed(NODES)
    assert cluster.found("c")
    check(cluster, "c")


@pytest.mark.nightly
def test_a_second_server_with_the_id_of_another_ends_and_changes_nothing(cluster: Cluster) -> None:
    """It waits until the lease of the first would have run out."""
    cluster.ask("begin", "")
    second = cluster.start_store("a", host="y", wait=False)
    _, complaint = second.communicate(timeout=2 * TTL_S + 10)
    assert second.returncode == 2
    address = cluster.network.hosts["a"].address
    assert f"another server, at infinistore://{address}:22345, is registered in the cluster test as 'a'" in complaint
    assert complaint.count("\n") == 1
    for report in check(cluster).values():
        assert views_of(report) == {NODES}
