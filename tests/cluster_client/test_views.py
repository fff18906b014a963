"""Views that change: a call uses one, stores of nodes that left are closed, and keys
that have moved are found where they were.
"""

import sys
import threading
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import trio

from infinistore import blocking, open_store
from infinistore.client.cluster import reads
from infinistore.client.cluster.nodes import Nodes
from infinistore.cluster.membership import Node, NodeState
from infinistore.errors import LimitExceeded, StoreUnavailable
from tests.cluster_client.clusters import Cluster, Given, open_given, open_given_async

NAMES = [f"key {number}" for number in range(60)]
BLOCKS = {name: name.encode() for name in NAMES}


def states(cluster: Cluster, *of: NodeState) -> list[Any]:
    return [attrs.evolve(node, state=state) for node, state in zip(cluster.nodes(), of, strict=False)]


JOINING, SERVING, DRAINING = NodeState


def test_keys_of_a_node_that_left_are_missing_and_its_store_is_closed(three: Cluster) -> None:
    given = Given(three.nodes())
    with open_given(given) as store:
        store.put_many(BLOCKS)
        given.give(three.nodes()[1:])
        left = three.members[0].keys()
        found = store.get_many(NAMES)
        assert [name for name, value in zip(NAMES, found, strict=True) if value is None] == [
            name for name in NAMES if name in left
        ]
        three.members[0].wait_until_quiet()
    assert given.closed


def test_a_call_under_way_ends_with_the_view_that_it_began_with(three: Cluster) -> None:
    given = Given(three.nodes())
    with open_given(given, deadline_s=600, lookup_deadline_s=60) as store:
        store.put_many(BLOCKS)
        three.members[0].silence()
        found: list[Any] = []
        caller = threading.Thread(target=lambda: found.append(store.get_many(NAMES)))
        caller.start()
        given.give(three.nodes()[1:])
        while None not in store.get_many(NAMES):  # with the new view
            pass
        three.members[0].wake()
        caller.join()
        assert found in ([list(BLOCKS.values())], [store.get_many(NAMES)])


def test_another_run_of_a_server_at_the_same_address_is_another_store(three: Cluster) -> None:
    server = three.members[0].server
    assert server is not None
    instances = []
    for member in three.members:
        with blocking.open_store(f"tcp://{member.address}") as plain:
            instances.append(plain.stats().server.instance)  # type: ignore[union-attr]
    nodes = [attrs.evolve(node, instance=one) for node, one in zip(three.nodes(), instances, strict=True)]
    given = Given(nodes)
    with open_given(given) as store:
        store.put_many(BLOCKS)
        assert store.get_many(NAMES) == list(BLOCKS.values())
        given.give([attrs.evolve(nodes[0], instance="another"), *nodes[1:]])
        lost = three.members[0].keys()
        assert store.exists_many(NAMES) == [name not in lost for name in NAMES]  # who answers there is not that run
        given.give(nodes)
        assert store.get_many(NAMES) == list(BLOCKS.values())


def test_while_a_node_joins_its_keys_come_from_the_former_owner_and_are_copied(three: Cluster) -> None:
    given = Given(three.nodes()[:2])
    with open_given(given) as store:
        store.put_many(BLOCKS)
        given.give(states(three, SERVING, SERVING, JOINING))
        assert store.exists_many(NAMES) == [True] * len(NAMES)
        match = store.match_prefix(NAMES, hold_s=50)
        assert match == len(NAMES)
        assert store.release_hold(match.hold)
        assert store.get_many(NAMES) == list(BLOCKS.values())
        with store.lease(NAMES) as views:
            assert [bytes(view) for view in views if view is not None] == list(BLOCKS.values())
        buffers = [bytearray(9) for _ in NAMES]
        store.get_many_into(list(zip(NAMES, buffers, strict=True)), all_or_nothing=True)
        assert [bytes(buffer).rstrip(b"\0") for buffer in buffers] == list(BLOCKS.values())
        while (copied := store.stats().cluster.warmed_blocks) == 0:
            pass
        assert len(three.members[2].keys()) <= copied
        given.give(states(three, SERVING, SERVING, SERVING))
        warm = three.members[2].keys()
        assert [name for name in NAMES if name in warm]
        assert store.get_many(sorted(warm)) == [BLOCKS[name] for name in sorted(warm)]
        assert store.stats().cluster.moved_slots > 0


