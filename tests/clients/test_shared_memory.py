"""Clients that map the server's pool: which way they choose, what they leave behind,
and what they survive.
"""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import trio

import infinistore
from infinistore import blocking
from infinistore.client.connection.calls import Calls
from infinistore.client.environment import Environment
from infinistore.client.movers.channel import Channel
from infinistore.client.movers.shm.mapped_pool import Machine, MappedPool, ServerWatch
from infinistore.client.movers.shm.mover import ask_arenas
from infinistore.core.arena import Arena, Mapping, create_arena
from infinistore.errors import OutOfMemory, ProtocolError, StoreUnavailable
from infinistore.protocol.client_connection import ClientConnection
from infinistore.protocol.effects import ReceiveDescriptors, Send
from infinistore.protocol.messages import HelloReply
from infinistore.protocol.shared_tables import tables_are_safe_here
from infinistore.protocol.states import State
from tests.bad_days.test_fork import in_child
from tests.clients.on_this_host import best, open_files, server_process, serving, way
from tests.ports import own_ports
from tests.server.running import MIB, POOL_BYTES, running_server

VALUE = bytes(range(256)) * 1024  # more than goes inline


# Room for the next put


async def test_puts_in_a_row_find_their_room_taken_and_leave_none_behind(tmp_path: Path) -> None:
    block = VALUE * 8  # 2 MiB
    async with serving(tmp_path, prealloc_bytes=64 * MIB) as server:
        async with infinistore.open_store(best(server)) as store:
            await store.put("a", block)
            await server.until(reservations=0)
            await store.put("b", block)
            await server.until(reservations=1)
            for number in range(3):  # as long as puts are alike, there is room for one more
                await store.put(f"c{number}", block)
                await server.until(reservations=1)
            assert await store.get("c2") == block
            await store.put("d", VALUE * 5)  # another size: the room for the old one is given back
            await server.until(reservations=0)
            assert await store.get("d") == VALUE * 5
            await store.put("e", VALUE * 5)
            await server.until(reservations=1)
            async with store.lease(["e", "missing"]) as views:  # puts will go by other connections
                await server.until(reservations=0)
                assert views == [VALUE * 5, None]
                del views
            assert await store.exists_many(["a", "b", "c0", "c1", "c2", "d", "e"]) == [True] * 7
        await server.quiet()


# Which way


