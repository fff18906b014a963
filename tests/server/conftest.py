"""What tests of servers in clusters share, and those of servers with tenants."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster_io.etcd import Etcd
from tests.server.running import KIB, RunningServer, make_config, running_server
from tests.server.tenants_files import Serving, write


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """One for all tests of this folder, which take clusters of their own."""
    running = Etcd(tmp_path_factory.mktemp("etcd"))
    yield running
    running.close()


@pytest.fixture
def serving(tmp_path: Path) -> Serving:
    """Returns serving(text of the tenants file, **settings): a running server, by TCP
    and by a Unix socket, of which clients leave nothing behind.
    """

    @asynccontextmanager
    async def serve(text: str, **settings: Any) -> AsyncIterator[RunningServer]:
        settings = {"prealloc_bytes": 128 * KIB, "unix_socket": str(tmp_path / "s"), **settings}
        async with running_server(make_config(tenants=write(tmp_path, text), **settings)) as server:
            yield server
            await server.left_by_all()

    return serve
