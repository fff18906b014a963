"""How an operator has a node drain, and hears of it."""

import json
from typing import Any

import pytest

from infinistore.cluster.documents import Drain, write_drain
from infinistore.cluster.etcd.operators import NodeStanding, begin_drain, end_drain, follow_node, read_drains
from infinistore.cluster.etcd.session import EtcdSession
from infinistore.cluster.membership import NodeState
from infinistore.errors import ConfigError

from .fake_etcd import Running, World
from .test_registering import LAYOUT


def world_of(*names: str, **more: Any) -> World:
    world = World(more.pop("members", 1))
    for name in names:
        world.etcd.put(LAYOUT.node(name), json.dumps({"address": f"infinistore://{name}:1", **more}))
    return world


def begin(world: World, name: str, *, force: bool = False) -> Running:
    return world.start(begin_drain(EtcdSession(world.members), LAYOUT, name, force=force))


def end(world: World, name: str) -> Running:
    return world.start(end_drain(EtcdSession(world.members), LAYOUT, name))


def error(running: Running) -> str:
    assert isinstance(running.error, ConfigError), running.error
    return str(running.error)


def drains(world: World) -> list[str]:
    return sorted(key.rpartition("/")[2] for key in world.etcd.kvs if key.startswith(LAYOUT.drains))


def test_a_request_is_a_key_of_its_own_and_asked_for_once() -> None:
    world = world_of("a", "b")
    before = world.etcd.kvs[LAYOUT.node("a")]
    assert begin(world, "a").error is None
    revision = world.etcd.revision
    assert begin(world, "a").error is None
    assert (drains(world), world.etcd.revision) == (["a"], revision)
    assert world.etcd.kvs[LAYOUT.node("a")] == before
    assert end(world, "a").error is None
    assert drains(world) == []


def test_a_node_that_is_not_there_is_told_with_those_that_are() -> None:
    world = world_of("a", "b")
    assert error(begin(world, "c")) == "the cluster 'test' has no node 'c'; it has a, b"
    assert error(end(world, "c")) == "the cluster 'test' has no node 'c'; it has a, b"
    assert "etcd knows no cluster 'test'" in error(begin(World(), "a"))


@pytest.mark.parametrize("other", [{"weight": 0}, {"state": "draining"}])
def test_the_last_node_that_takes_blocks_is_not_drained_unless_that_is_meant(other: dict[str, Any]) -> None:
    world = world_of("a")
    world.etcd.put(LAYOUT.node("b"), json.dumps({"address": "infinistore://b:1", **other}))
    assert "a is the last node of the cluster 'test' that takes blocks" in error(begin(world, "a"))
    assert drains(world) == []
    assert begin(world, "a", force=True).error is None
    assert drains(world) == ["a"]


def test_of_two_operators_that_drain_each_other_s_last_node_one_is_refused() -> None:
    world = world_of("a", "b")
    answer = world.etcd.answer
    other: list[Running] = []

    def late(post: Any) -> Any:
        if post.path.endswith("txn") and not other:
            world.etcd.answer = answer  # type: ignore[method-assign]
            other.append(begin(world, "b"))
        return answer(post)

    world.etcd.answer = late  # type: ignore[method-assign]
    first = begin(world, "a")
    assert other[0].error is None
    assert "a is the last node" in error(first)
    assert drains(world) == ["b"]


def test_a_node_that_has_left_is_let_in_again() -> None:
    world = world_of("b")
    done = Drain(done=True, groups=1, moved_groups=1)
    world.etcd.put(LAYOUT.drain("a"), write_drain(done).decode())
    found: list[Any] = []

    async def look() -> None:
        found.append(dict(await read_drains(EtcdSession(1), LAYOUT)))

    world.start(look())
    assert found == [{"a": done}]
    assert begin(world, "a").error is None  # it is out already
    assert end(world, "a").error is None
    assert drains(world) == []


class Follower:
    """Somebody who follows the node a."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.seen: list[NodeStanding] = []
        session = EtcdSession(world.members)
        self.flow = world.start(follow_node(session, LAYOUT, "a", until=self.look))
        world.run(0.01)

    def look(self, standing: NodeStanding) -> bool:
        if standing not in self.seen[-1:]:
            self.seen.append(standing)
        return standing.drain is not None and standing.drain.done

    def say(self, drain: Drain) -> None:
        self.world.etcd.put(LAYOUT.drain("a"), write_drain(drain).decode())
        self.world.run(0.01)


def test_how_far_a_node_is_is_followed_to_the_end() -> None:
    world = world_of("a", "b")
    follower = Follower(world)
    begin(world, "a")
    world.run(0.01)
    follower.say(Drain(groups=2, moved_groups=1))
    world.cut_streams()
    world.run(2)
    world.etcd.delete(LAYOUT.node("a"))
    follower.say(Drain(done=True, groups=2, moved_groups=2))
    assert follower.flow.done
    assert follower.flow.error is None
    assert follower.seen[0] == NodeStanding(None, NodeState.SERVING, 100)
    assert follower.seen[1] == NodeStanding(Drain(), NodeState.DRAINING, 100)
    assert follower.seen[-1] == NodeStanding(Drain(done=True, groups=2, moved_groups=2), None)


def test_while_etcd_is_away_or_its_watch_is_silent_it_is_followed_on() -> None:
    world = world_of("a", "b", members=2)
    follower = Follower(world)
    world.etcd.away = {0, 1}
    world.cut_streams()
    world.run(30)
    assert not follower.flow.done
    world.etcd.away = set()
    world.run(5)
    assert follower.flow.stream is not None
    follower.flow.stream.silent = True
    follower.say(Drain(done=True))
    assert not follower.flow.done
    world.run(15)
    assert follower.flow.done


def test_a_configuration_that_cannot_be_used_does_not_matter() -> None:
    world = world_of("a", "b")
    world.etcd.put(LAYOUT.config, '{"placement": 7}')
    assert begin(world, "a").error is None
