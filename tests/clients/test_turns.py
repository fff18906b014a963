"""Every call of an asynchronous store lets other tasks have their turn, those too that
need not wait for anything.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import trio
import trio.testing

import infinistore
from infinistore import aio
from infinistore.aio import AsyncStore
from infinistore.errors import StoreUnavailable
from tests.clients.event_loops import under_asyncio
from tests.clients.shared_serving import LONG, Shared

KNOWN: list[Callable[[AsyncStore], Any]] = [
    lambda store: store.get("a"),
    lambda store: store.get_many(["a", "b"]),
    lambda store: store.get_into("b", bytearray(70_000)),
    lambda store: store.exists("a"),
    lambda store: store.match_prefix(["a", "b"]),
    lambda store: store.lease(["a"]).__aenter__(),
    lambda store: store.get_many([]),
    lambda store: store.put_many({}),
]
"""Calls that a store can answer without its server, once it has read LONG."""


@pytest.mark.parametrize("embedded", [False, True])
async def test_every_call_of_a_trio_store_is_a_checkpoint(embedded: bool, one_kind: Shared) -> None:
    async with infinistore.open_store(None if embedded else one_kind.url) as store:
        await store.put_many(LONG)
        await store.get_many(list(LONG))
        for call in KNOWN:
            for _ in range(3):
                with trio.testing.assert_checkpoints():
                    await call(store)


async def test_a_call_of_a_trio_store_that_fails_at_once_is_a_checkpoint(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with infinistore.open_store("unix:///nowhere/socket", lazy=True) as store:
        with pytest.raises(StoreUnavailable):
            await store.get("a")  # tries until the circuit is open
        for _ in range(3):
            with trio.testing.assert_checkpoints(), pytest.raises(StoreUnavailable, match="not tried again"):
                await store.get("a")


async def test_a_call_of_a_trio_store_that_is_cancelled_before_it_begins_asks_nothing(one_kind: Shared) -> None:
    async with infinistore.open_store(one_kind.url) as store:
        await store.put("a", b"1")
        with trio.CancelScope() as scope:
            scope.cancel()
            await store.put("a", b"2")
        assert await store.get("a") == b"1"


@pytest.mark.parametrize("embedded", [False, True])
@under_asyncio
async def test_calls_of_an_asyncio_store_in_a_row_let_others_run_between_them(embedded: bool, one_kind: Shared) -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with aio.open_store(None if embedded else one_kind.url) as store:
        await store.put_many(LONG)
        await store.get_many(list(LONG))
        task = asyncio.create_task(others())
        for call in KNOWN:
            before = turns
            for _ in range(20):
                await call(store)
            assert turns - before >= 19
        task.cancel()


@under_asyncio
async def test_an_asyncio_loop_of_calls_that_fail_at_once_ends_with_its_time() -> None:
    calls = 0
    async with aio.open_store("unix:///nowhere/socket", lazy=True) as store:
        with pytest.raises(StoreUnavailable):
            await store.get("a")  # tries until the circuit is open
        with suppress(TimeoutError):
            async with asyncio.timeout(0):
                while calls < 1000:
                    calls += 1
                    with pytest.raises(StoreUnavailable, match="not tried again"):
                        await store.get("a")
    assert calls < 1000


@under_asyncio
async def test_an_asyncio_loop_of_reads_that_wait_for_nobody_ends_with_its_time(one_kind: Shared) -> None:
    calls = 0
    async with aio.open_store(one_kind.url) as store:
        await store.put_many(LONG)
        with suppress(TimeoutError):
            async with asyncio.timeout(0):
                while calls < 1000:
                    calls += 1
                    await store.get("a")
    assert calls < 1000
