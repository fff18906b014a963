"""A pool that is full: what goes, what is refused, and how the pool grows."""

import errno
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from infinistore.config import ServerConfig
from infinistore.core import Arena
from infinistore.errors import DeadlineExceeded, LimitExceeded, OutOfMemory, ValueTooLarge
from infinistore.host import MemoryLimit
from infinistore.protocol.codec import pack_u64
from infinistore.protocol.messages import (
    CountReply,
    Evict,
    Exists,
    ExistsReply,
    Get,
    Keys,
    MatchPrefix,
    MatchPrefixReply,
    Put,
    PutReply,
    ReleaseHold,
)
from infinistore.server.environment import Environment
from tests.server.running import KIB, Peer, RunningServer, make_config, simulated_server, until

POOL = 64 * KIB


async def put(peer: Peer, key: str, size: int = 4 * KIB) -> None:
    value = (key.encode() * size)[:size]
    assert isinstance(await peer.ask(Put(Keys([key]), pack_u64([size]), checksums=False), value), PutReply)


async def present(peer: Peer, keys: list[str]) -> list[str]:
    reply = await peer.ask(Exists(Keys(keys)))
    assert isinstance(reply, ExistsReply)
    return [key for key, there in zip(keys, reply.present, strict=True) if there]


@pytest.fixture
async def server() -> AsyncIterator[RunningServer]:
    async with simulated_server(make_config(prealloc_bytes=POOL)) as server:
        yield server


async def test_a_full_pool_loses_what_was_not_used_for_longest(server: RunningServer, peer: Peer) -> None:
    keys = [f"key {number}" for number in range(12)]
    for key in keys:
        await put(peer, key)
    await peer.ask(Get(Keys(keys[:2]), pack_u64(), checksums=False))  # recently used from now on
    await peer.payload()
    for number in range(8):
        await put(peer, f"new {number}")
    left = await present(peer, keys)
    assert left == keys[:2] + keys[-(len(left) - 2) :]
    assert len(left) < 12
    assert server.core.statistics().evicted.on_demand == 12 - len(left)


async def test_nothing_is_evicted_for_a_batch_that_cannot_fit(peer: Peer) -> None:
    await put(peer, "stays")
    with pytest.raises(OutOfMemory):
        await peer.ask(Put(Keys(["a", "b"]), pack_u64([40 * KIB] * 2), checksums=False), bytes(80 * KIB))
    with pytest.raises(ValueTooLarge):
        await peer.ask(Put(Keys(["a"]), pack_u64([POOL + 1]), checksums=False), bytes(POOL + 1))
    assert await present(peer, ["stays", "a", "b"]) == ["stays"]


async def test_what_is_held_is_not_evicted_and_what_does_not_fit_beside_it_is_refused(peer: Peer) -> None:
    held = [f"held {number}" for number in range(4)]  # a quarter of the pool: all that holds may have
    for key in held:
        await put(peer, key)
    match = await peer.ask(MatchPrefix(Keys(held), hold_us=50_000_000))
    assert isinstance(match, MatchPrefixReply)
    assert match.matched == 4
    await put(peer, "one more")
    with pytest.raises(LimitExceeded):
        await peer.ask(MatchPrefix(Keys(["one more"]), hold_us=50_000_000))
    for number in range(40):
        await put(peer, f"other {number}")
    assert await present(peer, held) == held
    with pytest.raises(OutOfMemory, match="pinned"):
        await peer.ask(Put(Keys(["a"]), pack_u64([49 * KIB]), checksums=False), bytes(49 * KIB))
    assert await peer.ask(ReleaseHold(match.hold)) == CountReply(1)
    await put(peer, "a", 60 * KIB)


