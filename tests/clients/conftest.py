"""Loops and stores for the tests of clients.

An example runs with the kinds that reach code of their own; the rest are nightly. The
rule machines have them all.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.clients.dresses import DRESSES
from tests.clients.shared_serving import Shared, shared_serving
from tests.clients.stores import REMOTE, STORES, Loops, Opened, differing
from tests.server.running import KIB, MIB, make_config


@pytest.fixture(scope="session")
def loops() -> Iterator[Loops]:
    """A Trio and an asyncio loop, each in a thread, for all tests of a session."""
    with Loops.running() as running:
        yield running


@pytest.fixture(params=differing(STORES))
def opened(request: pytest.FixtureRequest, loops: Loops) -> Iterator[Opened]:
    """An open store of each kind that differs, with 4 MiB of room."""
    with STORES[request.param](loops, make_config(prealloc_bytes=4 * MIB), {}, 1) as store:
        yield store


@pytest.fixture(params=DRESSES)
def dress(request: pytest.FixtureRequest) -> str:
    """A kind of client, for `dresses.opened`."""
    name: str = request.param
    return name


class Remotes:
    """Opens stores of one remote kind, with settings of the test's own; all are closed
    after it.
    """

    def __init__(self, kind: str, loops: Loops, stack: ExitStack) -> None:
        self.kind = kind
        self._loops = loops
        self._stack = stack

    def open(self, options: dict[str, Any] | None = None, **settings: Any) -> Opened:
        config = make_config(**{"prealloc_bytes": 4 * MIB, "minimal_allocate_bytes": KIB, **settings})
        return self._stack.enter_context(REMOTE[self.kind](self._loops, config, options or {}, 2))


@pytest.fixture(params=differing(REMOTE))
def remotes(request: pytest.FixtureRequest, loops: Loops) -> Iterator[Remotes]:
    """Opens a server and a store of each remote kind."""
    with ExitStack() as stack:
        yield Remotes(request.param, loops, stack)


@pytest.fixture(params=differing(DRESSES))
def kind(request: pytest.FixtureRequest) -> str:
    """Of what kind the clients of `shared` are."""
    name: str = request.param
    return name


@pytest.fixture
def shared(kind: str, loops: Loops) -> Iterator[Shared]:
    """A server on this host, and what opens stores that map its pool, of each kind of
    client.
    """
    with shared_serving(loops, kind) as running:
        yield running


@pytest.fixture
def one_kind(loops: Loops) -> Iterator[Shared]:
    """For what does not depend on the kind of client, or looks at it from inside: from
    a loop that is impossible.
    """
    with shared_serving(loops, "threads") as running:
        yield running


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that do not answer are tried again at once, and always."""
    monkeypatch.setattr("infinistore.client.connection.circuit_breaker.FIRST_DELAY_S", 0.0)
    monkeypatch.setattr("infinistore.client.connection.circuit_breaker.FIRST_PAUSE_S", 0.0)
