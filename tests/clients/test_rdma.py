"""Stores that move blocks by RDMA: which way they choose, what they promise when it
fails, and what they register.

The devices are made of memory copies, with the checks of real ones
(`tests.transports.fake_rdma`). What every store does, and the rule machine, run over
them too: see `tests.clients.stores`.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from ipaddress import ip_address
from typing import Any
from unittest import mock

import pytest
import trio

import infinistore
from infinistore import aio, blocking
from infinistore.client.connection.calls import Calls
from infinistore.client.movers import rdma as client_rdma
from infinistore.client.options import Options
from infinistore.errors import (
    ConfigError,
    LimitExceeded,
    StoreUnavailable,
    TransferFailed,
)
from infinistore.server.movers import rdma as server_rdma
from infinistore.transports.rdma.devices import Place
from infinistore.transports.rdma.verbs import DeviceLimits, NoRdma
from tests.bad_days.test_fork import in_child
from tests.clients.on_this_host import way
from tests.clients.rdma_serving import VALUE, best_url, rdma_url, serving, serving_two, until_work_is_held
from tests.server.running import KIB, MIB, make_config, running_server, until
from tests.transports.fake_rdma import Fabric, fabric_in_use

REMOTE_ACCESS = 10
KEYS = [f"key-{number}" for number in range(64)]  # ports decide who owns which, and each owns some
LARGE = DeviceLimits(depth=256, longest_bytes=1 << 30)


# Which way


async def test_a_url_that_asks_for_rdma_gets_it() -> None:
    async with serving() as (fabric, server):
        for url in (rdma_url(server), best_url(server)):
            before = fabric.moved_bytes
            assert await way(url) == ("rdma", "by fake1 port 1")
            assert fabric.moved_bytes - before == 2 * 256 * 1024, "a block went there and back"
        await server.quiet()


async def test_without_a_word_of_rdma_it_is_taken_where_both_sides_have_a_device_and_no_memory_is_shared() -> None:
    async with serving() as (_, server):
        url = f"infinistore://127.0.0.1:{server.server.addresses.port}?inline_bytes=0"
        assert await way(url) == ("tcp", "the server has no Unix socket")
        with mock.patch.object(client_rdma, "there_is_rdma", return_value=True):
            assert await way(url) == ("rdma", "by fake port 1; the server has no Unix socket")
            assert (await way(url.replace("infinistore", "tcp")))[0] == "tcp"


async def test_devices_are_chosen_near_the_addresses_that_the_other_side_knows() -> None:
    with (
        mock.patch.object(client_rdma, "near_address", side_effect=ip_address),
        mock.patch.object(server_rdma, "near_address", side_effect=ip_address),
    ):
        async with serving() as (fabric, server):
            await way(rdma_url(server))
            assert fabric.asked_near == [ip_address("127.0.0.1")] * 2, "where it listens; where the client comes from"


async def test_a_device_is_chosen_for_the_gpu_and_the_server_unless_one_is_named() -> None:
    place = Place(("pci0000:10", "0000:1a:00.0"), 1)
    with (
        mock.patch.object(client_rdma, "near_address", side_effect=ip_address),
        mock.patch.object(client_rdma, "current_gpu", return_value=2),
        mock.patch.object(client_rdma, "gpu_place", return_value=place) as asked,
    ):
        async with serving() as (fabric, server):
            await way(rdma_url(server).replace("&device=fake1", ""))
            assert fabric.asked_for == [(None, None), (ip_address("127.0.0.1"), place)]
            assert [call.args[1] for call in asked.call_args_list] == [2]
            await way(rdma_url(server))
            assert fabric.asked_for[2] == (ip_address("127.0.0.1"), None)


async def test_a_host_without_a_device_falls_back_and_says_why() -> None:
    async with serving() as (fabric, server):
        fabric.absent = "this host has no RDMA device"
        transport, reason = await way(best_url(server))
        assert transport == "tcp"
        assert "this host has no RDMA device" in reason
        with pytest.raises(StoreUnavailable, match="this host has no RDMA device"):
            await way(rdma_url(server))
        await server.quiet()


async def test_shared_memory_comes_before_tcp_where_rdma_cannot_be_had(tmp_path: Any) -> None:
    async with serving(unix_socket=str(tmp_path / "store.sock")) as (fabric, server):
        assert (await way(best_url(server)))[0] == "rdma"
        fabric.absent = "no device"
        transport, reason = await way(best_url(server))
        assert transport == "shm"
        assert "no device" in reason


async def test_a_server_without_a_device_says_so_and_serves_tcp(caplog: pytest.LogCaptureFixture) -> None:
    with fabric_in_use(absent="there is no RDMA device 'mlx5_7' here"):
        async with running_server(make_config(dev_name="mlx5_7")) as server:
            transport, reason = await way(best_url(server))
            assert transport == "tcp"
            assert "the server has no RDMA" in reason
            with pytest.raises(StoreUnavailable, match="the server has no RDMA"):
                await way(rdma_url(server))
    (line,) = [record for record in caplog.records if record.getMessage() == "serving without RDMA"]
    assert line.levelname == "WARNING"
    assert "mlx5_7" in vars(line)["reason"]


async def test_a_server_that_must_have_rdma_does_not_start_without() -> None:
    with fabric_in_use(absent="port 1 of the RDMA device mlx5_0 is DOWN"), pytest.raises(BaseExceptionGroup) as caught:
        async with running_server(make_config(require_rdma=True)):
            raise AssertionError("it started")
    assert caught.group_contains(ConfigError, match="--require-rdma: port 1 .* DOWN")


@pytest.mark.parametrize("fault", ["refuses_queues", "refuses_to_connect"])
async def test_a_device_that_refuses_queue_pairs_means_tcp(fault: str) -> None:
    async with serving() as (fabric, server):
        setattr(fabric, fault, True)
        assert (await way(best_url(server)))[0] == "tcp"
        with pytest.raises(StoreUnavailable, match="no RDMA"):
            await way(rdma_url(server))
        await server.quiet()


# Memory


async def test_blocks_in_registered_memory_are_moved_where_they_are() -> None:
    async with serving(LARGE) as (fabric, server), infinistore.open_store(rdma_url(server)) as store:
        source, target = bytearray(VALUE * 4), bytearray(len(VALUE) * 4)
        size = len(VALUE) // 4
        registrations = [await store.register(source), await store.register(target)]
        spans = [slice(first, first + size) for first in range(0, len(source), size)]
        registered = fabric.registered_bytes
        await store.put_many([(f"{i}", memoryview(source)[span]) for i, span in enumerate(spans)])
        assert fabric.requests == 1, "blocks that touch on both sides are one request"
        await store.get_many_into([(f"{i}", memoryview(target)[span]) for i, span in enumerate(spans)])
        assert fabric.requests == 2
        assert target == source
        assert fabric.registered_bytes == registered, "no staging buffer was made"
        for registration in registrations:
            assert registration.registered
            registration.close()


async def test_an_arena_is_registered_once_and_nothing_is_registered_by_a_put_or_get() -> None:
    async with serving(prealloc_bytes=MIB, auto_increase=True, max_pool_bytes=4 * MIB) as (fabric, server):
        assert (fabric.registrations, fabric.registered_bytes) == (2, MIB + 1), "the arena, and a scratch byte"
        async with infinistore.open_store(f"{rdma_url(server)}&staging_bytes=65536") as store:
            with await store.register(bytearray(VALUE)) as registration:
                registered = registration.view
                await store.put("staged", bytes(VALUE))
                assert (fabric.registrations, fabric.registered_bytes) == (4, MIB + 1 + len(VALUE) + 65536)
                number = 0
                while number < 20 or server.core.statistics().arenas == 1:  # until the pool has grown
                    await store.put(f"registered {number}", registered)
                    await store.get_into(f"registered {number}", registered)
                    await store.put_many({f"staged {number}": VALUE, f"long {number}": VALUE * 8})
                    assert await store.get(f"long {number}") == VALUE * 8
                    number += 1
                await until(lambda: fabric.registrations == 4 + server.core.statistics().arenas - 1)


async def test_memory_that_the_system_does_not_let_be_pinned_is_an_error_that_says_so() -> None:
    async with serving() as (fabric, server), infinistore.open_store(rdma_url(server)) as store:
        fabric.refuses_to_register = True
        with pytest.raises(LimitExceeded, match="ulimit -l"):
            await store.register(bytearray(100))
        fabric.refuses_to_register = False
        await store.put("a", VALUE)


async def test_a_pool_that_cannot_be_registered_when_it_grows_does_not_grow() -> None:
    async with serving(prealloc_bytes=64 * KIB, auto_increase=True, max_pool_bytes=MIB) as (fabric, server):
        fabric.refuses_to_register = True
        async with infinistore.open_store(server.url) as store:
            for number in range(20):
                await store.put(f"{number}", VALUE)
        assert server.core.statistics().arenas == 1


async def test_without_rdma_registering_checks_its_argument_and_no_more() -> None:
    async with infinistore.open_store() as store:
        with pytest.raises(TypeError):
            await store.register(5)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="empty"):
            await store.register(b"")
        with await store.register(bytearray(10)) as registration:
            assert (registration.length, registration.registered) == (10, False)
    with blocking.open_store() as threads_store:
        threads_store.register(bytearray(10)).close()


async def test_memory_registered_before_the_first_connection_is_known_to_it() -> None:
    async with serving() as (fabric, server), infinistore.open_store(rdma_url(server), lazy=True) as store:
        buffer = bytearray(VALUE)
        with await store.register(buffer) as registration:
            assert not registration.registered
            await store.put("a", buffer)
            assert registration.registered
            assert fabric.registrations == 3, "of the server two, and the buffer: nothing was staged"


async def test_part_of_a_batch_in_registered_memory_is_as_good_as_none() -> None:
    async with serving() as (_, server), infinistore.open_store(rdma_url(server)) as store:
        buffer = bytearray(VALUE)
        with await store.register(buffer):
            await store.put_many({"a": buffer, "b": b"elsewhere"})
            other = bytearray(9)
            buffer[:] = bytes(len(buffer))
            assert await store.get_many_into({"a": buffer, "b": other, "c": bytearray(3)}) == [len(VALUE), 9, None]
            assert (bytes(buffer), bytes(other)) == (VALUE, b"elsewhere")


async def test_read_only_memory_can_be_put_from_and_not_read_into() -> None:
    async with serving() as (fabric, server), infinistore.open_store(rdma_url(server)) as store:
        with await store.register(VALUE):
            count = fabric.registrations
            await store.put("a", VALUE)
            assert fabric.registrations == count
            with pytest.raises(TypeError):
                await store.get_into("a", VALUE)
            assert await store.get("a") == VALUE


async def test_thousands_of_blocks_go_in_one_call_through_a_short_queue() -> None:
    async with (
        serving(minimal_allocate_bytes=64) as (fabric, server),
        infinistore.open_store(rdma_url(server)) as store,
    ):
        source = memoryview(bytearray(range(250)) * 400)
        with await store.register(source):
            items = {f"{i}": bytes(source[i * 25 : i * 25 + 20]) for i in range(4000)}
            await store.put_many({f"{i}": source[i * 25 : i * 25 + 20] for i in range(4000)})
            assert fabric.requests == 4000
            assert {key: bytes(await store.get(key)) for key in list(items)[::400]} == dict(list(items.items())[::400])
            assert list(map(bytes, filter(None, await store.get_many(items)))) == list(items.values())


# Failure


@pytest.mark.parametrize("registered", [True, False])
async def test_a_call_whose_transfer_fails_goes_on_without_rdma(registered: bool) -> None:
    async with serving() as (fabric, server), infinistore.open_store(best_url(server)) as store:
        buffer = bytearray(VALUE)
        if registered:
            await store.register(buffer)
        fabric.statuses.append(REMOTE_ACCESS)
        await store.put("a", buffer)
        assert (await store.stats()).transport == "tcp"
        reason = (await store.stats()).transport_reason
        assert "remote access error" in reason
        assert "tried again in" in reason
        assert await store.get("a") == VALUE
        assert not fabric.queues, "the queue pairs that failed are gone"


@pytest.mark.parametrize("registered", [True, False])
async def test_a_get_whose_transfer_fails_goes_on_without_rdma(registered: bool) -> None:
    async with serving() as (fabric, server), infinistore.open_store(best_url(server)) as store:
        await store.put_many({"a": VALUE, "b": VALUE[1:]})
        target = bytearray(len(VALUE))
        if registered:
            await store.register(target)
        fabric.statuses.append(REMOTE_ACCESS)
        assert await store.get_into("a", target) == len(VALUE)
        assert target == VALUE
        assert await store.get_many(["b", "a", "c"]) == [VALUE[1:], VALUE, None]


async def test_a_long_batch_that_fails_between_its_pieces_goes_on_without_rdma() -> None:
    async with serving() as (fabric, server), infinistore.open_store(f"{best_url(server)}&staging_bytes=5000") as store:
        fabric.statuses.extend([0, 0, 0, 0, REMOTE_ACCESS])
        await store.put_many({"a": VALUE, "b": VALUE[1:]})
        assert server.core.statistics().reservations == 0
        assert (await store.stats()).transport == "tcp"
        assert await store.get("a") == VALUE
        assert await store.get("b") == VALUE[1:]


async def test_where_rdma_is_forced_a_failed_transfer_is_an_error_and_stores_nothing() -> None:
    async with serving() as (fabric, server), infinistore.open_store(rdma_url(server)) as store:
        await store.put("a", b"old")
        fabric.statuses.append(REMOTE_ACCESS)
        with pytest.raises(TransferFailed, match="remote access error"):
            await store.put_many({"a": VALUE, "b": VALUE})
        assert await store.get_many(["a", "b"]) == [b"old", None]
        assert (await store.stats()).transport == "rdma", "a new queue pair was connected"


async def test_rdma_is_tried_again_after_a_pause() -> None:
    async with serving() as (fabric, server):
        with mock.patch.object(client_rdma, "FIRST_PAUSE_S", 0.0):
            async with infinistore.open_store(best_url(server)) as store:
                fabric.unplugged = True
                await store.put("a", VALUE)
                assert await store.get("a") == VALUE
                fabric.unplugged = False
                assert await store.get("a") == VALUE
                assert (await store.stats()).transport == "rdma"
                fabric.refuses_queues = fabric.unplugged = True
                assert await store.get("a") == VALUE
                assert (await store.stats()).transport == "tcp"
                fabric.refuses_queues = fabric.unplugged = False
                assert (await store.stats()).transport == "rdma", "and not the connection that was left"


async def test_a_connection_made_without_rdma_is_replaced_when_a_transfer_that_was_under_way_succeeds() -> None:
    async with serving() as (fabric, server), infinistore.open_store(best_url(server)) as store:
        await store.put("a", VALUE)
        fabric.held = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.get, "a")
            await until_work_is_held(fabric)
            fabric.refuses_queues = True
            assert await store.get("a") == VALUE
            assert (await store.stats()).transport == "tcp"
            fabric.refuses_queues = False
            fabric.release()
        before = fabric.moved_bytes
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.get, "a")
            nursery.start_soon(store.get, "a")
        assert fabric.moved_bytes - before == 2 * len(VALUE), "RDMA works, and both took it"


async def test_the_pause_doubles_and_ends_with_success() -> None:
    now = 0.0
    with fabric_in_use(absent="nothing here") as fabric:
        options = Options(device="fake1")
        rdma = client_rdma.StoreRdma(options, lambda: now, forced=False)
        pauses = []
        for _ in range(8):
            with pytest.raises(NoRdma):
                rdma.take_device()
            assert rdma.pause.resting
            pauses.append(rdma.pause.pause_s)
            now += rdma.pause.pause_s
        assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
        fabric.absent = ""
        assert not rdma.pause.resting
        rdma.take_device()
        rdma.pause.end()
        assert rdma.pause.pause_s == 0
        rdma.release(None)
        rdma.close()


@asynccontextmanager
async def two_servers() -> AsyncGenerator[tuple[Fabric, Any, list[str], list[str]], None]:
    """A store of two servers, and which keys each owns."""
    async with serving_two(KEYS) as (fabric, _, url, shares), infinistore.open_store(url) as store:
        yield fabric, store, *shares


async def test_a_transfer_that_fails_to_one_server_leaves_rdma_to_others_alone() -> None:
    async with two_servers() as (fabric, store, first, second):
        fabric.statuses.append(REMOTE_ACCESS)
        await store.put_many(dict.fromkeys(first, VALUE))  # by TCP
        before = fabric.moved_bytes
        await store.put_many(dict.fromkeys(second, VALUE))
        assert await store.get_many(KEYS) == [VALUE] * len(KEYS)
        assert fabric.moved_bytes - before == 2 * len(VALUE) * len(second)
        assert [node.stats.transport for node in (await store.stats()).cluster.nodes] == ["tcp", "rdma"]


async def test_a_device_that_fails_by_itself_is_left_alone_by_all_servers() -> None:
    async with two_servers() as (fabric, store, first, second):
        fabric.absent = "it is broken"
        await store.put_many(dict.fromkeys(first, VALUE))
        tried = len(fabric.asked_near)
        await store.put_many(dict.fromkeys(second, VALUE))
        assert await store.get_many(KEYS) == [VALUE] * len(KEYS)
        assert len(fabric.asked_near) == tried


# The ends of things


async def test_closing_a_store_closes_its_device_when_its_calls_have_ended() -> None:
    async with serving() as (fabric, server):
        async with trio.open_nursery() as nursery:
            async with infinistore.open_store(rdma_url(server)) as store:
                fabric.held = True
                nursery.start_soon(store.put, "a", VALUE)
                await until_work_is_held(fabric)
            assert [device.name for device in fabric.devices] == ["fake", "fake1"]
            fabric.release()
        assert [device.name for device in fabric.devices] == ["fake"]


async def test_a_server_that_stops_destroys_its_queue_pairs_before_its_memory_goes() -> None:
    with fabric_in_use() as fabric:
        async with (
            running_server(make_config()) as server,
            infinistore.open_store(rdma_url(server)) as store,
            trio.open_nursery() as nursery,
        ):
            fabric.held = True
            nursery.start_soon(fails_to_put, store)
            await until_work_is_held(fabric)
            server.scope.cancel()
        fabric.release()
        assert fabric.moved_bytes == 0


async def fails_to_put(store: Any) -> None:
    with pytest.raises(StoreUnavailable):
        await store.put("a", VALUE)


async def test_other_drivers_use_it_too() -> None:
    async with serving() as (fabric, server):

        def with_threads() -> str:
            with blocking.open_store(rdma_url(server)) as store, store.register(bytearray(VALUE)) as registration:
                store.put("a", registration.view)
                assert store.get("a") == VALUE
                return store.stats().transport

        async def with_asyncio() -> str:
            async with aio.open_store(rdma_url(server)) as store:
                with await store.register(bytearray(VALUE)) as registration:
                    await store.put("b", registration.view)
                    assert await store.get("b") == VALUE
                    return (await store.stats()).transport

        assert await trio.to_thread.run_sync(with_threads) == "rdma"
        assert await trio.to_thread.run_sync(asyncio.run, with_asyncio()) == "rdma"
        assert fabric.moved_bytes == 4 * len(VALUE)


@pytest.mark.process
async def test_a_forked_child_leaves_the_parents_device_alone() -> None:
    async with serving() as (fabric, server), infinistore.open_store(rdma_url(server)) as store:
        await store.put("a", VALUE)
        calls = store.calls  # type: ignore[attr-defined]
        assert isinstance(calls, Calls)
        device = calls.rdma.device

        def in_the_child() -> None:
            assert calls.rdma.device is None
            assert device is not None
            calls.close()

        in_child(in_the_child)
        assert await store.get("a") == VALUE
        assert len(fabric.devices) == 2
