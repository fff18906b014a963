"""Where no gap is told, reads still look wherever they looked before."""

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinistore.cluster.membership import Node, NodeState, View
from infinistore.cluster.placement import Placement, still_finds
from tests.examples import examples

JOINING, SERVING, DRAINING = NodeState
KEYS = [f"key {number}" for number in range(60)]
nodes = st.builds(
    Node,
    id=st.sampled_from("abcdefg"),
    address=st.just("infinistore://a:1"),
    weight=st.sampled_from([0, 1, 20, 60, 100]),
    state=st.sampled_from([JOINING, JOINING, SERVING, SERVING, SERVING, DRAINING]),
    zone=st.sampled_from(["", "", "z"]),
    host=st.sampled_from(["h", "i", "j"]),
)
lists = st.lists(nodes, min_size=1, max_size=6, unique_by=lambda node: node.id).map(
    lambda found: sorted(found, key=lambda node: node.id)
)


@st.composite
def changes(draw: st.DrawFn) -> tuple[View, View]:
    """A view, and one that it may become in a step."""
    before, copies = draw(lists), draw(st.sampled_from([1, 1, 1, 2]))
    after = []
    for node in before:
        kind = draw(st.sampled_from(["same", "drains", "grows"]))
        if kind == "drains" and node.state is SERVING:
            after.append(attrs.evolve(node, state=DRAINING))
        elif kind == "grows" and node.state is JOINING:
            after.append(attrs.evolve(node, weight=draw(st.integers(node.weight, 100))))
        else:
            after.append(node)
    return View(1, tuple(before), copies), View(2, tuple(after), copies)


def looked_at(view: View) -> list[set[str]]:
    return [{view.nodes[index].id for index in places} for places in Placement(view).places(KEYS)]


@settings(max_examples=examples(60))
@given(changes())
def test_what_was_found_is_looked_for_at_the_same_nodes(pair: tuple[View, View]) -> None:
    former, view = pair
    if still_finds(view, former) and any(node.weight and node.state is not DRAINING for node in former.nodes):
        for before, after in zip(looked_at(former), looked_at(view), strict=True):
            assert before <= after


def of(*given: tuple[str, int, NodeState], copies: int = 1) -> View:
    return View(0, tuple(Node(name, f"infinistore://{name}:1", weight=w, state=s) for name, w, s in given), copies)


A, B = ("a", 100, SERVING), ("b", 100, SERVING)


@pytest.mark.parametrize(
    ("former", "view", "holds"),
    [
        (of(A, B), of(A, B), True),
        (of(A, B), of(A, ("b", 100, DRAINING)), True),
        (of(A, B, copies=2), of(A, B, copies=2), True),
        (of(A, B, copies=2), of(A, ("b", 100, DRAINING), copies=2), False),
        (of(A, ("b", 20, JOINING)), of(A, ("b", 40, JOINING)), True),
        (of(A, ("b", 100, JOINING)), of(A, B), False),
        (of(A, ("b", 100, DRAINING)), of(A, B), False),
        (of(A, B), of(A, ("b", 100, JOINING)), False),
        (of(A, B), of(A, ("b", 50, SERVING)), False),
        (of(A, B), of(A, ("b", 50, DRAINING)), False),
        (of(A, ("b", 100, JOINING)), of(A, ("b", 100, DRAINING)), False),
        (of(A, ("b", 20, JOINING)), of(("a", 150, SERVING), ("b", 20, JOINING)), False),
        (of(("a", 20, JOINING), ("b", 20, JOINING)), of(("a", 20, JOINING), ("b", 40, JOINING)), False),
        (of(A, ("b", 40, JOINING)), of(A, ("b", 20, JOINING)), False),
        (of(A, B), of(A), False),
        (of(A), of(A, B), False),
        (of(A, B), of(A, B, copies=2), False),
    ],
)
def test_which_changes_lose_nothing(former: View, view: View, holds: bool) -> None:
    assert still_finds(view, former) is holds
