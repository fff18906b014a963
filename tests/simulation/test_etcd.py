"""The simulated etcd does what the real one was seen to do, and what must hold of a
cluster that registers there is checked.
"""

import math
from collections.abc import Awaitable, Callable

import attrs
import pytest
import trio

from infinistore.cluster.etcd import registration
from infinistore.cluster.etcd.follower import Departures
from infinistore.cluster.etcd.gateway import (
    Request,
    grant_lease,
    keep_alive,
    put,
    range_of,
    read_lease,
    read_range,
    read_ttl,
    read_watch,
    transaction,
    watch,
)
from infinistore.cluster.etcd.layout import Layout
from infinistore.cluster.etcd.registration import Registration, RegistrationState
from infinistore.cluster.etcd.session import EtcdUnavailable, Exchange, OpenStream
from infinistore.cluster.locate import EtcdPlace
from infinistore.cluster.membership import Node, NodeState, View
from infinistore.cluster_io.etcd import EtcdConnections
from infinistore.errors import BufferTooSmall, KeyNotFound, LimitExceeded
from infinistore.server import Server
from tests.simulation.clusters import ClusterSettings
from tests.simulation.etcd import MEMBERS, EtcdNetwork, SimulatedEtcd
from tests.simulation.faults import BuggifySettings, FaultSettings
from tests.simulation.history import Call
from tests.simulation.network import NetworkSettings
from tests.simulation.registered import EVENTS, EtcdSettings, RegisteredCluster
from tests.simulation.scenario import Scenario
from tests.simulation.simulate import Outcome, simulate
from tests.simulation.world import World

PLACE = EtcdPlace(endpoints=tuple((member, 2379) for member in MEMBERS), cluster="c")


def with_etcd(use: Callable[[SimulatedEtcd, EtcdConnections], Awaitable[None]]) -> Callable[[], None]:
    """Make a test of what uses an etcd in a world of its own."""

    def test() -> None:
        world = World(1)
        etcd = SimulatedEtcd(world, network := EtcdNetwork(world, NetworkSettings()))

        async def run() -> None:
            async with trio.open_nursery() as nursery:
                await nursery.start(etcd.run)
                connections = EtcdConnections(PLACE, network.connector("client"))
                await use(etcd, connections)
                await connections.close()
                nursery.cancel_scope.cancel()

        world.run(run)

    return test


async def ask(connections: EtcdConnections, request: Request, member: int = 0) -> bytes:
    return (await connections.exchange(Exchange(member, request.path, request.encode(), "", 2.0))).body


async def write(connections: EtcdConnections, key: str, lease: int = 0) -> None:
    await ask(connections, transaction([], [put(key, b"1", lease)], key))


async def open_watch(connections: EtcdConnections, start: int, member: int = 0) -> None:
    request = watch("/a", start)
    await connections.open_stream(OpenStream(member, request.path, request.encode(), "", 2.0))
    line = await connections.next_line(2.0)
    assert line is not None and read_watch(line).created


@with_etcd
async def test_a_lease_runs_out_with_what_was_written_under_it(
    etcd: SimulatedEtcd, connections: EtcdConnections
) -> None:
    lease = read_lease(await ask(connections, grant_lease(10)))
    await write(connections, "/a", lease)
    await trio.sleep(9)
    assert read_ttl(await ask(connections, keep_alive(lease))) == 10
    await trio.sleep(9.9)
    assert read_range(await ask(connections, range_of("/a"))).items
    await trio.sleep(1)
    assert not read_range(await ask(connections, range_of("/a"))).items
    assert read_ttl(await ask(connections, keep_alive(lease))) == 0  # and no error


@with_etcd
async def test_without_a_leader_nothing_is_answered_and_no_lease_runs_out(
    etcd: SimulatedEtcd, connections: EtcdConnections
) -> None:
    await write(connections, "/a", read_lease(await ask(connections, grant_lease(10))))
    etcd.lose_leader(60.0)
    for member in range(3):
        with pytest.raises(EtcdUnavailable, match="did not answer"):
            await ask(connections, range_of("/a"), member)
    await trio.sleep(60 - 3 * 2 + 9)
    assert read_range(await ask(connections, range_of("/a"))).items  # it had its whole time again


