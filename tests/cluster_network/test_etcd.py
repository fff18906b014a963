"""What clients of a cluster see when its etcd fails, or is out of reach."""

import time

import pytest

from tests.cluster_network.checks import TTL_S, check, views_of
from tests.cluster_network.cluster import MEMBERS, NODES, Cluster, kill, without

OUTLIVED_S = TTL_S + 1
"""How long to wait until a lease that nobody renews has run out."""


def test_a_store_that_only_etcd_cannot_see_stays_for_its_clients_still_can(cluster: Cluster) -> None:
    cluster.ask("begin", "")
    ways = [("c", member) for member in MEMBERS] + [(member, "c") for member in MEMBERS]
    with cluster.registrations("c") as wait:
        with cluster.network.cut(*ways):
            wait("DELETE")
            assert not cluster.viewed(without("c"), 1)
        wait("PUT")
    for report in check(cluster).values():
        assert views_of(report) == {NODES}


@pytest.mark.parametrize("how", ["killed", pytest.param("stopped", marks=pytest.mark.nightly)])
def test_no_node_leaves_because_the_leader_of_etcd_does(cluster: Cluster, how: str) -> None:
    leader = cluster.leader()
    cluster.ask("begin", "")
    if how == "stopped":
        with cluster.stopped(cluster.members[leader]):
            time.sleep(OUTLIVED_S)
    else:
        kill(cluster.members[leader])
        time.sleep(OUTLIVED_S)
        cluster.start_member(leader)
    cluster.wait_for_etcd()
    for report in check(cluster).values():
        assert views_of(report) == {NODES}


@pytest.mark.nightly
def test_a_client_that_missed_what_is_compacted_reads_all_of_it_again(cluster: Cluster) -> None:
    """It keeps its view, and works with it, until then."""
    cluster.ask("begin", "b")
    ways = [("x", member) for member in MEMBERS] + [(member, "x") for member in MEMBERS]
    with cluster.network.cut(*ways):
        kill(cluster.stores["b"])
        assert cluster.viewed(without("b"), of=["y"])
        reports = check(cluster, "b")
        assert views_of(reports["x"]) == {NODES}
    cluster.compact()
    for member in MEMBERS:  # so that its watch is over, and begins anew
        kill(cluster.members[member])
    for member in MEMBERS:
        cluster.start_member(member)
    assert cluster.viewed(without("b"), of=["x"])
    cluster.start_store("b")
    assert cluster.viewed(NODES)
    assert cluster.found("b")
    check(cluster, "b")


def test_an_etcd_that_comes_back_empty_is_filled_again_and_no_node_leaves(cluster: Cluster) -> None:
    cluster.ask("begin", "")
    for member in MEMBERS:
        kill(cluster.members[member])
    for member in MEMBERS:
        cluster.start_member(member, new=True)
    cluster.wait_for_etcd()
    until = time.monotonic() + 30
    while cluster.registered() != [*NODES]:
        assert time.monotonic() < until, "the stores did not register again"
        time.sleep(0.1)
    for report in check(cluster).values():
        assert views_of(report) == {NODES}
