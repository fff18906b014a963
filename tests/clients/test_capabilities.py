"""Servers that lack a capability, as a server of another implementation may: clients do
without.
"""

from pathlib import Path

import pytest

from infinistore.client import open_store
from infinistore.errors import StoreUnavailable
from infinistore.protocol.versions import OFFER, Capability
from tests.clients.stores import servers_lack
from tests.server.running import make_config, running_server

BLOCK = bytes(range(256)) * 1024


@pytest.mark.parametrize(
    ("missing", "transport"),
    [
        (Capability.SHARED_MEMORY, "tcp"),
        (Capability.TABLES, "shm"),
        (Capability.COMMIT_WORD, "shm"),
        (Capability.LIVENESS_PIPE, "shm"),
        (OFFER.capabilities, "tcp"),
    ],
    ids=lambda value: getattr(value, "name", value) or "all",
)
async def test_a_client_does_without_what_the_server_lacks(missing: Capability, transport: str, tmp_path: Path) -> None:
    config = make_config(unix_socket=str(tmp_path / "socket"))
    with servers_lack(missing):
        async with running_server(config) as server, open_store(server.url.replace("tcp", "infinistore")) as store:
            for _ in range(3):
                await store.put("long", BLOCK)
                await store.put("short", b"x")
                assert await store.get("long") == BLOCK
                assert await store.get("short") == b"x"
                async with store.lease(["long"]) as lease:
                    assert len(lease) == 1
            stats = await store.stats()
            assert stats.transport == transport
            if transport == "tcp":
                assert "the server's release has no shm" in stats.transport_reason


async def test_a_client_that_asks_for_shared_memory_hears_that_the_server_lacks_it(tmp_path: Path) -> None:
    config = make_config(unix_socket=str(tmp_path / "socket"))
    with servers_lack(OFFER.capabilities):
        async with running_server(config):
            with pytest.raises(StoreUnavailable, match="the server's release has no shm"):
                async with open_store(f"shm://{tmp_path / 'socket'}"):
                    pass