@with_etcd
async def test_nobody_can_connect_while_all_members_are_away_and_what_was_written_comes_back(
    etcd: SimulatedEtcd, connections: EtcdConnections
) -> None:
    await write(connections, "/a", read_lease(await ask(connections, grant_lease(10))))
    etcd.leave(60.0)
    for member in range(3):
        with pytest.raises(EtcdUnavailable, match="connection refused"):
            await ask(connections, range_of("/a"), member)
    await trio.sleep(60 + 9)
    assert read_range(await ask(connections, range_of("/a"))).items  # it had its whole time again


@with_etcd
async def test_a_leader_that_is_there_early_gives_leases_their_time_once(
    etcd: SimulatedEtcd, connections: EtcdConnections
) -> None:
    await write(connections, "/a", read_lease(await ask(connections, grant_lease(10))))
    etcd.lose_leader(5.0)
    await trio.sleep(1)
    etcd.heal()
    await trio.sleep(9.9)
    assert read_range(await ask(connections, range_of("/a"))).items
    await trio.sleep(1)
    assert not read_range(await ask(connections, range_of("/a"))).items


@with_etcd
async def test_a_watch_on_a_revision_that_is_compacted_is_created_then_canceled_and_stays_open(
    etcd: SimulatedEtcd, connections: EtcdConnections
) -> None:
    for _ in range(3):
        await write(connections, "/a")
    etcd.compact()
    await open_watch(connections, 2)
    line = await connections.next_line(2.0)
    assert line is not None and read_watch(line).canceled
    await write(connections, "/a")
    assert await connections.next_line(100.0) is None


@with_etcd
async def test_a_watch_of_a_member_apart_from_the_others_is_silent_until_it_is_back(
    etcd: SimulatedEtcd, connections: EtcdConnections
) -> None:
    etcd.apart.add(MEMBERS[1])
    await open_watch(connections, 2, member=1)
    await write(connections, "/a")
    assert await connections.next_line(100.0) is None
    etcd.heal()
    line = await connections.next_line(1.0)
    assert line is not None and [item.key for item in read_watch(line).written] == ["/a"]


@with_etcd
async def test_an_answer_may_be_lost_of_what_was_carried_out(etcd: SimulatedEtcd, connections: EtcdConnections) -> None:
    etcd.loses_answers = 2  # a request is sent again over a new connection, if the first was idle
    with pytest.raises(EtcdUnavailable):
        await write(connections, "/a")
    assert read_range(await ask(connections, range_of("/a"))).items


@with_etcd
async def test_an_etcd_that_comes_back_empty_begins_again_at_the_first_revision(
    etcd: SimulatedEtcd, connections: EtcdConnections
) -> None:
    await write(connections, "/a")
    etcd.restart(5.0, empty=True)
    await trio.sleep(6.0)
    found = read_range(await ask(connections, range_of("/a")))
    assert (found.revision, found.items) == (1, ())


# What happens to a cluster


def run_with(*kinds: str, events: int = 4, seed: int = 6, operations: int = 30, copies: int = 1) -> Outcome:
    scenario = Scenario.plain(seed).with_cluster()
    return simulate(
        attrs.evolve(
            scenario,
            clients=2,
            workload=attrs.evolve(scenario.workload, operations=operations, most_pause_s=3.0),
            faults=FaultSettings(),
            buggify=BuggifySettings(),
            client_restart_chance=0.0,
            deadline_s=5.0,
            cluster=ClusterSettings(nodes=3, copies=copies),
            etcd=EtcdSettings(registers=True, events=events, kinds=kinds, most_outage_s=25.0),
        )
    )


TOGETHER = [EVENTS[:3], EVENTS[3:6], EVENTS[6:9], EVENTS[9:11], EVENTS[11:]]


@pytest.mark.parametrize("kinds", [*TOGETHER, *(pytest.param((kind,), marks=pytest.mark.nightly) for kind in EVENTS)])
def test_each_event_happens_and_breaks_nothing(kinds: tuple[str, ...]) -> None:
    outcome = run_with(*kinds, events=4 * len(kinds))
    assert {f"ETCD_{kind.upper()}" for kind in kinds} <= outcome.faults.keys()
    assert outcome.violations == []
    assert outcome.ends["RETURNED"] > outcome.calls / 2


