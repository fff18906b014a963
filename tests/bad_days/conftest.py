"""What bad days need: a server, a proxy that does harm, every kind of client, and a
breaker that is in a hurry.
"""

from collections.abc import Iterator

import pytest

from infinistore import blocking
from infinistore.blocking import BlockingStore
from infinistore.client.connection import circuit_breaker as health
from tests.bad_days.faults import Proxy, running_proxy
from tests.bad_days.servers import ServerProcess, ServerUrl, running_server_here, running_server_process


@pytest.fixture(params=["trio", "blocking", "asyncio"])
def kind(request: pytest.FixtureRequest) -> str:
    """The kind of client. Tests that are about waiting ask for `KINDS`, which has
    uvloop as well.
    """
    return str(request.param)


@pytest.fixture
def quick_breaker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries without much waiting, and a circuit that is open for a moment only."""
    monkeypatch.setattr(health, "FIRST_DELAY_S", 0.0005)
    monkeypatch.setattr(health, "FIRST_PAUSE_S", 0.002)
    monkeypatch.setattr(health, "LONGEST_PAUSE_S", 0.002)


@pytest.fixture(scope="session")
def server_here() -> Iterator[ServerUrl]:
    """A server in a thread of this process, with which nothing is done."""
    with running_server_here() as started:
        yield started


@pytest.fixture(scope="session")
def server_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of all tests, which nobody kills, with a Unix socket."""
    with running_server_process(unix_socket=tmp_path_factory.mktemp("server") / "socket") as started:
        yield started


@pytest.fixture(scope="session")
def _mortal_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_server_process(unix_socket=tmp_path_factory.mktemp("server") / "socket") as started:
        yield started


@pytest.fixture
def mortal(_mortal_server: ServerProcess) -> ServerProcess:
    """A server that may be killed, and is there."""
    if _mortal_server.process is None:
        _mortal_server.start()
    return _mortal_server


@pytest.fixture
def server(server_here: ServerUrl) -> ServerUrl:
    """The server of a test. A module for which it matters that it is another process
    takes `server_process`.
    """
    return server_here


@pytest.fixture
def proxy(server: ServerUrl) -> Iterator[Proxy]:
    """A proxy to that server."""
    with running_proxy(("127.0.0.1", server.port)) as started:
        yield started


@pytest.fixture
def direct(server: ServerUrl) -> Iterator[BlockingStore]:
    """A store that does not go through the proxy."""
    with blocking.open_store(server.url) as store:
        yield store
