"""A lost node: what it has is missing, and nothing else is; puts say what they did."""

import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from infinistore.client.cluster.calls import CallInView, ClusterCalls
from infinistore.client.cluster.nodes import PING, Nodes
from infinistore.client.cluster.reads import lease, read
from infinistore.client.connection import circuit_breaker
from infinistore.client.connection.calls import Calls
from infinistore.client.options import Options
from infinistore.client.requests import (
    Batch,
    Get,
    GetInto,
    Lease,
)
from infinistore.cluster.membership import Node, NodeState
from infinistore.errors import AuthenticationFailed, DeadlineExceeded, PartialPut, StoreUnavailable
from infinistore.kept_errors import KeptError
from infinistore.protocol.messages import Exists
from infinistore.transports.sockets.blocking_streams import BlockingSocketStream
from tests.bad_days.clients import KINDS, run_with_store
from tests.bad_days.full_backlog import full
from tests.cluster_client.clusters import PATIENT, Cluster, Given, Member
from tests.cluster_client.silent_network import Network, run_in_virtual_time

NAMES = [f"key {number}" for number in range(60)]
BLOCKS = {name: name.encode() for name in NAMES}
Lose = Callable[[], set[str]]
"""Make the first node stop, or say nothing more; return its keys."""


def stopping(cluster: Cluster) -> Lose:
    member = cluster.members[0]

    def lose() -> set[str]:
        keys = member.keys()
        member.stop()
        return keys

    return lose


def silencing(network: Network) -> Lose:
    def lose() -> set[str]:
        network.silent.add("a")
        return network.keys("a")

    return lose


async def live_on(store: Any, address: str, lose: Lose) -> None:
    """What a lost node has is missing, and nothing else."""
    await store.put_many(BLOCKS)
    lost = lose()
    there = [name not in lost for name in NAMES]
    for _ in range(3):  # before the node counts as lost, and after
        assert await store.get_many(NAMES) == [None if name in lost else BLOCKS[name] for name in NAMES]
        buffers = [bytearray(9) for _ in NAMES]
        lengths = await store.get_many_into(list(zip(NAMES, buffers, strict=True)))
        assert [length is not None for length in lengths] == there
        assert await store.exists_many(NAMES) == there
        assert await store.match_prefix(NAMES) == there.index(False)
        assert await store.match_prefix([name for name in NAMES if name in lost]) == 0
        async with store.lease(NAMES) as views:
            assert [view is not None for view in views] == there
        assert await store.keys() == sorted(set(NAMES) - lost)
        with pytest.raises(StoreUnavailable, match=address):
            await store.keys(every_node=True)
        assert await store.flush(NAMES) == 0
    stats = await store.stats()
    assert stats.store.keys == len(NAMES) - len(lost)
    assert sorted(bool(node.problem) for node in stats.cluster.nodes) == [False, False, True]
    assert stats.cluster.lost_reads >= 12 * len(lost)


async def live_on_and_put(store: Any, address: str, lose: Lose) -> None:
    """A put says what is stored and what is not."""
    await store.put_many(BLOCKS)
    lost = lose()
    newer = dict.fromkeys(NAMES, b"newer")
    stored = [name for name in NAMES if name not in lost]
    errors = []
    for _ in range(3):
        with pytest.raises(PartialPut) as caught:
            await store.put_many(newer)
        errors.append(caught.value)
        assert errors[-1].stored == stored
        assert [*errors[-1].failed, *errors[-1].unknown] == [name for name in NAMES if name in lost]
        assert str(errors[-1]).count("the node ") == 1
    assert errors[-1].unknown == []  # it is known to be lost, and nothing was sent
    assert await store.get_many(stored) == [b"newer"] * len(stored)
    with pytest.raises(StoreUnavailable, match="not everything was deleted") as undeleted:
        await store.delete(NAMES)
    assert str(undeleted.value).count("the node ") == 1
    with pytest.raises(StoreUnavailable, match="not everything was purged"):
        await store.purge()
    assert await store.get_many(NAMES) == [None] * len(NAMES)


async def live_on_with_copies(store: Any, address: str, lose: Lose) -> None:
    """With two copies nothing is missing."""
    await store.put_many(BLOCKS)
    lose()
    for _ in range(3):
        assert await store.get_many(NAMES) == list(BLOCKS.values())
        assert await store.match_prefix(NAMES, hold_s=50) == len(NAMES)
        assert await store.exists_many(NAMES) == [True] * len(NAMES)
        async with store.lease(NAMES) as views:
            assert [bytes(view) for view in views] == list(BLOCKS.values())
        await store.put_many(BLOCKS)
    stats = await store.stats()
    assert stats.cluster.lost_reads == 0
    assert stats.cluster.lost_copies > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("live", [live_on, live_on_and_put, live_on_with_copies])
