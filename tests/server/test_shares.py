"""What all connections share: for each such thing, one tenant takes all that it can
have, and then the others get some of it all the same.
"""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import count
from typing import TypeAlias, cast

import attrs
import pytest
import trio.testing

from infinistore.allocators import create_allocator
from infinistore.core import CoreLimits, Pool, create_arena
from infinistore.core.clients import Hazard
from infinistore.core.tenants import Tenants
from infinistore.errors import LimitExceeded, OutOfMemory
from infinistore.protocol.effects import LongBody
from infinistore.server.budgets.body_budget import BodyBudget
from infinistore.server.budgets.log_budget import LogBudget
from infinistore.server.connection.conversation import Traffic
from infinistore.server.session.session import Session
from infinistore.server.session_registry import SessionRegistry
from infinistore.tenant_limits import TenantLimits
from tests.server.running import KIB

TENANTS = ["greedy", "b", "c", "d", "e", "f"]
MOST = 10
Take: TypeAlias = Callable[[str], Awaitable[bool]]
"""Takes some for a tenant, for good; returns whether there was some."""


@attrs.frozen(eq=False)
class _Session:
    """As far as the registry is about it."""

    tenant: str
    traffic: Traffic = attrs.field(factory=Traffic)

    @property
    def identity(self) -> "_Session":
        return self


@asynccontextmanager
async def connections() -> AsyncGenerator[Take, None]:
    registry = SessionRegistry(MOST, "close some")

    async def take(tenant: str) -> bool:
        try:
            registry.check_free(TenantLimits(tenant), len(TENANTS))
        except LimitExceeded:
            return False
        registry.add(cast(Session, _Session(tenant)))
        return True

    yield take


@asynccontextmanager
async def room_in_the_pool() -> AsyncGenerator[Take, None]:
    """All have some reserved. What one has taken, it reads in place from then on."""
    pool = Pool(create_allocator("bitmap", KIB))
    pool.add_arena(create_arena(0, 64 * KIB))
    tenants = Tenants(pool, clock=trio.current_time, limits=CoreLimits(max_pinned_ratio=1))
    tenants.on_removal = lambda entries: None
    tenants.apply(TenantLimits(name, reserved_bytes=8 * KIB) for name in TENANTS)
    greedy, rows = tenants.store("greedy"), list[Hazard]()
    numbers = count()
    greedy.accept_hazards(greedy.open_client("reader"), lambda: list(rows))

    async def take(tenant: str) -> bool:
        store = tenants.store(tenant)
        if store is not greedy:
            rows[:] = [(*entry, 1) for entry in greedy.index.get_many(greedy.all_keys()) if entry is not None]
        writer = store.open_client("writer")
        try:
            reservation = store.reserve(writer, [KIB] * 8)
        except (LimitExceeded, OutOfMemory):
            return False
        taken = next(numbers)
        store.commit(reservation, [f"{taken}/{number}" for number in range(8)], None)
        return True

    yield take
    pool.close()


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


@pytest.mark.parametrize("shared", [connections, room_in_the_pool, long_bodies, lines_of_the_log])
async def test_who_takes_all_that_it_can_have_leaves_some_to_each_of_the_others(
    shared: Callable[[], AbstractAsyncContextManager[Take]], autojump_clock: trio.testing.MockClock
) -> None:
    async with shared() as take:
        for _ in range(30):
            await take("greedy")
        assert [tenant for tenant in TENANTS[1:] if not await take(tenant)] == []