def test_a_client_that_verifies_nothing_copies_nothing_to_a_node_that_joins(three: Cluster) -> None:
    given, trusting, others = Given(three.nodes()[:2]), NAMES[:40], NAMES[40:]
    with open_given(given) as store:
        store.put_many(BLOCKS)
    given = Given(states(three, SERVING, SERVING, JOINING))
    with open_given(given, verify="never") as store:
        for _ in range(20):
            assert store.get_many(trusting) == [BLOCKS[name] for name in trusting]
        assert store.stats().cluster.warmed_blocks == 0
    with open_given(Given(states(three, SERVING, SERVING, JOINING))) as store:
        while store.stats().cluster.warmed_blocks == 0:
            assert store.get_many(others) == [BLOCKS[name] for name in others]
    assert three.members[2].keys() <= set(others)


def test_what_is_copied_to_a_node_that_joins_ends_when_the_original_does(three: Cluster) -> None:
    given = Given(three.nodes()[:2])
    names = NAMES[::2]
    with open_given(given) as store:
        store.put_many(BLOCKS)
        store.put_many({name: BLOCKS[name] for name in names}, ttl_s=500.0)
        given.give(states(three, SERVING, SERVING, JOINING))
        while store.stats().cluster.warmed_blocks == 0:
            assert store.get_many(NAMES) == list(BLOCKS.values())
        joined = three.members[2]
        ends = joined.look(lambda: dict(zip(NAMES, joined.core.retention.times_left(NAMES), strict=True)))
        there = {name: end for name, end in ends.items() if end != 0}
        assert set(there) & set(names)
        assert {name for name, end in there.items() if end is not None} == set(there) & set(names)
        assert all(0 < end <= 500.0 for end in there.values() if end is not None)


def test_no_more_than_the_bound_is_on_its_way_to_nodes_that_join(
    three: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "MOST_WARMING_BYTES", 3_500)
    given = Given(three.nodes()[:2])
    joined = three.members[2]
    with open_given(given) as store:
        counters = store.calls.counters

        def read_and_wait() -> None:
            before = counters.warmed
            assert store.get_many(NAMES) == list(blocks.values())
            while counters.warming_bytes or counters.warmed == before:
                pass

        blocks = {name: name.encode().ljust(1_000) for name in NAMES}
        store.put_many(blocks)
        given.give(states(three, SERVING, SERVING, JOINING))
        read_and_wait()
        assert counters.warmed == len(joined.keys()) == 3
        read_and_wait()  # what did not fit is copied when it is read again
        assert counters.warmed == len(joined.keys()) == 6
        counters.warming_bytes += 3_000  # as if another call had begun to copy
        assert store.get_many(NAMES) == list(blocks.values())
        assert counters.warming_bytes == 3_000
        assert len(joined.keys()) == 6


def test_a_draining_node_is_read_and_not_written_to(three: Cluster) -> None:
    given = Given(three.nodes())
    with open_given(given) as store:
        store.put_many(BLOCKS)
        before = three.members[0].keys()
        given.give(states(three, DRAINING, SERVING, SERVING))
        assert store.get_many(NAMES) == list(BLOCKS.values())
        assert store.match_prefix(NAMES) == len(NAMES)
        newer = dict.fromkeys(NAMES, b"newer")
        store.put_many(newer)
        assert three.members[0].keys() == before
        assert store.get_many(NAMES) == [b"newer"] * len(NAMES)
        assert store.delete(NAMES) == len(NAMES)
        assert store.exists_many(NAMES) == [False] * len(NAMES)


def on_machines(cluster: Cluster, *machines: str) -> list[Any]:
    return [attrs.evolve(node, host=host) for node, host in zip(cluster.nodes(), machines, strict=False)]


def test_two_copies_outlive_a_machine_with_several_nodes(three: Cluster) -> None:
    nodes = on_machines(three, "one", "one", "other")
    given = Given(nodes, copies=2)
    with open_given(given) as store:
        store.put_many(BLOCKS)
        here, there, other = (member.keys() for member in three.members)
        assert other == set(NAMES) == here | there
        assert not here & there
        for left in (nodes[2:], nodes[:2]):  # a machine is gone
            given.give(left, copies=2)
            assert store.get_many(NAMES) == list(BLOCKS.values())
            assert store.match_prefix(NAMES) == len(NAMES)
        given.give(nodes, copies=2)
        assert store.delete(NAMES) == len(NAMES)
        assert [member.keys() for member in three.members] == [set()] * 3


