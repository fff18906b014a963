"""One wrong entry in etcd is one problem that is logged, and concerns nobody else."""

import json
import logging
from random import Random

import pytest

from infinistore.cluster.documents import write_node
from infinistore.cluster.etcd.follower import Follower
from infinistore.cluster.etcd.layout import Layout
from infinistore.cluster.etcd.registration import Registration, RegistrationState
from infinistore.cluster.etcd.session import EtcdSession
from infinistore.cluster.membership import Node, View
from infinistore.cluster.placement import Placement

from .fake_etcd import Running, World

LAYOUT = Layout("test")
WRONG = ["[]", '{"address": "b", "state": []}', '{"address": "b", "weight": Infinity}', '{"address": "b", "zone": 1}']
WRONG += [r'{"address": "\ud800"}', r'{"address": "b", "zone": "\ud800"}', "[" * 5000, "9" * 5000]


class _World(World):
    """With three nodes that are registered, and one who follows."""

    def __init__(self) -> None:
        super().__init__()
        self.views: list[View] = []
        follower = Follower(
            EtcdSession(1), LAYOUT, clock=self.clock, random=Random(1), on_view=self.views.append, lease_s=0
        )
        for name in "acd":
            self.etcd.put(LAYOUT.node(name), write_node(Node(name, f"infinistore://{name}:1")).decode())
        self.follows = self.start(follower.run())
        self.run(1)

    def register(self) -> tuple[Registration, Running]:
        node = Node("b", "infinistore://b:1", instance="b")
        registration = Registration(
            EtcdSession(1),
            LAYOUT,
            node,
            clock=self.clock,
            random=Random(1),
            on_purge=lambda: registration.purged(lasting=True),
            warm_up_s=0,
        )
        return registration, self.start(registration.run())


@pytest.mark.parametrize("wrong", WRONG, ids=range(len(WRONG)))
def test_a_wrong_node_is_left_out_and_told_once(wrong: str, caplog: pytest.LogCaptureFixture) -> None:
    world = _World()
    world.etcd.put(LAYOUT.node("b"), wrong)
    world.run(100)
    world.etcd.put(LAYOUT.node("e"), write_node(Node("e", "infinistore://e:1")).decode())
    world.run(1)

    assert world.follows.error is None
    assert [node.id for node in world.views[-1].nodes] == ["a", "c", "d", "e"]
    Placement(world.views[-1]).owners(["key"])
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.startswith("the view of the cluster leaves a node out: /infinistore/test/nodes/b in etcd ")
    assert len(warning) < 400


@pytest.mark.parametrize("wrong", WRONG, ids=range(len(WRONG)))
def test_a_server_registers_over_a_wrong_entry_and_mends_one_that_comes_later(wrong: str) -> None:
    world = _World()
    world.etcd.put(LAYOUT.node("b"), wrong)
    for mark in (LAYOUT.purged("b"), LAYOUT.drain("a"), LAYOUT.purge):
        world.etcd.put(mark, wrong)
    registration, registers = world.register()
    world.run(1)
    assert registration.state is RegistrationState.REGISTERED
    world.etcd.put(LAYOUT.node("b"), wrong, world.etcd.kvs[LAYOUT.node("b")].lease)
    world.run(60)

    assert (registers.error, world.follows.error) == (None, None)
    assert json.loads(world.etcd.kvs[LAYOUT.node("b")].value)["instance"] == "b"
    assert "b" in [node.id for node in world.views[-1].nodes]


@pytest.mark.parametrize("wrong", ["[]", '{"copies": Infinity}', '{"placement": []}', r'{"copies": "\ud800"}'])
def test_a_wrong_configuration_changes_no_view(wrong: str) -> None:
    world = _World()
    world.etcd.put(LAYOUT.config, wrong)
    world.etcd.put(LAYOUT.node("e"), write_node(Node("e", "infinistore://e:1")).decode())
    world.run(100)
    assert world.follows.error is None
    assert [node.id for node in world.views[-1].nodes] == ["a", "c", "d"]
