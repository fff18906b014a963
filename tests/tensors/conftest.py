"""Stores for the tests of tensors: embedded, shared memory and TCP; and one that waits
until a test lets it go.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from infinistore import blocking
from infinistore.blocking import BlockingStore
from infinistore.errors import StoreUnavailable
from infinistore.kept_errors import KeptError
from infinistore.protocol.messages import StoreRequest
from tests.bad_days.servers import ServerHere, running_server_here
from tests.cluster_client.clusters import PATIENT

_T = TypeVar("_T")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerHere]:
    """A server in a thread, with a Unix socket."""
    folder: Path = tmp_path_factory.mktemp("tensors")
    with running_server_here(unix_socket=str(folder / "store.sock")) as started:
        yield started


@pytest.fixture(scope="session")
def other_server() -> Iterator[ServerHere]:
    """Another one, which makes a cluster with the first."""
    with running_server_here(unix_socket="off") as started:
        yield started


@pytest.fixture
def store() -> Iterator[BlockingStore]:
    """An embedded store."""
    with blocking.open_store(pool_bytes=16 << 20, minimal_allocate_bytes=4096) as opened:
        yield opened


@contextmanager
def open_kind(kind: str, server: ServerHere) -> Iterator[BlockingStore]:
    """A store of this kind, empty."""
    if kind == "embedded":
        url, options = None, {"pool_bytes": 16 << 20, "minimal_allocate_bytes": 4096}
    elif kind == "shm":
        url, options = server.url.replace("tcp", "shm"), {"inline_bytes": 0}
    else:
        url, options = server.url, {}
    with blocking.open_store(url, **options) as opened:  # type: ignore[arg-type]
        opened.purge()
        yield opened


@pytest.fixture(params=["embedded", "shm", "tcp", "cluster"])
def any_store(request: pytest.FixtureRequest, server: ServerHere) -> Iterator[BlockingStore]:
    """A store of each kind; one node of the cluster goes by shared memory, the other by
    TCP.
    """
    if request.param == "cluster":
        nodes = server, request.getfixturevalue("other_server")
        addresses = ",".join(node.url.partition("://")[2].partition("?")[0] for node in nodes)
        with blocking.open_store(f"infinistore+static://{addresses}", inline_bytes=0, **PATIENT) as opened:
            opened.purge()
            yield opened
        return
    with open_kind(request.param, server) as opened:
        yield opened


class GatedStore(BlockingStore):
    """A store whose calls wait for `gate`, and then fail with `failure` if there is
    one. `begun` counts them.

    `entered` is released by each call, before it waits.
    """

    def __init__(self, store: BlockingStore) -> None:
        self.inner = store
        self.gate = threading.Event()
        self.entered = threading.Semaphore(0)
        self.begun = 0
        self.failure: Exception | None = None

    def _call(self, request: StoreRequest[_T]) -> _T:
        self.begun += 1
        self.entered.release()
        self.gate.wait()
        if self.failure is not None:
            raise KeptError(self.failure).again()
        return self.inner._call(request)

    def mapped_arenas(self) -> list[tuple[memoryview, memoryview | None]]:
        return self.inner.mapped_arenas()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.fixture
def gated(store: BlockingStore) -> Iterator[GatedStore]:
    """A gated store; whatever happens in the test, the gate is open when it ends."""
    made = GatedStore(store)
    yield made
    made.gate.set()


@pytest.fixture
def failing(gated: GatedStore) -> GatedStore:
    """A store that is gone."""
    gated.failure = StoreUnavailable("gone")
    gated.gate.set()
    return gated


def threads_named(part: str) -> int:
    """How many threads there are whose name has this in it."""
    return sum(part in thread.name for thread in threading.enumerate())
