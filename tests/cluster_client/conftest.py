"""Clusters for the tests of their clients."""

from collections.abc import Iterator

import pytest

from tests.cluster_client.clusters import Cluster, running_cluster


@pytest.fixture(scope="session")
def three_servers() -> Iterator[Cluster]:
    with running_cluster(3) as cluster:
        yield cluster


@pytest.fixture
def three(three_servers: Cluster) -> Cluster:
    """Three servers, empty and awake."""
    three_servers.clear()
    return three_servers
