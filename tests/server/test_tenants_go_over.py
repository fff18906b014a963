"""A server with tenants is taken over, or kept by its service manager: each tenant has
its blocks afterwards, in the memory of its group, and nobody has another's.
"""

import os
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing

import infinistore
from infinistore.access.tenants import SUCCESSOR
from infinistore.client.api.store import AsyncStore
from infinistore.config import ServerConfig
from infinistore.disk_settings import DiskPlace
from infinistore.errors import AuthenticationFailed, ConfigError, LimitExceeded, PermissionDenied
from infinistore.protocol.messages import Exists, Keys, Purge, Statistics
from infinistore.server import Server
from infinistore.server.composition import run_server
from infinistore.server.environment import Environment
from infinistore.sizes import KIB, MIB
from infinistore.transports.sockets.trio_streams import connect_tcp, connect_unix
from tests.server import tenants_files
from tests.server.running import Peer, make_config
from tests.server.tenants_files import TOKENS, write
from tests.server.test_kept import Keeper, reasons

Tenants = dict[str, dict[str, str]]
KEYS = [f"key {number}" for number in range(12)]
SOLO: Tenants = {"ann": {"group": "a"}, "ben": {"group": "b"}}
GROUPS = "groups: {a: 128KiB, b: 128KiB, default: 128KiB}\n"
SHARED: Tenants = {"ann": {}, "ben": {}}


def block_of(name: str, key: str) -> bytes:
    return f"{name}'s {key}".encode().ljust(KIB)


def text_of(tenants: Tenants, groups: str = "") -> str:
    return tenants_files.text_of(groups, **tenants)


@attrs.define
class Place:
    """Where servers with tenants serve, one after the other. `kept`: the first one
    drains, and a service manager keeps what it has; else the next one takes over."""

    folder: Path
    kept: bool
    keeper: Keeper = attrs.field(factory=Keeper)

    def config(self, text: str | None, **settings: Any) -> ServerConfig:
        if text is not None:
            settings["tenants"] = write(self.folder, text)
        plain: dict[str, Any] = {"prealloc_bytes": 512 * KIB, "unix_socket": str(self.folder / "socket")}
        return make_config(**{**plain, "drain_timeout_s": 600.0, **settings})

    @asynccontextmanager
    async def serving(
        self, text: str | None, *, take_over: bool = False, **settings: Any
    ) -> AsyncGenerator[tuple[Server, trio.Event]]:
        """A server until the block is left, and what is set when it has ended."""
        config = self.config(text, take_over=take_over, **settings)
        ended = trio.Event()

        async def run(task_status: trio.TaskStatus[Server]) -> None:
            environment = Environment(service_manager=Keeper(self.keeper)) if self.kept else None
            await run_server(config, environment=environment, on_listening=task_status.started)
            ended.set()

        async with trio.open_nursery() as nursery:
            server: Server = await nursery.start(run)
            yield server, ended
            if self.kept:
                server.drain()
                await ended.wait()
            nursery.cancel_scope.cancel()

    @asynccontextmanager
    async def upgraded(
        self, before: str | None, after: str | None, act: Callable[[], Any] | None = None, **settings: Any
    ) -> AsyncGenerator[Server]:
        """The second of two servers; `act` is awaited at the first one. `then` are
        other settings of the second."""
        later = settings.pop("then", {})
        async with AsyncExitStack() as stack:
            first = self.serving(before, **settings)
            _, ended = await stack.enter_async_context(first)
            if act is not None:
                await act()
            if self.kept:
                await stack.aclose()
            async with self.serving(after, take_over=not self.kept, **{**settings, **later}) as (server, _):
                await ended.wait()
                yield server

    def open(self, name: str, scheme: str = "unix") -> AbstractAsyncContextManager[AsyncStore]:
        return infinistore.open_store(f"{scheme}://{self.folder / 'socket'}", token=TOKENS[name])

    async def fill(self, *names: str) -> None:
        for name in names:
            async with self.open(name) as store:
                await store.put_many({key: block_of(name, key) for key in KEYS})

    async def check(self, name: str, there: int = len(KEYS)) -> None:
        """The tenant has so many of its blocks, and no other."""
        async with self.open(name) as store:
            values = await store.get_many(KEYS)
            found = {key: bytes(value) for key, value in zip(KEYS, values, strict=True) if value is not None}
            assert found == {key: block_of(name, key) for key in found}
            assert (len(found), len(await store.keys())) == (there, there)


