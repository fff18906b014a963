"""Servers that the tests of several engines share."""

from collections.abc import Iterator

import pytest

from infinistore import blocking
from tests.bad_days.servers import ServerProcess, running_server_process
from tests.cluster_client.clusters import Cluster, running_cluster


@pytest.fixture(scope="session")
def shared_server() -> Iterator[ServerProcess]:
    with running_server_process("--unix-socket", "auto") as server:
        yield server


@pytest.fixture
def server(shared_server: ServerProcess) -> Iterator[ServerProcess]:
    """A server with an empty pool of 16 MiB, for tests that leave it alive."""
    yield shared_server
    with blocking.open_store(shared_server.url) as store:
        store.purge()


@pytest.fixture
def mortal_server() -> Iterator[ServerProcess]:
    """A server for tests that kill it."""
    with running_server_process() as server:
        yield server


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Three servers, each with an empty pool of 16 MiB, for tests that stop them."""
    with running_cluster(3, prealloc_bytes=16 * 1024 * 1024) as running:
        yield running
