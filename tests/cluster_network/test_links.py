"""What clients of a cluster see when the network fails, and when a clock does."""

import time

import pytest

from tests.cluster_network.checks import check, do_without, views_of
from tests.cluster_network.cluster import CLIENTS, MEMBERS, NODES, Cluster, without
from tests.cluster_network.wall_clock import WallClock


@pytest.mark.parametrize("way", [("x", "b"), ("b", "x")], ids=["requests", "answers"])
def test_a_partition_one_way_is_misses_and_moves_no_key(cluster: Cluster, way: tuple[str, str]) -> None:
    cluster.ask("begin", "b")
    with cluster.network.cut(way):
        assert not cluster.found("b", 2, of=["x"])
        assert cluster.found("b", of=["y"])
        check(cluster, "b")
    assert cluster.found("b")
    for report in check(cluster, "b").values():
        assert views_of(report) == {NODES}


def test_a_store_that_everybody_has_lost_leaves_and_returns(cluster: Cluster) -> None:
    cluster.ask("begin", "c")
    others = [*MEMBERS, *CLIENTS]
    with cluster.network.cut(*(("c", other) for other in others), *((other, "c") for other in others)):
        assert cluster.viewed(without("c"))
        check(cluster, "c")
    assert cluster.viewed(NODES)
    assert cluster.found("c")
    check(cluster, "c")


@pytest.mark.nightly
def test_a_slow_link_is_slow_and_nothing_else(cluster: Cluster) -> None:
    cluster.ask("begin", "")
    with cluster.network.slow("b", "10mbit"):
        time.sleep(4)
        reports = check(cluster)
    for report in reports.values():
        assert views_of(report) == {NODES}


@pytest.mark.nightly
def test_lost_packets_are_sent_again(cluster: Cluster) -> None:
    """One of a hundred. What a lookup learns too late counts as missing."""
    cluster.ask("begin", "")
    with cluster.network.lossy("b", 10), cluster.network.lossy("x", 10):
        time.sleep(4)
        reports = check(cluster, "b", of=["y"])
    assert reports["x"]["errors"] == []
    assert reports["x"]["hits"]["b"] > 0
    for report in reports.values():
        assert views_of(report) == {NODES}


@pytest.mark.nightly
def test_a_clock_that_is_set_changes_nothing(cluster: Cluster, clock: WallClock) -> None:
    """A store's, by an hour forward, which is more than any lease, and back again."""
    if not clock.exists:
        do_without("libfaketime is not installed; on Debian: apt-get install faketime")
    cluster.ask("begin", "")
    for seconds in (3600, -3600):
        with clock.wrong_by(seconds):
            time.sleep(2)
    for report in check(cluster).values():
        assert views_of(report) == {NODES}
