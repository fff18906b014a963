"""Copies that servers get after the keys were deleted: they store nothing."""

import threading
from collections.abc import AsyncGenerator, Collection, Generator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import attrs
import pytest
import trio

from infinistore import blocking
from infinistore.blocking import delete_by_prefix, do_by_prefix, key_pages
from infinistore.client.connection.effects import Background, ClusterCall, Together
from infinistore.client.requests import Batch, Copy, Get, Marks, Put
from infinistore.cluster.documents import Drain
from infinistore.cluster.membership import NodeState
from infinistore.errors import PartialPut, PermissionDenied, StoreUnavailable
from infinistore.kept_errors import KeptError
from infinistore.protocol.versions import Capability
from infinistore.server.cluster import OtherNodes, Others
from tests.clients.stores import servers_lack
from tests.cluster_client.clusters import (
    Cluster,
    Given,
    open_given,
    open_given_async,
    pass_on,
    running_cluster,
    until,
)
from tests.server.tenants_files import TOKENS, text_of, write

JOINING, SERVING, DRAINING = NodeState
NAMES = [f"key {number}" for number in range(60)]
BLOCKS = {name: name.encode() for name in NAMES}


def given_states(cluster: Cluster, *of: NodeState) -> Given:
    return Given([attrs.evolve(node, state=state) for node, state in zip(cluster.nodes(), of, strict=False)])


class Held:
    """A call whose work in the background is left to the test."""

    def __init__(self, call: ClusterCall[Any], works: list[ClusterCall[None]]) -> None:
        self._call = call
        self._works = works

    def __await__(self) -> Generator[Any, Any, Any]:
        result: Any = None
        while True:
            try:
                effect = self._call.send(result)
            except StopIteration as stop:
                return stop.value
            if isinstance(effect, Background):
                self._works.append(effect.work)
                result = True
            else:
                result = yield effect


async def wait_for(awaitable: Any) -> Any:
    return await awaitable


async def test_a_copy_to_a_node_that_joins_comes_after_the_keys_were_deleted(three: Cluster) -> None:
    given = given_states(three, SERVING, SERVING)
    async with open_given_async(given) as store:
        await store.put_many(BLOCKS)
        given.give(given_states(three, SERVING, SERVING, JOINING).view.nodes)
        works: list[ClusterCall[None]] = []
        await store.drive(wait_for(Held(store.calls.call(Get(NAMES)), works)))
        (work,) = works
        puts = work.send(await store.drive(wait_for(work.send(None))))  # all are there, it has heard
        assert isinstance(puts, Together)
        copied = [key for part in puts.parts if isinstance(part.request, Put) for key in part.request.keys]
        kept = copied.pop()
        assert copied
        assert await store.delete(copied) == len(copied)
        outcomes = await store.drive(wait_for(puts))
        assert three.members[2].keys() == {kept}
        assert await store.exists_many(copied) == [False] * len(copied)
        with suppress(StopIteration):
            work.send(outcomes)


def test_what_a_node_passes_on_comes_after_the_keys_were_deleted(three: Cluster) -> None:
    given = given_states(three, SERVING, SERVING, SERVING)
    others = Others(given, "a")  # type: ignore[arg-type]
    drains = three.members[0]

    class Late(OtherNodes):
        async def copy(
            self, blocks: Mapping[str, memoryview], marks: Mapping[str, int | KeptError], ttl_s: float | None
        ) -> Collection[str]:
            await trio.to_thread.run_sync(store.delete, list(blocks)[1:])
            return await super().copy(blocks, marks, ttl_s)

    @asynccontextmanager
    async def open_late() -> AsyncGenerator[OtherNodes, None]:
        async with open_given_async(others) as nodes:
            yield Late(nodes)

    with open_given(given) as store:
        store.put_many(BLOCKS)
        names = drains.keys()
        given.give(given_states(three, DRAINING, SERVING, SERVING).view.nodes)
        pass_on(drains, others, open_late)
        passed_on = [name for name in names if store.exists(name)]
        assert len(passed_on) == 1 < len(names)
        assert drains.keys() == set(passed_on)


def test_blocks_from_before_that_were_deleted_since_are_not_passed_on(three: Cluster) -> None:
    given = given_states(three, SERVING, SERVING)
    others = Others(given, "a")  # type: ignore[arg-type]
    drains = three.members[0]
    with open_given(given) as store:
        store.put_many(BLOCKS)
        given.give(given_states(three, SERVING, SERVING, SERVING).view.nodes)
        store.put_many(BLOCKS)
        left = drains.keys()
        store.delete(NAMES)
        assert left > drains.keys() > set()
        given.give(given_states(three, DRAINING, SERVING, SERVING).view.nodes)
        pass_on(drains, others)
        assert store.exists_many(NAMES) == [False] * len(NAMES)


def test_a_node_that_is_not_in_the_view_yet_may_pass_on_all_that_it_has() -> None:
    others = Others(Given([]), "a")  # type: ignore[arg-type]
    assert others.has_place(NAMES) == [True] * len(NAMES)


async def test_why_a_node_takes_no_copies_is_said(three: Cluster) -> None:
    given = given_states(three, SERVING, SERVING, SERVING)
    async with open_given_async(given) as store:
        marks = await store.drive(store.calls.call(Marks(NAMES[:1])))
        assert len(marks) == 1  # of the owner alone
        refused = dict.fromkeys(marks, KeptError(PermissionDenied("may only read")))
        with pytest.raises(PartialPut, match="takes no copies: may only read"):
            await store.drive(store.calls.call(Copy(Batch(NAMES[:1], [memoryview(b"x")]), refused)))


