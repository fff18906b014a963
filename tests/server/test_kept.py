"""What a service manager has kept for the next run of a server: all of it is used, or
none, and the log says why.
"""

import logging
import os
import struct
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from infinistore import open_store
from infinistore.allocators import Allocator
from infinistore.allocators.bitmap import BitmapAllocator
from infinistore.config import ServerConfig
from infinistore.core.pool_state import FORMAT
from infinistore.disk_settings import DiskPlace
from infinistore.server import Server
from infinistore.server import server as server_module
from infinistore.server.composition import run_server
from infinistore.server.environment import Environment
from infinistore.server.session.session import Session
from infinistore.server.take_over.kept import as_large_as_kept
from infinistore.service_manager import ServiceManager
from infinistore.sizes import DefaultSize
from tests.server.running import fill_twice, make_config

BLOCK = b"b" * 5000
KEYS = [f"{n}" for n in range(20)]


class Keeper(ServiceManager):
    """Keeps descriptors itself."""

    def __init__(self, before: "Keeper | None" = None, *, most_kept: int = 50, fails: bool = False) -> None:
        self.next: dict[str, int] = {} if before is None else before.next
        copies = {name: os.dup(descriptor) for name, descriptor in self.next.items()}
        super().__init__("\0nobody", most_kept=most_kept, kept=copies)
        self.fails = fails

    def keep(self, descriptors: Sequence[tuple[str, int]]) -> None:
        if self.fails:
            raise TimeoutError("it does not answer")
        assert len(descriptors) <= self.most_kept
        assert descriptors[-1][0] == "state"
        self.next |= {f"infinistore-{name}": os.dup(descriptor) for name, descriptor in descriptors}

    def forget(self, which: str = "") -> None:
        for name in [name for name in self.next if name.startswith(f"infinistore-{which}")]:
            os.close(self.next.pop(name))
            if name in self.kept:
                os.close(self.kept.pop(name))

    def lose(self, name: str) -> None:
        os.close(self.next.pop(f"infinistore-{name}"))

    def _send(self, *lines: str) -> None:
        """Nobody listens."""


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    made = Keeper()
    yield made
    made.forget()


@pytest.fixture
def config(tmp_path: Path) -> ServerConfig:
    return make_config(unix_socket=str(tmp_path / "socket"), drain_timeout_s=600.0)


@asynccontextmanager
async def running(config: ServerConfig, keeper: Keeper) -> AsyncGenerator[Server]:
    """A server, which drains at the end of the block."""

    async def run(task_status: trio.TaskStatus[Server]) -> None:
        environment = Environment(service_manager=keeper)
        await run_server(config, environment=environment, on_listening=task_status.started)

    async with trio.open_nursery() as nursery:
        server: Server = await nursery.start(run)
        yield server
        server.drain()


def open_at(config: ServerConfig, scheme: str = "unix") -> Any:
    return open_store(f"{scheme}://{config.unix_socket}")


async def fill(config: ServerConfig, keeper: Keeper, **settings: Any) -> None:
    """Run a server, and leave what it kept."""
    async with running(attrs.evolve(config, **settings), keeper), open_at(config) as store:
        await store.put_many(dict.fromkeys(KEYS, BLOCK))


async def count(store: Any) -> int:
    values = await store.get_many(KEYS)
    assert {bytes(value) for value in values if value is not None} <= {BLOCK}
    return sum(value is not None for value in values)


async def there(config: ServerConfig, keeper: Keeper, **settings: Any) -> int:
    """How many blocks the next run has."""
    async with running(attrs.evolve(config, **settings), Keeper(keeper)), open_at(config) as store:
        assert not keeper.next
        return await count(store)


@pytest.mark.parametrize("allocator", ["bitmap", "slab"])
async def test_the_next_run_has_all_blocks_and_so_has_the_one_after(
    config: ServerConfig, keeper: Keeper, allocator: str
) -> None:
    await fill(config, keeper, allocator=allocator)
    assert has_socket(config)
    for _ in range(2):
        assert await there(config, keeper, allocator=allocator) == len(KEYS)


