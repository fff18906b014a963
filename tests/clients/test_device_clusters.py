"""Memory of a GPU, and the nodes of a cluster, over a GPU and devices made of memory
copies.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
import torch

import infinistore
from infinistore.errors import DeviceMemoryUnreachable
from tests.clients.rdma_serving import serving_two
from tests.transports.fake_gpu import FakeGpu, gpu_in_use
from tests.transports.fake_rdma import Fabric

REMOTE_ACCESS = 10
KEYS = [f"key-{number}" for number in range(64)]  # ports decide who owns which, and each owns some
BLOCK = 512
CONTENT = bytes(range(256)) * (len(KEYS) * BLOCK // 256)


@asynccontextmanager
async def two_nodes() -> AsyncGenerator[tuple[Fabric, FakeGpu, str, tuple[list[str], list[str]]], None]:
    async with serving_two(KEYS) as (fabric, servers, url, shares):
        with gpu_in_use(fabric) as gpu:
            yield fabric, gpu, url, shares
        for server in servers:
            await server.quiet()


def filled(gpu: FakeGpu) -> torch.Tensor:
    tensor = gpu.tensor(len(CONTENT))
    gpu.write(tensor, CONTENT)
    return tensor


def blocks_of(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    return {key: tensor[i * BLOCK : (i + 1) * BLOCK] for i, key in enumerate(KEYS)}


async def test_a_batch_goes_straight_between_a_gpu_and_the_pools_of_its_owners() -> None:
    async with two_nodes() as (fabric, gpu, url, shares), infinistore.open_store(url) as store:
        source, target = filled(gpu), gpu.tensor(len(CONTENT))
        await store.register(source)
        await store.register(target)
        known = fabric.registered_bytes
        await store.put_many(blocks_of(source))
        before = fabric.moved_bytes
        assert await store.get_many_into(blocks_of(target)) == [BLOCK] * len(KEYS)
        assert gpu.read(target) == CONTENT
        assert len(CONTENT) <= fabric.moved_bytes - before < len(CONTENT) + BLOCK
        assert fabric.registered_bytes == known, "registered once for all nodes, and nothing was staged"
        assert all(shares)
        cluster = (await store.stats()).cluster
        assert cluster is not None
        assert [node.stats and node.stats.transport for node in cluster.nodes] == ["rdma", "rdma"]


async def test_a_transfer_that_fails_to_one_node_is_an_error_that_names_it() -> None:
    """For memory of a GPU there is no other way, as with a single store."""
    async with two_nodes() as (fabric, gpu, url, (first, second)), infinistore.open_store(url) as store:
        source = filled(gpu)
        await store.register(source)
        blocks = blocks_of(source)
        fabric.statuses.append(REMOTE_ACCESS)
        with pytest.raises(DeviceMemoryUnreachable, match=r"remote access error.*the node 127\.0\.0\.1:"):
            await store.put_many({key: blocks[key] for key in first})
        assert await store.exists_many(first) == [False] * len(first)
        await store.put_many({key: blocks[key] for key in second})
        assert await store.exists_many(second) == [True] * len(second)