async def test_a_hold_ends_by_itself(peer: Peer, autojump_clock: MockClock) -> None:
    await put(peer, "held", 16 * KIB)
    await peer.ask(MatchPrefix(Keys(["held"]), hold_us=5_000_000))
    with pytest.raises(OutOfMemory):
        await peer.ask(Put(Keys(["a"]), pack_u64([60 * KIB]), checksums=False), bytes(60 * KIB))
    await trio.sleep(5)
    await put(peer, "a", 60 * KIB)


async def test_a_hold_outlives_its_connection(server: RunningServer) -> None:
    peer, other = await server.peer(), await server.peer()
    await put(peer, "held")
    match = await peer.ask(MatchPrefix(Keys(["held"]), hold_us=50_000_000))
    assert isinstance(match, MatchPrefixReply)
    peer.close()
    await trio.testing.wait_all_tasks_blocked()
    assert server.core.statistics().holds == 1
    assert await other.ask(ReleaseHold(match.hold)) == CountReply(1)
    assert await other.ask(ReleaseHold(match.hold)) == CountReply(0)


async def test_eviction_on_request_goes_down_to_the_lower_bound(peer: Peer) -> None:
    for number in range(12):
        await put(peer, f"key {number}")
    assert await peer.ask(Evict(0.5, 0.8)) == CountReply(0)
    assert await peer.ask(Evict(0.25, 0.5)) == CountReply(8)
    assert await present(peer, [f"key {number}" for number in range(12)]) == [f"key {n}" for n in range(8, 12)]


def evicting(interval_s: float, least: float, most: float) -> ServerConfig:
    bounds: dict[str, Any] = {"evict_min_threshold": least, "evict_max_threshold": most}
    return make_config(prealloc_bytes=POOL, enable_periodic_evict=True, evict_interval_s=interval_s, **bounds)


async def test_periodic_eviction_keeps_the_pool_below_its_bound(autojump_clock: MockClock) -> None:
    async with simulated_server(evicting(5, 0.25, 0.5)) as server:
        peer = await server.peer()
        for number in range(8):
            await put(peer, f"key {number}")
        await trio.sleep(6)
        assert server.core.statistics().keys == 8  # half is not more than half
        await put(peer, "one more")
        await trio.sleep(5)
        assert server.core.statistics().keys == 4
        assert server.core.statistics().evicted.periodic == 5
        assert await present(peer, ["key 0", "key 7", "one more"]) == ["key 7", "one more"]


async def test_periodic_eviction_goes_on_while_holds_pin(autojump_clock: MockClock) -> None:
    async with simulated_server(evicting(1, 0.0, 0.01)) as server:
        peer = await server.peer()
        await put(peer, "held")
        await peer.ask(MatchPrefix(Keys(["held"]), hold_us=10_000_000))
        await put(peer, "not held")
        await trio.sleep(5)
        assert await present(peer, ["held", "not held"]) == ["held"]
        await trio.sleep(7)
        assert await present(peer, ["held", "not held"]) == []


# Growth


def growing() -> ServerConfig:
    return make_config(prealloc_bytes=POOL, auto_increase=True, max_pool_bytes=4 * POOL)


async def test_a_put_that_does_not_fit_waits_until_the_pool_has_grown() -> None:
    async with simulated_server(growing()) as server:
        peer = await server.peer()
        await put(peer, "a", 40 * KIB)
        await put(peer, "b", 120 * KIB)
        assert server.core.pool.capacity_bytes > POOL
        assert server.core.pool.capacity_bytes <= 4 * POOL
        for key in ("a", "b"):
            await peer.ask(Get(Keys([key]), pack_u64(), checksums=False))
            assert len(await peer.payload()) == {"a": 40 * KIB, "b": 120 * KIB}[key]


