"""A cluster is purged from outside, and its nodes carry it out."""

from infinistore.cluster.etcd.layout import Layout
from infinistore.cluster.etcd.operators import Purged, purge_cluster
from infinistore.cluster.etcd.session import EtcdSession, EtcdUnavailable
from infinistore.errors import ConfigError

from .fake_etcd import Running, World

LAYOUT = Layout("test")


def world_of(*node_ids: str, members: int = 1) -> World:
    world = World(members)
    world.etcd.put(LAYOUT.config, '{"placement": 1}')
    for node_id in node_ids:
        world.etcd.put(LAYOUT.node(node_id), '{"address": "h:1"}')
        world.etcd.put(LAYOUT.purged(node_id), "0")
    return world


def start(world: World, timeout_s: float = 15) -> tuple[Running, list[Purged]]:
    """Begin to purge. What comes of it will be in the list."""
    results: list[Purged] = []

    async def flow() -> None:
        session = EtcdSession(world.members)
        results.append(await purge_cluster(session, LAYOUT, "5a" * 16, world.clock, timeout_s))

    return world.start(flow()), results


def carry_out(world: World, node_id: str) -> None:
    world.etcd.put(LAYOUT.purged(node_id), str(world.etcd.kvs[LAYOUT.purge].mod_revision))
    world.run(0)


def test_it_is_written_at_once_and_ends_when_every_node_has_carried_it_out() -> None:
    world = world_of("a", "b")
    running, results = start(world)
    revision = world.etcd.kvs[LAYOUT.purge].mod_revision
    carry_out(world, "b")
    assert not running.done
    carry_out(world, "a")
    assert results == [Purged(revision, ("a", "b"), ())]
    assert world.now == 0


def test_a_node_that_does_not_say_so_in_time_is_named() -> None:
    world = world_of("a", "b")
    running, results = start(world, timeout_s=7)  # real time: no, that of this world
    carry_out(world, "a")
    world.run(6.9)
    assert not running.done
    world.run(0.2)
    assert [(one.done, one.waiting) for one in results] == [(("a",), ("b",))]


def test_a_node_whose_lease_runs_out_is_not_waited_for() -> None:
    world = world_of("a", "b")
    _, results = start(world)
    carry_out(world, "a")
    world.etcd.delete(LAYOUT.node("b"))
    world.run(0)
    assert [(one.done, one.waiting) for one in results] == [(("a",), ())]


def test_a_later_purge_counts_as_this_one() -> None:
    world = world_of("a")
    _, results = start(world)
    world.etcd.put(LAYOUT.purge, "")
    carry_out(world, "a")
    assert [(one.done, one.waiting) for one in results] == [(("a",), ())]


def test_it_stands_without_nodes() -> None:
    world = world_of()
    _, results = start(world)
    assert [(one.done, one.waiting) for one in results] == [((), ())]
    assert LAYOUT.purge in world.etcd.kvs


def test_an_etcd_that_is_lost_afterwards_leaves_the_purge_and_names_who_is_not_known_to_have_done_it() -> None:
    world = world_of("a")
    _, results = start(world)
    world.cut_streams()
    assert [(one.done, one.waiting) for one in results] == [((), ("a",))]


def test_a_watch_that_is_canceled_ends_the_waiting() -> None:
    world = world_of("a")
    world.etcd.compacted = 100
    _, results = start(world)
    world.run(0)
    assert [one.waiting for one in results] == [("a",)]


def test_a_cluster_that_etcd_does_not_know_is_not_purged() -> None:
    world = World()
    running, _ = start(world)
    assert isinstance(running.error, ConfigError)
    assert "etcd knows no cluster 'test'" in str(running.error)
    assert world.etcd.kvs == {}


def test_an_etcd_that_does_not_answer_is_told() -> None:
    world = world_of("a", members=2)
    world.etcd.away = {0, 1}
    assert isinstance(start(world)[0].error, EtcdUnavailable)
    assert LAYOUT.purge not in world.etcd.kvs
