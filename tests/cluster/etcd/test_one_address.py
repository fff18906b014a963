"""Two servers that advertise one address: the second is refused, and the first stays.
What an earlier process of a server has left behind stops nobody.
"""

from random import Random
from typing import Any

import pytest

from infinistore.cluster.etcd.layout import Layout
from infinistore.cluster.etcd.registration import Registration
from infinistore.cluster.etcd.session import EtcdSession
from infinistore.cluster.membership import Node, View
from infinistore.errors import ConfigError

from .fake_etcd import World

LAYOUT = Layout("test")
ADDRESS = "infinistore://10.0.0.7:1"


class _Server:
    def __init__(self, world: World, instance: str, node_id: str = "10.0.0.7:1", **more: Any) -> None:
        node = Node(node_id, ADDRESS, instance=instance, **{"host": "here", **more})
        self.registration = Registration(EtcdSession(1), LAYOUT, node, clock=world.clock, random=Random(1))
        self.flow = world.start(self.registration.run())
        world.run(0.01)

    @property
    def outcome(self) -> tuple[int, bool]:
        """How often it has registered, and whether it was refused."""
        return self.registration.registrations, isinstance(self.flow.error, ConfigError)


def instances(world: World) -> list[str]:
    return [kv.value.split('"instance": "')[1].split('"')[0] for key, kv in world.etcd.kvs.items() if "/nodes/" in key]


@pytest.mark.parametrize("node_id", ["10.0.0.7:1", "another"])
@pytest.mark.parametrize("host", ["here", "there"])
def test_the_second_is_refused_with_the_name_of_the_first(node_id: str, host: str) -> None:
    world = World()
    one = _Server(world, "one")
    world.reachable["10.0.0.7:1"] = "one" if host == "here" else ""  # elsewhere, each reaches itself by it
    two = _Server(world, "two", node_id, host=host)
    world.run(30)

    assert (one.outcome, two.outcome) == ((1, False), (0, True))
    problem = f"another server, at {ADDRESS}, is registered in the cluster test as '10.0.0.7:1'"
    assert problem in str(two.flow.error)
    assert "instance one, on the machine here" in str(two.flow.error)
    assert "--advertise" in str(two.flow.error)
    assert instances(world) == ["one"]


@pytest.mark.parametrize("node_id", ["10.0.0.7:1", "another"])
def test_a_server_that_was_restarted_waits_for_nothing(node_id: str) -> None:
    world = World()
    one = _Server(world, "one")
    world.stop(one.flow)
    two = _Server(world, "two", node_id)
    world.run(1)
    assert two.outcome == (1, False)
    world.run(20)
    assert instances(world) == ["two"]


def test_a_server_that_moved_with_its_address_waits_for_the_lease_of_the_one_before() -> None:
    world = World()
    one = _Server(world, "one")
    world.stop(one.flow)
    two = _Server(world, "two", host="there")
    world.run(5)
    assert two.outcome == (0, False)
    world.run(10)
    assert two.outcome == (1, False)


def test_servers_that_reach_nobody_by_their_address_do_not_displace_each_other_for_ever() -> None:
    world = World()
    one = _Server(world, "one")
    two = _Server(world, "two")
    for _ in range(60):
        world.run(1.0)
        view = View(0, tuple(Node(one.registration.node.id, ADDRESS, name) for name in instances(world)))
        for server in (one, two):
            server.registration.seen(view)
            world.wake(server.flow)
    assert (one.outcome, two.outcome) == ((1, False), (1, False))
    assert "instance two, on the machine here" in one.registration.problem


def test_a_server_that_lost_its_lease_leaves_the_one_that_has_its_address_alone() -> None:
    world = World()
    one = _Server(world, "one")
    world.etcd.revoke(next(iter(world.etcd.leases)))
    two = _Server(world, "two", "another")
    world.run(30)
    assert (one.outcome, two.outcome) == ((1, False), (1, False))
    world.stop(two.flow)
    world.run(15)
    assert one.outcome == (2, False)
