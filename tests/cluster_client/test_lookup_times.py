"""How long lookups take while a node is silent, to the last microsecond: in virtual
time, with real servers in a network without sockets.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

import infinistore
from infinistore.client import AsyncStore
from infinistore.client.extension import Environment
from infinistore.cluster.view import Node, NodeState
from tests.cluster_client.clusters import Given
from tests.server.running import simulated_server
from tests.transports.memory_network import MemoryStream

NAMES = [f"key {number}" for number in range(60)]
HOSTS = ("a", "b", "c")
LONGEST_S = 0.5
"""What docs promise of a lookup, with the options that a store has by default."""
LOOKUPS: list[Callable[[AsyncStore], Awaitable[Any]]] = [
    lambda store: store.exists_many(NAMES),
    lambda store: store.match_prefix(NAMES),
    lambda store: store.match_prefix(NAMES, hold_s=60),
    lambda store: store.prefetch(NAMES),
    lambda store: store.exists(NAMES[0]),
]


class Network:
    """Servers by name. One that is in `silent` accepts connections, and says nothing.
    `sent` counts what was sent there.
    """

    def __init__(self) -> None:
        self.silent: set[str] = set()
        self.sent = 0
        self._servers: dict[str, Any] = {}

    @asynccontextmanager
    async def running(self) -> AsyncGenerator["Network", None]:
        async with AsyncExitStack() as stack:
            for host in HOSTS:
                self._servers[host] = await stack.enter_async_context(simulated_server())
            yield self

    async def connect(self, url: Any) -> "Line":
        await trio.lowlevel.checkpoint()
        self.sent += url.host in self.silent
        return Line(self, url.host, self._servers[url.host].listener.connect_stream())


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


@pytest.mark.parametrize("since", ["before it is connected", "after it was connected"])
@pytest.mark.parametrize(
    ("states", "copies"),
    [
        ([NodeState.SERVING] * 3, 1),
        ([NodeState.SERVING] * 3, 2),
        ([NodeState.SERVING, NodeState.JOINING, NodeState.SERVING], 1),
        ([NodeState.DRAINING, NodeState.JOINING, NodeState.SERVING], 2),
    ],
    ids=["one copy", "two copies", "joining", "changing"],
)
@pytest.mark.parametrize("host", HOSTS)
def test_no_lookup_waits_longer_than_half_a_second_for_a_silent_node_nor_at_all_once_it_is_lost(
    host: str, states: Sequence[NodeState], copies: int, since: str
) -> None:
    nodes = [Node(name, f"tcp://{name}:1", state=state) for name, state in zip(HOSTS, states, strict=True)]
    given = Given(nodes, copies=copies)

    async def took_s(call: Callable[[AsyncStore], Awaitable[Any]], store: AsyncStore) -> float:
        begun = trio.current_time()
        await call(store)
        return trio.current_time() - begun

    async def main() -> None:
        async with Network().running() as network:
            environment = Environment(connect=network.connect, membership=lambda url: given)
            async with infinistore.open_store(
                "infinistore+static://nobody:1", environment=environment, lazy=True
            ) as store:
                if since == "after it was connected":
                    for lookup in LOOKUPS:
                        assert await took_s(lookup, store) == 0
                network.silent.add(host)
                waited = [await took_s(lookup, store) for lookup in LOOKUPS * 2]
                assert 0 < max(waited) <= LONGEST_S
                assert sum(map(bool, waited)) == 2  # so many silences open the breaker
                sent = network.sent
                assert [await took_s(lookup, store) for lookup in LOOKUPS * 3] == [0] * 3 * len(LOOKUPS)
                assert network.sent == sent
                # Also while the background asks it again and again.
                for _ in range(100):
                    await trio.sleep(0.17)
                    assert await took_s(LOOKUPS[0], store) == 0
                assert network.sent > sent

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
