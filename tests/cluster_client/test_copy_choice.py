"""Which of two servers with the same blocks clients read from."""

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
import trio
import trio.testing

import infinistore
from infinistore.client.extension import Environment
from infinistore.client.requests import Get
from infinistore.cluster.membership import Node
from tests.cluster_client.clusters import Given
from tests.cluster_client.silent_network import Network

GROUP = [f"{{prompt}}/{number}" for number in range(8)]
BLOCKS = {key: key.encode() * 100 for key in GROUP}
Open = Callable[..., Awaitable[Any]]


def two(zones: tuple[str, str] = ("", ""), hosts: tuple[str, str] = ("", "")) -> Given:
    nodes = [
        Node(name, f"infinistore://{name}:1", zone=zone, host=host)
        for name, zone, host in zip("ab", zones, hosts, strict=True)
    ]
    return Given(nodes, copies=2)


def in_virtual_time(given: Given, body: Callable[[Network, Open], Awaitable[None]]) -> None:
    """Run `body` with two servers and a function that opens stores."""

    async def main() -> None:
        async with Network().running() as network, AsyncExitStack() as stack:

            async def open_client(name: str, host: str = "", **options: Any) -> Any:
                environment = Environment(connect=network.connect, membership=lambda url: given, host_name=lambda: host)
                opened = infinistore.open_store(
                    "infinistore+static://nobody:1", environment=environment, name=name, **options
                )
                return await stack.enter_async_context(opened)

            await body(network, open_client)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


async def read(client: Any, times: int) -> None:
    for _ in range(times):
        await client.get_many(GROUP)


def hits(network: Network) -> tuple[int, int]:
    return network.core("a").hits, network.core("b").hits


def test_both_copies_of_a_hot_group_serve_their_part_of_the_reads() -> None:
    async def body(network: Network, open_client: Open) -> None:
        clients = [await open_client(f"client {number}") for number in range(8)]
        await clients[0].put_many(BLOCKS)
        for _ in range(200):
            for client in clients:
                assert await client.get_many(GROUP) == list(BLOCKS.values())
        first, second = hits(network)
        assert first + second == 200 * 8 * len(GROUP)
        assert 0.4 < first / (first + second) < 0.6

    in_virtual_time(two(), body)


@pytest.mark.parametrize(
    ("given", "options"),
    [
        (two(zones=("east", "west")), {"zone": "west"}),
        (two(hosts=("far", "here")), {"host": "here"}),
        (two(zones=("east", "west"), hosts=("far", "here")), {"host": "here", "zone": "east"}),
    ],
    ids=["zone", "machine", "machine before zone"],
)
def test_reads_stay_near(given: Given, options: dict[str, str]) -> None:
    async def body(network: Network, open_client: Open) -> None:
        client = await open_client("client", **options)
        await client.put_many(BLOCKS)
        buffer = bytearray(1000)
        for _ in range(100):
            await read(client, 1)
            await client.get_into(GROUP[0], buffer)
            async with client.lease(GROUP) as views:
                assert views == list(BLOCKS.values())
        first, second = hits(network)
        assert (first, second) == (0, 100 * (2 * len(GROUP) + 1))
        # What is not there is still found at the other one.
        network.core("b").purge()
        assert await client.get_many(GROUP) == list(BLOCKS.values())

    in_virtual_time(given, body)


@pytest.mark.parametrize("call", ["match_prefix", "prefetch"])
def test_a_hold_is_where_the_blocks_are_read(call: str) -> None:
    async def body(network: Network, open_client: Open) -> None:
        for number in range(8):
            client = await open_client(f"client {number}")
            await client.put_many(BLOCKS)
            hold = (await getattr(client, call)(GROUP, hold_s=60)).hold
            before = hits(network)
            await client.get_many(GROUP)
            read_at = "ab"[[old != new for old, new in zip(before, hits(network), strict=True)].index(True)]
            assert hold.partition("=")[0] == read_at

    in_virtual_time(two(), body)


def test_a_copy_that_is_twice_as_slow_is_read_rarely_until_it_has_recovered() -> None:
    async def body(network: Network, open_client: Open) -> None:
        client = await open_client("client", zone="east")
        await client.put_many(BLOCKS)
        slow, fast = client.calls.nodes.begin().nodes
        slow.answers.note(Get, len(GROUP), 0.1)
        fast.answers.note(Get, len(GROUP), 0.01)
        await read(client, 160)
        first, second = hits(network)
        assert (first // len(GROUP), second // len(GROUP)) == (10, 150)
        await read(client, 480)  # its answers took no time
        assert slow.answers.usual_s(Get, len(GROUP)) < 0.002
        before = hits(network)
        await read(client, 16)
        assert hits(network) == (before[0] + 16 * len(GROUP), before[1])

    in_virtual_time(two(zones=("east", "west")), body)


def test_copies_that_differ_by_what_a_busy_processor_takes_keep_their_order() -> None:
    async def body(network: Network, open_client: Open) -> None:
        client = await open_client("client", zone="east")
        await client.put_many(BLOCKS)
        near, far = client.calls.nodes.begin().nodes
        near.answers.note(Get, len(GROUP), 0.0019)
        far.answers.note(Get, len(GROUP), 0.0001)
        await read(client, 20)
        assert hits(network) == (20 * len(GROUP), 0)

    in_virtual_time(two(zones=("east", "west")), body)
