"""Drains on request, as a node and the follower of a cluster see them."""

import json
from random import Random
from typing import Any

from infinistore.cluster.documents import Drain, read_drain, write_drain
from infinistore.cluster.etcd.follower import Follower
from infinistore.cluster.etcd.session import EtcdSession
from infinistore.cluster.membership import NodeState, View

from .fake_etcd import World
from .test_registering import KEY, LAYOUT, Registered

MARK = LAYOUT.drain("a")


class Draining(Registered):
    """A node beside another one, and what it was asked."""

    def __init__(self, world: World | None = None, **more: Any) -> None:
        self.asked: list[bool] = []
        world = world or World()
        other = LAYOUT.node("b")
        if other not in world.etcd.kvs:
            world.etcd.put(other, json.dumps({"address": "infinistore://b:1", "instance": "other"}))
        super().__init__(world, on_drain=self.asked.append, warm_up_s=10.0, **more)
        self.world.run(20)
        self.views: list[View] = []
        self.follower = Follower(EtcdSession(1), LAYOUT, clock=self.world.clock, random=Random(2), on_view=self._take)
        self.world.start(self.follower.run())

    def _take(self, view: View) -> None:
        self.views.append(view)
        if self.registration.seen(view):
            self.world.wake(self.flow)

    def request(self) -> None:
        self.world.etcd.put(MARK, write_drain(Drain()).decode())
        self.world.run(0.1)

    def take_back(self) -> None:
        self.world.etcd.delete(MARK)
        self.world.run(0.1)

    def say(self, drain: Drain) -> None:
        self.registration.drained(drain)
        self.wake()

    @property
    def state(self) -> str:
        return self.registration.state.value

    @property
    def mark(self) -> Drain:
        return read_drain(self.world.etcd.kvs[MARK].value.encode())

    @property
    def seen_state(self) -> NodeState | None:
        return next((node.state for node in self.views[-1].nodes if node.id == "a"), None)


def test_a_node_that_is_asked_to_drain_says_so_under_its_lease() -> None:
    one = Draining()
    (lease,) = one.world.etcd.leases
    one.request()
    assert one.asked == [True]
    assert one.written["state"] == "draining"
    assert one.world.etcd.kvs[KEY].lease == lease
    assert (one.seen_state, one.views[-1].drains) == (NodeState.DRAINING, ("a",))
    one.world.run(60)
    assert one.asked == [True]
    assert one.registration.registrations == 1


def test_everybody_sees_it_before_the_node_has_heard_of_it() -> None:
    one = Draining()
    one.world.stop(one.flow)
    one.request()
    assert one.written["state"] == "serving"
    assert one.seen_state is NodeState.DRAINING


def test_a_node_says_how_far_it_is_and_leaves_with_the_last_word() -> None:
    one = Draining()
    one.request()
    half = Drain(groups=2, moved_groups=1, moved_blocks=3, moved_bytes=7)
    one.say(half)
    assert one.mark == half
    assert one.state == "registered"
    over = Drain(done=True, groups=2, moved_groups=2)
    one.say(over)
    assert one.mark == over
    assert (one.written, one.world.etcd.leases) == ({}, {})
    assert one.state == "drained"
    one.world.run(100)
    assert (one.written, one.mark) == ({}, over)
    assert one.seen_state is None


def test_a_node_that_has_drained_joins_again_when_that_is_taken_back() -> None:
    one = Draining()
    one.request()
    one.say(Drain(done=True))
    one.world.run(50)
    one.take_back()
    one.world.run(2)
    assert (one.written["state"], one.written["weight"]) == ("joining", 20)
    assert one.asked == [True, False]
    one.world.run(20)
    assert (one.written["state"], one.written["weight"]) == ("serving", 100)
    assert one.registration.registrations == 2
    one.request()  # and may be asked once more
    assert one.asked == [True, False, True]
    assert one.written["state"] == "draining"


def test_a_drain_that_is_taken_back_before_its_end_makes_the_node_join_under_its_lease() -> None:
    one = Draining()
    (lease,) = one.world.etcd.leases
    one.request()
    one.take_back()
    assert one.asked == [True, False]
    assert one.written["state"] == "joining"  # what was put meanwhile is with others
    assert one.world.etcd.kvs[KEY].lease == lease
    one.world.run(15)
    assert one.written["state"] == "serving"


def test_a_last_word_that_comes_after_it_was_taken_back_is_not_believed() -> None:
    one = Draining()
    one.request()
    one.world.stop(one.world.flows[-1])  # the node hears nothing
    one.world.etcd.delete(MARK)
    one.say(Drain(done=True))
    one.world.run(2)
    assert MARK not in one.world.etcd.kvs
    assert one.written["instance"] == "one"
    assert one.asked == [True, False]


def test_a_node_that_is_started_again_while_it_drains_goes_on() -> None:
    one = Draining()
    one.request()
    one.world.stop(one.flow)
    two = Draining(one.world, instance="two")
    assert two.asked == [True]
    assert (two.written["instance"], two.written["state"]) == ("two", "draining")


def test_a_node_that_is_started_again_after_it_drained_stays_out_and_may_serve() -> None:
    one = Draining()
    one.request()
    one.say(Drain(done=True))
    one.world.stop(one.flow)
    may_serve: list[int] = []
    two = Draining(one.world, instance="two", on_registered=lambda: may_serve.append(1))
    assert (two.asked, two.written, bool(may_serve)) == ([], {}, True)
    assert two.state == "drained"
    two.take_back()
    two.world.run(2)
    assert (two.written["instance"], two.written["state"]) == ("two", "joining")


def test_a_node_that_ends_drains_as_ever() -> None:
    one = Draining()
    one.request()
    one.say(Drain(done=True))
    one.world.stop(one.flow)
    one.world.start(one.registration.leave())
    assert one.mark.done


def test_while_etcd_is_away_the_last_word_waits() -> None:
    one = Draining()
    one.request()
    one.world.etcd.away = {0}
    one.say(Drain(done=True))
    one.world.run(4)
    assert one.state == "registered"
    one.world.etcd.away = set()
    one.world.run(5)
    assert one.mark.done
    assert one.written == {}


def test_an_answer_that_was_lost_is_asked_for_again() -> None:
    one = Draining()
    one.request()
    # etcd has carried the last word out, and the node does not know it.
    one.world.etcd.put(MARK, write_drain(Drain(done=True)).decode())
    one.world.etcd.delete(KEY)
    one.world.run(30)
    assert one.state == "drained"
    assert one.written == {}
    one.take_back()
    one.world.run(3)
    assert one.written["state"] == "joining"


def test_a_node_whose_lease_ran_out_while_it_drained_drains_on() -> None:
    one = Draining()
    one.request()
    (lease,) = one.world.etcd.leases
    one.world.etcd.revoke(lease)
    one.world.run(7)
    assert one.written["state"] == "draining"
    assert one.asked == [True]
    one.say(Drain(done=True))
    assert one.mark.done


def test_what_somebody_rewrote_under_the_lease_stays_with_the_node() -> None:
    one = Draining()
    kv = one.world.etcd.kvs[KEY]
    one.world.etcd.put(KEY, kv.value.replace("serving", "draining"), kv.lease)
    one.world.run(40)
    assert (one.written["state"], one.registration.registrations) == ("serving", 1)
    assert one.world.etcd.kvs[KEY].lease == kv.lease
