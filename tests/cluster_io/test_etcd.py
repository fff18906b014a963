"""The flows against a real etcd: what the fake one of `tests/cluster` is made after."""

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio

from infinistore.cluster.etcd.gateway import (
    Item,
    delete,
    grant_lease,
    keep_alive,
    put,
    range_of,
    read_lease,
    read_outcome,
    read_range,
    read_ttl,
    read_watch,
    revoke_lease,
    transaction,
    unless_changed,
    watch,
)
from infinistore.cluster.etcd.layout import Layout
from infinistore.cluster.etcd.registration import Registration, RegistrationState
from infinistore.cluster.etcd.session import EtcdSession, EtcdUnavailable, NextLine
from infinistore.cluster.locate import EtcdPlace, parse_cluster_url
from infinistore.cluster.membership import Node, View
from infinistore.cluster_io.etcd import EtcdConnections, FlowRunner
from infinistore.cluster_io.memberships import EtcdMembership, make_session
from tests.ports import own_ports
from tests.server.running import until as until_holds

from .etcd import Etcd, needs_etcd, own_cluster


@pytest.fixture
def one_etcd(etcd_of_all: Etcd) -> Etcd:
    return own_cluster(etcd_of_all)


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[Etcd]:
    etcd = Etcd(tmp_path)
    yield etcd
    etcd.close()


def place_of(etcd: Etcd) -> EtcdPlace:
    place = parse_cluster_url(etcd.url).place
    assert isinstance(place, EtcdPlace)
    return place


async def nobody(node: Node) -> str:
    await trio.lowlevel.checkpoint()
    return ""


def names_of(membership: EtcdMembership) -> list[str]:
    return [node.id for node in membership.view.nodes]


def runner(place: EtcdPlace) -> FlowRunner:
    return FlowRunner(EtcdConnections(place), ask_instance=nobody)


async def call(place: EtcdPlace, *requests: Any) -> list[bytes]:
    session = EtcdSession(len(place.endpoints))

    async def flow() -> list[bytes]:
        return [await session.call(request) for request in requests]

    return await runner(place).run(flow())


