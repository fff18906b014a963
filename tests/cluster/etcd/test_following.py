"""What a follower makes of etcd, and of its traps."""

import json
from random import Random

import attrs
import pytest

from infinistore.cluster.documents import write_node
from infinistore.cluster.etcd.follower import Departures, Follower
from infinistore.cluster.etcd.gateway import range_of
from infinistore.cluster.etcd.layout import Layout
from infinistore.cluster.etcd.session import Credentials, EtcdSession, EtcdUnavailable
from infinistore.cluster.membership import Node, NodeState, View

from .fake_etcd import Running, World, coded

LAYOUT = Layout("test")


def node(name: str, **more: object) -> Node:
    return Node(name, f"infinistore://{name}:22345", instance=f"instance of {name}", **more)  # type: ignore[arg-type]


class Watched:
    """A world with a follower, and all its views."""

    def __init__(self, *names: str, members: int = 1, credentials: Credentials | None = None) -> None:
        self.world = World(members)
        self.views: list[View] = []
        self.problems: list[str] = []
        self.follower = Follower(
            EtcdSession(members, credentials),
            LAYOUT,
            clock=self.world.clock,
            random=Random(1),
            on_view=self.views.append,
            on_problem=self.problems.append,
        )
        for name in names:
            self.put(node(name))

    def start(self) -> Running:
        self.flow = self.world.start(self.follower.run())
        self.world.run(1)
        return self.flow

    def put(self, one: Node) -> None:
        self.world.etcd.put(LAYOUT.node(one.id), write_node(one).decode())

    def delete(self, *names: str) -> None:
        for name in names:
            self.world.etcd.delete(LAYOUT.node(name))

    @property
    def names(self) -> str:
        assert self.follower.view is not None
        return " ".join(one.id for one in self.follower.view.nodes)


def test_a_view_has_what_nodes_say_of_themselves() -> None:
    watched = Watched()
    full = node("a", weight=7, capacity_bytes=5, state=NodeState.JOINING, zone="z", host="h", protocol=3)
    watched.put(full)
    watched.world.etcd.put(LAYOUT.config, '{"placement": 1, "copies": 2}')
    watched.world.etcd.put(LAYOUT.purge, "")

    watched.start()

    (view,) = watched.views
    assert view.nodes == (attrs.evolve(full, generation=2),)
    assert (view.copies, view.purged_revision, view.epoch) == (2, 4, 4)


def test_what_changes_is_seen_at_once() -> None:
    watched = Watched("a", "b", "c", "d")
    watched.start()

    watched.put(node("e"))
    watched.world.run(0.001)
    assert watched.names == "a b c d e"
    watched.delete("b")
    watched.world.run(0.001)
    assert watched.names == "a c d e"


def test_what_is_deleted_and_written_again_in_one_message_is_there() -> None:
    watched = Watched("a", "b")
    watched.start()
    for instance in ("second", "third"):  # as a server does that is started again, twice
        watched.delete("a")
        watched.put(attrs.evolve(node("a"), instance=instance))
    watched.delete("b")
    watched.world.run(0.001)
    assert len(watched.views) == 2
    assert [one.instance for one in watched.views[-1].nodes] == ["third"]


def test_what_is_written_and_deleted_in_one_message_is_gone() -> None:
    watched = Watched("a", "b")
    watched.start()
    watched.put(node("c"))
    watched.delete("c", "b")
    watched.world.run(0.001)
    assert watched.names == "a"


def test_a_view_that_says_nothing_new_is_not_published() -> None:
    watched = Watched("a")
    watched.start()
    watched.world.etcd.put(LAYOUT.purged("a"), "0")
    watched.world.run(100)
    assert len(watched.views) == 1


