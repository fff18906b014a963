"""Three servers in virtual time, in a network without sockets, of which some fall
silent: whoever waits for a silent one waits to the microsecond, and no other one is
ever late, however busy the machine is.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import trio
import trio.testing

import infinistore
from infinistore.client import AsyncStore
from infinistore.client.extension import Environment
from infinistore.core import StoreCore
from tests.server.running import RunningServer, simulated_server
from tests.transports.memory_network import MemoryStream

__all__ = ["HOSTS", "Network", "run_in_virtual_time"]

HOSTS = ("a", "b", "c")


class Network:
    """Servers by name. One that is in `silent` accepts connections, and says nothing.
    `sent` counts what was sent there.
    """

    def __init__(self) -> None:
        self.silent: set[str] = set()
        self.sent = 0
        self._servers: dict[str, RunningServer] = {}

    @asynccontextmanager
    async def running(self) -> AsyncGenerator["Network", None]:
        async with AsyncExitStack() as stack:
            for host in HOSTS:
                self._servers[host] = await stack.enter_async_context(simulated_server())
            yield self

    def core(self, host: str) -> StoreCore:
        return self._servers[host].core

    def keys(self, host: str) -> set[str]:
        """What a server has."""
        return set(self.core(host).index)

    async def connect(self, url: Any) -> "Line":
        await trio.lowlevel.checkpoint()
        self.sent += url.host in self.silent
        listener = self._servers[url.host].listener
        assert listener is not None
        return Line(self, url.host, listener.connect_stream())


class Line:
    """A client's end of a connection to a server that may fall silent."""

    passes_descriptors = False

    def __init__(self, network: Network, host: str, stream: MemoryStream) -> None:
        self._network = network
        self._host = host
        self._stream = stream

    @property
    def _is_silent(self) -> bool:
        return self._host in self._network.silent

    async def send_all(self, views: Sequence[memoryview], within_s: float = float("inf")) -> None:
        if self._is_silent:
            self._network.sent += 1
            await trio.lowlevel.checkpoint()
        else:
            await self._stream.send_all(views, within_s)

    async def receive_into(self, views: Sequence[memoryview], deadline: float = float("inf")) -> int:
        if self._is_silent:
            await trio.sleep_until(deadline)
            raise TimeoutError
        return await self._stream.receive_into(views, deadline)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def run_in_virtual_time(
    body: Callable[[AsyncStore, Network], Awaitable[None]], *, copies: int = 1, membership: Any = None, **options: Any
) -> None:
    """Run `body` with a store of the three, which are there."""

    async def main() -> None:
        async with Network().running() as network:
            environment = Environment(connect=network.connect)
            if membership is not None:
                environment = Environment(connect=network.connect, membership=lambda url: membership)
            url = "infinistore+static://" + ",".join(f"{host}:1" for host in HOSTS) + f"?copies={copies}"
            async with infinistore.open_store(url, environment=environment, **options) as store:
                await body(store, network)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
