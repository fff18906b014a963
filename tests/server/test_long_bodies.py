"""Long bodies of requests: how much memory those that are under way may take together,
and who waits for it.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from functools import partial

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from infinistore.errors import LimitExceeded, StoreUnavailable
from infinistore.protocol.codec import encode_head
from infinistore.protocol.effects import LongBody
from infinistore.protocol.messages import Exists, ExistsReply, Keys
from infinistore.server.budgets import BodyBudget, BodyGrant
from infinistore.server.environment import Environment
from tests.server.running import HALF_REQUEST_ID, KIB, MIB, Peer, RunningServer, simulated_server
from tests.transports.memory_network import random_chunks, whole

ROOM_BYTES = 1000 * KIB


def asked(count: int, key_bytes: int = 1000) -> Exists:
    return Exists(Keys([f"{number:0{key_bytes}}" for number in range(count)]))


LONG = asked(250)
HEAD = encode_head(LONG, request_id=HALF_REQUEST_ID)


@asynccontextmanager
async def with_little_room(seed: int | None = None) -> AsyncGenerator[RunningServer, None]:
    """A server that has room for four of `LONG` at a time."""
    chunks = whole if seed is None else random_chunks(seed)
    async with simulated_server(chunks=chunks, environment=Environment(body_budget_bytes=ROOM_BYTES)) as server:
        yield server
        await server.left_by_all()
        assert bodies(server).taken_bytes == 0


def bodies(server: RunningServer) -> BodyBudget:
    return server.server.context.body_budget


async def unfinished(server: RunningServer, count: int, sent: float = 0.9) -> list[Peer]:
    """Clients that have sent a part of a long request."""
    peers = []
    for _ in range(count):
        peer = await server.peer()
        await peer.send(HEAD[: int(len(HEAD) * sent)])
        await trio.testing.wait_all_tasks_blocked()
        peers.append(peer)
    return peers


async def test_bodies_under_way_take_no_more_memory_than_there_is_for_all_of_them(
    mock_clock: MockClock,
) -> None:
    """The clock stands still: nobody gives room back because its time is over."""
    async with with_little_room() as server:
        await unfinished(server, 12)
        assert ROOM_BYTES - len(HEAD) < bodies(server).taken_bytes <= ROOM_BYTES
        other = await server.peer()
        assert await other.ask(asked(60)) == ExistsReply(bytes(60))  # fits the buffer of its connection


@pytest.mark.parametrize("sent", [0.0001, 0.5, 0.9])
async def test_who_announces_a_body_and_does_not_send_it_keeps_nobody_out_for_long(
    sent: float, autojump_clock: MockClock
) -> None:
    async with with_little_room() as server:
        peers = await unfinished(server, 12, max(sent, 70 / len(HEAD)))
        other = await server.peer()
        start = trio.current_time()
        assert await other.ask(asked(200)) == ExistsReply(bytes(200))
        assert trio.current_time() - start <= 3  # a second and a look, or two
        with pytest.raises(LimitExceeded, match="others wait for room"):
            await peers[0].reply_to_half(LONG)
        assert await peers[0].is_closed()


async def test_a_body_that_trickles_in_is_given_up_where_others_wait(autojump_clock: MockClock) -> None:
    async with with_little_room() as server, trio.open_nursery() as nursery:
        peers = await unfinished(server, 4, 0.1)

        async def trickle(peer: Peer) -> None:
            for start in range(len(HEAD) // 10, len(HEAD)):
                await trio.sleep(0.1)
                await peer.send(HEAD[start : start + 1])

        for peer in peers:
            nursery.start_soon(trickle, peer)
        other = await server.peer()
        start = trio.current_time()
        assert await other.ask(LONG) == ExistsReply(bytes(250))
        assert trio.current_time() - start < 3
        nursery.cancel_scope.cancel()


async def test_a_body_that_is_only_slow_is_waited_for_while_nobody_else_wants_room(
    autojump_clock: MockClock,
) -> None:
    async with with_little_room() as server:
        (peer,) = await unfinished(server, 1, 0.5)
        for start in range(len(HEAD) // 2, len(HEAD), 20_000):
            await trio.sleep(5)
            await peer.send(HEAD[start : start + 20_000])
        assert await peer.reply_to_half(LONG) == ExistsReply(bytes(250))


@pytest.mark.parametrize("seed", range(3))
async def test_more_long_requests_than_there_is_room_for_are_all_answered(seed: int, autojump_clock: MockClock) -> None:
    answered: list[int] = []
    async with with_little_room(seed) as server, trio.open_nursery() as nursery:

        async def ask(count: int) -> None:
            peer = await server.peer()
            assert await peer.ask(asked(count)) == ExistsReply(bytes(count))
            answered.append(count)

        for count in range(100, 400, 20):
            nursery.start_soon(ask, count)
    assert sorted(answered) == list(range(100, 400, 20))


async def test_the_shortest_that_waits_comes_first_and_who_gives_up_waiting_has_nothing() -> None:
    budget = BodyBudget(100)
    first = await budget.acquire(LongBody(100), lambda: None, "")
    order: list[int] = []

    async def take(length: int, task_status: trio.TaskStatus[trio.CancelScope]) -> None:
        with trio.CancelScope() as scope:
            task_status.started(scope)
            grant = await budget.acquire(LongBody(length), lambda: None, "")
            order.append(length)
            budget.release(grant)

    async with trio.open_nursery() as nursery:
        for length in (90, 1000, 70, 80):
            scope: trio.CancelScope = await nursery.start(take, length)
            if length == 70:
                scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert order == []
        budget.release(first)
        budget.release(first)
    assert (order, budget.taken_bytes) == ([80, 90, 1000], 0)


LONGEST_BYTES = 64 * MIB - 100 * KIB


async def announced(server: RunningServer, length: int) -> Peer:
    """A client that has announced a body of so many bytes."""
    peer = await server.peer()
    await peer.send(HEAD[:12] + length.to_bytes(4, "little") + HEAD[16:32])
    await trio.testing.wait_all_tasks_blocked()
    return peer


@pytest.mark.parametrize("number", [2, 3, 6])
async def test_what_arrives_slowly_for_its_length_keeps_nobody_out(number: int, autojump_clock: MockClock) -> None:
    """Two of the longest bodies, sent at more than the least rate, take all there is;
    more of them wait."""
    async with simulated_server() as server, trio.open_nursery() as nursery:
        peers = [await announced(server, LONGEST_BYTES) for _ in range(number)]

        async def trickle(peer: Peer) -> None:
            with suppress(StoreUnavailable):
                while True:
                    await peer.send(bytes(8 * KIB))
                    await trio.sleep(0.1)

        for peer in peers:
            nursery.start_soon(trickle, peer)
        other = await server.peer()
        start = trio.current_time()
        for _ in range(10):
            assert await other.ask(LONG) == ExistsReply(bytes(250))
        assert trio.current_time() - start <= 3 * number  # each of them has a second and a look, or two
        nursery.cancel_scope.cancel()


async def test_no_more_slow_bodies_are_given_up_than_others_need_room_the_slowest_first(
    autojump_clock: MockClock,
) -> None:
    budget, ended = BodyBudget(4 * MIB), list[int]()
    bodies = [LongBody(MIB) for _ in range(4)]
    grants = [await budget.acquire(body, partial(ended.append, i), "") for i, body in enumerate(bodies)]
    for body, arrived in zip(bodies, [3, 1, 2, MIB], strict=True):
        body.arrived = arrived
    async with trio.open_nursery() as nursery:
        nursery.start_soon(budget.acquire, LongBody(MIB // 2), lambda: None, "")
        await trio.sleep(5)
        assert ended == [1]
        budget.release(grants[1])


@pytest.mark.parametrize(("length", "bytes_per_s"), [(8 * MIB, MIB), (1000 * KIB, 125 * KIB), (300 * KIB, 64 * KIB)])
@pytest.mark.parametrize("missing", [0, 1])
async def test_a_body_that_keeps_its_pace_is_not_given_up(
    length: int, bytes_per_s: int, missing: int, autojump_clock: MockClock
) -> None:
    await trio.sleep(7)
    budget, ended, body = BodyBudget(length), list[float](), LongBody(length)
    grant = await budget.acquire(body, lambda: ended.append(trio.current_time()), "")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(budget.acquire, LongBody(1), lambda: None, "")
        for _ in range(4):
            await trio.sleep(0.5)
            body.arrived += bytes_per_s - missing
            await trio.sleep(0.5)
        assert ended == ([pytest.approx(8)] if missing else [])
        budget.release(grant)


async def test_a_body_that_was_given_up_and_is_still_there_saves_no_other(autojump_clock: MockClock) -> None:
    budget, ended = BodyBudget(2), list[int]()
    grants = [await budget.acquire(LongBody(1), partial(ended.append, number), "") for number in range(2)]
    async with trio.open_nursery() as nursery:
        for expected in ([0], [0, 1]):
            nursery.start_soon(budget.acquire, LongBody(1), lambda: None, "")
            await trio.sleep(1.5)
            assert ended == expected
        for grant in grants:
            budget.release(grant)


async def test_who_is_cancelled_in_the_moment_of_its_grant_keeps_no_room() -> None:
    budget = BodyBudget(10)
    first = await budget.acquire(LongBody(10), lambda: None, "")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(budget.acquire, LongBody(10), lambda: None, "")
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        budget.release(first)
    assert budget.taken_bytes == 0


async def test_what_a_tenant_had_before_puts_it_behind_nobody() -> None:
    budget, order = BodyBudget(100), list[str]()

    async def take(length: int, tenant: str) -> None:
        grant = await budget.acquire(LongBody(length), lambda: None, tenant)
        order.append(tenant)
        budget.release(grant)

    earlier = [await budget.acquire(LongBody(30), lambda: None, "before") for _ in range(2)]
    for one in earlier:
        budget.release(one)
    everything = await budget.acquire(LongBody(100), lambda: None, "other")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(take, 70, "new")
        nursery.start_soon(take, 60, "before")
        await trio.testing.wait_all_tasks_blocked()
        budget.release(everything)
    assert order == ["before", "new"]


async def test_the_tenant_that_has_most_gives_and_the_one_that_has_least_comes_first(
    autojump_clock: MockClock,
) -> None:
    budget, ended, order = BodyBudget(100), list[str](), list[str]()
    grants: list[BodyGrant] = []

    async def take(length: int, tenant: str) -> None:
        grants.append(await budget.acquire(LongBody(length), partial(ended.append, tenant), tenant))
        order.append(tenant)

    async with trio.open_nursery() as nursery:
        for length, tenant in [(30, "few"), (35, "many"), (35, "many")]:
            await take(length, tenant)
        for length, tenant in [(21, "many"), (21, "many"), (50, "new")]:
            nursery.start_soon(take, length, tenant)
        await trio.sleep(1.5)
        assert ended == ["many", "many", "few"]  # all are slow, and all of their room is wanted
        budget.release(grants[0])
        budget.release(grants[1])
        await trio.testing.wait_all_tasks_blocked()
        assert order[3:] == ["new"]
        budget.release(grants[2])
