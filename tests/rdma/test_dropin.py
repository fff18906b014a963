"""The programming interface of the original over RDMA: what its TYPE_RDMA was
made for.
"""

import asyncio
import ctypes
from collections.abc import Iterator

import pytest

import infinistore
from infinistore import TYPE_RDMA, ClientConfig, InfinityConnection
from infinistore.dropin.registered_server import RegisteredServer
from tests.rdma.conftest import Host
from tests.server.running import MIB, make_config

BLOCKS = [(f"layer{number}", number * 64 * 1024) for number in range(16)]
SIZE = 16 * 64 * 1024


def pointer(memory: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@pytest.fixture
def connection(hosts: tuple[Host, Host]) -> Iterator[InfinityConnection]:
    """A connection from the one end to a server at the other."""
    there, here = hosts
    config = make_config(host=there.address, insecure=True, dev_name=there.device, prealloc_bytes=8 * MIB)
    server = RegisteredServer(config)
    client = ClientConfig(host_addr=there.address, service_port=server.addresses.port, connection_type=TYPE_RDMA)
    client.dev_name = here.device
    with InfinityConnection(client) as connection:
        connection.connect()
        yield connection
    server.stop()


def test_registered_memory_is_written_and_read_by_rdma(connection: InfinityConnection) -> None:
    source, target = bytearray(range(256)) * (SIZE // 256), bytearray(SIZE)
    for memory in (source, target):
        assert connection.register_mr(pointer(memory), SIZE) == 0

    asyncio.run(connection.rdma_write_cache_async(BLOCKS, 64 * 1024, pointer(source)))
    asyncio.run(connection.rdma_read_cache_async(BLOCKS, 64 * 1024, pointer(target)))

    assert connection.transport == "rdma"
    assert source == target


@pytest.mark.nightly
def test_a_read_is_all_or_nothing_and_may_have_room_to_spare(connection: InfinityConnection) -> None:
    memory = bytearray(b"v" * SIZE)
    connection.register_mr(pointer(memory), SIZE)
    asyncio.run(connection.rdma_write_cache_async([("key", 0)], SIZE // 2, pointer(memory)))
    memory[:] = b"r" * SIZE

    with pytest.raises(infinistore.InfiniStoreKeyNotFound):
        asyncio.run(connection.rdma_read_cache_async([("key", 0), ("missing", 0)], SIZE, pointer(memory)))
    with pytest.raises(infinistore.BufferTooSmall):
        asyncio.run(connection.rdma_read_cache_async([("key", 0)], SIZE // 2 - 1, pointer(memory)))
    assert memory == b"r" * SIZE
    asyncio.run(connection.rdma_read_cache_async([("key", 0)], SIZE, pointer(memory)))

    assert memory == b"v" * (SIZE // 2) + b"r" * (SIZE - SIZE // 2)
