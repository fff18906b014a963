"""Servers that the tests of several engines share."""

from collections.abc import Iterator
from typing import Final

import pytest

from infinistore import blocking
from tests.bad_days.servers import ServerProcess, running_server_process
from tests.cluster_client.clusters import Cluster, Member, running_cluster

PROCESSES: Final = {"shared_server", "mortal_server"}


def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests with a server in a process of its own are of that level."""
    if PROCESSES.intersection(getattr(item, "fixturenames", ())):
        item.add_marker(pytest.mark.process)


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
def own_server() -> Iterator[Member]:
    """A server in this process, for tests that stop it and start it again."""
    with running_cluster(1, prealloc_bytes=16 * 1024 * 1024) as running:
        yield running.members[0]


class PatientCluster(Cluster):
    """No node is given up because the machine is busy: those that are away refuse."""

    def url(self, *options: str) -> str:
        return super().url("deadline_s=600", "lookup_deadline_s=600", *options)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Three servers, each with an empty pool of 16 MiB, for tests that stop them."""
    with running_cluster(3, prealloc_bytes=16 * 1024 * 1024) as running:
        yield PatientCluster(running.members)
