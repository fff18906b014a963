"""How long lookups take while a node is silent, to the last microsecond: in virtual
time, with real servers in a network without sockets.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
import trio

from infinistore.client import AsyncStore
from infinistore.cluster.membership import Node, NodeState
from tests.cluster_client.clusters import Given
from tests.cluster_client.silent_network import HOSTS, Network, run_in_virtual_time

NAMES = [f"key {number}" for number in range(60)]
LONGEST_S = 0.5
"""What docs promise of a lookup, with the options that a store has by default."""
LOOKUPS: list[Callable[[AsyncStore], Awaitable[Any]]] = [
    lambda store: store.exists_many(NAMES),
    lambda store: store.match_prefix(NAMES),
    lambda store: store.match_prefix(NAMES, hold_s=60),
    lambda store: store.prefetch(NAMES),
    lambda store: store.exists(NAMES[0]),
]


SERVING, JOINING, DRAINING = NodeState.SERVING, NodeState.JOINING, NodeState.DRAINING
VIEWS: list[tuple[Sequence[NodeState], int, str]] = [
    ([SERVING, SERVING, SERVING], 1, "a"),
    ([SERVING, SERVING, SERVING], 2, "b"),
    ([SERVING, JOINING, SERVING], 1, "bc"),
    ([DRAINING, JOINING, SERVING], 2, "abc"),
]
"""The states of the nodes, the number of copies, and hosts in different states."""
SINCE = ("before it is connected", "after it was connected")


@pytest.mark.parametrize(
    ("states", "copies", "host", "since"),
    [
        pytest.param(
            states,
            copies,
            host,
            since,
            id=f"{'-'.join(state.value for state in states)}-{copies}-{host}-{since}",
            marks=() if host in different else pytest.mark.nightly,
        )
        for states, copies, different in VIEWS
        for host in HOSTS
        for since in SINCE
    ],
)
def test_no_lookup_waits_longer_than_half_a_second_for_a_silent_node_nor_at_all_once_it_is_lost(
    host: str, states: Sequence[NodeState], copies: int, since: str
) -> None:
    nodes = [Node(name, f"tcp://{name}:1", state=state) for name, state in zip(HOSTS, states, strict=True)]
    given = Given(nodes, copies=copies)

    async def took_s(call: Callable[[AsyncStore], Awaitable[Any]], store: AsyncStore) -> float:
        begun = trio.current_time()
        await call(store)
        return trio.current_time() - begun

    async def body(store: AsyncStore, network: Network) -> None:
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

    run_in_virtual_time(body, membership=given, lazy=True)
