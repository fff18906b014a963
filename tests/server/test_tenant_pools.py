"""What the tenants of a running server have of its memory: their own keys, their own
room, and the memory of their own group.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

import infinistore
from infinistore.errors import ConfigError, LimitExceeded, PermissionDenied
from infinistore.protocol.codec import pack_u64
from infinistore.protocol.messages import (
    Abort,
    Exists,
    Keys,
    MapArenas,
    MapArenasReply,
    MapTables,
    MapTablesReply,
    Prepare,
    Put,
    Reserve,
    ReserveReply,
)
from infinistore.server.budgets import Departures, Rates, TokenBucket
from infinistore.server.connection import LINGER_S
from infinistore.tenant_limits import TenantLimits
from infinistore.transports.base import drive
from tests.server.http_client import ask
from tests.server.running import KIB, Peer, RunningServer, peer_with, until
from tests.server.tenants_files import TOKENS, Serving, store_of, text_of, write

BLOCK = b"x" * KIB
GROUPS = "groups: {team: 64KiB, solo: 64KiB}\n"
TEAM = text_of(GROUPS, ann={"group": "team"}, ben={"group": "team"}, cleo={"group": "solo"})


async def test_one_tenant_learns_nothing_of_anothers_keys(serving: Serving) -> None:
    async with (
        serving(text_of(ann={}, ben={})) as server,
        store_of(server, "ann") as ann,
        store_of(server, "ben") as ben,
    ):
        await ann.put("prompt", BLOCK)
        assert not await ben.exists("prompt")
        assert await ben.match_prefix(["prompt"]) == 0
        assert (await ben.get_many(["prompt"])) == [None]
        listed = await ben.keys()
        assert not listed
        assert await ben.delete(["prompt"]) == 0
        assert await ben.purge() == await ben.evict(0.0, 0.0) == 0
        stats = await ben.stats(details=True)
        assert (stats.store.keys, stats.store.used_bytes, stats.store.puts) == (0, 0, 0)
        assert stats.server is not None
        assert stats.details is not None
        assert stats.server.received_bytes == 0
        assert stats.server.connections_open == len(stats.details.clients) > 0
        assert not (stats.details.prefixes or stats.details.operations or stats.details.arenas)
        assert bytes(await ann.get("prompt")) == BLOCK
        await ben.put("prompt", b"y" * KIB)
        assert bytes(await ann.get("prompt")) == BLOCK


async def test_a_tenant_at_its_limit_evicts_its_own_and_is_told_when_it_cannot(serving: Serving) -> None:
    text = text_of(ann={"max_bytes": "4KiB"}, ben={})
    async with serving(text) as server, store_of(server, "ann") as ann, store_of(server, "ben") as ben:
        await ben.put("b", BLOCK)
        for number in range(9):
            await ann.put(str(number), BLOCK)
        assert await ann.exists_many([str(number) for number in range(9)]) == [False] * 5 + [True] * 4
        assert await ben.exists("b")
        with pytest.raises(LimitExceeded, match="tenant 'ann' may take max_bytes=4 KiB"):
            await ann.put_many([(f"x{number}", BLOCK) for number in range(5)])


async def test_a_tenant_keeps_what_is_reserved_for_it(serving: Serving) -> None:
    text = text_of(ann={"reserved_bytes": "32KiB"}, ben={})
    async with serving(text) as server, store_of(server, "ann") as ann, store_of(server, "ben") as ben:
        keys = [f"a{number}" for number in range(32)]
        await ann.put_many([(key, BLOCK) for key in keys])
        for number in range(300):
            await ben.put(f"b{number}", BLOCK)
        assert all(await ann.exists_many(keys))


async def mapped(server: RunningServer, name: str) -> tuple[MapArenasReply, list[int], MapTablesReply]:
    """What a client of this tenant maps, and which files these arenas are."""
    peer = await local_peer(server, name)
    descriptors: list[int] = []
    arenas = await drive(peer.connection.request(MapArenas(), descriptors=descriptors), peer.stream)
    tables = await drive(peer.connection.request(MapTables(), descriptors=descriptors), peer.stream)
    peer.close()
    assert isinstance(arenas, MapArenasReply)
    assert isinstance(tables, MapTablesReply)
    files = [os.fstat(descriptor).st_ino for descriptor in descriptors[: len(arenas.lengths)]]
    for descriptor in descriptors:
        os.close(descriptor)
    return arenas, files, tables


async def test_a_client_maps_the_pool_of_its_group_alone(serving: Serving) -> None:
    async with serving(TEAM) as server:
        tenancy = server.server.tenancy
        assert tenancy is not None
        groups = tenancy.groups()
        for name, group, writable in [("ann", "team", False), ("ben", "team", False), ("cleo", "solo", True)]:
            arenas, files, _ = await mapped(server, name)
            assert files == [os.fstat(groups[group].tenants.pool.arenas[0].fd).st_ino]
            assert arenas.writable is writable


async def test_tenants_of_no_group_map_nothing_and_send_everything(serving: Serving) -> None:
    async with serving(text_of(ann={}, ben={})) as server:
        arenas, _, tables = await mapped(server, "ann")
        assert (len(arenas.lengths), arenas.writable, tables.granule_bytes) == (0, False, 0)
        async with store_of(server, "ann") as ann:
            await ann.put("k", BLOCK)
            assert bytes(await ann.get("k")) == BLOCK


async def local_peer(server: RunningServer, name: str) -> Peer:
    return await peer_with(server, TOKENS[name], "unix")


async def test_tenants_of_no_group_read_long_blocks_by_the_unix_socket(serving: Serving) -> None:
    block = os.urandom(200 * KIB)  # too long for the reply to a lease
    async with serving(text_of(ann={}, ben={}), prealloc_bytes=1024 * KIB) as server:
        async with store_of(server, "ann") as ann:
            for number in range(2):
                await ann.put(str(number), block)
                assert bytes(await ann.get(str(number))) == block
                buffer = bytearray(len(block))
                assert await ann.get_many_into([(str(number), memoryview(buffer))]) == [len(block)]
                assert buffer == block
            async with ann.lease(["0", "gone"]) as (found, missing):
                assert bytes(found or b"") == block
                assert missing is None
            stats = await ann.stats()
            assert (stats.transport, stats.transport_reason) == ("unix", "the server lets this client map nothing")
        async with store_of(server, "ann") as ann, ann.lease(["1"]) as (found,):  # as the first request
            assert bytes(found or b"") == block


@pytest.mark.parametrize("text", [text_of(ann={}, ben={}), TEAM], ids=["no group", "a group of several"])
async def test_who_may_not_write_to_the_pool_gets_no_room_that_shows_what_others_had(
    serving: Serving, text: str
) -> None:
    async with serving(text) as server:
        async with store_of(server, "ann") as ann:
            await ann.put_many([(str(number), BLOCK) for number in range(40)])
            await ann.delete([str(number) for number in range(40)])
        ben = await local_peer(server, "ben")
        await ben.ask(MapTables())
        sizes = pack_u64([40 * KIB])
        for request in (Reserve(sizes), Reserve(sizes, spare=True), Prepare(0, Keys(["k"]), sizes, False)):
            with pytest.raises(PermissionDenied, match="clients may not write to the server's memory here"):
                await ben.ask(request)


async def test_room_is_given_back_also_by_who_may_no_longer_write(serving: Serving, tmp_path: Path) -> None:
    async with serving(TEAM) as server:
        cleo = await local_peer(server, "cleo")
        room = await cleo.ask(Reserve(pack_u64([KIB])))
        assert isinstance(room, ReserveReply)
        assert server.core.statistics().reserved_bytes == KIB
        write(tmp_path, TEAM.replace("[read, write, monitor, admin]", "[read]"))
        assert await server.server.reloads.run() == []
        await drive(cleo.connection.notify(Abort(room.reservation)), cleo.stream)
        await cleo.ask(Exists(Keys(["k"])))
        assert server.core.statistics().reserved_bytes == 0


@pytest.mark.parametrize(("setting", "writable"), [("auto", False), ("on", True), ("off", False)])
async def test_in_a_group_of_several_tenants_clients_write_only_if_told_so(
    serving: Serving, setting: str, writable: bool
) -> None:
    async with serving(TEAM, shm_writes=setting) as server:
        arenas, _, tables = await mapped(server, "ann")
        assert arenas.writable is writable
        assert tables.granule_bytes > 0
        async with store_of(server, "ann") as ann, store_of(server, "ben") as ben:
            await ann.put("k", b"a" * KIB)
            await ben.put("k", b"b" * KIB)
            for _ in range(3):
                assert bytes(await ann.get("k")) == b"a" * KIB
                assert bytes(await ben.get("k")) == b"b" * KIB


async def test_limits_change_while_clients_are_served(serving: Serving, tmp_path: Path) -> None:
    text = text_of(ann={}, ben={})
    async with serving(text) as server, store_of(server, "ann") as ann, store_of(server, "ben") as ben:
        await ann.put_many([(str(number), BLOCK) for number in range(20)])
        write(tmp_path, text_of(ann={"max_bytes": "2KiB"}))
        assert await server.server.reloads.run() == []
        await ann.put("new", BLOCK)
        assert (await ann.stats()).store.keys == 2
        with pytest.raises(infinistore.AuthenticationFailed):
            await ben.exists("k")


async def test_the_blocks_of_a_tenant_that_is_removed_go(
    serving: Serving, tmp_path: Path, mock_clock: MockClock
) -> None:
    async with serving(text_of(ann={}, ben={})) as server:
        async with store_of(server, "ben") as ben:
            await ben.put_many([(str(number), BLOCK) for number in range(20)])
            write(tmp_path, text_of(ann={}))
            assert await server.server.reloads.run() == []
            await until(lambda: server.server.telemetry.statistics().errors)
            mock_clock.jump(LINGER_S)  # which the session gives its client to leave
            await server.quiet()
        await trio.testing.wait_all_tasks_blocked()
        assert server.server.core.statistics().used_bytes == 0


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            text_of(ann={"reserved_bytes": "65KiB"}, ben={"reserved_bytes": "64KiB"}),
            "129 KiB .*are reserved for tenants together",
        ),
        (text_of(ann={"group": "elsewhere"}), "elsewhere"),
        (text_of(ann={}, ben={}, cleo={}, ops={}), "4 tenants cannot share 3 connections"),
    ],
)
async def test_limits_that_cannot_hold_change_nothing(
    serving: Serving, tmp_path: Path, text: str, problem: str
) -> None:
    before = text_of(ann={"max_bytes": "2KiB"})
    async with serving(before, max_connections=3) as server, store_of(server, "ann") as ann:
        write(tmp_path, text)
        problems = await server.server.reloads.run()
        assert len(problems) == 1
        with pytest.raises(ConfigError, match=problem):
            raise ConfigError(problems[0])
        await ann.put_many([(str(number), BLOCK) for number in range(2)])
        with pytest.raises(LimitExceeded):
            await ann.put_many([(str(number), BLOCK) for number in range(3)])


async def test_a_group_opened_for_one_tenant_takes_no_other(serving: Serving, tmp_path: Path) -> None:
    async with serving(TEAM) as server:
        moved = text_of(GROUPS, ann={"group": "team"}, ben={"group": "solo"}, cleo={"group": "solo"})
        write(tmp_path, moved)
        (problem,) = await server.server.reloads.run()
        assert "group 'solo' had one tenant when the server started" in problem


async def test_nobody_comes_after_the_one_tenant_of_a_group_that_writes_to_it(serving: Serving, tmp_path: Path) -> None:
    async with serving(TEAM) as server:
        tenants = {"ann": {"group": "team"}}
        write(tmp_path, text_of(GROUPS, **tenants))
        assert await server.server.reloads.run() == []
        write(tmp_path, text_of(GROUPS, ops={"group": "solo"}, **tenants))
        (problem,) = await server.server.reloads.run()
        assert "group 'solo' had one tenant when the server started" in problem
        write(tmp_path, text_of(GROUPS, cleo={"group": "solo"}, **tenants))
        assert await server.server.reloads.run() == []


async def test_an_operator_sees_the_sum_and_clears_everything(serving: Serving) -> None:
    text = text_of(GROUPS, ann={"group": "team"}, cleo={"group": "solo"}, ops={"group": "team", "operator": "true"})
    async with (
        serving(text, manage_port=0) as server,
        store_of(server, "ann") as ann,
        store_of(server, "cleo") as cleo,
    ):
        await ann.put("k", BLOCK)
        await cleo.put("k", BLOCK)
        whole = server.server.core.statistics()
        assert (whole.keys, whole.used_bytes, whole.capacity_bytes) == (2, 2 * KIB, 128 * KIB)
        headers = {"Authorization": f"Bearer {TOKENS['ops']}"}
        management = server.server.addresses.management[0]
        assert (await ask(management, "POST", "/purge", headers=headers)).status == 200
        assert not await ann.exists("k")
        assert not await cleo.exists("k")


@pytest.mark.parametrize(
    ("text", "settings", "problem"),
    [
        (TEAM, {"prealloc_bytes": 100 * KIB}, "the groups of .* have 128 KiB together, and --prealloc-size is 100 KiB"),
        (text_of(ann={"reserved_bytes": "1MiB"}), {}, "group 'default': 1 MiB are reserved for tenants together"),
        (
            text_of(ann={}, ben={}),
            {"max_connections": 1},
            "2 tenants cannot share 1 connections, of which each needs one",
        ),
        (TEAM, {"auto_increase": True}, "--tenants does not go together with --auto-increase"),
    ],
)
async def test_what_does_not_fit_is_refused_at_the_start(
    serving: Serving, text: str, settings: dict[str, Any], problem: str
) -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match=problem), flatten_subgroups=True, allow_unwrapped=True):
        async with serving(text, **settings):
            raise AssertionError("it serves")


# Rates


def test_a_bucket_gives_a_second_at_once_and_then_what_comes() -> None:
    now = 100.0
    bucket = TokenBucket(10, lambda: now)
    assert [bucket.take(1) for _ in range(10)] == [0] * 10
    assert bucket.take(1) == pytest.approx(0.1)
    assert bucket.take(20) == pytest.approx(2.1)
    now += 2.1
    assert bucket.take(0) == pytest.approx(0)
    assert bucket.take(5) == pytest.approx(0.5)
    bucket.set_rate(1)
    assert bucket.take(0) == pytest.approx(5)
    now += 1000
    assert bucket.take(1) == 0
    assert bucket.take(1) == pytest.approx(1)


def test_the_slower_of_two_rates_counts_and_limits_change() -> None:
    rates = Rates(TenantLimits("a", requests_per_s=10, bytes_per_s=1000), Departures(), clock=lambda: 5.0)
    assert rates.take(3000) == pytest.approx(2)
    assert rates.take(0) == pytest.approx(2)
    rates.set_limits(TenantLimits("a"))
    assert rates.take(10**9) == 0
    rates.set_limits(TenantLimits("a", requests_per_s=1))
    assert [rates.take(0), rates.take(0)] == [0, 1]


def test_at_less_than_one_a_second_one_is_kept() -> None:
    bucket = TokenBucket(0.5, lambda: 100.0)
    assert [bucket.take(1), bucket.take(1)] == [0, 2]
    bucket = TokenBucket(10, lambda: 100.0)
    bucket.set_rate(0.5)
    assert [bucket.take(1), bucket.take(1)] == [0, 2]


async def test_who_waits_waits_for_the_limits_of_now(autojump_clock: MockClock) -> None:
    """What is owed stays owed when the rate becomes a tenth."""
    for name in ("requests_per_s", "bytes_per_s"):
        rates = Rates(TenantLimits("a", **{name: 1.0}), Departures())  # type: ignore[arg-type]
        assert await rates.rest(1, None)
        assert rates.pauses == 0
        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(rates.rest, 1, None)
            await trio.sleep(1)
            rates.set_limits(TenantLimits("a", **{name: 0.1}))  # type: ignore[arg-type]
        assert trio.current_time() - start == pytest.approx(21)
        assert rates.pauses == 3


async def test_the_connections_of_a_tenant_share_its_rate_and_nothing_is_dropped(
    serving: Serving, autojump_clock: MockClock
) -> None:
    async with serving(text_of(ann={"requests_per_s": "50"}, ben={})) as server:
        peers = [await local_peer(server, "ann") for _ in range(2)]
        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            for peer in peers:
                nursery.start_soon(ask_often, peer, 40)
        # Each asks once without having to wait for the answer.
        assert trio.current_time() - start == pytest.approx((80 - 50 - 2) / 50)


async def test_a_new_connection_of_a_tenant_waits_for_what_its_others_took(
    serving: Serving, autojump_clock: MockClock
) -> None:
    async with serving(text_of(ann={"bytes_per_s": "32KiB"}, ben={})) as server:
        first = await local_peer(server, "ann")
        start = trio.current_time()
        await first.ask(Put(Keys(["k"]), pack_u64([48 * KIB]), False), bytes(48 * KIB))
        first.close()
        second = await local_peer(server, "ann")
        await second.ask(Exists(Keys(["k"])))
        assert trio.current_time() - start == pytest.approx(0.5)


async def ask_often(peer: Peer, count: int) -> None:
    for _ in range(count):
        await peer.ask(Exists(Keys(["k"])))