async def test_a_node_of_an_older_release_gets_no_copies(caplog: pytest.LogCaptureFixture) -> None:
    with servers_lack(Capability.COPIES), running_cluster(3) as older:
        given = given_states(older, SERVING, SERVING)
        async with open_given_async(given) as store:
            await store.put_many(BLOCKS)
            given.give(given_states(older, SERVING, SERVING, JOINING).view.nodes)
            works: list[ClusterCall[None]] = []
            found = await store.drive(wait_for(Held(store.calls.call(Get(NAMES)), works)))
            assert [bytes(value) for value in found] == list(BLOCKS.values())
            assert works == []
        others = Others(given_states(older, DRAINING, SERVING, SERVING), "a")  # type: ignore[arg-type]
        told = list[Drain]()
        pass_on(older.members[0], others, told=told.append)
        assert told[-1].failed_groups == told[-1].groups > 0
    problems = [str(vars(record).get("problem", "")) for record in caplog.records]
    assert any("is of an older release" in problem for problem in problems)


def test_while_nodes_join_keys_are_deleted_on_all_former_owners() -> None:
    with running_cluster(4) as some:
        given = given_states(some, SERVING)
        with open_given(given) as store:
            counters = store.calls.counters
            store.put_many(BLOCKS)
            for count in (1, 2, 3):
                given.give(given_states(some, SERVING, *[JOINING] * count).view.nodes)
                store.get_many(NAMES)
                until(lambda: not counters.warming_bytes)
            assert all(member.keys() for member in some.members)
            assert store.delete(NAMES) == len(NAMES)
            assert [member.keys() for member in some.members] == [set()] * 4


def test_while_a_node_joins_a_delete_needs_only_the_nodes_that_have_a_place() -> None:
    with running_cluster(3) as some:
        last = some.nodes()[2].id
        given = given_states(some, SERVING, JOINING, SERVING)
        with open_given(given) as store:
            view = store.calls.nodes.begin()
            by_place = {
                name: last in [view.view.nodes[index].id for index in places]
                for name, places in zip(NAMES, view.placement.places(NAMES), strict=True)
            }
            others = [name for name in NAMES if not by_place[name]]
            store.put_many(BLOCKS)
            some.members[2].stop()
            assert store.delete(others) == len(others) > 0
            with pytest.raises(StoreUnavailable, match="deleted"):
                store.delete(NAMES)


@pytest.fixture(scope="module")
def with_tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    text = text_of(ann={"roles": "[read, write]"}, ben={"roles": "[read]"})
    with running_cluster(2, tenants=write(tmp_path_factory.mktemp("tenants"), text)) as some:
        yield some


def test_to_delete_by_prefix_takes_the_roles_read_and_write(with_tenants: Cluster) -> None:
    for states in ((SERVING, SERVING), (SERVING, JOINING)):
        given = given_states(with_tenants, *states)
        with open_given(given, token=TOKENS["ann"]) as store:
            store.put_many(BLOCKS)
            assert delete_by_prefix(store, "key ") == (len(BLOCKS), "")


def test_to_list_the_keys_of_every_node_takes_the_role_read(with_tenants: Cluster) -> None:
    given = given_states(with_tenants, SERVING, JOINING)
    with open_given(given, token=TOKENS["ben"]) as store:
        assert store.keys(every_node=True) == []


def test_a_node_that_refuses_a_mark_is_asked_for_one_once(with_tenants: Cluster) -> None:
    given = given_states(with_tenants, SERVING, JOINING)
    with open_given(given, token=TOKENS["ben"]) as store:
        for number in range(5):
            store.get_many([f"missing {number} {other}" for other in range(20)])
        server = with_tenants.members[1].server
        assert server is not None
        assert [session.traffic.errors for session in server.server.sessions] == [1]


def test_only_who_deletes_by_prefix_ends_copies(three: Cluster) -> None:
    given = given_states(three, SERVING, SERVING, JOINING)
    marks = [member.look(member.core.deletions.mark) for member in three.members]
    with open_given(given) as store:
        store.keys(every_node=True)
        assert do_by_prefix(store, "key ", store.unpin) == (0, "")
        assert [member.look(member.core.deletions.mark) for member in three.members] == marks
        delete_by_prefix(store, "key ")
        later = [member.look(member.core.deletions.mark) for member in three.members]
    assert all(new > old for new, old in zip(later, marks, strict=True))


def test_a_node_that_begins_to_join_while_keys_are_deleted_by_prefix_ends_copies(
    three: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = given_states(three, SERVING, SERVING, SERVING)
    joining = given_states(three, SERVING, SERVING, JOINING).view.nodes
    marks = [member.look(member.core.deletions.mark) for member in three.members]
    with open_given(given) as store:

        def listed_before(*arguments: Any, **options: Any) -> Iterator[list[str]]:
            yield from key_pages(*arguments, **options)
            given.give(joining)

        monkeypatch.setattr(blocking, "key_pages", listed_before)
        assert delete_by_prefix(store, "key ") == (0, "")
        later = [member.look(member.core.deletions.mark) for member in three.members]
    assert all(new > old for new, old in zip(later, marks, strict=True))


def test_a_node_that_is_slower_than_a_lookup_is_deleted_from_by_prefix(three: Cluster) -> None:
    given = given_states(three, SERVING, SERVING, JOINING)
    with open_given(given, lookup_deadline_s=0.5) as store:
        store.put_many(BLOCKS)
        three.members[1].silence()
        waking = threading.Timer(1.0, three.members[1].wake)
        waking.start()
        _, lost = delete_by_prefix(store, "key ")
        waking.join()
    assert lost == ""
    assert [member.keys() for member in three.members] == [set()] * 3
