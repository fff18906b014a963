"""Who follows removals forgets what a change of the view hides: reads find it no more,
and no node has removed it.
"""

from typing import Any

import attrs

from infinistore.cluster.membership import NodeState
from tests.cluster_client.clusters import Cluster, Given, open_given

JOINING, SERVING, DRAINING = NodeState
NAMES = [f"key {number}" for number in range(60)]
Shown = tuple[int, NodeState] | None
"""Weight and state of a node, if it is in the view."""
WHOLE = (100, SERVING)
STEPS: list[tuple[tuple[Shown, Shown, Shown], bool]] = [
    ((WHOLE, WHOLE, (20, JOINING)), True),
    ((WHOLE, WHOLE, (60, JOINING)), False),
    ((WHOLE, WHOLE, (100, JOINING)), False),
    ((WHOLE, WHOLE, WHOLE), True),
    (((100, DRAINING), WHOLE, WHOLE), False),
    ((None, WHOLE, WHOLE), True),
    ((WHOLE, WHOLE, WHOLE), True),
    ((WHOLE, (10, SERVING), WHOLE), True),
    (((20, JOINING), WHOLE, (20, JOINING)), True),
    (((60, JOINING), WHOLE, (20, JOINING)), True),
    (((60, JOINING), WHOLE, (20, JOINING)), False),
]
"""Views one after the other, and whether there is a gap."""


def test_a_key_that_another_view_hides_is_told_or_there_is_a_gap(three: Cluster) -> None:
    def shown(*nodes: Shown) -> list[Any]:
        return [
            attrs.evolve(node, weight=one[0], state=one[1])
            for node, one in zip(three.nodes(), nodes, strict=True)
            if one is not None
        ]

    given = Given(shown(WHOLE, WHOLE, None))
    hidden = set()
    with open_given(given) as store:
        batches = iter(store.removals(wait_s=0.001))
        assert not next(batches).gap
        for nodes, is_gap in STEPS:
            store.put_many(dict.fromkeys(NAMES, b"value"))
            given.give(shown(*nodes))
            if not all(store.exists_many(NAMES)):
                hidden.add(nodes)
            batch = next(batches)
            assert (batch.gap, batch.problem) == (is_gap, ""), nodes
            assert not next(batches).gap
    assert {nodes for nodes, is_gap in STEPS if is_gap} > hidden > set()


def test_other_copies_hide_keys_too(three: Cluster) -> None:
    given = Given(three.nodes(), copies=2)
    with open_given(given) as store:
        batches = iter(store.removals(wait_s=0.001))
        next(batches)
        given.give(three.nodes(), copies=2)
        assert not next(batches).gap
        given.give(three.nodes(), copies=1)
        assert next(batches).gap
