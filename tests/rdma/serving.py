"""Servers and stores on the two devices: the server has one end of the cable, the
client the other.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import infinistore
from infinistore.client import AsyncStore
from tests.rdma.conftest import Host
from tests.server.running import MIB, RunningServer, make_config, running_server

__all__ = ["POOL_BYTES", "opened", "serving", "url"]

POOL_BYTES = 24 * MIB  # registering costs 10 ms for each MiB in the virtual machine


@asynccontextmanager
async def serving(host: Host, **settings: Any) -> AsyncGenerator[RunningServer, None]:
    plain = {
        "dev_name": host.device,
        "require_rdma": True,
        "prealloc_bytes": POOL_BYTES,
        "minimal_allocate_bytes": 4096,
    }
    async with running_server(make_config(**{**plain, **settings})) as server:
        yield server


def url(server: RunningServer, host: Host, *, forced: bool = True) -> str:
    """The URL of a server for a client on this host."""
    scheme = "rdma" if forced else "infinistore"
    port = server.server.addresses.port
    return f"{scheme}://127.0.0.1:{port}?device={host.device}&inline_bytes=0&staging_bytes={MIB}"


@asynccontextmanager
async def opened(
    hosts: tuple[Host, Host], *, forced: bool = True, **settings: Any
) -> AsyncGenerator[tuple[RunningServer, AsyncStore], None]:
    async with (
        serving(hosts[0], **settings) as server,
        infinistore.open_store(url(server, hosts[1], forced=forced), deadline_s=300) as store,
    ):
        yield server, store
