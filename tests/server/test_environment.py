"""What a server takes from its machine is given to it: chance, time and threads."""

import logging
from collections.abc import Callable
from random import Random, SystemRandom
from typing import Any

import pytest
import trio

from infinistore.core.index import BYTES_PER_KEY
from infinistore.host import MemoryLimit
from infinistore.protocol.messages import Keys, MatchPrefix, MatchPrefixReply
from infinistore.server.environment import Environment
from tests.server.running import make_config, running_server, simulated_server
from tests.server.test_bad_peers import put


async def test_the_ids_of_servers_and_holds_come_from_the_given_generator() -> None:
    async def ids(environment: Environment) -> list[Any]:
        async with simulated_server(environment=environment) as server:
            peer = await server.peer()
            await put(peer, "a", b"value")
            found: list[Any] = [server.server.context.hello.instance]
            for _ in range(3):
                reply = await peer.ask(MatchPrefix(Keys(["a"]), hold_us=1_000_000))
                assert isinstance(reply, MatchPrefixReply)
                found.append(reply.hold)
            return found

    first = await ids(Environment(random=Random(7)))
    assert await ids(Environment(random=Random(7))) == first
    assert max(first[1:]) >= 2**63  # all 64 bits
    assert set(await ids(Environment())).isdisjoint(first)


def test_nobody_can_foresee_the_ids_of_a_server() -> None:
    assert isinstance(Environment().random, SystemRandom)


async def test_holds_end_by_the_given_clock() -> None:
    now = 5.0
    async with simulated_server(environment=Environment(clock=lambda: now)) as server:
        peer = await server.peer()
        await put(peer, "a", b"value")
        await peer.ask(MatchPrefix(Keys(["a"]), hold_us=1_000_000))
        assert server.core.expire_holds() == 6.0
        now = 6.0
        assert server.core.expire_holds() is None


async def test_a_server_starts_threads_as_it_is_told_and_grows_in_them() -> None:
    ran: list[Callable[..., Any]] = []

    async def run_at_once(work: Callable[..., Any], *arguments: Any) -> Any:
        ran.append(work)
        await trio.lowlevel.checkpoint()
        return work(*arguments)

    config = make_config(auto_increase=True, max_pool_bytes=8 * 1024 * 1024, manage_port=None)
    async with running_server(config, Environment(run_in_thread=run_at_once)) as server:
        begun = len(ran)
        assert begun == 2  # the first arena, and the movers
        server.loses_clients = True
        server.core.reserve(server.core.open_client("a"), [1024 * 1024] * 3)
        peer = await server.peer()
        await put(peer, "a", bytes(1024 * 1024))
        await put(peer, "b", bytes(1024 * 1024))
        assert len(ran) == begun + 1
        assert len(server.core.pool.arenas) == 2


@pytest.mark.parametrize(("missing_bytes", "warnings"), [(0, []), (1, ["the index of keys may outgrow the memory"])])
async def test_a_pool_of_more_small_blocks_than_memory_has_keys_for_is_warned_of(
    missing_bytes: int, warnings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(prealloc_bytes=1024 * 1024, minimal_allocate_bytes=1024, manage_port=None)
    left = MemoryLimit(1024 * BYTES_PER_KEY - missing_bytes, "memory.max of a test")
    with caplog.at_level(logging.WARNING, "infinistore.server"):
        async with running_server(config, Environment(available_memory=lambda: left)):
            pass
    assert [record.message for record in caplog.records] == warnings