async def test_shared_memory_is_taken_unless_the_url_names_another_way(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        port = server.server.addresses.port
        transport, reason = await way(best(server))
        assert (transport, str(server.unix_path) in reason) == ("shm", True)
        assert await way(f"tcp://127.0.0.1:{port}") == ("tcp", "the URL asks for TCP")
        assert await way(f"unix://{server.unix_path}") == ("unix", "the URL asks for a Unix socket")
        assert (await way(f"shm://{server.unix_path}"))[0] == "shm"
        assert (await way(f"shm://127.0.0.1:{port}"))[0] == "shm"
        await server.quiet()


async def test_a_server_without_a_unix_socket_is_used_by_tcp() -> None:
    async with running_server() as server:
        assert await way(best(server)) == ("tcp", "the server has no Unix socket")
        with pytest.raises(StoreUnavailable, match="no Unix socket"):
            await way(server.url.replace("tcp", "shm"))
        await server.quiet()


async def test_a_socket_file_that_is_gone_means_tcp_for_every_connection(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        server.unix_path.unlink()
        async with infinistore.open_store(best(server)) as store:
            reasons = []

            async def ask() -> None:
                stats = await store.stats()
                reasons.append((stats.transport, stats.transport_reason))

            async with trio.open_nursery() as nursery:  # at a time, so that there are several connections
                nursery.start_soon(ask)
                nursery.start_soon(ask)
            assert len(set(reasons)) == 1
            assert reasons[0][0] == "tcp"
            assert str(server.unix_path) in reasons[0][1]
        with pytest.raises(StoreUnavailable, match=r"store\.sock"):
            await way(server.url.replace("tcp", "shm"))
        await server.quiet()


async def test_the_socket_of_another_server_is_not_used(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        server.unix_path.unlink()
        async with serving(tmp_path) as other:
            transport, reason = await way(best(server))
            assert (transport, "another server" in reason) == ("tcp", True)
            with pytest.raises(StoreUnavailable, match="another server"):
                await way(server.url.replace("tcp", "shm"))
            await other.quiet()
            assert not other.core.exists(["way"])[0]
        await server.quiet()


async def test_a_socket_that_the_server_names_is_not_trusted_if_a_stranger_listens_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infinistore.client.connection.routing.peer_user", lambda sock: os.geteuid() + 1)
    async with serving(tmp_path) as server:
        async with infinistore.open_store(best(server)) as store:
            stats = await store.stats()
            assert (stats.transport, "another user" in stats.transport_reason) == ("tcp", True)
        async with infinistore.open_store(f"shm://{server.unix_path}") as store:  # named by the caller: trusted
            assert (await store.stats()).transport == "shm"


async def test_a_socket_that_another_server_took_over_is_left(tmp_path: Path) -> None:
    """The store found its server by that socket before; new connections must not go to
    whoever has it now.
    """
    async with serving(tmp_path) as server, infinistore.open_store(best(server)) as store:
        await store.put("key", VALUE)
        assert (await store.stats()).transport == "shm"
        server.unix_path.unlink()
        async with serving(tmp_path) as other:
            calls: Calls[Any] = store.calls  # type: ignore[attr-defined]
            calls.pool.close_idle()
            await store.put("key", VALUE)
            assert (await store.stats()).transport == "tcp"
            assert not other.core.exists(["key"])[0]
            assert server.core.exists(["key"])[0]


async def test_a_server_with_no_room_for_a_second_connection_is_used_by_tcp(tmp_path: Path) -> None:
    async with serving(tmp_path, max_connections=1) as server:
        transport, reason = await way(best(server))
        assert (transport, "no shared memory" in reason) == ("tcp", True)
        await server.quiet()


async def test_a_server_that_was_restarted_is_found_again_with_new_arenas(tmp_path: Path) -> None:
    (port,) = own_ports(1)
    before = 0
    async with infinistore.open_store(f"infinistore://127.0.0.1:{port}", lazy=True) as store:
        for number in range(4):
            async with serving(tmp_path, service_port=port):
                value = VALUE + bytes([number])
                for _ in range(2):
                    assert await store.get_many(["key"]) == [None]
                    assert not await store.exists("key")
                await store.put("key", value)
                for _ in range(3):  # which it soon knows
                    assert await store.get("key") == value
                assert (await store.stats()).transport == "shm"
                assert open_files() <= before or not number
                before = open_files()


# Puts and gets


async def test_without_shared_writes_puts_go_inline_and_gets_do_not(tmp_path: Path) -> None:
    async with serving(tmp_path, shm_writes="off") as server:
        async with infinistore.open_store(best(server)) as store:
            await store.put_many({"a": VALUE, "b": b"short"})
            assert await store.get_many(["a", "b"]) == [VALUE, bytearray(b"short")]
            assert (await store.stats()).transport == "shm"
            pool: MappedPool = store.calls.mapped_pool  # type: ignore[attr-defined]
            assert set(pool.mappings) == {(0, False)}
        await server.quiet()


async def test_a_batch_of_exactly_inline_bytes_goes_inline(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, infinistore.open_store(best(server), inline_bytes=10) as store:
        pool: MappedPool = store.calls.mapped_pool  # type: ignore[attr-defined]
        await store.put_many({"a": b"12345", "b": b"67890"})
        assert await store.get_many(["a", "b"]) == [bytearray(b"12345"), bytearray(b"67890")]
        assert pool.arena_count == 0
        await store.put("c", b"12345678901")
        assert set(pool.mappings) == {(0, True)}
        assert await store.get("c") == b"12345678901"
        assert set(pool.mappings) == {(0, True), (0, False)}


async def test_the_arenas_of_a_pool_that_has_grown_are_asked_for(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"auto_increase": True, "max_pool_bytes": 3 * POOL_BYTES}
    async with serving(tmp_path, **settings) as server, infinistore.open_store(best(server)) as store:
        await store.put("first", VALUE)
        pool: MappedPool = store.calls.mapped_pool  # type: ignore[attr-defined]
        assert pool.arena_count == 1
        values = {f"key {i}": bytearray(os.urandom(MIB)) for i in range(6)}  # more than the first arena has
        await store.put_many(values)
        assert pool.arena_count > 1
        async with infinistore.open_store(best(server)) as other:
            assert await other.get_many(list(values)) == list(values.values())
        assert await store.get_many(list(values)) == list(values.values())


async def test_a_pool_of_more_arenas_than_one_reply_tells_of_is_asked_for_until_all_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a pool has grown 254 times: a client that comes then has to ask more than
    once.
    """
    monkeypatch.setattr("infinistore.server.movers.shm.MAX_DESCRIPTORS", 2)  # an arena, and what tells of the end
    async with serving(tmp_path) as server, infinistore.open_store(best(server)) as store:
        for index in (1, 2):
            server.core.add_arena(create_arena(index, POOL_BYTES))
        values = {f"key {i}": os.urandom(MIB) for i in range(11)}
        for key, value in values.items():
            await store.put(key, value)
        last = next(key for key in values if server.core.index.get(key)[0] == 2)  # type: ignore[index]
        for read in (lambda other: other.get(last), lambda other: leased(other, last)):
            async with infinistore.open_store(best(server)) as other:
                assert await read(other) == values[last]


async def leased(store: Any, key: str) -> bytes:
    async with store.lease([key]) as (view,):
        return bytes(view)


async def test_a_refused_put_keeps_its_connection(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, infinistore.open_store(best(server)) as store:
        await store.put("key", VALUE)
        accepted = server.server.telemetry.statistics().connections_total
        for _ in range(3):
            with pytest.raises(OutOfMemory):
                await store.put_many({f"key {i}": bytes(MIB) for i in range(5)})
            assert await store.get("key") == VALUE
        assert server.server.telemetry.statistics().connections_total == accepted


# What is left behind


async def test_all_descriptors_are_closed_with_the_store_and_not_inherited_before(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        before = open_files()
        async with infinistore.open_store(best(server)) as store:
            await store.put("key", VALUE)
            assert await store.get("key") == VALUE
            pool: MappedPool = store.calls.mapped_pool  # type: ignore[attr-defined]
            assert pool.descriptors
            assert not any(map(os.get_inheritable, pool.descriptors))
        await server.quiet()
        assert open_files() <= before


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = create_arena(0, MIB)
    yield arena
    arena.close()


def pool_of(arena: Arena, length: int = MIB) -> MappedPool:
    """A client's mapping of a pool of one arena, of this length as the server says."""
    pool = MappedPool("instance")
    pool.add(0, [length], [os.dup(arena.fd)], writable=True)
    return pool


def test_a_store_that_is_closed_during_a_copy_ends_that_call_with_an_error(arena: Arena) -> None:
    pool = pool_of(arena)
    (view,) = pool.views([0], [MIB], writable=True)
    pool.close()
    view[:3] = b"abc"
    assert bytes(arena.memory[:3]) == b"abc"
    with pytest.raises(StoreUnavailable):
        pool.views([0], [MIB], writable=True)
    view.release()


@pytest.mark.parametrize(("place", "size"), [(0, MIB + 1), (MIB, 1), (MIB - 1, 2), (1 << 48, 1), (2**64 - 1, 1)])
def test_a_place_outside_the_arenas_is_not_touched(arena: Arena, place: int, size: int) -> None:
    pool = pool_of(arena)
    with pytest.raises(ProtocolError):
        pool.views([place], [size], writable=False)
    pool.close()


def test_an_arena_that_is_shorter_than_the_server_says_is_not_mapped(arena: Arena) -> None:
    pool = pool_of(arena, 2 * MIB)
    with pytest.raises(ProtocolError, match="not as long"):
        pool.views([0], [1], writable=False)
    pool.close()


async def test_a_store_takes_memory_threads_and_the_watch_from_the_machine_that_it_is_given(tmp_path: Path) -> None:
    taken: list[str] = []

    def map_memory(descriptor: int, length: int, *, writable: bool) -> Mapping:
        taken.append("writable" if writable else "readable")
        return Mapping(descriptor, length, writable=writable)

    def watch_server(lifeline: int, ended: object) -> ServerWatch:
        raise StoreUnavailable("nobody watches")

    def start_thread(thread: threading.Thread) -> None:
        raise StoreUnavailable("no threads")

    machine = Machine(map_memory=map_memory, watch_server=watch_server, start_thread=start_thread)
    threads = set(threading.enumerate())
    async with serving(tmp_path) as server:
        opened = infinistore.open_store(f"shm://{server.unix_path}", environment=Environment(machine=machine))
        async with opened as store:
            await store.put("key", VALUE)
            assert await store.get("key") == VALUE
            assert not [one for one in set(threading.enumerate()) - threads if one.name.startswith("infinistore")]
    tables = ["readable", "writable"] if tables_are_safe_here() else []
    assert sorted(taken) == sorted([*tables, "readable", "writable"])


@pytest.mark.parametrize(("lengths", "count"), [(1, 0), (0, 1), (1, 2), (2, 1)])
def test_arenas_and_descriptors_that_do_not_match_are_refused_and_closed(
    arena: Arena, lengths: int, count: int
) -> None:
    before = open_files()
    pool = MappedPool("instance")
    with pytest.raises(ProtocolError):
        pool.add(0, [MIB] * lengths, [os.dup(arena.fd) for _ in range(count)], writable=True)
    assert pool.arena_count == 0
    assert open_files() <= before


def test_arenas_that_are_asked_for_in_vain_change_nothing(arena: Arena) -> None:
    """The call is dropped after descriptors have come, and before the whole
    reply has.
    """
    pool = pool_of(arena)
    before = open_files()
    connection = ClientConnection()
    connection.state = State.READY
    channel = Channel(connection, mock.Mock(), lambda: 0.0, verify=True)
    channel.hello = HelloReply("instance", "1", MIB, 10, MIB, MIB)
    exchange = ask_arenas(channel, pool)
    assert isinstance(exchange.send(None), Send)
    effect = exchange.send(0)
    assert isinstance(effect, ReceiveDescriptors)
    effect.descriptors.append(os.dup(arena.fd))
    exchange.close()
    assert (pool.arena_count, pool.writable) == (1, True)
    assert open_files() <= before
    pool.close()


# Threads and forks


@pytest.mark.process
def test_after_a_fork_the_child_is_refused_and_the_parent_goes_on(tmp_path: Path) -> None:
    others = set(os.listdir("/proc/self/fd"))
    with server_process(tmp_path) as server, blocking.open_store(best(server)) as store:
        store.put("key", VALUE)
        assert store.get("key") == VALUE

        def check() -> None:
            for call in (lambda: store.get("key"), lambda: store.put("key", VALUE)):
                with pytest.raises(StoreUnavailable, match="fork"):
                    call()
            with os.scandir("/proc/self/fd") as entries:
                names = [os.readlink(entry.path) for entry in entries if entry.name not in others]
            assert not [name for name in names if "memfd" in name or "eventfd" in name]
            with blocking.open_store(best(server)) as own:
                assert own.get("key") == VALUE
                own.put("child", VALUE)

        in_child(check)
        assert store.get("child") == VALUE
        store.put("key", VALUE)
