"""How a node gets into etcd, stays there, and leaves."""

import json
from random import Random
from typing import Any

import pytest

from infinistore.cluster.documents import ClusterConfig
from infinistore.cluster.etcd.gateway import Answer
from infinistore.cluster.etcd.layout import Layout
from infinistore.cluster.etcd.registration import Registration, RegistrationState
from infinistore.cluster.etcd.session import EtcdSession
from infinistore.cluster.membership import Node, View
from infinistore.errors import ConfigError

from .fake_etcd import Running, World

LAYOUT = Layout("test")
KEY = LAYOUT.node("a")


class Registered:
    """A world with one node that registers."""

    def __init__(
        self, world: World | None = None, node_id: str = "a", instance: str = "one", address: str = "", **more: Any
    ) -> None:
        self.world = world or World()
        self.purges = 0
        self.registration = Registration(
            EtcdSession(self.world.members),
            LAYOUT,
            Node(node_id, address or f"infinistore://{node_id}:1", instance=instance),
            clock=self.world.clock,
            random=Random(1),
            on_purge=self._purge,
            **more,
        )
        self.flow: Running = self.world.start(self.registration.run())

    def _purge(self) -> None:
        self.purges += 1
        self.registration.purged(lasting=True)

    @property
    def written(self) -> dict[str, Any]:
        kv = self.world.etcd.kvs.get(LAYOUT.node(self.registration.node.id))
        return {} if kv is None else json.loads(kv.value)

    def wake(self) -> None:
        self.world.wake(self.flow)
        self.world.run(0.01)


def keep_alives(world: World) -> int:
    return sum(path == "/v3/lease/keepalive" for _, path in world.etcd.calls)


def test_a_node_registers_under_a_lease_of_ten_seconds() -> None:
    one = Registered(config=ClusterConfig(copies=2))
    kv = one.world.etcd.kvs[KEY]
    assert one.world.etcd.leases[kv.lease][0] == 10
    assert (one.written["instance"], one.written["state"], one.written["weight"]) == ("one", "serving", 100)
    assert json.loads(one.world.etcd.kvs[LAYOUT.config].value) == {"placement": 1, "copies": 2}
    assert one.registration.state is RegistrationState.REGISTERED


def test_a_lease_that_etcd_loses_before_anything_is_written_under_it_is_asked_for_again() -> None:
    world = World()
    grant_lease = world.etcd.grant

    def grant_and_lose(body: dict[str, Any]) -> Answer:
        answer = grant_lease(body)
        world.etcd.leases.clear()  # as an etcd does that comes back empty
        return answer

    world.etcd.grant = grant_and_lose  # type: ignore[method-assign]
    one = Registered(world)
    assert one.flow.error is None
    assert (one.written, one.registration.problem) == ({}, "etcd: etcdserver: requested lease not found")
    world.etcd.grant = grant_lease  # type: ignore[method-assign]
    world.run(2)
    assert one.registration.state is RegistrationState.REGISTERED


def test_the_lease_is_renewed_when_half_of_it_is_left() -> None:
    one = Registered(warm_up_s=0)
    one.world.run(100)
    assert 18 <= keep_alives(one.world) <= 22
    assert one.world.etcd.kvs[KEY].create_revision == one.world.etcd.kvs[KEY].mod_revision
    assert one.registration.registrations == 1


def test_a_renewal_that_fails_is_tried_again_when_half_of_what_is_left_has_passed() -> None:
    one = Registered()
    one.world.run(4)
    one.world.etcd.away = {0}
    one.world.run(5.7)
    assert KEY in one.world.etcd.kvs
    one.world.etcd.away = set()
    one.world.run(20)
    assert one.registration.registrations == 1


def test_a_renewal_goes_to_the_next_member() -> None:
    one = Registered(World(3))
    one.world.etcd.away = {0, 1}
    one.world.run(60)
    assert one.registration.registrations == 1


def test_the_keep_alive_of_a_lost_lease_is_noticed_and_the_node_registers_again() -> None:
    one = Registered()
    (lease,) = one.world.etcd.leases
    one.world.etcd.revoke(lease)
    assert one.written == {}

    one.world.run(7)

    assert one.written["instance"] == "one"
    assert one.registration.registrations == 2
    assert one.purges == 0  # it keeps its blocks


