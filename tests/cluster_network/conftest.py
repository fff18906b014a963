"""A cluster on hosts of its own. It takes minutes and root, so it is a target of its
own: `make test-cluster`. There, what root lacks is a failure.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import attrs
import pytest

from tests.cluster_network.checks import do_without
from tests.cluster_network.cluster import HOSTS, NODES, Cluster
from tests.cluster_network.network import network, why_not
from tests.cluster_network.wall_clock import WallClock

FRESH_S = 30


@attrs.frozen
class Running:
    """The cluster, and the wall clock of its store `a`."""

    cluster: Cluster
    clock: WallClock


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    if os.environ.get("INFINISTORE_TEST_NETWORK") != "1":
        pytest.skip("`make test-cluster` runs this")
    if reason := why_not():
        do_without(reason)
    folder: Path = tmp_path_factory.mktemp("network")
    with ExitStack() as stack:
        cluster = Cluster(stack.enter_context(network(*HOSTS)), folder)
        stack.callback(cluster.close)
        clock = WallClock(folder / "clock")
        cluster.start({"a": clock.environment})
        yield Running(cluster, clock)


@pytest.fixture
def cluster(running: Running) -> Cluster:
    """All of it, as it should be."""
    assert running.cluster.viewed(NODES, FRESH_S), running.cluster.ask("report")
    for node in NODES:
        assert running.cluster.found(node, FRESH_S), f"{node} lacks what it should have"
    return running.cluster


@pytest.fixture
def clock(running: Running) -> WallClock:
    return running.clock
