"""The sessions of tenants: their places, their pauses, and what a reload ends."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import example, given
from hypothesis import strategies as st
from trio.testing import MockClock

import infinistore
from infinistore.errors import LimitExceeded, PermissionDenied, ServerReplaced, StoreUnavailable
from infinistore.protocol.codec import pack_u64
from infinistore.protocol.messages import (
    Exists,
    ExistsReply,
    Get,
    Keys,
    Lease,
    LeaseReply,
    MapArenas,
    MapTables,
    Prepare,
    PrepareReply,
    Put,
)
from infinistore.protocol.shared_tables import tables_are_safe_here
from infinistore.server.connection import Traffic
from infinistore.server.session.session import SessionRegistry
from infinistore.tenant_limits import TenantLimits
from tests.server.raw_tables import map_tables
from tests.server.running import KIB, Peer, RunningServer, peer_with, until
from tests.server.tenants_files import TOKENS, Serving, text_of, write
from tests.transports.certificates import Files, issue

BLOCK = b"x" * KIB


async def reload(server: RunningServer, folder: Path, text: str) -> None:
    write(folder, text)
    assert await server.server.reloads.run() == []


async def peer_of(server: RunningServer, name: str, transport: str = "tcp", files: Files | None = None) -> Peer:
    return await peer_with(server, TOKENS[name], transport, files)


async def put(peer: Peer, key: str, size: int = KIB) -> None:
    await peer.ask(Put(Keys([key]), pack_u64([size]), checksums=False), bytes(size))


async def present(peer: Peer, key: str) -> bool:
    reply = await peer.ask(Exists(Keys([key])))
    assert isinstance(reply, ExistsReply)
    return reply.present == b"\1"


# Pauses

SLOW = text_of(ann={"bytes_per_s": "1KiB"}, ben={})
"""A put of 64 KiB makes ann pause for a minute."""


@pytest.mark.parametrize("pipelined", [False, True], ids=["idle", "pipelined"])
@pytest.mark.parametrize("transport", ["tcp", "unix", "tls"])
async def test_a_client_that_leaves_in_a_pause_keeps_no_place(
    serving: Serving, tmp_path: Path, transport: str, pipelined: bool, mock_clock: MockClock
) -> None:
    """The clock stands still: no pause is over."""
    files = issue(tmp_path) if transport == "tls" else None
    settings = {} if files is None else {"tls_cert": files.cert, "tls_key": files.key}
    async with serving(SLOW, **settings) as server:
        peer = await peer_of(server, "ann", transport, files)
        await put(peer, "k", 64 * KIB)
        if pipelined:
            await peer.send_head(Exists(Keys(["k"])))
        await peer_of(server, "ann", transport, files)  # pauses from its first request on


async def test_who_leaves_and_comes_again_pays_all_the_same(serving: Serving, mock_clock: MockClock) -> None:
    async with serving(SLOW) as server:
        peer = await peer_of(server, "ann")
        await put(peer, "k", 64 * KIB)
        peer.close()
        await server.quiet()
        again = await peer_of(server, "ann", "unix")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(again.ask, Exists(Keys(["k"])))
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(30)
            await trio.testing.wait_all_tasks_blocked()
            assert server.server.telemetry.statistics().requests == 1  # the put
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("limits", [{}, {"bytes_per_s": "1GiB"}, {"requests_per_s": "100"}], ids=str)
async def test_new_rates_hold_for_a_session_that_pauses(
    serving: Serving, tmp_path: Path, limits: dict[str, str], autojump_clock: MockClock
) -> None:
    async with serving(SLOW) as server, trio.open_nursery() as nursery:
        peer = await peer_of(server, "ann", "unix")
        await put(peer, "k", 64 * KIB)
        answered = trio.Event()

        async def ask() -> None:
            assert await present(peer, "k")
            answered.set()

        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        assert not answered.is_set()
        await reload(server, tmp_path, text_of(ann=limits, ben={}))
        start = trio.current_time()
        await answered.wait()
        assert trio.current_time() - start < 1


# Places


async def test_one_tenant_cannot_take_all_places(serving: Serving) -> None:
    async with serving(text_of(ann={}, ben={}), max_connections=8) as server:
        peers = [await peer_of(server, "ann") for _ in range(6)]
        with pytest.raises(
            LimitExceeded,
            match="tenant 'ann' has 6 of the server's 8 connections, and the 2 that are left are kept for other "
            "tenants; close some, or raise --max-connections",
        ):
            await peer_of(server, "ann")
        peers += [await peer_of(server, "ben") for _ in range(2)]


async def test_a_tenant_has_the_connections_that_the_file_gives_it(serving: Serving, tmp_path: Path) -> None:
    async with serving(text_of(ann={"max_connections": "2"}, ben={})) as server:
        peers = [await peer_of(server, "ann") for _ in range(2)]
        with pytest.raises(LimitExceeded, match="tenant 'ann' has its max_connections=2 connections; close some"):
            await peer_of(server, "ann")
        assert server.server.sessions.refused == 1
        await reload(server, tmp_path, text_of(ann={"max_connections": "3"}, ben={}))
        peers.append(await peer_of(server, "ann"))


class Visitor:
    """A session, as far as the registry is about it."""

    def __init__(self, tenant: str) -> None:
        self.identity = self
        self.tenant = tenant
        self.traffic = Traffic()


@given(
    most=st.integers(1, 30),
    tenants=st.integers(2, 6),
    first=st.integers(0, 30),
    steps=st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=200),
)
@example(10, 6, 10, [(number, True) for number in range(6)])
def test_each_tenant_always_gets_its_share_of_half_the_places_and_one_at_least(
    most: int, tenants: int, first: int, steps: list[tuple[int, bool]]
) -> None:
    registry = SessionRegistry(most, "close some")
    visitors: list[Any] = []
    has: Counter[str] = Counter()
    for number, comes in [(0, True)] * first + steps:
        name = f"t{number % tenants}"
        if not comes:
            leaving = next((one for one in visitors if one.tenant == name), None)
            if leaving is not None:
                visitors.remove(leaving)
                registry.remove(leaving)
                has[name] -= 1
            continue
        try:
            registry.check_free(TenantLimits(name), tenants)
        except LimitExceeded:
            assert has[name] >= max(most // 2 // tenants, min(1, most // tenants))
            continue
        visitors.append(Visitor(name))
        registry.add(visitors[-1])
        has[name] += 1
        assert len(registry) <= most


# What a reload ends

needs_tables = pytest.mark.skipif(not tables_are_safe_here(), reason="tables are for x86-64 only")
ALONE = "groups: {solo: 64KiB}\n"


@needs_tables
@pytest.mark.parametrize("removed", [False, True], ids=["without the role", "removed"])
async def test_what_is_committed_through_tables_after_a_reload_took_the_role_is_not_there(
    serving: Serving, tmp_path: Path, removed: bool
) -> None:
    reader = {"group": "solo", "roles": "[read]"}
    async with serving(text_of(ALONE, ann={"group": "solo"})) as server:
        peer = await peer_of(server, "ann", "unix")
        tables = await map_tables(peer)
        reply = await peer.ask(Prepare(0, Keys(["k"]), pack_u64([KIB]), checksums=False))
        assert isinstance(reply, PrepareReply)
        assert reply.accepted
        await reload(server, tmp_path, text_of(ALONE, **({} if removed else {"ann": reader})))
        tables.word.commit(reply.reservation, pack_u64([]))
        assert server.core.statistics().keys == 0
        with pytest.raises(StoreUnavailable if not removed else infinistore.AuthenticationFailed):
            await peer.ask(Exists(Keys(["k"])))
        assert server.core.statistics().keys == 0  # although its client has not hung up


@needs_tables
@pytest.mark.parametrize("kept", ["read", "write"])
async def test_a_session_with_memory_of_the_server_ends_with_the_role_that_it_loses(
    serving: Serving, tmp_path: Path, kept: str
) -> None:
    async with serving(text_of(ALONE, ann={"group": "solo"})) as server:
        mapping, plain = await peer_of(server, "ann", "unix"), await peer_of(server, "ann", "unix")
        for request in (MapArenas(), MapTables()):
            await mapping.ask(request)
        await reload(server, tmp_path, text_of(ALONE, ann={"group": "solo", "roles": f"[{kept}]"}))
        with pytest.raises(ServerReplaced, match="what tenant ann may do has changed, connect again"):
            await mapping.ask(Exists(Keys(["k"])))
        asked: dict[str, tuple[Any, bytes]] = {
            "read": (Get(Keys(["k"]), pack_u64()), b""),
            "write": (Put(Keys(["k"]), pack_u64([1]), False), b"x"),
        }
        await plain.ask(*asked.pop(kept))
        ((lost, payload),) = asked.values()
        with pytest.raises(PermissionDenied):
            await plain.ask(lost, payload)


async def test_a_session_that_loses_no_role_over_blocks_goes_on_with_what_it_maps(
    serving: Serving, tmp_path: Path
) -> None:
    roles = {"group": "solo", "roles": "[read, write, admin]"}
    async with serving(text_of(ALONE, ann=roles)) as server:
        peer = await peer_of(server, "ann", "unix")
        await peer.ask(MapArenas())
        await reload(server, tmp_path, text_of(ALONE, ann={**roles, "roles": "[read, write, monitor]"}))
        assert not await present(peer, "k")


async def test_a_client_notices_only_that_it_may_no_longer_write(serving: Serving, tmp_path: Path) -> None:
    async with serving(text_of(ALONE, ann={"group": "solo"})) as server:
        url = f"shm://{server.unix_path}"
        async with infinistore.open_store(url, token=TOKENS["ann"]) as store:
            await store.put("k", BLOCK)
            assert bytes(await store.get("k")) == BLOCK
            await reload(server, tmp_path, text_of(ALONE, ann={"group": "solo", "roles": "[read]"}))
            assert bytes(await store.get("k")) == BLOCK
            with pytest.raises(PermissionDenied, match="needs the role write"):
                await store.put("k", BLOCK)


async def test_a_removed_tenant_whose_client_hangs_up_late_is_forgotten(serving: Serving, tmp_path: Path) -> None:
    text = "groups: {solo: 64KiB, other: 32KiB}\n"
    both = {"ann": {"group": "solo"}, "ben": {"group": "other"}}
    async with serving(text_of(text, **both)) as server:
        peer = await peer_of(server, "ann", "unix")
        await peer.ask(MapArenas())
        await put(peer, "k")
        await peer.ask(Lease(Keys(["k"]), pack_u64()))
        await reload(server, tmp_path, text_of(text, ben=both["ben"]))
        tenancy = server.server.tenancy
        assert tenancy is not None
        tenants = tenancy.groups()["solo"].tenants
        await until(lambda: tenants.leaving == 1)  # its client may still read what it has leased
        peer.close()
        await server.quiet()
        await until(lambda: not tenants.leaving)
        assert tenants.pool.used_bytes == 0


async def test_a_session_that_maps_nothing_is_told_no_places(serving: Serving) -> None:
    async with serving(text_of(ann={}, ben={})) as server:
        ann, ben = await peer_of(server, "ann"), await peer_of(server, "ben", "unix")
        await put(ann, "a")
        await put(ben, "b")  # at a place that is not 0
        for inline_bytes in (0, 2 * KIB):
            reply = await ben.ask(Lease(Keys(["b"]), pack_u64(), inline_bytes))
            assert isinstance(reply, LeaseReply)
            assert list(reply.sizes) == [KIB]
            assert list(reply.places) == [0]
            await ben.payload()


@pytest.mark.parametrize(
    ("keys", "transport"),
    [
        ({}, "unix"),
        ({"roles": "[monitor]"}, "unix"),
        ({"group": "solo", "roles": "[write, monitor]"}, "unix"),
        ({"group": "solo"}, "shm"),
    ],
    ids=str,
)
async def test_statistics_name_the_way_that_blocks_take(serving: Serving, keys: dict[str, str], transport: str) -> None:
    groups = ALONE if "group" in keys else ""
    async with (
        serving(text_of(groups, ann={"roles": "[read, write, monitor]", **keys})) as server,
        infinistore.open_store(f"shm://{server.unix_path}", token=TOKENS["ann"]) as store,
    ):
        assert (await store.stats()).transport == transport
