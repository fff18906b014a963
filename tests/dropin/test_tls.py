"""A program of the original reaches a server over TLS."""

from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest

from infinistore import TYPE_RDMA, TYPE_TCP, ClientConfig, ConfigError, InfinityConnection, TlsFailed
from tests.dropin.conftest import connected, read, register, running_server, write
from tests.transports.certificates import Files, issue

TYPES = (TYPE_TCP, TYPE_RDMA)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return issue(tmp_path)


@pytest.fixture
def mine(tmp_path: Path) -> Files:
    """What a client shows."""
    return issue(tmp_path, "client", ca="clients", stem="client")


@pytest.fixture
def port(files: Files, mine: Files) -> Iterator[int]:
    """Of a server that wants a certificate of its clients."""
    settings = {"tls_cert": files.cert, "tls_key": files.key, "tls_client_ca": mine.ca}
    with running_server(unix_socket="off", **settings) as running:
        yield running.addresses.port


def moves_blocks(connection: InfinityConnection) -> None:
    assert connection.transport == "tls"
    array = numpy.arange(4096, dtype=numpy.uint8)
    connection.tcp_write_cache("one", array.ctypes.data, array.nbytes)
    found = connection.tcp_read_cache("one")
    assert found is not None
    assert bytes(found) == bytes(array)
    if connection.rdma_connected:
        target = register(connection, numpy.zeros_like(array))
        write(connection, [("two", 0)], array.nbytes, register(connection, array))
        read(connection, [("two", 0)], array.nbytes, target)
        assert bytes(target) == bytes(array)


@pytest.mark.parametrize("kind", TYPES)
def test_blocks_travel_over_tls_with_the_files_that_the_settings_name(
    port: int, files: Files, mine: Files, kind: str
) -> None:
    with connected(port, kind, ca=files.ca, cert=mine.cert, key=mine.key, dev_name="mlx5_0") as connection:
        moves_blocks(connection)


@pytest.mark.parametrize("kind", TYPES)
def test_a_program_that_knows_of_no_tls_gets_it_from_the_environment(
    port: int, files: Files, mine: Files, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, file in (("CA", files.ca), ("CERT", mine.cert), ("KEY", mine.key)):
        monkeypatch.setenv(f"INFINISTORE_{name}", str(file))
    with connected(port, kind) as connection:
        moves_blocks(connection)


def test_a_url_of_a_cluster_names_them_too(port: int, files: Files, mine: Files) -> None:
    url = f"infinistores+static://127.0.0.1:{port}?ca={files.ca}&cert={mine.cert}&key={mine.key}"
    with InfinityConnection(ClientConfig(host_addr=url, connection_type=TYPE_TCP)) as connection:
        connection.connect()
        array = numpy.ones(100, dtype=numpy.uint8)
        connection.tcp_write_cache("key", array.ctypes.data, array.nbytes)
        assert connection.check_exist("key")


@pytest.mark.parametrize("kind", TYPES)
def test_who_is_not_let_in_is_told_why(port: int, files: Files, kind: str) -> None:
    for settings, reason in (
        ({}, "this port speaks TLS, and the client does not"),
        ({"ca": files.ca}, "wants a certificate of the client"),
    ):
        with pytest.raises(TlsFailed, match=reason), connected(port, kind, **settings):
            pass


def test_a_file_that_cannot_be_used_is_named(port: int) -> None:
    for setting, reason in (("ca", "cannot read /no/such/file"), ("key", "key is that of cert")):
        with pytest.raises(ConfigError, match=reason), connected(port, TYPE_TCP, **{setting: "/no/such/file"}):
            pass