@pytest.fixture(params=["taken over", "kept"])
def place(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    made = Place(tmp_path, kept=request.param == "kept")
    yield made
    made.keeper.forget()


@pytest.fixture
def taken(tmp_path: Path) -> Place:
    return Place(tmp_path, kept=False)


def files_of(server: Server) -> dict[str, list[int]]:
    """Which files the memory of each group is."""
    assert server.tenancy is not None
    groups = server.tenancy.groups().items()
    return {name: [os.fstat(one.fd).st_ino for one in group.tenants.pool.arenas] for name, group in groups}


@pytest.mark.parametrize(("tenants", "groups"), [(SHARED, ""), (SOLO, GROUPS)], ids=["one pool", "groups"])
async def test_each_tenant_goes_on_with_its_own_blocks(place: Place, tenants: Tenants, groups: str) -> None:
    text = text_of(tenants, groups)
    async with AsyncExitStack() as stack:
        old, ended = await stack.enter_async_context(place.serving(text))
        await place.fill("ann", "ben")
        files = files_of(old)
        if place.kept:
            await stack.aclose()
        async with place.serving(text, take_over=not place.kept) as (new, _):
            await ended.wait()
            assert files_of(new) == files
            for name in ("ann", "ben"):
                await place.check(name)
            async with place.open("ann") as ann:
                await ann.purge()
            await place.check("ann", 0)
            await place.check("ben")


async def test_over_any_number_of_servers(place: Place) -> None:
    text = text_of(SOLO, GROUPS)
    async with place.upgraded(text, text, lambda: place.fill("ann", "ben")):
        if not place.kept:
            async with place.serving(text, take_over=True):
                for name in ("ann", "ben"):
                    await place.check(name)
    if place.kept:
        async with place.serving(text):
            await place.check("ann")


async def test_who_is_no_tenant_any_more_loses_its_blocks_and_nobody_gets_them(place: Place) -> None:
    before, after = text_of(SHARED), text_of({"ann": {}, "cleo": {}})
    async with place.upgraded(before, after, lambda: place.fill("ann", "ben")) as server:
        await place.check("ann")
        await place.check("cleo", 0)
        with pytest.raises(AuthenticationFailed):
            await place.check("ben")
        assert server.core.statistics().used_bytes == len(KEYS) * KIB


async def test_who_has_another_group_loses_its_blocks(place: Place) -> None:
    before = text_of({"ann": {"group": "a"}, "ben": {}}, GROUPS)
    after = text_of({"ann": {"group": "a"}, "ben": {"group": "b"}}, GROUPS)
    async with place.upgraded(before, after, lambda: place.fill("ann", "ben")) as server:
        await place.check("ann")
        await place.check("ben", 0)
        assert server.core.statistics().keys == len(KEYS)


async def test_lower_limits_hold_from_the_next_put_on(place: Place) -> None:
    after = text_of({"ann": {"max_bytes": "4KiB"}, "ben": {"max_keys": "5"}})
    async with place.upgraded(text_of(SHARED), after, lambda: place.fill("ann", "ben")):
        for name, most in (("ann", 4), ("ben", 5)):
            async with place.open(name) as store:
                await store.put("new", bytes(KIB))
                assert len(await store.keys()) == most
        async with place.open("ann") as ann:
            with pytest.raises(LimitExceeded, match="max_bytes=4 KiB"):
                await ann.put_many({str(n): bytes(KIB) for n in range(5)})


@pytest.mark.parametrize("stays", [True, False], ids=["still a tenant", "no tenant any more"])
async def test_what_a_client_leases_stays_in_quarantine_for_its_tenant(place: Place, stays: bool) -> None:
    tenants = {**SOLO, "ann": {"group": "a", "max_bytes": "64KiB"}}
    after = tenants if stays else {"ben": SOLO["ben"]}
    lease = AsyncExitStack()
    views: list[Any] = []

    async def act() -> None:
        await place.fill("ann", "ben")
        store = await lease.enter_async_context(place.open("ann", "shm"))
        views.extend(await lease.enter_async_context(store.lease(KEYS[:3])))

    async with place.upgraded(text_of(tenants, GROUPS), text_of(after, GROUPS), act) as server:
        assert server.tenancy is not None
        a, b = (server.tenancy.groups()[name].tenants.pool for name in "ab")
        assert server.core.statistics().quarantined_bytes == (3 * KIB if stays else 0)
        assert (a.used_bytes, b.used_bytes) == ((len(KEYS) if stays else 3) * KIB, len(KEYS) * KIB)
        if stays:
            async with place.open("ann") as ann:
                await ann.delete(KEYS)
                for number in range(200):
                    await ann.put(f"fill {number}", bytes(KIB))
        assert [bytes(view) for view in views] == [block_of("ann", key) for key in KEYS[:3]]
        views.clear()
        await lease.aclose()
        while server.core.statistics().quarantined_bytes or (not stays and a.used_bytes):
            await place.check("ben")


async def test_a_hold_goes_on_and_only_its_tenant_can_end_it(place: Place) -> None:
    held: list[str] = []

    async def act() -> None:
        await place.fill("ann", "ben")
        async with place.open("ann") as ann:
            held.append((await ann.match_prefix(KEYS, hold_s=60)).hold)

    async with place.upgraded(text_of(SHARED), text_of(SHARED), act) as server:
        assert server.core.statistics().held_bytes == len(KEYS) * KIB
        async with place.open("ben") as ben, place.open("ann") as ann:
            assert await ben.release_hold(held[0]) is False
            assert await ann.release_hold(held[0]) is True


@pytest.mark.parametrize(
    ("before", "after", "settings", "reason"),
    [
        ({"ann": {"group": "a"}}, {"cleo": {"group": "a"}}, {}, "clients of tenant 'ann' may write to its memory"),
        (SOLO, {**SOLO, "cleo": {"group": "a"}}, {}, "clients of tenant 'ann' may write to its memory"),
        (
            {**SOLO, "cleo": {"group": "a"}},
            {**SOLO, "cleo": {"group": "a"}},
            {"shm_writes": "on", "then": {"shm_writes": "auto"}},
            "clients may write to its memory, and now not all of them may",
        ),
    ],
    ids=["another tenant", "one more tenant", "writes turned off"],
)
async def test_memory_that_clients_may_write_to_becomes_nobody_elses(
    taken: Place, before: Tenants, after: Tenants, settings: dict[str, Any], reason: str
) -> None:
    first, second = (text_of({**tenants, "ben": {}}, GROUPS) for tenants in (before, after))
    async with taken.upgraded(first, second, lambda: taken.fill("ann", "ben"), **settings) as server:
        assert server.core.statistics().keys == (0 if settings else len(KEYS))
        if "ann" in after:
            await taken.check("ann", 0)
        if not settings:
            await taken.check("ben")


async def test_whoever_could_write_stays_alone_also_where_nobody_may_write_any_more(place: Place) -> None:
    text = text_of(SOLO, GROUPS)
    async with place.upgraded(text, text, lambda: place.fill("ann"), then={"shm_writes": "off"}) as server:
        await place.check("ann")
        write(place.folder, text_of({**SOLO, "cleo": {"group": "a"}}, GROUPS))
        (problem,) = await server.reloads.run()
        assert "group 'a' had one tenant" in problem


async def test_a_group_whose_memory_clients_only_read_starts_empty_and_the_others_do_not(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    team = text_of({"ann": {"group": "a"}, "cleo": {"group": "a"}, "ben": {"group": "b"}}, GROUPS)

    async def act() -> None:
        await place.fill("ann", "ben")
        async with place.open("cleo", "shm") as cleo:
            await cleo.put("key 0", b"1")
            async with cleo.lease(["key 0"]) as views:  # who maps it, seals it
                assert views[0] is not None

    async with place.upgraded(team, team, act):
        await place.check("ben")
        await place.check("cleo", 0)
        await place.check("ann", 0)
    assert ("the cache of a group starts empty", "nobody may map arena 0 to write any more (--shm-writes off)") in (
        reasons(caplog)
    )


async def test_a_group_that_is_smaller_starts_empty_and_one_that_is_larger_does_not(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    after = text_of(SOLO, "groups: {a: 64KiB, b: 192KiB, default: 128KiB}\n")
    async with place.upgraded(text_of(SOLO, GROUPS), after, lambda: place.fill("ann", "ben")) as server:
        await place.check("ann", 0)
        await place.check("ben")
        assert [len(files) for files in files_of(server).values()] == [1, 2, 1]
    assert [message for message, _ in reasons(caplog)] == ["the cache of a group starts empty"]


async def test_a_group_that_is_gone_costs_the_others_nothing(place: Place) -> None:
    after = text_of({"ben": SOLO["ben"], "ann": {}}, "groups: {b: 128KiB, default: 128KiB}\n")
    async with place.upgraded(text_of(SOLO, GROUPS), after, lambda: place.fill("ann", "ben")):
        await place.check("ben")
        await place.check("ann", 0)


@pytest.mark.parametrize("tenants_first", [True, False])
async def test_a_server_with_tenants_and_one_without_share_no_cache(place: Place, tenants_first: bool) -> None:
    async def act() -> None:
        if tenants_first:
            await place.fill("ann")
        else:
            async with infinistore.open_store(f"unix://{place.folder / 'socket'}") as store:
                await store.put("key", b"1")

    both = text_of(SHARED), None
    if tenants_first and not place.kept:
        async with place.serving(both[0]):
            with pytest.raises(ConfigError, match="give the token of a tenant"):
                await run_server(place.config(None, take_over=True), on_listening=print)
        return
    before, after = both if tenants_first else both[::-1]
    async with place.upgraded(before, after, act) as server:
        assert server.core.statistics().keys == 0


async def test_disks_of_tenants_go_over_closed(place: Place) -> None:
    text = text_of({"ann": {"disk_max_bytes": "64MiB"}, "ben": {}})
    disks = (DiskPlace(place.folder / "disk", 128 * MIB),)

    async def act() -> None:
        await place.fill("ann", "ben")
        async with place.open("ann") as ann:
            assert await ann.flush(KEYS[:1]) == 1

    async with place.upgraded(text, text, act, disks=disks, disk_admission="eager"):
        await place.check("ann")
        await place.check("ben")
        async with place.open("ann") as ann:
            await ann.put("new", b"new")
            assert await ann.flush(["new", *KEYS]) == 1 + len(KEYS)


async def test_a_tenant_gets_disks_while_clients_of_its_last_run_are_still_there(place: Place) -> None:
    """Its store is there already, for what they lease."""
    ann = {"ann": {"disk_max_bytes": "64MiB"}}
    before, after = text_of({**ann, "ben": {"group": "b"}}, GROUPS), text_of(ann, GROUPS)
    disks = (DiskPlace(place.folder / "disk", 256 * MIB),)
    lease = AsyncExitStack()

    async def act() -> None:
        await place.fill("ben")
        store = await lease.enter_async_context(place.open("ben", "shm"))
        await lease.enter_async_context(store.lease(KEYS[:3]))

    async with place.upgraded(before, after, act, disks=disks) as server:
        again = {**ann, "ben": {"group": "b", "disk_max_bytes": "64MiB"}}
        write(place.folder, text_of(again, GROUPS))
        (problem,) = await server.reloads.run()
        assert "clients of tenant 'ben' from before the last restart still use its memory" in problem
        await lease.aclose()
        while await server.reloads.run():
            await trio.lowlevel.checkpoint()


async def test_who_takes_over_may_do_nothing_else(taken: Place) -> None:
    async with taken.serving(text_of(SHARED)):
        await taken.fill("ann")
        peer = Peer(await connect_unix(str(taken.folder / "socket")))
        await peer.hello(SUCCESSOR)
        for request in (Purge(), Exists(Keys(["key 0"])), Statistics()):
            with pytest.raises(PermissionDenied):
                await peer.ask(request)
        peer.close()
        await taken.check("ann")


async def test_only_the_user_of_the_server_takes_over(taken: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinistore.server.security.os.geteuid", lambda: os.getuid() + 1)
    async with taken.serving(text_of(SHARED)) as (server, _):
        monkeypatch.undo()
        streams = [
            await connect_unix(str(taken.folder / "socket")),
            await connect_tcp("127.0.0.1", server.addresses.port),
        ]
        for stream in streams:
            peer = Peer(stream)
            with pytest.raises(AuthenticationFailed, match="only of the server's user"):
                await peer.hello(SUCCESSOR)
            peer.close()
