"""LMCache itself, where it is installed: `make test-integrations` brings an environment that has it."""

import os
import warnings
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from infinistore import blocking
from tests.bad_days.servers import ServerProcess, running_server_process

os.environ["LMCACHE_TRACK_USAGE"] = "false"  # a test tells nobody that it ran
if find_spec("lmcache") is not None:
    with warnings.catch_warnings():  # what LMCache and its dependencies warn of while they are imported
        warnings.simplefilter("ignore")
        import lmcache.v1.cache_engine
        import lmcache.v1.distributed.storage_manager  # noqa: F401

        import infinistore.integrations.lmcache
        import infinistore.integrations.lmcache_l2  # noqa: F401


@pytest.fixture(scope="session")
def shared_server() -> Iterator[ServerProcess]:
    with running_server_process("--unix-socket", "auto") as server:
        yield server


@pytest.fixture
def server(shared_server: ServerProcess) -> Iterator[ServerProcess]:
    """A server with an empty pool of 16 MiB, for tests that leave it alive."""
    yield shared_server
    with blocking.open_store(shared_server.url) as store:
        store.purge()


@pytest.fixture
def mortal_server() -> Iterator[ServerProcess]:
    """A server for tests that kill it."""
    with running_server_process() as server:
        yield server


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask a server that was down again at once, where the next call would wait for a second."""
    monkeypatch.setattr("infinistore.client.health._FIRST_PAUSE_S", 0.0)