async def test_a_full_pool_grows_while_it_serves_and_never_beyond_its_bound() -> None:
    async with simulated_server(growing()) as server:
        peer = await server.peer()
        for number in range(200):
            await put(peer, f"key {number}")
            await trio.testing.wait_all_tasks_blocked()
            assert server.core.pool.capacity_bytes <= 4 * POOL
        while server.core.growth.growable_bytes:
            number += 1
            await put(peer, f"key {number}")
        assert server.core.pool.capacity_bytes == 4 * POOL
        with pytest.raises(ValueTooLarge):
            await put(peer, "larger than any arena", 4 * POOL)
        assert server.core.pool.capacity_bytes == 4 * POOL


async def test_many_puts_that_wait_for_growth_are_all_served() -> None:
    async with simulated_server(growing()) as server:

        async def store(number: int) -> None:
            peer = await server.peer()
            await put(peer, f"key {number}", 60 * KIB)
            peer.close()

        async with trio.open_nursery() as nursery:
            for number in range(12):
                nursery.start_soon(store, number)
        await server.quiet()
        assert server.core.statistics().puts == 12
        assert server.core.pool.capacity_bytes <= 4 * POOL


REFUSALS: dict[str, Callable[[], Exception]] = {
    "no memory": lambda: OutOfMemory("the machine has none"),
    "no descriptors": lambda: OSError(errno.EMFILE, "Too many open files"),
}


@pytest.mark.parametrize("why", REFUSALS)
async def test_a_machine_without_memory_refuses_the_put_and_the_server_lives(why: str) -> None:
    tried = 0

    def refuse(index: int, length: int, **options: Any) -> Arena:
        nonlocal tried
        tried += 1
        raise REFUSALS[why]()

    async with simulated_server(growing(), environment=Environment(create_arena=refuse)) as server:
        peer = await server.peer()
        await put(peer, "a", 40 * KIB)
        with pytest.raises(OutOfMemory):
            await put(peer, "b", 100 * KIB)
        assert tried == 1
        assert await present(peer, ["a"]) == ["a"]
        with pytest.raises(ValueTooLarge):  # it does not grow any more
            await put(peer, "b", 100 * KIB)
        assert tried == 1
        await put(peer, "c", 50 * KIB)


async def test_a_put_does_not_wait_for_growth_beyond_its_deadline(autojump_clock: MockClock) -> None:
    never = trio.Event()

    async def run_slowly(function: Callable[..., Arena], *arguments: Any) -> Arena:
        await never.wait()
        return function(*arguments)

    async with simulated_server(growing(), environment=Environment(run_in_thread=run_slowly)) as server:
        peer = await server.peer()
        start = trio.current_time()
        request = Put(Keys(["a"]), pack_u64([100 * KIB]), checksums=False)
        with pytest.raises((OutOfMemory, DeadlineExceeded)):
            await peer.ask(request, bytes(100 * KIB), deadline_us=2_000_000)
        assert trio.current_time() - start <= 3
        await put(peer, "b")
        never.set()
        await trio.testing.wait_all_tasks_blocked()
        assert server.core.pool.capacity_bytes > POOL


async def test_without_a_bound_the_pool_grows_by_what_the_machine_has() -> None:
    machine = Environment(available_memory=lambda: MemoryLimit(POOL, "this test"))
    async with simulated_server(make_config(prealloc_bytes=POOL, auto_increase=True), environment=machine) as server:
        assert server.core.growth.growable_bytes == POOL
        peer = await server.peer()
        for number in range(40):
            await put(peer, f"key {number}")


async def test_an_arena_longer_than_asked_for_does_not_pass_the_bound() -> None:
    """Arenas are whole pages; the bound is not."""
    config = make_config(prealloc_bytes=POOL, auto_increase=True, max_pool_bytes=POOL + 5000)
    async with simulated_server(config) as server:
        peer = await server.peer()
        for number in range(40):
            await put(peer, f"key {number}")
            await trio.testing.wait_all_tasks_blocked()
        await until(lambda: not server.core.growth.growable_bytes or len(server.core.pool.arenas) > 1)
        assert sum(arena.length for arena in server.core.pool.arenas) <= POOL + 5000