def test_a_node_that_only_its_answers_kept_in_views_may_be_there_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    class CutOffThenCrashed(RegisteredCluster):
        async def run(self) -> None:
            await self._settled()
            self._cut_off("node-1")
            await trio.sleep(32.0)  # its lease has run out, and it serves; clients have just looked
            self._servers["node-1"].crash(30.0)

        def _outage_s(self) -> float:
            return 34.0

    monkeypatch.setattr("tests.simulation.simulate.RegisteredCluster", CutOffThenCrashed)
    outcome = run_with("server_cut_off")
    assert outcome.faults["CRASH"] == 1
    assert outcome.violations == []


@pytest.mark.parametrize(
    ("seed", "copies"), [(7, 2), *(pytest.param(seed, 1, marks=pytest.mark.nightly) for seed in (6, 8))]
)
def test_no_call_fails_and_no_key_moves_while_all_of_etcd_is_away_for_a_minute(
    seed: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    away_s, left_s = 60.0, list[float]()
    calls: list[Call] = []
    views: set[tuple[tuple[str, NodeState, int], ...]] = set()

    class LeftAlone(RegisteredCluster):
        async def run(self) -> None:
            await self._settled()
            await trio.sleep(20.0)
            left_s.append(self._world.clock.now)
            self._disturb("etcd", away_s)
            self.etcd.leave(away_s)
            await trio.sleep(away_s + 30.0)
            calls.extend(self._history.calls)
            views.update(tuple((node.id, node.state, node.weight) for node in view.nodes) for view in self.views)

    monkeypatch.setattr("tests.simulation.simulate.RegisteredCluster", LeftAlone)
    outcome = run_with("restarted", seed=seed, operations=100, copies=copies)
    assert outcome.violations == []
    meanwhile = [call for call in calls if left_s[0] <= call.begun and call.ended <= left_s[0] + away_s]
    assert len(meanwhile) > 40
    assert {call.client for call in meanwhile} == {"client-1", "client-2"}
    errors = {type(call.error) for call in meanwhile if call.error is not None}
    assert errors <= {LimitExceeded, BufferTooSmall, KeyNotFound}  # by what was asked for
    assert not any(call.lost for call in meanwhile)
    assert views == {tuple((f"node-{number}", NodeState.SERVING, 100) for number in (1, 2, 3))}


def test_a_lost_lease_that_a_node_believes_to_have_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "read_ttl", lambda body: 10)
    violations = run_with("emptied", events=1, operations=60).violations
    assert any("etcd lists None" in problem for problem in violations)
    assert any("believes to be registered" in problem for problem in violations)


def test_a_node_that_leaves_before_it_has_served_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(self: Registration, view: View) -> bool:
        self.state = RegistrationState.LEFT
        return True

    monkeypatch.setattr(Registration, "seen", leave)
    assert any("has left" in problem for problem in run_with("restarted", events=0, operations=5).violations)


def test_a_purge_that_takes_long_costs_no_node_its_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    purges = []

    class Purged(RegisteredCluster):
        async def run(self) -> None:
            await self._settled()
            self.etcd.memory.put(Layout("simulated").purge, "1")
            self.etcd.told()
            await trio.sleep(60.0)

    async def purge(server: Server) -> None:
        purges.append(server)
        await trio.sleep(30.0)

    monkeypatch.setattr(Server, "purge", purge)
    monkeypatch.setattr("tests.simulation.simulate.RegisteredCluster", Purged)
    assert run_with("restarted", events=0, operations=5).violations == []
    assert len(purges) == 3


def test_a_client_that_believes_an_empty_etcd_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from infinistore.cluster.etcd import follower

    class Believing(Departures):
        @property
        def nodes(self) -> dict[str, Node]:
            return {name: node for name, node in super().nodes.items() if name not in self.kept}

    monkeypatch.setattr(follower, "Departures", Believing)
    assert any("which is up and answers" in problem for problem in run_with("emptied").violations)


@pytest.mark.nightly
def test_a_lease_that_runs_out_while_nothing_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "SHORTEST_PAUSE_S", 12.0)
    assert any("nothing was wrong with it" in problem for problem in run_with("compacted").violations)


@pytest.mark.nightly
def test_a_watch_that_is_believed_although_it_was_canceled_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from infinistore.cluster.etcd import follower

    monkeypatch.setattr(follower, "read_watch", lambda line: attrs.evolve(read_watch(line), canceled=False))
    monkeypatch.setattr(follower, "READ_AGAIN_S", math.inf)
    assert run_with("compacted", "server_down", events=12, seed=7).violations
