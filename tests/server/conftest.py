"""What tests of servers share: one, its clients, and what clusters and tenants need."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster_io.etcd import Etcd
from tests.server.raw_tables import Tables, map_tables
from tests.server.running import KIB, Peer, RunningServer, make_config, running_server
from tests.server.tenants_files import Serving, write


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """One for all tests of this folder, which take clusters of their own."""
    running = Etcd(tmp_path_factory.mktemp("etcd"))
    yield running
    running.close()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RunningServer]:
    """One that listens on TCP and on a Unix socket."""
    async with running_server(make_config(unix_socket=str(tmp_path / "socket"))) as server:
        yield server


async def connect(server: RunningServer) -> Peer:
    return await (server.peer() if server.server.addresses.unix_socket is None else server.local_peer())


@pytest.fixture
async def peer(server: RunningServer) -> Peer:
    """A client of the server, over its Unix socket if it has one."""
    return await connect(server)


@pytest.fixture
async def other(server: RunningServer) -> Peer:
    """Another client of the server."""
    return await connect(server)


@pytest.fixture
async def tables(peer: Peer) -> Tables:
    """The tables that the server shares with the client."""
    return await map_tables(peer)


@pytest.fixture
def serving(tmp_path: Path) -> Serving:
    """Returns serving(text of the tenants file, **settings): a running server, by TCP
    and by a Unix socket.
    """

    @asynccontextmanager
    async def serve(text: str, **settings: Any) -> AsyncIterator[RunningServer]:
        settings = {"prealloc_bytes": 128 * KIB, "unix_socket": str(tmp_path / "s"), **settings}
        async with running_server(make_config(tenants=write(tmp_path, text), **settings)) as server:
            yield server

    return serve
