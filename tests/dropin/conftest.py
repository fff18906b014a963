"""A server, and connections to it in the manner of the original."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from infinistore import TYPE_RDMA, ClientConfig, InfinityConnection
from infinistore.dropin.registered_server import RegisteredServer
from tests.server.running import KIB, MIB, make_config

Connect: TypeAlias = Callable[..., InfinityConnection]


def run_server(**settings: Any) -> RegisteredServer:
    """A server in a thread, on a free port, with a pool of 16 MiB."""
    return RegisteredServer(make_config(**{"prealloc_bytes": 16 * MIB, "minimal_allocate_bytes": KIB, **settings}))


@contextmanager
def serving(path: str) -> Iterator[RegisteredServer]:
    """A server to which the best path is this one."""
    with tempfile.TemporaryDirectory(prefix="infinistore-") as folder:
        running = run_server(unix_socket=str(Path(folder, "s")) if path == "shm" else "off")
        yield running
        running.stop()


@pytest.fixture(scope="module", params=["shm", "tcp"])
def server(request: pytest.FixtureRequest) -> Iterator[RegisteredServer]:
    """A server to which the best path is by shared memory, and one to which it
    is TCP.
    """
    with serving(request.param) as running:
        yield running


@pytest.fixture
def config(server: RegisteredServer) -> ClientConfig:
    """How a program of the original with RDMA would reach the server, which is
    empty.
    """
    server.ask(lambda store: store.purge())
    return ClientConfig(host_addr="127.0.0.1", service_port=server.addresses.port, connection_type=TYPE_RDMA)


@pytest.fixture
def connect(config: ClientConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Connect]:
    """Opens connections; keyword arguments change the configuration. All are closed
    after the test. Their calls have more time than the original's settings can say: a
    thousand at once take long on a busy machine.
    """
    options: Any = ClientConfig.options
    monkeypatch.setattr(ClientConfig, "options", property(lambda given: {**options.fget(given), "deadline_s": 100.0}))
    with ExitStack() as stack:

        def connect(**settings: Any) -> InfinityConnection:
            given = {name: getattr(config, name) for name in ("host_addr", "service_port", "connection_type")}
            connection = stack.enter_context(InfinityConnection(ClientConfig(**{**given, **settings})))
            connection.connect()
            return connection

        yield connect


@pytest.fixture
def connection(connect: Connect) -> InfinityConnection:
    """A connection of TYPE_RDMA."""
    return connect()