@asynccontextmanager
async def registered(place: EtcdPlace, name: str, lease_s: int = 2) -> AsyncIterator[Registration]:
    registration = Registration(
        make_session(place, Random()),
        Layout(place.cluster),
        Node(name, f"infinistore://127.0.0.1:{ord(name)}", instance=name),
        clock=trio.current_time,
        random=Random(),
        warm_up_s=0,
        lease_s=lease_s,
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(runner(place).run, registration.run())
        await until_holds(lambda: registration.registrations)  # others may see it before it knows itself
        yield registration
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def following(
    place: EtcdPlace, ask: Callable[[Node], Any] = nobody
) -> AsyncIterator[tuple[EtcdMembership, Callable[[str], Any]]]:
    membership = EtcdMembership(place, ask_instance=ask)
    send, receive = trio.open_memory_channel[View](1000)
    membership.add_listener(send.send_nowait)

    async def until(names: str) -> None:
        async for view in receive:
            if " ".join(node.id for node in view.nodes) == names:
                return

    async with trio.open_nursery() as nursery:
        nursery.start_soon(membership.run)
        yield membership, until
        nursery.cancel_scope.cancel()


@needs_etcd
@pytest.mark.process
async def test_answers_are_as_the_fake_one_gives_them(one_etcd: Etcd) -> None:
    place = place_of(one_etcd)
    key = "/infinistore/answers/a"
    write = transaction([unless_changed(Item(key))], [put(key, b"v")], key)
    erase = transaction([], [delete(key)], key)
    first, second, found, _, empty = await call(place, write, write, range_of(key), erase, range_of(key))
    created = read_outcome(first).revision
    item = Item(key, b"v", created, created, 0)
    assert read_outcome(first).succeeded
    assert not read_outcome(second).succeeded
    assert read_outcome(second).items == read_range(found).items == (item,)
    assert read_range(empty).items == ()

    lease = read_lease((await call(place, grant_lease(5)))[0])
    renewed, _, lost = await call(place, keep_alive(lease), revoke_lease(lease), keep_alive(lease))
    assert (read_ttl(renewed), read_ttl(lost)) == (5, 0)


@needs_etcd
@pytest.mark.process
async def test_a_watch_of_a_compacted_revision_is_created_then_canceled_and_stays_open(one_etcd: Etcd) -> None:
    place = place_of(one_etcd)
    write = transaction([], [put("/infinistore/compacted/a", b"")], "a")
    bodies = await call(place, write, write, write)
    revision = read_outcome(bodies[-1]).revision
    one_etcd.ask("kv/compaction", revision=str(revision))
    connections = EtcdConnections(place)
    session = EtcdSession(1)

    async def flow() -> list[Any]:
        await session.open_stream(watch("/infinistore/compacted/", revision - 1))
        return [await NextLine(60), await NextLine(60), await NextLine(0.05)]

    created, canceled, nothing = await FlowRunner(connections, ask_instance=nobody).run(flow())
    assert (read_watch(created).created, read_watch(created).canceled) == (True, False)
    assert read_watch(canceled).canceled
    assert nothing is None


@needs_etcd
@pytest.mark.process
async def test_nodes_come_and_go_and_a_lease_runs_out(one_etcd: Etcd) -> None:
    place = place_of(one_etcd)
    async with following(place) as (membership, until), registered(place, "a"):
        await until("a")
        async with registered(place, "b"):
            await until("a b")
        await until("a")
        assert membership.age_s < 60


@needs_etcd
@pytest.mark.process
async def test_etcd_away_and_back_moves_nothing(one_etcd: Etcd) -> None:
    place = place_of(one_etcd)
    # A lease that etcd does not end, however long it takes to start.
    async with following(place) as (membership, until), registered(place, "a", lease_s=3600) as registration:
        await until("a")
        view = membership.view
        one_etcd.kill()
        await until_holds(lambda: "cannot be reached" in membership.problem)
        assert membership.view is view
        await trio.to_thread.run_sync(one_etcd.start)
        async with registered(place, "b"):
            await until("a b")
        assert registration.registrations == 1
        assert membership.view.nodes[0] == view.nodes[0]


@needs_etcd
@pytest.mark.process
async def test_an_etcd_that_comes_back_empty_is_told_again(own_etcd: Etcd) -> None:
    place = place_of(own_etcd)
    alive = {"a"}

    async def ask(node: Node) -> str:
        await trio.lowlevel.checkpoint()
        return node.instance if node.id in alive else ""

    async with following(place, ask) as (membership, until), registered(place, "a") as registration:
        await until("a")
        own_etcd.kill()
        own_etcd.forget()
        await trio.to_thread.run_sync(own_etcd.start)
        await until_holds(lambda: registration.registrations == 2 or names_of(membership) != ["a"])
        assert names_of(membership) == ["a"]
        await until_holds(lambda: registration.state is RegistrationState.REGISTERED)


@needs_etcd
@pytest.mark.process
async def test_a_password_is_asked_for_and_a_token_renewed(own_etcd: Etcd, tmp_path: Path) -> None:
    own_etcd.ask("auth/user/add", name="root", password="secret")
    own_etcd.ask("auth/role/add", name="root")
    own_etcd.ask("auth/user/grant", user="root", role="root")
    own_etcd.ask("auth/enable")
    with pytest.raises(BaseException, match="etcd wants a user and a password"):
        await call(place_of(own_etcd), range_of("/"))
    (tmp_path / "password").write_text("secret\n")
    (tmp_path / "password").chmod(0o600)
    place = parse_cluster_url(f"{own_etcd.url}?etcd_user=root&etcd_password_file={tmp_path}/password").place
    assert isinstance(place, EtcdPlace)
    async with following(place) as (_, until), registered(place, "a"):
        await until("a")
        own_etcd.kill()  # it forgets its tokens
        await trio.to_thread.run_sync(own_etcd.start)
        async with registered(place, "b"):
            await until("a b")


@needs_etcd
@pytest.mark.process
async def test_tls_is_spoken_and_the_certificate_checked(tmp_path: Path) -> None:
    etcd = Etcd(tmp_path, tls=True)
    try:
        url = f"{etcd.url}?etcd_tls=on"
        trusting = parse_cluster_url(f"{url}&etcd_ca_file={etcd.certificate()}").place
        doubting = parse_cluster_url(url).place
        assert isinstance(trusting, EtcdPlace) and isinstance(doubting, EtcdPlace)
        async with following(trusting) as (_, until), registered(trusting, "a"):
            await until("a")
        with pytest.raises(EtcdUnavailable, match="certificate verify failed"):
            await call(doubting, range_of("/"))
    finally:
        etcd.close()


async def test_an_etcd_that_is_not_there_is_unavailable() -> None:
    place = EtcdPlace(endpoints=tuple(("127.0.0.1", port) for port in own_ports(2)), cluster="test")
    with pytest.raises(EtcdUnavailable, match=r"127\.0\.0\.1:\d+ cannot be reached: Connection refused$"):
        await call(place, range_of("/"))


async def test_what_does_not_answer_is_given_up_in_time(autojump_clock: trio.testing.MockClock) -> None:
    async def silent(host: str, port: int, context: object) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        return trio.testing.memory_stream_pair()[0]

    place = EtcdPlace(endpoints=(("a", 1), ("b", 2)), cluster="test")
    flow = EtcdSession(2).call(range_of("/"), timeout_s=1.0)
    with pytest.raises(EtcdUnavailable, match="b:2 did not answer in 1 s"):
        await FlowRunner(EtcdConnections(place, silent), ask_instance=nobody).run(flow)
    assert trio.current_time() == pytest.approx(2.0)


async def test_a_connection_that_was_closed_while_idle_is_replaced() -> None:
    answer = json.dumps({"header": {"revision": "5"}}).encode()
    reply = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(answer), answer)
    opened = 0

    async with trio.open_nursery() as nursery:

        async def serve(stream: trio.abc.Stream) -> None:
            async with stream:
                await stream.receive_some(4096)
                await stream.send_all(reply)

        async def once(host: str, port: int, context: object) -> trio.abc.Stream:
            nonlocal opened
            await trio.lowlevel.checkpoint()
            ours, theirs = trio.testing.memory_stream_pair()
            nursery.start_soon(serve, theirs)
            opened += 1
            return ours

        session = EtcdSession(1)

        async def flow() -> list[int]:
            return [read_range(await session.call(range_of("/"))).revision for _ in range(3)]

        place = EtcdPlace(endpoints=(("a", 1),), cluster="test")
        assert await FlowRunner(EtcdConnections(place, once), ask_instance=nobody).run(flow()) == [5, 5, 5]
    assert opened == 3