def test_etcd_gone_is_told_once_each_time(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched("a", members=3)
    watched.start()
    for outage in (1, 2):
        watched.world.etcd.away = {0, 1, 2}
        watched.world.cut_streams()
        watched.world.run(60)
        assert len(caplog.records) == outage
        watched.world.etcd.away = set()
        watched.world.run(60)
    assert len(watched.views) == 1


def test_the_first_view_is_of_what_there_is_be_it_nothing() -> None:
    watched = Watched()
    watched.start()
    assert watched.views == [View(watched.world.etcd.revision, ())]
    assert watched.world.etcd.calls == [(0, "/v3/kv/range")]
    watched.put(node("a"))
    watched.world.run(0.01)
    assert watched.views[1:] == [View(watched.world.etcd.revision, (node("a", generation=2),))]


def test_an_etcd_that_is_away_from_the_start_is_told() -> None:
    watched = Watched("a")
    watched.world.etcd.away = {0}
    watched.start()
    assert set(watched.problems) == {"etcd: member 0 is away"}
    watched.world.etcd.away = set()
    watched.world.run(3)
    assert watched.names == "a"


def test_who_has_lost_etcd_comes_back_ever_more_slowly_and_not_with_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for chance, first_s in ((0.0, 0.05), (0.25, 0.075), (1.0, 0.15)):
        monkeypatch.setattr(Random, "random", lambda _, chance=chance: chance)
        watched = Watched("a")
        watched.start()
        for _ in range(2):  # the second outage begins as the first one did
            watched.world.etcd.away = {0}
            watched.world.cut_streams()
            began, pauses = watched.world.now, list[float]()
            while len(pauses) < 7:
                pauses.append(watched.flow.due - watched.world.now)
                watched.world.run(pauses[-1] + 1e-9)
            assert pauses == pytest.approx([first_s * times for times in (1, 2, 4, 8, 16, 20, 20)], rel=1e-6)
            watched.world.etcd.away = set()
            watched.world.run(20)
            assert watched.world.now > began


def test_what_is_wrong_with_etcd_is_said_in_the_log_and_to_who_asks(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched("a", members=1)
    watched.start()
    stream = watched.flow.stream
    watched.world.run(28)
    assert len(watched.world.etcd.calls) == 1  # it is not read again before its time
    for outage in (1, 2):  # the watch stands while reading fails
        watched.world.etcd.away = {0}
        watched.world.run(31)
        assert watched.problems == ["etcd: member 0 is away"] * outage
        assert caplog.messages == ["the view of the cluster stays as it is: etcd: member 0 is away"] * outage
        watched.world.etcd.away = set()
        watched.world.run(31)
    assert watched.flow.stream is stream


def test_etcd_gone_leaves_the_last_view_for_ever() -> None:
    watched = Watched("a", "b", members=3)
    watched.start()
    watched.world.etcd.away = {0, 1, 2}
    watched.world.cut_streams()

    watched.world.run(5_000)

    assert watched.names == "a b"
    assert not watched.flow.done
    assert watched.follower.confirmed_at is not None and watched.follower.confirmed_at < 2
    watched.world.etcd.away = {0, 1}
    watched.put(node("c"))
    watched.world.run(10)
    assert watched.names == "a b c"


def test_a_watch_of_a_compacted_revision_is_given_up_though_its_stream_stays_open() -> None:
    watched = Watched("a")
    watched.start()
    for _ in range(20):  # what happens between the range and the watch
        watched.world.cut_streams()
        watched.put(node("b"))
        watched.world.etcd.compact()
        watched.world.run(0.01)
    watched.world.run(5)
    assert watched.names == "a b"
    watched.put(node("c"))
    watched.world.run(0.01)
    assert watched.names == "a b c"


def test_a_watch_that_is_created_and_canceled_is_opened_again_from_what_is_there_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched("a")
    answer = watched.world.etcd.answer

    def answer_and_compact(post: object) -> object:
        answered = answer(post)  # type: ignore[arg-type]
        if len(watched.world.etcd.calls) == 1:
            watched.put(node("b"))
            watched.put(node("c"))
            watched.world.etcd.compact()
        return answered

    monkeypatch.setattr(watched.world.etcd, "answer", answer_and_compact)
    watched.start()
    assert watched.names == "a b c"


def test_a_silent_watch_is_found_by_reading_again() -> None:
    watched = Watched("a", "b", "c", "d", members=2)
    watched.start()
    assert watched.flow.stream is not None
    watched.flow.stream.silent = True  # its member has lost the others
    watched.put(node("e"))

    watched.world.run(29)
    assert watched.names == "a b c d"
    watched.world.run(3)
    assert watched.names == "a b c d e"
    watched.put(node("f"))
    watched.world.run(0.01)
    assert watched.names == "a b c d e f"


def test_an_idle_watch_is_kept_and_the_view_confirmed() -> None:
    watched = Watched("a")
    watched.start()
    stream = watched.flow.stream

    watched.world.run(1000)

    assert watched.flow.stream is stream
    assert watched.follower.confirmed_at is not None and watched.world.now - watched.follower.confirmed_at < 31


def test_a_watch_that_is_not_created_is_opened_at_another_member() -> None:
    watched = Watched("a", members=2)
    watched.flow = watched.world.start(watched.follower.run())
    assert watched.flow.stream is not None
    watched.flow.stream.lines.clear()
    watched.flow.stream.silent = True
    first = watched.flow.stream

    watched.world.run(4.9)
    assert watched.flow.stream is first
    watched.world.run(5.1)
    assert watched.problems == ["etcd: a watch was not created in time"]

    watched.put(node("b"))
    watched.world.run(0.01)
    assert watched.names == "a b"
    assert watched.flow.stream.member == 1


def test_a_single_node_that_vanishes_is_gone() -> None:
    watched = Watched("a", "b", "c", "d")
    watched.start()
    watched.delete("a")
    watched.world.run(0.01)
    assert watched.names == "b c d"
    assert watched.world.probed == []


def test_nodes_are_in_doubt_together_if_they_went_within_the_window() -> None:
    nodes = {name: node(name) for name in "abcd"}

    def without(*names: str) -> dict[str, Node]:
        return {name: one for name, one in nodes.items() if name not in names}

    for later_s, doubtful in ((9.9, "ab"), (10.0, "b")):
        departures = Departures(10.0)
        departures.listed(nodes, 100.0)
        assert departures.listed(without("a"), 200.0) == ()
        assert departures.listed(without("a", "b"), 200.0 + later_s) == tuple(map(node, doubtful))


def test_a_third_that_vanishes_is_asked_and_who_answers_as_the_same_instance_stays(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watched = Watched("a", "b", "c", "d", "e", "f")
    watched.start()
    watched.world.reachable = {"a": "instance of a", "b": "another instance"}
    watched.delete("a")
    watched.world.run(0.01)
    assert watched.names == "b c d e f"

    watched.delete("b")
    watched.delete("c")
    watched.world.run(0.01)

    assert watched.names == "a d e f"
    assert watched.world.probed == [("a", "b", "c")]
    [said] = caplog.records
    assert said.message == "nodes vanished from etcd at once; those that answer stay"
    assert (vars(said)["vanished"], vars(said)["stay"]) == (3, 1)
    watched.world.run(200)
    assert watched.names == "a d e f"
    watched.world.reachable = {}
    watched.world.run(31)
    assert watched.names == "d e f"


def test_nodes_that_go_one_by_one_over_a_long_time_are_believed() -> None:
    watched = Watched("a", "b", "c", "d", "e", "f", "g", "h")
    watched.start()
    watched.world.reachable = {name: f"instance of {name}" for name in "abcdefgh"}
    for name in "abcd":
        watched.delete(name)
        watched.world.run(11)
    assert watched.names == "e f g h"


def test_nodes_that_drained_are_believed_to_be_gone() -> None:
    watched = Watched("a", "b")
    watched.start()
    watched.put(node("a", state=NodeState.DRAINING))
    watched.world.run(0.01)
    watched.delete("a")
    watched.world.run(0.01)
    assert (watched.names, watched.world.probed) == ("b", [])


def test_an_etcd_that_restarts_empty_does_not_empty_the_view() -> None:
    watched = Watched("a", "b", "c")
    watched.world.etcd.put(LAYOUT.config, '{"copies": 2}')
    watched.start()
    watched.world.reachable = {"a": "instance of a", "b": "instance of b"}
    watched.world.etcd.empty()
    watched.world.cut_streams()
    watched.world.run(60)
    assert watched.names == "a b"
    assert watched.follower.view is not None and watched.follower.view.copies == 2

    watched.put(node("a"))
    watched.world.reachable = {}
    watched.world.run(60)
    assert watched.names == "a"


def test_a_configuration_of_another_placement_version_keeps_the_last_view() -> None:
    watched = Watched("a")
    watched.start()
    watched.world.etcd.put(LAYOUT.config, '{"placement": 2}')
    watched.put(node("b"))
    watched.world.run(0.01)
    assert watched.names == "a"
    assert "is of placement version 2, and this is 1: use one release" in watched.problems[-1]


def test_an_item_that_is_no_node_is_told_and_left_out() -> None:
    watched = Watched("a")
    watched.world.etcd.put(LAYOUT.node("b"), '{"address": 5}')
    watched.start()
    assert watched.names == "a"
    assert watched.problems == ["/infinistore/test/nodes/b in etcd needs an address, such as 10.0.0.7:22345"]


@pytest.mark.parametrize("password", ["right", "wrong"])
def test_a_user_gets_a_token_and_another_when_it_has_expired(password: str) -> None:
    watched = Watched("a", credentials=Credentials("user", password))
    watched.world.etcd.password = "right"
    watched.start()
    if password == "wrong":
        assert watched.follower.view is None
        assert "invalid user ID or password" in watched.problems[-1]
        return
    assert watched.names == "a"
    watched.world.etcd.tokens.clear()
    watched.put(node("b"))
    watched.world.cut_streams()
    watched.world.run(3)
    assert watched.names == "a b"


def test_an_etcd_that_wants_a_password_says_which_setting_is_missing() -> None:
    watched = Watched("a")
    watched.world.etcd.password = "right"
    watched.start()
    asked_for = "etcd: etcd wants a user and a password: set etcd_user and etcd_password_file"
    assert watched.problems[-1] == asked_for
    watched.world.etcd.away = {0}
    watched.world.run(60)
    assert watched.problems[-1] == asked_for, "silence says less"


def test_a_member_that_does_not_answer_is_passed_over() -> None:
    watched = Watched("a", members=3)
    watched.world.etcd.away = {0, 1}
    watched.start()
    assert watched.names == "a"
    assert {member for member, _ in watched.world.etcd.calls} == {2}


def test_a_call_that_no_member_answers_says_what_the_last_one_said() -> None:
    world = World(2)
    world.etcd.away = {0, 1}

    flow = world.start(EtcdSession(2).call(range_of("/")))
    assert isinstance(flow.error, EtcdUnavailable)
    assert str(flow.error) == "member 1 is away"


def test_what_a_watch_says_of_the_past_changes_nothing() -> None:
    watched = Watched("a")
    watched.start()
    assert watched.flow.stream is not None
    stale = {"key": coded(LAYOUT.node("a")), "value": coded(write_node(node("a", weight=1))), "mod_revision": "1"}
    line = {"result": {"header": {"revision": "1"}, "events": [{"kv": stale}]}}
    watched.flow.stream.lines.append(json.dumps(line).encode())
    watched.world.run(1)
    assert len(watched.views) == 1


@pytest.mark.parametrize(("nodes", "asked"), [("abcdef", True), ("abcdefg", False)])
def test_two_that_vanish_are_asked_if_they_were_a_third(nodes: str, asked: bool) -> None:
    watched = Watched(*nodes)
    watched.start()
    watched.delete("a")
    watched.delete("b")
    watched.world.run(0.01)
    assert watched.world.probed == ([("a", "b")] if asked else [])
