"""What all connections share: for each such thing, one tenant takes all that it can
have, and then the others get some of it all the same.
"""

import logging
import os
import resource
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias, cast

import attrs
import pytest
import trio.testing

from infinistore.allocators import create_allocator
from infinistore.core import CoreLimits, Pool, StoreCore, create_arena
from infinistore.core.clients import Client, Hazard
from infinistore.core.tenants import Tenants
from infinistore.disk.jobs import ALIGNMENT_BYTES
from infinistore.disk_io import open_folder
from infinistore.disk_io.direct_io import aligned_memory
from infinistore.disk_io.files import DiskFiles
from infinistore.disk_settings import DESCRIPTORS_OF_A_DISK
from infinistore.errors import LimitExceeded, OutOfMemory
from infinistore.protocol.effects import LongBody
from infinistore.server.budgets import BodyBudget, DescriptorBudget, LogBudget
from infinistore.server.connection import Traffic
from infinistore.server.session.session import Session, SessionRegistry
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


Pin: TypeAlias = Callable[[StoreCore, Client, list[str]], object]
"""Pins blocks of the greedy tenant for good, if it may."""


def leases(store: StoreCore, client: Client, keys: list[str]) -> object:
    return store.lease(client, keys)


def holds(store: StoreCore, client: Client, keys: list[str]) -> object:
    return store.hold_prefix(client, keys, 60.0)


def protected_keys(store: StoreCore, client: Client, keys: list[str]) -> object:
    return store.retention.protect(keys)


def unfinished_writes(store: StoreCore, client: Client, keys: list[str]) -> object:
    return store.reserve(client, [KIB] * len(keys))


def reads_in_place(store: StoreCore, client: Client, keys: list[str]) -> object:
    """Without a request: the store finds these pins in shared memory."""
    rows: list[Hazard] = [(*entry, 1) for entry in store.index.get_many(store.all_keys()) if entry is not None]
    if client.read_hazards is None:
        store.accept_hazards(client, lambda: rows)
    client.read_hazards = lambda: rows
    return rows


@asynccontextmanager
async def room_in_the_pool(pin: Pin, *, reserved_bytes: int) -> AsyncGenerator[Take, None]:
    """One has filled the pool, and pins all that it may before each of the others puts.
    All have some reserved, or one may not pin all of the pool.
    """
    pool = Pool(create_allocator("bitmap", KIB))
    pool.add_arena(create_arena(0, 64 * KIB))
    most = CoreLimits(max_pinned_ratio=1, max_held_ratio=1, max_protected_ratio=1)
    tenants = Tenants(pool, clock=trio.current_time, limits=most if reserved_bytes else CoreLimits())
    tenants.on_removal = lambda entries: None
    tenants.apply(TenantLimits(name, reserved_bytes=reserved_bytes) for name in TENANTS)
    greedy = tenants.store("greedy")
    reader = greedy.open_client("reader")
    if pin is reads_in_place:
        pin(greedy, reader, [])
    numbers = count()

    async def take(tenant: str) -> bool:
        store = tenants.store(tenant)
        if store is not greedy:
            for key in greedy.all_keys():
                with suppress(LimitExceeded, OutOfMemory):
                    pin(greedy, reader, [key])
        try:
            reservation = store.reserve(store.open_client("writer"), [KIB] * 8)
        except (LimitExceeded, OutOfMemory):
            return False
        store.commit(reservation, [f"{next(numbers)}" for _ in range(8)], None)
        return True

    yield take
    pool.close()


@asynccontextmanager
async def room_of_one_tenant() -> AsyncGenerator[Take, None]:
    """Connections of one tenant: what the greedy one reserves, it never finishes."""
    store = StoreCore(Pool(create_allocator("bitmap", KIB)), clock=trio.current_time)
    store.add_arena(create_arena(0, 64 * KIB))
    clients = {name: store.open_client(name) for name in TENANTS}

    async def take(tenant: str) -> bool:
        try:
            reservation = store.reserve(clients[tenant], [KIB] * 8)
        except (LimitExceeded, OutOfMemory):
            return False
        if tenant != "greedy":
            store.commit(reservation, [f"{tenant}/{number}" for number in range(8)], None)
        return True

    yield take
    store.pool.close()


def make_files(folder: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).write_bytes(bytes(ALIGNMENT_BYTES))


@asynccontextmanager
async def descriptors() -> AsyncGenerator[Take, None]:
    """A process that may not open many: each connection takes two, and each tenant
    reads from files of its disk.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = len(os.listdir("/proc/self/fd")) + 400
    with (
        TemporaryDirectory() as place,
        pytest.MonkeyPatch.context() as patch,
        ExitStack() as opened,
    ):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        opened.callback(partial(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard)))
        patch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
        patch.setattr(resource, "setrlimit", lambda kind, limits: None)
        budget = DescriptorBudget(clients=1000, strangers=10, management=10, arenas=0)
        disks: dict[str, DiskFiles] = {}
        files = {tenant: [f"segments/{number}" for number in range(60)] for tenant in TENANTS}
        for tenant in TENANTS:
            budget.reserve(DESCRIPTORS_OF_A_DISK)
            disks[tenant] = DiskFiles(open_folder(Path(place, tenant)))
            opened.callback(disks[tenant].close)
            make_files(Path(place, tenant), files[tenant])
        registry = SessionRegistry(budget.clients(each=2), "close some")
        strangers = [os.dup(0) for _ in range(budget.strangers + budget.management)]
        for descriptor in strangers:
            opened.callback(os.close, descriptor)

        async def take(tenant: str) -> bool:
            try:
                for file in files.pop(tenant, []):
                    disks[tenant].read(file, 0, [aligned_memory(ALIGNMENT_BYTES)])
                registry.check_free(TenantLimits(tenant), len(TENANTS))
                for _ in range(2):
                    opened.callback(os.close, os.dup(0))
            except (LimitExceeded, OSError):
                return False
            registry.add(cast(Session, _Session(tenant)))
            return True

        yield take


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


ASKED: list[Pin] = [leases, holds, protected_keys, unfinished_writes]
PINS: list[Pin] = [*ASKED, reads_in_place]
SHARED = {
    "connections": connections,
    "descriptors": descriptors,
    **{f"room beside {pin.__name__}": partial(room_in_the_pool, pin, reserved_bytes=8 * KIB) for pin in PINS},
    **{f"room beside {pin.__name__}, none reserved": partial(room_in_the_pool, pin, reserved_bytes=0) for pin in ASKED},
    "room of one tenant": room_of_one_tenant,
    "long bodies": long_bodies,
    "lines of the log": lines_of_the_log,
}


@pytest.mark.parametrize("shared", SHARED.values(), ids=SHARED)
async def test_who_takes_all_that_it_can_have_leaves_some_to_each_of_the_others(
    shared: Callable[[], AbstractAsyncContextManager[Take]], autojump_clock: trio.testing.MockClock
) -> None:
    async with shared() as take:
        for _ in range(30):
            await take("greedy")
        assert [tenant for tenant in TENANTS[1:] if not await take(tenant)] == []
