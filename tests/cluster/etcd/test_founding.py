"""Servers that begin a cluster together have their shares of it at once."""

from collections import Counter
from random import Random
from typing import Any

import pytest

from infinistore.cluster.etcd.follower import LEASE_S, READ_AGAIN_S
from infinistore.cluster.etcd.gateway import Answer, Item
from infinistore.cluster.etcd.layout import Layout, Listing
from infinistore.cluster.etcd.registration import Registration
from infinistore.cluster.etcd.session import EtcdSession
from infinistore.cluster.membership import Node, NodeState, View
from infinistore.cluster.placement import Placement

from .fake_etcd import Running, World

LAYOUT = Layout("test")
WARM_UP_S = 30.0


class _World(World):
    def register(self, name: str, warm_up_s: float = WARM_UP_S, **more: Any) -> Running:
        node = Node(name, f"infinistore://{name}:1", instance=f"{name} since {self.now}")
        registration = Registration(
            EtcdSession(1), LAYOUT, node, clock=self.clock, random=Random(1), warm_up_s=warm_up_s, **more
        )
        running = self.start(registration.run())
        self.run(0.01)
        return running

    def crash(self, running: Running) -> None:
        """End a server without a word, and let its lease run out."""
        self.stop(running)
        self.run(10.0)

    @property
    def nodes(self) -> dict[str, Node]:
        items = [
            Item(key, kv.value.encode(), kv.create_revision, kv.mod_revision, kv.lease)
            for key, kv in self.etcd.kvs.items()
        ]
        return dict(Listing.of(LAYOUT, items).nodes)

    @property
    def weights(self) -> dict[str, int]:
        return {name: node.weight for name, node in self.nodes.items()}


def test_three_servers_that_start_together_have_a_third_of_the_keys_each() -> None:
    world = _World()
    for name in "abc":
        world.register(name)
    placement = Placement(View(0, tuple(world.nodes.values())))
    counts = Counter(placement.owners([f"key {number}" for number in range(3000)]))
    assert all(900 < count < 1100 for count in counts.values()), counts
    world.run(WARM_UP_S + 1)
    assert {(node.weight, node.state) for node in world.nodes.values()} == {(100, NodeState.SERVING)}


def test_what_the_first_one_has_is_found_there_while_the_others_are_new() -> None:
    world = _World()
    world.register("a")
    world.run(5)
    for name in "bc":
        world.register(name)
    assert [node.state for node in world.nodes.values()] == [NodeState.SERVING, NodeState.JOINING, NodeState.JOINING]
    keys = [f"key {number}" for number in range(100)]
    assert all(0 in places for places in Placement(View(0, tuple(world.nodes.values()))).places(keys))


def test_who_comes_when_the_first_one_has_served_for_a_while_is_no_founder() -> None:
    world = _World()
    world.register("a")
    world.run(WARM_UP_S - 1)
    world.register("b")
    world.run(2)
    world.register("c")
    assert world.weights == {"a": 100, "b": 100, "c": 20}


@pytest.mark.parametrize("gone", ["restarted", "crashed"])
def test_a_server_that_comes_back_to_others_is_no_founder(gone: str) -> None:
    world = _World()
    world.register("a")
    b = world.register("b")
    world.run(WARM_UP_S + 1)
    world.stop(b) if gone == "restarted" else world.crash(b)
    world.register("b")
    world.run(2)
    assert world.weights == {"a": 100, "b": 20}


def test_all_that_start_again_after_all_were_gone_are_founders() -> None:
    world = _World()
    running = [world.register(name) for name in "ab"]
    world.run(WARM_UP_S + 1)
    for one in running:
        world.stop(one)
    world.run(10)
    for name in "ab":
        world.register(name)
    assert world.weights == {"a": 100, "b": 100}


def test_servers_whose_disks_may_have_blocks_of_before_found_a_cluster_together() -> None:
    world = _World()
    for name in "ab":
        world.register(name, has_old_blocks=True)
    assert world.weights == {"a": 100, "b": 100}


def test_who_joins_a_server_that_registers_again_is_no_founder() -> None:
    world = _World()
    world.register("a")
    world.run(WARM_UP_S + 1)
    world.etcd.empty()
    world.run(11)
    world.register("b")
    assert world.weights == {"a": 100, "b": 20}


