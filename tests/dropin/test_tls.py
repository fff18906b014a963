"""A program of the original reaches a server over TLS."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest

import infinistore
from infinistore import ClientConfig, ConfigError, InfinityConnection, TlsFailed
from infinistore.dropin.registered_server import RegisteredServer
from tests.dropin.conftest import run_server
from tests.transports.certificates import Files, issue

TYPES = (infinistore.TYPE_TCP, infinistore.TYPE_RDMA)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return issue(tmp_path)


@pytest.fixture
def mine(tmp_path: Path) -> Files:
    """What a client shows."""
    return issue(tmp_path, "client", ca="clients", stem="client")


@pytest.fixture
def server(files: Files, mine: Files) -> Iterator[RegisteredServer]:
    """A server that wants a certificate of its clients."""
    running = run_server(unix_socket="off", tls_cert=files.cert, tls_key=files.key, tls_client_ca=mine.ca)
    yield running
    running.stop()


@contextmanager
def connected(server: RegisteredServer, kind: str, **settings: Any) -> Iterator[InfinityConnection]:
    given = {"host_addr": "127.0.0.1", "service_port": server.addresses.port, "connection_type": kind}
    connection = InfinityConnection(ClientConfig(**given, **settings))
    try:
        connection.connect()
        yield connection
    finally:
        connection.close()


def moves_blocks(connection: InfinityConnection) -> None:
    assert connection.transport == "tls"
    array = numpy.arange(4096, dtype=numpy.uint8)
    connection.tcp_write_cache("one", array.ctypes.data, array.nbytes)
    found = connection.tcp_read_cache("one")
    assert found is not None
    assert bytes(found) == bytes(array)
    if connection.rdma_connected:
        target = numpy.zeros_like(array)
        for memory in (array, target):
            assert connection.register_mr(memory.ctypes.data, memory.nbytes) == 0
        asyncio.run(connection.rdma_write_cache_async([("two", 0)], array.nbytes, array.ctypes.data))
        asyncio.run(connection.rdma_read_cache_async([("two", 0)], array.nbytes, target.ctypes.data))
        assert bytes(target) == bytes(array)


@pytest.mark.parametrize("kind", TYPES)
def test_blocks_travel_over_tls_with_the_files_that_the_settings_name(
    server: RegisteredServer, files: Files, mine: Files, kind: str
) -> None:
    with connected(server, kind, ca=files.ca, cert=mine.cert, key=mine.key, dev_name="mlx5_0") as connection:
        moves_blocks(connection)


@pytest.mark.parametrize("kind", TYPES)
def test_a_program_that_knows_of_no_tls_gets_it_from_the_environment(
    server: RegisteredServer, files: Files, mine: Files, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFINISTORE_CA", str(files.ca))
    monkeypatch.setenv("INFINISTORE_CERT", str(mine.cert))
    monkeypatch.setenv("INFINISTORE_KEY", str(mine.key))
    with connected(server, kind) as connection:
        moves_blocks(connection)


def test_a_url_of_a_cluster_names_them_too(server: RegisteredServer, files: Files, mine: Files) -> None:
    url = f"infinistores+static://127.0.0.1:{server.addresses.port}?ca={files.ca}&cert={mine.cert}&key={mine.key}"
    connection = InfinityConnection(ClientConfig(host_addr=url, connection_type=infinistore.TYPE_TCP))
    connection.connect()
    try:
        array = numpy.ones(100, dtype=numpy.uint8)
        connection.tcp_write_cache("key", array.ctypes.data, array.nbytes)
        assert connection.check_exist("key")
    finally:
        connection.close()


@pytest.mark.parametrize("kind", TYPES)
def test_who_is_not_let_in_is_told_why(server: RegisteredServer, files: Files, kind: str) -> None:
    with (
        pytest.raises(TlsFailed, match="this port speaks TLS, and the client does not"),
        connected(server, kind),
    ):
        pass
    with pytest.raises(TlsFailed, match="wants a certificate of the client"), connected(server, kind, ca=files.ca):
        pass


def test_a_file_that_cannot_be_used_is_named(server: RegisteredServer) -> None:
    with pytest.raises(ConfigError, match="cannot read /no/such/file"), connected(server, "TCP", ca="/no/such/file"):
        pass
    with pytest.raises(ConfigError, match="key is that of cert"), connected(server, "TCP", key="/no/such/file"):
        pass
