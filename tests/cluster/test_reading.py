"""Which copy a client reads first: the nearest, in turns where several are as near."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore.cluster.membership import Node, NodeState, View
from infinistore.cluster.placement import Placement
from infinistore.cluster.reading import READS_IN_A_TURN, Reader, ReadOrder

KEYS = [f"key {number}" for number in range(200)]
PLACES = st.sampled_from(["", "a", "b"])
NODES = st.lists(
    st.tuples(PLACES, PLACES, st.sampled_from(NodeState), st.sampled_from([0, 20, 100])), min_size=1, max_size=6
)


def placement_of(nodes: list[tuple[str, str, NodeState, int]], copies: int) -> Placement:
    return Placement(
        View(
            0,
            tuple(
                Node(f"node {n}", f"infinistore://10.0.0.{n}:1", host=host, zone=zone, state=state, weight=weight)
                for n, (host, zone, state, weight) in enumerate(nodes)
            ),
            copies,
        )
    )


@given(NODES, st.integers(1, 3), st.builds(Reader, st.text(max_size=3), PLACES, PLACES), st.integers(0, 1000))
def test_a_client_asks_all_places_the_nearest_first(
    nodes: list[tuple[str, str, NodeState, int]], copies: int, reader: Reader, reads: int
) -> None:
    placement = placement_of(nodes, copies)
    order = ReadOrder(placement, reader)
    for places, asked in zip(placement.places(KEYS), order.places(KEYS, reads), strict=True):
        assert sorted(asked) == sorted(places)
        assert order.may_swap(places) == all(nodes[node][2] is NodeState.SERVING for node in places)
        if not order.may_swap(places):
            assert asked == places
        elif places:
            distances = [reader.distance(placement.view.nodes[node]) for node in asked]
            assert distances == sorted(distances)


@pytest.mark.parametrize("copies", [2, 3])
def test_copies_as_near_as_each_other_have_equal_shares_of_the_reads_of_a_group(copies: int) -> None:
    order = ReadOrder(placement_of([("", "", NodeState.SERVING, 100)] * 4, copies), Reader("client"))
    for key in KEYS:
        turns = Counter(order.places([key], reads)[0][0] for reads in range(READS_IN_A_TURN * copies))
        assert list(turns.values()) == [READS_IN_A_TURN] * copies
    for reads in range(0, READS_IN_A_TURN, 7):
        assert order.places(KEYS, reads) == order.places(KEYS, 0)


def test_clients_with_different_names_begin_with_different_copies() -> None:
    placement = placement_of([("", "", NodeState.SERVING, 100)] * 2, 2)
    for key in KEYS[:20]:
        first = Counter(ReadOrder(placement, Reader(f"client {n}")).places([key], 0)[0][0] for n in range(64))
        assert min(first.values()) > 64 // 5
    assert {places[0] for places in ReadOrder(placement, Reader("a client")).places(KEYS, 0)} == {0, 1}


def test_this_machine_is_nearer_than_this_zone_and_that_is_nearer_than_the_rest() -> None:
    serving = NodeState.SERVING
    nodes = [("far", "east", serving, 100), ("other", "west", serving, 100), ("here", "east", serving, 100)]
    order = ReadOrder(placement_of(nodes, 3), Reader("client", "here", "west"))
    assert {tuple(places) for reads in range(500) for places in order.places(KEYS, reads)} == {(2, 1, 0)}


def test_a_client_that_does_not_say_where_it_is_is_near_nothing() -> None:
    (node,) = placement_of([("", "", NodeState.SERVING, 100)], 1).view.nodes
    assert Reader("client").distance(node) == 2
