"""Servers, and connections to them in the manner of the original."""

import asyncio
import ctypes
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import pytest

from infinistore import TYPE_RDMA, ClientConfig, InfinityConnection
from infinistore.dropin.registered_server import RegisteredServer
from tests.server.running import KIB, MIB, make_config

Connect: TypeAlias = Callable[..., InfinityConnection]
Memory = TypeVar("Memory")


def pointer(memory: Any) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def register(connection: InfinityConnection, memory: Memory) -> Memory:
    """Register memory by its address; return it."""
    view: Any = memory
    assert connection.register_mr(pointer(view), memoryview(view).nbytes) == 0
    return memory


def write(connection: InfinityConnection, blocks: list[tuple[str, int]], size: int, memory: Any) -> int:
    return asyncio.run(connection.rdma_write_cache_async(blocks, size, pointer(memory)))


def read(connection: InfinityConnection, blocks: list[tuple[str, int]], size: int, memory: Any) -> int:
    return asyncio.run(connection.rdma_read_cache_async(blocks, size, pointer(memory)))


@contextmanager
def running_server(**settings: Any) -> Iterator[RegisteredServer]:
    """A server in a thread, on a free port, with a pool of 16 MiB."""
    given = {"prealloc_bytes": 16 * MIB, "minimal_allocate_bytes": KIB, **settings}
    running = RegisteredServer(make_config(**given))
    try:
        yield running
    finally:
        running.stop()


@contextmanager
def serving(path: str) -> Iterator[RegisteredServer]:
    """A server to which the best path is this one."""
    with (
        tempfile.TemporaryDirectory(prefix="infinistore-") as folder,
        running_server(unix_socket=str(Path(folder, "s")) if path == "shm" else "off") as running,
    ):
        yield running


def config_for(port: int, kind: str = TYPE_RDMA, **settings: Any) -> ClientConfig:
    """How a program of the original reaches a server on this machine."""
    given = {"host_addr": "127.0.0.1", "service_port": port, "connection_type": kind, **settings}
    return ClientConfig(**given)


@contextmanager
def connected(port: int, kind: str = TYPE_RDMA, **settings: Any) -> Iterator[InfinityConnection]:
    with InfinityConnection(config_for(port, kind, **settings)) as connection:
        connection.connect()
        yield connection


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
    return config_for(server.addresses.port)


@pytest.fixture
def connect(server: RegisteredServer, config: ClientConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Connect]:
    """Opens connections; keyword arguments change the configuration. All are closed
    after the test. Their calls have more time than the original's settings can say: a
    thousand at once take long on a busy machine.
    """
    options: Any = ClientConfig.options
    monkeypatch.setattr(ClientConfig, "options", property(lambda given: {**options.fget(given), "deadline_s": 100.0}))
    with ExitStack() as stack:

        def connect(kind: str = TYPE_RDMA, **settings: Any) -> InfinityConnection:
            return stack.enter_context(connected(server.addresses.port, kind, **settings))

        yield connect


@pytest.fixture
def connection(connect: Connect) -> InfinityConnection:
    """A connection of TYPE_RDMA."""
    return connect()
