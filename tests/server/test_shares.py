"""What all connections share: for each such thing, one tenant takes all that it can
have, and then the others get some of it all the same.
"""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeAlias

import pytest
import trio.testing

from infinistore.protocol.effects import LongBody
from infinistore.server.budgets.body_budget import BodyBudget
from infinistore.server.budgets.log_budget import LogBudget

TENANTS = ["greedy", "b", "c", "d", "e", "f"]
MOST = 10
Take: TypeAlias = Callable[[str], Awaitable[bool]]
"""Takes some for a tenant, for good; returns whether there was some."""


@asynccontextmanager
async def long_bodies() -> AsyncGenerator[Take, None]:
    """Those that are announced and never sent."""
    budget = BodyBudget(MOST)
    taken: list[str] = []

    async def receive(tenant: str) -> None:
        with trio.CancelScope() as scope:
            grant = await budget.acquire(LongBody(1), scope.cancel, tenant)
            taken.append(tenant)
            await trio.sleep_forever()
        budget.release(grant)

    async with trio.open_nursery() as nursery:

        async def take(tenant: str) -> bool:
            before = taken.count(tenant)
            nursery.start_soon(receive, tenant)
            await trio.sleep(0.1 if tenant == "greedy" else 3)
            return taken.count(tenant) > before

        yield take
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def lines_of_the_log() -> AsyncGenerator[Take, None]:
    budget, lines = LogBudget(), list[logging.LogRecord]()
    log = logging.getLogger("infinistore.server")

    def keep(line: logging.LogRecord) -> bool:
        lines.append(line)
        return False

    async def take(tenant: str) -> bool:
        before = len(lines)
        budget.log(logging.ERROR, "bad", tenant=tenant)
        return len(lines) > before

    log.addFilter(keep)
    yield take
    log.removeFilter(keep)


@pytest.mark.parametrize("shared", [long_bodies, lines_of_the_log])
async def test_who_takes_all_that_it_can_have_leaves_some_to_each_of_the_others(
    shared: Callable[[], AbstractAsyncContextManager[Take]], autojump_clock: trio.testing.MockClock
) -> None:
    async with shared() as take:
        for _ in range(100):
            if not await take("greedy"):
                break
        else:
            pytest.fail("there is no limit")
        assert [tenant for tenant in TENANTS[1:] if not await take(tenant)] == []
