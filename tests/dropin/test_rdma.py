"""Connections of TYPE_RDMA where there is RDMA: between devices of this process, which
check what real ones check.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import infinistore
from infinistore import InfinityConnection
from infinistore.dropin import memory as dropin_memory
from infinistore.dropin.registered_server import RegisteredServer
from tests.dropin.conftest import connected, pointer, read, register, running_server, write
from tests.transports.fake_rdma import Fabric, fabric_in_use

if TYPE_CHECKING:
    from tests.transports.fake_gpu import FakeGpu

SIZE = 300_000


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    with fabric_in_use() as fabric:
        yield fabric


@pytest.fixture
def server(fabric: Fabric, tmp_path: Path) -> Iterator[RegisteredServer]:
    """A server with RDMA and a Unix socket."""
    with running_server(unix_socket=str(tmp_path / "s")) as running:
        yield running


@pytest.fixture
def connection(server: RegisteredServer) -> Iterator[InfinityConnection]:
    with connected(server.addresses.port, dev_name="fake1") as connection:
        yield connection


def move(connection: InfinityConnection, memory: bytearray) -> None:
    """Write the memory, and read it back."""
    blocks = [(f"key{offset}", offset) for offset in range(0, SIZE, SIZE // 3)]
    before = bytes(memory)
    write(connection, blocks, SIZE // 3, memory)
    memory[:] = bytes(SIZE)
    read(connection, blocks, SIZE // 3, memory)
    assert memory == before


def test_rdma_comes_before_shared_memory_if_a_device_is_named(connection: InfinityConnection) -> None:
    memory = register(connection, bytearray(range(250)) * (SIZE // 250))

    assert connection.transport == "rdma"
    move(connection, memory)


def test_registered_memory_is_known_to_the_device_until_the_connection_is_closed(
    connection: InfinityConnection, fabric: Fabric
) -> None:
    memory = register(connection, bytearray(b"v" * SIZE))
    move(connection, memory)

    def known() -> list[tuple[int, int]]:
        regions = [region for device in fabric.devices for region in device.regions.values()]
        return [(region.address, region.length) for region in regions if region.address == pointer(memory)]

    assert known() == [(pointer(memory), SIZE)]
    connection.register_mr(pointer(memory), SIZE // 3)
    assert known() == [(pointer(memory), SIZE // 3)]
    connection.register_mr(pointer(memory), SIZE)
    connection.reconnect()
    move(connection, memory)
    assert known() == [(pointer(memory), SIZE)]
    connection.close()
    assert known() == []


@pytest.fixture
def gpu(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> "Iterator[FakeGpu]":
    """A GPU, whose memory is nowhere in the map of this process, and nor is any
    other.
    """
    pytest.importorskip("torch")
    from tests.transports.fake_gpu import gpu_in_use

    monkeypatch.setattr(dropin_memory, "_mapped_spans", lambda: iter(()))
    with gpu_in_use(fabric) as gpu:
        yield gpu


@pytest.mark.parametrize("as_tensor", [True, False])
def test_memory_of_a_gpu_is_moved_by_rdma(connection: InfinityConnection, gpu: "FakeGpu", as_tensor: bool) -> None:
    content = bytes(range(250)) * (SIZE // 250)
    tensor = gpu.tensor(SIZE)
    gpu.told.append(lambda: gpu.write(tensor, content))
    address = tensor.data_ptr()
    assert (connection.register_mr(tensor) if as_tensor else connection.register_mr(address, SIZE)) == 0

    blocks = [(f"key{offset}", offset) for offset in range(0, SIZE, SIZE // 3)]
    asyncio.run(connection.rdma_write_cache_async(blocks, SIZE // 3, address))
    gpu.write(tensor, bytes(SIZE))
    asyncio.run(connection.rdma_read_cache_async(blocks, SIZE // 3, address))

    assert gpu.read(tensor) == content
    with pytest.raises(infinistore.InfiniStoreKeyNotFound):
        asyncio.run(connection.rdma_read_cache_async([("missing", 0)], SIZE // 3, address))


def test_memory_that_is_neither_the_processes_nor_a_gpus_is_refused(
    connection: InfinityConnection, gpu: "FakeGpu"
) -> None:
    tensor = gpu.tensor(SIZE)
    for address, size in ((4096, 10), (tensor.data_ptr(), 1 << 30)):
        with pytest.raises(infinistore.InvalidRequest, match="not memory of this process"):
            connection.register_mr(address, size)


def test_without_rdma_memory_of_a_gpu_is_refused(server: RegisteredServer, fabric: Fabric, gpu: "FakeGpu") -> None:
    fabric.absent = "no device"
    with (
        connected(server.addresses.port) as connection,
        pytest.raises(infinistore.InvalidRequest, match=r"RDMA alone .* of cuda:0 .* goes by shm"),
    ):
        connection.register_mr(gpu.tensor(SIZE))


def test_a_read_with_a_missing_key_writes_nothing(connection: InfinityConnection) -> None:
    memory = register(connection, bytearray(b"v" * SIZE))
    move(connection, memory)
    memory[:] = bytes(SIZE)

    with pytest.raises(infinistore.InfiniStoreKeyNotFound):
        read(connection, [("key0", SIZE // 3), ("missing", 0)], SIZE // 3, memory)

    assert not any(memory)


def test_a_value_smaller_than_the_block_size_leaves_the_rest_as_it_is(connection: InfinityConnection) -> None:
    memory = register(connection, bytearray(b"v" * SIZE))
    write(connection, [("key", 0)], SIZE // 2, memory)
    memory[:] = b"r" * SIZE

    read(connection, [("key", 0)], SIZE, memory)

    assert memory == b"v" * (SIZE // 2) + b"r" * (SIZE - SIZE // 2)
