"""Clusters in the simulated world: what is known of each node, and what is excused."""

import attrs
import pytest

from infinistore.cluster.membership import Node, NodeState, View
from infinistore.errors import PartialPut
from infinistore.protocol.messages import KeyedRequest
from tests.simulation.checker import check
from tests.simulation.clusters import ClusterSettings, single_places
from tests.simulation.faults import FaultSettings
from tests.simulation.history import Call, End, History, Life
from tests.simulation.promises import PromiseException, promise_exceptions
from tests.simulation.scenario import Scenario
from tests.simulation.simulate import simulate

KEYS = [f"key-{number}" for number in range(40)]
NODES = tuple(Node(name, f"infinistore://{name}:1") for name in "abc")


def test_a_key_has_one_place_if_its_owner_is_the_same_in_all_views() -> None:
    everybody, without_c = View(0, NODES), View(1, NODES[:2])
    places = single_places([everybody, without_c], KEYS)
    assert 0 < len(places) < len(KEYS)
    assert set(places.values()) == {"a", "b"}


@pytest.mark.parametrize("state", [NodeState.JOINING, NodeState.DRAINING])
def test_what_a_node_that_joins_or_drains_has_is_in_two_places(state: NodeState) -> None:
    view = View(0, (*NODES[:2], attrs.evolve(NODES[2], state=state)))
    assert "c" not in single_places([view], KEYS).values()


def test_with_copies_no_key_has_one_place() -> None:
    assert single_places([View(0, NODES, copies=2)], KEYS) == {}


def put_of(keys: list[str], error: PartialPut | None, end: End) -> Call:
    return Call(0, "a", "put_many", keys, 0.0, puts=dict.fromkeys(keys, b"1"), ended=1.0, end=end, error=error)


def test_the_parts_of_a_put_end_as_its_error_says() -> None:
    error = PartialPut("lost", stored=["1"], failed=["2"], unknown=["3"])
    put = put_of(["1", "2", "3"], error, End.UNKNOWN)
    assert [put.part({key}, "a", lost=True).end for key in "123"] == [End.RETURNED, End.REFUSED, End.UNKNOWN]


def test_what_is_missing_is_excused_only_where_a_node_was_lost() -> None:
    put = put_of(["1"], None, End.RETURNED)
    for lost in (True, False):
        read = Call(1, "a", "get", ["1"], 2.0, ended=3.0, end=End.RETURNED, seen=[("1", None)], lost=lost)
        history = History([put, read], nodes={"a": [Life(0.0)]}, places={"1": "a"})
        assert bool(check(history)) != lost
        assert check(history, promise_exceptions() - {PromiseException.LOST_NODE})


def test_an_old_value_is_excused_only_where_a_key_had_several_places() -> None:
    puts = [attrs.evolve(put_of(["1"], None, End.RETURNED), number=n, begun=2.0 * n, ended=2.0 * n + 1) for n in (0, 1)]
    puts[1].puts = {"1": b"2"}
    reads = [
        Call(2 + n, "a", "get", ["1"], 4.0 + n, ended=4.5 + n, end=End.RETURNED, seen=[("1", value)])
        for n, value in enumerate([b"2", b"1"])
    ]
    history = History([*puts, *reads], nodes={"a": [Life(0.0)]})
    assert check(history) == []
    assert check(history, promise_exceptions() - {PromiseException.OTHER_PLACE})
    assert check(attrs.evolve(history, places={"1": "a"}))


def test_reads_that_are_merged_in_the_wrong_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    merge = KeyedRequest.merge
    monkeypatch.setattr(
        KeyedRequest, "merge", lambda self, parts: merge(self, [(where, list(found)[::-1]) for where, found in parts])
    )
    scenario = Scenario.plain(1).with_cluster().shortened(40)
    workload = attrs.evolve(scenario.workload, keys=12, groups=0)
    assert simulate(attrs.evolve(scenario, cluster=ClusterSettings(nodes=2), workload=workload)).violations


def test_blocks_that_a_cable_spoiled_may_be_found_when_all_look_at_the_cluster() -> None:
    scenario = Scenario.plain(2).with_cluster().shortened(40)
    outcome = simulate(
        attrs.evolve(
            scenario,
            clients=1,
            workload=attrs.evolve(scenario.workload, keys=12, groups=0, methods=("put",), value_bytes=(40,)),
            server=attrs.evolve(scenario.server, max_batch_keys=2),  # a read ends at the first part that is spoilt
            faults=FaultSettings(corrupt_payload=0.5),
            cluster=ClusterSettings(nodes=2),
        )
    )
    assert outcome.errors["get_many: ChecksumMismatch"] > 1  # the first is not when all look
    assert outcome.violations == []