def test_an_etcd_that_was_away_and_refills_leases_finds_the_node_registered() -> None:
    one = Registered()
    one.world.etcd.away = {0}
    frozen = {lease: list(times) for lease, times in one.world.etcd.leases.items()}
    for _ in range(60):
        one.world.etcd.refill_leases()  # none runs out while there is no leader
        one.world.run(1)
    assert frozen.keys() == one.world.etcd.leases.keys()
    one.world.etcd.away = set()
    one.world.run(30)
    assert one.registration.registrations == 1


def test_an_etcd_that_lost_everything_is_told_again() -> None:
    one = Registered(config=ClusterConfig(copies=2))
    one.world.etcd.empty()
    one.world.run(7)
    assert one.written["instance"] == "one"
    assert json.loads(one.world.etcd.kvs[LAYOUT.config].value)["copies"] == 2


def test_what_somebody_rewrote_without_the_lease_is_written_again_under_one() -> None:
    one = Registered()
    one.world.etcd.put(KEY, one.world.etcd.kvs[KEY].value)
    assert one.world.etcd.kvs[KEY].lease == 0

    one.world.run(45)

    assert one.world.etcd.kvs[KEY].lease in one.world.etcd.leases
    one.world.stop(one.flow)
    one.world.run(11)
    assert KEY not in one.world.etcd.kvs


def test_what_somebody_deleted_is_written_again_as_soon_as_a_view_lacks_it() -> None:
    one = Registered()
    one.world.etcd.delete(KEY)
    assert one.registration.seen(View(1, ()))
    one.wake()
    one.world.run(2)
    assert one.written["instance"] == "one"


def test_an_id_that_another_server_uses_stops_the_newcomer() -> None:
    one = Registered()
    two = Registered(one.world, instance="two", address="infinistore://b:1")
    one.world.run(30)
    assert isinstance(two.flow.error, ConfigError)
    assert "another server, at infinistore://a:1, is registered in the cluster test as 'a'" in str(two.flow.error)
    assert "--node-id" in str(two.flow.error)
    assert one.written["instance"] == "one"
    assert one.registration.registrations == 1


def test_a_server_that_moved_waits_for_the_lease_of_the_one_before_it() -> None:
    one = Registered()
    one.world.stop(one.flow)
    two = Registered(one.world, instance="two", address="infinistore://b:1")
    one.world.run(5)
    assert two.written["instance"] == "one"
    one.world.run(10)
    assert two.written["instance"] == "two"
    assert not two.flow.done


def test_a_server_that_restarts_on_its_port_replaces_the_one_before_it_at_once() -> None:
    one = Registered()
    before = one.world.etcd.kvs[KEY].create_revision
    one.world.stop(one.flow)
    two = Registered(one.world, instance="two")
    one.world.run(3)
    assert two.written["instance"] == "two"
    assert one.world.etcd.kvs[KEY].create_revision > before


def test_a_server_that_lost_its_id_to_another_goes_on() -> None:
    one = Registered()
    (lease,) = one.world.etcd.leases
    one.world.etcd.revoke(lease)
    two = Registered(one.world, instance="two", address="infinistore://b:1")
    one.world.run(60)
    assert (one.flow.done, two.flow.done) == (False, False)
    assert two.written["instance"] == "two"


def test_another_placement_version_stops_a_newcomer_and_nobody_else() -> None:
    one = Registered()
    one.world.etcd.put(LAYOUT.config, '{"placement": 2}')
    two = Registered(one.world, "b")
    assert isinstance(two.flow.error, ConfigError)
    assert "is of placement version 2" in str(two.flow.error)
    (lease,) = one.world.etcd.leases
    one.world.etcd.revoke(lease)
    one.world.run(20)
    assert not one.flow.done


def test_a_wrong_password_stops_a_newcomer() -> None:
    world = World()
    world.etcd.password = "secret"
    one = Registered(world)
    assert isinstance(one.flow.error, ConfigError)
    assert "etcd_user and etcd_password_file" in str(one.flow.error)


