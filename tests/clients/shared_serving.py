"""A server on this host and several stores that map its pool, all of one kind of
client, for tests of shared memory.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from infinistore.blocking import BlockingStore
from infinistore.core import StoreCore
from infinistore.server.environment import Environment
from tests.clients.dresses import opened
from tests.clients.stores import Loops, when_idle
from tests.server.running import KIB, MIB, RunningServer, make_config, running_server

__all__ = ["LONG", "Shared", "shared_serving"]

LONG = {"a": bytes(range(256)) * 400, "b": b"b" * 70_000}
"""Blocks that do not go inline."""


class Shared:
    """A server, and stores of one kind on it, which are closed with the test or
    before.
    """

    def __init__(self, loops: Loops, dress: str, server: RunningServer, stack: ExitStack) -> None:
        self.server = server
        self.url = f"shm://{server.unix_path}"
        self._loops = loops
        self._dress = dress
        self.stack = stack

    @property
    def core(self) -> StoreCore:
        return self.server.core

    def open(self, **options: Any) -> BlockingStore:
        return self.stack.enter_context(self.entered(**options))

    def entered(self, **options: Any) -> AbstractContextManager[BlockingStore]:
        return opened(self._loops, self._dress, self.url, **options)

    def look(self, function: Callable[[], Any]) -> Any:
        """Run a function where the server may be looked at: in its loop, when that is
        idle.
        """
        return self._loops.trio.run(when_idle, function)

    def core_statistics(self) -> Any:
        return self.look(self.core.statistics)

    def until(self, **expected: int) -> None:
        """Wait until the core's figures are these; the test's time limit ends it if
        they never are.
        """
        while any(getattr(self.core_statistics(), name) != value for name, value in expected.items()):
            pass

    def requests(self) -> int:
        found: int = self.look(lambda: self.server.server.sessions.traffic().requests)
        return found

    @contextmanager
    def without_a_request(self) -> Iterator[None]:
        before = self.requests()
        yield
        assert self.requests() == before

    @contextmanager
    def with_a_request(self) -> Iterator[None]:
        before = self.requests()
        yield
        assert self.requests() > before

    def end_connections(self) -> None:
        """Have the server end every connection that it has, as when it drains."""

        def end() -> None:
            for session in self.server.server.sessions:
                session.finish()

        self.look(end)
        self.look(lambda: None)


@contextmanager
def shared_serving(
    loops: Loops, kind: str, environment: Environment | None = None, **settings: Any
) -> Iterator[Shared]:
    """Run a server with 4 MiB of room, in units of 1 KiB unless the settings say
    otherwise.
    """
    with tempfile.TemporaryDirectory() as folder:
        plain: dict[str, Any] = {"prealloc_bytes": 4 * MIB, "minimal_allocate_bytes": KIB}
        config = make_config(unix_socket=f"{folder}/store.sock", **{**plain, **settings})
        with loops.trio.entered(lambda: running_server(config, environment)) as server, ExitStack() as stack:
            shared = Shared(loops, kind, server, stack)
            yield shared
