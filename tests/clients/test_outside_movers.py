"""Transports of other packages in the client: found by entry point, forced by the
option, refused with a reason.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import infinistore
from infinistore import aio, blocking
from infinistore.errors import ConfigError, StoreUnavailable
from infinistore.transports import Transport
from tests.clients.stores import Loops
from tests.installing import install
from tests.server.running import RunningServer, make_config, running_server

BLOCKS = {"a": bytes(range(256)) * 400, "b": b"b", "c": bytes(5000)}


def no_source(options: Any, clock: Any) -> object:
    return "a string"


SERVER_ONLY = Transport("server_only")
NO_SOURCE = Transport("no_source", client_mover=no_source)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example, and transports that cannot be used by a client."""
    entries = {
        "loopback": "examples.loopback_mover:LOOPBACK",
        "server_only": "tests.clients.test_outside_movers:SERVER_ONLY",
        "no_source": "tests.clients.test_outside_movers:NO_SOURCE",
    }
    install(tmp_path, monkeypatch, "infinistore.transports", entries)


@pytest.fixture
def server(installed: None, tmp_path: Path, loops: Loops) -> Iterator[RunningServer]:
    with loops.trio.entered(lambda: running_server(make_config(unix_socket=str(tmp_path / "socket")))) as running:
        yield running


def url(server: RunningServer, scheme: str = "infinistore", query: str = "") -> str:
    return f"{scheme}://127.0.0.1:{server.server.addresses.port}{query}"


async def there_and_back(store: Any) -> tuple[str, str]:
    await store.put_many(BLOCKS)
    assert await store.get_many([*BLOCKS, "missing"]) == [*BLOCKS.values(), None]
    stats = await store.stats()
    return stats.transport, stats.transport_reason


def test_a_mover_of_another_package_carries_the_blocks_of_every_kind_of_store(
    server: RunningServer, loops: Loops
) -> None:
    with loops.trio.entered(lambda: infinistore.open_store(url(server), transport="loopback")) as store:
        way = loops.trio.run(there_and_back, store)
        assert way == ("loopback", "the option transport asks for it")
    with loops.asyncio.entered(lambda: aio.open_store(url(server, "tcp", "?transport=loopback"))) as store:
        assert loops.asyncio.run(there_and_back, store)[0] == "loopback"
    with blocking.open_store(url(server), transport="loopback") as one:
        one.put_many(BLOCKS)
        assert [bytes(value or b"") for value in one.get_many(list(BLOCKS))] == list(BLOCKS.values())
        clients = loops.trio.run_sync(server.server.telemetry.clients)
        assert "loopback" in [client.transport for client in clients]


def test_one_that_cannot_be_used_with_a_server_says_why(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from examples import loopback_mover

    monkeypatch.setattr(loopback_mover, "_servers", {})
    with (
        pytest.raises(StoreUnavailable, match="the server is not in this process, or has no loop-back"),
        blocking.open_store(url(server), transport="loopback"),
    ):
        pass


@pytest.mark.parametrize(
    ("query", "transport"), [("?transport=inline", "tcp"), ("?transport=shm", "shm"), ("?transport=", "shm")]
)
def test_a_built_in_transport_can_be_asked_for_by_name(server: RunningServer, query: str, transport: str) -> None:
    with blocking.open_store(url(server, query=query)) as store:
        assert store.stats().transport == transport


def test_a_built_in_transport_that_was_asked_for_is_not_replaced_by_another(server: RunningServer) -> None:
    with (
        pytest.raises(StoreUnavailable, match="no RDMA: the server has no RDMA"),
        blocking.open_store(url(server), transport="rdma"),
    ):
        pass


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("lopback", "unknown transport 'lopback'; known are rdma, shm, inline, loopback, no_source, server_only"),
        ("infinistore", "unknown transport 'infinistore'"),
        ("server_only", "the transport 'server_only' has no mover for clients"),
        ("no_source", "the client_mover of the transport 'no_source' returned no MoverSource: 'a string'"),
    ],
)
def test_a_name_that_means_nothing_is_refused_before_anything_is_connected(
    installed: None, name: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason), blocking.open_store("tcp://127.0.0.1:1", transport=name):
        pass


@pytest.mark.parametrize(("scheme", "name"), [("tcp", "rdma"), ("shm", "inline"), ("rdma", "shm"), ("unix", "shm")])
def test_a_transport_that_the_url_rules_out_is_refused(scheme: str, name: str) -> None:
    where = "/socket" if scheme == "unix" else "127.0.0.1:1"
    with (
        pytest.raises(ConfigError, match=f"transport={name} contradicts {scheme}://"),
        blocking.open_store(f"{scheme}://{where}", transport=name),
    ):
        pass
