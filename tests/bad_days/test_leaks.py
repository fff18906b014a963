"""A thousand bad days in a row leave nothing behind: no descriptor, no thread, no task,
no memory, no connection.
"""

import asyncio
import gc
import os
import sys
import threading
from collections.abc import Iterator
from itertools import islice, repeat

import pytest
import trio

from infinistore.aio import AsyncStore
from infinistore.blocking import BlockingStore
from infinistore.errors import InfiniStoreException
from tests.asking import until
from tests.bad_days.clients import KINDS, run_with_store
from tests.bad_days.faults import Action, Direction, Fault, Proxy
from tests.bad_days.operations import OLD, OPERATIONS, check_contents, outcome, prepare, works_again
from tests.bad_days.servers import ServerProcess
from tests.bad_days.striking import measure

pytestmark = [pytest.mark.usefixtures("quick_breaker"), pytest.mark.process]
DAYS = 1000
FIRST_DAYS = 250
"""Until then caches fill and pools grow; what is left behind is counted over the days
that follow.
"""
GET, PUT = (next(operation for operation in OPERATIONS if operation.name == name) for name in ("get", "put"))


@pytest.fixture
def server(server_process: ServerProcess) -> ServerProcess:
    """One in another process: only what clients have open is counted."""
    return server_process


class Count:
    """What this process has open."""

    def __init__(self) -> None:
        gc.collect()
        self.descriptors = len(os.listdir("/proc/self/fd"))
        self.threads = threading.active_count()
        self.blocks = sys.getallocatedblocks()


def tasks(kind: str) -> int:
    if kind == "trio":
        return trio.lowlevel.current_statistics().tasks_living
    return 0 if kind == "blocking" else len(asyncio.all_tasks())


def bad_days(lengths: dict[Direction, int]) -> Iterator[Fault]:
    """Without end: each byte of a reply as the last one that comes, garbage, other
    versions, other replies.
    """
    length = lengths[Direction.REPLY]
    while True:
        for place in range(length + 1):
            yield Fault((Action.CUT, Action.END)[place % 2], Direction.REPLY, place)
            if place % 8 == 0:
                yield Fault(Action.CUT, Direction.REQUEST, place % lengths[Direction.REQUEST])
                yield Fault(Action.GARBAGE, Direction.REPLY, place)
                yield Fault(Action.REPLACE, Direction.REPLY, 4, b"\x02")  # another version
                yield Fault(Action.REPLACE, Direction.REPLY, 8, b"\xff\xff")  # a reply to another request
                yield Fault(Action.CORRUPT, Direction.REPLY, length - 1)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_bad_days_leave_nothing_behind(kind: str, proxy: Proxy, direct: BlockingStore) -> None:
    prepare(GET, direct)

    async def live(store: AsyncStore, fault: Fault, day: int) -> None:
        if day % 50 == 0:
            proxy.refuse()
            proxy.accept_again()
        proxy.arm(fault)
        result, error = await outcome(store.put("k1", OLD["k1"]) if day % 10 == 0 else store.get("k0"))
        assert error is not None or result in (None, OLD["k0"])
        if day % 25 == 0:
            proxy.disarm()
            await works_again(store)

    async def body(store: AsyncStore) -> None:
        days = bad_days(await measure(store, GET, proxy, direct))
        for day, fault in enumerate(islice(days, FIRST_DAYS)):
            await live(store, fault, day)
        proxy.disarm()
        await works_again(store)
        before, tasks_before = Count(), tasks(kind)
        for day, fault in enumerate(islice(days, DAYS - FIRST_DAYS)):
            await live(store, fault, day)
        proxy.disarm()
        await works_again(store)
        proxy.wait_for_ends(2)
        after = Count()
        assert tasks(kind) == tasks_before
        assert after.threads <= before.threads
        assert after.descriptors <= before.descriptors + 2  # one connection more, at both ends of it in the proxy
        assert after.blocks - before.blocks < 500  # less than one object a day

    run_with_store(kind, proxy.url, works_again)  # what a loop opens once for the whole process is no leak
    proxy.wait_for_ends()
    at_first = Count()
    run_with_store(kind, proxy.url, body)
    proxy.wait_for_ends()
    at_last = Count()
    assert at_last.threads <= at_first.threads
    assert at_last.descriptors <= at_first.descriptors
    check_contents(direct)


@pytest.mark.parametrize("kind", KINDS)
def test_calls_that_run_into_their_deadline_leave_nothing_behind(
    kind: str, proxy: Proxy, direct: BlockingStore
) -> None:
    prepare(GET, direct)
    until_in_time = repeat(None)  # a busy machine may not answer within the deadline

    async def late(store: AsyncStore) -> None:
        for operation in (GET, PUT):
            proxy.arm(Fault(Action.STALL, Direction.REPLY, 0, forever=True))
            _, error = await outcome(operation.call(store, None))
            assert isinstance(error, InfiniStoreException)
            proxy.disarm()

    async def body(store: AsyncStore) -> None:
        for _ in range(3):
            await late(store)
        await works_again(store, until_in_time)
        before, tasks_before = Count(), tasks(kind)
        for _ in range(15):
            await late(store)
        await works_again(store, until_in_time)
        proxy.wait_for_ends(1)
        after = Count()
        assert tasks(kind) == tasks_before
        assert after.threads <= before.threads  # Trio's idle threads, of earlier tests, end when they like
        assert after.descriptors <= before.descriptors + 2
        assert after.blocks - before.blocks < 150

    run_with_store(kind, proxy.url, body, deadline_s=0.03, lazy=True)  # real time: the proxy never answers


@pytest.mark.parametrize("kind", KINDS)
def test_stores_that_cannot_be_opened_leave_nothing_behind(kind: str, proxy: Proxy) -> None:
    async def nothing(_: AsyncStore) -> None:
        raise AssertionError("the store should not have opened")

    def try_to_open(count: int) -> None:
        for number in range(count):
            proxy.arm(Fault((Action.CUT, Action.END, Action.GARBAGE)[number % 3], Direction.REPLY, number))
            with pytest.raises(InfiniStoreException):
                run_with_store(kind, proxy.url, nothing)

    try_to_open(30)
    proxy.wait_for_ends()
    before = Count()

    def is_as_before() -> bool:
        after = Count()
        return after.descriptors <= before.descriptors and after.threads <= before.threads

    try_to_open(60)
    until(is_as_before)  # the proxy may still accept, and close, a connection whose client has given up
    assert Count().blocks - before.blocks < 300
