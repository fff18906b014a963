"""Clusters for the tests of their clients."""

from collections.abc import Iterator

import pytest

from tests.clients.conftest import loops
from tests.cluster_client.clusters import Cluster, running_cluster

__all__ = ["loops", "three", "three_servers"]


@pytest.fixture(scope="session")
def three_servers() -> Iterator[Cluster]:
    with running_cluster(3) as cluster:
        yield cluster


@pytest.fixture
def three(three_servers: Cluster) -> Cluster:
    """Three servers, empty and awake."""
    three_servers.clear()
    return three_servers