async def test_without_a_service_manager_that_keeps_nothing_is_left(config: ServerConfig) -> None:
    keeper = Keeper(most_kept=0)
    await fill(config, keeper)
    assert not keeper.next
    assert not has_socket(config)


def has_socket(config: ServerConfig) -> bool:
    return Path(config.unix_socket).exists()


def reasons(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    found = [record for record in caplog.records if record.levelno >= logging.WARNING]
    return [(record.message, vars(record)["reason"]) for record in found]


def write_state(data: bytes, place: int, keeper: Keeper) -> None:
    os.pwrite(keeper.next["infinistore-state"], data, place)


def replace_arena(keeper: Keeper) -> None:
    keeper.lose("arena-0")
    keeper.next["infinistore-arena-0"] = os.memfd_create("other")


UNREADABLE = "what the last run said of its pool cannot be read: it "
NEWER = f"it has format {FORMAT + 1}, and this release reads format 2 or {FORMAT}"
HARM: dict[str, tuple[Callable[[Keeper], None], str]] = {
    "no state": (lambda keeper: keeper.lose("state"), "the last run of the service did not end in order"),
    "no arena": (lambda keeper: keeper.lose("arena-0"), "arena 0 was not kept; raise FileDescriptorStoreMax="),
    "no lifeline": (lambda keeper: keeper.lose("lifeline"), "the end of the last run cannot be seen"),
    **{f"torn at {place}": (partial(write_state, b"\xff", place), UNREADABLE) for place in (0, 8, 20, 100)},
    "a newer format": (partial(write_state, struct.pack("=Q", FORMAT + 1), 8), NEWER),
    "another file": (replace_arena, "is not one of"),
}


@pytest.mark.parametrize(("harm", "says"), HARM.values(), ids=HARM)
async def test_what_is_not_whole_is_dropped_and_the_log_says_why(
    config: ServerConfig,
    keeper: Keeper,
    harm: Callable[[Keeper], None],
    says: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await fill(config, keeper)
    harm(keeper)
    assert await there(config, keeper) == 0
    ((message, reason),) = reasons(caplog)
    assert message == "the cache starts empty"
    assert says in reason


async def test_a_damaged_block_is_dropped_and_the_others_are_served(config: ServerConfig, keeper: Keeper) -> None:
    await fill(config, keeper)
    descriptor = keeper.next["infinistore-arena-0"]
    at = os.pread(descriptor, 1 << 20, 0).index(BLOCK)
    os.pwrite(descriptor, b"damage", at + 100)
    assert await there(config, keeper) == len(KEYS) - 1


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ({"prealloc_bytes": 1 << 20}, (0, "and this one is to have 1 MiB")),
        ({"prealloc_bytes": 64 << 20}, (len(KEYS), "")),
        ({"minimal_allocate_bytes": 64}, (len(KEYS), "")),
    ],
)
async def test_other_settings(
    config: ServerConfig,
    keeper: Keeper,
    change: dict[str, Any],
    outcome: tuple[int, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    await fill(config, keeper)
    kept, says = outcome
    assert await there(config, keeper, **change) == kept
    assert says in "".join(reason for _, reason in reasons(caplog)[:1])
    assert bool(says) == bool(reasons(caplog))


async def test_an_allocator_that_places_all_blocks_itself(
    config: ServerConfig, keeper: Keeper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await fill(config, keeper)
    monkeypatch.setattr(BitmapAllocator, "adopt", Allocator.adopt)
    assert await there(config, keeper) == 0
    assert [message for message, _ in reasons(caplog)] == [
        "the cache starts empty",
        "the cache is not kept for the next run",
    ]


@pytest.mark.parametrize(
    ("manager", "settings", "says"),
    [
        ({"most_kept": 1}, {}, "FileDescriptorStoreMax=1 is 4 too few; raise it"),
        ({"most_kept": 4}, {}, "FileDescriptorStoreMax=4 is 1 too few; raise it"),
        ({"fails": True}, {}, "the service manager cannot be told: it does not answer"),
        ({}, {"shm_writes": "off"}, "nobody may map the pool to write any more (--shm-writes off)"),
    ],
)
async def test_a_cache_that_cannot_be_kept_leaves_nothing_and_the_log_says_why(
    config: ServerConfig, manager: dict[str, Any], settings: dict[str, Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = Keeper(**manager)
    await fill(config, keeper, **settings)
    assert not keeper.next
    assert reasons(caplog) == [("the cache is not kept for the next run", says)]
    assert not has_socket(config)


@pytest.mark.parametrize("most", [6, 50])
async def test_what_clients_lease_is_not_reused_although_their_connections_are_too_many(
    config: ServerConfig, most: int
) -> None:
    """The room of a client whose connection is not kept is never used again."""
    keeper = Keeper(most_kept=most)
    await fill(config, keeper)
    async with AsyncExitStack() as stack:
        async with running(config, Keeper(keeper, most_kept=most)):
            stores = [await stack.enter_async_context(open_at(config, "shm")) for _ in range(3)]
            leases = [await stack.enter_async_context(store.lease(KEYS[:3])) for store in stores]
        async with running(config, Keeper(keeper, most_kept=most)) as server:
            assert server.core.statistics().quarantined_bytes > 0
            await stores[0].delete(KEYS)
            await fill_twice(stores[0], server.core.pool.capacity_bytes, bytes(len(BLOCK)))
            assert all(bytes(view or b"") == BLOCK for views in leases for view in views)
            del leases
            await stack.aclose()
            if most == 50:
                async with open_at(config) as store:
                    while server.core.statistics().quarantined_bytes:
                        await store.put("next", BLOCK)
    keeper.forget()


async def test_a_request_that_does_not_end_leaves_nothing(
    config: ServerConfig, keeper: Keeper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "LAST_WRITES_S", 0.05)
    await fill(config, keeper)
    async with AsyncExitStack() as stack, running(attrs.evolve(config, drain_timeout_s=0.05), Keeper(keeper)):
        store = await stack.enter_async_context(open_at(config))
        await store.exists("key")
        monkeypatch.setattr(Session, "replace", lambda session: None)
        monkeypatch.setattr(Session, "cut", lambda session: None)  # as if it waited for a thread
    assert not keeper.next
    assert reasons(caplog) == [("the cache is not kept for the next run", "a request under way does not end")]


async def test_a_disk_below_it_is_closed_and_opened_again(config: ServerConfig, keeper: Keeper, tmp_path: Path) -> None:
    with_disk = attrs.evolve(config, disks=(DiskPlace(tmp_path / "disk", 64 << 20),))
    await fill(with_disk, keeper)
    assert await there(with_disk, keeper) == len(KEYS)


@pytest.mark.parametrize("name", ["infinistore-arena-0", "infinistore-shard-1-of-2-arena-0"])
def test_a_server_of_no_certain_size_is_as_large_as_what_was_kept(name: str) -> None:
    """The default is a part of the memory that is left."""
    arena = os.memfd_create("arena")
    try:
        os.ftruncate(arena, 3 << 20)
        manager = ServiceManager(kept={name: arena, f"{name}0": arena, "infinistore-state": arena})
        default = ServerConfig(prealloc_bytes=DefaultSize(1 << 20))
        assert as_large_as_kept(default, manager).prealloc_bytes == 6 << 20
        assert as_large_as_kept(default, ServiceManager()) == default
        exact = ServerConfig(prealloc_bytes=1 << 20)
        assert as_large_as_kept(exact, manager) == exact
    finally:
        os.close(arena)