def test_a_newcomer_among_others_begins_with_a_part_of_its_weight() -> None:
    one = Registered()
    one.world.run(60)
    two = Registered(one.world, "b", warm_up_s=10.0)
    seen = []
    for _ in range(12):
        said = two.written["state"], two.written["weight"]
        seen += [] if said in seen else [said]
        one.world.run(1.0)
    # It has the whole weight while clients still look at rank 2 for what it misses.
    assert seen == [*(("joining", weight) for weight in (20, 40, 60, 80, 100)), ("serving", 100)]
    assert two.registration.registrations == 1
    assert one.world.etcd.kvs[LAYOUT.node("b")].lease in one.world.etcd.leases


def test_a_node_that_drains_says_so_and_leaves_at_once() -> None:
    one = Registered()
    one.registration.drain()
    one.wake()
    assert one.written["state"] == "draining"
    assert one.world.etcd.kvs[KEY].lease in one.world.etcd.leases

    one.world.stop(one.flow)
    one.world.start(one.registration.leave())

    assert (one.written, one.world.etcd.leases) == ({}, {})
    assert one.registration.state is RegistrationState.LEFT


@pytest.mark.parametrize("has_old_blocks", [True, False])
def test_a_node_that_missed_a_purge_purges_before_it_registers(has_old_blocks: bool) -> None:
    world = World()
    world.etcd.put(LAYOUT.purge, "")
    one = Registered(world, has_old_blocks=has_old_blocks)
    assert one.purges == 1
    assert one.world.etcd.kvs[LAYOUT.purged("a")].value == "2"
    one.world.stop(one.flow)

    again = Registered(world, instance="two", has_old_blocks=True)
    world.run(3)
    assert again.written["instance"] == "two"
    assert again.purges == 0


def test_a_purge_is_not_forgotten_with_etcd() -> None:
    """Who was stopped meanwhile carries it out, and nobody else does so again."""
    world = World()
    stopped, other = Registered(world), Registered(world, "b")
    world.stop(stopped.flow)
    world.run(20)  # its lease runs out
    world.etcd.put(LAYOUT.purge, "0f" * 16)
    world.run(100)
    assert (stopped.purges, other.purges) == (0, 1)

    world.etcd.empty()
    stopped.flow = world.start(stopped.registration.run())
    world.run(100)
    assert world.etcd.kvs[LAYOUT.purge].value == "0f" * 16
    assert (stopped.purges, other.purges) == (1, 1)
    marks = {world.etcd.kvs[LAYOUT.purged(node_id)].value for node_id in "ab"}
    assert marks == {str(world.etcd.kvs[LAYOUT.purge].mod_revision)}


def test_a_node_that_was_started_again_knows_the_purge_that_an_empty_etcd_gets_back() -> None:
    world = World()
    other, one = Registered(world, "b"), Registered(world)
    world.etcd.put(LAYOUT.purge, "0f" * 16)
    world.run(100)
    world.stop(one.flow)
    world.run(20)
    again = Registered(world, instance="two", has_old_blocks=True)
    world.run(100)
    world.etcd.empty()
    world.run(100)
    assert world.etcd.kvs[LAYOUT.purge].value == "0f" * 16
    assert (one.purges, other.purges, again.purges) == (1, 1, 0)
    calls = len(world.etcd.calls)
    world.run(60)
    assert sum(path == "/v3/kv/range" for _, path in world.etcd.calls[calls:]) <= 6, "each looks every half minute"


def test_a_node_that_serves_purges_as_soon_as_a_view_tells_of_it_and_only_once() -> None:
    one = Registered(has_old_blocks=True)
    one.world.etcd.put(LAYOUT.purge, "")
    me = Node("a", "", instance="one")
    view = View(9, (me,), purged_revision=one.world.etcd.revision)
    assert one.registration.seen(view)
    one.wake()
    one.wake()
    assert one.purges == 1
    assert one.world.etcd.kvs[LAYOUT.purged("a")].value == str(view.purged_revision)
    assert not one.registration.seen(view)
    one.world.run(100)
    assert one.purges == 1
    assert one.registration.registrations == 1