def test_what_a_stopped_node_has_is_missing_and_nothing_else(
    kind: str, live: Callable[[Any, str, Lose], Awaitable[None]], three: Cluster
) -> None:
    options = ["copies=2"] if live is live_on_with_copies else []
    run_with_store(
        kind,
        three.url(*options),
        lambda store: live(store, three.members[0].address, stopping(three)),
        **PATIENT,
    )
    three.clear()


@pytest.mark.parametrize("live", [live_on, live_on_and_put, live_on_with_copies])
def test_what_a_silent_node_has_is_missing_and_nothing_else(
    live: Callable[[Any, str, Lose], Awaitable[None]],
) -> None:
    async def body(store: Any, network: Network) -> None:
        begun = trio.current_time()
        await live(store, "a:1", silencing(network))
        assert trio.current_time() - begun <= 5  # so many silences open the breaker: two lookups, or two other calls

    run_in_virtual_time(body, deadline_s=2.0, copies=2 if live is live_on_with_copies else 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_that_is_on_one_node_only_is_on_both_after_a_put_that_replaces_nothing(
    kind: str, three: Cluster
) -> None:
    async def body(store: Any) -> None:
        await store.put_many(BLOCKS)
        for member in three.members:
            had = sorted(member.keys())
            member.look(member.core.purge)
            await store.put_many(BLOCKS, replace=False)
            assert sorted(member.keys()) == had
        for member in three.members[:2]:
            member.look(member.core.purge)
        await store.put_many(BLOCKS, replace=False)
        assert sum(len(member.keys()) for member in three.members) == 2 * len(NAMES)
        assert await store.get_many(NAMES) == list(BLOCKS.values())

    run_with_store(kind, three.url("copies=2"), body, **PATIENT)


@pytest.mark.parametrize("kind", KINDS)
def test_a_node_that_is_there_again_is_found(kind: str, three: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuit_breaker, "FIRST_PAUSE_S", 0.01)

    async def body(store: Any) -> None:
        while await store.get_many(NAMES) != list(BLOCKS.values()):
            with suppress(PartialPut):  # on a busy machine another one may be late
                await store.put_many(BLOCKS)
        three.members[0].silence()
        while None not in await store.get_many(NAMES):
            pass
        three.members[0].wake()
        while await store.get_many(NAMES) != list(BLOCKS.values()):  # which the background finds out
            pass

    run_with_store(kind, three.url(), body, deadline_s=600.0, lookup_deadline_s=0.1, lazy=True)


@pytest.mark.parametrize("kind", KINDS)
def test_all_nodes_lost_is_an_error_when_a_store_is_opened_and_all_missing_later(kind: str, three: Cluster) -> None:
    async def body(store: Any) -> None:
        assert await store.get_many(NAMES) == [None] * len(NAMES)
        assert await store.match_prefix(NAMES) == 0
        with pytest.raises(PartialPut):
            await store.put_many(BLOCKS)
        with pytest.raises(StoreUnavailable):
            await store.stats()

    for member in three.members:
        member.stop()
    with pytest.raises(StoreUnavailable, match="refused"):
        run_with_store(kind, three.url(), body)
    run_with_store(kind, three.url(), body, lazy=True)
    three.clear()


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_that_one_node_refuses_is_one_clear_error(kind: str, three: Cluster, tmp_path: Any) -> None:
    token = tmp_path / "token"
    token.write_text("a-token-of-its-own\n")
    stranger = Member(token_file=str(token))
    cluster = Cluster([*three.members, stranger])
    names = [f"key {number}" for number in range(100)]  # of which it owns some, wherever it listens

    async def body(store: Any) -> None:
        for call in (store.get_many, store.exists_many, store.match_prefix, store.delete):
            with pytest.raises(AuthenticationFailed, match=f"token.*the node {stranger.address}"):
                await call(names)

    try:
        with pytest.raises(AuthenticationFailed, match=f"token.*the node {stranger.address}"):
            run_with_store(kind, cluster.url(), body)
        run_with_store(kind, cluster.url(), body, lazy=True)
    finally:
        stranger.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_a_silent_node_among_others_does_not_keep_a_store_from_being_opened(kind: str, three: Cluster) -> None:
    async def body(store: Any) -> None:
        assert await store.get_many(NAMES) == [None] * len(NAMES)

    three.members[0].silence()
    try:
        while True:
            with suppress(StoreUnavailable):  # on a busy machine all may be late
                run_with_store(kind, three.url(), body, deadline_s=600.0, lookup_deadline_s=0.1)
                break
    finally:
        three.members[0].wake()


@pytest.mark.parametrize("kind", ["trio", "blocking", "asyncio"])
def test_a_node_that_accepts_no_connection_is_waited_for_as_long_as_for_a_lookup(kind: str, three: Cluster) -> None:
    async def body(store: Any) -> None:
        problems: list[str] = []
        while not any("accepts no connection within 0.1 s" in one for one in problems):
            with suppress(StoreUnavailable):  # on a busy machine the other one may be late
                problems = [node.problem for node in (await store.stats()).cluster.nodes]

    with socket.create_server(("127.0.0.1", 0)) as listener, full(listener, listener.getsockname()):
        url = f"infinistore+static://127.0.0.1:{listener.getsockname()[1]},{three.members[0].address}"
        run_with_store(kind, url, body, deadline_s=600.0, lookup_deadline_s=0.1, lazy=True)


def test_whoever_opens_a_store_has_more_patience_than_a_lookup() -> None:
    """The time to connect to a busy node, or to send a first packet again."""
    given = Given([Node("a", "tcp://127.0.0.1:1")])
    nodes: Any = Nodes(
        given, lambda address, instance: SimpleNamespace(calls=Calls(address, Options(), float, Random()))
    )
    calls = ClusterCalls(nodes, {}, Options(), float)
    opening = calls.check()
    asked: Any = opening.send(None)
    assert [(part.request, part.within_s) for part in asked.parts] == [(PING, Options().deadline_s)]
    opening.close()
    lookup = CallInView(calls, nodes.begin(), Options().deadline_s).ask([(0, PING)])
    asked = lookup.send(None)
    assert [part.within_s for part in asked.parts] == [Options().lookup_deadline_s]
    lookup.close()


@pytest.mark.parametrize(
    "request_for",
    [
        Exists,
        Get,
        lambda keys: GetInto(Batch(keys, [memoryview(bytearray(9)) for _ in keys])),
        lambda keys: Lease(keys, verify=False),
    ],
    ids=["exists", "get", "get_into", "lease"],
)
@pytest.mark.parametrize("copies", [1, 2])
def test_a_call_waits_for_a_silent_node_once_wherever_its_keys_may_be(request_for: Any, copies: int) -> None:
    """So a lookup takes no longer than one that has one place to look at."""
    states = (NodeState.SERVING, NodeState.JOINING, NodeState.SERVING, NodeState.DRAINING)
    given = Given([Node(name, f"tcp://{name}:1", state=state) for name, state in zip("abcd", states, strict=True)])
    given.give(given.view.nodes, copies=copies)
    nodes: Any = Nodes(
        given,
        lambda address, instance: SimpleNamespace(
            name=address.host, calls=Calls(address, Options(), lambda: 0.0, Random())
        ),
    )
    calls = ClusterCalls(nodes, {}, Options(hedged_reads=False), lambda: 0.0)
    request = request_for(NAMES)
    call: Any = (lease if isinstance(request, Lease) else read)(CallInView(calls, nodes.begin(), 30.0), request)
    asked: Counter[str] = Counter()
    found: Any = None
    try:
        effect = call.send(None)
        while True:
            asked.update(part.store.name for part in effect.parts)
            effect = call.send([KeptError(DeadlineExceeded("planned")) for _ in effect.parts])
    except StopIteration as stop:
        found = stop.value
    assert asked == Counter("abcd")
    assert calls.counters.lost_reads == len(NAMES)
    assert not any(found.handed if isinstance(request, Lease) else found)


def test_an_answer_that_came_while_its_client_waited_for_a_core_is_no_silence() -> None:
    left, right = socket.socketpair()
    stream = BlockingSocketStream(left, 0)
    stream.silence_s, stream.ask = 0.5, lambda: None
    right.send(b"two answers")
    byte = bytearray(1)
    for deadline in (1.0, 2.0):  # of two calls, long ago
        stream.deadline = deadline
        assert stream.receive_into([memoryview(byte)]) == 1
        with pytest.raises(TimeoutError):
            stream.receive_into([memoryview(byte)])
    assert byte == b"w"
    stream.close()
    right.close()
