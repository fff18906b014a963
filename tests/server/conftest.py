"""What tests of servers in clusters share."""

from collections.abc import Iterator

import pytest

from tests.cluster_io.etcd import Etcd


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """One for all tests of this folder, which take clusters of their own."""
    running = Etcd(tmp_path_factory.mktemp("etcd"))
    yield running
    running.close()
