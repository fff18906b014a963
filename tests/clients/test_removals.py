"""Following removals, with each kind of client, embedded and with servers."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

import infinistore
from infinistore import aio, blocking
from infinistore.client import RemovedKeys
from infinistore.core import StoreCore
from infinistore.errors import StoreUnavailable, VersionMismatch
from infinistore.protocol.versions import Capability
from tests.clients.stores import REMOTE, STORES, Loops, servers_lack
from tests.clients.test_disks import with_disk
from tests.cluster_client.clusters import PATIENT
from tests.ports import own_ports
from tests.server.running import KIB, make_config, running_server, until

BLOCK = b"x" * KIB


def keys_of(batches: Iterator[RemovedKeys], count: int) -> list[str]:
    """The next so many keys; no gap is among them."""
    keys: list[str] = []
    while len(keys) < count:
        batch = next(batches)
        assert not batch.gap
        assert batch.problem == ""
        keys += batch.keys
    return keys


def test_a_blocking_store_tells_what_is_removed(loops: Loops) -> None:
    with loops.trio.entered(running_server) as server, blocking.open_store(server.url) as store:
        check_blocking(store, server.core)


def test_an_embedded_store_tells_what_is_removed() -> None:
    with blocking.open_store(pool_bytes=1024 * KIB) as store:
        check_blocking(store, store.embedded.core)  # type: ignore[attr-defined]


def check_blocking(store: blocking.BlockingStore, core: StoreCore) -> None:
    batches = store.removals()
    assert next(batches) == RemovedKeys()
    store.put_many({"a": BLOCK, "b": BLOCK, "c": BLOCK})

    def delete() -> None:
        while not core.removal_log.waiting:
            pass
        store.delete(["a"])

    thread = threading.Thread(target=delete)
    thread.start()
    assert keys_of(batches, 1) == ["a"]  # which it waits for
    thread.join()
    store.delete(["b"])
    store.put("b", BLOCK)
    store.evict(0, 0)
    assert sorted(keys_of(batches, 2)) == ["b", "c"]
    assert next(store.removals(wait_s=0.01)) == RemovedKeys()
    quick = store.removals(wait_s=0.01)
    assert [next(quick), next(quick)] == [RemovedKeys()] * 2


@pytest.mark.parametrize("kind", ["trio", "asyncio"])
@pytest.mark.parametrize("where", ["server", "embedded"])
def test_an_asynchronous_store_tells_what_is_removed(loops: Loops, kind: str, where: str) -> None:
    async def use(open_store: Any, url: str | None) -> list[str]:
        options: dict[str, Any] = {"pool_bytes": 1024 * KIB} if url is None else {}
        async with open_store(url, **options) as store:
            await store.put("a", BLOCK)
            told: list[str] = []
            async for batch in store.removals(wait_s=0.05):
                assert not batch.gap
                told += batch.keys
                if told:
                    return told
                await store.delete(["a"])
        raise AssertionError

    loop, opener = (loops.trio, infinistore.open_store) if kind == "trio" else (loops.asyncio, aio.open_store)
    with loops.trio.entered(running_server) as server:
        assert loop.run(use, opener, server.url if where == "server" else None) == ["a"]


async def test_lookups_go_on_while_many_follow() -> None:
    async with running_server() as server, infinistore.open_store(server.url) as store, trio.open_nursery() as nursery:
        ended: list[str] = []

        async def follow() -> None:
            async for batch in store.removals():
                if batch.keys:
                    ended.extend(batch.keys)
                    return

        for _ in range(4):
            nursery.start_soon(follow)
        await until(lambda: len(server.core.removal_log.waiting) == 4)
        await store.put("a", BLOCK)
        for _ in range(20):
            assert await store.exists("a")
        await store.delete(["a"])
    assert ended == ["a"] * 4


async def test_a_step_that_is_cancelled_loses_nothing() -> None:
    async with running_server() as server, infinistore.open_store(server.url) as store:
        batches = store.removals()
        await anext(batches)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(anext, batches)
            await until(lambda: server.core.removal_log.waiting)
            nursery.cancel_scope.cancel()
        await store.put("a", BLOCK)
        await store.delete(["a"])
        assert (await anext(batches)).keys == ["a"]


@pytest.mark.usefixtures("no_pauses")
async def test_a_restart_is_a_gap_and_then_it_goes_on() -> None:
    (port,) = own_ports(1)
    config = make_config(service_port=port)
    async with infinistore.open_store(f"tcp://127.0.0.1:{port}", lazy=True) as store:
        async with running_server(config):
            batches = store.removals(wait_s=0.01)
            assert await anext(batches) == RemovedKeys()
        lost = await anext(batches)
        assert lost.problem
        assert lost.keys == []
        async with running_server(config):
            while (batch := await anext(batches)).problem:
                pass
            assert batch == RemovedKeys(missed=None)
            assert batch.gap
            await store.put("a", BLOCK)
            await store.delete(["a"])
            assert (await anext(batches)).keys == ["a"]


def test_closing_the_store_ends_the_iteration(loops: Loops) -> None:
    with loops.trio.entered(running_server) as server:
        with blocking.open_store(server.url) as store:
            batches = store.removals()
            next(batches)
        with pytest.raises(StoreUnavailable, match="closed"):
            next(batches)
    with blocking.open_store(pool_bytes=1024 * KIB) as store:
        batches = store.removals()
    with pytest.raises(StoreUnavailable, match="closed"):
        next(batches)


@pytest.mark.parametrize("kind", ["server", "embedded"])
def test_a_block_on_disk_is_not_removed_until_it_is_deleted(loops: Loops, kind: str, tmp_path: Path) -> None:
    name = "threads" if kind == "server" else "embedded-threads"
    with STORES[name](loops, with_disk(tmp_path / "disk"), {}, 1) as opened:
        store = opened.store
        batches = store.removals(wait_s=0.01)
        next(batches)
        store.put_many({"a": BLOCK, "b": BLOCK})
        assert store.flush(["a", "b"]) == 2
        assert store.evict(0, 0) == 2
        assert next(batches) == RemovedKeys()
        assert store.delete(["b"]) <= 1
        assert keys_of(batches, 1) == ["b"]
        store.purge()
        assert next(batches).gap


def test_an_older_server_is_refused_by_name(loops: Loops) -> None:
    with (
        servers_lack(Capability.REMOVALS),
        REMOTE["shm-threads"](loops, make_config(), {}, 1) as opened,
        pytest.raises(VersionMismatch, match="install this release there"),
    ):
        next(opened.store.removals())


@pytest.mark.parametrize("wait_s", [0, -1, float("nan"), float("inf")])
def test_a_wait_that_is_none_is_refused(wait_s: float) -> None:
    with blocking.open_store(pool_bytes=1024 * KIB) as store, pytest.raises(ValueError, match="wait_s"):
        store.removals(wait_s=wait_s)


async def test_a_cluster_tells_what_any_node_removes_and_a_quiet_one_is_not_lost() -> None:
    async with running_server() as one, running_server() as two:
        hosts = ",".join(f"127.0.0.1:{server.server.addresses.port}" for server in (one, two))
        async with infinistore.open_store(f"infinistore+static://{hosts}", **PATIENT) as store:
            batches = store.removals(wait_s=0.05)
            for _ in range(8):
                assert await anext(batches) == RemovedKeys()
            keys = [f"k{number}" for number in range(40)]
            await store.put_many(dict.fromkeys(keys, BLOCK))
            await store.delete(keys)
            told: list[str] = []
            while len(told) < len(keys):
                batch = await anext(batches)
                assert (batch.gap, batch.problem) == (False, "")
                told += batch.keys
            assert sorted(told) == sorted(keys)
            assert one.core.removal_log.next > 0 < two.core.removal_log.next
            two.core.removal_log.end()
            assert (await anext(batches)).gap
