"""Clients of a server with shards: they know only the URL of a plain server."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import attrs
import pytest
import trio

from infinistore import aio, blocking, open_store
from infinistore.client.cluster.opening import cluster_of, options_of_shard
from infinistore.client.options import StoreUrl, make_options, parse_url
from infinistore.config import ServerConfig
from infinistore.errors import StoreUnavailable
from infinistore.protocol.messages import Shard
from infinistore.server.environment import Environment
from infinistore.server.listeners import ServerAddresses
from tests.cluster_client.clusters import PATIENT
from tests.ports import own_ports
from tests.server.running import Peer, RunningServer, make_config, running_server

from .conftest import HOST, RunningShards

KEYS = [f"key {number}" for number in range(40)]


def blocks_of(prefix: str) -> list[tuple[str, bytes]]:
    return [(prefix + key, key.encode()) for key in KEYS]


def urls(server: RunningShards) -> list[str]:
    """Every URL that leads to it: any scheme, any shard."""
    found = []
    for shard in server.shards():
        found += [f"{scheme}://{HOST}:{shard['port']}" for scheme in ("infinistore", "tcp", "shm")]
        found += [f"{scheme}://{shard['unix_socket']}" for scheme in ("unix", "shm")]
    return found


def keys_of(blocks: Sequence[tuple[str, bytes]]) -> list[str]:
    return [key for key, _ in blocks]


def values_of(blocks: Sequence[tuple[str, bytes]]) -> list[bytearray | None]:
    return [bytearray(data) for _, data in blocks]


@pytest.mark.process
def test_what_is_put_by_one_url_is_found_by_every_other_and_lies_in_both_shards(two_shards: RunningShards) -> None:
    prefix = secrets.token_hex(4)
    blocks = blocks_of(prefix)
    with blocking.open_store(urls(two_shards)[0], **PATIENT) as store:
        store.put_many(blocks)
    for url in urls(two_shards):
        with blocking.open_store(url, **PATIENT) as store:
            assert store.get_many(keys_of(blocks)) == values_of(blocks), url
            assert store.match_prefix([*keys_of(blocks), "missing"]) == len(blocks)
    shares = [one["store"]["keys"] for one in two_shards.told("/stats")["shards"]]
    assert min(shares) > 0


@pytest.mark.process
@pytest.mark.parametrize("lazy", [False, True])
async def test_the_trio_client_goes_on_with_all_shards(two_shards: RunningShards, lazy: bool) -> None:
    blocks = blocks_of(secrets.token_hex(4))
    async with open_store(f"tcp://{HOST}:{two_shards.port}", lazy=lazy, **PATIENT) as store:
        await store.put_many(blocks)
        assert await store.get_many(keys_of(blocks)) == values_of(blocks)
        statistics = await store.stats(details=True)
        assert statistics.store.capacity_bytes == 8 << 20
        assert statistics.details is not None
        assert sum(one.count for one in statistics.details.operations if one.kind == "put") >= 2
        assert await store.delete(keys_of(blocks)) == len(blocks)


@pytest.mark.process
@pytest.mark.parametrize("lazy", [False, True])
def test_the_other_clients_go_on_with_all_shards(two_shards: RunningShards, lazy: bool) -> None:
    url, blocks = f"tcp://{HOST}:{two_shards.port}", blocks_of(secrets.token_hex(4))

    async def main() -> list[bytearray | None]:
        async with aio.open_store(url, lazy=lazy, **PATIENT) as store:
            await store.put_many(blocks)
            return await store.get_many(keys_of(blocks))

    assert asyncio.run(main()) == values_of(blocks)
    with blocking.open_store(url, lazy=lazy, **PATIENT) as store:
        assert store.get_many(keys_of(blocks)) == values_of(blocks)


# Servers in this process that say that they are shards


@asynccontextmanager
async def shards(count: int, ports: Sequence[int] = ()) -> AsyncGenerator[list[RunningServer], None]:
    """Servers of this process that are shards of one, at these ports, and then at
    others. One shard is a plain server.
    """
    ports = [*ports, *own_ports(max(0, count - len(ports)))]
    known: list[Shard] = []
    met = trio.Event()

    async def meet(addresses: ServerAddresses) -> Sequence[Shard]:
        if count == 1:
            return ()
        known.append(Shard(addresses.port))
        if len(known) == count:
            met.set()
        await met.wait()
        return sorted(known, key=lambda shard: ports.index(shard.port))

    found: list[RunningServer | None] = [None] * count

    async def run(index: int, nursery: trio.Nursery, *, task_status: trio.TaskStatus[None]) -> None:
        config: ServerConfig = make_config(service_port=ports[index])
        async with running_server(config, Environment(meet_shards=meet)) as server:
            found[index] = server
            task_status.started()
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        async with trio.open_nursery() as starting:
            for index in range(count):
                starting.start_soon(nursery.start, run, index, nursery)
        yield [server for server in found if server is not None]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("counts", [(1, 2), (2, 1), (2, 3), (3, 2)])
async def test_a_store_that_is_open_finds_that_its_server_has_other_shards_now(counts: tuple[int, int]) -> None:
    before, after = counts
    blocks = blocks_of("")
    async with AsyncExitStack() as stores:
        async with shards(before) as servers:
            ports = [server.server.addresses.port for server in servers]
            store = await stores.enter_async_context(open_store(f"tcp://127.0.0.1:{ports[0]}", **PATIENT))
            await store.put_many(blocks)
            assert [len(server.core) > 0 for server in servers] == [True] * before
        async with shards(after, ports) as servers:
            while True:  # the first calls may find their connections broken, and keys count as missing
                try:
                    await store.put_many(blocks)
                    if await store.get_many(keys_of(blocks)) == values_of(blocks):
                        break
                except StoreUnavailable:
                    pass
            assert [len(server.core) > 0 for server in servers] == [True] * after
            async with open_store(f"tcp://127.0.0.1:{ports[0]}", **PATIENT) as other:
                assert await other.get_many(keys_of(blocks)) == values_of(blocks)


async def test_a_client_that_sees_no_shards_uses_the_one_that_it_connects_to() -> None:
    async with shards(2) as servers:
        peer = Peer(await servers[0].connect())
        await peer.hello()
        assert servers[0].server.telemetry.statistics().connections_open == 1
        assert servers[1].server.telemetry.statistics().connections_open == 0
        peer.close()


# What a store makes of what it is told


def test_shards_are_reached_as_the_server_was() -> None:
    told = [Shard(5000, "/run/a/5000.sock"), Shard(5001, "/run/a/50 01.sock")]

    def addresses(url: str) -> list[str]:
        place: Any = cluster_of(parse_url(url), told).place
        assert [node.id for node in place.nodes] == ["shard-0", "shard-1"]
        return [node.address for node in place.nodes]

    assert addresses("tcp://host:5001?deadline_s=3") == ["tcp://host:5000", "tcp://host:5001"]
    assert addresses("infinistore://[::1]") == ["infinistore://[::1]:5000", "infinistore://[::1]:5001"]
    found = [parse_url(one) for one in addresses("shm:///run/a/5000.sock")]
    assert found == [StoreUrl("shm", "", 0, shard.unix_socket, {}) for shard in told]


@pytest.mark.parametrize("socket", ["", "/run/b/5001.sock"])
def test_a_socket_in_a_folder_that_the_caller_did_not_name_is_not_trusted(socket: str) -> None:
    with pytest.raises(StoreUnavailable, match=r"no socket in the same folder.*use infinistore://HOST:PORT"):
        cluster_of(parse_url("unix:///run/a/5000.sock"), [Shard(5000, "/run/a/5000.sock"), Shard(5001, socket)])


@pytest.mark.parametrize(("wanted", "count", "each"), [(8, 2, 4), (8, 3, 3), (8, 16, 2), (1, 4, 1), (3, 1, 3)])
def test_the_connections_of_a_store_are_shared_by_the_shards(wanted: int, count: int, each: int) -> None:
    _, options = make_options("tcp://host", {"max_connections": wanted})
    assert options_of_shard(options, count) == attrs.evolve(options, max_connections=each)
