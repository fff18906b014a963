"""A server with TLS, and one that is a node of a cluster, are taken over, or kept by
their service manager: clients go on.
"""

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

import infinistore
from infinistore.client.api.store import AsyncStore
from infinistore.errors import StoreUnavailable, TlsFailed
from infinistore.server import Server
from infinistore.sizes import KIB
from tests.cluster_client.clusters import PATIENT
from tests.cluster_io.etcd import Etcd
from tests.server.etcd_keys import needs_etcd, put
from tests.server.running import until
from tests.server.test_cluster import listed
from tests.server.test_tenants_go_over import KEYS, Place, block_of, place
from tests.transports.certificates import Files, issue

__all__ = ["place"]


async def fill(store: AsyncStore, name: str = "") -> None:
    await store.put_many({key: block_of(name, key) for key in KEYS})


async def has_all(store: AsyncStore, name: str = "") -> bool:
    return [bytes(value or b"") for value in await store.get_many(KEYS)] == [block_of(name, key) for key in KEYS]


def url_of(server: Server, files: Files) -> str:
    return f"infinistores://127.0.0.1:{server.addresses.port}?ca={files.ca}"


async def test_clients_go_on_over_tls_with_the_certificate_of_the_next_server(place: Place, tmp_path: Path) -> None:
    files = issue(tmp_path)
    settings: dict[str, Any] = {"tls_cert": files.cert, "tls_key": files.key}
    async with AsyncExitStack() as stack:
        old, ended = await stack.enter_async_context(place.serving(None, **settings))
        url = url_of(old, files)
        async with infinistore.open_store(url) as store:
            await fill(store)
            issue(tmp_path, into=files)
            if place.kept:
                await stack.aclose()
            async with place.serving(None, take_over=not place.kept, **settings) as (new, _):
                await ended.wait()
                assert url_of(new, files) == url
                assert await has_all(store)
                await store.put("new", bytes(KIB))
                async with infinistore.open_store(url) as other:
                    assert await has_all(other)
                stranger = issue(tmp_path, ca="two", stem="stranger")
                with pytest.raises(TlsFailed):
                    async with infinistore.open_store(url_of(new, stranger)) as other:
                        await other.exists("new")


async def test_a_tenant_is_known_by_its_certificate_at_the_next_server(place: Place, tmp_path: Path) -> None:
    files, mine = issue(tmp_path), issue(tmp_path, "ann.example", stem="ann")
    settings: dict[str, Any] = {"tls_cert": files.cert, "tls_key": files.key, "tls_client_ca": files.ca}
    text = 'tenants:\n  ann: {certificates: ["DNS:ann.example"]}\n  ben: {certificates: ["DNS:ben.example"]}\n'
    async with AsyncExitStack() as stack:
        old, ended = await stack.enter_async_context(place.serving(text, **settings))
        url = f"{url_of(old, files)}&cert={mine.cert}&key={mine.key}"
        async with infinistore.open_store(url) as store:
            await fill(store, "ann")
            if place.kept:
                await stack.aclose()
            async with place.serving(text, take_over=not place.kept, **settings):
                await ended.wait()
                assert await has_all(store, "ann")
                other = issue(tmp_path, "ben.example", stem="ben")
                async with infinistore.open_store(f"{url_of(old, files)}&cert={other.cert}&key={other.key}") as ben:
                    assert not any(await ben.exists_many(KEYS))


async def registered(etcd: Etcd, cluster: str, server: Server) -> None:
    """Wait until this server is the only node, named a."""
    seen, instance = server.telemetry.cluster, server.telemetry.instance
    assert seen is not None
    await until(lambda: [(node.id, node.instance) for node in seen().nodes] == [("a", instance)])
    while {name: node["instance"] for name, node in (await listed(etcd, cluster)).items()} != {"a": instance}:
        pass  # it registers again after a stop of the process


async def has_none(store: AsyncStore) -> bool:
    return not any(await store.exists_many(KEYS))


async def by_and_by(holds: Callable[[], Awaitable[bool]]) -> None:
    """Ask until it is so: from the client's view the node may be missing for a while,
    as after a stop of the process in which its lease ended.
    """
    while True:
        with suppress(StoreUnavailable):
            if await holds():
                return
        await trio.lowlevel.checkpoint()


@needs_etcd
@pytest.mark.parametrize("purged", [False, True], ids=["", "purged meanwhile"])
async def test_a_node_keeps_its_place_and_its_blocks(place: Place, etcd: Etcd, purged: bool) -> None:
    cluster = f"over-{place.kept}-{purged}".lower()
    settings: dict[str, Any] = {"cluster": etcd.url_of(cluster), "node_id": "a"}
    async with AsyncExitStack() as stack:
        old, ended = await stack.enter_async_context(place.serving(None, **settings))
        await registered(etcd, cluster, old)
        async with infinistore.open_store(etcd.url_of(cluster), **PATIENT) as store:
            await fill(store)
            if place.kept:
                await stack.aclose()
            if purged:
                await put(etcd, f"/infinistore/{cluster}/purge")
            async with place.serving(None, take_over=not place.kept, **settings) as (new, _):
                await ended.wait()
                await registered(etcd, cluster, new)
                if purged:
                    await until(lambda: len(new.core) == 0)
                    await by_and_by(partial(has_none, store))
                else:
                    await by_and_by(partial(has_all, store))
                await store.put("new", b"1")
                assert await store.get("new") == b"1"