def test_while_a_node_joins_a_machine_keys_are_found_though_one_that_had_them_is_gone(three: Cluster) -> None:
    a, b, c = on_machines(three, "one", "other", "other")
    for index, rest in enumerate(([b, c], [a, c], [a, b])):
        three.clear()
        joins = attrs.evolve((a, b, c)[index], state=NodeState.JOINING)
        given = Given(rest, copies=2)
        with open_given(given) as store:
            store.put_many(BLOCKS)
            given.give(sorted([*rest, joins], key=lambda node: node.id), copies=2)
            for lost in range(3):
                if lost != index:
                    three.members[lost].look(three.members[lost].core.purge)
                    with open_given(given) as fresh:
                        assert fresh.get_many(NAMES) == list(BLOCKS.values())
                    given.give(rest, copies=2)
                    store.put_many(BLOCKS)
                    three.members[index].look(three.members[index].core.purge)
                    given.give(sorted([*rest, joins], key=lambda node: node.id), copies=2)
            assert store.delete(NAMES) == len(NAMES)


def test_a_cluster_where_nobody_takes_blocks_says_so(three: Cluster) -> None:
    given = Given(states(three, DRAINING, DRAINING, DRAINING))
    with open_given(given) as store, pytest.raises(StoreUnavailable, match="no node of the cluster takes blocks"):
        store.put("key", b"x")
    given = Given([])
    with pytest.raises(StoreUnavailable, match="the cluster has no nodes"), open_given(given):
        pass


def test_a_node_whose_address_is_none_is_lost_and_says_why(three: Cluster) -> None:
    nodes = three.nodes()
    given = Given([nodes[0], attrs.evolve(nodes[1], address="gopher://here")])
    with open_given(given) as store:
        with pytest.raises(StoreUnavailable, match="unknown scheme 'gopher'"):
            store.put_many(BLOCKS)
        assert store.get_many(NAMES) != [None] * len(NAMES)


def test_a_closed_store_refuses_every_call(three: Cluster) -> None:
    with open_given(Given(three.nodes())) as store:
        pass
    for call in (store.get_many, store.exists_many, store.match_prefix):
        with pytest.raises(StoreUnavailable, match="closed"):
            call(NAMES)


def test_a_hold_that_one_node_refuses_is_released_by_the_others(three: Cluster) -> None:
    half = bytes(512 * 1024)  # a node of 4 MiB holds a quarter
    with open_given(Given(three.nodes())) as store:
        store.put_many(BLOCKS)
        full = min(three.members[0].keys())
        names = [*NAMES, *(f"{{{full}}} {number}" for number in range(3))]
        store.put_many(dict.fromkeys(names[-3:], half))
        with pytest.raises(LimitExceeded, match=f"the node a at infinistore://{three.members[0].address}"):
            store.match_prefix(names, hold_s=50)
        stats = store.stats()
        assert (stats.store.holds, stats.store.pinned_bytes) == (0, 0)


async def test_a_cancelled_call_leaves_no_part_behind(three: Cluster) -> None:
    async with open_given_async(Given(three.nodes()), deadline_s=600) as store:
        await store.put_many(BLOCKS)
        three.members[0].silence()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.get_many, NAMES)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert nursery.cancel_scope.cancelled_caught
        three.members[0].wake()
        assert list(map(bytes, filter(None, await store.get_many(NAMES)))) == list(BLOCKS.values())


async def test_errors_of_the_caller_are_raised_as_they_are(three: Cluster) -> None:
    async with open_store(three.url(), lookup_deadline_s=60) as store:
        with pytest.raises(KeyError, match="is not in the store"):
            await store.get("nothing")


@pytest.mark.parametrize("has_numpy", [False, True])
def test_a_client_without_numpy_says_once_that_a_large_cluster_wants_it(
    has_numpy: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not has_numpy:
        monkeypatch.setitem(sys.modules, "numpy", None)
    counts = []
    given = Given([])
    nodes: Any = Nodes(given, lambda address, instance: SimpleNamespace(close=lambda: None))
    for count in (30, 31, 32, 30, 31):
        given.give([Node(f"{number:02}", f"tcp://host-{number}:1") for number in range(count)])
        nodes.begin()
        counts.append(sum("without numpy" in record.message for record in caplog.records))
    assert counts == ([0] * 5 if has_numpy else [0, 1, 1, 1, 1])
