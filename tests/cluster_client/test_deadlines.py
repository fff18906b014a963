"""The deadline is for a call as a whole, however many nodes it asks one after another:
in virtual time, with real servers in a network without sockets.
"""

import itertools
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from infinistore.client import AsyncStore
from infinistore.client.cluster.calls import ClusterCalls
from infinistore.client.cluster.everywhere import HANDLERS
from infinistore.client.cluster.nodes import Nodes
from infinistore.client.options import Options
from infinistore.cluster.membership import Node, NodeState
from infinistore.errors import InfiniStoreException
from infinistore.protocol.messages import Purge
from tests.cluster_client.clusters import Given
from tests.cluster_client.silent_network import HOSTS, Network, run_in_virtual_time

NAMES = [f"key {number}" for number in range(60)]
DEADLINE_S = 2.0


async def leased(store: AsyncStore) -> None:
    async with store.lease(NAMES):
        pass


async def next_removals(store: AsyncStore) -> None:
    await anext(store.removals())


CALLS: dict[str, Callable[[AsyncStore], Awaitable[Any]]] = {
    "get": lambda store: store.get(NAMES[0]),
    "get_many": lambda store: store.get_many(NAMES),
    "get_into": lambda store: store.get_into(NAMES[0], bytearray(9)),
    "lease": leased,
    "exists": lambda store: store.exists_many(NAMES),
    "match_prefix": lambda store: store.match_prefix(NAMES, hold_s=60),
    "put": lambda store: store.put_many(dict.fromkeys(NAMES, b"x")),
    "put if new": lambda store: store.put_many(dict.fromkeys(NAMES, b"x"), replace=False),
    "delete": lambda store: store.delete(NAMES),
    "flush": lambda store: store.flush(NAMES),
    "pin": lambda store: store.pin(NAMES),
    "unpin": lambda store: store.unpin(NAMES),
    "keys": lambda store: store.keys(),
    "evict": lambda store: store.evict(0, 0),
    "purge": lambda store: store.purge(),
    "stats": lambda store: store.stats(),
    "removals": next_removals,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_to_slow_nodes_ends_with_its_deadline(name: str) -> None:
    """Wherever the slow ones stand."""
    states = (NodeState.JOINING, NodeState.SERVING, NodeState.DRAINING)
    nodes = [Node(host, f"tcp://{host}:1", state=state) for host, state in zip(HOSTS, states, strict=True)]
    late: dict[str, float] = {}

    def with_silent(silent: Sequence[str]) -> None:
        async def body(store: AsyncStore, network: Network) -> None:
            await store.stats()  # which connects
            network.silent.update(silent)
            for _ in range(2):
                begun = trio.current_time()
                with suppress(InfiniStoreException):
                    await CALLS[name](store)
                late[",".join(silent)] = trio.current_time() - begun

        given = Given(nodes, copies=3)
        run_in_virtual_time(body, membership=given, lazy=True, deadline_s=DEADLINE_S, lookup_deadline_s=1.5)

    for silent in (HOSTS, *itertools.combinations(HOSTS, 2)):
        with_silent(silent)
    assert {silent: took_s for silent, took_s in late.items() if took_s > DEADLINE_S} == {}


def test_a_reservation_whose_copies_are_slow_is_stored_in_time() -> None:
    stored: list[str] = []

    def with_one(there: str) -> None:
        async def body(store: AsyncStore, network: Network) -> None:
            await store.stats()  # which connects
            begun = trio.current_time()
            with suppress(InfiniStoreException):
                async with store.reserve({"key": 5}) as views:
                    views[0][:] = b"value"
                    network.silent.update(set(HOSTS) - {there})
            assert 0 < trio.current_time() - begun <= DEADLINE_S
            stored.extend(network.keys(there))

        run_in_virtual_time(body, copies=3, deadline_s=DEADLINE_S)

    for host in HOSTS:
        with_one(host)
    assert stored == ["key"] * 3  # by its owner, and as a copy


@pytest.mark.parametrize(
    ("deadline_s", "within_s"), [(30.0, [29.2, 29.6, 30.0]), (0.6, [0.2, 0.3, 0.6])], ids=["long", "short"]
)
def test_the_first_turn_of_a_purge_has_all_but_a_lookup_for_each_later_one(
    deadline_s: float, within_s: list[float]
) -> None:
    states = (NodeState.JOINING, NodeState.SERVING, NodeState.DRAINING)
    given = Given([Node(host, f"tcp://{host}:1", state=state) for host, state in zip(HOSTS, states, strict=True)])
    node = SimpleNamespace(calls=SimpleNamespace(breaker=SimpleNamespace(open_until=None, failures=0)))
    options = Options(deadline_s=deadline_s, lookup_deadline_s=0.4)
    work = ClusterCalls(Nodes(given, lambda url, instance: node), HANDLERS, options, lambda: 0.0).call(Purge())
    asked: list[float] = []
    outcomes = None
    with suppress(StopIteration):
        while True:
            effect = work.send(outcomes)
            asked.append(effect.parts[0].within_s)
            outcomes = [0] * len(effect.parts)
    assert asked == pytest.approx(within_s)