def test_who_comes_while_etcd_has_lost_the_others_is_no_founder_once_one_is_back() -> None:
    world = _World()
    world.register("a")
    world.run(WARM_UP_S + 1)
    world.etcd.empty()
    world.register("b")
    world.register("c")
    assert world.weights == {"b": 100, "c": 100}
    world.run(2 * LEASE_S)
    assert {name: (node.state, node.founding) for name, node in world.nodes.items()} == {
        "a": (NodeState.SERVING, False),
        "b": (NodeState.JOINING, False),
        "c": (NodeState.JOINING, False),
    }
    assert world.weights["a"] == 100
    assert world.weights["b"] < 100 > world.weights["c"]
    world.run(WARM_UP_S + 1)
    assert {(node.weight, node.state) for node in world.nodes.values()} == {(100, NodeState.SERVING)}


def test_founders_whose_warm_up_ends_at_different_times_stay_founders() -> None:
    world = _World()
    world.register("a")
    world.run(WARM_UP_S / 2)
    world.register("b")
    world.run(WARM_UP_S / 2 + READ_AGAIN_S)
    assert not world.nodes["a"].founding
    for _ in range(int(WARM_UP_S)):
        world.run(1.0)
        assert world.weights == {"a": 100, "b": 100}


@pytest.mark.parametrize(
    ("comes", "after_s"),
    [
        pytest.param("first", 3.0, id="met when they registered"),
        pytest.param("first", 2.0 * LEASE_S, id="met twice"),
        pytest.param("last", 2.0 * LEASE_S, id="met when they looked"),
    ],
)
def test_founders_stay_founders_beside_one_of_them_that_loses_its_lease(comes: str, after_s: float) -> None:
    world = _World()
    if comes == "first":
        world.register("a")
        world.run(WARM_UP_S - 1)
    for name in "bcdef":
        world.register(name)
    if comes == "last":
        world.register("a", warm_up_s=LEASE_S)
    world.run(after_s)
    assert {name for name, node in world.nodes.items() if not node.founding} == {"a"}
    generation = world.nodes["a"].generation
    world.etcd.revoke(world.etcd.kvs[LAYOUT.node("a")].lease)
    for _ in range(int(WARM_UP_S)):
        world.run(1.0)
        assert {world.weights[name] for name in "bcdef"} == {100}
    assert world.nodes["a"].generation > generation


def test_who_joins_a_server_that_came_back_from_a_drain_is_no_founder() -> None:
    world = _World()
    world.etcd.put(LAYOUT.drain("a"), "")
    a = world.register("a")
    world.run(1)
    world.etcd.delete(LAYOUT.drain("a"))
    world.run(READ_AGAIN_S + LEASE_S)
    world.register("b")
    assert a.error is None
    assert world.weights == {"a": 100, "b": 20}


def test_who_joins_what_cannot_be_read_is_no_founder() -> None:
    world = _World()
    world.etcd.put(LAYOUT.node("a"), "?")
    world.register("b")
    assert world.weights == {"b": 20}


def test_that_a_cluster_is_new_no_longer_is_no_other_view() -> None:
    world = _World()
    world.register("a")
    new = world.nodes
    world.run(WARM_UP_S + 1)
    assert new == world.nodes


def test_who_drained_comes_back_to_others_as_a_newcomer_whatever_the_configuration_says() -> None:
    world = _World()
    world.register("a")
    b = world.register("b")
    world.run(WARM_UP_S + 1)
    world.etcd.put(LAYOUT.drain("b"), "")
    world.run(READ_AGAIN_S + LEASE_S)
    world.etcd.put(LAYOUT.config, "?")
    world.etcd.delete(LAYOUT.drain("b"))
    seen = set()
    for _ in range(int(READ_AGAIN_S + LEASE_S)):
        world.run(1.0)
        seen.add('"state": "joining"' in world.etcd.kvs[LAYOUT.node("b")].value)
    assert (b.error, seen) == (None, {False, True})


def test_a_founder_whose_first_attempt_fails_is_one_with_the_next() -> None:
    world = _World()
    grant = world.etcd.grant

    def grant_and_lose(body: dict[str, Any]) -> Answer:
        world.etcd.grant = grant  # type: ignore[method-assign]
        answer = grant(body)
        world.etcd.leases.clear()
        return answer

    world.etcd.grant = grant_and_lose  # type: ignore[method-assign]
    world.register("a")
    assert world.weights == {}
    world.run(2)
    world.register("b")
    assert world.weights == {"a": 100, "b": 100}
